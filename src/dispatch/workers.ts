/**
 * The workers of one model and the slot that each has: room for one batch.
 *
 * A worker learns its own pace: `ratio` is its service time over the fleet's, so that predictions fit a
 * mixed fleet. One that needs more than 1.5 times the best is slow: it is chosen last, takes full batches
 * or what has waited long enough, and does not teach the fleet's estimate.
 */
import type { Worker } from "../backend/backend.ts";
import { ServiceEstimate } from "../core/estimate.ts";
import type { BatchNote } from "../core/task.ts";
import type { Events, WorkerState } from "../telemetry/events.ts";
import { Circuit, type HealthLimits } from "./health.ts";

const RATIO_WEIGHT = 0.2;
const SLOW = 1.5;
const USAGE_WINDOW_MS = 10_000;
const USAGE_STEP_MS = 500;

export class Slot {
  readonly worker: Worker;
  readonly circuit: Circuit;
  /** The batch it runs; undefined when it is free. Written by the dispatcher. */
  batch: (BatchNote & { readonly expectedFreeAt: number }) | undefined;
  ratio = 1;
  batches = 0;
  tasks = 0;
  calls = 0;
  failures = 0;
  busyMs = 0;

  constructor(worker: Worker, limits: HealthLimits) {
    this.worker = worker;
    this.circuit = new Circuit(limits);
  }

  get name(): string {
    return this.worker.name;
  }

  free(now: number): boolean {
    return this.batch === undefined && now >= this.circuit.usableAt;
  }

  state(now: number): WorkerState {
    if (this.circuit.down(now)) return "down";
    return this.batch === undefined ? "idle" : "busy";
  }

  busyMsUntil(now: number): number {
    return this.busyMs + (this.batch === undefined ? 0 : now - this.batch.startedAt);
  }
}

export class Workers {
  readonly slots: readonly Slot[];
  readonly service = new ServiceEstimate();
  readonly #model: string;
  readonly #events: Events;
  /** Snapshots of all busy time, oldest first, at most as many as the window has steps. */
  readonly #usage: { at: number; busyMs: number }[] = [];

  constructor(model: string, workers: readonly Worker[], limits: HealthLimits, events: Events) {
    this.#model = model;
    this.#events = events;
    this.slots = workers.map((worker) => new Slot(worker, limits));
  }

  /** The free worker with the best pace; one that was ejected and is not proven yet comes last. */
  best(now: number): Slot | undefined {
    let best: Slot | undefined;
    let bestPace = Infinity;
    for (const slot of this.slots) {
      const pace = slot.circuit.probing ? Number.MAX_VALUE : slot.ratio;
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

  healthy(now: number): number {
    let healthy = 0;
    for (const slot of this.slots) if (!slot.circuit.down(now)) healthy++;
    return healthy;
  }

  slow(slot: Slot): boolean {
    let best = Infinity;
    for (const { ratio } of this.slots) best = Math.min(best, ratio);
    return slot.ratio > SLOW * best;
  }

  /** When each worker that is busy or asked for a pause will be free, earliest first. */
  freeAt(now: number): number[] {
    const times: number[] = [];
    for (const slot of this.slots) {
      if (slot.batch !== undefined) times.push(slot.batch.expectedFreeAt);
      else if (!slot.circuit.down(now) && slot.circuit.paused(now)) times.push(slot.circuit.usableAt);
    }
    return times.sort((a, b) => a - b);
  }

  /** The next instant at which an ejected or paused worker may be tried; Infinity when none is. */
  nextUsableAt(now: number): number {
    let next = Infinity;
    for (const { batch, circuit } of this.slots) {
      if (batch === undefined && circuit.usableAt > now) next = Math.min(next, circuit.usableAt);
    }
    return next;
  }

  /** Tasks per millisecond when every healthy worker runs full batches. */
  capacityPerMs(maxBatchSize: number, now: number): number {
    const fullMs = this.service.msFor(maxBatchSize);
    let capacity = 0;
    for (const slot of this.slots) {
      if (!slot.circuit.down(now)) capacity += maxBatchSize / (fullMs * slot.ratio);
    }
    return capacity;
  }

  answered(slot: Slot, size: number, ms: number): void {
    this.alive(slot);
    if (this.service.settled) slot.ratio += RATIO_WEIGHT * (ms / this.service.msFor(size) - slot.ratio);
    if (!this.slow(slot)) this.service.learn(size, ms);
  }

  /** It answered, whatever it said. */
  alive(slot: Slot): void {
    const recovered = slot.circuit.probing;
    slot.circuit.answered();
    if (recovered) this.#changed(slot, "idle", "it answered again");
  }

  /** Counts a failure; true when it ejects the worker. */
  failed(slot: Slot, now: number, why: string, unreachable: boolean): boolean {
    slot.failures++;
    const ejected = slot.circuit.failed(now, why, unreachable);
    if (ejected) this.#changed(slot, "down", why);
    return ejected;
  }

  /** Share of the fleet's time spent on batches, over the last ten seconds. */
  utilization(now: number): number {
    const busyMs = this.#busyMs(now);
    const since = this.#usage.find(({ at }) => at >= now - USAGE_WINDOW_MS);
    if (since === undefined || now - since.at < 1)
      return this.slots.filter((slot) => slot.batch).length / this.slots.length;
    return Math.min(1, (busyMs - since.busyMs) / ((now - since.at) * this.slots.length));
  }

  /** Takes a snapshot for `utilization`; called when a slot changes hands. */
  noteUsage(now: number): void {
    const last = this.#usage.at(-1);
    if (last !== undefined && now - last.at < USAGE_STEP_MS) return;
    this.#usage.push({ at: now, busyMs: this.#busyMs(now) });
    if (this.#usage.length > USAGE_WINDOW_MS / USAGE_STEP_MS) this.#usage.shift();
  }

  #busyMs(now: number): number {
    return this.slots.reduce((sum, slot) => sum + slot.busyMsUntil(now), 0);
  }

  #changed(slot: Slot, state: WorkerState, why: string): void {
    this.#events.emit("worker.changed", { model: this.#model, worker: slot.name, state, why });
  }
}
