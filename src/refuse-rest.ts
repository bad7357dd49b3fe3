/** What waits for a model that nobody serves any more is answered: better a word now than silence until the deadline. */
import type { Clock } from "./clock.ts";
import type { Engine } from "./engine/engine.ts";

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
