/** The engine from the settings: in memory, or in Redis with the parts of a fleet. */
import { randomBytes, randomInt } from "node:crypto";
import type { Clock } from "./clock.ts";
import type { Config, MemoryEngineConfig, ModelConfig, RedisEngineConfig } from "./config/config.ts";
import { HOMES } from "../core/home.ts";
import type { Engine, EngineLimits, TaskStore } from "../engine/engine.ts";
import { openJournal } from "../engine/memory/journal.ts";
import { MemoryEngine } from "../engine/memory/engine.ts";
import { RedisEngine } from "../engine/redis/engine.ts";
import { RedisClock } from "../engine/redis/frames.ts";
import { RedisKeys } from "../engine/redis/keys.ts";
import { RedisNodes } from "../engine/redis/client/nodes.ts";
import { probeRedis } from "../engine/redis/client/probe.ts";
import { RecordKeeper } from "../engine/memory/saved.ts";
import { RedisRegistry, type Registry } from "../workers/fleet/registry.ts";
import type { Events } from "../observe/events.ts";

/**
 * How often a gateway writes a bundle. A bundle costs the same CPU, here and in Redis, for one task as for ten; a task
 * waits half of this on average, and not at all if the gateway was idle for as long.
 */
const TICK_MS = 2;
/** How often a gateway polls its awaited tasks, in case a notification was lost. */
const SWEEP_MS = 1000;

/** Shared by processes beside the tasks; Redis only. */
export interface Shared {
  readonly engine: RedisEngine;
  readonly registry: Registry;
  readonly id: string;
  readonly nodes: RedisNodes;
  key(name: string): string;
  /** Whether an accepted task is on one server, or on two. */
  durability(): "replica" | "local";
  reachable(): boolean;
}

/** What a gateway needs of the store of tasks. */
export interface OpenedStore {
  readonly engine: TaskStore;
  /** Accepted tasks survive this process. */
  readonly durable: boolean;
  /** False while the journal cannot be written. */
  readonly writable: () => boolean;
  readonly shared?: Shared;
}

export interface Opened extends OpenedStore {
  readonly engine: Engine;
  /** Resolves when this process can never store tasks again and must be restarted. */
  readonly lost?: Promise<void>;
  close(): Promise<void>;
}

export function openEngine(
  config: Config,
  limits: () => EngineLimits,
  clock: Clock,
  events: Events,
): Promise<Opened> {
  const { engine } = config;
  return engine.kind === "memory"
    ? openMemory(engine, limits, clock, events)
    : openRedis(engine, config, limits, clock, events);
}

async function openMemory(
  { dataDir }: MemoryEngineConfig,
  limits: () => EngineLimits,
  clock: Clock,
  events: Events,
): Promise<Opened> {
  const seed = randomInt(2 ** 32);
  const opened = (engine: Engine): Opened => ({
    engine,
    durable: dataDir !== undefined,
    writable: () => true,
    close: () => engine.close(),
  });
  if (dataDir === undefined)
    return opened(new MemoryEngine(limits, clock, events, { seed, afterTurn: setImmediate }));
  const lost = Promise.withResolvers<void>();
  const { journal, records, torn, running } = await openJournal(
    dataDir,
    (why) => {
      if (why === undefined) {
        events.emit("notice", { level: "info", message: `the journal in ${dataDir} is written again` });
        return;
      }
      const next = why.lasting ? "ending, to be started again" : "it is tried again each second";
      const message = `the journal cannot be written, new tasks are refused: ${why.message}; ${next}`;
      events.emit("notice", { level: "error", message });
      if (why.lasting) lost.resolve();
    },
    clock,
  );
  if (torn > 0) {
    const message = `${torn} torn at the end of the journal in ${dataDir}: the last commits before a crash or damage`;
    events.emit("notice", { level: "warn", message });
  }
  const keeper = new RecordKeeper(journal, records, running);
  return {
    ...opened(new MemoryEngine(limits, clock, events, { keeper, seed, afterTurn: setImmediate })),
    writable: () => journal.trouble === undefined,
    lost: lost.promise,
  };
}

async function openRedis(
  settings: RedisEngineConfig,
  { zone }: Config,
  limits: () => EngineLimits,
  clock: Clock,
  events: Events,
): Promise<Opened> {
  const { refuse, warn } = await probeRedis(settings, clock);
  if (refuse.length > 0) throw new Error(refuse.join("; "));
  for (const message of warn) events.emit("notice", { level: "warn", message });
  const id = `f${randomBytes(6).toString("hex")}`;
  const keys = new RedisKeys(settings.keyPrefix, HOMES);
  const name = `ferry-${id}`;
  const nodes = await RedisNodes.open({ ...settings, tags: keys.tags, name }, clock, events);
  const base = { nodes, keys, clock, events, shared: new RedisClock(), name: id };
  const { leaseMs, zoneSpillMs, commandTimeoutMs } = settings;
  const options = {
    zone,
    zoneSpillMs,
    leaseMs,
    sweepMs: SWEEP_MS,
    tickMs: TICK_MS,
    putWithinMs: commandTimeoutMs,
  };
  const engine = new RedisEngine(base, limits, options, nodes.cluster);
  try {
    await engine.open();
  } catch (error) {
    await nodes.close();
    throw error;
  }
  const key = (each: string): string => keys.bases[0]! + each;
  const registry = new RedisRegistry(nodes, { aliveMs: settings.aliveMs, key });
  const durability = (): "replica" | "local" =>
    nodes.primaries().every(({ waits }) => waits) ? "replica" : "local";
  const reachable = (): boolean => keys.tags.every((_, shard) => nodes.up(shard));
  return {
    engine,
    durable: true,
    writable: () => true,
    shared: { engine, registry, id, nodes, key, durability, reachable },
    close: async () => {
      await engine.close();
      await nodes.close();
    },
  };
}

/** Engine limits; `leaving`: removed models that are still being served. */
export function limitsOf(
  { tiers, limits, results, deadLetters, models }: Config,
  leaving: readonly ModelConfig[] = [],
): EngineLimits {
  return {
    models: new Map([...leaving, ...models].map(({ name, timeouts }) => [name, timeouts])),
    tiers: tiers.length,
    maxQueued: limits.maxQueued,
    maxQueuedBytes: limits.maxQueuedBytes,
    results,
    deadLetters,
  };
}
