/**
 * The workers of one model, their learned pace, and the probing of ejected ones. A worker that takes more than 1.5
 * times the best is slow: chosen last, gets full batches or overdue tasks, and does not teach the estimates. Counts
 * cover only workers whose lease this process holds.
 */
import type { Alarm, Clock } from "../app/clock.ts";
import { type BatchShape, CostEstimate } from "../core/cost.ts";
import { SurpriseEstimate } from "../core/estimate.ts";
import { CurveEstimate } from "../core/knee.ts";
import type { Events, WorkerState } from "../observe/events.ts";
import type { Worker } from "./backend/backend.ts";
import type { HealthLimits, Held } from "./health.ts";
import { type Lifecycle, PoolWorker, type PoolWorkerOptions, type WorkerEvent } from "./worker.ts";

const RATIO_WEIGHT = 0.2;
/** Cap of a batch's time over its expectation (`usualRatio`). */
const ACCIDENT = 2;
const SLOW = 1.5;

export interface WorkersOptions {
  readonly limits: () => HealthLimits;
  readonly clock: Clock;
  readonly events: Events;
  readonly shared?: boolean | undefined;
  readonly suffix?: string | undefined;
}

export type JoinOptions = Pick<PoolWorkerOptions, "predecessors" | "lease" | "drained">;

export class Workers {
  readonly #workers: PoolWorker[] = [];
  readonly service = new CostEstimate();
  readonly surprise = new SurpriseEstimate();
  /** For display only. */
  readonly curve = new CurveEstimate();
  readonly #model: string;
  readonly #options: WorkersOptions;
  readonly #usage = new Usage();
  readonly #prober: Prober;
  /** Busy time of removed workers. */
  #goneMs = 0;
  /** Latest instant until which failed tasks wait for a retry. */
  retriesUntil = 0;
  /** A worker joined, left, or may be given batches again. One listener: the dispatcher. */
  onChange: () => void = () => {};

