/**
 * How the end of a task reaches the process that waits for it. Awaited tasks are registered here before they are put;
 * the batcher that ends them sends one message per gateway and batch. Messages are hints: outcomes are looked up after
 * a gap, after a reconnect, and once a second for what has waited longer than that. An end is reported once, however
 * often it is heard.
 */
import { hashOf, Table } from "../../core/table.ts";
import type { Task } from "../../core/task.ts";
import type { RecordView } from "../engine.ts";
import { fieldOf } from "./keys.ts";
import type { Messages } from "./messages.ts";
import type { RedisParts } from "./parts.ts";
import type { RedisRecords } from "./records.ts";

export interface Awaited {
  readonly id: string;
  readonly since: number;
  /** Its put is under way here. */
  putting: Promise<unknown> | undefined;
  /** Set if this process put it. */
  task: Task | undefined;
  joinKey: string;
  until: number;
  /** Redis confirmed the task; before that it may be missing there. */
  accepted: boolean;
  /** Callers in this process besides the first. */
  joins: number;
  /** How often in a row it was found nowhere, and when last. */
  missing: number;
  missedAt: number;
}

const LOST_AFTER_LOOKS = 3; // a single miss may be a moment between two replies or two servers
const PATIENCE_MS = 5000; // a caller learns of a deadline from its own clock; the record may follow a little later
const LOOK_UP_TOGETHER = 500;

export class Outcomes {
  readonly #parts: RedisParts;
  readonly #records: RedisRecords;
  readonly seed: number; // for tables whose keys callers choose
  readonly #awaited: Table<Awaited>; // bounded by the tasks that this process put and the results that it long-polls
  readonly #joinable: Table<Awaited>; // tasks in flight that this process put, by join key
  onLeft: (task: Task) => void = () => {}; // a task that this process put has ended or is no longer awaited
  onExpired: (task: Task) => void = () => {}; // past its deadline, and no batcher has read it

  constructor(parts: RedisParts, records: RedisRecords, messages: Messages) {
    this.#parts = parts;
    this.#records = records;
    // Callers choose the ids that they long-poll; our name is random.
    this.seed = hashOf(parts.name, 0);
    this.#awaited = new Table(this.seed);
    this.#joinable = new Table(this.seed);
    messages.on("outcomes", (fields) => {
      for (let at = 0; at + 1 < fields.length; at += 2)
        this.heard(fields[at]!.toString("latin1"), fields[at + 1]!);
    });
    messages.onGap = () => void this.#lookUp(this.#awaited.values().map(({ id }) => id));
  }

  /** Polls for what no message has reported. */
  open(): void {
    this.close = this.#parts.repeat(this.#parts.options.sweepMs, () => this.sweep());
  }

  close = (): void => {};

  get(id: string): Awaited | undefined {
    return this.#awaited.get(id);
  }

  joinable(joinKey: string): Awaited | undefined {
    return this.#joinable.get(joinKey);
  }

  /** Listens for the end of `id`, which may not exist yet. */
  expect(id: string, until: number): Awaited {
    let awaited = this.#awaited.get(id);
    if (awaited !== undefined) {
      awaited.until = Math.max(awaited.until, until + PATIENCE_MS);
      return awaited;
    }
    awaited = {
      id,
      since: this.#parts.clock.now(),
      putting: undefined,
      task: undefined,
      joinKey: "",
      until: until + PATIENCE_MS,
      accepted: false,
      joins: 0,
      missing: 0,
      missedAt: -Infinity,
    };
    this.#awaited.set(id, awaited);
    return awaited;
  }

  /** This process put it: identical tasks may join it here. */
  accepted(awaited: Awaited, task: Task, joinKey: string | undefined): void {
    awaited.accepted = true;
    awaited.putting = undefined;
    // Without its input: the garbage collector copies what waits for long again and again.
    awaited.task = { ...task, input: "", content: "" };
    if (joinKey === undefined) return;
    awaited.joinKey = joinKey;
    this.#joinable.set(joinKey, awaited);
  }

  unexpect(id: string): boolean {
    const awaited = this.#awaited.get(id);
    if (awaited === undefined) return false;
    this.#awaited.delete(id);
    const { joinKey } = awaited;
    if (joinKey !== "" && this.#joinable.get(joinKey) === awaited) this.#joinable.delete(joinKey);
    if (awaited.task !== undefined) this.onLeft(awaited.task);
    return true;
  }

  ended(record: RecordView): void {
    if (!this.unexpect(record.task.id)) return;
    for (const listener of this.#parts.listeners) listener.settled?.(record);
  }

  /** The same, before decoding: only awaited ones are decoded. */
  heard(id: string, outcome: Buffer): void {
    if (this.#awaited.get(id) !== undefined) this.ended(this.#records.read(id, outcome));
  }

  async sweep(): Promise<void> {
    const now = this.#parts.clock.now();
    const old: string[] = [];
    for (const { id, since, until, task } of this.#awaited.values()) {
      if (until <= now) {
        if (task !== undefined) this.onExpired(task);
        this.unexpect(id);
      } else if (since + this.#parts.options.sweepMs <= now) old.push(id);
    }
    await this.#lookUp(old);
  }

  async #lookUp(ids: readonly string[]): Promise<void> {
    const { nodes, keys } = this.#parts;
    for (let from = 0; from < ids.length; from += LOOK_UP_TOGETHER) {
      const bundles = [...Map.groupBy(ids.slice(from, from + LOOK_UP_TOGETHER), (id) => keys.bundle(id))];
      const commands = bundles.map(([bundle, some]) => ({
        shard: keys.shardOf(some[0]!),
        command: [
          "HMGET",
          bundle,
          "m",
          ...some.flatMap((id) => [fieldOf(id), `m${fieldOf(id)}`, `g${fieldOf(id)}`]),
        ],
      }));
      // A shard that is away is polled in the next round.
      const replies = await nodes.scatter(commands);
      replies.forEach((reply, which) => {
        if (!Array.isArray(reply)) return;
        const [meta, ...found] = reply as (Buffer | null)[];
        bundles[which]![1].forEach((id, at) => {
          const [outcome, late, deleted] = found.slice(3 * at, 3 * at + 3);
          // Its owner deleted it before it was heard of here: nothing to report.
          if (deleted) this.unexpect(id);
          else if (outcome) this.heard(id, outcome);
          else this.#looked(id, (meta ?? late) !== null);
        });
      });
    }
  }

  #looked(id: string, alive: boolean): void {
    const awaited = this.#awaited.get(id);
    if (awaited === undefined || !awaited.accepted) return;
    if (alive) {
      awaited.missing = 0;
      return;
    }
    const now = this.#parts.clock.now();
    // Concurrent lookups, one per gap, count as one.
    if (now - awaited.missedAt < this.#parts.options.sweepMs / 2) return;
    awaited.missedAt = now;
    if (++awaited.missing !== LOST_AFTER_LOOKS) return;
    const why = "accepted, but Redis knows neither the task nor its outcome";
    this.#parts.events.emit("task.lost", { id, model: "", why });
  }
}
