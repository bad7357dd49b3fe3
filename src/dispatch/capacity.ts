/**
 * How many tasks a worker may be given in one call, which of those that were claimed are sent, and why a batch left as it did.
 *
 *   most = min( maxBatchSize, what the worker takes, what the budgets hold of tasks of the usual weight )
 *
 * The engine counts tasks and does not weigh them: on Redis their inputs are fetched only after they were claimed. So a
 * claim is made by `most`, and weighed when it is there. What is beyond `maxBatchTokens` or `maxBatchBytes`, or beyond
 * what the worker takes by now, goes back to its place in the queue at once, with no attempt counted, where the next tasks join
 * it: a second call to the same worker would be nearly empty, and hold it while others may be idle.
 *
 * Tasks are taken in the order of the claim as far as they fit, and the first is always sent, however heavy. Lighter ones may
 * overtake a task that does not fit, which fills batches better; every tenth time that the longest-waiting was left
 * behind, it goes first.
 *
 * The usual weight is the mean over the tasks of the last ten batches or so; a task that is heavier than a whole budget counts
 * as the budget. Without budgets nothing is weighed.
 */
import { estimateTokens, inputBytes } from "../core/weight.ts";
import type { DispatchReason, Json } from "../core/task.ts";
import type { ClaimedTask, Lease } from "../engine/engine.ts";
import { StarvationGuard } from "./chooser.ts";
import type { ModelRules } from "./model-rules.ts";
import type { PoolWorker } from "../workers/worker.ts";

/** What keeps a batch below `maxBatchSize`. */
export type SizeBound = "maxBatchTokens" | "maxBatchBytes" | "worker";

export interface Fitted {
  readonly taken: readonly ClaimedTask[];
  readonly left: readonly ClaimedTask[];
  /** What the first of those that are left did not fit into; undefined when all are taken. */
  readonly bound: SizeBound | undefined;
}

/** The sums that the usual weight is made of fade by a tenth with each batch, so that a batch counts by its tasks. */
const KEPT = 0.9;
const FILL_WEIGHT = 0.1;

export class Budget {
  readonly bound: SizeBound;
  readonly most: number;
  readonly weigh: (input: Json) => number;
  #weight = 0;
  #tasks = 0;
  #taken = 0;

  constructor(bound: SizeBound, most: number, weigh: (input: Json) => number) {
    this.bound = bound;
    this.most = most;
    this.weigh = weigh;
  }

  /** Tasks of the usual weight that it holds: at least one, and Infinity before any was weighed. */
  get tasks(): number {
    return this.#tasks === 0 ? Infinity : Math.max(1, Math.floor((this.most * this.#tasks) / this.#weight));
  }

  holds(weight: number): boolean {
    return this.#taken + weight <= this.most;
  }

  take(weight: number): void {
    this.#taken += weight;
  }

  /** So many tasks are sent: the next batch is empty. */
  close(tasks: number): void {
    this.#weight = KEPT * this.#weight + Math.min(this.#taken, this.most);
    this.#tasks = KEPT * this.#tasks + tasks;
    this.#taken = 0;
  }
}

export class BatchCapacity {
  readonly #rules: () => ModelRules;
  /** Those of the rules `#budgetsOf`: what was learned of weights belongs to the budgets. */
  #budgets: readonly Budget[] = [];
  #budgetsOf: ModelRules | undefined;
  /** Share of a batch's places that are taken while at least a batch's worth waits. */
  #fill = 1;
  readonly #guard = new StarvationGuard();

  constructor(rules: () => ModelRules) {
    this.#rules = rules;
  }

