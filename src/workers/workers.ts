/**
 * The workers of one model and the slot that each has: room for one batch, and for one behind it (`pipeline.ts`).
 *
 * A worker learns its own pace: `ratio` is its service time over the fleet's, so that predictions fit a mixed fleet. One
 * that needs more than 1.5 times the best is slow: it is chosen last, takes full batches or what has waited long enough,
 * and does not teach the fleet's estimate. One batch that took five times as long says little of the next: `usualRatio`,
 * where a batch counts as at most twice what was expected, is what its batches are judged and promised by. How often such a
 * batch comes is the fleet's `surprise`. `ratio` is what happened, whole: who may teach goes by it, and who is chosen first.
 *
 * A worker that other processes list too is shared: this one may use it only while it holds its lease, which src/workers/fleet
 * writes into its slot. Whatever counts workers here counts those that are held.
 */
import type { Worker } from "./backend/backend.ts";
import type { Clock } from "../app/clock.ts";
import { ServiceEstimate, SurpriseEstimate } from "../core/estimate.ts";
import { CurveEstimate } from "../core/knee.ts";
import type { Events, WorkerState } from "../observe/events.ts";
import { Circuit, type HealthLimits, type Held } from "./health.ts";
import type { InFlightBatch } from "../dispatch/in-flight.ts";
import { Usage } from "./usage.ts";

const RATIO_WEIGHT = 0.2;
/** What took longer than so many times what was expected was an accident, and counts as that much. */
const ACCIDENT = 2;
const SLOW = 1.5;
/** What a worker said of its load is forgotten after this long. */
const LOAD_HOLDS_MS = 3000;

export class Slot {
  readonly worker: Worker;
  /** As everybody is told; the backend may know it by a shorter one. */
  readonly name: string;
  readonly circuit: Circuit;
  /** The batch it runs; undefined when it is free. */
  batch: InFlightBatch | undefined;
  /** The one behind it; undefined whenever `batch` is. */
  ahead: InFlightBatch | undefined;
  /** Batches since one left when its worker was free. */
  earlyInRow = 0;
  /** Others list this worker too, and it is leased to one process at a time. */
  readonly shared: boolean;
  /** No batch starts at or after this instant. */
  heldUntil: number;
  /** It is to be given back: no further batch starts. */
  leaving = false;
  /** It is to go for good: no further batch starts, and it is no capacity. When it has: `gone`. */
  retiring = false;
  gone: Promise<void> | undefined;
  /** Somebody put it aside: no further batch starts, and it is no capacity, until it is let back in. */
  aside = false;
  /** What it runs is long overdue: it may be dead, and does not count until it answers. */
  suspect = false;
  /** Called when a slot that is leaving has become free. */
  onIdle: (() => void) | undefined;
  /** The same worker by other rules, before this one: while that runs a batch, or is `lasting`, this one starts none. */
  after: Slot | undefined;
  lasting = false;
  /** Called when a slot that is retiring has become free. */
  onRetired: (() => void) | undefined;
  ratio = 1;
  usualRatio = 1;
  batches = 0;
  tasks = 0;
  calls = 0;
  failures = 0;
  busyMs = 0;

  constructor(worker: Worker, limits: () => HealthLimits, shared = false, suffix = "") {
    this.worker = worker;
    this.name = worker.name + suffix;
    this.circuit = new Circuit(limits);
    this.shared = shared;
    this.heldUntil = shared ? -Infinity : Infinity;
  }

  held(now: number): boolean {
    return now < this.heldUntil;
  }

  healthy(now: number): boolean {
    return (
      this.held(now) && !this.retiring && !this.aside && !this.circuit.down(now) && !this.suspect && this.well
    );
  }

  /** The most tasks that its worker takes in one call, as it says now. */
  get takes(): number {
    const most = this.worker.maxBatchSize;
    if (most === undefined) return Infinity;
    return most >= 1 ? Math.floor(most) : 1;
  }

  /** It does not say that it is unwell. */
  get well(): boolean {
    return this.worker.health?.well !== false;
  }

  /** It is well, has proven so, and is not fuller than `maxLoad` by its own account. */
  counts(now: number, maxLoad: number): boolean {
    // One that is leaving is another's in a moment, and as fast there.
    if (!this.healthy(now) || this.circuit.probing) return false;
    const { load } = this.worker;
    return load === undefined || load.share <= maxLoad || now - load.at > LOAD_HOLDS_MS;
  }

  /** Its worker runs a batch: for this slot, or still for one before it. */
  get occupied(): boolean {
    if (this.after?.lasting === false && !this.after.occupied) this.after = undefined;
    return this.batch !== undefined || this.after !== undefined;
  }

  free(now: number): boolean {
    if (this.occupied || this.leaving || this.retiring || this.aside || !this.held(now)) return false;
    return now >= this.circuit.usableAt && this.well;
  }

