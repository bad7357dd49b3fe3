/** A fold on virtual time, with a process around it whose every number a test can set. */
import type { Clock } from "../../../src/app/clock.ts";
import { Fold, type FoldRules } from "../../../src/observe/dashboard/fold.ts";
import type { ModelFrame } from "../../../src/observe/dashboard/frames.ts";
import type { BatchNote, DispatchReason } from "../../../src/core/task.ts";
import { VirtualClock } from "../../../src/cli/plan/virtual-clock.ts";
import {
  type AnsweredRequest,
  type EventFields,
  Events,
  type WorkerState,
} from "../../../src/observe/events.ts";
import type { ModelSight, ProcessSight, WorkerSight } from "../../../src/observe/sight.ts";
import { Tally } from "../../../src/observe/tally.ts";
import { PROCESS } from "../stage.ts";

export const START = 1_000_000_000;
export const TIERS = ["gold", "silver", "tin"];

export const RULES: FoldRules = {
  models: [{ name: "embed", maxBatchSize: 64, maxWaitMs: 50, policy: "adaptive" }],
  tiers: TIERS,
  role: "all",
  targetUtilization: 0.7,
  fleet: false,
};

/** Alarms of one instant stand a little apart: what is due then has rung only a moment later. */
const BEHIND_MS = 0.002;

type Open<Value> = { -readonly [Name in keyof Value]: Value[Name] };

export function workerSight(name: string, state: WorkerState = "idle"): Open<WorkerSight> {
  const counts = { inFlight: 0, batches: 0, tasks: 0, failures: 0, utilization: 0, ratio: 1 };
  return { name, state, own: true, ...counts, batcher: "", zone: "" };
}

export function modelSight(name: string, workers: WorkerSight[]): Open<ModelSight> {
  return {
    name,
    maxBatchSize: 64,
    queuedByTier: [0, 0, 0],
    oldestWaitMs: 0,
    workers,
    healthy: workers.filter(({ state }) => state !== "down").length,
    utilization: 0,
    capacityPerSecond: 0,
    arrivalsPerSecond: 0,
    load: 0,
    desiredWorkers: workers.length,
  };
}

export class Stage implements Disposable {
  readonly clock = new VirtualClock(START);
  readonly events = new Events();
  readonly model = modelSight("embed", [workerSight("gpu-1"), workerSight("gpu-2")]);
  readonly process: Open<ProcessSight> = { ...PROCESS, startedAt: START };
  loopLateMs = 0;
  readonly fold: Fold;
  #ids = 0;

  constructor(more: Partial<FoldRules> = {}) {
    this.fold = this.foldOn(this.clock, { ...RULES, ...more });
  }

  foldOn(clock: Clock, rules: FoldRules): Fold {
    return new Fold(rules, {
      clock,
      events: this.events,
      tally: new Tally(this.events, clock, () => ["embed"]),
      sight: { models: () => [this.model], process: () => this.process },
      delay: { watch: () => {}, take: () => this.loopLateMs, stop: () => {} },
    });
  }

  /** Lets time pass up to so many ms after the start. */
  async to(ms: number): Promise<void> {
    await this.clock.run(START + ms + BEHIND_MS);
  }

  /** All that is kept of the model, as somebody who comes now would see it. */
  look(): ModelFrame {
    return this.fold.hello().models[0]!;
  }

  note(id: string, startedAt: number, size: number, more: Partial<BatchNote> = {}): BatchNote {
    return { id, size, reason: "idle", worker: "gpu-1", startedAt, why: "", ...more };
  }

  answer(latencyMs: number, more: Partial<AnsweredRequest> = {}): void {
    const startedAt = this.clock.now() - latencyMs;
    this.events.emit("request.answered", {
      id: `t${++this.#ids}`,
      method: "POST",
      route: "/v1/inference",
      model: "embed",
      tier: "gold",
      tenant: "u1",
      status: 200,
      code: "",
      startedAt,
      latencyMs,
      work: "own",
      ending: { queuedAt: startedAt, attempt: 1, settledAt: startedAt + latencyMs },
      trace: undefined,
      ...more,
    });
  }

  begin(
    id: string,
    worker: string,
    tiers: readonly number[],
    more: { reason?: DispatchReason; attempt?: number; why?: string } = {},
  ): void {
    const { reason = "idle", attempt = 1, why = "" } = more;
    const now = this.clock.now();
    const tasks = tiers.map((tier) => ({ task: { tier } as never, attempt, queuedAt: now - 10 }));
    const batch = this.note(id, now, tiers.length, { worker, reason, why });
    this.events.emit("batch.started", { model: "embed", batch, maxBatchSize: 64, oldestWaitMs: 10, tasks });
  }

  end(
    id: string,
    worker: string,
    size: number,
    busyMs: number,
    measured: Pick<EventFields["batch.settled"], "shape" | "savedMs"> = {},
  ): void {
    const rest = { size, reason: "idle" as const, calls: 1, busyMs, ...measured };
    this.events.emit("batch.settled", { model: "embed", batchId: id, worker, ...rest });
  }

  [Symbol.dispose](): void {
    this.fold.stop();
  }
}
