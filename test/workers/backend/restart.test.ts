import assert from "node:assert/strict";
import { PassThrough } from "node:stream";
import { describe, test } from "./suite.ts";
import type { Batch } from "../../../src/workers/backend/backend.ts";
import {
  type BatchListener,
  type Child,
  MAX_LINE_CHARS,
  printLines,
  ChildWorker,
} from "../../../src/workers/backend/child-workers.ts";
import { match } from "../../../src/workers/backend/replies.ts";
import { Events } from "../../../src/observe/events.ts";
import { batchOf } from "../../contract/backend.ts";
import { ManualClock } from "./manual-clock.ts";

const never = new AbortController().signal;

/** A child that lives and dies by the test's word. */
class PuppetChild implements Child {
  readonly #ready = Promise.withResolvers<void>();
  readonly #gone = Promise.withResolvers<string>();
  readonly ready = this.#ready.promise;
  readonly gone = this.#gone.promise;
  closed = false;
  killed = false;
  /** Of the last batch it was handed. */
  answer: (() => void) | undefined;
  begin: (() => void) | undefined;

  load(): void {
    this.#ready.resolve();
  }

  die(how = "died"): void {
    this.#ready.reject(new Error(how));
    this.#gone.resolve(how);
  }

  run(batch: Batch, listener: BatchListener): void {
    this.begin = () => listener.begun();
    this.answer = () =>
      listener.answer(
        match(
          batch,
          batch.tasks.map((task) => task.input),
        ),
      );
  }

  close(): void {
    this.closed = true;
  }

  kill(): void {
    this.killed = true;
    this.die("was killed");
  }
}

function stage() {
  const clock = new ManualClock();
  const events = new Events();
  const children: PuppetChild[] = [];
  const born = (): PuppetChild => {
    const child = new PuppetChild();
    children.push(child);
    return child;
  };
  const worker = new ChildWorker("w-1", born, 5_000, { model: "m", clock, events });
  const last = (): PuppetChild => children.at(-1)!;
  const started = async (): Promise<void> => {
    const starting = worker.start();
    last().load();
    await starting;
  };
  return { clock, events, children, worker, last, started };
}

