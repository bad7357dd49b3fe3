/**
 * Per-second counters of one model, and what a frame shows of them. `Fold` listens and keeps the time; this only adds.
 * A request's time is split into queue (until its batch left), worker (until the outcome) and gateway (the rest:
 * reading, admitting, writing). A request that joined another's task gets only the part that passed while it was there;
 * a cached one gets neither queue nor worker time.
 */
import type { CurveReading } from "../../core/knee.ts";
import type { Outcome } from "../../core/task.ts";
import {
  type AnsweredRequest,
  askedForWorker,
  SHED_REASONS,
  type ShedReason,
  type TaskEnding,
} from "../events.ts";
import type { CostSight, ModelSight, WorkerSight } from "../sight.ts";
import { BatchBook } from "./batches.ts";
import type { CostFrame, CurveFrame, ModelFrame, RecentFigures, Slots } from "./frames.ts";
import { Latencies } from "./quantiles.ts";
import { COLUMN, rounded, SlotRing } from "./slots.ts";
import { type ProcessFacts, sayVerdict, type VerdictFacts } from "./verdict.ts";
import { RECENT_SECONDS, WorkerBook } from "./workers.ts";

export interface ShownModel {
  readonly name: string;
  readonly maxBatchSize: number;
  readonly maxWaitMs: number;
  readonly policy: string;
}

export interface EndedTask extends TaskEnding {
  readonly task: { readonly model: string };
  /** Answered from an earlier outcome. */
  readonly cached?: boolean;
  readonly outcome?: Outcome;
}

const SLOWEST = 0.05;
const RING = RECENT_SECONDS + 1;
const TOP_TENANTS = 10;
const QUARTER_HOUR_S = 900;

const SECOND_MS = 1000;

export class ModelFold {
  readonly rules: ShownModel;
  readonly slots: SlotRing;
  readonly workers: WorkerBook;
  readonly batches: BatchBook;
  readonly #tiers: readonly string[];
  readonly #target: number;
  readonly #tenants = new RefusedTenants();
  /** Ring by second: the current one and the ten before. */
  readonly #latencies = Array.from({ length: RING }, () => new Latencies());
  /** Tasks admitted, by tier and second; a ring like it. */
  readonly #admitted: readonly Float64Array[];
  #latency: Latencies;
  /** The last ten seconds merged; rebuilt for each frame. */
  readonly #lately = new Latencies();
  /** 429 and 503 replies of the current second. */
  #turnedAway = 0;
  /** Refusals of the previous second whose replies had not been sent when it ended. */
  #unanswered = 0;
  /** Worker time reported too late for the second it belongs to. */
  #owedMs = 0;
  #owedFilledMs = 0;

  constructor(
    rules: ShownModel,
    tiers: readonly string[],
    target: number,
    maxBatches: number,
    second: number,
    fleet: boolean,
  ) {
    this.rules = rules;
    this.#tiers = tiers;
    this.#target = target;
    this.slots = new SlotRing(tiers, second);
    this.workers = new WorkerBook(second);
    const { slots, workers } = this;
    this.batches = new BatchBook(rules.maxBatchSize, tiers.length, maxBatches, slots, workers, fleet);
    this.#admitted = tiers.map(() => new Float64Array(RING));
    this.#latency = this.#latencies[second % RING]!;
  }

