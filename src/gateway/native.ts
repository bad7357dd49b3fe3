/**
 * Ferry's own protocol: /v1/inference, /v1/result/{task_id}, /api/inference.
 *
 * How long a caller waits is one idea in RFC 7240's words: by default until done or the total timeout;
 * `Prefer: respond-async` not at all; `Prefer: wait=N` N seconds, then 202.
 */
import type { Admission } from "./admission/admit.ts";
import type { Caller } from "./admission/caller.ts";
import type { Credentials } from "./admission/credentials.ts";
import type { Clock } from "../app/clock.ts";
import { Refusal } from "../core/errors.ts";
import type { Json } from "../core/task.ts";
import { readBinary } from "../core/tensor.ts";
import type { Engine, RecordView } from "../engine/engine.ts";
import type { Router, Woken } from "./router.ts";
import { accepted, bytesHeaders, BYTES_TYPE, type Encoding, encodingNamed, noBytes } from "./encoding.ts";
import { type Exchange, JSON_TYPE } from "./exchange.ts";
import { idempotencyKey } from "./headers.ts";
import { looksLikeId } from "../engine/ids.ts";
import type { Draft, Intake, Ticket } from "./intake.ts";
import { parseBody, PLAIN_FIELDS } from "./native-body.ts";
import { pieceLine } from "./pieces.ts";
import {
  batchHeaders,
  chained,
  outputPart,
  outputPieces,
  quotaHeaders,
  refusalOf,
  resultBody,
  successBody,
  successPieces,
  tenths,
} from "./reply.ts";
import { bringsWork, type Routes } from "./server.ts";

export interface NativeOptions {
  readonly defaultMode: "sync" | "async";
  readonly maxPollMs: number;
  /** Accepted tasks outlive this process, so that a caller can be sent to poll for them elsewhere. */
  readonly durable: boolean;
}

export interface NativeParts {
  readonly credentials: Credentials;
  readonly intake: Intake;
  readonly admission: Admission;
  readonly router: Router;
  readonly engine: Engine;
  readonly clock: Clock;
}

export class NativeProtocol {
  readonly #options: NativeOptions;
  readonly #credentials: Credentials;
  readonly #intake: Intake;
  readonly #admission: Admission;
  readonly #router: Router;
  readonly #engine: Engine;
  readonly #clock: Clock;

  constructor(options: NativeOptions, parts: NativeParts) {
    this.#options = options;
    this.#credentials = parts.credentials;
    this.#intake = parts.intake;
    this.#admission = parts.admission;
    this.#router = parts.router;
    this.#engine = parts.engine;
    this.#clock = parts.clock;
  }

