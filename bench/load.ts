/**
 * The load generator: one process, one core, one server on this machine.
 *
 *   node bench/load.ts '<LoadSpec as JSON>'
 *
 * Prints one LoadResult as JSON on stdout. On stderr one JSON line per event (`Tick`): `start` when the
 * warm-up is over and measuring begins, `phase` when a later phase begins, `tick` every second, `stop` when
 * it ends; whoever started the generator reads the server's counters at these moments.
 *
 *   closed   `callers` callers, each sending its next request when the last one is answered. The load
 *            adapts to the server, so it measures throughput; its latencies only say how deep the queue
 *            was. With `requests` set it stops after so many answers.
 *   open     requests leave at instants fixed beforehand, `rate` a second, whatever the server does.
 *            Every millisecond all that are due are sent, on an idle connection or a new one. Latency
 *            counts from the instant at which a request SHOULD have left, so a stall of the server (or
 *            of this process) is charged to every request that it delayed: no coordinated omission.
 *
 * Which requests count: closed, those answered between start and stop; open, those that were due
 * between start and stop, however late their answer. After stop nothing is sent, and what is in flight
 * gets `drainMs`; what is still open then is `unanswered`. Inputs never repeat, so neither the cache
 * nor collapsing can help the server; with `verify` each answer must contain its own request's marker,
 * and one that does not is `crossed`.
 *
 * With several `kinds` of caller each has its own connections, and so a request of its own with its own
 * headers. In the closed loop the callers are divided among them equally, in the open loop each arrival draws
 * one (arrivals.ts). With `sliceMs` the result has a tally by kind, phase and time (tally.ts).
 *
 * `cpuShare` is this process's CPU time over the measured time: near 1 the generator, not the server,
 * was the bottleneck, and the figures are worth nothing.
 */
import { Arrivals, type CallerKind, type OpenLoad, type Phase } from "../src/cli/bench/arrivals.ts";
import { Connection, Markers, type Owner, type Target, type Template } from "../src/cli/bench/connection.ts";
import { Histogram, type HistogramState } from "../src/cli/bench/histogram.ts";
import { requestOf, type TensorForm } from "./tensors.ts";
import { Tally, type TallyState } from "./tally.ts";

export interface LoadSpec {
  readonly target: Target;
  readonly bodyBytes: number;
  /** Further fields of the body, e.g. the model. */
  readonly fields?: Readonly<Record<string, string>>;
  /** A tensor instead (tensors.ts); `bodyBytes` and `fields` then mean nothing. */
  readonly tensor?: TensorForm;
  readonly verify: boolean;
  /** Taken off every latency: the worker's own time, where only what is added to it matters. */
  readonly lessMs?: number;
  readonly warmMs: number;
  readonly measureMs: number;
  readonly drainMs: number;
  /** Left out: one kind, without further headers. */
  readonly kinds?: readonly CallerKind[];
  /** The steps of the tally over time; left out: no tally is kept. */
  readonly sliceMs?: number;
  readonly load: ClosedLoad | OpenLoad;
}

export interface ClosedLoad {
  readonly kind: "closed";
  readonly callers: number;
  /** Stop after so many measured answers. */
  readonly requests?: number;
}

export interface LoadResult {
  readonly seconds: number;
  readonly sent: number;
  readonly answered: number;
  /** Answers by HTTP status. */
  readonly statuses: Readonly<Record<string, number>>;
  /** 200s that carried somebody else's output. */
  readonly crossed: number;
  /** Connections that ended with a request in flight. */
  readonly broken: number;
  readonly unanswered: number;
  /** Open loop: due while `maxConnections` were all in use, so never sent. */
  readonly unsent: number;
  /** Most connections open at once. */
  readonly connections: number;
  /** Open loop: sent more than `lateMs` after the intended instant. */
  readonly late: number;
  readonly lag: HistogramState;
  readonly latency: HistogramState;
  readonly tally?: TallyState;
  readonly cpuShare: number;
}

