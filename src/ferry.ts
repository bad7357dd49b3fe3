/**
 * The only file that knows every part: it builds them, starts them in order, and stops them in reverse.
 */
import { randomInt, randomUUID } from "node:crypto";
import { Admission } from "./admission/admit.ts";
import { Gate, type Prospects } from "./admission/gate.ts";
import type { Backend } from "./backend/backend.ts";
import { SimulatedBackend } from "./backend/simulated.ts";
import { Vault } from "./backend/vault.ts";
import { makeBackend } from "./backends.ts";
import type { Tally as Done } from "./banner.ts";
import { Certificates } from "./certificates.ts";
import { type Clock, SystemClock } from "./clock.ts";
import type { Config, ModelConfig, Role } from "./config.ts";
import { screenFor } from "./core/screen.ts";
import { openCredentials } from "./credentials.ts";
import { Demo } from "./demo.ts";
import { forwards, knownWorkers, openDropIns, speaksTensors } from "./dropins.ts";
import { Dispatcher } from "./dispatch/dispatcher.ts";
import { Reaper } from "./dispatch/reaper.ts";
import type { Engine } from "./engine/engine.ts";
import { type Opened, openEngine, type Shared } from "./engines.ts";
import { type FleetModel, Membership } from "./fleet/membership.ts";
import { FleetOutlook } from "./fleet/outlook.ts";
import { FleetRank } from "./fleet/rank.ts";
import { adminRoutes } from "./gateway/admin.ts";
import { Crossing } from "./gateway/crossing.ts";
import { GrpcDoor } from "./gateway/grpc.ts";
import { healthRoutes } from "./gateway/health.ts";
import { Intake, type ModelDoor } from "./gateway/intake.ts";
import { NativeProtocol } from "./gateway/native.ts";
import { openapiRoutes } from "./gateway/openapi.ts";
import { Listener } from "./gateway/server.ts";
import type { EdgeTls } from "./gateway/tls.ts";
import { tuneHeap } from "./heap.ts";
import { openObservers } from "./observers.ts";
import { Report } from "./report.ts";
import type { ScalingLoop } from "./scaling.ts";
import { openScaling } from "./scalings.ts";
import { Router } from "./result/router.ts";
import { Events } from "./telemetry/events.ts";
import { logEvents } from "./telemetry/log.ts";
import { Tally } from "./telemetry/tally.ts";
import { type Tracing, tracingOf } from "./telemetry/tracing.ts";
import { version } from "./version.ts";
import { alone, ofFleet, perUser, samplerFor } from "./wiring.ts";

