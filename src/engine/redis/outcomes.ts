/**
 * How the end of a task reaches the process that waits for it.
 *
 * Which tasks this process waits for is noted here before they are put. The batcher that ends them sends one message per
 * gateway and batch. Messages are hints: after a gap, after a reconnect, and once a second for what has waited longer
 * than that, the outcomes are looked up. An end is told once, however often it is heard of.
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
  /** It is on its way in from here. */
  putting: Promise<unknown> | undefined;
  /** Set where this process put it. */
  task: Task | undefined;
  joinKey: string;
  /** Nobody waits any longer after this. */
  until: number;
  /** Redis has said that it has the task; before that it need not know it. */
  accepted: boolean;
  /** Callers in this process beside the first. */
  joins: number;
  /** How often in a row it was found nowhere, and when last. */
  missing: number;
  missedAt: number;
}

/** Once may be a moment between two answers, or between two servers. */
const LOST_AFTER_LOOKS = 3;
/** A caller hears of a deadline from its own clock; the record may say so a little later. */
const PATIENCE_MS = 5000;
const LOOK_UP_TOGETHER = 500;

export class Outcomes {
  readonly #parts: RedisParts;
  readonly #records: RedisRecords;
  /** Of tables whose keys callers choose. */
  readonly seed: number;
  /** Bounded by the tasks that this process put and the results that it long-polls. */
  readonly #awaited: Table<Awaited>;
  /** Tasks in flight that this process put, by join key. */
  readonly #joinable: Table<Awaited>;
  /** A task that this process put has ended, or is not waited for any longer. */
  onLeft: (task: Task) => void = () => {};
  /** Past its deadline, and no batcher has read it. */
  onExpired: (task: Task) => void = () => {};

  constructor(parts: RedisParts, records: RedisRecords, messages: Messages) {
    this.#parts = parts;
    this.#records = records;
    // Ids that are long-polled are chosen by callers; our name is random.
    this.seed = hashOf(parts.name, 0);
    this.#awaited = new Table(this.seed);
    this.#joinable = new Table(this.seed);
    messages.on("outcomes", (fields) => {
      for (let at = 0; at + 1 < fields.length; at += 2)
        this.heard(fields[at]!.toString("latin1"), fields[at + 1]!);
    });
    messages.onGap = () => void this.#lookUp(this.#awaited.values().map(({ id }) => id));
  }

  /** Looks up once in a while what no message has told. */
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

  /** Listen for the end of `id`, which may not be there yet. */
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

  /** This process has put it: identical tasks may join it here. */
  accepted(awaited: Awaited, task: Task, joinKey: string | undefined): void {
    awaited.accepted = true;
    awaited.putting = undefined;
    // Without its input: what waits for long is copied by the collector again and again.
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

  /** The end of a task, from whichever side it was heard. */
  ended(record: RecordView): void {
    if (!this.unexpect(record.task.id)) return;
    for (const listener of this.#parts.listeners) listener.settled?.(record);
  }

  /** The same, before it is unpacked: only what is waited for here is. */
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
      // A shard that is away is looked at in the next round.
      const replies = await nodes.scatter(commands);
      replies.forEach((reply, which) => {
        if (!Array.isArray(reply)) return;
        const [meta, ...found] = reply as (Buffer | null)[];
        bundles[which]![1].forEach((id, at) => {
          const [outcome, late, deleted] = found.slice(3 * at, 3 * at + 3);
          // Its owner has deleted it before it was heard of here: there is nothing to tell any more.
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
    // Looks that are on their way together, one for each gap, fall into the same moment.
    if (now - awaited.missedAt < this.#parts.options.sweepMs / 2) return;
    awaited.missedAt = now;
    if (++awaited.missing !== LOST_AFTER_LOOKS) return;
    const why = "accepted, but Redis knows neither the task nor its outcome";
    this.#parts.events.emit("task.lost", { id, model: "", why });
  }
}
