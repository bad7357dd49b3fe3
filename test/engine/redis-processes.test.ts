/**
 * Gateways and batchers as separate processes on one Redis: who hears of what, and what survives whom.
 *
 * Each process has its own connections and engine; all of a fleet share a clock that the test moves. A batcher reads
 * when the test says so (`read`), and is dead for the others as soon as its `alive` key is gone.
 */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { Refusal } from "../../src/core/errors.ts";
import type { Task } from "../../src/core/task.ts";
import type { ClaimedTask, Lease, RecordView, Sharing } from "../../src/engine/engine.ts";
import { MAX_GROUPS } from "../../src/engine/engine.ts";
import type { RedisOptions } from "../../src/engine/redis/parts.ts";
import type { Demand } from "../../src/engine/redis/reader.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import type { RedisNodes } from "../../src/engine/redis/client/nodes.ts";
import {
  dead,
  done,
  failed,
  idsOf,
  type Judgement,
  MODEL,
  OTHER_MODEL,
  PLAIN,
  retry,
  Stage,
} from "../contract/engine-stage.ts";
import { startCluster, startServer, until } from "./redis-client/servers.ts";
import { ASLEEP, makeEngine, openNodes } from "./redis-engines.ts";

const FOREVER_MS = 1e9;
const PATIENT = {
  ...PLAIN,
  maxQueued: 100_000,
  models: new Map([MODEL, OTHER_MODEL].map((name) => [name, { queueMs: FOREVER_MS, totalMs: FOREVER_MS }])),
};

type Connect = () => Promise<RedisNodes>;
let fleets = 0;

/** Processes that share a prefix and a clock. */
class Fleet implements AsyncDisposable {
  /** How old an entry is, is told by the server's clock. */
  readonly clock = new VirtualClock(Date.now());
  readonly processes: Process[] = [];
  readonly #connect: Connect;
  readonly #prefix = `fleet${++fleets}:`;

  constructor(connect: Connect) {
    this.#connect = connect;
  }

  async start(settings: Partial<RedisOptions> = {}): Promise<Process> {
    const nodes = await this.#connect();
    const own = { prefix: this.#prefix, clock: this.clock, sweepMs: FOREVER_MS };
    const made = makeEngine(nodes, PATIENT, { ...own, ...settings });
    await made.engine.open();
    const process = new Process(nodes, made);
    this.processes.push(process);
    return process;
  }

  async gatewayAndBatchers(batchers: number): Promise<[Process, ...Process[]]> {
    const gateway = await this.start();
    const others: Process[] = [];
    for (let n = 0; n < batchers; n++) others.push(await this.start());
    return [gateway, ...others];
  }

  /** Lets time pass and waits until `check` holds. */
  passUntil(check: () => boolean | Promise<boolean>, what: string, stepMs = 100): Promise<void> {
    return until(async () => {
      if (await check()) return true;
      await this.clock.run(this.clock.now() + stepMs);
      return false;
    }, what);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const process of this.processes) await process.stop();
  }
}

class Process {
  readonly engine: ReturnType<typeof makeEngine>["engine"];
  readonly name: string;
  readonly stage: Stage;
  readonly #made: ReturnType<typeof makeEngine>;
  readonly #nodes: RedisNodes;
  readonly #ends: RecordView[] = [];

