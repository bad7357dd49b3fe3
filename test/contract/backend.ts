/**
 * What every backend promises, as tests: `backendContract(name, makeBackend)` runs them on one kind.
 *
 * The model behind the backend under test echoes its inputs, except that an input of `REJECT` makes it
 * refuse the batch and `CRASH` makes it die. In the mood `short` it drops the last output of every batch,
 * in the mood `hang` it never answers.
 */
import assert from "node:assert/strict";
import { describe, test } from "../workers/backend/suite.ts";
import { setImmediate as turn } from "node:timers/promises";
import fc from "fast-check";
import type { Backend, Batch, Reply } from "../../src/workers/backend/backend.ts";

export type Mood = "well" | "short" | "hang";

/** Makes a backend with `workers` workers; the suite starts and stops it, then disposes of the rest. */
export type MakeBackend = (mood: Mood, workers: number) => Promise<Backend & AsyncDisposable>;

export interface ContractLimits {
  /** Values survive, but their text does not: the model parses and prints. */
  readonly reprints?: boolean;
  /** Outputs travel as bytes, whatever they hold. */
  readonly opaque?: boolean;
  /** How many batches the random aborts are tried on; each may cost a restart. */
  readonly abortedBatches?: number;
}

export const REJECT = '"please reject"';
export const CRASH = '"please crash"';

const never = new AbortController().signal;
let lastId = 0;

/** A batch of these JSON texts, with fresh ids. */
export function batchOf(inputs: readonly string[], parameters = ""): Batch {
  const tasks = inputs.map((input) => ({ id: `task-${++lastId}`, input }));
  return { id: `batch-${lastId}`, tasks, parameters };
}

/** The outputs in the order of the batch's tasks; fails the test when there are none. */
export function outputsOf(batch: Batch, reply: Reply): string[] {
  assert.equal(reply.kind, "answered", `message: ${"message" in reply ? reply.message : ""}`);
  assert(reply.kind === "answered");
  assert.equal(reply.outputs.length, batch.tasks.length);
  return [...reply.outputs];
}

/** No answer, but this one, in words fit to be passed on. */
export function assertMessage(reply: Reply, kind: Reply["kind"], message: RegExp): void {
  assert(reply.kind !== "answered", "answered");
  assert.equal(reply.kind, kind, reply.message);
  assert.match(reply.message, message);
  assertOneLine(reply.message);
}

export function assertOneLine(message: string): void {
  assert.match(message, /^[^\n\r]{1,500}$/);
}

export function backendContract(name: string, make: MakeBackend, limits: ContractLimits = {}): void {
  const withBackend = async (
    mood: Mood,
    workers: number,
    check: (backend: Backend) => Promise<void>,
  ): Promise<void> => {
    await using backend = await make(mood, workers);
    await backend.start();
    try {
      await check(backend);
    } finally {
      await backend.stop();
    }
  };

  describe(`${name} keeps the backend contract:`, () => {
    answering(withBackend, limits);
    refusing(withBackend);
    checking(withBackend, limits);
    aborting(withBackend, limits);
    queueing(withBackend);
    growing(withBackend);
    stopping(withBackend);
  });
}

type WithBackend = (mood: Mood, workers: number, check: (backend: Backend) => Promise<void>) => Promise<void>;

function answering(withBackend: WithBackend, limits: ContractLimits): void {
  test("every task gets its own output, for any JSON and any batch size", () =>
    withBackend("well", 1, async ({ workers: [worker] }) => {
      const value = fc.jsonValue({ stringUnit: "grapheme" }).map((value) => JSON.stringify(value));
      await fc.assert(
        fc.asyncProperty(fc.array(value, { minLength: 1, maxLength: 64 }), async (inputs) => {
          const batch = batchOf(inputs);
          const outputs = outputsOf(batch, await worker!.run(batch, never));
          if (limits.reprints) assert.deepEqual(outputs.map(parse), inputs.map(parse));
          else assert.deepEqual(outputs, inputs);
        }),
        { numRuns: 30 },
      );
    }));

  test("workers have their own names and run side by side", () =>
    withBackend("well", 3, async ({ workers }) => {
      assert.equal(new Set(workers.map((worker) => worker.name)).size, 3);
      const batches = workers.map((_, index) => batchOf([`"a${index}"`, `"b${index}"`]));
      const replies = await Promise.all(workers.map((worker, index) => worker.run(batches[index]!, never)));
      for (const [index, reply] of replies.entries()) {
        assert.deepEqual(outputsOf(batches[index]!, reply), [`"a${index}"`, `"b${index}"`]);
      }
    }));

  test("parameters go along", () =>
    withBackend("well", 1, async ({ workers: [worker] }) => {
      const batch = batchOf(['"x"'], '{"temperature":0.5}');
      assert.deepEqual(outputsOf(batch, await worker!.run(batch, never)), ['"x"']);
    }));
}

