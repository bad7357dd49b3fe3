/**
 * The tasks that this batcher has read from the streams and that have not ended. They are in a `MemoryEngine`: tiers,
 * tenants in turn, retries, bisection and expiry are the embedded engine's. Their stream entries stay pending in Redis
 * under this batcher's name, which is the lease: an entry is acknowledged and deleted when all its tasks have ended.
 * Outcomes are in the bundle's hash, so that a batcher that takes over runs only the rest.
 */
import { hashOf, Table } from "../../core/table.ts";
import type { Task } from "../../core/task.ts";
import type { Arg } from "./client/nodes.ts";
import type { Sharing } from "../engine.ts";
import { MemoryEngine } from "../memory/engine.ts";
import { ANY_BATCH, type TaskRecord } from "../memory/record.ts";
import type { Depths } from "./depths.ts";
import { entryFrame, readBody, readEntry, readMeta, type TaskBody } from "./frames.ts";
import { fieldOf, GRACE_MS, GROUP } from "./keys.ts";
import type { RedisParts } from "./parts.ts";
import { readState, stateText, type TriedState, UNTRIED } from "./records.ts";

export interface HeldEntry {
  readonly shard: number;
  readonly stream: string;
  readonly id: string;
  /** The gateway that put it and waits for its outcomes. */
  readonly gateway: string;
  /** Tasks of it that have not ended. */
  left: number;
  /** Ended tasks whose outcome Redis has not confirmed. */
  unconfirmed: number;
  /** Others may end it until Redis knows that this batcher holds it: report outcomes only once Redis has taken them. */
  contested: boolean;
  /** Another batcher holds it, as far as known: only that one may acknowledge it. */
  lost: boolean;
}

export interface HeldTask {
  readonly entry: HeldEntry;
  readonly record: TaskRecord;
  readonly sharing: Sharing;
  readonly body: Buffer;
}

/** As XREADGROUP and XCLAIM return it; null fields: it was deleted. */
export type StreamEntry = [id: Buffer, fields: Buffer[] | null];

export class TaskPool {
  readonly engine: MemoryEngine;
  readonly #parts: RedisParts;
  readonly #depths: Depths;
  readonly #held: Table<HeldTask>;
  readonly #entries = new Map<string, HeldEntry>();
  readonly #leasedUntil = new Map<number, number>();

  constructor(parts: RedisParts, depths: Depths) {
    this.#parts = parts;
    this.#depths = depths;
    this.#held = new Table(hashOf(parts.name, 2));
    this.engine = new MemoryEngine(() => parts.limits, parts.clock, parts.events, { keepsOutcomes: false });
  }

  get size(): number {
    return this.#held.size;
  }

  get(id: string): HeldTask | undefined {
    return this.#held.get(id);
  }

  all(): readonly HeldTask[] {
    return this.#held.values();
  }

  /** An entry whose delivery was lost is pending under this batcher's name, and not held. */
  holds(stream: string, id: string): boolean {
    return this.#entries.has(`${stream} ${id}`);
  }

