/**
 * Spans, built from events after the fact. The request path only carries ids (`core/trace.ts`).
 *
 *   request  SERVER    the caller's child, or a root          at request.answered
 *   └ queue  INTERNAL  put → claim, one per batch             at batch.started, in the process that claimed
 *   batch    CONSUMER  a root: it belongs to many requests    from batch.started to batch.settled
 *   └ call   CLIENT    one per worker call                    at batch.answered; its id is sent to the worker
 *
 * Links go both ways: the batch links the queue span of every traced task, the request links the batch that answered
 * it, even one of another or an earlier request. A batch is traced if one of its tasks is.
 *
 * A retry's second wait begins when the first batch gave the task back; a process that did not see that uses the put.
 * State is bounded by `MAX_OPEN` and `MAX_RETRIED`; a batch that never ends (the engine failed) is evicted and counts
 * as dropped.
 *
 * Attributes: `http.*` is stable, `messaging.*` and `gen_ai.*` are in development and will change, `ferry.*` is ours.
 * `error.type` is our error code for a request, the backend's reply kind for a call.
 */
import type { Attributes, Link } from "@opentelemetry/api";
import type { Clock } from "../app/clock.ts";
import type { BatchNote } from "../core/task.ts";
import { batchSpan, callSpan, queueSpan, readTraceparent, type SpanPlace } from "../core/trace.ts";
import type { AnsweredRequest, BatchedTask, EventFields, Events } from "./events.ts";
import type { Counter } from "./sight.ts";
import { KIND, sentCollector, SpanBuffer } from "./span-buffer.ts";
import type { Sender } from "./sender.ts";
import type { Tracing } from "./tracing.ts";

export interface TracedModel {
  readonly name: string;
  readonly kind: string;
  readonly protocol?: string;
}

export interface TracesParts {
  readonly clock: Clock;
  readonly events: Events;
  readonly sender: Pick<Sender, "ask">;
  readonly models: () => readonly TracedModel[];
  /** Requests are received by other processes. */
  readonly apart: boolean;
  readonly version: string;
  /** Unique to this start. */
  readonly instance: string;
  readonly zone: string;
  /** Where clients connect; "" until known. */
  apiUrl(): string;
}

export interface Traces {
  readonly dropped: Counter;
  close(): Promise<void>;
}

const MAX_OPEN = 10_000;
const MAX_RETRIED = 10_000;
const SERVER_ERROR = 500;
/** Methods known to the conventions; over HTTP/2 a method may be any word. */
const METHODS = new Set([
  "GET",
  "HEAD",
  "POST",
  "PUT",
  "DELETE",
  "CONNECT",
  "OPTIONS",
  "TRACE",
  "PATCH",
  "QUERY",
]);
/** `gen_ai.operation.name` by protocol. */
const OPERATIONS: Readonly<Record<string, string>> = {
  "openai-embeddings": "embeddings",
  "openai-completions": "text_completion",
  tei: "embeddings",
};

/** Listens from now on; the library is loaded with the first spans. */
export function openTraces(tracing: Tracing, parts: TracesParts): Traces {
  const { clock, events, version, instance, zone } = parts;
  const { url, place, timeoutMs, maxSpans } = tracing;
  for (const complaint of tracing.complaints) events.emit("notice", { level: "warn", message: complaint });
  const about: Attributes = {
    "service.name": "ferry",
    "service.version": version,
    "service.instance.id": instance,
    ...(zone !== "" && { "cloud.availability_zone": zone }),
  };
  const load = async () => sentCollector(parts.sender, { url, timeoutMs, about, version });
  const buffer = new SpanBuffer({ maxSpans, closeMs: timeoutMs, place }, load, clock, events);
  new SpanMaker(parts, buffer).listen(events);
  return {
    dropped: {
      name: "ferry_spans_dropped_total",
      help: "Spans that no collector will ever see: too many waited, or it refused them.",
      read: () => buffer.dropped,
    },
    close: () => buffer.close(),
  };
}

interface OpenBatch {
  readonly model: string;
  readonly batch: BatchNote;
  readonly fill: number;
  readonly attempt: number;
  readonly tasks: ReadonlySet<string>;
  readonly links: Link[];
  /** Reply kind of its last call. */
  kind: string;
  answered: boolean;
}

interface Server {
  readonly scheme: string;
  readonly address: string;
  readonly port: number | undefined;
}

