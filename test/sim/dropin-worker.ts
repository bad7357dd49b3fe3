/**
 * A worker behind HTTP, without the HTTP: what it is sent is what the protocol's `call` says, and what it answers goes
 * through the same `HttpExchange` as an answer from a socket.
 *
 * Most often it is right. It also answers with too many elements or too few, with hollow or misplaced ones, with
 * text that ends in the middle, with statuses of every kind; it hangs, resets the connection before its answer or in it,
 * and takes longer than anybody waits. Where elements say whose they are it shuffles them, which is no fault.
 */
import assert from "node:assert/strict";
import type { Batch, Reply, Worker } from "../../src/workers/backend/backend.ts";
import { HttpExchange } from "../../src/workers/backend/http.ts";
import type { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import type { PadMemory } from "../../src/gateway/protocol/oip-pad.ts";
import type { WorkerCall, WorkerSide } from "../../src/gateway/protocol/protocol.ts";
import type { Speaker } from "./dropin-table.ts";
import type { Dice } from "./plan.ts";

export const MISHAPS = [
  "short",
  "long",
  "hollow",
  "bent",
  "not json",
  "cut text",
  "empty",
  "status 400",
  "status 429",
  "status 500",
  "status 503",
  "reset before",
  "reset within",
  "hang",
  "late",
] as const;
type Mishap = (typeof MISHAPS)[number];

const MAX_REPLY_BYTES = 2 ** 20;
const JSON_TYPE = { "content-type": "application/json" };

export interface WorkerPlan {
  readonly protocol: WorkerSide;
  readonly speaker: Speaker;
  readonly memory: PadMemory;
  readonly maxBatchSize: number;
  /** Share of calls that go wrong. */
  readonly faults: number;
  readonly baseMs: number;
  readonly workerMs: number;
}

export class DropInWorker implements Worker {
  readonly name: string;
  readonly #plan: WorkerPlan;
  readonly #clock: VirtualClock;
  readonly #dice: Dice;
  readonly #count: (what: string) => void;
  /** From here on it makes no mistakes. */
  calm = false;
  #busy = false;

  constructor(
    name: string,
    plan: WorkerPlan,
    clock: VirtualClock,
    dice: Dice,
    count: (what: string) => void,
  ) {
    this.name = name;
    this.#plan = plan;
    this.#clock = clock;
    this.#dice = dice;
    this.#count = count;
  }

  run(batch: Batch, signal: AbortSignal): Promise<Reply> {
    const { protocol, maxBatchSize, memory } = this.#plan;
    assert.ok(!this.#busy, "two batches at once");
    assert.ok(
      batch.tasks.length >= 1 && batch.tasks.length <= maxBatchSize,
      `a batch of ${batch.tasks.length}`,
    );
    this.#busy = true;
    this.#count("calls");
    return new Promise((resolve) => {
      const abort = (): void => exchange.abort();
      const inputs = batch.tasks.map(({ input }) => input);
      const call = protocol.call(inputs, batch.parameters, "upstream");
      const exchange = new HttpExchange({
        batch,
        protocol,
        model: "upstream",
        named: call.named === true,
        ownCredential: false,
        maxReplyBytes: MAX_REPLY_BYTES,
        memory,
        clock: this.#clock,
        done: (reply) => {
          signal.removeEventListener("abort", abort);
          this.#busy = false;
          resolve(reply);
        },
      });
      signal.addEventListener("abort", abort);
      exchange.onRequestSent();
      this.#serve(exchange, call);
    });
  }

  #serve(exchange: HttpExchange, call: WorkerCall): void {
    const dice = this.#dice;
    const { faults, baseMs, workerMs } = this.#plan;
    const mishap = !this.calm && dice.chance(faults) ? dice.pick(MISHAPS) : undefined;
    if (mishap !== undefined) this.#count(`worker: ${mishap}`);
    if (mishap === "hang") return;
    const ms = mishap === "late" ? workerMs + dice.upTo(500) : baseMs * (0.3 + 1.4 * dice.share());
    this.#clock.at(this.#clock.now() + ms, () => this.#answer(exchange, call, mishap));
  }

  #answer(exchange: HttpExchange, call: WorkerCall, mishap: Mishap | undefined): void {
    const { speaker } = this.#plan;
    if (mishap === "reset before") return exchange.onResponseError(undefined, new Error("reset"));
    const status = /^status (\d+)$/.exec(mishap ?? "")?.[1];
    if (status !== undefined) return send(exchange, Number(status), JSON_TYPE, Buffer.from('{"error":"no"}'));
    const elements = speaker.elements(call);
    if (elements === undefined) return send(exchange, 400, JSON_TYPE, Buffer.from('{"error":"bad"}'));
    const { body, headers } = speaker.reply(this.#spoiled(elements, mishap), call);
    const all = { ...JSON_TYPE, ...headers };
    if (mishap === "not json") return send(exchange, 200, all, Buffer.from("<html>"));
    if (mishap === "empty") return send(exchange, 200, all, Buffer.alloc(0));
    if (mishap === "cut text") return send(exchange, 200, all, body.subarray(0, body.length >> 1));
    if (mishap !== "reset within") return send(exchange, 200, all, body);
    exchange.onResponseStart(undefined, 200, all);
    exchange.onResponseData(undefined, body.subarray(0, body.length >> 1));
    exchange.onResponseError(undefined, new Error("reset"));
  }

  #spoiled(elements: unknown[], mishap: Mishap | undefined): unknown[] {
    const dice = this.#dice;
    const { speaker } = this.#plan;
    const at = dice.upTo(elements.length);
    if (mishap === "short") return elements.toSpliced(at, 1);
    if (mishap === "long") return elements.toSpliced(at, 0, elements[dice.upTo(elements.length)]);
    if (mishap === "hollow") return elements.with(at, null);
    if (mishap === "bent") return speaker.bend?.(elements, dice) ?? elements.slice(1);
    return speaker.shuffles && dice.chance(0.5) ? shuffled(elements, dice) : elements;
  }
}

function send(exchange: HttpExchange, status: number, headers: Record<string, string>, body: Buffer): void {
  exchange.onResponseStart(undefined, status, headers);
  exchange.onResponseData(undefined, body);
  exchange.onResponseEnd();
}

function shuffled(elements: unknown[], dice: Dice): unknown[] {
  const all = [...elements];
  for (let at = all.length - 1; at > 0; at--) {
    const other = dice.upTo(at + 1);
    [all[at], all[other]] = [all[other], all[at]];
  }
  return all;
}
