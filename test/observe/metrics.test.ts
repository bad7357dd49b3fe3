/** From events and what can be seen to the text that Prometheus reads. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { Events } from "../../src/observe/events.ts";
import { Buckets, LATENCY_BOUNDS, sizeBounds } from "../../src/observe/metric-counts.ts";
import { openMetrics, type Metrics } from "../../src/observe/metrics.ts";
import type { Counter, Sight, WorkerSight } from "../../src/observe/sight.ts";
import { answered, called, namesOf, samplesOf, PROCESSES, sightOf, started, TIERS } from "./stage.ts";

const MODELS = [
  { name: "embed", maxBatchSize: 64, caches: true },
  { name: "rank", maxBatchSize: 8, caches: false },
];

interface Stage {
  readonly events: Events;
  readonly metrics: Metrics;
  /** All samples now. */
  readonly samples: () => Promise<Map<string, number>>;
}

async function stage(sight: Sight = sightOf(MODELS), more: readonly Counter[] = []): Promise<Stage> {
  const events = new Events();
  const metrics = openMetrics({
    models: () => MODELS,
    tiers: TIERS,
    version: "1.2.3",
    events,
    sight,
    processes: PROCESSES,
    more,
  });
  return { events, metrics, samples: async () => samplesOf((await metrics.expose()).text) };
}

test("nothing is printed that is no number, however soon one asks again", async () => {
  const { metrics } = await stage();
  for (const accept of ["", "", "application/openmetrics-text", "application/openmetrics-text"]) {
    const { text } = await metrics.expose(accept);
    assert.match(text, /^nodejs_eventloop_lag_p99_seconds /m);
    assert.doesNotMatch(text, /nan$/im);
  }
});

describe("requests", () => {
  test("every one counts by status; those that waited for their outcome have a latency", async () => {
    const { events, samples } = await stage();
    events.emit("request.answered", answered());
    events.emit("request.answered", answered({ latencyMs: 120.001 }));
    events.emit("request.answered", answered({ status: 202, ending: undefined }));
    events.emit("request.answered", answered({ status: 499, ending: undefined }));
    events.emit("request.answered", answered({ status: 429, code: "RATE_LIMITED", ending: undefined }));
    const late = { status: 504, code: "DEADLINE_EXCEEDED", ending: undefined, latencyMs: 4000 } as const;
    events.emit("request.answered", answered(late));
    const now = await samples();
    const of = (code: number): number | undefined =>
      now.get(`ferry_requests_total{code="${code}",model="embed",tier="paid"}`);
    assert.deepEqual([200, 202, 499, 429, 504].map(of), [2, 1, 1, 1, 1]);
    const upTo = (le: string): number | undefined =>
      now.get(`ferry_request_seconds_bucket{le="${le}",model="embed",tier="paid"}`);
    assert.deepEqual(["0.11", "0.12", "0.13", "3", "4", "+Inf"].map(upTo), [0, 1, 2, 2, 3, 3]);
    assert.equal(now.get('ferry_request_seconds_count{model="embed",tier="paid"}'), 3);
    assert.ok(Math.abs(now.get('ferry_request_seconds_sum{model="embed",tier="paid"}')! - 4.24) < 0.001);
  });

  test("a model or tier that is not configured is empty, and no tenant is there", async () => {
    const { events, samples, metrics } = await stage();
    for (let n = 0; n < 500; n++) {
      const strange = { model: `model-${n}`, tier: `tier-${n}`, tenant: `tenant-${n}`, id: `id-${n}` };
      events.emit("request.answered", answered({ ...strange, route: `/r-${n}`, method: `M${n}` }));
      events.emit("request.shed", { ...strange, reason: "capacity", retryAfterMs: 1 });
      events.emit("task.queued", { id: "", model: strange.model, tier: n, at: 0 });
      events.emit("batch.started", started(strange.model, [1, 2], [n]));
      events.emit("batch.answered", called(strange.model, 1));
    }
    assert.equal((await samples()).get('ferry_requests_total{code="200",model="",tier=""}'), 500);
    const { text } = await metrics.expose();
    assert.doesNotMatch(text, /(model|tier|tenant|id|r)-\d/);
    assert.ok((await samples()).size < 700, `${(await samples()).size} samples`);
  });
});