export class SpanMaker {
  readonly #parts: Pick<TracesParts, "clock" | "apart" | "apiUrl">;
  readonly #models: () => readonly TracedModel[];
  readonly #buffer: Pick<SpanBuffer, "add" | "drop">;
  /** By id, oldest first. */
  readonly #open = new Map<string, OpenBatch>();
  /** When a traced task was given back, by its id. */
  readonly #retried = new Map<string, number>();
  readonly #workers = new Map<string, Server | undefined>();
  #server: Server | undefined;

  constructor(
    parts: Pick<TracesParts, "clock" | "apart" | "apiUrl" | "models">,
    buffer: Pick<SpanBuffer, "add" | "drop">,
  ) {
    this.#parts = parts;
    this.#models = parts.models;
    this.#buffer = buffer;
  }

  listen(events: Events): void {
    events.on("request.answered", (request) => {
      if (request.trace !== undefined) this.#request(request);
    });
    events.on("batch.started", (started) => this.#started(started));
    events.on("batch.answered", (answered) => {
      if (this.#open.size > 0) this.#answered(answered);
    });
    events.on("batch.settled", (settled) => {
      if (this.#open.size > 0) this.#settled(settled);
    });
    events.on("task.retried", ({ id, batchId }) => {
      if (this.#open.get(batchId)?.tasks.has(id) !== true) return;
      bound(this.#retried, MAX_RETRIED);
      this.#retried.set(id, this.#parts.clock.now());
    });
  }

  #request(request: AnsweredRequest): void {
    const { trace, ending, status, startedAt, latencyMs, route } = request;
    if (trace === undefined) return;
    const method = METHODS.has(request.method) ? request.method : "_OTHER";
    const batch = ending?.batch && batchSpan(ending.batch.id);
    const attributes = this.#requestAttributes(request, method, batch);
    const word = method === "_OTHER" ? "HTTP" : method;
    this.#buffer.add({
      name: route === "" ? word : `${word} ${route}`,
      kind: KIND.server,
      place: trace,
      ...(trace.parentId !== "" && { parentId: trace.parentId, remote: true }),
      state: trace.state,
      startedAt,
      endedAt: startedAt + latencyMs,
      attributes,
      ...(batch && { links: [{ context: linkTo(batch) }] }),
      failed: status >= SERVER_ERROR,
    });
  }

  #requestAttributes(request: AnsweredRequest, method: string, batch: SpanPlace | undefined): Attributes {
    const { route, path, status, code, tier, model, id, work, ending } = request;
    this.#server ??= serverOf(this.#parts.apiUrl());
    const attributes: Attributes = { "http.request.method": method, "http.response.status_code": status };
    // An unknown path is untrusted text.
    if (route !== "") attributes["http.route"] = route;
    if (route !== "" && path !== undefined) attributes["url.path"] = path;
    if (this.#server !== undefined) {
      attributes["url.scheme"] = this.#server.scheme;
      attributes["server.address"] = this.#server.address;
      if (this.#server.port !== undefined) attributes["server.port"] = this.#server.port;
    }
    if (code !== "") attributes["error.type"] = code;
    if (model !== "") attributes["ferry.model"] = model;
    if (tier !== "") attributes["ferry.tier"] = tier;
    if (id !== "") attributes["ferry.task.id"] = id;
    if (work === "cached") attributes["ferry.cached"] = true;
    if (work === "joined") attributes["ferry.collapsed"] = true;
    if (ending !== undefined) attributes["ferry.attempt"] = ending.attempt;
    if (ending?.batch !== undefined) {
      attributes["ferry.batch.id"] = ending.batch.id;
      attributes["ferry.batch.trace_id"] = batch!.traceId;
    }
    return attributes;
  }

  #started({ model, batch, maxBatchSize, tasks }: EventFields["batch.started"]): void {
    let place: SpanPlace | undefined;
    let open: (OpenBatch & { tasks: Set<string>; attempt: number }) | undefined;
    for (const each of tasks) {
      if (each.task.trace === undefined) continue;
      const queue = this.#queue(each, batch, (place ??= batchSpan(batch.id)), each.task.trace);
      if (queue === undefined) continue;
      const fill = batch.size / maxBatchSize;
      open ??= { model, batch, fill, attempt: 1, tasks: new Set(), links: [], kind: "", answered: false };
      open.links.push(queue);
      open.tasks.add(each.task.id);
      open.attempt = Math.max(open.attempt, each.attempt);
    }
    if (open === undefined) return;
    if (bound(this.#open, MAX_OPEN)) this.#buffer.drop();
    this.#open.set(batch.id, open);
  }

  /** The span of a task's wait, and a link to it. */
  #queue(
    { task, attempt, queuedAt }: BatchedTask,
    batch: BatchNote,
    batchPlace: SpanPlace,
    trace: string,
  ): Link | undefined {
    const request = readTraceparent(trace);
    if (request === undefined) return undefined;
    const { id, model } = task;
    const place = queueSpan(request, batchPlace);
    const again = this.#retried.get(id);
    if (again !== undefined) this.#retried.delete(id);
    this.#buffer.add({
      name: `queue ${model}`,
      kind: KIND.internal,
      place,
      parentId: request.spanId,
      remote: this.#parts.apart,
      startedAt: again ?? queuedAt,
      endedAt: batch.startedAt,
      attributes: {
        "messaging.system": "ferry",
        "messaging.destination.name": model,
        "messaging.message.id": id,
        "ferry.attempt": attempt,
      },
    });
    return { context: linkTo(place), attributes: { "messaging.message.id": id } };
  }