function growing(withBackend: WithBackend): void {
  test("workers go and come while others run", () =>
    withBackend("well", 2, async (backend) => {
      const [first, second] = backend.workers;
      await backend.retire(first!);
      assert.deepEqual(backend.workers, [second]);
      assert.equal((await first!.run(batchOf(['"gone"']), never)).kind, "failed");
      const added = await backend.grow(first!.address);
      assert.deepEqual(backend.workers, [second, added]);
      assert.equal(added.name, first!.name);
      for (const worker of backend.workers) {
        const batch = batchOf([`"${worker.name}"`]);
        assert.deepEqual(outputsOf(batch, await worker.run(batch, never)), [`"${worker.name}"`]);
      }
    }));

  test("one that is not there can be sent away twice", () =>
    withBackend("well", 1, async (backend) => {
      const [worker] = backend.workers;
      await backend.retire(worker!);
      await backend.retire(worker!);
      assert.deepEqual(backend.workers, []);
    }));
}

function refusing(withBackend: WithBackend): void {
  test("a refused batch is `rejected`, and the worker lives on", () =>
    withBackend("well", 1, async ({ workers: [worker] }) => {
      const reply = await worker!.run(batchOf(['"a"', REJECT, '"c"']), never);
      assert(reply.kind === "rejected", reply.kind);
      assertOneLine(reply.message);
      const batch = batchOf(['"a"']);
      assert.deepEqual(outputsOf(batch, await worker!.run(batch, never)), ['"a"']);
    }));

  test("an output too few makes the whole reply `unusable`", () =>
    withBackend("short", 1, async ({ workers: [worker] }) => {
      const reply = await worker!.run(batchOf(['"a"', '"b"', '"c"']), never);
      assert.deepEqual(reply, { kind: "unusable", message: "worker returned 2 outputs for 3 inputs" });
    }));

  test("a worker that dies with the batch in its hands is `failed`, blames the batch, and comes back", () =>
    withBackend("well", 1, async ({ workers: [worker] }) => {
      for (let round = 0; round < 2; round++) {
        const reply = await worker!.run(batchOf(['"a"', CRASH]), never);
        assert(reply.kind === "failed", reply.kind);
        assert.equal(reply.blame, "batch");
        assertOneLine(reply.message);
        if (worker!.probe !== undefined) assert.equal(await worker!.probe(never), true);
        const batch = batchOf(['"a"']);
        assert.deepEqual(outputsOf(batch, await worker!.run(batch, never)), ['"a"']);
      }
    }));
}

/** What the model is sent here no client could send: it stands for what a model makes of its inputs. */
function checking(withBackend: WithBackend, limits: ContractLimits): void {
  const flawed = [
    "1e400",
    `[1,[${"9".repeat(400)}]]`,
    `{"a":-1e999}`,
    `${"[".repeat(65)}${"]".repeat(65)}`,
    ...(limits.reprints === true ? [] : ['{"a":1,"a":2}', '[{"b":{"\\u0061":1,"a":2}}]']),
  ];
  test("an output that no caller may get makes the reply `unusable`, and the worker lives on", () =>
    withBackend("well", 1, async ({ workers: [worker] }) => {
      if (limits.opaque === true) return;
      for (const output of flawed) {
        const reply = await worker!.run(batchOf(['"a"', output, '"c"']), never);
        assert(reply.kind === "unusable", `${output.slice(0, 40)}: ${reply.kind}`);
        assertOneLine(reply.message);
        // Nothing that a model says of an input is in the log.
        assert(!(reply.message.includes("999") && reply.brief === undefined));
      }
      const deep = `${"[".repeat(64)}${"]".repeat(64)}`;
      const batch = batchOf(['"a"', deep, "-1.5e-300", '{"a":{"a":[]},"b":{"a":{}}}']);
      assert.deepEqual(
        outputsOf(batch, await worker!.run(batch, never)).map(parse),
        inputsOf(batch).map(parse),
      );
    }));
}

