/** What Python functions may return beside JSON: bytes, arrays, tensors, and callables; through a real child. */
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { fileURLToPath } from "node:url";
import { describe, test } from "./suite.ts";
import type { Reply } from "../../../src/workers/backend/backend.ts";
import { PythonBackend } from "../../../src/workers/backend/python.ts";
import type { ChildWorker } from "../../../src/workers/backend/child-workers.ts";
import { SystemClock } from "../../../src/app/clock.ts";
import { type Dtype, tensorText } from "../../../src/core/tensor.ts";
import { Events } from "../../../src/observe/events.ts";
import { assertMessage, batchOf, outputsOf } from "../../contract/backend.ts";

const PYTHON = execFileSync("python3", ["-c", "import sys; print(sys.executable)"], {
  encoding: "utf8",
}).trim();
process.env["PYTHONDONTWRITEBYTECODE"] = "1";

const never = new AbortController().signal;
const file = fileURLToPath(new URL("models/arrays.py", import.meta.url));

async function withWorker(name: string, check: (worker: ChildWorker) => Promise<void>): Promise<void> {
  const backend = new PythonBackend(
    {
      function: `${file}:${name}`,
      workers: 1,
      python: PYTHON,
      startTimeoutMs: 20_000,
      maxReplyBytes: 4_000_000,
    },
    { model: "m", clock: new SystemClock(), events: new Events() },
  );
  await backend.start();
  try {
    await check(backend.workers[0]!);
  } finally {
    await backend.stop();
  }
}

async function answers(worker: ChildWorker, what: string, size = 2): Promise<string[]> {
  const batch = batchOf([JSON.stringify(what), ...Array.from({ length: size - 1 }, () => "0")]);
  return outputsOf(batch, await worker.run(batch, never));
}

const from = (view: ArrayBufferView): string =>
  Buffer.from(view.buffer as ArrayBuffer, view.byteOffset, view.byteLength).toString("base64");
const tensor = (dtype: Dtype, shape: number[], view: ArrayBufferView): string =>
  tensorText({ dtype, shape, base64: from(view) });
const floats = (shape: number[], ...values: number[]): string =>
  tensor("float32", shape, Float32Array.from(values));
const rows = [floats([6], 0, 1, 2, 3, 4, 5), floats([6], 6, 7, 8, 9, 10, 11)];
const twelve = Array.from({ length: 12 }, (_, at) => at);

/** What `RETURNS` of arrays.py becomes. */
const CASES: Record<string, readonly string[]> = {
  block: rows,
  "deep block": [floats([3, 2], ...twelve.slice(0, 6)), floats([3, 2], ...twelve.slice(6))],
  "no columns": [floats([0]), floats([0])],
  flat: ["0.5", "2.0"],
  "flat view": ["1", "-2"],
  "list of arrays": [floats([1], 1), floats([1], 2)],
  "two types": [
    tensor("int16", [2], Int16Array.of(1, -1)),
    tensor("uint64", [1], BigUint64Array.of(2n ** 64n - 1n)),
  ],
  bytes: ['{"$bytes":"AP8="}', '{"$bytes":""}'],
  views: ['{"$bytes":"YWI="}', '{"$bytes":"YWNl"}'],
  mixed: ['{"a":[1]}', floats([3, 4], ...twelve)],
  "json and bytes": ['"hé"', '{"$bytes":"MQ=="}'],
  "half pairs": ['"a\\ud800\\\\"', '{"\\udfff":"é"}'],
  gaps: [floats([3], 0, 4, 8), floats([2], 11, 10)],
  "big-endian": [floats([2], 1, 2), tensor("int16", [1], Int16Array.of(1))],
  ctypes: [tensor("bool", [2], Uint8Array.of(1, 0)), tensor("int8", [1, 2], Int8Array.of(1, -1))],
  interface: rows,
  "interface of a buffer": [floats([12], ...twelve), floats([12], ...twelve)],
  "interface with strides": rows,
  converted: rows,
  tensor: rows,
  bfloat16: rows,
  scalars: ["1.0", "5.0"],
  strings: ['["a","b"]', "1"],
};

