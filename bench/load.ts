/**
 * The load generator: one process, one core, one server on this machine.
 *
 *   node bench/load.ts '<LoadSpec as JSON>'
 *
 * Prints one LoadResult as JSON on stdout. On stderr one JSON line per event (`Tick`): `start` when the
 * warm-up is over and measuring begins, `phase` when a later phase begins, `tick` every second, `stop` when
 * it ends; whoever started the generator reads the server's counters at these moments.
 *
 * The load is that of `src/cli/bench/driver.ts`, which says what counts; `closed` with `requests` stops after so many
 * answers. After stop nothing is sent, and what is in flight gets `drainMs`; what is still open then is `unanswered`.
 * Inputs never repeat, so neither the cache nor collapsing can help the server; with `verify` each answer must contain
 * its own request's marker, and one that does not is `crossed`. With `sliceMs` the result has a tally by kind, phase and
 * time (tally.ts).
 *
 * `cpuShare` is this process's CPU time over the measured time: near 1 the generator, not the server,
 * was the bottleneck, and the figures are worth nothing.
 */
import { SystemClock } from "../src/app/clock.ts";
import type { Silence } from "../src/cli/bench/account.ts";
import type { CallerKind, OpenLoad, Phase } from "../src/cli/bench/arrivals.ts";
import { Markers, type Target, type Template } from "../src/cli/bench/connection.ts";
import { Driver, type Ledger, type RequestSource } from "../src/cli/bench/driver.ts";
import { Histogram, type HistogramState } from "../src/cli/bench/histogram.ts";
import { parseLengths } from "../src/cli/plan/lengths.ts";
import { Random } from "../src/core/random.ts";
import { requestOf, type TensorForm } from "./tensors.ts";
import { Tally, type TallyState } from "./tally.ts";

export interface LoadSpec {
  readonly target: Target;
  readonly bodyBytes: number;
  /** Texts of these lengths instead, in this order for each seed; at least 4 tokens. `bodyBytes` then means nothing. */
  readonly lengths?: { readonly mix: string; readonly seed: number };
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

/** A server that far behind has failed; its backlog need not also use up the machine's open files. */
const maxConnections = 15_000;
const everybody: readonly CallerKind[] = [{ label: "all", share: 1 }];

/** The same request with another marker each time, one for each kind of caller. */
class Templates implements RequestSource {
  marker = "";
  readonly #templates: readonly Template[];
  readonly #markers: Markers;
  readonly #verify: boolean;

  constructor(spec: LoadSpec, kinds: readonly CallerKind[]) {
    this.#templates = kinds.map(({ headers }) => requestOf(spec, headers));
    this.#markers = new Markers(spec.tensor === undefined ? 36 : 10);
    this.#verify = spec.verify;
  }

  next(kind: number): string {
    const { front, back } = this.#templates[kind]!;
    const marker = this.#markers.take();
    this.marker = this.#verify ? marker : "";
    return front + marker + back;
  }
}

/** As `Templates`, with inputs that differ in length. */
class MixedLengths implements RequestSource {
  marker = "";
  readonly #templates: Template[] = [];
  readonly #spec: LoadSpec;
  readonly #next: () => number;
  readonly #markers = new Markers();

  constructor(spec: LoadSpec) {
    this.#spec = spec;
    this.#next = lengthsOf(spec.lengths!);
  }

  next(): string {
    const tokens = this.#next();
    // {"input":"…"} around four characters a token.
    const bodyBytes = 12 + 4 * tokens;
    const { front, back } = (this.#templates[tokens] ??= requestOf({ ...this.#spec, bodyBytes }));
    this.marker = this.#markers.take();
    return front + this.marker + back;
  }
}

/** The lengths that such a run sends, one after the other. */
export function lengthsOf({ mix, seed }: NonNullable<LoadSpec["lengths"]>): () => number {
  const random = new Random(seed);
  const lengths = parseLengths(mix)!;
  return () => lengths.draw(random);
}

/** What came of the requests that count. */
class Counts implements Ledger {
  readonly latency = new Histogram();
  readonly statuses: Record<string, number> = {};
  tally: Tally | undefined;
  /** Called after so many answers. */
  enough: { readonly answers: number; readonly stop: () => void } | undefined;
  readonly #lessMs: number;
  readonly #clock: SystemClock;
  offered = 0;
  answers = 0;
  crossed = 0;
  broken = 0;
  unsent = 0;

