/** The servers that the Redis tests stand on: each thing that they can do, once. */
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync } from "node:fs";
import { connect, type Socket } from "node:net";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { describe, test } from "node:test";
import { startProxy } from "./proxy.ts";
import { slotOf, startCluster, startPair, startServer, until, type Server } from "./servers.ts";

const refused = { code: "ECONNREFUSED" };

describe("a server", () => {
  test("keeps its port and its data over a kill and over a stop", async () => {
    await using server = await startServer();
    const { port, pid } = server;
    await server.cli("SET", "a", "1");
    await server.kill();
    await assert.rejects(server.cli("PING"), refused);
    assert.throws(() => server.pid, /does not run/);
    await server.restart();
    await server.cli("SET", "b", "2");
    await server.restart();
    assert.equal(await server.cli("MGET", "a", "b", "c"), "1\n2\n");
    assert.equal(server.port, port);
    assert.notEqual(server.pid, pid);
  });

  test("answers after a pause what came in the meantime", async () => {
    await using server = await startServer();
    server.pause();
    const answer = server.cli("INCR", "n");
    assert.equal(await Promise.race([answer, soon()]), "nothing yet");
    server.resume();
    assert.equal(await answer, "1");
  });

  test("takes settings, a password among them, and says why it does not start", async () => {
    await using server = await startServer({ requirepass: "geheim", maxmemory: "10mb" });
    assert.equal(await server.cli("CONFIG", "GET", "maxmemory"), "maxmemory\n10485760");
    assert.match(server.url, /^redis:\/\/:geheim@127\.0\.0\.1:\d+$/);
    await assert.rejects(server.cli("NONSENSE"), /unknown command/);
    await assert.rejects(startServer({ "no-such-setting": "1" }), /did not start.*'no-such-setting 1'/s);
  });

  test("ends when the process that started it is killed -9", async () => {
    const script = `import { startServer } from ${JSON.stringify(join(import.meta.dirname, "servers.ts"))};
      const server = await startServer();
      console.log(server.port + " " + (await server.cli("CONFIG", "GET", "dir")).split("\\n")[1]);
      process.stdin.resume();`;
    const owner = spawn(process.execPath, ["--input-type=module", "-e", script], {
      stdio: ["pipe", "pipe", "inherit"],
    });
    const [line] = (await once(createInterface(owner.stdout), "line")) as [string];
    const [port, folder] = line.split(" ") as [string, string];
    assert.equal(await say(Number(port), "PING\r\n"), "+PONG\r\n");
    owner.kill("SIGKILL");
    await until(() => !existsSync(folder), "the folder is gone");
    // The folder may be gone a moment before the server is: its last connection then ends with a reset.
    const gone = async (): Promise<boolean> => {
      const said = say(Number(port), "PING\r\n");
      return said.then(
        () => false,
        (error: NodeJS.ErrnoException) => error.code === refused.code,
      );
    };
    await until(gone, "nothing listens any more");
  });
});

describe("a pair", () => {
  test("has a replica that follows, and that is a primary after promote, for good", async () => {
    await using pair = await startPair({ requirepass: "geheim" });
    await pair.primary.cli("SET", "a", "1");
    await until(async () => (await pair.replica.cli("GET", "a")) === "1");
    await assert.rejects(pair.replica.cli("SET", "a", "2"), /READONLY/);
    await pair.primary.kill();
    await pair.promote();
    await pair.replica.cli("SET", "a", "2");
    await pair.replica.restart();
    assert.equal(await pair.replica.cli("INCR", "a"), "3");
  });
});

