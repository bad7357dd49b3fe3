/**
 * One model's last 900 seconds, one number a column and second, in typed arrays that never grow.
 *
 * `now` is the second that runs, as plain sums. `close` writes it into the ring and starts the next. Nothing
 * is ever removed: the 901st second overwrites the first. A number that is not known is NaN here and null on
 * the wire. Some 250 KB a model with three tiers.
 */
import { type Column, COLUMNS, FILL_STEPS, HISTORY_SECONDS, SHED_REASONS, type Slots } from "./frames.ts";

const REASON_COUNT = SHED_REASONS.length;
const COLUMN_COUNT = COLUMNS.length;

/** Column → its place in `SlotRing.now`. */
export const COLUMN = Object.fromEntries(COLUMNS.map((name, at) => [name, at])) as Readonly<
  Record<Column, number>
>;

export class SlotRing {
  /** Sums of the second that runs. */
  readonly now = new Float64Array(COLUMN_COUNT);
  readonly fillNow = new Float64Array(FILL_STEPS);
  /** tier × reason, the reasons of a tier side by side. */
  readonly shedNow: Float64Array;
  /** By tier: what waits when the second ends. */
  readonly depthNow: Float64Array;
  readonly #tiers: readonly string[];
  readonly #columns = COLUMNS.map(() => new Float32Array(HISTORY_SECONDS));
  readonly #fill = Array.from({ length: FILL_STEPS }, () => new Float32Array(HISTORY_SECONDS));
  readonly #shed: readonly Float32Array[];
  readonly #depth: readonly Float32Array[];
  /** The second that runs. */
  #second: number;
  #closed = 0;

  constructor(tiers: readonly string[], second: number) {
    this.#tiers = tiers;
    this.#second = second;
    this.shedNow = new Float64Array(tiers.length * REASON_COUNT);
    this.depthNow = new Float64Array(tiers.length);
    this.#shed = Array.from({ length: tiers.length * REASON_COUNT }, () => new Float32Array(HISTORY_SECONDS));
    this.#depth = tiers.map(() => new Float32Array(HISTORY_SECONDS));
  }

  get second(): number {
    return this.#second;
  }

  /** How many seconds there are. */
  get length(): number {
    return this.#closed;
  }

  /** The second that runs is over; the next begins with nothing in it. */
  close(): void {
    const at = this.#second % HISTORY_SECONDS;
    put(this.#columns, this.now, at);
    put(this.#fill, this.fillNow, at);
    put(this.#shed, this.shedNow, at);
    put(this.#depth, this.depthNow, at);
    this.now.fill(0);
    this.fillNow.fill(0);
    this.shedNow.fill(0);
    this.#second++;
    this.#closed = Math.min(HISTORY_SECONDS, this.#closed + 1);
  }

  /** Seconds of which nobody knows anything: the machine slept. */
  skipTo(second: number): void {
    this.#second = second;
    this.#closed = 0;
  }

  /** Sum of a column over the last `seconds` that are over. */
  sum(column: number, seconds: number): number {
    let sum = 0;
    for (let back = this.#reach(seconds); back > 0; back--) sum += this.#at(column, back);
    return sum;
  }

  max(column: number, seconds: number): number {
    let most = 0;
    for (let back = this.#reach(seconds); back > 0; back--) most = Math.max(most, this.#at(column, back));
    return most;
  }

  /** The seconds from `since` on that are over. */
  since(since: number): Slots {
    const from = Math.max(since, this.#second - this.#closed);
    const length = Math.max(0, this.#second - from);
    const read = (ring: Float32Array, round: (value: number) => number | null): (number | null)[] => {
      const values = new Array<number | null>(length);
      for (let at = 0; at < length; at++) values[at] = round(ring[(from + at) % HISTORY_SECONDS]!);
      return values;
    };
    const whole = (ring: Float32Array): number[] => read(ring, Math.round) as number[];
    const shed: Record<string, readonly number[]> = {};
    this.#shed.forEach((ring, place) => {
      const values = whole(ring);
      if (!values.some((value) => value > 0)) return;
      const tier = this.#tiers[Math.floor(place / REASON_COUNT)]!;
      shed[`${tier} ${SHED_REASONS[place % REASON_COUNT]!}`] = values;
    });
    const columns = {} as Record<Column, (number | null)[]>;
    COLUMNS.forEach((name, at) => (columns[name] = read(this.#columns[at]!, nullOrRounded)));
    return {
      from,
      length,
      columns,
      depth: this.#depth.map(whole),
      fill: this.#fill.map(whole),
      shed,
    };
  }

  #reach(seconds: number): number {
    return Math.min(seconds, this.#closed);
  }

  #at(column: number, back: number): number {
    return this.#columns[column]![(this.#second - back) % HISTORY_SECONDS]!;
  }
}

function put(rings: readonly Float32Array[], values: Float64Array, at: number): void {
  for (let place = 0; place < rings.length; place++) rings[place]![at] = values[place]!;
}

function nullOrRounded(value: number): number | null {
  return Number.isNaN(value) ? null : rounded(value);
}

/** Three digits that count, and never fewer than all before the point: what is read, not what is computed with. */
export function rounded(value: number): number {
  const size = Math.abs(value);
  if (size >= 100) return Math.round(value);
  const unit = size >= 10 ? 10 : size >= 1 ? 100 : 1000;
  return Math.round(value * unit) / unit;
}
