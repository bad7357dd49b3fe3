/** The parts of the page that need no browser: numbers, history, batches, the stream's parser. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import {
  type BatchRow,
  COLUMNS,
  type Column,
  FILL_STEPS,
  type Slots,
} from "../../../src/observe/dashboard/frames.ts";
import {
  age,
  count,
  ms,
  plural,
  quoted,
  rate,
  share,
  short,
} from "../../../src/observe/dashboard/page/format.js";
import { Batches, History, ServerClock } from "../../../src/observe/dashboard/page/state.js";
import { stepsOf } from "../../../src/observe/dashboard/page/steps.js";
import { Parser } from "../../../src/observe/dashboard/page/stream.js";

describe("numbers", () => {
  const written: readonly (readonly [string, string])[] = [
    [count(0), "0"],
    [count(0.1234), "0.123"],
    [count(15.44), "15.4"],
    [count(1804.2), "1,804"],
    [count(123_456), "123k"],
    [count(4_321_000), "4.32M"],
    [count(null), "–"],
    [rate(1804.7), "1,805"],
    [rate(3.14), "3.1"],
    [ms(0.04), "0 ms"],
    [ms(15.44), "15.4 ms"],
    [ms(131.2), "131 ms"],
    [ms(9999), "9,999 ms"],
    [ms(12_345), "12.3 s"],
    [ms(240_000), "4 m"],
    [ms(undefined), "–"],
    [age(119_000), "119 s"],
    [age(7_300_000), "2 h"],
    [share(0), "0 %"],
    [share(0.0004), "< 0.1 %"],
    [share(0.031), "3.1 %"],
    [share(0.704), "70 %"],
    [share(1.64), "164 %"],
    [short(1804), "1.8k"],
    [short(640), "640"],
    [plural(1, "batch"), "1 batch"],
    [plural(2, "batch"), "2 batches"],
    [quoted("it's"), String.raw`'it'\''s'`],
  ];
  for (const [is, should] of written) test(should, () => assert.equal(is, should));
});

/** Each second holds its own number, so that what stands where can be checked. */
function slots(from: number, length: number, shed: Slots["shed"] = {}): Slots {
  const seconds = Array.from({ length }, (_, at) => from + at);
  const columns = Object.fromEntries(COLUMNS.map((name) => [name, seconds])) as Record<Column, number[]>;
  return {
    from,
    length,
    columns,
    depth: [seconds, seconds],
    fill: Array.from({ length: FILL_STEPS }, () => seconds),
    shed,
  };
}

describe("the history", () => {
  test("whatever comes, in whatever pieces, every list is as long as it says and each second in its place", () => {
    const piece = fc.tuple(fc.integer({ min: 1000, max: 2400 }), fc.integer({ min: 0, max: 40 }));
    fc.assert(
      fc.property(fc.array(piece, { maxLength: 40 }), (pieces) => {
        const history = new History();
        for (const [from, length] of pieces.sort(([a], [b]) => a - b)) history.merge(slots(from, length));
        assert.ok(history.length <= 900);
        const lists = [...history.columns.values(), ...history.depth, ...history.fill];
        for (const list of lists) {
          assert.equal(list.length, history.length);
          list.forEach((value, at) => assert.ok(!value || value === history.from + at));
        }
      }),
    );
  });

  test("a gap is null where a line would lie, 0 where things are counted", () => {
    const history = new History();
    history.merge(slots(100, 2));
    history.merge(slots(104, 1));
    assert.deepEqual(history.last("p99", 5), [100, 101, null, null, 104]);
    assert.deepEqual(history.last("requests", 5), [100, 101, 0, 0, 104]);
    assert.equal(history.sum("requests", 3), 104);
  });

  test("after a restart the server's history is laid over what was seen before", () => {
    const history = new History();
    history.merge(slots(100, 10));
    history.merge(slots(105, 3));
    assert.deepEqual([history.from, history.length], [100, 8]);
    history.merge(slots(5000, 2));
    assert.deepEqual([history.from, history.length], [5000, 2], "too long ago to matter");
  });

  test("a refusal that is new starts with zeros; one that is long past is forgotten", () => {
    const history = new History();
    history.merge(slots(100, 2));
    history.merge(slots(102, 1, { "free rate": [7] }));
    assert.deepEqual(history.shed.get("free rate"), [0, 0, 7]);
    for (let at = 103; at < 1100; at++) history.merge(slots(at, 1));
    assert.equal(history.shed.size, 0);
  });
});

