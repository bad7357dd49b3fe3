/**
 * `ferry serve`: starts Ferry, reports that it is ready, and shuts it down.
 *
 * The first SIGINT or SIGTERM drains: nothing new is accepted, accepted work continues for at most `limits.drainMs`, a
 * summary is printed, exit 0. A second signal kills the process by that signal, so that supervisors see the true status
 * (130, 143). Before Ferry is ready signals keep their default action. On a terminal keys do more (`serve-keys.ts`);
 * draining restores the terminal, so that the second Ctrl-C is a signal again.
 *
 * Output is text on a terminal or with `--pretty`, else JSON.
 *
 * `--role` splits the work over processes that share tasks through Redis: a gateway takes requests, a batcher runs
 * them. `--processes N` starts N gateway processes and one core process (`app/processes`), with Redis and without; they
 * start, drain and end together.
 */
import { spawn } from "node:child_process";
import { closeSync, openSync } from "node:fs";
import { availableParallelism } from "node:os";
import {
  drainBanner,
  drainLine,
  farewellBanner,
  farewellLine,
  jsonLine,
  readyBanner,
  readyLine,
  type Durability,
  type ReadyFacts,
  type ServeTotals,
} from "./terminal/banner.ts";
import { SystemClock, type Clock } from "../app/clock.ts";
import type { Config, Problem, Role } from "../app/config/config.ts";
import { formatProblems, type Loaded } from "../app/config/load.ts";
import { explainStart } from "../app/port-holder.ts";
import { fittingProcesses, MAX_PROCESSES } from "../app/processes/fitting.ts";
import type { Part } from "../app/processes/core-link.ts";
import type { Killed } from "./demo/demo.ts";
import { type Change, type Reloaded, Reloader } from "../app/reload.ts";
import { didYouMean } from "../app/config/spelling.ts";
import { prettyLine } from "../observe/pretty.ts";
import { printable, wantsColor } from "./terminal/terminal.ts";
import { version } from "../app/version.ts";
import { expectNoWords, Failure, UsageError, type Call, type Command, type Console } from "./command.ts";
import { chooseConfig, configFlag, loader } from "./config-file.ts";
import type { ServeKeys } from "./serve-keys.ts";

export interface Served {
  readonly apiUrl: string;
  readonly grpcUrl?: string | undefined;
  readonly adminUrl: string;
  /** Gateway processes, if there are several. */
  readonly processes?: number;
  /** Of an accepted task; undefined: as configured. */
  readonly durability?: Durability | undefined;
  readonly demo?: { kill(forMs: number): Killed | undefined } | undefined;
  /** Resolves when it must be restarted; undefined: never. */
  readonly lost?: Promise<void> | undefined;
  /** Accepts the backlog before `drain` closes the listener. */
  takeWaiting?(): Promise<void>;
  /** Added to `limits.drainMs` when waiting for the drain; default: 0. */
  readonly graceMs?: number;
  /** Rejects with one line, and then has changed nothing. Undefined: not supported. */
  change?(next: Config): Promise<void>;
  /** The same in two phases, for several processes together; undefined on the parent of several. */
  prepare?(next: Config): Promise<Change>;
  onReload?: (() => Promise<Reloaded>) | undefined;
  tally(): ServeTotals | Promise<ServeTotals>;
  drain(): Promise<void>;
  stop(): Promise<void>;
}

export type StopSignal = "SIGINT" | "SIGTERM";

/** `process`, except in tests. */
export interface Signals {
  on(signal: StopSignal, listener: () => void): unknown;
  off(signal: StopSignal, listener: () => void): unknown;
  /** Dies by the signal; called once we have no listener left. */
  raise(signal: StopSignal): void;
}

export interface ServeParts {
  /** `log` gets whole lines of JSON. */
  start(config: Config, clock: Clock, role: Role, log: (line: string) => void, part?: Part): Promise<Served>;
  readonly clock: Clock;
  readonly signals: Signals;
  onHangup?(listener: () => void): void;
  /** Whether there was a terminal that was closed. */
  terminalGone?(): boolean;
  load?: (() => Loaded) | undefined;
  uptimeMs(): number;
  readonly openPage: (url: string) => void;
}