describe("tasks and batches", () => {
  test("queue time by tier when the batch leaves, size and reason of the batch, time of the call", async () => {
    const { events, samples } = await stage();
    // The third was queued after the batch left, by the clock of the store.
    events.emit("batch.started", started("embed", [100, 95, 100.5, 60], [0, 1, 1, 2]));
    events.emit("batch.answered", called("embed", 105));
    const now = await samples();
    assert.equal(now.get('ferry_queue_seconds_bucket{le="0.001",model="embed",tier="enterprise"}'), 1);
    assert.equal(now.get('ferry_queue_seconds_count{model="embed",tier="paid"}'), 2);
    assert.equal(now.get('ferry_queue_seconds_sum{model="embed",tier="paid"}'), 0.005);
    assert.equal(now.get('ferry_queue_seconds_bucket{le="0.02",model="embed",tier="free"}'), 0);
    assert.equal(now.get('ferry_queue_seconds_bucket{le="0.04",model="embed",tier="free"}'), 1);
    assert.equal(now.get('ferry_batch_size_bucket{le="2",model="embed"}'), 0);
    assert.equal(now.get('ferry_batch_size_bucket{le="4",model="embed"}'), 1);
    assert.equal(now.get('ferry_batch_size_sum{model="embed"}'), 4);
    assert.equal(now.get('ferry_batches_total{model="embed",reason="full"}'), 1);
    assert.equal(now.get('ferry_batches_total{model="rank",reason="full"}'), 0);
    assert.equal(now.get('ferry_worker_seconds_bucket{le="0.11",model="embed"}'), 1);
    assert.equal(now.get('ferry_worker_seconds_count{model="rank"}'), 0);
  });

  test("what grouping saved and lost are two counters: a sum of both could fall", async () => {
    const { events, samples } = await stage();
    const settled = { model: "embed", batchId: "b", worker: "w", size: 4, reason: "full" } as const;
    for (const savedMs of [1500, -250, undefined, 500]) {
      events.emit("batch.settled", { ...settled, calls: 1, busyMs: 9, savedMs });
    }
    const now = await samples();
    assert.equal(now.get('ferry_grouping_seconds_total{effect="saved",model="embed"}'), 2);
    assert.equal(now.get('ferry_grouping_seconds_total{effect="lost",model="embed"}'), 0.25);
    assert.equal(now.get('ferry_grouping_seconds_total{effect="saved",model="rank"}'), 0);
  });

  test("arrivals are those that asked for a worker; the others were never meant to reach one", async () => {
    const { events, samples } = await stage();
    for (const model of ["embed", "rank"]) events.emit("task.queued", { id: "", model, tier: 2, at: 0 });
    for (const reason of ["rate", "capacity", "deadline", "full", "draining", "no_worker"] as const) {
      const refused = { model: "embed", tier: "free", tenant: "t", retryAfterMs: 1 };
      events.emit("request.shed", { ...refused, reason });
    }
    const now = await samples();
    assert.equal(now.get('ferry_arrivals_total{model="embed",tier="free"}'), 5);
    assert.equal(now.get('ferry_arrivals_total{model="rank",tier="free"}'), 1);
    assert.equal(now.get('ferry_shed_total{reason="no_worker",tier="free"}'), 1);
    assert.equal(now.get('ferry_shed_total{reason="no_worker",tier="paid"}'), 0);
    // Where nothing is kept for later, nothing was looked for.
    assert.equal(now.get('ferry_cache_total{result="miss"}'), 1);
  });

  test("what is rare has a 0 to begin with: a rate needs two points", async () => {
    const { events, samples } = await stage();
    const rare = [
      "ferry_lost_total",
      "ferry_dead_letters_total",
      "ferry_retries_total",
      "ferry_collapsed_total",
      'ferry_cache_total{result="hit"}',
      'ferry_shed_total{reason="capacity",tier="enterprise"}',
      'ferry_batches_total{model="rank",reason="deadline"}',
      'ferry_workers{model="embed",state="down"}',
      'ferry_arrivals_total{model="rank",tier="paid"}',
    ];
    const before = await samples();
    for (const name of rare) assert.equal(before.get(name), 0, name);
    const id = "1";
    events.emit("task.lost", { id, model: "", why: "" });
    events.emit("task.dead", { id, model: "embed", code: "INFERENCE_FAILED", message: "" });
    const retried = { id, model: "embed", attempt: 1, at: 0, message: "", batchId: "", worker: "" };
    events.emit("task.retried", retried);
    events.emit("task.joined", { id, model: "embed" });
    events.emit("task.cached", { id, model: "embed" });
    const after = await samples();
    for (const name of rare.slice(0, 5)) assert.equal(after.get(name), 1, name);
  });
});

