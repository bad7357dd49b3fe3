/**
 * The queues of one model: by parameters first, because only tasks with equal parameters share a batch,
 * then by tier, and there tenants take turns (`turns.ts`).
 *
 * A group exists only while it holds a task, so there are never more groups than queued tasks. Groups are
 * kept in order of their best tier and then of their oldest task, so that the one to serve first is found
 * first; the order is
 * mended when it is asked for, and only after a task left or came back at the head of a group.
 */
import { seatTiers } from "../core/fair.ts";
import type { Json } from "../core/task.ts";
import type { QueueView } from "./engine.ts";
import { ANY_BATCH, type TaskRecord } from "./record.ts";
import { TierQueue } from "./turns.ts";

/** Groups that `turn` looks at; where there are more, turns are not counted. */
const MAX_GROUPS = 16;

export class Group implements QueueView {
  readonly parameters: Json;
  readonly tiers: TierQueue[];
  /** Written and read by `take`: seats that the lower tiers are owed. */
  readonly credits: number[];
  depth = 0;
  fresh = 0;

  constructor(parameters: Json, tiers: number) {
    this.parameters = parameters;
    this.tiers = Array.from({ length: tiers }, () => new TierQueue());
    this.credits = Array.from({ length: tiers }, () => 0);
  }

  get tier(): number {
    return this.tiers.findIndex(({ size }) => size > 0);
  }

  /** The head of each tier waits longest in it: what comes back stands where its arrival puts it. */
  get oldestAt(): number {
    let oldest = Infinity;
    for (const { first } of this.tiers) if (first !== undefined) oldest = Math.min(oldest, first.queuedAt);
    return oldest;
  }

  get headMaxBatchSize(): number {
    const head = this.tiers.find(({ size }) => size > 0)?.next;
    return head === undefined || head.maxBatchSize === ANY_BATCH ? Infinity : head.maxBatchSize;
  }

  /**
   * Of the heads: deadlines are a fixed time after arrival, so whoever came first is due first. The first
   * caller's own: whoever joined it and waits longer must not hide the hurry of those behind it.
   */
  get earliestDeadlineAt(): number {
    let earliest = Infinity;
    for (const { first } of this.tiers)
      if (first !== undefined) earliest = Math.min(earliest, first.task.deadlineAt);
    return earliest;
  }
}

export class ModelQueues {
  readonly #tiers: number;
  readonly #groups = new Map<Json, Group>();
  /** The one that was last emptied: most often it is the next to be needed. */
  #last: Group | undefined;
  #inOrder = true;
  #arrivals = 0;
  depth = 0;
  /** By tier. */
  readonly depths: number[];

  constructor(tiers: number) {
    this.#tiers = tiers;
    this.depths = Array.from({ length: tiers }, () => 0);
  }

  /** The best tier first, and there the one that waits longest. */
  groups(): Iterable<Group> {
    if (!this.#inOrder) this.#putInOrder();
    return this.#groups.values();
  }

  #putInOrder(): void {
    const groups = [...this.#groups.values()].map((group) => ({ group, ...orderOf(group) }));
    this.#groups.clear();
    for (const { group } of groups.sort(inOrder)) this.#groups.set(group.parameters, group);
    this.#inOrder = true;
  }

  /** Returns how many tasks with these parameters wait now. */
  push(record: TaskRecord, place: "back" | "arrival"): number {
    const { parameters } = record.task;
    let group = this.#groups.get(parameters);
    if (group === undefined) this.#groups.set(parameters, (group = this.#newGroup(parameters)));
    const tier = this.#tierOf(record);
    const list = group.tiers[tier]!;
    if (place === "back") {
      record.arrival = ++this.#arrivals;
      list.pushBack(record);
      // The newest of one tier stands last in any case.
      if (this.depths[tier] !== this.depth) this.#inOrder &&= this.#groups.size === 1;
    } else {
      list.insert(record);
      this.#inOrder = this.#groups.size === 1;
    }
    group.depth++;
    if (record.attempt === 0) group.fresh++;
    this.depth++;
    this.depths[tier]!++;
    return group.depth;
  }

  #newGroup(parameters: Json): Group {
    return this.#last?.parameters === parameters ? this.#last : new Group(parameters, this.#tiers);
  }

  /** A record from disk may carry a tier that is no longer configured. */
  #tierOf({ tier }: TaskRecord): number {
    return Math.min(tier, this.#tiers - 1);
  }

  /**
   * How many of this tier are served before a new task of this tenant: until each tenant has had as many
   * turns as it needs, as far as there are tasks. Exact when all others have that many queued, else too high,
   * never more than wait. Which group it will stand in is not asked: the groups are served side by side, each
   * in turns of its own. With very many groups nobody's turn is counted: then all that wait are before it.
   */
  turn(tier: number, tenant: string): number {
    if (this.#groups.size > MAX_GROUPS) return this.depths[tier] ?? 0;
    let before = 0;
    for (const { tiers } of this.#groups.values()) {
      const queue = tiers[tier];
      if (queue !== undefined) before += Math.min(queue.size, (queue.queuedOf(tenant) + 1) * queue.tenants);
    }
    return before;
  }

  remove(record: TaskRecord): void {
    const group = this.#groups.get(record.task.parameters)!;
    const wasHead = record.before === undefined;
    record.list!.remove(record);
    group.depth--;
    if (record.attempt === 0) group.fresh--;
    this.depth--;
    this.depths[this.#tierOf(record)]!--;
    if (group.depth === 0) {
      this.#groups.delete(group.parameters);
      this.#last = group;
    } else if (wasHead && this.#groups.size > 1) this.#inOrder = false;
  }

  /**
   * Takes out up to `max` records of one group, tiers and tenants in fair turn. A record that may only ride
   * in a small batch makes this batch small, or stays for the next one when the batch has outgrown it. A tier
   * with such a record at its head gets in first, or the tiers above would outgrow it every time.
   */
  take(parameters: Json, max: number): TaskRecord[] {
    const group = this.#groups.get(parameters);
    if (group === undefined) return [];
    const seats = seatTiers(
      max,
      group.tiers.map((list) => list.size),
      group.credits,
    );
    const taken: TaskRecord[] = [];
    let limit = max;
    const turns = [...seats.keys()];
    const small = turns.find((tier) => seats[tier]! > 0 && group.tiers[tier]!.next!.maxBatchSize < max);
    if (small !== undefined) {
      turns.unshift(...turns.splice(small, 1));
      // The batch is small for its sake: it gets every seat that it can use, or many more would be small.
      const { next, size } = group.tiers[small]!;
      seats[small] = Math.min(size, next!.maxBatchSize);
    }
    for (const tier of turns) {
      for (let left = seats[tier]!; left > 0 && taken.length < limit; left--) {
        const queue = group.tiers[tier]!;
        const record = queue.next!;
        if (record.maxBatchSize <= taken.length) break;
        limit = Math.min(limit, record.maxBatchSize);
        queue.served();
        this.remove(record);
        taken.push(record);
      }
    }
    return taken;
  }
}

interface Order {
  readonly tier: number;
  readonly oldestAt: number;
}

function orderOf({ tier, oldestAt }: QueueView): Order {
  return { tier, oldestAt };
}

/** Who is served first: the better tier, then whoever waits longer. */
export function inOrder(one: Order, other: Order): number {
  return one.tier - other.tier || one.oldestAt - other.oldestAt;
}
