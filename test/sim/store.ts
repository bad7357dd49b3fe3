/**
 * The store that the processes of a fleet share, and the wire to it.
 *
 * It stands for Redis: every call is one atomic act there, told what time it is by whoever calls (as the scripts
 * are); what a call brought about is in its reply, and on the bell for everybody else. The tasks themselves are in a
 * real `MemoryEngine`. The wire delays, loses, and brings too late; calls of one process keep their order.
 */
import { Refusal } from "../../src/core/errors.ts";
import type { Engine, EngineLimits, QueueView, RecordView } from "../../src/engine/engine.ts";
import { MemoryEngine } from "../../src/engine/memory.ts";
import type { VirtualClock } from "../../src/plan/virtual-clock.ts";
import { StoreAway } from "../../src/redis/nodes.ts";
import { Events } from "../../src/telemetry/events.ts";
import type { Host } from "./host.ts";
import type { Ledger } from "./ledger.ts";
import { ALIVE_MS, type Dice, MODEL, type NetFaults } from "./plan.ts";
import { MemoryRegistry } from "./registry.ts";

export const COMMAND_TIMEOUT_MS = 1000;

/** How deep the queues are, in the store's time. Numbered: an older one says nothing. */
export interface Report {
  readonly number: number;
  readonly queues: readonly QueueView[];
  readonly waiting: readonly number[];
  /** Tasks that this call brought, by parameters. */
  readonly came: ReadonlyMap<string, number>;
}

export interface Done<Value> {
  readonly value: Value;
  readonly report: Report;
  /** What ended by it, and who waits for that. */
  readonly ended: readonly { readonly record: RecordView; readonly waiters: readonly string[] }[];
}

/** A process at the other end of the wire. */
export interface Listener {
  readonly name: string;
  readonly host: Host;
  rung(report: Report): void;
  noted(payload: Buffer): void;
}

export class Store {
  readonly engine: MemoryEngine;
  readonly registry: MemoryRegistry;
  readonly events = new Events();
  readonly listeners = new Map<string, Listener>();
  /** Who waits for the end of which task. */
  readonly waiters = new Map<string, Set<string>>();
  readonly #time: VirtualClock;
  readonly #dice: Dice;
  readonly #ledger: Ledger;
  #net: NetFaults;
  #toldNow = 0;
  #number = 0;
  #ended: RecordView[] = [];
  #came = new Map<string, number>();
  /** How far somebody has set its clock. */
  stepMs = 0;
  awayUntil = -Infinity;

  constructor(limits: EngineLimits, time: VirtualClock, dice: Dice, net: NetFaults, ledger: Ledger) {
    this.#time = time;
    this.#dice = dice;
    this.#net = net;
    this.#ledger = ledger;
    const clock = {
      now: () => this.#toldNow,
      wall: () => this.#toldNow,
      at: () => ({ cancel: () => {} }),
    };
    this.engine = ledger.fencing(new MemoryEngine(limits, clock, this.events));
    this.registry = new MemoryRegistry(ALIVE_MS, () => this.now());
    this.engine.watch({
      settled: (record) => void this.#ended.push(record),
      queued: (_, parameters, __, count) =>
        void this.#came.set(parameters, (this.#came.get(parameters) ?? 0) + count),
    });
  }

  /** By its own clock. */
  now(): number {
    return this.#time.now() + this.stepMs;
  }

  get away(): boolean {
    return this.#time.now() < this.awayUntil;
  }

  /** From here on the wire is as good as new. */
  heal(): void {
    this.#net = { lost: 0, replyLost: 0, late: 0, noteLost: 0, noteTwice: 0, noteLate: 0 };
    this.awayUntil = -Infinity;
  }

