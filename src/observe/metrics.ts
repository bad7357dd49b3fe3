/**
 * GET /metrics: every metric by its name. Names and labels are a contract; docs/metrics.md lists them, and a test
 * compares the two. Worker metrics cover this process, so sum them over processes. Queue depth, load, utilization and
 * desired workers cover the whole fleet in each process: take their maximum, not their sum.
 *
 * prom-client keeps the registry, prints it, and adds the Node metrics; it is loaded with the first scrape (20 ms).
 * Counting is ours (`metric-counts.ts`): a request's events cost 0.1 µs, against 1.5 µs with prom-client (1.1 µs with
 * cached children), which builds label text per observation. A scrape takes 1 ms with one model in three tiers, 10 ms
 * with fifty, and blocks the event loop. (`node bench/metrics.ts`, 2 cores of a shared machine.)
 *
 * Scrapers that ask for OpenMetrics get it, with a trace as exemplar in each bucket of ferry_request_seconds.
 * prom-client renames its counters permanently once printed in one format, so each format has its own registry over the
 * same metrics.
 */
import type { Metric, Registry, RegistryContentType } from "prom-client";
import { DISPATCH_REASONS } from "../core/task.ts";
import type { Routes } from "../gateway/server.ts";
import { type Events, SHED_REASONS, type WorkerState } from "./events.ts";
import { type Buckets, type MeasuredModel, MetricCounts } from "./metric-counts.ts";
import type { ProcessSample, ProcessSamples } from "./processes.ts";
import type { Counter, ModelSight, ProcessSight, Sight } from "./sight.ts";

export interface MetricsParts {
  readonly models: () => readonly MeasuredModel[];
  readonly tiers: readonly string[];
  readonly version: string;
  readonly events: Events;
  readonly sight: Sight;
  readonly processes: Pick<ProcessSamples, "take">;
  readonly more: readonly Counter[];
}

export interface Metrics {
  readonly routes: Routes;
  expose(accept?: string): Promise<{ readonly type: string; readonly text: string }>;
}

export function openMetrics(parts: MetricsParts): Metrics {
  const counts = new MetricCounts(parts.models, parts.tiers, parts.events);
  let opening: Promise<Registries> | undefined;
  const expose: Metrics["expose"] = async (accept = "") => {
    const { plain, open, look } = await (opening ??= openRegistries(parts, counts));
    look();
    const registry = accept.includes("application/openmetrics-text") ? open : plain;
    return { type: registry.contentType, text: await registry.metrics() };
  };
  const routes: Routes = {
    "/metrics": {
      GET: async (exchange) => {
        const { type, text } = await expose(exchange.header("accept"));
        exchange.sendBytes(type, Buffer.from(text));
      },
    },
  };
  return { routes, expose };
}

interface Registries {
  readonly plain: Registry<RegistryContentType>;
  readonly open: Registry<RegistryContentType>;
  /** Called before each scrape. */
  readonly look: () => void;
}

async function openRegistries(parts: MetricsParts, counts: MetricCounts): Promise<Registries> {
  const { Registry, collectDefaultMetrics } = await import("prom-client");
  const { families, look } = seen(parts);
  const plain = new Registry<RegistryContentType>();
  const open = new Registry<RegistryContentType>();
  open.setContentType(Registry.OPENMETRICS_CONTENT_TYPE);
  const more = parts.more.map((each) => single(each.name, each.help, () => each.read()));
  for (const family of [...counted(counts), ...measured(counts), ...families, ...more]) {
    plain.registerMetric(metricOf(family));
    open.registerMetric(metricOf({ ...family, name: openName(family) }));
  }
  const ofNode = new Registry();
  collectDefaultMetrics({ register: ofNode });
  for (const { name, type } of ofNode.getMetricsAsArray()) {
    const metric = ofNode.getSingleMetric(name)!;
    plain.registerMetric(renamed(metric, name));
    open.registerMetric(renamed(metric, openName({ name, type })));
  }
  return { plain, open, look };
}

/** OpenMetrics names a family without its samples' suffix. */
function openName({ name, type }: { readonly name: string; readonly type: unknown }): string {
  return type === "counter" ? name.replace(/_total$/, "") : name;
}

