import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { once } from "node:events";
import { type AddressInfo, type Socket, createServer } from "node:net";
import { describe, test } from "./suite.ts";
import { fileURLToPath } from "node:url";
import type { Worker } from "../../../src/workers/backend/backend.ts";
import { PythonBackend, type PythonOptions } from "../../../src/workers/backend/python.ts";
import { SystemClock } from "../../../src/app/clock.ts";
import { Events } from "../../../src/observe/events.ts";
import { assertMessage, assertOneLine, backendContract, batchOf, outputsOf } from "../../contract/backend.ts";

// The interpreter itself, not a wrapper that looks for it at each start; and no files left beside the models.
const PYTHON = execFileSync("python3", ["-c", "import sys; print(sys.executable)"], {
  encoding: "utf8",
}).trim();
process.env["PYTHONDONTWRITEBYTECODE"] = "1";

const never = new AbortController().signal;
const model = (file: string): string => fileURLToPath(new URL(`models/${file}`, import.meta.url));

function backendFor(fn: string, more: Partial<PythonOptions> = {}, events = new Events()): PythonBackend {
  const options = { workers: 1, python: PYTHON, startTimeoutMs: 20_000, maxReplyBytes: 4_000_000, ...more };
  return new PythonBackend(
    { ...options, function: model(fn) },
    { model: "m", clock: new SystemClock(), events },
  );
}

async function withWorker(
  fn: string,
  check: (worker: Worker & { probe(signal: AbortSignal): Promise<boolean> }, events: Events) => Promise<void>,
  more: Partial<PythonOptions> = {},
): Promise<void> {
  const events = new Events();
  const backend = backendFor(fn, more, events);
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
  "python",
  (mood, workers) => {
    const fn = mood === "well" ? "echo" : mood;
    const backend = backendFor(`model.py:${fn}`, { workers });
    return Promise.resolve(Object.assign(backend, { [Symbol.asyncDispose]: () => Promise.resolve() }));
  },
  { reprints: true, abortedBatches: 24 },
);

describe("python, what comes back:", () => {
  test("a list that cannot be sent is `unusable`, and the worker lives on", () =>
    withWorker("model.py:returning", async (worker) => {
      const cases: [what: string, message: RegExp][] = [
        ["none", /returned a NoneType, not a list/],
        ["str", /returned a str, not a list/],
        ["dict", /returned a dict, not a list/],
        ["generator", /returned a generator, not a list/],
        ["long", /worker returned 3 outputs for 2 inputs/],
        ["nan", /output 1 cannot be written as JSON: ValueError/],
        ["infinity", /output 0 cannot be written as JSON: ValueError/],
        ["bytes", /returned a bytes, not a list/],
        ["object", /output 1 .*an object is not a JSON value/],
        ["bad key", /output 0 .*TypeError/],
        ["circular", /output 0 .*ValueError/],
        ["huge", /^output 1 holds a number beyond the range of a double$/],
        ["huge inside", /^output 0 holds a number beyond/],
        ["two keys", /^output 1 has a key twice$/],
        ["two keys inside", /^output 0 has a key twice$/],
        ["deep", /^output 1 is nested deeper than 64$/],
        ["too deep", /^output 1 cannot be written as JSON: RecursionError/],
        ["large", /larger than maxReplyBytes \(4000000\)/],
      ];
      for (const [what, message] of cases) {
        const reply = await worker.run(batchOf([`"${what}"`, "0"]), never);
        assertMessage(reply, "unusable", message);
      }
      assert.deepEqual(await answers(worker, ['"tuple"', "0"]), ["1", "2"]);
      assert.deepEqual(await answers(worker, ['"keys"', "0"]), ['{"1":3,"1.5":2,"null":4}', '{"1":{"1":1}}']);
      // Half of a pair has no UTF-8, but JSON has a way to write it, and an input may hold one.
      assert.deepEqual(await answers(worker, ['"surrogate"', "0"]), ["1", '"\\ud800"']);
    }));

  test("arrays and scalars of numeric libraries, unicode and 64-bit integers are fine", () =>
    withWorker("model.py:returning", async (worker) => {
      assert.deepEqual(await answers(worker, ['"array"', "0"]), ["[0.5,1]", "[2,3]"]);
      assert.deepEqual(await answers(worker, ['"scalars"', "0"]), ["1.5", "[1,1.5]"]);
      const unicode = await answers(worker, ['"unicode"', "0"]);
      assert.deepEqual(unicode, ['"hé 😀 \u2028"', "9223372036854775807"]);
    }));

  test("whatever the function raises is `rejected`, with its type; the traceback is printed", () =>
    withWorker("model.py:raising", async (worker, events) => {
      const traceback = events.next("worker.printed", ({ line }) =>
        line.startsWith("ValueError: its message is in the answer"),
      );
      const cases: [what: string, message: RegExp][] = [
        ["value", /^ValueError: invalid literal for int\(\) with base 10: 'x'$/],
        ["exit", /^SystemExit: bye$/],
        ["interrupt", /^KeyboardInterrupt$/],
        ["memory", /^MemoryError$/],
        ["odd", /^Odd$/],
        ["cancelled", /^CancelledError$/],
      ];
      for (const [what, message] of cases) {
        assertMessage(await worker.run(batchOf([`"${what}"`]), never), "rejected", message);
      }
      assert.equal((await traceback).stream, "stderr");
      assert.deepEqual(await answers(worker, ['"fine"']), ['"fine"']);
    }));

  test("frames of many megabytes go both ways", () =>
    withWorker(
      "model.py:plain",
      async (worker) => {
        const huge = JSON.stringify("é😀x".repeat(1_200_000));
        assert(Buffer.byteLength(huge) > 8_000_000);
        assert.deepEqual(await answers(worker, [huge, "1"]), [huge, "1"]);
        assert.deepEqual(await answers(worker, ["2"]), ["2"]);
      },
      { maxReplyBytes: 20_000_000 },
    ));
});

