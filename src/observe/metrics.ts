/**
 * GET /metrics: what Prometheus scrapes. prom-client keeps the registry, prints it, and brings the metrics of
 * the Node process; it is loaded with the first scrape, and only here: that takes 20 ms, and not
 * everybody scrapes. What it measures of the process begins then.
 *
 * Counting is our own (`metric-counts.ts`): all that a request's events cost is 0.05 µs. With prom-client's own
 * counters and histograms the same took 1.5 µs, and 1.1 µs with every child kept: each observation builds the
 * text of its labels. A scrape takes 1 ms with one model in three tiers, 10 ms with fifty; that is time in
 * which no request moves. (`node bench/metrics.ts`, 2 cores of a shared machine.)
 *
 * Whoever asks for OpenMetrics, as Prometheus does, gets that, with the trace of one request as an exemplar in
 * each bucket of ferry_request_seconds; others get the older text. prom-client renames its counters for good
 * once it has printed them in one of the two ways, so each has a registry of its own over the same metrics.
 */
import type { Metric, Registry, RegistryContentType } from "prom-client";
import type { Routes } from "../gateway/server.ts";
import type { Events } from "./events.ts";
import { MetricCounts, type MeasuredModel } from "./metric-counts.ts";
import { buildInfo, counted, type Family, measured, seen, single } from "./metric-families.ts";
import type { Counter, Sight } from "./sight.ts";

export interface MetricsParts {
  readonly models: readonly MeasuredModel[];
  /** In order of priority. */
  readonly tiers: readonly string[];
  readonly version: string;
  readonly events: Events;
  readonly sight: Sight;
  /** Counters of the others who look on. */
  readonly more: readonly Counter[];
}

export interface Exposition {
  readonly type: string;
  readonly text: string;
}

export interface Metrics {
  readonly routes: Routes;
  /** `accept` as the scraper sent it. */
  expose(accept?: string): Promise<Exposition>;
  /** Other models from now on; those that stay keep their counts. */
  retune(models: readonly MeasuredModel[]): void;
}

export function openMetrics(parts: MetricsParts): Metrics {
  let counts = new MetricCounts(parts.models, parts.tiers);
  let deaf = counts.listen(parts.events);
  let opening: Promise<Registries> | undefined;
  const expose = async (accept = ""): Promise<Exposition> => {
    const { plain, open, look } = await (opening ??= openRegistries(parts, () => counts));
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
  const retune = (models: readonly MeasuredModel[]): void => {
    deaf();
    counts = new MetricCounts(models, parts.tiers, counts);
    deaf = counts.listen(parts.events);
  };
  return { routes, expose, retune };
}

interface Registries {
  readonly plain: Registry<RegistryContentType>;
  readonly open: Registry<RegistryContentType>;
  /** Before each scrape: what is seen of the process then. */
  readonly look: () => void;
}

async function openRegistries(parts: MetricsParts, counts: () => MetricCounts): Promise<Registries> {
  const { tiers, sight, version, more } = parts;
  const { Registry, collectDefaultMetrics } = await import("prom-client");
  const { families, look } = seen(tiers, sight);
  const plain = new Registry<RegistryContentType>();
  const open = new Registry<RegistryContentType>();
  open.setContentType(Registry.OPENMETRICS_CONTENT_TYPE);
  for (const family of [
    ...ofLatest(counted, counts),
    ...ofLatest(measured, counts),
    ...families,
    buildInfo(version, sight),
    ...more.map((each) => single(each.name, each.help, () => each.read())),
  ]) {
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

/** Each reads what is counted at the time: models come and go. */
function ofLatest(families: (counts: MetricCounts) => Family[], counts: () => MetricCounts): Family[] {
  const read = (at: number) => (): ReturnType<Family["read"]> => families(counts())[at]!.read();
  return families(counts()).map((family, at) => ({ ...family, read: read(at) }));
}

/** A family of OpenMetrics is named without the ending that its samples have. */
function openName({ name, type }: { readonly name: string; readonly type: unknown }): string {
  return type === "counter" ? name.replace(/_total$/, "") : name;
}

/** All that a registry asks of a metric is its name and `get`. */
function metricOf(family: Family): Metric {
  const { name, help, type } = family;
  const metric = { name, type, get: () => ({ name, help, type, values: family.read() }) };
  return metric as unknown as Metric;
}

/** A mean over nothing, as between two scrapes in the same breath, is left out: it is no number. */
function renamed(metric: Metric, name: string): Metric {
  const { type } = metric as unknown as { type: string };
  const get = async (): Promise<object> => {
    const { values, ...rest } = await metric.get();
    return { ...rest, name, values: values.filter(({ value }) => !Number.isNaN(value)) };
  };
  return { name, type, get } as unknown as Metric;
}
