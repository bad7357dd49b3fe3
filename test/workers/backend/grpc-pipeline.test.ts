/**
 * The dispatcher with `pipeline: 2` in front of a server behind gRPC, which answers in whichever order it likes. What the
 * backend itself does with two batches at once stands in `handed-over.test.ts`.
 */
import assert from "node:assert/strict";
import { status as codes } from "@grpc/grpc-js";
import type { Batch } from "../../../src/workers/backend/backend.ts";
import { SystemClock } from "../../../src/app/clock.ts";
import { Dispatcher } from "../../../src/dispatch/dispatcher.ts";
import { Reaper } from "../../../src/dispatch/reaper.ts";
import type { RecordView } from "../../../src/engine/engine.ts";
import { MemoryEngine } from "../../../src/engine/memory/engine.ts";
import { Events } from "../../../src/observe/events.ts";
import { OipServer, status } from "../../gateway/protocol/oip-service.ts";
import { asRows, asTexts, backendFor, echoing, texts } from "./grpc-stage.ts";
import { describe, test } from "./suite.ts";

const DEADLINE_MS = 60_000;

/** A whole way from the queue to the server and back; tests say when a batch is answered. */
class Stage implements AsyncDisposable {
  readonly events = new Events();
  readonly ended = new Map<string, RecordView>();
  /** Calls in the order in which they came, each by its inputs. */
  readonly calls: { readonly inputs: readonly string[]; readonly answer: (refusal?: string) => void }[] = [];
  readonly #heard: (() => void)[] = [];
  readonly #clock = new SystemClock();
  engine!: MemoryEngine;
  dispatcher!: Dispatcher;
  #reaper!: Reaper;
  #server!: OipServer;
  #backend!: ReturnType<typeof backendFor>;

  static async open(workerMs = DEADLINE_MS): Promise<Stage> {
    const stage = new Stage();
    stage.#server = await OipServer.listen(async (request) => {
      const inputs = texts(request);
      const refusal = await new Promise<string | undefined>((answer) => {
        stage.calls.push({ inputs, answer });
        stage.#tell();
      });
      if (refusal !== undefined) throw status(codes.INVALID_ARGUMENT, refusal);
      return echoing(request, inputs);
    });
    stage.#backend = backendFor([stage.#server.url]);
    await stage.#backend.start();
    stage.#dispatch(workerMs);
    return stage;
  }

  #dispatch(workerMs: number): void {
    const timeouts = { queueMs: DEADLINE_MS, totalMs: DEADLINE_MS };
    const results = { ttlMs: DEADLINE_MS, evictAfterRead: false, maxBytes: Infinity };
    const limits = {
      models: new Map([["m", timeouts]]),
      tiers: 1,
      maxQueued: 100,
      maxQueuedBytes: Infinity,
      results,
    };
    const letters = { deadLetters: { max: 100, ttlMs: Infinity } };
    const all = { ...limits, ...letters };
    this.engine = new MemoryEngine(() => all, this.#clock, this.events);
    this.engine.watch({
      settled: (record) => {
        this.ended.set(record.task.id, record);
        this.#tell();
      },
    });
    const rules = {
      name: "m",
      limits: { policy: "latency", maxBatchSize: 2, maxWaitMs: 5 },
      pipeline: 2,
      workerMs,
      retry: { max: 3, baseMs: 1, maxMs: 10, budget: 1 },
      health: { failures: 9, ejectMs: 10, maxEjectMs: 10 },
    } as const;
    const workers = this.#backend.workers.map((worker) => ({
      name: worker.name,
      run: async (batch: Batch, signal: AbortSignal) =>
        asTexts(await worker.run({ ...batch, ...asRows(batch) }, signal)),
    }));
    this.#reaper = new Reaper(this.engine, this.#clock);
    let batches = 0;
    this.dispatcher = new Dispatcher(() => rules, workers, {
      engine: this.engine,
      clock: this.#clock,
      events: this.events,
      random: () => 0.5,
      newBatchId: () => `batch-${++batches}`,
    });
  }

  #tell(): void {
    for (const heard of this.#heard.splice(0)) heard();
  }

  async until(what: () => boolean): Promise<void> {
    while (!what()) await new Promise<void>((resolve) => this.#heard.push(resolve));
  }

  put(...ids: readonly string[]): void {
    const createdAt = this.#clock.now();
    for (const id of ids) {
      const task = { id, tenant: "t", tier: 0, model: "m", input: `"${id}"`, parameters: "", content: "" };
      void this.engine.put({ ...task, createdAt, deadlineAt: createdAt + DEADLINE_MS }, {});
    }
  }

  /** One that runs, and a full one behind it in the server's hands. */
  async two(): Promise<void> {
    // In one moment: nothing is handed over behind a batch that is late.
    this.put("a", "b", "c");
    await this.until(() => this.calls.length === 2);
    assert.deepEqual(this.inputs, [['"a"'], ['"b"', '"c"']]);
  }

  get inputs(): readonly (readonly string[])[] {
    return this.calls.map(({ inputs }) => inputs);
  }

  output(id: string): string | undefined {
    const outcome = this.ended.get(id)?.outcome;
    return outcome?.ok === true ? outcome.output : outcome?.code;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const { answer } of this.calls) answer();
    await this.dispatcher.stop();
    this.#reaper.stop();
    await this.#backend.stop();
    await this.#server[Symbol.asyncDispose]();
    await this.#clock.rest();
  }
}

