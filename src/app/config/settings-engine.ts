/**
 * The part of the table that says where tasks live: in this process, or in Redis.
 *
 * The times of the Redis engine hang together (rules in `app/config/check.ts`): a write waits `waitTimeoutMs`
 * for a replica at most, which is part of a command's `commandTimeoutMs`. A lease is renewed each
 * `leaseMs` / 3, so a renewal that times out leaves leaseMs × 2/3 − commandTimeoutMs for the next try. A
 * batcher is dead after `aliveMs` without a beat, which leaves room for two beats that were lost.
 */
import { redisUrl, server } from "./setting-addresses.ts";
import { boolean, choice, group, integer, list, oneOf, optional, path, text } from "./setting-kinds.ts";

const second = 1000;
const minute = 60 * second;

const redis = group(
  "In Redis 7.0 or newer (or Valkey), alone, with a replica, or as a Cluster; shared by processes.",
  {
    url: optional(
      redisUrl("The server, or any node of a Cluster; either this or `nodes`.", "redis://127.0.0.1:6379"),
    ),
    nodes: list(
      "Nodes of a Cluster, or a primary and its replicas: whoever is up tells the rest.",
      server("One server.", "redis-1:6379"),
      { min: 0, max: 1000 },
    ),
    username: optional(
      text("Who to be at `nodes`; left out: the default user.", {
        maxLength: 128,
        secret: true,
        example: "ferry",
      }),
    ),
    password: optional(
      text("The password for `nodes`.", { maxLength: 512, secret: true, example: "${REDIS_PASSWORD}" }),
    ),
    tls: boolean("Whether `nodes` speak TLS; in a `url` rediss:// says so.", false),
    durability: choice(
      "`replica`: accepted means that a replica has the task too; `local`: one server; `auto`: replica while one is connected.",
      ["auto", "replica", "local"],
      "auto",
    ),
    keyPrefix: text("Every key begins with it; processes that share tasks have the same.", {
      maxLength: 64,
      default: "ferry:",
      without: ["{", "}"],
    }),
    connectTimeoutMs: integer("How long a connection may take until it can be used.", {
      default: second,
      min: 10,
      max: minute,
      unit: "ms",
    }),
    commandTimeoutMs: integer("How long an answer may take; then the connection is closed and made anew.", {
      default: second,
      min: 10,
      max: minute,
      unit: "ms",
    }),
    // 0 would be no bound at all: WAIT takes it as "for ever".
    waitTimeoutMs: integer("How long a write may wait for a replica; after that the task is not accepted.", {
      default: 200,
      min: 1,
      max: minute,
      unit: "ms",
    }),
    leaseMs: integer(
      "A batcher that has not renewed its lease for so long loses its tasks to others; renewed each third.",
      {
        default: 2 * second,
        min: 100,
        max: 10 * minute,
        unit: "ms",
      },
    ),
    beatMs: integer("How often a batcher says that it lives.", {
      default: 500,
      min: 10,
      max: minute,
      unit: "ms",
    }),
    aliveMs: integer("A batcher that was silent for so long is dead, and others take over its workers.", {
      default: 2 * second,
      min: 30,
      max: 10 * minute,
      unit: "ms",
    }),
    sweepMs: integer("How often waiting callers are looked up, in case a wake-up was lost.", {
      default: second,
      min: 10,
      max: minute,
      unit: "ms",
    }),
    zoneSpillMs: integer("How long a task waits for a worker of its own zone before any other may take it.", {
      default: 100,
      min: 0,
      max: minute,
      unit: "ms",
    }),
  },
);

export const engines = oneOf(
  "Where accepted tasks and their outcomes live.",
  {
    memory: group("In this process.", {
      dataDir: optional(
        path("Accepted tasks, outcomes and dead letters survive a restart here; left out: nothing on disk.", {
          example: "./ferry-data",
        }),
      ),
    }),
    redis,
  },
  { fallback: "memory" },
);
