/** What the tests of credentials share: a clock, keys, tokens that are good or forged. */
import { createSecretKey, generateKeyPairSync, type KeyObject, randomBytes, sign } from "node:crypto";
import {
  digestOf,
  type KeyRecord,
  type KeyStore,
  nameOfSecret,
  newApiKey,
  readApiKey,
} from "../../../src/gateway/admission/api-keys.ts";
import { Refusal } from "../../../src/core/errors.ts";
import { type EventFields, Events } from "../../../src/observe/events.ts";

export const TIERS = [{ name: "enterprise" }, { name: "paid" }, { name: "free" }];
export const SECRET = "0123456789abcdef0123456789abcdef";
/** A Sunday in 2026, in ms; whole seconds, as in tokens. */
export const START = 1_790_000_000_000;

export interface Made {
  readonly key: string;
  readonly record: KeyRecord;
}

export function makeKey(user: string, tier: string, secret = SECRET): Made {
  const key = newApiKey(randomBytes);
  const with_ = createSecretKey(secret, "utf8");
  const record = {
    id: readApiKey(key)!,
    digest: digestOf(key, with_),
    user,
    tier,
    name: "",
    createdAt: START,
    madeWith: nameOfSecret(with_),
  };
  return { key, record };
}

/** A store in memory that counts how often it is asked. */
export class FakeStore implements KeyStore {
  readonly records = new Map<string, KeyRecord>();
  asked = 0;

  constructor(...made: readonly Made[]) {
    for (const { record } of made) this.records.set(record.id, record);
  }

  get(id: string): KeyRecord | undefined | Promise<KeyRecord | undefined> {
    this.asked++;
    return this.records.get(id);
  }

  list(): Promise<KeyRecord[]> {
    return Promise.resolve([...this.records.values()]);
  }

  add(record: KeyRecord): Promise<void> {
    this.records.set(record.id, record);
    return Promise.resolve();
  }

  revoke(id: string): Promise<boolean> {
    return Promise.resolve(this.records.delete(id));
  }

  secret(): Promise<string> {
    return Promise.resolve(SECRET);
  }

  close(): void {}
}

export interface Pair {
  readonly publicKey: KeyObject;
  readonly privateKey: KeyObject;
}

export function rsaPair(): Pair {
  return generateKeyPairSync("rsa", { modulusLength: 2048 });
}

export function pem({ publicKey }: Pair): string {
  return publicKey.export({ type: "spki", format: "pem" });
}

export function jwk({ publicKey }: Pair, kid: string): object {
  return { ...publicKey.export({ format: "jwk" }), kid, use: "sig" };
}

export type Fields = Readonly<Record<string, unknown>>;

const part = (value: unknown): string => Buffer.from(JSON.stringify(value)).toString("base64url");

/** The two parts that are signed. */
export function unsigned(header: Fields, payload: Fields): string {
  return `${part(header)}.${part(payload)}`;
}

/** Signed with RS256, whatever the header says. */
export function token(pair: Pair, payload: Fields, header: Fields = {}): string {
  const body = unsigned({ alg: "RS256", typ: "JWT", ...header }, payload);
  return `${body}.${sign("sha256", Buffer.from(body), pair.privateKey).toString("base64url")}`;
}

/** Claims of a token that is good for an hour from `now` (ms). */
export function claims(now: number, more: Fields = {}): Record<string, unknown> {
  const seconds = Math.floor(now / 1000);
  const usual = { iss: "https://id.example", aud: "ferry", sub: "u1", tier: "paid", iat: seconds };
  return { ...usual, exp: seconds + 3600, ...more };
}

/** The code of the refusal that this ends in, thrown or rejected. */
export async function codeOf(act: () => unknown): Promise<string> {
  try {
    await act();
    return "none";
  } catch (error) {
    if (error instanceof Refusal) return error.code;
    throw error;
  }
}

export function notices(events: Events): EventFields["notice"][] {
  const heard: EventFields["notice"][] = [];
  events.on("notice", (notice) => heard.push(notice));
  return heard;
}
