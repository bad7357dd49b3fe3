/** The request log in memory, and how it hands rows on. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import type { BatchNote } from "../../src/core/task.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { type AnsweredRequest, Events } from "../../src/observe/events.ts";
import {
  type LoggedOutcome,
  type LoggedRequest,
  RequestLog,
  RequestRow,
  type RowSink,
} from "../../src/observe/request-log.ts";
import { Troubles } from "../../src/observe/recent.ts";

const batch: BatchNote = {
  id: "b1",
  size: 8,
  reason: "full",
  worker: "gpu-1",
  startedAt: 1_000_030,
  why: "",
};

function request(more: Partial<AnsweredRequest> = {}): AnsweredRequest {
  return {
    id: "r1",
    method: "POST",
    route: "/v1/inference",
    model: "embed",
    tier: "paid",
    tenant: "alice",
    status: 200,
    code: "",
    startedAt: 1_000_000,
    latencyMs: 130,
    work: "own",
    ending: { queuedAt: 1_000_010, attempt: 1, settledAt: 1_000_120, batch },
    trace: undefined,
    ...more,
  };
}

const ended = (id: string, more: Partial<LoggedOutcome> = {}): LoggedOutcome => ({
  task: { id },
  queuedAt: 1_000_010,
  attempt: 1,
  settledAt: 1_000_120,
  batch,
  outcome: { ok: true, output: "1" },
  ...more,
});

class Sink implements RowSink {
  readonly rows: RequestRow[] = [];
  readonly ends: RequestRow[] = [];

  add(row: RequestRow): void {
    this.rows.push(row);
  }

  ended(row: RequestRow): void {
    this.ends.push(row);
  }
}

function stage(recent = 4, records = new Map<string, LoggedOutcome>(), reportedLate = false) {
  const events = new Events();
  const clock = new VirtualClock(1_000_000);
  const sink = new Sink();
  const asked: string[] = [];
  const lookUp = async (id: string) => {
    asked.push(id);
    return records.get(id);
  };
  const log = new RequestLog(events, clock, { recent, lookAfterMs: 10_000, lookUp, sink, reportedLate });
  const answer = (more?: Partial<AnsweredRequest>): void => events.emit("request.answered", request(more));
  return { events, clock, sink, log, answer, asked };
}

const ids = (rows: Iterable<LoggedRequest>): string[] => [...rows].map(({ id }) => id);

describe("the request log in memory", () => {
  test("keeps the latest, newest first, and finds all that share an id", () => {
    const { log, answer } = stage(4);
    assert.deepEqual(ids(log.rows()), []);
    for (const id of ["a", "b"]) answer({ id });
    assert.deepEqual(ids(log.rows()), ["b", "a"]);
    for (const id of ["c", "b", "e"]) answer({ id });
    assert.deepEqual(ids(log.rows()), ["e", "b", "c", "b"]);
    assert.deepEqual(ids(log.find("b", 9)), ["b", "b"]);
    assert.deepEqual(log.find("a", 9), []);
    assert.equal(log.find("b", 1).length, 1);
    assert.equal(log.count, 5);
  });

  test("rows without a sink are overwritten in place, and read as if each were new", () => {
    const events = new Events();
    const clock = new VirtualClock(1_000_000);
    const log = new RequestLog(events, clock, { recent: 3, lookAfterMs: 1e4, lookUp: async () => undefined });
    const trace = { traceId: "t", spanId: "s", parentId: "", state: "" };
    const rejected = { status: 429, code: "RATE_LIMITED", ending: undefined } as const;
    const kinds: Partial<AnsweredRequest>[] = [{}, rejected, { status: 202, ending: undefined }, { trace }];
    const all: RequestRow[] = [];
    const copies: [LoggedRequest, LoggedRequest][] = [];
    for (let n = 1; n <= 40; n++) {
      const each = request({ ...kinds[(n * n + (n >> 2)) % kinds.length], id: `r${n}`, latencyMs: n });
      events.emit("request.answered", each);
      all.unshift(new RequestRow(n, each));
      // The end of one that is still in the ring or no longer: another request must not get it.
      const late = all[(n * 7) % 5];
      if (late?.status === 202 && late.outcome === "") {
        log.settled(ended(late.id));
        late.end(ended(late.id), "SUCCESS");
      }
      const rows = [...log.rows()];
      assert.deepEqual(
        rows,
        all.slice(0, 3).map((row) => Object.assign({}, row)),
      );
      copies.push([rows[0]!, structuredClone(rows[0]!)]);
    }
    for (const [copy, asRead] of copies) {
      assert.deepEqual(copy, asRead);
    }
    log.close();
  });

  test("splits the latency into the request's own wait and work", () => {
    const { sink, answer } = stage();
    answer();
    // Joined late, when the batch ran already.
    answer({ work: "joined", startedAt: 1_000_050, latencyMs: 80 });
    answer({ work: "cached", ending: { queuedAt: 1_000_000, attempt: 1, settledAt: 1_000_000, batch } });
    answer({ status: 429, code: "RATE_LIMITED", ending: undefined });
    const parts = sink.rows.map((row) => [row.queueMs, row.workerMs, row.outcome, row.attempts]);
    assert.deepEqual(parts, [
      [20, 90, "SUCCESS", 1],
      [0, 70, "SUCCESS", 1],
      [0, 0, "SUCCESS", 1],
      [0, 0, "", 0],
    ]);
  });

  test("takes what asks for inference, and nothing else", () => {
    const { log, answer } = stage(10);
    answer({ method: "GET", route: "/v1/result/{id}", id: "poll" });
    answer({ route: "", status: 404, code: "NOT_FOUND", id: "nowhere" });
    answer({ route: "/v1/result/{id}", status: 405, code: "METHOD_NOT_ALLOWED", id: "wrong" });
    answer({ status: 401, code: "UNAUTHENTICATED", model: "", tenant: "", tier: "", id: "stranger" });
    answer({ status: 499, ending: undefined, id: "left" });
    assert.deepEqual(ids(log.rows()), ["left", "stranger"]);
  });

  test("without memory and without a sink nobody listens", () => {
    const events = new Events();
    const options = { recent: 0, lookAfterMs: 1, lookUp: async () => undefined };
    assert.equal(new RequestLog(events, new VirtualClock(), options).count, 0);
    assert.equal(events.heard("request.answered"), false);
  });
});

describe("a request that was answered 202", () => {
  const accepted = { status: 202, ending: undefined };

  test("gets its outcome; a sink that has the row is told", () => {
    const { log, sink, answer } = stage();
    answer({ ...accepted, id: "waits" });
    answer({ ...accepted, id: "written" });
    sink.rows[1]!.written = true;
    for (const id of ["waits", "written", "unknown"]) log.settled(ended(id));
    for (const { outcome, settledAt, status } of sink.rows)
      assert.deepEqual([outcome, settledAt, status], ["SUCCESS", 1_000_120, 202]);
    assert.deepEqual(ids(sink.ends), ["written"]);
  });

  test("so do all that joined it", () => {
    const { log, sink, answer } = stage();
    for (const work of ["own", "joined", "joined"] as const) answer({ ...accepted, work, id: "shared" });
    const outcome = { ok: false, code: "DEADLINE_EXCEEDED", message: "" } as const;
    log.settled(ended("shared", { outcome }));
    assert.equal(sink.rows.length, 3);
    for (const row of sink.rows) assert.equal(row.outcome, "DEADLINE_EXCEEDED");
  });

  test("an end that nobody told is looked up once, when it must have come", async () => {
    const { sink, clock, answer, asked } = stage(4, new Map([["missed", ended("missed")]]));
    for (const id of ["missed", "gone"]) answer({ ...accepted, id });
    await clock.run(1_009_000);
    assert.deepEqual(asked, []);
    await clock.run(1_100_000);
    assert.deepEqual(asked, ["missed", "gone"]);
    assert.deepEqual([sink.rows[0]!.outcome, sink.rows[1]!.outcome], ["SUCCESS", ""]);
  });

  test("an end before a request that another process reports is found at once", async () => {
    const { log, sink, answer, asked } = stage(4, new Map([["early", ended("early")]]), true);
    for (const id of ["early", "runs"]) answer({ ...accepted, id });
    await new Promise(setImmediate);
    assert.deepEqual([sink.rows[0]!.outcome, sink.rows[1]!.outcome], ["SUCCESS", ""]);
    log.settled(ended("runs"));
    assert.deepEqual([sink.rows[1]!.outcome, asked], ["SUCCESS", ["early", "runs"]]);
  });

  test("however many such ends there are a second: what the cache answers has ended before it is answered", async () => {
    const { clock, answer, asked } = stage();
    const seconds = 60;
    for (let second = 0; second < seconds; second++) {
      for (let n = 0; n < 50; n++)
        answer({ ...accepted, work: "cached", id: `${second}-${n}`, startedAt: clock.now() });
      await clock.run(clock.now() + 1000);
    }
    // All but those of the time that is left to an end to come, and of the time between two looks.
    assert.ok(asked.length >= 50 * (seconds - 16), `${asked.length} were looked up`);
  });
});

test("troubles are kept by task, in order, and the oldest go", () => {
  const events = new Events();
  const troubles = new Troubles(events, new VirtualClock(5000));
  const known = { model: "m", at: 6000, message: "500", batchId: "b", worker: "w" };
  const retried = (id: string, attempt: number): void =>
    events.emit("task.retried", { ...known, id, attempt });
  retried("a", 1);
  retried("b", 1);
  events.emit("task.dead", { id: "a", model: "m", code: "INFERENCE_FAILED", message: "500" });
  const common = { id: "a", at: 5000, message: "500" };
  assert.deepEqual(troubles.of("a"), [
    { ...common, attempt: 1, batchId: "b", worker: "w", retryAt: 6000 },
    { ...common, attempt: 0, batchId: "", worker: "", retryAt: 0 },
  ]);
  for (let at = 0; at < 10_000; at++) retried("c", at);
  assert.deepEqual(troubles.of("a"), []);
  const attempts = troubles.of("c").map(({ attempt }) => attempt);
  assert.deepEqual(
    attempts,
    Array.from({ length: 10_000 }, (_, at) => at),
  );
});
