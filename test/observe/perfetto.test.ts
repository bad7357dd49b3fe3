/** The trace of the last seconds, against the rules of the Trace Event Format. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { Events } from "../../src/observe/events.ts";
import { traceText, type TraceScene } from "../../src/observe/perfetto.ts";
import { type RecentBatch, RecentBatches } from "../../src/observe/recent.ts";
import type { LoggedRequest } from "../../src/observe/request-log.ts";
import { checkTrace, type Trace, type TraceEvent } from "./trace-format.ts";

const NOW = 1_700_000_000_000;

function batchRow(id: string, worker: string, startedAt: number, endedAt: number): RecentBatch {
  return {
    model: "embed",
    note: { id, size: 48, reason: "idle", worker, startedAt: startedAt - 0.4, why: "a worker was free" },
    maxBatchSize: 64,
    oldestWaitMs: 12.34,
    attempt: 1,
    startedAt,
    waiting: [3, 0],
    endedAt,
    calls: endedAt === 0 ? 0 : 1,
    overdue: false,
    shape: undefined,
  };
}

function requestRow(id: string, startedAt: number, batch?: RecentBatch, more = {}): LoggedRequest {
  const settledAt = batch === undefined ? 0 : batch.endedAt;
  const answeredAt = batch === undefined ? startedAt + 1 : settledAt + 0.3;
  return {
    id,
    tenant: "a secret tenant",
    tier: "paid",
    model: "embed",
    status: batch === undefined ? 429 : 200,
    code: batch === undefined ? "RATE_LIMITED" : "",
    work: "own",
    startedAt,
    latencyMs: answeredAt - startedAt,
    queuedAt: startedAt + 0.2,
    queueMs: 1,
    workerMs: 1,
    attempts: 1,
    settledAt,
    outcome: "",
    traceId: "",
    batch: batch?.note,
    ...more,
  };
}

const scene = (more: Partial<TraceScene> = {}): TraceScene => ({
  from: NOW - 10_000,
  to: NOW,
  models: ["embed", "other"],
  tiers: ["enterprise", "paid"],
  batches: [],
  requests: [],
  ...more,
});

async function trace(more: Partial<TraceScene> = {}): Promise<Trace> {
  const parsed = JSON.parse(await traceText(scene(more))) as Trace;
  checkTrace(parsed.traceEvents);
  return parsed;
}

const slices = (events: readonly TraceEvent[], cat: string): TraceEvent[] =>
  events.filter((event) => event.ph === "X" && event.cat === cat);

const named = (events: readonly TraceEvent[], kind: string): unknown[] =>
  events.filter(({ name }) => name === kind).map(({ args }) => args!["name"]);

describe("a trace", () => {
  test("of nothing is a trace", async () => {
    const { traceEvents, otherData } = await trace();
    assert.deepEqual(slices(traceEvents, "batch"), []);
    assert.equal(otherData["requests"], 0);
    assert.deepEqual(named(traceEvents, "process_name"), ["embed", "other"]);
  });

  test("shows batches on their workers, and arrows from requests into them", async () => {
    const first = batchRow("b1", "gpu-1", NOW - 500.1234, NOW - 400.5678);
    // Began before the other's end was noted: as they are, they would overlap.
    const second = batchRow("b2", "gpu-1", NOW - 400.7, NOW - 300);
    const runs = batchRow("b3", "gpu-2", NOW - 50, 0);
    const requests = [
      requestRow("cached", NOW - 450, first, { work: "cached" }),
      requestRow("r4", NOW - 100),
      requestRow("r3", NOW - 420, second),
      requestRow("r2", NOW - 510, first),
      requestRow("r1", NOW - 512, first),
    ];
    const { traceEvents, otherData } = await trace({ batches: [first, second, runs], requests });
    const drawn = slices(traceEvents, "batch");
    assert.deepEqual(drawn.map(({ name, args }) => `${name} ${String(args!["batch_id"])}`).sort(), [
      "I 48/64 b1",
      "I 48/64 b2",
      "I 48/64 b3",
    ]);
    assert.equal(drawn.find(({ args }) => args!["batch_id"] === "b3")!.args!["running"], true);
    const threads = ["gpu-1", "gpu-2", "requests 1", "requests 2", "requests 3"];
    assert.deepEqual(named(traceEvents, "thread_name"), [...threads, "requests 4"]);
    assert.equal(traceEvents.filter(({ ph }) => ph === "s").length, 3);
    assert.equal(traceEvents.filter(({ ph }) => ph === "C").length, 3);
    assert.deepEqual([otherData["requests"], otherData["requests_left_out"]], [5, 0]);
    assert.doesNotMatch(JSON.stringify(traceEvents), /secret tenant/);
  });

  test("shows what is in the window, and what has no model", async () => {
    const requests = [
      requestRow("stranger", NOW - 100, undefined, { model: "", tier: "", status: 401 }),
      requestRow("in", NOW - 9999),
      requestRow("before", NOW - 10_002),
      requestRow("long before", NOW - 20_000),
    ];
    const { traceEvents, otherData } = await trace({ requests });
    const shown = slices(traceEvents, "request");
    assert.deepEqual(
      shown.map(({ args, name }) => [args!["id"], name]),
      [
        ["in", "429 paid"],
        ["stranger", "401"],
      ],
    );
    assert.deepEqual(named(traceEvents, "process_name"), ["embed", "other", "no model"]);
    assert.equal(otherData["requests_since"], otherData["from"]);
  });

  test("says how many it leaves out, and how far back it reaches", async () => {
    const batch = batchRow("b", "gpu", NOW - 200, NOW - 100);
    const row = (_: unknown, at: number): LoggedRequest => requestRow(`r${at}`, NOW - 200 - at / 1000, batch);
    const requests = Array.from({ length: 250 }, row);
    const { traceEvents, otherData } = await trace({ batches: [batch], requests });
    assert.deepEqual([otherData["requests"], otherData["requests_left_out"]], [100, 150]);
    assert.equal(slices(traceEvents, "request").filter(({ args }) => args !== undefined).length, 100);
    assert.ok(String(otherData["requests_since"]) > String(otherData["from"]));
  });

  test("of any mixture keeps the rules", async () => {
    let seed = 7;
    const random = (): number => (seed = (seed * 48_271) % 2_147_483_647) / 2_147_483_647;
    for (let round = 0; round < 30; round++) {
      const batches: RecentBatch[] = [];
      const freeAt = [NOW - 11_000, NOW - 11_000, NOW - 11_000];
      for (let at = 0; at < 60; at++) {
        const worker = Math.floor(random() * 3);
        const start = freeAt[worker]! + random() * 20;
        freeAt[worker] = start + random() * 300;
        batches.push(batchRow(`b${at}`, `gpu-${worker}`, start, freeAt[worker]));
      }
      const over = batches.filter(({ endedAt }) => endedAt < NOW);
      const requests = Array.from({ length: 400 }, (_, at) => {
        const batch = random() < 0.8 ? over[Math.floor(random() * over.length)] : undefined;
        const start = (batch?.startedAt ?? NOW - 8000 * random()) - 30 * random();
        // Clocks of two machines differ a little.
        return requestRow(`r${at}`, start, batch, { queuedAt: start + random() - 0.5 });
      }).sort((a, b) => b.startedAt + b.latencyMs - a.startedAt - a.latencyMs);
      await trace({ batches: batches.sort((a, b) => a.startedAt - b.startedAt), requests });
    }
  });
});

test("batches are kept while they run and for the window", () => {
  const events = new Events();
  const waiting = [4, 1];
  const recent = new RecentBatches(events, new VirtualClock(1000), () => waiting);
  const start = (id: string): void =>
    events.emit("batch.started", {
      model: "embed",
      batch: { id, size: 2, reason: "full", worker: "gpu", startedAt: 999, why: "" },
      maxBatchSize: 2,
      oldestWaitMs: 3,
      tasks: [{ attempt: 2 } as never, { attempt: 1 } as never],
    });
  start("a");
  start("b");
  waiting[0] = 9;
  const settled = { model: "embed", worker: "gpu", size: 2, reason: "full", calls: 3, busyMs: 50 } as const;
  events.emit("batch.overdue", { model: "embed", batchId: "b", worker: "gpu", afterMs: 1 });
  const shape = { rows: 2, longest: 7, total: 9, inOrder: 40 };
  events.emit("batch.settled", { ...settled, batchId: "a", shape });
  events.emit("batch.settled", { ...settled, batchId: "unknown" });
  const [a, b] = recent.since(1000);
  assert.deepEqual([a!.endedAt, a!.calls, a!.attempt, a!.waiting], [1050, 3, 2, [4, 1]]);
  assert.deepEqual([a!.shape, b!.shape], [shape, undefined]);
  assert.deepEqual([b!.endedAt, b!.calls, b!.overdue], [0, 0, true]);
  const later = recent.since(1051).map(({ note }) => note.id);
  assert.deepEqual(later, ["b"]);
});
