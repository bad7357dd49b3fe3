/**
 * A span that is over, as the exporter takes it: built after the fact from what events told, with explicit
 * times. Nothing here limits how many links it has.
 */
import type { Attributes, HrTime, Link, SpanContext, SpanStatus, TraceState } from "@opentelemetry/api";
import type { Resource } from "@opentelemetry/resources";
import type { ReadableSpan } from "@opentelemetry/sdk-trace";
import type { SpanPlace } from "../core/trace.ts";
import { ERROR, type KIND, SCHEMA_URL, SCOPE_NAME, UNSET } from "./span-names.ts";

export type SpanKind = (typeof KIND)[keyof typeof KIND];

/** Who made the spans. */
export interface Origin {
  /** Known before any of them leaves. */
  resource?: Resource;
  readonly version: string;
}

export interface SpanFacts {
  readonly name: string;
  readonly kind: SpanKind;
  readonly place: SpanPlace;
  /** Left out: it begins its trace. */
  readonly parentId?: string;
  /** The parent lives in another process. */
  readonly remote?: boolean;
  /** A caller's `tracestate`. */
  readonly state?: string;
  readonly startedAt: number;
  readonly endedAt: number;
  readonly attributes: Attributes;
  readonly links?: Link[];
  /** It went wrong by our own doing, not by the caller's. */
  readonly failed?: boolean;
}

const TRACED = 1;
const NO_LINKS: Link[] = [];
const NO_EVENTS: [] = [];
const WELL: SpanStatus = { code: UNSET };
const FAILED: SpanStatus = { code: ERROR };

export class FinishedSpan implements ReadableSpan {
  readonly name: string;
  readonly kind: SpanKind;
  readonly attributes: Attributes;
  readonly links: Link[];
  readonly status: SpanStatus;
  readonly parentSpanContext?: SpanContext;
  readonly #context: SpanContext;
  readonly #startedAt: number;
  readonly #endedAt: number;
  readonly #origin: Origin;

  constructor(facts: SpanFacts, origin: Origin) {
    const { place, parentId, remote = false, state } = facts;
    this.name = facts.name;
    this.kind = facts.kind;
    this.attributes = facts.attributes;
    this.links = facts.links ?? NO_LINKS;
    this.status = facts.failed === true ? FAILED : WELL;
    this.#context = linkTo(place, state);
    if (parentId !== undefined) {
      const { traceId } = place;
      this.parentSpanContext = { traceId, spanId: parentId, traceFlags: TRACED, isRemote: remote };
    }
    this.#startedAt = facts.startedAt;
    // A clock that two processes share is good to a millisecond; no span ends before it began.
    this.#endedAt = Math.max(facts.startedAt, facts.endedAt);
    this.#origin = origin;
  }

  spanContext(): SpanContext {
    return this.#context;
  }

  get startTime(): HrTime {
    return hrTime(this.#startedAt);
  }

  get endTime(): HrTime {
    return hrTime(this.#endedAt);
  }

  get duration(): HrTime {
    return hrTime(this.#endedAt - this.#startedAt);
  }

  get events(): [] {
    return NO_EVENTS;
  }

  get ended(): boolean {
    return true;
  }

  get resource(): Resource {
    return this.#origin.resource!;
  }

  get instrumentationScope(): ReadableSpan["instrumentationScope"] {
    return scopeOf(this.#origin);
  }

  get droppedAttributesCount(): number {
    return 0;
  }

  get droppedEventsCount(): number {
    return 0;
  }

  get droppedLinksCount(): number {
    return 0;
  }
}

/** A span of ours, or one to link to. */
export function linkTo({ traceId, spanId }: SpanPlace, state = ""): SpanContext {
  if (state === "") return { traceId, spanId, traceFlags: TRACED };
  return { traceId, spanId, traceFlags: TRACED, traceState: asState(state) };
}

const scopes = new WeakMap<Origin, ReadableSpan["instrumentationScope"]>();

/** The same object each time: the exporter groups spans by it. */
function scopeOf(origin: Origin): ReadableSpan["instrumentationScope"] {
  let scope = scopes.get(origin);
  if (scope === undefined) {
    scope = { name: SCOPE_NAME, version: origin.version, schemaUrl: SCHEMA_URL };
    scopes.set(origin, scope);
  }
  return scope;
}

/** Milliseconds as seconds and nanoseconds; less than a microsecond is below what the clock knows. */
function hrTime(ms: number): HrTime {
  const micros = Math.round(ms * 1000);
  return [Math.floor(micros / 1e6), (micros % 1e6) * 1000];
}

/** It only travels: whoever exports it wants its text. */
function asState(text: string): TraceState {
  const state: TraceState = {
    get: () => undefined,
    set: () => state,
    unset: () => state,
    serialize: () => text,
  };
  return state;
}
