/**
 * Which queue of a model the next batch is made of, and how large it is: asks the policy about each.
 *
 * For a free worker the question is about now. For one that is given its next batch early it is about the instant at
 * which it will be free, as if it were then: with that worker idle and the others as they will be.
 */
import type { QueueView } from "../engine/engine.ts";
import { decide, type Decision, type View } from "../core/policy.ts";
import type { RunParts } from "./batch-run.ts";
import type { ModelRules } from "./model-rules.ts";
import type { PoolWorker } from "../workers/worker.ts";

/** Queues that are looked at in each tier; what a choice costs does not grow with the number of parameters. */
const MAX_QUEUES_SEEN = 64;
const PATIENCE = 9;

/** Lets whatever is passed over for a good reason go first every tenth time. */
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

/** A queue, and what is to be done with it. */
export interface Choice<Kind extends Decision["kind"]> {
  readonly queue: QueueView;
  readonly decision: Decision & { readonly kind: Kind };
}

/** The worker that a batch is looked for. */
export interface BatchQuestion {
  readonly slot: PoolWorker;
  readonly now: number;
  /** When the batch would start: later than `now` where the worker still runs another. */
  readonly at: number;
  readonly early: boolean;
  /** Only a full batch may leave. */
  readonly fullOnly: boolean;
}

/** The workers when the batch would start. */
type Fleet = Pick<View, "idle" | "freeAt" | "lastStartAt">;

export class Chooser {
  readonly #rules: () => ModelRules;
  readonly #parts: RunParts;
  /** Counts queues of a lower tier that wait longer and were passed over. */
  readonly #guard = new StarvationGuard();
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
    // Made only when something waits: most often nothing does.
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

  /** The better tier first. Lower tiers with other parameters cannot join its batches, and would never go. */
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
    // A slow worker is worth a full batch, or one that has waited as long as it may.
    return decide(view, { ...limits, policy: "fixed" }, at);
  }
}

/** Its next batch may hold the input that ended a worker: no other batch may be with the worker that tries it. */
export function suspected({ headMaxBatchSize }: QueueView): boolean {
  return headMaxBatchSize !== Infinity;
}

/** The next batch would hold only tasks that were tried before. */
export function repeats({ depth, fresh, headMaxBatchSize }: QueueView): boolean {
  return fresh === 0 || headMaxBatchSize <= depth - fresh;
}
