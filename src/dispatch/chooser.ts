/**
 * Chooses the queue and size of a model's next batch by asking the policy about each queue. For a free worker the
 * question is about now; for an early batch, about the instant at which its worker will be free, with that worker idle
 * and the others as they will be.
 */
import type { QueueView } from "../engine/engine.ts";
import { decide, type Decision, type View } from "../core/policy.ts";
import type { RunParts } from "./batch-run.ts";
import type { ModelRules } from "./model-rules.ts";
import type { PoolWorker } from "../workers/worker.ts";

const MAX_QUEUES_SEEN = 64; // per tier, so that the cost of a choice does not grow with the number of parameters
const PATIENCE = 9;

/** Lets what is passed over for a good reason go first every tenth time. */
export class StarvationGuard {
  #times = 0;

  get due(): boolean {
    return this.#times >= PATIENCE;
  }

  passedOver(): void {
    this.#times++;
  }

  served(): void {
    this.#times = 0;
  }
}

export interface Choice<Kind extends Decision["kind"]> {
  readonly queue: QueueView;
  readonly decision: Decision & { readonly kind: Kind };
}

export interface BatchQuestion {
  readonly slot: PoolWorker;
  readonly now: number;
  /** When the batch would start: after `now` if the worker still runs another. */
  readonly at: number;
  readonly early: boolean;
  readonly fullOnly: boolean;
}

/** Worker state when the batch would start. */
type Fleet = Pick<View, "idle" | "freeAt" | "lastStartAt">;

export class Chooser {
  readonly #rules: () => ModelRules;
  readonly #parts: RunParts;
  readonly #guard = new StarvationGuard(); // counts how often longer-waiting queues of a lower tier were passed over
  lastStartAt = -Infinity;

  constructor(rules: () => ModelRules, parts: RunParts) {
    this.#rules = rules;
    this.#parts = parts;
  }

  /** The queue to send from now, or the one to wait for. */
  choose(question: BatchQuestion): Choice<"send"> | Choice<"wait"> | undefined {
    const { engine, budget } = this.#parts;
    const { now, early, fullOnly } = question;
    const sendable: Choice<"send">[] = [];
    let waiting: Choice<"wait"> | undefined;
    const wait = (queue: QueueView, decision: Choice<"wait">["decision"]): void => {
      if (waiting === undefined || decision.until < waiting.decision.until) waiting = { queue, decision };
    };
    let seen = 0;
    // Lazy: usually nothing waits.
    let fleet: Fleet | undefined;
    for (const queue of engine.queues(this.#rules().name, MAX_QUEUES_SEEN)) {
      if (++seen > MAX_QUEUES_SEEN && !this.#guard.due) break;
      if (early && suspected(queue)) continue;
      fleet ??= this.#fleet(question);
      const decision = this.#decide(queue, question, fleet);
      if (fullOnly && (decision.kind !== "send" || decision.reason !== "full")) continue;
      if (decision.kind === "send") sendable.push({ queue, decision });
      else if (decision.kind === "wait") wait(queue, decision);
    }
    for (const choice of this.#inTurn(sendable)) {
      if (!repeats(choice.queue) || budget.extra(now)) return choice;
      wait(choice.queue, { kind: "wait", until: now + budget.waitMs(), unless: 1 });
    }
    return waiting;
  }

  /** Better tier first. The guard: lower tiers with other parameters cannot join its batches and would starve. */
  #inTurn(sendable: readonly Choice<"send">[]): readonly Choice<"send">[] {
    if (sendable.length < 2) return sendable;
    const oldest = sendable.reduce((one, other) => (other.queue.oldestAt < one.queue.oldestAt ? other : one));
    if (oldest.queue.tier === sendable[0]!.queue.tier) return sendable;
    if (!this.#guard.due) {
      this.#guard.passedOver();
      return sendable;
    }
    this.#guard.served();
    return [oldest, ...sendable.filter((choice) => choice !== oldest)];
  }

  #fleet({ slot, now, at, early }: BatchQuestion): Fleet {
    const { workers } = this.#parts;
    if (!early)
      return { idle: workers.free(now), freeAt: workers.freeAt(now), lastStartAt: this.lastStartAt };
    let { lastStartAt } = this;
    for (const { batch, ahead } of workers.slots) {
      // A bound batch will have started by then.
      const startsAt = ahead === undefined ? -Infinity : batch!.expectedFreeAt;
      if (startsAt <= at) lastStartAt = Math.max(lastStartAt, startsAt);
    }
    return { idle: 1, freeAt: workers.freeAt(now, slot), lastStartAt };
  }

  #decide(queue: QueueView, { slot, now, at }: BatchQuestion, fleet: Fleet): Decision {
    const { workers, capacity, arrivals } = this.#parts;
    const maxBatchSize = Math.min(capacity.most(slot), queue.headMaxBatchSize);
    const limits = { ...this.#rules().limits, maxBatchSize };
    const view = {
      queued: queue.depth,
      oldestAt: queue.oldestAt,
      earliestDeadlineAt: queue.earliestDeadlineAt,
      ...fleet,
      arrivalsPerMs: arrivals.perMs(now),
      service: workers.service,
    };
    const decision = decide(view, limits, at);
    if (decision.kind !== "send" || decision.reason !== "idle" || !workers.slow(slot, now)) return decision;
    // A slow worker gets a full batch, or one that has waited as long as it may.
    return decide(view, { ...limits, policy: "fixed" }, at);
  }
}

/** The next batch may hold an input that killed a worker: its worker may have no other batch meanwhile. */
export function suspected({ headMaxBatchSize }: QueueView): boolean {
  return headMaxBatchSize !== Infinity;
}

export function repeats({ depth, fresh, headMaxBatchSize }: QueueView): boolean {
  return fresh === 0 || headMaxBatchSize <= depth - fresh;
}
