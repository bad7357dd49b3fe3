/**
 * What the server counted between two reads of its /metrics.
 *
 * Reads only the Prometheus families that ferry bench shows, summed over the processes and the selected models:
 *
 *   batches, fill   ferry_batch_size: count, tasks, and count per size
 *   reasons         ferry_batches_total{reason}
 *   worker time     ferry_worker_seconds: one observation per call
 *   workers         ferry_workers that are not down
 *
 * GPU time = workers × seconds. Busy: the share spent in calls; of that, mean fill is "filled", the rest "empty"; what
 * remains is idle. Mean fill is an approximation: larger batches may take longer. Calls are counted when they end, so
 * each read misses at most one call per worker.
 */

export interface Scrape {
  /** On the reader's clock. */
  readonly at: number;
  /** One per process that answered. */
  readonly texts: readonly string[];
}

export interface SizeBin {
  readonly from: number;
  readonly to: number;
  readonly batches: number;
}

export interface ServerSide {
  readonly seconds: number;
  readonly batches: number;
  readonly tasks: number;
  readonly maxBatchSize: number;
  readonly reasons: Readonly<Record<string, number>>;
  readonly sizes: readonly SizeBin[];
  /** Mean call time; NaN without calls. */
  readonly workerMs: number;
  readonly workers: number;
  /** Shares of the workers' time, 0 to 1; NaN without workers. */
  readonly filled: number;
  readonly empty: number;
  readonly idle: number;
}

type Labels = Readonly<Record<string, string>>;

interface Line {
  readonly name: string;
  readonly labels: Labels;
  readonly value: number;
}

const KNOWN = /^ferry_(batch_size|batches_total|worker_seconds|workers)/;
const LINE = /^(\w+)(?:\{(.*?)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

function linesOf(text: string, model: string | undefined): Line[] {
  const lines: Line[] = [];
  for (const row of text.split("\n")) {
    if (!KNOWN.test(row)) continue;
    const [, name, inner = "", value] = LINE.exec(row) ?? [];
    if (name === undefined) continue;
    const labels = Object.fromEntries([...inner.matchAll(LABEL)].map(([, key, text]) => [key!, text!]));
    if (model !== undefined && labels["model"] !== model) continue;
    lines.push({ name, labels, value: Number(value) });
  }
  return lines;
}

class Sums {
  readonly #sums = new Map<string, number>();
  readonly #values = new Map<string, Set<string>>();

  constructor(scrape: Scrape, model: string | undefined) {
    for (const { name, labels, value } of scrape.texts.flatMap((text) => linesOf(text, model))) {
      const label = labels["le"] ?? labels["reason"] ?? labels["state"] ?? "";
      const key = `${name} ${label}`;
      this.#sums.set(key, (this.#sums.get(key) ?? 0) + value);
      const values = this.#values.get(name) ?? new Set();
      this.#values.set(name, values.add(label));
    }
  }

  get(name: string, label = ""): number {
    return this.#sums.get(`${name} ${label}`) ?? 0;
  }

  labels(name: string): string[] {
    return [...(this.#values.get(name) ?? [])];
  }
}

export function serverSide(before: Scrape, after: Scrape, model: string | undefined): ServerSide {
  const [from, to] = [new Sums(before, model), new Sums(after, model)];
  const more = (name: string, label = ""): number => Math.max(0, to.get(name, label) - from.get(name, label));
  const seconds = (after.at - before.at) / 1000;
  const batches = more("ferry_batch_size_count");
  const tasks = more("ferry_batch_size_sum");
  const bounds = to
    .labels("ferry_batch_size_bucket")
    .map(Number)
    .filter(Number.isFinite)
    .sort((a, b) => a - b);
  const maxBatchSize = bounds.at(-1) ?? 0;
  const workers = to
    .labels("ferry_workers")
    .filter((state) => state !== "down")
    .reduce((sum, state) => sum + to.get("ferry_workers", state), 0);
  const busy = Math.min(1, more("ferry_worker_seconds_sum") / (workers * seconds));
  const filled = (busy * tasks) / (batches * maxBatchSize);
  return {
    seconds,
    batches,
    tasks,
    maxBatchSize,
    reasons: Object.fromEntries(
      to.labels("ferry_batches_total").map((reason) => [reason, more("ferry_batches_total", reason)]),
    ),
    sizes: binsOf(bounds, (le) => more("ferry_batch_size_bucket", String(le))),
    workerMs: (more("ferry_worker_seconds_sum") / more("ferry_worker_seconds_count")) * 1000,
    workers,
    filled,
    empty: busy - filled,
    idle: 1 - busy,
  };
}

/** Up to five rows: quarters of the largest size, and that size alone. */
function binsOf(bounds: readonly number[], upTo: (le: number) => number): SizeBin[] {
  const max = bounds.at(-1);
  if (max === undefined) return [];
  const ends = [0.25, 0.5, 0.75].map((share) => bounds.findLast((bound) => bound <= share * max) ?? 0);
  const all = [...new Set([...ends, max - 1, max])].filter((end) => end > 0);
  return all.map((to, at) => {
    const below = at === 0 ? 0 : all[at - 1]!;
    return { from: below + 1, to, batches: upTo(to) - (below === 0 ? 0 : upTo(below)) };
  });
}
