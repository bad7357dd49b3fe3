/**
 * The OpenTelemetry library behind a `Collector`: spans as OTLP over HTTP, in protobuf. Loaded only when the first
 * spans leave, by the thread of `sender.ts`. Headers, compression and certificates come from the usual
 * OTEL_EXPORTER_OTLP_* variables, which the library reads itself; it also tries again what can be tried again, within
 * the timeout.
 */
import type { Attributes } from "@opentelemetry/api";
import { OTLPTraceExporter } from "@opentelemetry/exporter-trace-otlp-proto";
import {
  detectResources,
  resourceAttributesEnvDetector,
  resourceFromAttributes,
  serviceNameEnvDetector,
} from "@opentelemetry/resources";
import type { Collector, Delivery } from "./span-buffer.ts";
import { SCHEMA_URL } from "./span-names.ts";
import { FinishedSpan, type Origin, type SpanFacts } from "./span.ts";

export interface OtlpRules {
  /** The whole of it, /v1/traces included. */
  readonly url: string;
  readonly timeoutMs: number;
}

const SUCCESS = 0;

/** Says who we are, the variables of the environment over our own words, and opens the way to the collector. */
export function openOtlp({ url, timeoutMs }: OtlpRules, about: Attributes, origin: Origin): Collector {
  const detectors = [resourceAttributesEnvDetector, serviceNameEnvDetector];
  const told = detectResources({ detectors });
  origin.resource = resourceFromAttributes(about, { schemaUrl: SCHEMA_URL }).merge(told);
  // One bundle at a time is the buffer's rule. The library forgets one a moment after it says how it fared, and with
  // a limit of 1 would refuse the next.
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
  const spans = facts.map((each) => new FinishedSpan(each, origin));
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

/** An HTTP status is there only when another try would get the same. */
function statusOf(error: Error | undefined): number | undefined {
  return error !== undefined && "code" in error && typeof error.code === "number" ? error.code : undefined;
}
