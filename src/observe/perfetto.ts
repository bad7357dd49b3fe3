/**
 * The last seconds as a Chrome trace, for https://ui.perfetto.dev and chrome://tracing.
 *
 *   process  a model; one more for requests without a model
 *   thread   a worker with its batches: "F 64/64" left full, with 64 of 64 places
 *   thread   a track of requests, with parts "queue" and "worker"; an arrow leads into the batch
 *   counter  waiting tasks by tier, whenever a batch leaves
 *
 * Slices of a thread must not overlap, so concurrent requests get separate tracks, up to `MAX_TRACKS` per model;
 * further ones are counted. Tenants are omitted: such files are shared. Instants are whole microseconds since 1970,
 * both ends rounded alike. Yields to the event loop every `SLICES_A_TURN` requests (about 1 ms).
 */
import type { RecentBatch } from "./recent.ts";
import type { LoggedRequest } from "./request-log.ts";

export interface TraceScene {
  readonly from: number;
  readonly to: number;
  readonly models: readonly string[];
  readonly tiers: readonly string[];
  /** By start. */
  readonly batches: readonly RecentBatch[];
  /** Newest first; reading stops at the first that ended before `from`. */
  readonly requests: Iterable<LoggedRequest>;
}

interface Place {
  readonly pid: number;
  readonly tid: number;
}

interface Slice {
  readonly start: number;
  readonly end: number;
}

type Shown = Slice & Place & { readonly row: LoggedRequest };
type Drawn = Slice & Place & { readonly batch: RecentBatch };

const MAX_TRACKS = 100;
const MAX_REQUESTS = 10_000;
const SLICES_A_TURN = 200;
/** Thread ids must be unique across processes: some viewers keep one table. */
const THREADS_A_PROCESS = 100_000;
const FIRST_TRACK = 50_000;
const ACCEPTED = 202;

const ORDER = new Intl.Collator("en", { numeric: true });

const LETTERS: Readonly<Record<string, string>> = { full: "F", wait: "W", idle: "I", deadline: "D" };

/** The whole file; yields to the event loop between pieces. */
export async function traceText(scene: TraceScene): Promise<string> {
  const pieces: string[] = [];
  let count = 0;
  for (const piece of traceEvents(scene)) {
    pieces.push(JSON.stringify(piece));
    if (++count % (SLICES_A_TURN * 5) === 0) await new Promise((resolve) => setImmediate(resolve));
  }
  const about = pieces.pop()!;
  return `{"displayTimeUnit":"ms","otherData":${about},"traceEvents":[\n${pieces.join(",\n")}\n]}\n`;
}

/** The events; the last item is the metadata. */
export function* traceEvents(scene: TraceScene): Generator<object> {
  const { from, to, models } = scene;
  const pids = new Map([...models, ""].map((model, at) => [model, at + 1]));
  const threads = new Threads(models, pids);
  const drawn = drawBatches(scene, pids, threads);
  const { shown, leftOut, since } = placeRequests(scene, pids, threads);
  yield* threads.names();
  for (const each of drawn.values()) yield batchSlice(each);
  yield* counters(scene, pids);
  let flow = 0;
  for (const each of shown) {
    yield* requestSlices(each);
    const batch = each.row.batch && drawn.get(each.row.batch.id);
    if (batch === undefined || !hasParts(each.row)) continue;
    const ts = within(micros(each.row.batch!.startedAt), each);
    // Clocks of two machines may differ by more than the batch took.
    if (ts > batch.end) continue;
    const arrow = { name: "rides in", cat: "ride", id: ++flow };
    yield { ph: "s", ...arrow, ts, ...placeOf(each) };
    yield { ph: "f", bp: "e", ...arrow, ts: Math.max(ts, batch.start), ...placeOf(batch) };
  }
  yield {
    from: iso(from),
    to: iso(to),
    batches: drawn.size,
    requests: shown.length,
    requests_left_out: leftOut,
    requests_since: iso(since),
  };
}

class Threads {
  readonly #workers = new Map<string, Place>();
  readonly #tracks = new Map<number, number>();
  readonly #pids: ReadonlyMap<string, number>;
  readonly #events: object[] = [];

  constructor(models: readonly string[], pids: ReadonlyMap<string, number>) {
    this.#pids = pids;
    for (const model of models) this.#process(model, model);
  }

  worker(model: string, name: string): Place {
    const key = `${model}\n${name}`;
    const known = this.#workers.get(key);
    if (known !== undefined) return known;
    const pid = this.#pids.get(model)!;
    const place = { pid, tid: pid * THREADS_A_PROCESS + this.#workers.size + 1 };
    this.#workers.set(key, place);
    this.#thread(place, name);
    return place;
  }

  track(model: string, number: number): Place {
    const pid = this.#pids.get(model)!;
    const place = { pid, tid: pid * THREADS_A_PROCESS + FIRST_TRACK + number };
    if (number >= (this.#tracks.get(pid) ?? 0)) {
      if (model === "" && number === 0) this.#process(model, "no model");
      this.#tracks.set(pid, number + 1);
      this.#thread(place, `requests ${number + 1}`);
    }
    return place;
  }

  names(): readonly object[] {
    return this.#events;
  }

  #process(model: string, name: string): void {
    const pid = this.#pids.get(model)!;
    const place = { pid, tid: pid * THREADS_A_PROCESS };
    this.#events.push({ ph: "M", name: "process_name", ...place, args: { name } });
    this.#events.push({ ph: "M", name: "process_sort_index", ...place, args: { sort_index: pid } });
  }

  #thread(place: Place, name: string): void {
    this.#events.push({ ph: "M", name: "thread_name", ...place, args: { name } });
    this.#events.push({ ph: "M", name: "thread_sort_index", ...place, args: { sort_index: place.tid } });
  }
}

