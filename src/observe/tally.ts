/** Counts since the start, and the rates of the last ten seconds. Listens; nothing else. */
import type { Clock } from "../app/clock.ts";
import { askedForWorker, CLIENT_LEFT, type Events } from "./events.ts";
import { RecentRate } from "./recent-rate.ts";

export class Tally {
  readonly #clock: Clock;
  readonly #requestRate: RecentRate;
  /** Tasks that ask for a worker, by model. */
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

  constructor(events: Events, clock: Clock, models: readonly string[] = []) {
    this.#clock = clock;
    this.#requestRate = new RecentRate(clock.now());
    this.retune(models);
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

  /** Models that are new begin at nothing, those that are gone are forgotten. */
  retune(models: readonly string[]): void {
    for (const model of this.#arrivals.keys()) if (!models.includes(model)) this.#arrivals.delete(model);
    for (const model of models) {
      if (!this.#arrivals.has(model)) this.#arrivals.set(model, new RecentRate(this.#clock.now()));
    }
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
