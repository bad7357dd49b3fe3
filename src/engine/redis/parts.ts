/** Shared by the parts of the Redis engine. */
import type { Alarm, Clock } from "../../app/clock.ts";
import { Refusal } from "../../core/errors.ts";
import {
  type Arg,
  RedisError,
  type RedisNodes,
  type RedisReply,
  type Script,
  StoreAway,
} from "./client/nodes.ts";
import type { Events } from "../../observe/events.ts";
import type { EngineLimits, EngineListener } from "../engine.ts";
import type { RedisClock } from "./frames.ts";
import type { RedisKeys } from "./keys.ts";
import { NEVER_WRITTEN } from "./scripts.ts";

export interface RedisOptions {
  readonly zone: string;
  readonly zoneSpillMs: number;
  /** A batcher that does not renew its lease for this long loses it; renewed each third. */
  readonly leaseMs: number;
  readonly sweepMs: number;
  /** At most one bundle of a model leaves per tick. */
  readonly tickMs: number;
  /** How long a put may take before its caller is told to retry. */
  readonly putWithinMs: number;
}

export type RedisStore = Pick<
  RedisNodes,
  | "activeShards"
  | "block"
  | "clockOffset"
  | "command"
  | "pipeline"
  | "run"
  | "runDurably"
  | "scatter"
  | "subscribe"
  | "transact"
  | "up"
>;

export interface RedisBase {
  readonly nodes: RedisStore;
  readonly keys: RedisKeys;
  readonly clock: Clock;
  readonly shared: RedisClock;
  readonly events: Events;
  /** Unique to this start of the process. */
  readonly name: string;
}

export class RedisParts implements RedisBase {
  readonly nodes: RedisStore;
  readonly keys: RedisKeys;
  readonly clock: Clock;
  readonly shared: RedisClock;
  readonly events: Events;
  readonly name: string;
  readonly #limits: () => EngineLimits;
  readonly options: RedisOptions;
  readonly listeners = new Set<EngineListener>();

  constructor(
    { nodes, keys, clock, shared, events, name }: RedisBase,
    limits: () => EngineLimits,
    options: RedisOptions,
  ) {
    this.#limits = limits;
    this.nodes = nodes;
    this.keys = keys;
    this.clock = clock;
    this.shared = shared;
    this.events = events;
    this.name = name;
    this.options = options;
  }

  /** Bounds apply to the whole store. `results.maxBytes` is Redis's maxmemory. */
  get limits(): EngineLimits {
    return this.#limits();
  }

  key(shard: number, name: string): string {
    return this.keys.bases[shard]! + name;
  }

  call(shard: number, script: Script, keys: readonly string[], args: readonly Arg[]) {
    return { script, keys: [...keys, this.key(shard, NEVER_WRITTEN)], args };
  }

  run(shard: number, script: Script, keys: readonly string[], args: readonly Arg[]): Promise<RedisReply> {
    return this.nodes.run(shard, this.call(shard, script, keys, args), { resend: true });
  }

  /** For a waiting caller: fails at once if the server is known to be away. */
  async asked<Value>(shard: number, ask: () => Promise<Value>): Promise<Value> {
    try {
      this.reach(shard);
      return await ask();
    } catch (error) {
      throw overloaded(error, ASK_AGAIN, ASK_AGAIN);
    }
  }

  /** Repeats `work`, each time `ms` after it ended; returns a function that stops it. */
  repeat(ms: number, work: () => Promise<unknown>): () => void {
    let alarm: Alarm | undefined;
    let stopped = ms === Infinity;
    const again = (): void => {
      if (!stopped) alarm = this.clock.at(this.clock.now() + ms, () => void work().then(again, again));
    };
    again();
    return () => {
      stopped = true;
      alarm?.cancel();
    };
  }

  pause(ms: number): Promise<void> {
    return new Promise((resolve) => this.clock.at(this.clock.now() + ms, () => resolve()));
  }

  reach(shard: number): void {
    if (!this.nodes.up(shard)) throw new StoreAway("the server of this shard is away", false);
  }
}

const RETRY_AFTER_MS = 1000;
const ASK_AGAIN = "ask again";

export function overloaded(error: unknown, ifUnknown: string, otherwise: string): Refusal {
  if (error instanceof Refusal) return error;
  // Server addresses are for the log, not for callers.
  const why = (error instanceof Error ? error.message : String(error)).replaceAll(/\bredis \S+/g, "Redis");
  const known = error instanceof StoreAway || error instanceof RedisError;
  const message = known ? `the task store cannot be used now (${why})` : `the task store failed (${why})`;
  const advice = nothingHappened(error) ? otherwise : ifUnknown;
  return new Refusal("SERVICE_OVERLOADED", `${message}; ${advice}`, { retryAfterMs: RETRY_AFTER_MS });
}

/** The server itself refused, or was not reached. */
export function nothingHappened(error: unknown): boolean {
  return error instanceof RedisError || (error instanceof StoreAway && !error.unknown);
}
