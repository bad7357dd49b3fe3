/**
 * Whether and how requests are traced: the settings, overridden by the standard OTEL_* variables.
 *
 *   OTEL_SDK_DISABLED=true, OTEL_TRACES_EXPORTER=none    nothing is traced
 *   OTEL_EXPORTER_OTLP_ENDPOINT, …_TRACES_ENDPOINT       telemetry.otlpUrl; the second is the whole URL
 *   OTEL_EXPORTER_OTLP_TIMEOUT, …_TRACES_TIMEOUT         EXPORT_TIMEOUT_MS
 *   OTEL_BSP_MAX_QUEUE_SIZE                              MAX_SPANS
 *   OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG         telemetry.sample
 *   OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES          resource attributes; read by `otlp.ts`
 *   OTEL_EXPORTER_OTLP_HEADERS, _COMPRESSION, …          read by the library
 *
 * An invalid variable is reported and ignored.
 */
export interface Tracing {
  /** Full URL, /v1/traces included. */
  readonly url: string;
  /** The URL for messages: without credentials. */
  readonly place: string;
  readonly timeoutMs: number;
  /** Sampled share of requests that arrive without a trace. */
  readonly share: number;
  /** Whether the caller's sampling decision counts. */
  readonly followsCaller: boolean;
  readonly maxSpans: number;
  /** Ignored variables, and why. */
  readonly complaints: readonly string[];
}

export interface TracingSettings {
  readonly otlpUrl?: string;
  readonly sample: number;
}

/** Time limit of one export, and of the last one at exit. */
const EXPORT_TIMEOUT_MS = 3000;
/** Spans waiting for the collector; more are dropped and counted. */
const MAX_SPANS = 10_000;
const TIMEOUT_VARIABLES = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];

type Env = Readonly<Record<string, string | undefined>>;

/** Undefined: tracing is off. */
export function tracingOf(settings: TracingSettings, env: Env): Tracing | undefined {
  if (set(env, "OTEL_SDK_DISABLED")?.toLowerCase() === "true") return undefined;
  if (set(env, "OTEL_TRACES_EXPORTER")?.toLowerCase() === "none") return undefined;
  const complaints: string[] = [];
  const url = urlOf(settings.otlpUrl, env, complaints);
  if (url === undefined) return undefined;
  const protocol = set(env, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") ?? set(env, "OTEL_EXPORTER_OTLP_PROTOCOL");
  if (protocol !== undefined && protocol !== "http/protobuf") {
    complaints.push("OTEL_EXPORTER_OTLP_PROTOCOL: only http/protobuf is spoken; point Ferry at port 4318");
  }
  const { host, pathname } = new URL(url);
  const sampling = samplingOf(settings.sample, env, complaints);
  if (sampling === undefined) return undefined;
  return {
    url,
    place: host + pathname,
    timeoutMs: numberOf(TIMEOUT_VARIABLES, EXPORT_TIMEOUT_MS, env, complaints),
    ...sampling,
    maxSpans: numberOf(["OTEL_BSP_MAX_QUEUE_SIZE"], MAX_SPANS, env, complaints),
    complaints,
  };
}

function urlOf(otlpUrl: string | undefined, env: Env, complaints: string[]): string | undefined {
  const whole = set(env, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
  if (isHttp(whole)) return whole;
  if (whole !== undefined)
    complaints.push("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is no http:// or https:// URL");
  const base = set(env, "OTEL_EXPORTER_OTLP_ENDPOINT");
  if (base !== undefined && !isHttp(base)) {
    complaints.push("OTEL_EXPORTER_OTLP_ENDPOINT is no http:// or https:// URL");
  }
  const chosen = isHttp(base) ? base : otlpUrl;
  return chosen === undefined ? undefined : `${chosen.replace(/\/+$/, "")}/v1/traces`;
}

function isHttp(text: string | undefined): text is string {
  const protocol = text === undefined ? undefined : URL.parse(text)?.protocol;
  return protocol === "http:" || protocol === "https:";
}

function numberOf(names: readonly string[], fallback: number, env: Env, complaints: string[]): number {
  const name = names.find((each) => set(env, each) !== undefined);
  if (name === undefined) return fallback;
  const value = Number(set(env, name));
  if (Number.isFinite(value) && value > 0) return value;
  complaints.push(`${name} is no number above 0`);
  return fallback;
}

type Sampling = Pick<Tracing, "share" | "followsCaller">;

function samplingOf(sample: number, env: Env, complaints: string[]): Sampling | undefined {
  const name = set(env, "OTEL_TRACES_SAMPLER");
  const asSet = { share: sample, followsCaller: true };
  if (name === undefined) return asSet;
  const followsCaller = name.startsWith("parentbased_");
  switch (followsCaller ? name.slice("parentbased_".length) : name) {
    case "always_on":
      return { share: 1, followsCaller };
    case "always_off":
      return followsCaller ? { share: 0, followsCaller } : undefined;
    case "traceidratio":
      return { share: shareOf(env, complaints), followsCaller };
    default:
      complaints.push(
        `OTEL_TRACES_SAMPLER: known are always_on, always_off and traceidratio, and parentbased_ ones`,
      );
      return asSet;
  }
}

/** Defaults to 1, as the specification says. */
function shareOf(env: Env, complaints: string[]): number {
  const share = Number(set(env, "OTEL_TRACES_SAMPLER_ARG") ?? 1);
  if (share >= 0 && share <= 1) return share;
  complaints.push("OTEL_TRACES_SAMPLER_ARG is no share from 0 to 1; 1 is used");
  return 1;
}

/** By the specification an empty variable counts as not set. */
function set(env: Env, name: string): string | undefined {
  const value = env[name]?.trim();
  return value === "" ? undefined : value;
}
