/**
 * How many tasks wait in the fleet, as last heard: from the replies to our own puts and claims, which carry the new
 * counts, and once a second from the counts themselves. The counts are one hash, changed by differences: a put adds,
 * the batcher whose pool a task leaves subtracts. So each pool remembers what it reported and sends the difference with
 * its next commands. What a crash left behind is cleared when nothing is left in any stream (`heal`).
 */
import type { Task } from "../../core/task.ts";
import type { Arg, RedisReply } from "./client/nodes.ts";
import type { PutReply } from "../engine.ts";
import type { MemoryEngine } from "../memory/engine.ts";
import type { RedisParts } from "./parts.ts";

/** Shard of the hash. */
export const DEPTH_SHARD = 0;
const LATER = "later"; // waiting for a retry, of any model
const BYTES = "bytes";
const RUNNING = "running";

const NEAR = 1 / 8; // from this share of a bound on, tasks are counted before they are put

type Full = PutReply & { readonly kind: "full" };

/** Differences by field. */
export type QueueCounts = Map<string, number>;

export class Depths {
  readonly #parts: RedisParts;
  readonly #key: string;
  #known: QueueCounts = new Map(); // last values from Redis
  readonly #entering: QueueCounts = new Map(); // on their way in
  readonly #told: QueueCounts = new Map(); // reported by this process's pool
  #suspicious = "";
  /** Fields of each requested model; the engine asks only for those it knows. */
  readonly #fields = new Map<string, readonly string[]>();

  constructor(parts: RedisParts) {
    this.#parts = parts;
    this.#key = parts.key(DEPTH_SHARD, "depth");
  }

