/**
 * A collector of traces: OTLP over HTTP, as the OpenTelemetry protocol says it, read with a protobuf reader of our
 * own so that what the exporter writes is checked and not just believed.
 *
 * Field numbers: opentelemetry/proto/collector/trace/v1/trace_service.proto, …/trace/v1/trace.proto,
 * …/common/v1/common.proto, …/resource/v1/resource.proto.
 */
import assert from "node:assert/strict";
import { createServer, type IncomingHttpHeaders, type Server } from "node:http";
import { eventually, SOON_MS } from "./harness.ts";
import { ReturningServer } from "./returning-server.ts";

export type Value = string | number | boolean;

export interface SeenLink {
  readonly traceId: string;
  readonly spanId: string;
  readonly attributes: Readonly<Record<string, Value>>;
}

export interface SeenSpan {
  readonly traceId: string;
  readonly spanId: string;
  /** "" for a root. */
  readonly parentId: string;
  readonly state: string;
  readonly name: string;
  /** INTERNAL 1, SERVER 2, CLIENT 3, PRODUCER 4, CONSUMER 5 */
  readonly kind: number;
  readonly startMs: number;
  readonly endMs: number;
  readonly attributes: Readonly<Record<string, Value>>;
  readonly links: readonly SeenLink[];
  readonly droppedLinks: number;
  /** UNSET 0, OK 1, ERROR 2 */
  readonly status: number;
  readonly resource: Readonly<Record<string, Value>>;
  readonly scope: string;
  readonly schemaUrl: string;
}

export const KIND = { internal: 1, server: 2, client: 3, consumer: 5 } as const;

type Field = { readonly number: number; readonly bytes: Buffer; readonly integer: bigint };

/** Every field of a message, in order; lengths, varints and fixed widths are all that OTLP uses. */
function* fields(bytes: Buffer): Generator<Field> {
  let at = 0;
  const varint = (): bigint => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = bytes[at++];
      assert.ok(byte !== undefined, "the message is cut off");
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const tag = Number(varint());
    const number = tag >> 3;
    const wire = tag & 7;
    if (wire === 0) yield { number, bytes: Buffer.alloc(0), integer: varint() };
    else {
      const length = wire === 1 ? 8 : wire === 5 ? 4 : wire === 2 ? Number(varint()) : undefined;
      assert.ok(length !== undefined, `wire type ${wire}`);
      const slice = bytes.subarray(at, (at += length));
      assert.equal(slice.length, length, "the message is cut off");
      const integer = wire === 1 ? slice.readBigUInt64LE() : wire === 5 ? BigInt(slice.readUInt32LE()) : 0n;
      yield { number, bytes: slice, integer };
    }
  }
}

const all = (bytes: Buffer, number: number): Buffer[] =>
  [...fields(bytes)].filter((field) => field.number === number).map((field) => field.bytes);
const text = (bytes: Buffer, number: number): string => all(bytes, number)[0]?.toString("utf8") ?? "";
const hex = (bytes: Buffer, number: number): string => all(bytes, number)[0]?.toString("hex") ?? "";
const integer = (bytes: Buffer, number: number): bigint =>
  [...fields(bytes)].find((field) => field.number === number)?.integer ?? 0n;

/** AnyValue: 1 string, 2 bool, 3 int, 4 double. */
function value(bytes: Buffer): Value {
  const [only] = fields(bytes);
  assert.ok(only !== undefined, "a value without a value");
  if (only.number === 1) return only.bytes.toString("utf8");
  if (only.number === 2) return only.integer === 1n;
  if (only.number === 3) return Number(BigInt.asIntN(64, only.integer));
  assert.equal(only.number, 4, "lists and maps are none of ours");
  return only.bytes.readDoubleLE();
}

function attributes(bytes: Buffer, number: number): Record<string, Value> {
  return Object.fromEntries(all(bytes, number).map((pair) => [text(pair, 1), value(all(pair, 2)[0]!)]));
}

const ms = (nanos: bigint): number => Number(nanos / 1000n) / 1000;

function span(bytes: Buffer, around: Pick<SeenSpan, "resource" | "scope" | "schemaUrl">): SeenSpan {
  const links = all(bytes, 13).map((link) => {
    return { traceId: hex(link, 1), spanId: hex(link, 2), attributes: attributes(link, 4) };
  });
  return {
    traceId: hex(bytes, 1),
    spanId: hex(bytes, 2),
    state: text(bytes, 3),
    parentId: hex(bytes, 4),
    name: text(bytes, 5),
    kind: Number(integer(bytes, 6)),
    startMs: ms(integer(bytes, 7)),
    endMs: ms(integer(bytes, 8)),
    attributes: attributes(bytes, 9),
    links,
    droppedLinks: Number(integer(bytes, 14)),
    status: Number(integer(all(bytes, 15)[0] ?? Buffer.alloc(0), 3)),
    ...around,
  };
}

/** ExportTraceServiceRequest → resource_spans → scope_spans → spans. */
export function readTraces(bytes: Buffer): SeenSpan[] {
  return all(bytes, 1).flatMap((resourceSpans) => {
    const resource = attributes(all(resourceSpans, 1)[0]!, 1);
    return all(resourceSpans, 2).flatMap((scopeSpans) => {
      const scope = text(all(scopeSpans, 1)[0]!, 1);
      const around = { resource, scope, schemaUrl: text(scopeSpans, 3) };
      return all(scopeSpans, 2).map((each) => span(each, around));
    });
  });
}

export class OtlpCollector extends ReturningServer {
  readonly spans: SeenSpan[] = [];
  readonly headers: IncomingHttpHeaders[] = [];
  /** What it answers; 200 takes the spans. */
  status = 200;

  static async listen(): Promise<OtlpCollector> {
    const collector = new OtlpCollector();
    await collector.open();
    return collector;
  }

  named(name: string): SeenSpan[] {
    return this.spans.filter((span) => span.name === name);
  }

  /** Waits until as many spans have that name. */
  async seen(name: string, count = 1, withinMs = SOON_MS): Promise<SeenSpan[]> {
    await eventually(() => this.named(name).length >= count, withinMs).catch(() => {
      const names = this.spans.map((span) => span.name).join(", ");
      throw new Error(`${this.named(name).length} spans "${name}", not ${count}; there are: ${names}`);
    });
    const found = this.named(name);
    assert.equal(found.length, count, name);
    return found;
  }

  protected override make(): Server {
    return createServer((request, response) => {
      const chunks: Buffer[] = [];
      request.on("data", (chunk: Buffer) => chunks.push(chunk));
      request.on("end", () => {
        this.headers.push(request.headers);
        const good = request.method === "POST" && request.url === "/v1/traces";
        const proto = request.headers["content-type"] === "application/x-protobuf";
        const status = good && proto ? this.status : 404;
        if (status === 200) this.spans.push(...readTraces(Buffer.concat(chunks)));
        response.writeHead(status, { "content-type": "application/x-protobuf" }).end();
      });
    });
  }
}
