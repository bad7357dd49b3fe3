/**
 * What metrics count, from events. Listens and counts; nothing else.
 *
 * Models and tiers come from the config, so a label set is a small integer: model × tiers + tier, where the
 * last row stands for a model, and the last column for a tier, that is not known (its label is ""). Every
 * array has its size from the start, whatever clients send; statuses lie in 100..599.
 *
 * What is measured, and when:
 *
 *   requests          each request of a client at its end, by status
 *   requestSeconds    those that waited for their outcome: neither 202, nor polls, nor refusals
 *   queueSeconds      each task of a batch when that leaves: from the queue's door to there
 *   batchSize         each batch when it leaves, beside its reason
 *   workerSeconds     each call to a worker when it ends, however it ends
 *   arrivals          tasks that asked for a worker: queued, or refused for lack of one
 */
import { DISPATCH_REASONS } from "../core/task.ts";
import {
  type AnsweredRequest,
  askedForWorker,
  type EventFields,
  type Events,
  SHED_REASONS,
} from "./events.ts";
import { Spread } from "./spread.ts";

export interface MeasuredModel {
  readonly name: string;
  readonly maxBatchSize: number;
  /** Whether outcomes are kept for later. */
  readonly caches: boolean;
}

/**
 * Seconds. From 1 ms to 10 s, fine between 100 and 200 ms: there a batch of 100 ms and its wait end up, and
 * there a goal is met or missed. 0.5, 1 and 4 s are where alerts and default timeouts are.
 */
export const LATENCY_BOUNDS: readonly number[] = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.11, 0.12, 0.13, 0.15, 0.175, 0.2, 0.25, 0.3, 0.4,
  0.5, 0.75, 1, 2, 3, 4, 10,
];

const FIRST_STATUS = 100;
const STATUSES = 500;

export class MetricCounts {
  readonly models: readonly MeasuredModel[];
  readonly tiers: readonly string[];
  /** Labels of a pair: model and tier. */
  readonly pairs: readonly { readonly model: string; readonly tier: string }[];
  readonly requestSeconds: Spread;
  readonly queueSeconds: Spread;
  readonly batchSize: Spread;
  readonly workerSeconds: Spread;
  /** By pair. */
  readonly arrivals: Float64Array;
  /** By model, then by reason. */
  readonly batches: Float64Array;
  /** By tier, then by reason. */
  readonly shed: Float64Array;
  hits = 0;
  misses = 0;
  collapsed = 0;
  retries = 0;
  dead = 0;
  lost = 0;
  readonly #modelAt = new Map<string, number>();
  readonly #tierAt = new Map<string, number>();
  readonly #columns: number;
  /** By pair, then by status; made when the pair has its first request. */
  readonly #statuses: (Float64Array | undefined)[];