describe("python, how the function is called:", () => {
  test("parameters are passed where the function can take them, and refused where it cannot", async () => {
    const parameters = '{"k":[1]}';
    await withWorker("model.py:wants_parameters", async (worker) => {
      assert.deepEqual(await answers(worker, ["1", "2"], parameters), ['{"k":[1]}', '{"k":[1]}']);
      assert.deepEqual(await answers(worker, ["1"]), ["{}"]);
    });
    await withWorker("model.py:any_keywords", async (worker) => {
      assert.deepEqual(await answers(worker, ["1"], parameters), ['{"parameters":{"k":[1]}}']);
      assert.deepEqual(await answers(worker, ["1"]), ["{}"]);
    });
    for (const name of ["plain", "parameters_first"]) {
      await withWorker(`model.py:${name}`, async (worker) => {
        const reply = await worker.run(batchOf(["1"], parameters), never);
        assert.deepEqual(reply, { kind: "rejected", message: `${name}() takes no parameters` });
        assert.deepEqual(await answers(worker, ["1"]), ["1"]);
        assert.deepEqual(await answers(worker, ["1"], '{"$tokens":true}'), ["1"]);
      });
    }
  });

  test("async functions run on one loop that lasts, also after one of them has called exit", async () => {
    await withWorker("model.py:coroutine", async (worker) => {
      const first = await answers(worker, ["1", "2"]);
      assert.equal(first[0], first[1]);
      assert.deepEqual(await answers(worker, ["1", "2"]), first);
    });
    await withWorker("model.py:failing_coroutine", async (worker) => {
      assertMessage(await worker.run(batchOf(['"exit"']), never), "rejected", /^SystemExit: 1$/);
      assert.deepEqual(await answers(worker, ["1"]), ["1"]);
    });
  });

  test("the file sees the world as if Python had been started on it", () =>
    withWorker("model.py:whoami", async (worker) => {
      const [seen] = await answers(worker, ["1"]);
      const [, neighbour, name, argv, file] = JSON.parse(seen!) as unknown[];
      assert.deepEqual(
        [neighbour, name, argv, file],
        ["neighbour", "model", [model("model.py")], model("model.py")],
      );
    }));

  test("what the code prints, also from C, comes out line by line and never among the outputs", () =>
    withWorker("model.py:printing", async (worker, events) => {
      const lines: Record<string, string[]> = { stdout: [], stderr: [] };
      events.on("worker.printed", ({ worker, stream, line }) => {
        assert.equal(worker, "python-1");
        lines[stream]!.push(line);
      });
      const second = events.next("worker.printed", ({ line }) => line === "no newlinefrom print two");
      const errors = events.next("worker.printed", ({ line }) => line === "to fd 2");
      assert.deepEqual(await answers(worker, ['"one"']), ['"one"']);
      assert.deepEqual(await answers(worker, ['"two"']), ['"two"']);
      await Promise.all([second, errors]);
      assert.deepEqual(lines["stdout"]!.slice(0, 7), [
        "from print one",
        "from write",
        "from C hé",
        "lone \\ud800",
        "x".repeat(8192),
        "x".repeat(8192),
        "x".repeat(20_000 - 2 * 8192),
      ]);
      assert.deepEqual(lines["stderr"]!.slice(0, 2), ["to stderr", "to fd 2"]);
    }));
});

