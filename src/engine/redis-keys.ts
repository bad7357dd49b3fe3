/**
 * Every key and channel that Ferry writes to Redis: what it holds, who writes it, when it goes.
 *
 * All keys of a shard carry the shard's hash tag, so that they live in one slot of a Cluster and one script
 * may change them together. The sixteen tags were chosen so that their slots lie in the middle of sixteen
 * equal parts: they spread evenly over 1, 2, 4, 8 or 16 primaries, and 6/5/5 over three.
 *
 * `ferry:{f0h}:` is the base of shard 0; after it comes
 *
 * | key              | type   | holds                                             | written by               | goes                    |
 * |------------------|--------|---------------------------------------------------|--------------------------|-------------------------|
 * | `s`              | hash   | id → state of a task that is not final            | put claim extend settle reap cancel replay | with the task's end |
 * | `due`            | zset   | id by the instant at which `reap` must look at it | the same                 | with the task's end     |
 * | `q:…`            | stream | ids of queued tasks, group `g`                    | put settle reap replay   | entry: when it is claimed, or ends; stream: `tend`, when empty |
 * | `w`              | stream | ids of tasks that wait for their retry            | settle                   | entry: when the retry is due |
 * | `qs`             | hash   | stream → parameters of its tasks                  | put settle reap replay   | `tend`, when the stream is empty |
 * | `b:<id>`         | string | meta and input of a task that is not final        | put replay               | with the task's end; where it is not queued: a minute |
 * | `j:<id>`         | string | the task joined another                           | put                      | a minute                |
 * | `x:<content>`    | string | join or cache key → id of the last task with it   | put replay               | totalMs + `cache.ttlMs` + 1 min |
 * | `n`              | string | tasks and bytes that wait, version                | every script that moves a task | stays             |
 * | `o:<id>.<token>` | string | a success before it is known whether it counts    | settle                   | renamed to `r:<id>`, or deleted |
 * | `r:<id>`         | string | outcome of a final task                           | settle reap cancel put (cached) | `results.ttlMs` after the end, `cache.ttlMs` if that is longer |
 * | `lb:<token>`     | string | the batch of a lease                              | claim                    | 10 min after the lease  |
 * | `rk:<id>`        | string | Idempotency-Keys of a final task that is shared   | settle reap cancel put (cached) | `results.ttlMs` after the end |
 * | `k:<digest>`     | string | Idempotency-Key → id and fingerprint              | put                      | with the record         |
 * | `f:<digest>`     | string | Idempotency-Key → home of its task, at the key's own shard | bind            | longer than the record  |
 * | `c:<id>`         | string | number of its owner's last cancel, and its reply  | cancel                   | twice the time that a call may take |
 * | `p:<digest>`     | string | Idempotency-Key → id of the task that is on its way in under it, beside `f:` | bind | twice the time that a put may take |
 * | `d`, `dz`        | hash, zset | dead letters by id; ids by the time of death  | settle reap              | `deadLetters.ttlMs`, `.max`, replay, purge |
 * | `l:<digest>`     | string | a rate window: when it closes, what is spent      | spend                    | after two windows       |
 * | `none`           |        | nothing; declared by every script on a Cluster (`redis-scripts.ts`) | nobody |               |
 * | `format`         | string | version of all that is listed here (shard 0 only, `redis-format.ts`) | the first process | stays |
 * | `keys`           | hash   | id of an API key → its digest, user, tier (shard 0 only) | `ferry keys`      | when it is revoked      |
 * | `keys:secret`    | string | what these digests are keyed with, where `auth.secret` is not set (shard 0 only) | whoever needs it first | stays |
 *
 * Channels: `bell` (how deep the queues are now, after every change) and `n:<gateway>` (outcomes for the
 * callers that it holds). The registry of the batchers has its keys on shard 0 too; `src/fleet/redis-registry.ts` lists them.
 */
import { hash } from "node:crypto";
import type { Json } from "../core/task.ts";

const TAGS = "f0h f11a f22a f38 f422 f53 f6c f712 f813 f910 fa1j fb23 fc3 fd2d fe9 ff0".split(" ");

export class RedisKeys {
  readonly tags: readonly string[];
  /** What every key of a shard starts with. */
  readonly bases: readonly string[];

  constructor(prefix: string, shards: number) {
    this.tags = TAGS.slice(0, shards);
    this.bases = this.tags.map((tag) => `${prefix}{${tag}}:`);
  }

  bell(shard: number): string {
    return `${this.bases[shard]!}bell`;
  }

  notes(shard: number, gateway: string): string {
    return `${this.bases[shard]!}n:${gateway}`;
  }
}

/** Keys that callers choose are digested: any length, any characters, one size. */
export function digest(text: string): string {
  return hash("sha256", text, "base64url").slice(0, 32);
}

/** The index of contents outlives task and outcome by so much: joins may have given the task more time. */
export const INDEX_GRACE_MS = 60_000;
const MAX_INDEX_NAME = 128;

/** Content keys are digests with a little beside them already; only long ones are digested again. */
export function indexName(key: string): string {
  return key.length <= MAX_INDEX_NAME ? key : digest(key);
}

/**
 * A stream's name says what is in it: model, parameters (as a digest), the zone of the gateways that took
 * the tasks, tier, and how they came: `n` new; `n` and a tenant's digest: new, of a tenant that crowds the others
 * (`redis-crowds.ts`); `0` came back; a number: came back, and may never again ride in a larger batch than that.
 */
export interface StreamName {
  readonly model: string;
  readonly parameters: string;
  readonly zone: string;
  readonly tier: number;
  readonly kind: string;
}

/** The part of the name that stays when a task comes back or changes its tier: `q:model:parameters:zone:`. */
export function streamFamily(model: string, parameters: Json, zone: string): string {
  const which = parameters === "" ? "" : digest(parameters);
  return `q:${encodeURIComponent(model)}:${which}:${encodeURIComponent(zone)}:`;
}

export function readStreamName(name: string): StreamName {
  const [, model, parameters, zone, tier, kind] = name.split(":");
  return {
    model: decodeURIComponent(model!),
    parameters: parameters!,
    zone: decodeURIComponent(zone!),
    tier: Number(tier),
    kind: kind!,
  };
}

/** Whether its tasks were never tried. */
export function isNew({ kind }: StreamName): boolean {
  return kind.startsWith("n");
}

/** The largest batch for tasks of this kind of stream. */
export function batchLimit(name: StreamName): number {
  return isNew(name) || name.kind === "0" ? Infinity : Number(name.kind);
}
