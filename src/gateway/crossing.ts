/**
 * From the inputs of one request to their outputs: all submitted, all waited for, given back in order.
 *
 * Each input is a task of its own and rides in whichever batch comes first. The request is one to the rates and as
 * many as it has inputs to the workers. It is answered as a whole: when one input is refused or fails, or the client
 * leaves, the others are no longer waited for, and those that nobody else wants are cancelled.
 *
 * What is told of the request as a whole (headers, request log, spans: batch, attempts, times) is that of one input: the
 * one that settled last, for which the caller waited; of a request that failed, the one whose failure it was answered with.
 */
import type { Admission } from "./admission/admit.ts";
import type { Caller } from "./admission/caller.ts";
import type { Credentials } from "./admission/credentials.ts";
import type { Clock } from "../app/clock.ts";
import { Refusal } from "../core/errors.ts";
import type { Json } from "../core/task.ts";
import type { RequestTrace } from "../core/trace.ts";
import type { Engine, RecordView } from "../engine/engine.ts";
import type { Router } from "./router.ts";
import type { AnsweredRequest, TaskEnding } from "../observe/events.ts";
import { idempotencyKey } from "./headers.ts";
import type { Intake, Ticket } from "./intake.ts";
import { batchHeaders, quotaHeaders, refusalOf } from "./reply.ts";

export interface CrossingParts {
  readonly credentials: Credentials;
  readonly intake: Intake;
  readonly admission: Admission;
  readonly router: Router;
  readonly engine: Engine;
  readonly clock: Clock;
}

/** The request that waits: an HTTP exchange, or a call of another kind. */
export interface Visitor {
  readonly trace: RequestTrace | undefined;
  id: string;
  model: string;
  tier: string;
  tenant: string;
  work: AnsweredRequest["work"];
  ending: TaskEnding | undefined;
  header(name: string): string | undefined;
  /** See Exchange. */
  readonly room?: Promise<void> | undefined;
  /** Calls `gone` when the client leaves before it is answered. */
  onGone(gone: () => void): void;
}

/** What is to be run. */
export interface Freight {
  readonly model: string;
  readonly inputs: readonly Json[];
  readonly parameters: Json;
  /** See Drafts. */
  readonly drawn?: boolean | undefined;
}

export interface Crossed {
  readonly outputs: readonly Json[];
  /** Of the batch that answered its last input, and the quota: name, value, name, value… */
  readonly headers: readonly string[];
}

export class Crossing {
  readonly #credentials: Credentials;
  readonly #intake: Intake;
  readonly #admission: Admission;
  readonly #router: Router;
  readonly #engine: Engine;
  readonly #clock: Clock;

  constructor(parts: CrossingParts) {
    const { credentials, intake, admission, router, engine, clock } = parts;
    this.#credentials = credentials;
    this.#intake = intake;
    this.#admission = admission;
    this.#router = router;
    this.#engine = engine;
    this.#clock = clock;
  }

  /** Who it is; before the body is read. Throws a Refusal. */
  async enter(visitor: Visitor): Promise<Caller> {
    const shown = visitor.header("authorization");
    const caller = await this.#credentials.identify(shown, visitor.header("x-api-key"));
    visitor.tier = this.#admission.tierName(caller.tier);
    visitor.tenant = caller.tenant;
    await visitor.room;
    return caller;
  }

  /** As `enter`, with inputs: once this process has time for them. */
  async enterWithTask(visitor: Visitor): Promise<Caller> {
    const caller = await this.enter(visitor);
    await this.#admission.turn(caller);
    return caller;
  }

  /** Counts a request that goes past the batches; headers for its answer. Throws a Refusal. */
  async pass(caller: Caller | undefined, model: string): Promise<readonly string[]> {
    if (caller === undefined) return [];
    if (this.#admission.draining) throw this.#admission.ending(caller, model);
    return quotaHeaders(await this.#admission.count(caller, model));
  }

  /** Undefined: the client left, and nobody is there to be answered. Throws a Refusal. */
  async cross(visitor: Visitor, caller: Caller, freight: Freight): Promise<Crossed | undefined> {
    visitor.model = freight.model;
    this.#checkSize(freight);
    const counted = this.#admission.count(caller, freight.model);
    const quota = counted && (await counted);
    const tickets = await this.#submit(visitor, caller, freight);
    visitor.id = tickets[0]!.id;
    visitor.work = workOf(tickets);
    let left = false;
    visitor.onGone(() => {
      left = true;
      this.#abandon(tickets);
    });
    try {
      const records: RecordView[] = [];
      for (const ticket of tickets) {
        const record = ticket.record ?? (await this.#router.wait(ticket.waiter, ticket.deadlineAt));
        if (left) return undefined;
        const refusal = record === undefined ? this.#undone(ticket) : refusalOf(record);
        if (refusal !== undefined) {
          visitor.ending = record;
          throw refusal;
        }
        records.push(record!);
      }
      for (const { id } of tickets) this.#engine.delivered(id);
      const last = lastSettled(records);
      visitor.ending = last;
      return {
        outputs: records.map(({ outcome }) => (outcome?.ok === true ? outcome.output : "null")),
        headers: [...batchHeaders(last), ...quotaHeaders(quota)],
      };
    } catch (error) {
      this.#abandon(tickets);
      throw error;
    }
  }

  /** All enter the queue together: what an empty queue has no room for is refused for good, not for now. */
  #checkSize({ inputs, parameters }: Freight): void {
    let inputBytes = 0;
    for (const { length } of inputs) inputBytes += length;
    const flaw = this.#engine.neverFits(inputs.length, inputBytes, parameters.length);
    if (flaw !== undefined) throw new Refusal("PAYLOAD_TOO_LARGE", flaw);
  }

  /** All in one moment, so that they can leave in one batch. */
  async #submit(visitor: Visitor, caller: Caller, freight: Freight): Promise<Ticket[]> {
    const { model, inputs, parameters, drawn } = freight;
    const key = idempotencyKey(visitor);
    const authorization = visitor.header("authorization");
    const submit = async (input: Json, at: number): Promise<Ticket> => {
      const inputKey = key === undefined ? undefined : `${key}#${at}`;
      const draft = {
        model,
        input,
        parameters,
        idempotencyKey: inputKey,
        of: inputs.length,
        authorization,
        drawn,
      };
      return this.#intake.submit(draft, caller, visitor.trace, false);
    };
    if (inputs.length === 1) return [await submit(inputs[0]!, 0)];
    const puts = this.#engine.together(() => Promise.allSettled(inputs.map(submit)));
    const tickets: Ticket[] = [];
    let refusal: unknown;
    for (const put of await puts) {
      if (put.status === "fulfilled") tickets.push(put.value);
      else refusal ??= put.reason;
    }
    if (refusal === undefined) return tickets;
    this.#abandon(tickets);
    throw refusal;
  }

  /** The client of these has left. Outcomes that were known at once are included: they were not delivered either. */
  #abandon(tickets: readonly Ticket[]): void {
    for (const { id, waiter, caller } of tickets) {
      waiter.wake(undefined);
      this.#router.release(waiter);
      if (!this.#router.polled(id)) void this.#engine.cancel(id, caller.tenant, true);
    }
  }

  #undone({ caller, model, deadlineAt }: Ticket): Refusal {
    const stopped = this.#admission.draining && this.#clock.now() < deadlineAt;
    if (stopped) return this.#admission.ending(caller, model);
    return new Refusal("DEADLINE_EXCEEDED", "no answer before the total timeout");
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
  const works = new Set(tickets.map(({ work }) => work));
  return works.has("own") ? "own" : works.has("joined") ? "joined" : "cached";
}