describe("batches", () => {
  const row = (id: string, start: number, end: number, lengths = "", why = ""): BatchRow => [
    id,
    "gpu-1",
    start,
    end,
    5,
    0,
    1,
    1,
    1,
    "5",
    lengths,
    why,
  ];

  test("a batch whose end was left out is over when the next begins, or when its worker has none", () => {
    const batches = new Batches();
    batches.merge([row("a", 100, 0), row("b", 200, 0)], 300);
    assert.deepEqual(
      batches.of("gpu-1").map(({ end }) => end),
      [200, 0],
    );
    batches.end(400, ({ worker }) => worker === "gpu-1");
    assert.equal(batches.of("gpu-1")[1]!.end, 0);
    batches.end(400, () => false);
    assert.equal(batches.of("gpu-1")[1]!.end, 400);
    batches.merge([row("b", 200, 0)], 500);
    assert.equal(batches.of("gpu-1")[1]!.end, 400, "an older word does not make it run again");
    batches.merge([row("b", 200, 390)], 500);
    assert.equal(batches.of("gpu-1")[1]!.end, 390);
  });

  test("one that hangs for minutes is still there; a copy does not change", () => {
    const batches = new Batches();
    batches.merge([row("a", 100, 0)], 100);
    const copy = batches.copy();
    batches.merge([], 600_000);
    assert.equal(batches.size, 1);
    batches.merge([row("a", 100, 600_100)], 900_000);
    assert.equal(batches.size, 0);
    assert.deepEqual(
      copy.of("gpu-1").map(({ end }) => end),
      [0],
    );
  });

  test("a batch comes twice and is there once, with its last word; rows are in the order of their start", () => {
    const batches = new Batches();
    batches.merge([row("b", 200, 0), row("a", 100, 190)], 300);
    batches.merge([row("b", 200, 290)], 400);
    assert.deepEqual(
      batches.of("gpu-1").map(({ id, end }) => [id, end]),
      [
        ["a", 190],
        ["b", 290],
      ],
    );
    assert.deepEqual(
      batches.latest(1).map(({ id }) => id),
      ["b"],
    );
  });

  test("what was told of it stays: its sentence, its lengths", () => {
    const batches = new Batches();
    batches.merge([row("a", 100, 0, "", "similar length")], 200);
    assert.equal(batches.of("gpu-1")[0]!.lengths, undefined);
    batches.merge([row("a", 100, 190, "16/60/412", "")], 300);
    const { lengths, why } = batches.of("gpu-1")[0]!;
    assert.deepEqual([lengths, why], [{ longest: 16, total: 60, inOrder: 412 }, "similar length"]);
  });

  test("those of more than a minute ago are forgotten, also one that never ended", () => {
    const batches = new Batches();
    batches.merge([row("a", 0, 0), row("b", 10, 90)], 100);
    batches.merge([], 80_000);
    assert.equal(batches.size, 0);
  });
});

test("the server's clock follows slowly, and jumps when it must", () => {
  const clock = new ServerClock();
  clock.set(1000, 0);
  clock.set(1600, 500);
  assert.ok(clock.at(500) > 1500 && clock.at(500) < 1520);
  clock.set(90_000, 1000);
  assert.equal(clock.at(1000), 90_000);
});

test("the parser gives the same events however the text is cut", () => {
  const text =
    ': ferry\nretry: 1000\n\nevent: hello\ndata: {"a":1}\r\n\r\nevent: frame\ndata: one\ndata: two\n\ndata:x\n\n';
  const expected = [
    ["hello", '{"a":1}'],
    ["frame", "one\ntwo"],
    ["message", "x"],
  ];
  fc.assert(
    fc.property(fc.array(fc.integer({ min: 0, max: text.length }), { maxLength: 12 }), (cuts) => {
      const heard: string[][] = [];
      const parser = new Parser((event: string, data: string) => heard.push([event, data]));
      const at = [0, ...cuts.sort((a, b) => a - b), text.length];
      for (let i = 1; i < at.length; i++) parser.push(text.slice(at[i - 1], at[i]));
      assert.deepEqual(heard, expected);
    }),
  );
});

describe("the story of a task", () => {
  const at = (ms: number): string => new Date(1_800_000_000_000 + ms).toISOString();
  const known = { task_id: "1", tenant: "acme", model: "m", tier: "paid", state: "done", attempts: 2 };
  const what = (story: Parameters<typeof stepsOf>[0]): string[] => stepsOf(story).map(({ what }) => what);

  test("with its failed attempt, in the order of time", () => {
    const story = {
      ...known,
      created_at: at(0),
      queued_at: at(150),
      failed_attempts: [{ at: at(101), attempt: 1, worker: "gpu-2", message: "answered 500" }],
      batch: {
        id: "b",
        size: 5,
        reason: "idle",
        why: "a worker was free",
        worker: "gpu-1",
        started_at: at(160),
      },
      settled_at: at(260),
      outcome: { ok: true, output_bytes: 12 },
      requests: [{ status: 200, work: "own", arrived_at: at(0), answered_at: at(261) }],
    };
    const steps = ["Arrived", "Failed, tried again", "Queued", "Sent to a worker", "Done", "Answered"];
    assert.deepEqual(what(story), steps);
    assert.equal(stepsOf(story)[1]!.more, "attempt 1: gpu-2: answered 500");
  });

  test("of a request that was refused, as far as the log knows", () => {
    const refused = { status: 429, code: "RATE_LIMITED", work: "own", arrived_at: at(0), answered_at: at(1) };
    assert.deepEqual(what({ ...known, created_at: at(0), requests: [refused] }), ["Arrived", "Answered"]);
  });
});
