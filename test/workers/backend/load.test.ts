/** What workers say about themselves: how full they are, and whether they are well. */
import assert from "node:assert/strict";
import { once } from "node:events";
import type { IncomingMessage, ServerResponse } from "node:http";
import { describe, test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import type { Worker } from "../../../src/workers/backend/backend.ts";
import { HttpBackend } from "../../../src/workers/backend/http.ts";
import { bodyLoad, headerLoad } from "../../../src/workers/backend/network.ts";
import { Events } from "../../../src/observe/events.ts";
import { batchOf } from "../../contract/backend.ts";
import { ManualClock } from "./manual-clock.ts";
import { echo, hang, status, StubWorker } from "./stub-worker.ts";

const never = new AbortController().signal;
const HEALTH = { askMs: 1000, askTimeoutMs: 500, failures: 3 };

class Stage implements AsyncDisposable {
  readonly clock = new ManualClock();
  readonly backend: HttpBackend;
  readonly worker: Worker;
  readonly stub: StubWorker;
  changes = 0;

  private constructor(stub: StubWorker, healthPath?: string) {
    this.stub = stub;
    const url = stub.url.replace("//", "//user:secret@");
    const tls = { reloadMs: 1000 };
    const options = { workers: [url], maxReplyBytes: 100_000, health: HEALTH, tls };
    const around = { model: "m", clock: this.clock, events: new Events() };
    this.backend = new HttpBackend({ ...options, ...(healthPath && { healthPath }) }, around);
    this.worker = this.backend.workers[0]!;
    this.worker.onHealth = () => this.changes++;
  }

  static async open(healthPath?: string): Promise<Stage> {
    return new Stage(await StubWorker.listen(), healthPath);
  }

  /** Waits until the question that is under way is answered and the next one is set. */
  async asked(): Promise<void> {
    while (this.clock.nextMs !== HEALTH.askMs) await turn();
  }

  /** The next question, from the time at which it is due to its answer. */
  async next(): Promise<void> {
    this.clock.advance(HEALTH.askMs);
    await this.asked();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.backend.stop();
    assert.equal(this.clock.nextMs, Infinity, "nothing is left to ring");
    await this.stub[Symbol.asyncDispose]();
  }
}

/** As functions, since the compiler takes what was undefined once for undefined for ever. */
const loadOf = (worker: Worker) => worker.load;
const healthOf = (worker: Worker) => worker.health;

const answer =
  (code: number, body = "", headers: Record<string, string> = {}) =>
  (_: IncomingMessage, response: ServerResponse): void =>
    void response.writeHead(code, headers).end(body);

describe("x-ferry-load:", () => {
  test("a number from 0 to 1, or nothing", () => {
    const load = (text: string | string[]) => headerLoad({ "x-ferry-load": text });
    for (const text of ["0", "1", "0.93", "1.0", "0.000001", " 0.5 "]) assert.equal(load(text), Number(text));
    const others = [
      "",
      "1.01",
      "-0.1",
      "93",
      "93%",
      "0,9",
      ".5",
      "1e-1",
      "NaN",
      "Infinity",
      "0x1",
      "0.5 0.6",
    ];
    for (const text of [...others, ["0.5", "0.6"]]) assert.equal(load(text), undefined, String(text));
    assert.equal(headerLoad({}), undefined);
  });

  test("is heard on any reply, with its time; what is not a load changes nothing", async () => {
    await using stage = await Stage.open();
    const { stub, worker, clock } = stage;
    assert.equal(loadOf(worker), undefined);
    for (const [code, load, heard] of [
      [200, "0.93", 0.93],
      [503, "1", 1],
      [422, "0.25", 0.25],
      [500, "full", 0.25],
    ] as const) {
      clock.advance(100);
      stub.behave = status(code, { "x-ferry-load": load });
      await worker.run(batchOf(["1"]), never);
      assert.equal(worker.load?.share, heard);
    }
    assert.equal(worker.load?.at, clock.now() - 100);
    stub.behave = echo;
    await worker.run(batchOf(["1"]), never);
    assert.equal(worker.load?.share, 0.25);
  });
});

describe("a health path's body:", () => {
  const bodies: [text: string, load: number | undefined][] = [
    ['{"load":0.2,"queue":0.95,"memory":0.5}', 0.95],
    ['{"memory":0.5,"status":"ok"}', 0.5],
    ['{"load":0}', 0],
    ['{"load":2,"queue":-1,"memory":"0.5"}', undefined],
    ['{"load":null}', undefined],
    ["[0.5]", undefined],
    ["0.5", undefined],
    ["null", undefined],
    ["ok", undefined],
    ["", undefined],
  ];
  for (const [text, load] of bodies) {
    test(`${text || "nothing"} says ${load ?? "nothing"}`, () => assert.equal(bodyLoad(text), load));
  }
});

describe("health questions:", () => {
  test("begin with start, come each askMs, on a connection of their own, and end with stop", async () => {
    await using stage = await Stage.open("/health?deep=0");
    const { stub, worker, backend, clock } = stage;
    const questions: IncomingMessage[] = [];
    stub.onQuestion = (request, response) => {
      questions.push(request);
      answer(200, '{"load":0.4,"queue":0.91}', { "x-ferry-load": "0.5" })(request, response);
    };
    assert.deepEqual([worker.health, clock.nextMs], [undefined, Infinity]);
    await worker.run(batchOf(["1"]), never);
    const connections = stub.connections;
    await backend.start();
    await stage.asked();
    assert.equal(worker.health?.well, true);
    assert.deepEqual(worker.load, { share: 0.91, at: clock.now() });
    assert.equal(questions[0]!.url, "/health?deep=0");
    assert.equal(
      questions[0]!.headers.authorization,
      `Basic ${Buffer.from("user:secret").toString("base64")}`,
    );
    await stage.next();
    assert.equal(questions.length, 2);
    assert.ok(stub.connections > connections, "not the connection of the batches");
    await worker.run(batchOf(["1"]), never);
    assert.equal(stage.changes, 0, "it was never unwell");
  });

  test("three failures in a row, and it is not well; one success, and it is", async () => {
    await using stage = await Stage.open("/health");
    const { stub, worker, backend } = stage;
    stub.onQuestion = answer(503, "loading the model");
    await backend.start();
    await stage.asked();
    await stage.next();
    assert.equal(healthOf(worker), undefined);
    await stage.next();
    assert.equal(worker.health?.well, false);
    assert.equal(worker.health?.why, "its health path /health answered 503 (3 times in a row)");
    await worker.run(batchOf(["1"]), never);
    await stage.next();
    assert.deepEqual([worker.health?.well, stage.changes], [false, 1]);
    stub.onQuestion = answer(204);
    await stage.next();
    assert.deepEqual([worker.health?.well, worker.health?.why, stage.changes], [true, "", 2]);
    stub.onQuestion = answer(404);
    await stage.next();
    assert.equal(worker.health?.well, true);
  });

  test("no answer within askTimeoutMs is a failure; so is no worker", async () => {
    await using stage = await Stage.open("/health");
    const { stub, worker, backend, clock } = stage;
    stub.onQuestion = () => {};
    await backend.start();
    for (let asked = 0; asked < 3; asked++) {
      assert.equal(clock.nextMs, HEALTH.askTimeoutMs);
      clock.advance(HEALTH.askTimeoutMs);
      await stage.asked();
      assert.equal(worker.health?.well, asked < 2 ? undefined : false);
      clock.advance(HEALTH.askMs);
    }
    assert.match(worker.health!.why, /did not answer in time/);
    await stub[Symbol.asyncDispose]();
    clock.advance(HEALTH.askTimeoutMs);
    await stage.asked();
    await stage.next();
    assert.equal(worker.health?.well, false);
  });

  test("silence does not count while the worker answers batches", async () => {
    await using stage = await Stage.open("/health");
    const { stub, worker, backend, clock } = stage;
    stub.onQuestion = () => {};
    await backend.start();
    for (let asked = 0; asked < 6; asked++) {
      clock.advance(HEALTH.askTimeoutMs);
      await stage.asked();
      assert.equal((await worker.run(batchOf(["1"]), never)).kind, "answered");
      clock.advance(HEALTH.askMs);
    }
    assert.equal(healthOf(worker), undefined);
  });

  test("an answer without end, a cut-off one and a redirect do no harm", async () => {
    await using stage = await Stage.open("/health");
    const { stub, worker, backend } = stage;
    stub.onQuestion = (_, response) => void response.end(`{"load":0.5,"rest":"${"a".repeat(100_000)}"}`);
    await backend.start();
    await stage.asked();
    assert.deepEqual([worker.health?.well, worker.load], [true, undefined]);
    stub.onQuestion = (_, response) => {
      response.writeHead(200, { "content-length": "100" }).write("{");
      response.socket!.end();
    };
    await stage.next();
    stub.onQuestion = answer(302, "", { location: "http://127.0.0.1:1/" });
    await stage.next();
    await stage.next();
    assert.equal(worker.health?.well, false);
  });

  test("stop ends one that is under way", async () => {
    await using stage = await Stage.open("/health");
    const arrived = new Promise<ServerResponse>((resolve) => {
      stage.stub.onQuestion = (_, response) => resolve(response);
    });
    await stage.backend.start();
    const gone = once(await arrived, "close");
    await stage.backend.stop();
    await gone;
    for (let turns = 0; turns < 10; turns++) await turn();
    assert.equal(stage.worker.health, undefined);
  });
});

describe("a probe:", () => {
  test("is there when the worker could not be reached, not when it failed a batch", async () => {
    await using stage = await Stage.open("/health");
    const { stub, worker } = stage;
    assert.equal(worker.probe, undefined);
    stub.behave = status(500);
    await worker.run(batchOf(["1"]), never);
    assert.equal(worker.probe, undefined, "that it answers questions would prove nothing");
    stub.behave = hang;
    const patience = new AbortController();
    const arrival = stub.arrival();
    const running = worker.run(batchOf(["1"]), patience.signal);
    await arrival;
    patience.abort();
    await running;
    assert.equal(worker.probe, undefined);
    await stub[Symbol.asyncDispose]();
    await worker.run(batchOf(["1"]), never);
    assert.equal(await worker.probe!(never), false);
  });

  test("without a healthPath there is none", async () => {
    await using stage = await Stage.open();
    await stage.stub[Symbol.asyncDispose]();
    await stage.worker.run(batchOf(["1"]), never);
    assert.equal(stage.worker.probe, undefined);
    assert.equal(stage.worker.health, undefined);
  });
});
