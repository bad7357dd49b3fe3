/**
 * Task ids: 36 characters of Crockford's base 32. Ten of time, so that ids sort by arrival; the rest is random, so that
 * one caller cannot guess another's result. Tasks of one bundle share the first 21 (ten of time, ten random, the
 * shard); the last 15 are 75 random bits.
 */
import { randomFillSync } from "node:crypto";
import { ID_DIGITS } from "../core/home.ts";

const DIGITS = Buffer.from(ID_DIGITS, "latin1");
const TIME_DIGITS = 10;
const BUNDLE_DIGITS = 20;
const ID_LENGTH = 36;
const POOL_BYTES = 8192;

const pool = new Uint8Array(POOL_BYTES);
let used = pool.length;
const digits = Buffer.alloc(ID_LENGTH); // reused, so that one string is made per id
let lastMs = -1;

/** `bundle`: the first 21 characters; without it the whole id is new. */
export function newId(nowMs: number, bundle?: string): string {
  if (bundle !== undefined) {
    writeRandom(bundle.length, ID_LENGTH);
    return bundle + digits.toString("latin1", bundle.length);
  }
  writeTime(Math.floor(nowMs));
  writeRandom(TIME_DIGITS, ID_LENGTH);
  return digits.toString("latin1");
}

export function newBundle(nowMs: number, shard: number): string {
  writeTime(Math.floor(nowMs));
  writeRandom(TIME_DIGITS, BUNDLE_DIGITS);
  digits[BUNDLE_DIGITS] = DIGITS[shard]!;
  return digits.toString("latin1", 0, BUNDLE_DIGITS + 1);
}

/** Whether a text could be an id; anything else need not be looked up. */
export function looksLikeId(text: string): boolean {
  return /^[0-9A-HJKMNP-TV-Z]{36}$/.test(text);
}

function writeRandom(from: number, to: number): void {
  if (used + ID_LENGTH > pool.length) {
    randomFillSync(pool);
    used = 0;
  }
  for (let at = from; at < to; at++) digits[at] = DIGITS[pool[used++]! & 31]!;
}

function writeTime(ms: number): void {
  if (ms === lastMs) return;
  lastMs = ms;
  for (let left = ms, at = TIME_DIGITS - 1; at >= 0; at--) {
    digits[at] = DIGITS[left % 32]!;
    left = Math.floor(left / 32);
  }
}