  answered(request: AnsweredRequest): void {
    const { status, latencyMs, ending } = request;
    const now = this.slots.now;
    now[COLUMN.requests]! += 1;
    if (status === 503 || status === 429) this.#turnedAway++;
    else if (status >= 500) now[COLUMN.failed]! += 1;
    if (ending === undefined) {
      // It waited for an outcome that never came.
      if (status === 504) this.#latency.add(latencyMs, latencyMs, 0);
      return;
    }
    // The work was done before it arrived: all of its time is the gateway's.
    if (request.work === "cached") return this.#latency.add(latencyMs, 0, 0);
    const { startedAt } = request;
    const { queuedAt, batch, settledAt = startedAt } = ending;
    const left = batch === undefined ? settledAt : batch.startedAt;
    // Each part from the later of its own start and the request's.
    const queueMs = left - (queuedAt > startedAt ? queuedAt : startedAt);
    const workerMs = settledAt - (left > startedAt ? left : startedAt);
    this.#latency.add(
      latencyMs,
      queueMs > 0 ? (queueMs < latencyMs ? queueMs : latencyMs) : 0,
      workerMs > 0 ? (workerMs < latencyMs ? workerMs : latencyMs) : 0,
    );
  }

  /** A task of ours has ended in another process. */
  ended({ batch, cached, outcome, queuedAt, attempt, settledAt }: EndedTask): void {
    if (batch === undefined || settledAt === undefined || cached === true || outcome === undefined) return;
    // Any other ending may come long after the task's last batch.
    if (!outcome.ok && outcome.code !== "INPUT_REJECTED") return;
    this.batches.seen(batch, queuedAt, attempt, settledAt);
  }

  shed(tier: string, tenant: string, reason: ShedReason, retryAfterMs: number): void {
    const { now, shedNow } = this.slots;
    const why = SHED_REASONS.indexOf(reason);
    const place = this.#tiers.indexOf(tier);
    now[COLUMN.refused]! += 1;
    if (askedForWorker(reason)) now[COLUMN.arrivals]! += 1;
    if (place >= 0 && why >= 0) shedNow[place * SHED_REASONS.length + why]! += 1;
    this.#tenants.count(tenant, retryAfterMs);
  }

  queued(tier: number): void {
    const { now, second } = this.slots;
    now[COLUMN.arrivals]! += 1;
    const admitted = this.#admitted[tier];
    if (admitted !== undefined) admitted[second % RING]! += 1;
  }

  /** Ends the second. `workers`: how many report their batches here. Returns workers that went down or came back. */
  close(
    sight: ModelSight | undefined,
    workers: number,
    loopLateMs: number,
    now: number,
  ): readonly WorkerSight[] {
    const { slots } = this;
    this.batches.account((slots.second + 1) * SECOND_MS);
    this.#settleWorkerTime(workers);
    this.#settleRefusals();
    const columns = slots.now;
    const latency = this.#latency;
    columns[COLUMN.p50] = latency.quantile(0.5) ?? NaN;
    columns[COLUMN.p95] = latency.quantile(0.95) ?? NaN;
    columns[COLUMN.p99] = latency.quantile(0.99) ?? NaN;
    const slow = latency.slowest(SLOWEST);
    columns[COLUMN.slowQueueMs] = slow?.queueMs ?? NaN;
    columns[COLUMN.slowWorkerMs] = slow?.workerMs ?? NaN;
    columns[COLUMN.slowGatewayMs] = slow?.gatewayMs ?? NaN;
    columns[COLUMN.oldestWaitMs] = sight?.oldestWaitMs ?? 0;
    columns[COLUMN.load] = sight?.load ?? 0;
    columns[COLUMN.loopLateMs] = loopLateMs;
    for (let tier = 0; tier < this.#tiers.length; tier++) {
      slots.depthNow[tier] = sight?.queuedByTier[tier] ?? 0;
    }
    slots.close();
    this.#tenants.fade();
    const next = slots.second % RING;
    this.#latency = this.#latencies[next]!;
    this.#latency.clear();
    for (const admitted of this.#admitted) admitted[next] = 0;
    return this.workers.close(sight?.workers ?? [], now);
  }

  /** The machine slept: older data are no longer the last quarter of an hour. */
  skipTo(second: number): void {
    this.slots.skipTo(second);
    for (const latency of this.#latencies) latency.clear();
    for (const admitted of this.#admitted) admitted.fill(0);
    this.#latency = this.#latencies[second % RING]!;
  }

  frame(sight: ModelSight, facts: ProcessFacts, slots: Slots, now: number): Omit<ModelFrame, "batches"> {
    const recent = this.#recent(sight);
    const workers = sight.workers.map((worker) => this.workers.row(worker, now));
    const verdict = sayVerdict({
      model: this.rules,
      target: this.#target,
      process: facts,
      recent,
      workers,
      healthy: sight.healthy,
      queued: sight.queuedByTier.reduce((sum, depth) => sum + depth, 0),
      oldestWaitMs: sight.oldestWaitMs,
      arrivalsPerSecond: sight.arrivalsPerSecond,
      justNow: this.slots.now[COLUMN.requests]!,
      slowWorker: this.workers.slowest(
        sight.workers.map(({ name }) => name),
        now,
      ),
      ...this.#trouble(),
      grouped: sight.cost?.grouped === true,
      quarterHour: this.#quarterHour(),
    });
    return {
      verdict,
      recent,
      queues: this.#tiers.map((_, tier) => ({
        depth: sight.queuedByTier[tier] ?? 0,
        admittedPerSecond: rounded(this.#admittedPerSecond(tier)),
      })),
      oldestWaitMs: Math.round(sight.oldestWaitMs),
      workers,
      curve: sight.curve === undefined ? null : curveFrame(sight.curve),
      cost: costFrame(sight),
      slots,
      batchesLeftOut: 0,
      refusedTenants: this.#tenants.top(TOP_TENANTS),
    };
  }

  /**
   * Idle time is the remainder. Other processes' batches are reported when they end and may have begun seconds ago:
   * what does not fit into this second is carried over.
   */
  #settleWorkerTime(workers: number): void {
    const { now } = this.slots;
    const all = workers * SECOND_MS;
    const filled = now[COLUMN.filledMs]! + this.#owedFilledMs;
    const busy = now[COLUMN.filledMs]! + now[COLUMN.emptyMs]! + this.#owedMs;
    const counted = Math.max(0, workers === 0 ? busy : Math.min(busy, all));
    const share = busy > 0 ? Math.min(1, Math.max(0, filled / busy)) : 0;
    now[COLUMN.filledMs] = counted * share;
    now[COLUMN.emptyMs] = counted * (1 - share);
    now[COLUMN.idleMs] = Math.max(0, all - counted);
    // A worker that is gone must not leave a carry-over that can never be used up.
    this.#owedMs = Math.min(busy - counted, all * RECENT_SECONDS);
    this.#owedFilledMs = this.#owedMs * share;
  }

  /** Admission reports its own refusals. Replies 429/503 beyond those come from an unreachable store. */
  #settleRefusals(): void {
    const { now } = this.slots;
    const refused = now[COLUMN.refused]!;
    const more = this.#turnedAway - this.#unanswered - refused;
    now[COLUMN.refused]! += Math.max(0, more);
    this.#unanswered = Math.min(refused, Math.max(0, -more));
    this.#turnedAway = 0;
  }

  #recent(sight: ModelSight): RecentFigures {
    const { slots } = this;
    const sum = (column: number): number => slots.sum(column, RECENT_SECONDS);
    const latency = this.#lately;
    latency.clear();
    for (const each of this.#latencies) if (each !== this.#latency) latency.merge(each);
    const seconds = Math.max(1, Math.min(RECENT_SECONDS, slots.length));
    const [requests, refused, batches] = [sum(COLUMN.requests), sum(COLUMN.refused), sum(COLUMN.batches)];
    const orNull = (value: number | null): number | null => (value === null ? null : rounded(value));
    const slow = latency.slowest(SLOWEST);
    return {
      requestsPerSecond: rounded(requests / seconds),
      p50: orNull(latency.quantile(0.5)),
      p95: orNull(latency.quantile(0.95)),
      p99: orNull(latency.quantile(0.99)),
      slow: slow && {
        queueMs: rounded(slow.queueMs),
        workerMs: rounded(slow.workerMs),
        gatewayMs: rounded(slow.gatewayMs),
      },
      meanMs: orNull(latency.mean()),
      refusedShare: refused === 0 ? 0 : rounded(refused / Math.max(requests, refused)),
      load: rounded(sight.load),
      capacityPerSecond: Math.round(sight.capacityPerSecond),
      utilization: rounded(sight.utilization),
      fill: batches === 0 ? null : rounded(sum(COLUMN.tasks) / (batches * this.rules.maxBatchSize)),
      desiredWorkers: sight.desiredWorkers,
    };
  }

  #trouble(): Pick<VerdictFacts, "tasksPerSecond" | "retriedShare" | "fullShare" | "loopLateMs"> {
    const { slots } = this;
    const batches = slots.sum(COLUMN.batches, RECENT_SECONDS);
    const tasks = slots.sum(COLUMN.tasks, RECENT_SECONDS);
    const retried = slots.sum(COLUMN.retried, RECENT_SECONDS);
    return {
      tasksPerSecond: tasks / Math.max(1, Math.min(RECENT_SECONDS, slots.length)),
      retriedShare: retried === 0 ? 0 : retried / Math.max(tasks, retried),
      fullShare: batches === 0 ? 0 : slots.sum(COLUMN.full, RECENT_SECONDS) / batches,
      loopLateMs: slots.max(COLUMN.loopLateMs, RECENT_SECONDS),
    };
  }

  /** Undefined until 15 minutes have passed. */
  #quarterHour(): { idleShare: number; peakLoad: number } | undefined {
    const { slots } = this;
    if (slots.length < QUARTER_HOUR_S) return undefined;
    const sum = (column: number): number => slots.sum(column, QUARTER_HOUR_S);
    const idle = sum(COLUMN.idleMs);
    const all = idle + sum(COLUMN.filledMs) + sum(COLUMN.emptyMs);
    return { idleShare: all > 0 ? idle / all : 0, peakLoad: slots.max(COLUMN.load, QUARTER_HOUR_S) };
  }

  #admittedPerSecond(tier: number): number {
    const { second, length } = this.slots;
    const seconds = Math.min(RECENT_SECONDS, length);
    let sum = 0;
    for (let back = 1; back <= seconds; back++) sum += this.#admitted[tier]![(second - back) % RING]!;
    return sum / Math.max(1, seconds);
  }
}

