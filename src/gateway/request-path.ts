/**
 * The one path of a request that brings work, whichever protocol it speaks:
 *
 *   admit → (protocol: read and parse) → run: rate, capacity, put, wait → (protocol: render)
 *
 * Each input is a task of its own and runs in whichever batch comes first. The request counts once against the rates and
 * is answered as a whole: when one input is refused or fails, or the client leaves, the others are no longer waited for,
 * and those that no other request wants are cancelled.
 *
 * Headers, request log and spans of the request (batch, attempts, times) are those of one input: the one that settled last,
 * or the one whose failure the request was answered with.
 */
import { hash } from "node:crypto";
import type { Clock } from "../app/clock.ts";
import { type Quota, Refusal } from "../core/errors.ts";
import { canonical } from "../core/json.ts";
import type { Json } from "../core/task.ts";
import { type RequestTrace, traceparent } from "../core/trace.ts";
import type { Engine, PutReply, RecordView, Sharing } from "../engine/engine.ts";
import { newId } from "../engine/ids.ts";
import type { AnsweredRequest, TaskEnding } from "../observe/events.ts";
import type { Admission } from "./admission/admission.ts";
import type { Caller, Credentials } from "./admission/credentials.ts";
import type { CapacityGate, CapacityRefusal } from "./admission/capacity-gate.ts";
import { checkUncredited, credited } from "./protocol/fields.ts";
import { batchHeaders, quotaHeaders, refusalOf } from "./reply.ts";
import type { Screening } from "./screening.ts";
import type { Waiter, Waiters } from "./waiters.ts";

/** The client's request: an HTTP exchange or a gRPC call. */
export interface PathRequest {
  readonly startedAt: number;
  readonly trace: RequestTrace | undefined;
  id: string;
  model: string;
  tier: string;
  tenant: string;
  work: AnsweredRequest["work"];
  ending: TaskEnding | undefined;
  header(name: string): string | undefined;
  /** Set while the client has too many untaken answers: resolves when it has room for another. */
  readonly room?: Promise<void> | undefined;
  /** Calls `gone` when the client leaves before it is answered; at once when it has left already. */
  onGone(gone: () => void): void;
  /** Answers with what was thrown where no promise carries it. */
  failed(error: unknown): void;
}

/** What a protocol has parsed a request into: one task per input. */
export interface Inference {
  /** Undefined: the only model. */
  readonly model: string | undefined;
  readonly inputs: readonly Json[];
  /** Canonical; "" when there are none. */
  readonly parameters: Json;
  /** The outcome is sampled: neither shared nor reused. */
  readonly drawn?: boolean | undefined;
  /** How long the caller waits from its arrival; undefined: until the total timeout; 0: not at all. */
  readonly waitMs?: number | undefined;
  /** The client can poll for its task: when it waits no longer, or this process stops, that is no failure. */
  readonly pollable?: boolean;
  /** Requests of this protocol never have several inputs, so the Idempotency-Key needs no position. */
  readonly single?: boolean;
}

/** How a request ended: with records, with a refusal, or with neither: the caller's wait was over first. */
export interface Ended {
  readonly id: string;
  readonly tickets: readonly Ticket[];
  /** One per input, in order, all of them successes. */
  readonly records: readonly RecordView[] | undefined;
  readonly refusal: Refusal | undefined;
  /** Batch and quota: name, value, name, value… */
  readonly headers: readonly string[];
}

/** Answers a request that has ended. */
export type Render = (ended: Ended) => Promise<void> | void;

/** The rules of one model for the requests that name it. */
export interface ModelRoute {
  readonly name: string;
  readonly totalMs: number;
  readonly cache: { readonly ttlMs: number; readonly scope: "tenant" | "shared" | "off" };
  readonly collapse: boolean;
  readonly gate: CapacityGate;
  /** Whether looking for a shareable outcome costs no round trip; with an Idempotency-Key it is done anyway. */
  readonly looksForFree: boolean;
  /** Undefined: no deny patterns. */
  readonly screen?: Screening | undefined;
  /** Keeps clients' credentials for the model's workers, each under a name; undefined: workers get none. */
  readonly vault?: { keep(header: string): string | undefined } | undefined;
}

