/**
 * Passthrough: proxies a request to a worker outside the batches.
 *
 * Both bodies are streamed with backpressure; at most two socket buffers are held. Events reach the client one by one.
 * If the client leaves, the worker's connection is closed at once. If the worker fails mid-response, the client's
 * connection is aborted, so that a partial response cannot pass for a complete one.
 *
 *   arrival ── totalMs ──► first byte of the response, else 504
 *   byte    ── idleMs ───► next byte taken by the client, else aborted
 *
 * At most `maxOpen` at once per process, shared among tenants (`core/share.ts`). They count as requests, not as tasks.
 */
import type { Readable } from "node:stream";
import type { Alarm, Clock } from "../app/clock.ts";
import { Refusal } from "../core/errors.ts";
import { Shares } from "../core/share.ts";
import { traceparent } from "../core/trace.ts";
import { newId } from "../engine/ids.ts";
import type { ShedReason } from "../observe/events.ts";
import type { Admission } from "./admission/admission.ts";
import type { Passage, Proxy } from "./dropin.ts";
import type { Exchange, Relay } from "./exchange.ts";
import { withFields } from "./protocol/fields.ts";
import type { PassedRequest, PassReceiver, PassUnderway } from "./protocol/protocol.ts";

export interface Road {
  send(request: PassedRequest, receiver: PassReceiver): PassUnderway;
}

export interface PassedModel {
  readonly road: Road;
  readonly totalMs: number;
  readonly forwardAuthorization: boolean;
}

export interface PassLimits {
  readonly maxOpen: number;
  /** Whether callers are authenticated; otherwise all are one tenant, and no share is reserved for others. */
  readonly perTenant: boolean;
  readonly idleMs: number;
}

const NO_BODY: ReadonlySet<number> = new Set([204, 304]);
const RETRY_AFTER_MS = 1000;

export class Passthrough implements Proxy {
  readonly #models: ReadonlyMap<string, PassedModel>;
  readonly #limits: PassLimits;
  readonly #admission: Admission;
  readonly #clock: Clock;
  readonly #underway: Shares;

  /** `underway`: requests in progress, also under an earlier config. */
  constructor(
    models: ReadonlyMap<string, PassedModel>,
    limits: PassLimits,
    admission: Admission,
    clock: Clock,
    underway = new Shares(),
  ) {
    this.#underway = underway;
    this.#models = models;
    this.#limits = limits;
    this.#admission = admission;
    this.#clock = clock;
  }

  async forward(exchange: Exchange, passage: Passage): Promise<void> {
    const { model, path, query } = passage;
    checkPath(path, query);
    if (/\bwebsocket\b/i.test(exchange.header("upgrade") ?? "")) {
      throw new Refusal(
        "INVALID_REQUEST",
        "connections are not passed through, only requests: no websockets",
      );
    }
    if (passage.body === undefined) exchange.checkLength();
    if (exchange.answered) return;
    const giveBack = this.#take(passage);
    try {
      exchange.id = newId(exchange.startedAt);
      const unseen = await new Crossover(
        exchange,
        passage,
        this.#models.get(model)!,
        this.#limits,
        this.#clock,
      ).over;
      if (unseen !== undefined) throw this.#refusal(passage, "no_worker", unseen);
    } finally {
      giveBack();
    }
  }

  /** Takes a slot and returns its release. Throws a Refusal. */
  #take(passage: Passage): () => void {
    const { maxOpen, perTenant } = this.#limits;
    const share = this.#underway;
    const tenant = perTenant ? (passage.caller?.tenant ?? "") : "";
    if (share.total >= maxOpen)
      throw this.#refusal(passage, "full", `${maxOpen} requests are being passed through already`);
    if (!perTenant || share.fits(tenant, 1, maxOpen)) {
      share.add(tenant, 1);
      return () => share.remove(tenant, 1);
    }
    const held = share.heldBy(tenant);
    const message = `${held} of your requests are being passed through; the other places are for other users`;
    throw this.#refusal(passage, "rate", message);
  }

  #refusal({ caller, model }: Passage, why: ShedReason, message: string): Refusal {
    if (caller !== undefined) return this.#admission.refuse(caller, model, why, message, RETRY_AFTER_MS);
    return new Refusal("SERVICE_OVERLOADED", message, { retryAfterMs: RETRY_AFTER_MS });
  }
}

class Crossover {
  readonly #exchange: Exchange;
  readonly #passage: Passage;
  readonly #idleMs: number;
  readonly #clock: Clock;
  readonly #end = Promise.withResolvers<string | undefined>();
  readonly #underway: ReturnType<Road["send"]> | undefined;
  #relay: Relay | undefined;
  #alarm: Alarm;
  #movedAt = 0;