  /** `before`: the same tiers, other models; what was counted for those that stay is kept, and so are its bounds. */
  constructor(models: readonly MeasuredModel[], tiers: readonly string[], before?: MetricCounts) {
    this.models = models;
    this.tiers = tiers;
    models.forEach(({ name }, at) => this.#modelAt.set(name, at));
    tiers.forEach((name, at) => this.#tierAt.set(name, at));
    this.#columns = tiers.length + 1;
    this.pairs = [...models.map(({ name }) => name), ""].flatMap((model) =>
      [...tiers, ""].map((tier) => ({ model, tier })),
    );
    const { length } = this.pairs;
    this.requestSeconds = new Spread(length, LATENCY_BOUNDS);
    this.queueSeconds = new Spread(length, LATENCY_BOUNDS);
    this.batchSize = new Spread(models.length + 1, [...(before?.batchSize.bounds ?? sizeBounds(models))]);
    this.workerSeconds = new Spread(models.length + 1, LATENCY_BOUNDS);
    this.arrivals = new Float64Array(length);
    this.batches = new Float64Array((models.length + 1) * DISPATCH_REASONS.length);
    this.shed = new Float64Array(this.#columns * SHED_REASONS.length);
    this.#statuses = Array.from({ length }, () => undefined);
    if (before !== undefined) this.#adopt(before);
  }

  /** Returns what ends it. */
  listen(events: Events): () => void {
    const ends = [
      events.on("request.answered", (request) => this.#answered(request)),
      events.on("request.shed", (refused) => this.#refused(refused)),
      events.on("task.queued", (task) => this.#queued(task)),
      events.on("task.cached", () => this.hits++),
      events.on("task.joined", () => this.collapsed++),
      events.on("task.retried", () => this.retries++),
      events.on("task.dead", () => this.dead++),
      events.on("task.lost", () => this.lost++),
      events.on("batch.started", (batch) => this.#started(batch)),
      events.on("batch.answered", ({ model, serviceMs }) =>
        this.workerSeconds.observe(this.#model(model), serviceMs / 1000),
      ),
    ];
    return () => ends.forEach((end) => end());
  }

  #adopt(before: MetricCounts): void {
    const { hits, misses, collapsed, retries, dead, lost } = before;
    Object.assign(this, { hits, misses, collapsed, retries, dead, lost });
    this.shed.set(before.shed);
    // The last row is that of models that are not known.
    const rows = this.models.map(({ name }, row) => [row, before.#modelAt.get(name)] as const);
    for (const [row, old] of [...rows, [this.models.length, before.models.length] as const]) {
      if (old === undefined) continue;
      const reasons = DISPATCH_REASONS.length;
      this.batches.set(before.batches.subarray(old * reasons, (old + 1) * reasons), row * reasons);
      this.batchSize.adopt(row, before.batchSize, old);
      this.workerSeconds.adopt(row, before.workerSeconds, old);
      for (let column = 0; column < this.#columns; column++) {
        const [pair, of] = [row * this.#columns + column, old * this.#columns + column];
        this.arrivals[pair] = before.arrivals[of]!;
        this.#statuses[pair] = before.#statuses[of];
        this.requestSeconds.adopt(pair, before.requestSeconds, of);
        this.queueSeconds.adopt(pair, before.queueSeconds, of);
      }
    }
  }

  /** Whether the pair is of a model and a tier that are configured. */
  known(pair: number): boolean {
    return pair % this.#columns < this.tiers.length && pair < this.models.length * this.#columns;
  }

  /** Calls `each` with every status that a pair's requests had, and how many had it. */
  statuses(pair: number, each: (status: number, count: number) => void): void {
    this.#statuses[pair]?.forEach((count, at) => {
      if (count > 0) each(FIRST_STATUS + at, count);
    });
  }

  #answered({ model, tier, status, ending, code, latencyMs, startedAt, trace }: AnsweredRequest): void {
    const column = this.#tierAt.get(tier) ?? this.tiers.length;
    const pair = this.#model(model) * this.#columns + column;
    (this.#statuses[pair] ??= new Float64Array(STATUSES))[status - FIRST_STATUS]!++;
    if (ending === undefined && code !== "DEADLINE_EXCEEDED") return;
    if (trace === undefined) this.requestSeconds.observe(pair, latencyMs / 1000);
    else this.requestSeconds.observeTraced(pair, latencyMs / 1000, trace.traceId, startedAt + latencyMs);
  }

  #refused({ model, tier, reason }: EventFields["request.shed"]): void {
    const column = this.#tierAt.get(tier) ?? this.tiers.length;
    this.shed[column * SHED_REASONS.length + SHED_REASONS.indexOf(reason)]!++;
    if (askedForWorker(reason)) this.arrivals[this.#model(model) * this.#columns + column]!++;
  }

  #queued({ model, tier }: EventFields["task.queued"]): void {
    const row = this.#model(model);
    this.arrivals[this.#pair(row, tier)]!++;
    if (this.models[row]?.caches === true) this.misses++;
  }

  #started({ model, batch, tasks }: EventFields["batch.started"]): void {
    const row = this.#model(model);
    this.batchSize.observe(row, tasks.length);
    this.batches[row * DISPATCH_REASONS.length + DISPATCH_REASONS.indexOf(batch.reason)]!++;
    const { startedAt } = batch;
    for (const { task, queuedAt } of tasks) {
      // The store's clock may be ahead of ours.
      const seconds = startedAt > queuedAt ? (startedAt - queuedAt) / 1000 : 0;
      this.queueSeconds.observe(this.#pair(row, task.tier), seconds);
    }
  }

  #model(name: string): number {
    return this.#modelAt.get(name) ?? this.models.length;
  }

  #pair(row: number, tier: number): number {
    return row * this.#columns + (tier < this.tiers.length ? tier : this.tiers.length);
  }
}

/**
 * 1, 2, 4 … a quarter of the largest batch, then its eighths, then one short of full, and full: how full
 * batches are is decided near the end. All models have the same, so that they can be added up.
 */
export function sizeBounds(models: readonly { readonly maxBatchSize: number }[]): number[] {
  const max = Math.max(1, ...models.map(({ maxBatchSize }) => maxBatchSize));
  const bounds = new Set([max - 1, max]);
  for (let size = 1; size <= max / 4; size *= 2) bounds.add(size);
  for (let eighth = 2; eighth < 8; eighth++) bounds.add(Math.round((max * eighth) / 8));
  return [...bounds].filter((size) => size >= 1).sort((a, b) => a - b);
}