  /** Binds a batch to it: to run now, or behind the one it runs. */
  bind(batch: InFlightBatch): void {
    if (batch.early) {
      this.batch!.overlapped = true;
      this.ahead = batch;
      this.earlyInRow++;
    } else {
      this.batch = batch;
      this.earlyInRow = 0;
    }
  }

  /** It is done with this batch; the one behind it is next. */
  leave(batch: InFlightBatch, now: number): void {
    this.busyMs += batch.rest(now);
    const next = this.ahead;
    this.ahead = undefined;
    if (next === batch) return;
    this.batch = next;
    next?.transition("turn", now);
  }

  /** The batch that it ran came back and is not over; the worker is at the next one, if it has one. */
  passTurn(now: number): void {
    const { batch, ahead } = this;
    if (batch === undefined || ahead === undefined || ahead.state === "bound") return;
    this.busyMs += batch.rest(now);
    this.batch = ahead;
    this.ahead = batch;
    ahead.transition("turn", now);
  }

  /** When it will be free, with whatever it has in its hands; undefined while it is. */
  get freeAt(): number | undefined {
    const { batch, ahead } = this;
    return batch && ahead ? ahead.freeIf(batch.expectedFreeAt) : batch?.expectedFreeAt;
  }

  state(now: number): WorkerState {
    // Whoever put it aside may be at work on it: that it does not answer then is no news.
    if (this.aside) return "draining";
    if (this.circuit.down(now) || this.suspect || !this.well) return "down";
    if (this.leaving || this.retiring) return "draining";
    return this.batch === undefined ? "idle" : "busy";
  }

  busyMsUntil(now: number): number {
    return this.busyMs + (this.batch?.busyMs(now) ?? 0);
  }
}

export class Workers {
  readonly #slots: Slot[] = [];
  readonly service = new ServiceEstimate();
  readonly surprise = new SurpriseEstimate();
  /** For people to see; nothing is decided by it. */
  readonly curve = new CurveEstimate();
  readonly #model: string;
  readonly #limits: () => HealthLimits;
  readonly #events: Events;
  readonly #shared: boolean;
  readonly #suffix: string;
  readonly #usage = new Usage();
  /** Of workers that are gone. */
  #goneMs = 0;
  /** Tasks that failed here sit out until then at most. */
  retriesUntil = 0;

  constructor(
    model: string,
    workers: readonly Worker[],
    limits: () => HealthLimits,
    events: Events,
    shared = false,
    suffix = "",
  ) {
    this.#model = model;
    this.#limits = limits;
    this.#events = events;
    this.#shared = shared;
    this.#suffix = suffix;
    for (const worker of workers) this.add(worker);
  }

  get slots(): readonly Slot[] {
    return this.#slots;
  }

  add(worker: Worker): Slot {
    const slot = new Slot(worker, this.#limits, this.#shared, this.#suffix);
    worker.onHealth = () => this.#asked(slot);
    this.#slots.push(slot);
    return slot;
  }

  /** It gets no further batch; resolves when it runs nothing any more, and is gone from here then. */
  retire(slot: Slot, clock: Clock): Promise<void> {
    return (slot.gone ??= this.#retire(slot, clock));
  }

  async #retire(slot: Slot, clock: Clock): Promise<void> {
    slot.retiring = true;
    if (slot.batch !== undefined) await new Promise<void>((resolve) => (slot.onRetired = resolve));
    this.noteUsage(clock.now());
    this.#goneMs += slot.busyMs;
    slot.worker.onHealth = undefined;
    this.#slots.splice(this.#slots.indexOf(slot), 1);
  }

  /** Called when a worker says that it is well again. */
  onRecovered: () => void = () => {};

  #asked(slot: Slot): void {
    const { well, why } = slot.worker.health!;
    this.#changed(slot, well ? "idle" : "down", well ? "it says that it is well again" : why);
    if (well) this.onRecovered();
  }

  /** The free worker with the best pace; one whose last call failed comes after, and one that was ejected last. */
  best(now: number): Slot | undefined {
    let best: Slot | undefined;
    let bestPace = Infinity;
    for (const slot of this.slots) {
      const pace = slot.ratio * slot.circuit.reluctance;
      if (pace >= bestPace || !slot.free(now)) continue;
      best = slot;
      bestPace = pace;
    }
    return best;
  }

  free(now: number): number {
    let free = 0;
    for (const slot of this.slots) if (slot.free(now)) free++;
    return free;
  }

  held(now: number): number {
    let held = 0;
    for (const slot of this.slots) if (slot.held(now)) held++;
    return held;
  }

  healthy(now: number): number {
    let healthy = 0;
    for (const slot of this.slots) if (slot.healthy(now)) healthy++;
    return healthy;
  }

