/**
 * What metrics cost a request: `node bench/metrics.ts`, about five seconds, one line a figure on stdout.
 *
 *  - a request: all that its events cost, `task.queued`, its share of `batch.started` and `batch.answered` at
 *    batches of 64, and `request.answered`;
 *  - prom-client: the same counts with its own counters and histograms, their children looked up each time
 *    (`labels().observe()`) and kept;
 *  - a scrape: printing everything for 1 and for 50 models with three tiers, every pair in use.
 */
import { Counter, Histogram, Registry } from "prom-client";
import { Events } from "../src/observe/events.ts";
import { LATENCY_BOUNDS, type MeasuredModel } from "../src/observe/metric-counts.ts";
import { openMetrics } from "../src/observe/metrics.ts";
import { answered, called, PROCESSES, sightOf, started, TIERS } from "../test/observe/stage.ts";

const BATCH = 64;
const ROUNDS = 30_000;

/** Sends one batch's worth of events, with latencies that differ. */
function batchOf(events: Events, model: string): () => void {
  const queuedAt = Array.from({ length: BATCH }, (_, at) => at);
  const batch = started(model, queuedAt, [0, 1, 2]);
  const call = called(model, 100, BATCH);
  const requests = batch.tasks.map(({ task }, at) =>
    answered({ model, tier: TIERS[task.tier]!, latencyMs: 90 + at * 2 }),
  );
  return () => {
    for (const { task } of batch.tasks) events.emit("task.queued", { ...task, at: 0 });
    events.emit("batch.started", batch);
    events.emit("batch.answered", call);
    for (const request of requests) events.emit("request.answered", request);
  };
}

/** ns a request; the best of five, since whatever disturbs only makes it slower. */
function time(send: () => void, rounds: number): number {
  let best = Infinity;
  for (let run = 0; run < 5; run++) {
    const startedAt = performance.now();
    for (let round = 0; round < rounds; round++) send();
    best = Math.min(best, performance.now() - startedAt);
  }
  return (best * 1e6) / (rounds * BATCH);
}

function withPromClient(keep: boolean): () => void {
  const registers = [new Registry()];
  const make = { registers, help: "x", labelNames: ["model", "tier"] };
  const buckets = [...LATENCY_BOUNDS];
  const seconds = new Histogram({ ...make, name: "request_seconds", buckets });
  const queue = new Histogram({ ...make, name: "queue_seconds", buckets });
  const arrivals = new Counter({ ...make, name: "arrivals_total" });
  const requests = new Counter({ ...make, name: "requests_total", labelNames: ["model", "tier", "code"] });
  const children = (tier: string) => ({
    seconds: seconds.labels("embed", tier),
    queue: queue.labels("embed", tier),
    arrivals: arrivals.labels("embed", tier),
    requests: requests.labels("embed", tier, "200"),
  });
  const kept = TIERS.map(children);
  return () => {
    for (let at = 0; at < BATCH; at++) {
      const each = keep ? kept[at % 3]! : children(TIERS[at % 3]!);
      each.arrivals.inc();
      each.queue.observe((100 - at) / 1000);
      each.requests.inc();
      each.seconds.observe((90 + at * 2) / 1000);
    }
  };
}

async function scrapeMs(count: number): Promise<string> {
  const models = Array.from({ length: count }, (_, at): MeasuredModel => {
    return { name: `m${at}`, maxBatchSize: BATCH, caches: true };
  });
  const events = new Events();
  const parts = {
    models: () => models,
    tiers: TIERS,
    version: "0",
    events,
    sight: sightOf(models),
    processes: PROCESSES,
    more: [],
  };
  const metrics = openMetrics(parts);
  for (const { name } of models) batchOf(events, name)();
  const took: number[] = [];
  let lines = 0;
  for (let run = 0; run < 20; run++) {
    const startedAt = performance.now();
    lines = (await metrics.expose()).text.split("\n").length;
    took.push(performance.now() - startedAt);
  }
  took.sort((a, b) => a - b);
  return `${took[10]!.toFixed(1)} ms for ${lines} lines`;
}

const events = new Events();
const send = batchOf(events, "embed");
const unheard = time(send, ROUNDS);
const models = [{ name: "embed", maxBatchSize: BATCH, caches: true }];
openMetrics({
  models: () => models,
  tiers: TIERS,
  version: "0",
  events,
  sight: sightOf(models),
  processes: PROCESSES,
  more: [],
});
console.log(`a request: ${(time(send, ROUNDS) - unheard).toFixed(0)} ns`);
console.log(`prom-client, labels() each time: ${time(withPromClient(false), ROUNDS / 20).toFixed(0)} ns`);
console.log(`prom-client, children kept: ${time(withPromClient(true), ROUNDS / 20).toFixed(0)} ns`);
console.log(`a scrape, 1 model: ${await scrapeMs(1)}`);
console.log(`a scrape, 50 models: ${await scrapeMs(50)}`);