const roles: readonly Role[] = ["all", "gateway", "batcher"];

export const serve: Command = {
  summary: "run the gateway",
  usage: "serve [-c FILE] [--role ROLE] [--processes N] [--pretty]",
  examples: [
    { line: "ferry serve", doc: "./ferry.yaml, or a demo with a simulated GPU" },
    { line: "ferry serve -c ferry.yaml --processes auto", doc: "your models, on as many cores as fit" },
  ],
  flags: {
    config: configFlag,
    role: {
      type: "string",
      value: "ROLE",
      doc: "all (default); with engine.kind redis also gateway (takes requests) and batcher (runs batches)",
    },
    processes: {
      type: "string",
      value: "N",
      doc: "gateway processes behind one port, beside one core process; auto: as fits the cores; default 1, all in one",
    },
    pretty: { type: "boolean", doc: "lines for people instead of JSON; what a terminal gets anyway" },
  },

  run,
};

async function run(call: Call, console: Console): Promise<number> {
  expectNoWords(call);
  const role = parseRole(call.text("role") ?? "all");
  const processes = parseProcesses(call.text("processes") ?? "1");
  const clock = new SystemClock();
  const parts = {
    uptimeMs: () => process.uptime() * 1000,
    openPage: (url: string) => openPage(url, console.env),
  };
  if (call.text("processes") !== undefined) {
    const { clusterParent, serveChild } = await import("./serve-child.ts");
    const parent = clusterParent();
    const clockOf = (epoch: number): Clock => new SystemClock(epoch);
    if (parent !== undefined)
      return serveChild(console, { ...parts, clockOf, start: await startOne() }, parent);
  }
  const chosen = chooseConfig(call, console, "nothing was started");
  if (chosen === undefined) return 1;
  checkRole(role, chosen.config);
  const several = processes > 1 && takesRequests(role);
  const start = several ? await startSeveral(processes, clock.epoch) : await startOne();
  const signals: Signals = {
    on: (signal, listener) => process.on(signal, listener),
    off: (signal, listener) => process.off(signal, listener),
    raise: (signal) => process.kill(process.pid, signal),
  };
  const onHangup = (listener: () => void): void => void process.on("SIGHUP", listener);
  const terminalGone = (): boolean => console.errIsTTY && !hasTerminal();
  const load = loader(call, console);
  const wishes = { role, noColor: call.is("no-color"), pretty: call.is("pretty") };
  return runServe(
    chosen.config,
    chosen.warnings,
    console,
    { ...parts, clock, start, signals, onHangup, terminalGone, load },
    wishes,
  );
}

/** Loaded lazily, so that a bad config is reported before the server's code is read. */
async function startOne(): Promise<ServeParts["start"]> {
  return (await import("../app/ferry.ts")).startFerry;
}

async function startSeveral(count: number, epoch: number): Promise<ServeParts["start"]> {
  const { startProcesses } = await import("../app/processes/processes.ts");
  const { backlogTaken, forker } = await import("../app/processes/life.ts");
  return (config, clock, role, log) => {
    const fork = forker(["serve", "--processes", String(count)], clock);
    const parts = { clock, epoch, fork, backlogTaken: () => backlogTaken(clock), log };
    return startProcesses(count, config, role, parts);
  };
}

function parseRole(written: string): Role {
  const role = roles.find((each) => each === written);
  if (role !== undefined) return role;
  throw new UsageError(
    `--role ${printable(written)} is not one of ${roles.join(", ")}${didYouMean(written, roles)}`,
  );
}

function checkRole(role: Role, { engine }: Config): void {
  if (role === "all" || engine.kind === "redis") return;
  throw new Failure(
    `--role ${role} needs engine.kind redis: two processes cannot share the memory of one; ` +
      `set engine: { kind: redis, url: redis://HOST:6379 }, or leave --role out to run all in one`,
  );
}

function parseProcesses(written: string): number {
  if (written === "auto") return fittingProcesses(availableParallelism());
  const count = /^\d{1,4}$/.test(written) ? Number(written) : 0;
  if (count >= 1 && count <= MAX_PROCESSES) return count;
  throw new UsageError(
    `--processes ${printable(written)} is not a number from 1 to ${MAX_PROCESSES}, nor auto`,
  );
}

