/**
 * What requests of the drop-in simulation hold, whatever they speak.
 *
 * A text is `t<serial>.<position>` or, where several requests may share it, `s<number>.0`; `bad<serial>.0` is one that
 * servers refuse. Tokens are the same two numbers. What comes out for it follows from these numbers.
 */
import type { Dice } from "./plan.ts";

export type Input = string | readonly number[];

const KINDS = ["t", "s", "bad"];
const TOKENS = 9;
const SHARED_TEXTS = 20;

/** Most ask for one or a few, some for more than fit a batch. */
export function howMany(dice: Dice): number {
  const roll = dice.share();
  if (roll < 0.55) return 1;
  if (roll < 0.9) return dice.between(2, 5);
  return roll < 0.99 ? dice.between(6, 16) : dice.between(17, 80);
}

export function textFor(dice: Dice, serial: number, at: number): string {
  return dice.chance(0.15) ? `s${dice.upTo(SHARED_TEXTS)}.0` : `t${serial}.${at}`;
}

/** So many texts, and whether one of them is bad. */
export function textsFor(dice: Dice, serial: number): { readonly texts: string[]; readonly bad: boolean } {
  const texts = Array.from({ length: howMany(dice) }, (_, at) => textFor(dice, serial, at));
  const bad = dice.chance(0.01);
  if (bad) texts[dice.upTo(texts.length)] = `bad${serial}.0`;
  return { texts, bad };
}

export function isBad(input: unknown): boolean {
  return typeof input === "string" && input.startsWith("bad");
}

/** Kind, serial number, position, and whatever else the output depends on. */
export function vectorOf(input: Input, ...more: readonly number[]): number[] {
  if (typeof input !== "string") return [TOKENS, input[0]!, input[1]!, ...more];
  const [, kind, serial, position] = /^([a-z]+)(\d+)\.(\d+)$/.exec(input)!;
  return [KINDS.indexOf(kind!), Number(serial), Number(position), ...more];
}

/** One number for a text, below a million; another for each. */
export function codeOf(text: string): number {
  const [kind, serial, position] = vectorOf(text) as [number, number, number];
  return (kind * 1000 + serial) * 100 + position;
}

export function sameNumbers(got: unknown, own: readonly number[]): boolean {
  return Array.isArray(got) && got.length === own.length && own.every((number, at) => got[at] === number);
}