  constructor(
    exchange: Exchange,
    passage: Passage,
    { road, totalMs, forwardAuthorization }: PassedModel,
    { idleMs }: PassLimits,
    clock: Clock,
  ) {
    this.#exchange = exchange;
    this.#passage = passage;
    this.#idleMs = idleMs;
    this.#clock = clock;
    const authorization = forwardAuthorization ? (exchange.header("authorization") ?? null) : undefined;
    this.#alarm = clock.at(exchange.startedAt + totalMs, () => this.#late());
    exchange.onGone(() => this.#stop(undefined));
    this.#underway = road.send(
      {
        method: exchange.method,
        path: passage.path + (passage.query === "" ? "" : `?${passage.query}`),
        headers: headersFor(exchange, passage.body),
        authorization,
        body: () => this.#body(),
      },
      {
        started: (status, headers) => this.#started(status, headers),
        data: (chunk) => this.#data(chunk),
        ended: () => this.#ended(),
        failed: (message, how) => this.#failed(message, how),
      },
    );
  }

  /** Resolves when both sides ended, with the problem if no worker could be reached; rejects with a Refusal. */
  get over(): Promise<string | undefined> {
    return this.#end.promise;
  }

  #body(): Readable | Buffer | null {
    if (this.#passage.body !== undefined) return this.#passage.body;
    if (!this.#exchange.hasBody) return null;
    const inflow = this.#exchange.inflow();
    inflow.once("error", (error) => {
      if (error instanceof Refusal) this.#stop(error);
    });
    return inflow;
  }

  #started(status: number, raw: readonly string[]): void {
    const exchange = this.#exchange;
    this.#alarm.cancel();
    const headers = sentBack(raw, status === 204);
    if (!headers.some((text, at) => at % 2 === 0 && text === "x-request-id"))
      headers.push("x-request-id", exchange.id);
    headers.push(...this.#passage.headers);
    try {
      this.#relay = exchange.relay(status, headers);
    } catch {
      const message = "the worker's answer has a status or headers that cannot be passed on";
      return this.#stop(new Refusal("INFERENCE_FAILED", message));
    }
    if (exchange.method === "HEAD" || NO_BODY.has(status)) return;
    this.#relay.onDrain(() => {
      this.#movedAt = this.#clock.now();
      this.#underway?.resume();
    });
    this.#movedAt = this.#clock.now();
    this.#watch();
  }

  #data(chunk: Buffer): boolean {
    this.#movedAt = this.#clock.now();
    return this.#relay!.write(chunk);
  }

  #ended(): void {
    this.#alarm.cancel();
    this.#relay!.end();
    this.#end.resolve(undefined);
  }

  #failed(message: string, how: "unseen" | "unfit" | "broken"): void {
    this.#alarm.cancel();
    if (how === "unseen") return this.#end.resolve(message);
    this.#end.reject(new Refusal(how === "unfit" ? "INVALID_REQUEST" : "INFERENCE_FAILED", message));
  }

  /** One timer per stream: when it fires, it checks when data last moved. */
  #watch(): void {
    const dueAt = this.#movedAt + this.#idleMs;
    this.#alarm = this.#clock.at(dueAt, () => {
      if (this.#clock.now() < this.#movedAt + this.#idleMs) this.#watch();
      else this.#stop(new Refusal("DEADLINE_EXCEEDED", `nothing moved for ${this.#idleMs} ms`));
    });
  }

  #late(): void {
    this.#stop(new Refusal("DEADLINE_EXCEEDED", "the worker did not answer before the total timeout"));
  }

  /** Cancels the worker's request. Undefined: there is no client to answer. */
  #stop(refusal: Refusal | undefined): void {
    this.#alarm.cancel();
    this.#underway?.recall();
    if (refusal === undefined) this.#end.resolve(undefined);
    else this.#end.reject(refusal);
  }
}

function headersFor(exchange: Exchange, body: Buffer | undefined): string[] {
  const { request, trace } = exchange;
  const before = exchange.header("x-forwarded-for");
  const peer = request.socket.remoteAddress;
  const way = [before, peer].filter((each) => each !== undefined && each !== "").join(", ");
  const length = exchange.header("content-length");
  return sentOn(request.rawHeaders, [
    ...(way === "" ? [] : ["x-forwarded-for", way]),
    ...(trace === undefined ? [] : ["traceparent", traceparent(trace)]),
    // Only for a stream; the length of a buffered body is known.
    ...(body === undefined && exchange.hasBody && length !== undefined ? ["content-length", length] : []),
  ]);
}

