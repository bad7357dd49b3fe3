/**
 * Counters of the metrics, from events.
 *
 *   requests          each client request at its end, by status
 *   requestSeconds    requests that waited for their outcome: no 202, polls or refusals
 *   queueSeconds      each task when its batch leaves, since it was queued
 *   batchSize         each batch when it leaves, with its reason
 *   workerSeconds     each worker call when it ends, however it ends
 *   savedSeconds      each measured batch of a padded model when it has ended: expected time in order of arrival,
 *                     minus that of the batch as it was made; where that is negative, it counts as lostSeconds
 *   arrivals          tasks that asked for a worker: queued, or refused for lack of capacity
 *
 * Labels are bounded by the config: an unknown model or tier counts under "". A model removed by a reload is forgotten;
 * the others keep their counts.
 */
import { DISPATCH_REASONS } from "../core/task.ts";
import {
  type AnsweredRequest,
  askedForWorker,
  type EventFields,
  type Events,
  SHED_REASONS,
} from "./events.ts";

export interface MeasuredModel {
  readonly name: string;
  readonly maxBatchSize: number;
  readonly caches: boolean;
}

/**
 * Seconds, 1 ms to 10 s; fine between 100 and 200 ms, where a 100 ms batch plus its wait meets or misses a goal. 0.5, 1
 * and 4 s are alert thresholds and default timeouts.
 */
export const LATENCY_BOUNDS: readonly number[] = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.11, 0.12, 0.13, 0.15, 0.175, 0.2, 0.25, 0.3, 0.4,
  0.5, 0.75, 1, 2, 3, 4, 10,
];

export interface Exemplar {
  readonly traceId: string;
  readonly value: number;
  /** ms since 1970. */
  readonly at: number;
}

/** One series of a Prometheus histogram. Bounds are inclusive; the last bucket holds the rest. */
export class Buckets {
  sum = 0;
  readonly bounds: readonly number[];
  readonly #counts: Float64Array;
  /** By bucket: the last traced value. */
  readonly exemplars: (Exemplar | undefined)[] = [];

  /** `bounds` must ascend. */
  constructor(bounds: readonly number[]) {
    this.bounds = bounds;
    this.#counts = new Float64Array(bounds.length + 1);
  }

  /** `traceId` and `at` only for a traced value. */
  observe(value: number, traceId = "", at = 0): void {
    const { bounds } = this;
    let low = 0;
    let high = bounds.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (value <= bounds[middle]!) high = middle;
      else low = middle + 1;
    }
    this.#counts[low]!++;
    this.sum += value;
    if (traceId !== "") this.exemplars[low] = { traceId, value, at };
  }

  /** Cumulative counts per bound; the last is the total. */
  upTo(): number[] {
    let total = 0;
    return Array.from(this.#counts, (count) => (total += count));
  }
}

const FIRST_STATUS = 100;
const STATUSES = 500;

/** Of one model and tier. Undefined: never counted, and not exposed. */
class TierCounts {
  readonly labels: { readonly model: string; readonly tier: string };
  arrivals = 0;
  requestSeconds: Buckets | undefined;
  queueSeconds: Buckets | undefined;
  /** By status - 100. */
  #statuses: Float64Array | undefined;

  constructor(model: string, tier: string) {
    this.labels = { model, tier };
  }