/** A batcher has no gateways: it is one process, whatever the number. */
function takesRequests(role: Role): boolean {
  return role !== "batcher";
}

/** Messages to the person or program that started Ferry, once each. */
export interface Voice {
  ready(facts: ReadyFacts): void;
  draining(tally: ServeTotals, signal: StopSignal): void;
  farewell(tally: ServeTotals): void;
}

export interface ServeWishes {
  readonly role: Role;
  readonly noColor: boolean;
  /** Text output also without a terminal. */
  readonly pretty?: boolean;
  readonly voice?: Voice;
}

export async function runServe(
  config: Config,
  warnings: readonly Problem[],
  console: Console,
  parts: ServeParts,
  { role, noColor, pretty = false, voice }: ServeWishes,
): Promise<number> {
  const { clock, signals } = parts;
  const people = console.errIsTTY || pretty;
  const color = wantsColor({ env: console.env, isTTY: console.errIsTTY, noColor });
  const log = (line: string): void => console.err(people ? prettyLine(line, color) : line);
  if (people)
    console.err(formatProblems(warnings.map((each) => ({ ...each, message: `warning: ${each.message}` }))));
  else
    for (const { message, ...place } of warnings) console.err(jsonLine("warn", clock.now(), message, place));

  const say =
    voice ?? (people ? voiceForPeople(config, role, console, color) : jsonVoice(config, console, clock));
  const onHangup = parts.load && holdHangups(parts);
  let ferry: Served;
  try {
    ferry = await parts.start(config, clock, role, log);
  } catch (error) {
    throw new Failure(explainStart(error, config));
  }
  const stopping = nextSignal(signals);
  const reloader = hearReloads(config, ferry, { ...parts, ...(onHangup && { onHangup }) }, log, () =>
    stopping.hear("SIGTERM"),
  );
  const keys = await hearKeys(config, console, parts, ferry, () => stopping.hear("SIGINT"));
  const facts = {
    config,
    role,
    version: version(),
    apiUrl: ferry.apiUrl,
    grpcUrl: ferry.grpcUrl,
    adminUrl: ferry.adminUrl,
    processes: ferry.processes,
    durability: ferry.durability,
    startMs: parts.uptimeMs(),
    keys: keys !== undefined,
  };
  say.ready(facts);

  let isLost = false;
  void ferry.lost?.then(() => {
    isLost = true;
    stopping.hear("SIGTERM");
  });
  const signal = await stopping.first;
  keys?.end();
  await ferry.takeWaiting?.();
  const before = await ferry.tally();
  const { drainMs } = (reloader?.config ?? config).limits;
  const drained = within(drainMs + (ferry.graceMs ?? 0), drainAfter(keys, ferry), clock);
  // Printed once the port is closed.
  say.draining(before, signal);
  await drained;
  const after = await ferry.tally();
  await ferry.stop();
  await keys?.quiet();
  say.farewell(after);
  return isLost ? 1 : 0;
}

function voiceForPeople(config: Config, role: Role, console: Console, color: boolean): Voice {
  return {
    ready: (facts) => console.err(readyBanner(facts, color)),
    draining: (tally, signal) => console.err(drainBanner(tally, config, signal)),
    farewell: (tally) => console.err(farewellBanner(tally, config, role)),
  };
}

function jsonVoice(config: Config, console: Console, clock: Clock): Voice {
  return {
    ready: (facts) => console.err(readyLine(facts, clock.now())),
    draining: (tally, signal) => console.err(drainLine(tally, config, signal, clock.now())),
    farewell: (tally) => console.err(farewellLine(tally, clock.now())),
  };
}

