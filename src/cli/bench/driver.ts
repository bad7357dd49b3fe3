/**
 * The load generator of `ferry bench`, the demo, and bench/.
 *
 *   open     Requests are due at fixed instants (arrivals.ts), whatever the server does. All that are due leave when
 *            the timer fires, at most once a millisecond. Latency counts from the instant a request was DUE, so a
 *            stall of the server or of this process is charged to every request it delayed.
 *   closed   Each caller sends its next request when the last one is answered: the load adapts to the server.
 *
 * Measured: open, requests due between the end of the warm-up and the end; closed, requests sent in that time.
 *
 * Bounds: at most `connections` connections, one request on each, at most `OPENING` being opened at once (a burst would
 * overflow the server's backlog). A request without a free connection waits here, which its latency shows; beyond
 * `outstanding` waiting and in flight it is not sent. A request unanswered `timeoutMs` after it was due is lost and its
 * connection closed; if still waiting, it is not sent. So a run ends at most `timeoutMs` after its last request.
 *
 * `load.connections` are opened during the warm-up and kept. Others are closed after `MAX_IDLE_MS` idle, before the
 * server closes them under a request. A closed-loop caller pauses briefly after a refusal or a broken connection.
 */
import type { Alarm, Clock } from "../../app/clock.ts";
import { Fifo } from "../../core/fifo.ts";
import { Account, type Silence } from "./account.ts";
import { Arrivals, type CallerKind, type OpenLoad } from "./arrivals.ts";
import { Connection, type Owner, type Target } from "./connection.ts";
import { Histogram } from "./histogram.ts";

/** Without `warmRate` the warm-up has the same rate; without `connections` none is opened beforehand. */
export type LoadKind =
  | (Omit<OpenLoad, "warmRate" | "connections"> & Partial<OpenLoad>)
  | { readonly kind: "closed"; readonly callers: number };

export interface RequestSource {
  /** The next request of a kind of caller, one character per byte. */
  next(kind: number): string;
  /** What the reply to the last request must contain; "": anything. */
  readonly marker: string;
}

/** Requests of the warm-up are not reported, except through `echo`. */
export interface Ledger {
  offer(kind: number, intendedAt: number): void;
  /** `head` and `tail`: first and last characters of the reply. */
  answered(kind: number, status: number, intendedAt: number, now: number, head: string, tail: string): void;
  silent(kind: number, how: Silence, detail: string, intendedAt: number): void;
  echo(isOwn: boolean): void;
}

export interface DriverOptions {
  readonly target: Target;
  readonly load: LoadKind;
  readonly kinds: readonly CallerKind[];
  readonly requests: RequestSource;
  readonly warmMs: number;
  readonly measureMs: number;
  readonly ledger?: Ledger;
  readonly timeoutMs: number;
  readonly connections: number;
  readonly outstanding: number;
  readonly clock: Clock;
  /** Uniform in [0, 1). */
  readonly draw: () => number;
  readonly cpuMs: () => number;
}

export interface ClientState {
  /** CPU time over measured time, in cores. */
  readonly cpuShare: number;
  /** Sent more than `LATE_MS` after it was due because the event loop was busy. */
  readonly late: number;
  /** Delay between due and handled, ms. */
  readonly lag: Histogram;
  /** Timer lateness, ms. */
  readonly loop: Histogram;
  readonly connections: number;
  readonly waited: number;
}

export const LATE_MS = 5;
const OPENING = 64;
const MAX_IDLE_MS = 3000;
const PAUSE_MS = 10;
const SWEEP_MS = 50;
const LOOP_MS = 10;

interface Due {
  readonly kind: number;
  readonly intendedAt: number;
}

type Phase = "warm" | "measure" | "drain" | "over";

export class Driver implements Owner {
  /** Counts nothing where the options have another ledger. */
  readonly account: Account;
  readonly #ledger: Ledger;
  readonly #kept: number;
  readonly #options: DriverOptions;
  readonly #clock: Clock;
  readonly #arrivals: Arrivals | undefined;
  readonly #lag = new Histogram();
  readonly #loop = new Histogram();
  readonly #ended = Promise.withResolvers<void>();
  readonly #measuring = Promise.withResolvers<void>();
  readonly #stopped = Promise.withResolvers<void>();
  readonly #alarms = new Map<string, Alarm>();
  readonly #pauses = new Set<Alarm>();
  readonly #open = new Set<Connection>();
  /** A stack: the bottom has been idle longest. */
  #idle: Connection[] = [];
  /** Connections with a request in flight, in send order. */
  readonly #flying = new Set<Connection>();
  readonly #line = new Fifo<Due>();
  #phase: Phase = "warm";
  #startAt: number;
  #stopAt: number;
  #opening = 0;
  #late = 0;
  #most = 0;
  #waited = 0;
  #cpuFromMs = 0;
  #cpuMs = 0;

