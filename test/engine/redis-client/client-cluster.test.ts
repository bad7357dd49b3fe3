/** A Cluster of three primaries with a replica each: routing, moving slots, failover. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { slotOf } from "../../../src/engine/redis/client/topology.ts";
import { startCluster, until } from "./servers.ts";
import type { Cluster, Server } from "./servers.ts";
import { channelOf, Ear, PATIENT_MS, pushTo, scriptOf, Stage, tags } from "./client-stage.ts";

describe("a Cluster", () => {
  let cluster: Cluster;
  before(async () => void (cluster = await startCluster()));
  after(() => cluster.stop());

  const stageOn = (): Promise<Stage> => Stage.open({ nodes: cluster.nodes, commandTimeoutMs: 2000 });
  const slot = (shard: number): number => slotOf(tags[shard]!);

  async function anotherThan(owner: Server): Promise<Server> {
    return (await cluster.primaries()).find((server) => server !== owner)!;
  }

  test("each shard's work reaches its own primary, from any seed, also by url", async () => {
    for (const options of [{ nodes: cluster.nodes.slice(5) }, { url: cluster.servers[0]!.url }]) {
      await using stage = await Stage.open(options);
      const { nodes } = stage;
      assert.equal(nodes.cluster, true);
      // The first shard of each third of the slots.
      assert.deepEqual(nodes.activeShards(), [0, 5, 11]);
      assert.equal(nodes.primaries().length, 3);
      assert.ok(nodes.primaries().every(({ replicas, waits, up }) => replicas === 1 && waits && up));
      const calls = tags.map((_, shard) =>
        nodes.runDurably(shard, pushTo(shard, shard, "routed"), PATIENT_MS),
      );
      await Promise.all(calls);
    }
    const counts = await Promise.all(
      tags.map(async (tag, shard) => {
        const owner = await cluster.primaryOf(slot(shard));
        return owner.cli("LRANGE", `{${tag}}:routed`, "0", "-1");
      }),
    );
    assert.deepEqual(
      counts.map((text) => text.trim().split(/\s+/)),
      tags.map((_, shard) => [String(shard), String(shard)]),
    );
    const { url } = cluster.servers[0]!;
    await assert.rejects(
      Stage.open({ url: `${url}/3` }),
      /a Cluster has only database 0, so leave \/3 out of the url/,
    );
  });

  test("a slot that moves under load: nobody notices, and the channels move too", async () => {
    await using stage = await stageOn();
    const { nodes } = stage;
    const ear = await Ear.on(nodes);
    const moving = 4;
    const [from, key] = [await cluster.primaryOf(slot(moving)), `{${tags[moving]}}`];
    const to = await anotherThan(from);
    for (let n = 0; n < 60; n++) await nodes.command(moving, ["SET", `${key}:filler:${n}`, n]);
    const moved = new AbortController();
    let written = 0;
    const load = (async () => {
      while (!moved.signal.aborted) {
        await nodes.runDurably(moving, pushTo(moving, written, "moved"), PATIENT_MS);
        await nodes.run(moving, pushTo(moving, written, "moved-plain"), { withinMs: PATIENT_MS });
        written++;
      }
    })();
    const asked: string[] = [];
    await cluster.moveSlot(slot(moving), to, async () => {
      // In the middle of it: this key is not there, so the old owner sends us on with ASK.
      const name = `${key}:fresh:${asked.length}`;
      asked.push(String(await nodes.command(moving, ["SET", name, 1], { withinMs: PATIENT_MS })));
    });
    assert.ok(asked.length >= 6 && asked.every((reply) => reply === "OK"));
    await until(() => nodes.up(moving) && ear.confirmed.get(moving)! >= 2);
    moved.abort();
    await load;
    assert.ok(written > 0);
    for (const list of ["moved", "moved-plain"])
      assert.equal(await to.cli("LLEN", `${key}:${list}`), String(written));
    assert.equal(await nodes.command(moving, ["SPUBLISH", channelOf(moving), "here"]), 1);
    await until(() => ear.heard.includes(`${moving} here`));
    // And back: it was unsubscribed there, which must have been noticed.
    const times = ear.confirmed.get(moving)!;
    await cluster.moveSlot(slot(moving), from);
    assert.equal(await nodes.run(moving, pushTo(moving, 0, "moved"), { withinMs: PATIENT_MS }), written + 1);
    await until(() => ear.confirmed.get(moving)! > times);
    await until(async () => (await nodes.command(moving, ["SPUBLISH", channelOf(moving), "back"])) === 1);
    await until(() => ear.heard.includes(`${moving} back`));
    assert.deepEqual(
      stage.notices.filter(({ message }) => /away/.test(message)),
      [],
    );
  });

  test("keys in two halves of a moving slot: tried again until they are together", async () => {
    await using stage = await stageOn();
    const { nodes } = stage;
    const moving = 7;
    const names = [`{${tags[moving]}}:a`, `{${tags[moving]}}:b`];
    const two = scriptOf("two", "return redis.call('MSET', KEYS[1], 1, KEYS[2], 2)");
    await nodes.run(moving, { script: two, keys: names, args: [] });
    const from = await cluster.primaryOf(slot(moving));
    const to = await anotherThan(from);
    const [fromId, toId] = [await from.cli("CLUSTER", "MYID"), await to.cli("CLUSTER", "MYID")];
    await to.cli("CLUSTER", "SETSLOT", String(slot(moving)), "IMPORTING", fromId);
    await from.cli("CLUSTER", "SETSLOT", String(slot(moving)), "MIGRATING", toId);
    const migrate = (name: string): Promise<string> =>
      from.cli("MIGRATE", "127.0.0.1", String(to.port), name, "0", "20000");
    await migrate(names[0]!);
    const call = { script: two, keys: names, args: [] };
    await assert.rejects(nodes.run(moving, call, { withinMs: 100 }), {
      name: "StoreAway",
      unknown: false,
      message: /answered for 100 ms: TRYAGAIN/,
    });
    const patient = [
      nodes.run(moving, call, { withinMs: PATIENT_MS }),
      nodes.runDurably(moving, call, PATIENT_MS),
    ];
    await migrate(names[1]!);
    assert.deepEqual((await Promise.all(patient)).map(String), ["OK", "OK"]);
    await cluster.moveSlot(slot(moving), to);
    assert.equal(String(await nodes.run(moving, call)), "OK");
  });

  test("while a slot moves: pipelines and scattered commands arrive, a transaction waits for its end", async () => {
    await using stage = await stageOn();
    const { nodes } = stage;
    const moving = 9;
    const key = `{${tags[moving]}}`;
    for (let n = 0; n < 40; n++) await nodes.command(moving, ["SET", `${key}:n${n}`, n]);
    const from = await cluster.primaryOf(slot(moving));
    const to = await anotherThan(from);
    const names = Array.from({ length: 40 }, (_, n) => `${key}:n${n}`);
    const patience = { resend: true, withinMs: PATIENT_MS };
    let steps = 0;
    let waiting: Promise<unknown> | undefined;
    await cluster.moveSlot(slot(moving), to, async () => {
      steps++;
      // Some of these are here, some are there.
      const piped = await nodes.pipeline(
        moving,
        names.map((name) => ["INCR", name]),
        patience,
      );
      assert.deepEqual(
        piped,
        names.map((_, n) => n + 2 * steps - 1),
      );
      const everywhere = [
        ...names.map((name) => ({ shard: moving, command: ["INCR", name] })),
        { shard: 0, command: ["ECHO", "elsewhere"] },
      ];
      const scattered = await nodes.scatter(everywhere, patience);
      assert.deepEqual(
        scattered.slice(0, -1),
        names.map((_, n) => n + 2 * steps),
      );
      assert.equal(String(scattered.at(-1)), "elsewhere");
      const fresh = (again: boolean): string[][] => [
        ["SET", `${key}:fresh`, String(again)],
        ["RPUSH", `${key}:list`, "once"],
      ];
      await assert.rejects(nodes.transact(moving, fresh, 100), {
        name: "StoreAway",
        unknown: false,
        message: /answered for 100 ms: TRYAGAIN the slot moves/,
      });
      waiting ??= nodes.transact(moving, fresh, PATIENT_MS);
    });
    assert.ok(steps >= 4);
    assert.deepEqual(((await waiting) as unknown[]).map(String), ["OK", "1"]);
    assert.equal(await to.cli("LLEN", `${key}:list`), "1", "none of the refused ones was half done");
    assert.deepEqual(await nodes.transact(moving, () => [["INCR", names[0]!]], PATIENT_MS), [2 * steps + 1]);
  });

  test("a blocked read finds its shard after a failover of its primary", async () => {
    await cluster.until(() => cluster.isWell());
    await using stage = await stageOn();
    const { nodes } = stage;
    const shard = 6;
    const list = `{${tags[shard]}}:blocked`;
    assert.equal(await nodes.block(shard, ["BLPOP", list, "0.01"], 10), null);
    const primary = await cluster.primaryOf(slot(shard));
    const replica = await cluster.replicaOf(primary);
    const blocked = nodes.block(shard, ["BLPOP", list, "60"], 60_000);
    // The server says UNBLOCKED, or closes; either way the read is over, and the next one goes to the new primary.
    await until(async () => /cmd=blpop/.test(await primary.cli("CLIENT", "LIST")), "it waits");
    const ended = blocked.catch((error: Error) => error.name);
    await until(async () => (await replica.cli("CLUSTER", "FAILOVER")) === "OK");
    await until(async () => (await cluster.primaryOf(slot(shard))) === replica, "the replica has taken over");
    await nodes.command(shard, ["RPUSH", list, "one"], { resend: true, withinMs: PATIENT_MS });
    const first = await ended;
    const got = Array.isArray(first) ? first : await nodes.block(shard, ["BLPOP", list, "60"], 60_000);
    assert.deepEqual((got as Buffer[]).map(String), [list, "one"]);
    await cluster.until(() => cluster.isWell());
  });

  test("a primary that dies: its shards come back at the replica, the others never go", async () => {
    await using stage = await stageOn();
    const { nodes } = stage;
    const ear = await Ear.on(nodes);
    const lost = 15;
    const dead = await cluster.primaryOf(slot(lost));
    const owners = await Promise.all(tags.map((_, shard) => cluster.primaryOf(slot(shard))));
    const spared = owners.findIndex((owner) => owner !== dead);
    await nodes.runDurably(lost, pushTo(lost, 0, "failover"), PATIENT_MS);
    await dead.kill();
    const patient = nodes.runDurably(lost, pushTo(lost, 1, "failover"), PATIENT_MS);
    assert.equal(await nodes.runDurably(spared, pushTo(spared, 0, "failover"), PATIENT_MS), 1);
    assert.equal(nodes.up(spared), true);
    assert.equal(await patient, 2);
    await until(() => nodes.up(lost) && ear.confirmed.get(lost)! >= 2);
    assert.equal(ear.confirmed.get(spared), 1);
    assert.equal(await nodes.command(lost, ["SPUBLISH", channelOf(lost), "again"]), 1);
    await until(() => ear.heard.includes(`${lost} again`));
    assert.equal(nodes.primaries().length, 3);
    assert.match(stage.notices.map(({ message }) => message).join("\n"), /no replica is connected to redis/);
    const back = stage.events.next("notice", ({ message }) => message.startsWith("a replica is connected"));
    await dead.restart();
    await back;
  });

  test("a primary that stands still and wakes up too late is not believed", async () => {
    await cluster.until(() => cluster.isWell());
    await using stage = await stageOn();
    const { nodes } = stage;
    const shard = 0;
    const stale = await cluster.primaryOf(slot(shard));
    assert.equal(await nodes.runDurably(shard, pushTo(shard, 0, "stale"), PATIENT_MS), 1);
    stale.pause();
    await until(async () => (await cluster.primaryOf(slot(shard))) !== stale);
    await nodes.runDurably(shard, pushTo(shard, 1, "stale"), PATIENT_MS);
    stale.resume();
    for (let n = 0; n < 50; n++) await nodes.runDurably(shard, pushTo(shard, n, "stale"), PATIENT_MS);
    const owner = await cluster.primaryOf(slot(shard));
    assert.ok(Number(await owner.cli("LLEN", `{${tags[shard]}}:stale`)) >= 52);
    assert.ok(nodes.primaries().every(({ address }) => address !== `127.0.0.1:${stale.port}`));
  });
});