describe("restart:", () => {
  test("the wait doubles from 100 ms to 30 s and a batch that was answered resets it", async () => {
    const { clock, events, worker, last, started } = stage();
    await started();
    const deathAndRebirth = async (): Promise<number> => {
      const notice = events.next("notice");
      last().die("died of age");
      const waitMs = Number(/^m: w-1 died of age; restarting in (\d+) ms$/.exec((await notice).message)![1]);
      assert.equal(clock.nextMs, waitMs);
      const ready = worker.probe(never);
      const again = events.next("notice", ({ message }) => message === "m: w-1 is ready again");
      const spawned = nextChild(waitMs);
      await spawned;
      last().load();
      assert.equal(await ready, true);
      await again;
      return waitMs;
    };
    const nextChild = async (waitMs: number): Promise<void> => {
      const before = last();
      clock.advance(waitMs);
      while (last() === before) await Promise.resolve();
    };
    const waits: number[] = [];
    for (let death = 0; death < 11; death++) waits.push(await deathAndRebirth());
    assert.deepEqual(waits, [100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000, 30000]);
    const running = worker.run(batchOf(["1"]), never);
    last().answer!();
    assert.equal((await running).kind, "answered");
    assert.equal(await deathAndRebirth(), 100);
    last().die();
    await worker.stop();
  });

  test("while it waits, `run` says how long, at once", async () => {
    const { clock, events, worker, last, started } = stage();
    await started();
    const notice = events.next("notice");
    last().die();
    await notice;
    clock.advance(30);
    const reply = await worker.run(batchOf(["1"]), never);
    assert.deepEqual(reply, {
      kind: "failed",
      message: "w-1 is restarting, next try in 70 ms",
      blame: "nobody",
    });
    await worker.stop();
    assert.equal(clock.nextMs, Infinity, "stop calls the wait off");
  });

  test("an abort kills the child, replies at once, and the next child starts without a wait", async () => {
    const { events, children, worker, last, started } = stage();
    await started();
    const abort = new AbortController();
    const running = worker.run(batchOf(["1"]), abort.signal);
    const [first] = children;
    const notice = events.next("notice");
    abort.abort();
    assert.deepEqual(await running, { kind: "failed", message: "aborted", blame: "batch" });
    assert.equal(first!.killed, true);
    assert.match((await notice).message, /restarting$/);
    const early = await worker.run(batchOf(["2"]), never);
    assert.equal(early.kind === "failed" && early.message, "w-1 is restarting, it is not ready yet");
    last().load();
    assert.equal(await worker.probe(never), true);
    const next = worker.run(batchOf(["3"]), never);
    // The dead child's answer comes late and must not be taken for the new batch's.
    first!.answer!();
    last().answer!();
    const reply = await next;
    assert.deepEqual(reply.kind === "answered" && [...reply.outputs.values()], ["3"]);
    last().die();
    await worker.stop();
  });

  test("of two batches only the one that had begun is to blame, and a third is one too many", async () => {
    const { worker, last, started } = stage();
    await started();
    const begun: number[] = [];
    const first = worker.run(batchOf(["1"]), never, () => begun.push(1));
    last().begin!();
    last().begin!();
    const second = worker.run(batchOf(["2"]), never, () => begun.push(2));
    assert.throws(() => worker.run(batchOf(["3"]), never), /holds one more at most/);
    last().die("died");
    assert.deepEqual(await first, { kind: "failed", message: "w-1 died", blame: "batch" });
    assert.deepEqual(await second, { kind: "failed", message: "w-1 died", blame: "nobody" });
    last().begin!();
    assert.deepEqual(begun, [1]);
    await worker.stop();
  });

  test("one that has nothing before it is to blame though it had not begun: a child may die of reading it", async () => {
    const { worker, last, started } = stage();
    await started();
    const first = worker.run(batchOf(["1"]), never);
    const second = worker.run(batchOf(["2"]), never);
    last().die("died");
    assert.deepEqual(await first, { kind: "failed", message: "w-1 died", blame: "batch" });
    assert.deepEqual(await second, { kind: "failed", message: "w-1 died", blame: "nobody" });
    await worker.stop();
  });

  test("a child that is late is killed; the first ends the start, a later one is tried again", async () => {
    const first = stage();
    const starting = first.worker.start();
    first.clock.advance(5_000);
    await assert.rejects(starting, /^Error: w-1 was not ready within 5000 ms; raise backend.startTimeoutMs$/);
    assert.equal(first.last().killed, true);

    const later = stage();
    await later.started();
    const died = later.events.next("notice");
    later.last().die();
    await died;
    later.clock.advance(100);
    while (later.children.length < 2) await Promise.resolve();
    const late = later.events.next("notice");
    later.clock.advance(5_000);
    assert.match(
      (await late).message,
      /cannot start: w-1 was not ready within 5000 ms.*; restarting in 200 ms$/,
    );
    await later.worker.stop();
  });

  test("stop asks first and kills after a second", async () => {
    const { clock, worker, last, started } = stage();
    await started();
    const running = worker.run(batchOf(["1"]), never);
    const stopping = worker.stop();
    assert.equal(last().closed, true);
    clock.advance(999);
    assert.equal(last().killed, false);
    clock.advance(1);
    assert.equal(last().killed, true);
    await stopping;
    assert.deepEqual(await running, { kind: "failed", message: "w-1 was stopped", blame: "nobody" });
    assert.equal(clock.nextMs, Infinity);
  });

  test("a child that cannot even be made is a death like any other", async () => {
    const worker = new ChildWorker(
      "w-1",
      () => {
        throw new Error("out of file descriptors");
      },
      5_000,
      { model: "m", clock: new ManualClock(), events: new Events() },
    );
    await assert.rejects(worker.start(), /out of file descriptors/);
    await worker.stop();
  });
});

describe("lines:", () => {
  test("lines are put together over chunks, cut when too long, and the last needs no newline", async () => {
    const events = new Events();
    const lines: string[] = [];
    events.on("worker.printed", ({ line }) => lines.push(line));
    const stream = new PassThrough();
    printLines(stream, "stdout", "w-1", { model: "m", clock: new ManualClock(), events });
    const last = events.next("worker.printed", ({ line }) => line === "end");
    const [before, after] = [Buffer.from("é\n").subarray(0, 1), Buffer.from("é\n").subarray(1)];
    for (const chunk of ["one\ntw", "o\r\n\n", "x".repeat(MAX_LINE_CHARS), "y\n", before, after, "end"]) {
      stream.write(chunk);
    }
    stream.end();
    await last;
    assert.deepEqual(lines, ["one", "two", "", "x".repeat(MAX_LINE_CHARS), "y", "é", "end"]);
  });
});
