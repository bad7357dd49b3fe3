/**
 * The queues of one model: by parameters first, because only tasks with equal parameters share a batch, then by tier,
 * where tenants take turns (`TierQueue`).
 *
 * A group exists while a task of it waits, in its queue or for a retry. Several groups are ordered for service: best
 * tier first, then tenants in turn, least recently served first, each with the group of its longest-waiting task. A
 * group with tasks of several tenants is served on the turn of the first of them. So a tenant with a thousand groups
 * delays only itself. An arrival or departure costs O(log n) in the number of groups.
 */
import { floorOf, refundSeats, seatTiers } from "../../core/fair.ts";
import { type Due, Heap } from "../../core/heap.ts";
import { hasShare } from "../../core/share.ts";
import { Table } from "../../core/table.ts";
import type { Json, Task } from "../../core/task.ts";
import { type Composed, type Composition, MAX_GROUPS, type QueueView } from "../engine.ts";
import { ANY_BATCH, RecordList, type TaskRecord } from "./record.ts";

const FEW_GROUPS = 16; // groups that `turn` examines one by one; with more, it uses each tenant's total over all groups

/** One tenant's records in a tier; tenants with any form a ring. */
export class TenantRow {
  readonly tenant: string;
  first: TaskRecord | undefined;
  last: TaskRecord | undefined;
  size = 0;
  before: TenantRow = this;
  after: TenantRow = this;

  constructor(tenant: string) {
    this.tenant = tenant;
  }
}

/**
 * One tier of one group: tenants take turns, one task each (`core/fair.ts`).
 *
 * Every record is in two lists in arrival order: the tier's, whose head has waited longest, and its tenant's, whose
 * head is served at the tenant's turn. Adding, serving and removing are O(1); only a record that comes back searches
 * its place, from the nearer end. With a single tenant the tier's list is that tenant's and nothing else is kept. The
 * second tenant builds the rows, and they stay until the tier is empty: one visit per record in its life.
 */
export class TierQueue extends RecordList {
  #sole = ""; // the only tenant, until there is a second
  #rows: Map<string, TenantRow> | undefined;
  #turn: TenantRow | undefined;

  get next(): TaskRecord | undefined {
    return this.#turn === undefined ? this.first : this.#turn.first;
  }

  get tenants(): number {
    return this.#rows === undefined ? Math.min(1, this.size) : this.#rows.size;
  }

  tenantNames(): Iterable<string> {
    return this.#rows === undefined ? (this.size === 0 ? [] : [this.#sole]) : this.#rows.keys();
  }

