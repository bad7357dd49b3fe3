/**
 * The one door that every protocol goes through: admit → expect → put.
 *
 * Here a draft becomes a task: it gets its id, its deadline (once, for good) and the keys under which
 * its work may be shared. What comes back is a `Ticket`: the id to wait for, and the outcome if it is
 * known already.
 */
import { hash } from "node:crypto";
import type { Admission, Reception } from "./admission/admit.ts";
import type { Caller } from "./admission/caller.ts";
import type { Gate, GateRefusal } from "./admission/gate.ts";
import type { Clock } from "../app/clock.ts";
import { type Quota, Refusal } from "../core/errors.ts";
import { canonical } from "../core/json.ts";
import type { Json } from "../core/task.ts";
import { type RequestTrace, traceparent } from "../core/trace.ts";
import type { Engine, PutReply, RecordView, Sharing } from "../engine/engine.ts";
import { checkUncredited, credited as withCredential } from "./protocol/fields.ts";
import type { Router, Waiter } from "./router.ts";
import type { AnsweredRequest } from "../observe/events.ts";
import { newId } from "../engine/ids.ts";
import type { Screening } from "./screening.ts";

/** One input as a protocol read it, checked. */
export interface Draft {
  /** Left out when the client named none. */
  readonly model: string | undefined;
  readonly input: Json;
  /** Canonical; "" when there are none. */
  readonly parameters: Json;
  readonly idempotencyKey: string | undefined;
  /** How many inputs came with it in its request, which the key covers as a whole; left out: it came alone. */
  readonly of?: number | undefined;
  /** The client's own, for models that send it on. */
  readonly authorization?: string | undefined;
  /** Its outcome is drawn by lot: it is nobody else's, neither now nor later. */
  readonly drawn?: boolean | undefined;
}

export interface ModelDoor {
  readonly name: string;
  readonly totalMs: number;
  readonly cache: { readonly ttlMs: number; readonly scope: "tenant" | "shared" | "off" };
  readonly collapse: boolean;
  readonly gate: Gate;
  /** Whether finding an answer that others' work has left costs nothing; with an Idempotency-Key it is worth it. */
  readonly looksForFree: boolean;
  /** Left out: every input is let in. */
  readonly screen?: Screening | undefined;
  /** Keeps clients' credentials for its workers, each under a name; left out: they get none. */
  readonly vault?: { keep(header: string): string | undefined } | undefined;
}

export interface Ticket {
  readonly id: string;
  readonly caller: Caller;
  readonly model: string;
  readonly deadlineAt: number;
  readonly quota: Quota | undefined;
  /** Set when the outcome was known at once. */
  readonly record: RecordView | undefined;
  /** The outcome must be answered now, also to a caller that would ask for it later. */
  readonly unstored: boolean;
  readonly work: AnsweredRequest["work"];
  readonly waiter: Waiter;
}

export class Intake {
  readonly #models: ReadonlyMap<string, ModelDoor>;
  readonly #only: ModelDoor | undefined;
  readonly #admission: Admission;
  readonly #router: Router;
  readonly #engine: Engine;
  readonly #clock: Clock;
  /** Those of the last task. */
  #parameters = new Parameters("", false, "");

  constructor(
    models: readonly ModelDoor[],
    admission: Admission,
    router: Router,
    engine: Engine,
    clock: Clock,
  ) {
    this.#models = new Map(models.map((model) => [model.name, model]));
    this.#only = models.length === 1 ? models[0] : undefined;
    this.#admission = admission;
    this.#router = router;
    this.#engine = engine;
    this.#clock = clock;
  }

