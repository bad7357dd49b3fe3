/** Redis engines for tests: on a real server, on virtual time, each under a key prefix of its own. */
import { SystemClock } from "../../src/app/clock.ts";
import { HOMES } from "../../src/core/home.ts";
import { RedisEngine } from "../../src/engine/redis/engine.ts";
import { RedisClock } from "../../src/engine/redis/frames.ts";
import { RedisKeys } from "../../src/engine/redis/keys.ts";
import type { Demand } from "../../src/engine/redis/reader.ts";
import type { RedisOptions } from "../../src/engine/redis/parts.ts";
import { type NodesOptions, RedisNodes } from "../../src/engine/redis/client/nodes.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { Events } from "../../src/observe/events.ts";
import type { EngineOptions, OpenEngine } from "../contract/engine-stage.ts";

/** A batcher whose workers want nothing now. */
export const ASLEEP: Demand = {
  models: () => [],
  room: () => 0,
  pacePerMs: () => 0,
  batchSize: () => 0,
  patienceMs: () => 0,
  share: () => 1,
  othersIdle: () => false,
  leads: () => false,
  zones: () => [],
};

let names = 0;

export function openNodes(
  where: Pick<NodesOptions, "url" | "nodes">,
  more: Partial<NodesOptions> = {},
): Promise<RedisNodes> {
  const options = {
    ...where,
    tags: new RedisKeys("", HOMES).tags,
    connectTimeoutMs: 5000,
    commandTimeoutMs: 10_000,
    waitTimeoutMs: 10_000,
    durability: "auto",
    name: "test",
    ...more,
  } as const;
  return RedisNodes.open(options, new SystemClock(), new Events());
}

export function makeEngine(
  nodes: RedisNodes,
  options: EngineOptions,
  more: { shards?: number; prefix?: string; clock?: VirtualClock } & Partial<RedisOptions> = {},
) {
  const { shards = HOMES, prefix, clock = new VirtualClock(), ...settings } = more;
  const [events, name] = [new Events(), `e${++names}`];
  const keys = new RedisKeys(prefix ?? `${name}:`, shards);
  const base = { nodes, keys, clock, events, shared: new RedisClock(), name };
  const all = {
    zone: "",
    zoneSpillMs: 100,
    leaseMs: Infinity,
    sweepMs: 1000,
    putWithinMs: 10_000,
    tickMs: 0,
    ...settings,
  };
  const engine = new RedisEngine(base, () => options, all, nodes.cluster);
  return { engine, clock, events, keys, name };
}

/** One process that puts and claims; `shards`: of how many it knows. */
export function openRedis(nodes: () => RedisNodes, shards = HOMES): OpenEngine {
  return async (options) => {
    const { engine, clock, events } = makeEngine(nodes(), options, { shards });
    return { engine, clock, events, refresh: () => engine.refresh(), approximate: true };
  };
}