/** A task that was put. */
export interface Ticket {
  readonly id: string;
  readonly deadlineAt: number;
  /** Set when the outcome was known at once. */
  readonly record: RecordView | undefined;
  /** The outcome could not be stored: it is answered now, also to a caller that would poll for it. */
  readonly unstored: boolean;
  readonly work: AnsweredRequest["work"];
  readonly waiter: Waiter;
}

export interface RequestPathParts {
  readonly routes: readonly ModelRoute[];
  readonly credentials: Credentials;
  readonly admission: Admission;
  readonly waiters: Waiters;
  readonly engine: Engine;
  readonly clock: Clock;
  /** Accepted tasks outlive this process. */
  readonly durable: boolean;
}

export class RequestPath {
  readonly #parts: RequestPathParts;
  readonly #routes: ReadonlyMap<string, ModelRoute>;
  readonly #only: ModelRoute | undefined;
  /** Those of the last task: all inputs of a request share one text, so it is prepared once. */
  #parameters = new SharedParameters("", false, "");

  constructor(parts: RequestPathParts) {
    this.#parts = parts;
    this.#routes = new Map(parts.routes.map((route) => [route.name, route]));
    this.#only = parts.routes.length === 1 ? parts.routes[0] : undefined;
  }

  /** Authenticates, before the body is read. Throws a Refusal. */
  async identify(request: PathRequest): Promise<Caller> {
    const { credentials, admission } = this.#parts;
    const caller = await credentials.identify(request.header("authorization"), request.header("x-api-key"));
    request.tier = admission.tierName(caller.tier);
    request.tenant = caller.tenant;
    await request.room;
    return caller;
  }

  /** As `identify`, for a request with work: resolves when this process has time for it. */
  async admit(request: PathRequest): Promise<Caller> {
    const caller = await this.identify(request);
    await this.#parts.admission.turn(caller);
    return caller;
  }

  /** Counts a request that bypasses the batches; headers for its answer. Throws a Refusal. */
  async pass(caller: Caller | undefined, model: string): Promise<readonly string[]> {
    const { admission } = this.#parts;
    if (caller === undefined) return [];
    if (admission.draining) throw admission.ending(caller, model);
    return quotaHeaders(await admission.count(caller, model));
  }

  /**
   * Puts the tasks, and calls `render` when the request has ended; never when the client leaves before that. Throws or
   * rejects with a Refusal when the request was not accepted. A call and no promise, so that no caller's frame holds the
   * body while the request waits. `bench/path.ts` measures the gain: 1.5 KB for each
   * waiting request of 2 KB, and some 0.7 µs of CPU, which one run in six did not show.
   */
  run(request: PathRequest, caller: Caller, inference: Inference, render: Render): Promise<void> | void {
    const { admission } = this.#parts;
    const route = this.#route(inference.model);
    request.model = route.name;
    this.#checkSize(inference);
    if (admission.draining) throw admission.ending(caller, route.name);
    const wait = new Wait(this.#parts, request, caller, inference, route.name, render);
    const counted = admission.count(caller, route.name);
    if (counted === undefined) return this.#enter(wait, route, inference);
    return counted.then((quota) => {
      wait.quota = quota;
      return this.#enter(wait, route, inference);
    });
  }

  #enter(wait: Wait, route: ModelRoute, inference: Inference): Promise<void> | void {
    const tickets = this.#putAll(wait.request, wait.caller, route, inference);
    if (!(tickets instanceof Promise)) return wait.begin(tickets);
    return tickets.then((all) => wait.begin(all));
  }

  /** The outputs, which count as delivered. Throws the Refusal of a request that has none. */
  outputs(ended: Ended): readonly Json[] {
    const { records, refusal } = ended;
    if (records === undefined) throw refusal!;
    this.delivered(ended);
    return records.map(({ outcome }) => (outcome?.ok === true ? outcome.output : "null"));
  }

