/**
 * API keys in Redis, for a fleet: one hash and one string on shard 0.
 *
 *   keys          hash     id → record (`api-keys.ts`)
 *   keys:secret   string   HMAC key of the digests, unless auth.secret is set
 *
 * A record is cached for `reloadMs`, which bounds how long a revoked key works. From half that age its next use
 * refreshes it in the background, so a key in use never waits for Redis. Unknown ids are cached for a second. At most
 * one lookup is in flight and ids that arrive meanwhile share the next one: guessing a million ids costs Redis a few
 * thousand commands. Both caches are bounded; the oldest are evicted.
 *
 * While Redis is down, a cached key works for `graceMs` since it was last seen; any other gets 503, as it may be valid.
 */
import { randomBytes } from "node:crypto";
import type { Clock } from "../../app/clock.ts";
import { Refusal } from "../../core/errors.ts";
import type { RedisNodes, RedisReply } from "../../engine/redis/client/nodes.ts";
import type { Events } from "../../observe/events.ts";
import { byAge, type KeyRecord, type KeyStore, readRecord, writeRecord } from "./api-keys.ts";

export interface KeyRedisOptions {
  readonly reloadMs: number;
  readonly graceMs: number;
  readonly waitMs: number;
  key(name: string): string;
}

interface Known {
  readonly text: string;
  readonly record: KeyRecord;
  readAt: number;
}

type Wanted = PromiseWithResolvers<KeyRecord | undefined>;

const SHARD = 0;
const SECRET_BYTES = 32;
const MAX_KNOWN = 20_000;
const MAX_UNKNOWN = 20_000;
const UNKNOWN_MS = 1000;
/** Unknown ids in one lookup, and so waiting for the next. */
const MAX_WANTED = 1000;

export class KeyRedis implements KeyStore {
  readonly #nodes: Pick<RedisNodes, "command" | "primaries">;
  readonly #options: KeyRedisOptions;
  readonly #clock: Clock;
  readonly #events: Events;
  readonly #known = new Map<string, Known>();
  /** Id → expiry of the negative cache entry. */
  readonly #unknown = new Map<string, number>();
  #wanted = new Map<string, Wanted>();
  #asked = new Map<string, Wanted>();
  #away = false;

  constructor(
    nodes: Pick<RedisNodes, "command" | "primaries">,
    options: KeyRedisOptions,
    clock: Clock,
    events: Events,
  ) {
    this.#nodes = nodes;
    this.#options = options;
    this.#clock = clock;
    this.#events = events;
  }

