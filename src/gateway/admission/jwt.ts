/**
 * JSON Web Tokens: whether one is good, and whom it names.
 *
 * Taken: signed with the one algorithm of the config (never the one that a token's header names), by a key
 * that we have; `iss` and `aud` as configured; `exp` there, not past, not more than `maxLifeMs` ahead; `nbf`
 * past; the clocks may differ by `skewMs`. A header can name a key by `kid` and nothing else: `jku`, `x5u`
 * and `jwk` are never looked at, `crit` is refused, and `typ` must be that of an access token where it is
 * there. The user claim is a string that can be a tenant's name. The tier claim may be left out where there is
 * a default; any other than a configured one is 403.
 *
 * A token that was good is remembered, by its text, until it expires, a minute at most: the next request with
 * it costs a look into a map. A key that its issuer withdrew can be used for that minute more.
 *
 * Instants in a token are the issuer's, so they are held against the machine's clock as it is now, also after a sleep
 * or when it was wrong at the start.
 */
import type { KeyObject } from "node:crypto";
import { decodeProtectedHeader, jwtVerify } from "jose";
import type { Clock } from "../../app/clock.ts";
import { Refusal } from "../../core/errors.ts";
import { type Caller, isUser } from "./caller.ts";
import { type CallerOf, type TokenCheck, unauthenticated } from "./credentials.ts";
import { Recent } from "./recent.ts";

/** How far the issuer's clock may be from ours. */
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

/** Where public keys come from: `public-key.ts` or `jwks.ts`. */
export interface PublicKeys {
  /** Undefined: there is none of that name. Rejects with a Refusal when that cannot be found out now. */
  find(kid: string | undefined): KeyObject | undefined | Promise<KeyObject | undefined>;
  close(): void;
}

const MAX_TOKEN = 8192;
const REMEMBER_MS = 60_000;
const MAX_REMEMBERED = 10_000;
const MAX_REMEMBERED_CHARS = 16 * 2 ** 20;
/** Three parts of base64url; an empty signature is no signature. */
const SHAPE = /^[\w-]+\.[\w-]+\.[\w-]+$/;
/** RFC 7519 and RFC 9068; others are tokens for another purpose. */
const TYPES = new Set(["jwt", "at+jwt", "application/jwt", "application/at+jwt"]);

export class Tokens implements TokenCheck {
  readonly #rules: TokenRules;
  readonly #keys: PublicKeys;
  readonly #clock: Clock;
  readonly #callerOf: CallerOf;
  readonly #good = new Recent<Caller>(MAX_REMEMBERED, MAX_REMEMBERED_CHARS);

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

  /** Every flaw ends in the same refusal; only "not now" is told apart. */
  async #verify(token: string) {
    const { algorithm, issuer, audience, skewMs } = this.#rules;
    try {
      const { alg, typ, kid } = decodeProtectedHeader(token);
      if (alg !== algorithm) throw unauthenticated();
      // Whatever the types say: this is what somebody sent.
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
