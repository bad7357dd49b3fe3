/**
 * The path of every request with work, whichever protocol it speaks:
 *
 *   admit → (protocol: read and parse) → run: rate, capacity, put, wait → (protocol: render)
 *
 * Each input is a task and runs in any batch. The request counts once against the rates and is answered as a whole: if
 * an input fails or the client leaves, the others are abandoned, and cancelled unless another request wants them.
 *
 * Response headers, request log and spans describe one input: the last to settle, or the one that failed the request.
 */
import { hash } from "node:crypto";
import type { Clock } from "../app/clock.ts";
import { type Quota, Refusal } from "../core/errors.ts";
import { canonical } from "../core/json.ts";
import type { Json, Task } from "../core/task.ts";
import { type RequestTrace, traceparent } from "../core/trace.ts";
import type { Placed, RecordView, Sharing, TaskStore } from "../engine/engine.ts";
import { newId } from "../engine/ids.ts";
import type { AnsweredRequest, TaskEnding } from "../observe/events.ts";
import type { Admission } from "./admission/admission.ts";
import type { Caller, Credentials } from "./admission/credentials.ts";
import { checkUncredited, credited } from "./protocol/fields.ts";
import { batchHeaders, quotaHeaders, refusalOf } from "./reply.ts";
import type { Screening } from "./screening.ts";
import type { Waiter, Waiters } from "./waiters.ts";

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
  /** Set while the client has too many unread responses: resolves when it has room. */
  readonly room?: Promise<void> | undefined;
  /** Calls `gone` when the client disconnects before its response; at once if it already has. */
  onGone(gone: () => void): void;
  failed(error: unknown): void;
}

export interface Inference {
  readonly model: string | undefined;
  readonly inputs: readonly Json[];
  /** Canonical; "" if there are none. */
  readonly parameters: Json;
  /** Sampled: the outcome is neither shared nor reused. */
  readonly drawn?: boolean | undefined;
  /** How long the caller waits from its arrival; undefined: until the total timeout; 0: not at all. */
  readonly waitMs?: number | undefined;
  /** The client can poll: the end of its wait, or of this process, is not a failure. */
  readonly pollable?: boolean;
  /** Never several inputs, so the Idempotency-Key needs no position. */
  readonly single?: boolean;
}

/** A request's end: records, a refusal, or neither if the caller's wait ended first. */
export interface Ended {
  readonly id: string;
  readonly tickets: readonly Ticket[];
  /** One per input, in order, all successful. */
  readonly records: readonly RecordView[] | undefined;
  readonly refusal: Refusal | undefined;
  /** Batch and quota: name, value, name, value… */
  readonly headers: readonly string[];
}

export type Render = (ended: Ended) => Promise<void> | void;

export interface ModelRoute {
  readonly name: string;
  readonly totalMs: number;
  readonly cache: { readonly ttlMs: number; readonly scope: "tenant" | "shared" | "off" };
  readonly collapse: boolean;
  /** False: the model was removed, also for requests that arrived before. */
  open: boolean;
  readonly screen?: Screening | undefined;
  /** Stores clients' credentials for the model's workers under a name; undefined: workers get none. */
  readonly vault?: { keep(header: string): string | undefined } | undefined;
}

export interface Ticket {
  readonly id: string;
  readonly deadlineAt: number;
  /** Set if the outcome was known at once. */
  readonly record: RecordView | undefined;
  /** The outcome could not be stored, so it is answered now even if the caller would poll. */
  readonly unstored: boolean;
  readonly work: AnsweredRequest["work"];
  readonly waiter: Waiter;
}

export interface RequestPathParts {
  readonly routes: readonly ModelRoute[];
  readonly credentials: Credentials;
  readonly admission: Admission;
  readonly waiters: Waiters;
  readonly engine: TaskStore;
  /** The engine's put behind the model's capacity gate; `ofMany`: one of a request's several inputs. */
  put(task: Task, sharing: Sharing, ofMany: boolean): Placed | Promise<Placed>;
  readonly clock: Clock;
  readonly durable: boolean;
}

export class RequestPath {
  readonly #parts: RequestPathParts;
  readonly #routes: ReadonlyMap<string, ModelRoute>;
  readonly #only: ModelRoute | undefined;
  /** The last request's: its inputs share one text, prepared once. */
  #parameters = new SharedParameters("", false, "");