  constructor(lessMs: number, clock: SystemClock) {
    this.#lessMs = lessMs;
    this.#clock = clock;
  }

  get ok(): number {
    return this.statuses["200"] ?? 0;
  }

  offer(kind: number, intendedAt: number): void {
    this.offered += 1;
    this.tally?.sent(kind, intendedAt);
  }

  echo(isOwn: boolean): void {
    if (!isOwn) this.crossed += 1;
  }

  answered(kind: number, status: number, intendedAt: number, now: number): void {
    this.answers += 1;
    this.statuses[status] = (this.statuses[status] ?? 0) + 1;
    this.latency.record(now - intendedAt - this.#lessMs);
    this.tally?.ended(kind, intendedAt, now, status);
    if (this.answers === this.enough?.answers) this.enough.stop();
  }

  silent(kind: number, how: Silence, _detail: string, intendedAt: number): void {
    if (how === "unsent") this.unsent += 1;
    else {
      this.broken += 1;
      this.tally?.ended(kind, intendedAt, this.#clock.now(), 0);
    }
  }
}

export async function runLoad(spec: LoadSpec): Promise<LoadResult> {
  const { target, load, warmMs, measureMs, drainMs, sliceMs, kinds = everybody } = spec;
  const clock = new SystemClock();
  const counts = new Counts(spec.lessMs ?? 0, clock);
  const driver = new Driver({
    target,
    load,
    kinds,
    requests: spec.lengths === undefined ? new Templates(spec, kinds) : new MixedLengths(spec),
    ledger: counts,
    warmMs,
    measureMs,
    // What is open at the end of `drainMs` is counted as unanswered instead.
    timeoutMs: Infinity,
    connections: maxConnections,
    outstanding: maxConnections,
    clock,
    draw: Math.random,
    cpuMs: () => {
      const { user, system } = process.cpuUsage();
      return (user + system) / 1000;
    },
  });
  const phases: readonly Pick<Phase, "name" | "ms">[] = (load.kind === "open" ? load.phases : undefined) ?? [
    { name: "all", ms: measureMs },
  ];
  if (sliceMs !== undefined) counts.tally = new Tally(kinds, phases, sliceMs, clock.now() - driver.elapsedMs);
  if (load.kind === "closed" && load.requests !== undefined)
    counts.enough = { answers: load.requests, stop: () => driver.stop() };
  const say = (event: Tick["event"], phase?: string): void => {
    const p99Ms = counts.latency.percentileMs(99);
    const tick: Tick = {
      event,
      ...(phase !== undefined && { phase }),
      seconds: Math.max(0, driver.elapsedMs) / 1000,
      answered: counts.answers,
      errors: counts.answers - counts.ok + counts.broken + counts.crossed + counts.unsent,
      p99Ms: Number.isNaN(p99Ms) ? null : p99Ms,
    };
    process.stderr.write(`${JSON.stringify(tick)}\n`);
  };
  const ticks = setInterval(() => say("tick"), 1000);
  driver.start();
  await driver.measuring;
  say("start");
  let at = -driver.elapsedMs;
  const begins = phases.map(({ name, ms }) => {
    const timer = at <= 0 ? undefined : setTimeout(() => say("phase", name), at);
    at += ms;
    return timer;
  });
  await driver.stopped;
  clearInterval(ticks);
  for (const timer of begins) clearTimeout(timer);
  say("stop");
  const late = setTimeout(() => driver.interrupt(), drainMs);
  await driver.ended;
  clearTimeout(late);
  const { lag, late: lateSent, connections, cpuShare } = driver.client();
  return {
    seconds: driver.elapsedMs / 1000,
    sent: counts.offered - counts.unsent,
    answered: counts.answers,
    statuses: counts.statuses,
    crossed: counts.crossed,
    broken: counts.broken,
    unanswered: counts.offered - counts.answers - counts.broken - counts.unsent,
    unsent: counts.unsent,
    connections,
    late: lateSent,
    lag: lag.state(),
    latency: counts.latency.state(),
    ...(counts.tally && { tally: counts.tally.state() }),
    cpuShare,
  };
}

if (import.meta.main) {
  const spec = JSON.parse(process.argv[2] ?? "null") as LoadSpec | null;
  if (spec === null) {
    process.stderr.write("usage: node bench/load.ts '<LoadSpec as JSON>'\n");
    process.exit(2);
  }
  process.stdout.write(`${JSON.stringify(await runLoad(spec))}\n`);
}
