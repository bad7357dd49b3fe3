/** Redis engines for tests: on a real server, on virtual time, each under a key prefix of its own. */
import { SystemClock } from "../../src/clock.ts";
import { homeOf, HOMES } from "../../src/core/home.ts";
import { RedisEngine } from "../../src/engine/redis.ts";
import { RedisClock } from "../../src/engine/redis-frames.ts";
import { RedisKeys } from "../../src/engine/redis-keys.ts";
import { type NodesOptions, RedisNodes } from "../../src/redis/nodes.ts";
import type { RedisOptions } from "../../src/engine/redis-parts.ts";
import { VirtualClock } from "../../src/plan/virtual-clock.ts";
import { Events } from "../../src/telemetry/events.ts";
import type { EngineOptions, OpenEngine } from "../contract/engine-stage.ts";

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
    waitTimeoutMs: 500,
    durability: "auto",
    name: "test",
    ...more,
  } as const;
  return RedisNodes.open(options, new SystemClock(), new Events());
}

export function makeEngine(
  nodes: RedisNodes,
  options: EngineOptions,
  more: { shards?: number; prefix?: string } & Partial<RedisOptions> = {},
) {
  const { shards = HOMES, prefix, ...settings } = more;
  const [clock, events, name] = [new VirtualClock(), new Events(), `e${++names}`];
  const keys = new RedisKeys(prefix ?? `${name}:`, shards);
  const base = { nodes, keys, clock, events, shared: new RedisClock(), name };
  const engine = new RedisEngine(base, {
    ...options,
    zone: "",
    zoneSpillMs: 100,
    leaseMs: Infinity,
    sweepMs: 1000,
    putWithinMs: 10_000,
    ...settings,
  });
  return { engine, clock, events, keys, name };
}

/** In one shard, where order and bounds are exact. */
export function openInOneShard(nodes: () => RedisNodes): OpenEngine {
  return async (options) => {
    const { engine, clock, events } = makeEngine(nodes(), options, { shards: 1 });
    return { engine, clock, events, refresh: () => engine.refresh(), approximate: true };
  };
}

/** In sixteen: tasks of the same content meet, the others go anywhere. */
export function openSpread(nodes: () => RedisNodes, more: Partial<RedisOptions> = {}): OpenEngine {
  return async (options) => {
    const { engine, clock, events } = makeEngine(nodes(), options, more);
    const home = (content: string, number: number): number =>
      content === "" ? number % HOMES : homeOf(content);
    return { engine, clock, events, home, refresh: () => engine.refresh(), approximate: true };
  };
}
