/**
 * When a batch leaves, how large, and with which tasks. `decide` returns "send n", "wait until t" or "idle"; `compose`
 * the lengths that go together. Pure; milliseconds. The same code runs in production, `ferry plan` and the simulation.
 *
 * A batch is composed only when it leaves (late binding), so this is asked whenever a worker is free. A full batch
 * leaves at once; any other at
 *
 *   due = min( guard, cap, max(gate, eco) )
 *
 *   gate   the stagger. Workers that start together finish together, and a task that arrives just after waits a whole
 *          batch (p99 → 2S). Starts are spread as evenly as the workers' predicted free times allow, the taut string
 *          over them:
 *              gate = lastStart + max_i (free_i − lastStart) / (idle + i) / u
 *          While no worker runs gate = −∞: an idle fleet never waits.
 *   eco    the economic batch. Waiting for a larger batch saves fixed cost a and costs every task in it time; the
 *          balance is m = sqrt(2λκa / (1 + 2λb)),  reached after (m − 1)/λ. No wait when less than one arrival is
 *          expected within W.
 *   guard  the earliest deadline in the queue − S(n + 1) − margin, margin = max(5 ms, 3 · mean deviation of batches).
 *   cap    oldest + maxWaitMs: the longest wait while a worker is free.
 *
 *   preset     κ   u                                             W (patience)
 *   latency    0   1                                             –
 *   adaptive   1   1 up to 3 workers, 0.9 when S grows with n, else 0.8    S(B)/4
 *   eco        8   0.5                                           a quarter of the slack to the deadline
 *   fixed      full, or oldest + maxWaitMs; nothing is learned, nothing is guarded
 */
import type { DispatchReason } from "./task.ts";

export type PolicyName = "adaptive" | "latency" | "eco" | "fixed";

export interface ServiceCurve {
  readonly baseMs: number;
  readonly perTaskMs: number;
  /** Mean deviation of batches from the expectation. Default: 0. */
  readonly deviationMs?: number;
  msFor(size: number): number;
}

export interface View {
  /** Tasks that could leave in one batch now. */
  readonly queued: number;
  readonly oldestAt: number;
  readonly earliestDeadlineAt: number;
  readonly idle: number;
  /** Expected free times of busy workers, earliest first. */
  readonly freeAt: readonly number[];
  readonly lastStartAt: number;
  readonly arrivalsPerMs: number;
  readonly service: ServiceCurve;
}

export interface Limits {
  readonly policy: PolicyName;
  readonly maxBatchSize: number;
  readonly maxWaitMs: number;
}

export type Decision =
  | { readonly kind: "send"; readonly size: number; readonly reason: DispatchReason }
  /** Ask again at `until`, or once `unless` are queued. */
  | { readonly kind: "wait"; readonly until: number; readonly unless: number }
  | { readonly kind: "idle" };

const IDLE: Decision = { kind: "idle" };
const GUARD_MARGIN_MS = 5; // time for delivering the answer, however short the batch
const GUARD_DEVIATIONS = 3;
const FEW_WORKERS = 3;
/** A timer may fire this early; sending then beats another round. */
export const ROUNDING_MS = 0.05;

export function decide(view: View, limits: Limits, now: number): Decision {
  if (view.queued === 0 || view.idle === 0) return IDLE;
  const size = Math.min(view.queued, limits.maxBatchSize);
  if (size === limits.maxBatchSize) return { kind: "send", size, reason: "full" };
  const { at, reason } = limits.policy === "fixed" ? whenCapped(view, limits) : whenDue(view, limits, now);
  if (now >= at - ROUNDING_MS) return { kind: "send", size, reason };
  return { kind: "wait", until: at, unless: nextSize(view, limits) };
}

interface Due {
  readonly at: number;
  readonly reason: DispatchReason;
}

function whenCapped(view: View, limits: Limits): Due {
  return { at: view.oldestAt + limits.maxWaitMs, reason: "wait" };
}

function whenDue(view: View, limits: Limits, now: number): Due {
  const worthIt = Math.max(staggerGate(view, limits, now), economicGate(view, limits));
  const margin = Math.max(GUARD_MARGIN_MS, GUARD_DEVIATIONS * (view.service.deviationMs ?? 0));
  const guard = view.earliestDeadlineAt - view.service.msFor(view.queued + 1) - margin;
  const capped = whenCapped(view, limits);
  if (worthIt <= guard && worthIt <= capped.at) return { at: worthIt, reason: "idle" };
  return guard < capped.at ? { at: guard, reason: "deadline" } : capped;
}

function staggerGate(view: View, limits: Limits, now: number): number {
  if (view.freeAt.length === 0) return -Infinity;
  let gap = 0;
  for (let i = 0; i < view.freeAt.length; i++) {
    const free = Math.max(now, view.freeAt[i]!);
    gap = Math.max(gap, (free - view.lastStartAt) / (view.idle + i + 1));
  }
  return view.lastStartAt + gap / spread(view, limits);
}

/** u: below 1 starts are further apart than the fleet needs, which fills batches better. */
function spread(view: View, limits: Limits): number {
  if (limits.policy === "latency") return 1;
  if (limits.policy === "eco") return 0.5;
  if (view.idle + view.freeAt.length <= FEW_WORKERS) return 1;
  const grows = view.service.msFor(limits.maxBatchSize) > 1.25 * view.service.msFor(1);
  return grows ? 0.9 : 0.8;
}