  constructor(options: DriverOptions) {
    const { clock, load, kinds, warmMs, measureMs, draw } = options;
    this.#options = options;
    this.#clock = clock;
    const now = clock.now();
    this.#startAt = now + warmMs;
    this.#stopAt = this.#startAt + measureMs;
    const labels = kinds.map(({ label }) => label);
    this.account = new Account(labels, measureMs);
    this.account.begin(this.#startAt);
    this.#ledger = options.ledger ?? this.account;
    this.#kept = load.kind === "open" ? (load.connections ?? 0) : 0;
    if (load.kind === "open") {
      const plan = { warmRate: load.rate, connections: 0, ...load };
      this.#arrivals = new Arrivals(plan, kinds, now, this.#startAt, draw);
    }
  }

  /** These resolve when measuring begins, when it ends, and when the last request has ended. */
  get measuring(): Promise<void> {
    return this.#measuring.promise;
  }
  get stopped(): Promise<void> {
    return this.#stopped.promise;
  }
  get ended(): Promise<void> {
    return this.#ended.promise;
  }

  /** Measured so far; negative in the warm-up. */
  get elapsedMs(): number {
    return Math.min(this.#clock.now(), this.#stopAt) - this.#startAt;
  }

  start(): void {
    const { load } = this.#options;
    if (load.kind === "open") this.#ring("send", this.#arrivals!.nextAt, () => this.#sendDue());
    else for (const kind of callersOf(load.callers, this.#options.kinds)) this.#call(kind);
    this.#ring("phase", this.#startAt, () => this.#measure());
    this.#ring("sweep", this.#clock.now() + SWEEP_MS, () => this.#sweep());
    this.#listenToLoop(this.#clock.now() + LOOP_MS);
    this.#openKept();
  }

  /** Sends nothing more; the run ends with the last request in flight. */
  stop(): void {
    if (this.#phase !== "warm" && this.#phase !== "measure") return;
    const now = this.#clock.now();
    this.#startAt = Math.min(this.#startAt, now);
    this.#stopAt = now;
    this.#drain();
  }

  /** Ends the run now, without waiting for requests in flight. */
  interrupt(): void {
    this.stop();
    if (this.#phase !== "over") this.#end();
  }

  client(): ClientState {
    const ms = Math.max(1, this.#stopAt - this.#startAt);
    return {
      cpuShare: this.#cpuMs / ms,
      late: this.#late,
      lag: this.#lag,
      loop: this.#loop,
      connections: this.#most,
      waited: this.#waited,
    };
  }

  #measure(): void {
    this.#phase = "measure";
    this.#cpuFromMs = this.#options.cpuMs();
    this.#measuring.resolve();
    this.#ring("phase", this.#stopAt, () => this.#drain());
  }

  #drain(): void {
    // The end alarm may fire before the last due requests were sent; send them now, late.
    if (this.#phase === "measure" && this.#arrivals !== undefined) this.#sendArrived(this.#stopAt);
    this.#phase = "drain";
    this.#cpuMs = this.#options.cpuMs() - this.#cpuFromMs;
    this.#measuring.resolve();
    this.#stopped.resolve();
    for (const name of ["send", "loop", "phase"]) this.#alarms.get(name)?.cancel();
    for (const pause of this.#pauses) pause.cancel();
    this.#endWhenQuiet();
  }

  #endWhenQuiet(): void {
    if (this.#phase === "drain" && this.#flying.size === 0 && this.#line.size === 0) this.#end();
  }

  #end(): void {
    this.#phase = "over";
    for (const alarm of this.#alarms.values()) alarm.cancel();
    for (const connection of this.#open) connection.close();
    this.#ended.resolve();
  }

  #ring(name: string, at: number, ring: () => void): void {
    this.#alarms.set(name, this.#clock.at(at, ring));
  }

  #listenToLoop(dueAt: number): void {
    this.#ring("loop", dueAt, () => {
      const now = this.#clock.now();
      if (this.#phase === "measure") this.#loop.record(now - dueAt);
      this.#listenToLoop(now + LOOP_MS);
    });
  }

  #sendDue(): void {
    this.#sendArrived(Math.min(this.#clock.now(), this.#stopAt));
    if (this.#arrivals!.nextAt < this.#stopAt) {
      this.#ring("send", this.#arrivals!.nextAt, () => this.#sendDue());
    }
  }

  #sendArrived(until: number): void {
    const arrivals = this.#arrivals!;
    const now = this.#clock.now();
    for (; arrivals.nextAt <= until && arrivals.nextAt < this.#stopAt; arrivals.advance()) {
      const { nextAt: intendedAt, kind } = arrivals;
      if (intendedAt >= this.#startAt) {
        this.#ledger.offer(kind, intendedAt);
        this.#lag.record(now - intendedAt);
        if (now - intendedAt > LATE_MS) this.#late++;
      }
      this.#take({ kind, intendedAt });
    }
  }

  #call(kind: number): void {
    if (this.#phase !== "warm" && this.#phase !== "measure") return;
    const intendedAt = this.#clock.now();
    if (intendedAt >= this.#startAt) this.#ledger.offer(kind, intendedAt);
    this.#take({ kind, intendedAt });
  }

  #take(due: Due): void {
    const connection = this.#line.size === 0 ? this.#free() : undefined;
    if (connection !== undefined) return this.#send(connection, due);
    if (this.#line.size + this.#flying.size >= this.#options.outstanding) {
      if (this.#counts(due)) this.#ledger.silent(due.kind, "unsent", "", due.intendedAt);
      return;
    }
    if (this.#counts(due)) this.#waited++;
    this.#line.push(due);
  }

  #counts({ intendedAt }: Due): boolean {
    return intendedAt >= this.#startAt;
  }

  #free(): Connection | undefined {
    const idle = this.#idle.pop();
    if (idle !== undefined) return idle;
    if (this.#open.size >= this.#options.connections || this.#opening >= OPENING) return undefined;
    return this.#connect();
  }

  #connect(): Connection {
    const connection = new Connection(this.#options.target, this);
    this.#opening++;
    this.#open.add(connection);
    this.#most = Math.max(this.#most, this.#open.size);
    return connection;
  }

  #openKept(): void {
    while (this.#open.size < this.#kept && this.#opening < OPENING) this.#connect();
  }

  #serveLine(): void {
    while (this.#line.size > 0) {
      const connection = this.#free();
      if (connection === undefined) return;
      this.#send(connection, this.#line.shift()!);
    }
  }

  #send(connection: Connection, { kind, intendedAt }: Due): void {
    const { requests } = this.#options;
    connection.kind = kind;
    this.#flying.add(connection);
    const text = requests.next(kind);
    connection.send(text, requests.marker, intendedAt);
  }

  opened(connection: Connection): void {
    this.#opening--;
    if (!this.#flying.has(connection)) {
      connection.idleSince = this.#clock.now();
      this.#idle.push(connection);
    }
    this.#serveLine();
    if (this.#phase === "warm") this.#openKept();
  }

  answered(connection: Connection): void {
    const { kind, status, intendedAt, head, tail } = connection;
    const now = this.#clock.now();
    this.#flying.delete(connection);
    if (status === 200 && connection.isMarked) this.#ledger.echo(!connection.crossed);
    if (intendedAt >= this.#startAt && this.#phase !== "over")
      this.#ledger.answered(kind, status, intendedAt, now, head, tail);
    if (connection.last) connection.close();
    else if (this.#line.size > 0) this.#send(connection, this.#line.shift()!);
    else {
      connection.idleSince = now;
      this.#idle.push(connection);
    }
    this.#next(kind, status === 200);
  }

  closed(connection: Connection): void {
    this.#open.delete(connection);
    if (!connection.isOpen) this.#opening--;
    if (this.#phase === "over") return;
    if (this.#flying.delete(connection)) {
      const { kind, intendedAt, isOpen, error } = connection;
      if (intendedAt >= this.#startAt)
        this.#ledger.silent(kind, isOpen ? "broken" : "not connected", isOpen ? "" : error, intendedAt);
      this.#next(kind, false);
    } else {
      const at = this.#idle.indexOf(connection);
      if (at >= 0) this.#idle.splice(at, 1);
    }
    this.#serveLine();
    this.#endWhenQuiet();
  }

  #next(kind: number, isWell: boolean): void {
    if (this.#phase === "drain") return this.#endWhenQuiet();
    if (this.#options.load.kind === "open") return;
    if (isWell) return this.#call(kind);
    const alarm = this.#clock.at(this.#clock.now() + PAUSE_MS, () => {
      this.#pauses.delete(alarm);
      this.#call(kind);
    });
    this.#pauses.add(alarm);
  }

  #sweep(): void {
    const now = this.#clock.now();
    const { timeoutMs } = this.#options;
    for (const connection of this.#flying) {
      const { kind, intendedAt } = connection;
      if (now - intendedAt < timeoutMs) break;
      this.#flying.delete(connection);
      if (intendedAt >= this.#startAt) this.#ledger.silent(kind, "timeout", "", intendedAt);
      connection.close();
      this.#next(kind, false);
    }
    for (let due = this.#line.first; due !== undefined; due = this.#line.first) {
      if (now - due.intendedAt < timeoutMs) break;
      this.#line.shift();
      if (this.#counts(due)) this.#ledger.silent(due.kind, "unsent", "", due.intendedAt);
      this.#next(due.kind, false);
    }
    this.#retire(now);
    this.#endWhenQuiet();
    if (this.#phase !== "over") this.#ring("sweep", now + SWEEP_MS, () => this.#sweep());
  }

  #retire(now: number): void {
    let old = 0;
    const surplus = Math.min(this.#idle.length, this.#open.size - this.#kept);
    while (old < surplus && now - this.#idle[old]!.idleSince > MAX_IDLE_MS) old++;
    for (const connection of this.#idle.splice(0, old)) connection.close();
  }
}

export function callersOf(callers: number, kinds: readonly CallerKind[]): number[] {
  const all = kinds.reduce((sum, { share }) => sum + share, 0);
  return Array.from({ length: callers }, (_, caller) => {
    let left = ((caller + 0.5) / callers) * all;
    const kind = kinds.findIndex(({ share }) => (left -= share) < 0);
    return kind < 0 ? kinds.length - 1 : kind;
  });
}
