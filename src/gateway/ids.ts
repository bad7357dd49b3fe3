/**
 * Task ids: 10 characters of time, then 26 of chance, in Crockford's base 32.
 *
 * The time makes ids sort by arrival, which keeps indexes and logs in order; the 130 random bits make
 * them impossible to guess, which is what keeps one caller's result from another.
 */
import { randomFillSync } from "node:crypto";

const DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";
const RANDOM_DIGITS = 26;
const POOL_IDS = 256;

const pool = new Uint8Array(RANDOM_DIGITS * POOL_IDS);
let used = pool.length;
let lastMs = -1;
let lastTime = "";

export function newId(nowMs: number): string {
  if (used === pool.length) {
    randomFillSync(pool);
    used = 0;
  }
  let id = timeDigits(Math.floor(nowMs));
  for (const end = used + RANDOM_DIGITS; used < end; used++) id += DIGITS[pool[used]! & 31]!;
  return id;
}

/** Whether a text could be one of ours; anything else need not be looked up. */
export function looksLikeId(text: string): boolean {
  return /^[0-9A-HJKMNP-TV-Z]{36}$/.test(text);
}

function timeDigits(ms: number): string {
  if (ms === lastMs) return lastTime;
  let digits = "";
  for (let left = ms, i = 0; i < 10; i++) {
    digits = DIGITS[left % 32]! + digits;
    left = Math.floor(left / 32);
  }
  lastMs = ms;
  return (lastTime = digits);
}
