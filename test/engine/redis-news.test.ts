/** How the end of a task reaches the process that waits for it, also when wake-ups are lost. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { SystemClock } from "../../src/clock.ts";
import { HOMES, ID_DIGITS } from "../../src/core/home.ts";
import type { RecordView } from "../../src/engine/engine.ts";
import { RedisEngine } from "../../src/engine/redis.ts";
import { RedisClock } from "../../src/engine/redis-frames.ts";
import { RedisKeys } from "../../src/engine/redis-keys.ts";
import { Events } from "../../src/telemetry/events.ts";
import { MODEL, PLAIN } from "../contract/engine-stage.ts";
import { type Server, startServer, until } from "../redis/servers.ts";
import { openNodes } from "./redis-engines.ts";

let server: Server;
before(async () => (server = await startServer()));
after(() => server.stop());

let made = 0;

/** One process of a fleet, on the real clock. */
class Process implements AsyncDisposable {
  readonly engine: RedisEngine;
  readonly name: string;
  readonly keys: RedisKeys;
  /** The ends that it heard of. */
  readonly ends: RecordView[] = [];
  readonly events: Events;
  readonly #nodes: Awaited<ReturnType<typeof openNodes>>;
  readonly #clock = new SystemClock();

  private constructor(nodes: Awaited<ReturnType<typeof openNodes>>, prefix: string, sweepMs: number) {
    this.#nodes = nodes;
    this.name = `p${++made}`;
    this.keys = new RedisKeys(prefix, HOMES);
    this.events = new Events();
    const base = {
      nodes,
      keys: this.keys,
      clock: this.#clock,
      events: this.events,
      shared: new RedisClock(),
    };
    const own = { zone: "", zoneSpillMs: 100, leaseMs: 2000, sweepMs, putWithinMs: 1000 };
    this.engine = new RedisEngine({ ...base, name: this.name }, { ...PLAIN, ...own });
    this.engine.watch({ settled: (record) => this.ends.push(record) });
  }

  static async start(prefix: string, sweepMs = 60_000): Promise<Process> {
    const process = new Process(await openNodes({ url: server.url }), prefix, sweepMs);
    await process.engine.open();
    return process;
  }

  async put(number: number): Promise<string> {
    const createdAt = this.#clock.now();
    const id = `${this.name}-${number}-${ID_DIGITS[number % HOMES]!}`;
    const task = { id, tenant: "ann", tier: 0, model: MODEL, input: `"${id}"`, parameters: "", content: "" };
    const reply = await this.engine.put({ ...task, createdAt, deadlineAt: createdAt + 30_000 });
    assert.equal(reply.kind, "queued");
    return id;
  }

  /** Claims what there is and answers each task with its own input. */
  async work(count: number): Promise<void> {
    let left = count;
    await until(async () => {
      const note = { id: "b", reason: "idle", worker: "gpu", startedAt: this.#clock.now(), why: "" } as const;
      const lease = await this.engine.claim({
        model: MODEL,
        parameters: "",
        max: 64,
        leaseMs: 5000,
        batch: note,
      });
      const verdicts = lease.tasks.map(
        ({ task }) => ({ id: task.id, kind: "done", output: task.input }) as const,
      );
      await this.engine.settle(lease, verdicts);
      left -= lease.tasks.length;
      return left === 0;
    }, "everything was worked off");
  }

  /** From here on its notes go nowhere; the numbers go on. Returns what ends that. */
  mute(): () => void {
    const nodes = this.#nodes;
    const say = nodes.command.bind(nodes);
    nodes.command = (shard, words, options) =>
      words[0] === "SPUBLISH" ? Promise.resolve(0) : say(shard, words, options);
    return () => (nodes.command = say);
  }

  async heard(ids: readonly string[]): Promise<void> {
    await until(() => this.ends.length >= ids.length, `${ids.length} ends, heard of ${this.ends.length}`);
    assert.deepEqual(new Set(this.ends.map(({ task }) => task.id)), new Set(ids));
    assert.equal(this.ends.length, ids.length, "each once");
    for (const { task, outcome } of this.ends)
      assert.deepEqual(outcome, { ok: true, output: `"${task.id}"` }, "its own answer");
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.engine.close();
    await this.#nodes.close();
  }
}

const numbers = (count: number): number[] => Array.from({ length: count }, (_, at) => at);

describe("wake-ups", () => {
  test("each process hears of its own tasks, with the outcome, once", async () => {
    await using one = await Process.start("wake:");
    await using two = await Process.start("wake:");
    await using batcher = await Process.start("wake:");
    const ones = await Promise.all(numbers(40).map((n) => one.put(n)));
    const twos = await Promise.all(numbers(40).map((n) => two.put(n)));
    await batcher.work(80);
    await one.heard(ones);
    await two.heard(twos);
    assert.equal(batcher.ends.length, 0);
  });

  test("whoever follows a task hears of its end too", async () => {
    await using one = await Process.start("follow:");
    await using two = await Process.start("follow:");
    const id = await one.put(1);
    assert.equal((await two.engine.follow(id, "ann"))?.state, "queued");
    assert.equal(await two.engine.follow(id, "bob"), undefined);
    await one.work(1);
    await two.heard([id]);
    await one.heard([id]);
    assert.equal((await two.engine.follow(id, "ann"))?.state, "done");
  });
});

describe("a lost wake-up", () => {
  test("is found by the sweep", async () => {
    await using gateway = await Process.start("sweep:", 100);
    await using batcher = await Process.start("sweep:");
    const id = await gateway.put(3);
    batcher.mute();
    await batcher.work(1);
    await gateway.heard([id]);
  });

  test("shows as a gap in the numbers of its sender, and everything is looked up at once", async () => {
    await using gateway = await Process.start("gap:");
    await using batcher = await Process.start("gap:");
    const first = await gateway.put(0);
    await batcher.work(1);
    await gateway.heard([first]);
    gateway.ends.length = 0;
    const lost = await gateway.put(16);
    const unmute = batcher.mute();
    await batcher.work(1);
    unmute();
    const last = await gateway.put(32);
    await batcher.work(1);
    await gateway.heard([lost, last]);
  });

  test("after the connection was cut, everything is looked up when it is back", async () => {
    await using gateway = await Process.start("cut:");
    await using batcher = await Process.start("cut:");
    for (let round = 0; round < 5; round++) {
      gateway.ends.length = 0;
      const ids = await Promise.all(numbers(16).map((n) => gateway.put(100 * round + n)));
      const cut = server.ask("CLIENT", "KILL", "TYPE", "pubsub");
      await batcher.work(16);
      await cut;
      await gateway.heard(ids);
    }
  });
});