/** Hop-by-hop headers, in either direction. */
const HOP: ReadonlySet<string> = new Set([
  "connection",
  "http2-settings",
  "keep-alive",
  "proxy-authenticate",
  "proxy-authentication-info",
  "proxy-authorization",
  "proxy-connection",
  "te",
  "trailer",
  "transfer-encoding",
  "upgrade",
]);

/** For Ferry only, or rewritten. */
const NOT_SENT: ReadonlySet<string> = new Set([
  ...HOP,
  "authorization",
  "content-length",
  "cookie",
  "expect",
  "host",
  "x-api-key",
]);

/**
 * Headers that servers trust from their own proxy: client address, protocol, and overrides of URL, host or method.
 * Ferry is the worker's proxy, so none is forwarded from a client; `x-forwarded-for` is rewritten.
 */
const PROXY_CLAIM = new RegExp(
  `^(?:${[
    "forwarded|x-forward(?:ed)?(?:-.*)?",
    "x-original-.*|x-originating-.*|x-rewrite-.*|x-(?:http-)?method.*|x-host|x-http-host.*|x-script-name",
    "x-scheme|x-url-scheme|front-end-https|proxy",
    // x-real-ip, true-client-ip, cf-connecting-ip, fastly-client-ip, x-azure-clientip…
    "(?:.*-)?(?:client|socket)?ip(?:v6)?|(?:x-)?remote-.*",
    "cf-.*|x-envoy-.*|x-appengine-.*|x-arr-.*",
    "x-auth-request-.*|x-amzn-oidc-.*|x-goog-(?:authenticated|iap)-.*|x-ms-client-principal.*",
    "(?:x-)?ssl-.*|x-client-(?:cert|verify|dn).*",
  ].join("|")})$`,
);

/** About the worker's connection or origin, or instructions to a proxy in front of Ferry. */
const NOT_RETURNED: ReadonlySet<string> = new Set([
  ...HOP,
  "alt-svc",
  "clear-site-data",
  "nel",
  "public-key-pins",
  "report-to",
  "reporting-endpoints",
  "set-cookie",
  "set-cookie2",
  "strict-transport-security",
  "x-accel-redirect",
  "x-ferry-load",
  "x-lighttpd-send-file",
  "x-sendfile",
]);

/** Request headers for the worker: name, value, name, value… */
export function sentOn(raw: readonly string[], more: readonly string[]): string[] {
  const own = new Set<string>();
  for (let at = 0; at < more.length; at += 2) own.add(more[at]!);
  // WSGI and CGI treat `_` and `-` alike: `content_length` would be read as the body's length. As in nginx, no name
  // with `_` is forwarded.
  const dropped = (name: string): boolean =>
    name.includes("_") || NOT_SENT.has(name) || own.has(name) || PROXY_CLAIM.test(name);
  return [...kept(raw, dropped), ...more];
}

/** Response headers for the client. `bodiless`: a response that never has a body must not announce one. */
export function sentBack(raw: readonly string[], bodiless: boolean): string[] {
  return kept(raw, (name) => NOT_RETURNED.has(name) || (bodiless && name === "content-length"));
}

function kept(raw: readonly string[], dropped: (name: string) => boolean): string[] {
  const listed = connectionNames(raw);
  const headers: string[] = [];
  for (let at = 0; at < raw.length; at += 2) {
    const name = raw[at]!.toLowerCase();
    // HTTP/2 pseudo-headers.
    if (name.startsWith(":") || listed.has(name) || dropped(name)) continue;
    headers.push(name, raw[at + 1]!);
  }
  return headers;
}

/** Headers listed in `Connection` are hop-by-hop. */
function connectionNames(raw: readonly string[]): ReadonlySet<string> {
  const names = new Set<string>();
  for (let at = 0; at < raw.length; at += 2) {
    if (raw[at]!.toLowerCase() !== "connection") continue;
    for (const name of raw[at + 1]!.split(",")) names.add(name.trim().toLowerCase());
  }
  return names;
}

const MAX_DECODINGS = 4;

/**
 * Throws a Refusal for a path that could leave the worker's base: `.` or `..` segments, however escaped, with either
 * slash, or with parameters that some servers strip (`..;x`); also for a `#`.
 */
export function checkPath(path: string, query = ""): void {
  if (!path.startsWith("/") || path.startsWith("//") || !/^[\x21\x22\x24-\xff]*$/.test(path + query))
    throw unclear();
  let form = path;
  for (let round = 0; round < MAX_DECODINGS; round++) {
    if (hasDots(form) || hasControl(form)) throw unclear();
    const next = form.replace(/%([0-9a-f]{2})/gi, (_, digits: string) =>
      String.fromCharCode(Number.parseInt(digits, 16)),
    );
    if (next === form) return;
    form = next;
  }
  throw unclear();
}

