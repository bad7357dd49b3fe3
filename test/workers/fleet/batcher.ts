/** A whole batcher around a membership: memory engine, dispatcher, workers that count what runs on them. */
import type { Reply, Worker } from "../../../src/workers/backend/backend.ts";
import type { Clock } from "../../../src/app/clock.ts";
import type { ModelRules } from "../../../src/dispatch/model-rules.ts";
import { Dispatcher } from "../../../src/dispatch/dispatcher.ts";
import type { Engine } from "../../../src/engine/engine.ts";
import { MemoryEngine } from "../../../src/engine/memory/engine.ts";
import { Membership, type MembershipOptions } from "../../../src/workers/fleet/membership.ts";
import type { Beat, BeatReply, Member, Registry } from "../../../src/workers/fleet/registry.ts";
import { Events } from "../../../src/observe/events.ts";
import { MODEL } from "./stage.ts";

/** A worker that several batchers may list. */
export class Gpu {
  readonly address: string;
  serviceMs: number;
  /** Batches at this moment, the most there ever were, and all of them. */
  running = 0;
  most = 0;
  batches = 0;
  lastStartAt = -Infinity;

  constructor(address: string, serviceMs: number) {
    this.address = address;
    this.serviceMs = serviceMs;
  }

  asWorker(clock: Clock): Worker {
    return {
      name: new URL(this.address).host,
      address: this.address,
      run: async ({ tasks }): Promise<Reply> => {
        this.most = Math.max(this.most, ++this.running);
        this.batches++;
        this.lastStartAt = clock.now();
        await new Promise<void>((resolve) => clock.at(clock.now() + this.serviceMs, resolve));
        this.running--;
        return { kind: "answered", outputs: tasks.map(() => "1") };
      },
    };
  }
}

export function gpus(count: number, serviceMs: number): Gpu[] {
  return Array.from({ length: count }, (_, at) => new Gpu(`http://gpu-${at}/run`, serviceMs));
}

export class Batcher {
  readonly events = new Events();
  readonly engine: Engine;
  readonly dispatcher: Dispatcher;
  readonly membership: Membership;
  readonly #clock: Clock;
  #ids = 0;

  constructor(
    fleet: readonly Gpu[],
    registry: Registry,
    clock: Clock,
    changes: Partial<MembershipOptions> = {},
    wrap: (engine: Engine) => Engine = (engine) => engine,
  ) {
    this.#clock = clock;
    this.engine = wrap(memoryEngine(clock, this.events));
    const rules: ModelRules = {
      name: MODEL,
      limits: { policy: "adaptive", maxBatchSize: 1, maxWaitMs: 0 },
      workerMs: 10_000,
      retry: { max: 3, baseMs: 50, maxMs: 1000, budget: 0.1 },
      health: { failures: 3, ejectMs: 1000, maxEjectMs: 30_000 },
    };
    this.dispatcher = new Dispatcher(
      () => rules,
      fleet.map((gpu) => gpu.asWorker(clock)),
      {
        engine: this.engine,
        clock,
        events: this.events,
        random: () => 0.5,
        newBatchId: () => "batch",
        shared: true,
      },
    );
    this.membership = new Membership(
      {
        id: "me",
        zone: "a",
        role: "batcher",
        version: "1",
        beatMs: 500,
        aliveMs: 2000,
        models: () => [MODEL],
        dispatchers: () => [this.dispatcher],
        ...changes,
      },
      { registry, clock, events: this.events, random: () => 0 },
    );
  }

  put(count = 1): string[] {
    return Array.from({ length: count }, () => {
      const id = `task-${++this.#ids}`;
      const createdAt = this.#clock.now();
      const of = { tenant: "t", tier: 0, model: MODEL, input: "1", parameters: "", content: "" };
      void this.engine.put({ id, createdAt, deadlineAt: createdAt + 600_000, ...of });
      return id;
    });
  }

  /** Keeps so many tasks in the queue, for ever. */
  keepBusy(queued: number): void {
    this.events.on("batch.settled", () => this.put());
    this.put(queued);
  }

  async stop(): Promise<void> {
    await this.dispatcher.drain();
    await this.membership.stop();
    await this.engine.close();
  }
}

export function memoryEngine(clock: Clock, events: Events): MemoryEngine {
  return new MemoryEngine(
    () => ({
      models: new Map([[MODEL, { queueMs: 600_000, totalMs: 600_000 }]]),
      tiers: 1,
      maxQueued: 1_000_000,
      maxQueuedBytes: Infinity,
      results: { ttlMs: 1000, evictAfterRead: false, maxBytes: Infinity },
      deadLetters: { max: 10, ttlMs: Infinity },
    }),
    clock,
    events,
  );
}

/** A registry that answers as the test says, and remembers what it was told. */
export class ScriptedRegistry implements Registry {
  readonly beats: { readonly at: number; readonly beat: Beat }[] = [];
  readonly left: string[] = [];
  /** What the next beats are answered; a promise lets one wait. */
  answer: (beat: Beat) => Partial<BeatReply> | Promise<Partial<BeatReply>> = () => ({});
  readonly #clock: Clock;

  constructor(clock: Clock) {
    this.#clock = clock;
  }

  get last(): Beat {
    return this.beats.at(-1)!.beat;
  }

  async beat(beat: Beat): Promise<BeatReply> {
    this.beats.push({ at: this.#clock.now(), beat });
    return { held: [], giveBack: [], unheld: [], members: [], ...(await this.answer(beat)) };
  }

  leave(id: string): Promise<void> {
    this.left.push(id);
    return Promise.resolve();
  }
}

export function member(changes: Partial<Member> & { readonly id: string }): Member {
  return {
    zone: "b",
    role: "batcher",
    version: "1",
    models: [],
    workers: [],
    doors: [],
    ageMs: 0,
    ...changes,
  };
}
