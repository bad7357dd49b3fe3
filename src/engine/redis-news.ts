/**
 * How the end of a task reaches the process that waits for it.
 *
 * Whoever waits is written down here before the task is put, and in the task's state by the same script that
 * takes it in. Whoever ends it sends one note per process with all the outcomes of the batch. Notes are hints: each
 * is numbered, and after a gap, after a reconnect, and once a second for whoever has waited longer than that, the
 * outcomes are looked up. An end is told once, however often it is heard of.
 */
import type { Alarm } from "../clock.ts";
import { hashOf, Table } from "../core/table.ts";
import type { RecordView } from "./engine.ts";
import type { Holder } from "./redis-crowds.ts";
import { frame, frameOf, OutcomeReader, parts as partsOf } from "./redis-frames.ts";
import type { RedisReply } from "../redis/nodes.ts";
import type { RedisParts } from "./redis-parts.ts";

interface Awaited {
  readonly id: string;
  readonly since: number;
  /** Nobody waits any longer after this. */
  until: number;
  /** Redis has said that it has the task; before that it need not know it. */
  accepted: boolean;
  /** How often in a row it was found nowhere, and when last. */
  missing: number;
  missedAt: number;
  /** Its tenant has it in flight, until its end is heard here or nobody waits any longer. */
  held?: Holder;
}

/** Ids in one MGET. */
const LOOK_UP_TOGETHER = 500;
/** Once may be a moment between two answers, or between two servers. */
const LOST_AFTER_LOOKS = 3;
const MAX_SENDERS = 10_000;
/** A caller hears of a deadline from its own clock; the record may say so a little later. */
const PATIENCE_MS = 5000;

export class RedisNews {
  readonly #parts: RedisParts;
  readonly #sweepMs: number;
  readonly #tell: (record: RecordView) => void;
  readonly #reader: OutcomeReader;
  /** Bounded by the tasks that this process put and the results that it long-polls. */
  readonly #awaited: Table<Awaited>;
  /** The number of the last note heard, by sender and shard, and of the last one sent, by receiver and shard. */
  readonly #last = new Map<string, number>();
  readonly #sent = new Map<string, number>();
  #alarm: Alarm | undefined;
  #closed = false;
  #unsubscribe: () => void = () => {};

  constructor(parts: RedisParts, tell: (record: RecordView) => void) {
    this.#parts = parts;
    // Whoever long-polls chooses ids; our name is chance.
    this.#awaited = new Table(hashOf(parts.name, 0));
    this.#sweepMs = parts.options.sweepMs;
    this.#tell = tell;
    this.#reader = new OutcomeReader(parts.shared);
  }

