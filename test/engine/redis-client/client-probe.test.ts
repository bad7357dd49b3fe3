/** The boot check of whole installations: a server, a primary with its replica, a Cluster. */
import assert from "node:assert/strict";
import { createServer, type AddressInfo } from "node:net";
import { once } from "node:events";
import { describe, test } from "node:test";
import { SystemClock } from "../../../src/app/clock.ts";
import { probeRedis, type Probe, type ProbeOptions } from "../../../src/engine/redis/client/probe.ts";
import { startCluster, startPair, startServer, type Server } from "./servers.ts";

const good = { maxmemory: "100mb", "maxmemory-policy": "noeviction" };
const at = (...servers: Server[]) => servers.map(({ port }) => ({ host: "127.0.0.1", port }));
function probe(options: Partial<ProbeOptions>): Promise<Probe> {
  const usual = { durability: "auto", connectTimeoutMs: 20_000, commandTimeoutMs: 20_000 } as const;
  return probeRedis({ ...usual, ...options }, new SystemClock());
}
const inOrder = (ports: number[]) => ports.sort((a, b) => a - b);
const ports = ({ servers }: Probe) => inOrder(servers.map(({ address }) => Number(address.split(":")[1])));

describe("a server", () => {
  test("by its url, password and database included", async () => {
    await using server = await startServer({ ...good, requirepass: "p@ss" });
    const { refuse, warn, servers } = await probe({ url: `${server.url}/3`, durability: "local" });
    assert.deepEqual([refuse, warn], [[], []]);
    assert.deepEqual(
      servers.map(({ address, facts }) => [address, facts.role]),
      [[`127.0.0.1:${server.port}`, "primary"]],
    );
    const refused = await probe({ url: `redis://:wrong@127.0.0.1:${server.port}` });
    assert.match(refused.refuse[0]!, /refuses us: WRONGPASS .*; check that it runs and that engine\.url/);
    assert.ok(!refused.refuse[0]!.includes("wrong@"));
    assert.match(
      (await probe({ nodes: at(server) })).refuse[0]!,
      /it wants a password; write one in engine\.url/,
    );
  });

  test("that is not there, or hears and says nothing", async () => {
    await using server = await startServer(good);
    const options = { url: server.url, commandTimeoutMs: 50 };
    server.pause();
    assert.match((await probe(options)).refuse[0]!, /did not answer within 50 ms/);
    await server.kill();
    const { refuse, servers } = await probe(options);
    assert.equal(refuse.length, 1);
    assert.match(refuse[0]!, /^redis 127\.0\.0\.1:\d+ is not reachable: .*; check that it runs/);
    assert.deepEqual(servers, []);
  });

  test("that is something else", async () => {
    const web = createServer((socket) => void socket.end("HTTP/1.1 400 Bad Request\r\n\r\n"));
    web.listen(0, "127.0.0.1");
    await once(web, "listening");
    const { port } = web.address() as AddressInfo;
    const { refuse } = await probe({ nodes: [{ host: "127.0.0.1", port }] });
    web.close();
    assert.equal(refuse.length, 1);
    assert.match(refuse[0]!, new RegExp(`redis 127\\.0\\.0\\.1:${port} does not speak RESP2`));
  });
});

describe("a primary and its replica", () => {
  test("only the primary is judged, whatever the order", async () => {
    await using pair = await startPair(good);
    for (const nodes of [at(pair.primary, pair.replica), at(pair.replica, pair.primary)]) {
      const told = await probe({ nodes });
      assert.deepEqual([told.refuse, told.warn], [[], []]);
      assert.deepEqual(ports(told), [pair.primary.port]);
    }
    const wrong = await probe({ nodes: at(pair.replica) });
    assert.match(wrong.refuse[0]!, new RegExp(`it is a replica of 127\\.0\\.0\\.1:${pair.primary.port}`));

    await pair.promote();
    const both = await probe({ nodes: at(pair.primary, pair.replica), durability: "local" });
    assert.deepEqual(both.refuse, []);
    assert.match(
      both.warn[0]!,
      /both call themselves primary, and share nothing; make one the other's replica/,
    );
    await pair.primary.kill();
    const after = await probe({ nodes: at(pair.primary, pair.replica), durability: "local" });
    assert.deepEqual([after.refuse, ports(after)], [[], [pair.replica.port]]);
    assert.match(after.warn[0]!, new RegExp(`redis 127\\.0\\.0\\.1:${pair.primary.port} is not reachable`));
  });
});

describe("a Cluster", () => {
  test("from one seed to every primary; from a url too", async () => {
    await using cluster = await startCluster(good);
    const primaries = inOrder((await cluster.primaries()).map(({ port }) => port));
    for (const seed of [cluster.servers[0]!, cluster.servers.at(-1)!]) {
      const told = await probe({ nodes: at(seed) });
      assert.deepEqual([told.refuse, told.warn], [[], []]);
      assert.deepEqual(ports(told), primaries);
    }
    const [first, second] = await cluster.primaries();
    await second!.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru");
    const { refuse, servers } = await probe({ url: first!.url });
    assert.equal(refuse.length, 1);
    assert.match(
      refuse[0]!,
      new RegExp(`^redis 127\\.0\\.0\\.1:${second!.port}: maxmemory-policy is allkeys-lru`),
    );
    assert.ok(servers.every(({ facts }) => facts.cluster && facts.durability === "replica"));
    second!.pause();
    const paused = await probe({ nodes: at(first!, second!), commandTimeoutMs: 100 });
    second!.resume();
    assert.match(
      paused.refuse[0]!,
      new RegExp(`redis 127\\.0\\.0\\.1:${second!.port} did not answer within 100 ms`),
    );
    assert.deepEqual(
      ports(paused),
      primaries.filter((port) => port !== second!.port),
    );
  });
});
