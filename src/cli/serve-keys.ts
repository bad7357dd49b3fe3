/**
 * Keys while `ferry serve` runs on a terminal.
 *
 *   h   the list of keys
 *   o   open the dashboard in a browser, if there is one
 *   l   load on or off, k kill a worker: only with simulated workers in this process
 *   q   drain, as Ctrl-C does; in raw mode Ctrl-C is an ordinary key
 *
 * The load is `admission.targetUtilization` of the simulated capacity, as in the banner, and at most what this process
 * can send without becoming the bottleneck.
 */
import { count, dashboardUrl, plannedPerSecond, plural, reachable } from "./terminal/banner.ts";
import type { Clock } from "../app/clock.ts";
import type { Config } from "../app/config/config.ts";
import { Random } from "../core/random.ts";
import type { Killed } from "./demo/demo.ts";
import { DemoLoad, type LoadCounts, type Stream } from "./demo/load.ts";
import { printable } from "./terminal/terminal.ts";

/** With the default `health` it is probed 0, 2, 6 and 14 s after its failure, so it works again after 6 s. */
const DEAD_MS = 5500;
const DEAD_TEXT = "6 s";
const MAX_PER_SECOND = 2500;
const CTRL_C = "\u0003";
const ENTER = "\r";

export interface ServeKeyParts {
  readonly config: Config;
  readonly apiUrl: string;
  readonly adminUrl: string;
  /** Undefined without simulated workers in this process. */
  readonly demo?: { kill(forMs: number): Killed | undefined } | undefined;
  readonly clock: Clock;
  readonly say: (line: string) => void;
  readonly open: (url: string) => void;
  readonly quit: () => void;
}

export class ServeKeys {
  readonly #parts: ServeKeyParts;
  #load: DemoLoad | undefined;
  /** Stopped loads that still have to report. */
  #farewells: Promise<void> = Promise.resolve();
  #ended = false;

  constructor(parts: ServeKeyParts) {
    this.#parts = parts;
  }

  press(key: string): void {
    if (this.#ended) return;
    switch (key.toLowerCase()) {
      case "h":
      case "?":
        return this.#help();
      case "o":
        return this.#open();
      case "l":
        return this.#toggleLoad();
      case "k":
        return this.#kill();
      case "q":
      case CTRL_C:
        this.end(); // a second press in the same chunk must not count as a second Ctrl-C
        return this.#parts.quit();
      case ENTER: // lets people insert a blank line
        return this.#parts.say("");
    }
  }

  end(): void {
    this.#ended = true;
    if (this.#load !== undefined) this.#stopLoad(this.#load);
  }

  quiet(): Promise<void> {
    return this.#farewells;
  }

  #help(): void {
    const { demo, say } = this.#parts;
    say("  h  this list");
    say(`  o  open the dashboard  ${dashboardUrl(this.#parts)}`);
    if (demo !== undefined) {
      say("  l  load on or off");
      say(`  k  kill a worker for ${DEAD_TEXT}`);
    }
    say("  q  drain and stop, as Ctrl-C does");
  }

  #open(): void {
    const { config, adminUrl, say, open } = this.#parts;
    if (!config.telemetry.dashboard) return say("  the dashboard is off: telemetry.dashboard is false");
    say(`  dashboard: ${dashboardUrl(this.#parts)}`);
    // Without the token: other users of this machine can read a command line.
    open(`${reachable(adminUrl)}/`);
  }

  #toggleLoad(): void {
    if (this.#load !== undefined) return this.#stopLoad(this.#load);
    const { config, demo, clock, say, apiUrl } = this.#parts;
    if (demo === undefined) return;
    if (config.auth.mode !== "none") return say("  the demo load needs auth: { mode: none }");
    if (config.tls !== undefined) return say("  the demo load needs a public listener without tls");
    const streams = streamsOf(config);
    const perSecond = streams.reduce((sum, stream) => sum + stream.perSecond, 0);
    this.#load = new DemoLoad(reachable(apiUrl), streams, clock, new Random(clock.now()));
    say(`  load on: about ${count(Math.round(perSecond))} requests a second, press l to stop`);
  }

  #stopLoad(load: DemoLoad): void {
    this.#load = undefined;
    const stopped = load.stop().then((counts) => this.#parts.say(loadLine(counts)));
    this.#farewells = Promise.all([this.#farewells, stopped]).then(() => {});
  }

  #kill(): void {
    const { demo, say, config } = this.#parts;
    if (demo === undefined) return;
    const killed = demo.kill(DEAD_MS);
    if (killed === undefined) return say(`  nobody is left to kill; each is back after ${DEAD_TEXT}`);
    say(killLine(killed, config.models.length > 1));
  }
}

/** The load per simulated model; models that answer at once share the rest. */
export function streamsOf(config: Config): Stream[] {
  const wanted = config.models
    .filter(({ backend }) => backend.kind === "simulated")
    .map((model) => ({
      model: model.name,
      perSecond: plannedPerSecond(model, config) ?? MAX_PER_SECOND,
    }));
  const sum = wanted.reduce((total, { perSecond }) => total + perSecond, 0);
  const scale = Math.min(1, MAX_PER_SECOND / sum);
  return wanted.map(({ model, perSecond }) => ({ model, perSecond: perSecond * scale }));
}

/** `gpu-2 killed for 6 s with 57 tasks in its hands; 3 of 4 are left to do them, nobody's answer is lost` */
export function killLine({ worker, model, inFlight, left, workers }: Killed, named: boolean): string {
  const who = named ? `${worker} of ${printable(model)}` : worker;
  const what = inFlight === 0 ? "with nothing in its hands" : `with ${plural(inFlight, "task")} in its hands`;
  const then =
    left === 0
      ? "nobody is left: what cannot wait is refused until one is back"
      : `${left} of ${workers} are left to do the work, nobody's answer is lost`;
  return `  ${who} killed for ${DEAD_TEXT} ${what}; ${then}`;
}

/** `load off: 21,480 requests in 12 s, 21,480 answered, 0 refused, 0 failed` */
export function loadLine(counts: LoadCounts): string {
  const { sent, answered, refused, failed, leftOut, seconds } = counts;
  const skipped = leftOut === 0 ? "" : `, ${count(leftOut)} never sent: too many were on their way`;
  return (
    `  load off: ${plural(sent, "request")} in ${count(Math.round(seconds))} s, ` +
    `${count(answered)} answered, ${count(refused)} refused, ${count(failed)} failed${skipped}`
  );
}