function curveFrame({ points, knee, hint }: CurveReading): CurveFrame {
  return {
    points: points.map(({ size, ms, batches }) => [size, rounded(ms), batches] as const),
    knee:
      knee === undefined
        ? null
        : { size: knee.size, ms: rounded(knee.ms), perSecond: Math.round(knee.perSecond) },
    hint,
  };
}

function costFrame({ cost, paddingRatio }: ModelSight): CostFrame | null {
  if (cost === undefined || (cost.kind === "rows" && !cost.grouped)) return null;
  const { kind, grouped } = cost;
  return {
    kind,
    words: costWords(cost),
    paddingRatio: paddingRatio === undefined ? null : rounded(paddingRatio),
    grouped,
  };
}

export function costWords({ kind, baseMs, perRowMs, perTokenMs }: Omit<CostSight, "grouped">): string {
  const parts = [
    baseMs > 0 && time(baseMs),
    perRowMs > 0 && `${time(perRowMs)} a row`,
    perTokenMs > 0 && `${time(perTokenMs)} a token${kind === "padded" ? " of the padded batch" : ""}`,
  ];
  return parts.filter((part) => part !== false).join(" + ");
}

/** Two significant digits; microseconds below 0.1 ms. */
function time(ms: number): string {
  return ms < 0.1 ? `${Number((1000 * ms).toPrecision(2))} µs` : `${Number(ms.toPrecision(2))} ms`;
}