/** All that a registry asks of a metric is its name and `get`. */
function metricOf(family: Family): Metric {
  const { name, help, type } = family;
  const metric = { name, type, get: () => ({ name, help, type, values: family.read() }) };
  return metric as unknown as Metric;
}

/** Skips NaN, such as a mean over nothing between two quick scrapes. */
function renamed(metric: Metric, name: string): Metric {
  const { type } = metric as unknown as { type: string };
  const get = async (): Promise<object> => {
    const { values, ...rest } = await metric.get();
    return { ...rest, name, values: values.filter(({ value }) => !Number.isNaN(value)) };
  };
  return { name, type, get } as unknown as Metric;
}

type Labels = Readonly<Record<string, string | number>>;

interface Sample {
  readonly value: number;
  readonly labels: Labels;
  /** Labels shared by many lines; formatted once per object. */
  readonly sharedLabels?: Labels;
  /** Where it differs from the family's. */
  readonly metricName?: string;
  readonly exemplar?: { readonly labelSet: Labels; readonly value: number; readonly timestamp: number };
}

interface Family {
  readonly name: string;
  readonly help: string;
  readonly type: "counter" | "gauge" | "histogram";
  read(): Sample[];
}

const NONE: Labels = {};
const STATES: readonly WorkerState[] = ["idle", "busy", "draining", "down"];
const KINDS: readonly ProcessSight["durability"][] = ["none", "disk", "local", "replica"];

function measured(counts: MetricCounts): Family[] {
  return [
    histogram(
      "ferry_request_seconds",
      "From a request's first byte to its answer, of requests that waited for their outcome.",
      () => counts.pairs.map(({ labels, requestSeconds }) => [labels, requestSeconds]),
    ),
    histogram(
      "ferry_queue_seconds",
      "From a task's arrival in the queue until a batch with it left; every attempt counts from there.",
      () => counts.pairs.map(({ labels, queueSeconds }) => [labels, queueSeconds]),
    ),
    histogram("ferry_batch_size", "Tasks in a batch when it leaves.", () =>
      counts.models.map(({ labels, batchSize }) => [labels, batchSize]),
    ),
    histogram("ferry_worker_seconds", "One call to a worker, however it ended.", () =>
      counts.models.map(({ labels, workerSeconds }) => [labels, workerSeconds]),
    ),
  ];
}