function hasDots(path: string): boolean {
  return path.split(/[/\\]/).some((segment) => /^\.{1,2}(?:;.*)?$/s.test(segment));
}

function hasControl(text: string): boolean {
  // oxlint-disable-next-line no-control-regex
  return /[\x00-\x1f\x7f]/.test(text);
}

function unclear(): Refusal {
  return new Refusal("INVALID_REQUEST", "write the path plainly, without . and .. or what stands for them");
}

export interface PassTarget {
  readonly name: string;
  readonly workerName: string;
  /** Whether other model names pass unchanged. */
  readonly anyName: boolean;
  /** Body fields that name models, in lower case. */
  readonly fields: ReadonlySet<string>;
}

export const MODEL_FIELD: ReadonlySet<string> = new Set(["model"]);
/** Fields that name a model in `/api/show`, `/api/delete`, `/api/copy`, `/api/create` and others. */
export const OLLAMA_FIELDS: ReadonlySet<string> = new Set(["model", "name", "source", "destination", "from"]);

export function targetPath(path: string, target: PassTarget): string {
  const segments = path.split("/");
  for (let at = 0; at < segments.length; at++) {
    const segment = decoded(segments[at]!).toLowerCase();
    // A worker that decodes the slash would find an unchecked name.
    if (!target.anyName && /[/\\]models$|(?:^|[/\\])models[/\\]/.test(segment)) {
      throw new Refusal("INVALID_REQUEST", "write the path plainly: models and its slashes without escapes");
    }
    if (segment !== "models") continue;
    const next = segments.findIndex((each, index) => index > at && each !== "");
    if (next < 0) continue;
    // A name with unescaped slashes.
    const long = [target.name, target.workerName].find((own) => {
      const parts = own.split("/");
      return parts.length > 1 && decoded(segments.slice(next, next + parts.length).join("/")) === own;
    });
    if (long === undefined) segments[next] = targetSegment(segments[next]!, target);
    else
      segments.splice(next, long.split("/").length, ...target.workerName.split("/").map(encodeURIComponent));
  }
  return segments.join("/");
}

/** `NAME`, or `NAME:predict`. */
function targetSegment(segment: string, target: PassTarget): string {
  const whole = decoded(segment);
  const colon = segment.lastIndexOf(":");
  const end = colon < 0 || isOwn(whole, target) ? segment.length : colon;
  const said = decoded(segment.slice(0, end));
  const name = nameFor(said, target);
  return name === said ? segment : encodeURIComponent(name) + segment.slice(end);
}

export function targetQuery(query: string, target: PassTarget): string {
  if (!/model|%/i.test(query)) return query;
  const parts = query.split("&").map((part) => {
    const [[key, said] = ["", ""]] = new URLSearchParams(part);
    if (key.toLowerCase() !== "model") return part;
    const name = nameFor(said, target);
    return name === said ? part : `model=${encodeURIComponent(name)}`;
  });
  return parts.join("&");
}

/** A JSON body with the worker's name for the model; need not be JSON if any name may pass. Throws a Refusal. */
export function targetBody(body: Buffer, target: PassTarget): Buffer {
  if (!body.includes("{")) return body;
  try {
    return withFields(body, (field, text) => {
      if (!target.fields.has(field.toLowerCase()) || text === "null") return undefined;
      if (!text.startsWith('"')) throw new Refusal("INVALID_REQUEST", `"${field}" must be a string`);
      return JSON.stringify(nameFor(JSON.parse(text) as string, target));
    });
  } catch (error) {
    if (target.anyName && error instanceof Refusal) return body;
    throw error;
  }
}

function isOwn(said: string, target: PassTarget): boolean {
  return [said, bare(said)].some((each) => each === target.name || each === target.workerName);
}

/** Ollama adds `:latest` to a name without a tag. */
function bare(name: string): string {
  return name.endsWith(":latest") ? name.slice(0, -":latest".length) : name;
}

function nameFor(said: string, target: PassTarget): string {
  const { name, workerName, anyName } = target;
  if (said === workerName || bare(said) === workerName) return said;
  if (said === name || bare(said) === name) return workerName;
  if (anyName) return said;
  const quoted = JSON.stringify(said.slice(0, 128));
  throw new Refusal("NOT_FOUND", `the model ${quoted} is not at this address, which is that of ${name}`);
}

/** Unchanged if it is not a valid escape. */
export function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