  constructor(parts: RequestPathParts) {
    this.#parts = parts;
    this.#routes = new Map(parts.routes.map((route) => [route.name, route]));
    this.#only = parts.routes.length === 1 ? parts.routes[0] : undefined;
  }

  /** Authenticates before the body is read. Throws or rejects with a Refusal; synchronous where nothing has to be awaited. */
  identify(request: PathRequest): Caller | Promise<Caller> {
    const { credentials } = this.#parts;
    const caller = credentials.identify(request.header("authorization"), request.header("x-api-key"));
    if (caller instanceof Promise) return caller.then((known) => this.#identified(request, known));
    return this.#identified(request, caller);
  }

  #identified(request: PathRequest, caller: Caller): Caller | Promise<Caller> {
    request.tier = this.#parts.admission.tierName(caller.tier);
    request.tenant = caller.tenant;
    const { room } = request;
    return room === undefined ? caller : room.then(() => caller);
  }

  /** As `identify`; resolves when this process has time for the request. */
  admit(request: PathRequest): Caller | Promise<Caller> {
    const caller = this.identify(request);
    return caller instanceof Promise ? caller.then((known) => this.#turn(known)) : this.#turn(caller);
  }

  #turn(caller: Caller): Caller | Promise<Caller> {
    const turn = this.#parts.admission.turn(caller);
    return turn === undefined ? caller : turn.then(() => caller);
  }

  /** Counts a proxied request; returns headers for its response. Throws a Refusal. */
  async pass(caller: Caller | undefined, model: string): Promise<readonly string[]> {
    const { admission } = this.#parts;
    if (caller === undefined) return [];
    if (admission.draining) throw admission.ending(caller, model);
    return quotaHeaders(await admission.count(caller, model));
  }

  /**
   * Puts the tasks and calls `render` at the end, unless the client leaves first. Throws or rejects with a Refusal if
   * the request was not accepted. A callback, so that no frame holds the body while the request waits. `bench/path.ts`
   * measures the gain: 1.5 KB per waiting request of 2 KB, and some 0.7 µs of CPU, which one run in six did not show.
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

  /** The outputs, counted as delivered. Throws the Refusal of a failed request. */
  outputs(ended: Ended): readonly Json[] {
    const { records, refusal } = ended;
    if (records === undefined) throw refusal!;
    this.delivered(ended);
    return records.map(({ outcome }) => (outcome?.ok === true ? outcome.output : "null"));
  }

  delivered({ tickets }: Ended): void {
    for (const { id } of tickets) this.#parts.engine.delivered(id);
  }

  #route(name: string | undefined): ModelRoute {
    const route = name === undefined ? this.#only : this.#routes.get(name);
    if (route?.open === true) return route;
    const names = [...this.#routes.values()]
      .filter(({ open }) => open)
      .map((each) => each.name)
      .join(", ");
    const what =
      name === undefined ? `"model" is missing` : `model ${JSON.stringify(name)} is not served here`;
    throw new Refusal("INVALID_REQUEST", `${what}; choose one of: ${names}`);
  }

  /** Inputs are queued together: more than an empty queue holds is refused for good. `put` checks a single one. */
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

  /** In one turn, so that they can share a batch. */
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