describe("a cluster", () => {
  test("moves a slot with its keys while they are used, and survives the death of a primary", async () => {
    await using cluster = await startCluster();
    assert.equal((await cluster.primaries()).length, 3);
    const slot = slotOf("{tag}:1");
    const from = await cluster.primaryOf(slot);
    assert.equal(await from.cli("CLUSTER", "KEYSLOT", "tag"), String(slot));
    const to = (await cluster.primaries()).find((server) => server !== from)!;
    await from.cli("MSET", ...Array.from({ length: 35 }, (_, n) => [`{tag}:${n}`, String(n)]).flat());
    let steps = 0;
    await cluster.moveSlot(slot, to, async () => {
      if (steps++ > 0) return;
      const all = Array.from({ length: 35 }, (_, n) => `{tag}:${n}`);
      await assert.rejects(from.cli("MGET", ...all), /TRYAGAIN/);
      await assert.rejects(from.cli("SET", "{tag}:new", "1"), /ASK/);
    });
    assert.equal(steps, 4);
    assert.equal(await cluster.primaryOf(slot), to);
    assert.equal(await to.cli("GET", "{tag}:34"), "34");
    await assert.rejects(from.cli("GET", "{tag}:34"), /MOVED/);

    const heir = await cluster.replicaOf(to);
    await to.kill();
    assert.ok([to, heir].includes(await cluster.primaryOf(slot)));
    await cluster.until(async () => (await cluster.primaryOf(slot)) === heir, "the replica takes over");
    assert.equal(await cluster.isWell(), false);
    await to.restart();
    await cluster.until(() => cluster.isWell(), "the old primary follows");
    assert.equal(await cluster.replicaOf(heir), to);
    assert.equal(await heir.cli("GET", "{tag}:34"), "34");
  });

  test("slots are those of the specification", () => {
    assert.equal(slotOf("123456789"), 0x31c3);
    assert.equal(slotOf("{user1000}.following"), slotOf("user1000"));
    assert.equal(slotOf("foo{}{bar}"), 8363);
  });
});

describe("a proxy", () => {
  test("passes on, with latency", async () => {
    await using stage = await behindProxy();
    assert.equal(await say(stage.proxy.port, "PING\r\n"), "+PONG\r\n");
    stage.proxy.latencyMs = 60;
    const before = performance.now();
    assert.equal(await say(stage.proxy.port, "PING\r\n"), "+PONG\r\n");
    assert.ok(performance.now() - before >= 60);
  });

  test("holds everything back as a black hole, and lets it go", async () => {
    await using stage = await behindProxy();
    stage.proxy.blackhole = true;
    const answer = say(stage.proxy.port, "INCR n\r\n");
    await until(() => stage.proxy.open === 1);
    assert.equal(await Promise.race([answer, soon()]), "nothing yet");
    assert.equal(await stage.server.cli("GET", "n"), "");
    stage.proxy.blackhole = false;
    assert.equal(await answer, ":1\r\n");
  });

  test("cuts after so many bytes, once", async () => {
    await using stage = await behindProxy();
    stage.proxy.cutAfter(3);
    assert.equal(await say(stage.proxy.port, "PING\r\n"), "+PO");
    assert.equal(stage.proxy.cuts, 1);
    assert.equal(await say(stage.proxy.port, "PING\r\n"), "+PONG\r\n");
  });

  test("loses the reply to a request that was carried out", async () => {
    await using stage = await behindProxy();
    stage.proxy.cutOnly = "INCR";
    stage.proxy.cutRequests = 1;
    assert.equal(await say(stage.proxy.port, "PING\r\n"), "+PONG\r\n");
    await assert.rejects(say(stage.proxy.port, `ECHO a\r\n`.repeat(50) + "INCR n\r\n"), {
      code: "ECONNRESET",
    });
    assert.equal(stage.proxy.cuts, 1);
    assert.equal(await stage.server.cli("GET", "n"), "1");
    assert.equal(await say(stage.proxy.port, "INCR n\r\n"), ":2\r\n");
  });

  test("resets what is open, and closes", async () => {
    await using stage = await behindProxy();
    stage.proxy.blackhole = true;
    const answer = say(stage.proxy.port, "PING\r\n");
    await until(() => stage.proxy.open === 1);
    stage.proxy.reset();
    await assert.rejects(answer, { code: "ECONNRESET" });
    stage.proxy.blackhole = false;
    assert.equal(await say(stage.proxy.port, "PING\r\n"), "+PONG\r\n");
    await stage.proxy.close();
    await assert.rejects(say(stage.proxy.port, "PING\r\n"), refused);
  });
});

async function behindProxy() {
  await using stack = new AsyncDisposableStack();
  const server: Server = stack.use(await startServer());
  const proxy = stack.use(await startProxy(server.port));
  const kept = stack.move();
  return { server, proxy, [Symbol.asyncDispose]: () => kept.disposeAsync() };
}

/** In this time an answer that is not held back would have come: another server starts and answers. */
async function soon(): Promise<string> {
  await using other = await startServer();
  await other.cli("PING");
  return "nothing yet";
}

/** Sends `request`; resolves with the first bytes of the answer, or with what came until the end. */
async function say(port: number, request: string): Promise<string> {
  const socket: Socket = connect(port, "127.0.0.1");
  socket.write(request);
  try {
    for await (const chunk of socket) return String(chunk);
    return "";
  } finally {
    socket.destroy();
  }
}
