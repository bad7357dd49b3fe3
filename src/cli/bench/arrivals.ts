/**
 * Open-loop arrivals: when each request is due and which kind of caller sends it, independent of the server. The rate
 * is `warmRate` before the start, then that of the phase in which a gap begins (`rate` without phases). Even arrivals:
 * one at a random instant of each 1/rate gap; poisson: independent gaps. Each arrival draws its kind by the shares of
 * its phase. Shares are relative and need not add up to 1.
 */
import { Random } from "../../core/random.ts";

export interface CallerKind {
  readonly label: string;
  readonly share: number;
  readonly headers?: Readonly<Record<string, string>>;
}

export interface Phase {
  readonly name: string;
  readonly ms: number;
  readonly rate: number;
  /** By label; overrides the kind's share. */
  readonly shares?: Readonly<Record<string, number>>;
}

export interface OpenLoad {
  readonly kind: "open";
  readonly rate: number;
  /** even: one per 1/rate interval, at a random instant in it. */
  readonly arrivals: "even" | "poisson";
  readonly warmRate: number;
  /**
   * Opened during the warm-up and kept; more are opened when all are in use. Without this pool a short server stall
   * becomes a burst of new connections, which overflows the accept backlog and costs each the 1 s TCP retry.
   */
  readonly connections: number;
  /** In order from the start; together as long as the measurement. */
  readonly phases?: readonly Phase[];
  /** The same seed gives the same arrivals; omitted: random. */
  readonly seed?: number;
}

interface Stretch {
  readonly endsAt: number;
  readonly gapMs: number;
  /** Cumulative shares of the kinds; the last is 1. */
  readonly upTo: readonly number[];
}

export class Arrivals {
  /** On the clock of `now` and `startAt`. */
  nextAt = 0;
  kind = 0;
  readonly #draw: () => number;
  readonly #poisson: boolean;
  readonly #stretches: readonly Stretch[];
  #stretch = 0;
  /** Start of the gap after the last arrival. */
  #gapAt: number;

  /** Warm-up rate from `now`, the load's rate from `startAt`. `draw`: uniform in [0, 1), unused with a seed. */
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