  routes(): Routes {
    return {
      "/v1/inference": { POST: bringsWork((exchange) => this.#infer(exchange)) },
      "/api/inference": { POST: bringsWork((exchange) => this.#inferPlainly(exchange)) },
      "/v1/result/{id}": {
        GET: (exchange, id) => this.#result(exchange, id),
        DELETE: (exchange, id) => this.#forget(exchange, id),
      },
    };
  }

  /** Who it is, before anything else: a stranger's body is not read. At once, most often. */
  #enter(exchange: Exchange): Caller | Promise<Caller> {
    const found = this.#credentials.identify(exchange.header("authorization"), exchange.header("x-api-key"));
    if (found instanceof Promise) return found.then((caller) => this.#entered(exchange, caller));
    return this.#entered(exchange, found);
  }

  /** As `#enter`, with a task: once this process has time for it. */
  #enterWithTask(exchange: Exchange): Caller | Promise<Caller> {
    const entering = this.#enter(exchange);
    if (entering instanceof Promise) return entering.then((caller) => this.#turn(caller));
    return this.#turn(entering);
  }

  #turn(caller: Caller): Caller | Promise<Caller> {
    const turn = this.#admission.turn(caller);
    return turn === undefined ? caller : turn.then(() => caller);
  }

  #entered(exchange: Exchange, caller: Caller): Caller | Promise<Caller> {
    exchange.tier = this.#admission.tierName(caller.tier);
    exchange.tenant = caller.tenant;
    const { room } = exchange;
    return room === undefined ? caller : room.then(() => caller);
  }

  /**
   * The one path that everybody takes: each step calls the next, and a promise is made only where a step has to
   * wait for something else than the body and the outcome.
   */
  #infer(exchange: Exchange): Promise<void> | void {
    const entering = this.#enterWithTask(exchange);
    if (entering instanceof Promise) return entering.then((caller) => this.#inferFor(exchange, caller));
    this.#inferFor(exchange, entering);
  }

  #inferFor(exchange: Exchange, caller: Caller): void {
    exchange.read((text) => {
      const draft = parseBody(text, idempotencyKey(exchange));
      const ticket = this.#submit(exchange, draft, caller);
      const { encoding } = draft;
      if (ticket instanceof Promise) return ticket.then((known) => this.#await(exchange, known, encoding));
      this.#await(exchange, ticket, encoding);
    });
  }

  #await(exchange: Exchange, ticket: Ticket, encoding: Encoding): void {
    this.#noted(exchange, ticket);
    const waitMs = preferredWaitMs(exchange.header("prefer"), this.#options.defaultMode);
    if (ticket.record !== undefined) {
      // The client may have left while its task was put.
      if (exchange.answered) return this.#abandon(ticket);
      return this.#conclude(exchange, ticket, waitMs, ticket.record, encoding);
    }
    this.#wait(exchange, ticket, waitMs, (record) => {
      try {
        this.#conclude(exchange, ticket, waitMs, record, encoding);
      } catch (error) {
        exchange.failed(error);
      }
    });
  }

