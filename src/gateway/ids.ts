/**
 * Task ids: 10 characters of time, then 26 of chance, in Crockford's base 32.
 *
 * The time makes ids sort by arrival, which keeps indexes and logs in order; the 125 or more random bits
 * make them impossible to guess, which is what keeps one caller's result from another. The last character
 * names the task's home (`core/home.ts`), chosen for tasks that may share and chance for the others.
 */
import { randomFillSync } from "node:crypto";
import { ID_DIGITS } from "../core/home.ts";

const DIGITS = Buffer.from(ID_DIGITS, "latin1");
const TIME_DIGITS = 10;
const RANDOM_DIGITS = 26;
const POOL_IDS = 256;

const pool = new Uint8Array(RANDOM_DIGITS * POOL_IDS);
let used = pool.length;
/** Written anew for each id: one string is made, instead of one for every character on the way. */
const digits = Buffer.alloc(TIME_DIGITS + RANDOM_DIGITS);
let lastMs = -1;

export function newId(nowMs: number, home?: number): string {
  if (used === pool.length) {
    randomFillSync(pool);
    used = 0;
  }
  writeTime(Math.floor(nowMs));
  for (let at = 0; at < RANDOM_DIGITS; at++) digits[TIME_DIGITS + at] = DIGITS[pool[used++]! & 31]!;
  if (home !== undefined) digits[digits.length - 1] = DIGITS[home]!;
  return digits.toString("latin1");
}

/** Whether a text could be one of ours; anything else need not be looked up. */
export function looksLikeId(text: string): boolean {
  return /^[0-9A-HJKMNP-TV-Z]{36}$/.test(text);
}

function writeTime(ms: number): void {
  if (ms === lastMs) return;
  lastMs = ms;
  for (let left = ms, at = TIME_DIGITS - 1; at >= 0; at--) {
    digits[at] = DIGITS[left % 32]!;
    left = Math.floor(left / 32);
  }
}