  model(name: string | undefined): ModelDoor {
    const model = name === undefined ? this.#only : this.#models.get(name);
    if (model?.gate.open === true) return model;
    const names = [...this.#models.values()]
      .filter(({ gate }) => gate.open)
      .map((each) => each.name)
      .join(", ");
    const what =
      name === undefined ? `"model" is missing` : `model ${JSON.stringify(name)} is not served here`;
    throw new Refusal("INVALID_REQUEST", `${what}; choose one of: ${names}`);
  }

  /**
   * Answers without a promise where neither a rate nor the engine has to be waited for. `counts`: whether it is the
   * one task of its request that the rates count.
   */
  submit(asked: Draft, caller: Caller, trace?: RequestTrace, counts = true): Ticket | Promise<Ticket> {
    const model = this.model(asked.model);
    const received = this.#admission.receive(caller, model.gate, counts, (asked.of ?? 1) > 1);
    if (!(received instanceof Promise)) return this.#put(asked, caller, model, received, trace);
    return received.then((reception) => this.#put(asked, caller, model, reception, trace));
  }

  #put(
    asked: Draft,
    caller: Caller,
    model: ModelDoor,
    { quota, refusal }: Reception,
    trace: RequestTrace | undefined,
  ): Ticket | Promise<Ticket> {
    const now = this.#clock.now();
    const shared = this.#parametersOf(asked, model);
    const { content, sharing } = share(asked, shared.key, model, caller);
    const mayShare =
      sharing.idempotency !== undefined || (model.looksForFree && sharing !== NOTHING_SHARED.sharing);
    if (refusal !== undefined && !mayShare) throw this.#admission.shed(caller, model.name, refusal);
    // After admission: trying out what is let through consumes the caller's quota.
    model.screen?.checkTask(asked.input, shared.parameters);
    const id = newId(now, this.#engine.bundle?.(model.name));
    const { input } = asked;
    const { parameters } = shared;
    const { tenant, tier } = caller;
    const deadlineAt = now + model.totalMs;
    const task = {
      id,
      tenant,
      tier,
      model: model.name,
      input,
      parameters,
      content,
      createdAt: now,
      deadlineAt,
      trace: trace && traceparent(trace),
    };
    const waiter = this.#router.expect(id);
    const ticket: Ticket = {
      id,
      caller,
      model: model.name,
      deadlineAt,
      quota,
      record: undefined,
      unstored: false,
      work: "own",
      waiter,
    };
    const put = this.#engine.put(task, refusal === undefined ? sharing : { ...sharing, only: true });
    if (!(put instanceof Promise)) return this.#placed(ticket, put, model, refusal, now);
    const { puts } = this.#admission.load;
    puts.began(now);
    return put.then(
      (reply) => {
        puts.ended(now);
        return this.#placed(ticket, reply, model, refusal, now);
      },
      (error: unknown) => {
        puts.ended(now);
        // The engine is away: no outcome will ever wake the waiter.
        this.#router.release(waiter);
        throw error;
      },
    );
  }

  /** All inputs of a request bring the same text, one right after the other: it is prepared once. */
  #parametersOf({ parameters, authorization }: Draft, { vault }: ModelDoor): Parameters {
    const name =
      vault === undefined || authorization === undefined ? "" : credentialName(authorization, vault);
    if (!this.#parameters.fits(parameters, vault !== undefined, name)) {
      this.#parameters = new Parameters(parameters, vault !== undefined, name);
    }
    return this.#parameters;
  }

  /** What the engine did with it. */
  #placed(
    ticket: Ticket,
    put: PutReply,
    model: ModelDoor,
    refusal: GateRefusal | undefined,
    now: number,
  ): Ticket | Promise<Ticket> {
    const { caller, waiter } = ticket;
    if (put.kind === "queued") {
      model.gate.queued(caller, now);
      return ticket;
    }
    if (put.kind === "joined") {
      const joined: Ticket = { ...ticket, id: put.id, work: "joined" };
      return this.#router.follow(waiter, put.id).then(() => joined);
    }
    this.#router.release(waiter);
    if (put.kind === "done") {
      const { id, record, cached, unstored = false } = put;
      return { ...ticket, id, record, work: cached ? "cached" : unstored ? "own" : "joined", unstored };
    }
    if (put.kind === "full") {
      if (put.never === true)
        throw new Refusal("PAYLOAD_TOO_LARGE", "the input is larger than what may be queued; send less");
      if (refusal !== undefined) throw this.#admission.shed(caller, model.name, refusal);
      const { message, own, retryInMs = model.gate.retryInMs(caller, now) } = put;
      throw this.#admission.refuse(caller, model.name, "full", message, retryInMs, undefined, own);
    }
    throw new Refusal(
      "IDEMPOTENCY_CONFLICT",
      "this Idempotency-Key was used with another body; use a new key",
    );
  }
}

/** Parameters longer than this stand in keys as their SHA-256. */
const MAX_KEY_CHARACTERS = 128;

/**
 * The parameters of a request as each of its tasks carries them: one text, held once, and what would otherwise
 * be worked out for every input. A request of some hundred inputs and a megabyte of parameters costs that megabyte.
 */
class Parameters {
  readonly #given: Json;
  readonly #credited: boolean;
  readonly #name: string;
  readonly parameters: Json;
  /** In the keys under which work is shared. Canonical JSON begins with a brace, so a digest cannot be mistaken for it. */
  readonly key: string;

  /** `credited`: the model sends clients' credentials on. `name`: of this client's; "": it has none. */
  constructor(given: Json, credited: boolean, name: string) {
    this.#given = given;
    this.#credited = credited;
    this.#name = name;
    if (credited) checkUncredited(given);
    this.parameters = name === "" ? given : withCredential(given, name);
    const { length } = this.parameters;
    const short = length <= MAX_KEY_CHARACTERS;
    this.key = short ? this.parameters : `#${hash("sha256", this.parameters, "base64url")}`;
  }

  fits(given: Json, credited: boolean, name: string): boolean {
    return given === this.#given && credited === this.#credited && name === this.#name;
  }
}

/** The name under which a client's credential is kept. It keeps apart what may not share a batch, an outcome or a key. */
function credentialName(authorization: string, vault: NonNullable<ModelDoor["vault"]>): string {
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
 * Under which keys this work may be shared. The input is hashed alone, without a copy of it joined to the
 * model and parameters; those stand beside the hash, where nothing can be mistaken for anything else.
 *
 * Tasks of the same `content` are one input of their batch. Unless outcomes are shared by all anyway, it names the
 * tenant too: a model that draws its answer by lot would give two strangers the same one.
 */
function share(draft: Draft, parametersKey: string, model: ModelDoor, caller: Caller): Shared {
  const { cache } = model;
  const { idempotencyKey, of = 1, drawn = false } = draft;
  const collapse = model.collapse && !drawn;
  const cached = cache.scope !== "off" && !drawn;
  if (!collapse && !cached && idempotencyKey === undefined) return NOTHING_SHARED;
  const content = `${hash("sha256", canonical(draft.input), "base64url")} ${model.name} ${parametersKey}`;
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
          fingerprint: of === 1 ? content : `${content}\n${of}`,
        },
      }),
    },
  };
}