  /** The client has the outputs. */
  delivered({ tickets }: Ended): void {
    for (const { id } of tickets) this.#parts.engine.delivered(id);
  }

  #route(name: string | undefined): ModelRoute {
    const route = name === undefined ? this.#only : this.#routes.get(name);
    if (route?.gate.open === true) return route;
    const names = [...this.#routes.values()]
      .filter(({ gate }) => gate.open)
      .map((each) => each.name)
      .join(", ");
    const what =
      name === undefined ? `"model" is missing` : `model ${JSON.stringify(name)} is not served here`;
    throw new Refusal("INVALID_REQUEST", `${what}; choose one of: ${names}`);
  }

  /** Inputs enter the queue together: what an empty queue has no room for is refused for good. One alone, `put` refuses. */
  #checkSize({ inputs, parameters }: Inference): void {
    if (inputs.length === 1) return;
    let inputBytes = 0;
    for (const { length } of inputs) inputBytes += length;
    const flaw = this.#parts.engine.neverFits(inputs.length, inputBytes, parameters.length);
    if (flaw !== undefined) throw new Refusal("PAYLOAD_TOO_LARGE", flaw);
  }

  #putAll(
    request: PathRequest,
    caller: Caller,
    route: ModelRoute,
    inference: Inference,
  ): readonly Ticket[] | Promise<readonly Ticket[]> {
    const { inputs, single = false } = inference;
    const key = idempotencyKey(request);
    const shared = this.#prepare(inference.parameters, route, route.vault && request.header("authorization"));
    const put = (input: Json, at: number): Ticket | Promise<Ticket> => {
      const inputKey = key === undefined || single ? key : `${key}#${at}`;
      const sharing = share(inference, input, shared.key, route, caller, inputKey);
      return this.#put(request, caller, route, input, shared.text, sharing, inputs.length > 1);
    };
    if (inputs.length > 1) return this.#putMany(inputs, put, caller);
    const ticket = put(inputs[0]!, 0);
    return ticket instanceof Promise ? ticket.then((known) => [known]) : [ticket];
  }

  /** All in one moment, so that they can leave in one batch. */
  async #putMany(
    inputs: readonly Json[],
    put: (input: Json, at: number) => Ticket | Promise<Ticket>,
    caller: Caller,
  ): Promise<readonly Ticket[]> {
    const { engine } = this.#parts;
    const puts = engine.together(() => Promise.allSettled(inputs.map(async (input, at) => put(input, at))));
    const tickets: Ticket[] = [];
    let refusal: unknown;
    for (const each of await puts) {
      if (each.status === "fulfilled") tickets.push(each.value);
      else refusal ??= each.reason;
    }
    if (refusal === undefined) return tickets;
    abandon(tickets, caller, this.#parts);
    throw refusal;
  }

  #prepare(text: Json, { vault }: ModelRoute, authorization: string | undefined): SharedParameters {
    const name =
      vault === undefined || authorization === undefined ? "" : credentialName(authorization, vault);
    if (!this.#parameters.fits(text, vault !== undefined, name)) {
      this.#parameters = new SharedParameters(text, vault !== undefined, name);
    }
    return this.#parameters;
  }

  /** Throws or rejects with a Refusal. The promise is the engine's: where it answers at once, so does this. */
  #put(
    request: PathRequest,
    caller: Caller,
    route: ModelRoute,
    input: Json,
    parameters: Json,
    { content, sharing }: Shared,
    ofMany: boolean,
  ): Ticket | Promise<Ticket> {
    const { admission, waiters, engine, clock } = this.#parts;
    const now = clock.now();
    const { tenant, tier } = caller;
    const { trace } = request;
    const refusal = route.gate.enter(caller, now, ofMany);
    const mayShare =
      sharing.idempotency !== undefined || (route.looksForFree && sharing !== NOTHING_SHARED.sharing);
    if (refusal !== undefined && !mayShare) throw admission.shed(caller, route.name, refusal);
    // After admission: probing the deny patterns consumes the caller's quota.
    route.screen?.checkTask(input, parameters);
    const id = newId(now, engine.bundle?.(route.name));
    const deadlineAt = now + route.totalMs;
    const waiter = waiters.expect(id);
    const ticket: Ticket = { id, deadlineAt, record: undefined, unstored: false, work: "own", waiter };
    const reply = engine.put(
      {
        id,
        tenant,
        tier,
        model: route.name,
        input,
        parameters,
        content,
        createdAt: now,
        deadlineAt,
        trace: trace && traceparent(trace),
      },
      refusal === undefined ? sharing : { ...sharing, only: true },
    );
    if (!(reply instanceof Promise)) return this.#placed(ticket, reply, caller, route, refusal, now);
    const { puts } = admission.load;
    puts.began(now);
    return reply.then(
      (known) => {
        puts.ended(now);
        return this.#placed(ticket, known, caller, route, refusal, now);
      },
      (error: unknown) => {
        puts.ended(now);
        // The engine is away: no outcome will ever wake the waiter.
        waiters.release(waiter);
        throw error;
      },
    );
  }

  #placed(
    ticket: Ticket,
    put: PutReply,
    caller: Caller,
    route: ModelRoute,
    refusal: CapacityRefusal | undefined,
    now: number,
  ): Ticket | Promise<Ticket> {
    const { admission, waiters } = this.#parts;
    const { waiter } = ticket;
    if (put.kind === "queued") {
      route.gate.queued(caller, now);
      return ticket;
    }
    if (put.kind === "joined") {
      const joined: Ticket = { ...ticket, id: put.id, work: "joined" };
      return waiters.follow(waiter, put.id).then(() => joined);
    }
    waiters.release(waiter);
    if (put.kind === "done") {
      const { id, record, cached, unstored = false } = put;
      return { ...ticket, id, record, work: cached ? "cached" : unstored ? "own" : "joined", unstored };
    }
    if (put.kind === "full") {
      if (put.never === true)
        throw new Refusal("PAYLOAD_TOO_LARGE", "the input is larger than what may be queued; send less");
      if (refusal !== undefined) throw admission.shed(caller, route.name, refusal);
      const { message, own, retryInMs = route.gate.retryInMs(caller, now) } = put;
      throw admission.refuse(caller, route.name, "full", message, retryInMs, undefined, own);
    }
    throw new Refusal(
      "IDEMPOTENCY_CONFLICT",
      "this Idempotency-Key was used with another body; use a new key",
    );
  }
}

