/**
 * The way past the batches: a request goes to a worker as it came, and the answer back as it comes.
 *
 * Both bodies are streams that go no faster than they are taken; of neither is more held than fits the buffers of two
 * sockets. A stream of events reaches the client event by event. When the client leaves, the worker's connection ends
 * at once. When the worker dies in the middle of its answer, the client's connection ends without the mark of a whole
 * answer: nobody takes a half for a whole.
 *
 *   arrival ── totalMs ──► first byte of the answer, else 504
 *   byte    ── idleMs ───► next byte taken by the client, else it is cut off
 *
 * At most `maxOpen` at once in this process, which tenants share (`core/share.ts`); more are refused. What is passed
 * on counts as requests, not as tasks.
 */
import type { Readable } from "node:stream";
import type { Admission } from "./admission/admit.ts";
import type { Alarm, Clock } from "../app/clock.ts";
import { Refusal } from "../core/errors.ts";
import { Shares } from "../core/share.ts";
import { traceparent } from "../core/trace.ts";
import type { ShedReason } from "../observe/events.ts";
import type { Passage, Proxy } from "./dropin.ts";
import type { Exchange, Relay } from "./exchange.ts";
import { newId } from "../engine/ids.ts";
import { checkPath, sentBack, sentOn } from "./pass-headers.ts";

/** The workers of one model: `workers/backend/passthrough.ts`. */
export interface Road {
  send(
    parcel: {
      readonly method: string;
      readonly path: string;
      readonly headers: readonly string[];
      readonly authorization?: string | null | undefined;
      body(): Readable | Buffer | null;
    },
    receiver: {
      started(status: number, headers: readonly string[]): void;
      data(chunk: Buffer): boolean;
      ended(): void;
      failed(message: string, how: "unseen" | "unfit" | "broken"): void;
    },
  ): { resume(): void; recall(): void };
}

export interface PassedModel {
  readonly road: Road;
  readonly totalMs: number;
  /** The client's `Authorization` goes to the worker. */
  readonly forwardAuthorization: boolean;
}

export interface PassLimits {
  readonly maxOpen: number;
  /** Whether callers are told apart; otherwise all are one tenant, and no part is kept for others. */
  readonly perTenant: boolean;
  readonly idleMs: number;
}

const NO_BODY: ReadonlySet<number> = new Set([204, 304]);
const RETRY_AFTER_MS = 1000;

export class Passthrough implements Proxy {
  readonly #models: ReadonlyMap<string, PassedModel>;
  readonly #limits: PassLimits;
  readonly #admission: Admission;
  readonly #clock: Clock;
  readonly #underway: Shares;

  /** `underway`: what is passed through now, also by the rules of an earlier config. */
  constructor(
    models: ReadonlyMap<string, PassedModel>,
    limits: PassLimits,
    admission: Admission,
    clock: Clock,
    underway = new Shares(),
  ) {
    this.#underway = underway;
    this.#models = models;
    this.#limits = limits;
    this.#admission = admission;
    this.#clock = clock;
  }

  async forward(exchange: Exchange, passage: Passage): Promise<void> {
    const { model, path, query } = passage;
    checkPath(path, query);
    if (/\bwebsocket\b/i.test(exchange.header("upgrade") ?? "")) {
      throw new Refusal(
        "INVALID_REQUEST",
        "connections are not passed through, only requests: no websockets",
      );
    }
    if (passage.body === undefined) exchange.checkLength();
    if (exchange.answered) return;
    const giveBack = this.#take(passage);
    try {
      exchange.id = newId(exchange.startedAt);
      const unseen = await new Crossover(
        exchange,
        passage,
        this.#models.get(model)!,
        this.#limits,
        this.#clock,
      ).over;
      if (unseen !== undefined) throw this.#refusal(passage, "no_worker", unseen);
    } finally {
      giveBack();
    }
  }

  /** Takes a place, and returns what gives it back. Throws a Refusal. */
  #take(passage: Passage): () => void {
    const { maxOpen, perTenant } = this.#limits;
    const share = this.#underway;
    const tenant = perTenant ? (passage.caller?.tenant ?? "") : "";
    if (share.total >= maxOpen)
      throw this.#refusal(passage, "full", `${maxOpen} requests are being passed through already`);
    if (!perTenant || share.fits(tenant, 1, maxOpen)) {
      share.add(tenant, 1);
      return () => share.remove(tenant, 1);
    }
    const held = share.heldBy(tenant);
    const message = `${held} of your requests are being passed through; the other places are for other users`;
    throw this.#refusal(passage, "rate", message);
  }

  #refusal({ caller, model }: Passage, why: ShedReason, message: string): Refusal {
    if (caller !== undefined) return this.#admission.refuse(caller, model, why, message, RETRY_AFTER_MS);
    return new Refusal("SERVICE_OVERLOADED", message, { retryAfterMs: RETRY_AFTER_MS });
  }
}

