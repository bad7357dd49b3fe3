/**
 * Which queue of a model the next batch is made of, and how large it is: asks the policy about each.
 *
 * For a worker that is free the question is about now. For one that is given its next batch early it is about the instant at
 * which it will be free, as if it were then: with that worker idle and the others as they will be.
 */
import type { Engine, QueueView } from "../engine/engine.ts";
import type { RateEstimate } from "../core/estimate.ts";
import { decide, type Decision } from "../core/policy.ts";
import type { RetryBudget } from "../core/retry.ts";
import type { ModelRules } from "./model-rules.ts";
import { inTurn, Overtaken } from "./overtaken.ts";
import type { Seats } from "./seats.ts";
import type { PoolWorker as Slot } from "../workers/worker.ts";
import type { Workers } from "../workers/workers.ts";

/** Queues that are looked at in each tier; what a choice costs does not grow with the number of parameters. */
const MAX_QUEUES_SEEN = 64;

/** A queue, and what is to be done with it. */
export interface Choice<Kind extends Decision["kind"]> {
  readonly queue: QueueView;
  readonly decision: Decision & { readonly kind: Kind };
}

export interface ChooserParts {
  readonly engine: Engine;
  readonly workers: Workers;
  readonly seats: Seats;
  readonly arrivals: RateEstimate;
  readonly budget: RetryBudget;
}

/** For whom a batch is looked for, and how the fleet stands when it would start. */
interface Question {
  readonly slot: Slot;
  readonly now: number;
  /** When the batch would start. */
  readonly at: number;
  /** Whether its worker still runs another. */
  readonly early: boolean;
  readonly fullOnly: boolean;
}

/** The other workers at that time. */
interface Fleet {
  readonly idle: number;
  readonly freeAt: readonly number[];
  readonly lastStartAt: number;
}

export class Chooser {
  readonly #rules: () => ModelRules;
  readonly #parts: ChooserParts;
  /** Queues that wait longer, of a lower tier, and were not the one. */
  readonly #overtaken = new Overtaken();
  lastStartAt = -Infinity;

  constructor(rules: () => ModelRules, parts: ChooserParts) {
    this.#rules = rules;
    this.#parts = parts;
  }

  /** The queue to send from now, or the one to wait for. */
  choose(slot: Slot, now: number): Choice<"send" | "wait"> | undefined {
    return this.#choose({ slot, now, at: now, early: false, fullOnly: false });
  }

  /** The same for a worker that will be free at `at`; `fullOnly`: full batches alone are looked for. */
  chooseAhead(slot: Slot, now: number, at: number, fullOnly: boolean): Choice<"send" | "wait"> | undefined {
    return this.#choose({ slot, now, at, early: true, fullOnly });
  }

  #choose(question: Question): Choice<"send" | "wait"> | undefined {
    const { engine, budget } = this.#parts;
    const { now, fullOnly } = question;
    const sendable: Choice<"send">[] = [];
    let waiting: Choice<"wait"> | undefined;
    const wait = (queue: QueueView, decision: Choice<"wait">["decision"]): void => {
      if (waiting === undefined || decision.until < waiting.decision.until) waiting = { queue, decision };
    };
    let seen = 0;
    // Asked for only when something waits: most often this looks whether something does.
    let fleet: Fleet | undefined;
    for (const queue of engine.queues(this.#rules().name, MAX_QUEUES_SEEN)) {
      if (++seen > MAX_QUEUES_SEEN && !this.#overtaken.due) break;
      if (question.early && suspected(queue)) continue;
      fleet ??= this.#fleet(question);
      const decision = this.#decide(queue, question, fleet);
      if (fullOnly && (decision.kind !== "send" || decision.reason !== "full")) continue;
      if (decision.kind === "send") sendable.push({ queue, decision });
      else if (decision.kind === "wait") wait(queue, decision);
    }
    for (const choice of inTurn(sendable, this.#overtaken)) {
      if (!repeats(choice.queue) || budget.extra(now)) return choice;
      wait(choice.queue, { kind: "wait", until: now + budget.waitMs(), unless: 1 });
    }
    return waiting;
  }

  #fleet({ slot, now, at, early }: Question): Fleet {
    const { workers } = this.#parts;
    if (!early)
      return { idle: workers.free(now), freeAt: workers.freeAt(now), lastStartAt: this.lastStartAt };
    let { lastStartAt } = this;
    for (const { batch, ahead } of workers.slots) {
      // It is bound, and will have started by then.
      const startsAt = ahead === undefined ? -Infinity : batch!.expectedFreeAt;
      if (startsAt <= at) lastStartAt = Math.max(lastStartAt, startsAt);
    }
    return { idle: 1, freeAt: workers.freeAt(now, slot), lastStartAt };
  }

  #decide(queue: QueueView, { slot, now, at }: Question, fleet: Fleet): Decision {
    const { workers, seats, arrivals } = this.#parts;
    const maxBatchSize = Math.min(seats.most(slot), queue.headMaxBatchSize);
    const limits = { ...this.#rules().limits, maxBatchSize };
    const view = {
      queued: queue.depth,
      oldestAt: queue.oldestAt,
      earliestDeadlineAt: queue.earliestDeadlineAt,
      idle: fleet.idle,
      freeAt: fleet.freeAt,
      lastStartAt: fleet.lastStartAt,
      arrivalsPerMs: arrivals.perMs(now),
      service: workers.service,
    };
    const decision = decide(view, limits, at);
    if (decision.kind !== "send" || decision.reason !== "idle" || !workers.slow(slot, now)) return decision;
    // A slow worker is worth a full batch, or one that has waited as long as it may.
    return decide(view, { ...limits, policy: "fixed" }, at);
  }
}

/** One of its next batch may have been a worker's end. Nobody else shall be in that worker's hands when it is tried. */
export function suspected({ headMaxBatchSize }: QueueView): boolean {
  return headMaxBatchSize !== Infinity;
}

/** The next batch would hold only tasks that were tried before. */
export function repeats({ depth, fresh, headMaxBatchSize }: QueueView): boolean {
  return fresh === 0 || headMaxBatchSize <= depth - fresh;
}
