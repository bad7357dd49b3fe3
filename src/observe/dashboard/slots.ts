/**
 * One model's last 900 seconds in one fixed array: one number per column and second. `now` and its neighbours are the
 * running second's sums. `close` writes them into the ring, the numbers of a second side by side, and starts the next;
 * the 901st second overwrites the first. Unknown is NaN here and null on the wire. 0.2 MB per model with three tiers,
 * touched only as seconds pass.
 */
import { SHED_REASONS } from "../events.ts";
import { type Column, COLUMNS, FILL_STEPS, HISTORY_SECONDS, type Slots } from "./frames.ts";

const REASON_COUNT = SHED_REASONS.length;
/** Layout of a second: columns, fill steps, refusals, depths. */
const FILL = COLUMNS.length;
const SHED = FILL + FILL_STEPS;

/** Column → index in `SlotRing.now`. */
export const COLUMN = Object.fromEntries(COLUMNS.map((name, at) => [name, at])) as Readonly<
  Record<Column, number>
>;

export class SlotRing {
  /** The running second; the arrays below are views of it, in this order. */
  readonly #running: Float64Array;
  readonly now: Float64Array;
  readonly fillNow: Float64Array;
  /** tier × reason, grouped by tier. */
  readonly shedNow: Float64Array;
  /** By tier: tasks waiting when the second ends. */
  readonly depthNow: Float64Array;
  readonly #tiers: readonly string[];
  readonly #ring: Float32Array;
  #second: number;
  #closed = 0;

  constructor(tiers: readonly string[], second: number) {
    this.#tiers = tiers;
    this.#second = second;
    const depth = SHED + tiers.length * REASON_COUNT;
    const running = new Float64Array(depth + tiers.length);
    this.#running = running;
    this.now = running.subarray(0, FILL);
    this.fillNow = running.subarray(FILL, SHED);
    this.shedNow = running.subarray(SHED, depth);
    this.depthNow = running.subarray(depth);
    this.#ring = new Float32Array(HISTORY_SECONDS * running.length);
  }

  get second(): number {
    return this.#second;
  }

  get length(): number {
    return this.#closed;
  }

  /** Ends the running second and starts an empty one. */
  close(): void {
    this.#ring.set(this.#running, this.#place(this.#second));
    this.#running.fill(0);
    this.#second++;
    this.#closed = Math.min(HISTORY_SECONDS, this.#closed + 1);
  }

  /** Drops the history: the machine slept. */
  skipTo(second: number): void {
    this.#second = second;
    this.#closed = 0;
  }

  /** Sum of a column over the last `seconds` complete ones. */
  sum(column: number, seconds: number): number {
    let sum = 0;
    for (const value of this.#last(column, seconds)) sum += value;
    return sum;
  }

  max(column: number, seconds: number): number {
    let most = 0;
    for (const value of this.#last(column, seconds)) most = Math.max(most, value);
    return most;
  }

  since(since: number): Slots {
    const from = Math.max(since, this.#second - this.#closed);
    const length = Math.max(0, this.#second - from);
    const whole = (at: number): number[] => this.#last(at, length).map(Math.round);
    const shed: Record<string, readonly number[]> = {};
    this.shedNow.forEach((_, at) => {
      const values = whole(SHED + at);
      if (!values.some((value) => value > 0)) return;
      const tier = this.#tiers[Math.floor(at / REASON_COUNT)]!;
      shed[`${tier} ${SHED_REASONS[at % REASON_COUNT]!}`] = values;
    });
    const columns = {} as Record<Column, (number | null)[]>;
    COLUMNS.forEach((name, at) => (columns[name] = this.#last(at, length).map(nullOrRounded)));
    const depth = SHED + this.shedNow.length;
    return {
      from,
      length,
      columns,
      depth: this.#tiers.map((_, tier) => whole(depth + tier)),
      fill: Array.from(this.fillNow, (_, step) => whole(FILL + step)),
      shed,
    };
  }

  /** A column over the last `seconds` complete ones, oldest first. */
  #last(column: number, seconds: number): number[] {
    const ring = this.#ring;
    const values = new Array<number>(Math.min(seconds, this.#closed));
    let at = this.#place(this.#second - values.length) + column;
    for (let n = 0; n < values.length; n++) {
      values[n] = ring[at]!;
      at += this.#running.length;
      if (at >= ring.length) at -= ring.length;
    }
    return values;
  }

  #place(second: number): number {
    return (second % HISTORY_SECONDS) * this.#running.length;
  }
}

function nullOrRounded(value: number): number | null {
  return Number.isNaN(value) ? null : rounded(value);
}

/** Three significant digits, but never fewer than the integer part; for display only. */
export function rounded(value: number): number {
  const size = Math.abs(value);
  if (size >= 100) return Math.round(value);
  const unit = size >= 10 ? 10 : size >= 1 ? 100 : 1000;
  return Math.round(value * unit) / unit;
}