function economicGate(view: View, limits: Limits): number {
  const rate = view.arrivalsPerMs;
  const full = view.service.msFor(limits.maxBatchSize);
  const patience =
    limits.policy === "eco" ? Math.max(0, view.earliestDeadlineAt - view.oldestAt - full) / 4 : full / 4;
  if (rate * patience < 1) return -Infinity;
  const size = economicSize(view, limits);
  return view.queued >= size ? -Infinity : view.oldestAt + Math.min(patience, (size - 1) / rate);
}

const KAPPA: Record<PolicyName, number> = { latency: 0, adaptive: 1, eco: 8, fixed: 0 };

/** m: the batch size at which one more task's wait costs as much as it saves. */
function economicSize({ arrivalsPerMs: rate, service }: View, limits: Limits): number {
  const saving = 2 * rate * KAPPA[limits.policy] * service.baseMs;
  return Math.min(limits.maxBatchSize, Math.sqrt(saving / (1 + 2 * rate * service.perTaskMs)));
}

/** The depth at which the decision may change before the time is up. */
function nextSize(view: View, limits: Limits): number {
  const size = economicSize(view, limits);
  return view.queued < size ? Math.ceil(size) : limits.maxBatchSize;
}

/** Lengths from `least` to `most` tokens, both included. */
export interface LengthRange {
  readonly least: number;
  readonly most: number;
}

/** Milliseconds of a padded batch: base + n · (perRow + longest · perToken). */
export interface PaddedCost {
  readonly baseMs: number;
  readonly perRowMs: number;
  readonly perTokenMs: number;
}

const CLASSES = 8 * 32; // eight to a doubling
/** All leave at once below this share of the time of two batches: the second could still be joined by others. */
const TOGETHER = 0.9;

/**
 * Which lengths share a batch with the first of `lengths`, which leads it: the range around it that does the most work
 * per millisecond,
 *
 *   work of a task  = perRow + length · perToken + base / max      its cost in a full batch of its own length
 *   value of a range = Σ work / (base + n · (perRow + longest · perToken)),   n = min(tasks in it, max)
 *
 * A full batch of one length has the value 1, the most there is. Where everything that waits would fit into one batch
 * in less time than that range and the rest after it, all leave at once. The leader is always in it, so the order of service decides
 * when a task leaves at the latest, and this only who joins it.
 */
export function compose(lengths: readonly number[], max: number, cost: PaddedCost): LengthRange {
  const { baseMs, perRowMs, perTokenMs } = cost;
  const classes = classesOf(lengths);
  const { counts, totals, longest } = classes;
  const lead = classOf(lengths[0]!);
  const share = perRowMs + baseMs / max;
  const msOf = (rows: number, most: number): number => baseMs + rows * (perRowMs + most * perTokenMs);
  let best = { value: -1, low: lead, high: lead, count: 0 };
  let [above, aboveTokens] = [0, 0]; // tasks in the classes from the leader's up to `high`
  for (let high = lead; high <= classes.last; high++) {
    if (counts[high] === 0) continue;
    above += counts[high]!;
    aboveTokens += totals[high]!;
    let [count, tokens] = [above, aboveTokens];
    for (let low = lead; ;) {
      const rows = Math.min(count, max);
      const work = (rows / count) * (count * share + tokens * perTokenMs);
      const value = work / msOf(rows, longest[high]!);
      if (value > best.value) best = { value, low, high, count };
      if (count >= max) break;
      do low--;
      while (low >= classes.first && counts[low] === 0);
      if (low < classes.first) break;
      count += counts[low]!;
      tokens += totals[low]!;
    }
    if (above >= max) break;
  }
  const { low, high, count } = best;
  const rest = lengths.length - count;
  if (lengths.length <= max && rest > 0) {
    const longestLeft =
      high < classes.last ? longest[classes.last]! : longest.findLast((most, at) => at < low && most > 0)!;
    const all = msOf(lengths.length, longest[classes.last]!);
    if (all <= TOGETHER * (msOf(count, longest[high]!) + msOf(rest, longestLeft)))
      return { least: 1, most: longest[classes.last]! };
  }
  return { least: leastOf(low), most: longest[high]! };
}

interface LengthClasses {
  readonly counts: Int32Array;
  readonly totals: Float64Array;
  readonly longest: Float64Array;
  readonly first: number;
  readonly last: number;
}

function classesOf(lengths: readonly number[]): LengthClasses {
  const counts = new Int32Array(CLASSES);
  const totals = new Float64Array(CLASSES);
  const longest = new Float64Array(CLASSES);
  let [first, last] = [CLASSES, 0];
  for (const length of lengths) {
    const at = classOf(length);
    counts[at]!++;
    totals[at]! += length;
    if (length > longest[at]!) longest[at] = length;
    if (at < first) first = at;
    if (at > last) last = at;
  }
  return { counts, totals, longest, first, last };
}

/** Steps of 1/8 to 1/16 of the length. */
function classOf(length: number): number {
  const exponent = 31 - Math.clz32(length);
  return 8 * exponent + (((length / 2 ** exponent - 1) * 8) | 0);
}

function leastOf(at: number): number {
  return Math.ceil(2 ** (at >> 3) * (1 + (at & 7) / 8));
}
