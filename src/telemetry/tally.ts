/** Counts since the start, and the request rate of the last ten seconds. Listens; nothing else. */
import type { Clock } from "../clock.ts";
import type { Events } from "./events.ts";

const SECONDS = 10;

export class Tally {
  readonly #clock: Clock;
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
  /** Requests by second, in a ring; `#second` is the newest. */
  readonly #perSecond = new Array<number>(SECONDS + 1).fill(0);
  #second: number;
  readonly #startedAt: number;

  constructor(events: Events, clock: Clock) {
    this.#clock = clock;
    this.#startedAt = clock.now();
    this.#second = Math.floor(this.#startedAt / 1000);
    events.on("request.answered", ({ model }) => {
      if (model !== "") this.#request();
    });
    events.on("batch.settled", ({ size, calls }) => {
      this.batches++;
      this.tasks += size;
      this.calls += calls;
    });
    events.on("task.joined", () => this.joined++);
    events.on("task.cached", () => this.cached++);
    events.on("task.dropped", () => this.dropped++);
    events.on("task.retried", () => this.retried++);
    events.on("task.dead", () => this.dead++);
    events.on("task.lost", () => this.lost++);
    events.on("request.shed", () => this.shed++);
  }

  totals(): Record<string, number> {
    const { requests, batches, tasks, calls, joined, cached, dropped, retried, dead, lost, shed } = this;
    return { requests, batches, tasks, calls, joined, cached, dropped, retried, dead, lost, shed };
  }

  /** Over whole seconds that have passed, so that the number does not sag at each new one. */
  requestsPerSecond(): number {
    this.#turn();
    const seconds = Math.min(SECONDS, Math.max(1, (this.#clock.now() - this.#startedAt) / 1000));
    const newest = this.#second % this.#perSecond.length;
    const sum = this.#perSecond.reduce((total, count, at) => (at === newest ? total : total + count), 0);
    return Math.round((10 * sum) / seconds) / 10;
  }

  #request(): void {
    this.requests++;
    this.#turn();
    this.#perSecond[this.#second % this.#perSecond.length]!++;
  }

  #turn(): void {
    const second = Math.floor(this.#clock.now() / 1000);
    const steps = Math.min(second - this.#second, this.#perSecond.length);
    for (let step = 1; step <= steps; step++)
      this.#perSecond[(second - steps + step) % this.#perSecond.length] = 0;
    this.#second = second;
  }
}
