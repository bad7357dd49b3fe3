/**
 * How many tasks a worker may be given in one call, and which of those that were claimed for it ride.
 *
 *   most = min( maxBatchSize, what the worker takes, what the budgets hold of tasks of the usual weight )
 *
 * The engine counts tasks and does not weigh them: on Redis their inputs are fetched only after they were claimed. So a
 * claim is made by `most`, and weighed when it is there. What is beyond `maxBatchTokens` or `maxBatchBytes`, or beyond
 * what the worker takes by now, goes back to its place in the queue at once, with no attempt counted, and the rest
 * leaves without waiting for that. Running it as a second call on the same worker would be no better: that call is the
 * rest of a batch and nearly empty, where in the queue the next tasks join it; it holds a worker while others may
 * be idle; and its answers, its lateness and its bisection would be those of several batches under one id.
 *
 * Tasks are taken in the order of the claim as far as they fit, and the first always rides, however heavy. A task that
 * does not fit may be overtaken by lighter ones behind it, which fills batches better; so may the last tier's share,
 * which stands at the end of a claim. Every tenth time that the longest-waiting was left behind, it goes first.
 *
 * The usual weight is learned from what was sent; a task that is heavier than a whole budget counts as the budget.
 * Without budgets nothing is weighed.
 */
import { FillEstimate } from "../core/estimate.ts";
import { estimateTokens, inputBytes, WeightEstimate } from "../core/weight.ts";
import type { Json } from "../core/task.ts";
import type { ClaimedTask } from "../engine/engine.ts";
import { Overtaken } from "./overtaken.ts";
import type { Departure } from "./words.ts";
import type { PoolWorker as Slot } from "../workers/worker.ts";

export interface SeatRules {
  readonly maxBatchSize: number;
  /** Left out: no budget. */
  readonly maxBatchTokens?: number | undefined;
  readonly maxBatchBytes?: number | undefined;
}

/** What keeps a batch below `maxBatchSize`. */
export type Bound = "maxBatchTokens" | "maxBatchBytes" | "worker";

export interface Fitted {
  readonly ride: readonly ClaimedTask[];
  readonly left: readonly ClaimedTask[];
  /** What the first of those that were left did not fit into; undefined when all ride. */
  readonly bound: Bound | undefined;
}

const NOBODY: readonly never[] = [];

class Budget {
  readonly bound: Bound;
  readonly most: number;
  readonly #weigh: (input: Json) => number;
  readonly #usual = new WeightEstimate();
  #taken = 0;

  constructor(bound: Bound, most: number, weigh: (input: Json) => number) {
    this.bound = bound;
    this.most = most;
    this.#weigh = weigh;
  }

  /** Tasks of the usual weight. */
  get tasks(): number {
    return this.#usual.within(this.most);
  }

  weigh({ task }: ClaimedTask): number {
    return this.#weigh(task.input);
  }

  holds(weight: number): boolean {
    return this.#taken + weight <= this.most;
  }

  take(weight: number): void {
    this.#taken += weight;
  }

  /** So many tasks ride: the next batch is empty. */
  close(tasks: number): void {
    this.#usual.learn(Math.min(this.#taken, this.most), tasks);
    this.#taken = 0;
  }
}

export class Seats {
  #maxBatchSize = 1;
  #budgets: readonly Budget[] = [];
  readonly #fill = new FillEstimate();
  readonly #overtaken = new Overtaken();

  constructor(rules: SeatRules) {
    this.retune(rules);
  }

  /** What was learned of weights is of the old budgets. */
  retune({ maxBatchSize, maxBatchTokens, maxBatchBytes }: SeatRules): void {
    this.#maxBatchSize = maxBatchSize;
    const budgets: Budget[] = [];
    if (maxBatchTokens !== undefined)
      budgets.push(new Budget("maxBatchTokens", maxBatchTokens, estimateTokens));
    if (maxBatchBytes !== undefined) budgets.push(new Budget("maxBatchBytes", maxBatchBytes, inputBytes));
    this.#budgets = budgets;
  }

  /** The most tasks that it may be given now; left out: a worker that takes as many as there may be. */
  most(slot?: Slot): number {
    let most = Math.min(this.#maxBatchSize, slot?.takes ?? Infinity);
    for (const budget of this.#budgets) most = Math.min(most, budget.tasks);
    return most;
  }

  /** What keeps a batch of `size` for it below `maxBatchSize`; undefined when that is something else. */
  boundOf(slot: Slot, size: number): Departure["bound"] {
    if (size >= this.#maxBatchSize || size !== this.most(slot)) return undefined;
    if (size === slot.takes) return { by: "worker", weighed: false };
    return { by: this.#budgets.find(({ tasks }) => tasks === size)!.bound, weighed: false };
  }

  /** Seats that are taken in its batches while tasks queue up. */
  usual(slot?: Slot): number {
    return Math.max(1, this.#fill.share * this.most(slot));
  }

  /** A batch of `size` left that could have held `most`; `waiting` is what waited before. */
  learn(size: number, waiting: number, most: number): void {
    this.#fill.learn(size, waiting, most);
  }

  /** Which of them its worker is given in one call. */
  fit(claimed: readonly ClaimedTask[], slot: Slot): Fitted {
    const room = slot.takes;
    if (this.#budgets.length === 0) {
      if (claimed.length <= room) return { ride: claimed, left: NOBODY, bound: undefined };
      return { ride: claimed.slice(0, room), left: claimed.slice(room), bound: "worker" };
    }
    const ride: ClaimedTask[] = [];
    const left: ClaimedTask[] = [];
    let bound: Bound | undefined;
    for (const each of this.#inTurn(claimed)) {
      const full = ride.length >= room ? "worker" : this.#take(each, ride.length === 0);
      if (full === undefined) ride.push(each);
      else left.push(each);
      bound ??= full;
    }
    for (const budget of this.#budgets) budget.close(ride.length);
    if (left.length > 0 && left.includes(oldestOf(claimed))) this.#overtaken.again();
    return { ride, left, bound };
  }

  /** Takes it into the batch, the first in any case; or says which budget does not hold it. */
  #take(claimed: ClaimedTask, first: boolean): Bound | undefined {
    const weights = this.#budgets.map((budget) => budget.weigh(claimed));
    const full = first ? undefined : this.#budgets.find((budget, at) => !budget.holds(weights[at]!));
    if (full !== undefined) return full.bound;
    this.#budgets.forEach((budget, at) => budget.take(weights[at]!));
    return undefined;
  }

  #inTurn(claimed: readonly ClaimedTask[]): readonly ClaimedTask[] {
    if (!this.#overtaken.due || claimed.length < 2) return claimed;
    this.#overtaken.served();
    const oldest = oldestOf(claimed);
    return [oldest, ...claimed.filter((each) => each !== oldest)];
  }
}

function oldestOf(claimed: readonly ClaimedTask[]): ClaimedTask {
  return claimed.reduce((one, other) => (other.queuedAt < one.queuedAt ? other : one));
}