  queuedOf(tenant: string): number {
    if (this.#rows === undefined) return tenant === this.#sole ? this.size : 0;
    return this.#rows.get(tenant)?.size ?? 0;
  }

  override pushBack(record: TaskRecord): void {
    if (this.#alone(record.task.tenant)) return super.pushBack(record);
    super.pushBack(record);
    const row = this.#rowOf(record.task.tenant);
    link(row, record, row.last);
  }

  /** Inserts by arrival in its tenant's row; its tenant is next, because it lost this turn. */
  override insert(record: TaskRecord): void {
    if (this.#alone(record.task.tenant)) return super.insert(record);
    super.insert(record);
    const row = this.#rowOf(record.task.tenant);
    let before: TaskRecord | undefined;
    for (let each = row.first; each !== undefined && each.arrival < record.arrival; each = each.rowAfter) {
      before = each;
    }
    link(row, record, before);
    if (row === this.#turn) return;
    this.#leaveRing(row);
    this.#enterRing(row);
    this.#turn = row;
  }

  override remove(record: TaskRecord): void {
    super.remove(record);
    const { row } = record;
    if (row === undefined) return;
    unlink(row, record);
    if (row.size > 0) return;
    this.#leaveRing(row);
    this.#rows!.delete(row.tenant);
    if (this.size === 0) this.#rows = this.#turn = undefined;
  }

  /** This record is about to be taken. Its tenant has had its turn, unless an earlier task of it was passed over. */
  served(record: TaskRecord): void {
    const { row } = record;
    if (row === undefined || row.first !== record) return;
    if (row === this.#turn) this.#turn = row.after;
    else {
      this.#leaveRing(row);
      this.#enterRing(row);
    }
  }

  /** The first `most` in the order in which they would be served. */
  ahead(most: number): TaskRecord[] {
    const found: TaskRecord[] = [];
    if (this.#turn === undefined) {
      for (let each = this.first; each !== undefined && found.length < most; each = each.after)
        found.push(each);
      return found;
    }
    let round: TaskRecord[] = [];
    let row = this.#turn;
    do {
      round.push(row.first!);
      row = row.after;
    } while (row !== this.#turn && round.length < most);
    while (round.length > 0) {
      const next: TaskRecord[] = [];
      for (const record of round) {
        if (found.length === most) return found;
        found.push(record);
        if (record.rowAfter !== undefined) next.push(record.rowAfter);
      }
      round = next;
    }
    return found;
  }

  /** Whether this tenant has the tier for itself; if it no longer has, builds the rows. */
  #alone(tenant: string): boolean {
    if (this.#rows !== undefined) return false;
    if (this.size === 0) this.#sole = tenant;
    else if (tenant !== this.#sole) this.#makeRows();
    return this.#rows === undefined;
  }

  #makeRows(): void {
    this.#rows = new Map();
    const row = this.#rowOf(this.#sole);
    for (let each = this.first; each !== undefined; each = each.after) link(row, each, row.last);
  }

  #rowOf(tenant: string): TenantRow {
    let row = this.#rows!.get(tenant);
    if (row !== undefined) return row;
    row = new TenantRow(tenant);
    this.#rows!.set(tenant, row);
    this.#enterRing(row);
    return row;
  }

  /** At the end: right before the tenant whose turn it is. */
  #enterRing(row: TenantRow): void {
    const next = (this.#turn ??= row);
    row.before = next.before;
    row.after = next;
    row.before.after = row;
    next.before = row;
  }

  #leaveRing(row: TenantRow): void {
    if (this.#turn === row) this.#turn = row.after === row ? undefined : row.after;
    row.before.after = row.after;
    row.after.before = row.before;
    row.before = row.after = row;
  }
}

function link(row: TenantRow, record: TaskRecord, before: TaskRecord | undefined): void {
  const after = before === undefined ? row.first : before.rowAfter;
  record.row = row;
  record.rowBefore = before;
  record.rowAfter = after;
  if (before === undefined) row.first = record;
  else before.rowAfter = record;
  if (after === undefined) row.last = record;
  else after.rowBefore = record;
  row.size++;
}

function unlink(row: TenantRow, record: TaskRecord): void {
  if (record.rowBefore === undefined) row.first = record.rowAfter;
  else record.rowBefore.rowAfter = record.rowAfter;
  if (record.rowAfter === undefined) row.last = record.rowBefore;
  else record.rowAfter.rowBefore = record.rowBefore;
  record.row = record.rowBefore = record.rowAfter = undefined;
  row.size--;
}

export class Group implements QueueView, Due {
  readonly parameters: Json;
  opener = ""; // the tenant that put its first task; the group counts as that tenant's
  readonly tiers: TierQueue[];
  readonly credits: number[]; // seats owed to the lower tiers. Written and read by `take`.
  depth = 0; // tasks in its queue
  waiting = 0; // `depth`, and tasks that wait for a retry
  fresh = 0;
  /** The tenant on whose turn it is served; undefined while its queue is empty or it is the only group. */
  owner: Owner | undefined;
  dueAt = 0; // among its owner's groups, by `oldestAt`
  place = -1;

  constructor(parameters: Json, tiers: number) {
    this.parameters = parameters;
    this.tiers = Array.from({ length: tiers }, () => new TierQueue());
    this.credits = Array.from({ length: tiers }, () => 0);
  }

  get tier(): number {
    return this.tiers.findIndex(({ size }) => size > 0);
  }

  /** The head of each tier has waited longest: what comes back is inserted by arrival. */
  get oldestAt(): number {
    let oldest = Infinity;
    for (const { first } of this.tiers) if (first !== undefined) oldest = Math.min(oldest, first.queuedAt);
    return oldest;
  }

  get headMaxBatchSize(): number {
    const head = this.tiers.find(({ size }) => size > 0)?.next;
    return head === undefined || head.maxBatchSize === ANY_BATCH ? Infinity : head.maxBatchSize;
  }

  /** Of the heads' first callers: a joined caller that waits longer must not hide the urgency of tasks behind it. */
  get earliestDeadlineAt(): number {
    let earliest = Infinity;
    for (const { first } of this.tiers)
      if (first !== undefined) earliest = Math.min(earliest, first.task.deadlineAt);
    return earliest;
  }
}

/** A tenant in one tier: its queued tasks there, and the groups served on its turn. */
class Owner implements Due {
  readonly tenant: string;
  readonly tier: number;
  queued = 0;
  servedAt = -Infinity; // when a batch last left on its turn
  readonly groups = new Heap<Group>();
  dueAt = 0; // among its tier's owners: waiting for its turn since then
  place = -1;

  constructor(tenant: string, tier: number) {
    this.tenant = tenant;
    this.tier = tier;
  }
}

/** The tenants of one tier in service order. */
class TierOrder {
  readonly #tier: number;
  readonly #owners = new Map<string, Owner>();
  readonly #turns = new Heap<Owner>();

  constructor(tier: number) {
    this.#tier = tier;
  }

  get tenants(): number {
    return this.#owners.size;
  }

  queuedOf(tenant: string): number {
    return this.#owners.get(tenant)?.queued ?? 0;
  }

  of(tenant: string): Owner {
    let owner = this.#owners.get(tenant);
    if (owner === undefined) this.#owners.set(tenant, (owner = new Owner(tenant, this.#tier)));
    return owner;
  }

  /** Of the tenants with a task in this queue, the least recently served. */
  next(queue: TierQueue): Owner {
    let next: Owner | undefined;
    for (const tenant of queue.tenantNames()) {
      const owner = this.of(tenant);
      if (next === undefined || owner.servedAt < next.servedAt) next = owner;
    }
    return next!;
  }

  /** One of its groups was added, removed or has another oldest task; or it was served. */
  moved(owner: Owner): void {
    if (owner.groups.size > 0) this.#turns.set(owner, Math.max(owner.servedAt, owner.groups.firstAt));
    else {
      this.#turns.remove(owner);
      if (owner.queued === 0 && this.#owners.get(owner.tenant) === owner) this.#owners.delete(owner.tenant);
    }
  }

  /** At most `most` groups: the first of each owner in turn, then the second of each, and so on. */
  *groups(most: number): Generator<Group, void> {
    let walks: Generator<Group, void>[] = [];
    for (const owner of this.#turns.inOrder()) {
      if (walks.push(owner.groups.inOrder()) >= most) break;
    }
    for (let left = most; walks.length > 0;) {
      const further: typeof walks = [];
      for (const walk of walks) {
        const { value } = walk.next();
        if (value === undefined) continue;
        yield value;
        if (--left <= 0) return;
        further.push(walk);
      }
      walks = further;
    }
  }
}

export class ModelQueues {
  readonly #tiers: number;
  /** Not a Map: V8 hashes long texts by their length alone, so a client could make it slow. */
  readonly #groups: Table<Group>;
  readonly #opened = new Map<string, number>(); // how many of them each tenant opened
  #sole: Group | undefined; // the only group with queued tasks, while there is no order
  #last: Group | undefined; // the last one emptied: usually the next to be needed
  /** By tier. Made when tasks of a second group are queued, dropped when nothing is. */
  #orders: readonly TierOrder[] | undefined;
  #arrivals = 0;
  depth = 0;
  readonly depths: number[];

  constructor(tiers: number, seed: number) {
    this.#tiers = tiers;
    this.#groups = new Table(seed);
    this.depths = Array.from({ length: tiers }, () => 0);
  }

  /** In service order; at most `perTier` of each tier. */
  groups(perTier = Infinity): Iterable<Group> {
    if (this.#orders !== undefined) return servingOrder(this.#orders, perTier);
    return this.depth === 0 ? [] : [this.#sole!];
  }

  has(parameters: Json): boolean {
    return this.#groups.get(parameters) !== undefined;
  }

  /** Whether this task would open one group more than its tenant may have. */
  noGroupFor({ parameters, tenant }: Task): boolean {
    const { size } = this.#groups;
    if (size === 0 || this.has(parameters)) return false;
    return !hasShare(this.#opened.get(tenant) ?? 0, size, MAX_GROUPS, this.#opened.size);
  }

  /** A record will wait: its group exists from now on. True if it is new. */
  hold(record: TaskRecord): boolean {
    const { parameters, tenant } = record.task;
    let group = this.#groups.get(parameters);
    const opened = group === undefined;
    if (group === undefined) {
      group = this.#last?.parameters === parameters ? this.#last : new Group(parameters, this.#tiers);
      group.opener = tenant;
      this.#groups.set(parameters, group);
      this.#opened.set(tenant, (this.#opened.get(tenant) ?? 0) + 1);
    }
    group.waiting++;
    record.group = group;
    return opened;
  }

  /** It waits no longer. True if its group is gone. */
  release(record: TaskRecord): boolean {
    const group = record.group!;
    record.group = undefined;
    if (--group.waiting > 0) return false;
    this.#groups.delete(group.parameters);
    const opened = this.#opened.get(group.opener)! - 1;
    if (opened === 0) this.#opened.delete(group.opener);
    else this.#opened.set(group.opener, opened);
    this.#last = group;
    return true;
  }

  /** Returns how many tasks with these parameters are queued now. */
  push(record: TaskRecord, place: "back" | "arrival"): number {
    const group = record.group!;
    const tier = this.#tierOf(record);
    const list = group.tiers[tier]!;
    if (this.depth === 0) this.#sole = group;
    else if (this.#orders === undefined && group !== this.#sole) this.#orders = this.#ordersOf(this.#sole!);
    if (place === "back") {
      record.arrival = ++this.#arrivals;
      list.pushBack(record);
    } else {
      list.insert(record);
    }
    group.depth++;
    if (record.attempt === 0) group.fresh++;
    this.depth++;
    this.depths[tier]!++;
    if (this.#orders !== undefined) this.#entered(record, group, tier, this.#orders[tier]!);
    return group.depth;
  }

  #entered({ before, task }: TaskRecord, group: Group, tier: number, order: TierOrder): void {
    const own = order.of(task.tenant);
    own.queued++;
    const { owner } = group;
    // On the turn of the least recently served tenant.
    const sooner =
      owner === undefined || tier < owner.tier || (tier === owner.tier && own.servedAt < owner.servedAt);
    if (sooner) this.#giveTo(group, own);
    else if (before === undefined) this.#giveTo(group, owner);
  }

  /** Builds the order from the one group there is: each of its tenants is visited once. */
  #ordersOf(group: Group): readonly TierOrder[] {
    const orders = group.tiers.map((queue, tier) => {
      const order = new TierOrder(tier);
      for (const tenant of queue.tenantNames()) order.of(tenant).queued = queue.queuedOf(tenant);
      return order;
    });
    const { tier } = group;
    const owner = (group.owner = orders[tier]!.next(group.tiers[tier]!));
    owner.groups.set(group, group.oldestAt);
    orders[tier]!.moved(owner);
    return orders;
  }

  /** Keeps its owner while that has a task in its best tier, otherwise picks the next tenant there. */
  #rank(group: Group): void {
    const { tier, owner } = group;
    if (tier < 0) return this.#giveTo(group, undefined);
    const queue = group.tiers[tier]!;
    const order = this.#orders![tier]!;
    if (owner?.tier !== tier) this.#giveTo(group, order.next(queue));
    else if (queue.queuedOf(owner.tenant) > 0) this.#giveTo(group, owner);
    // The next tenant in it, until it is served: a scan each time a task expires would cost too much.
    else this.#giveTo(group, order.of(queue.next!.task.tenant));
  }

  #giveTo(group: Group, owner: Owner | undefined): void {
    const before = group.owner;
    if (before !== undefined && before !== owner) {
      before.groups.remove(group);
      this.#orders![before.tier]!.moved(before);
    }
    group.owner = owner;
    if (owner === undefined) return;
    owner.groups.set(group, group.oldestAt);
    this.#orders![owner.tier]!.moved(owner);
  }

  /** A record from disk may carry a tier that is no longer configured. */
  #tierOf({ tier }: TaskRecord): number {
    return Math.min(tier, this.#tiers - 1);
  }

  /**
   * How many tasks of this tier are served before a new one of this tenant: until each tenant has had as many turns as
   * it needs. Exact if all others have that many queued, else too high, never more than wait. The group is ignored:
   * groups are served in parallel, each with separate turns. With very many groups the turns are those of tenants
   * between groups.
   */
  turn(tier: number, tenant: string): number {
    let before = 0;
    const orders = this.#orders;
    if (orders !== undefined && this.#groups.size > FEW_GROUPS) {
      const order = orders[tier];
      if (order !== undefined) before = (order.queuedOf(tenant) + 1) * order.tenants;
      return Math.min(this.depths[tier] ?? 0, before);
    }
    for (const { tiers } of orders === undefined ? this.groups() : this.#groups.unordered()) {
      const queue = tiers[tier];
      if (queue !== undefined) before += Math.min(queue.size, (queue.queuedOf(tenant) + 1) * queue.tenants);
    }
    return before;
  }

  remove(record: TaskRecord): void {
    const group = record.group!;
    const tier = this.#tierOf(record);
    const wasHead = record.before === undefined;
    record.list!.remove(record);
    group.depth--;
    if (record.attempt === 0) group.fresh--;
    this.depth--;
    this.depths[tier]!--;
    if (this.#orders === undefined) return;
    const order = this.#orders[tier]!;
    const own = order.of(record.task.tenant);
    own.queued--;
    if (wasHead || group.owner === own) this.#rank(group);
    order.moved(own);
    if (this.depth === 0) this.#orders = undefined;
  }

  /**
   * Removes up to `max` records of one group, tiers and tenants in fair turn. A record restricted to a small batch
   * makes this one small, or stays for the next if the batch has outgrown it. A tier with such a head goes first, or
   * the tiers above would outgrow it every time. `composition`: the records of similar length, unless one has to leave.
   */
  take(parameters: Json, max: number, now: number, composition?: Composition): TakenBatch {
    const group = this.#groups.get(parameters);
    if (group === undefined || group.depth === 0) return NOTHING_TAKEN;
    const { owner } = group;
    const composed = composition && group.depth > 1 ? this.#compose(group, max, now, composition) : undefined;
    const taken = composed === undefined ? this.#inOrder(group, max) : composed.records;
    if (this.#orders !== undefined && owner !== undefined) this.#served(group, owner, now);
    return composed ?? { records: taken };
  }

  #inOrder(group: Group, max: number): TaskRecord[] {
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
      // The batch is small because of it: it gets every seat that it can use, or many more would be small.
      const { next, size } = group.tiers[small]!;
      seats[small] = Math.min(size, next!.maxBatchSize);
    }
    for (const tier of turns) {
      for (let left = seats[tier]!; left > 0 && taken.length < limit; left--) {
        const queue = group.tiers[tier]!;
        const record = queue.next!;
        if (record.maxBatchSize <= taken.length) break;
        limit = Math.min(limit, record.maxBatchSize);
        queue.served(record);
        this.remove(record);
        taken.push(record);
      }
    }
    return taken;
  }

  /**
   * Removes up to `max` records of similar length. Seats go to tiers as in any batch, and of each tier the first in
   * service order are examined, in proportion to its seats. The first of the best tier leads, or the first of a lower
   * tier that was passed over for long. Seats that a tier has no similar record for go to the others, best first, but
   * to none below the first that waits when a lower tier leads. Tenants whose first task was passed over keep their
   * turn.
   *
   * A record that none may overtake any more ends what is examined of its tier. Where it has a seat in the tier with
   * the most, the batch is taken in service order: undefined, as for a record restricted to a small batch.
   */
  #compose(
    group: Group,
    max: number,
    now: number,
    { window, overtakeMs, lengthOf, choose }: Composition,
  ): (TakenBatch & { readonly composed: Composed }) | undefined {
    const { tiers, credits } = group;
    const creditsBefore = [...credits];
    const depths = tiers.map(({ size }) => size);
    const seats = seatTiers(max, depths, credits);
    const inOrder = (): undefined => {
      for (const [tier, credit] of creditsBefore.entries()) credits[tier] = credit;
    };
    const best = group.tier;
    const first = seats.findIndex((count) => count > 0);
    const most = Math.max(...seats);
    let lead: { readonly record: TaskRecord; readonly tier: number } | undefined;
    const windows: TaskRecord[][] = [];
    const lengths: number[] = [];
    for (const [tier, queue] of tiers.entries()) {
      const records = (windows[tier] = queue.ahead(Math.ceil((window * seats[tier]!) / max)));
      const [head] = records;
      if (head === undefined) continue;
      if (head.maxBatchSize < max) return inOrder();
      // Passed over for half of its time: only those before it, or the next batch's worth, may still go first. That
      // drains them in batches of their own lengths; a mixed batch in order of service is the last resort.
      const late = records.findIndex(
        ({ overtakenUntil: until }) => until !== 0 && until - overtakeMs / 2 <= now,
      );
      if (late >= 0) records.length = Math.min(records.length, Math.max(seats[tier]!, late + 1));
      const mustLeave = records.findIndex(({ overtakenUntil: until }) => until !== 0 && until <= now);
      if (mustLeave >= 0 && mustLeave < seats[tier]! && seats[tier] === most) return inOrder();
      if (mustLeave >= 0) records.length = mustLeave + 1;
      const since = head.overtakenUntil;
      const due = mustLeave >= 0 || (since !== 0 && since - now < overtakeMs / 2);
      if (lead === undefined || (due && (lead.tier === first || since < lead.record.overtakenUntil)))
        lead = { record: head, tier };
      for (const record of records) {
        if (record.length === 0) record.length = lengthOf(record.task.input);
        lengths.push(record.length);
      }
    }
    const leads = lengths.indexOf(lead!.record.length);
    [lengths[0], lengths[leads]] = [lengths[leads]!, lengths[0]!];
    const range = choose(lengths);
    const fits = ({ length, maxBatchSize }: TaskRecord): boolean =>
      length >= range.least && length <= range.most && maxBatchSize === ANY_BATCH;
    // The leader goes first: it has its seat also where the better tiers could fill the batch.
    const chosen = new Set([lead!.record]);
    const used = tiers.map((_, tier) => (tier === lead!.tier ? 1 : 0));
    for (const shares of [seats, depths]) {
      for (const [tier, records] of windows.entries()) {
        if (shares === depths && lead!.tier > best && tier > best) break;
        for (const record of records) {
          if (chosen.size === max || used[tier]! >= shares[tier]!) break;
          if (chosen.has(record) || !fits(record)) continue;
          chosen.add(record);
          used[tier]!++;
        }
      }
    }
    let [longer, shorter, ordinal, longest] = [0, 0, 0, 0];
    for (const [tier, records] of windows.entries()) {
      const last = records.findLastIndex((record) => chosen.has(record));
      const share =
        tier === 0 || seats[tier] === depths[tier]
          ? 1
          : Math.max(seats[tier]! / max, floorOf(tier, tiers.length));
      let passed: TaskRecord | undefined;
      for (const [at, record] of records.entries()) {
        if (ordinal++ < chosen.size) longest = Math.max(longest, record.length);
        if (chosen.has(record)) continue;
        if (record.length > range.most) longer++;
        else if (record.length < range.least) shorter++;
        // Behind the last that left, only one that had a seat and is unlike the leader of another tier.
        if (at > last && (tier === lead!.tier || used[tier]! >= seats[tier]! || passed !== undefined))
          continue;
        passed ??= record;
        record.overtakenUntil ||= now + overtakeMs / share;
      }
      const queue = tiers[tier]!;
      for (let at = 0; at <= last; at++) {
        const record = records[at]!;
        if (!chosen.has(record)) continue;
        queue.served(record);
        this.remove(record);
      }
    }
    refundSeats(max, depths, creditsBefore, credits, used);
    return { records: [...chosen], composed: { longer, shorter, inOrder: longest } };
  }

  #served(group: Group, owner: Owner, now: number): void {
    owner.servedAt = now;
    const { tier } = group;
    if (tier >= 0) this.#giveTo(group, this.#orders![tier]!.next(group.tiers[tier]!));
    this.#orders![owner.tier]!.moved(owner);
  }
}

/** Records that left their queue together. */
export interface TakenBatch {
  readonly records: readonly TaskRecord[];
  readonly composed?: Composed;
}

const NOTHING_TAKEN: TakenBatch = { records: [] };

function* servingOrder(orders: readonly TierOrder[], perTier: number): Generator<Group, void> {
  for (const order of orders) yield* order.groups(perTier);
}