describe("python, death and restart:", () => {
  test("each way to die is told apart; the worker says that it restarts and comes back", () =>
    withWorker("model.py:dying", async (worker, events) => {
      const cases: [how: string, message: RegExp][] = [
        ["exit", /^python-1 ended with exit code 7$/],
        ["kill", /^python-1 was killed by SIGKILL \(out of memory\?\)$/],
        ["segfault", /^python-1 was killed by SIGSEGV$/],
      ];
      for (const [how, message] of cases) {
        const notice = events.next("notice");
        const reply = await worker.run(batchOf([`"${how}"`]), never);
        assertMessage(reply, "failed", message);
        assert(reply.kind === "failed");
        assert.equal(reply.blame, "batch");
        // Said 100 ms each time: the batch that was answered in between has reset the wait.
        assert.match((await notice).message, /^m: python-1 .*; restarting in 100 ms$/);
        const early = await worker.run(batchOf(["1"]), never);
        assertMessage(early, "failed", /^python-1 is restarting, next try in \d+ ms$/);
        assert.equal(early.kind === "failed" && early.blame, "nobody");
        assert.equal(await worker.probe(never), true);
        assert.deepEqual(await answers(worker, ["1"]), ["1"]);
      }
    }));

  test("a copy of the process that the function forks off never answers", () =>
    withWorker("model.py:forking", async (worker) => {
      for (let round = 0; round < 3; round++) {
        assert.deepEqual(await answers(worker, [`"${round}"`]), [`"${round} parent"`]);
      }
    }));

  test("frames that answer no call end the child and reach no batch", () =>
    withWorker("model.py:meddling", async (worker) => {
      for (const [what, message] of [
        ["foreign", /sent a frame that answers no call/],
        ["garbage", /sent too large a frame/],
        ["table", /sent a frame that cannot be read/],
      ] as const) {
        const reply = await worker.run(batchOf([`"${what}"`]), never);
        assertMessage(reply, "failed", message);
        assert.equal(await worker.probe(never), true);
      }
    }));

  test("what the child has started goes with it", () =>
    withWorker("model.py:leaving_children", async (worker) => {
      assertMessage(await worker.run(batchOf(["1"]), never), "failed", /ended with exit code 1/);
      assert.equal(await worker.probe(never), true);
    }));

  for (const mode of ["busy", "idle"]) {
    test(`the death of Ferry ends its children, ${mode} ones too`, async () => {
      await using server = createServer().listen(0, "127.0.0.1");
      const connection = once(server, "connection") as Promise<[Socket]>;
      await once(server, "listening");
      const { port } = server.address() as AddressInfo;
      const script = fileURLToPath(new URL("models/orphan-maker.ts", import.meta.url));
      const ferry = spawn(process.execPath, [script, PYTHON, model("model.py:telling"), String(port), mode]);
      const [line] = await connection;
      await once(line, "data");
      const ended = once(line, "end");
      ferry.kill("SIGKILL");
      await ended;
    });
  }
});

describe("python, what cannot start:", () => {
  const cases: [name: string, fn: string, more: Partial<PythonOptions>, message: RegExp][] = [
    [
      "a missing interpreter",
      "model.py:echo",
      { python: "no-such-python" },
      /^cannot run "no-such-python": not found; install Python 3 or set backend.python$/,
    ],
    [
      "an interpreter that may not be run",
      "model.py:echo",
      { python: model("model.py") },
      /^cannot run ".*": permission denied; install Python 3 or set backend.python$/,
    ],
    [
      "something that is no Python",
      "model.py:echo",
      { python: "true" },
      /^python-\d ended with exit code 0 before/,
    ],
    ["a missing file", "absent.py:echo", {}, /^cannot find \/.*\/absent.py; check backend.function$/],
    [
      "a file that cannot be imported",
      "broken.py:batchstring",
      {},
      /^cannot import .*: ModuleNotFoundError: No module named 'no_such_library'; it must load with \//,
    ],
    [
      "a function that is none",
      "model.py:not_a_function",
      {},
      /"not_a_function" in .* is no function but an int;/,
    ],
    ["a missing function", "neighbour.py:echo", {}, /neighbour.py has no function "echo" \(it has none\);/],
    ["a misspelt function", "model.py:ehco", {}, /has no function "ehco" \(it has echo, short, hang, /],
    [
      "a file that kills the process",
      "silent_death.py:echo",
      {},
      /^python-\d ended with exit code 9 before it was ready: the GPU is on fire$/,
    ],
    [
      "a file that loads for too long",
      "slow_import.py:echo",
      { startTimeoutMs: 50 },
      /^python-\d was not ready within 50 ms; raise backend.startTimeoutMs$/,
    ],
  ];
  for (const [name, fn, more, message] of cases) {
    test(name, async () => {
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

describe("python, GPUs:", () => {
  test("each worker is shown a GPU of its own, counted round", async () => {
    const backend = backendFor("model.py:broken_context", { workers: 3, gpus: "4, 7" });
    await backend.start();
    const seen = await Promise.all(backend.workers.map((worker) => answers(worker, ['"which"'])));
    await backend.stop();
    assert.deepEqual(seen, [['"4"'], ['"7"'], ['"4"']]);
  });

  test("a process whose GPU context is broken is replaced, and its batch is tried in smaller ones", () =>
    withWorker("model.py:broken_context", async (worker) => {
      const reply = await worker.run(batchOf(['"assert"', '"fine"']), never);
      assert.ok(reply.kind === "failed" && reply.blame === "batch", reply.kind);
      assert.equal(await worker.probe(never), true);
      assert.deepEqual(await answers(worker, ['"fine"']), ['"all"']);
    }));
});