  /** One atomic act for `who`, which says what time it is. */
  act<Value>(who: string, now: number, verb: (engine: Engine) => Promise<Value>): Promise<Done<Value>> {
    this.#toldNow = now;
    this.#ended = [];
    this.#came = new Map();
    const doing = verb(this.engine);
    // Memory has changed by now; only the reply takes its time.
    const report = this.report(this.#came);
    const ended = this.#ended.map((record) => {
      const { id } = record.task;
      const waiters = [...(this.waiters.get(id) ?? [])];
      this.waiters.delete(id);
      return { record, waiters };
    });
    for (const { record } of ended) this.#ledger.settled(record);
    this.#ledger.bounded(this.engine.stats());
    this.#ring(who, report);
    return doing.then((value) => ({ value, report, ended }));
  }

  report(came: ReadonlyMap<string, number> = new Map()): Report {
    return {
      number: ++this.#number,
      queues: Array.from(this.engine.queues(MODEL), (queue) => ({
        parameters: queue.parameters,
        tier: queue.tier,
        depth: queue.depth,
        oldestAt: queue.oldestAt,
        earliestDeadlineAt: queue.earliestDeadlineAt,
        fresh: queue.fresh,
        headMaxBatchSize: queue.headMaxBatchSize,
      })),
      waiting: [...this.engine.waiting(MODEL)],
      came,
    };
  }

  #ring(by: string, report: Report): void {
    for (const listener of this.listeners.values()) {
      if (listener.name !== by) this.#note("bell", listener, () => listener.rung(report));
    }
  }

  /** A note to one process, which it may never hear, or twice. */
  send(to: string, payload: Buffer): void {
    const listener = this.listeners.get(to);
    if (listener !== undefined) this.#note("note", listener, () => listener.noted(payload));
  }

  #note(what: "bell" | "note", { host }: Listener, take: () => void): void {
    const { noteLost, noteTwice, noteLate } = this.#net;
    const dice = this.#dice;
    if (this.away || dice.chance(noteLost)) return this.#ledger.count(`${what} lost`);
    let afterMs = this.latency();
    if (dice.chance(noteLate)) {
      afterMs += dice.share() * 300;
      this.#ledger.count(`${what} late`);
    }
    host.deliver(afterMs, take);
    if (!dice.chance(noteTwice)) return;
    host.deliver(afterMs + dice.share() * 100, take);
    this.#ledger.count(`${what} repeated`);
  }

  latency(): number {
    return 0.1 + this.#dice.exponential(0.4);
  }

  /** What becomes of one call on the wire. */
  fate(): "well" | "lost" | "reply lost" | "late" {
    const { lost, replyLost, late } = this.#net;
    const roll = this.#dice.share();
    if (roll < lost) return "lost";
    if (roll < lost + replyLost) return "reply lost";
    return roll < lost + replyLost + late ? "late" : "well";
  }
}

/** The connection of one process. */
export class Wire {
  readonly #host: Host;
  readonly #store: Store;
  readonly #time: VirtualClock;
  readonly #ledger: Ledger;
  #lastOutAt = 0;

  constructor(host: Host, store: Store, time: VirtualClock, ledger: Ledger) {
    this.#host = host;
    this.#store = store;
    this.#time = time;
    this.#ledger = ledger;
  }

  /** `resend`: twice does no harm, so a call without an answer is made again, once. */
  async call<Value>(name: string, act: () => Value | Promise<Value>, resend = false): Promise<Value> {
    try {
      return await this.#once(name, act);
    } catch (error) {
      if (!resend || error instanceof Refusal) throw error;
      this.#ledger.count("call made again");
      return this.#once(name, act);
    }
  }

  #once<Value>(name: string, act: () => Value | Promise<Value>): Promise<Value> {
    const store = this.#store;
    if (store.away) return Promise.reject(new StoreAway("the store is away", false));
    const { promise, resolve, reject } = Promise.withResolvers<Value>();
    const fate = store.fate();
    if (fate !== "well") {
      this.#ledger.count(`call ${fate}`);
      this.#ledger.say(this.#host.name, `${name}: ${fate}`);
    }
    const patience = this.#host.at(this.#host.now() + COMMAND_TIMEOUT_MS, () =>
      reject(new StoreAway("no answer in time", true)),
    );
    this.#host.called(name);
    if (fate === "lost") return promise;
    let outAt = this.#time.now() + store.latency();
    if (fate === "late") outAt += COMMAND_TIMEOUT_MS * 1.2;
    else this.#lastOutAt = outAt = Math.max(outAt, this.#lastOutAt);
    this.#time.at(outAt, () => {
      if (store.away) return;
      const doing = (async () => act())();
      if (fate !== "well") return void doing.catch(() => {});
      const back = (take: () => void): void =>
        this.#host.deliver(store.latency(), () => {
          patience.cancel();
          take();
        });
      doing.then(
        (value) => back(() => resolve(value)),
        (error: unknown) => back(() => reject(error)),
      );
    });
    return promise;
  }
}
