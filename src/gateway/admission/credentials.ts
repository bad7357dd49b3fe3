/**
 * Credentials: an API key or a token → user and tier.
 *
 *   Authorization: Bearer X, or x-api-key: X       both, and different: 401
 *   X begins with fy_live_   → `api-keys.ts`, then the store's record, then its digest
 *   anything else            → `tokens.ts`
 *
 * Every failure is the same 401, which says what to send and nothing about what was sent. 403: a valid credential with
 * an unconfigured tier. No other header or body field identifies a caller.
 *
 * A key verified before is admitted after a constant-time comparison if its record is unchanged: 0.4 µs; an HMAC alone
 * takes 2 µs. Other keys take the full path (checksum, record, digest), equally long for unknown ids and wrong secrets.
 */
import { createSecretKey, type KeyObject, timingSafeEqual } from "node:crypto";
import { Refusal } from "../../core/errors.ts";
import {
  digestOf,
  idOf,
  KEY_LENGTH,
  KEY_PREFIX,
  type KeyRecord,
  type KeyStore,
  nameOfSecret,
  readApiKey,
} from "./api-keys.ts";

export interface Caller {
  /** The credential's user. Results, keys and cached outcomes are per tenant. */
  readonly tenant: string;
  readonly tier: number;
}

export interface TokenCheck {
  /** Synchronous for a token that was verified recently. */
  identify(token: string): Caller | Promise<Caller>;
}

export interface CredentialRules {
  readonly tiers: readonly { readonly name: string }[];
  /** Undefined: a credential is required. */
  readonly anonymousTier?: string | undefined;
}

export interface KeyParts {
  readonly store: KeyStore;
  readonly secret: string;
  /** Called once, for the first key that was made with another secret and can never work here. */
  readonly otherSecret?: ((id: string) => void) | undefined;
}

export interface CredentialParts {
  readonly keys?: KeyParts | undefined;
  readonly tokens?: ((callerOf: CallerOf) => TokenCheck) | undefined;
}

/** Throws FORBIDDEN for a tier that is not configured. */
export type CallerOf = (user: string, tier: string | undefined) => Caller;

interface Proven {
  /** Valid while the store returns this same object. */
  readonly record: KeyRecord;
  readonly bytes: Buffer;
  readonly caller: Caller;
}

export const ANONYMOUS = "anonymous";
/** Compared with for unknown ids, so that they take as long as known ones. */
const NO_DIGEST = Buffer.alloc(32);
const MAX_PROVEN = 20_000;
const USUAL = "Bearer ";
const BEARER = /^Bearer +([^\s]+) *$/i;

export class Credentials {
  readonly #tiers: ReadonlyMap<string, number>;
  readonly #anonymous: Caller | undefined;
  readonly #store: KeyStore | undefined;
  readonly #secret: KeyObject | undefined;
  readonly #secretName: string;
  #otherSecret: ((id: string) => void) | undefined;
  readonly #tokens: TokenCheck | undefined;
  /** By id; the oldest are evicted first. */
  readonly #proven = new Map<string, Proven>();
  readonly #shown = Buffer.alloc(KEY_LENGTH);

  constructor({ tiers, anonymousTier }: CredentialRules, { keys, tokens }: CredentialParts = {}) {
    this.#tiers = new Map(tiers.map(({ name }, at) => [name, at]));
    if (anonymousTier !== undefined) {
      this.#anonymous = { tenant: ANONYMOUS, tier: this.#tiers.get(anonymousTier) ?? 0 };
    }
    this.#store = keys?.store;
    this.#secret = keys && createSecretKey(keys.secret, "utf8");
    this.#secretName = this.#secret === undefined ? "" : nameOfSecret(this.#secret);
    this.#otherSecret = keys?.otherSecret;
    this.#tokens = tokens?.((user, tier) => this.#callerOf(user, tier));
  }

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
    const store = this.#store;
    if (store === undefined || key.length !== KEY_LENGTH) throw unauthenticated();
    const proven = this.#proven.get(idOf(key));
    // For a known id the digest comparison catches any flaw in the key.
    const id = proven === undefined ? readApiKey(key) : proven.record.id;
    if (id === undefined) throw unauthenticated();
    const record = store.get(id);
    if (proven !== undefined && record === proven.record) {
      this.#shown.write(key, "latin1");
      if (timingSafeEqual(this.#shown, proven.bytes)) return proven.caller;
    }
    if (record instanceof Promise) return record.then((found) => this.#prove(key, found));
    return this.#prove(key, record);
  }

  #prove(key: string, record: KeyRecord | undefined): Caller {
    const same = timingSafeEqual(digestOf(key, this.#secret!), record?.digest ?? NO_DIGEST);
    if (record !== undefined && record.madeWith !== this.#secretName) this.#tellOtherSecret(record.id);
    if (record === undefined || !same) throw unauthenticated();
    const caller = this.#callerOf(record.user, record.tier);
    this.#proven.delete(record.id);
    this.#proven.set(record.id, { record, bytes: Buffer.from(key, "latin1"), caller });
    if (this.#proven.size > MAX_PROVEN) this.#proven.delete(this.#proven.keys().next().value!);
    return caller;
  }

  /** Once: a client that keeps trying must not fill the log. */
  #tellOtherSecret(id: string): void {
    this.#otherSecret?.(id);
    this.#otherSecret = undefined;
  }

  #callerOf(tenant: string, name: string | undefined): Caller {
    const tier = name === undefined ? undefined : this.#tiers.get(name);
    if (tier !== undefined) return { tenant, tier };
    throw new Refusal("FORBIDDEN", "the credential is good, but it names no tier that is served here");
  }
}

function shownBy(authorization: string | undefined, apiKey: string | undefined): string | undefined {
  if (authorization === undefined) return apiKey;
  // The usual form needs no regular expression.
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
