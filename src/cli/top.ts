/**
 * `ferry top`: the dashboard for people on ssh, from the same stream.
 *
 * On a terminal it draws until q; elsewhere, and with --once, one picture, and with --json one object a
 * frame. A listener that cannot be reached at the start is a failure like any other; one that goes away later
 * is waited for, and said to be gone.
 */
import { urlOf } from "./terminal/banner.ts";
import { type Clock, SystemClock } from "../app/clock.ts";
import { didYouMean } from "../app/config/spelling.ts";
import { paint, type Paint, printable, wantsColor } from "./terminal/terminal.ts";
import { AdminClient } from "./admin-client.ts";
import { type Call, type Command, type Console, expectNoWords, Failure, UsageError } from "./command.ts";
import { chooseConfig, configFlag } from "./config-file.ts";
import { parseAdminUrl } from "./dead.ts";
import { drawTop } from "./top-screen.ts";
import { ProcessTerminal, type TopTerminal } from "./top-terminal.ts";
import { TopView } from "./top-view.ts";

export const top: Command = {
  summary: "watch a running Ferry",
  usage: "top [-c FILE] [--model NAME] [--once] [--json]",
  examples: [
    { line: "ferry top -c ferry.yaml", doc: "live: verdict, queues, one line a worker; q quits" },
    { line: "ferry top --once --json", doc: "one look, for scripts" },
  ],
  flags: {
    config: { ...configFlag, doc: "the config file of the running Ferry; default ./ferry.yaml" },
    admin: { type: "string", value: "URL", doc: "another admin listener than the config's" },
    model: { type: "string", value: "NAME", doc: "the model to show first; default the first one" },
    once: { type: "boolean", doc: "one picture, then exit; so it is wherever stdout is no terminal" },
    json: { type: "boolean", doc: "JSON on stdout, one object a frame (twice a second)" },
  },

  async run(call: Call, console: Console): Promise<number> {
    expectNoWords(call);
    const chosen = chooseConfig(call, console, "nothing was done");
    if (chosen === undefined) return 1;
    const { admin, tls } = chosen.config;
    const other = call.text("admin");
    const base = other === undefined ? urlOf(admin.listen, admin.tls) : parseAdminUrl(other);
    const client = new AdminClient(base, admin.token, "top", tls?.certFile);
    const colors = paint(wantsColor({ ...console, isTTY: console.outIsTTY, noColor: call.is("no-color") }));
    const json = call.is("json");
    const watch = { client, clock: new SystemClock(), model: call.text("model") };
    if (json || call.is("once") || !console.outIsTTY) {
      return print({ ...watch, once: !json || call.is("once"), json }, console, colors);
    }
    const terminal = new ProcessTerminal(process.stdin, process.stdout);
    return new TopSession(watch, terminal, colors).run();
  },
};

export interface Watch {
  readonly client: Pick<AdminClient, "live">;
  readonly clock: Clock;
  readonly model: string | undefined;
}

const FIRST_RETRY_MS = 500;
const MAX_RETRY_MS = 5000;
/** Of a picture that goes into a file or a pipe. */
const PLAIN_SIZE = { columns: 120, rows: 200 };

/** One picture, or one object a frame. */
async function print(
  { client, clock, model, once, json }: Watch & { once: boolean; json: boolean },
  console: Console,
  colors: Paint,
): Promise<number> {
  const view = new TopView();
  const stop = new AbortController();
  let retryMs = FIRST_RETRY_MS;
  for (;;) {
    try {
      for await (const event of client.live(clock, stop.signal)) {
        if (!view.take(event)) throw notFerry();
        if (view.frame === undefined) continue;
        chooseModel(view, model);
        retryMs = FIRST_RETRY_MS;
        if (json) console.out(`${JSON.stringify(view.plain())}\n`);
        else console.out(`${drawTop(view, PLAIN_SIZE, colors).join("\n")}\n`);
        if (once) return 0;
      }
    } catch (error) {
      // Once begun, a listener that is gone is waited for; what is wrong from the start is not healed by waiting.
      if (once || view.hello === undefined || !(error instanceof Failure)) throw error;
      console.err(`ferry: ${error.message}; trying again\n`);
    }
    await new Promise<void>((resolve) => clock.at(clock.now() + retryMs, resolve));
    retryMs = Math.min(MAX_RETRY_MS, 2 * retryMs);
  }
}