  /** Beside those that are well: one that is gone was perhaps the fastest, and the rest must not be judged by it. */
  slow(slot: Slot, now: number, by: "ratio" | "usualRatio" = "usualRatio"): boolean {
    let best = slot[by];
    for (const other of this.slots) {
      if (other[by] < best && other.healthy(now) && !other.circuit.probing) best = other[by];
    }
    return slot[by] > SLOW * best;
  }

  /** When each worker that is busy or asked for a pause will be free, earliest first; all but one, where one is given. */
  freeAt(now: number, but?: Slot): number[] {
    const times: number[] = [];
    for (const slot of this.slots) {
      if (slot === but || slot.leaving || slot.retiring || slot.aside || slot.suspect || !slot.held(now))
        continue;
      if (slot.freeAt !== undefined) times.push(slot.freeAt);
      else if (!slot.circuit.down(now) && slot.circuit.paused(now)) times.push(slot.circuit.usableAt);
    }
    return times.sort((a, b) => a - b);
  }

  /** The next instant at which an ejected or paused worker may be tried; Infinity when none is. */
  nextUsableAt(now: number): number {
    let next = Infinity;
    for (const slot of this.slots) {
      const { batch, circuit, leaving, retiring, aside } = slot;
      if (batch !== undefined || leaving || retiring || aside || !slot.held(now)) continue;
      if (circuit.usableAt > now) next = Math.min(next, circuit.usableAt);
    }
    return next;
  }

  /**
   * Tasks per millisecond when every worker runs batches of the `most` that it may be given. One that is silent
   * counts as well: most often it is only late, and will be back.
   */
  capacityPerMs(most: (slot: Slot) => number, now: number): number {
    let capacity = 0;
    for (const slot of this.slots) {
      if (slot.aside || (!slot.healthy(now) && !slot.suspect)) continue;
      const size = most(slot);
      capacity += size / (this.service.msFor(size) * slot.usualRatio);
    }
    return capacity;
  }

  /** What it runs is long overdue. */
  suspect(slot: Slot, why: string): void {
    slot.suspect = true;
    this.#changed(slot, "down", why);
  }

  /** It said something, late as it may be: it is not dead. */
  heard(slot: Slot): void {
    if (!slot.suspect) return;
    slot.suspect = false;
    this.#changed(slot, "busy", "it answered after all");
  }

  answered(slot: Slot, size: number, ms: number, now: number): void {
    this.alive(slot);
    if (this.service.settled) {
      const ratio = ms / this.service.msFor(size);
      this.surprise.learn(ratio / slot.usualRatio);
      slot.ratio += RATIO_WEIGHT * (ratio - slot.ratio);
      const usual = Math.min(ratio, ACCIDENT * slot.usualRatio);
      slot.usualRatio += RATIO_WEIGHT * (usual - slot.usualRatio);
    }
    if (this.slow(slot, now, "ratio")) return;
    this.service.learn(size, ms);
    this.curve.learn(size, ms, now);
  }

  /** It answered, whatever it said. */
  alive(slot: Slot): void {
    const recovered = slot.circuit.probing;
    slot.circuit.answered();
    if (recovered) this.#changed(slot, "idle", "it answered again");
  }

  /** Counts a failure; true when it ejects the worker. */
  failed(slot: Slot, now: number, why: string, unreachable: boolean, held?: Held): boolean {
    slot.failures++;
    const silent = slot.suspect;
    // Silence has been held against it already: that it ends like this is enough, but for an input that it was silent with before.
    const atOnce = unreachable || (silent && held?.repeated !== true);
    const ejected = slot.circuit.failed(now, why, atOnce, held);
    slot.suspect = false;
    if (ejected) this.#changed(slot, "down", why);
    else if (silent) this.#changed(slot, "idle", "the same input failed there before");
    return ejected;
  }

  /** Share of the held workers' time spent on batches, over the last ten seconds. */
  utilization(now: number): number {
    this.#usage.count(this.held(now), now);
    const share = this.#usage.share(this.#busyMs(now), now);
    if (share !== undefined) return share;
    const held = this.slots.filter((slot) => slot.held(now));
    return held.filter((slot) => slot.batch).length / Math.max(1, held.length);
  }

  /** Called when a batch starts or ends, and before a lease changes. */
  noteUsage(now: number): void {
    this.#usage.count(this.held(now), now);
    this.#usage.note((at) => this.#busyMs(at), now);
  }

  #busyMs(now: number): number {
    return this.slots.reduce((sum, slot) => sum + slot.busyMsUntil(now), this.#goneMs);
  }

  #changed(slot: Slot, state: WorkerState, why: string): void {
    this.#events.emit("worker.changed", { model: this.#model, worker: slot.name, state, why });
  }
}
