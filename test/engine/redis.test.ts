/** The Redis engine keeps the engine contract: on one server, on a primary with a replica, on a Cluster. */
import { after, before, describe } from "node:test";
import type { RedisNodes } from "../../src/redis/nodes.ts";
import { engineContract } from "../contract/engine.ts";
import { propertyContract } from "../contract/engine-property.ts";
import { startCluster, startPair, startServer } from "../redis/servers.ts";
import { openInOneShard, openNodes, openSpread } from "./redis-engines.ts";

/** More tasks than a story puts: the bound is shared out to the shards, and the model knows only the sum. */
const UNBOUNDED = 1000;

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
      openInOneShard(() => nodes),
      { runs: 60 },
    );
    describe("spread over sixteen shards", () => {
      propertyContract(
        openSpread(() => nodes),
        { runs: 60, maxQueued: UNBOUNDED },
      );
    });
    describe("with tenants that crowd each other", () => {
      propertyContract(
        openSpread(() => nodes, { crowdFrom: 0 }),
        { runs: 60, maxQueued: UNBOUNDED },
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
