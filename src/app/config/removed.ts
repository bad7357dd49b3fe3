/** Settings of earlier versions: the error says "was removed: ", this sentence, and "delete the line" (`read.ts`). */
export const REMOVED: ReadonlyMap<string, string> = new Map([
  ["tiers.NAME.weight", "it had no effect; the order of the tiers decides who is served first"],
  ["engine.connectTimeoutMs", "engine.commandTimeoutMs limits connecting too"],
  ["engine.beatMs", "a batcher reports every 500 ms, and at least four times in engine.aliveMs"],
  ["engine.sweepMs", "a result whose notification was lost is looked up within a second"],
  ["tls.maxStreams", "a client may have 256 requests at once on one HTTP/2 connection"],
  ["tls.reloadMs", "Ferry looks for a renewed certificate every 2 seconds"],
  ["models[].backend.tls.reloadMs", "Ferry looks for a renewed certificate every 2 seconds"],
  ["grpc.maxRows", "limits.maxInputs limits the rows of a gRPC request too"],
  ["grpc.maxStreams", "a client may have 1024 calls at once on one gRPC connection"],
  ["auth.jwt.skewMs", "the issuer's clock may differ by a minute"],
  ["auth.jwt.jwksCacheMs", "the keys of jwksUrl are fetched again every 10 minutes"],
  ["auth.jwt.jwksCooldownMs", "the keys of jwksUrl are fetched at most every 30 seconds"],
  ["auth.jwt.jwksTimeoutMs", "fetching the keys of jwksUrl may take 2 seconds"],
  ["admission.lastTierDepth", "admission.mode thresholds refuses the last tier above 100 queued tasks"],
  [
    "admission.firstTierDepth",
    "admission.mode thresholds accepts only the first tier above 500 queued tasks",
  ],
  ["admission.maxWorkerLoad", "a worker that reports a load above 90 % does not count as capacity"],
  ["models[].retry.budget", "calls that only repeat failed work are limited to 10 % of first calls"],
  ["models[].health.maxEjectMs", "a worker is taken out for at most 30 × health.ejectMs"],
  ["models[].health.askTimeoutMs", "a worker may take 2 seconds to answer a health check"],
  ["models[].backend.keepAliveMs", "a gRPC connection that is silent for 10 seconds is checked"],
  ["models[].backend.askReady", "workers without ModelReady are left alone, so it need not be turned off"],
  ["models[].backend.dnsGraceMs", "an address is removed once it has been missing for 3 × backend.dnsMs"],
  ["requestLog.flushMs", "rows are written every second"],
  ["requestLog.maxBufferedRows", "100,000 rows wait while PostgreSQL is away"],
  ["requestLog.writeTimeoutMs", "PostgreSQL may take 10 seconds to write"],
  ["telemetry.maxViewers", "20 dashboards may watch at once"],
  ["telemetry.maxBufferedSpans", "10,000 spans wait for the collector; OTEL_BSP_MAX_QUEUE_SIZE changes that"],
  ["telemetry.exportTimeoutMs", "the collector may take 3 seconds; OTEL_EXPORTER_OTLP_TIMEOUT changes that"],
  ["models[].scaling.longLine", "scaling.queueDepth and scaling.coldStartMs decide (docs/operations.md)"],
  ["models[].scaling.line", "scaling.queueDepth and scaling.coldStartMs decide (docs/operations.md)"],
  ["models[].scaling.busy", "a load above 85 % for scaling.coolDownMs adds a worker"],
  ["models[].scaling.quiet", "a load below 40 % for 3 × scaling.coolDownMs removes a worker"],
  ["models[].scaling.maxRemoveShare", "at most 20 % of the workers are removed at a time"],
  ["models[].scaling.forecast", "arrivals are always forecast; scaling.coldStartMs says how far ahead"],
  ["models[].scaling.hookTimeoutMs", "the webhook or the command may take 30 seconds"],
  ...["jitter", "errorRate", "hangRate", "shortRate", "slowRate", "slowFactor", "seed"].map(
    (name) =>
      [
        `models[].backend.${name}`,
        "simulated workers always answer, after the time that baseMs, perItemMs and perTokenMs say",
      ] as const,
  ),
  ["models[].backend.dnsMaxAddresses", "the first 1024 addresses of a name are used"],
  ["tls.http2", "clients that ask for HTTP/2 get it"],
  ["api.maxPollMs", "?wait= holds a request for at most 30 seconds"],
  ["auth.reloadMs", "a revoked key stops working within 5 seconds, or with the next reload"],
  ["auth.graceMs", "keys that were used before go on working for a minute while Redis is unreachable"],
  ["limits.maxHeaders", "a request may have 100 header fields"],
  ["limits.processAnswerMs", "a process that does not answer for 5 seconds during a reload stops the reload"],
]);

/** For a path such as `models[0].backend.tls.reloadMs`. */
export function whyRemoved(path: string): string | undefined {
  const why = REMOVED.get(path.replaceAll(/\[\d+\]/g, "[]").replace(/^tiers\.[^.]+\./, "tiers.NAME."));
  return why === undefined ? undefined : `was removed: ${why}; delete the line`;
}
