/**
 * The only file that knows every part: it builds them, starts them in order, and stops them in reverse.
 */
import { randomUUID } from "node:crypto";
import { Admission } from "./admission/admit.ts";
import type { Backend } from "./backend/backend.ts";
import { makeBackend } from "./backends.ts";
import { type Clock, SystemClock } from "./clock.ts";
import type { Config, ModelConfig } from "./config.ts";
import { Dispatcher } from "./dispatch/dispatcher.ts";
import { Reaper } from "./dispatch/reaper.ts";
import type { Engine } from "./engine/engine.ts";
import { openJournal } from "./engine/journal.ts";
import { MemoryEngine } from "./engine/memory.ts";
import { RecordKeeper } from "./engine/saved.ts";
import { adminRoutes } from "./gateway/admin.ts";
import { healthRoutes } from "./gateway/health.ts";
import { Intake, type ModelDoor } from "./gateway/intake.ts";
import { NativeProtocol } from "./gateway/native.ts";
import { openapiRoutes } from "./gateway/openapi.ts";
import { Listener } from "./gateway/server.ts";
import { Report } from "./report.ts";
import { Router } from "./result/router.ts";
import { Events } from "./telemetry/events.ts";
import { logEvents } from "./telemetry/log.ts";
import { Tally } from "./telemetry/tally.ts";

export async function startFerry(config: Config, clock: Clock = new SystemClock()): Promise<Ferry> {
  const ferry = new Ferry(config, clock);
  try {
    await ferry.start();
    return ferry;
  } catch (error) {
    await ferry.stop();
    throw error;
  }
}

const LAST_WORDS_MS = 500;

export class Ferry {
  readonly events = new Events();
  readonly #config: Config;
  readonly #clock: Clock;
  readonly #tally: Tally;
  readonly #dispatchers: Dispatcher[] = [];
  /** How to undo what was started, in the order in which it was started. */
  readonly #undo: (() => Promise<void> | void)[] = [];
  #admission: Admission | undefined;
  #router: Router | undefined;
  #listener: Listener | undefined;
  #stopped: Promise<void> | undefined;
  apiUrl = "";
  adminUrl = "";

  constructor(config: Config, clock: Clock) {
    this.#config = config;
    this.#clock = clock;
    this.#tally = new Tally(this.events, clock);
    logEvents(this.events, clock, config.telemetry.logLevel, (line) => process.stderr.write(line));
  }

