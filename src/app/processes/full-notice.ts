/**
 * Logs that this process is full, and what would help: its main thread, which all requests or all tasks go through, used
 * more than `FULL_SHARE` of a core in two `LOOK_MS` in a row.
 */
import { availableParallelism, cpus } from "node:os";
import type { Events } from "../../observe/events.ts";
import type { Alarm, Clock } from "../clock.ts";
import type { Role } from "../config/config.ts";
import type { Part } from "./core-link.ts";
import { fittingProcesses, MAX_PROCESSES } from "./fitting.ts";

export const LOOK_MS = 5000;
export const FULL_SHARE = 0.85;
export const AGAIN_MS = 600_000;

/** Which process this is. */
export interface ProcessPlace {
  readonly role: Role;
  /** Undefined: this process is all of it. */
  readonly part: Pick<Part, "kind" | "number" | "gateways"> | undefined;
  readonly redis: boolean;
}

export interface Machine {
  readonly cores: number;
  /** CPU time of the main thread. Not of the process: workers of kind `module` are threads of it. */
  threadMs(): number;
  /** Idle time of all cores together. Read only while the process is full: with 200 cores it takes milliseconds. */
  idleMs(): number;
}

const THIS_MACHINE: Machine = {
  cores: availableParallelism(),
  threadMs: () => {
    const { user, system } = process.threadCpuUsage();
    return (user + system) / 1000;
  },
  idleMs: () => cpus().reduce((sum, { times }) => sum + times.idle, 0),
};

export class FullNotice {
  readonly #place: ProcessPlace;
  readonly #clock: Clock;
  readonly #events: Events;
  readonly #machine: Machine;
  #alarm: Alarm;
  #at: number;
  #threadMs: number;
  /** When the process was full at the last look. */
  #full: { readonly share: number; readonly idleMs: number } | undefined;

  constructor(place: ProcessPlace, clock: Clock, events: Events, machine = THIS_MACHINE) {
    this.#place = place;
    this.#clock = clock;
    this.#events = events;
    this.#machine = machine;
    this.#at = clock.now();
    this.#threadMs = machine.threadMs();
    this.#alarm = this.#after(LOOK_MS);
  }

  stop(): void {
    this.#alarm.cancel();
  }

  #after(ms: number): Alarm {
    return this.#clock.at(this.#at + ms, () => this.#look());
  }

  #look(): void {
    const [now, threadMs, last] = [this.#clock.now(), this.#machine.threadMs(), this.#full];
    const passedMs = now - this.#at;
    const share = (threadMs - this.#threadMs) / passedMs;
    this.#at = now;
    this.#threadMs = threadMs;
    this.#full = share > FULL_SHARE ? { share, idleMs: this.#machine.idleMs() } : undefined;
    let said = false;
    if (last !== undefined && this.#full !== undefined) {
      const { cores } = this.#machine;
      // In a container the idle time may be of cores that are not ours.
      const idle = Math.min(cores - 1, Math.floor((this.#full.idleMs - last.idleMs) / passedMs));
      said = this.#say((share + last.share) / 2, adviceWhenFull(this.#place, cores, idle));
    }
    if (said) this.#full = undefined;
    this.#alarm = this.#after(said ? AGAIN_MS : LOOK_MS);
  }

  #say(share: number, advice: string | undefined): boolean {
    if (advice === undefined) return false;
    const { part } = this.#place;
    const name = part === undefined ? "this process" : `the ${part.kind} process`;
    const measured = `${name} used ${Math.round(100 * share)} % of a core for ${(2 * LOOK_MS) / 1000} s`;
    this.#events.emit("notice", { level: "warn", message: `${measured}; ${advice}` });
    return true;
  }
}

/** Undefined: nothing would help on this machine. `idle`: cores. */
export function adviceWhenFull(
  { role, part, redis }: ProcessPlace,
  cores: number,
  idle: number,
): string | undefined {
  if (part?.kind === "core" && !redis)
    return "more gateway processes do not help: divide models or tenants over several machines, or use engine.kind redis";
  if (part?.kind !== "gateway" && (part !== undefined || role === "batcher")) {
    return role === "gateway"
      ? "start another ferry serve --role gateway"
      : "start another ferry serve --role batcher";
  }
  // Connections are handed out in turn, so that the first gateway is as full as the others.
  if (part !== undefined && part.number > 1) return undefined;
  const now = part?.gateways ?? 1;
  const more = part === undefined ? Math.min(fittingProcesses(cores), idle) : Math.min(2 * now, now + idle);
  const count = Math.min(MAX_PROCESSES, more);
  return count > now
    ? `${idle} other cores were idle: ferry serve --processes ${count} uses them`
    : undefined;
}