/** From the first frame to the last key. */
export class TopSession {
  readonly #watch: Watch;
  readonly #terminal: TopTerminal;
  readonly #colors: Paint;
  readonly #view = new TopView();
  readonly #stop = new AbortController();
  #code = 0;
  #wake: (() => void) | undefined;

  constructor(watch: Watch, terminal: TopTerminal, colors: Paint) {
    this.#watch = watch;
    this.#terminal = terminal;
    this.#colors = colors;
  }

  async run(): Promise<number> {
    let retryMs = FIRST_RETRY_MS;
    try {
      while (!this.#stop.signal.aborted) {
        const began = this.#view.hello;
        try {
          await this.#follow();
        } catch (error) {
          // What is wrong from the start is not healed by waiting.
          if (!(error instanceof Failure) || this.#view.hello === undefined) throw error;
          if (this.#view.hello !== began) retryMs = FIRST_RETRY_MS;
          await this.#wait(error.message, retryMs);
          retryMs = Math.min(MAX_RETRY_MS, 2 * retryMs);
        }
      }
    } finally {
      this.#terminal.close();
    }
    return this.#code;
  }

  async #follow(): Promise<void> {
    const { client, clock, model } = this.#watch;
    const view = this.#view;
    for await (const event of client.live(clock, this.#stop.signal)) {
      const first = view.hello === undefined;
      if (!view.take(event)) throw notFerry();
      if (view.frame === undefined) continue;
      view.link = { up: true };
      if (first) {
        chooseModel(view, model);
        this.#open();
      }
      if (!view.paused) this.#draw();
    }
  }

  /** Only once there is something to show: a failure before that is a line where one typed. */
  #open(): void {
    this.#view.interactive = true;
    this.#terminal.open({
      key: (key) => this.#key(key),
      resized: () => this.#draw(),
      ended: (signal) => this.#end({ SIGINT: 130, SIGTERM: 143, SIGHUP: 129 }[signal as string] ?? 1),
    });
  }

  async #wait(why: string, ms: number): Promise<void> {
    if (this.#stop.signal.aborted) return;
    const { clock } = this.#watch;
    this.#view.link = { up: false, why: `${why.replace(/^top: /, "")}; trying again` };
    this.#draw();
    await new Promise<void>((resolve) => {
      const alarm = clock.at(clock.now() + ms, resolve);
      this.#wake = () => {
        alarm.cancel();
        resolve();
      };
    });
    this.#wake = undefined;
  }

  #key(key: string): void {
    const view = this.#view;
    if (key === "q" || key === "Q" || key === "\u0003") return this.#end(0);
    if (key === "m") view.nextModel();
    else if (key === "r") view.nextReason();
    else if (key === "p" || key === " ") view.paused = !view.paused;
    else return;
    this.#draw();
  }

  #end(code: number): void {
    this.#code = code;
    this.#stop.abort();
    this.#wake?.();
  }

  #draw(): void {
    this.#terminal.draw(drawTop(this.#view, this.#terminal.size(), this.#colors));
  }
}

function chooseModel(view: TopView, wanted: string | undefined): void {
  const names = view.hello!.models.map(({ name }) => name);
  if (wanted === undefined) return;
  const at = names.indexOf(wanted);
  if (at < 0) {
    const known = didYouMean(wanted, names) || `; one of ${names.map(printable).join(", ")}`;
    throw new UsageError(`--model ${printable(wanted)} is not there${known}`);
  }
  view.model = at;
}

function notFerry(): Failure {
  return new Failure("top: what the stream says cannot be read; is this Ferry of another version?");
}
