/**
 * W3C trace context as text. Ids only, so that the request path needs no tracing library; `observe/traces.ts` builds
 * spans from events afterwards. A request that is not sampled has no trace.
 *
 * A batch is a separate trace whose ids derive from the batch id, so that any process that knows the batch (every
 * outcome names it) can link to its span; likewise each worker call and each task's queue wait. Workers belong to the
 * batch's trace, so a caller's `tracestate` ends at the request's span.
 */

export interface RequestTrace {
  /** 32 hex digits. */
  readonly traceId: string;
  /** The request's span: 16 hex digits. */
  readonly spanId: string;
  /** The caller's span; "" if the trace begins here. */
  readonly parentId: string;
  /** The caller's `tracestate`; "" if none or unreadable. */
  readonly state: string;
}

export interface SpanPlace {
  readonly traceId: string;
  readonly spanId: string;
}

const TRACEPARENT = /^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$/;
const NO_TRACE = "0".repeat(32);
const NO_SPAN = "0".repeat(16);
const SAMPLED = 1;

/** Undefined if invalid: the standard says to go on without it. Two headers joined by a comma are invalid too. */
export function readTraceparent(text: string): (SpanPlace & { readonly sampled: boolean }) | undefined {
  const found = TRACEPARENT.exec(text);
  if (found === null) return undefined;
  const [, version, traceId, spanId, flags, more] = found;
  // Version 00 has exactly these four fields; a later one may have more; ff is invalid.
  if (version === "ff" || (version === "00" && more !== undefined)) return undefined;
  if (traceId === NO_TRACE || spanId === NO_SPAN) return undefined;
  return { traceId: traceId!, spanId: spanId!, sampled: (Number.parseInt(flags!, 16) & SAMPLED) !== 0 };
}

export function traceparent({ traceId, spanId }: SpanPlace): string {
  return `00-${traceId}-${spanId}-01`;
}

/** `key=value`; a key may be `tenant@system`. Values are printable, without trailing blanks. */
const STATE_KEY = /^(?:[a-z0-9][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})$/;
const STATE_VALUE = /^[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]$/;
const MAX_MEMBERS = 32;
const MAX_STATE = 512;
const LONG_MEMBER = 128; // if the whole is too long, longer members are dropped first
const ABSURD_STATE = 8192; // longer ones are ignored; Node's header limit is larger

/** A `tracestate` fit to forward: "" if malformed, without its last members if too long. */
export function readTracestate(text: string): string {
  if (text === "" || text.length > ABSURD_STATE) return "";
  const keys = new Set<string>();
  const members: string[] = [];
  for (const part of text.split(",")) {
    const member = part.replace(/^[ \t]+|[ \t]+$/g, "");
    if (member === "") continue;
    const cut = member.indexOf("=");
    const key = member.slice(0, Math.max(0, cut));
    if (!STATE_KEY.test(key) || !STATE_VALUE.test(member.slice(cut + 1)) || keys.has(key)) return "";
    keys.add(key);
    members.push(member);
  }
  return members.length > MAX_MEMBERS ? "" : shortened(members);
}

function shortened(members: string[]): string {
  let length = members.reduce((sum, member) => sum + member.length + 1, -1);
  for (let at = members.length - 1; at >= 0 && length > MAX_STATE; at--) {
    if (members[at]!.length <= LONG_MEMBER) continue;
    length -= members[at]!.length + 1;
    members.splice(at, 1);
  }
  while (length > MAX_STATE) length -= members.pop()!.length + 1;
  return members.join(",");
}

/**
 * Samples requests that the caller samples, and a share of those without a trace. With `followsCaller` false, the share
 * of all by trace id: other services with the same share choose the same.
 */
export class Sampler {
  readonly #share: number;
  readonly #random: () => number;
  readonly #followsCaller: boolean;

  constructor(share: number, random: () => number, followsCaller = true) {
    this.#share = share;
    this.#random = random;
    this.#followsCaller = followsCaller;
  }

  begin(header: string | undefined, state: string | undefined): RequestTrace | undefined {
    const parent = header === undefined ? undefined : readTraceparent(header);
    if (parent === undefined) {
      if (this.#random() >= this.#share) return undefined;
      return { traceId: this.#hex(32), spanId: this.#hex(16), parentId: "", state: "" };
    }
    const { traceId, spanId: parentId, sampled } = parent;
    if (this.#followsCaller ? !sampled : positionOf(traceId) >= this.#share) return undefined;
    const kept = state === undefined ? "" : readTracestate(state);
    return { traceId, spanId: this.#hex(16), parentId, state: kept };
  }

  /** Never all zeros, which means "none". */
  #hex(digits: number): string {
    let text = "";
    while (text.length < digits) text += hex8(Math.floor(this.#random() * 2 ** 32));
    return /[^0]/.test(text) ? text : `${text.slice(1)}1`;
  }
}

/** Uniform in [0, 1), from the last seven bytes, which the standard requires to be random. */
function positionOf(traceId: string): number {
  return Number.parseInt(traceId.slice(-13), 16) / 2 ** 52;
}

/** A batch id is a UUID; its digits are the trace id. */
export function batchSpan(batchId: string): SpanPlace {
  const digits = batchId.replaceAll("-", "");
  return { traceId: digits, spanId: digits.slice(16) };
}

/** `call`: first is 1. */
export function callSpan(batchId: string, call: number): SpanPlace {
  const { traceId } = batchSpan(batchId);
  return { traceId, spanId: traceId.slice(8, 16) + hex8(word(traceId, 0) ^ Math.imul(call, 0x9e37_79b1)) };
}

/** A task's wait for a batch, child of its request's span; one per batch it goes with. */
export function queueSpan(request: SpanPlace, batch: SpanPlace): SpanPlace {
  const { traceId: digits } = batch;
  const high = word(request.spanId, 0) ^ word(digits, 0);
  const low = word(request.spanId, 8) ^ word(digits, 24);
  return { traceId: request.traceId, spanId: hex8(high) + hex8(high === 0 && low === 0 ? 1 : low) };
}

function word(digits: string, at: number): number {
  return Number.parseInt(digits.slice(at, at + 8), 16);
}

function hex8(bits: number): string {
  return (bits >>> 0).toString(16).padStart(8, "0");
}
