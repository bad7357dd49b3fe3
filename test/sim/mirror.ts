/**
 * What a process knows of the queues in the store, as `engine/redis-view.ts` keeps it, without its streams: the
 * youngest report, less what claims are on their way for.
 */
import type { QueueView } from "../../src/engine/engine.ts";
import { TIERS } from "./plan.ts";
import type { Report } from "./store.ts";

export class Mirror {
  readonly #own: (at: number) => number;
  #number = 0;
  #queues = new Map<string, QueueView>();
  #waiting: readonly number[] = Array.from({ length: TIERS }, () => 0);
  readonly #reserved = new Map<string, number>();
  /** Tasks are there, `count` of them new. */
  arrived: (parameters: string, depth: number, count: number) => void = () => {};

  /** `own` translates an instant of the store's. */
  constructor(own: (at: number) => number) {
    this.#own = own;
  }

  /** `looked`: somebody asked, because a bell may have been missed. */
  told({ number, queues, waiting, came }: Report, looked = false): void {
    if (number <= this.#number) return;
    this.#number = number;
    const before = this.#queues;
    this.#queues = new Map(queues.map((queue) => [queue.parameters, queue]));
    this.#waiting = waiting;
    for (const { parameters, depth } of queues) {
      const more = depth - (before.get(parameters)?.depth ?? 0);
      const count = looked ? Math.max(0, more) : (came.get(parameters) ?? 0);
      if (count > 0) this.arrived(parameters, this.#free(parameters), count);
    }
  }

  /** Nothing is known any more. */
  forget(): void {
    this.#queues.clear();
  }

  queues(): QueueView[] {
    const views: QueueView[] = [];
    for (const queue of this.#queues.values()) {
      const depth = this.#free(queue.parameters);
      if (depth <= 0) continue;
      views.push({
        ...queue,
        depth,
        fresh: Math.min(queue.fresh, depth),
        oldestAt: this.#own(queue.oldestAt),
        earliestDeadlineAt: this.#own(queue.earliestDeadlineAt),
      });
    }
    return views;
  }

  waiting(): readonly number[] {
    return this.#waiting;
  }

  reserve(parameters: string, count: number): () => void {
    const taken = Math.min(count, this.#free(parameters));
    this.#reserved.set(parameters, (this.#reserved.get(parameters) ?? 0) + taken);
    return () => {
      this.#reserved.set(parameters, this.#reserved.get(parameters)! - taken);
      const free = this.#free(parameters);
      if (free > 0) this.arrived(parameters, free, 0);
    };
  }

  #free(parameters: string): number {
    return (this.#queues.get(parameters)?.depth ?? 0) - (this.#reserved.get(parameters) ?? 0);
  }
}
