/**
 * Every key and channel that Ferry writes to Redis: what it holds, who writes it, when it is deleted.
 *
 * All keys of a shard carry the shard's hash tag, so that they live in one slot of a Cluster and one script
 * may change them together. The sixteen tags were chosen so that their slots lie in the middle of sixteen
 * equal parts: they spread evenly over 1, 2, 4, 8 or 16 primaries, and 6/5/5 over three.
 *
 * A task's id names its shard, its bundle and its field: any process finds its outcome without an index.
 * New bundles go to one shard of each primary (`RedisNodes.activeShards`), so that one read fills a batch; share index,
 * Idempotency-Keys and rate windows are spread over all shards by hash.
 *
 * `ferry:{f0h}:` is the base of shard 0; after it comes
 *
 * | key            | type   | holds                                              | written by | deleted |
 * |----------------|--------|----------------------------------------------------|------------|------|
 * | `q:model:zone` | stream | an entry per bundle: its tasks with their inputs (`frames.ts`); group `g`, consumers are batchers | gateway | entry: when all its tasks have ended |
 * | `r:<bundle>`   | hash   | the records of a bundle's tasks, see below         | gateway, batcher | last deadline + `results.ttlMs` (`cache.ttlMs` if longer) + 1 min |
 * | `depth`        | hash   | how many tasks wait by `model:tier`, `bytes` of them, how many are `running` | put, claim, settle | when nothing is left in the shard |
 * | `x:<content>`  | string | join or cache key → id of the last task put with it | gateway   | totalMs + `cache.ttlMs` + 1 min |
 * | `c:<content>`  | string | cache key → id of its last success, unless that is a join key | batcher | `cache.ttlMs` |
 * | `k:<digest>`   | string | Idempotency-Key → id and fingerprint               | gateway    | totalMs + `results.ttlMs` + 1 min |
 * | `alive:<name>` | string | a batcher lives: the number of the call that began its lease | batcher    | `leaseMs` after its last renewal |
 * | `run:<name>`   | hash   | batch → the tasks that the batcher runs in it      | batcher    | batch: when it is settled; hash: when the batcher's entries are taken over |
 * | `d`, `dz`      | hash, zset | dead letters by id; ids by the time of death   | batcher    | `deadLetters.ttlMs`, `.max`, replay, purge |
 * | `l:<digest>`   | string | a rate window: when it closes, what is spent       | gateway    | after two windows |
 * | `format`       | string | version of all that is listed here (shard 0 only, `format.ts`) | the first process | stays |
 * | `keys`         | hash   | id of an API key → its digest, user, tier (shard 0 only) | `ferry keys` | when it is revoked |
 * | `keys:secret`  | string | what these digests are keyed with, where `auth.secret` is not set (shard 0 only) | the first process that needs it | stays |
 *
 * Fields of `r:<bundle>`, where F is a task's field:
 *
 * | field | holds                                                                   |
 * |-------|-------------------------------------------------------------------------|
 * | `m`   | tenant, model, times of each task: the bundle was accepted; `mF`: of one that came after the others |
 * | `F`   | the outcome; written once, by HSETNX                                    |
 * | `o`   | the batcher that holds the bundle; `oF`: another one that holds this task |
 * | `sF`  | attempts, losses and largest batch of a task that was tried             |
 * | `wF`  | other gateways that wait for it, comma-separated; `~` before one that only polls |
 * | `pF`  | deadline and tier of joined callers                                     |
 * | `kF`  | an Idempotency-Key stands for it                                        |
 * | `gF`  | its owner has deleted it; the outcome may still answer others           |
 * | `rF`  | it was a dead letter, and becomes one again unless it succeeds          |
 * | `x`   | `w`, `p`, `k` or an outcome came from a gateway: checked when a bundle is read or settled |
 *
 * Channel `n:<name>`: messages for one process (`messages.ts`). The registry of the fleet has its keys on shard 0 too;
 * `src/workers/fleet/redis-registry.ts` lists them.
 */
import { hash } from "node:crypto";
import { HOMES, ID_DIGITS } from "../../core/home.ts";

const TAGS = "f0h f11a f22a f38 f422 f53 f6c f712 f813 f910 fa1j fb23 fc3 fd2d fe9 ff0".split(" ");

export const GROUP = "g";
/** Keys that belong to a task outlive its last deadline and its outcome by so much. */
export const GRACE_MS = 60_000;
const MAX_INDEX_NAME = 128;

/** A task id: time and chance of its bundle, the shard, then the task's own field, which is chance. */
export const TIME_DIGITS = 10;
export const BUNDLE_DIGITS = 10;
export const FIELD_DIGITS = 15;
const SHARD_AT = TIME_DIGITS + BUNDLE_DIGITS;

export class RedisKeys {
  readonly tags: readonly string[];
  readonly bases: readonly string[]; // what every key of a shard starts with

  constructor(prefix: string, shards: number) {
    this.tags = TAGS.slice(0, shards);
    this.bases = this.tags.map((tag) => `${prefix}{${tag}}:`);
  }

  get shards(): number {
    return this.bases.length;
  }

  channel(shard: number, name: string): string {
    return `${this.bases[shard]!}n:${name}`;
  }

  stream(shard: number, model: string, zone: string): string {
    return `${this.bases[shard]!}q:${encodeURIComponent(model)}:${encodeURIComponent(zone)}`;
  }

  shardOf(id: string): number {
    const digit = ID_DIGITS.indexOf(id.charAt(SHARD_AT));
    return (digit < 0 ? 0 : digit & (HOMES - 1)) % this.shards;
  }

  bundle(id: string): string {
    return `${this.bases[this.shardOf(id)]!}r:${id.slice(0, -FIELD_DIGITS) || id}`;
  }
}

export function modelOf(stream: string): string {
  return decodeURIComponent(stream.split(":").at(-2)!);
}

export function fieldOf(id: string): string {
  return id.slice(-FIELD_DIGITS);
}

/** Keys that callers choose are digested: any length, any characters, one size. */
export function digest(text: string): string {
  return hash("sha256", text, "base64url").slice(0, 32);
}

/** Content keys are digests with a little beside them already; only long ones are digested again. */
export function indexName(key: string): string {
  return key.length <= MAX_INDEX_NAME ? key : digest(key);
}
