/**
 * Outcome counters of a bench run.
 *
 *   served    2xx
 *   refused   429 or 503
 *   failed    another status, or the connection could not be made
 *   lost      sent, no reply: timeout, or the connection broke
 *   unsent    due while `outstanding` was reached
 *
 * offered = served + refused + failed + lost + unsent (+ pending while running or interrupted). A crossed reply
 * (another request's output) counts as served and as an error.
 *
 * Latency covers served requests, from the instant they were due; kept in total, per kind of caller, and in time
 * blocks, from which results.ts computes confidence intervals. Queue time and batch size come from reply headers:
 * 1/size summed over the replies of a batch is 1, so the sum over all replies is the number of batches.
 */
import { Histogram } from "./histogram.ts";

export interface KindAccount {
  readonly label: string;
  offered: number;
  served: number;
  refused: number;
  failed: number;
  lost: number;
  unsent: number;
  readonly latency: Histogram;
}

export type Silence = "timeout" | "broken" | "not connected" | "unsent";

/** Number of blocks per run, and the shortest useful block. */
const BLOCKS = 20;
const MIN_BLOCK_MS = 1000;
/** As Ferry writes them. Metadata follow the output, which may contain any text. */
const SIZE = "\r\nx-ferry-batch-size: ";
const QUEUE = "\r\nx-ferry-queue-ms: ";
const LATENCY = '"latency_ms":';

export class Account {
  readonly kinds: readonly KindAccount[];
  readonly latency = new Histogram();
  readonly refusedLatency = new Histogram();
  readonly codes = new Map<string, number>();
  readonly blocks: Histogram[] = [];
  readonly blockMs: number;
  crossed = 0;
  cached = 0;
  /** Replies with queue time and batch size. */
  batched = 0;
  queueSumMs = 0;
  batches = 0;
  /** Replies with the server's total time. */
  timed = 0;
  serverSumMs = 0;
  #echoed = 0;
  #foreign = 0;
  #startAt = 0;

  constructor(labels: readonly string[], measureMs: number) {
    this.kinds = labels.map((label) => ({
      label,
      offered: 0,
      served: 0,
      refused: 0,
      failed: 0,
      lost: 0,
      unsent: 0,
      latency: new Histogram(),
    }));
    this.blockMs = Math.max(MIN_BLOCK_MS, measureMs / BLOCKS);
  }

  begin(at: number): void {
    this.#startAt = at;
  }

  get offered(): number {
    return this.#sum("offered");
  }
  get served(): number {
    return this.#sum("served");
  }
  get refused(): number {
    return this.#sum("refused");
  }
  get failed(): number {
    return this.#sum("failed");
  }
  get lost(): number {
    return this.#sum("lost");
  }
  get unsent(): number {
    return this.#sum("unsent");
  }
  get errors(): number {
    return this.failed + this.lost + this.unsent + this.crossed;
  }
  get pending(): number {
    return this.offered - this.served - this.refused - this.failed - this.lost - this.unsent;
  }
  /** Mean tasks per batch; NaN before the first. */
  get meanFill(): number {
    return this.batched / this.batches;
  }

  offer(kind: number): void {
    this.kinds[kind]!.offered++;
  }

  answered(kind: number, status: number, intendedAt: number, now: number, head: string, tail: string): void {
    this.#count(String(status));
    const row = this.kinds[kind]!;
    const ms = now - intendedAt;
    if (status === 429 || status === 503) {
      row.refused++;
      this.refusedLatency.record(ms);
      return;
    }
    if (status < 200 || status > 299) {
      row.failed++;
      return;
    }
    row.served++;
    this.latency.record(ms);
    if (this.kinds.length > 1) row.latency.record(ms);
    this.#block(intendedAt).record(ms);
    this.#readMetadata(head, tail);
  }

  silent(kind: number, how: Silence, detail = ""): void {
    const row = this.kinds[kind]!;
    if (how === "unsent") row.unsent++;
    else if (how === "not connected") row.failed++;
    else row.lost++;
    this.#count(detail === "" ? how : detail);
  }

  /** Whether a reply carried its request's marker; counted in the warm-up too. */
  echo(isOwn: boolean): void {
    if (isOwn) this.#echoed++;
    else this.#foreign++;
    // A model that never echoes proves nothing; one that does should always echo the right marker.
    this.crossed = this.#echoed > 0 ? this.#foreign : 0;
  }

  get echoes(): boolean {
    return this.#echoed > 0;
  }

  #readMetadata(head: string, tail: string): void {
    const size = numberAt(head, head.indexOf(SIZE), SIZE);
    if (size > 0) {
      this.batched++;
      this.batches += 1 / size;
      this.queueSumMs += Math.max(0, numberAt(head, head.indexOf(QUEUE), QUEUE));
    }
    const serverMs = numberAt(tail, tail.lastIndexOf(LATENCY), LATENCY);
    if (serverMs >= 0) {
      this.timed++;
      this.serverSumMs += serverMs;
      if (tail.includes('"cached":true')) this.cached++;
    }
  }

  #block(at: number): Histogram {
    const index = Math.max(0, Math.floor((at - this.#startAt) / this.blockMs));
    while (this.blocks.length <= index) this.blocks.push(new Histogram());
    return this.blocks[index]!;
  }

  #count(code: string): void {
    this.codes.set(code, (this.codes.get(code) ?? 0) + 1);
  }

  #sum(name: "offered" | "served" | "refused" | "failed" | "lost" | "unsent"): number {
    let sum = 0;
    for (const kind of this.kinds) sum += kind[name];
    return sum;
  }
}

/** The number after `name`, which starts at `at`; -1 when absent. */
function numberAt(text: string, at: number, name: string): number {
  if (at < 0) return -1;
  const from = at + name.length;
  let end = from;
  while (end < text.length && isNumeric(text.charCodeAt(end))) end++;
  return Number(text.slice(from, end));
}

function isNumeric(code: number): boolean {
  return (code >= 48 && code <= 57) || code === 46;
}