/** By id. A worker runs one batch at a time; overlaps from rounding are cut. */
function drawBatches(
  { batches, to }: TraceScene,
  pids: ReadonlyMap<string, number>,
  threads: Threads,
): Map<string, Drawn> {
  const drawn = new Map<string, Drawn>();
  const next = new Map<number, number>();
  const known = batches.filter(({ model }) => pids.has(model));
  const workers = known.map(({ model, note }) => ({ model, name: note.worker }));
  workers.sort((a, b) => ORDER.compare(a.name, b.name));
  for (const { model, name } of workers) threads.worker(model, name);
  for (const batch of known.toReversed()) {
    const place = threads.worker(batch.model, batch.note.worker);
    const start = micros(batch.startedAt);
    const end = Math.min(micros(batch.endedAt === 0 ? to : batch.endedAt), next.get(place.tid) ?? Infinity);
    next.set(place.tid, start);
    drawn.set(batch.note.id, { ...place, start, end: Math.max(start, end), batch });
  }
  return drawn;
}

function placeRequests(scene: TraceScene, pids: ReadonlyMap<string, number>, threads: Threads) {
  const found: LoggedRequest[] = [];
  let since = scene.from;
  let left = 0;
  let oldest = scene.to;
  for (const row of scene.requests) {
    oldest = row.startedAt + row.latencyMs;
    if (oldest < scene.from) break;
    if (found.length < MAX_REQUESTS) found.push(row);
    else left++;
  }
  // The kept batches do not reach back to `from`.
  if (oldest >= scene.from && found.length > 0) since = oldest;
  const tracks = new Map<string, number[]>();
  const shown: Shown[] = [];
  for (const row of found.sort((a, b) => a.startedAt - b.startedAt)) {
    const model = pids.has(row.model) ? row.model : "";
    const start = micros(row.startedAt);
    const end = micros(row.startedAt + row.latencyMs);
    const ends = tracks.get(model) ?? [];
    tracks.set(model, ends);
    let free = ends.findIndex((busyUntil) => busyUntil <= start);
    if (free < 0) free = ends.length;
    if (free === MAX_TRACKS) {
      left++;
      continue;
    }
    ends[free] = end;
    shown.push({ ...threads.track(model, free), start, end, row });
  }
  return { shown, leftOut: left, since };
}

function batchSlice({ batch, start, end, pid, tid }: Drawn): object {
  const { note, maxBatchSize, calls, oldestWaitMs, attempt, shape } = batch;
  return {
    ph: "X",
    name: `${LETTERS[note.reason]} ${note.size}/${maxBatchSize}`,
    cat: "batch",
    ts: start,
    dur: end - start,
    pid,
    tid,
    args: {
      batch_id: note.id,
      reason: note.reason,
      why: note.why,
      fill: Math.round((1000 * note.size) / maxBatchSize) / 1000,
      oldest_wait_ms: tenths(oldestWaitMs),
      ...(shape && { longest_tokens: shape.longest, total_tokens: shape.total }),
      ...(calls === 0 ? { running: true } : { calls }),
      ...(attempt > 1 && { attempt }),
      ...(batch.overdue && { overdue: true }),
    },
  };
}

function* counters({ batches, tiers }: TraceScene, pids: ReadonlyMap<string, number>): Generator<object> {
  for (const { model, waiting, startedAt } of batches) {
    const pid = pids.get(model);
    if (pid === undefined) continue;
    const args = Object.fromEntries(tiers.map((tier, at) => [tier, waiting[at] ?? 0]));
    yield { ph: "C", name: "waiting", ts: micros(startedAt), pid, tid: pid * THREADS_A_PROCESS, args };
  }
}

function* requestSlices(shown: Shown): Generator<object> {
  const { row, start, end } = shown;
  const { id, status, code, work, tier, attempts, batch } = row;
  const place = placeOf(shown);
  yield {
    ph: "X",
    name: tier === "" ? String(status) : `${status} ${tier}`,
    cat: "request",
    ts: start,
    dur: end - start,
    ...place,
    args: {
      id,
      status,
      ...(code !== "" && { code }),
      work,
      attempts,
      ...(batch && { batch_id: batch.id, queue_ms: tenths(row.queueMs), worker_ms: tenths(row.workerMs) }),
    },
  };
  if (!hasParts(row)) return;
  const part = (name: string, from: number, to: number): object => {
    const ts = within(micros(from), shown);
    return { ph: "X", name, cat: "request", ts, dur: Math.max(0, within(micros(to), shown) - ts), ...place };
  };
  yield part("queue", row.queuedAt, batch!.startedAt);
  yield part("worker", batch!.startedAt, row.settledAt);
}

/** Its task ran within the request: not a 202, not from the cache. */
function hasParts({ batch, work, status, settledAt }: LoggedRequest): boolean {
  return batch !== undefined && work !== "cached" && status !== ACCEPTED && settledAt > 0;
}

function placeOf({ pid, tid }: Place): Place {
  return { pid, tid };
}

function within(instant: number, { start, end }: Slice): number {
  return Math.min(end, Math.max(start, instant));
}

function micros(instant: number): number {
  return Math.round(instant * 1000);
}

function tenths(ms: number): number {
  return Math.round(ms * 10) / 10;
}

function iso(instant: number): string {
  return new Date(instant).toISOString();
}
