/**
 * One seed of the drop-in simulation: the routes, the request path, admission, waiters, memory engine, dispatcher
 * and each protocol's both sides as they are in production, on virtual time, between clients and workers of our own.
 *
 * Requests have one input or many, come in crowds, leave early, and share inputs; workers do what
 * `dropin-worker.ts` lists. Whoever is answered 200 must have got its own outputs in its own order; whoever is not
 * must be told in the protocol's shape and for a reason; nobody may wait longer than the total timeout; nothing may be
 * left behind.
 */
import assert from "node:assert/strict";
import { Admission } from "../../src/gateway/admission/admission.ts";
import type { Credentials } from "../../src/gateway/admission/credentials.ts";
import { CapacityGate } from "../../src/gateway/admission/capacity-gate.ts";
import { ProcessLoad } from "../../src/gateway/admission/process-load.ts";
import type { ModelRules } from "../../src/dispatch/model-rules.ts";
import { Dispatcher } from "../../src/dispatch/dispatcher.ts";
import { Reaper } from "../../src/dispatch/reaper.ts";
import { MemoryEngine } from "../../src/engine/memory/engine.ts";
import { DropIns } from "../../src/gateway/dropin.ts";
import { RequestPath } from "../../src/gateway/request-path.ts";
import type { Routes } from "../../src/gateway/server.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { type Pad, PadMemory } from "../../src/gateway/protocol/oip-pad.ts";
import type { ProtocolName } from "../../src/gateway/protocol/protocol.ts";
import { protocols } from "../../src/gateway/protocol/protocols.ts";
import { Waiters } from "../../src/gateway/waiters.ts";
import { Events } from "../../src/observe/events.ts";
import { played, type SimRequest, speakers } from "./dropin-table.ts";
import { DropInTalk, type Told } from "./dropin-talk.ts";
import { DropInWorker } from "./dropin-worker.ts";
import { Dice } from "./plan.ts";

export const REQUESTS_A_SEED = 500;
const MODEL = "m";
const TENANTS = ["a", "b", "c"];
/** Beyond the total timeout: what one ring of an alarm may take. */
const GRACE_MS = 1;

export interface DropInRun {
  readonly seed: number;
  readonly protocol: ProtocolName;
  readonly requests: number;
  readonly inputs: number;
  readonly counts: ReadonlyMap<string, number>;
  readonly failure: Error | undefined;
}

interface DropInPlan {
  readonly protocol: ProtocolName;
  readonly workers: number;
  readonly maxBatchSize: number;
  readonly baseMs: number;
  readonly faults: number;
  readonly meanGapMs: number;
  readonly leaves: number;
  readonly policy: "adaptive" | "latency" | "eco" | "fixed";
  readonly cache: "tenant" | "shared" | "off";
  readonly collapse: boolean;
  readonly timeouts: { readonly queueMs: number; readonly workerMs: number; readonly totalMs: number };
  readonly retries: number;
  readonly mode: "predictive" | "off";
  /** Only of tensors. */
  readonly pad: Pad | undefined;
}

function draw(dice: Dice, protocol: ProtocolName): DropInPlan {
  const workers = dice.between(1, 4);
  const maxBatchSize = dice.pick([1, 2, 3, 8, 16, 64]);
  const baseMs = dice.pick([2, 10, 40]);
  // Three inputs a request, about; from a third of what the workers can do to half as much again.
  const load = 0.3 + 1.2 * dice.share();
  const meanGapMs = (3 * baseMs) / (workers * maxBatchSize * load);
  return {
    protocol,
    workers,
    maxBatchSize,
    baseMs,
    faults: dice.pick([0, 0.02, 0.1, 0.3]),
    meanGapMs,
    leaves: dice.pick([0, 0.05, 0.3]),
    policy: dice.pick(["adaptive", "latency", "eco", "fixed"]),
    cache: dice.pick(["tenant", "shared", "off"]),
    collapse: dice.chance(0.7),
    timeouts: { queueMs: 2000, workerMs: dice.pick([100, 1000]), totalMs: 4000 },
    retries: dice.between(0, 3),
    mode: dice.pick(["predictive", "off"]),
    pad: protocol === "oip-v2" && dice.chance(0.7) ? drawPad(dice) : undefined,
  };
}

