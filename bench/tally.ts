/**
 * What came of the requests, by kind of caller and phase, and over time.
 *
 * Every request ends in one of three ways:
 *
 *   ok        200
 *   refused   429 or 503: turned away
 *   failed    anything else: 504 (let in, and not in time), 500, a connection that ended (status 0)
 *
 * `accounts` has each kind in each phase: statuses, and a histogram of the latencies of each way. `slices`
 * has the same three ways for all kinds together, in steps of `sliceMs` from the start. Requests belong to the
 * phase and slice in which they should have left, however late their answer; only `arrivedOk` counts 200s by
 * when they came: it is what the workers got done in that time.
 *
 * The generator writes a `Tally` and prints its state; `Tallied` is what scenarios read.
 */
import type { CallerKind, Phase } from "../src/cli/bench/arrivals.ts";
import { Histogram, type HistogramState } from "../src/cli/bench/histogram.ts";

export type Way = "ok" | "refused" | "failed";
const ways: readonly Way[] = ["ok", "refused", "failed"];

export interface AccountState {
  readonly label: string;
  readonly phase: string;
  readonly sent: number;
  readonly statuses: Readonly<Record<string, number>>;
  readonly latencies: Readonly<Record<Way, HistogramState>>;
}

interface SliceState {
  readonly ok: HistogramState;
  readonly refused: number;
  readonly failed: number;
  readonly arrivedOk: number;
}

export interface TallyState {
  readonly sliceMs: number;
  readonly phases: readonly { readonly name: string; readonly ms: number }[];
  readonly accounts: readonly AccountState[];
  readonly slices: readonly SliceState[];
}

export function wayOf(status: number): Way {
  if (status === 200) return "ok";
  return status === 429 || status === 503 ? "refused" : "failed";
}

interface Row {
  readonly label: string;
  readonly phase: string;
  sent: number;
  readonly statuses: Record<string, number>;
  readonly latencies: Readonly<Record<Way, Histogram>>;
}

interface SliceRow {
  readonly ok: Histogram;
  refused: number;
  failed: number;
  arrivedOk: number;
}

export class Tally {
  readonly #sliceMs: number;
  readonly #phases: readonly Pick<Phase, "name" | "ms">[];
  readonly #endsAt: readonly number[];
  readonly #kinds: number;
  readonly #startAt: number;
  /** By phase, and in it by kind. */
  readonly #rows: Row[];
  readonly #slices: SliceRow[] = [];

  constructor(
    kinds: readonly CallerKind[],
    phases: readonly Pick<Phase, "name" | "ms">[],
    sliceMs: number,
    startAt: number,
  ) {
    this.#sliceMs = sliceMs;
    this.#phases = phases;
    this.#kinds = kinds.length;
    this.#startAt = startAt;
    let endsAt = startAt;
    this.#endsAt = phases.map(({ ms }) => (endsAt += ms));
    this.#rows = phases.flatMap(({ name }) =>
      kinds.map(({ label }) => ({
        label,
        phase: name,
        sent: 0,
        statuses: {},
        latencies: { ok: new Histogram(), refused: new Histogram(), failed: new Histogram() },
      })),
    );
  }

  sent(kind: number, intendedAt: number): void {
    this.#row(kind, intendedAt).sent += 1;
  }

  /** `status` 0: the connection ended. What left before the start does not count. */
  ended(kind: number, intendedAt: number, now: number, status: number): void {
    if (intendedAt < this.#startAt) return;
    const row = this.#row(kind, intendedAt);
    const way = wayOf(status);
    row.statuses[status] = (row.statuses[status] ?? 0) + 1;
    row.latencies[way].record(now - intendedAt);
    const slice = this.#slice(intendedAt);
    if (way === "ok") {
      slice.ok.record(now - intendedAt);
      this.#slice(now).arrivedOk += 1;
    } else {
      slice[way] += 1;
    }
  }

  #row(kind: number, at: number): Row {
    let phase = 0;
    while (phase < this.#endsAt.length - 1 && at >= this.#endsAt[phase]!) phase++;
    return this.#rows[phase * this.#kinds + kind]!;
  }

  #slice(at: number): SliceRow {
    const index = Math.floor((at - this.#startAt) / this.#sliceMs);
    while (this.#slices.length <= index) {
      this.#slices.push({ ok: new Histogram(), refused: 0, failed: 0, arrivedOk: 0 });
    }
    return this.#slices[index]!;
  }

  state(): TallyState {
    return {
      sliceMs: this.#sliceMs,
      phases: this.#phases.map(({ name, ms }) => ({ name, ms })),
      accounts: this.#rows.map(({ latencies, ...row }) => ({
        ...row,
        latencies: {
          ok: latencies.ok.state(),
          refused: latencies.refused.state(),
          failed: latencies.failed.state(),
        },
      })),
      slices: this.#slices.map((slice) => ({ ...slice, ok: slice.ok.state() })),
    };
  }
}

