/** Events in, seconds out: exact where it must be, and against a naive model. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { type Column, COLUMNS, HISTORY_SECONDS } from "../../../src/observe/dashboard/frames.ts";
import { rounded } from "../../../src/observe/dashboard/slots.ts";
import { RULES, Stage, START, TIERS, workerSight } from "./stage.ts";

const gold = (size: number): number[] => new Array<number>(size).fill(0);

function column(stage: Stage, name: Column): readonly (number | null)[] {
  return stage.look().slots.columns[name];
}

describe("seconds", () => {
  test("each event is in the second in which it happened, and quiet seconds are there too", async () => {
    using stage = new Stage();
    await stage.to(300);
    stage.answer(100);
    stage.answer(100, { status: 502 });
    stage.answer(100, { status: 429, ending: undefined });
    stage.answer(100, { model: "" });
    stage.answer(100, { status: 499 });
    await stage.to(2500);
    stage.events.emit("task.queued", { id: "a", model: "embed", tier: 2, at: 0 });
    stage.events.emit("task.cached", { id: "a", model: "embed" });
    stage.events.emit("task.joined", { id: "a", model: "embed" });
    stage.events.emit("task.lost", { id: "a", model: "", why: "a bug" });
    await stage.to(3000);
    const { slots } = stage.look();
    assert.equal(slots.from, START / 1000);
    assert.equal(slots.length, 3);
    assert.deepEqual(slots.columns.requests, [3, 0, 0]);
    assert.deepEqual(slots.columns.failed, [1, 0, 0]);
    assert.deepEqual(slots.columns.arrivals, [0, 0, 1]);
    assert.deepEqual(slots.columns.cached, [0, 0, 1]);
    assert.deepEqual(slots.columns.joined, [0, 0, 1]);
    // Whose it was is not known; there is only one model.
    assert.deepEqual(slots.columns.lost, [0, 0, 1]);
    assert.equal(slots.columns.p50[1], null);
    assert.ok(Math.abs(slots.columns.p50[0]! - 100) < 2);
    for (const name of COLUMNS) assert.equal(slots.columns[name].length, 3, name);
  });

  test("whoever is told to come again was refused, once, whether the door said so or the store was away", async () => {
    using stage = new Stage();
    const shed = { model: "embed", tier: "tin", tenant: "u", reason: "capacity" as const, retryAfterMs: 9 };
    const turnedAway = { status: 503, ending: undefined };
    await stage.to(500);
    stage.events.emit("request.shed", shed);
    stage.answer(1, turnedAway);
    stage.events.emit("request.shed", shed);
    await stage.to(1500);
    stage.answer(1, turnedAway);
    await stage.to(2500);
    stage.answer(1, turnedAway);
    stage.answer(1, turnedAway);
    await stage.to(3000);
    assert.deepEqual(column(stage, "refused"), [2, 0, 2]);
    assert.deepEqual(column(stage, "failed"), [0, 0, 0]);
    assert.equal(stage.look().recent.refusedShare, 1);
  });

  test("fifteen minutes are kept", async () => {
    using stage = new Stage();
    stage.answer(10);
    await stage.to((HISTORY_SECONDS + 5) * 1000);
    const { slots } = stage.look();
    assert.equal(slots.length, HISTORY_SECONDS);
    assert.equal(slots.from, START / 1000 + 5);
    assert.equal(
      slots.columns.requests.reduce<number>((sum, each) => sum + each!, 0),
      0,
    );
  });

  test("of many models a newcomer is told less, of each at least a minute", async () => {
    const models = (count: number) =>
      Array.from({ length: count }, (_, at) => ({
        ...RULES.models[0]!,
        name: at === 0 ? "embed" : `m${at}`,
      }));
    for (const [count, seconds] of [
      [16, HISTORY_SECONDS],
      [32, HISTORY_SECONDS / 2],
      [256, 60],
    ] as const) {
      using stage = new Stage({ models: models(count) });
      await stage.to(1000 * HISTORY_SECONDS);
      const { slots } = stage.look();
      assert.equal(slots.length, seconds);
      assert.equal(slots.from, START / 1000 + HISTORY_SECONDS - seconds);
    }
  });

  test("a machine that slept goes on with nothing, and one that was only late with quiet seconds", async () => {
    const stage = new Stage();
    stage.fold.stop();
    let [now, ring] = [START, (): void => {}];
    const clock = {
      now: () => now,
      wall: () => now,
      at: (_: number, rung: () => void) => ((ring = rung), { cancel() {} }),
    };
    const fold = stage.foldOn(clock, RULES);
    stage.answer(10);
    now = START + 3400;
    ring();
    assert.deepEqual(fold.hello().models[0]!.slots.columns.requests, [1, 0, 0]);
    now = START + 8 * 3_600_000;
    ring();
    const { slots, recent } = fold.hello().models[0]!;
    assert.equal(slots.length, 0);
    assert.equal(recent.p50, null);
    now += 1000;
    ring();
    assert.equal(fold.hello().models[0]!.slots.length, 1);
  });

  test("what waits is looked at when a second ends", async () => {
    using stage = new Stage();
    stage.model.queuedByTier = [1, 2, 3];
    stage.model.oldestWaitMs = 44;
    stage.model.load = 0.5;
    stage.loopLateMs = 12;
    await stage.to(1000);
    stage.model.queuedByTier = [0, 0, 7];
    await stage.to(2000);
    const { slots } = stage.look();
    assert.deepEqual(slots.depth, [
      [1, 0],
      [2, 0],
      [3, 7],
    ]);
    assert.deepEqual(slots.columns.oldestWaitMs, [44, 44]);
    assert.deepEqual(slots.columns.load, [0.5, 0.5]);
    assert.deepEqual(slots.columns.loopLateMs, [12, 12]);
  });

  test("a frame has what came since the one before, a hello all; none is told twice", async () => {
    using stage = new Stage();
    await stage.to(1000);
    assert.equal(stage.fold.frame().models[0]!.slots.length, 1);
    stage.begin("b1", "gpu-1", gold(8));
    stage.events.emit("notice", { level: "warn", message: "look here" });
    const first = stage.fold.frame();
    assert.deepEqual(
      first.models[0]!.batches.map(([id, , , endedAt]) => [id, endedAt]),
      [["b1", 0]],
    );
    assert.deepEqual(first.notes, [{ at: START + 1000, level: "warn", text: "look here" }]);
    await stage.to(3200);
    stage.end("b1", "gpu-1", 8, 150);
    const second = stage.fold.frame();
    assert.equal(second.models[0]!.slots.from, START / 1000 + 1);
    assert.equal(second.models[0]!.slots.length, 2);
    assert.deepEqual(second.models[0]!.batches[0], [
      "b1",
      "gpu-1",
      START + 1000,
      START + 1150,
      8,
      2,
      10,
      1,
      1,
      "8/0/0",
      "",
      "",
    ]);
    assert.deepEqual(second.notes, []);
    const hello = stage.fold.hello();
    assert.equal(hello.models[0]!.slots.length, 3);
    assert.equal(hello.models[0]!.batches.length, 1);
    assert.equal(hello.notes.length, 1);
    const third = stage.fold.frame();
    assert.equal(third.models[0]!.slots.length, 0);
    assert.deepEqual(third.models[0]!.batches, []);
  });
});

describe("worker time", () => {
  test("a batch that spans seconds is spread over them, seat by seat", async () => {
    using stage = new Stage();
    await stage.to(500);
    stage.begin("b1", "gpu-1", gold(16));
    await stage.to(2250);
    stage.end("b1", "gpu-1", 16, 1750);
    await stage.to(3000);
    assert.deepEqual(column(stage, "filledMs"), [125, 250, 62.5]);
    assert.deepEqual(column(stage, "emptyMs"), [375, 750, 188]);
    assert.deepEqual(column(stage, "idleMs"), [1500, 1000, 1750]);
    assert.deepEqual(
      stage.look().workers.map(({ name, busy, filled }) => [name, busy, filled]),
      [
        ["gpu-1", 0.583, 0.146],
        ["gpu-2", 0, 0],
      ],
    );
  });

  test("a batch that hangs is busy time while it does", async () => {
    using stage = new Stage();
    stage.begin("b1", "gpu-1", gold(64));
    await stage.to(5000);
    assert.deepEqual(column(stage, "filledMs"), [1000, 1000, 1000, 1000, 1000]);
  });

  test("batches by reason and by how full they were", async () => {
    using stage = new Stage();
    stage.begin("b1", "gpu-1", gold(64), { reason: "full" });
    stage.begin("b2", "gpu-2", [0, 1, 2, 2], { reason: "deadline", attempt: 3 });
    stage.begin("b3", "gpu-2", gold(33), { reason: "wait" });
    await stage.to(1000);
    const { slots, batches } = stage.look();
    assert.deepEqual(slots.columns.batches, [3]);
    assert.deepEqual(slots.columns.tasks, [101]);
    const reasons = (["full", "wait", "idle", "deadline"] as const).map((name) => slots.columns[name][0]);
    assert.deepEqual(reasons, [1, 1, 0, 1]);
    assert.deepEqual(
      slots.fill.map(([count]) => count),
      [1, 0, 0, 0, 1, 0, 0, 1],
    );
    assert.deepEqual(batches.find(([id]) => id === "b2")!.slice(8, 10), [3, "1/1/2"]);
  });

  test("a gateway learns of batches from the ends of its tasks, each once, and long ones are carried on", async () => {
    using stage = new Stage({ role: "gateway", fleet: true });
    stage.model.workers = [workerSight("gpu-1")];
    const note = stage.note("far", START + 500, 32);
    const ending = { queuedAt: START + 480, attempt: 1, settledAt: START + 2900, batch: note };
    await stage.to(2910);
    const ended = { task: { model: "embed" }, ...ending };
    for (let time = 0; time < 3; time++) {
      stage.fold.ended({ ...ended, outcome: { ok: true, output: "1" } });
      stage.answer(2430, { ending });
    }
    // Its end is now, its batch was long ago: from the cache, or too late for another attempt.
    const old = { ...ended, batch: stage.note("old", START - 9000, 64) };
    stage.fold.ended({ ...old, cached: true, outcome: { ok: true, output: "1" } });
    stage.answer(5, { work: "cached", ending: old });
    stage.fold.ended({ ...old, outcome: { ok: false, code: "DEADLINE_EXCEEDED", message: "" } });
    stage.fold.ended({ ...old, task: { model: "unknown" }, outcome: { ok: true, output: "1" } });
    await stage.to(6000);
    const { slots, batches } = stage.look();
    assert.deepEqual(slots.columns.batches, [0, 0, 1, 0, 0, 0]);
    assert.deepEqual(slots.columns.tasks, [0, 0, 32, 0, 0, 0]);
    assert.deepEqual(batches, [["far", "gpu-1", START + 500, START + 2900, 32, 2, 20, 1, 1, "", "", ""]]);
    // 2.4 s were heard of in one second, and one worker has only 1 s in each.
    assert.deepEqual(slots.columns.filledMs, [0, 0, 500, 500, 200, 0]);
    assert.deepEqual(slots.columns.idleMs, [1000, 1000, 0, 0, 600, 1000]);
  });
});

describe("padding", () => {
  test("cells of measured batches, what order of arrival would have computed, and the time between", async () => {
    using stage = new Stage();
    stage.begin("b1", "gpu-1", gold(4), { why: "4 of 64: similar length" });
    stage.begin("b2", "gpu-2", gold(2));
    await stage.to(200);
    const [short, long] = [
      { longest: 10, total: 30, inOrder: 90 },
      { longest: 90, total: 150, inOrder: 80 },
    ];
    stage.end("b1", "gpu-1", 4, 200, { shape: { rows: 4, ...short }, savedMs: 300 });
    stage.end("b2", "gpu-2", 2, 100, { shape: { rows: 2, ...long }, savedMs: -40 });
    // One whose cost is not known yet, and one that was not measured.
    for (const id of ["b3", "b4"]) stage.begin(id, "gpu-1", gold(1));
    stage.end("b3", "gpu-1", 1, 9, { shape: { rows: 1, longest: 5, total: 5, inOrder: 5 } });
    stage.end("b4", "gpu-1", 1, 9);
    await stage.to(1000);
    assert.deepEqual(column(stage, "paddedCells"), [40 + 180 + 5]);
    assert.deepEqual(column(stage, "inOrderCells"), [360 + 160 + 5]);
    assert.deepEqual(column(stage, "usefulCells"), [30 + 150 + 5]);
    assert.deepEqual(column(stage, "groupedMs"), [300]);
    // Useful shares of b1 (30 of 40) and b2 (150 of 180); a place each of b3 and b4.
    assert.deepEqual(column(stage, "filledMs"), [rounded(200 * 0.75 + 100 * (5 / 6) + 18 / 64)]);
    assert.deepEqual(
      stage.look().workers.map(({ filled }) => filled),
      [0.013, 0.003],
      "places, as ever",
    );
    assert.deepEqual(column(stage, "savedMs"), [260]);
    assert.deepEqual(
      stage.look().batches.map((row) => [row[0], ...row.slice(10)]),
      [
        ["b1", "10/30/90", "4 of 64: similar length"],
        ["b2", "90/150/80", ""],
        ["b3", "5/5/5", ""],
        ["b4", "", ""],
      ],
    );
  });

  test("what a batch's time follows is told in words, unless that is its size alone", async () => {
    using stage = new Stage();
    assert.equal(stage.look().cost, null);
    const rows = { kind: "rows", baseMs: 12, perRowMs: 0.25, perTokenMs: 0, grouped: false } as const;
    stage.model.cost = rows;
    assert.equal(stage.look().cost, null);
    stage.model.cost = { ...rows, grouped: true };
    assert.deepEqual(stage.look().cost, {
      kind: "rows",
      words: "12 ms + 0.25 ms a row",
      paddingRatio: null,
      grouped: true,
    });
    const padded = { baseMs: 0.4991, perRowMs: 0.00512, perTokenMs: 0.000_46, grouped: true };
    stage.model.cost = { kind: "padded", ...padded };
    stage.model.paddingRatio = 1.2345;
    assert.deepEqual(stage.look().cost, {
      kind: "padded",
      words: "0.5 ms + 5.1 µs a row + 0.46 µs a token of the padded batch",
      paddingRatio: 1.23,
      grouped: true,
    });
    stage.model.cost = { kind: "packed", ...padded, perRowMs: 0 };
    assert.equal(stage.look().cost!.words, "0.5 ms + 0.46 µs a token");
  });

  test("a worker that is given longer inputs is not slow", async () => {
    using stage = new Stage();
    let now = 0;
    const run = async (count: number, longest: number, ms: number, savedMs?: number): Promise<void> => {
      for (let n = 0; n < count; n++) {
        stage.begin(`${now}`, "gpu-1", gold(8));
        await stage.to((now += ms));
        const shape = { rows: 8, longest, total: 8 * longest, inOrder: longest };
        stage.end(`${now - ms}`, "gpu-1", 8, ms, { shape, savedMs });
      }
    };
    await run(300, 100, 100, 0);
    await run(16, 400, 400, 0);
    assert.doesNotMatch(stage.look().verdict.sentence, /slow/i);
    await run(16, 100, 400, 0);
    assert.match(stage.look().verdict.sentence, /slow/i);
  });
});

test("an answer from the cache spent nothing in the queue or at a worker, however the store dates it", async () => {
  using stage = new Stage();
  await stage.to(500);
  const batch = stage.note("old", START - 9000, 64);
  const ending = { queuedAt: START + 495, attempt: 0, settledAt: START + 499, batch };
  stage.answer(8, { work: "cached", ending });
  await stage.to(1000);
  assert.deepEqual(stage.look().recent.slow, { queueMs: 0, workerMs: 0, gatewayMs: 8 });
});

test("a naive model agrees: the sum of the seconds is what was fed", async () => {
  const step = fc.record({
    waitMs: fc.integer({ min: 0, max: 700 }),
    what: fc.constantFrom("answer", "fail", "queue", "shed", "begin", "end", "retry"),
    size: fc.integer({ min: 1, max: 64 }),
    tier: fc.integer({ min: 0, max: 2 }),
  });
  await fc.assert(
    fc.asyncProperty(fc.array(step, { maxLength: 60 }), async (steps) => {
      using stage = new Stage();
      const naive = { requests: 0, failed: 0, arrivals: 0, refused: 0, batches: 0, tasks: 0, retried: 0 };
      const running: { id: string; worker: string; size: number; startedAt: number }[] = [];
      const busy: number[] = [];
      let filled = 0;
      const finish = ({ id, worker, size, startedAt }: (typeof running)[number]): void => {
        const ms = stage.clock.now() - startedAt;
        stage.end(id, worker, size, ms);
        busy.push(ms);
        filled += (ms * size) / 64;
      };
      let now = 0;
      for (const [at, { waitMs, what, size, tier }] of steps.entries()) {
        await stage.to((now += waitMs));
        if (what === "answer" || what === "fail") {
          stage.answer(size, { status: what === "fail" ? 502 : 200 });
          naive.requests++;
          if (what === "fail") naive.failed++;
        } else if (what === "queue") {
          stage.events.emit("task.queued", { id: "x", model: "embed", tier, at: 0 });
          naive.arrivals++;
        } else if (what === "shed") {
          const refused = { model: "embed", tier: TIERS[tier]!, tenant: "u", reason: "rate" as const };
          stage.events.emit("request.shed", { ...refused, retryAfterMs: 1 });
          naive.refused++;
        } else if (what === "retry") {
          const rest = { attempt: 2, at: 0, message: "", batchId: "", worker: "" };
          stage.events.emit("task.retried", { id: "x", model: "embed", ...rest });
          naive.retried++;
        } else if (what === "begin" && running.length < 2) {
          const worker = running.some((each) => each.worker === "gpu-1") ? "gpu-2" : "gpu-1";
          stage.begin(`b${at}`, worker, new Array<number>(size).fill(tier));
          running.push({ id: `b${at}`, worker, size, startedAt: stage.clock.now() });
          naive.batches++;
          naive.tasks += size;
        } else if (running.length > 0) finish(running.shift()!);
      }
      running.forEach(finish);
      const seconds = Math.floor(now / 1000) + 2;
      await stage.to(seconds * 1000);
      const { slots } = stage.look();
      const sum = (name: Column): number =>
        slots.columns[name].reduce<number>((total, each) => total + each!, 0);
      for (const [name, value] of Object.entries(naive)) assert.equal(sum(name as Column), value, name);
      const busyMs = busy.reduce((total, each) => total + each, 0);
      // Each second is rounded to three digits.
      const slack = 0.51 * seconds + 0.001;
      assert.ok(Math.abs(sum("filledMs") - filled) <= slack, `${sum("filledMs")} for ${filled}`);
      assert.ok(Math.abs(sum("filledMs") + sum("emptyMs") - busyMs) <= 2 * slack);
      assert.ok(Math.abs(sum("idleMs") + busyMs - 2000 * seconds) <= 3 * slack);
    }),
    { numRuns: 60 },
  );
});

test("workers: since when one is down, and what its batches usually take", async () => {
  using stage = new Stage();
  for (let n = 0; n < 6; n++) {
    stage.begin(`b${n}`, "gpu-1", gold(8));
    await stage.to(100 * (n + 1));
    stage.end(`b${n}`, "gpu-1", 8, 100);
  }
  await stage.to(1500);
  const gone = { ...workerSight("gpu-2", "down"), down: { why: "ECONNREFUSED", retryInMs: 900 } };
  stage.model.workers = [workerSight("gpu-1"), gone];
  stage.events.emit("worker.changed", {
    model: "embed",
    worker: "gpu-2",
    state: "down",
    why: "ECONNREFUSED",
  });
  await stage.to(4000);
  const [one, two] = stage.look().workers;
  assert.equal(one!.batchMs, 100);
  assert.deepEqual(two!.down, { why: "ECONNREFUSED", sinceMs: 2500, retryInMs: 900 });
  assert.match(stage.look().verdict.sentence, /^gpu-2 is down for 2,500 ms \(ECONNREFUSED\)\. /);
  stage.model.workers = [workerSight("gpu-1"), workerSight("gpu-2")];
  await stage.to(5000);
  assert.equal(stage.look().workers[1]!.down, undefined);
});

test("workers that other processes run are noted when they go and when they come back", async () => {
  using stage = new Stage({ role: "gateway", fleet: true });
  const far = { ...workerSight("gpu-1"), own: false };
  stage.model.workers = [far];
  await stage.to(1000);
  stage.model.workers = [{ ...far, state: "down", down: { why: "ECONNREFUSED", retryInMs: 0 } }];
  await stage.to(3000);
  stage.model.workers = [far];
  await stage.to(5000);
  const notes = stage.fold.hello().notes.map(({ level, text }) => [level, text]);
  assert.deepEqual(notes, [
    ["warn", "gpu-1 of embed is down: ECONNREFUSED"],
    ["info", "gpu-1 of embed is idle"],
  ]);
});

test("another number of workers is noted, with the reason", async () => {
  using stage = new Stage();
  stage.events.emit("scaling.changed", { model: "embed", from: 2, desired: 5, reason: "a long line: +3" });
  await stage.to(1000);
  const notes = stage.fold.hello().notes.map(({ level, text }) => [level, text]);
  assert.deepEqual(notes, [["info", "embed wants 5 workers instead of 2: a long line: +3"]]);
});
