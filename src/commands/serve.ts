/**
 * `ferry serve`: starts Ferry, says that it is ready, and ends it well.
 *
 * The first SIGINT or SIGTERM drains: nothing new is taken, accepted work goes on for at most
 * `limits.drainMs`, the farewell line is printed, exit 0. A second signal ends the process at once by
 * that signal, so that shells and supervisors see the truth (130, 143). Before Ferry is ready signals
 * keep their usual meaning.
 */
import {
  drainBanner,
  drainLine,
  farewellBanner,
  farewellLine,
  jsonLine,
  readyBanner,
  readyLine,
  type Tally,
} from "../banner.ts";
import { SystemClock, type Clock } from "../clock.ts";
import type { Config, Problem } from "../config.ts";
import { formatProblems } from "../config-load.ts";
import { explainStart } from "../port-holder.ts";
import { didYouMean } from "../spelling.ts";
import { printable, wantsColor } from "../terminal.ts";
import { version } from "../version.ts";
import { expectNoWords, Failure, UsageError, type Call, type Command, type Console } from "./command.ts";
import { chooseConfig, configFlag } from "./config-file.ts";

/** What `serve` needs of a running Ferry. */
export interface Served {
  readonly apiUrl: string;
  readonly adminUrl: string;
  tally(): Tally;
  drain(): Promise<void>;
  stop(): Promise<void>;
}

export type StopSignal = "SIGINT" | "SIGTERM";

/** Where signals come from; `process`, but for tests. */
export interface Signals {
  on(signal: StopSignal, listener: () => void): unknown;
  off(signal: StopSignal, listener: () => void): unknown;
  /** Dies by the signal; called once no listener of ours is left. */
  raise(signal: StopSignal): void;
}

export interface ServeParts {
  start(config: Config, clock: Clock): Promise<Served>;
  readonly clock: Clock;
  readonly signals: Signals;
  /** Since the process began. */
  uptimeMs(): number;
}

const roles = ["all", "gateway", "batcher"];

export const serve: Command = {
  summary: "run the gateway",
  usage: "serve [-c FILE] [--role all]",
  examples: [
    { line: "ferry serve", doc: "./ferry.yaml, or a demo with a simulated GPU" },
    { line: "ferry serve -c ferry.yaml", doc: "your models" },
  ],
  flags: {
    config: configFlag,
    role: {
      type: "string",
      value: "ROLE",
      doc: "all (default); gateway and batcher are not in this version yet",
    },
  },

  async run(call: Call, console: Console): Promise<number> {
    expectNoWords(call);
    checkRole(call.text("role") ?? "all");
    const chosen = chooseConfig(call, console, "nothing was started");
    if (chosen === undefined) return 1;
    // Loaded only now, so that a bad config is answered before the server's code is read.
    const { startFerry } = await import("../ferry.ts");
    const parts: ServeParts = {
      start: startFerry,
      clock: new SystemClock(),
      uptimeMs: () => process.uptime() * 1000,
      signals: {
        on: (signal, listener) => process.on(signal, listener),
        off: (signal, listener) => process.off(signal, listener),
        raise: (signal) => process.kill(process.pid, signal),
      },
    };
    return runServe(chosen.config, chosen.warnings, console, parts, call.is("no-color"));
  },
};

function checkRole(role: string): void {
  if (!roles.includes(role)) {
    throw new UsageError(
      `--role ${printable(role)} is not one of ${roles.join(", ")}${didYouMean(role, roles)}`,
    );
  }
  if (role !== "all")
    throw new Failure(`--role ${role} is not in this version yet; leave it out to run all in one`);
}

export async function runServe(
  config: Config,
  warnings: readonly Problem[],
  console: Console,
  parts: ServeParts,
  noColor: boolean,
): Promise<number> {
  const { clock, signals } = parts;
  const people = console.errIsTTY;
  const color = wantsColor({ env: console.env, isTTY: people, noColor });
  if (people)
    console.err(formatProblems(warnings.map((each) => ({ ...each, message: `warning: ${each.message}` }))));
  else
    for (const { message, ...place } of warnings) console.err(jsonLine("warn", clock.now(), message, place));

  let ferry: Served;
  try {
    ferry = await parts.start(config, clock);
  } catch (error) {
    throw new Failure(explainStart(error, config));
  }
  const stopping = nextSignal(signals);
  const facts = {
    config,
    version: version(),
    apiUrl: ferry.apiUrl,
    adminUrl: ferry.adminUrl,
    startMs: parts.uptimeMs(),
  };
  console.err(people ? readyBanner(facts, color) : readyLine(facts, clock.now()));

  const signal = await stopping;
  const before = ferry.tally();
  console.err(people ? drainBanner(before, config, signal) : drainLine(before, config, signal, clock.now()));
  await within(config.limits.drainMs, ferry.drain(), clock);
  const after = ferry.tally();
  await ferry.stop();
  console.err(people ? farewellBanner(after, config) : farewellLine(after, clock.now()));
  return 0;
}

/** Resolves with the first signal; from then on the next one, of either kind, ends the process. */
function nextSignal(signals: Signals): Promise<StopSignal> {
  return new Promise((resolve) => {
    let seen = false;
    const hear = (signal: StopSignal) => {
      if (!seen) {
        seen = true;
        resolve(signal);
        return;
      }
      signals.off("SIGINT", onInterrupt);
      signals.off("SIGTERM", onTerminate);
      signals.raise(signal);
    };
    const onInterrupt = () => hear("SIGINT");
    const onTerminate = () => hear("SIGTERM");
    signals.on("SIGINT", onInterrupt);
    signals.on("SIGTERM", onTerminate);
  });
}

/** Waits for `work`, but not longer than `timeoutMs`. */
async function within(timeoutMs: number, work: Promise<void>, clock: Clock): Promise<void> {
  const { promise, resolve } = Promise.withResolvers<void>();
  const alarm = clock.at(clock.now() + timeoutMs, resolve);
  try {
    await Promise.race([work, promise]);
  } finally {
    alarm.cancel();
  }
}
