/**
 * API keys: their format, and the digest that is stored.
 *
 *   fy_live_ 4fTq8ZxW0aBc 9Kd…28 characters…Qe 2kX7Lm
 *   prefix   id           secret               CRC32 of all before it
 *
 * 54 base-62 characters. The prefix tells a key from a token and lets secret scanners find leaked keys. The id (71
 * bits, not secret) is the lookup key; the secret has 166 random bits. The checksum rejects typos without a store
 * lookup.
 *
 * Only the id and HMAC-SHA-256(auth.secret, whole key) are stored: a copy of the store, even with the secret, yields no
 * key.
 */
import { createHmac, type KeyObject } from "node:crypto";
import { crc32 } from "node:zlib";

export const KEY_PREFIX = "fy_live_";
const ID_LENGTH = 12;
const SECRET_LENGTH = 28;
const CRC_LENGTH = 6;
const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
/** Digit by character code: reads a checksum without allocating a string. */
const VALUES = new Uint8Array(128);
for (let value = 0; value < DIGITS.length; value++) VALUES[DIGITS.charCodeAt(value)] = value;
const CRC_AT = KEY_PREFIX.length + ID_LENGTH + SECRET_LENGTH;
/** 4 × 62: bytes below this map to every digit with equal probability; others are discarded. */
const FAIR_BYTES = 248;

export const KEY_LENGTH = CRC_AT + CRC_LENGTH;
const SHAPE = new RegExp(`^${KEY_PREFIX}[0-9A-Za-z]{${KEY_LENGTH - KEY_PREFIX.length}}$`);
const ID_SHAPE = new RegExp(`^[0-9A-Za-z]{${ID_LENGTH}}$`);

/** `random` returns that many cryptographically random bytes. */
export function newApiKey(random: (bytes: number) => Uint8Array): string {
  let digits = "";
  while (digits.length < ID_LENGTH + SECRET_LENGTH) {
    for (const byte of random(64)) if (byte < FAIR_BYTES) digits += DIGITS[byte % 62]!;
  }
  const body = KEY_PREFIX + digits.slice(0, ID_LENGTH + SECRET_LENGTH);
  return body + checksum(body);
}

export function readApiKey(text: string): string | undefined {
  if (text.length !== KEY_LENGTH || !SHAPE.test(text)) return undefined;
  let sum = 0;
  for (let at = CRC_AT; at < KEY_LENGTH; at++) sum = sum * 62 + VALUES[text.charCodeAt(at)]!;
  if (crc32(text.slice(0, CRC_AT)) !== sum) return undefined;
  return idOf(text);
}

export function idOf(text: string): string {
  return text.slice(KEY_PREFIX.length, KEY_PREFIX.length + ID_LENGTH);
}

export function isKeyId(text: string): boolean {
  return ID_SHAPE.test(text);
}

export function digestOf(key: string, secret: KeyObject): Buffer {
  return createHmac("sha256", secret).update(key).digest();
}

/** Identifies the secret a digest was made with without revealing it. */
export function nameOfSecret(secret: KeyObject): string {
  return createHmac("sha256", secret).update("ferry: which secret is this").digest("hex").slice(0, 8);
}

function checksum(body: string): string {
  let left = crc32(body);
  let text = "";
  for (let at = 0; at < CRC_LENGTH; at++) {
    text = DIGITS[left % 62]! + text;
    left = Math.floor(left / 62);
  }
  return text;
}

export interface KeyRecord {
  readonly id: string;
  /** HMAC-SHA-256 of the whole key, 32 bytes. */
  readonly digest: Buffer;
  readonly user: string;
  /** The tier's name, since positions change with the config. */
  readonly tier: string;
  /** A label; may be "". */
  readonly name: string;
  readonly createdAt: number;
  /** Which secret the digest was made with (`nameOfSecret`). */
  readonly madeWith: string;
}

export interface KeyStore {
  /** Synchronous if cached, the same object while unchanged; undefined: no such key. Rejects if the store is down. */
  get(id: string): KeyRecord | undefined | Promise<KeyRecord | undefined>;
  list(): Promise<KeyRecord[]>;
  add(record: KeyRecord): Promise<void>;
  revoke(id: string): Promise<boolean>;
  /** The secret stored beside the keys, created on first use. */
  secret(): Promise<string>;
  close(): void;
}

const DIGEST_BYTES = 32;

export function writeRecord(record: KeyRecord): object {
  const { id, digest, user, tier, name, createdAt, madeWith } = record;
  return {
    id,
    digest: digest.toString("base64url"),
    user,
    tier,
    name,
    created_at: new Date(createdAt).toISOString(),
    made_with: madeWith,
  };
}

export function readRecord(value: unknown): KeyRecord | undefined {
  if (typeof value !== "object" || value === null) return undefined;
  const fields = value as Readonly<Record<string, unknown>>;
  const text = (name: string): string => (typeof fields[name] === "string" ? fields[name] : "");
  const [id, user, tier] = [text("id"), text("user"), text("tier")];
  const digest = Buffer.from(text("digest"), "base64url");
  const createdAt = Date.parse(text("created_at"));
  const whole = id !== "" && isUser(user) && tier !== "" && digest.length === DIGEST_BYTES;
  if (!whole || Number.isNaN(createdAt)) return undefined;
  return { id, digest, user, tier, name: text("name"), createdAt, madeWith: text("made_with") };
}

export function byAge(records: Iterable<KeyRecord>): KeyRecord[] {
  return [...records].sort((a, b) => a.createdAt - b.createdAt || (a.id < b.id ? -1 : 1));
}

export const MAX_USER = 255;

/** 1 to 255 characters, no controls, no lone surrogates (UTF-8 makes them U+FFFD, which would merge two users). */
export function isUser(text: unknown): text is string {
  if (typeof text !== "string" || text.length === 0 || text.length > MAX_USER) return false;
  return !/[\u0000-\u001f\u007f-\u009f\u2028\u2029]/.test(text) && text.isWellFormed();
}
