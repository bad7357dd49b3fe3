/**
 * Every metric of Ferry by its name, and how it is read. The names and labels are a contract; docs/metrics.md
 * lists them, and a test compares the two.
 *
 * Counters and histograms come from what was counted, gauges from the process as it is when it is scraped.
 * Workers are those of this process, so that sums over processes are right. What waits, load, utilization
 * and desired workers are about the whole fleet in each of its processes: take their maximum, not their sum.
 */
import { DISPATCH_REASONS } from "../core/task.ts";
import { SHED_REASONS, type WorkerState } from "./events.ts";
import type { MetricCounts } from "./metric-counts.ts";
import type { ModelSight, ProcessSight, Sight } from "./sight.ts";
import type { Spread } from "./spread.ts";

type Labels = Readonly<Record<string, string | number>>;

/** One line of the exposition. */
export interface Sample {
  readonly value: number;
  readonly labels: Labels;
  /** Labels that many lines have; printed once for each object. */
  readonly sharedLabels?: Labels;
  /** Where it is not the family's own. */
  readonly metricName?: string;
  readonly exemplar?: { readonly labelSet: Labels; readonly value: number; readonly timestamp: number };
}

export interface Family {
  readonly name: string;
  readonly help: string;
  readonly type: "counter" | "gauge" | "histogram";
  read(): Sample[];
}

const NONE: Labels = {};
const STATES: readonly WorkerState[] = ["idle", "busy", "draining", "down"];
const KINDS: readonly ProcessSight["durability"][] = ["none", "disk", "local", "replica"];

/** How long, and how many at once. */
export function measured(counts: MetricCounts): Family[] {
  const { models, pairs, requestSeconds, queueSeconds } = counts;
  const modelLabels = models.map(({ name }) => ({ model: name }));
  const each = (): number[] => models.map((_, at) => at);
  /** A pair that nobody used has no line: models × tiers × bounds would be many for nothing. */
  const used = (spread: Spread) => (): number[] =>
    [...pairs.keys()].filter((pair) => spread.upTo(pair).at(-1)! > 0);
  return [
    histogram(
      "ferry_request_seconds",
      "From a request's first byte to its answer, of requests that waited for their outcome.",
      requestSeconds,
      pairs,
      used(requestSeconds),
    ),
    histogram(
      "ferry_queue_seconds",
      "From a task's arrival in the queue until a batch with it left; every attempt counts from there.",
      queueSeconds,
      pairs,
      used(queueSeconds),
    ),
    histogram("ferry_batch_size", "Tasks in a batch when it leaves.", counts.batchSize, modelLabels, each),
    histogram(
      "ferry_worker_seconds",
      "One call to a worker, however it ended.",
      counts.workerSeconds,
      modelLabels,
      each,
    ),
  ];
}

export function counted(counts: MetricCounts): Family[] {
  const { models, tiers, pairs } = counts;
  const modelLabels = models.map(({ name }) => ({ model: name }));
  const tierLabels = tiers.map((tier) => ({ tier }));
  const known = [...pairs.keys()].filter((pair) => counts.known(pair));
  return [
    counter(
      "ferry_requests_total",
      "Requests of clients at their end, by HTTP status; 499: the client left. Empty labels are not known.",
      () => requestSamples(counts),
    ),
    counter("ferry_batches_total", "Batches that left, by the reason why they left when they did.", () =>
      grid(modelLabels, "reason", DISPATCH_REASONS, counts.batches),
    ),
    counter(
      "ferry_arrivals_total",
      "Tasks that asked for a worker: queued, or refused for lack of one.",
      () => known.map((at) => ({ labels: NONE, sharedLabels: pairs[at]!, value: counts.arrivals[at]! })),
    ),
    counter("ferry_shed_total", "Requests refused at the door, by reason.", () =>
      grid(tierLabels, "reason", SHED_REASONS, counts.shed),
    ),
    counter(
      "ferry_cache_total",
      "Answers from an earlier outcome (hit), and tasks queued without one (miss).",
      () => [
        { labels: { result: "hit" }, value: counts.hits },
        { labels: { result: "miss" }, value: counts.misses },
      ],
    ),
    single(
      "ferry_collapsed_total",
      "Requests that joined a task in flight with the same work.",
      () => counts.collapsed,
    ),
    single("ferry_retries_total", "Tasks that will be tried again.", () => counts.retries),
    single("ferry_dead_letters_total", "Tasks that became dead letters.", () => counts.dead),
    single(
      "ferry_lost_total",
      "Accepted tasks that can no longer be answered; must stay 0.",
      () => counts.lost,
    ),
  ];
}

