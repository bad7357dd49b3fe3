/**
 * How many tasks a worker may get in one call, which of the claimed ones are sent, and why a batch left as it did.
 *
 *   most = min( maxBatchSize, the worker's limit, tasks of the usual weight that fit the budgets )
 *
 * The engine does not weigh tasks (on Redis inputs are fetched only after the claim). So `most` are claimed and weighed
 * then; what exceeds `maxBatchTokens`, `maxBatchBytes` or the worker's current limit returns to its place in the queue
 * with no attempt counted: a second call to the same worker would be nearly empty and hold it while others may be idle.
 *
 * Tasks are taken in claim order as they fit; the first is always sent, however heavy. Lighter tasks may overtake one
 * that does not fit; every tenth time that the longest-waiting was passed over, it goes first. The usual weight is the
 * mean over the last ten batches or so, a task heavier than a budget counting as the budget. Without budgets nothing is
 * weighed.
 */
import { estimateTokens, inputBytes } from "../core/weight.ts";
import type { DispatchReason, Json } from "../core/task.ts";
import type { ClaimedTask, Composition, Lease } from "../engine/engine.ts";
import { StarvationGuard } from "./chooser.ts";
import type { ModelRules } from "./model-rules.ts";
import type { PoolWorker } from "../workers/worker.ts";

export type SizeBound = "maxBatchTokens" | "maxBatchBytes" | "worker";

export interface Fitted {
  readonly taken: readonly ClaimedTask[];
  readonly left: readonly ClaimedTask[];
  /** What the first returned task did not fit into; undefined if all were taken. */
  readonly bound: SizeBound | undefined;
}

const KEPT = 0.9; // decay per batch of the weight sums, so that a batch counts by its tasks
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

  /** Tasks of the usual weight that fit: at least one; Infinity before any was weighed. */
  get tasks(): number {
    return this.#tasks === 0 ? Infinity : Math.max(1, Math.floor((this.most * this.#tasks) / this.#weight));
  }

  holds(weight: number): boolean {
    return this.#taken + weight <= this.most;
  }

  take(weight: number): void {
    this.#taken += weight;
  }

  /** `tasks` are sent: the next batch is empty. */
  close(tasks: number): void {
    this.#weight = KEPT * this.#weight + Math.min(this.#taken, this.most);
    this.#tasks = KEPT * this.#tasks + tasks;
    this.#taken = 0;
  }
}

export class BatchCapacity {
  readonly #rules: () => ModelRules;
  #budgets: readonly Budget[] = []; // for the rules in `#budgetsOf`: learned weights belong to the budgets
  #budgetsOf: ModelRules | undefined;
  #fill = 1; // share of a batch that is filled while at least a batch's worth waits
  readonly #guard = new StarvationGuard();

  constructor(rules: () => ModelRules) {
    this.#rules = rules;
  }

  /** Most tasks for a worker now; without `slot`, for a worker without a limit. */
  most(slot?: PoolWorker): number {
    let most = Math.min(this.#rules().limits.maxBatchSize, slot?.takes ?? Infinity);
    for (const budget of this.#current()) most = Math.min(most, budget.tasks);
    return most;
  }

  /** What keeps a batch of `size` below `maxBatchSize`; undefined if something else. */
  boundOf(slot: PoolWorker, size: number): Departure["bound"] {
    if (size >= this.#rules().limits.maxBatchSize || size !== this.most(slot)) return undefined;
    if (size === slot.takes) return { by: "worker", weighed: false };
    return { by: this.#current().find(({ tasks }) => tasks === size)!.bound, weighed: false };
  }

  /** Batch size under backlog: tasks with different parameters cannot share a batch. */
  usual(slot?: PoolWorker): number {
    return Math.max(1, this.#fill * this.most(slot));
  }

  /** A batch of `size` left with room for `most`; `waiting` is the depth before. */
  learn(size: number, waiting: number, most: number): void {
    const seen = waiting >= most ? size / most : 1;
    this.#fill += FILL_WEIGHT * (seen - this.#fill);
  }

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

  /** Adds it to the batch (the first always), or returns the exceeded budget. */
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

export interface Departure {
  readonly size: number;
  readonly most: number;
  readonly waitedMs: number;
  readonly reason: DispatchReason;
  /** Its worker is on trial with few tasks. */
  readonly probing: boolean;
  /** Its worker still ran another batch. */
  readonly early?: boolean;
  /** What kept it below `most`: measured weight, or the estimate by usual weight. */
  readonly bound?: { readonly by: SizeBound; readonly weighed: boolean } | undefined;
  /** Tasks of other lengths that it left behind, and how long they may be overtaken. */
  readonly left?:
    | { readonly longer: number; readonly shorter: number; readonly atMostMs: number }
    | undefined;
}

const REASONS: Record<DispatchReason, string> = {
  full: "no more of its tasks may ride together",
  wait: "it had waited for maxWaitMs",
  idle: "a worker was free and waiting longer would not have paid",
  deadline: "waiting longer would have missed a deadline",
};

/** For people, in one sentence. ASCII: it is part of answers whose bytes are counted. */
export function whyItLeft(departure: Departure): string {
  const { size, most, waitedMs, reason, probing, early, bound, left } = departure;
  const after = `${early === true ? "handed over early" : "left"} after ${Math.round(waitedMs)} ms`;
  if (size === most) return `a full batch of ${most} ${after}`;
  if (bound !== undefined) return `a full batch of ${size} ${after}: ${boundWords(size, bound)}`;
  if (left !== undefined && left.longer + left.shorter > 0)
    return `batch of ${size} of ${most} ${after}: similar length; ${leftWords(left)}`;
  const words = probing ? "its worker failed before and is tried with few" : REASONS[reason];
  return `batch of ${size} of ${most} ${after}: ${words}`;
}

/** The lease of a batch that differs from the request: others were faster, some expired, or not all fitted. */
export function explained(
  claimed: Lease,
  { taken, bound }: Fitted,
  asked: Omit<Departure, "size">,
  composition: Composition | undefined,
): Lease {
  const size = taken.length;
  const by = bound && { by: bound, weighed: true };
  const left = composition && claimed.composed && { ...claimed.composed, atMostMs: composition.overtakeMs };
  const why = whyItLeft({ ...asked, bound: by, size, left });
  // Fewer than there was room for: the bound is not why it left.
  const full = bound && ({ size, reason: "full" } as const);
  return { ...claimed, batch: { ...claimed.batch, ...full, why } };
}

function leftWords({ longer, shorter, atMostMs }: NonNullable<Departure["left"]>): string {
  const counts = [longer > 0 && `${longer} longer`, shorter > 0 && `${shorter} shorter`].filter(Boolean);
  const others = longer + shorter === 1 ? "one waits" : "ones wait";
  return `${counts.join(" and ")} ${others} for the next worker, at most ${Math.ceil(atMostMs)} ms`;
}

function boundWords(size: number, { by, weighed }: NonNullable<Departure["bound"]>): string {
  if (by === "worker") return "its worker takes no more at once";
  return `${weighed ? "" : "about "}${size} ${size === 1 ? "task fills" : "tasks fill"} ${by}`;
}