/** A request whose tasks are put, until it is answered. Holds neither body nor inputs: those are the engine's now. */
class Wait {
  readonly #parts: RequestPathParts;
  readonly request: PathRequest;
  readonly caller: Caller;
  readonly #model: string;
  readonly #waitMs: number | undefined;
  readonly #pollable: boolean;
  readonly #render: Render;
  quota: Quota | undefined;
  #tickets: readonly Ticket[] = [];
  readonly #records: RecordView[] = [];
  #left = false;

  constructor(
    parts: RequestPathParts,
    request: PathRequest,
    caller: Caller,
    { waitMs, pollable = false }: Inference,
    model: string,
    render: Render,
  ) {
    this.#parts = parts;
    this.request = request;
    this.caller = caller;
    this.#model = model;
    this.#waitMs = waitMs;
    this.#pollable = pollable;
    this.#render = render;
  }

  begin(tickets: readonly Ticket[]): Promise<void> | void {
    this.#tickets = tickets;
    const { request } = this;
    const { id, record, unstored, waiter } = tickets[0]!;
    request.id = id;
    request.work = workOf(tickets);
    if (this.#waitMs !== 0 || record !== undefined) request.onGone(() => this.#leave());
    if (this.#left) return;
    if (this.#waitMs !== 0 || unstored) return this.#next();
    this.#parts.waiters.release(waiter);
    return this.#end();
  }

  /** Takes the outcomes in order, until one is not known yet. */
  #next(): Promise<void> | void {
    for (;;) {
      const ticket = this.#tickets[this.#records.length];
      if (ticket === undefined) return this.#succeed();
      const { waiter } = ticket;
      if (ticket.record === undefined && !waiter.woken) {
        const patience = this.#waitMs === undefined ? Infinity : this.request.startedAt + this.#waitMs;
        return this.#parts.waiters.call(waiter, Math.min(ticket.deadlineAt, patience), this.#woken);
      }
      const record = ticket.record ?? waiter.record;
      if (record === undefined) return this.#late(ticket);
      const refusal = refusalOf(record);
      if (refusal !== undefined) return this.#fail(ticket, refusal, record);
      this.#records.push(record);
    }
  }

  readonly #woken = (): void => {
    if (this.#left) return;
    const { request } = this;
    try {
      const done = this.#next();
      if (done !== undefined) done.catch((error: unknown) => request.failed(error));
    } catch (error) {
      request.failed(error);
    }
  };

  /** Not done. Woken before its deadline though the caller would wait: this process is being stopped. */
  #late(ticket: Ticket): Promise<void> | void {
    const { admission, clock, durable } = this.#parts;
    const waits = this.#waitMs === undefined;
    const stopped = waits && admission.draining && clock.now() < ticket.deadlineAt;
    if (this.#pollable && (stopped ? durable : !waits)) return this.#end();
    if (!stopped) {
      return this.#fail(
        ticket,
        new Refusal("DEADLINE_EXCEEDED", "no answer before the total timeout"),
        undefined,
      );
    }
    abandon(this.#tickets, this.caller, this.#parts);
    return this.#end(admission.ending(this.caller, this.#model));
  }

  /** The failure of one input is the request's. That input counts as delivered; the others are given up. */
  #fail(ticket: Ticket, refusal: Refusal, record: RecordView | undefined): Promise<void> | void {
    this.request.ending = record;
    if (this.#tickets.length > 1) {
      const others = this.#tickets.filter((each) => each !== ticket);
      abandon(others, this.caller, this.#parts);
    }
    this.#parts.engine.delivered(ticket.id);
    return this.#end(refusal, record);
  }

  #succeed(): Promise<void> | void {
    const records = this.#records;
    const last = lastSettled(records);
    this.request.ending = last;
    return this.#end(undefined, last, records);
  }

  #end(refusal?: Refusal, told?: RecordView, records?: readonly RecordView[]): Promise<void> | void {
    const headers = batchHeaders(told);
    if (this.quota !== undefined) headers.push(...quotaHeaders(this.quota));
    return this.#render({ id: this.request.id, tickets: this.#tickets, records, refusal, headers });
  }