  /** Throws or rejects with a Refusal. Synchronous if the engine answers at once. */
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
    // After the rates: probing the deny patterns consumes the caller's quota.
    route.screen?.checkTask(input, parameters);
    const id = newId(now, engine.bundle?.(route.name));
    const deadlineAt = now + route.totalMs;
    const waiter = waiters.expect(id);
    const ticket: Ticket = { id, deadlineAt, record: undefined, unstored: false, work: "own", waiter };
    const reply = this.#parts.put(
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
      sharing,
      ofMany,
    );
    if (!(reply instanceof Promise)) return this.#placed(ticket, reply, caller, route);
    const { puts } = admission.load;
    puts.began(now);
    return reply.then(
      (known) => {
        puts.ended(now);
        return this.#placed(ticket, known, caller, route);
      },
      (error: unknown) => {
        puts.ended(now);
        // The engine is down: no outcome will wake the waiter.
        waiters.release(waiter);
        throw error;
      },
    );
  }

  #placed(ticket: Ticket, put: Placed, caller: Caller, route: ModelRoute): Ticket | Promise<Ticket> {
    const { admission, waiters } = this.#parts;
    const { waiter } = ticket;
    if (put.kind === "queued") return ticket;
    if (put.kind === "joined") {
      const joined: Ticket = { ...ticket, id: put.id, work: "joined" };
      return waiters.follow(waiter, put.id).then(() => joined);
    }
    waiters.release(waiter);
    if (put.kind === "done") {
      const { id, record, cached, unstored = false } = put;
      const own = unstored && id === ticket.id;
      return { ...ticket, id, record, work: cached ? "cached" : own ? "own" : "joined", unstored };
    }
    if (put.kind === "full") {
      if (put.never === true)
        throw new Refusal("PAYLOAD_TOO_LARGE", "the input is larger than what may be queued; send less");
      throw admission.refuse(
        caller,
        route.name,
        "full",
        put.message,
        put.retryInMs ?? 1000,
        undefined,
        put.own,
      );
    }
    if (put.kind === "refused") throw admission.shed(caller, route.name, put);
    throw new Refusal(
      "IDEMPOTENCY_CONFLICT",
      "this Idempotency-Key was used with another body; use a new key",
    );
  }
}

/** A request between put and response. Holds neither body nor inputs: the engine has those. */
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

  /** Not done. Woken before its deadline while the caller would wait: this process is stopping. */
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

  /** One input's failure is the request's. That input counts as delivered; the others are abandoned. */
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
 * No request here waits for these tasks any longer. The engine knows joined requests, only the waiters know long polls.
 * Includes outcomes known at once: they were not delivered either.
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

/** The first of several, since a batch settles at once. */
function lastSettled(records: readonly RecordView[]): RecordView {
  let last = records[0]!;
  for (const record of records) if ((record.settledAt ?? 0) > (last.settledAt ?? 0)) last = record;
  return last;
}

/** `own` if any input needed a new task, `cached` only if all were. */
function workOf(tickets: readonly Ticket[]): Ticket["work"] {
  let work: Ticket["work"] = "cached";
  for (const ticket of tickets) {
    if (ticket.work === "own") return "own";
    if (ticket.work === "joined") work = "joined";
  }
  return work;
}

const MAX_NAME = 255;

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

/** Longer parameters are hashed (SHA-256) in keys. */
const MAX_KEY_CHARACTERS = 128;

/** A request's parameters, held once for all its tasks: a megabyte of them costs a megabyte, however many inputs. */
class SharedParameters {
  readonly #given: Json;
  readonly #forwards: boolean;
  readonly #name: string;
  readonly text: Json;
  /** For sharing keys. Canonical JSON begins with a brace, so a digest cannot collide with it. */
  readonly key: string;

  /** `forwards`: the model forwards clients' credentials. `name`: this client's; "": none. */
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

/** The name of a client's stored credential; separates batches, outcomes and keys. */
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
 * Keys under which this work may be shared. Only the input is hashed, to avoid a copy joined with model and parameters,
 * which follow the hash unambiguously. Tasks with equal `content` are one input of their batch. It includes the tenant
 * unless outcomes are shared by all: a sampling model would give two tenants the same answer.
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
  const digest = hash("sha256", canonical(input), "base64url");
  // `join` makes one flat string: the engine hashes it several times, each character at a fifth of a concatenation's cost.
  const content = [digest, model.name, parametersKey].join(" ");
  // No name, canonical JSON or key contains a line break.
  const own = [content, caller.tenant].join("\n");
  const cacheKey = cache.scope === "shared" ? content : own;
  // Nearly every request, in one literal.
  if (collapse && cached && idempotencyKey === undefined)
    return { content: cacheKey, sharing: { joinKey: own, cacheKey, cacheTtlMs: cache.ttlMs } };
  return {
    content: collapse ? cacheKey : "",
    sharing: {
      ...(collapse && { joinKey: own }),
      ...(cached && { cacheKey, cacheTtlMs: cache.ttlMs }),
      ...(idempotencyKey !== undefined && {
        idempotency: {
          key: `${idempotencyKey}\n${caller.tenant}`,
          // The key covers the whole request, including its number of inputs.
          fingerprint: inputs.length === 1 ? content : `${content}\n${inputs.length}`,
        },
      }),
    },
  };
}
