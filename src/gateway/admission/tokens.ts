/**
 * JSON Web Tokens: verification and the user a token names.
 *
 * Accepted: signed with the configured algorithm (never the one in the token's header) by a known key; `iss` and `aud`
 * as configured; `exp` present, not past, at most `maxLifeMs` ahead; `nbf` past; `skewMs` of clock skew. A header may
 * name a key by `kid` only: `jku`, `x5u` and `jwk` are ignored, `crit` is refused, and `typ`, if present, must be an
 * access token's. The user claim must be a valid tenant name. The tier claim is optional with a default; an
 * unconfigured tier is 403.
 *
 * A verified token is cached by its text until it expires, at most a minute; a withdrawn key works for that minute
 * more.
 *
 * Token times are the issuer's, so they are compared with the wall clock as it is now, also after a suspend or a wrong
 * clock at the start.
 */
import { createPublicKey, type KeyObject } from "node:crypto";
import { decodeProtectedHeader, jwtVerify } from "jose";
import type { Clock } from "../../app/clock.ts";
import { Refusal } from "../../core/errors.ts";
import type { Events } from "../../observe/events.ts";
import { type Caller, type CallerOf, type TokenCheck, unauthenticated } from "./credentials.ts";
import { isUser } from "./api-keys.ts";
import { WatchedFile } from "./key-file.ts";

export const SKEW_MS = 60_000;

export interface TokenRules {
  readonly algorithm: string;
  readonly issuer: string;
  readonly audience: string;
  readonly userClaim: string;
  readonly tierClaim: string;
  readonly defaultTier?: string | undefined;
  readonly skewMs: number;
  readonly maxLifeMs: number;
}

/** Implemented by `PublicKeyFile` and `jwks.ts`. */
export interface PublicKeys {
  /** Undefined: no such key. Rejects with a Refusal if that cannot be determined now. */
  find(kid: string | undefined): KeyObject | undefined | Promise<KeyObject | undefined>;
  close(): void;
}

const MAX_TOKEN = 8192;
const REMEMBER_MS = 60_000;
const MAX_REMEMBERED = 10_000;
const MAX_REMEMBERED_CHARS = 16 * 2 ** 20;
const SHAPE = /^[\w-]+\.[\w-]+\.[\w-]+$/;
/** RFC 7519 and RFC 9068; other types are for another purpose. */
const TYPES = new Set(["jwt", "at+jwt", "application/jwt", "application/at+jwt"]);

export class Tokens implements TokenCheck {
  readonly #rules: TokenRules;
  readonly #keys: PublicKeys;
  readonly #clock: Clock;
  readonly #callerOf: CallerOf;
  readonly #good = new RecentTokens<Caller>(MAX_REMEMBERED, MAX_REMEMBERED_CHARS);

  constructor(rules: TokenRules, keys: PublicKeys, clock: Clock, callerOf: CallerOf) {
    this.#rules = rules;
    this.#keys = keys;
    this.#clock = clock;
    this.#callerOf = callerOf;
  }

  identify(token: string): Caller | Promise<Caller> {
    const known = this.#good.get(token, this.#clock.now());
    if (known !== undefined) return known;
    if (token.length > MAX_TOKEN || !SHAPE.test(token)) throw unauthenticated();
    return this.#check(token);
  }

  async #check(token: string): Promise<Caller> {
    const { userClaim, tierClaim, defaultTier, skewMs, maxLifeMs } = this.#rules;
    const payload = await this.#verify(token);
    const claim = (name: string): unknown => (Object.hasOwn(payload, name) ? payload[name] : undefined);
    const user = claim(userClaim);
    const lastsMs = payload.exp! * 1000 - this.#clock.wall();
    if (!isUser(user) || lastsMs > maxLifeMs + skewMs) throw unauthenticated();
    const tier = claim(tierClaim) ?? defaultTier;
    const caller = this.#callerOf(user, typeof tier === "string" ? tier : undefined);
    this.#good.set(token, caller, this.#clock.now() + Math.min(lastsMs + skewMs, REMEMBER_MS));
    return caller;
  }

  /** Every flaw is the same refusal; only temporary failures are told apart. */
  async #verify(token: string) {
    const { algorithm, issuer, audience, skewMs } = this.#rules;
    try {
      const { alg, typ, kid } = decodeProtectedHeader(token);
      if (alg !== algorithm) throw unauthenticated();
      // Untrusted input: the type may be wrong.
      if (typ !== undefined && (typeof typ !== "string" || !TYPES.has(typ.toLowerCase())))
        throw unauthenticated();
      if (kid !== undefined && typeof kid !== "string") throw unauthenticated();
      const key = await this.#keys.find(kid);
      if (key === undefined) throw unauthenticated();
      const { payload } = await jwtVerify(token, key, {
        algorithms: [algorithm],
        issuer,
        audience,
        requiredClaims: ["exp"],
        clockTolerance: skewMs / 1000,
        currentDate: new Date(this.#clock.wall()),
      });
      return payload;
    } catch (error) {
      throw error instanceof Refusal ? error : unauthenticated();
    }
  }
}

