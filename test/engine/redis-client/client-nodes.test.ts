/** Scripts on one server, and on a primary with a replica, through everything that happens to them. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { RedisError, StoreAway } from "../../../src/engine/redis/client/nodes.ts";
import { endpointsOf, readSlots, slotOf, targetOf } from "../../../src/engine/redis/client/topology.ts";
import { startProxy } from "./proxy.ts";
import { startPair, startServer, until } from "./servers.ts";
import { channelOf, clock, Ear, PATIENT_MS, pushTo, scriptOf, Stage, tags } from "./client-stage.ts";

describe("on paper", () => {
  test("the slot of a tag is what Redis says it is", async () => {
    // The check value of CRC-16/XMODEM, and the example of the Cluster specification.
    assert.equal(slotOf("123456789"), 0x31c3);
    assert.equal(slotOf("foo"), 12182);
    assert.deepEqual(
      tags.map((tag) => Math.floor(slotOf(tag) / 1024)),
      tags.map((_, shard) => shard),
    );
  });

  test("a url says everything, and a wrong one is explained without its password", () => {
    assert.deepEqual(endpointsOf({ url: "rediss://me:a%40b@[::1]:7000/2" }), {
      seeds: [{ host: "::1", port: 7000 }],
      tls: true,
      username: "me",
      password: "a@b",
      db: 2,
    });
    assert.deepEqual(endpointsOf({ url: "redis://host" }).seeds, [{ host: "host", port: 6379 }]);
    for (const url of ["http://h", "redis://", "nonsense", "redis://:secret@h/x"])
      assert.throws(() => endpointsOf({ url }), /^Error: (?!.*secret).*Redis url/);
    assert.throws(() => endpointsOf({}), /set the url or the nodes/);
  });

  test("a host that is not announced is the one that was asked", () => {
    const row = [0, 99, [null, 7000], [Buffer.from(""), 7001], [Buffer.from("other"), 7002]];
    const { ranges, members } = readSlots([row], "asked");
    assert.deepEqual(ranges, [{ from: 0, to: 99, primary: { host: "asked", port: 7000 } }]);
    assert.deepEqual(
      members.map(({ host }) => host),
      ["asked", "asked", "other"],
    );
    assert.deepEqual(targetOf(new RedisError("MOVED 1 :7000"), "asked"), { host: "asked", port: 7000 });
    assert.deepEqual(targetOf(new RedisError("ASK 1 ::1:7000"), "asked"), { host: "::1", port: 7000 });
  });
});

describe("one server", () => {
  test("runs scripts, durable writes and commands, also after it forgot the scripts", async () => {
    await using server = await startServer();
    await using stage = await Stage.open({ url: server.url });
    const { nodes } = stage;
    assert.equal(nodes.cluster, false);
    assert.deepEqual(nodes.activeShards(), [0], "one for the only primary");
    const address = `127.0.0.1:${server.port}`;
    assert.deepEqual(nodes.primaries(), [{ address, replicas: 0, waits: false, up: true }]);
    for (let round = 1; round <= 3; round++) {
      await server.cli("SCRIPT", "FLUSH");
      const calls = Array.from({ length: 20 }, (_, n) =>
        n % 2 ? nodes.run(1, pushTo(1, n)) : nodes.runDurably(1, pushTo(1, n), PATIENT_MS),
      );
      const lengths = (await Promise.all(calls)).map(Number).sort((a, b) => a - b);
      assert.deepEqual(
        lengths,
        Array.from({ length: 20 }, (_, n) => round * 20 - 19 + n),
      );
    }
    assert.equal(await nodes.command(1, ["LLEN", `{${tags[1]}}:list`]), 60);
    // One for all who lacked it, not one each.
    assert.match(await server.cli("INFO", "commandstats"), /cmdstat_script\|load:calls=[3-6],/);
    assert.ok(Math.abs(await nodes.clockOffset()) < 5000);
  });

  test("a script's own mistake, and a refusal, reject at once with what the server said", async () => {
    await using server = await startServer();
    await using stage = await Stage.open({ url: server.url });
    const broken = { script: scriptOf("broken", "return redis.call('NONSENSE')"), keys: [], args: [] };
    await assert.rejects(stage.nodes.run(0, broken), { name: "RedisError", code: "ERR" });
    await assert.rejects(stage.nodes.runDurably(0, broken, PATIENT_MS), { name: "RedisError", code: "ERR" });
    await server.cli("SET", `{${tags[0]}}:list`, "text");
    await assert.rejects(stage.nodes.runDurably(0, pushTo(0, 1), PATIENT_MS), { code: "WRONGTYPE" });
    await server.cli("CONFIG", "SET", "maxmemory", "1");
    await assert.rejects(stage.nodes.run(0, pushTo(0, 1, "other")), { name: "RedisError", code: "OOM" });
    await server.cli("CONFIG", "SET", "maxmemory", "0");
    await server.cli("CONFIG", "SET", "min-replicas-to-write", "1");
    await assert.rejects(stage.nodes.run(0, pushTo(0, 1, "other")), { code: "NOREPLICAS" });
    const wrong = { ...scriptOf("wrong", "return 1"), sha: "0".repeat(40) };
    await assert.rejects(
      stage.nodes.run(0, { script: wrong, keys: [], args: [] }),
      /the script wrong has SHA1/,
    );
  });

  test("what passes is waited out: a replica that becomes primary, a busy script", async () => {
    await using server = await startServer({ "busy-reply-threshold": "5" });
    await using stage = await Stage.open({ url: server.url });
    await stage.nodes.run(0, pushTo(0, 0));
    // A port where nobody is: it is then a replica that waits for its primary.
    await server.cli("REPLICAOF", "127.0.0.1", "1");
    await assert.rejects(stage.nodes.run(0, pushTo(0, 1), { withinMs: 100 }), (error) => {
      assert.ok(error instanceof StoreAway && !error.unknown, String(error));
      return true;
    });
    const waiting = [
      stage.nodes.run(0, pushTo(0, 1), { withinMs: PATIENT_MS }),
      stage.nodes.runDurably(0, pushTo(0, 1), PATIENT_MS),
    ];
    await server.cli("REPLICAOF", "NO", "ONE");
    assert.deepEqual(new Set(await Promise.all(waiting)), new Set([2, 3]));
    await until(() => stage.nodes.up(0));
    const loop = scriptOf("loop", "for i = 1, 3e7 do end return redis.call('SET', KEYS[1], 1)");
    const busy = stage.nodes.run(
      0,
      { script: loop, keys: [`{${tags[0]}}:x`], args: [] },
      { withinMs: PATIENT_MS },
    );
    await until(async () => {
      const reply = await server.cli("PING").catch((error: Error) => error.message);
      return /BUSY/.test(reply);
    });
    assert.equal(await stage.nodes.runDurably(0, pushTo(0, 2), PATIENT_MS), 4);
    assert.equal(String(await busy), "OK");
  });

  test("a reply that is lost: unknown, or sent again by those who may", async () => {
    await using server = await startServer();
    await using proxy = await startProxy(server.port);
    await using stage = await Stage.open({ url: proxy.url });
    const { nodes } = stage;
    await nodes.run(0, pushTo(0, "first"));
    proxy.cutOnly = "lost";
    proxy.cutRequests = 1;
    await assert.rejects(nodes.run(0, pushTo(0, "lost")), { name: "StoreAway", unknown: true });
    await until(() => nodes.up(0));
    assert.equal(await nodes.command(0, ["LLEN", `{${tags[0]}}:list`]), 2);
    proxy.cutRequests = 1;
    assert.equal(await nodes.run(0, pushTo(0, "lost"), { resend: true }), 4);
    proxy.cutRequests = 1;
    assert.equal(await nodes.runDurably(0, pushTo(0, "lost"), PATIENT_MS), 6);
    proxy.cutRequests = Infinity;
    await assert.rejects(nodes.runDurably(0, pushTo(0, "lost"), 300), { name: "StoreAway", unknown: true });
  });

  test("pipelines and scattered commands answer in their order; refusals are values", async () => {
    await using server = await startServer();
    await using stage = await Stage.open({ url: server.url });
    const { nodes } = stage;
    const commands = [["SET", "a", "1"], ["LPUSH", "a", "x"], ["NONSENSE"], ["INCR", "a"]];
    for (const replies of [
      await nodes.pipeline(3, commands),
      await nodes.scatter(commands.map((command, shard) => ({ shard, command }))),
    ]) {
      assert.deepEqual(
        replies.map((reply) => (reply instanceof RedisError ? reply.code : String(reply))),
        ["OK", "WRONGTYPE", "ERR", "2"],
      );
    }
    assert.deepEqual(await nodes.pipeline(0, []), []);
    assert.deepEqual(await nodes.scatter([]), []);
  });

  test("a transaction does all or nothing, and rejects with what the server said of it", async () => {
    await using server = await startServer();
    await using stage = await Stage.open({ url: server.url });
    const { nodes } = stage;
    const done = await nodes.transact(
      0,
      () => [
        ["INCR", "a"],
        ["RPUSH", "l", "x", "y"],
        ["GET", "b"],
      ],
      PATIENT_MS,
    );
    assert.deepEqual(done, [1, 2, null]);
    // Refused before it is run: nothing of it happens.
    const wrong = () => [["INCR", "a"], ["NONSENSE"]];
    await assert.rejects(nodes.transact(0, wrong, PATIENT_MS), { name: "RedisError", code: "ERR" });
    await server.cli("CONFIG", "SET", "maxmemory", "1");
    const full = () => [
      ["DEL", "l"],
      ["SET", "b", "1"],
    ];
    await assert.rejects(nodes.transact(0, full, PATIENT_MS), { name: "RedisError", code: "OOM" });
    await server.cli("CONFIG", "SET", "maxmemory", "0");
    assert.deepEqual(
      await nodes.pipeline(0, [
        ["GET", "a"],
        ["LLEN", "l"],
        ["EXISTS", "b"],
      ]),
      [Buffer.from("1"), 2, 0],
    );
  });

  test("a transaction whose reply is lost is sent again, and knows that it may be the second", async () => {
    await using server = await startServer();
    await using proxy = await startProxy(server.port);
    await using stage = await Stage.open({ url: proxy.url });
    const { nodes } = stage;
    proxy.cutOnly = "EXEC";
    proxy.cutRequests = 2;
    const attempts: boolean[] = [];
    const push = (again: boolean): string[][] => {
      attempts.push(again);
      return [["RPUSH", "l", again ? "again" : "first"]];
    };
    assert.deepEqual(await nodes.transact(0, push, PATIENT_MS), [3]);
    assert.deepEqual(attempts, [false, true, true]);
    assert.equal((await server.cli("LRANGE", "l", "0", "-1")).replaceAll(/\s+/g, " "), "first again again");
    proxy.cutRequests = Infinity;
    await assert.rejects(nodes.transact(0, push, 300), { name: "StoreAway", unknown: true });
    proxy.cutRequests = 0;
    await until(() => nodes.up(0));
    // Without `resend` a pipeline is not sent twice.
    proxy.cutOnly = "piped";
    proxy.cutRequests = 1;
    const piped = [["RPUSH", "p", "piped"]];
    await assert.rejects(nodes.pipeline(0, piped), { name: "StoreAway", unknown: true });
    await until(() => nodes.up(0));
    proxy.cutRequests = 1;
    assert.deepEqual(await nodes.pipeline(0, piped, { resend: true }), [3]);
    proxy.cutRequests = 1;
    assert.deepEqual(
      await nodes.scatter([{ shard: 5, command: piped[0]! }], { resend: true, withinMs: PATIENT_MS }),
      [5],
    );
  });

  test("a server that is a replica for a moment: what it refused is sent again, and nothing else", async () => {
    await using server = await startServer();
    await using stage = await Stage.open({ url: server.url });
    const { nodes } = stage;
    await nodes.command(0, ["SET", "a", "0"]);
    await server.cli("REPLICAOF", "127.0.0.1", "1");
    const patience = { resend: true, withinMs: PATIENT_MS };
    const waiting = [
      nodes.pipeline(
        0,
        [
          ["GET", "a"],
          ["INCR", "a"],
        ],
        patience,
      ),
      nodes.scatter([{ shard: 1, command: ["INCR", "a"] }], patience),
      nodes.transact(0, () => [["INCR", "a"]], PATIENT_MS),
    ];
    await server.cli("REPLICAOF", "NO", "ONE");
    await Promise.all(waiting);
    assert.equal(await server.cli("GET", "a"), "3");
  });

  test("a blocked read ends with what comes, its timeout, or its connection; others are not held up", async () => {
    await using server = await startServer();
    await using stage = await Stage.open({ url: server.url, commandTimeoutMs: 300 });
    const { nodes } = stage;
    assert.equal(await nodes.block(0, ["BLPOP", "l", "0.01"], 10), null);
    const waits = async (): Promise<boolean> => /cmd=blpop/.test(await server.cli("CLIENT", "LIST"));
    const blocked = nodes.block(0, ["BLPOP", "l", "60"], 60_000);
    await until(waits, "it waits");
    // Longer than any other command may take.
    for (let n = 0; n < 3; n++) await nodes.command(0, ["PING"]);
    await nodes.command(0, ["RPUSH", "l", "x"]);
    assert.deepEqual(((await blocked) as Buffer[]).map(String), ["l", "x"]);
    const broken = nodes.block(0, ["BLPOP", "l", "60"], 60_000);
    await until(waits, "it waits");
    await server.cli("CLIENT", "KILL", "TYPE", "normal");
    await assert.rejects(broken, { name: "StoreAway", unknown: true });
    await nodes.command(0, ["RPUSH", "l", "y"], { resend: true });
    assert.deepEqual(((await nodes.block(0, ["BLPOP", "l", "60"], 60_000)) as Buffer[]).map(String), [
      "l",
      "y",
    ]);
    const last = assert.rejects(nodes.block(0, ["BLPOP", "l", "60"], 60_000), { name: "StoreAway" });
    await until(waits, "it waits");
    await nodes.close();
    await last;
  });

  test("one that stands still: everybody is told in time, and nothing crosses afterwards", async () => {
    await using server = await startServer();
    await using stage = await Stage.open({ url: server.url, commandTimeoutMs: 100, waitTimeoutMs: 100 });
    const { nodes } = stage;
    await nodes.run(0, pushTo(0, 0));
    server.pause();
    const startedAt = clock.now();
    await Promise.all(
      [nodes.run(0, pushTo(0, 1)), nodes.runDurably(0, pushTo(0, 2), 150), nodes.command(0, ["TIME"])].map(
        (call) => assert.rejects(call, { unknown: true, message: /did not answer within [12]00 ms/ }),
      ),
    );
    assert.ok(clock.now() - startedAt < 15_000);
    await assert.rejects(nodes.run(0, pushTo(0, 3)), { name: "StoreAway", unknown: false });
    assert.equal(nodes.up(0), false);
    server.resume();
    await until(() => nodes.up(0));
    const echoes = Array.from({ length: 200 }, async (_, n) =>
      assert.equal(String(await nodes.command(0, ["ECHO", n])), String(n)),
    );
    await Promise.all(echoes);
    assert.match(stage.notices[0]!.message, /did not answer within .*; it is away until/);
    assert.match(stage.notices[1]!.message, /is back$/);
  });

  test("a restart: waited for by those who have time, and the channels are heard again", async () => {
    await using server = await startServer();
    await using stage = await Stage.open({ url: server.url });
    const { nodes } = stage;
    const ear = await Ear.on(nodes);
    assert.equal(ear.confirmed.size, 16);
    assert.equal(await nodes.command(5, ["SPUBLISH", channelOf(5), "one"]), 1);
    await until(() => ear.heard.length === 1);
    await server.kill();
    // Unknown until this connection, too, is seen to be gone.
    await until(async () => {
      const error = await nodes.run(0, pushTo(0, 1)).catch((error: unknown) => error);
      return error instanceof StoreAway && !error.unknown;
    });
    assert.equal(nodes.up(0), false);
    const patient = nodes.runDurably(0, pushTo(0, 1), PATIENT_MS);
    await server.restart();
    assert.equal(await patient, 1);
    await until(() => ear.confirmed.get(15) === 2);
    await nodes.command(9, ["SPUBLISH", channelOf(9), "two"], { withinMs: PATIENT_MS });
    await until(() => ear.heard.length === 2);
    assert.deepEqual(ear.heard, ["5 one", "9 two"]);
    ear.stop();
    await until(async () => (await server.cli("PUBSUB", "SHARDCHANNELS")) === "");
  });

  test("connections that somebody kills come back", async () => {
    await using server = await startServer();
    await using stage = await Stage.open({ url: server.url });
    const { nodes } = stage;
    const ear = await Ear.on(nodes);
    for (let round = 2; round <= 4; round++) {
      await server.cli("CLIENT", "KILL", "TYPE", "pubsub");
      await until(() => ear.confirmed.get(0) === round && ear.confirmed.get(15) === round);
      await server.cli("CLIENT", "KILL", "TYPE", "normal");
      assert.equal(await nodes.run(2, pushTo(2, 1), { resend: true }), 2 * round - 3);
      assert.equal(await nodes.runDurably(2, pushTo(2, 1), PATIENT_MS), 2 * round - 2);
    }
    await nodes.command(3, ["SPUBLISH", channelOf(3), "still there"], { resend: true });
    await until(() => ear.heard.length > 0);
  });

  test("a listener that throws is reported and harms nobody", async () => {
    await using server = await startServer();
    await using stage = await Stage.open({ url: server.url });
    const { nodes } = stage;
    const calls: number[] = [];
    await nodes.subscribe(
      channelOf,
      (shard) => {
        calls.push(shard);
        throw new Error("oops");
      },
      () => {
        throw new Error("dear me");
      },
    );
    for (let n = 0; n < 2; n++) await nodes.command(n, ["SPUBLISH", channelOf(n), "x"]);
    await until(() => calls.length === 2);
    assert.match(stage.notices.map(({ message }) => message).join(), /dear me[^]*oops[^]*oops/);
  });

  test("what cannot be opened says so in one line", async () => {
    await using pair = await startPair({ requirepass: "secret" });
    const replica = { url: pair.replica.url };
    await assert.rejects(Stage.open(replica), /is a replica; name its primary, or all of them as nodes$/);
    const nobody = { nodes: [{ host: "127.0.0.1", port: 1 }], durability: "local" } as const;
    await assert.rejects(Stage.open(nobody), /127.0.0.1:1 is not reachable: .*; check its address/);
    const url = `redis://127.0.0.1:${pair.primary.port}`;
    await assert.rejects(Stage.open({ url }), /NOAUTH|INFO/);
    await assert.rejects(Stage.open({ url, password: "no" }), /refuses us: WRONGPASS/);
    const { nodes } = await Stage.open({ url, password: "secret" });
    await nodes.close();
    await assert.rejects(nodes.run(0, pushTo(0, 1), { withinMs: 5000 }), { name: "StoreAway" });
    await assert.rejects(nodes.runDurably(0, pushTo(0, 1), 5000), { name: "StoreAway", unknown: false });
    assert.deepEqual(await pair.primary.cli("CLIENT", "LIST", "TYPE", "pubsub"), "");
  });
});