describe("grpc, pipeline: 2", () => {
  test("a server that answers the second first: each gets its own, and it goes on", async () => {
    await using stage = await Stage.open();
    await stage.two();
    stage.calls[1]!.answer();
    await stage.until(() => stage.ended.size === 2);
    assert.deepEqual([stage.output("b"), stage.output("c")], ['"b"', '"c"']);
    assert.equal(stage.output("a"), undefined);
    stage.put("d", "e");
    stage.calls[0]!.answer();
    await stage.until(() => stage.calls.length === 3);
    stage.calls[2]!.answer();
    await stage.until(() => stage.ended.size === 5);
    for (const id of ["a", "d", "e"]) assert.equal(stage.output(id), `"${id}"`);
  });

  test("in order: the second's tasks wait for the first, and the place behind it is taken again", async () => {
    await using stage = await Stage.open();
    await stage.two();
    stage.put("d", "e");
    stage.calls[0]!.answer();
    await stage.until(() => stage.calls.length === 3);
    assert.deepEqual(stage.inputs[2], ['"d"', '"e"']);
    stage.calls[1]!.answer();
    stage.calls[2]!.answer();
    await stage.until(() => stage.ended.size === 5);
    for (const id of ["a", "b", "c", "d", "e"]) {
      assert.equal(stage.output(id), `"${id}"`);
      assert.equal(stage.ended.get(id)!.attempt, 1);
    }
  });

  test("the first is refused: the second keeps its answers, and only the guilty one fails", async () => {
    await using stage = await Stage.open();
    await stage.two();
    stage.calls[0]!.answer("no such input");
    stage.calls[1]!.answer();
    await stage.until(() => stage.ended.size === 3);
    assert.deepEqual(
      [stage.output("a"), stage.output("b"), stage.output("c")],
      ["INPUT_REJECTED", '"b"', '"c"'],
    );
  });

  test("the first is never answered: its time ends, the second is not cut off, and it is tried again", async () => {
    await using stage = await Stage.open(1500);
    await stage.two();
    const failed = new Promise((resolve) => stage.events.on("batch.answered", ({ kind }) => resolve(kind)));
    assert.equal(await failed, "failed");
    stage.calls[1]!.answer();
    await stage.until(() => stage.calls.length === 3);
    assert.deepEqual(stage.inputs[2], ['"a"']);
    stage.calls[2]!.answer();
    await stage.until(() => stage.ended.size === 3);
    for (const id of ["a", "b", "c"]) assert.equal(stage.output(id), `"${id}"`);
    assert.equal(stage.calls.length, 3, "nobody of the second rode again");
  });
});
