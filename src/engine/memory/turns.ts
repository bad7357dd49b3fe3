/**
 * One tier of one group in memory: tenants take turns, one task each (the rule is in `core/fair.ts`).
 *
 * Every record stands in two rows at once: the tier's, in the order of arrival, whose head says how long
 * somebody has waited, and its tenant's, in the same order, whose head is served when the turn comes to it.
 * The tenants that have a record here form a ring. Adding, serving and removing cost the same however many
 * wait; only a record that comes back looks for its place, from the nearer end.
 *
 * While all records are one tenant's (nobody else is known where there are no credentials) the tier's row is
 * that tenant's, and nothing else is kept. The second tenant makes the rows from what is there: each record
 * is looked at once for that in its life, because the rows then stay until the tier is empty.
 */
import { RecordList, type TaskRecord } from "./record.ts";

export class TenantRow {
  readonly tenant: string;
  first: TaskRecord | undefined;
  last: TaskRecord | undefined;
  size = 0;
  /** The ring; itself, where it is the only one. */
  before: TenantRow = this;
  after: TenantRow = this;

  constructor(tenant: string) {
    this.tenant = tenant;
  }
}

export class TierQueue extends RecordList {
  /** Whose records all are, until there is a second tenant. */
  #sole = "";
  #rows: Map<string, TenantRow> | undefined;
  #turn: TenantRow | undefined;

  /** The record that is served next. */
  get next(): TaskRecord | undefined {
    return this.#turn === undefined ? this.first : this.#turn.first;
  }

  /** How many tenants have a record here. */
  get tenants(): number {
    return this.#rows === undefined ? Math.min(1, this.size) : this.#rows.size;
  }

  /** Their names. */
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

  /** Where its arrival puts it in its tenant's row; and its tenant is next, for it had this turn before. */
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

  /** The record that is next is taken: then it is the next tenant's turn. */
  served(): void {
    if (this.#turn !== undefined) this.#turn = this.#turn.after;
  }

  /** Whether this tenant has the tier for itself; where it no longer has, the rows are made. */
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

  /** At the end: right before the one whose turn it is. */
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