describe("python, bytes and arrays:", () => {
  for (const name of ["returning", "later"]) {
    test(`each becomes what it is, ${name === "later" ? "also from a callable" : "as a return value"}`, () =>
      withWorker(name, async (worker) => {
        for (const [what, outputs] of Object.entries(CASES)) {
          assert.deepEqual(await answers(worker, what), outputs, what);
        }
      }));
  }

  test("what cannot be sent is `unusable`, with a reason", () =>
    withWorker("returning", async (worker) => {
      const run = (what: string, size = 2): Promise<Reply> =>
        worker.run(batchOf([`"${what}"`, ...Array.from({ length: size - 1 }, () => "0")]), never);
      assertMessage(await run("has gaps"), "unusable", /returned an Interface, not a list/);
      assertMessage(await run("is complex"), "unusable", /returned an Interface, not a list/);
      assertMessage(await run("large"), "unusable", /larger than maxReplyBytes \(4000000\)/);
      assertMessage(await run("large list"), "unusable", /larger than maxReplyBytes \(4000000\)/);
      assertMessage(await run("far too many"), "unusable", /many more outputs than there were inputs/);
      assertMessage(await run("many that are empty"), "unusable", /many more outputs than there were inputs/);
      assertMessage(await run("claims"), "rejected", /says that it is \$tensor or \$bytes, and is not/);
      assertMessage(await run("block", 3), "unusable", /worker returned 2 outputs for 3 inputs/);
      assertMessage(await run("no columns", 3), "unusable", /worker returned 2 outputs for 3 inputs/);
      assert.deepEqual(await answers(worker, "block"), rows);
    }));

  test("numpy's, where it is there", () =>
    withWorker("numpy_there", async (worker) => {
      const found = await answers(worker, "block");
      if (found[0] === '"no numpy"') return;
      assert.deepEqual(found, rows);
      assert.deepEqual(await answers(worker, "transposed"), [
        floats([6], 0, 2, 4, 6, 8, 10),
        floats([6], 1, 3, 5, 7, 9, 11),
      ]);
      assert.deepEqual(await answers(worker, "big-endian"), rows);
      assert.deepEqual(await answers(worker, "rows"), rows);
      assert.match((await answers(worker, "half"))[0]!, /^\{"\$tensor":"float16","shape":\[6\],/);
      assert.deepEqual(await answers(worker, "flat"), ["0.0", "6.0"]);
      assert.deepEqual(await answers(worker, "strings"), ['"a"', '"b"']);
      assert.deepEqual(await answers(worker, "scalars"), ["1.0", "2"]);
      for (const what of ["date", "dates"]) {
        const dates = await worker.run(batchOf([`"${what}"`, "0"]), never);
        assertMessage(dates, "unusable", /output 0 cannot be written as JSON/);
      }
    }));

  test("a buffer that a function fills again at each call never shows the next call's values", () =>
    withWorker("reusing", (worker) => assertOwnValues(worker)));

  test("nor do two that it fills in turn, where it returns callables", () =>
    withWorker("reusing_in_turn", (worker) => assertOwnValues(worker)));
});

/** Two batches in its hands at any time, each of one value. */
async function assertOwnValues(worker: ChildWorker): Promise<void> {
  let before: Promise<void> | undefined;
  for (let value = 0; value < 30; value++) {
    const batch = batchOf([String(value), "0"]);
    const next = worker.run(batch, never).then((reply) => {
      const wanted = floats([20_000], ...Array.from({ length: 20_000 }, () => value));
      assert.ok(
        outputsOf(batch, reply).every((output) => output === wanted),
        `call ${value} has other values`,
      );
    });
    await before;
    before = next;
  }
  await before;
}

describe("python, callables and threads:", () => {
  test("the next call's function is called before the last one's callable has ended", () =>
    withWorker("overlapping", async (worker) => {
      const said: string[] = [];
      const run = async (name: string): Promise<void> => {
        const batch = batchOf([`"${name}"`]);
        const reply = await worker.run(batch, never, () => said.push(`${name} begun`));
        assert.deepEqual(outputsOf(batch, reply), [`"${name}"`]);
        said.push(`${name} done`);
      };
      await Promise.all([run("first"), run("second")]);
      assert.deepEqual(said, ["first begun", "second begun", "first done", "second done"]);
    }));

  test("a quick function that begins to return callables, and stops, keeps its order", () =>
    withWorker("now_and_later", async (worker) => {
      const said: string[] = [];
      const run = async (name: string): Promise<void> => {
        const batch = batchOf([`"${name}"`]);
        const reply = await worker.run(batch, never, (agoMs = 0) => {
          assert.ok(agoMs >= 0 && agoMs < 60_000);
          said.push(`${name} begun`);
        });
        assert.deepEqual(outputsOf(batch, reply), [`"${name}"`]);
        said.push(`${name} done`);
      };
      const wanted: string[] = [];
      for (let round = 0; round < 3; round++) {
        for (const name of [...Array.from({ length: 20 }, (_, at) => `now ${at}`), "later", "later"]) {
          await run(name);
          wanted.push(`${name} begun`, `${name} done`);
        }
        // Two at a time: the second is read while the first runs, or after it.
        await Promise.all([run("now"), run("now")]);
        wanted.push("now begun", "now done", "now begun", "now done");
        assert.deepEqual(said.toSorted(), wanted.toSorted());
        assert.equal(said.indexOf("now begun") < said.indexOf("now done"), true);
      }
    }));

  test("what a callable does wrong is the fault of its own batch", () =>
    withWorker("failing_later", async (worker) => {
      const run = (what: string): Promise<Reply> => worker.run(batchOf([`"${what}"`]), never);
      assertMessage(await run("raise"), "rejected", /^ValueError: too late$/);
      assertMessage(await run("exit"), "rejected", /^SystemExit: bye$/);
      assertMessage(await run("none"), "unusable", /returned a NoneType, not a list/);
      assertMessage(await run("again"), "unusable", /callable returned a function, not a list/);
      assert.deepEqual(await answers(worker, "fork", 1), ['"parent"']);
      assert.deepEqual(await answers(worker, "where", 1), ["false"]);
      const died = await run("die");
      assertMessage(died, "failed", /ended with exit code 5/);
      assert.equal(died.kind === "failed" && died.blame, "batch");
      assert.equal(await worker.probe(never), true);
      const abort = new AbortController();
      const hanging = worker.run(batchOf(['"hang"']), abort.signal, () => abort.abort());
      assertMessage(await hanging, "failed", /^aborted$/);
    }));

  test("the function has the main thread, and is never called twice at once", async () => {
    await withWorker("only_main", async (worker) => {
      assert.deepEqual(await answers(worker, "x", 1), ["true"]);
    });
    await withWorker("alone", async (worker) => {
      let before: Promise<unknown> | undefined;
      for (let at = 0; at < 20; at++) {
        const next = answers(worker, `${at}`);
        await before;
        before = next;
      }
      assert.deepEqual(await before, ['"19"', "0"]);
    });
  });
});