  answered(status: number): void {
    (this.#statuses ??= new Float64Array(STATUSES))[status - FIRST_STATUS]!++;
  }

  statuses(): [status: number, count: number][] {
    const all = [...(this.#statuses ?? [])].map((count, at): [number, number] => [FIRST_STATUS + at, count]);
    return all.filter(([, count]) => count > 0);
  }
}

class ModelCounts {
  readonly labels: { readonly model: string };
  caches = false;
  /** By tier; the last is for unknown tiers. */
  readonly tiers: readonly TierCounts[];
  readonly batchSize: Buckets;
  readonly workerSeconds = new Buckets(LATENCY_BOUNDS);
  readonly batches = new Float64Array(DISPATCH_REASONS.length);
  savedSeconds = 0;
  lostSeconds = 0;

  constructor(model: string, tiers: readonly string[], sizes: readonly number[]) {
    this.labels = { model };
    this.tiers = [...tiers, ""].map((tier) => new TierCounts(model, tier));
    this.batchSize = new Buckets(sizes);
  }
}

export class MetricCounts {
  readonly tiers: readonly string[];
  hits = 0;
  misses = 0;
  collapsed = 0;
  retries = 0;
  dead = 0;
  lost = 0;
  /** By tier, then by reason. */
  readonly shed: readonly Float64Array[];
  readonly #rules: () => readonly MeasuredModel[];
  /** From the models at startup: the buckets of a series never change. */
  readonly #sizes: readonly number[];
  readonly #tierAt: ReadonlyMap<string, number>;
  readonly #unknown: ModelCounts;
  #byName = new Map<string, ModelCounts>();

  constructor(models: () => readonly MeasuredModel[], tiers: readonly string[], events: Events) {
    this.tiers = tiers;
    this.#rules = models;
    this.#sizes = sizeBounds(models());
    this.#tierAt = new Map(tiers.map((name, at) => [name, at]));
    this.#unknown = new ModelCounts("", tiers, this.#sizes);
    this.shed = [...tiers, ""].map(() => new Float64Array(SHED_REASONS.length));
    this.#follow();
    events.on("reloaded", () => this.#follow());
    events.on("request.answered", (request) => this.#answered(request));
    events.on("request.shed", (refused) => this.#refused(refused));
    events.on("task.queued", (task) => this.#queued(task));
    events.on("task.cached", () => this.hits++);
    events.on("task.joined", () => this.collapsed++);
    events.on("task.retried", () => this.retries++);
    events.on("task.dead", () => this.dead++);
    events.on("task.lost", () => this.lost++);
    events.on("batch.started", (batch) => this.#started(batch));
    events.on("batch.answered", ({ model, serviceMs }) =>
      this.#model(model).workerSeconds.observe(serviceMs / 1000),
    );
    events.on("batch.settled", ({ model, savedMs = 0 }) => {
      const counts = this.#model(model);
      if (savedMs >= 0) counts.savedSeconds += savedMs / 1000;
      else counts.lostSeconds -= savedMs / 1000;
    });
  }

  get models(): readonly ModelCounts[] {
    return [...this.#byName.values()];
  }

  /** By model and tier, unknown ones last. */
  get pairs(): readonly TierCounts[] {
    return [...this.models, this.#unknown].flatMap(({ tiers }) => tiers);
  }

  #follow(): void {
    const before = this.#byName;
    this.#byName = new Map();
    for (const { name, caches } of this.#rules()) {
      const counts = before.get(name) ?? new ModelCounts(name, this.tiers, this.#sizes);
      counts.caches = caches;
      this.#byName.set(name, counts);
    }
  }

  #answered({ model, tier, status, ending, code, latencyMs, startedAt, trace }: AnsweredRequest): void {
    const counts = this.#model(model).tiers[this.#tier(tier)]!;
    counts.answered(status);
    if (ending === undefined && code !== "DEADLINE_EXCEEDED") return;
    counts.requestSeconds ??= new Buckets(LATENCY_BOUNDS);
    if (trace === undefined) counts.requestSeconds.observe(latencyMs / 1000);
    else counts.requestSeconds.observe(latencyMs / 1000, trace.traceId, startedAt + latencyMs);
  }

  #refused({ model, tier, reason }: EventFields["request.shed"]): void {
    const at = this.#tier(tier);
    this.shed[at]![SHED_REASONS.indexOf(reason)]!++;
    if (askedForWorker(reason)) this.#model(model).tiers[at]!.arrivals++;
  }

  #queued({ model, tier }: EventFields["task.queued"]): void {
    const counts = this.#model(model);
    (counts.tiers[tier] ?? counts.tiers.at(-1)!).arrivals++;
    if (counts.caches) this.misses++;
  }

  #started({ model, batch, tasks }: EventFields["batch.started"]): void {
    const { tiers, batchSize, batches } = this.#model(model);
    batchSize.observe(tasks.length);
    batches[DISPATCH_REASONS.indexOf(batch.reason)]!++;
    const { startedAt } = batch;
    for (const { task, queuedAt } of tasks) {
      const counts = tiers[task.tier] ?? tiers.at(-1)!;
      counts.queueSeconds ??= new Buckets(LATENCY_BOUNDS);
      // The store's clock may be ahead of ours.
      counts.queueSeconds.observe(startedAt > queuedAt ? (startedAt - queuedAt) / 1000 : 0);
    }
  }

  #model(name: string): ModelCounts {
    return this.#byName.get(name) ?? this.#unknown;
  }

  #tier(name: string): number {
    return this.#tierAt.get(name) ?? this.tiers.length;
  }
}

/** 1, 2, 4 … max/4, then eighths of max, max - 1, max. The same for all models, so that they can be summed. */
export function sizeBounds(models: readonly { readonly maxBatchSize: number }[]): number[] {
  const max = Math.max(1, ...models.map(({ maxBatchSize }) => maxBatchSize));
  const bounds = new Set([max - 1, max]);
  for (let size = 1; size <= max / 4; size *= 2) bounds.add(size);
  for (let eighth = 2; eighth < 8; eighth++) bounds.add(Math.round((max * eighth) / 8));
  return [...bounds].filter((size) => size >= 1).sort((a, b) => a - b);
}