  async start(): Promise<void> {
    const { models } = this.#config;
    const backends = models.map((model) => makeBackend(model, this.#clock, this.events));
    for (const backend of backends) this.#undo.push(() => backend.stop());
    await Promise.all(backends.map((backend) => backend.start()));
    const engine = await this.#openEngine();
    this.#undo.push(() => engine.close());
    models.forEach((model, at) => this.#dispatch(model, backends[at]!, engine));
    const reaper = new Reaper(engine, this.#clock);
    this.#undo.push(() => reaper.stop());
    await this.#openDoors(engine);
  }

  /** No new request is taken; resolves when those that wait are answered and no batch runs. */
  async drain(): Promise<void> {
    if (this.#admission !== undefined) this.#admission.draining = true;
    await this.#listener?.drain();
    await Promise.all(this.#dispatchers.map((dispatcher) => dispatcher.drain()));
  }

  /** Stops at once; accepted tasks stay in the engine. Idempotent. */
  stop(): Promise<void> {
    this.#stopped ??= this.#stop();
    return this.#stopped;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop();
  }

  tally(): {
    requests: number;
    batches: number;
    tasks: number;
    calls: number;
    lost: number;
    queued: number;
    running: number;
  } {
    const { requests, batches, tasks, calls, lost } = this.#tally;
    const running = this.#dispatchers
      .flatMap(({ workers }) => workers.slots)
      .filter(({ batch }) => batch).length;
    return { requests, batches, tasks, calls, lost, queued: this.#listener?.open ?? 0, running };
  }

  async #stop(): Promise<void> {
    if (this.#admission !== undefined) this.#admission.draining = true;
    // Whoever still waits is told where to ask; that takes a moment to reach the socket.
    this.#router?.releaseAll();
    await this.#listener?.settle(LAST_WORDS_MS);
    for (const undo of this.#undo.toReversed()) await undo();
  }

  async #openEngine(): Promise<Engine> {
    const { engine, tiers, limits, results, deadLetters, models } = this.#config;
    const options = {
      models: new Map(models.map(({ name, timeouts }) => [name, timeouts])),
      tiers: tiers.length,
      maxQueued: limits.maxQueued,
      maxQueuedBytes: limits.maxQueuedBytes,
      results,
      deadLetters,
    };
    if (engine.dataDir === undefined) return new MemoryEngine(options, this.#clock, this.events);
    const { journal, records, torn } = await openJournal(engine.dataDir, (why) => {
      const message = `the journal is broken, nothing more is accepted: ${why.message}`;
      this.events.emit("notice", { level: "error", message });
    });
    if (torn > 0) {
      const message = `${torn} torn at the end of the journal in ${engine.dataDir}: the last commits before a crash or damage`;
      this.events.emit("notice", { level: "warn", message });
    }
    return new MemoryEngine(options, this.#clock, this.events, new RecordKeeper(journal, records));
  }

  #dispatch(model: ModelConfig, backend: Backend, engine: Engine): void {
    const { name, policy, maxBatchSize, maxWaitMs, timeouts, retry, health } = model;
    const rules = {
      name,
      limits: { policy, maxBatchSize, maxWaitMs },
      workerMs: timeouts.workerMs,
      retry,
      health,
    };
    const dispatcher = new Dispatcher(rules, backend.workers, {
      engine,
      clock: this.#clock,
      events: this.events,
      random: Math.random,
      newBatchId: () => randomUUID(),
    });
    this.#dispatchers.push(dispatcher);
    this.#undo.push(() => dispatcher.stop());
  }

  async #openDoors(engine: Engine): Promise<void> {
    const { api, auth, tiers, limits, admin, listen, models } = this.#config;
    const clock = this.#clock;
    const router = (this.#router = new Router(engine, clock));
    this.#undo.push(() => router.close());
    const rules = { tiers, anonymousTier: auth.anonymousTier, ...perUser(limits.perUserPerMinute) };
    const admission = (this.#admission = new Admission(rules, engine, clock, this.events));
    const doors = models.map((model, at) => this.#door(model, this.#dispatchers[at]!, engine));
    const intake = new Intake(doors, admission, router, engine, clock);
    const durable = this.#config.engine.dataDir !== undefined;
    const native = new NativeProtocol({ ...api, durable }, { intake, admission, router, engine, clock });
    const draining = (): boolean => admission.draining;
    const report = new Report(engine, this.#dispatchers, this.#tally, clock, draining);
    const adminListener = new Listener(
      adminRoutes(engine, report, tiers, admin.token),
      limits,
      clock,
      this.events,
    );
    this.#undo.push(() => adminListener.close());
    this.adminUrl = await adminListener.listen(admin.listen.host, admin.listen.port);
    const routes = { ...native.routes(), ...healthRoutes(draining), ...openapiRoutes() };
    const listener = (this.#listener = new Listener(routes, limits, clock, this.events));
    this.#undo.push(() => listener.close());
    this.apiUrl = await listener.listen(listen.host, listen.port);
  }

  #door(model: ModelConfig, { workers }: Dispatcher, engine: Engine): ModelDoor {
    const { name, timeouts, cache, collapse, maxBatchSize } = model;
    const depth = (): number =>
      engine
        .stats()
        .depth.get(name)
        ?.reduce((sum, tier) => sum + tier, 0) ?? 0;
    const capacity = {
      healthy: (now: number) => workers.healthy(now),
      nextUsableAt: (now: number) => workers.nextUsableAt(now),
      drainMs: (now: number) => depth() / workers.capacityPerMs(maxBatchSize, now),
    };
    return { name, totalMs: timeouts.totalMs, cache, collapse, capacity };
  }
}

function perUser(perUserPerMinute: number | undefined): { perUserPerMinute?: number } {
  return perUserPerMinute === undefined ? {} : { perUserPerMinute };
}
