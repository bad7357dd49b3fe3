/** Whether and how requests are traced: settings, and the OTEL_* variables over them. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { tracingOf } from "../../src/observe/tracing.ts";

describe("OTEL_* variables go over the file", () => {
  const settings = { sample: 0.25 };
  const file = { ...settings, otlpUrl: "http://collector:4318/" };

  test("without any, the file counts", () => {
    assert.equal(tracingOf(settings, {}), undefined);
    assert.deepEqual(tracingOf(file, {}), {
      url: "http://collector:4318/v1/traces",
      place: "collector:4318/v1/traces",
      timeoutMs: 3000,
      share: 0.25,
      followsCaller: true,
      maxSpans: 10_000,
      complaints: [],
    });
    assert.equal(tracingOf({ ...file, otlpUrl: "https://c/base" }, {})?.url, "https://c/base/v1/traces");
  });

  test("off, elsewhere, and how long", () => {
    assert.equal(tracingOf(file, { OTEL_SDK_DISABLED: "True" }), undefined);
    assert.equal(tracingOf(file, { OTEL_TRACES_EXPORTER: "none" }), undefined);
    const env = {
      OTEL_EXPORTER_OTLP_ENDPOINT: "http://user:pass@other:1/a/",
      OTEL_EXPORTER_OTLP_TIMEOUT: "500",
      OTEL_BSP_MAX_QUEUE_SIZE: "512",
    };
    const tracing = tracingOf(settings, env);
    assert.equal(tracing?.url, "http://user:pass@other:1/a/v1/traces");
    assert.equal(tracing?.place, "other:1/a/v1/traces");
    assert.deepEqual([tracing?.timeoutMs, tracing?.maxSpans], [500, 512]);
    const whole = { ...env, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: "http://third/x" };
    assert.equal(tracingOf(file, whole)?.url, "http://third/x");
  });

  test("samplers", () => {
    const by = (name: string, arg?: string) => {
      const tracing = tracingOf(file, { OTEL_TRACES_SAMPLER: name, OTEL_TRACES_SAMPLER_ARG: arg });
      return tracing && [tracing.share, tracing.followsCaller];
    };
    assert.deepEqual(by("always_on"), [1, false]);
    assert.equal(by("always_off"), undefined);
    assert.deepEqual(by("traceidratio", "0.5"), [0.5, false]);
    assert.deepEqual(by("parentbased_always_on"), [1, true]);
    assert.deepEqual(by("parentbased_always_off"), [0, true]);
    assert.deepEqual(by("parentbased_traceidratio", "0.1"), [0.1, true]);
    assert.deepEqual(by("parentbased_traceidratio"), [1, true]);
  });

  test("what makes no sense is said, and has no effect", () => {
    const tracing = tracingOf(file, {
      OTEL_EXPORTER_OTLP_ENDPOINT: "collector:4318",
      OTEL_EXPORTER_OTLP_TIMEOUT: "soon",
      OTEL_EXPORTER_OTLP_PROTOCOL: "grpc",
      OTEL_TRACES_SAMPLER: "jaeger_remote",
      OTEL_SERVICE_NAME: "",
    });
    assert.partialDeepStrictEqual(tracing, {
      url: "http://collector:4318/v1/traces",
      timeoutMs: 3000,
      share: 0.25,
    });
    assert.equal(tracing?.complaints.length, 4);
  });
});