function aborting(withBackend: WithBackend, limits: ContractLimits): void {
  test("a signal that is aborted already means that nothing is sent", () =>
    withBackend("well", 1, async ({ workers: [worker] }) => {
      const reply = await worker!.run(batchOf([CRASH]), AbortSignal.abort());
      assert.deepEqual(reply, { kind: "failed", message: "aborted", blame: "nobody" });
    }));

  test("an abort ends a batch that hangs", () =>
    withBackend("hang", 1, async ({ workers: [worker] }) => {
      const abort = new AbortController();
      const running = worker!.run(batchOf(['"a"']), abort.signal);
      await turn();
      abort.abort();
      const reply = await running;
      assert(reply.kind === "failed", reply.kind);
      assert.equal(reply.message, "aborted");
    }));

  test("after aborts at random moments no batch ever sees the outputs of another", () =>
    withBackend("well", 1, async ({ workers: [worker] }) => {
      let serial = 0;
      let aborted = 0;
      const runOne = async (size: number, turnsToAbort: number | null): Promise<void> => {
        if (worker!.probe !== undefined) assert.equal(await worker!.probe(never), true);
        const batch = batchOf(Array.from({ length: size }, () => `"serial ${++serial}"`));
        const abort = new AbortController();
        const running = worker!.run(batch, abort.signal);
        if (turnsToAbort !== null) {
          for (let turns = turnsToAbort; turns > 0; turns--) await turn();
          abort.abort();
        }
        const reply = await running;
        if (reply.kind === "failed" && abort.signal.aborted) aborted++;
        else assert.deepEqual(outputsOf(batch, reply), inputsOf(batch));
      };
      await runOne(3, 0); // at once is always in flight, however the draws below fall
      // From "before a byte was written" to "long answered"; some batches may end in peace.
      const moment = fc.option(fc.nat(16), { freq: 3 });
      const plan = fc.array(fc.tuple(fc.integer({ min: 1, max: 5 }), moment), { minLength: 8, maxLength: 8 });
      await fc.assert(
        fc.asyncProperty(plan, async (batches) => {
          for (const [size, turnsToAbort] of batches) await runOne(size, turnsToAbort);
        }),
        { numRuns: Math.ceil((limits.abortedBatches ?? 400) / 8) },
      );
      assert(aborted > 0, "no batch was aborted in flight");
    }));
}

/** Of workers that take the next batch while they run one; those that do not have nothing to show. */
function queueing(withBackend: WithBackend): void {
  test("a batch that is handed over early runs after the one before it, and says when it begins", () =>
    withBackend("well", 1, async ({ workers: [worker] }) => {
      if (worker!.queues !== true) return;
      const said: string[] = [];
      const run = async (name: string): Promise<void> => {
        const batch = batchOf([`"${name}"`, `"${name} too"`]);
        const reply = await worker!.run(batch, never, () => said.push(`${name} begun`));
        assert.deepEqual(outputsOf(batch, reply), inputsOf(batch));
        said.push(`${name} done`);
      };
      const wanted: string[] = [];
      let before: Promise<void> | undefined;
      for (let at = 0; at < 20; at++) {
        const next = run(String(at));
        await before;
        before = next;
        wanted.push(`${at} begun`, `${at} done`);
      }
      await before;
      for (const kind of ["begun", "done"]) {
        const ofKind = (what: string): boolean => what.endsWith(kind);
        assert.deepEqual(said.filter(ofKind), wanted.filter(ofKind));
      }
      for (let at = 0; at < 20; at++) assert(said.indexOf(`${at} begun`) < said.indexOf(`${at} done`));
    }));

  test("a death is the fault of the batch that had begun, not of the one that waited", () =>
    withBackend("well", 1, async ({ workers: [worker] }) => {
      if (worker!.queues !== true) return;
      const first = worker!.run(batchOf([CRASH]), never);
      const second = worker!.run(batchOf(['"a"']), never, () => assert.fail("it never began"));
      const replies = await Promise.all([first, second]);
      assert.deepEqual(
        replies.map((reply) => reply.kind === "failed" && reply.blame),
        ["batch", "nobody"],
      );
      if (worker!.probe !== undefined) assert.equal(await worker!.probe(never), true);
      const batch = batchOf(['"a"']);
      assert.deepEqual(outputsOf(batch, await worker!.run(batch, never)), ['"a"']);
    }));

  for (const which of [0, 1]) {
    test(`an abort of the ${which === 0 ? "first" : "second"} of two ends both`, () =>
      withBackend("hang", 1, async ({ workers: [worker] }) => {
        if (worker!.queues !== true) return;
        const aborts = [new AbortController(), new AbortController()];
        const begun = Promise.withResolvers<void>();
        const running = aborts.map(({ signal }, at) =>
          worker!.run(batchOf([`"${at}"`]), signal, () => {
            assert.equal(at, 0, "the second never began");
            begun.resolve();
          }),
        );
        await begun.promise;
        aborts[which]!.abort();
        const replies = await Promise.all(running);
        assert.deepEqual(
          replies.map((reply) => reply.kind === "failed" && reply.blame),
          ["batch", "nobody"],
        );
        const aborted = replies[which]!;
        assert.equal(aborted.kind === "failed" && aborted.message, "aborted");
      }));
  }
}

function stopping(withBackend: WithBackend): void {
  test("stopping ends what is running; afterwards nothing is taken", () =>
    withBackend("hang", 2, async (backend) => {
      const [first, second] = backend.workers;
      const running = first!.run(batchOf(['"a"']), never);
      await Promise.all([backend.stop(), backend.stop()]);
      assert.equal((await running).kind, "failed");
      const reply = await second!.run(batchOf(['"a"']), never);
      assert(reply.kind === "failed", reply.kind);
      assert.equal(reply.blame, "nobody");
      if (first!.probe !== undefined) assert.equal(await first!.probe(never), false);
    }));
}

function parse(text: string): unknown {
  return JSON.parse(text);
}

function inputsOf(batch: Batch): string[] {
  return batch.tasks.map((task) => task.input);
}
