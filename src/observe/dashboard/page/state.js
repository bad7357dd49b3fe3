/**
 * What the page knows: a history of seconds for each model, the batches of the last minute, what was said last.
 *
 * Frames bring only what is new. A second that never came (a frame was lost, Ferry was restarted) is a gap:
 * null where a line would lie, 0 where things are counted. After a reconnect the server's history is laid over
 * ours from its first second on, so what was seen before a restart stays on the charts.
 */
/** @import { BatchRow, Column, Frame, Hello, Note, Slots } from "../frames.ts" */

const KEPT_SECONDS = 900;
const KEPT_BATCHES_MS = 65_000;
const KEPT_NOTES = 60;

/** Lines that break where nothing is known; all other columns count something. */
const LINES = new Set(["p50", "p95", "p99", "slowQueueMs", "slowWorkerMs", "slowGatewayMs", "load"]);

export class History {
  /** The first second that is held. */
  from = 0;
  length = 0;
  /** @type {Map<Column, (number | null)[]>} */
  columns = new Map();
  /** @type {number[][]} */
  depth = [];
  /** @type {number[][]} */
  fill = [];
  /** "tier reason" → per second. @type {Map<string, number[]>} */
  shed = new Map();

  /** @param {Slots} slots */
  merge(slots) {
    if (slots.length === 0) return;
    const gap = slots.from - (this.from + this.length);
    if (this.length === 0 || gap > KEPT_SECONDS || slots.from <= this.from) this.#clear(slots.from);
    else if (gap < 0) this.#cut(this.length + gap);
    else if (gap > 0) this.#skip(gap);
    for (const name of /** @type {Column[]} */ (Object.keys(slots.columns))) {
      const column = this.columns.get(name) ?? this.#blank(name);
      column.push(...slots.columns[name]);
    }
    slots.depth.forEach((list, at) => (this.depth[at] ??= this.#zeros()).push(...list));
    slots.fill.forEach((list, at) => (this.fill[at] ??= this.#zeros()).push(...list));
    for (const [key, list] of Object.entries(slots.shed)) {
      const kept = this.shed.get(key) ?? this.#zeros();
      this.shed.set(key, kept);
      kept.push(...list);
    }
    this.length += slots.length;
    for (const list of this.#counts()) while (list.length < this.length) list.push(0);
    if (this.length > KEPT_SECONDS) this.#trim(this.length - KEPT_SECONDS);
  }

  /** The last `seconds`, oldest first; shorter while there is less. @param {Column} column @param {number} seconds */
  last(column, seconds) {
    return this.columns.get(column)?.slice(-seconds) ?? [];
  }

  /** @param {Column} column @param {number} seconds */
  sum(column, seconds) {
    return total(this.columns.get(column) ?? [], seconds);
  }

  /** As it is now, whatever comes later. */
  copy() {
    const copy = new History();
    copy.from = this.from;
    copy.length = this.length;
    for (const [name, column] of this.columns) copy.columns.set(name, [...column]);
    copy.depth = this.depth.map((list) => [...list]);
    copy.fill = this.fill.map((list) => [...list]);
    for (const [key, list] of this.shed) copy.shed.set(key, [...list]);
    return copy;
  }

  #zeros() {
    return Array.from({ length: this.length }, () => 0);
  }

  /** @param {Column} name */
  #blank(name) {
    /** @type {(number | null)[]} */
    const column = Array.from({ length: this.length }, () => (LINES.has(name) ? null : 0));
    this.columns.set(name, column);
    return column;
  }

  #counts() {
    return [...this.depth, ...this.fill, ...this.shed.values()];
  }

  /** @param {number} from */
  #clear(from) {
    this.from = from;
    this.length = 0;
    this.columns.clear();
    this.depth = [];
    this.fill = [];
    this.shed.clear();
  }

  /** @param {number} length */
  #cut(length) {
    for (const list of [...this.columns.values(), ...this.#counts()]) list.length = length;
    this.length = length;
  }

  /** @param {number} seconds */
  #skip(seconds) {
    for (let i = 0; i < seconds; i++) {
      for (const [name, column] of this.columns) column.push(LINES.has(name) ? null : 0);
      for (const list of this.#counts()) list.push(0);
    }
    this.length += seconds;
  }

  /** @param {number} seconds */
  #trim(seconds) {
    for (const list of [...this.columns.values(), ...this.#counts()]) list.splice(0, seconds);
    for (const [key, list] of this.shed) if (!list.some((times) => times > 0)) this.shed.delete(key);
    this.from += seconds;
    this.length -= seconds;
  }
}

/** @param {readonly (number | null)[]} list @param {number} seconds */
export function total(list, seconds) {
  let sum = 0;
  for (let i = Math.max(0, list.length - seconds); i < list.length; i++) sum += list[i] ?? 0;
  return sum;
}

/**
 * @typedef {object} Batch
 * @property {string} id
 * @property {string} worker
 * @property {number} start
 * @property {number} end 0 while it runs
 * @property {number} size
 * @property {number} reason
 * @property {number} oldestWaitMs
 * @property {number} calls
 * @property {number} attempt
 * @property {string} tiers
 * @property {Lengths | undefined} lengths of its inputs, once it has ended and was measured
 * @property {string} why "": not told
 */

/** In tokens. @typedef {{ longest: number, total: number, inOrder: number }} Lengths */

/**
 * The batches of the last minute, by worker, in the order in which they began.
 *
 * A frame may leave out batches, and with them the end of one that was seen to begin. A worker runs one at a time:
 * a batch is over when the next one begins, and when its worker has none.
 */
export class Batches {
  /** @type {Map<string, Batch>} */
  #byId = new Map();
  /** @type {Map<string, Batch[]>} */
  #byWorker = new Map();

  /** @param {string} worker @returns {readonly Batch[]} */
  of(worker) {
    return this.#byWorker.get(worker) ?? [];
  }

  get size() {
    return this.#byId.size;
  }

  /** Newest first, at most `most`. @param {number} most */
  latest(most) {
    return [...this.#byWorker.values()]
      .flatMap((row) => row.slice(-most))
      .sort((a, b) => b.start - a.start)
      .slice(0, most);
  }

  /** @param {readonly BatchRow[]} rows @param {number} now */
  merge(rows, now) {
    for (const row of rows) {
      const [id, worker, start, end, size, reason, oldestWaitMs, calls, attempt, tiers, measured, why] = row;
      const known = this.#byId.get(id);
      const lengths = lengthsOf(measured) ?? known?.lengths;
      const batch = {
        id,
        worker,
        start,
        end,
        size,
        reason,
        oldestWaitMs,
        calls,
        attempt,
        tiers,
        lengths,
        why,
      };
      // One that is over does not run again, whatever an older word says.
      if (known === undefined) this.#add(batch);
      else Object.assign(known, batch, { end: end || known.end, why: why || known.why });
    }
    for (const [worker, row] of this.#byWorker) this.#prune(worker, row, now - KEPT_BATCHES_MS);
  }

  /** Ends those that run, unless `goesOn` says that they do. @param {number} at @param {(batch: Batch) => boolean} goesOn */
  end(at, goesOn) {
    for (const row of this.#byWorker.values()) {
      const last = row.at(-1);
      if (last !== undefined && last.end === 0 && !goesOn(last)) last.end = Math.max(at, last.start);
    }
  }

  /** As they are now, whatever comes later. */
  copy() {
    const copy = new Batches();
    for (const row of this.#byWorker.values()) for (const batch of row) copy.#add({ ...batch });
    return copy;
  }

  /** @param {Batch} batch */
  #add(batch) {
    this.#byId.set(batch.id, batch);
    const row = this.#byWorker.get(batch.worker) ?? [];
    if (row.length === 0) this.#byWorker.set(batch.worker, row);
    let at = row.length;
    while (at > 0 && (row[at - 1]?.start ?? 0) > batch.start) at--;
    const [before, after] = [row[at - 1], row[at]];
    if (before !== undefined && before.end === 0) before.end = batch.start;
    if (after !== undefined && batch.end === 0) batch.end = after.start;
    if (after === undefined) row.push(batch);
    else row.splice(at, 0, batch);
  }

  /** @param {string} worker @param {Batch[]} row @param {number} before */
  #prune(worker, row, before) {
    let old = 0;
    while (old < row.length && lastSeen(row[old]) < before) old++;
    for (const { id } of row.splice(0, old)) this.#byId.delete(id);
    if (row.length === 0) this.#byWorker.delete(worker);
  }
}

/** @param {string} measured @returns {Lengths | undefined} */
function lengthsOf(measured) {
  if (measured === "") return undefined;
  const [longest = 0, total = 0, inOrder = 0] = measured.split("/").map(Number);
  return { longest, total, inOrder };
}

/** @param {Batch | undefined} batch */
function lastSeen(batch) {
  return batch?.end || Infinity;
}

/** The server's clock as seen from here: frames arrive with some delay and some jitter. */
export class ServerClock {
  #ahead = 0;
  #known = false;

  /** @param {number} serverNow @param {number} hereNow */
  set(serverNow, hereNow) {
    const ahead = serverNow - hereNow;
    const off = ahead - this.#ahead;
    this.#ahead = !this.#known || Math.abs(off) > 1000 ? ahead : this.#ahead + off / 10;
    this.#known = true;
  }

  /** @param {number} hereNow */
  at(hereNow) {
    return hereNow + this.#ahead;
  }
}

export class State {
  /** @type {Hello | undefined} */
  hello;
  /** @type {Frame | undefined} */
  frame;
  /** @type {History[]} */
  histories = [];
  /** @type {Batches[]} */
  batches = [];
  /** Newest first. @type {Note[]} */
  notes = [];
  clock = new ServerClock();
  /** When the last frame came, on this machine's clock. */
  heardAt = 0;

  /** @param {Hello} hello @param {number} hereNow */
  welcome(hello, hereNow) {
    const same = this.hello !== undefined && nameList(this.hello) === nameList(hello);
    this.hello = hello;
    if (!same) {
      this.histories = hello.models.map(() => new History());
      this.batches = hello.models.map(() => new Batches());
    }
    // What ran when the connection broke, and is not told of now, ended meanwhile: perhaps with its Ferry.
    const lastNow = this.frame?.now ?? 0;
    this.batches.forEach((batches, at) => {
      const told = new Set(hello.frame.models[at]?.batches.map(([id]) => id));
      batches.end(lastNow, ({ id }) => told.has(id));
    });
    this.notes = [];
    this.clock = new ServerClock();
    this.apply(hello.frame, hereNow);
  }

  /** As it is now, for those who paused. */
  copy() {
    const copy = new State();
    copy.hello = this.hello;
    copy.frame = this.frame;
    copy.histories = this.histories.map((history) => history.copy());
    copy.batches = this.batches.map((batches) => batches.copy());
    copy.notes = [...this.notes];
    copy.clock = this.clock;
    copy.heardAt = this.heardAt;
    return copy;
  }

  /** @param {Frame} frame @param {number} hereNow */
  apply(frame, hereNow) {
    this.frame = frame;
    this.heardAt = hereNow;
    this.clock.set(frame.now, hereNow);
    frame.models.forEach((model, at) => {
      this.histories[at]?.merge(model.slots);
      this.batches[at]?.merge(model.batches, frame.now);
      const busy = new Set(model.workers.filter(({ inFlight }) => inFlight > 0).map(({ name }) => name));
      this.batches[at]?.end(frame.now, ({ worker }) => busy.has(worker));
    });
    if (frame.notes.length > 0) {
      this.notes.unshift(...frame.notes.toReversed());
      this.notes.sort((a, b) => b.at - a.at);
      this.notes.length = Math.min(this.notes.length, KEPT_NOTES);
    }
  }
}

/** @param {Hello} hello */
function nameList({ models, tiers }) {
  return JSON.stringify([models.map(({ name, maxBatchSize }) => [name, maxBatchSize]), tiers]);
}
