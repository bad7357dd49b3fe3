/** Dead letters in Redis: kept in the shard of their task, with its input. */
import { noRoomToReplay } from "../memory/dead-letters.ts";
import type { DeadLetter, Engine, Sharing } from "../engine.ts";
import type { Depths } from "./depths.ts";
import { bodyFrame, bundleFrame, entryFrame, readLetter } from "./frames.ts";
import { fieldOf, GRACE_MS } from "./keys.ts";
import type { Outcomes } from "./outcomes.ts";
import type { RedisParts } from "./parts.ts";
import { scripts } from "./scripts.ts";

type DeadLetterVerbs = Engine["deadLetters"];

const SWEEP_TOGETHER = 100; // letters removed per sweep and shard

export class RedisLetters implements DeadLetterVerbs {
  readonly #parts: RedisParts;
  readonly #depths: Depths;
  readonly #outcomes: Outcomes;
  #replays = 0;
  count = 0; // at the last count

  constructor(parts: RedisParts, depths: Depths, outcomes: Outcomes) {
    this.#parts = parts;
    this.#depths = depths;
    this.#outcomes = outcomes;
  }

  /** Oldest first. */
  async list(): Promise<readonly DeadLetter[]> {
    const { nodes, keys, shared } = this.#parts;
    const lists = await Promise.all(
      keys.tags.map(async (_, shard) => {
        const command = ["HGETALL", this.#parts.key(shard, "d")];
        const found = (await this.#parts.asked(shard, () => nodes.command(shard, command))) as Buffer[];
        const letters: DeadLetter[] = [];
        for (let at = 0; at < found.length; at += 2)
          letters.push(readLetter(found[at]!.toString(), found[at + 1]!, shared).letter);
        return letters;
      }),
    );
    return lists
      .flat()
      .filter((letter) => this.#lives(letter))
      .sort((one, other) => one.diedAt - other.diedAt);
  }

  #lives({ diedAt }: DeadLetter): boolean {
    return this.#parts.clock.now() < diedAt + this.#parts.limits.deadLetters.ttlMs;
  }

  async get(id: string): Promise<DeadLetter | undefined> {
    return (await this.#find(id))?.letter;
  }

  async #find(id: string): Promise<{ letter: DeadLetter; sharing: Sharing } | undefined> {
    const { nodes, keys, shared } = this.#parts;
    const shard = keys.shardOf(id);
    const command = ["HGET", this.#parts.key(shard, "d"), id];
    const found = await this.#parts.asked(shard, () => nodes.command(shard, command));
    if (found === null) return undefined;
    const letter = readLetter(id, found as Buffer, shared);
    return this.#lives(letter.letter) ? letter : undefined;
  }

  async replay(id: string): Promise<boolean> {
    const { clock, shared, name, keys, options, nodes } = this.#parts;
    const found = await this.#find(id);
    const limits = found && this.#parts.limits.models.get(found.letter.task.model);
    if (found === undefined || limits === undefined) return false;
    const now = clock.now();
    const task = { ...found.letter.task, createdAt: now, deadlineAt: now + limits.totalMs };
    const full = this.#depths.full(task);
    if (full !== undefined) throw noRoomToReplay(full.message);
    const tasks = [{ id, body: bodyFrame(task, found.sharing, shared) }];
    const [shard, field] = [keys.shardOf(id), fieldOf(id)];
    const counts = [...this.#depths.of([task])];
    const [queue, bytes] = counts as [[string, number], [string, number]];
    const keepMs = Math.ceil(
      limits.totalMs + Math.max(this.#parts.limits.results.ttlMs, found.sharing.cacheTtlMs ?? 0) + GRACE_MS,
    );
    const named = ["d", "dz"].map((each) => this.#parts.key(shard, each));
    const places = [keys.bundle(id), ...named, keys.stream(shard, task.model, options.zone)];
    const args = [
      id,
      field,
      bundleFrame(tasks),
      entryFrame(name, "check", tasks),
      keepMs,
      `${name} ${++this.#replays}`,
    ];
    // Listen first: its end may be announced before this reply is read.
    const awaited = this.#outcomes.expect(id, task.deadlineAt);
    const call = this.#parts.call(shard, scripts.replay, places, args);
    const reply = await this.#parts.asked(shard, () => nodes.runDurably(shard, call, options.putWithinMs));
    if (reply !== 1) {
      this.#outcomes.unexpect(id);
      return false;
    }
    this.#outcomes.accepted(awaited, task, found.sharing.joinKey);
    void this.#depths.add(new Map([queue, bytes]));
    return true;
  }

  async purge(id: string): Promise<boolean> {
    const { nodes, keys } = this.#parts;
    const shard = keys.shardOf(id);
    const commands = [
      ["HDEL", this.#parts.key(shard, "d"), id],
      ["ZREM", this.#parts.key(shard, "dz"), id],
    ];
    const [gone] = await this.#parts.asked(shard, () => nodes.pipeline(shard, commands));
    return gone === 1;
  }

  async sweep(): Promise<void> {
    const { nodes, keys, clock, shared } = this.#parts;
    const before = shared.shared(clock.now() - this.#parts.limits.deadLetters.ttlMs);
    const counts = await Promise.all(
      keys.tags.map(async (_, shard) => {
        const [letters, times] = [this.#parts.key(shard, "d"), this.#parts.key(shard, "dz")];
        const [count, old] = await nodes.pipeline(shard, [
          ["ZCARD", times],
          ["ZRANGE", times, "-inf", before, "BYSCORE", "LIMIT", 0, SWEEP_TOGETHER],
        ]);
        const ids = Array.isArray(old) ? old.map(String) : [];
        if (ids.length > 0) {
          await nodes.pipeline(shard, [
            ["HDEL", letters, ...ids],
            ["ZREM", times, ...ids],
          ]);
        }
        return Number(count) - ids.length;
      }),
    );
    this.count = counts.reduce((sum, count) => sum + count, 0);
  }
}
