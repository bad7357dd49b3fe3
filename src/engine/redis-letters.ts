/** Dead letters in Redis: kept in the shard of their task, with its input. */
import { noRoomToReplay } from "./dead-letters.ts";
import type { DeadLetter, Engine } from "./engine.ts";
import { metaFrame, readLetter } from "./redis-frames.ts";
import { INDEX_GRACE_MS, indexName, streamFamily } from "./redis-keys.ts";
import type { RedisParts } from "./redis-parts.ts";
import { scripts } from "./redis-scripts.ts";

type DeadLetterVerbs = Engine["deadLetters"];

export class RedisLetters implements DeadLetterVerbs {
  readonly #parts: RedisParts;

  constructor(parts: RedisParts) {
    this.#parts = parts;
  }

  /** The oldest first. */
  async list(): Promise<readonly DeadLetter[]> {
    const { nodes, keys, shards } = this.#parts;
    const lists = await Promise.all(
      Array.from({ length: shards }, async (_, shard) => {
        const command = ["HGETALL", `${keys.bases[shard]!}d`];
        const found = (await this.#parts.asked(shard, () => nodes.command(shard, command))) as Buffer[];
        const letters: DeadLetter[] = [];
        for (let at = 0; at < found.length; at += 2)
          letters.push(this.#read(found[at]!.toString(), found[at + 1]!).letter);
        return letters;
      }),
    );
    const now = this.#parts.clock.now();
    return lists
      .flat()
      .filter(({ diedAt }) => now < diedAt + this.#parts.options.deadLetters.ttlMs)
      .sort((one, other) => one.diedAt - other.diedAt);
  }

  async get(id: string): Promise<DeadLetter | undefined> {
    return (await this.#find(id))?.letter;
  }

  async #find(id: string): Promise<ReturnType<typeof readLetter> | undefined> {
    const { nodes, keys } = this.#parts;
    const shard = this.#parts.shardOf(id);
    const command = ["HGET", `${keys.bases[shard]!}d`, id];
    const found = await this.#parts.asked(shard, () => nodes.command(shard, command));
    if (found === null) return undefined;
    const letter = this.#read(id, found as Buffer);
    const expired = this.#parts.clock.now() >= letter.letter.diedAt + this.#parts.options.deadLetters.ttlMs;
    return expired ? undefined : letter;
  }

  async replay(id: string): Promise<boolean> {
    const found = await this.#find(id);
    const limits = found && this.#parts.options.models.get(found.letter.task.model);
    if (found === undefined || limits === undefined) return false;
    const { nodes, clock, shared, name, news, options, mirror, shards } = this.#parts;
    const now = clock.now();
    const task = { ...found.letter.task, createdAt: now, deadlineAt: now + limits.totalMs };
    const { tenant, model, parameters, input, tier, deadlineAt } = task;
    const family = streamFamily(model, parameters, options.zone);
    const { joinKey, cacheKey, cacheTtlMs } = found.meta;
    const meta = metaFrame(task, { joinKey, ...(cacheKey !== "" && { cacheKey, cacheTtlMs }) }, shared);
    const times = [shared.shared(deadlineAt), limits.queueMs] as const;
    const call = this.#parts.call(
      scripts.replay,
      name,
      id,
      tenant,
      family,
      tier,
      ...times,
      meta,
      input,
      parameters,
      indexName(joinKey),
      limits.totalMs + cacheTtlMs + INDEX_GRACE_MS,
      Math.ceil(options.maxQueued / shards),
      Math.ceil(options.maxQueuedBytes / shards),
    );
    const shard = this.#parts.shardOf(id);
    call.place(shard);
    call.names(shard, `${family}${tier}:n`, `r:${id}`);
    // Listening first: its end may be told before the reply to this is read.
    news.expect(id, deadlineAt);
    const [said, report] = (await this.#parts.asked(shard, () => nodes.run(shard, call.build()))) as Buffer[];
    const reply = said!.toString("latin1");
    if (reply === "n") throw noRoomToReplay(`the queue is full (limits.maxQueued ${options.maxQueued})`);
    if (reply === "b") {
      throw noRoomToReplay(`the queue is full (limits.maxQueuedBytes ${options.maxQueuedBytes})`);
    }
    if (reply === "0") return false;
    mirror.told(report!.toString());
    this.#parts.fallsDue(Math.min(deadlineAt, now + limits.queueMs));
    return true;
  }

  async purge(id: string): Promise<boolean> {
    const shard = this.#parts.shardOf(id);
    const call = this.#parts.call(scripts.purge, id);
    call.place(shard);
    return (await this.#parts.asked(shard, () => this.#parts.nodes.run(shard, call.build()))) === 1;
  }

  #read(id: string, bytes: Buffer): ReturnType<typeof readLetter> {
    return readLetter(id, bytes, this.#parts.shared);
  }
}
