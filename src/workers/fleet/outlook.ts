/**
 * What the whole fleet can do for one model, for admission: our workers as they are now, the others' as of their last
 * heartbeat. A heartbeat has the number of workers and the batch time, not when each is free: that would be outdated.
 * The policy spreads starts evenly, so the free times of n workers are assumed even over one batch: S/n, 2S/n … S from
 * now. A worker between two leases is in no heartbeat; it counts as one of those last reported. While no member reports
 * serving the model, but one just did, the last state stands (`Fleet.healthy` says how long).
 */
import { type Horizon, runMsOf } from "../../core/shed.ts";
import type { Fleet } from "./fleet.ts";
import type { CapacityBeat } from "./registry.ts";

/** How long a result is reused; the queue depth is always current, and changes faster than workers do. */
const HOLDS_MS = 10;
/** Tasks of many streams, read by several batchers, are served nearly in order: the mean deviation. */
const ORDER_MS = 20;

export class FleetOutlook {
  readonly #fleet: Fleet;
  readonly #model: string;
  #last: Horizon | undefined;
  /** Capacity of one worker when one was last reported. */
  #each: CapacityBeat | undefined;
  #lastAt = -Infinity;

  constructor(fleet: Fleet, model: string) {
    this.#fleet = fleet;
    this.#model = model;
  }

  horizon(now: number): Horizon {
    if (this.#last === undefined || now - this.#lastAt >= HOLDS_MS) {
      this.#last = this.#draw(now);
      this.#lastAt = now;
    }
    return this.#last;
  }

  hasRoom(waiting: number, now: number): boolean {
    const { idle, healthy, batchSize } = this.horizon(now);
    return idle > 0 && healthy > 0 && waiting < batchSize;
  }

  othersPerMs(tier: number): number {
    return this.#fleet.admittedByOthers(this.#model)[tier] ?? 0;
  }

  #draw(now: number): Horizon {
    const fleet = this.#fleet;
    const healthy = fleet.healthy(this.#model);
    const freeAt: number[] = [];
    const beats: CapacityBeat[] = [];
    for (const dispatcher of fleet.self.dispatchers) {
      if (dispatcher.rules.name !== this.#model) continue;
      const horizon = dispatcher.horizon(now);
      beats.push({ ...horizon, counted: horizon.freeAt.length });
      freeAt.push(...horizon.freeAt);
    }
    /** Members that could run the model's workers and hold none. */
    const bystanders: CapacityBeat[] = [];
    for (const { capacity, workers } of fleet.others(this.#model)) {
      if (workers === 0) {
        bystanders.push(capacity);
        continue;
      }
      beats.push(capacity);
      for (let at = 1; at <= capacity.counted; at++)
        freeAt.push(now + (at * capacity.batchMs) / capacity.counted);
    }
    this.#remember(beats);
    const changing = this.#each && fleet.changingHands(this.#model);
    if (changing !== undefined && changing > 0) {
      beats.push(times(this.#each!, changing));
      for (let at = 1; at <= changing; at++) freeAt.push(now + (at * this.#each!.batchMs) / changing);
    }
    if (beats.length === 0 && healthy > 0 && this.#last !== undefined && this.#last.freeAt.length > 0) {
      return { ...this.#last, healthy };
    }
    // No member ever reported one: the bystanders' expected batch time is all that is known.
    if (beats.length === 0) beats.push(...bystanders);
    const sum = (each: (beat: CapacityBeat) => number): number =>
      beats.reduce((total, beat) => total + each(beat), 0);
    const weight = (beat: CapacityBeat): number => Math.max(beat.counted, 0.001);
    const mean = (each: (beat: CapacityBeat) => number): number =>
      sum((beat) => weight(beat) * each(beat)) / Math.max(sum(weight), 0.001);
    const silences = beats.map(({ silentMs }) => silentMs).filter((ms) => ms !== undefined);
    const deviationMs = Math.max(0, ...beats.map((beat) => beat.deviationMs));
    return {
      healthy,
      idle: sum(({ idle }) => idle),
      overdue: sum(({ overdue }) => overdue),
      ...(silences.length > 0 && { silentMs: Math.min(...silences) }),
      perMs: sum(({ perMs }) => perMs),
      guessed: beats.length > 0 && beats.every(({ guessed }) => guessed === true),
      nominalPerMs: sum(({ nominalPerMs }) => nominalPerMs),
      batchSize: Math.max(
        1,
        mean(({ batchSize }) => batchSize),
      ),
      batchMs: mean(({ batchMs }) => batchMs),
      runMs: runMsOf(beats.map(({ runMs, perMs }) => ({ ms: runMs, perMs }))),
      deviationMs: Math.hypot(ORDER_MS, deviationMs),
      // A member of an older version does not report it.
      overtakeMs: Math.max(0, ...beats.map((beat) => beat.overtakeMs ?? 0)),
      freeAt: freeAt.sort((one, other) => one - other),
      nextUsableAt: now + fleet.model(this.#model).nextUsableInMs,
    };
  }

  #remember(beats: readonly CapacityBeat[]): void {
    const best = beats.find(({ counted }) => counted > 0);
    if (best !== undefined) this.#each = times(best, 1 / best.counted);
  }
}

function times(beat: CapacityBeat, factor: number): CapacityBeat {
  const { counted, perMs, nominalPerMs } = beat;
  return {
    ...beat,
    idle: 0,
    overdue: 0,
    counted: counted * factor,
    perMs: perMs * factor,
    nominalPerMs: nominalPerMs * factor,
  };
}