const CURVES: ReadonlyMap<string, string> = new Map([
  ["ES256", "prime256v1"],
  ["ES384", "secp384r1"],
  ["ES512", "secp521r1"],
]);
const MIN_RSA_BITS = 2048;

export function fits(key: KeyObject, algorithm: string): boolean {
  const { asymmetricKeyType: type, asymmetricKeyDetails: details } = key;
  if (/^[RP]S/.test(algorithm)) return type === "rsa" && (details?.modulusLength ?? 0) >= MIN_RSA_BITS;
  if (algorithm === "EdDSA") return type === "ed25519" || type === "ed448";
  return type === "ec" && details?.namedCurve === CURVES.get(algorithm);
}

/** The key of a PEM text (public key or certificate); throws an Error that says what is wrong. */
export function readPem(text: string, algorithm: string): KeyObject {
  if (text.includes("PRIVATE KEY"))
    throw new Error("it holds a private key; Ferry needs only the public one");
  let key: KeyObject;
  try {
    key = createPublicKey(text);
  } catch (error) {
    throw new Error("it holds no public key in PEM (-----BEGIN PUBLIC KEY-----)", { cause: error });
  }
  if (fits(key, algorithm)) return key;
  const bits = key.asymmetricKeyDetails?.modulusLength;
  const what = `${key.asymmetricKeyType}${bits === undefined ? "" : ` of ${bits} bits`}`;
  throw new Error(`its key (${what}) cannot be used with ${algorithm}; see auth.jwt.algorithm`);
}

/** One key in a file, for any `kid`; reread when the file changes. */
export class PublicKeyFile implements PublicKeys {
  readonly #watched: WatchedFile;
  #key: KeyObject | undefined;
  #trouble = "";

  private constructor(path: string, algorithm: string, reloadMs: number, clock: Clock, events: Events) {
    const failed = (why: string): void => {
      this.#trouble = `auth.jwt.publicKeyFile ${path}: ${why}`;
      if (this.#key === undefined) return;
      const message = `${this.#trouble}; the key that was read before stays in force`;
      events.emit("notice", { level: "warn", message });
    };
    const changed = (text: string | undefined): void => {
      try {
        if (text === undefined) throw new Error("there is no such file");
        this.#key = readPem(text, algorithm);
      } catch (error) {
        failed((error as Error).message);
      }
    };
    this.#watched = new WatchedFile(path, reloadMs, clock, { changed, failed });
  }

  static async open(
    path: string,
    algorithm: string,
    reloadMs: number,
    clock: Clock,
    events: Events,
  ): Promise<PublicKeyFile> {
    const file = new PublicKeyFile(path, algorithm, reloadMs, clock, events);
    await file.#watched.start();
    if (file.#key !== undefined) return file;
    file.close();
    throw new Error(file.#trouble);
  }

  find(): KeyObject | undefined {
    return this.#key;
  }

  close(): void {
    this.#watched.stop();
  }
}

interface Entry<Value> {
  readonly value: Value;
  readonly until: number;
}

export class RecentTokens<Value> {
  readonly #entries = new Map<string, Entry<Value>>();
  readonly #maxEntries: number;
  readonly #maxChars: number;
  #chars = 0;

  constructor(maxEntries: number, maxChars: number) {
    this.#maxEntries = maxEntries;
    this.#maxChars = maxChars;
  }

  get size(): number {
    return this.#entries.size;
  }

  get(text: string, now: number): Value | undefined {
    const entry = this.#entries.get(text);
    if (entry === undefined) return undefined;
    if (entry.until > now) return entry.value;
    this.#forget(text);
    return undefined;
  }

  set(text: string, value: Value, until: number): void {
    this.#forget(text);
    this.#entries.set(text, { value, until });
    this.#chars += text.length;
    for (const oldest of this.#entries.keys()) {
      if (this.#entries.size <= this.#maxEntries && this.#chars <= this.#maxChars) break;
      this.#forget(oldest);
    }
  }

  #forget(text: string): void {
    if (this.#entries.delete(text)) this.#chars -= text.length;
  }
}
