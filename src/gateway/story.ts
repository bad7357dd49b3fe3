/** A request's history for operators, from the engine's record, or from the request log if there is none. */
import { type ErrorCode, Refusal } from "../core/errors.ts";
import type { RecordView } from "../engine/engine.ts";
import { CLIENT_LEFT } from "../observe/events.ts";
import type { LoggedRequest } from "../observe/request-log.ts";
import type { Trouble } from "../observe/recent.ts";

export interface History {
  /** In memory, newest first. */
  recent(): Iterable<LoggedRequest>;
  /** By id, newest first. */
  requests(id: string): readonly LoggedRequest[];
  /** By id from the database; undefined if there is none or it is down. */
  older(id: string): Promise<readonly LoggedRequest[] | undefined>;
  troubles(id: string): readonly Trouble[];
}

export type Tiers = readonly { readonly name: string }[];

const ACCEPTED = 202;
const MAX_LISTED = 1000;
const LISTED = 100;

export function story(record: RecordView, tiers: Tiers, history: History): object {
  const { task, state, attempt, queuedAt, settledAt, outcome, batch } = record;
  const requests = history.requests(task.id);
  const own = requests.find(({ work }) => work !== "joined");
  return {
    task_id: task.id,
    tenant: task.tenant,
    model: task.model,
    tier: tiers[task.tier]?.name,
    state,
    attempts: attempt,
    created_at: iso(task.createdAt),
    queued_at: iso(queuedAt),
    deadline_at: iso(task.deadlineAt),
    ...(batch && {
      batch: {
        id: batch.id,
        size: batch.size,
        reason: batch.reason,
        why: batch.why,
        worker: batch.worker,
        started_at: iso(batch.startedAt),
        queue_ms: Math.max(0, Math.round(batch.startedAt - queuedAt)),
      },
    }),
    ...(settledAt !== undefined && {
      settled_at: iso(settledAt),
      total_ms: Math.round(settledAt - task.createdAt),
    }),
    ...(outcome && { outcome: ending(outcome) }),
    gaps_ms: gaps([
      ["arrived", own?.startedAt],
      ["queued", queuedAt],
      ["batch", record.cached === true ? undefined : batch?.startedAt],
      ["settled", settledAt],
      ["answered", own && own.status !== ACCEPTED ? own.startedAt + own.latencyMs : undefined],
    ]),
    failed_attempts: history.troubles(task.id).map(troubleView),
    requests: requests.map(requestView),
  };
}

/** For a request without a record, from its log rows: newest first, at least one. */
export function loggedStory(requests: readonly LoggedRequest[], history: History): object {
  const row = requests.find(({ outcome }) => outcome !== "") ?? requests[0]!;
  const { id, tenant, model, tier, outcome } = row;
  return {
    task_id: id,
    tenant,
    model,
    tier,
    state: stateOf(row),
    attempts: row.attempts,
    created_at: iso(row.startedAt),
    ...(row.batch && { batch: batchView(row) }),
    ...(row.settledAt > 0 && {
      settled_at: iso(row.settledAt),
      total_ms: Math.round(row.settledAt - row.startedAt),
    }),
    ...(outcome !== "" && { outcome: outcome === "SUCCESS" ? { ok: true } : { ok: false, code: outcome } }),
    failed_attempts: history.troubles(id).map(troubleView),
    requests: requests.map(requestView),
    source: "request log",
  };
}

const TEXTS = ["tier", "model", "tenant", "code", "outcome", "work"] as const;
const FILTERS: readonly string[] = ["limit", "status", ...TEXTS];

/** From memory, newest first: ?limit=100&status=5xx&tier=…&model=…&tenant=…&code=… */
export function listRequests(query: string, history: History): object {
  const asked = new URLSearchParams(query);
  // An ignored typo would list everything.
  const strange = [...asked.keys()].find((name) => !FILTERS.includes(name));
  if (strange !== undefined) {
    const known = `known: ${FILTERS.join(", ")}`;
    throw new Refusal("INVALID_REQUEST", `unknown filter ${JSON.stringify(strange.slice(0, 64))}; ${known}`);
  }
  const limit = limitOf(asked.get("limit"));
  const ofStatus = statusOf(asked.get("status"));
  const texts = TEXTS.map((name) => [name, asked.get(name)] as const).filter(([, wanted]) => wanted !== null);
  const requests: object[] = [];
  for (const row of history.recent()) {
    if (requests.length === limit) break;
    if (ofStatus(row.status) && texts.every(([name, wanted]) => row[name] === wanted)) {
      requests.push(requestView(row));
    }
  }
  return { requests };
}

