/** Counts since the start, rates of the last ten seconds, and what recent batches padded. */
import type { Clock } from "../app/clock.ts";
import type { BatchShape } from "../core/cost.ts";
import { askedForWorker, CLIENT_LEFT, type Events } from "./events.ts";

const SECONDS = 10;
const SECOND_MS = 1000;

/** Events per second, over the last ten whole seconds. */
export class RecentRate {
  /** Ring of counts by second; the running one is at `#at` and ends at `#endsAt`. */
  readonly #perSecond = new Array<number>(SECONDS + 1).fill(0);
  readonly #startedAt: number;
  #endsAt: number;
  #at = 0;

  constructor(now: number) {
    this.#startedAt = now;
    this.#endsAt = (Math.floor(now / SECOND_MS) + 1) * SECOND_MS;
  }

  count(now: number): void {
    if (now >= this.#endsAt) this.#turn(now);
    this.#perSecond[this.#at]!++;
  }

  /** Over complete seconds, so that the number does not drop at each new one. */
  perSecond(now: number): number {
    if (now >= this.#endsAt) this.#turn(now);
    const seconds = Math.min(SECONDS, Math.max(1, (now - this.#startedAt) / SECOND_MS));
    const sum = this.#perSecond.reduce((total, count, at) => (at === this.#at ? total : total + count), 0);
    return Math.round((10 * sum) / seconds) / 10;
  }

  #turn(now: number): void {
    const second = Math.floor(now / SECOND_MS);
    const passed = second + 1 - this.#endsAt / SECOND_MS;
    for (let step = Math.min(passed, this.#perSecond.length); step > 0; step--) {
      this.#at = (this.#at + 1) % this.#perSecond.length;
      this.#perSecond[this.#at] = 0;
    }
    this.#endsAt = (second + 1) * SECOND_MS;
  }
}

/** Time after which a batch counts 1/e of a new one. */
const FADE_MS = 60_000;
/** Sums without a batch for so long say nothing about now. */
const FORGET_MS = 300_000;

/** Computed over useful cells of recent batches, as a padded model computes them; each fades with its age. */
export class PaddingRatio {
  #computed = 0;
  #useful = 0;
  #at = -Infinity;

  add({ rows, longest, total }: BatchShape, now: number): void {
    const kept = Math.exp(Math.min(0, this.#at - now) / FADE_MS);
    this.#computed = kept * this.#computed + rows * longest;
    this.#useful = kept * this.#useful + total;
    this.#at = now;
  }

  /** Undefined without a batch in the last five minutes. */
  read(now: number): number | undefined {
    return this.#useful > 0 && now - this.#at < FORGET_MS ? this.#computed / this.#useful : undefined;
  }
}

interface ModelTally {
  readonly arrivals: RecentRate;
  readonly padding: PaddingRatio;
}

export class Tally {
  readonly #clock: Clock;
  readonly #requestRate: RecentRate;
  readonly #models = new Map<string, ModelTally>();
  requests = 0;
  batches = 0;
  tasks = 0;
  calls = 0;
  joined = 0;
  cached = 0;
  dropped = 0;
  retried = 0;
  dead = 0;
  lost = 0;
  shed = 0;

  constructor(events: Events, clock: Clock, models: () => readonly string[] = () => []) {
    this.#clock = clock;
    this.#requestRate = new RecentRate(clock.now());
    const follow = (): void => {
      const before = new Map(this.#models);
      this.#models.clear();
      for (const model of models()) {
        const kept = before.get(model);
        this.#models.set(
          model,
          kept ?? { arrivals: new RecentRate(clock.now()), padding: new PaddingRatio() },
        );
      }
    };
    follow();
    events.on("reloaded", follow);
    events.on("request.answered", ({ model, status, startedAt, latencyMs }) => {
      if (model === "" || status === CLIENT_LEFT) return;
      this.requests++;
      this.#requestRate.count(startedAt + latencyMs);
    });
    events.on("batch.settled", ({ model, size, calls, shape }) => {
      this.batches++;
      this.tasks += size;
      this.calls += calls;
      if (shape !== undefined) this.#models.get(model)?.padding.add(shape, clock.now());
    });
    events.on("task.queued", ({ model, at }) => this.#models.get(model)?.arrivals.count(at));
    events.on("task.joined", () => this.joined++);
    events.on("task.cached", () => this.cached++);
    events.on("task.dropped", () => this.dropped++);
    events.on("task.retried", () => this.retried++);
    events.on("task.dead", () => this.dead++);
    events.on("task.lost", () => this.lost++);
    events.on("request.shed", ({ model, reason }) => {
      this.shed++;
      if (askedForWorker(reason)) this.#models.get(model)?.arrivals.count(clock.now());
    });
  }

  totals(): Record<string, number> {
    const { requests, batches, tasks, calls, joined, cached, dropped, retried, dead, lost, shed } = this;
    return { requests, batches, tasks, calls, joined, cached, dropped, retried, dead, lost, shed };
  }

  requestsPerSecond(): number {
    return this.#requestRate.perSecond(this.#clock.now());
  }

  arrivalsPerSecond(model: string): number {
    return this.#models.get(model)?.arrivals.perSecond(this.#clock.now()) ?? 0;
  }

  paddingRatio(model: string): number | undefined {
    return this.#models.get(model)?.padding.read(this.#clock.now());
  }
}
