/** The boot check, against real servers that are set up well and badly, and against words of servers we lack. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import {
  checkServer,
  type ProbeCommand,
  type CheckOptions,
  type ServerCheck,
} from "../../../src/engine/redis/client/probe.ts";
import { exchange } from "./exchange.ts";
import { startPair, startServer, until, type Server, type Settings } from "./servers.ts";

type Durability = CheckOptions["durability"];

/** As the client would ask: replies as Buffers, errors as rejections. */
function asker(server: Server, ...login: string[]): ProbeCommand {
  return async (command) => {
    const words = login.length === 0 ? [command] : [["AUTH", ...login], command];
    const reply = (await exchange(server.port, words, 5000)).at(-1)!;
    return typeof reply === "string" ? Buffer.from(reply) : reply;
  };
}
function checked(server: Server, durability: Durability = "local", ...login: string[]): Promise<ServerCheck> {
  return checkServer(asker(server, ...login), { address: `127.0.0.1:${server.port}`, durability });
}
async function withServer(settings: Settings, durability: Durability = "local"): Promise<ServerCheck> {
  await using server = await startServer({ ...good, ...settings });
  return await checked(server, durability);
}
/** Nothing to say about it, but that it has no replica. */
const good = { maxmemory: "100mb", "maxmemory-policy": "noeviction" };

/** Exactly one line in `lines`, which names the server and matches. */
function only(lines: readonly string[], expected: RegExp): void {
  assert.equal(lines.length, 1, lines.join("\n"));
  assert.match(lines[0]!, /^redis [\w.:[\]]+: [^\n]+$/);
  assert.match(lines[0]!, expected);
}

