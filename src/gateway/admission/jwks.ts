/**
 * Public keys of an issuer, from its JWKS URL (RFC 7517), by `kid`.
 *
 *   known kid           at once; past `cacheMs` the set is refetched in the background
 *   unknown or no kid   the set is fetched first, unless that was tried less than `cooldownMs` ago
 *
 * A new key is seen within `cooldownMs` of its first token, and the issuer is asked at most once per `cooldownMs`. If a
 * fetch fails, the previous keys stay in force (one notice); without any, callers get 503.
 *
 * A fetch follows no redirect, ends after `timeoutMs`, and reads at most 512 KiB. Keys for another algorithm or use are
 * skipped. A token without `kid` is accepted only with a set of one key.
 */
import { createPublicKey, type KeyObject } from "node:crypto";
import type { Clock } from "../../app/clock.ts";
import { Refusal } from "../../core/errors.ts";
import type { Events } from "../../observe/events.ts";
import { fits, type PublicKeys } from "./tokens.ts";

/** Keys change about monthly; the cooldown keeps made-up key ids from flooding the issuer. */
export const JWKS_TIMES = { cacheMs: 600_000, cooldownMs: 30_000, timeoutMs: 2000 } as const;

export interface JwksOptions {
  readonly url: string;
  readonly algorithm: string;
  readonly cacheMs: number;
  readonly cooldownMs: number;
  readonly timeoutMs: number;
}

export type Download = (url: string, signal: AbortSignal) => Promise<string>;

const MAX_BYTES = 512 * 1024;
const MAX_KEYS = 100;

export class Jwks implements PublicKeys {
  readonly #options: JwksOptions;
  readonly #clock: Clock;
  readonly #events: Events;
  readonly #download: Download;
  readonly #ended = new AbortController();
  #keys: ReadonlyMap<string, KeyObject> = new Map();
  /** Set if the set has exactly one key. */
  #only: KeyObject | undefined;
  #fetching: Promise<void> | undefined;
  #staleAt = -Infinity;
  #mayFetchAt = -Infinity;
  #failing = false;

  constructor(options: JwksOptions, clock: Clock, events: Events, fetchText: Download = download) {
    this.#options = options;
    this.#clock = clock;
    this.#events = events;
    this.#download = fetchText;
  }

  /** The first fetch. An unreachable issuer does not prevent the start. */
  async open(): Promise<void> {
    await this.#refresh();
  }

  find(kid: string | undefined): KeyObject | undefined | Promise<KeyObject | undefined> {
    const key = this.#pick(kid);
    if (key === undefined) return this.#findAfresh(kid);
    if (this.#clock.now() >= this.#staleAt) void this.#refresh();
    return key;
  }

  close(): void {
    this.#ended.abort();
  }

  #pick(kid: string | undefined): KeyObject | undefined {
    return kid === undefined ? this.#only : this.#keys.get(kid);
  }

