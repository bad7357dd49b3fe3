/**
 * From what a request shows to who is behind it: an API key or a token → user and tier.
 *
 *   Authorization: Bearer X, or x-api-key: X       both, and different: 401
 *   X begins with fy_live_   → api-key.ts, then the store's record, then its digest
 *   anything else            → jwt.ts
 *
 * Whatever is wrong, the answer is the same 401: it says what to send and nothing about what was sent. 403 is
 * for a credential that is good and names a tier that is not configured. Nothing but the credential says who
 * somebody is: no header, no field of the body.
 *
 * The way of a key that was seen before is synchronous and allocates nothing: its checksum, its record, and
 * a comparison in constant time with the bytes that were proven then. What was proven hangs on the record, so
 * that it is forgotten with it. An unknown id does the same work as a known one with another secret.
 */
import { createSecretKey, type KeyObject, timingSafeEqual } from "node:crypto";
import { Refusal } from "../core/errors.ts";
import { digestOf, KEY_LENGTH, KEY_PREFIX, readApiKey } from "./api-key.ts";
import type { Caller } from "./caller.ts";
import type { KeyRecord, KeyStore } from "./keys.ts";

/** What checks tokens; `jwt.ts`. */
export interface TokenCheck {
  /** At once for a token that was checked a moment ago. */
  identify(token: string): Caller | Promise<Caller>;
}

export interface CredentialRules {
  /** In the order of the config. */
  readonly tiers: readonly { readonly name: string }[];
  /** Left out: everybody must show a credential. */
  readonly anonymousTier?: string | undefined;
}

export interface CredentialParts {
  readonly keys?: { readonly store: KeyStore; readonly secret: string } | undefined;
  readonly tokens?: ((callerOf: CallerOf) => TokenCheck) | undefined;
}

/** Throws FORBIDDEN for a tier that is not configured. */
export type CallerOf = (user: string, tier: string | undefined) => Caller;

interface Proven {
  readonly bytes: Buffer;
  readonly caller: Caller;
}

/** Compared with where there is nothing to compare with. */
const NO_DIGEST = Buffer.alloc(32);
const NO_BYTES = Buffer.alloc(KEY_LENGTH);
const USUAL = "Bearer ";
const BEARER = /^Bearer +([^\s]+) *$/i;

export class Credentials {
  readonly #tiers: ReadonlyMap<string, number>;
  readonly #anonymous: Caller | undefined;
  readonly #store: KeyStore | undefined;
  readonly #secret: KeyObject | undefined;
  readonly #tokens: TokenCheck | undefined;
  readonly #proven = new WeakMap<KeyRecord, Proven>();
  readonly #shown = Buffer.alloc(KEY_LENGTH);

  constructor({ tiers, anonymousTier }: CredentialRules, { keys, tokens }: CredentialParts = {}) {
    this.#tiers = new Map(tiers.map(({ name }, at) => [name, at]));
    if (anonymousTier !== undefined) {
      this.#anonymous = { tenant: "anonymous", tier: this.#tiers.get(anonymousTier) ?? 0 };
    }
    this.#store = keys?.store;
    this.#secret = keys && createSecretKey(keys.secret, "utf8");
    this.#tokens = tokens?.((user, tier) => this.#callerOf(user, tier));
  }

  /** Whether requests need a credential. */
  get required(): boolean {
    return this.#anonymous === undefined;
  }

  /** Throws or rejects with a Refusal: UNAUTHENTICATED, FORBIDDEN, or SERVICE_OVERLOADED. */
  identify(authorization: string | undefined, apiKey: string | undefined): Caller | Promise<Caller> {
    if (this.#anonymous !== undefined) return this.#anonymous;
    const shown = shownBy(authorization, apiKey);
    if (shown === undefined) throw unauthenticated();
    if (shown.startsWith(KEY_PREFIX)) return this.#byKey(shown);
    if (this.#tokens === undefined) throw unauthenticated();
    return this.#tokens.identify(shown);
  }

  #byKey(key: string): Caller | Promise<Caller> {
    const id = this.#store && readApiKey(key);
    if (id === undefined) throw unauthenticated();
    const record = this.#store!.get(id);
    if (record instanceof Promise) return record.then((found) => this.#prove(key, found));
    return this.#prove(key, record);
  }

  #prove(key: string, record: KeyRecord | undefined): Caller {
    const proven = record && this.#proven.get(record);
    this.#shown.write(key, "latin1");
    if (timingSafeEqual(this.#shown, proven?.bytes ?? NO_BYTES) && proven !== undefined) return proven.caller;
    const same = timingSafeEqual(digestOf(key, this.#secret!), record?.digest ?? NO_DIGEST);
    if (record === undefined || !same) throw unauthenticated();
    const caller = this.#callerOf(record.user, record.tier);
    this.#proven.set(record, { bytes: Buffer.from(key, "latin1"), caller });
    return caller;
  }

  #callerOf(tenant: string, name: string | undefined): Caller {
    const tier = name === undefined ? undefined : this.#tiers.get(name);
    if (tier !== undefined) return { tenant, tier };
    throw new Refusal("FORBIDDEN", "the credential is good, but it names no tier that is served here");
  }
}

/** The one credential that was sent. */
function shownBy(authorization: string | undefined, apiKey: string | undefined): string | undefined {
  if (authorization === undefined) return apiKey;
  // What almost everybody writes needs no match.
  const usual = authorization.startsWith(USUAL) && !authorization.includes(" ", USUAL.length);
  const bearer = usual ? authorization.slice(USUAL.length) : BEARER.exec(authorization)?.[1];
  return apiKey === undefined || apiKey === bearer ? bearer : undefined;
}

export function unauthenticated(): Refusal {
  return new Refusal(
    "UNAUTHENTICATED",
    "no valid credential; send Authorization: Bearer <API key or token>, or x-api-key: <API key>",
  );
}
