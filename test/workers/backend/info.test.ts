/** How many inputs a worker takes in one call: what its protocol allows, then what it says itself. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import type { Worker } from "../../../src/workers/backend/backend.ts";
import { HttpBackend } from "../../../src/workers/backend/http.ts";
import { batch } from "../../../src/gateway/protocol/batch.ts";
import { cohere } from "../../../src/gateway/protocol/cohere.ts";
import type { WorkerSide } from "../../../src/gateway/protocol/protocol.ts";
import { tei } from "../../../src/gateway/protocol/tei.ts";
import { Events } from "../../../src/observe/events.ts";
import { batchOf } from "../../contract/backend.ts";
import type { Served } from "../../gateway/protocol/servers/json-server.ts";
import { TeiServer } from "../../gateway/protocol/servers/tei-server.ts";
import { ManualClock } from "./manual-clock.ts";

const never = new AbortController().signal;
const HEALTH = { askMs: 1000, askTimeoutMs: 500, failures: 1 };
const SELDOM_MS = 60 * HEALTH.askMs;

class Stage implements AsyncDisposable {
  readonly clock = new ManualClock();
  readonly server: TeiServer;
  readonly backend: HttpBackend;
  readonly worker: Worker;

  private constructor(server: TeiServer) {
    this.server = server;
    // Its health has tests of its own; unasked, every alarm here is about what is tested here.
    const { healthPath: _, ...protocol } = tei.worker;
    this.backend = backendFor(`${server.url}/embed`, protocol, this.clock);
    this.worker = this.backend.workers[0]!;
  }

  static async open(maxClientBatchSize: number): Promise<Stage> {
    const server = new TeiServer();
    server.maxClientBatchSize = maxClientBatchSize;
    return new Stage(await server.listen());
  }

  get questions(): number {
    return this.server.callsOf("/info").length;
  }

  /** Waits until the next question is so far away. */
  async nextIn(ms: number): Promise<void> {
    while (this.clock.nextMs !== ms) await turn();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.backend.stop();
    assert.equal(this.clock.nextMs, Infinity, "nothing is left to ring");
    await this.server[Symbol.asyncDispose]();
  }
}

function backendFor(url: string, protocol: WorkerSide, clock: ManualClock): HttpBackend {
  const options = {
    workers: [url],
    protocol,
    maxReplyBytes: 100_000,
    health: HEALTH,
    tls: { reloadMs: 1000 },
  };
  return new HttpBackend(options, { model: "m", clock, events: new Events() });
}

/** As a function, since the compiler takes what was 32 once for 32 for ever. */
const takes = ({ worker }: Stage): number | undefined => worker.maxBatchSize;
const inputs = (count: number): string[] => Array.from({ length: count }, (_, at) => `"text ${at}"`);

describe("how many inputs a worker takes:", () => {
  test("its protocol's cap until it has said so itself; no batch waits for that", async () => {
    await using stage = await Stage.open(128);
    assert.equal(takes(stage), 32);
    assert.equal((await stage.worker.run(batchOf(inputs(2)), never)).kind, "answered");
    await stage.backend.start();
    await stage.nextIn(SELDOM_MS);
    assert.equal(takes(stage), 128);
    stage.server.maxClientBatchSize = 64;
    stage.clock.advance(SELDOM_MS - 1);
    assert.equal(stage.questions, 1);
    stage.clock.advance(1);
    await stage.nextIn(SELDOM_MS);
    assert.equal(takes(stage), 64);
  });

  test("a server that cannot be asked is asked again soon, and what it said before holds", async () => {
    await using stage = await Stage.open(8);
    const answers: (Served | undefined)[] = [
      { status: 503, text: "loading" },
      undefined,
      { status: 500, text: '{"max_client_batch_size":1}' },
    ];
    stage.server.instead = ({ path }) => (path === "/info" ? answers.shift() : undefined);
    await stage.backend.start();
    await stage.nextIn(HEALTH.askMs);
    assert.equal(takes(stage), 32);
    stage.clock.advance(HEALTH.askMs);
    await stage.nextIn(SELDOM_MS);
    assert.equal(takes(stage), 8);
    stage.clock.advance(SELDOM_MS);
    await stage.nextIn(HEALTH.askMs);
    assert.equal(takes(stage), 8);
  });

  test("an answer that says nothing of use changes nothing", async () => {
    await using stage = await Stage.open(8);
    for (const text of ["", "<html>", "[]", '{"max_client_batch_size":0}', '{"max_client_batch_size":"9"}']) {
      stage.server.instead = () => ({ status: 200, text });
      const before = stage.questions;
      if (before === 0) await stage.backend.start();
      else stage.clock.advance(SELDOM_MS);
      await stage.nextIn(SELDOM_MS);
      assert.equal(stage.questions, before + 1);
      assert.equal(takes(stage), 32);
    }
  });

  test("a server that hangs is left after askTimeoutMs", async () => {
    await using stage = await Stage.open(8);
    stage.server.instead = () => ({ status: 200, text: "{", headers: { "content-length": "10" } });
    await stage.backend.start();
    while (stage.questions < 1) await turn();
    assert.equal(stage.clock.nextMs, HEALTH.askTimeoutMs);
    stage.clock.advance(HEALTH.askTimeoutMs);
    await stage.nextIn(HEALTH.askMs);
    assert.equal(takes(stage), 32);
  });

  test("after a refused batch of several it is asked again, but not twice in one askMs", async () => {
    await using stage = await Stage.open(8);
    await stage.backend.start();
    await stage.nextIn(SELDOM_MS);
    stage.server.maxClientBatchSize = 4;
    assert.equal((await stage.worker.run(batchOf(inputs(8)), never)).kind, "rejected");
    // Just asked: the next question is due when askMs is over.
    assert.equal(stage.clock.nextMs, HEALTH.askMs);
    assert.equal((await stage.worker.run(batchOf(inputs(8)), never)).kind, "rejected");
    assert.equal(stage.questions, 1);
    stage.clock.advance(HEALTH.askMs);
    await stage.nextIn(SELDOM_MS);
    assert.equal(takes(stage), 4);
    stage.clock.advance(2 * HEALTH.askMs);
    assert.equal((await stage.worker.run(batchOf(['"refuse me"']), never)).kind, "rejected");
    assert.equal(stage.questions, 2, "alone it was not too many");
  });

  test("protocols without a place to ask have a cap that stays, or none", () => {
    const clock = new ManualClock();
    const of = (protocol: WorkerSide) =>
      backendFor("http://127.0.0.1:1/", protocol, clock).workers[0]!.maxBatchSize;
    assert.equal(of(cohere.worker), 96);
    assert.equal(of(batch), undefined);
  });
});
