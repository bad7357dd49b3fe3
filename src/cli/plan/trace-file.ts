/**
 * Recorded arrivals: one JSON value per line, streamed and kept as 13 bytes each.
 *
 * A line is a request from Ferry (`GET /internal/requests`, or a row of `ferry_requests`), another program's object
 * with an instant, or a bare instant. Instants are ISO times or milliseconds from any origin, in any order. Ferry's
 * whole reply `{"requests":[…]}` is accepted too. The length of its input is its `tokens`, `length` or `input_tokens`,
 * or estimated from its `input`. Skipped, and counted:
 *
 *   joined, cached     answered by another request's work: needs no place in a batch
 *   turned away        400 to 428: invalid, never waited for a worker
 *   unreadable         not JSON, or no instant in it
 */
import type { Random } from "../../core/random.ts";
import { estimateTokens } from "../../core/weight.ts";
import { MOST_TOKENS } from "./lengths.ts";

export interface Trace {
  /** ms from the first, ascending. */
  readonly instants: Float64Array;
  /** Index into `tierNames`. */
  readonly tiers: Uint8Array;
  /** In tokens, at most `MOST_TOKENS`; 0 where the line does not say. */
  readonly lengths: Uint32Array;
  readonly tierNames: readonly string[];
  readonly lines: number;
  readonly unreadable: number;
  /** Line number of the first; 0 for none. */
  readonly unreadableAt: number;
  readonly seatless: number;
  readonly turnedAway: number;
  /** The recording was longer than the limit; later requests were skipped. */
  readonly cut: boolean;
}

const INSTANTS = [
  "arrived_at",
  "started_at",
  "received_at",
  "created_at",
  "timestamp",
  "time",
  "ts",
  "at",
  "ms",
];
const LENGTHS = ["tokens", "length", "input_tokens"];
const MAX_TIERS = 255;

type Fields = Readonly<Record<string, unknown>>;

export class TraceReader {
  #instants = new Float64Array(1024);
  #tiers = new Uint8Array(1024);
  #lengths = new Uint32Array(1024);
  #size = 0;
  readonly #tierNames: string[] = [];
  readonly #most: number;
  #lines = 0;
  #unreadable = 0;
  #unreadableAt = 0;
  #seatless = 0;
  #turnedAway = 0;
  #cut = false;

  constructor(most: number) {
    this.#most = most;
  }

  line(text: string): void {
    this.#lines++;
    if (text.trim() === "") return;
    let value: unknown;
    try {
      value = JSON.parse(text);
    } catch {
      return this.#cannot();
    }
    if (isFields(value) && Array.isArray(value["requests"]))
      for (const each of value["requests"]) this.#take(each);
    else this.#take(value);
  }

  #take(value: unknown): void {
    const fields = isFields(value) ? value : { at: value };
    const at = instantOf(fields);
    if (Number.isNaN(at)) return this.#cannot();
    const { work, status } = fields;
    if (work === "joined" || work === "cached") return void this.#seatless++;
    const turned = Number(status) >= 400 && Number(status) < 429;
    if (turned) return void this.#turnedAway++;
    if (this.#size === this.#most) {
      this.#cut = true;
      return;
    }
    this.#keep(at, this.#tierOf(fields["tier"]), lengthIn(fields));
  }

  #cannot(): void {
    this.#unreadable++;
    this.#unreadableAt ||= this.#lines;
  }

  #tierOf(tier: unknown): number {
    const name = typeof tier === "string" ? tier : "";
    const known = this.#tierNames.indexOf(name);
    if (known >= 0) return known;
    if (this.#tierNames.length === MAX_TIERS) return MAX_TIERS - 1;
    return this.#tierNames.push(name) - 1;
  }

  #keep(at: number, tier: number, length: number): void {
    if (this.#size === this.#instants.length) {
      const [instants, tiers] = [new Float64Array(2 * this.#size), new Uint8Array(2 * this.#size)];
      const lengths = new Uint32Array(2 * this.#size);
      instants.set(this.#instants);
      tiers.set(this.#tiers);
      lengths.set(this.#lengths);
      [this.#instants, this.#tiers, this.#lengths] = [instants, tiers, lengths];
    }
    this.#instants[this.#size] = at;
    this.#lengths[this.#size] = length;
    this.#tiers[this.#size++] = tier;
  }

  /** `order`: tiers from best to last; unnamed ones follow in order of appearance. */
  end(order: readonly string[] = []): Trace {
    const from = this.#instants.subarray(0, this.#size);
    const places = Uint32Array.from(from, (_, index) => index);
    // Equal instants keep their recorded order.
    places.sort((one, other) => from[one]! - from[other]! || one - other);
    const names = [
      ...order.filter((name) => this.#tierNames.includes(name)),
      ...this.#tierNames.filter((name) => !order.includes(name)),
    ];
    const place = this.#tierNames.map((name) => names.indexOf(name));
    const first = this.#size === 0 ? 0 : from[places[0]!]!;
    return {
      instants: Float64Array.from(places, (index) => from[index]! - first),
      tiers: Uint8Array.from(places, (index) => place[this.#tiers[index]!]!),
      lengths: Uint32Array.from(places, (index) => this.#lengths[index]!),
      tierNames: names,
      lines: this.#lines,
      unreadable: this.#unreadable,
      unreadableAt: this.#unreadableAt,
      seatless: this.#seatless,
      turnedAway: this.#turnedAway,
      cut: this.#cut,
    };
  }
}

function isFields(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Lengths in a line of a file that need not have instants; a bare number is one. Empty where it says none. */
export function lengthsIn(line: string): number[] {
  let value: unknown;
  try {
    value = JSON.parse(line);
  } catch {
    return [];
  }
  const entries: unknown[] =
    isFields(value) && Array.isArray(value["requests"]) ? value["requests"] : [value];
  const lengths = entries.map((entry) => lengthIn(isFields(entry) ? entry : { length: entry }));
  return lengths.filter((length) => length > 0);
}

/** 0 where there is none. */
function lengthIn(fields: Fields): number {
  for (const name of LENGTHS) {
    const value = fields[name];
    if (typeof value === "number" && value >= 1) return Math.min(Math.round(value), MOST_TOKENS);
  }
  const { input } = fields;
  return input === undefined ? 0 : Math.min(estimateTokens(JSON.stringify(input)), MOST_TOKENS);
}

/** NaN where there is none. */
function instantOf(fields: Fields): number {
  for (const name of INSTANTS) {
    const value = fields[name];
    if (typeof value === "number" && Number.isFinite(value)) return value;
    if (typeof value === "string") {
      // `psql` writes a space where ISO has a T.
      const at = Date.parse(value);
      if (!Number.isNaN(at)) return at;
    }
  }
  return NaN;
}

/** Whole-millisecond instants form artificial bursts: each is moved to a random point in its millisecond. */
export function spreadWholeMs(instants: Float64Array, random: Random): Float64Array {
  if (instants.some((at) => at % 1 !== 0)) return instants;
  return Float64Array.from(instants, (at) => at + random.next()).sort();
}
