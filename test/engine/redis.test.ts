/** The Redis engine keeps the engine contract: on one server, on a primary with a replica, on a Cluster. */
import { after, before, describe } from "node:test";
import type { RedisNodes } from "../../src/engine/redis/client/nodes.ts";
import { engineContract } from "../contract/engine.ts";
import { usually } from "../fixtures/long.ts";
import { startCluster, startPair, startServer } from "./redis-client/servers.ts";
import { propertyContract } from "../contract/engine-property.ts";
import { openNodes, openRedis } from "./redis-engines.ts";

function onServers(name: string, start: () => Promise<AsyncDisposable & { connect(): Promise<RedisNodes> }>) {
  describe(name, () => {
    let servers: AsyncDisposable;
    let nodes: RedisNodes;
    before(async () => {
      const started = await start();
      servers = started;
      nodes = await started.connect();
    });
    after(async () => {
      await nodes.close();
      await servers[Symbol.asyncDispose]();
    });
    engineContract(
      `redis, ${name}`,
      // One shard: bounds are shared out to the primaries, and tests know only the sum.
      openRedis(() => nodes, 1),
      { runs: usually(20, 200) },
    );
    describe("spread over all primaries", () => {
      propertyContract(
        openRedis(() => nodes),
        { runs: usually(12, 200), maxQueued: 1000 },
      );
    });
  });
}

onServers("one server", async () => {
  const server = await startServer();
  return { connect: () => openNodes({ url: server.url }), [Symbol.asyncDispose]: () => server.stop() };
});

onServers("a primary with a replica", async () => {
  const pair = await startPair();
  const connect = () => openNodes({ url: pair.primary.url });
  return { connect, [Symbol.asyncDispose]: () => pair[Symbol.asyncDispose]() };
});

onServers("a Cluster", async () => {
  const cluster = await startCluster();
  const connect = () => openNodes({ nodes: cluster.nodes });
  return { connect, [Symbol.asyncDispose]: () => cluster[Symbol.asyncDispose]() };
});
