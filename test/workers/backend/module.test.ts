import assert from "node:assert/strict";
import { describe, test } from "./suite.ts";
import { setImmediate as turn } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import type { Worker } from "../../../src/workers/backend/backend.ts";
import { ModuleBackend, type ModuleOptions } from "../../../src/workers/backend/module.ts";
import { SystemClock } from "../../../src/app/clock.ts";
import { Events } from "../../../src/observe/events.ts";
import { assertMessage, assertOneLine, backendContract, batchOf, outputsOf } from "../../contract/backend.ts";

const never = new AbortController().signal;
const model = (file: string): string => fileURLToPath(new URL(`models/${file}`, import.meta.url));

function backendFor(fn: string, more: Partial<ModuleOptions> = {}, events = new Events()): ModuleBackend {
  const options = { workers: 1, startTimeoutMs: 20_000, ...more, function: model(fn) };
  return new ModuleBackend(options, { model: "m", clock: new SystemClock(), events });
}

async function withWorker(
  fn: string,
  check: (worker: Worker & { probe(signal: AbortSignal): Promise<boolean> }, events: Events) => Promise<void>,
): Promise<void> {
  const events = new Events();
  const backend = backendFor(fn, {}, events);
  await backend.start();
  try {
    await check(backend.workers[0]!, events);
  } finally {
    await backend.stop();
  }
}

async function answers(worker: Worker, inputs: string[], parameters = ""): Promise<string[]> {
  const batch = batchOf(inputs, parameters);
  return outputsOf(batch, await worker.run(batch, never));
}

backendContract(
  "module",
  (mood, workers) => {
    const backend = backendFor(mood === "well" ? "module.ts" : `module.ts:${mood}`, { workers });
    return Promise.resolve(Object.assign(backend, { [Symbol.asyncDispose]: () => Promise.resolve() }));
  },
  { reprints: true, abortedBatches: 24 },
);