  constructor(model: string, workers: readonly Worker[], options: WorkersOptions) {
    this.#model = model;
    this.#options = options;
    this.#prober = new Prober(options.clock, (worker) => {
      this.alive(worker);
      this.onChange();
    });
    for (const worker of workers) this.#add(worker, {});
  }

  /** In join order. */
  get slots(): readonly PoolWorker[] {
    return this.#workers;
  }

  nameOf(worker: Worker): string {
    return worker.name + (this.#options.suffix ?? "");
  }

  /** Adds a worker; it gets batches once its predecessors are gone. */
  join(worker: Worker, options: JoinOptions = {}): PoolWorker {
    const joined = this.#add(worker, options);
    this.onChange();
    return joined;
  }

  #add(worker: Worker, options: JoinOptions): PoolWorker {
    const { limits, shared = false, suffix = "" } = this.#options;
    const onEvent = this.#onEvent.bind(this);
    const added = new PoolWorker(worker, { ...options, limits, shared, suffix, onEvent });
    worker.onHealth = () => this.#saidHealth(added);
    this.#workers.push(added);
    return added;
  }

  /** No further batch; resolves when it is gone. */
  retire(worker: PoolWorker): Promise<void> {
    worker.transition({ type: "retire" });
    return worker.gone;
  }

  drain(worker: PoolWorker, drained: boolean): void {
    worker.transition({ type: "drain", drained });
  }

  /** Stops probing. */
  stop(): void {
    this.#prober.stop();
  }

  #onEvent(worker: PoolWorker, event: WorkerEvent["type"], before: Lifecycle): void {
    const { phase, lease } = worker;
    if (phase === "gone" && before.phase !== "gone") this.#remove(worker);
    else if (event === "idle" && !lease.release) return;
    else if (event === "lease" || event === "silent" || event === "heard") return;
    // Its lease may be given back now.
    if (event === "idle")
      this.#options.events.emit("worker.released", { model: this.#model, worker: worker.name });
    else this.onChange();
  }

  #remove(worker: PoolWorker): void {
    this.noteUsage(this.#options.clock.now());
    this.#goneMs += worker.busyMs;
    worker.worker.onHealth = undefined;
    this.#prober.forget(worker);
    this.#workers.splice(this.#workers.indexOf(worker), 1);
  }

  #saidHealth(worker: PoolWorker): void {
    const { well, why } = worker.worker.health!;
    this.#changed(worker, well ? "idle" : "down", well ? "it says that it is well again" : why);
    if (well) this.onChange();
  }

  /** The fastest free worker; after a failed call it ranks lower, after an ejection last. */
  best(now: number): PoolWorker | undefined {
    let best: PoolWorker | undefined;
    let bestPace = Infinity;
    for (const worker of this.#workers) {
      const pace = worker.ratio * worker.circuit.reluctance;
      if (pace >= bestPace || !worker.free(now)) continue;
      best = worker;
      bestPace = pace;
    }
    return best;
  }

  free(now: number): number {
    let free = 0;
    for (const worker of this.#workers) if (worker.free(now)) free++;
    return free;
  }

  held(now: number): number {
    let held = 0;
    for (const worker of this.#workers) if (worker.held(now)) held++;
    return held;
  }

  healthy(now: number): number {
    let healthy = 0;
    for (const worker of this.#workers) if (worker.healthy(now)) healthy++;
    return healthy;
  }

  /** Relative to the healthy ones: the best may be gone, and the rest must not be judged by it. */
  slow(worker: PoolWorker, now: number, by: "ratio" | "usualRatio" = "usualRatio"): boolean {
    let best = worker[by];
    for (const other of this.#workers) {
      if (other[by] < best && other.healthy(now) && !other.circuit.probing) best = other[by];
    }
    return worker[by] > SLOW * best;
  }

  /** When each busy or paused worker will be free, earliest first, without `but`. */
  freeAt(now: number, but?: PoolWorker): number[] {
    const times: number[] = [];
    for (const worker of this.#workers) {
      if (worker === but || worker.silent || !worker.takesBatches(now)) continue;
      if (worker.freeAt !== undefined) times.push(worker.freeAt);
      else if (!worker.circuit.down(now) && worker.circuit.paused(now)) times.push(worker.circuit.usableAt);
    }
    return times.sort((a, b) => a - b);
  }

  /** When the next ejected or paused worker may be tried; Infinity when none is. */
  nextUsableAt(now: number): number {
    let next = Infinity;
    for (const worker of this.#workers) {
      if (worker.batch !== undefined || !worker.takesBatches(now)) continue;
      const { usableAt } = worker.circuit;
      if (usableAt > now) next = Math.min(next, usableAt);
    }
    return next;
  }

  /** Tasks per millisecond when every worker runs batches of `most`. A silent one counts: it is usually only late. */
  capacityPerMs(most: (worker: PoolWorker) => number, now: number): number {
    let capacity = 0;
    for (const worker of this.#workers) {
      if (worker.drained || (!worker.healthy(now) && !worker.silent)) continue;
      const size = most(worker);
      capacity += size / (this.service.msFor(size) * worker.usualRatio);
    }
    return capacity;
  }

  /** Its batch is long overdue. */
  suspect(worker: PoolWorker, why: string): void {
    worker.transition({ type: "silent" });
    this.#changed(worker, "down", why);
  }

  /** It replied, however late: it is not dead. */
  heard(worker: PoolWorker): void {
    if (!worker.silent) return;
    worker.transition({ type: "heard" });
    this.#changed(worker, "busy", "it answered after all");
  }

  answered(worker: PoolWorker, shape: BatchShape, ms: number, now: number): void {
    this.alive(worker);
    if (this.service.settled) {
      const ratio = ms / this.service.msOf(shape);
      this.surprise.learn(ratio / worker.usualRatio);
      worker.ratio += RATIO_WEIGHT * (ratio - worker.ratio);
      const usual = Math.min(ratio, ACCIDENT * worker.usualRatio);
      worker.usualRatio += RATIO_WEIGHT * (usual - worker.usualRatio);
    }
    if (this.slow(worker, now, "ratio")) return;
    this.service.learn(shape, ms);
    this.curve.learn(shape.rows, ms, now);
  }

  /** It answered, whatever the reply. */
  alive(worker: PoolWorker): void {
    const recovered = worker.circuit.probing;
    worker.circuit.answered();
    if (recovered) this.#changed(worker, "idle", "it answered again");
  }

  /** Counts a failure, and starts probing a worker that it ejects. */
  failed(worker: PoolWorker, now: number, why: string, unreachable: boolean, held?: Held): void {
    worker.failures++;
    const { silent } = worker;
    // A silent worker that fails is ejected at once, unless the same input made it silent before.
    const atOnce = unreachable || (silent && held?.repeated !== true);
    const ejected = worker.circuit.failed(now, why, atOnce, held);
    worker.transition({ type: "heard" });
    if (ejected) {
      this.#changed(worker, "down", why);
      this.#prober.ejected(worker, unreachable);
    } else if (silent) this.#changed(worker, "idle", "the same input failed there before");
  }

  /** Busy share of the held workers, last ten seconds. */
  utilization(now: number): number {
    this.#usage.count(this.held(now), now);
    const share = this.#usage.share(this.#busyMs(now), now);
    if (share !== undefined) return share;
    const held = this.#workers.filter((worker) => worker.held(now));
    return held.filter((worker) => worker.batch).length / Math.max(1, held.length);
  }

  /** Call when a batch starts or ends, and before a lease changes. */
  noteUsage(now: number): void {
    this.#usage.count(this.held(now), now);
    this.#usage.note((at) => this.#busyMs(at), now);
  }

  #busyMs(now: number): number {
    return this.#workers.reduce((sum, worker) => sum + worker.busyMsUntil(now), this.#goneMs);
  }

  #changed(worker: PoolWorker, state: WorkerState, why: string): void {
    this.#options.events.emit("worker.changed", { model: this.#model, worker: worker.name, state, why });
  }
}