  async open(): Promise<void> {
    const { nodes, keys, name } = this.#parts;
    this.#unsubscribe = await nodes.subscribe(
      (shard) => keys.notes(shard, name),
      (shard, payload) => this.#heard(shard, payload),
      () => this.#resubscribed(),
    );
    this.#arm();
  }

  close(): void {
    this.#closed = true;
    this.#unsubscribe();
    this.#alarm?.cancel();
  }

  /** Listen for the end of `id`, which may not be there yet. Returns whether nobody here did before. */
  expect(id: string, until: number): boolean {
    const awaited = this.#awaited.get(id);
    if (awaited !== undefined) {
      awaited.until = Math.max(awaited.until, until + PATIENCE_MS);
      return false;
    }
    const since = this.#parts.clock.now();
    this.#awaited.set(id, {
      id,
      since,
      until: until + PATIENCE_MS,
      accepted: false,
      missing: 0,
      missedAt: -Infinity,
    });
    return true;
  }

  /** From here on Redis must know it. */
  accepted(id: string): void {
    const awaited = this.#awaited.get(id);
    if (awaited !== undefined) awaited.accepted = true;
  }

  /** Redis took it in: it is in flight until its end, which may have been heard before the reply was. */
  holds(id: string, holder: Holder): void {
    const awaited = this.#awaited.get(id);
    if (awaited === undefined) holder.leave();
    else awaited.held = holder;
  }

  unexpect(id: string): boolean {
    this.#awaited.get(id)?.held?.leave();
    return this.#awaited.delete(id);
  }

  /** The end of a task, from whichever side it was heard. */
  ended(record: RecordView): void {
    if (this.unexpect(record.task.id)) this.#tell(record);
  }

  /** The same, before it is unpacked: most of what is heard is for somebody who waits here. */
  endedFrame(id: string, bytes: Buffer): void {
    if (this.#awaited.get(id) !== undefined) this.ended(this.#reader.read(id, bytes));
  }

  /** Tells another process of ends, id and outcome in turn. Whatever goes wrong here, it will look itself. */
  send(shard: number, gateway: string, news: readonly (string | Buffer)[]): void {
    const { nodes, keys, name } = this.#parts;
    const number = nextOf(this.#sent, `${gateway} ${shard}`);
    const payload = frame([name, String(number), ...news]);
    nodes.command(shard, ["SPUBLISH", keys.notes(shard, gateway), payload]).catch(() => {});
  }

  #heard(shard: number, payload: Buffer): void {
    const [sender, number, ...news] = partsOf(payload);
    const key = `${sender!.toString("latin1")} ${shard}`;
    const last = this.#last.get(key);
    const count = Number(number);
    if (this.#last.size > MAX_SENDERS) this.#last.clear();
    this.#last.set(key, count);
    for (let at = 0; at < news.length; at += 2) this.endedFrame(news[at]!.toString("latin1"), news[at + 1]!);
    if (last !== undefined && count !== last + 1)
      void this.#lookUp(this.#awaited.values().map(({ id }) => id));
  }

  #resubscribed(): void {
    this.#last.clear();
    void this.#lookUp(this.#awaited.values().map(({ id }) => id));
  }

  #arm(): void {
    if (this.#closed) return;
    const { clock } = this.#parts;
    this.#alarm = clock.at(clock.now() + this.#sweepMs, () => {
      void this.#sweep().finally(() => this.#arm());
    });
  }

  async #sweep(): Promise<void> {
    const now = this.#parts.clock.now();
    const old: string[] = [];
    for (const { id, since, until } of this.#awaited.values()) {
      if (until <= now) this.unexpect(id);
      else if (since + this.#sweepMs <= now) old.push(id);
    }
    await this.#lookUp(old);
  }

  async #lookUp(ids: readonly string[]): Promise<void> {
    // A shard that is away is looked at in the next round.
    await this.#parts.spread(
      ids,
      (id) => this.#parts.shardOf(id),
      (some, shards) => this.#lookUpGroup(shards[0]!, some).catch(() => {}),
    );
  }

  async #lookUpGroup(shard: number, ids: readonly string[]): Promise<void> {
    const { nodes, keys } = this.#parts;
    for (let at = 0; at < ids.length; at += LOOK_UP_TOGETHER) {
      const some = ids.slice(at, at + LOOK_UP_TOGETHER);
      const names = some.map((id) => `${keys.bases[this.#parts.shardOf(id)]!}r:${id}`);
      const values = (await nodes.command(shard, ["MGET", ...names])) as (Buffer | null)[];
      const missing: string[] = [];
      values.forEach((value, which) => {
        if (value === null) missing.push(some[which]!);
        else this.endedFrame(some[which]!, frameOf(value));
      });
      await this.#checkAlive(missing);
    }
  }

  /** Not final, so it must be in its shard's states; in neither place again and again, and it is lost. */
  async #checkAlive(ids: readonly string[]): Promise<void> {
    const { nodes, keys } = this.#parts;
    const byShard = Map.groupBy(ids, (id) => this.#parts.shardOf(id));
    for (const [shard, some] of byShard) {
      const states = (await nodes.command(shard, [
        "HMGET",
        `${keys.bases[shard]!}s`,
        ...some,
      ])) as RedisReply[];
      states.forEach((state, which) => this.#looked(some[which]!, state !== null));
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
    if (now - awaited.missedAt < this.#sweepMs / 2) return;
    awaited.missedAt = now;
    if (++awaited.missing !== LOST_AFTER_LOOKS) return;
    const why = "accepted, but Redis knows neither the task nor its outcome";
    this.#parts.events.emit("task.lost", { id, model: "", why });
  }
}

/** The next number under a key; bounded as the processes of a fleet are. */
function nextOf(numbers: Map<string, number>, key: string): number {
  if (numbers.size > MAX_SENDERS) numbers.clear();
  const next = (numbers.get(key) ?? 0) + 1;
  numbers.set(key, next);
  return next;
}
