/**
 * When each request of an open loop leaves, and whose it is; all of it fixed before the server has a say.
 *
 * The rate is `warmRate` before the start, and then that of the phase in which a gap begins; without phases
 * it is `rate` to the end. Even arrivals own one gap of 1/rate each and leave anywhere in it; poisson ones
 * are independent of each other.
 *
 * Of several kinds of caller each arrival draws one, by the shares of its phase: so a kind's own arrivals
 * are independent of each other whichever way the gaps are made. Shares are relative; they need not add up
 * to 1.
 */
import { Random } from "../../core/random.ts";

export interface CallerKind {
  readonly label: string;
  readonly share: number;
  /** Further headers of its requests, such as its credential. */
  readonly headers?: Readonly<Record<string, string>>;
}

export interface Phase {
  readonly name: string;
  readonly ms: number;
  readonly rate: number;
  /** By label, for those that differ from the kind's own. */
  readonly shares?: Readonly<Record<string, number>>;
}

export interface OpenLoad {
  readonly kind: "open";
  readonly rate: number;
  /** even: one in each stretch of 1/rate, at a random instant of it. */
  readonly arrivals: "even" | "poisson";
  /** The rate during the warm-up. */
  readonly warmRate: number;
  /**
   * Opened during the warm-up and kept; more are opened when all are in use. A client of this size has
   * its pool, and without it a short stall of the server becomes a burst of new connections, which
   * overflows the accept backlog and costs each of them the second until TCP tries again.
   */
  readonly connections: number;
  /** One after the other from the start on; together they are as long as the measurement. */
  readonly phases?: readonly Phase[];
  /** The same seed gives the same arrivals, counted from their beginning; left out: others each time. */
  readonly seed?: number;
}

interface Stretch {
  readonly endsAt: number;
  readonly gapMs: number;
  /** The kinds' shares, each with those before it; the last is 1. */
  readonly upTo: readonly number[];
}

export class Arrivals {
  /** When the next request is due, on the clock of `now` and `startAt`. */
  nextAt = 0;
  /** Whose it is. */
  kind = 0;
  readonly #draw: () => number;
  readonly #poisson: boolean;
  readonly #stretches: readonly Stretch[];
  #stretch = 0;
  /** The start of the gap after the last one. */
  #gapAt: number;

  /**
   * From `now` on at the rate of the warm-up, from `startAt` on as the load says. `draw` gives random numbers,
   * uniform in [0, 1), unless the load has a seed.
   */
  constructor(
    load: OpenLoad,
    kinds: readonly CallerKind[],
    now: number,
    startAt: number,
    draw: () => number,
  ) {
    const seeded = load.seed === undefined ? undefined : new Random(load.seed);
    this.#draw = seeded === undefined ? draw : () => seeded.next();
    this.#poisson = load.arrivals === "poisson";
    this.#gapAt = now;
    const phases = load.phases ?? [{ name: "all", ms: Infinity, rate: load.rate }];
    const warm: Stretch = { endsAt: startAt, gapMs: 1000 / load.warmRate, upTo: sharesUpTo(kinds) };
    let endsAt = startAt;
    const rest = phases.map(({ ms, rate, shares }) => {
      endsAt += ms;
      return { endsAt, gapMs: 1000 / rate, upTo: sharesUpTo(kinds, shares) };
    });
    this.#stretches = [warm, ...rest];
    this.advance();
  }

  /** Fixes the next arrival. */
  advance(): void {
    let stretch = this.#stretches[this.#stretch]!;
    while (this.#gapAt >= stretch.endsAt && this.#stretch < this.#stretches.length - 1) {
      stretch = this.#stretches[++this.#stretch]!;
    }
    const { gapMs, upTo } = stretch;
    if (this.#poisson) {
      this.#gapAt += -Math.log(1 - this.#draw()) * gapMs;
      this.nextAt = this.#gapAt;
    } else {
      this.nextAt = this.#gapAt + this.#draw() * gapMs;
      this.#gapAt += gapMs;
    }
    if (upTo.length > 1) {
      const drawn = this.#draw();
      let kind = 0;
      while (drawn >= upTo[kind]!) kind++;
      this.kind = kind;
    }
  }
}

function sharesUpTo(kinds: readonly CallerKind[], others: Readonly<Record<string, number>> = {}): number[] {
  const shares = kinds.map(({ label, share }) => others[label] ?? share);
  const all = shares.reduce((sum, share) => sum + share, 0);
  let sum = 0;
  return shares.map((share, i) => (i === shares.length - 1 ? 1 : (sum += share / all)));
}