export interface Tick {
  readonly event: "start" | "phase" | "tick" | "stop";
  /** With the event `phase`: which one begins. */
  readonly phase?: string;
  readonly seconds: number;
  readonly answered: number;
  readonly errors: number;
  readonly p99Ms: number | null;
}

export const lateMs = 5;
/** Node closes idle connections after 5 s by default; a request must not race with that. */
const maxIdleMs = 3000;
/** A refused caller comes back after this, so that refusals are counted and not multiplied. */
const refusedPauseMs = 10;
/** A server that far behind has failed; its backlog need not also use up the machine's open files. */
const maxConnections = 15_000;
/** 4,000 a second: slow enough for any backlog. */
const openPerTick = 4;

/** The connections of one kind of caller. */
interface Pool {
  readonly request: Template;
  /** A stack: its bottom is what has been idle longest. */
  readonly idle: Connection[];
  open: number;
  /** Opened beforehand and kept. */
  readonly kept: number;
}

const everybody: readonly CallerKind[] = [{ label: "all", share: 1 }];

class Load implements Owner {
  readonly #spec: LoadSpec;
  readonly #kinds: readonly CallerKind[];
  readonly #pools: readonly Pool[];
  readonly #markers: Markers;
  readonly #open = new Set<Connection>();
  readonly #latency = new Histogram();
  readonly #lag = new Histogram();
  readonly #statuses: Record<string, number> = {};
  readonly #done = Promise.withResolvers<void>();
  #phase: "warm" | "measure" | "drain" | "over" = "warm";
  #startAt = Infinity;
  #stopAt = Infinity;
  #inFlight = 0;
  #sent = 0;
  #answered = 0;
  #ok = 0;
  #crossed = 0;
  #broken = 0;
  #unsent = 0;
  #late = 0;
  #connections = 0;
  #arrivals: Arrivals | undefined;
  #tally: Tally | undefined;
  #cpuAt: NodeJS.CpuUsage = process.cpuUsage();
  #cpuMs = 0;