describe("what is seen when it is scraped", () => {
  const worker: WorkerSight = {
    name: "w",
    state: "busy",
    own: true,
    inFlight: 3,
    batches: 1,
    tasks: 3,
    failures: 0,
    utilization: 0.5,
    ratio: 1,
    batcher: "",
    zone: "",
  };

  test("workers are our own; queues, load and the rest are as the sight has them", async () => {
    const workers = [worker, { ...worker, own: false }, { ...worker, state: "down" } as const];
    const embed = { name: "embed", workers, queuedByTier: [1, 0, 41], oldestWaitMs: 1500 };
    const more = { utilization: 0.8, load: 0.7, desiredWorkers: 5, paddingRatio: 1.25 };
    const process = { durability: "local", deadLetters: 2, reachable: false, role: "gateway" } as const;
    const { samples } = await stage(sightOf([{ ...embed, ...more }, MODELS[1]!], process));
    const now = await samples();
    assert.equal(now.get('ferry_workers{model="embed",state="busy"}'), 1);
    assert.equal(now.get('ferry_workers{model="embed",state="down"}'), 1);
    assert.equal(now.get('ferry_workers{model="embed",state="idle"}'), 0);
    assert.equal(now.get('ferry_queue_depth{model="embed",tier="free"}'), 41);
    assert.equal(now.get('ferry_queue_oldest_seconds{model="embed"}'), 1.5);
    assert.equal(now.get('ferry_worker_utilization{model="embed"}'), 0.8);
    assert.equal(now.get('ferry_load{model="embed"}'), 0.7);
    assert.equal(now.get('ferry_desired_workers{model="embed"}'), 5);
    assert.equal(now.get('ferry_padding_ratio{model="embed"}'), 1.25);
    assert.equal(now.has('ferry_padding_ratio{model="rank"}'), false, "none of its batches was measured");
    assert.equal(now.get('ferry_durability{kind="local"}'), 1);
    assert.equal(now.get('ferry_durability{kind="replica"}'), 0);
    assert.equal(now.get("ferry_dead_letters_kept"), 2);
    assert.equal(now.get("ferry_store_up"), 0);
    assert.equal(now.get('ferry_build_info{engine="memory",role="gateway",version="1.2.3"}'), 1);
  });

  test("counters of others are read anew each time", async () => {
    let rows = 0;
    const { samples } = await stage(sightOf(MODELS), [
      { name: "ferry_rows_total", help: "Rows.", read: () => ++rows },
    ]);
    assert.equal((await samples()).get("ferry_rows_total"), 1);
    assert.equal((await samples()).get("ferry_rows_total"), 2);
  });
});

describe("the text", () => {
  test("both ways to write it have the same names and values, whichever is asked for first", async () => {
    const { events, metrics } = await stage();
    events.emit("request.answered", answered());
    const accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5";
    const open = await metrics.expose(accept);
    const plain = await metrics.expose("text/plain");
    const again = await metrics.expose(accept);
    assert.match(open.type, /^application\/openmetrics-text; version=1\.0\.0/);
    assert.match(plain.type, /^text\/plain; version=0\.0\.4/);
    assert.ok(open.text.endsWith("\n# EOF\n"));
    const names = (text: string): string[] => [...samplesOf(text).keys()].filter((name) => !/gc_/.test(name));
    assert.deepEqual(names(open.text), names(plain.text));
    assert.deepEqual(names(again.text), names(plain.text));
    assert.ok(names(plain.text).includes("process_cpu_seconds_total"));
    // There a family and its samples have two names, and no two families one.
    const families = namesOf(open.text);
    assert.equal(new Set(families).size, families.length);
    assert.ok(families.includes("ferry_dead_letters"));
  });

  test("a bucket of OpenMetrics names a trace that ended in it; the older text does not", async () => {
    const { events, metrics } = await stage();
    const trace = { traceId: "ab".repeat(16), spanId: "cd".repeat(8), parentId: "", state: "" };
    events.emit("request.answered", answered({ trace: { ...trace, traceId: "00".repeat(16) } }));
    events.emit("request.answered", answered({ trace, latencyMs: 119 }));
    events.emit("request.answered", answered({ latencyMs: 118 }));
    const { text } = await metrics.expose("application/openmetrics-text");
    const line = text.split("\n").find((each) => each.includes(" # "));
    assert.equal(
      line,
      'ferry_request_seconds_bucket{le="0.12",model="embed",tier="paid"} 3 ' +
        `# {trace_id="${"ab".repeat(16)}"} 0.119 1790000000.119`,
    );
    assert.equal(text.split(" # ").length, 2);
    assert.doesNotMatch((await metrics.expose()).text, /trace_id/);
  });
});

describe("bounds", () => {
  test("of latency go from 1 ms to 10 s, and are finest where a batch of 100 ms ends up", () => {
    assert.equal(LATENCY_BOUNDS[0], 0.001);
    assert.equal(LATENCY_BOUNDS.at(-1), 10);
    assert.deepEqual(
      LATENCY_BOUNDS,
      LATENCY_BOUNDS.toSorted((a, b) => a - b),
    );
  });

  test("of sizes end with one short of full, and full", () => {
    const of = (maxBatchSize: number): number[] => sizeBounds([{ maxBatchSize }, { maxBatchSize: 1 }]);
    assert.deepEqual(of(64), [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 63, 64]);
    assert.deepEqual(of(1), [1]);
    assert.deepEqual(of(2), [1, 2]);
    assert.deepEqual(of(8), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert.ok(of(4096).length < 25, String(of(4096)));
  });

  test("a value is in the first bucket whose bound it does not exceed", () => {
    const bounds = [0.001, 0.01, 0.1, 1];
    fc.assert(
      fc.property(fc.array(fc.double({ min: 0, max: 3, noNaN: true }), { minLength: 1 }), (values) => {
        const buckets = new Buckets(bounds);
        for (const value of values) buckets.observe(value);
        const expected = [...bounds, Infinity].map(
          (bound) => values.filter((value) => value <= bound).length,
        );
        assert.deepEqual(buckets.upTo(), expected);
      }),
    );
  });
});
