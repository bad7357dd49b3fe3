/** Durable writes with a replica, without one, and over a promotion. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { Events } from "../../../src/observe/events.ts";
import { startPair, startServer, until } from "./servers.ts";
import { clock, PATIENT_MS, pushTo, scriptOf, Stage, tags } from "./client-stage.ts";

describe("a primary with a replica", () => {
  test("a durable write is confirmed by the replica, many of them by one WAIT", async () => {
    await using pair = await startPair();
    await using stage = await Stage.open({ url: pair.primary.url });
    const { nodes } = stage;
    assert.deepEqual(
      nodes.primaries().map(({ replicas, waits }) => [replicas, waits]),
      [[1, true]],
    );
    await nodes.runDurably(0, pushTo(0, 0), PATIENT_MS);
    const calls = Array.from({ length: 500 }, (_, n) =>
      nodes.runDurably(n % 16, pushTo(n % 16, n), PATIENT_MS),
    );
    assert.equal((await Promise.all(calls)).length, 500);
    assert.equal(await pair.replica.cli("LLEN", `{${tags[3]}}:list`), "32");
    const waits = /cmdstat_wait:calls=(\d+),/.exec(await pair.primary.cli("INFO", "commandstats"))?.[1];
    assert.ok(Number(waits) <= 5, `${waits} times`);
  });

  test("transactions are confirmed by the replica like scripts, and a primary that was replaced takes none", async () => {
    await using pair = await startPair();
    const list = [pair.primary, pair.replica].map(({ port }) => ({ host: "127.0.0.1", port }));
    await using stage = await Stage.open({ nodes: list, waitTimeoutMs: 2000 });
    const { nodes } = stage;
    const push = (): string[][] => [
      ["RPUSH", "l", "x"],
      ["INCR", "n"],
    ];
    const all = Array.from({ length: 200 }, () => nodes.transact(0, push, PATIENT_MS));
    assert.equal((await Promise.all(all)).length, 200);
    assert.equal(await pair.replica.cli("GET", "n"), "200");
    pair.replica.pause();
    await assert.rejects(nodes.transact(0, push, PATIENT_MS), {
      name: "StoreAway",
      unknown: true,
      message: "no replica confirmed the write within 2000 ms",
    });
    pair.replica.resume();
    await pair.promote();
    await pair.primary.cli("REPLICAOF", "127.0.0.1", String(pair.replica.port));
    // READONLY: it happened nowhere, and is done at the other.
    const before = Number(await pair.replica.cli("GET", "n"));
    assert.deepEqual(await nodes.transact(0, push, PATIENT_MS), [before + 1, before + 1]);
  });

  test("no confirmation in time: unknown, and not sent again", async () => {
    await using pair = await startPair();
    await using stage = await Stage.open({ url: pair.primary.url, waitTimeoutMs: 100 });
    const { nodes } = stage;
    await nodes.command(0, ["DEL", "x"]);
    pair.replica.pause();
    const startedAt = clock.now();
    const doubt = {
      name: "StoreAway",
      unknown: true,
      message: "no replica confirmed the write within 100 ms",
    };
    await assert.rejects(nodes.runDurably(0, pushTo(0, 1), PATIENT_MS), doubt);
    assert.ok(clock.now() - startedAt < 10_000);
    // The script's own answer is worth nothing then, but what failed has failed.
    const broken = { script: scriptOf("no", "return redis.call('NONSENSE')"), keys: [], args: [] };
    await Promise.all([
      assert.rejects(nodes.runDurably(0, pushTo(0, 2), PATIENT_MS), doubt),
      assert.rejects(nodes.runDurably(0, broken, PATIENT_MS), { name: "RedisError" }),
    ]);
    assert.equal(await nodes.command(0, ["LLEN", `{${tags[0]}}:list`]), 2);
    pair.replica.resume();
    // An error counts as "not yet".
    await until(async () => Number(await nodes.runDurably(0, pushTo(0, 3), PATIENT_MS)) > 2);
  });

  test("a primary that is demoted during the WAIT: the write is sent again, to a primary", async () => {
    await using pair = await startPair();
    await using stage = await Stage.open({ url: pair.primary.url });
    await stage.nodes.run(0, pushTo(0, 0));
    pair.replica.pause();
    const patient = stage.nodes.runDurably(0, pushTo(0, 1), PATIENT_MS);
    await until(async () => /flags=b .*cmd=wait/.test(await pair.primary.cli("CLIENT", "LIST")));
    await pair.primary.cli("REPLICAOF", "127.0.0.1", "1");
    await until(() => !stage.nodes.up(0));
    await pair.primary.cli("REPLICAOF", "NO", "ONE");
    assert.equal(await patient, 3);
  });

  test('"auto" says when the last replica goes, accepts alone, and says when one is back', async () => {
    await using pair = await startPair();
    await using stage = await Stage.open({ url: pair.primary.url });
    await using strict = await Stage.open({
      url: pair.primary.url,
      durability: "replica",
      waitTimeoutMs: 100,
    });
    await using loose = await Stage.open({ url: pair.primary.url, durability: "local" });
    const alone = stage.events.next("notice");
    await pair.replica.kill();
    assert.deepEqual(await alone, {
      level: "warn",
      message:
        `no replica is connected to redis 127.0.0.1:${pair.primary.port}: ` +
        "accepted tasks are kept by one server only",
    });
    assert.equal(await stage.nodes.runDurably(0, pushTo(0, 1), PATIENT_MS), 1);
    assert.equal(await loose.nodes.runDurably(0, pushTo(0, 1), PATIENT_MS), 2);
    await assert.rejects(strict.nodes.runDurably(0, pushTo(0, 1), PATIENT_MS), { unknown: true });
    const back = stage.events.next("notice");
    await pair.replica.restart();
    assert.match((await back).message, /^a replica is connected to/);
    assert.equal(await stage.nodes.runDurably(0, pushTo(0, 1), PATIENT_MS), 4);
    assert.deepEqual([...strict.notices, ...loose.notices], []);
  });
});

describe("a primary with two replicas", () => {
  test("a write that one of them does not have is not accepted while that one may be promoted", async () => {
    await using pair = await startPair();
    await using second = await startServer();
    const replicas = async (): Promise<string> => await pair.primary.cli("INFO", "replication");
    await second.cli("REPLICAOF", "127.0.0.1", String(pair.primary.port));
    const online = `port=${second.port},state=online`;
    await until(async () => (await replicas()).includes(online), "the second replica is online");
    await using stage = await Stage.open({ url: pair.primary.url, waitTimeoutMs: 100 });
    const { nodes } = stage;
    assert.deepEqual(
      nodes.primaries().map((each) => each.replicas),
      [2],
    );
    // An error counts as "not yet".
    await until(async () => (await nodes.runDurably(0, pushTo(0, 1), PATIENT_MS)) !== null);
    second.pause();
    await assert.rejects(nodes.runDurably(0, pushTo(0, 2), PATIENT_MS), {
      name: "StoreAway",
      unknown: true,
      message: "only 1 of 2 replicas confirmed the write within 100 ms",
    });
    // It hangs: after a few seconds it does not count any more, and the other one is enough.
    await until(async () => (await nodes.runDurably(0, pushTo(0, 3), PATIENT_MS)) !== null);
    second.resume();
  });
});

describe("several servers without a Cluster", () => {
  test("the primary is used wherever it stands, and after a promotion the new one", async () => {
    await using pair = await startPair();
    const list = [pair.replica, pair.primary].map(({ port }) => ({ host: "127.0.0.1", port }));
    await using stage = await Stage.open({ nodes: list });
    const { nodes } = stage;
    const addresses = (): string[] => nodes.primaries().map(({ address }) => address);
    assert.deepEqual(addresses(), [`127.0.0.1:${pair.primary.port}`]);
    await nodes.runDurably(0, pushTo(0, 0), PATIENT_MS);
    await pair.primary.kill();
    const patient = nodes.runDurably(0, pushTo(0, 1), PATIENT_MS);
    await pair.promote();
    assert.equal(await patient, 2);
    assert.deepEqual(addresses(), [`127.0.0.1:${pair.replica.port}`]);
    // The old one comes back and still calls itself primary: it is not gone back to.
    await pair.primary.restart();
    await pair.replica.cli("CLIENT", "KILL", "TYPE", "normal");
    assert.equal(await nodes.run(0, pushTo(0, 2), { resend: true, withinMs: PATIENT_MS }), 3);
    assert.deepEqual(addresses(), [`127.0.0.1:${pair.replica.port}`]);
    assert.match(stage.notices.map(({ message }) => message).join("\n"), /no replica is connected to/);
  });

  test("a primary that is demoted while it lives is left for the other", async () => {
    await using pair = await startPair();
    const list = [pair.primary, pair.replica].map(({ port }) => ({ host: "127.0.0.1", port }));
    await using stage = await Stage.open({ nodes: list });
    await stage.nodes.runDurably(0, pushTo(0, 0), PATIENT_MS);
    await pair.promote();
    await pair.primary.cli("REPLICAOF", "127.0.0.1", String(pair.replica.port));
    const calls = [
      stage.nodes.run(0, pushTo(0, 1), { withinMs: PATIENT_MS }),
      stage.nodes.runDurably(0, pushTo(0, 1), PATIENT_MS),
    ];
    assert.deepEqual(new Set(await Promise.all(calls)), new Set([2, 3]));
    assert.deepEqual(
      stage.nodes.primaries().map(({ address }) => address),
      [`127.0.0.1:${pair.replica.port}`],
    );
  });

  test("two that call themselves primary: the one with a replica is chosen, and it is said", async () => {
    await using one = await startServer();
    await using pair = await startPair();
    const list = [one, pair.replica, pair.primary].map(({ port }) => ({ host: "127.0.0.1", port }));
    const events = new Events();
    const said = events.next("notice");
    await using stage = await Stage.open({ nodes: list }, events);
    assert.deepEqual(
      stage.nodes.primaries().map(({ address }) => address),
      [`127.0.0.1:${pair.primary.port}`],
    );
    assert.match((await said).message, new RegExp(`127.0.0.1:${one.port} also calls itself primary`));
  });
});