/** Some kinds in some phases, taken together. */
export interface Account {
  readonly sent: number;
  readonly statuses: Readonly<Record<string, number>>;
  readonly latencies: Readonly<Record<Way, Histogram>>;
}

/** A stretch of time. */
export interface Window {
  readonly seconds: number;
  readonly ok: Histogram;
  readonly refused: number;
  readonly failed: number;
  readonly arrivedOk: number;
}

export class Tallied {
  readonly #state: TallyState;

  constructor(state: TallyState) {
    this.#state = state;
  }

  get sliceMs(): number {
    return this.#state.sliceMs;
  }

  get endMs(): number {
    return this.#state.phases.reduce((sum, { ms }) => sum + ms, 0);
  }

  /** When a phase begins and ends, in ms since the start. */
  span(phase: string): { readonly fromMs: number; readonly toMs: number } {
    let fromMs = 0;
    for (const { name, ms } of this.#state.phases) {
      if (name === phase) return { fromMs, toMs: fromMs + ms };
      fromMs += ms;
    }
    throw new Error(`there was no phase ${phase}`);
  }

  account(phases: readonly string[], takes: (label: string) => boolean = () => true): Account {
    const latencies = { ok: new Histogram(), refused: new Histogram(), failed: new Histogram() };
    const statuses: Record<string, number> = {};
    let sent = 0;
    for (const row of this.#state.accounts) {
      if (!phases.includes(row.phase) || !takes(row.label)) continue;
      sent += row.sent;
      for (const [status, count] of Object.entries(row.statuses)) {
        statuses[status] = (statuses[status] ?? 0) + count;
      }
      for (const way of ways) latencies[way].merge(Histogram.from(row.latencies[way]));
    }
    return { sent, statuses, latencies };
  }

  /** The slices that begin from `fromMs` on and before `toMs`. */
  window(fromMs: number, toMs: number): Window {
    const { sliceMs, slices } = this.#state;
    const some = slices.slice(Math.ceil(fromMs / sliceMs), Math.ceil(toMs / sliceMs));
    const ok = new Histogram();
    for (const slice of some) ok.merge(Histogram.from(slice.ok));
    const sum = (pick: (slice: SliceState) => number): number => some.reduce((n, s) => n + pick(s), 0);
    return {
      seconds: (toMs - fromMs) / 1000,
      ok,
      refused: sum((slice) => slice.refused),
      failed: sum((slice) => slice.failed),
      arrivedOk: sum((slice) => slice.arrivedOk),
    };
  }

  /** Ms from `fromMs` on until a stretch of `windowMs` begins that `accepts`; NaN when none does before `toMs`. */
  msUntil(fromMs: number, toMs: number, windowMs: number, accepts: (window: Window) => boolean): number {
    for (let at = fromMs; at + windowMs <= toMs; at += this.sliceMs) {
      if (accepts(this.window(at, at + windowMs))) return at - fromMs;
    }
    return NaN;
  }
}
