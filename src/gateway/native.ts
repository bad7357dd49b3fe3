/**
 * Ferry's native protocol: /v1/inference, /v1/result/{task_id}, /api/inference. Waiting follows RFC 7240: by default
 * until done or the total timeout; `Prefer: respond-async` not at all; `Prefer: wait=N` N seconds, then 202.
 */
import { Refusal } from "../core/errors.ts";
import { canonical, scan } from "../core/json.ts";
import type { Clock } from "../app/clock.ts";
import type { RecordView, TaskStore } from "../engine/engine.ts";
import { looksLikeId } from "../engine/ids.ts";
import type { Admission } from "./admission/admission.ts";
import type { Caller } from "./admission/credentials.ts";
import type { Exchange } from "./exchange.ts";
import {
  batchHeaders,
  type Encoding,
  encodingNamed,
  metadata,
  sendBytes,
  sendOutput,
  tenths,
} from "./reply.ts";
import { checkName, type Ended, type Inference, type RequestPath } from "./request-path.ts";
import { bringsWork, type Routes } from "./server.ts";
import type { Waiters } from "./waiters.ts";

/** The longest `?wait=`; proxies in front must allow more (docs/kubernetes.md). */
export const MAX_POLL_MS = 30_000;

export interface NativeOptions {
  readonly defaultMode: "sync" | "async";
  readonly maxPollMs: number;
}

export interface NativeParts {
  readonly path: RequestPath;
  readonly admission: Admission;
  readonly waiters: Waiters;
  readonly engine: TaskStore;
  readonly clock: Clock;
  readonly authRequired: boolean;
}

export class NativeProtocol {
  readonly #options: NativeOptions;
  readonly #parts: NativeParts;

  constructor(options: NativeOptions, parts: NativeParts) {
    this.#options = options;
    this.#parts = parts;
  }

  routes(): Routes {
    return {
      "/v1/inference": { POST: bringsWork((exchange) => this.#infer(exchange)) },
      "/api/inference": { POST: bringsWork((exchange) => this.#infer(exchange, true)) },
      "/v1/result/{id}": {
        GET: (exchange, id) => this.#result(exchange, id),
        DELETE: (exchange, id) => this.#forget(exchange, id),
      },
    };
  }

  /** `minimal`: the contract of /api/inference, always synchronous. */
  #infer(exchange: Exchange, minimal = false): Promise<void> | void {
    const caller = this.#parts.path.admit(exchange);
    if (caller instanceof Promise) return caller.then((known) => this.#read(exchange, known, minimal));
    this.#read(exchange, caller, minimal);
  }

  #read(exchange: Exchange, caller: Caller, minimal: boolean): void {
    exchange.withBody((text) => {
      const { encoding, model, inputs, parameters } = parseBody(text, minimal);
      const waitMs = minimal
        ? undefined
        : preferredWaitMs(exchange.header("prefer"), this.#options.defaultMode);
      const inference = { model, inputs, parameters, waitMs, single: true, pollable: !minimal };
      return this.#parts.path.run(exchange, caller, inference, (ended) =>
        this.#render(exchange, ended, encoding, minimal),
      );
    });
  }

  #render(exchange: Exchange, ended: Ended, encoding: Encoding, minimal: boolean): Promise<void> | void {
    const { records, refusal, headers, id } = ended;
    if (exchange.answered) return;
    if (refusal !== undefined) exchange.fail(refusal, headers);
    else if (records === undefined) sendPending(exchange, id, headers);
    else return this.#answer(exchange, ended, records[0]!, encoding, minimal);
  }

  #answer(
    exchange: Exchange,
    ended: Ended,
    record: RecordView,
    encoding: Encoding,
    minimal: boolean,
  ): Promise<void> | void {
    const { id, headers } = ended;
    const { path, clock } = this.#parts;
    const latencyMs = clock.now() - exchange.startedAt;
    const explain = exchange.header("x-ferry-explain") === "1";
    const head = minimal ? "{" : `{"request_id":"${id}","task_id":"${id}","status":"SUCCESS",`;
    const tail = minimal
      ? `,"request_id":"${id}","latency_ms":${tenths(latencyMs)}}`
      : metadata(record, { work: exchange.work, explain, latencyMs });
    const sent =
      sendBytes(exchange, record, id, headers) ??
      sendOutput(exchange, record, encoding, { head, tail, headers });
    if (sent === true) path.delivered(ended);
    else if (sent !== false) return sent.then((whole) => (whole ? path.delivered(ended) : undefined));
  }

  async #result(exchange: Exchange, id: string): Promise<void> {
    const { path, engine } = this.#parts;
    const caller = await path.identify(exchange);
    const waitMs = Math.min(pollMs(exchange), this.#options.maxPollMs);
    const asked = new URLSearchParams(exchange.query).get("encoding") ?? undefined;
    const encoding = encodingNamed(asked, '"encoding"');
    const record = looksLikeId(id) ? await this.#lookUp(exchange, id, caller.tenant, waitMs) : undefined;
    if (exchange.answered) return;
    if (record === undefined) throw await this.#noResult(caller);
    const sent =
      sendBytes(exchange, record, id, batchHeaders(record)) ?? sendRecord(exchange, record, encoding);
    // A HEAD request has not received the outcome.
    if ((await sent) && record.outcome !== undefined && exchange.request.method !== "HEAD")
      engine.delivered(id);
  }

  async #lookUp(
    exchange: Exchange,
    id: string,
    tenant: string,
    waitMs: number,
  ): Promise<RecordView | undefined> {
    const { waiters, engine } = this.#parts;
    if (waitMs === 0) return engine.outcome(id, tenant);
    const waiter = waiters.expect(id, true);
    exchange.onGone(() => waiter.wake(undefined));
    try {
      const now = await engine.follow(id, tenant);
      if (now === undefined || now.outcome !== undefined) return now;
      const ended = await waiters.wait(waiter, exchange.startedAt + waitMs);
      return ended ?? (await engine.outcome(id, tenant));
    } finally {
      waiters.release(waiter);
    }
  }

