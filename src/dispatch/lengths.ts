/**
 * Whether a model's batches are made of inputs of similar length, and by which rules. With `lengths: auto` they are
 * while the model is seen to pad (`core/cost.ts`). Until that is known, some full batches are made of one length, so
 * that batches of different lengths can be compared.
 *
 * A task is examined once it is among the next `window`, and may be overtaken for `overtakeMs`, with μ tasks per ms:
 *
 *   window     = at most 8 batches, and what is served in an eighth of queueMs, but at least one batch
 *   overtakeMs = max( maxWaitMs, 4 · window / μ )      usually it has left after half of that
 */
import { type BatchShape, type CostEstimate, powerOfTwo, SHORT, unmeasured } from "../core/cost.ts";
import { compose, type LengthRange } from "../core/policy.ts";
import { estimateTokens } from "../core/weight.ts";
import type { ClaimedTask, Composed, Composition } from "../engine/engine.ts";
import type { ModelRules } from "./model-rules.ts";

const WINDOW = 8; // batches
const MAX_WINDOW = 2048; // tasks: bounds the cost of a choice
const QUEUE_SHARE = 1 / 8;
const OVERTAKE = 4; // times the usual time of a window
const EXPLORE_EVERY = 4; // one in this many batches from a queue of EXPLORE_FROM or a full batch, while undecided
const EXPLORE_FROM = 64;
const ALIKE = 1.5; // longest over shortest input of such a batch
const MEASURE_EVERY = 16; // one in this many batches, where the time does not follow lengths

export class LengthGrouping {
  readonly #rules: () => ModelRules;
  readonly #cost: CostEstimate;
  #batches = 0;
  #explored = 0;

  constructor(rules: () => ModelRules, cost: CostEstimate) {
    this.#rules = rules;
    this.#cost = cost;
  }

  /** Whether batches are made of similar lengths now. */
  get active(): boolean {
    const { lengths = "off" } = this.#rules();
    this.#cost.assumePadded = typeof lengths === "object";
    return lengths !== "off" && this.#cost.kind === "padded";
  }

  /** How long a task may be overtaken because of its length, at this pace; 0: not at all. */
  overtakeMs(perMs: number): number {
    return this.active ? this.#bounds(this.#rules().limits.maxBatchSize, perMs).overtakeMs : 0;
  }

  #bounds(most: number, perMs: number): Pick<Composition, "window" | "overtakeMs"> {
    const { queueMs = Infinity, limits } = this.#rules();
    const window = Math.min(MAX_WINDOW, WINDOW * most, Math.max(most, perMs * QUEUE_SHARE * queueMs));
    const passMs = perMs > 0 ? window / perMs : 0;
    return { window: Math.ceil(window), overtakeMs: Math.max(limits.maxWaitMs, OVERTAKE * passMs) };
  }

  /**
   * How to choose from `depth` tasks for a worker that takes `most`, where all take `perMs`; undefined: in order of
   * service.
   */
  composition(depth: number, most: number, perMs: number): Composition | undefined {
    const { active } = this;
    if (!active && !this.#explores(depth, most)) return undefined;
    return {
      ...this.#bounds(most, perMs),
      lengthOf: estimateTokens,
      choose: active ? (lengths) => this.#choose(lengths, most) : ([lead]) => similarTo(lead!),
    };
  }

  #explores(depth: number, most: number): boolean {
    const { lengths = "off" } = this.#rules();
    if (lengths === "off" || depth < Math.min(most, EXPLORE_FROM) || most < 2 || !this.#cost.undecided)
      return false;
    return ++this.#explored % EXPLORE_EVERY === 0;
  }

  #choose(lengths: readonly number[], most: number): LengthRange {
    const { lengths: classes } = this.#rules();
    const shortest = typeof classes === "object" ? 1 : SHORT;
    const padded = lengths.map((length) => this.paddedTo(Math.max(shortest, length)));
    const { least, most: longest } = compose(padded, most, this.#cost);
    if (typeof classes === "object")
      return { least: (classes.findLast((each) => each < least) ?? 0) + 1, most: longest };
    if (least <= SHORT) return { least: 1, most: longest };
    return { least: this.#cost.stepped ? least / 2 + 1 : least, most: longest };
  }

  /** The length at which the model computes a batch whose longest input is this one, as far as known. */
  paddedTo(length: number): number {
    const { lengths: classes } = this.#rules();
    // Longer than all classes: its own length.
    if (typeof classes === "object") return classes.find((each) => each >= length) ?? length;
    return this.#cost.stepped ? powerOfTwo(length) : length;
  }

  /** `composed`: how the batch was chosen, if not in order of service. */
  shapeOf(tasks: readonly ClaimedTask[], composed: Composed | undefined): BatchShape {
    const rows = tasks.length;
    const { kind, undecided } = this.#cost;
    const measured =
      composed !== undefined || kind !== "rows" || undecided || this.#batches++ % MEASURE_EVERY === 0;
    if (!measured) return unmeasured(rows);
    let [longest, total] = [1, 0];
    for (const { task, length } of tasks) {
      const tokens = length === 0 ? estimateTokens(task.input) : length;
      longest = Math.max(longest, tokens);
      total += tokens;
    }
    const shape = { rows, longest, total, inOrder: Math.max(1, composed?.inOrder ?? longest) };
    return typeof this.#rules().lengths === "object" ? this.padded(shape) : shape;
  }

  /** The same as the model computes it. */
  padded(shape: BatchShape): BatchShape {
    return { ...shape, longest: this.paddedTo(shape.longest), inOrder: this.paddedTo(shape.inOrder) };
  }

  /** Expected time of the batch of as many rows in order of arrival, minus that of this one. */
  savedMs(shape: BatchShape): number | undefined {
    if (shape.total === 0 || this.#cost.kind !== "padded") return undefined;
    return this.#cost.msOf({ ...shape, longest: shape.inOrder }) - this.#cost.msOf(shape);
  }
}

function similarTo(length: number): LengthRange {
  const least = Math.ceil(length / ALIKE);
  return { least: least <= SHORT ? 1 : least, most: Math.floor(Math.max(SHORT, length) * ALIKE) };
}
