/**
 * What came of the requests of a run, counted while it goes.
 *
 *   served    2xx
 *   refused   429 or 503: turned away
 *   failed    another status, or the connection could not be made
 *   lost      sent, and no answer: the time was up, or the connection broke
 *   unsent    due while nothing more could be on its way
 *
 * offered = served + refused + failed + lost + unsent, and while a run goes on (or was interrupted) + pending.
 * A crossed answer (somebody else's output) counts as served and is an error beside that.
 *
 * Latency is that of served requests, from the instant at which they should have left. It is kept as a whole, by
 * kind of caller, and in blocks of time (by the same instant), from which intervals.ts tells how sure the
 * figures are. Queue time and size of the batch come from the answers' headers: the sum of 1/size over the
 * answers of a batch is 1, so the sum over all of them is how many batches they came in.
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

/** How a request ended that was not answered. */
export type Silence = "timeout" | "broken" | "not connected" | "unsent";

/** As many blocks as a run is cut into, and the shortest that says anything. */
const BLOCKS = 20;
const MIN_BLOCK_MS = 1000;
/** As Ferry writes them. The metadata stand behind the output, which may say anything. */
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
  /** Answers that said how long they waited, and in what batch. */
  batched = 0;
  queueSumMs = 0;
  batches = 0;
  /** Answers that said how long the server needed. */
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

  /** When what counts began. */
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
  /** Tasks in a batch on average; NaN before the first. */
  get meanFill(): number {
    return this.batched / this.batches;
  }

  offer(kind: number): void {
    this.kinds[kind]!.offered++;
  }

  /** An answer; `head` and `tail` are its first and last characters. */
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

  /** Whether an answer carried the marker of its request; counts also in the warm-up. */
  echo(isOwn: boolean): void {
    if (isOwn) this.#echoed++;
    else this.#foreign++;
    // A model that never echoes says nothing about whose answer it is; one that does always should.
    this.crossed = this.#echoed > 0 ? this.#foreign : 0;
  }

  /** Whether answers show whose they are. */
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

/** The number behind `name`, which stands at `at`; -1 when it is not there. */
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