  /** The most tasks that a worker may be given now; without a slot: a worker that takes as many as allowed. */
  most(slot?: PoolWorker): number {
    let most = Math.min(this.#rules().limits.maxBatchSize, slot?.takes ?? Infinity);
    for (const budget of this.#current()) most = Math.min(most, budget.tasks);
    return most;
  }

  /** What keeps a batch of `size` for it below `maxBatchSize`; undefined when that is something else. */
  boundOf(slot: PoolWorker, size: number): Departure["bound"] {
    if (size >= this.#rules().limits.maxBatchSize || size !== this.most(slot)) return undefined;
    if (size === slot.takes) return { by: "worker", weighed: false };
    return { by: this.#current().find(({ tasks }) => tasks === size)!.bound, weighed: false };
  }

  /** Tasks in its batches while tasks queue up: those with different parameters cannot share one. */
  usual(slot?: PoolWorker): number {
    return Math.max(1, this.#fill * this.most(slot));
  }

  /** A batch of `size` left that could have held `most`; `waiting` is what waited before. */
  learn(size: number, waiting: number, most: number): void {
    const seen = waiting >= most ? size / most : 1;
    this.#fill += FILL_WEIGHT * (seen - this.#fill);
  }

  /** Which of them its worker is given in one call. */
  fit(claimed: readonly ClaimedTask[], slot: PoolWorker): Fitted {
    const room = slot.takes;
    const budgets = this.#current();
    if (budgets.length === 0) {
      if (claimed.length <= room) return { taken: claimed, left: [], bound: undefined };
      return { taken: claimed.slice(0, room), left: claimed.slice(room), bound: "worker" };
    }
    const taken: ClaimedTask[] = [];
    const left: ClaimedTask[] = [];
    let bound: SizeBound | undefined;
    for (const each of this.#inTurn(claimed)) {
      const full = taken.length >= room ? "worker" : this.#take(each, taken.length === 0);
      if (full === undefined) taken.push(each);
      else left.push(each);
      bound ??= full;
    }
    for (const budget of budgets) budget.close(taken.length);
    if (left.length > 0 && left.includes(oldestOf(claimed))) this.#guard.passedOver();
    return { taken, left, bound };
  }

  /** Takes it into the batch, the first in any case; or says which budget does not hold it. */
  #take({ task }: ClaimedTask, first: boolean): SizeBound | undefined {
    const budgets = this.#current();
    const weights = budgets.map((budget) => budget.weigh(task.input));
    const full = first ? undefined : budgets.find((budget, at) => !budget.holds(weights[at]!));
    if (full !== undefined) return full.bound;
    budgets.forEach((budget, at) => budget.take(weights[at]!));
    return undefined;
  }

  #inTurn(claimed: readonly ClaimedTask[]): readonly ClaimedTask[] {
    if (!this.#guard.due || claimed.length < 2) return claimed;
    this.#guard.served();
    const oldest = oldestOf(claimed);
    return [oldest, ...claimed.filter((each) => each !== oldest)];
  }

  #current(): readonly Budget[] {
    const rules = this.#rules();
    if (rules === this.#budgetsOf) return this.#budgets;
    const { maxBatchTokens: tokens, maxBatchBytes: bytes } = rules;
    this.#budgetsOf = rules;
    return (this.#budgets = [
      ...(tokens === undefined ? [] : [new Budget("maxBatchTokens", tokens, estimateTokens)]),
      ...(bytes === undefined ? [] : [new Budget("maxBatchBytes", bytes, inputBytes)]),
    ]);
  }
}

function oldestOf(claimed: readonly ClaimedTask[]): ClaimedTask {
  return claimed.reduce((one, other) => (other.queuedAt < one.queuedAt ? other : one));
}

/** A batch that leaves. */
export interface Departure {
  readonly size: number;
  /** The model's `maxBatchSize`. */
  readonly most: number;
  /** Its oldest task had waited so long. */
  readonly waitedMs: number;
  readonly reason: DispatchReason;
  /** Its worker failed before and is tried with few. */
  readonly probing: boolean;
  /** Its worker still ran another one. */
  readonly early?: boolean;
  /** What kept it below `most`: by weight, or by what tasks of the usual weight would fill. */
  readonly bound?: { readonly by: SizeBound; readonly weighed: boolean } | undefined;
}

const REASONS: Record<DispatchReason, string> = {
  full: "no more of its tasks may ride together",
  wait: "it had waited for maxWaitMs",
  idle: "a worker was free and waiting longer would not have paid",
  deadline: "waiting longer would have missed a deadline",
};

/** Why a batch left when it did, in one sentence for people. ASCII: it is part of answers whose bytes are counted. */
export function whyItLeft({ size, most, waitedMs, reason, probing, early, bound }: Departure): string {
  const after = `${early === true ? "handed over early" : "left"} after ${Math.round(waitedMs)} ms`;
  if (size === most) return `a full batch of ${most} ${after}`;
  if (bound !== undefined) return `a full batch of ${size} ${after}: ${boundWords(size, bound)}`;
  const words = probing ? "its worker failed before and is tried with few" : REASONS[reason];
  return `batch of ${size} of ${most} ${after}: ${words}`;
}

/** The lease of a batch that is not what was asked for: others were faster, some had expired, or not all fitted. */
export function explained(claimed: Lease, { taken, bound }: Fitted, asked: Omit<Departure, "size">): Lease {
  const size = taken.length;
  const by = bound && { by: bound, weighed: true };
  const why = whyItLeft({ ...asked, bound: by, size });
  // Fewer than there was room for: what made room scarce is not why it left.
  const full = bound && ({ size, reason: "full" } as const);
  return { ...claimed, batch: { ...claimed.batch, ...full, why } };
}

function boundWords(size: number, { by, weighed }: NonNullable<Departure["bound"]>): string {
  if (by === "worker") return "its worker takes no more at once";
  return `${weighed ? "" : "about "}${size} ${size === 1 ? "task fills" : "tasks fill"} ${by}`;
}