const MAX_TENANTS = 64;
const KEPT_PER_SECOND = Math.exp(-1 / 60);
const FORGOTTEN = 0.5;

interface Counter {
  tenant: string;
  times: number;
  retryAfterMs: number;
}

/**
 * Most refused tenants: the space-saving sketch with decay. An uncounted tenant replaces the one with the smallest
 * count and continues from it, so every tenant with more than 1/MAX_TENANTS of all refusals is included and no count is
 * too small. Each second a count loses 1/60, so it reads as "refusals in the last minute".
 */
export class RefusedTenants {
  readonly #counters: Counter[] = [];
  readonly #places = new Map<string, Counter>();

  count(tenant: string, retryAfterMs: number): void {
    let counter = this.#places.get(tenant);
    if (counter === undefined) {
      counter = this.#counters.length < MAX_TENANTS ? this.#add(tenant) : this.#replaceSmallest(tenant);
      this.#places.set(tenant, counter);
    }
    counter.times++;
    counter.retryAfterMs = retryAfterMs;
  }

  fade(): void {
    const counters = this.#counters;
    let kept = 0;
    for (const counter of counters) {
      counter.times *= KEPT_PER_SECOND;
      if (counter.times < FORGOTTEN) this.#places.delete(counter.tenant);
      else counters[kept++] = counter;
    }
    counters.length = kept;
  }

  top(most: number): (readonly [tenant: string, times: number, retryAfterMs: number])[] {
    const sorted = this.#counters.toSorted((a, b) => b.times - a.times);
    return sorted
      .slice(0, most)
      .map(({ tenant, times, retryAfterMs }) => [tenant, Math.round(times), Math.round(retryAfterMs)]);
  }

  #add(tenant: string): Counter {
    const counter = { tenant, times: 0, retryAfterMs: 0 };
    this.#counters.push(counter);
    return counter;
  }

  #replaceSmallest(tenant: string): Counter {
    let smallest = this.#counters[0]!;
    for (const counter of this.#counters) if (counter.times < smallest.times) smallest = counter;
    this.#places.delete(smallest.tenant);
    smallest.tenant = tenant;
    return smallest;
  }
}