function counted(counts: MetricCounts): Family[] {
  return [
    counter(
      "ferry_requests_total",
      "Requests of clients at their end, by HTTP status; 499: the client left. Empty labels are not known.",
      () =>
        counts.pairs.flatMap((pair) =>
          pair.statuses().map(([code, value]) => ({ labels: { code }, sharedLabels: pair.labels, value })),
        ),
    ),
    counter("ferry_batches_total", "Batches that left, by the reason why they left when they did.", () =>
      counts.models.flatMap(({ labels, batches }) => byReason(labels, DISPATCH_REASONS, batches)),
    ),
    counter(
      "ferry_grouping_seconds_total",
      "Worker time that batches of similar length saved or lost against order of arrival, as estimated.",
      () =>
        counts.models.flatMap(({ labels, savedSeconds, lostSeconds }) => [
          { labels: { effect: "saved" }, sharedLabels: labels, value: savedSeconds },
          { labels: { effect: "lost" }, sharedLabels: labels, value: lostSeconds },
        ]),
    ),
    counter(
      "ferry_arrivals_total",
      "Tasks that asked for a worker: queued, or refused for lack of one.",
      () =>
        counts.models.flatMap(({ tiers }) =>
          tiers
            .slice(0, -1)
            .map(({ labels, arrivals }) => ({ labels: NONE, sharedLabels: labels, value: arrivals })),
        ),
    ),
    counter("ferry_shed_total", "Requests refused at the door, by reason.", () =>
      counts.tiers.flatMap((tier, at) => byReason({ tier }, SHED_REASONS, counts.shed[at]!)),
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

/** One look per scrape: `look` is called first, then every family reads its result. */
function seen(parts: MetricsParts): { families: Family[]; look: () => void } {
  const { tiers, sight, version, processes } = parts;
  let models: readonly ModelSight[] = [];
  let samples: readonly ProcessSample[] = [];
  let process = sight.process();
  const { role, engine } = process;
  const gauge = (name: string, help: string, read: () => Sample[]): Family => {
    return { name, help, type: "gauge", read };
  };
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
    gauge(
      "ferry_padding_ratio",
      "Computed over useful cells of the batches that this process measured, fading over a minute.",
      () =>
        models.flatMap(({ name, paddingRatio: value }) =>
          value === undefined ? [] : [{ labels: { model: name }, value }],
        ),
    ),
    gauge("ferry_dead_letters_kept", "Dead letters that are kept now; of the whole fleet.", () => [
      { labels: NONE, value: process.deadLetters },
    ]),
    gauge("ferry_durability", "1 for where an accepted task is kept now, 0 for the other kinds.", () =>
      KINDS.map((kind) => ({ labels: { kind }, value: process.durability === kind ? 1 : 0 })),
    ),
    gauge("ferry_store_up", "Whether the store of tasks answers.", () => [
      { labels: NONE, value: process.reachable ? 1 : 0 },
    ]),
    counter("ferry_process_cpu_seconds_total", "CPU of each process of this Ferry, user and system.", () =>
      perProcess(samples, ({ cpuSeconds }) => cpuSeconds),
    ),
    gauge("ferry_process_resident_bytes", "Resident memory of each process of this Ferry.", () =>
      perProcess(samples, ({ residentBytes }) => residentBytes),
    ),
    gauge(
      "ferry_process_loop_delay_seconds",
      "Longest delay of the event loop of each process of this Ferry since the last scrape.",
      () => perProcess(samples, ({ loopDelayMs }) => loopDelayMs / 1000),
    ),
    gauge("ferry_build_info", "1, with what this process is as labels.", () => [
      { labels: { version, role, engine }, value: 1 },
    ]),
  ];
  const look = (): void => {
    models = sight.models();
    process = sight.process();
    samples = processes.take();
  };
  return { families, look };
}

function perProcess(samples: readonly ProcessSample[], value: (sample: ProcessSample) => number): Sample[] {
  return samples.map((sample) => ({ labels: { process: sample.process }, value: value(sample) }));
}

function single(name: string, help: string, value: () => number): Family {
  return counter(name, help, () => [{ labels: NONE, value: value() }]);
}

function counter(name: string, help: string, read: () => Sample[]): Family {
  return { name, help, type: "counter", read };
}

function byReason(sharedLabels: Labels, reasons: readonly string[], values: Float64Array): Sample[] {
  return reasons.map((reason, at) => ({ labels: { reason }, sharedLabels, value: values[at]! }));
}

function workerSamples({ name, workers }: ModelSight): Sample[] {
  const own = workers.filter((worker) => worker.own);
  return STATES.map((state) => ({
    labels: { model: name, state },
    value: own.filter((worker) => worker.state === state).length,
  }));
}

function histogram(name: string, help: string, series: () => [Labels, Buckets | undefined][]): Family {
  const read = (): Sample[] =>
    series().flatMap(([sharedLabels, buckets]): Sample[] => {
      if (buckets === undefined) return [];
      const upTo = buckets.upTo();
      const lines = [...buckets.bounds, "+Inf"].map((le, at): Sample => {
        const sample = { metricName: `${name}_bucket`, labels: { le }, sharedLabels, value: upTo[at]! };
        const exemplar = buckets.exemplars[at];
        if (exemplar === undefined) return sample;
        const { traceId, value, at: instant } = exemplar;
        return { ...sample, exemplar: { labelSet: { trace_id: traceId }, value, timestamp: instant / 1000 } };
      });
      const sum = { metricName: `${name}_sum`, labels: NONE, sharedLabels, value: buckets.sum };
      const count = { metricName: `${name}_count`, labels: NONE, sharedLabels, value: upTo.at(-1)! };
      return [...lines, sum, count];
    });
  return { name, help, type: "histogram", read };
}
