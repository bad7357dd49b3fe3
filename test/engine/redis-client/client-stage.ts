/** What the tests of the Redis connections share: a script that writes, and nodes that are closed at the end. */
import { createHash } from "node:crypto";
import { SystemClock } from "../../../src/app/clock.ts";
import { RedisNodes } from "../../../src/engine/redis/client/nodes.ts";
import type { NodesOptions, Script, ScriptCall } from "../../../src/engine/redis/client/nodes.ts";
import { Events } from "../../../src/observe/events.ts";
import type { EventFields } from "../../../src/observe/events.ts";

export const clock = new SystemClock();

/** For whatever must succeed: no machine is so slow. */
export const PATIENT_MS = 20_000;

/** One per sixteenth of the slots. */
export const tags = "f0h f11a f22a f38 f422 f53 f6c f712 f813 f910 fa1j fb23 fc3 fd2d fe9 ff0".split(" ");

export function scriptOf(name: string, source: string): Script {
  return { name, source, sha: createHash("sha1").update(source).digest("hex") };
}

/** Appends to a list and returns its length: what was done twice shows. */
const push = scriptOf("push", "return redis.call('RPUSH', KEYS[1], ARGV[1])");

export function pushTo(shard: number, value: string | number, list = "list"): ScriptCall {
  return { script: push, keys: [`{${tags[shard]}}:${list}`], args: [value] };
}

export class Stage implements AsyncDisposable {
  readonly nodes: RedisNodes;
  readonly events: Events;
  readonly notices: EventFields["notice"][] = [];

  private constructor(nodes: RedisNodes, events: Events) {
    this.nodes = nodes;
    this.events = events;
    events.on("notice", (notice) => this.notices.push(notice));
  }

  static async open(options: Partial<NodesOptions>, events = new Events()): Promise<Stage> {
    const limits = { connectTimeoutMs: PATIENT_MS, commandTimeoutMs: PATIENT_MS, waitTimeoutMs: PATIENT_MS };
    const nodes = await RedisNodes.open(
      { tags, ...limits, name: "test", durability: "auto", ...options },
      clock,
      events,
    );
    return new Stage(nodes, events);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.nodes.close();
  }
}

/** A subscription to one channel per shard, and what came of it. */
export class Ear {
  readonly heard: string[] = [];
  /** How often each shard was confirmed. */
  readonly confirmed = new Map<number, number>();
  stop = (): void => {};

  static async on(nodes: RedisNodes): Promise<Ear> {
    const ear = new Ear();
    ear.stop = await nodes.subscribe(
      channelOf,
      (shard, payload) => void ear.heard.push(`${shard} ${String(payload)}`),
      (shards) => {
        for (const shard of shards) ear.confirmed.set(shard, (ear.confirmed.get(shard) ?? 0) + 1);
      },
    );
    return ear;
  }
}

export const channelOf = (shard: number): string => `{${tags[shard]}}:news`;