  #leave(): void {
    this.#left = true;
    abandon(this.#tickets, this.caller, this.#parts);
  }
}

/**
 * No request here waits for these tasks any longer. The engine knows the requests that joined them, only the waiters know
 * long polls. Outcomes that were known at once are included: they were not delivered either.
 */
function abandon(
  tickets: readonly Ticket[],
  { tenant }: Caller,
  { waiters, engine }: RequestPathParts,
): void {
  for (const { id, waiter } of tickets) {
    waiter.wake(undefined);
    waiters.release(waiter);
    if (!waiters.polled(id)) void engine.cancel(id, tenant, true);
  }
}

/** The record that settled last; the first of several, since a batch settles at once. */
function lastSettled(records: readonly RecordView[]): RecordView {
  let last = records[0]!;
  for (const record of records) if ((record.settledAt ?? 0) > (last.settledAt ?? 0)) last = record;
  return last;
}

/** `own` where any input needed a new task, `cached` only where all were. */
function workOf(tickets: readonly Ticket[]): Ticket["work"] {
  let work: Ticket["work"] = "cached";
  for (const ticket of tickets) {
    if (ticket.work === "own") return "own";
    if (ticket.work === "joined") work = "joined";
  }
  return work;
}

/** The most characters of a name that a client gives to something. */
const MAX_NAME = 255;