  #conclude(
    exchange: Exchange,
    ticket: Ticket,
    waitMs: number | undefined,
    record: RecordView | undefined,
    encoding: Encoding,
  ): void {
    if (exchange.answered) return;
    const asksLater = waitMs === 0 && !ticket.unstored;
    if (record === undefined || asksLater) this.#answerUndone(exchange, ticket, waitMs);
    else this.#answer(exchange, ticket, record, encoding);
  }

  async #inferPlainly(exchange: Exchange): Promise<void> {
    const caller = await this.#enterWithTask(exchange);
    const draft = parseBody(await exchange.body(), idempotencyKey(exchange), PLAIN_FIELDS);
    if (!draft.input.startsWith('"')) throw new Refusal("INVALID_REQUEST", `"input" must be a string`);
    const ticket = this.#noted(exchange, await this.#submit(exchange, draft, caller));
    const record =
      ticket.record ??
      (await new Promise<RecordView | undefined>((woken) => this.#wait(exchange, ticket, undefined, woken)));
    if (exchange.answered) return ticket.record && this.#abandon(ticket);
    const quota = quotaHeaders(ticket.quota);
    exchange.ending = record;
    const refusal = record === undefined ? tooLate() : refusalOf(record);
    if (refusal !== undefined) {
      exchange.fail(refusal, ticket.id, quota);
      return this.#engine.delivered(ticket.id);
    }
    const headers = [...batchHeaders(record!), ...quota];
    const bytes = this.#sendBytes(exchange, record!, ticket.id, headers);
    if (bytes === "refused") return;
    if (bytes === undefined) {
      const latencyMs = tenths(this.#clock.now() - exchange.startedAt);
      const rest = `,"request_id":"${ticket.id}","latency_ms":${latencyMs}}`;
      const pieces = outputPieces(record!, draft.encoding);
      if (pieces !== undefined)
        return this.#sendPieces(exchange, chained(["{"], pieces, [rest]), headers, ticket.id);
      exchange.send(200, `{${outputPart(record!, draft.encoding).output}${rest}`, headers);
    }
    this.#engine.delivered(ticket.id);
  }

  #submit(exchange: Exchange, draft: Draft, caller: Caller): Ticket | Promise<Ticket> {
    const { name, vault } = this.#intake.model(draft.model);
    exchange.model = name;
    const authorization = vault && exchange.header("authorization");
    const whole = authorization === undefined ? draft : { ...draft, authorization };
    return this.#intake.submit(whole, caller, exchange.trace);
  }

  #noted(exchange: Exchange, ticket: Ticket): Ticket {
    exchange.id = ticket.id;
    exchange.work = ticket.work;
    return ticket;
  }

  /** Calls when the outcome is there, the caller's patience ends, or the caller is gone. */
  #wait(exchange: Exchange, ticket: Ticket, waitMs: number | undefined, woken: Woken): void {
    const { waiter } = ticket;
    if (waitMs === 0) {
      this.#router.release(waiter);
      return woken(undefined);
    }
    exchange.onGone(() => {
      waiter.wake(undefined);
      this.#router.release(waiter);
      this.#abandon(ticket);
    });
    const patience = waitMs === undefined ? Infinity : exchange.startedAt + waitMs;
    this.#router.call(waiter, Math.min(ticket.deadlineAt, patience), woken);
  }

  /** Its caller has left. The engine counts callers that joined; only the router knows those that poll. */
  #abandon({ id, caller }: Ticket): void {
    if (!this.#router.polled(id)) void this.#engine.cancel(id, caller.tenant, true);
  }

  /** To a caller who takes the bytes: sends them, or says that there are none ("refused"). Undefined: it wants JSON. */
  #sendBytes(
    exchange: Exchange,
    record: RecordView,
    id: string,
    headers: readonly string[],
  ): "sent" | "refused" | undefined {
    const wanted = accepted(exchange.header("accept"));
    if (wanted === "json" || record.outcome?.ok !== true) return undefined;
    const binary = readBinary(record.outcome.output);
    if (binary === undefined) {
      if (wanted === "either") return undefined;
      exchange.fail(noBytes(id), id, headers);
      return "refused";
    }
    const all = ["x-request-id", id, ...bytesHeaders(binary), ...headers];
    exchange.sendBytes(BYTES_TYPE, Buffer.from(binary.base64, "base64"), all);
    return "sent";
  }

  /** An answer that takes long to write; delivered when it is. */
  async #sendPieces(
    exchange: Exchange,
    texts: Iterable<Json>,
    headers: readonly string[],
    id: string,
  ): Promise<void> {
    const parts = await pieceLine.gather(texts, () => exchange.answered);
    if (parts === undefined || exchange.answered) return;
    exchange.sendBytes(JSON_TYPE, parts, headers);
    // Whoever asks for the headers alone has not got the outcome.
    if (exchange.request.method !== "HEAD") this.#engine.delivered(id);
  }

  #answer(exchange: Exchange, ticket: Ticket, record: RecordView, encoding: Encoding): void {
    const { id, work, quota } = ticket;
    exchange.ending = record;
    const refusal = refusalOf(record);
    const headers = batchHeaders(record);
    if (quota !== undefined) headers.push(...quotaHeaders(quota));
    const sent = this.#sendBytes(exchange, record, id, headers);
    // It is still there to be asked for.
    if (sent === "refused") return;
    if (refusal !== undefined) exchange.fail(refusal, id, headers);
    else if (sent === undefined) {
      const explain = exchange.header("x-ferry-explain") === "1";
      const latencyMs = this.#clock.now() - exchange.startedAt;
      const head = `{"request_id":"${id}","task_id":"${id}","status":"SUCCESS",`;
      const rendering = {
        cached: work === "cached",
        joined: work === "joined",
        explain,
        latencyMs,
        encoding,
      };
      const pieces = successPieces(head, record, rendering);
      if (pieces !== undefined) {
        const sending = this.#sendPieces(exchange, pieces, headers, id);
        return void sending.catch((error: unknown) => exchange.failed(error));
      }
      const { text, bytes } = successBody(head, record, rendering);
      exchange.send(200, text, headers, bytes);
    }
    this.#engine.delivered(id);
  }

  /**
   * Not done. 202 to those who said how long they would wait; 504 to those who waited for the end. If
   * the end has not come, this process is being stopped: whoever can poll later is told so.
   */
  #answerUndone(exchange: Exchange, ticket: Ticket, waitMs: number | undefined): void {
    const { id, quota, caller, deadlineAt } = ticket;
    const stopped = waitMs === undefined && this.#admission.draining && this.#clock.now() < deadlineAt;
    if (stopped && !this.#options.durable) {
      return exchange.fail(this.#admission.ending(caller, ticket.model), id);
    }
    if (waitMs === undefined && !stopped) {
      exchange.fail(tooLate(), id);
      return this.#engine.delivered(id);
    }
    exchange.send(202, `{"request_id":"${id}","task_id":"${id}","status":"PENDING"}`, [
      "location",
      `/v1/result/${id}`,
      "preference-applied",
      "respond-async",
      ...quotaHeaders(quota),
    ]);
  }

  async #result(exchange: Exchange, id: string): Promise<void> {
    const caller = await this.#enter(exchange);
    const waitMs = Math.min(pollMs(exchange), this.#options.maxPollMs);
    const asked = new URLSearchParams(exchange.query).get("encoding") ?? undefined;
    const encoding = encodingNamed(asked, '"encoding"');
    const record = looksLikeId(id) ? await this.#lookUp(exchange, id, caller.tenant, waitMs) : undefined;
    if (exchange.answered) return;
    if (record === undefined) throw await this.#noResult(caller);
    const explain = exchange.header("x-ferry-explain") === "1";
    const sent = this.#sendBytes(exchange, record, id, batchHeaders(record));
    if (sent === "refused") return;
    if (sent === undefined) {
      const body = resultBody(record, explain, encoding);
      if (!("text" in body)) return this.#sendPieces(exchange, body, batchHeaders(record), id);
      exchange.send(200, body.text, batchHeaders(record), body.bytes);
    }
    // Whoever asks for the headers alone has not got the outcome.
    if (record.outcome !== undefined && exchange.request.method !== "HEAD") this.#engine.delivered(id);
  }

  async #lookUp(
    exchange: Exchange,
    id: string,
    tenant: string,
    waitMs: number,
  ): Promise<RecordView | undefined> {
    if (waitMs === 0) return this.#engine.outcome(id, tenant);
    const waiter = this.#router.expect(id, true);
    exchange.onGone(() => waiter.wake(undefined));
    try {
      const now = await this.#engine.follow(id, tenant);
      if (now === undefined || now.outcome !== undefined) return now;
      const ended = await this.#router.wait(waiter, exchange.startedAt + waitMs);
      return ended ?? (await this.#engine.outcome(id, tenant));
    } finally {
      // Also when the engine is away or the caller left.
      this.#router.release(waiter);
    }
  }

  /** Counted where callers are known: whoever guesses ids runs into the limit. */
  async #noResult(caller: Caller): Promise<Refusal> {
    if (this.#credentials.required) await this.#admission.spend(caller);
    return new Refusal("NOT_FOUND", NO_RESULT);
  }

  async #forget(exchange: Exchange, id: string): Promise<void> {
    const { tenant, tier } = await this.#enter(exchange);
    const reply = looksLikeId(id) ? await this.#engine.cancel(id, tenant) : "unknown";
    if (reply === "unknown") throw await this.#noResult({ tenant, tier });
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

/** One for all cases, so that nothing tells somebody else's id from one that never was. */
const NO_RESULT = "no such result: the id is unknown, its time to live has passed, or it is not yours";

function tooLate(): Refusal {
  return new Refusal("DEADLINE_EXCEEDED", "no answer before the total timeout");
}

/** Undefined: until it is done. What cannot be understood is ignored, as preferences are. */
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