/** One request and its answer, until both are over. */
class Crossover {
  readonly #exchange: Exchange;
  readonly #passage: Passage;
  readonly #idleMs: number;
  readonly #clock: Clock;
  readonly #end = Promise.withResolvers<string | undefined>();
  readonly #underway: ReturnType<Road["send"]> | undefined;
  #relay: Relay | undefined;
  #alarm: Alarm;
  #movedAt = 0;

  constructor(
    exchange: Exchange,
    passage: Passage,
    { road, totalMs, forwardAuthorization }: PassedModel,
    { idleMs }: PassLimits,
    clock: Clock,
  ) {
    this.#exchange = exchange;
    this.#passage = passage;
    this.#idleMs = idleMs;
    this.#clock = clock;
    const authorization = forwardAuthorization ? (exchange.header("authorization") ?? null) : undefined;
    this.#alarm = clock.at(exchange.startedAt + totalMs, () => this.#late());
    exchange.onGone(() => this.#stop(undefined));
    this.#underway = road.send(
      {
        method: exchange.method,
        path: passage.path + (passage.query === "" ? "" : `?${passage.query}`),
        headers: headersFor(exchange, passage.body),
        authorization,
        body: () => this.#body(),
      },
      {
        started: (status, headers) => this.#started(status, headers),
        data: (chunk) => this.#data(chunk),
        ended: () => this.#ended(),
        failed: (message, how) => this.#failed(message, how),
      },
    );
  }

  /** Resolves when all is over, with what is wrong when no worker could be reached; rejects with a Refusal. */
  get over(): Promise<string | undefined> {
    return this.#end.promise;
  }

  #body(): Readable | Buffer | null {
    if (this.#passage.body !== undefined) return this.#passage.body;
    if (!this.#exchange.hasBody) return null;
    const inflow = this.#exchange.inflow();
    inflow.once("error", (error) => {
      if (error instanceof Refusal) this.#stop(error);
    });
    return inflow;
  }

  #started(status: number, raw: readonly string[]): void {
    const exchange = this.#exchange;
    this.#alarm.cancel();
    const headers = sentBack(raw, status === 204);
    if (!headers.some((text, at) => at % 2 === 0 && text === "x-request-id"))
      headers.push("x-request-id", exchange.id);
    headers.push(...this.#passage.headers);
    try {
      this.#relay = exchange.relay(status, headers);
    } catch {
      const message = "the worker's answer has a status or headers that cannot be passed on";
      return this.#stop(new Refusal("INFERENCE_FAILED", message));
    }
    if (exchange.method === "HEAD" || NO_BODY.has(status)) return;
    this.#relay.onDrain(() => {
      this.#movedAt = this.#clock.now();
      this.#underway?.resume();
    });
    this.#movedAt = this.#clock.now();
    this.#watch();
  }

  #data(chunk: Buffer): boolean {
    this.#movedAt = this.#clock.now();
    return this.#relay!.write(chunk);
  }

  #ended(): void {
    this.#alarm.cancel();
    this.#relay!.end();
    this.#end.resolve(undefined);
  }

  #failed(message: string, how: "unseen" | "unfit" | "broken"): void {
    this.#alarm.cancel();
    if (how === "unseen") return this.#end.resolve(message);
    this.#end.reject(new Refusal(how === "unfit" ? "INVALID_REQUEST" : "INFERENCE_FAILED", message));
  }

  /** One alarm for a whole stream: when it rings it looks how long ago something moved. */
  #watch(): void {
    const dueAt = this.#movedAt + this.#idleMs;
    this.#alarm = this.#clock.at(dueAt, () => {
      if (this.#clock.now() < this.#movedAt + this.#idleMs) this.#watch();
      else this.#stop(new Refusal("DEADLINE_EXCEEDED", `nothing moved for ${this.#idleMs} ms`));
    });
  }

  #late(): void {
    this.#stop(new Refusal("DEADLINE_EXCEEDED", "the worker did not answer before the total timeout"));
  }

  /** The worker need not go on. Without a refusal there is nobody to be told. */
  #stop(refusal: Refusal | undefined): void {
    this.#alarm.cancel();
    this.#underway?.recall();
    if (refusal === undefined) this.#end.resolve(undefined);
    else this.#end.reject(refusal);
  }
}

function headersFor(exchange: Exchange, body: Buffer | undefined): string[] {
  const { request, trace } = exchange;
  const before = exchange.header("x-forwarded-for");
  const peer = request.socket.remoteAddress;
  const way = [before, peer].filter((each) => each !== undefined && each !== "").join(", ");
  const length = exchange.header("content-length");
  return sentOn(request.rawHeaders, [
    ...(way === "" ? [] : ["x-forwarded-for", way]),
    ...(trace === undefined ? [] : ["traceparent", traceparent(trace)]),
    // Of a stream; with a body that was read, its length is known.
    ...(body === undefined && exchange.hasBody && length !== undefined ? ["content-length", length] : []),
  ]);
}
