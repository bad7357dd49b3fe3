/**
 * Table of the request log: migrations, and how rows are written and read. Migrations run once, in order, and are never
 * edited: later versions append and only add columns, so an older Ferry can write to a newer table. One statement
 * writes many rows, each column as an array: 2 µs of our CPU per row in chunks of a thousand (JSON costs about the
 * same, COPY more). `(instance, seq)` is unique, so writing a row twice is idempotent.
 */
import type { PostgresLink, PostgresRow } from "./postgres-link.ts";
import type { LoggedRequest, RequestRow } from "./request-log.ts";

/** "ferry" and a number, as advisory lock keys. */
const LOCKS = 0x6665_7272;
const MIGRATION_LOCK = `${LOCKS}, 1`;
const RETENTION_LOCK = `${LOCKS}, 2`;

const MIGRATIONS: readonly string[] = [
  `CREATE TABLE ferry_requests (
    instance uuid NOT NULL,
    seq bigint NOT NULL,
    id text NOT NULL,
    tenant text,
    tier text,
    model text,
    status smallint NOT NULL,
    code text,
    work text NOT NULL,
    started_at timestamptz NOT NULL,
    latency_ms real NOT NULL,
    queue_ms real,
    worker_ms real,
    batch_id text,
    batch_size integer,
    worker text,
    reason text,
    attempts smallint NOT NULL,
    settled_at timestamptz,
    outcome text,
    trace_id text,
    PRIMARY KEY (instance, seq)
  );
  CREATE INDEX ferry_requests_started_at ON ferry_requests (started_at);
  CREATE INDEX ferry_requests_id ON ferry_requests (id);
  CREATE INDEX ferry_requests_tenant ON ferry_requests (tenant, started_at)`,
];

/** Migrates the table. Safe to run concurrently; a user without DDL rights may use a table that is up to date. */
export async function migrate(link: PostgresLink): Promise<void> {
  const [table] = await link.ask("SELECT to_regclass('ferry_migrations') IS NOT NULL AS there");
  const versions = "SELECT coalesce(max(version), 0) AS version FROM ferry_migrations";
  const done = table!["there"] === true ? Number((await link.ask(versions))[0]!["version"]) : 0;
  for (let version = done + 1; version <= MIGRATIONS.length; version++) {
    await link.ask(
      `SELECT pg_advisory_xact_lock(${MIGRATION_LOCK});
      CREATE TABLE IF NOT EXISTS ferry_migrations (
        version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now());
      DO $migration$ BEGIN
        IF NOT EXISTS (SELECT FROM ferry_migrations WHERE version = ${version}) THEN
          ${MIGRATIONS[version - 1]};
          INSERT INTO ferry_migrations (version) VALUES (${version});
        END IF;
      END $migration$`,
    );
  }
}

type Cell = string | number | undefined;

/** `sql`: converts the value to the column's type, where they differ. */
type Column = readonly [name: string, type: string, pick: (row: RequestRow) => Cell, sql?: string];

/** Known when the request is answered. */
const BEGINNINGS: readonly Column[] = [
  ["id", "text", ({ id }) => id],
  ["tenant", "text", ({ tenant }) => tenant],
  ["tier", "text", ({ tier }) => tier],
  ["model", "text", ({ model }) => model],
  ["status", "smallint", ({ status }) => status],
  ["code", "text", ({ code }) => code],
  ["work", "text", ({ work }) => work],
  ["started_at", "float8", ({ startedAt }) => startedAt / 1000, "to_timestamp(given.started_at)"],
  ["latency_ms", "real", ({ latencyMs }) => thousandths(latencyMs)],
  ["trace_id", "text", ({ traceId }) => traceId],
];

/** May change when the task ends. */
const ENDINGS: readonly Column[] = [
  ["queue_ms", "real", ({ batch, queueMs }) => batch && thousandths(queueMs)],
  ["worker_ms", "real", ({ batch, workerMs }) => batch && thousandths(workerMs)],
  ["batch_id", "text", ({ batch }) => batch?.id],
  ["batch_size", "integer", ({ batch }) => batch?.size],
  ["worker", "text", ({ batch }) => batch?.worker],
  ["reason", "text", ({ batch }) => batch?.reason],
  ["attempts", "smallint", ({ attempts }) => attempts],
  [
    "settled_at",
    "float8",
    ({ settledAt }) => (settledAt === 0 ? undefined : settledAt / 1000),
    "to_timestamp(given.settled_at)",
  ],
  ["outcome", "text", ({ outcome }) => outcome],
];

const SEQ: Column = ["seq", "bigint", ({ seq }) => seq];
const INSERTED = [SEQ, ...BEGINNINGS, ...ENDINGS];
const UPDATED = [SEQ, ...ENDINGS];