  /** Charged to authenticated callers, so that guessing ids hits the rate limit. */
  async #noResult(caller: Caller): Promise<Refusal> {
    if (this.#parts.authRequired) await this.#parts.admission.spend(caller);
    return new Refusal("NOT_FOUND", NO_RESULT);
  }

  async #forget(exchange: Exchange, id: string): Promise<void> {
    const { path, engine } = this.#parts;
    const caller = await path.identify(exchange);
    const reply = looksLikeId(id) ? await engine.cancel(id, caller.tenant) : "unknown";
    if (reply === "unknown") throw await this.#noResult(caller);
    if (reply === "kept") {
      throw new Refusal("NOT_CANCELLABLE", "the task is running, or another request waits for it too");
    }
    if (reply === "forgotten") return exchange.sendNothing(204);
    exchange.send(
      200,
      `{"task_id":"${id}","status":"FAILED","error":"CANCELLED","message":"cancelled before it ran"}`,
    );
  }
}

/** One text for all cases, so that another tenant's id looks like an unknown one. */
const NO_RESULT = "no such result: the id is unknown, its time to live has passed, or it is not yours";

function sendPending(exchange: Exchange, id: string, headers: readonly string[]): void {
  exchange.send(202, `{"request_id":"${id}","task_id":"${id}","status":"PENDING"}`, [
    "location",
    `/v1/result/${id}`,
    "preference-applied",
    "respond-async",
    ...headers,
  ]);
}

function sendRecord(exchange: Exchange, record: RecordView, encoding: Encoding): boolean | Promise<boolean> {
  const { task, outcome, settledAt = task.createdAt, cached = false } = record;
  const headers = batchHeaders(record);
  const id = `{"task_id":"${task.id}","status":`;
  if (outcome?.ok === true) {
    const explain = exchange.header("x-ferry-explain") === "1";
    const told = { work: cached ? "cached" : "own", explain, latencyMs: settledAt - task.createdAt } as const;
    return sendOutput(exchange, record, encoding, {
      head: `${id}"SUCCESS",`,
      tail: metadata(record, told),
      headers,
    });
  }
  const failed = outcome && `"FAILED","error":"${outcome.code}","message":${JSON.stringify(outcome.message)}`;
  exchange.send(200, `${id}${failed ?? '"PENDING"'}}`, headers);
  return true;
}

