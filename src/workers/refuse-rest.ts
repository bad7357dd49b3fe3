/** Answers tasks of a model that is no longer served: an error now is better than silence until the deadline. */
import type { Alarm, Clock } from "../app/clock.ts";
import type { Engine } from "../engine/engine.ts";

const LEASE_MS = 10_000;
const AT_ONCE = 256;

export async function refuseRest(model: string, engine: Engine, clock: Clock): Promise<void> {
  const message = `the model ${JSON.stringify(model)} was removed before this task had its turn`;
  for (;;) {
    const [queue] = engine.queues(model);
    if (queue === undefined) return;
    const batch = {
      id: "removed",
      reason: "full",
      worker: "",
      startedAt: clock.now(),
      why: message,
    } as const;
    const { parameters } = queue;
    const lease = await engine.claim({ model, parameters, max: AT_ONCE, leaseMs: LEASE_MS, batch });
    const failed = { kind: "failed", code: "NOT_FOUND", message } as const;
    await engine.settle(
      lease,
      lease.tasks.map(({ task }) => ({ id: task.id, ...failed })),
    );
    if (lease.tasks.length === 0) return;
  }
}

/** Refuses tasks requeued after their model is gone: they waited for a retry longer than it was served. */
export class LateTasks {
  readonly #clock: Clock;
  /** By model: stops watching. */
  readonly #watched = new Map<string, () => void>();

  constructor(clock: Clock) {
    this.#clock = clock;
  }

  /** `forMs`: no task of the model lives longer. */
  refuse(model: string, engine: Engine, forMs: number): void {
    this.forget(model);
    const clock = this.#clock;
    const unwatch = engine.watch({
      queued: (name) => {
        // Not re-entrantly from the enqueue.
        if (name === model) queueMicrotask(() => void refuseRest(model, engine, clock));
      },
    });
    const alarm: Alarm = clock.at(clock.now() + forMs, () => this.forget(model));
    this.#watched.set(model, () => {
      unwatch();
      alarm.cancel();
    });
  }

  /** It is served again. */
  forget(model: string): void {
    this.#watched.get(model)?.();
    this.#watched.delete(model);
  }

  stop(): void {
    for (const model of this.#watched.keys()) this.forget(model);
  }
}