const unnested = (columns: readonly Column[]): string =>
  `unnest(${columns.map(([, type], at) => `$${at + 2}::${type}[]`).join(", ")}) AS given(${namesOf(columns)})`;
const namesOf = (columns: readonly Column[]): string => columns.map(([name]) => name).join(", ");
const valuesOf = (columns: readonly Column[]): string =>
  columns.map(([name, , , sql]) => sql ?? name).join(", ");

const INSERT = `INSERT INTO ferry_requests (instance, ${namesOf(INSERTED)})
  SELECT $1::uuid, ${valuesOf(INSERTED)} FROM ${unnested(INSERTED)} ON CONFLICT DO NOTHING`;
const UPDATE = `UPDATE ferry_requests AS old
  SET ${ENDINGS.map(([name, , , sql]) => `${name} = ${sql ?? `given.${name}`}`).join(", ")}
  FROM ${unnested(UPDATED)} WHERE old.instance = $1::uuid AND old.seq = given.seq`;

/** Rows for the writing thread: by column, the values of all rows. */
export interface RowBundle {
  readonly instance: string;
  readonly columns: readonly (readonly Cell[])[];
}

export function bundleOf(verb: "insertRows" | "updateRows", rows: readonly RequestRow[]): Cell[][] {
  return (verb === "insertRows" ? INSERTED : UPDATED).map(([, , pick]) => rows.map(pick));
}

export async function insertRows(link: PostgresLink, { instance, columns }: RowBundle): Promise<void> {
  await link.ask(INSERT, [instance, ...columns.map(arrayLiteral)]);
}

export async function updateEndings(link: PostgresLink, { instance, columns }: RowBundle): Promise<void> {
  await link.ask(UPDATE, [instance, ...columns.map(arrayLiteral)]);
}

/** Deletes up to `max` older rows, unless another gateway is doing so; returns how many. */
export async function deleteOld(link: PostgresLink, days: number, max: number): Promise<number> {
  const { count } = await link.ask(
    `WITH turn AS MATERIALIZED (SELECT pg_try_advisory_xact_lock(${RETENTION_LOCK}) AS ours)
    DELETE FROM ferry_requests WHERE (SELECT ours FROM turn) AND ctid = ANY (ARRAY(
      SELECT ctid FROM ferry_requests WHERE started_at < now() - make_interval(days => $1::int)
      ORDER BY started_at LIMIT $2::int))`,
    [days, max],
  );
  return count;
}

export async function findRows(link: PostgresLink, id: string, max: number): Promise<LoggedRequest[]> {
  const instant = (name: string): string => `extract(epoch FROM ${name})::float8 * 1000 AS ${name}`;
  const rows = await link.ask(
    `SELECT id, tenant, tier, model, status, code, work, ${instant("started_at")}, latency_ms, queue_ms, worker_ms,
      batch_id, batch_size, worker, reason, attempts, ${instant("settled_at")}, outcome, trace_id
    FROM ferry_requests WHERE id = $1::text ORDER BY started_at DESC LIMIT $2::int`,
    [id, max],
  );
  return rows.map(fromRow);
}

function fromRow(row: PostgresRow): LoggedRequest {
  const text = (name: string): string => (typeof row[name] === "string" ? row[name] : "");
  const number = (name: string): number => Number(row[name] ?? 0);
  return {
    id: text("id"),
    tenant: text("tenant"),
    tier: text("tier"),
    model: text("model"),
    status: number("status"),
    code: text("code"),
    work: text("work"),
    startedAt: number("started_at"),
    latencyMs: number("latency_ms"),
    queuedAt: 0,
    queueMs: number("queue_ms"),
    workerMs: number("worker_ms"),
    attempts: number("attempts"),
    settledAt: number("settled_at"),
    outcome: text("outcome"),
    traceId: text("trace_id"),
    batch:
      row["batch_id"] === null
        ? undefined
        : {
            id: text("batch_id"),
            size: number("batch_size"),
            worker: text("worker"),
            reason: text("reason"),
            startedAt: 0,
            why: "",
          },
  };
}

/** A PostgreSQL array literal; "" is NULL. Consecutive values are often equal. */
function arrayLiteral(cells: readonly Cell[]): string {
  let last: Cell;
  let lastText = "NULL";
  const texts = cells.map((cell) => {
    if (cell === last) return lastText;
    last = cell;
    return (lastText = typeof cell === "number" ? String(cell) : quoted(cell));
  });
  return `{${texts.join(",")}}`;
}

/** PostgreSQL text cannot contain NUL. */
function quoted(text = ""): string {
  if (text === "") return "NULL";
  return PLAIN.test(text) ? `"${text}"` : `"${text.replaceAll("\0", "\ufffd").replace(/["\\]/g, "\\$&")}"`;
}

const PLAIN = /^[\w.:/@ -]*$/;

function thousandths(ms: number): number {
  return Math.round(ms * 1000) / 1000;
}