describe("a real server", () => {
  test("that is set up well: nothing to say, and the facts", async () => {
    const { refuse, warn, facts } = await withServer({});
    assert.deepEqual([refuse, warn], [[], []]);
    const { version, usedMemoryBytes, ...rest } = facts;
    assert.match(version, /^\d+\.\d+\.\d+$/);
    assert.ok(usedMemoryBytes > 100_000);
    assert.deepEqual(rest, {
      product: "redis",
      role: "primary",
      cluster: false,
      replicas: 0,
      minReplicasToWrite: 0,
      persistence: "aof",
      maxMemoryBytes: 100 * 2 ** 20,
      maxMemoryPolicy: "noeviction",
      durability: "local",
    });
  });

  test("that would drop tasks when it is full: refused", async () => {
    const { refuse, warn } = await withServer({ "maxmemory-policy": "volatile-lru" });
    only(
      refuse,
      /maxmemory-policy is volatile-lru: when memory is full it drops accepted tasks; run CONFIG SET/,
    );
    only(
      refuse,
      /run CONFIG SET maxmemory-policy noeviction, and write "maxmemory-policy noeviction" in redis/,
    );
    assert.deepEqual(warn, []);
  });

  test("without a bound on memory: two warnings, and the advice works", async () => {
    await using server = await startServer({ maxmemory: "0", "maxmemory-policy": "allkeys-lru" });
    const { refuse, warn } = await checked(server);
    assert.deepEqual(refuse, []);
    assert.equal(warn.length, 2, warn.join("\n"));
    assert.match(warn[0]!, /maxmemory-policy is allkeys-lru: nothing is dropped while maxmemory is 0, but/);
    assert.match(warn[1]!, /maxmemory is 0: it grows until .*; run CONFIG SET maxmemory \d+mb, and .* 60 %/);
    for (const line of warn) {
      const [, name, value] = /run CONFIG SET (\S+) ([^\s,]+)/.exec(line)!;
      assert.equal(await server.cli("CONFIG", "SET", name!, value!), "OK");
    }
    const after = await checked(server);
    assert.deepEqual([after.refuse, after.warn], [[], []]);
    const total = Number(/total_system_memory:(\d+)/.exec(await server.cli("INFO", "memory"))![1]);
    const share = after.facts.maxMemoryBytes / total;
    assert.ok(share > 0.59 && share <= 0.6, String(share));
  });

  test("that is nearly full", async () => {
    await using server = await startServer(good);
    const used = Number(/used_memory:(\d+)/.exec(await server.cli("INFO", "memory"))![1]);
    await server.cli("CONFIG", "SET", "maxmemory", String(Math.floor(used * 1.1)));
    const { refuse, warn } = await checked(server);
    assert.deepEqual(refuse, []);
    only(
      warn,
      /: \d\d % of maxmemory is in use, and new tasks are refused when it is full; raise it \(CONFIG SET/,
    );
  });

  test("that keeps nothing on disk, or snapshots alone", async () => {
    const none = await withServer({ appendonly: "no", save: "" });
    only(
      none.warn,
      /appendonly is no and there are no save points: a restart .*; run CONFIG SET appendonly yes, and/,
    );
    assert.equal(none.facts.persistence, "none");
    const snapshots = await withServer({ appendonly: "no", save: "900 1" });
    only(
      snapshots.warn,
      /appendonly is no: a restart of Redis forgets every task since the last snapshot; run/,
    );
    assert.equal(snapshots.facts.persistence, "snapshots");
  });

  test("whose snapshot failed", async () => {
    // The name of a folder: no file can be renamed to it.
    await using server = await startServer({ ...good, dbfilename: "appendonlydir" });
    await server.cli("BGSAVE");
    await until(async () => (await server.cli("INFO", "persistence")).includes("rdb_last_bgsave_status:err"));
    const { warn } = await checked(server);
    only(
      warn,
      /the last snapshot failed \(rdb_last_bgsave_status:err\), and Redis may refuse writes with MISCONF/,
    );
  });

  test("alone: local says nothing, auto warns, replica refuses", async () => {
    await using server = await startServer(good);
    const auto = await checked(server, "auto");
    assert.deepEqual(auto.refuse, []);
    only(
      auto.warn,
      /no replica is connected: accepted tasks are kept by one server only; start one with "replicaof/,
    );
    assert.equal(auto.facts.durability, "local");
    const replica = await checked(server, "replica");
    only(
      replica.refuse,
      /no replica is connected, and with engine\.durability replica no task could be accepted;/,
    );
  });

  test("with a replica: durable; the replica itself is refused and names its primary", async () => {
    await using pair = await startPair(good);
    const auto = await checked(pair.primary, "auto");
    assert.deepEqual([auto.refuse, auto.warn], [[], []]);
    assert.deepEqual([auto.facts.replicas, auto.facts.durability], [1, "replica"]);
    assert.equal((await checked(pair.primary, "local")).facts.durability, "local");
    only(
      (await checked(pair.primary, "replica")).warn,
      /min-replicas-to-write is 0: .* CONFIG SET min-replicas-to-write 1/,
    );
    await pair.primary.cli("CONFIG", "SET", "min-replicas-to-write", "1");
    assert.deepEqual((await checked(pair.primary, "replica")).warn, []);
    await pair.primary.cli("CONFIG", "SET", "min-replicas-to-write", "2");
    only(
      (await checked(pair.primary, "auto")).warn,
      /min-replicas-to-write is 2 and 1 can confirm now: until more do, Redis refuses every write with NOREPLICAS/,
    );
    const { refuse, facts } = await checked(pair.replica, "auto");
    only(
      refuse,
      new RegExp(`it is a replica of 127\\.0\\.0\\.1:${pair.primary.port}, and a replica takes no writes;`),
    );
    assert.equal(facts.role, "replica");
  });

  test("of a Cluster that is not ready", async () => {
    await using server = await startServer({ ...good, "cluster-enabled": "yes" });
    const { refuse, facts } = await checked(server);
    only(
      refuse,
      /cluster_state is fail with 0 of 16384 slots assigned, so it answers CLUSTERDOWN; redis-cli --cluster/,
    );
    assert.equal(facts.cluster, true);
    await server.cli("CLUSTER", "ADDSLOTSRANGE", "0", "16383");
    await until(async () => (await server.cli("CLUSTER", "INFO")).includes("cluster_state:ok"));
    const { refuse: now, warn } = await checked(server, "auto");
    assert.deepEqual(now, []);
    only(
      warn,
      /no replica is connected: .*; add one with redis-cli --cluster add-node HOST:PORT 127.* --cluster-slave/,
    );
  });
});

describe("a user with few rights", () => {
  test("without CONFIG: INFO has to do, and says almost everything", async () => {
    await using server = await startServer({ ...good, "maxmemory-policy": "allkeys-lfu", appendonly: "no" });
    await server.cli("ACL", "SETUSER", "ferry", "on", ">secret", "~*", "&*", "+@all", "-config");
    const { refuse, warn, facts } = await checked(server, "replica", "ferry", "secret");
    assert.equal(refuse.length, 2, refuse.join("\n"));
    assert.match(refuse[0]!, /maxmemory-policy is allkeys-lfu/);
    assert.match(refuse[1]!, /no replica is connected/);
    only(
      warn,
      /appendonly is no, and whether there are snapshots could not be asked \(CONFIG .*set "appendonly yes" where/,
    );
    assert.deepEqual(
      [facts.maxMemoryBytes, facts.persistence, facts.minReplicasToWrite],
      [100 * 2 ** 20, "unknown", undefined],
    );
  });

  test("without INFO: refused, with the command that allows it", async () => {
    await using server = await startServer(good);
    await server.cli("ACL", "SETUSER", "ferry", "on", ">secret", "~*", "&*", "+@all", "-@dangerous");
    const { refuse, facts } = await checked(server, "auto", "ferry", "secret");
    only(refuse, /its user ferry may not run INFO, .*; run ACL SETUSER ferry \+info$/);
    assert.equal(facts.product, "unknown");
    await server.cli("ACL", "SETUSER", "ferry", "+info");
    assert.deepEqual((await checked(server, "local", "ferry", "secret")).refuse, []);
  });

  test("without a password where one is needed", async () => {
    await using server = await startServer({ ...good, requirepass: "secret" });
    only(
      (await checked(server)).refuse,
      /it wants a password; write one in engine\.url .* or engine\.password$/,
    );
    assert.deepEqual((await checked(server, "local", "secret")).refuse, []);
  });
});

describe("words of servers that are not here", () => {
  const info = (fields: string) => `# Server\r\n${fields.trim().split(/\s+/).join("\r\n")}\r\n`;
  const usual = "role:master maxmemory:100 maxmemory_policy:noeviction aof_enabled:1";
  /** A server made of words: INFO, and a refusal of all else. */
  const told = (words: string, durability: Durability = "local") =>
    checkServer(
      async ([verb]) => (verb === "INFO" ? words : new Error("ERR unknown command 'CONFIG', with args")),
      { address: "[::1]:6379", durability },
    );

  test("versions", async () => {
    const versions: readonly (readonly [string, boolean])[] = [
      ["redis_version:7.0.0", true],
      ["redis_version:8.4.1", true],
      ["redis_version:10.0.0", true],
      ["redis_version:255.255.255", true],
      ["redis_version:6.2.14", false],
      ["redis_version:6.9", false],
      ["redis_version:7.2.4 server_name:valkey valkey_version:8.1.0", true],
      ["redis_version:7.2.4 server_name:valkey valkey_version:7.2.5", true],
      ["redis_version:7.0.0 valkey_version:7.1.0", false],
      ["redis_version:banana", false],
    ];
    for (const [words, fine] of versions) {
      const { refuse } = await told(info(`${words} ${usual}`));
      if (fine) assert.deepEqual(refuse, [], words);
      else
        only(
          refuse,
          /^redis \[::1\]:6379: it is (?:redis|valkey) \S+, which lacks .*needs Redis 7\.0 or newer/,
        );
    }
    const { refuse, facts } = await told(info(usual));
    only(refuse, /INFO does not say what it is \(no redis_version\); Ferry needs/);
    assert.deepEqual([facts.product, facts.version], ["unknown", ""]);
    const valkey = await told(info(`redis_version:7.2.4 server_name:valkey valkey_version:8.1.0 ${usual}`));
    assert.deepEqual([valkey.facts.product, valkey.facts.version], ["valkey", "8.1.0"]);
  });

  test("a service that tells neither CONFIG nor memory: warned, not refused", async () => {
    const { refuse, warn } = await told(info("redis_version:7.1.0 role:master aof_enabled:1"));
    assert.deepEqual(refuse, []);
    only(warn, /maxmemory-policy could not be asked \(CONFIG GET is refused and INFO leaves it out\)/);
  });

  test("a disk that is full", async () => {
    const { warn } = await told(info(`redis_version:7.0.0 ${usual} aof_last_write_status:err`));
    only(
      warn,
      /the last write to the append-only file failed .* refuses every write with MISCONF; free disk space/,
    );
  });

  test("a replica that still loads: a warning, whatever is asked of it", async () => {
    const words = `redis_version:7.0.0 ${usual} connected_slaves:1 slave0:ip=10.0.0.2,port=6379,state=wait_bgsave`;
    for (const [durability, expected] of [
      ["auto", /until it has it one server alone keeps the tasks; wait for state=online/],
      ["replica", /until it has it no task is accepted; wait for state=online/],
    ] as const) {
      const { refuse, warn, facts } = await told(info(words), durability);
      assert.deepEqual(refuse, []);
      only(warn, expected);
      assert.equal(facts.durability, "local");
    }
  });

  test("a server that goes away, or answers nonsense", async () => {
    const gone = await checkServer(
      () => Promise.reject(new Error("redis 10.0.0.1:6379 did not answer within 1000 ms")),
      { address: "10.0.0.1:6379", durability: "auto" },
    );
    only(gone.refuse, /INFO was not answered: redis 10\.0\.0\.1:6379 did not answer within 1000 ms$/);
    for (const reply of [null, 5, "", "no colons", [], [[null, ["x"]]], Buffer.from([0xff, 0x3a])]) {
      const { refuse } = await checkServer(async () => reply, { address: "a:1", durability: "auto" });
      only(refuse, /INFO does not say what it is/);
    }
  });
});