/** Looks once a scrape: `look` is called first, then every family reads what was seen. */
export function seen(tiers: readonly string[], sight: Sight): { families: Family[]; look: () => void } {
  let models: readonly ModelSight[] = [];
  let process: ProcessSight | undefined;
  const gauge = (name: string, help: string, read: () => Sample[]): Family => ({
    name,
    help,
    type: "gauge",
    read,
  });
  const perModel = (name: string, help: string, value: (model: ModelSight) => number): Family =>
    gauge(name, help, () => models.map((model) => ({ labels: { model: model.name }, value: value(model) })));
  const families = [
    gauge("ferry_queue_depth", "Tasks that wait; of the whole fleet.", () =>
      models.flatMap(({ name, queuedByTier }) =>
        tiers.map((tier, at) => ({ labels: { model: name, tier }, value: queuedByTier[at] ?? 0 })),
      ),
    ),
    perModel(
      "ferry_queue_oldest_seconds",
      "Age of the task that waits longest; of the whole fleet.",
      ({ oldestWaitMs }) => Math.max(0, oldestWaitMs) / 1000,
    ),
    gauge("ferry_workers", "Workers that this process runs, by state.", () => models.flatMap(workerSamples)),
    perModel(
      "ferry_worker_utilization",
      "Share of the last ten seconds in which workers ran a batch, full or not; of the whole fleet.",
      ({ utilization }) => utilization,
    ),
    perModel(
      "ferry_load",
      "Arrivals over what healthy workers can do with full batches; of the whole fleet.",
      ({ load }) => load,
    ),
    perModel(
      "ferry_desired_workers",
      "Workers that would hold the load at admission.targetUtilization; for the whole fleet.",
      ({ desiredWorkers }) => desiredWorkers,
    ),
    gauge("ferry_dead_letters_kept", "Dead letters that are kept now; of the whole fleet.", () => [
      { labels: NONE, value: process!.deadLetters },
    ]),
    gauge("ferry_durability", "1 for where an accepted task is kept now, 0 for the other kinds.", () =>
      KINDS.map((kind) => ({ labels: { kind }, value: process!.durability === kind ? 1 : 0 })),
    ),
    gauge("ferry_store_up", "Whether the store of tasks answers.", () => [
      { labels: NONE, value: process!.reachable ? 1 : 0 },
    ]),
  ];
  const look = (): void => {
    models = sight.models();
    process = sight.process();
  };
  return { families, look };
}

export function buildInfo(version: string, sight: Sight): Family {
  const { role, engine } = sight.process();
  return {
    name: "ferry_build_info",
    help: "1, with what this process is as labels.",
    type: "gauge",
    read: () => [{ labels: { version, role, engine }, value: 1 }],
  };
}

/** A counter without labels. */
export function single(name: string, help: string, value: () => number): Family {
  return counter(name, help, () => [{ labels: NONE, value: value() }]);
}

function counter(name: string, help: string, read: () => Sample[]): Family {
  return { name, help, type: "counter", read };
}

function requestSamples(counts: MetricCounts): Sample[] {
  const samples: Sample[] = [];
  counts.pairs.forEach((sharedLabels, pair) =>
    counts.statuses(pair, (code, value) => samples.push({ labels: { code }, sharedLabels, value })),
  );
  return samples;
}

function grid(
  rows: readonly Labels[],
  name: string,
  columns: readonly string[],
  values: Float64Array,
): Sample[] {
  return rows.flatMap((sharedLabels, row) =>
    columns.map((column, at) => ({
      labels: { [name]: column },
      sharedLabels,
      value: values[row * columns.length + at]!,
    })),
  );
}

function workerSamples({ name, workers }: ModelSight): Sample[] {
  const own = workers.filter((worker) => worker.own);
  return STATES.map((state) => ({
    labels: { model: name, state },
    value: own.reduce((sum, worker) => sum + (worker.state === state ? 1 : 0), 0),
  }));
}

function histogram(
  name: string,
  help: string,
  spread: Spread,
  labels: readonly Labels[],
  series: () => number[],
): Family {
  const edges = [...spread.bounds, "+Inf"].map((le) => ({ le }));
  const read = (): Sample[] =>
    series().flatMap((at): Sample[] => {
      const sharedLabels = labels[at]!;
      const upTo = spread.upTo(at);
      const buckets = edges.map((edge, n): Sample => {
        const sample = { metricName: `${name}_bucket`, labels: edge, sharedLabels, value: upTo[n]! };
        const exemplar = spread.exemplar(at, n);
        if (exemplar === undefined) return sample;
        const { traceId, value, at: instant } = exemplar;
        return { ...sample, exemplar: { labelSet: { trace_id: traceId }, value, timestamp: instant / 1000 } };
      });
      buckets.push(
        { metricName: `${name}_sum`, labels: NONE, sharedLabels, value: spread.sum(at) },
        { metricName: `${name}_count`, labels: NONE, sharedLabels, value: upTo.at(-1)! },
      );
      return buckets;
    });
  return { name, help, type: "histogram", read };
}
