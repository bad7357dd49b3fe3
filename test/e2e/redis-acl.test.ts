/**
 * What docs/operations.md tells an operator to copy: the rights of Ferry's user at Redis are all that Ferry
 * needs and nothing else, Redis takes every line of its redis.conf, and Ferry every ferry.yaml.
 */
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { globSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { describe, test } from "node:test";
import { parseConfig } from "../../src/app/config/load.ts";
import { exchange } from "../engine/redis-client/exchange.ts";
import {
  slotOf,
  startCluster,
  startServer,
  until,
  type Server,
  type Settings,
} from "../engine/redis-client/servers.ts";
import { brisk, Fleet, fleetConfig, patient } from "./fleet.ts";
import { assertError, eventually, Folder, ROOT, runFerry, SOON_MS, writeConfig } from "./harness.ts";
import { echo, Gate, stubModel, StubWorker } from "./stub-worker.ts";

/** Sent, and not in the line, with the reason. */
const NEEDS_NO_RIGHT = new Set([
  "auth", // everybody may
  "readonly", // not sent: the code of a refusal
  "select", // only with a database in the url
  "config|get", // the boot check then does without
  "acl|whoami", // only for the message that INFO is not allowed
]);

const page = readFileSync(join(ROOT, "docs/operations.md"), "utf8");

/** The fenced blocks of one language, in order. */
function blocks(language: string): string[] {
  return [...page.matchAll(/^```(\w+)\n(.*?)^```$/gms)]
    .filter(([, of]) => of === language)
    .map(([, , text]) => text!);
}

/** The arguments of ACL SETUSER as they stand in the docs, after the name. */
function documented(): string[] {
  const [, written] = /^redis-cli ACL SETUSER ferry ((?:.*\\\n)*.*)$/m.exec(page) ?? [];
  assert.ok(written !== undefined, "docs/operations.md has no redis-cli ACL SETUSER ferry");
  // As the shell reads it: what is not quoted there, and should be, would be found here.
  return execFileSync("sh", ["-c", `printf '%s\\n' ${written}`], { encoding: "utf8" })
    .trim()
    .split("\n");
}

const PASSWORD = documented()
  .find((word) => word.startsWith(">"))!
  .slice(1);

async function allow(servers: readonly Server[]): Promise<void> {
  for (const server of servers) await server.cli("ACL", "SETUSER", "ferry", ...documented());
}

async function commandsOf(server: Server): Promise<Set<string>> {
  return new Set(((await server.ask("COMMAND", "LIST")) as string[]).map((name) => name.toLowerCase()));
}

/** Every command that a file sends: "get", "cluster|slots". */
function commandsIn(file: string, known: ReadonlySet<string>): string[] {
  const quoted = file.endsWith(".lua")
    ? /redis\.p?call\('([A-Z]+)'(?:, '([A-Z]+)')?/g
    : /"([A-Z]+)"(?:, "([A-Z]+)")?/g;
  return [...readFileSync(join(ROOT, file), "utf8").matchAll(quoted)].flatMap(([, name, next]) => {
    const [command, both] = [name!.toLowerCase(), `${name}|${next}`.toLowerCase()];
    if (known.has(both)) return [both];
    return known.has(command) ? [command] : [];
  });
}

test("the rights are the commands that Ferry sends, each of them and no other", async () => {
  await using server = await startServer();
  const known = await commandsOf(server);
  const files = globSync(
    ["src/{engine,workers/fleet,gateway/admission}/**/*.ts", "src/{engine,workers/fleet}/**/*.lua"],
    {
      cwd: ROOT,
    },
  );
  const sent = new Set(files.flatMap((file) => commandsIn(file, known)));
  assert.ok(sent.has("xreadgroup") && sent.has("ssubscribe") && sent.has("cluster|slots"));
  const needed = [...sent].filter((name) => !NEEDS_NO_RIGHT.has(name));
  const given = documented().filter((word) => word.startsWith("+"));
  assert.deepEqual(given.toSorted(), needed.map((name) => `+${name}`).toSorted());
});

test("the user may not do what Ferry does not do", async () => {
  await using server = await startServer();
  await allow([server]);
  await server.cli("SET", "others:1", "secret");
  const login = ["AUTH", "ferry", PASSWORD];
  const reads = ["SCRIPT", "LOAD", "return redis.call('GET', ARGV[1])"];
  const [, sha] = await exchange(server.port, [login, reads], SOON_MS);
  const refused = [
    "FLUSHALL",
    "FLUSHDB",
    "KEYS *",
    "SCAN 0",
    "RANDOMKEY",
    "CONFIG SET maxmemory 1",
    "CONFIG GET requirepass",
    "SCRIPT FLUSH",
    "SHUTDOWN NOSAVE",
    "DEBUG SLEEP 0",
    "MONITOR",
    "REPLICAOF NO ONE",
    "ACL LIST",
    "CLIENT LIST",
    "EVAL return(1) 0",
    "GET others:1",
    "SET others:1 mine",
    "DEL others:1",
    "SSUBSCRIBE others:news",
    "SPUBLISH others:news hello",
    "SUBSCRIBE ferry:news",
    `EVALSHA ${String(sha)} 0 others:1`,
  ];
  for (const words of refused) {
    const asked = exchange(server.port, [login, words.split(" ")], SOON_MS);
    await assert.rejects(asked, /NOPERM|the user executing the script can't/i, words);
  }
  assert.deepEqual(await exchange(server.port, [login, ["GET", "ferry:1"]], SOON_MS), ["OK", null]);
});

/** A gateway and a batcher that are this user everywhere. */
async function startFleet(servers: readonly Server[], stub: StubWorker): Promise<Fleet> {
  await allow(servers);
  const nodes = servers.map(({ port }) => `127.0.0.1:${port}`);
  const rules = { timeouts: patient, retry: { max: 1, baseMs: 10 }, health: { failures: 100 } };
  const model = stubModel([stub], { ...rules, maxBatchSize: 1 });
  const config = fleetConfig({ nodes, username: "ferry", password: PASSWORD, ...brisk }, [model], {
    limits: { perUserPerMinute: 10_000 },
  });
  return Fleet.start({ gateways: 1, batchers: 1 }, config);
}

async function requestsWork(fleet: Fleet): Promise<void> {
  const [door] = fleet.gateways;
  const held = await door!.post({ input: "held" }, { "idempotency-key": "held" });
  assert.deepEqual(held.json.output, { of: "held" }, held.text);
  assert.match(held.header("ratelimit"), /r=\d+/);
  const again = await door!.post({ input: "held" }, { "idempotency-key": "held" });
  assert.equal(again.json.task_id, held.json.task_id);
  assertError(
    await door!.post({ input: "other" }, { "idempotency-key": "held" }),
    422,
    "IDEMPOTENCY_CONFLICT",
  );
  assert.equal((await door!.post({ input: "held" })).json.metadata?.["cached"], true);
  const id = await door!.accept({ input: "polled" });
  assert.deepEqual((await door!.result(id)).output, { of: "polled" });
  assert.match((await door!.admin(`/internal/requests/${id}`)).text, /"state":"done"/);
  assert.equal((await door!.delete(`/v1/result/${id}`)).status, 204);
  assertError(await door!.get(`/v1/result/${id}`), 404, "NOT_FOUND");
}

async function cancellingWorks(fleet: Fleet, stub: StubWorker): Promise<void> {
  const [door] = fleet.gateways;
  const gate = new Gate();
  stub.behave = gate.hold;
  const calls = stub.calls.length;
  const running = await door!.accept({ input: "running" });
  await stub.call(calls + 1);
  const queued = await door!.accept({ input: "queued" });
  assertError(await door!.delete(`/v1/result/${running}`), 409, "NOT_CANCELLABLE");
  assert.equal((await door!.delete(`/v1/result/${queued}`)).status, 200);
  stub.behave = echo;
  gate.open();
  assert.equal((await door!.result(running)).status, "SUCCESS");
}

async function deadLettersWork(fleet: Fleet, stub: StubWorker): Promise<void> {
  const [door] = fleet.gateways;
  stub.behave = (call) => call.reply(500, "{}");
  const ids = [await door!.accept({ input: "dead" }), await door!.accept({ input: "purged" })];
  for (const id of ids) assert.equal((await door!.result(id)).error, "INFERENCE_FAILED");
  stub.behave = echo;
  const list = await door!.admin("/internal/dead-letters");
  for (const id of ids) assert.ok(list.text.includes(id), list.text);
  assert.match((await door!.admin(`/internal/dead-letters/${ids[0]}`)).text, /"input":"dead"/);
  assert.equal((await door!.admin(`/internal/dead-letters/${ids[0]}/replay`, "POST")).status, 202);
  assert.deepEqual((await door!.result(ids[0]!)).output, { of: "dead" });
  assert.equal((await door!.admin(`/internal/dead-letters/${ids[1]}`, "DELETE")).status, 204);
}

/** How long the leases of batchers still run, in ms, on all servers. */
async function leases(servers: readonly Server[]): Promise<number[]> {
  const found = await Promise.all(
    servers.map(async (server) => {
      const names = (await server.ask("KEYS", "ferry:*:alive:*")) as string[];
      // A replica of a Cluster redirects to its primary.
      return Promise.all(names.map((name) => server.ask("PTTL", name).catch(() => -1)));
    }),
  );
  return found
    .flat()
    .map(Number)
    .filter((ms) => ms > 0);
}

/** The lease is renewed while a batch runs; when its batcher is killed, worker and task go to the next one. */
async function leasesWork(fleet: Fleet, stub: StubWorker, servers: readonly Server[]): Promise<void> {
  const [door] = fleet.gateways;
  const [batcher] = fleet.batchers;
  await fleet.spread([1]);
  const gate = new Gate();
  stub.behave = gate.hold;
  const calls = stub.calls.length;
  const id = await door!.accept({ input: "renewed" });
  await stub.call(calls + 1);
  const before = await leases(servers);
  assert.ok(before.length > 0);
  const most = Math.max(...before);
  await until(async () => Math.max(...(await leases(servers))) < most, "it runs down");
  await until(async () => Math.max(...(await leases(servers))) >= most, "it is renewed");
  await batcher!.kill();
  stub.behave = echo;
  gate.open();
  await fleet.add("batcher");
  assert.deepEqual((await door!.result(id)).output, { of: "renewed" });
}

/** A gateway that asks for keys, and `ferry keys`, as the same user. */
async function keysWork(fleet: Fleet, servers: readonly Server[]): Promise<void> {
  await using folder = await Folder.make();
  const nodes = servers.map(({ port }) => `127.0.0.1:${port}`);
  const models = [{ name: "m", backend: { kind: "simulated" } }];
  const engine = { kind: "redis", nodes, username: "ferry", password: PASSWORD };
  const file = await writeConfig(folder, { engine, models, auth: { mode: "required" } });
  const keys = async (...words: string[]): Promise<string> => {
    const { code, stdout, stderr } = await runFerry(["keys", ...words, "-c", file]);
    assert.equal(code, 0, stderr);
    return stdout.trim();
  };
  const door = await fleet.add("gateway", { auth: { mode: "required" } });
  const key = await keys("create", "--user", "u1", "--tier", "paid");
  const status = async (): Promise<number> => (await door.post({ input: "k" }, { "x-api-key": key })).status;
  await eventually(async () => (await status()) === 200);
  assert.match(await keys("list"), /u1/);
  await keys("revoke", key);
  await eventually(async () => (await status()) === 401);
}

/** What the servers refused to this user, but for what the boot check may do without. */
async function refusals(servers: readonly Server[]): Promise<string[]> {
  const logs = await Promise.all(servers.map((server) => server.ask("ACL", "LOG")));
  const objects = logs.flat().map((row) => {
    const fields = row as string[];
    return String(fields[fields.indexOf("object") + 1]);
  });
  return objects.filter((object) => object !== "config|get");
}

async function everythingWorks(servers: readonly Server[], more: (fleet: Fleet) => Promise<void>) {
  await using stub = await StubWorker.listen();
  await using fleet = await startFleet(servers, stub);
  await requestsWork(fleet);
  await cancellingWorks(fleet, stub);
  await deadLettersWork(fleet, stub);
  await leasesWork(fleet, stub, servers);
  await keysWork(fleet, servers);
  await more(fleet);
  for (const part of [fleet.gateways[0]!, fleet.batchers[1]!])
    assert.doesNotMatch(part.stderr(), /NOPERM|permission/i);
  assert.deepEqual(await refusals(servers), []);
}

describe("with these rights everything works", () => {
  test("at one server, also after SCRIPT FLUSH", async () => {
    await using server = await startServer({ maxmemory: "100mb" });
    await everythingWorks([server], async (fleet) => {
      await server.cli("SCRIPT", "FLUSH");
      assert.equal((await fleet.gateways[0]!.post({ input: "loaded again" })).status, 200);
    });
  });

  test("at a Cluster, also while a slot moves", async () => {
    await using cluster = await startCluster({ maxmemory: "100mb", "cluster-node-timeout": "15000" });
    await everythingWorks(cluster.servers, async (fleet) => {
      const [door] = fleet.gateways;
      assert.match((await door!.admin("/internal/health")).text, /"durability":"replica"/);
      for (const tag of ["f0h", "ff0"]) {
        const slot = slotOf(tag);
        const from = await cluster.primaryOf(slot);
        const to = (await cluster.primaries()).find((server) => server !== from)!;
        let number = 0;
        await cluster.moveSlot(slot, to, async () => {
          for (let i = 0; i < 4; i++) await door!.post({ input: `moving ${tag} ${number++}` });
        });
      }
      const works = async (): Promise<boolean> => (await door!.post({ input: "moved" })).status === 200;
      await eventually(works);
      const asked = await Promise.all(cluster.servers.map((server) => server.cli("INFO", "commandstats")));
      assert.match(asked.join("\n"), /cmdstat_asking:/);
    });
  });
});

describe("what is there to copy", () => {
  test("every redis.conf is taken by Redis", async () => {
    const confs = blocks("conf").map((text): Settings => {
      const lines = text.split("\n").filter((line) => line !== "" && !line.startsWith("#"));
      return Object.fromEntries(lines.map((line) => [line.split(" ")[0]!, line.replace(/^\S+ /, "")]));
    });
    assert.equal(confs.length, 4);
    for (const conf of confs) {
      // The first is what the others stand beside.
      await using server = await startServer({ ...confs[0], ...conf });
      for (const [name, value] of Object.entries(conf)) {
        const [, has] = (await server.ask("CONFIG", "GET", name)) as string[];
        assert.ok(/^\d+[mg]b$|mb /.test(value) || has === value, `${name} is ${has}, not ${value}`);
      }
    }
  });

  test("every ferry.yaml is valid, without a warning", () => {
    const models = "models: [{ name: embed, backend: { kind: simulated } }]";
    const env = { REDIS_URL: "redis://redis-1:6379", REDIS_PASSWORD: "p", FERRY_ADMIN_TOKEN: "t", ZONE: "a" };
    const files = blocks("yaml");
    assert.ok(files.length >= 7);
    for (const text of files) {
      const whole = text.includes("models:") ? text : `${text}${models}\n`;
      const { config, problems, warnings } = parseConfig(whole, "ferry.yaml", env);
      assert.deepEqual([problems, warnings], [undefined, []], text);
      if (text.includes("engine:")) assert.equal(config?.engine.kind, "redis", text);
    }
  });
});