  #answered({
    model,
    batchId,
    worker,
    kind,
    call,
    startedAt,
    serviceMs,
  }: EventFields["batch.answered"]): void {
    const open = this.#open.get(batchId);
    if (open === undefined) return;
    const answered = kind === "answered";
    open.kind = kind;
    open.answered ||= answered;
    const { name, attributes } = this.#callAttributes(model, worker);
    attributes["ferry.worker"] = worker;
    attributes["messaging.batch.message_count"] = open.batch.size;
    if (call > 1) attributes["http.request.resend_count"] = call - 1;
    if (!answered) attributes["error.type"] = kind;
    this.#buffer.add({
      name,
      kind: KIND.client,
      place: callSpan(batchId, call),
      parentId: batchSpan(batchId).spanId,
      startedAt,
      endedAt: startedAt + serviceMs,
      attributes,
      failed: !answered,
    });
  }

  #callAttributes(model: string, worker: string): { name: string; attributes: Attributes } {
    const { kind = "", protocol = "" } = this.#models().find(({ name }) => name === model) ?? {};
    const operation = Object.hasOwn(OPERATIONS, protocol) ? OPERATIONS[protocol] : undefined;
    const attributes: Attributes = { "gen_ai.request.model": model };
    if (operation !== undefined) {
      attributes["gen_ai.operation.name"] = operation;
      attributes["gen_ai.provider.name"] = protocol.startsWith("openai-") ? "openai" : protocol;
    }
    if (kind !== "http") return { name: `call ${model}`, attributes };
    attributes["http.request.method"] = "POST";
    const server = this.#workerServer(worker);
    if (server !== undefined) attributes["server.address"] = server.address;
    if (server?.port !== undefined) attributes["server.port"] = server.port;
    return { name: operation === undefined ? "POST" : `${operation} ${model}`, attributes };
  }

  /** HTTP workers are named by host; bounded by the config. */
  #workerServer(worker: string): Server | undefined {
    if (!this.#workers.has(worker)) this.#workers.set(worker, serverOf(`http://${worker}`));
    return this.#workers.get(worker);
  }

  #settled({ batchId, size, calls, shape }: EventFields["batch.settled"]): void {
    const open = this.#open.get(batchId);
    if (open === undefined) return;
    this.#open.delete(batchId);
    const { model, batch, fill, attempt, links, kind, answered } = open;
    this.#buffer.add({
      name: `process ${model}`,
      kind: KIND.consumer,
      place: batchSpan(batchId),
      startedAt: batch.startedAt,
      endedAt: this.#parts.clock.now(),
      attributes: {
        "messaging.system": "ferry",
        "messaging.destination.name": model,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.batch.message_count": size,
        "ferry.batch.id": batchId,
        "ferry.batch.reason": batch.reason,
        "ferry.batch.why": batch.why,
        "ferry.batch.fill": fill,
        "ferry.batch.calls": calls,
        ...(shape && {
          "ferry.batch.longest_tokens": shape.longest,
          "ferry.batch.total_tokens": shape.total,
        }),
        "ferry.worker": batch.worker,
        "ferry.attempt": attempt,
        ...(!answered && kind !== "" && { "error.type": kind }),
      },
      links,
      failed: !answered,
    });
  }
}

/** Makes room for one more; returns whether one was evicted. */
function bound(map: Map<string, unknown>, most: number): boolean {
  if (map.size < most) return false;
  const [oldest] = map.keys();
  return map.delete(oldest!);
}

function serverOf(url: string): Server | undefined {
  const parsed = url === "" ? null : URL.parse(url);
  if (parsed === null) return undefined;
  const { protocol, hostname, port } = parsed;
  return { scheme: protocol.slice(0, -1), address: hostname, port: port === "" ? undefined : Number(port) };
}

function linkTo({ traceId, spanId }: SpanPlace): Link["context"] {
  return { traceId, spanId, traceFlags: 1 };
}
