/**
 * Where a request stands in its caller's trace: W3C trace context, as text.
 *
 * Only ids live here, so that whoever is on a request's path can carry them without a tracing library;
 * `telemetry/traces.ts` makes spans of them afterwards, from events. What is not sampled has no trace at all.
 *
 * A batch is a trace of its own, and its ids follow from its id: whoever knows the batch (every outcome
 * does, in whichever process) can link to its span without asking anybody.
 */

/** A request that is traced. */
export interface RequestTrace {
  /** 32 hexadecimal digits. */
  readonly traceId: string;
  /** Of the request's own span: 16 hexadecimal digits. */
  readonly spanId: string;
  /** The caller's span; "" when the trace begins here. */
  readonly parentId: string;
  /** The caller's `tracestate`, handed on as it came; "" when there was none. */
  readonly state: string;
}

export interface SpanPlace {
  readonly traceId: string;
  readonly spanId: string;
}

const TRACEPARENT = /^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$/;
const NO_TRACE = "0".repeat(32);
const NO_SPAN = "0".repeat(16);
const SAMPLED = 1;
/** Of a `tracestate`: what is longer is left behind, as the standard allows. */
const MAX_STATE = 512;

/** Reads a `traceparent`; undefined when it is none, as the standard says to go on without it. */
export function readTraceparent(text: string): (SpanPlace & { readonly sampled: boolean }) | undefined {
  const found = TRACEPARENT.exec(text.trim());
  if (found === null || text.startsWith("ff")) return undefined;
  // Version 00 has exactly these four fields; a later one may have more behind them.
  if (text.startsWith("00") && found[4] !== undefined) return undefined;
  const [, traceId, spanId, flags] = found;
  if (traceId === NO_TRACE || spanId === NO_SPAN) return undefined;
  return { traceId: traceId!, spanId: spanId!, sampled: (Number.parseInt(flags!, 16) & SAMPLED) !== 0 };
}

/** The `traceparent` of somebody who is sampled. */
export function traceparent({ traceId, spanId }: SpanPlace): string {
  return `00-${traceId}-${spanId}-01`;
}

/** Who is traced: whom the caller traces already, and a share of those who come without a trace. */
export class Sampler {
  readonly #share: number;
  readonly #random: () => number;

  /** `random` gives numbers in [0, 1). */
  constructor(share: number, random: () => number) {
    this.#share = share;
    this.#random = random;
  }

  /** The trace of a new request; undefined when it is not sampled. */
  begin(header: string | undefined, state: string | undefined): RequestTrace | undefined {
    const parent = header === undefined ? undefined : readTraceparent(header);
    if (parent === undefined) {
      if (this.#random() >= this.#share) return undefined;
      return { traceId: this.#hex(32), spanId: this.#hex(16), parentId: "", state: "" };
    }
    if (!parent.sampled) return undefined;
    const kept = state !== undefined && state.length <= MAX_STATE ? state : "";
    return { traceId: parent.traceId, spanId: this.#hex(16), parentId: parent.spanId, state: kept };
  }

  /** Never all zeros, which means "none". */
  #hex(digits: number): string {
    let text = "";
    while (text.length < digits) {
      text += Math.floor(this.#random() * 2 ** 32)
        .toString(16)
        .padStart(8, "0");
    }
    return /[^0]/.test(text) ? text : `${text.slice(1)}1`;
  }
}

/** The span of a batch; its id is a UUID, whose digits are the trace's. */
export function batchSpan(batchId: string): SpanPlace {
  const digits = batchId.replaceAll("-", "");
  return { traceId: digits, spanId: digits.slice(16) };
}

/** The span of a batch's n-th call to its worker; first is 1. */
export function callSpan(batchId: string, call: number): SpanPlace {
  const { traceId } = batchSpan(batchId);
  const mixed = (Number.parseInt(traceId.slice(0, 8), 16) ^ Math.imul(call, 0x9e37_79b1)) >>> 0;
  return { traceId, spanId: traceId.slice(8, 16) + mixed.toString(16).padStart(8, "0") };
}