function limitOf(written: string | null): number {
  if (written === null) return LISTED;
  const limit = /^\d{1,4}$/.test(written) ? Number(written) : 0;
  if (limit >= 1 && limit <= MAX_LISTED) return limit;
  throw new Refusal("INVALID_REQUEST", `"limit" must be a number from 1 to ${MAX_LISTED}`);
}

function statusOf(written: string | null): (status: number) => boolean {
  if (written === null) return () => true;
  if (!/^[1-5](xx|\d\d)$/.test(written)) {
    throw new Refusal("INVALID_REQUEST", `"status" must be a status like 503, or a class like 5xx`);
  }
  if (!written.endsWith("xx")) return (status) => status === Number(written);
  return (status) => Math.floor(status / 100) === Number(written[0]);
}

function stateOf({ outcome, status }: LoggedRequest): string {
  if (outcome !== "") return outcome === "SUCCESS" ? "done" : "failed";
  if (status === ACCEPTED) return "accepted";
  return status === CLIENT_LEFT ? "left" : "refused";
}

function requestView(row: LoggedRequest): object {
  const { id, tenant, tier, model, status, code, work, startedAt, latencyMs, settledAt } = row;
  return {
    request_id: id,
    tenant,
    tier,
    model,
    status,
    ...(code !== "" && { code }),
    work,
    arrived_at: iso(startedAt),
    answered_at: iso(startedAt + latencyMs),
    latency_ms: tenths(latencyMs),
    ...(row.batch && {
      queue_ms: tenths(row.queueMs),
      worker_ms: tenths(row.workerMs),
      batch: batchView(row),
    }),
    attempts: row.attempts,
    ...(row.outcome !== "" && { outcome: row.outcome }),
    ...(settledAt > 0 && { settled_at: iso(settledAt) }),
    ...(row.traceId !== "" && { trace_id: row.traceId }),
  };
}

function batchView({ batch }: LoggedRequest): object {
  const { id, size, reason, worker } = batch!;
  return { id, size, reason, worker };
}

function troubleView({ at, attempt, batchId, worker, message, retryAt }: Trouble): object {
  return {
    at: iso(at),
    ...(attempt > 0 && { attempt }),
    ...(batchId !== "" && { batch_id: batchId, worker }),
    message,
    ...(retryAt > 0 ? { retry_at: iso(retryAt) } : { dead: true }),
  };
}

/** Time between consecutive known instants: `arrived_to_queued` and so on. */
function gaps(
  instants: readonly (readonly [name: string, at: number | undefined])[],
): Record<string, number> {
  const known = instants.filter((instant): instant is [string, number] => instant[1] !== undefined);
  const all: Record<string, number> = {};
  known.slice(1).forEach(([name, at], before) => {
    const [from, since] = known[before]!;
    all[`${from}_to_${name}`] = tenths(Math.max(0, at - since));
  });
  return all;
}

const WORKERS_WORDS: ReadonlySet<ErrorCode> = new Set([
  "INPUT_REJECTED",
  "NOT_FOUND",
  "UNAUTHENTICATED",
  "FORBIDDEN",
  "RATE_LIMITED",
]);

/** Without the worker's message, which may quote the input. */
function ending(outcome: NonNullable<RecordView["outcome"]>): object {
  if (outcome.ok) return { ok: true, output_bytes: outcome.output.length };
  const { code, message } = outcome;
  return { ok: false, code, ...(!WORKERS_WORDS.has(code) && { message }) };
}

function tenths(ms: number): number {
  return Math.round(ms * 10) / 10;
}

export function iso(instant: number): string {
  return new Date(instant).toISOString();
}