  entries(shard: number): HeldEntry[] {
    return [...this.#entries.values()].filter((entry) => entry.shard === shard);
  }

  waiting(model: string): number {
    let sum = 0;
    for (const depth of this.engine.waiting(model)) sum += depth;
    return sum;
  }

  /** In all pools and streams, as last heard. */
  waitingInFleet(model: string): number {
    let sum = 0;
    for (const depth of this.#depths.waiting(model)) sum += depth;
    return sum;
  }

  /** No other batcher takes over this one's entries in a shard before `until`. */
  leased(shard: number, until: number): void {
    this.#leasedUntil.set(shard, until);
  }

  /** Whether others may end an entry, so that its end here is uncertain before Redis confirms it. */
  contested({ shard, contested }: HeldEntry): boolean {
    return contested || this.#parts.clock.now() >= (this.#leasedUntil.get(shard) ?? 0);
  }

  /** Its tasks have ended, or are elsewhere. */
  drop(id: string): HeldEntry | undefined {
    const held = this.#held.get(id);
    if (held === undefined) return undefined;
    this.#held.delete(id);
    held.entry.left--;
    return held.entry;
  }

  /** Nothing is left to do for an entry: it is no longer held, and may be acknowledged. */
  finish(entry: HeldEntry): boolean {
    if (entry.left > 0 || entry.unconfirmed > 0 || entry.lost) return false;
    this.#release(entry);
    return true;
  }

  /** Another batcher holds it. If it is pending here after all, it is taken again (`BundleReader`). */
  lose(entry: HeldEntry): void {
    entry.lost = true;
    this.#release(entry);
  }

  #release(entry: HeldEntry): void {
    const name = `${entry.stream} ${entry.id}`;
    if (this.#entries.get(name) === entry) this.#entries.delete(name);
  }

  /**
   * Takes in entries; resolves with their number of tasks. `ran`: what ran at the dead batcher that held them, by
   * attempt.
   */
  async take(
    shard: number,
    stream: string,
    found: readonly StreamEntry[],
    ran?: ReadonlyMap<string, number>,
  ): Promise<number> {
    const { nodes, name, keys } = this.#parts;
    const commands: Arg[][] = [];
    let count = 0;
    const fresh: { readonly entry: HeldEntry; readonly tasks: readonly TaskBody[] }[] = [];
    const checked: ((typeof fresh)[number] & { readonly counted: boolean })[] = [];
    this.engine.together(() => {
      for (const [id, fields] of found) {
        const entryId = id.toString("latin1");
        const key = `${stream} ${entryId}`;
        if (fields === null || this.#entries.has(key)) continue;
        const { gateway, mark, tasks } = readEntry(fields[1]!);
        const left = tasks.length;
        count += left;
        const held = { shard, stream, id: entryId, gateway, left };
        const entry = { ...held, unconfirmed: 0, contested: true, lost: false };
        this.#entries.set(key, entry);
        if (ran !== undefined || mark === "check" || mark === "copy") {
          checked.push({ entry, tasks, counted: ran === undefined && mark === "check" });
          continue;
        }
        fresh.push({ entry, tasks });
        for (const { id: task, body } of tasks) this.#adopt(entry, task, body, UNTRIED);
        const bundle = keys.bundle(tasks[0]!.id);
        const owned = mark === "part" ? tasks.map((task) => `o${fieldOf(task.id)}`) : ["o"];
        commands.push(
          ["HSET", bundle, ...owned.flatMap((field) => [field, name])],
          ["HGET", bundle, "x"],
          this.#bounded(bundle),
        );
      }
    });
    const marked = nodes.pipeline(shard, commands, { resend: true }).then((replies) => {
      const some = fresh.filter((_, at) => replies[3 * at + 1] !== null);
      // In a marked entry, a task may have ended before it was read.
      for (const each of fresh) each.entry.contested = some.includes(each);
      return some;
    });
    // Workers may start with the fresh ones meanwhile.
    void marked
      .then((some) => Promise.all(some.map(({ entry, tasks }) => this.#lookAtMarks(entry, tasks))))
      .catch(() => {});
    for (const { entry, tasks, counted } of checked) {
      // What cannot be looked up now is taken again later.
      await this.#takeChecked(entry, tasks, ran, counted).catch(() => this.lose(entry));
    }
    return count;
  }

  /** An entry may be read after its bundle expired, if no batcher was there: what is written then must expire too. */
  #bounded(bundle: string): Arg[] {
    return ["PEXPIRE", bundle, Math.ceil(this.#parts.limits.results.ttlMs + GRACE_MS), "NX"];
  }

  #acknowledgeFinished(entry: HeldEntry): void {
    if (!this.finish(entry)) return;
    this.#parts.nodes.pipeline(entry.shard, acknowledged([entry]), { resend: true }).catch(() => {});
  }

  #adopt(
    entry: HeldEntry,
    id: string,
    body: Buffer,
    tried: TriedState,
    place = "",
    replayed = false,
  ): TaskRecord | undefined {
    const { shared } = this.#parts;
    const { meta, input } = readBody(body);
    const { task: about, sharing } = readMeta(meta, shared);
    const present = this.engine.find(id);
    if (present !== undefined) {
      // It is here already, by another entry; this one holds it from now on.
      const before = this.drop(id);
      this.#held.set(id, { entry, record: present, sharing, body });
      if (before !== undefined) this.#acknowledgeFinished(before);
      return undefined;
    }
    const task: Task = { id, input, ...about };
    const [deadline, tier] = place === "" ? [] : place.split(" ");
    const record = this.engine.adopt(task, {
      ...tried,
      replayed,
      deadlineAt: deadline === undefined ? task.deadlineAt : Math.max(task.deadlineAt, shared.own(deadline)),
      tier: tier === undefined ? task.tier : Math.min(task.tier, Number(tier)),
      queueFrom: tried.attempt === 0 ? task.createdAt : this.#parts.clock.now(),
      retryAt: tried.retryAt === "" ? 0 : shared.own(tried.retryAt),
    });
    if (record === undefined) return undefined;
    this.#held.set(id, { entry, record, sharing, body });
    this.#depths.moved(this.#depths.of([task]), 1);
    return record;
  }

  /**
   * An entry written again or held by another batcher: its hash says what is left. `counted`: all tasks count as
   * waiting.
   */
  async #takeChecked(
    entry: HeldEntry,
    tasks: readonly TaskBody[],
    ran: ReadonlyMap<string, number> | undefined,
    counted: boolean,
  ): Promise<void> {
    const { nodes, keys, name } = this.#parts;
    const bundle = keys.bundle(tasks[0]!.id);
    const fields = tasks.map(({ id }) => fieldOf(id));
    const owned = [...(ran === undefined ? [] : ["o"]), ...fields.map((field) => `o${field}`)];
    const owners = owned.flatMap((field) => [field, name]);
    const replies = await nodes.pipeline(
      entry.shard,
      [
        ["HSET", bundle, ...owners],
        ["HMGET", bundle, ...fields.flatMap((field) => [field, `s${field}`, `p${field}`, `r${field}`])],
        this.#bounded(bundle),
      ],
      { resend: true },
    );
    const found = replies[1] as (Buffer | null)[];
    const charged: TaskRecord[] = [];
    this.engine.together(() => {
      tasks.forEach(({ id, body }, at) => {
        const [final, state, place, replayed] = found.slice(4 * at, 4 * at + 4);
        if (counted && (final !== null || this.engine.find(id) !== undefined)) this.#uncount(id, body);
        if (final !== null) {
          entry.left--;
          return;
        }
        const attempt = ran?.get(id);
        const tried = readState(state);
        const known = attempt === undefined ? tried : { ...tried, attempt };
        const record = this.#adopt(entry, id, body, known, place?.toString("latin1"), replayed !== null);
        if (record === undefined || attempt === undefined) return;
        // It was counted as running, and waits now.
        this.#depths.ran(1);
        this.#depths.moved(this.#depths.of([record.task]), -1);
        charged.push(record);
        this.engine.chargeLoss(record);
      });
    });
    this.#acknowledgeFinished(entry);
    const notes = charged.filter(({ final }) => !final).map((record) => triedCommand(record, this.#parts));
    if (notes.length > 0) await nodes.pipeline(entry.shard, notes, { resend: true });
  }

  /** It counts as waiting, and does not wait. */
  #uncount(id: string, body: Buffer): void {
    const { meta, input } = readBody(body);
    const task = { id, input, ...readMeta(meta, this.#parts.shared).task };
    this.#depths.moved(this.#depths.of([task]), 1);
  }

  /** A gateway wrote to the bundle before it was read: an end, or the terms of joined callers. */
  async #lookAtMarks(entry: HeldEntry, tasks: readonly { id: string }[]): Promise<void> {
    const { nodes, keys, shared } = this.#parts;
    const fields = tasks.flatMap(({ id }) => [fieldOf(id), `p${fieldOf(id)}`]);
    const found = (await nodes.command(entry.shard, ["HMGET", keys.bundle(tasks[0]!.id), ...fields], {
      resend: true,
    })) as (Buffer | null)[];
    tasks.forEach(({ id }, at) => {
      const [final, place] = found.slice(2 * at, 2 * at + 2);
      const held = this.#held.get(id);
      if (held?.entry !== entry) return;
      if (final && held.record.state === "queued") this.#forget(held);
      if (!place) return;
      const [deadline, tier] = place.toString("latin1").split(" ");
      this.engine.accommodate(id, shared.own(deadline!), Number(tier));
    });
  }

  #forget({ record }: HeldTask): void {
    this.engine.withdraw(record);
    const entry = this.drop(record.task.id);
    if (entry !== undefined) this.#acknowledgeFinished(entry);
  }

  /** Another batcher may hold these entries now: drops what waits here of them. What runs may still succeed. */
  async verify(shard: number): Promise<void> {
    const { nodes, keys, name } = this.#parts;
    const held = this.all().filter(({ entry }) => entry.shard === shard);
    const commands = held.map(({ record }) => [
      "HMGET",
      keys.bundle(record.task.id),
      "o",
      `o${fieldOf(record.task.id)}`,
    ]);
    const replies = await nodes.pipeline(shard, commands, { resend: true });
    replies.forEach((reply, at) => {
      const { entry, record } = held[at]!;
      entry.contested = true;
      const [owner, own] = reply as (Buffer | null)[];
      if (String(own ?? owner ?? name) === name) return;
      if (record.state === "queued") this.engine.withdraw(record);
      this.drop(record.task.id);
      this.lose(entry);
    });
  }

  /** Returns tasks to their streams for other batchers. What runs does not count as tried. */
  async handBack(some: readonly HeldTask[]): Promise<void> {
    const { nodes, options } = this.#parts;
    const given = some.filter(({ record }) => this.#held.get(record.task.id)?.record === record);
    const returned: Promise<unknown>[] = [];
    for (const [entry, tasks] of Map.groupBy(given, ({ entry: held }) => held)) {
      const { shard, stream, gateway } = entry;
      const commands: Arg[][] = [];
      for (const { record } of tasks) {
        const { task } = record;
        if (record.state === "running") record.attempt--;
        commands.push([...triedCommand(record, this.#parts), `o${fieldOf(task.id)}`, ""]);
        this.engine.withdraw(record);
        this.drop(task.id);
        // It waits, and not here.
        this.#depths.moved(this.#depths.of([task]), -1);
      }
      const bodies = tasks.map(({ record, body }) => ({ id: record.task.id, body }));
      commands.push(["XADD", stream, "*", "b", entryFrame(gateway, "check", bodies)]);
      const finished = this.finish(entry);
      if (finished) commands.push(...acknowledged([entry]));
      // Others of it that end meanwhile must not acknowledge it before these are back.
      else entry.unconfirmed++;
      returned.push(
        nodes
          .transact(shard, () => commands, options.putWithinMs)
          .then(
            () => {
              if (finished) return;
              entry.unconfirmed--;
              this.#acknowledgeFinished(entry);
            },
            // The lease expires and another batcher takes over; or this one does, while it lives.
            () => this.lose(entry),
          ),
      );
    }
    await Promise.all(returned);
  }
}

export function acknowledged(entries: readonly HeldEntry[]): Arg[][] {
  const commands: Arg[][] = [];
  for (const [stream, some] of Map.groupBy(entries, (entry) => entry.stream)) {
    const ids = some.map(({ id }) => id);
    // In this order: the next XCLAIM drops a pending deleted entry; the other way round it would stay for ever.
    commands.push(["XDEL", stream, ...ids], ["XACK", stream, GROUP, ...ids]);
  }
  return commands;
}

/** Records how often a task was tried, for a batcher that takes over. */
export function triedCommand(record: TaskRecord, { shared, keys }: RedisParts): Arg[] {
  const { task, attempt, lost, maxBatchSize, overdue, retryAt } = record;
  const tried = {
    attempt,
    lost,
    maxBatchSize: maxBatchSize === ANY_BATCH ? Infinity : maxBatchSize,
    overdue,
    retryAt: retryAt > 0 ? shared.shared(retryAt) : "",
  };
  return ["HSET", keys.bundle(task.id), `s${fieldOf(task.id)}`, stateText(tried)];
}