/** Throws a Refusal for what is no name. */
export function checkName(what: string, value: string): void {
  if (value.length === 0 || value.length > MAX_NAME) {
    throw new Refusal("INVALID_REQUEST", `${what} must have 1 to ${MAX_NAME} characters`);
  }
  if (/[\u0000-\u001f\u007f-\u009f]/.test(value)) {
    throw new Refusal("INVALID_REQUEST", `${what} holds a control character`);
  }
}

function idempotencyKey(request: PathRequest): string | undefined {
  const key = request.header("idempotency-key");
  if (key !== undefined) checkName("Idempotency-Key", key);
  return key;
}

/** Longer parameters stand in keys as their SHA-256. */
const MAX_KEY_CHARACTERS = 128;

/**
 * The parameters of a request as each of its tasks carries them: one text, held once. A request of some hundred inputs
 * and a megabyte of parameters costs that megabyte.
 */
class SharedParameters {
  readonly #given: Json;
  readonly #forwards: boolean;
  readonly #name: string;
  readonly text: Json;
  /** For the keys under which work is shared. Canonical JSON begins with a brace, so a digest cannot be mistaken for it. */
  readonly key: string;

  /** `forwards`: the model forwards clients' credentials. `name`: of this client's; "": it has none. */
  constructor(given: Json, forwards: boolean, name: string) {
    this.#given = given;
    this.#forwards = forwards;
    this.#name = name;
    if (forwards) checkUncredited(given);
    this.text = name === "" ? given : credited(given, name);
    const short = this.text.length <= MAX_KEY_CHARACTERS;
    this.key = short ? this.text : `#${hash("sha256", this.text, "base64url")}`;
  }

  fits(given: Json, forwards: boolean, name: string): boolean {
    return given === this.#given && forwards === this.#forwards && name === this.#name;
  }
}

/** The name under which a client's credential is kept. It keeps apart what may not share a batch, an outcome or a key. */
function credentialName(authorization: string, vault: NonNullable<ModelRoute["vault"]>): string {
  const name = vault.keep(authorization);
  if (name !== undefined) return name;
  throw new Refusal("SERVICE_OVERLOADED", "too many different credentials are in use; try again in 1 s", {
    retryAfterMs: 1000,
  });
}

interface Shared {
  readonly content: string;
  readonly sharing: Sharing;
}

const NOTHING_SHARED: Shared = { content: "", sharing: {} };

/**
 * The keys under which this work may be shared. The input is hashed alone, without a copy of it joined to model and
 * parameters; those stand beside the hash, where nothing can be mistaken for anything else.
 *
 * Tasks of the same `content` are one input of their batch. Unless outcomes are shared by all anyway, it names the tenant:
 * a model that samples its answers would give two tenants the same one.
 */
function share(
  { inputs, drawn = false }: Inference,
  input: Json,
  parametersKey: string,
  model: ModelRoute,
  caller: Caller,
  idempotencyKey: string | undefined,
): Shared {
  const { cache } = model;
  const collapse = model.collapse && !drawn;
  const cached = cache.scope !== "off" && !drawn;
  if (!collapse && !cached && idempotencyKey === undefined) return NOTHING_SHARED;
  const content = `${hash("sha256", canonical(input), "base64url")} ${model.name} ${parametersKey}`;
  // Neither a name, nor canonical JSON, nor a key holds a line break.
  const own = `${content}\n${caller.tenant}`;
  const cacheKey = cache.scope === "shared" ? content : own;
  return {
    content: collapse ? cacheKey : "",
    sharing: {
      ...(collapse && { joinKey: own }),
      ...(cached && { cacheKey, cacheTtlMs: cache.ttlMs }),
      ...(idempotencyKey !== undefined && {
        idempotency: {
          key: `${idempotencyKey}\n${caller.tenant}`,
          // The key covers the whole request, so also how many inputs it has.
          fingerprint: inputs.length === 1 ? content : `${content}\n${inputs.length}`,
        },
      }),
    },
  };
}