  get queued(): number {
    return Math.max(0, sumOf(this.#entering) + sumOf(this.#known));
  }

  get running(): number {
    return this.#count(RUNNING);
  }

  /** By tier. Called for every request. */
  waiting(model: string): number[] {
    let fields = this.#fields.get(model);
    if (fields === undefined) {
      fields = Array.from({ length: this.#parts.limits.tiers }, (_, tier) => fieldOf(model, tier));
      this.#fields.set(model, fields);
    }
    return fields.map((field) => this.#count(field));
  }

  #count(field: string): number {
    return Math.max(0, (this.#known.get(field) ?? 0) + (this.#entering.get(field) ?? 0));
  }

  /** The bound that leaves no room for this task. */
  full(task: Task): Full | undefined {
    return this.#refusal(task, this.queued + 1, this.#count(BYTES) + weight(task));
  }

  /** Why this much may not wait; `task` is the last of it. */
  #refusal(task: Task, queued: number, bytes: number): Full | undefined {
    const { maxQueued, maxQueuedBytes } = this.#parts.limits;
    if (queued <= maxQueued && bytes <= maxQueuedBytes) return undefined;
    const setting =
      queued > maxQueued ? `limits.maxQueued ${maxQueued}` : `limits.maxQueuedBytes ${maxQueuedBytes}`;
    const never = weight(task) > maxQueuedBytes;
    return { kind: "full", message: `the queue is full (${setting})`, never };
  }

  /** Whether gateways that put at the same time could pass a bound. */
  near(): boolean {
    const { maxQueued, maxQueuedBytes } = this.#parts.limits;
    return this.queued > NEAR * maxQueued || this.#count(BYTES) > NEAR * maxQueuedBytes;
  }

  /** Counts tasks before they are put; resolves with the refusals of the last ones, for which there is no room. */
  async reserve(tasks: readonly Task[]): Promise<Full[]> {
    await this.add(this.of(tasks));
    let queued = sumOf(this.#known);
    let bytes = this.#known.get(BYTES) ?? 0;
    const refused: Task[] = [];
    const refusals: Full[] = [];
    for (const task of tasks.toReversed()) {
      const refusal = this.#refusal(task, queued, bytes);
      if (refusal === undefined) break;
      refusals.push(refusal);
      refused.push(task);
      queued--;
      bytes -= weight(task);
    }
    if (refused.length > 0) await this.unreserve(refused);
    return refusals;
  }

  /** They were counted, and did not get in. */
  async unreserve(tasks: readonly Task[]): Promise<void> {
    const counts = this.of(tasks);
    for (const [field, count] of counts) counts.set(field, -count);
    await this.add(counts);
  }

  /** A task is on its way in (`count` 1), or no longer (-1). */
  enters(task: Task, count: 1 | -1): void {
    add(this.#entering, fieldOf(task.model, this.#tier(task)), count);
    add(this.#entering, BYTES, count * weight(task));
  }

  /** What tasks count for while they wait. */
  of(tasks: readonly Task[]): QueueCounts {
    const counts: QueueCounts = new Map();
    for (const task of tasks) {
      add(counts, fieldOf(task.model, this.#tier(task)), 1);
      add(counts, BYTES, weight(task));
    }
    return counts;
  }

  #tier({ tier }: Task): number {
    return Math.min(tier, this.#parts.limits.tiers - 1);
  }

  commands(counts: QueueCounts): Arg[][] {
    return Array.from(counts, ([field, count]) => ["HINCRBY", this.#key, field, count]);
  }

  /** Applies the replies to these commands, in order. */
  heard(counts: QueueCounts, replies: readonly unknown[]): void {
    let at = 0;
    for (const field of counts.keys()) {
      const reply = replies[at++];
      if (typeof reply === "number") this.#known.set(field, reply);
    }
  }

  async add(counts: QueueCounts): Promise<void> {
    const replies = await this.#parts.nodes.pipeline(DEPTH_SHARD, this.commands(counts)).catch(() => []);
    this.heard(counts, replies);
  }

  /** Counted tasks came into this process's pool (1), or left it for another (-1). */
  moved(counts: QueueCounts, sign: 1 | -1): void {
    for (const [field, count] of counts) add(this.#told, field, sign * count);
  }

  /** Tasks that ran when their batcher died: they were counted as running, and wait now. */
  ran(count: number): void {
    add(this.#told, RUNNING, count);
  }

  /** The pool's counts minus what was reported; from here on they count as reported. */
  report(pool: MemoryEngine): QueueCounts {
    const { waiting, bytes, running } = pool.load;
    const now: QueueCounts = new Map([
      [BYTES, bytes],
      [RUNNING, running],
    ]);
    let queued = 0;
    for (const [model, depths] of pool.stats().depth) {
      for (let tier = 0; tier < depths.length; tier++) {
        queued += depths[tier]!;
        now.set(fieldOf(model, tier), depths[tier]!);
      }
    }
    now.set(LATER, waiting - queued);
    const differences: QueueCounts = new Map();
    for (const [field, count] of now) add(differences, field, count - (this.#told.get(field) ?? 0));
    for (const [field, count] of this.#told) if (!now.has(field)) add(differences, field, -count);
    for (const [field, difference] of differences) {
      add(this.#told, field, difference);
      add(this.#known, field, difference);
    }
    return differences;
  }

  /** A report did not arrive: it goes with the next one. */
  untold(differences: QueueCounts): void {
    this.moved(differences, -1);
  }

  async refresh(): Promise<void> {
    const reply = (await this.#parts.nodes.command(DEPTH_SHARD, ["HGETALL", this.#key])) as RedisReply[];
    const known: QueueCounts = new Map();
    for (let at = 0; at + 1 < reply.length; at += 2) known.set(String(reply[at]), Number(reply[at + 1]));
    this.#known = known;
  }

  /** Nothing is left in any stream: non-zero counts, unchanged since the last time, were left by a crash. */
  async heal(): Promise<void> {
    await this.refresh();
    const found = [...this.#known].filter(([, count]) => count !== 0);
    const text = JSON.stringify(found);
    if (found.length > 0 && text === this.#suspicious) {
      await this.#parts.nodes.command(DEPTH_SHARD, ["DEL", this.#key]);
      this.#known.clear();
      this.#told.clear();
    }
    this.#suspicious = text;
  }

  /** Something is left: the counts may be right. */
  unsuspicious(): void {
    this.#suspicious = "";
  }
}

function sumOf(counts: QueueCounts): number {
  let sum = 0;
  for (const [field, count] of counts) if (field !== BYTES && field !== RUNNING) sum += count;
  return sum;
}

function fieldOf(model: string, tier: number): string {
  return `${tier}:${model}`;
}

function weight({ input, parameters }: Task): number {
  return input.length + parameters.length;
}

function add(counts: QueueCounts, field: string, count: number): void {
  const sum = (counts.get(field) ?? 0) + count;
  if (sum === 0) counts.delete(field);
  else counts.set(field, sum);
}