describe("module:", () => {
  test("what JSON cannot hold is `unusable`, never dropped or turned into null", () =>
    withWorker("module.ts:returning", async (worker) => {
      const cases: [what: string, message: RegExp][] = [
        ["nothing", /returned undefined, not an array/],
        ["null", /returned null, not an array/],
        ["string", /returned a string, not an array/],
        ["object", /returned an Object, not an array/],
        ["long", /worker returned 3 outputs for 2 inputs/],
        ["undefined", /^output 1 cannot be written as JSON: it holds undefined$/],
        ["hole", /^output 0 .* undefined$/],
        ["undefined inside", /^output 1 .* undefined at "label"$/],
        ["undefined in an array", /^output 0 .* undefined at "0"$/],
        ["NaN", /^output 0 .* NaN$/],
        ["NaN inside", /^output 1 .* NaN at "1"$/],
        ["Infinity", /^output 1 .* -Infinity at "0"$/],
        ["NaN in an array", /^output 0 .* NaN at "1"$/],
        ["BigInt", /^output 1 .* a bigint$/],
        ["function", /^output 0 .* a function at "run"$/],
        ["symbol", /^output 0 .* a symbol$/],
        ["circular", /^output 1 .* circular/],
        ["promises", /^output 0 .* a promise \(await it, or use Promise.all\)$/],
        ["map", /^output 0 .* a Map$/],
        ["date", /^output 0 .* an invalid Date$/],
        ["a BigInt inside", /^output 0 .* a bigint at "0"$/],
        ["a toJSON that throws", /^output 1 cannot be written as JSON: AssertionError/],
        ["a getter that throws", /^output 1 cannot be written as JSON: AssertionError/],
        ["a toJSON", /^output 0 .* NaN$/],
        ["raw JSON", /^output 1 holds a number beyond the range of a double$/],
        ["deeper", /^output 1 is nested deeper than 64$/],
        ["much deeper", /^output 1 (cannot be written as JSON: RangeError|is nested deeper than 64)/],
      ];
      for (const [what, message] of cases) {
        assertMessage(await worker.run(batchOf([`"${what}"`, "0"]), never), "unusable", message);
      }
      assert.deepEqual(await answers(worker, ['"tensors"', "0"]), [
        '{"$tensor":"float32","shape":[2],"base64":"AAAAPwAAwH8="}',
        '{"$tensor":"uint8","shape":[2],"base64":"AQI="}',
      ]);
      assert.deepEqual(await answers(worker, ['"bytes"', "0"]), ['{"$bytes":"AQI="}', '{"$bytes":"Aw=="}']);
      assert.deepEqual(await answers(worker, ['"deep"', "0"]), [
        '{"deep":[0.5,1]}',
        '{"$tensor":"int64","shape":[1],"base64":"//////////8="}',
      ]);
      assert.deepEqual(await answers(worker, ['"scores"', "0"]), ["0.25", "0.5"]);
      assert.deepEqual(await answers(worker, ['"raw keys"', "0"]), [
        '{"a":"x","ab":1}',
        "12345678901234567890",
      ]);
      assert.deepEqual(await answers(worker, ['"fine"', "0"]), [
        '{"at":"1970-01-01T00:00:00.000Z","none":null,"list":[]}',
        '"é\\ud800"',
      ]);
    }));

  test("parameters are an object, empty when there are none", () =>
    withWorker("module.ts:withParameters", async (worker) => {
      assert.deepEqual(await answers(worker, ["1"], '{"k":[1]}'), ['{"k":[1]}']);
      assert.deepEqual(await answers(worker, ["1"]), ["{}"]);
    }));

  test("the default export and a named one, also of CommonJS", async () => {
    await withWorker("named.cjs", async (worker) => {
      assert.deepEqual(await answers(worker, ["1"]), ['["default",1]']);
    });
    await withWorker("named.cjs:named", async (worker) => {
      assert.deepEqual(await answers(worker, ["1"]), ['["named",1]']);
    });
  });

  test("what the code posts to the thread's parent is no answer, and no harm", () =>
    withWorker("module.ts:posting", async (worker) => {
      const posted = ["null", "7", '"x"', "[]", '{"kind":"begun"}', '{"kind":"outputs","number":1}'];
      assert.deepEqual(await answers(worker, posted), posted);
    }));

  test("what the code prints comes out line by line", () =>
    withWorker("module.ts:printing", async (worker, events) => {
      const out = events.next("worker.printed", ({ stream }) => stream === "stdout");
      const err = events.next("worker.printed", ({ stream }) => stream === "stderr");
      assert.deepEqual(await answers(worker, ["1"]), ["1"]);
      assert.deepEqual(await out, { model: "m", worker: "module-1", stream: "stdout", line: "from log" });
      assert.equal((await err).line, "from error");
    }));

  test("each way to die is told apart, and what is only thrown is no death", () =>
    withWorker("module.ts:dying", async (worker) => {
      const cases: [how: string, message: RegExp][] = [
        ["exit", /^module-1 ended with exit code 4$/],
        ["uncaught", /^module-1 died of TypeError: nobody catches this$/],
        ["unhandled", /^module-1 died of Error: nobody waits for this$/],
      ];
      for (const [how, message] of cases) {
        const reply = await worker.run(batchOf([`"${how}"`]), never);
        assertMessage(reply, "failed", message);
        assert.equal(reply.kind === "failed" && reply.blame, "batch");
        assert.equal(await worker.probe(never), true);
        assert.deepEqual(await answers(worker, ["1"]), ["1"]);
      }
      const reply = await worker.run(batchOf(['"string"']), never);
      assert.deepEqual(reply, { kind: "rejected", message: "thrown: only a string" });
    }));

  test("an endless loop ends with the abort, and the next thread is well", () =>
    withWorker("module.ts:endlessLoop", async (worker) => {
      const abort = new AbortController();
      const running = worker.run(batchOf(["1"]), abort.signal);
      await turn();
      abort.abort();
      assert.deepEqual(await running, { kind: "failed", message: "aborted", blame: "batch" });
      assert.equal(await worker.probe(never), true);
    }));

  const unstartable: [name: string, fn: string, more: Partial<ModuleOptions>, message: RegExp][] = [
    ["a missing file", "absent.ts", {}, /^cannot find \/.*\/absent.ts; check backend.function$/],
    ["a file that throws", "broken.ts", {}, /^cannot import \/.*broken.ts: Error: cannot load the weights$/],
    ["a missing export", "module.ts:ehco", {}, /module.ts has no exported function "ehco" \(it has .*short/],
    [
      "an export that is no function",
      "module.ts:notAFunction",
      {},
      /has no exported function "notAFunction"/,
    ],
    [
      "a file without a default export",
      "named-only.ts",
      {},
      /has no default export that is a function \(it has echo\);/,
    ],
    [
      "a file that ends the thread",
      "fatal-import.ts",
      {},
      /^module-\d ended with exit code 5 before it was ready$/,
    ],
    [
      "a file that loads for too long",
      "slow-import.ts",
      { startTimeoutMs: 100 },
      /^module-\d was not ready within 100 ms; raise backend.startTimeoutMs$/,
    ],
  ];
  for (const [name, fn, more, message] of unstartable) {
    test(`cannot start: ${name}`, async () => {
      const backend = backendFor(fn, { workers: 2, ...more });
      await assert.rejects(backend.start(), (error: Error) => {
        assert.match(error.message, message);
        assertOneLine(error.message);
        return true;
      });
      await backend.stop();
    });
  }
});
