/**
 * The Redis of a chaos run, in three shapes, with what their operator does: nothing in a Cluster, which
 * replaces a primary by itself; in a pair, promote the replica and bring the dead one back as its replica.
 *
 * Bringing it back as what it was, a primary, would make two primaries, and no client can mend that. So the
 * line `replicaof` is in its redis.conf before it starts.
 *
 * "Well" is the state in which one more loss is within the promise: every server runs, and every replica has
 * all that its primary has.
 */
import { appendFile } from "node:fs/promises";
import { join } from "node:path";
import { setTimeout as pause } from "node:timers/promises";
import type { Random } from "../../src/core/random.ts";
import { folder } from "../../test/engine/redis-client/guard.ts";
import {
  startCluster,
  startPair,
  startServer,
  until,
  type Server,
} from "../../test/engine/redis-client/servers.ts";

export type Topology = "single" | "pair" | "cluster";

/** What an orchestrator needs to see that a primary is gone; a Cluster has its `cluster-node-timeout`. */
const DETECT_MS = 1000;
/** As docs/operations.md says: a queue's file is mostly history, and rewriting it costs as much as serving. */
const SETTINGS = { "auto-aof-rewrite-min-size": "1gb" };

export interface Shard {
  readonly primary: Server;
  readonly replica: Server | undefined;
}

export interface Store extends AsyncDisposable {
  /** Settings of Ferry's engine. */
  readonly engine: Readonly<Record<string, unknown>>;
  readonly hasReplicas: boolean;
  isWell(): Promise<boolean>;
  /** One primary with its replica. */
  pick(random: Random): Promise<Shard>;
  /** A primary was killed: makes somebody else the primary, if that is anybody's work. */
  replace(dead: Shard): Promise<void>;
  /** Starts a killed server again. */
  revive(server: Server): Promise<void>;
}

export function startStore(topology: Topology): Promise<Store> {
  return { single: startSingle, pair: startTwo, cluster: startSix }[topology]();
}

async function startSingle(): Promise<Store> {
  const server = await startServer(SETTINGS);
  return {
    engine: { url: server.url },
    hasReplicas: false,
    isWell: async () => server.answers && (await server.cli("PING")) === "PONG",
    pick: () => Promise.resolve({ primary: server, replica: undefined }),
    replace: () => Promise.resolve(),
    revive: (dead) => dead.restart(),
    [Symbol.asyncDispose]: () => server[Symbol.asyncDispose](),
  };
}

async function startTwo(): Promise<Store> {
  const pair = await startPair(SETTINGS);
  let now = { primary: pair.primary, replica: pair.replica };
  return {
    engine: { nodes: [pair.primary, pair.replica].map(({ port }) => `127.0.0.1:${port}`) },
    hasReplicas: true,
    isWell: () => isInStep(now.primary, now.replica),
    pick: () => Promise.resolve(now),
    replace: async ({ primary, replica }) => {
      await pause(DETECT_MS);
      await replica!.cli("REPLICAOF", "NO", "ONE");
      await replica!.cli("CONFIG", "REWRITE");
      now = { primary: replica!, replica: primary };
    },
    revive: async (dead) => {
      const file = join(folder(), String(dead.port), "redis.conf");
      if (dead === now.replica) await appendFile(file, `\nreplicaof 127.0.0.1 ${now.primary.port}\n`);
      await dead.restart();
      // Keeps one such line only.
      await dead.cli("CONFIG", "REWRITE");
    },
    [Symbol.asyncDispose]: () => pair[Symbol.asyncDispose](),
  };
}

/** The replica has its copy, in its own file too, and follows. */
async function isInStep(primary: Server, replica: Server): Promise<boolean> {
  if (!primary.answers || !replica.answers) return false;
  const sends = await primary.cli("INFO", "replication");
  const gets = `${await replica.cli("INFO", "replication")}${await replica.cli("INFO", "persistence")}`;
  const facts = ["master_link_status:up", "master_sync_in_progress:0", "aof_rewrite_in_progress:0"];
  return sends.includes(`port=${replica.port},state=online`) && facts.every((fact) => gets.includes(fact));
}

async function startSix(): Promise<Store> {
  const cluster = await startCluster(SETTINGS);
  return {
    engine: { nodes: cluster.nodes.map(({ host, port }) => `${host}:${port}`) },
    hasReplicas: true,
    isWell: () => cluster.isWell(),
    pick: async (random) => {
      const primaries = await cluster.primaries();
      const primary = primaries[Math.floor(random.next() * primaries.length)]!;
      return { primary, replica: await cluster.replicaOf(primary) };
    },
    replace: () => Promise.resolve(),
    revive: (dead) => dead.restart(),
    [Symbol.asyncDispose]: () => cluster[Symbol.asyncDispose](),
  };
}

/** Waits for `isWell`; while servers come and go, asking them may fail. */
export function untilWell(store: Store, limitMs: number): Promise<void> {
  return until(() => store.isWell(), "Redis is well again", limitMs);
}
