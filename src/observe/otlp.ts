/**
 * `Collector` over the OpenTelemetry library: spans as OTLP over HTTP, in protobuf. Loaded by the thread of `sender.ts`
 * with the first spans. The library itself reads headers, compression and certificates from OTEL_EXPORTER_OTLP_*, and
 * retries within the timeout.
 */
import type { Attributes, HrTime, SpanContext, TraceState } from "@opentelemetry/api";
import { OTLPTraceExporter } from "@opentelemetry/exporter-trace-otlp-proto";
import {
  detectResources,
  type Resource,
  resourceAttributesEnvDetector,
  resourceFromAttributes,
  serviceNameEnvDetector,
} from "@opentelemetry/resources";
import type { ReadableSpan } from "@opentelemetry/sdk-trace";
import type { Collector, Delivery, SpanFacts } from "./span-buffer.ts";

const SCHEMA_URL = "https://opentelemetry.io/schemas/1.37.0";
const TRACED = 1;
const UNSET = 0;
const ERROR = 2;

export interface OtlpRules {
  /** Full URL, /v1/traces included. */
  readonly url: string;
  readonly timeoutMs: number;
}

const SUCCESS = 0;

/** Opens the exporter. Resource attributes from the environment override ours. */
export function openOtlp({ url, timeoutMs }: OtlpRules, about: Attributes, version: string): Collector {
  const detectors = [resourceAttributesEnvDetector, serviceNameEnvDetector];
  const told = detectResources({ detectors });
  const resource = resourceFromAttributes(about, { schemaUrl: SCHEMA_URL }).merge(told);
  // One object for all spans: the exporter groups by it.
  const origin = { resource, scope: { name: "ferry", version, schemaUrl: SCHEMA_URL } };
  // The buffer sends one bundle at a time. The library releases one only after it reports the result, so a limit of 1
  // would refuse the next.
  const exporter = new OTLPTraceExporter({ url, timeoutMillis: timeoutMs, concurrencyLimit: 2 });
  return {
    deliver: (spans) => deliver(exporter, spans, origin),
    close: () => exporter.shutdown(),
  };
}

function deliver(
  exporter: OTLPTraceExporter,
  facts: readonly SpanFacts[],
  origin: Origin,
): Promise<Delivery> {
  const spans = facts.map((each) => readableSpan(each, origin));
  return new Promise((resolve) => {
    exporter.export(spans, ({ code, error }) => {
      const verdict: number = code;
      if (verdict === SUCCESS) return resolve({ kind: "taken", why: "" });
      const status = statusOf(error);
      const why = error === undefined || error.message === "" ? "no answer in time" : error.message;
      if (status === undefined) resolve({ kind: "away", why });
      else resolve({ kind: "refused", why: `${status} ${why}` });
    });
  });
}

/** The library sets an HTTP status only for errors that are not retryable. */
function statusOf(error: Error | undefined): number | undefined {
  return error !== undefined && "code" in error && typeof error.code === "number" ? error.code : undefined;
}

export interface Origin {
  readonly resource: Resource;
  readonly scope: ReadableSpan["instrumentationScope"];
}

/** A span in the exporter's form. Links are not limited here. */
export function readableSpan(facts: SpanFacts, { resource, scope }: Origin): ReadableSpan {
  const { place, parentId, remote = false, state = "", startedAt, attributes, links = [] } = facts;
  const { traceId, spanId } = place;
  const context: SpanContext = { traceId, spanId, traceFlags: TRACED };
  if (state !== "") context.traceState = asState(state);
  // Clocks of two processes agree to a millisecond; no span may end before it began.
  const endedAt = Math.max(startedAt, facts.endedAt);
  return {
    name: facts.name,
    kind: facts.kind,
    spanContext: () => context,
    ...(parentId !== undefined && {
      parentSpanContext: { traceId, spanId: parentId, traceFlags: TRACED, isRemote: remote },
    }),
    startTime: hrTime(startedAt),
    endTime: hrTime(endedAt),
    duration: hrTime(endedAt - startedAt),
    status: { code: facts.failed === true ? ERROR : UNSET },
    attributes,
    links,
    events: [],
    ended: true,
    resource,
    instrumentationScope: scope,
    droppedAttributesCount: 0,
    droppedEventsCount: 0,
    droppedLinksCount: 0,
  };
}

/** Milliseconds as seconds and nanoseconds, rounded to the clock's microsecond. */
function hrTime(ms: number): HrTime {
  const micros = Math.round(ms * 1000);
  return [Math.floor(micros / 1e6), (micros % 1e6) * 1000];
}

/** The exporter only needs the text. */
function asState(text: string): TraceState {
  const state: TraceState = {
    get: () => undefined,
    set: () => state,
    unset: () => state,
    serialize: () => text,
  };
  return state;
}
