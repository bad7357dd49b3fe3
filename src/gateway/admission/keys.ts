/**
 * What is known of an API key, and where that is kept: the contract of `key-file.ts` and `key-redis.ts`.
 *
 * As JSON, the same in both: `{"id","digest","user","tier","name","created_at","made_with"}`, the digest as
 * base64url. A key that is revoked is gone; there is nothing to keep of it.
 */
import { isUser } from "./caller.ts";

export interface KeyRecord {
  readonly id: string;
  /** HMAC-SHA-256 of the whole key, 32 bytes. */
  readonly digest: Buffer;
  readonly user: string;
  /** A tier's name: positions change with the config. */
  readonly tier: string;
  /** For people; may be "". */
  readonly name: string;
  readonly createdAt: number;
  /** Which secret the digest was made with (`nameOfSecret`). */
  readonly madeWith: string;
}

export interface KeyStore {
  /**
   * The record of a key, at once where it is known. Undefined: there is none. Rejects with a Refusal when that
   * cannot be found out now. The same object as long as the record is the same.
   */
  get(id: string): KeyRecord | undefined | Promise<KeyRecord | undefined>;
  /** All of them, the oldest first, as they are now. */
  list(): Promise<KeyRecord[]>;
  add(record: KeyRecord): Promise<void>;
  /** False: there was none. */
  revoke(id: string): Promise<boolean>;
  /** The secret that is kept beside the keys; made by whoever asks first. */
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

/** Undefined for anything that is not a record. */
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