  async #findAfresh(kid: string | undefined): Promise<KeyObject | undefined> {
    await this.#refresh();
    if (this.#staleAt > -Infinity) return this.#pick(kid);
    const retryAfterMs = Math.max(1000, Math.ceil(this.#mayFetchAt - this.#clock.now()));
    const message = "tokens cannot be checked now: their issuer's keys could not be fetched";
    throw new Refusal("SERVICE_OVERLOADED", message, { retryAfterMs });
  }

  /** Never rejects. Undefined: within the cooldown. */
  #refresh(): Promise<void> | undefined {
    if (this.#fetching !== undefined) return this.#fetching;
    const now = this.#clock.now();
    if (now < this.#mayFetchAt || this.#ended.signal.aborted) return undefined;
    this.#mayFetchAt = now + this.#options.cooldownMs;
    this.#fetching = this.#fetch().finally(() => (this.#fetching = undefined));
    return this.#fetching;
  }

  async #fetch(): Promise<void> {
    const { url, algorithm, timeoutMs, cacheMs } = this.#options;
    const late = new AbortController();
    const alarm = this.#clock.at(this.#clock.now() + timeoutMs, () => late.abort());
    try {
      const signal = AbortSignal.any([late.signal, this.#ended.signal]);
      const { keys, only } = readSet(await this.#download(url, signal), algorithm);
      this.#keys = keys;
      this.#only = only;
      this.#staleAt = this.#clock.now() + cacheMs;
      if (this.#failing) this.#tell("info", "could be fetched again");
      this.#failing = false;
    } catch (error) {
      if (this.#ended.signal.aborted) return;
      const why = late.signal.aborted ? `no answer within ${timeoutMs} ms` : causeOf(error);
      const rest =
        this.#staleAt > -Infinity ? "; those from before stay in force" : "; no token can be checked";
      if (!this.#failing) this.#tell("warn", `cannot be fetched: ${why}${rest}`);
      this.#failing = true;
    } finally {
      alarm.cancel();
    }
  }

  #tell(level: "info" | "warn", what: string): void {
    const { origin, pathname } = new URL(this.#options.url);
    this.#events.emit("notice", { level, message: `the keys of ${origin}${pathname} ${what}` });
  }
}

/** Throws if no key is usable, so that such a response replaces nothing. */
function readSet(
  text: string,
  algorithm: string,
): { keys: Map<string, KeyObject>; only: KeyObject | undefined } {
  const { keys: list } = (JSON.parse(text) ?? {}) as { keys?: unknown };
  if (!Array.isArray(list)) throw new Error("it is not a JSON Web Key Set");
  const keys = new Map<string, KeyObject>();
  const usable: KeyObject[] = [];
  for (const each of list.slice(0, MAX_KEYS) as unknown[]) {
    const key = readKey(each, algorithm);
    if (key === undefined) continue;
    usable.push(key);
    const { kid } = each as { kid?: unknown };
    if (typeof kid === "string") keys.set(kid, key);
  }
  if (usable.length === 0) throw new Error(`it holds no key for ${algorithm}`);
  return { keys, only: usable.length === 1 ? usable[0] : undefined };
}

function readKey(value: unknown, algorithm: string): KeyObject | undefined {
  if (typeof value !== "object" || value === null) return undefined;
  const { alg, use, key_ops: operations } = value as Readonly<Record<string, unknown>>;
  if (alg !== undefined && alg !== algorithm) return undefined;
  if (use !== undefined && use !== "sig") return undefined;
  if (Array.isArray(operations) && !operations.includes("verify")) return undefined;
  try {
    const key = createPublicKey({ key: value, format: "jwk" });
    return fits(key, algorithm) ? key : undefined;
  } catch {
    return undefined;
  }
}

async function download(url: string, signal: AbortSignal): Promise<string> {
  const answer = await fetch(url, { signal, redirect: "error", headers: { accept: "application/json" } });
  if (answer.status !== 200 || answer.body === null) {
    await answer.body?.cancel();
    throw new Error(`HTTP ${answer.status}`);
  }
  const chunks: Uint8Array[] = [];
  let bytes = 0;
  for await (const chunk of answer.body as AsyncIterable<Uint8Array>) {
    bytes += chunk.length;
    if (bytes > MAX_BYTES) throw new Error(`the answer is larger than ${MAX_BYTES} bytes`);
    chunks.push(chunk);
  }
  return Buffer.concat(chunks).toString("utf8");
}

/** The cause hidden by fetch; never the URL, which may hold a secret. */
function causeOf(error: unknown): string {
  if (error instanceof SyntaxError) return "it is not JSON";
  const { message, cause } = error as Error;
  const { code, message: inner } = (cause ?? {}) as NodeJS.ErrnoException;
  if (code !== undefined) return code;
  if (error instanceof TypeError && cause === undefined) return "no request can be made of this URL";
  return inner === "unexpected redirect" ? "it redirects, which is not followed" : (inner ?? message);
}
