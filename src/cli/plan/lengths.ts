/**
 * How long inputs are, in tokens: a named distribution, one written as `50%:6-16,40%:40-120,10%:200-512` (uniform within
 * each range, bounds included), or recorded lengths, drawn with repetition.
 *
 *   mixed   half queries of 6 to 16 tokens, 40 % passages (log-normal, median 74), a tenth documents of 200 to 512
 *   chat    log-normal, median 37, from 5 to 512
 */
import { Random } from "../../core/random.ts";
import type { Json } from "../../core/task.ts";

export interface LengthMix {
  /** As it was written, or the file. */
  readonly name: string;
  readonly longest: number;
  draw(random: Random): number;
}

const LONGEST = 512;
/** Inputs are made and measured as text: longer ones would take memory and time, not tell more. */
export const MOST_TOKENS = 100_000;

const NAMED: Readonly<Record<string, LengthMix["draw"]>> = {
  mixed(random) {
    const draw = random.next();
    if (draw < 0.5) return between(random, 6, 16);
    if (draw < 0.9) return logNormal(random, 4.3, 0.45, 17);
    return between(random, 200, LONGEST);
  },
  chat: (random) => logNormal(random, 3.6, 1, 5),
};

const PART = /^(\d+(?:\.\d+)?)%?:(\d{1,9})(?:-(\d{1,9}))?$/;

/** Undefined if it is neither a name nor a list. */
export function parseLengths(written: string): LengthMix | undefined {
  const named = Object.hasOwn(NAMED, written) ? NAMED[written] : undefined;
  if (named !== undefined) return { name: written, longest: LONGEST, draw: named };
  const parts = written.split(",").map((part) => {
    const [, share, from, to = from] = PART.exec(part.trim()) ?? [];
    return { share: Number(share), from: Number(from), to: Number(to) };
  });
  const sum = parts.reduce((total, { share }) => total + share, 0);
  if (!(sum > 0) || !parts.every(({ from, to }) => from >= 1 && to >= from && to <= MOST_TOKENS)) {
    return undefined;
  }
  return {
    name: written,
    longest: Math.max(...parts.map(({ to }) => to)),
    draw(random) {
      let left = random.next() * sum;
      const part = parts.find(({ share }) => (left -= share) < 0) ?? parts.at(-1)!;
      return between(random, part.from, part.to);
    },
  };
}

export function recordedLengths(name: string, lengths: Uint32Array): LengthMix {
  return {
    name,
    longest: lengths.reduce((most, length) => Math.max(most, length)),
    draw: (random) => lengths[Math.floor(random.next() * lengths.length)]!,
  };
}

export function sampleLengths(mix: LengthMix, count: number, seed: number): number[] {
  const random = new Random(seed);
  return Array.from({ length: count }, () => mix.draw(random));
}

const inputs: Json[] = [];

/** An input of so many tokens; above 1,000 within 2 %, because all that were made are kept. */
export function inputOf(tokens: number): Json {
  const made = tokens < 1000 ? tokens : Number(tokens.toPrecision(tokens < 10_000 ? 3 : 2));
  return (inputs[made] ??= `[${"0,".repeat(made - 1)}0]`);
}

function between(random: Random, from: number, to: number): number {
  return from + Math.floor(random.next() * (to - from + 1));
}

function logNormal(random: Random, mu: number, sigma: number, least: number): number {
  const drawn = Math.trunc(Math.exp(mu + sigma * random.gaussian()));
  return Math.min(LONGEST, Math.max(least, drawn));
}
