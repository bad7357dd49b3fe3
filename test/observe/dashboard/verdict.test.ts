/** Each rule of the sentence, by itself and in its order. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import type { RecentFigures, WorkerRow } from "../../../src/observe/dashboard/frames.ts";
import { sayVerdict, type VerdictFacts } from "../../../src/observe/dashboard/verdict.ts";

const calm: RecentFigures = {
  requestsPerSecond: 1804,
  p50: 115,
  p95: 128,
  p99: 131,
  slow: { queueMs: 31, workerMs: 100, gatewayMs: 0.3 },
  meanMs: 115,
  refusedShare: 0,
  load: 0.7,
  capacityPerSecond: 2560,
  utilization: 0.81,
  fill: 0.875,
  desiredWorkers: 4,
};

function worker(name: string, why = "", sinceMs = 4000): WorkerRow {
  const row = { name, busy: 0.8, filled: 0.7, inFlight: 0, ratio: 1, batchMs: 100, zone: "" };
  if (why === "") return { ...row, state: "busy" };
  return { ...row, state: "down", down: { why, sinceMs, retryInMs: 2000 } };
}

interface More extends Partial<Omit<VerdictFacts, "recent">> {
  readonly recent?: Partial<RecentFigures>;
}

function say(more: More = {}): ReturnType<typeof sayVerdict> {
  return sayVerdict({
    model: { name: "embed", policy: "adaptive", maxBatchSize: 64 },
    target: 0.7,
    process: { reachable: true, draining: false, used: true },
    workers: ["gpu-1", "gpu-2", "gpu-3", "gpu-4"].map((name) => worker(name)),
    healthy: 4,
    queued: 12,
    oldestWaitMs: 18,
    arrivalsPerSecond: 1804,
    justNow: 0,
    tasksPerSecond: 1804,
    slowWorker: undefined,
    retriedShare: 0,
    fullShare: 0,
    grouped: false,
    loopLateMs: 2,
    quarterHour: undefined,
    ...more,
    recent: { ...calm, ...more.recent },
  });
}

const slowWorker = { name: "gpu-2", nowMs: 240, usualMs: 100 };
const none = {
  workers: [worker("gpu-1", "ECONNREFUSED"), worker("gpu-2", "timeout")],
  healthy: 0,
  queued: 37,
};

describe("the sentence", () => {
  test("healthy, with its numbers", () => {
    assert.deepEqual(say(), {
      level: "ok",
      key: "healthy",
      sentence:
        "Healthy. 1,804 req/s is 70 % of capacity. p99 131 ms; the slowest 5 %: 100 ms worker + 31 ms queue. Nobody refused.",
      advice: "",
    });
    const unknown = say({
      recent: { load: 0, capacityPerSecond: 0, p99: null, slow: null, refusedShare: 0.034 },
    });
    assert.equal(unknown.sentence, "Healthy. 1,804 req/s. Nobody waited for an answer. 3.4 % refused.");
  });

  test("a batcher counts tasks, since it takes no requests", () => {
    const recent = { requestsPerSecond: 0, p99: null, slow: null };
    assert.match(say({ recent, tasksPerSecond: 512 }).sentence, /^Healthy\. 512 tasks\/s run here\.$/);
  });

  test("the store is away", () => {
    const { level, key, sentence } = say({
      process: { reachable: false, draining: false, used: true },
      ...none,
    });
    assert.equal(level, "bad");
    assert.equal(key, "store");
    assert.match(sentence, /^Cut off\. The store does not answer/);
  });

  test("draining", () => {
    const { sentence } = say({ process: { reachable: true, draining: true, used: true }, queued: 1 });
    assert.equal(sentence, "Draining. No new request is taken; 1 task still waits.");
  });

  test("no worker: all down, the only one down, none at all", () => {
    const { level, key, sentence, advice } = say({ ...none, recent: { load: 9 } });
    assert.equal(level, "bad");
    assert.equal(key, "no worker");
    assert.equal(
      sentence,
      "No worker. All 2 workers of embed are down (ECONNREFUSED). 37 tasks waiting, the oldest for 18 ms.",
    );
    assert.match(advice, /^Start a worker/);
    const alone = say({ workers: [worker("gpu-1", "timeout")], healthy: 0, queued: 0 });
    assert.equal(alone.sentence, "No worker. gpu-1 is down (timeout).");
    assert.equal(say({ workers: [], healthy: 0, queued: 0 }).sentence, "No worker. embed has no worker.");
  });

  test("overloaded, and how many workers more", () => {
    const { level, sentence, advice } = say({
      recent: { load: 1.29, desiredWorkers: 8, refusedShare: 0.22 },
      arrivalsPerSecond: 3300,
      queued: 900,
      oldestWaitMs: 1200,
      slowWorker,
    });
    assert.equal(level, "bad");
    assert.equal(
      sentence,
      "Overloaded. 3,300 req/s ask for workers that can do 2,560: load 129 %. 22 % refused. 900 tasks wait, the oldest for 1,200 ms.",
    );
    assert.equal(advice, "4 more workers (8 in all) would hold this load at 70 % of capacity.");
    assert.match(say({ recent: { load: 0.96, desiredWorkers: 5 } }).advice, /^1 more worker \(5 in all\)/);
    assert.equal(say({ recent: { load: 0.95 } }).key, "healthy");
  });

  test("a slow worker goes before the queue that it causes", () => {
    const { level, key, sentence } = say({
      slowWorker,
      recent: { slow: { queueMs: 300, workerMs: 100, gatewayMs: 0 } },
    });
    assert.equal(level, "busy");
    assert.equal(key, "slow worker gpu-2");
    assert.match(sentence, /^Slow worker\. gpu-2 takes 240 ms a batch, usually 100 ms\./);
  });

  test("the queue takes longer than the worker", () => {
    const recent = { slow: { queueMs: 180, workerMs: 100, gatewayMs: 1 } };
    const { key, sentence, advice } = say({ recent, retriedShare: 0.5 });
    assert.equal(key, "waiting");
    assert.match(sentence, /^Waiting\. The slowest 5 % spend 180 ms in the queue, 100 ms at the worker\./);
    assert.match(advice, /^Policy latency, or a smaller maxWaitMs/);
    assert.match(say({ recent: { ...recent, desiredWorkers: 6 } }).advice, /^2 more workers/);
    // Nobody notices 3 ms.
    assert.equal(say({ recent: { slow: { queueMs: 3, workerMs: 1, gatewayMs: 0 } } }).key, "healthy");
  });

  test("retries, then a late event loop", () => {
    assert.match(
      say({ retriedShare: 0.042, loopLateMs: 500 }).sentence,
      /^Retries\. 4\.2 % of the tasks were tried again\./,
    );
    const { key, sentence } = say({ loopLateMs: 180 });
    assert.equal(key, "late");
    assert.match(sentence, /^Late\. This process kept everybody waiting for 180 ms\./);
  });

  test("quiet: not yet asked, not asked of late; never while something waits", () => {
    const recent = { requestsPerSecond: 0, p99: null, slow: null, fill: null };
    const idle = { recent, queued: 0 };
    assert.equal(say(idle).sentence, "Quiet. No request in the last ten seconds; 4 workers are ready.");
    assert.equal(say({ ...idle, justNow: 2 }).sentence, "Quiet. 2 requests just now; 4 workers are ready.");
    const fresh = say({ ...idle, process: { reachable: true, draining: false, used: false } });
    assert.equal(fresh.sentence, "Quiet. No request yet; 4 workers are ready.");
    assert.equal(fresh.level, "quiet");
    assert.notEqual(say({ recent, queued: 3 }).key, "quiet");
    assert.equal(say({ ...idle, loopLateMs: 246 }).key, "quiet", "nobody was there to be kept waiting");
  });

  test("a worker that is down opens the sentence, whatever follows", () => {
    const workers = [worker("gpu-1"), worker("gpu-3", "ECONNREFUSED")];
    const { level, key, sentence } = say({ workers, healthy: 1 });
    assert.equal(level, "busy");
    assert.equal(key, "down healthy");
    assert.match(sentence, /^gpu-3 is down for 4,000 ms \(ECONNREFUSED\)\. Healthy\. /);
    const two = say({ workers: [...workers, worker("gpu-4", "timeout")], healthy: 1 });
    assert.match(two.sentence, /^2 workers are down, gpu-3 \(ECONNREFUSED\) among them\. /);
  });

  test("its key does not change with its numbers", () => {
    assert.equal(say({ recent: { requestsPerSecond: 7 } }).key, say().key);
  });
});

describe("what would help", () => {
  test("idle for a quarter of an hour: fewer workers would do, by its busiest second", () => {
    const { advice } = say({ quarterHour: { idleShare: 0.72, peakLoad: 0.3 } });
    assert.equal(
      advice,
      "The workers were idle 72 % of the last 15 minutes; 2 workers would do, even at its busiest second.",
    );
    assert.equal(say({ quarterHour: { idleShare: 0.72, peakLoad: 0.69 } }).advice, "");
    assert.equal(say({ quarterHour: { idleShare: 0.4, peakLoad: 0.1 } }).advice, "");
  });

  test("empty seats are the price of low latency", () => {
    const recent = { fill: 0.3 };
    assert.match(say({ recent }).advice, /^Batches leave 19\.2 of 64 full: empty seats are the price/);
    assert.equal(say({ recent, grouped: true }).advice, "", "the others are of another length");
    assert.equal(say({ recent, fullShare: 0.6 }).advice, "", "a budget or a cap has filled them");
    const model = { name: "embed", policy: "eco", maxBatchSize: 64 };
    assert.equal(say({ recent, model }).advice, "");
  });
});