const WINDOW_MS = 10_000;
const STEP_MS = 500;

/** Busy time over held time in the last ten seconds, interpolated between snapshots of both sums. */
class Usage {
  /** Oldest first; at most as many as the window has steps. */
  readonly #snapshots: { at: number; busyMs: number; heldMs: number }[] = [];
  #heldMs = 0;
  #heldSince: number | undefined;

  /** Adds the time since the last call, in which `held` workers were held. */
  count(held: number, now: number): void {
    this.#heldMs += held * (now - (this.#heldSince ?? now));
    this.#heldSince = now;
  }

  /** `busyMs`: the sum since the start; called only when a snapshot is due. */
  note(busyMs: (now: number) => number, now: number): void {
    const last = this.#snapshots.at(-1);
    if (last !== undefined && now - last.at < STEP_MS) return;
    this.#snapshots.push({ at: now, busyMs: busyMs(now), heldMs: this.#heldMs });
    if (this.#snapshots.length > WINDOW_MS / STEP_MS) this.#snapshots.shift();
  }

  /** Undefined while there is too little data. */
  share(busyMs: number, now: number): number | undefined {
    const since = this.#snapshots.find(({ at }) => at >= now - WINDOW_MS);
    if (since === undefined || this.#heldMs - since.heldMs < 1) return undefined;
    return Math.min(1, (busyMs - since.busyMs) / (this.#heldMs - since.heldMs));
  }
}

const PROBE_TIMEOUT_MS = 2000;

/**
 * Probes ejected workers where their protocol allows it, so that no task has to find out. An unreachable worker is
 * probed at once (it may only be restarting); one that failed too often first sits out its ejection. Without a probe
 * the next real batch is the probe.
 */
class Prober {
  readonly #clock: Clock;
  readonly #recovered: (worker: PoolWorker) => void;
  /** At most one per worker: the next probe, or its timeout. */
  readonly #alarms = new Map<PoolWorker, Alarm>();
  readonly #asking = new Map<PoolWorker, AbortController>();
  #stopped = false;

  constructor(clock: Clock, recovered: (worker: PoolWorker) => void) {
    this.#clock = clock;
    this.#recovered = recovered;
  }

  ejected(worker: PoolWorker, unreachable: boolean): void {
    if (worker.worker.probe === undefined || this.#stopped || worker.phase === "gone") return;
    if (this.#asking.has(worker)) return;
    this.#set(
      worker,
      unreachable ? this.#clock.now() : worker.circuit.usableAt,
      () => void this.#ask(worker),
    );
  }

  forget(worker: PoolWorker): void {
    this.#alarms.get(worker)?.cancel();
    this.#alarms.delete(worker);
    this.#asking.get(worker)?.abort();
  }

  stop(): void {
    this.#stopped = true;
    for (const alarm of this.#alarms.values()) alarm.cancel();
    for (const asking of this.#asking.values()) asking.abort();
  }

  async #ask(worker: PoolWorker): Promise<void> {
    // A batch tried meanwhile may have told more than this answer.
    if (worker.worker.probe === undefined) return;
    const patience = new AbortController();
    this.#asking.set(worker, patience);
    this.#set(worker, this.#clock.now() + PROBE_TIMEOUT_MS, () => patience.abort());
    const well = await worker.worker.probe(patience.signal);
    this.#asking.delete(worker);
    this.#alarms.get(worker)?.cancel();
    if (this.#stopped || worker.retiring || !worker.circuit.probing) return;
    if (well) return this.#recovered(worker);
    worker.circuit.failed(this.#clock.now(), worker.circuit.why, true);
    this.#set(worker, worker.circuit.usableAt, () => void this.#ask(worker));
  }

  #set(worker: PoolWorker, at: number, ring: () => void): void {
    this.#alarms.get(worker)?.cancel();
    this.#alarms.set(worker, this.#clock.at(at, ring));
  }
}
