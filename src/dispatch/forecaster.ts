/**
 * What this process's workers can do from now on, for admission. Read per request, changed per batch, so it is cached:
 * rebuilt when a batch starts or ends, and otherwise after 1 ms per 32 workers.
 *
 * With S the batch time at the fleet's pace and r each worker's ratio to it, a batch takes S·n / Σ(1/r) averaged over
 * batches (a fast worker runs more of them). With per-worker batch size B and S(B), the fleet runs Σ 1/(S·r) batches
 * per ms of Σ B/(S·r) tasks; a batch holds the latter over the former.
 */
import { type Horizon, runMsOf } from "../core/shed.ts";
import type { BatchCapacity } from "./capacity.ts";
import type { LengthGrouping } from "./lengths.ts";
import type { ModelRules } from "./model-rules.ts";
import type { PoolWorker } from "../workers/worker.ts";
import type { Workers } from "../workers/workers.ts";

const WORKERS_PER_MS = 32;
/** Acceptable lateness of a wait, as a share of the batch time: a plain timer will do for 50 ms and more. */
const LATE_SHARE = 0.02;
const OFTEN_MS = 0.5; // with more frequent starts the next arrival or reply comes before any timer
const SPARE_BELOW_LOAD = 0.9;
const FIRST_GUESS = 1 / 32; // assumed batch time before the first reply, as a share of `workerMs`
const HANDOVER_WEIGHT = 0.1;

export class Forecaster {
  readonly #rules: () => ModelRules;
  readonly #workers: Workers;
  readonly #capacity: BatchCapacity;
  readonly #lengths: LengthGrouping;
  handoverMs = 0; // usual time from choosing a batch to its call: with a remote engine, its round trip
  #last: Horizon | undefined;
  #lastAt = -Infinity;

  constructor(rules: () => ModelRules, workers: Workers, capacity: BatchCapacity, lengths: LengthGrouping) {
    this.#lengths = lengths;
    this.#rules = rules;
    this.#workers = workers;
    this.#capacity = capacity;
  }

  learnHandover(ms: number): void {
    this.handoverMs += HANDOVER_WEIGHT * (ms - this.handoverMs);
  }

  /** Call when a batch started or ended, or the workers or rules changed. */
  changed(): void {
    this.#last = undefined;
  }

  /** Acceptable lateness of a wait for the next batch; undefined: a plain timer will do. */
  get mayBeLateMs(): number | undefined {
    const { service, slots } = this.#workers;
    const batchMs = service.msFor(1);
    return batchMs < OFTEN_MS * slots.length ? undefined : LATE_SHARE * batchMs;
  }

  /** Whether an idle worker takes one more beside the `waiting` ones. */
  hasRoom(waiting: number, now: number): boolean {
    const capacity = this.#capacity;
    if (waiting >= capacity.usual()) return false;
    return this.#workers.slots.some((slot) => slot.free(now) && waiting < capacity.usual(slot));
  }

  at(now: number): Horizon {
    const holdsMs = Math.max(1, this.#workers.slots.length / WORKERS_PER_MS);
    if (this.#last === undefined || now - this.#lastAt >= holdsMs) {
      this.#last = this.#make(now);
      this.#lastAt = now;
    }
    return this.#last;
  }

  /** A second try is free only with spare capacity: load below 0.9, short queue, another worker. */
  hasSpare(waiting: number, arrivalsPerMs: number, now: number): boolean {
    const [workers, capacity] = [this.#workers, this.#capacity];
    if (workers.healthy(now) < 2) return false;
    let places = 0;
    for (const slot of workers.slots) if (slot.healthy(now)) places += capacity.most(slot);
    const perMs = workers.capacityPerMs((slot) => capacity.most(slot), now);
    return arrivalsPerMs / perMs < SPARE_BELOW_LOAD && waiting < places / 2;
  }

  #make(now: number): Horizon {
    const { service, surprise, slots } = this.#workers;
    const { maxWorkerLoad = 1 } = this.#rules();
    const freeAt: number[] = [];
    const running: { ms: number; perMs: number }[] = [];
    /** Batches and tasks per ms; `even`: batches if every worker had the fleet's pace. */
    let [batches, even, tasks, nominalTasks, usualMs] = [0, 0, 0, 0, 0];
    let [healthy, idle, overdue, silentMs] = [0, 0, 0, Infinity];
    for (const slot of slots) {
      if (!slot.held(now)) continue;
      const { size, ms, paceMs } = this.#batchOn(slot);
      const perMs = 1 / (paceMs * slot.usualRatio);
      nominalTasks += size * perMs;
      if (slot.silent) {
        overdue++;
        silentMs = Math.min(silentMs, now - (slot.batch?.expectedFreeAt ?? now));
      }
      if (slot.healthy(now)) healthy++;
      if (slot.free(now)) idle++;
      if (!slot.counts(now, maxWorkerLoad)) continue;
      batches += perMs;
      even += 1 / paceMs;
      tasks += size * perMs;
      usualMs += ms;
      running.push({ ms: paceMs * slot.usualRatio, perMs });
      freeAt.push(slot.freeAt ?? Math.max(now, slot.circuit.usableAt));
    }
    const count = freeAt.length;
    const one = count === 0 ? this.#batchOn(slots[0]) : undefined;
    // Ratios that scatter around 1 do not mean faster workers: their harmonic mean is below 1 by chance.
    const share = count === 0 ? 1 : Math.max(1, even / batches);
    const meanMs = one?.ms ?? usualMs / count;
    return {
      healthy,
      idle,
      overdue,
      ...(overdue > 0 && { silentMs }),
      perMs: tasks,
      guessed: service.samples === 0,
      nominalPerMs: nominalTasks,
      batchSize: one?.size ?? tasks / batches,
      batchMs: (one?.paceMs ?? count / even) * share,
      runMs: one?.paceMs ?? runMsOf(running),
      deviationMs: Math.max(service.spreadMs, surprise.share * meanMs) * share,
      overtakeMs: this.#lengths.overtakeMs(tasks),
      freeAt: freeAt.sort((early, late) => early - late),
      nextUsableAt: this.#workers.nextUsableAt(now),
    };
  }

  /** A batch of the usual size at the fleet's pace; `paceMs` includes the gap between two. */
  #batchOn(slot?: PoolWorker): { size: number; ms: number; paceMs: number } {
    const { service, surprise } = this.#workers;
    const size = this.#capacity.usual(slot);
    const ms = service.samples === 0 ? this.#rules().workerMs * FIRST_GUESS : service.msFor(size);
    return { size, ms, paceMs: ms * surprise.factor + this.handoverMs };
  }
}