  constructor(nodes: RedisNodes, made: ReturnType<typeof makeEngine>) {
    this.#nodes = nodes;
    this.#made = made;
    this.engine = made.engine;
    this.name = made.name;
    this.stage = new Stage({ ...made, approximate: true });
    made.engine.watch({ settled: (record) => this.#ends.push(record) });
  }

  /** Ends that it heard of: id → code, "" for a success. */
  get ends(): Map<string, string> {
    assert.equal(new Set(this.#ends.map(({ task }) => task.id)).size, this.#ends.length, "each end once");
    return new Map(
      this.#ends.map(({ task, outcome }) => [task.id, outcome!.ok ? "" : outcome!.code] as const),
    );
  }

  output(id: string): string | undefined {
    const outcome = this.#ends.find(({ task }) => task.id === id)?.outcome;
    return outcome?.ok ? outcome.output : undefined;
  }

  async heard(...ids: string[]): Promise<void> {
    await until(() => ids.every((id) => this.ends.has(id)), `${this.name} heard of ${ids.length} ends`);
  }

  /** Puts tasks of one tick: they share a bundle on one server. */
  async putTogether(count: number, fields: Partial<Task> = {}, sharing: Sharing = {}): Promise<string[]> {
    const patient = { deadlineAt: this.stage.now + FOREVER_MS, ...fields };
    const replies = await Promise.all(Array.from({ length: count }, () => this.stage.put(patient, sharing)));
    return replies.map((reply) => {
      assert.equal(reply.kind, "queued");
      assert(reply.kind === "queued");
      return reply.id;
    });
  }

  read(): Promise<void> {
    return this.engine.refresh();
  }

  /** Reads, and claims what it has. */
  async claim(max = 64): Promise<Lease> {
    await this.read();
    return this.stage.claim(max, { leaseMs: 1e9 });
  }

  async settle(lease: Lease, verdict: Judgement, ids = idsOf(lease)): Promise<void> {
    const replies = await this.engine.settle(lease, ids.map(verdict));
    assert.deepEqual(new Set(replies), new Set(["taken"]));
  }

  async work(): Promise<string[]> {
    const lease = await this.claim();
    if (lease.tasks.length > 0)
      await this.settle(lease, (id) => ({ id, kind: "done", output: JSON.stringify(id) }));
    return idsOf(lease);
  }

  /** It lives for the other batchers, until `die`. */
  async live(): Promise<void> {
    for (const [shard, base] of this.#made.keys.bases.entries())
      await this.#nodes.command(shard, ["SET", `${base}alive:${this.name}`, "1"]);
  }

  async die(): Promise<void> {
    for (const [shard, base] of this.#made.keys.bases.entries())
      await this.#nodes.command(shard, ["DEL", `${base}alive:${this.name}`]);
  }

  /** From here on nobody hears its messages; their numbers go on. Returns what ends that. */
  mute(): () => void {
    const nodes = this.#nodes;
    const [command, pipeline] = [nodes.command.bind(nodes), nodes.pipeline.bind(nodes)];
    nodes.command = (shard, words, options) =>
      words[0] === "SPUBLISH" ? Promise.resolve(0) : command(shard, words, options);
    nodes.pipeline = async (shard, commands, options) => {
      const replies = await pipeline(
        shard,
        commands.filter(([verb]) => verb !== "SPUBLISH"),
        options,
      );
      return commands.map(([verb]) => (verb === "SPUBLISH" ? 0 : replies.shift()!));
    };
    return () => Object.assign(nodes, { command, pipeline });
  }

  /** So many tasks too many count as waiting. */
  async miscount(tasks: number): Promise<void> {
    await this.command(0, ["HINCRBY", `${this.#made.keys.bases[0]!}depth`, `0:${MODEL}`, String(tasks)]);
  }

  command(shard: number, words: string[]): Promise<unknown> {
    return this.#nodes.command(shard, words);
  }

  /** Tasks that wait in its pool. */
  get pooled(): number {
    return [...this.engine.queues(MODEL)].reduce((sum, { depth }) => sum + depth, 0);
  }

  /** As kill -9 does. */
  kill(): Promise<void> {
    return this.#nodes.close();
  }

  async stop(): Promise<void> {
    await this.engine.close();
    await this.#nodes.close();
  }
}

const attempts = (lease: Lease): number[] => lease.tasks.map(({ attempt }: ClaimedTask) => attempt);

function processes(
  name: string,
  start: () => Promise<{ connect: Connect; [Symbol.asyncDispose](): Promise<void> }>,
) {
  describe(name, () => {
    let servers: Awaited<ReturnType<typeof start>>;
    before(async () => (servers = await start()));
    after(() => servers[Symbol.asyncDispose]());
    const fleet = (): Fleet => new Fleet(servers.connect);

    describe("the end of a task", () => {
      test("reaches the gateway that put it, with its own outcome, once", async () => {
        await using all = fleet();
        const [one, two, first, second] = (await all.gatewayAndBatchers(3)) as Process[];
        const ones = await one!.putTogether(40);
        const twos = await two!.putTogether(40);
        const ran = [...(await first!.work()), ...(await second!.work()), ...(await first!.work())];
        assert.deepEqual(new Set(ran), new Set([...ones, ...twos]));
        await one!.heard(...ones);
        await two!.heard(...twos);
        for (const id of ones) assert.equal(one!.output(id), JSON.stringify(id));
        assert.deepEqual([one!.ends.size, two!.ends.size], [40, 40]);
        assert.deepEqual([first!.ends.size, second!.ends.size], [0, 0]);
      });

      test("of each kind reaches a gateway that follows it, and the one that put it", async () => {
        await using all = fleet();
        const [gateway, batcher, third] = (await all.gatewayAndBatchers(2)) as Process[];
        const ids = await gateway!.putTogether(3);
        for (const id of ids) assert.equal((await third!.engine.follow(id, "ann"))?.state, "queued");
        assert.equal(await third!.engine.follow(ids[0]!, "bob"), undefined);
        const lease = await batcher!.claim();
        const order = idsOf(lease);
        assert.equal((await third!.engine.follow(order[0]!, "ann"))?.state, "running");
        const verdicts = [done, failed, dead];
        await batcher!.engine.settle(
          lease,
          order.map((id, at) => verdicts[at]!(id)),
        );
        const ends = new Map(order.map((id, at) => [id, ["", "INPUT_REJECTED", "INFERENCE_FAILED"][at]!]));
        for (const each of [gateway!, third!]) {
          await each.heard(...ids);
          assert.deepEqual(each.ends, ends);
        }
        assert.equal((await third!.engine.follow(order[0]!, "ann"))?.state, "done");
      });

      test("is found by the sweep when its message was lost", async () => {
        await using all = fleet();
        const gateway = await all.start({ sweepMs: 1000 });
        const batcher = await all.start();
        const ids = await gateway.putTogether(3);
        batcher.mute();
        await batcher.work();
        await all.passUntil(() => gateway.ends.size === ids.length, "the sweep finds them");
      });

      test("is looked up at once when the numbers of its sender have a gap", async () => {
        await using all = fleet();
        const [gateway, batcher] = (await all.gatewayAndBatchers(1)) as Process[];
        // Messages of a shard are numbered; on a Cluster tasks go to several shards.
        const rounds = async (): Promise<string[]> => {
          const ids = (
            await Promise.all(Array.from({ length: 6 }, async () => gateway!.putTogether(1)))
          ).flat();
          for (let n = 0; n < 6; n++) ids.push(...(await gateway!.putTogether(1)));
          await batcher!.work();
          return ids;
        };
        await gateway!.heard(...(await rounds()));
        const unmute = batcher!.mute();
        const lost = await rounds();
        assert.ok(lost.every((id) => !gateway!.ends.has(id)));
        unmute();
        const last = await rounds();
        await gateway!.heard(...lost, ...last);
      });

      test("is looked up when the connection is back", async () => {
        await using all = fleet();
        const [gateway, batcher] = (await all.gatewayAndBatchers(1)) as Process[];
        for (let round = 0; round < 3; round++) {
          const ids = await gateway!.putTogether(16);
          const killed: Promise<unknown>[] = [];
          for (let shard = 0; shard < 16; shard++)
            killed.push(batcher!.command(shard, ["CLIENT", "KILL", "TYPE", "pubsub"]));
          await batcher!.work();
          await Promise.all(killed);
          await gateway!.heard(...ids);
        }
      });
    });

    describe("a task that another gateway joins", () => {
      const sharing = { joinKey: "same" };

      test("before it is read: both are answered, and the batcher reads it with the better place", async () => {
        await using all = fleet();
        const [one, two, batcher] = (await all.gatewayAndBatchers(2)) as Process[];
        const { now } = one!.stage;
        const id = await one!.stage.queue({ tier: 2, deadlineAt: now + 500 }, sharing);
        const reply = await two!.stage.put({ tier: 0, deadlineAt: now + 1500 }, sharing);
        assert.deepEqual(reply, { kind: "joined", id });
        await batcher!.read();
        await until(() => batcher!.engine.queues(MODEL)[Symbol.iterator]().next().value?.tier === 0);
        await batcher!.stage.pass(1000);
        await batcher!.work();
        await one!.heard(id);
        await two!.heard(id);
        assert.deepEqual([one!.output(id), two!.output(id)], [JSON.stringify(id), JSON.stringify(id)]);
      });

      test("while a batcher holds it: the same, by message", async () => {
        await using all = fleet();
        const [one, two, batcher] = (await all.gatewayAndBatchers(2)) as Process[];
        const { now } = one!.stage;
        const id = await one!.stage.queue({ tier: 2, deadlineAt: now + 500 }, sharing);
        await batcher!.read();
        assert.equal([...batcher!.engine.queues(MODEL)][0]!.tier, 2);
        const reply = await two!.stage.put({ tier: 0, deadlineAt: now + 1500 }, sharing);
        assert.deepEqual(reply, { kind: "joined", id });
        await until(() => [...batcher!.engine.queues(MODEL)][0]?.tier === 0, "the batcher knows");
        await batcher!.stage.pass(1000);
        await batcher!.work();
        await one!.heard(id);
        await two!.heard(id);
      });

      test("is cancelled only when the last caller is gone", async () => {
        await using all = fleet();
        const [one, two, batcher] = (await all.gatewayAndBatchers(2)) as Process[];
        const id = await one!.stage.queue({}, sharing);
        assert.deepEqual(await two!.stage.put({}, sharing), { kind: "joined", id });
        assert.equal(await one!.engine.cancel(id, "ann"), "kept");
        assert.equal(await two!.engine.cancel(id, "ann", true), "kept");
        assert.equal(await one!.engine.cancel(id, "ann", true), "cancelled");
        assert.equal((await batcher!.claim()).tasks.length, 0);
      });
    });

    describe("cancel through another gateway", () => {
      test("of a task that nobody has read: it is never run", async () => {
        await using all = fleet();
        const [one, two, batcher] = (await all.gatewayAndBatchers(2)) as Process[];
        const [id, other] = (await one!.putTogether(2)) as [string, string];
        assert.equal(await two!.engine.cancel(id, "bob"), "unknown");
        assert.equal(await two!.engine.cancel(id, "ann"), "cancelled");
        await batcher!.read();
        await until(() => (batcher!.engine.queues(MODEL)[Symbol.iterator]().next().value?.depth ?? 0) === 1);
        assert.deepEqual(await batcher!.work(), [other]);
        assert.equal(await one!.stage.code(id), "CANCELLED");
        await one!.heard(other);
      });

      test("of one that a batcher holds: it is asked, and everybody hears of it; of one that runs: kept", async () => {
        await using all = fleet();
        const [one, two, batcher] = (await all.gatewayAndBatchers(2)) as Process[];
        const ids = await one!.putTogether(2);
        const lease = await batcher!.claim(1);
        const [running] = idsOf(lease) as [string];
        const waiting = ids.find((id) => id !== running)!;
        assert.equal(await two!.engine.cancel(waiting, "ann"), "cancelled");
        assert.equal(await two!.engine.cancel(running, "ann"), "kept");
        await one!.heard(waiting);
        assert.equal(one!.ends.get(waiting), "CANCELLED");
        assert.equal(await two!.engine.cancel(waiting, "ann"), "forgotten");
        assert.equal(await one!.engine.cancel(waiting, "ann"), "unknown");
        await batcher!.settle(lease, done);
        await one!.heard(running);
        assert.deepEqual(await batcher!.work(), []);
      });

      test("of one that a third gateway has polled: it is cancelled, and that one hears of it, too", async () => {
        await using all = fleet();
        const [one, third] = [await all.start({ sweepMs: 1000 }), await all.start({ sweepMs: 1000 })];
        const [two, batcher] = [await all.start(), await all.start()];
        const ids = await one.putTogether(2);
        for (const id of ids) assert.equal((await third.engine.follow(id, "ann"))?.state, "queued");
        assert.equal(await two.engine.cancel(ids[0]!, "ann"), "cancelled");
        await batcher.read();
        assert.equal(await two.engine.cancel(ids[1]!, "ann"), "cancelled");
        for (const each of [one, third]) {
          // No batcher had the first one, so nobody tells of its end: it is looked up.
          await all.passUntil(() => each.ends.size === 2, "it is heard of");
          assert.deepEqual([...each.ends.values()], ["CANCELLED", "CANCELLED"]);
        }
      });

      test("of one whose batcher does not answer: nobody can say, and the caller is told so", async () => {
        await using all = fleet();
        const [one, two, batcher] = (await all.gatewayAndBatchers(2)) as Process[];
        const [id] = (await one!.putTogether(1)) as [string];
        await batcher!.read();
        batcher!.mute();
        const cancelled = assert.rejects(two!.engine.cancel(id, "ann"), (error) => {
          assert.ok(error instanceof Refusal);
          assert.equal(error.status, 503);
          assert.match(error.message, /not certain whether the task was cancelled/);
          return true;
        });
        let over = false;
        void cancelled.finally(() => (over = true));
        await all.passUntil(() => over, "the answer is given up");
        await cancelled;
      });
    });

    describe("batchers that read by themselves", () => {
      const eager = (changes: Partial<Demand> = {}): Demand => ({
        ...ASLEEP,
        models: () => [MODEL],
        room: () => 100,
        batchSize: () => 100,
        patienceMs: () => 100,
        pacePerMs: () => 1,
        leads: () => true,
        ...changes,
      });

      test("the one that leads reads what comes; another only what is left", async () => {
        await using all = fleet();
        const [gateway, leader, other] = (await all.gatewayAndBatchers(2)) as Process[];
        let room = 100;
        await leader!.engine.serve(
          eager({ room: () => room, batchSize: () => room, othersIdle: () => true }),
        );
        await other!.engine.serve(eager({ leads: () => false, othersIdle: () => true }));
        await gateway!.putTogether(3);
        await all.passUntil(() => leader!.pooled === 3, "it is read", 1);
        assert.equal(other!.pooled, 0);
        room = 0;
        await gateway!.putTogether(3);
        await all.passUntil(() => leader!.pooled + other!.pooled === 6, "the rest is read", 10);
      });

      test("under backlog one that holds its share leaves new tasks to another, for as long as that takes them", async () => {
        await using all = fleet();
        const [gateway, first, second] = (await all.gatewayAndBatchers(2)) as Process[];
        const busy = eager({ room: () => 0, batchSize: () => 1, pacePerMs: () => 0, share: () => 0.5 });
        let serves = true;
        await gateway!.putTogether(6);
        await first!.engine.serve(busy);
        await all.passUntil(() => first!.pooled === 6, "nobody else has any", 1);
        await second!.engine.serve({ ...busy, models: () => (serves ? [MODEL] : []) });
        const counted = (): boolean =>
          [first!, second!].every(({ engine }) => engine.stats().queued === first!.pooled + second!.pooled);
        const pooled = (): number => first!.pooled + second!.pooled;
        // On a slow machine Redis may answer the second after the first's patience: then the first has them.
        for (let round = 1; round <= 10 && second!.pooled < 4; round++) {
          await gateway!.putTogether(2);
          await all.passUntil(() => pooled() === 6 + 2 * round, "they are read", 1);
          await all.passUntil(counted, "both know what waits", 100);
        }
        assert.ok(second!.pooled >= 4, `${second!.pooled} and ${first!.pooled}`);
        serves = false;
        const before = first!.pooled;
        await gateway!.putTogether(2);
        await all.passUntil(() => first!.pooled === before + 2, "nobody else takes them", 1);
      });

      test("one that is killed is noticed by its lease, and another goes on", async () => {
        await using all = fleet();
        const gateway = await all.start();
        const [first, second] = [await all.start({ leaseMs: 500 }), await all.start({ leaseMs: 500 })];
        const ids = await gateway.putTogether(6);
        await first.engine.serve(eager());
        await all.passUntil(() => first.pooled === 6, "it is read", 1);
        const lease = await first.stage.claim(2, { leaseMs: FOREVER_MS });
        await until(async () => (await gateway.stage.state(idsOf(lease)[0]!)) === "running", "it runs");
        await first.kill();
        await second.engine.serve(eager());
        await all.passUntil(() => second.pooled === 6, "it is taken over", 50);
        const next = await second.stage.claim(64, { leaseMs: FOREVER_MS });
        for (const { task, attempt } of next.tasks)
          assert.equal(attempt, idsOf(lease).includes(task.id) ? 2 : 1, task.id);
        await second.settle(next, done);
        await gateway.heard(...ids);
      });

      test("tasks of another zone are read when its batchers have had their time, or are none", async () => {
        for (const deserted of [false, true]) {
          await using all = fleet();
          const gateway = await all.start({ zone: "far" });
          const batcher = await all.start({ zone: "near", zoneSpillMs: 1000 });
          const ids = await gateway.putTogether(3);
          await batcher.engine.serve(eager({ zones: () => [{ zone: "far", deserted }] }));
          const startedAt = all.clock.now();
          await all.passUntil(() => batcher.pooled === 3, "it is read", 100);
          assert.ok(deserted || all.clock.now() - startedAt >= 1000, "not before");
          await batcher.settle(await batcher.stage.claim(), done);
          await gateway.heard(...ids);
        }
      });

      test("counts that a crash left behind are cleared when nothing is left, and not before", async () => {
        await using all = fleet();
        const [gateway, batcher] = (await all.gatewayAndBatchers(1)) as Process[];
        await gateway!.putTogether(1);
        await batcher!.miscount(5);
        await batcher!.engine.serve(eager({ room: () => 0 }));
        for (let n = 0; n < 5; n++)
          await all.passUntil(() => batcher!.engine.stats().queued === 6, "kept", 10_001);
        await batcher!.read();
        await batcher!.settle(await batcher!.stage.claim(), done);
        await all.passUntil(() => gateway!.engine.stats().queued === 0, "cleared", 5001);
        await gateway!.putTogether(2);
        await all.passUntil(() => batcher!.engine.stats().queued === 2, "and right", 1001);
      });
    });

    describe("a batcher that dies", () => {
      test("with very many entries: all of them are taken over at once", async () => {
        await using all = fleet();
        const [gateway, first, second] = (await all.gatewayAndBatchers(2)) as Process[];
        const ids: string[] = [];
        for (let n = 0; n < 250; n++) ids.push(...(await gateway!.putTogether(1)));
        await first!.read();
        await second!.engine.takeOver();
        assert.deepEqual(new Set(idsOf(await second!.stage.claim(1000))), new Set(ids));
      });

      test("with a bundle of which a part has ended: another runs the rest, and only what ran is charged", async () => {
        await using all = fleet();
        const [gateway, first, second] = (await all.gatewayAndBatchers(2)) as Process[];
        await first!.live();
        const ids = await gateway!.putTogether(9);
        const lease = await first!.claim(6);
        const [ended, running] = [idsOf(lease).slice(0, 3), idsOf(lease).slice(3)];
        await first!.settle(lease, done, ended);
        await second!.engine.takeOver();
        assert.deepEqual((await second!.claim()).tasks, [], "it lives, and keeps what it has");
        await first!.die();
        await second!.engine.takeOver();
        const rest = await second!.claim();
        assert.deepEqual(new Set(idsOf(rest)), new Set(ids.filter((id) => !ended.includes(id))));
        for (const { task, attempt } of rest.tasks)
          assert.equal(attempt, running.includes(task.id) ? 2 : 1, task.id);
        await second!.settle(rest, done);
        await gateway!.heard(...ids);
        assert.deepEqual(await second!.work(), []);
      });

      test("what ran when it was lost runs alone from the second loss, and is a dead letter at the fourth", async () => {
        await using all = fleet();
        const [gateway, ...batchers] = (await all.gatewayAndBatchers(4)) as Process[];
        const ids = await gateway!.putTogether(2);
        const seen: [size: number, attempts: number[]][] = [];
        for (const batcher of batchers) {
          await batcher.engine.takeOver();
          const lease = await batcher.claim();
          seen.push([lease.tasks.length, attempts(lease)]);
        }
        assert.deepEqual(seen, [
          [2, [1, 1]],
          [2, [2, 2]],
          [1, [3]],
          [1, [4]],
        ]);
        const last = await all.start();
        await last.engine.takeOver();
        await until(() => gateway!.ends.size === 1, "the gateway hears of the one that ran each time");
        const [[id, code]] = [...gateway!.ends] as [[string, string]];
        assert.ok(ids.includes(id));
        assert.equal(code, "INFERENCE_FAILED");
        assert.deepEqual(
          (await last.engine.deadLetters.list()).map(({ task, attempts }) => [task.id, attempts]),
          [[id, 4]],
        );
        assert.deepEqual(attempts(await last.claim()), [3]);
      });

      test("and comes back: its good news counts if it is the first, its bad news does not", async () => {
        await using all = fleet();
        const [gateway, zombie, heir] = (await all.gatewayAndBatchers(2)) as Process[];
        const ids = await gateway!.putTogether(4);
        const old = await zombie!.claim();
        await heir!.engine.takeOver();
        const lease = await heir!.claim();
        assert.equal(lease.tasks.length, 4);
        const [good, late, bad, deadly] = ids as [string, string, string, string];
        await heir!.settle(lease, (id) => ({ id, kind: "done", output: '"heir"' }), [late]);
        const verdicts = [
          { id: good, kind: "done", output: '"zombie"' } as const,
          { id: late, kind: "done", output: '"zombie"' } as const,
          failed(bad),
          dead(deadly),
        ];
        const replies = await zombie!.engine.settle(old, verdicts);
        assert.deepEqual(replies, ["taken", "late", "late", "late"]);
        assert.deepEqual(await zombie!.engine.deadLetters.list(), []);
        const rest = await heir!.engine.settle(lease, [good, bad, deadly].map(done));
        assert.deepEqual(rest, ["late", "taken", "taken"]);
        await gateway!.heard(...ids);
        assert.deepEqual(
          ids.map((id) => gateway!.output(id)),
          ['"zombie"', '"heir"', '"out"', '"out"'],
        );
        // Nothing is left for anybody.
        const third = await all.start();
        await third.engine.takeOver();
        assert.deepEqual(await third.work(), []);
        assert.equal((await third.stage.counts())[0], 0);
      });

      test("what it knew of retries is known to the next: attempts, batch size, when", async () => {
        await using all = fleet();
        const [gateway, first, second] = (await all.gatewayAndBatchers(2)) as Process[];
        const ids = await gateway!.putTogether(2);
        const lease = await first!.claim();
        const at = all.clock.now() + 1000;
        await first!.settle(lease, (id) => retry(id, at, { maxBatchSize: 1 }));
        await second!.engine.takeOver();
        assert.deepEqual((await second!.claim()).tasks, [], "not before its time");
        await second!.stage.pass(1001);
        const again = await second!.claim();
        assert.deepEqual(attempts(again), [2], "alone");
        await second!.settle(again, done);
        await second!.settle(await second!.claim(), done);
        await gateway!.heard(...ids);
      });
    });

    test("a batcher that closes hands everything back: at once, untried where it ran, nothing lost", async () => {
      await using all = fleet();
      const [gateway, first, second] = (await all.gatewayAndBatchers(2)) as Process[];
      await first!.live();
      const ids = await gateway!.putTogether(9);
      const lease = await first!.claim(6);
      const [ended, tried] = [idsOf(lease).slice(0, 2), idsOf(lease).slice(2, 4)];
      await first!.settle(lease, done, ended);
      await first!.settle(lease, (id) => retry(id, 0), tried);
      await first!.engine.close();
      const rest = await second!.claim();
      assert.deepEqual(new Set(idsOf(rest)), new Set(ids.filter((id) => !ended.includes(id))));
      for (const { task, attempt } of rest.tasks)
        assert.equal(attempt, tried.includes(task.id) ? 2 : 1, task.id);
      await second!.settle(rest, done);
      await gateway!.heard(...ids);
      assert.deepEqual((await second!.stage.counts()).slice(0, 2), [0, 0]);
    });

    test("a dead letter of one batcher is replayed through any gateway, and run by another", async () => {
      await using all = fleet();
      const [gateway, other, first, second] = (await all.gatewayAndBatchers(3)) as Process[];
      const [id] = (await gateway!.putTogether(1)) as [string];
      await first!.settle(await first!.claim(), dead);
      await gateway!.heard(id);
      assert.equal((await other!.engine.deadLetters.get(id))?.task.input, '"in"');
      assert.equal(await other!.engine.deadLetters.replay(id), true);
      assert.equal(await gateway!.engine.deadLetters.replay(id), false);
      assert.equal(await gateway!.stage.state(id), "queued");
      await second!.work();
      await other!.heard(id);
      assert.equal(await gateway!.stage.state(id), "done");
      assert.deepEqual(await gateway!.engine.deadLetters.list(), []);
    });

    test("different parameters are bounded for each gateway, shared by its tenants, and freed as they end", async () => {
      await using all = fleet();
      const [one, two, batcher] = (await all.gatewayAndBatchers(2)) as Process[];
      const fill = async (gateway: Process, tenant: string, count: number): Promise<number> => {
        const puts = Array.from({ length: count }, (_, n) =>
          gateway.stage.put({ tenant, parameters: `{"${tenant}":${n}}` }),
        );
        return (await Promise.all(puts)).filter(({ kind }) => kind === "queued").length;
      };
      const share = await fill(one!, "ann", MAX_GROUPS);
      assert.ok(share < MAX_GROUPS, "some are left for others");
      assert.equal(await fill(one!, "bob", 10), 10);
      assert.equal(await fill(two!, "ann", 10), 10, "another gateway counts for itself");
      await batcher!.read();
      for (let n = 0; n < 20; n++) {
        const lease = await batcher!.stage.claim(1, { parameters: `{"ann":${share - 1 - n}}` });
        await batcher!.settle(lease, done);
        await one!.heard(idsOf(lease)[0]!);
      }
      assert.equal((await one!.stage.put({ parameters: '{"ann":"again"}' })).kind, "queued");
    });

    test("a tenant that floods two gateways does not keep another one waiting", async () => {
      await using all = fleet();
      const [one, two, batcher] = (await all.gatewayAndBatchers(2)) as Process[];
      for (const gateway of [one!, two!]) {
        await gateway.putTogether(100, { tenant: "ann" });
        await gateway.putTogether(4, { tenant: "bob" });
      }
      const lease = await batcher!.claim(32);
      const bobs = lease.tasks.filter(({ task }) => task.tenant === "bob").length;
      assert.equal(bobs, 8);
    });

    test("how many tasks wait and run is exact after every step, through whichever process they go", async () => {
      await using all = fleet();
      const [gateway, first, second] = (await all.gatewayAndBatchers(2)) as Process[];
      const counted = async (queued: number, running: number, letters = 0): Promise<void> => {
        const views = (): string[] =>
          all.processes.map(({ engine }) => {
            const { queued, running, deadLetters } = engine.stats();
            return [queued, running, deadLetters].join(" ");
          });
        const wanted = `${queued} ${running} ${letters}`;
        await all
          .passUntil(() => views().every((view) => view === wanted), `everybody counts ${wanted}`, 1001)
          .catch((error: unknown) => {
            throw new Error(`wanted ${wanted}, found ${views().join(", ")}`, { cause: error });
          });
      };
      await gateway!.putTogether(10);
      await counted(10, 0);
      const [alone] = await gateway!.putTogether(1, { model: OTHER_MODEL });
      await counted(11, 0);
      assert.equal(await second!.engine.cancel(alone!, "ann"), "cancelled");
      await first!.read();
      await counted(10, 0);
      const lease = await first!.stage.claim(4, { leaseMs: 1e9 });
      await counted(6, 4);
      const [a, b, c, d] = idsOf(lease) as [string, string, string, string];
      await first!.engine.settle(lease, [done(a), failed(b), dead(c), retry(d, 0)]);
      await counted(7, 0, 1);
      await gateway!.engine.deadLetters.replay(c);
      await counted(8, 0);
      await first!.stop();
      all.processes.splice(all.processes.indexOf(first!), 1);
      await counted(8, 0);
      const rest = await second!.claim(5);
      await counted(3, 5);
      const third = await all.start();
      await third.engine.takeOver();
      await counted(8, 0);
      await third.work();
      await counted(0, 0);
      assert.equal(rest.tasks.length, 5);
    });
  });
}

processes("one server", async () => {
  const server = await startServer();
  return { connect: () => openNodes({ url: server.url }), [Symbol.asyncDispose]: () => server.stop() };
});

processes("a Cluster", async () => {
  const cluster = await startCluster();
  const connect = () => openNodes({ nodes: cluster.nodes });
  return { connect, [Symbol.asyncDispose]: () => cluster[Symbol.asyncDispose]() };
});