/** Handles keys until `end`, which also restores the terminal; undefined without a keyboard. */
async function hearKeys(
  config: Config,
  console: Console,
  { clock, openPage }: ServeParts,
  { apiUrl, adminUrl, demo }: Served,
  quit: () => void,
): Promise<Pick<ServeKeys, "end" | "quiet"> | undefined> {
  if (console.keys === undefined) return undefined;
  const { ServeKeys } = await import("./serve-keys.ts");
  const say = (line: string): void => console.err(`${line}\n`);
  const keys = new ServeKeys({ config, apiUrl, adminUrl, demo, clock, say, open: openPage, quit });
  const restore = await console.keys((key) => keys.press(key));
  if (restore === undefined) return undefined;
  const end = (): void => {
    restore();
    keys.end();
  };
  return { end, quiet: () => keys.quiet() };
}

/** Stops the demo's load first: its connecting callers would find the port closed. */
async function drainAfter(keys: Pick<ServeKeys, "quiet"> | undefined, ferry: Served): Promise<void> {
  if (keys !== undefined) await keys.quiet();
  await ferry.drain();
}

/** A closed terminal also sends SIGHUP, which ends the process. Undefined: no file, or nothing can change. */
export function hearReloads(
  config: Config,
  ferry: Served,
  parts: ServeParts,
  log: (line: string) => void,
  quit: () => void,
): Reloader | undefined {
  const { clock, load } = parts;
  if (load === undefined || ferry.change === undefined) return undefined;
  const tell = (level: "info" | "warn", message: string): void => {
    const { logLevel } = reloader.config.telemetry;
    const quiet = logLevel === "silent" || logLevel === "error" || (logLevel === "warn" && level === "info");
    if (!quiet) log(jsonLine(level, clock.now(), message, {}));
  };
  const reloader = new Reloader(config, { load, apply: (next) => ferry.change!(next), tell });
  ferry.onReload = () => reloader.reload();
  parts.onHangup?.(() => {
    if (parts.terminalGone?.() === true) quit();
    else void reloader.reload();
  });
  return reloader;
}

/** Catches SIGHUP from the first moment: during the start it would end the process. Held until a listener is set. */
export function holdHangups(
  parts: Pick<ServeParts, "onHangup" | "terminalGone" | "signals">,
): (listener: () => void) => void {
  let missed = false;
  let hear = (): void => {
    if (parts.terminalGone?.() === true) parts.signals.raise("SIGTERM");
    else missed = true;
  };
  parts.onHangup?.(() => hear());
  return (listener) => {
    hear = listener;
    if (missed) listener();
  };
}

/** Opening /dev/tty fails once the window or connection is gone. */
function hasTerminal(): boolean {
  try {
    closeSync(openSync("/dev/tty", "r"));
    return true;
  } catch {
    return false;
  }
}

interface Stopping {
  readonly first: Promise<StopSignal>;
  hear(signal: StopSignal): void;
}

/** Waits for the first signal; the next one, of either kind, then ends the process. */
function nextSignal(signals: Signals): Stopping {
  const { promise, resolve } = Promise.withResolvers<StopSignal>();
  let seen = false;
  const hear = (signal: StopSignal): void => {
    if (!seen) {
      seen = true;
      resolve(signal);
      return;
    }
    signals.off("SIGINT", onInterrupt);
    signals.off("SIGTERM", onTerminate);
    signals.raise(signal);
  };
  const onInterrupt = (): void => hear("SIGINT");
  const onTerminate = (): void => hear("SIGTERM");
  signals.on("SIGINT", onInterrupt);
  signals.on("SIGTERM", onTerminate);
  return { first: promise, hear };
}

/** Only with a display: elsewhere the opener may start a text browser. */
function openPage(url: string, env: NodeJS.ProcessEnv): void {
  const screen = env["DISPLAY"] ?? env["WAYLAND_DISPLAY"] ?? "";
  const opener = process.platform === "darwin" ? "open" : screen === "" ? "" : "xdg-open";
  if (opener === "") return;
  const child = spawn(opener, [url], { stdio: "ignore", detached: true });
  // Not installed: the address is on the screen anyway.
  child.on("error", () => {});
}

async function within(timeoutMs: number, work: Promise<void>, clock: Clock): Promise<void> {
  const { promise, resolve } = Promise.withResolvers<void>();
  const alarm = clock.at(clock.now() + timeoutMs, resolve);
  try {
    await Promise.race([work, promise]);
  } finally {
    alarm.cancel();
  }
}