/** Undefined: until done. Invalid preferences are ignored (RFC 7240). */
export function preferredWaitMs(
  prefer: string | undefined,
  defaultMode: "sync" | "async",
): number | undefined {
  let async = defaultMode === "async";
  let waitMs: number | undefined;
  for (const preference of prefer?.split(",") ?? []) {
    const [key, value] = preference.split(";")[0]!.split("=");
    if (key!.trim().toLowerCase() === "respond-async") async = true;
    if (key!.trim().toLowerCase() === "wait") waitMs = seconds(value) ?? waitMs;
  }
  return waitMs ?? (async ? 0 : undefined);
}

function pollMs(exchange: Exchange): number {
  const asked = new URLSearchParams(exchange.query).get("wait");
  if (asked === null) return preferredWaitMs(exchange.header("prefer"), "async") ?? 0;
  const waitMs = seconds(asked);
  if (waitMs === undefined) throw new Refusal("INVALID_REQUEST", `"wait" must be a number of seconds`);
  return waitMs;
}

function seconds(text: string | undefined): number | undefined {
  const trimmed = text?.trim().replace(/^"(.*)"$/, "$1");
  return trimmed !== undefined && /^\d{1,6}(\.\d{1,3})?$/.test(trimmed) ? Number(trimmed) * 1000 : undefined;
}

const FIELDS = new Set(["input", "model", "parameters", "client_id", "encoding"]);
const MINIMAL_FIELDS = new Set(["input", "encoding"]);

/** `encoding`: of a binary output. */
type NativeInference = Pick<Inference, "model" | "inputs" | "parameters"> & { readonly encoding: Encoding };

/** Reads `{"input", "model"?, "parameters"?, "client_id"?, "encoding"?}`. */
export function parseBody(text: string, minimal = false): NativeInference {
  const fields = minimal ? MINIMAL_FIELDS : FIELDS;
  const found = readObject(text);
  for (const name of found.keys()) {
    if (fields.has(name)) continue;
    const known = [...fields].map((field) => `"${field}"`).join(", ");
    throw new Refusal(
      "INVALID_REQUEST",
      `unknown field ${JSON.stringify(name.slice(0, 64))}; known: ${known}`,
    );
  }
  const field = (name: string): string | undefined => {
    const range = found.get(name);
    return range === undefined ? undefined : text.slice(range[0], range[1]);
  };
  const input = field("input");
  if (input === undefined) throw new Refusal("INVALID_REQUEST", `"input" is missing`);
  if (minimal && !input.startsWith('"')) throw new Refusal("INVALID_REQUEST", `"input" must be a string`);
  nameIn("client_id", field("client_id"));
  const encoding = field("encoding");
  return {
    model: nameIn("model", field("model")),
    inputs: [input],
    parameters: parametersOf(field("parameters")),
    encoding: encoding === undefined ? "base64" : encodingNamed(JSON.parse(encoding), '"encoding"'),
  };
}

function readObject(text: string): NonNullable<ReturnType<typeof scan>["fields"]> {
  const { fields, problem, tooMuch } = scan(text);
  if (tooMuch) throw new Refusal("INVALID_REQUEST", problem!);
  try {
    JSON.parse(text);
  } catch (error) {
    const at = /position \d+/.exec((error as Error).message)?.[0];
    throw new Refusal("INVALID_REQUEST", `the body is not valid JSON${at === undefined ? "" : ` (${at})`}`);
  }
  if (problem !== undefined) throw new Refusal("INVALID_REQUEST", problem);
  if (fields === undefined) throw new Refusal("INVALID_REQUEST", `send an object: {"input": …}`);
  return fields;
}

function parametersOf(json: string | undefined): string {
  if (json === undefined) return "";
  if (!json.startsWith("{")) throw new Refusal("INVALID_REQUEST", `"parameters" must be an object`);
  const parameters = canonical(json);
  return parameters === "{}" ? "" : parameters;
}

function nameIn(field: string, json: string | undefined): string | undefined {
  if (json === undefined) return undefined;
  const value: unknown = JSON.parse(json);
  if (typeof value !== "string") throw new Refusal("INVALID_REQUEST", `"${field}" must be a string`);
  checkName(`"${field}"`, value);
  return value;
}