  constructor(spec: LoadSpec) {
    this.#spec = spec;
    this.#kinds = spec.kinds ?? everybody;
    this.#markers = new Markers(spec.tensor === undefined ? 36 : 10);
    const all = this.#kinds.reduce((sum, { share }) => sum + share, 0);
    const kept = spec.load.kind === "open" ? spec.load.connections : 0;
    this.#pools = this.#kinds.map(({ share, headers }) => ({
      request: requestOf(spec, headers),
      idle: [],
      open: 0,
      kept: Math.ceil((kept * share) / all),
    }));
  }

  async run(): Promise<LoadResult> {
    const { warmMs, load } = this.#spec;
    const ticks = setInterval(() => this.#tick("tick"), 1000);
    const start = performance.now() + warmMs;
    let arrivals: NodeJS.Timeout | undefined;
    if (load.kind === "closed") {
      void this.#startCallers(load);
    } else {
      this.#startAt = start;
      this.#tally = this.#newTally(start);
      const schedule = new Arrivals(load, this.#kinds, performance.now(), start, Math.random);
      this.#arrivals = schedule;
      arrivals = setInterval(() => this.#sendDue(schedule), 1);
    }
    setTimeout(() => this.#start(), Math.max(0, start - performance.now()));
    await this.#done.promise;
    clearInterval(arrivals);
    clearInterval(ticks);
    await this.#drain();
    return this.#result();
  }

  /** In steps that no accept backlog overflows at. */
  async #startCallers(load: ClosedLoad): Promise<void> {
    for (let i = 0; i < load.callers; i++) {
      this.#send(this.#connect(i % this.#kinds.length), performance.now());
      if (i % 64 === 63) await pause(5);
    }
  }

  #start(): void {
    this.#phase = "measure";
    // In the open loop the instant was fixed when the schedule was; here it is when we got to it.
    if (this.#startAt === Infinity) this.#startAt = performance.now();
    this.#cpuAt = process.cpuUsage();
    this.#tick("start");
    this.#tally ??= this.#newTally(this.#startAt);
    const stopAt = this.#startAt + this.#spec.measureMs;
    if (this.#spec.load.kind === "open") this.#stopAt = stopAt;
    let at = this.#startAt;
    for (const [i, { name, ms }] of this.#phases().entries()) {
      if (i > 0) setTimeout(() => this.#tick("phase", name), at - performance.now());
      at += ms;
    }
    setTimeout(() => this.#stop(), stopAt - performance.now()).unref();
  }

  #phases(): readonly Pick<Phase, "name" | "ms">[] {
    const { load, measureMs } = this.#spec;
    return (load.kind === "open" ? load.phases : undefined) ?? [{ name: "all", ms: measureMs }];
  }

  #newTally(startAt: number): Tally | undefined {
    const { sliceMs } = this.#spec;
    return sliceMs === undefined ? undefined : new Tally(this.#kinds, this.#phases(), sliceMs, startAt);
  }

  /** In the open loop also waits for the last due request: the timer may come a moment before it. */
  #stop(): void {
    if (this.#phase !== "measure") return;
    const now = performance.now();
    if (this.#arrivals !== undefined && this.#arrivals.nextAt < this.#stopAt) {
      this.#sendDue(this.#arrivals);
      setTimeout(() => this.#stop(), 1);
      return;
    }
    if (this.#spec.load.kind === "closed") this.#stopAt = now;
    const cpu = process.cpuUsage(this.#cpuAt);
    this.#cpuMs = (cpu.user + cpu.system) / 1000;
    this.#phase = "drain";
    this.#tick("stop");
    this.#done.resolve();
  }

  async #drain(): Promise<void> {
    const until = performance.now() + this.#spec.drainMs;
    while (this.#inFlight > 0 && performance.now() < until) await pause(5);
    this.#phase = "over";
    for (const connection of this.#open) connection.close();
  }

  #sendDue(arrivals: Arrivals): void {
    const now = performance.now();
    while (arrivals.nextAt <= now && arrivals.nextAt < this.#stopAt) {
      const { nextAt: intendedAt, kind } = arrivals;
      arrivals.advance();
      if (intendedAt >= this.#startAt) {
        this.#lag.record(now - intendedAt);
        if (now - intendedAt > lateMs) this.#late += 1;
      }
      const connection =
        this.#pools[kind]!.idle.pop() ?? (this.#open.size < maxConnections ? this.#connect(kind) : undefined);
      if (connection === undefined) this.#unsent += 1;
      else this.#send(connection, intendedAt);
    }
    if (this.#phase === "warm") this.#fillPools(now);
    for (const pool of this.#pools) this.#retire(pool, now);
  }

  #fillPools(now: number): void {
    let left = openPerTick;
    for (const [kind, pool] of this.#pools.entries()) {
      for (; left > 0 && pool.open < pool.kept; left--) {
        const connection = this.#connect(kind);
        connection.idleSince = now;
        pool.idle.push(connection);
      }
    }
  }

  #retire(pool: Pool, now: number): void {
    const surplus = Math.min(pool.idle.length, pool.open - pool.kept);
    let old = 0;
    while (old < surplus && now - pool.idle[old]!.idleSince > maxIdleMs) old += 1;
    if (old > 0) for (const connection of pool.idle.splice(0, old)) connection.close();
  }

  #connect(kind: number): Connection {
    const pool = this.#pools[kind]!;
    const connection = new Connection(this.#spec.target, pool.request, this, this.#spec.verify);
    connection.kind = kind;
    pool.open += 1;
    this.#open.add(connection);
    this.#connections = Math.max(this.#connections, this.#open.size);
    return connection;
  }

  #send(connection: Connection, intendedAt: number): void {
    this.#inFlight += 1;
    if (intendedAt >= this.#startAt) {
      this.#sent += 1;
      this.#tally?.sent(connection.kind, intendedAt);
    }
    connection.send(this.#markers.take(), intendedAt);
  }

  answered(connection: Connection): void {
    const now = performance.now();
    this.#inFlight -= 1;
    this.#count(connection, now);
    if (this.#spec.load.kind === "open") {
      connection.idleSince = now;
      this.#pools[connection.kind]!.idle.push(connection);
    } else if (this.#phase === "warm" || this.#phase === "measure") {
      if (connection.status === 200) this.#send(connection, now);
      else setTimeout(() => this.#again(connection), refusedPauseMs);
    }
  }

  #again(connection: Connection): void {
    const sending = this.#phase === "warm" || this.#phase === "measure";
    if (sending && this.#open.has(connection)) this.#send(connection, performance.now());
  }

  #count(connection: Connection, now: number): void {
    // A crossed answer is a fault whenever it comes, in the warm-up too.
    if (connection.crossed) this.#crossed += 1;
    const { load } = this.#spec;
    if (load.kind === "open" ? connection.intendedAt < this.#startAt : this.#phase !== "measure") return;
    this.#answered += 1;
    this.#statuses[connection.status] = (this.#statuses[connection.status] ?? 0) + 1;
    if (connection.status === 200) this.#ok += 1;
    this.#latency.record(now - connection.intendedAt - (this.#spec.lessMs ?? 0));
    this.#tally?.ended(connection.kind, connection.intendedAt, now, connection.status);
    if (load.kind === "closed" && this.#answered === load.requests) this.#stop();
  }

  closed(connection: Connection, inFlight: boolean): void {
    this.#open.delete(connection);
    const pool = this.#pools[connection.kind]!;
    pool.open -= 1;
    if (this.#phase === "over") return;
    if (!inFlight) {
      const at = pool.idle.indexOf(connection);
      if (at >= 0) pool.idle.splice(at, 1);
      return;
    }
    this.#inFlight -= 1;
    this.#broken += 1;
    const { kind, intendedAt } = connection;
    if (intendedAt >= this.#startAt) this.#tally?.ended(kind, intendedAt, performance.now(), 0);
    if (this.#spec.load.kind === "closed" && this.#phase !== "drain") {
      setTimeout(() => {
        if (this.#phase === "warm" || this.#phase === "measure")
          this.#send(this.#connect(kind), performance.now());
      }, refusedPauseMs);
    }
  }

  #tick(event: Tick["event"], phase?: string): void {
    const p99Ms = this.#latency.percentileMs(99);
    const tick: Tick = {
      event,
      ...(phase !== undefined && { phase }),
      seconds: this.#phase === "warm" ? 0 : (performance.now() - this.#startAt) / 1000,
      answered: this.#answered,
      errors: this.#answered - this.#ok + this.#broken + this.#crossed + this.#unsent,
      p99Ms: Number.isNaN(p99Ms) ? null : p99Ms,
    };
    process.stderr.write(`${JSON.stringify(tick)}\n`);
  }

  #result(): LoadResult {
    const measuredMs = this.#stopAt - this.#startAt;
    return {
      seconds: measuredMs / 1000,
      sent: this.#sent,
      answered: this.#answered,
      statuses: this.#statuses,
      crossed: this.#crossed,
      broken: this.#broken,
      unanswered: this.#inFlight,
      unsent: this.#unsent,
      connections: this.#connections,
      late: this.#late,
      lag: this.#lag.state(),
      latency: this.#latency.state(),
      ...(this.#tally && { tally: this.#tally.state() }),
      cpuShare: this.#cpuMs / measuredMs,
    };
  }
}

function pause(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

if (import.meta.main) {
  const spec = JSON.parse(process.argv[2] ?? "null") as LoadSpec | null;
  if (spec === null) {
    process.stderr.write("usage: node bench/load.ts '<LoadSpec as JSON>'\n");
    process.exit(2);
  }
  const result = await new Load(spec).run();
  process.stdout.write(`${JSON.stringify(result)}\n`);
}
