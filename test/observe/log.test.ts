/** The log: the shape of its lines for programs, and how people see them. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { jsonLine } from "../../src/cli/terminal/banner.ts";
import type { AnsweredRequest } from "../../src/observe/events.ts";
import { Events } from "../../src/observe/events.ts";
import { logEvents, type LogLevel } from "../../src/observe/log.ts";
import { prettyLine } from "../../src/observe/pretty.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";

const TRACE = "0af7651916cd43dd8448eb211c80319c";
const PARENT = `00-${TRACE}-b7ad6b7169203331-01`;
const BATCH = "11111111-2222-4333-8444-555566667777";
const NOW = Date.UTC(2026, 0, 5, 10, 0, 0, 180);
const note = { id: BATCH, size: 2, reason: "idle", worker: "w", startedAt: 1, why: "so" } as const;

function logged(level: LogLevel) {
  const events = new Events();
  const lines: string[] = [];
  logEvents(events, new VirtualClock(NOW), level, (line) => lines.push(line));
  return { events, lines, facts: () => lines.map((line) => JSON.parse(line) as Record<string, unknown>) };
}

describe("lines for programs", () => {
  test("level, time and message come first, then the facts, in the shape of every other line", () => {
    const { events, lines } = logged("info");
    events.emit("worker.changed", { model: "m", worker: "w", state: "down", why: "gone" });
    const facts = { state: "down", model: "m", worker: "w", why: "gone" };
    assert.deepEqual(lines, [jsonLine("warn", NOW, "worker changed", facts)]);
    events.emit("notice", { level: "error", message: 'one "line"\nonly' });
    assert.equal(lines[1], jsonLine("error", NOW, 'one "line"\nonly', {}));
    assert.equal(lines[1].split("\n").length, 2);
  });

  test("ids have the same names everywhere", () => {
    const { events, facts } = logged("debug");
    const task = {
      id: "T",
      tenant: "SECRET",
      tier: 0,
      model: "m",
      input: "SECRET",
      parameters: "",
      content: "",
    };
    const times = { createdAt: 1, deadlineAt: 2 };
    events.emit("batch.started", {
      model: "m",
      batch: note,
      maxBatchSize: 4,
      oldestWaitMs: 1,
      tasks: [{ task: { ...task, ...times, trace: PARENT }, attempt: 1, queuedAt: 1 }],
    });
    events.emit("task.retried", {
      id: "T",
      model: "m",
      attempt: 1,
      at: 1,
      message: "again",
      batchId: BATCH,
      worker: "w",
      trace: PARENT,
    });
    events.emit("task.dead", { id: "T", model: "m", code: "INFERENCE_FAILED", message: "no", trace: PARENT });
    events.emit("task.lost", { id: "T", model: "m", why: "?" });
    const settled = { model: "m", batchId: BATCH, worker: "w", size: 2 };
    events.emit("batch.settled", { ...settled, reason: "idle", calls: 1, busyMs: 3 });
    events.emit("batch.overdue", { ...settled, afterMs: 5 });
    const request: AnsweredRequest = {
      id: "T",
      method: "POST",
      route: "/v1/inference",
      model: "m",
      tier: "paid",
      tenant: "SECRET",
      status: 200,
      code: "",
      startedAt: 1,
      latencyMs: 2,
      work: "own",
      ending: { queuedAt: 1, attempt: 1, batch: note },
      trace: { traceId: TRACE, spanId: "b7ad6b7169203331", parentId: "", state: "" },
    };
    events.emit("request.answered", request);
    const ids = facts().map(({ msg, task_id, batch_id, trace_id }) => [msg, task_id, batch_id, trace_id]);
    assert.deepEqual(ids, [
      ["batch started", undefined, BATCH, BATCH.replaceAll("-", "")],
      ["task retried", "T", BATCH, TRACE],
      ["dead letter", "T", undefined, TRACE],
      ["task lost", "T", undefined, undefined],
      ["batch settled", undefined, BATCH, undefined],
      ["batch overdue", undefined, BATCH, undefined],
      ["request answered", "T", BATCH, TRACE],
    ]);
    for (const line of facts()) {
      assert.ok(!("id" in line) && !("batchId" in line) && !("trace" in line), JSON.stringify(line));
      assert.doesNotMatch(JSON.stringify(line), /SECRET/);
    }
  });

  test("the level decides what is heard at all", () => {
    const say = ({ events }: ReturnType<typeof logged>): void => {
      for (const level of ["info", "warn", "error"] as const)
        events.emit("notice", { level, message: level });
    };
    for (const [level, count] of [
      ["debug", 3],
      ["info", 3],
      ["warn", 2],
      ["error", 1],
      ["silent", 0],
    ] as const) {
      const log = logged(level);
      say(log);
      assert.equal(log.lines.length, count, level);
      assert.equal(log.events.heard("request.answered"), level === "debug");
    }
  });
});

describe("lines for people", () => {
  const line = (facts: object, msg = "worker changed"): string => jsonLine("warn", NOW, msg, facts);
  const body = (text: string): string => text.replace(/^\d\d:\d\d:\d\d\.\d{3} /, "");

  test("time, level, words, fields", () => {
    const text = prettyLine(
      line({ state: "down", ms: 1.23456, why: "two words", list: [1], none: "" }),
      false,
    );
    assert.match(text, /^\d\d:\d\d:\d\d\.180 WARN {2}worker changed {2}/);
    assert.equal(body(text), 'WARN  worker changed  state=down ms=1.235 why="two words" list=[1]\n');
    assert.equal(body(prettyLine(line({}, "ready"), false)), "WARN  ready\n");
  });

  test("colour only where it is wanted", () => {
    assert.ok(prettyLine(line({ a: 1 }), true).includes("\u001b[33mWARN"));
    assert.ok(!prettyLine(line({ a: 1 }), false).includes("\u001b"));
  });

  test("nothing that a worker says moves the cursor or starts a line", () => {
    const evil = "\u001b[2J\r\nWARN forged\u009b31m\u202etxt\u0007";
    for (const color of [true, false]) {
      const lines = [
        prettyLine(line({ line: evil }), color),
        prettyLine(line({ [evil]: 1 }), color),
        prettyLine(line({}, evil), color),
        prettyLine(`${evil} no JSON`, color),
        prettyLine(JSON.stringify({ level: evil, time: evil, msg: evil, a: { b: evil } }), color),
      ];
      for (const text of lines) {
        const own = text.replace(/\u001b\[\d+m/g, "");
        assert.match(own, /^[^\u0000-\u001f\u007f-\u009f\u202e]*\n$/, JSON.stringify(text));
        assert.match(text, /forged/);
      }
    }
    assert.match(prettyLine(line({}, "a\u001b[31mb"), false), /a\\u001b\[31mb/);
  });

  test("what is no JSON is shown as it is", () => {
    for (const text of ["plain words", "3", "null"]) assert.equal(prettyLine(`${text}\n`, true), `${text}\n`);
  });
});