export async function startFerry(
  config: Config,
  clock: Clock = new SystemClock(),
  role: Role = "all",
  log = (line: string): void => void process.stderr.write(line),
): Promise<Ferry> {
  const ferry = new Ferry(config, clock, role, log);
  try {
    await ferry.start();
    tuneHeap();
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
  readonly #role: Role;
  readonly #tally: Tally;
  /** Left out: nobody is traced. */
  readonly #tracing: Tracing | undefined;
  #backends: readonly Backend[] = [];
  readonly #dispatchers: Dispatcher[] = [];
  /** By model. */
  readonly #prospects = new Map<string, Prospects>();
  /** Clients' own credentials, by model. */
  readonly #vaults: ReadonlyMap<string, Vault>;
  /** How to undo what was started, in the order in which it was started. */
  readonly #undo: (() => Promise<void> | void)[] = [];
  #admission: Admission | undefined;
  #router: Router | undefined;
  #listener: Listener | undefined;
  #grpc: GrpcDoor | undefined;
  #tls: EdgeTls | undefined;
  #membership: Membership | undefined;
  #scaling: ScalingLoop | undefined;
  #draining = false;
  #stopped: Promise<void> | undefined;
  /** What people may do to the simulated workers of this process; undefined where there are none. */
  demo: Demo | undefined;
  /** Where an accepted task is kept: by one server of the shared store, or by two. */
  durability: "replica" | "local" | undefined;
  /** "" in a batcher. */
  apiUrl = "";
  /** "" where clients cannot speak gRPC. */
  grpcUrl = "";
  adminUrl = "";

  constructor(config: Config, clock: Clock, role: Role, log: (line: string) => void) {
    this.#config = config;
    this.#clock = clock;
    this.#role = role;
    const { models, telemetry } = config;
    this.#tally = new Tally(
      this.events,
      clock,
      models.map(({ name }) => name),
    );
    this.#vaults = new Map(models.filter(forwards).map((model) => [model.name, this.#vault(model)]));
    this.#tracing = tracingOf(telemetry, process.env);
    logEvents(this.events, clock, telemetry.logLevel, log);
  }

  async start(): Promise<void> {
    const { models } = this.#config;
    const runs = this.#role !== "gateway";
    await this.#openTls();
    const backends = (this.#backends = runs ? models.map((model) => this.#backend(model)) : []);
    // A store that cannot be used is told before models are loaded, which may take minutes.
    const early = this.#config.engine.kind === "redis" ? await this.#openEngine() : undefined;
    for (const backend of backends) this.#undo.push(() => backend.stop());
    await Promise.all(backends.map((backend) => backend.start()));
    const opened = early ?? (await this.#openEngine());
    const { engine, shared } = opened;
    // Walked back, this comes after the dispatchers have stopped: what they held is free then.
    this.#undo.push(() => this.#membership?.stop());
    backends.forEach((backend, at) => this.#dispatch(models[at]!, backend, engine, shared?.id));
    if (shared !== undefined) await this.#join(shared);
    models.forEach(({ name }, at) => this.#prospects.set(name, this.#outlook(name, this.#dispatchers[at])));
    const reaper = new Reaper(engine, this.#clock);
    this.#undo.push(() => reaper.stop());
    await this.#openAdmin(opened);
    if (this.#role !== "batcher") await this.#openDoors(opened);
  }

  #backend(model: ModelConfig): Backend {
    return makeBackend(model, this.#clock, this.events, this.#vaults.get(model.name));
  }

  /** For as long as a task of that model lives, and for as many as can wait. */
  #vault({ timeouts }: ModelConfig): Vault {
    const ttlMs = timeouts.totalMs + timeouts.workerMs;
    return new Vault({ ttlMs, max: this.#config.limits.maxQueued }, this.#clock);
  }

  /** Early, for the same reason: a certificate that cannot be used is told before models are loaded. */
  async #openTls(): Promise<void> {
    const { tls, admin } = this.#config;
    if (tls === undefined || (this.#role === "batcher" && !admin.tls)) return;
    const certificates = new Certificates("tls", tls, tls.reloadMs, this.#clock, this.events);
    this.#undo.push(() => certificates.stop());
    await certificates.start();
    this.#tls = { ...tls, certificates };
  }

  async #openEngine(): Promise<Opened> {
    const opened = await openEngine(this.#config, this.#clock, this.events);
    this.#undo.push(() => opened.close());
    if (opened.shared !== undefined) this.durability = opened.shared.durability();
    return opened;
  }

  /** Takes this process's place in the fleet: from here on it holds its share of the workers. */
  async #join({ engine, registry, id }: Shared): Promise<void> {
    const { engine: settings, zone, models } = this.#config;
    if (settings.kind !== "redis") throw new Error("a fleet needs a shared engine; this is a bug");
    const { beatMs, aliveMs } = settings;
    const fleetModels = models.map(({ name }, at): FleetModel => {
      const dispatcher = this.#dispatchers[at];
      return { name, ...(dispatcher && { dispatcher }) };
    });
    const membership = new Membership(
      { id, zone, role: this.#role, version: version(), beatMs, aliveMs, models: fleetModels },
      { registry, clock: this.#clock, events: this.events, random: Math.random },
    );
    this.#membership = membership;
    engine.rank = new FleetRank(membership.fleet);
    await membership.start();
  }

  /** No new request is taken; resolves when those that wait are answered and no batch runs. */
  async drain(): Promise<void> {
    const { lingerMs, drainMs } = this.#config.limits;
    this.#draining = true;
    if (lingerMs > 0) await this.#listener?.linger(Math.min(lingerMs, drainMs / 2));
    this.#drainNow();
    await Promise.all([this.#listener?.drain(), this.#grpc?.drain()]);
    this.#membership?.drain();
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

  tally(): Done {
    const { requests, batches, tasks, calls, lost } = this.#tally;
    const running = this.#dispatchers
      .flatMap(({ workers }) => workers.slots)
      .filter(({ batch }) => batch).length;
    return { requests, batches, tasks, calls, lost, queued: this.#waiting, running };
  }

  /** Requests of clients that are not answered yet. */
  get #waiting(): number {
    return (this.#listener?.open ?? 0) + (this.#grpc?.open ?? 0);
  }

  #drainNow(): void {
    this.#draining = true;
    if (this.#admission !== undefined) this.#admission.draining = true;
  }

  async #stop(): Promise<void> {
    this.#drainNow();
    // Whoever still waits is told where to ask; that takes a moment to reach the socket.
    this.#router?.releaseAll();
    await Promise.all([this.#listener?.settle(LAST_WORDS_MS), this.#grpc?.settle(LAST_WORDS_MS)]);
    for (const undo of this.#undo.toReversed()) await undo();
  }

  #dispatch(model: ModelConfig, backend: Backend, engine: Engine, member: string | undefined): void {
    const { name, policy, maxBatchSize, maxWaitMs, timeouts, retry, health } = model;
    const rules = {
      name,
      limits: { policy, maxBatchSize, maxWaitMs },
      maxBatchTokens: model.maxBatchTokens,
      maxBatchBytes: model.maxBatchBytes,
      workerMs: timeouts.workerMs,
      retry,
      health,
      maxWorkerLoad: this.#config.admission.maxWorkerLoad,
    };
    const dispatcher = new Dispatcher(rules, backend.workers, {
      engine,
      clock: this.#clock,
      events: this.events,
      random: Math.random,
      newBatchId: () => randomUUID(),
      // Our own children are nobody else's, and every process calls its own alike: gpu-1, gpu-2.
      ...(member !== undefined && ofFleet(model, member)),
    });
    this.#dispatchers.push(dispatcher);
    if (backend instanceof SimulatedBackend)
      (this.demo ??= new Demo()).add(name, backend, dispatcher.workers.slots);
    this.#undo.push(() => dispatcher.stop());
  }

  async #openAdmin({ engine, shared, durable }: Opened): Promise<void> {
    const { tiers, limits, admin } = this.#config;
    const clock = this.#clock;
    const known = { config: this.#config, role: this.#role, engine, tally: this.#tally, clock };
    const report = new Report({
      ...known,
      dispatchers: this.#dispatchers,
      fleet: this.#membership?.fleet,
      draining: () => this.#draining,
      prospects: (model) => this.#prospects.get(model)!,
      durability: () => shared?.durability() ?? (durable ? "disk" : "none"),
      reachable: () => shared?.reachable() ?? true,
      scaling: () => this.#scaling,
    });
    this.#openScaling(report);
    const observers = await openObservers({
      ...known,
      events: this.events,
      sight: report,
      tracing: this.#tracing,
      random: Math.random,
      apiUrl: () => this.apiUrl,
    });
    // Walked back, this comes last: they hear of everything that ends.
    this.#undo.unshift(() => observers.close());
    const listener = new Listener(
      adminRoutes(engine, report, tiers, admin.token, observers),
      limits,
      clock,
      this.events,
      { tls: admin.tls ? this.#tls : undefined, uncounted: true },
    );
    this.#undo.push(() => listener.close());
    this.adminUrl = await listener.listen(admin.listen.host, admin.listen.port);
  }

  #openScaling(report: Report): void {
    const { fleet } = this.#membership ?? {};
    const { loop, close } = openScaling(this.#config, {
      clock: this.#clock,
      events: this.events,
      dispatchers: this.#dispatchers,
      backends: this.#backends,
      see: (model, now) => report.sighting(model, now),
      leads: () => fleet === undefined || fleet.leads(),
    });
    this.#scaling = loop;
    this.#undo.push(close);
  }

  async #openDoors({ engine, durable, shared }: Opened): Promise<void> {
    const { api, tiers, limits, listen, models } = this.#config;
    const clock = this.#clock;
    const opened = await openCredentials(this.#config, shared, clock, this.events);
    this.#undo.push(() => opened.close());
    const { credentials } = opened;
    const router = (this.#router = new Router(engine, clock, randomInt(2 ** 32)));
    this.#undo.push(() => router.close());
    const rules = { tiers, ...perUser(limits.perUserPerMinute) };
    const admission = (this.#admission = new Admission(rules, engine, clock, this.events));
    const doors = models.map((model) => this.#door(model, engine));
    if (this.#membership !== undefined) {
      this.#membership.doors = (now) =>
        doors.map(({ name, gate }) => ({ name, admittedPerMs: gate.admittedPerMs(now) }));
    }
    const intake = new Intake(doors, admission, router, engine, clock);
    const parts = { credentials, intake, admission, router, engine, clock };
    const native = new NativeProtocol({ ...api, durable }, parts);
    const crossing = new Crossing(parts);
    const { dropIns, close } = await openDropIns(this.#config, {
      crossing,
      admission,
      clock,
      // Those who run batches tell what there is to tell about certificates.
      events: this.#role === "gateway" ? this.events : new Events(),
      workers: (at) => this.#dispatchers[at] && knownWorkers(this.#dispatchers[at], clock.now()),
      healthy: (model) => this.#healthy(model),
      draining: () => this.#draining,
    });
    this.#undo.push(close);
    const described = { ...healthRoutes(() => this.#draining), ...openapiRoutes(credentials.required) };
    const routes = { ...dropIns.routes(), ...native.routes(), ...described };
    const listener = (this.#listener = new Listener(routes, limits, clock, this.events, {
      elsewhere: (path) => dropIns.find(path),
      tls: this.#tls,
      sampler: this.#tracing && samplerFor(this.#tracing, Math.random),
    }));
    this.#undo.push(() => listener.close());
    this.apiUrl = await listener.listen(listen.host, listen.port);
    await this.#openGrpc(crossing);
  }

  async #openGrpc(crossing: Crossing): Promise<void> {
    const { grpc, limits, models } = this.#config;
    if (grpc.listen === undefined) return;
    const tensors = models.filter(speaksTensors);
    const door = (this.#grpc = new GrpcDoor(
      { ...limits, ...grpc },
      {
        crossing,
        models: tensors.map(({ name, maxBatchSize }) => ({
          name,
          alone: maxBatchSize === 1,
          ready: () => this.#healthy(name),
        })),
        ready: () => !this.#draining,
        version: version(),
        clock: this.#clock,
        events: this.events,
        tls: this.#tls,
        sampler: this.#tracing && samplerFor(this.#tracing, Math.random),
      },
    ));
    this.#undo.push(() => door.close());
    this.grpcUrl = await door.listen(grpc.listen.host, grpc.listen.port);
  }

  /** At least one worker of this model can be given batches. */
  #healthy(model: string): boolean {
    return this.#prospects.get(model)!.horizon(this.#clock.now()).healthy > 0;
  }

  #door(model: ModelConfig, engine: Engine): ModelDoor {
    const { name, timeouts, cache, collapse } = model;
    const { admission, tiers } = this.#config;
    const rules = { ...admission, ...timeouts, model: name, tiers: tiers.length };
    const gate = new Gate(rules, this.#prospects.get(name)!, engine);
    const looksForFree = this.#membership === undefined;
    const screen = screenFor(model.deny);
    const vault = this.#vaults.get(name);
    return { name, totalMs: timeouts.totalMs, cache, collapse, gate, looksForFree, screen, vault };
  }

  /** How a model's workers are: those of this process, or of the whole fleet. */
  #outlook(model: string, dispatcher: Dispatcher | undefined): Prospects {
    const { fleet } = this.#membership ?? {};
    return fleet === undefined ? alone(dispatcher!) : new FleetOutlook(fleet, model);
  }
}