  get(id: string): KeyRecord | undefined | Promise<KeyRecord | undefined> {
    const now = this.#clock.now();
    const known = this.#known.get(id);
    if (known === undefined) {
      if ((this.#unknown.get(id) ?? 0) > now) return undefined;
      return this.#ask(id).catch(() => Promise.reject(away()));
    }
    const age = now - known.readAt;
    const { reloadMs, graceMs } = this.#options;
    if (age >= reloadMs) {
      return this.#ask(id).catch(() => (age < graceMs ? known.record : Promise.reject(away())));
    }
    // A failure matters only once the record has expired.
    if (age >= reloadMs / 2) this.#ask(id).catch(() => undefined);
    return known.record;
  }

  async list(): Promise<KeyRecord[]> {
    const reply = await this.#command("HGETALL", "keys");
    const texts = (reply as RedisReply[]).filter((_, at) => at % 2 === 1);
    return byAge(texts.map((text) => parse(String(text))).filter((record) => record !== undefined));
  }

  async add(record: KeyRecord): Promise<void> {
    const added = await this.#command("HSETNX", "keys", record.id, JSON.stringify(writeRecord(record)));
    if (Number(added) !== 1) throw new Error(`there is a key ${record.id} already; make another one`);
    await this.#confirm();
  }

  async revoke(id: string): Promise<boolean> {
    const revoked = Number(await this.#command("HDEL", "keys", id)) === 1;
    if (revoked) await this.#confirm();
    return revoked;
  }

  async secret(): Promise<string> {
    const known = await this.#command("GET", "keys:secret");
    if (known !== null) return String(known);
    await this.#command("SET", "keys:secret", randomBytes(SECRET_BYTES).toString("base64url"), "NX");
    await this.#confirm();
    // The first writer's secret counts for all.
    return String(await this.#command("GET", "keys:secret"));
  }

  close(): void {}

  /** One lookup at a time; callers with the same id share it. */
  #ask(id: string): Promise<KeyRecord | undefined> {
    const asked = this.#asked.get(id) ?? this.#wanted.get(id);
    if (asked !== undefined) return asked.promise;
    // Cached ids always get in: a flood of guesses must not keep a revoked key alive.
    if (this.#wanted.size >= MAX_WANTED && !this.#known.has(id)) return Promise.reject(away());
    const wanted: Wanted = Promise.withResolvers();
    this.#wanted.set(id, wanted);
    if (this.#asked.size === 0) void this.#askAll();
    return wanted.promise;
  }

  async #askAll(): Promise<void> {
    while (this.#wanted.size > 0) {
      this.#asked = this.#wanted;
      this.#wanted = new Map();
      const ids = [...this.#asked.keys()];
      try {
        const replies = (await this.#command("HMGET", "keys", ...ids)) as RedisReply[];
        const now = this.#clock.now();
        ids.forEach((id, at) => this.#asked.get(id)!.resolve(this.#learn(id, replies[at]!, now)));
        this.#tell(undefined);
      } catch (error) {
        this.#tell(error as Error);
        for (const wanted of this.#asked.values()) wanted.reject(error);
      }
    }
    this.#asked = new Map();
  }

  #learn(id: string, reply: RedisReply, now: number): KeyRecord | undefined {
    const text = reply === null ? "" : String(reply);
    const known = this.#known.get(id);
    if (known?.text === text) {
      known.readAt = now;
      return known.record;
    }
    this.#known.delete(id);
    const record = text === "" ? undefined : parse(text);
    if (record === undefined) {
      remember(this.#unknown, id, now + UNKNOWN_MS, MAX_UNKNOWN);
      return undefined;
    }
    this.#unknown.delete(id);
    remember(this.#known, id, { text, record, readAt: now }, MAX_KNOWN);
    return record;
  }

  /** Once when it starts, once when it ends. */
  #tell(why: Error | undefined): void {
    if (this.#away === (why !== undefined)) return;
    this.#away = why !== undefined;
    const message =
      why === undefined
        ? "API keys can be looked up again"
        : `API keys cannot be looked up: ${why.message}; known ones go on working for a while, others get 503`;
    this.#events.emit("notice", { level: why === undefined ? "info" : "warn", message });
  }

  #command(name: string, key: string, ...args: readonly (string | number)[]): Promise<RedisReply> {
    return this.#nodes.command(SHARD, [name, this.#options.key(key), ...args]);
  }

  /** Waits for a replica, if there is one: a failover must not restore a revoked key. */
  async #confirm(): Promise<void> {
    if (!this.#nodes.primaries().some(({ waits }) => waits)) return;
    const wait = this.#nodes.command(SHARD, ["WAIT", 1, this.#options.waitMs]);
    if (Number(await wait.catch(() => 0)) > 0) return;
    const message =
      "it is done, but no replica has it yet: a failover now would undo it; look with ferry keys list";
    this.#events.emit("notice", { level: "warn", message });
  }
}

function remember<Value>(map: Map<string, Value>, id: string, value: Value, max: number): void {
  map.delete(id);
  map.set(id, value);
  if (map.size > max) map.delete(map.keys().next().value!);
}

function parse(text: string): KeyRecord | undefined {
  try {
    return readRecord(JSON.parse(text));
  } catch {
    return undefined;
  }
}

function away(): Refusal {
  return new Refusal("SERVICE_OVERLOADED", "credentials cannot be checked now; send the request again", {
    retryAfterMs: 1000,
  });
}