function drawPad(dice: Dice): Pad {
  const lengthsInput = dice.chance(0.5) ? "n" : undefined;
  const how = dice.pick([{}, {}, { outputs: ["z"] }, { outputs: ["z"], classes: [4, 8] }]);
  return { axis: 1, value: 0, lengthsInput, ...how };
}

class DropInWorld {
  readonly counts = new Map<string, number>();
  readonly #plan: DropInPlan;
  readonly #dice: Dice;
  readonly #clock = new VirtualClock();
  readonly #events = new Events();
  readonly #engine: MemoryEngine;
  readonly #reaper: Reaper;
  readonly #workers: readonly DropInWorker[];
  readonly #dispatcher: Dispatcher;
  readonly #dropIns: DropIns;
  readonly #routes: Routes;
  #arrived = 0;
  inputs = 0;
  #open = 0;

  constructor(seed: number, protocol: ProtocolName) {
    const dice = (this.#dice = new Dice(seed * 6007 + 29));
    const plan = (this.#plan = draw(dice, protocol));
    const { timeouts, maxBatchSize, baseMs, faults } = plan;
    const speaks = { protocol: protocols[protocol]!.worker, speaker: speakers[protocol]! };
    this.#engine = new MemoryEngine(
      () => ({
        models: new Map([[MODEL, timeouts]]),
        tiers: 1,
        maxQueued: 10_000,
        maxQueuedBytes: Infinity,
        results: { ttlMs: 60_000, evictAfterRead: false, maxBytes: Infinity },
        deadLetters: { max: 100, ttlMs: Infinity },
      }),
      this.#clock,
      this.#events,
    );
    const count = (what: string): void => this.count(what);
    const memory = new PadMemory(() => count("pad: contradiction"));
    this.#workers = Array.from({ length: plan.workers }, (_, at) => {
      const worker = { ...speaks, memory, maxBatchSize, faults, baseMs, workerMs: timeouts.workerMs };
      return new DropInWorker(`w${at + 1}`, worker, this.#clock, dice, count);
    });
    let batches = 0;
    const rules: ModelRules = {
      name: MODEL,
      limits: { policy: plan.policy, maxBatchSize, maxWaitMs: 20 },
      workerMs: timeouts.workerMs,
      retry: { max: plan.retries, baseMs: 10, maxMs: 100, budget: 0.5 },
      health: { failures: 5, ejectMs: 20, maxEjectMs: 200 },
      maxWorkerLoad: 1,
    };
    this.#dispatcher = new Dispatcher(() => rules, this.#workers, {
      engine: this.#engine,
      clock: this.#clock,
      events: this.#events,
      random: () => dice.share(),
      newBatchId: () => `b${++batches}`,
    });
    this.#reaper = new Reaper(this.#engine, this.#clock);
    this.#dropIns = this.#openDoors();
    this.#routes = this.#dropIns.routes();
  }

  count(what: string): void {
    this.counts.set(what, (this.counts.get(what) ?? 0) + 1);
  }

  async run(): Promise<void> {
    this.#arriveLater();
    const { timeouts, meanGapMs } = this.#plan;
    const lastAt = this.#clock.now() + 2 * REQUESTS_A_SEED * meanGapMs + 1000;
    await this.#clock.run(lastAt);
    while (this.#arrived < REQUESTS_A_SEED) await this.#clock.run(this.#clock.now() + 1000);
    for (const worker of this.#workers) worker.calm = true;
    await this.#clock.run(this.#clock.now() + timeouts.totalMs + timeouts.workerMs + 1000);
    assert.equal(this.#open, 0, "requests that were never answered");
    const { queued, running } = this.#engine.stats();
    assert.deepEqual({ queued, running }, { queued: 0, running: 0 }, "tasks were left behind");
    this.#reaper.stop();
    await this.#dispatcher.stop();
  }

  #openDoors(): DropIns {
    const { protocol, timeouts, cache, collapse, mode, maxBatchSize, pad } = this.#plan;
    const [engine, clock] = [this.#engine, this.#clock];
    const waiters = new Waiters(engine, clock);
    // On virtual time a turn of the event loop is over when its promises are.
    const rules = { tiers: [{ name: "only" }] };
    const load = new ProcessLoad(1, clock, queueMicrotask);
    const admission = new Admission(() => rules, engine, clock, this.#events, load);
    const thresholds = { targetUtilization: 0.7, lastTierDepth: 1000, firstTierDepth: 2000 };
    const gate = new CapacityGate(
      { mode, model: MODEL, tiers: 1, ...timeouts, ...thresholds, looksForFree: true },
      {
        horizon: (now) => this.#dispatcher.horizon(now),
        hasRoom: (waiting, now) => this.#dispatcher.hasRoom(waiting, now),
        othersPerMs: () => 0,
      },
      engine,
    );
    const route = {
      name: MODEL,
      totalMs: timeouts.totalMs,
      cache: { ttlMs: 1000, scope: cache },
      collapse,
      open: true,
    };
    const path = new RequestPath({
      routes: [route],
      credentials: byHeader,
      admission,
      waiters,
      engine,
      put: gate.put.bind(gate),
      clock,
      durable: false,
    });
    const proxy = { forward: () => assert.fail("nothing is passed through here") };
    const model = {
      name: MODEL,
      protocols: [protocols[protocol]!],
      passthrough: false,
      maxBatchSize,
      pad,
      reachable: false,
      ready: () => true,
    };
    const parts = {
      path,
      proxy,
      limits: { maxInputs: 2048, maxBytes: Infinity },
      ready: () => true,
      version: "",
    };
    return new DropIns([model], parts);
  }

  #arriveLater(): void {
    if (this.#arrived === REQUESTS_A_SEED) return;
    // Crowds: several in one instant, then a pause as long as all of them.
    const crowd = Math.min(this.#dice.pick([1, 1, 1, 5, 20]), REQUESTS_A_SEED - this.#arrived);
    this.#clock.at(this.#clock.now() + this.#dice.exponential(crowd * this.#plan.meanGapMs), () => {
      for (let at = 0; at < crowd; at++) this.#arrive();
      this.#arriveLater();
    });
  }

  #arrive(): void {
    const dice = this.#dice;
    const request = speakers[this.#plan.protocol]!.make(dice, ++this.#arrived, MODEL);
    this.inputs += request.inputs;
    this.#open++;
    const tenant = dice.pick(TENANTS);
    const headers = { ...request.headers, authorization: tenant };
    const startedAt = this.#clock.now();
    const talk = new DropInTalk(request, headers, startedAt, (told) => {
      this.#open--;
      this.#judge(request, told, this.#clock.now() - startedAt);
    });
    void talk.serve(this.#routes, this.#dropIns);
    if (!dice.chance(this.#plan.leaves)) return;
    this.#clock.at(startedAt + dice.exponential(2 * this.#plan.baseMs), () => {
      if (!talk.leave()) return;
      this.#open--;
      this.count("left");
    });
  }

  #judge(request: SimRequest, { status, body, header, refusal }: Told, ms: number): void {
    assert.ok(ms <= this.#plan.timeouts.totalMs + GRACE_MS, `answered after ${ms} ms`);
    this.count(`answer ${status}`);
    if (status === 200) {
      assert.ok(!request.bad, "an input that every worker refuses was answered");
      request.check(body, header);
      return;
    }
    assert.ok(refusal !== undefined, `a status ${status} without a refusal`);
    if (this.#plan.faults > 0 || request.bad) return;
    const fair = ["RATE_LIMITED", "SERVICE_OVERLOADED", "DEADLINE_EXCEEDED"];
    assert.ok(fair.includes(refusal.code), `${refusal.code} without a fault: ${refusal.message}`);
  }
}

/** Who it is stands in the header. */
const byHeader = {
  required: false,
  identify: (authorization: string | undefined) => ({ tenant: authorization!, tier: 0 }),
} as unknown as Credentials;

/** Plays one seed; the protocols take turns. */
export async function playDropIn(seed: number): Promise<DropInRun> {
  const protocol = played[seed % played.length]!;
  const world = new DropInWorld(seed, protocol);
  let failure: Error | undefined;
  const failed = (error: unknown): void => void (failure ??= error as Error);
  process.on("unhandledRejection", failed);
  await world.run().catch(failed);
  process.off("unhandledRejection", failed);
  const { counts, inputs } = world;
  return { seed, protocol, requests: REQUESTS_A_SEED, inputs, counts, failure };
}
