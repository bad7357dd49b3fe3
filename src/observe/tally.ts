/** Counts since the start, and rates of the last ten seconds. */
import type { Clock } from "../app/clock.ts";
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

export class Tally {
  readonly #clock: Clock;
  readonly #requestRate: RecentRate;
  readonly #arrivals = new Map<string, RecentRate>();
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
      const before = new Map(this.#arrivals);
      this.#arrivals.clear();
      for (const model of models())
        this.#arrivals.set(model, before.get(model) ?? new RecentRate(clock.now()));
    };
    follow();
    events.on("reloaded", follow);
    events.on("request.answered", ({ model, status, startedAt, latencyMs }) => {
      if (model === "" || status === CLIENT_LEFT) return;
      this.requests++;
      this.#requestRate.count(startedAt + latencyMs);
    });
    events.on("batch.settled", ({ size, calls }) => {
      this.batches++;
      this.tasks += size;
      this.calls += calls;
    });
    events.on("task.queued", ({ model, at }) => this.#arrivals.get(model)?.count(at));
    events.on("task.joined", () => this.joined++);
    events.on("task.cached", () => this.cached++);
    events.on("task.dropped", () => this.dropped++);
    events.on("task.retried", () => this.retried++);
    events.on("task.dead", () => this.dead++);
    events.on("task.lost", () => this.lost++);
    events.on("request.shed", ({ model, reason }) => {
      this.shed++;
      if (askedForWorker(reason)) this.#arrivals.get(model)?.count(clock.now());
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
    return this.#arrivals.get(model)?.perSecond(this.#clock.now()) ?? 0;
  }
}
