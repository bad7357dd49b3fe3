/** Wires all parts: starts them in order, stops them in reverse; `change` prepares what can fail, then commits. */
import { randomBytes, randomUUID } from "node:crypto";
import type { Prospects } from "../gateway/admission/capacity-gate.ts";
import { SimulatedBackend } from "../workers/backend/simulated.ts";
import { makeBackend } from "./backends.ts";
import type { ServeTotals as Done } from "../cli/terminal/banner.ts";
import { CERTIFICATE_RELOAD_MS, Certificates } from "../gateway/certificates.ts";
import { type EdgeTls, MAX_HEADERS, MAX_STREAMS } from "../gateway/http2.ts";
import { type Clock, SystemClock } from "./clock.ts";
import type { Config, MemoryEngineConfig, ModelConfig, Role } from "./config/config.ts";
import { Demo } from "../cli/demo/demo.ts";
import { Dispatcher } from "../dispatch/dispatcher.ts";
import type { ModelRules } from "../dispatch/model-rules.ts";
import type { EngineLimits } from "../engine/engine.ts";
import { Reaper } from "../dispatch/reaper.ts";
import { limitsOf, type Opened, type OpenedStore, openEngine, type Shared } from "./engines.ts";
import { beatMsFor, Membership } from "../workers/fleet/membership.ts";
import { FleetOutlook } from "../workers/fleet/outlook.ts";
import { FleetDemand } from "../workers/fleet/demand.ts";
import { forwards, isReachable, knownWorkers } from "./dropins.ts";
import { Gates } from "./gates.ts";
import { PublicApi } from "./public-api.ts";
import { formatAddress } from "./port-holder.ts";
import { CoreLink, type CoreStatus, Gateways, type Part, processName } from "./processes/core-link.ts";
import { FullNotice } from "./processes/full-notice.ts";
import { adminRoutes } from "../gateway/admin.ts";
import { Listener } from "../gateway/server.ts";
import { HeapRest, tuneHeap } from "./heap.ts";
import { openObservers } from "./observers.ts";
import { type Change, prepareChange, type Reloaded, reloadRoutes } from "./reload.ts";
import { Report } from "./report.ts";
import { Orders } from "../workers/fleet/orders.ts";
import { Operator } from "../workers/operator.ts";
import { type Prepared, WorkerPool } from "../workers/pool.ts";
import { ScalingLoop } from "../workers/scaling.ts";
import { Events } from "../observe/events.ts";
import { type LogLevel, logEvents } from "../observe/log.ts";
import { ProcessSamples } from "../observe/processes.ts";
import { Tally } from "../observe/tally.ts";
import { type Tracing, tracingOf } from "../observe/tracing.ts";
import type { KnownWorker } from "../workers/backend/passthrough.ts";
import { Vault, type VaultRules } from "../workers/backend/vault.ts";
import { version } from "./version.ts";
import { liveConfig, ofFleet, rulesOf, vaultRules } from "./rules.ts";

export async function startFerry(
  config: Config,
  clock: Clock = new SystemClock(),
  role: Role = "all",
  log = (line: string): void => void process.stderr.write(line),
  part?: Part,
): Promise<Ferry> {
  const ferry = new Ferry(config, clock, role, log, part);
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
/** What a gateway process counts is counted in the core. */
const NOTHING_DONE: Done = { requests: 0, batches: 0, tasks: 0, calls: 0, lost: 0, queued: 0, running: 0 };

export class Ferry {
  readonly events = new Events();
  #config: Config;
  #limits: EngineLimits;
  /** The config in force, for readers at run time. */
  readonly #live: Config;
  readonly #clock: Clock;
  readonly #role: Role;
  /** Undefined: this process is all of it. */
  readonly #part: Part | undefined;
  readonly #processes: ProcessSamples;
  readonly #log: (line: string) => void;
  #endLog: () => void;
  readonly #tally: Tally;
  readonly #tracing: Tracing | undefined;
  readonly #pool: WorkerPool;
  readonly #orders = new Orders();
  readonly #prospects = new Map<string, Prospects>();
  readonly #vaults = new Map<string, Vault>();
  readonly #vaultKey: Buffer;
  /** Cleanups in start order; run in reverse. */
  readonly #undo: (() => Promise<void> | void)[] = [];
  #opened: Opened | undefined;
  #gates: Gates | undefined;
  /** In a gateway process. */
  #core: CoreLink | undefined;
  /** In the core process. */
  #gateways: Gateways | undefined;
  #publicApi: PublicApi | undefined;
  #tls: EdgeTls | undefined;
  #membership: Membership | undefined;
  #scaling: ScalingLoop | undefined;
  #draining = false;
  #change: Change | undefined;
  #stopped: Promise<void> | undefined;
  demo: Demo | undefined;
  /** Whether an accepted task is on one server of the shared store, or on two. */
  durability: "replica" | "local" | undefined;
  adminUrl = "";
  /** Rereads the config on an operator's request; undefined without a file. */
  onReload: (() => Promise<Reloaded>) | undefined;

  constructor(config: Config, clock: Clock, role: Role, log: (line: string) => void, part?: Part) {
    this.#part = part;
    this.#vaultKey = part === undefined ? randomBytes(32) : Buffer.from(part.vaultKey, "base64");
    this.#config = this.#ours(config);
    this.#limits = limitsOf(config);
    this.#live = liveConfig(() => this.#config);
    this.#clock = clock;
    this.#processes = new ProcessSamples(clock);
    this.#role = part?.kind === "gateway" ? "gateway" : role;
    this.#log = log;
    const { telemetry } = config;
    this.#tally = new Tally(this.events, clock, () => this.#config.models.map(({ name }) => name));
    this.#tracing = tracingOf(telemetry, process.env);
    this.#endLog = logEvents(this.events, clock, this.#logLevel(config), log);
    this.#pool = new WorkerPool({
      clock,
      events: this.events,
      orders: this.#orders,
      makeBackend: (model, numbers) => makeBackend(model, clock, this.events, this.#vault(model), numbers),
      makeDispatcher: (rules, model) => this.#dispatcher(rules, model),
      rulesOf,
      onBackend: (model, backend, { workers }) => {
        if (!(backend instanceof SimulatedBackend)) this.demo?.forget(model);
        else (this.demo ??= new Demo()).add(model, backend, workers.slots);
      },
      onGone: (model) => this.#gone(model),
      onWorkers: () => this.#membership?.changed(),
    });
  }

  /** Resolves when it can store no more tasks and must be restarted. */
  get lost(): Promise<void> | undefined {
    return this.#opened?.lost;
  }

  get apiUrl(): string {
    if (this.#part?.kind !== "core") return this.#publicApi?.apiUrl ?? "";
    const { listen, tls } = this.#config;
    return `${tls === undefined ? "http" : "https"}://${formatAddress(listen)}`;
  }

  get grpcUrl(): string {
    return this.#publicApi?.grpcUrl ?? "";
  }

  async start(): Promise<void> {
    const config = this.#config;
    const runs = this.#role !== "gateway";
    const place = { role: this.#role, part: this.#part, redis: config.engine.kind === "redis" };
    const full = new FullNotice(place, this.#clock, this.events);
    this.#undo.push(() => full.stop());
    await this.#openTls();
    if (this.#part?.kind === "gateway") {
      await this.#reachCore(this.#part);
      if (config.engine.kind === "memory") return this.#openPublicApi(this.#coreAsStore(config.engine));
    }
    // Fail on an unusable store before loading models, which may take minutes.
    const early = config.engine.kind === "redis" ? await this.#openEngine() : undefined;
    this.#undo.push(() => this.#pool.stopBackends());
    if (runs) await this.#pool.open(config);
    const opened = (this.#opened = early ?? (await this.#openEngine()));
    const { engine, shared } = opened;
    // In reverse order this runs after the dispatchers have stopped and released their workers.
    this.#undo.push(() => this.#membership?.stop());
    this.#undo.push(() => this.#pool.stopDispatchers());
    if (runs) this.#pool.begin(config, engine, shared !== undefined);
    if (shared !== undefined) await this.#join(shared);
    this.#look();
    const reaper = new Reaper(engine, this.#clock);
    this.#undo.push(() => reaper.stop());
    const rest = new HeapRest(this.#clock, () => this.#tally.requests + this.#tally.tasks);
    this.#undo.push(() => rest.stop());
    await this.#pool.follow();
    if (this.#part?.kind !== "gateway") await this.#openAdmin(opened);
    if (this.#role === "batcher") return;
    this.#openGates(opened);
    if (this.#part?.kind === "core") await this.#openCore(this.#part, opened);
    else await this.#openPublicApi(opened);
  }

  /** All of a config, or rejects with one line. Settings that need a restart (`app/config/diff.ts`) are ignored. */
  async change(next: Config): Promise<void> {
    const prepared = await this.prepare(next);
    await prepared.commit();
  }

  /** One at a time: the next after a commit or abandon. */
  async prepare(written: Config): Promise<Change> {
    const next = this.#ours(written);
    const steps = [
      ...(this.#tls === undefined ? [] : [() => this.#tls!.certificates.prepare()]),
      ...(this.#role === "gateway" ? [] : [() => this.#pool.prepare(next)]),
      ...(this.#publicApi === undefined ? [] : [() => this.#publicApi!.prepare(next)]),
    ];
    const commit = (prepared: readonly Prepared[]): void => this.#commit(next, prepared);
    return (this.#change = await prepareChange(steps, () => this.#draining, commit));
  }

  /** Must neither wait nor fail. */
  #commit(next: Config, prepared: readonly Prepared[]): void {
    const last = this.#config;
    this.#config = next;
    const gone = last.models.filter(({ name }) => !next.models.some((model) => model.name === name));
    const leaving = [...this.#pool.leaving.map(({ model }) => model), ...gone];
    this.#limits = limitsOf(next, this.#role === "gateway" ? [] : leaving);
    for (const each of prepared) each.commit();
    this.#look();
    this.#gates?.follow(next);
    this.#scaling?.wake();
    if (next.telemetry.logLevel !== last.telemetry.logLevel) {
      this.#endLog();
      this.#endLog = logEvents(this.events, this.#clock, this.#logLevel(next), this.#log);
    }
    this.events.emit("reloaded", {});
  }

  #gone(model: string): void {
    if (this.#config.models.some(({ name }) => name === model)) return;
    this.#vaults.delete(model);
    this.#limits = limitsOf(
      this.#config,
      this.#pool.leaving.map((crew) => crew.model),
    );
    this.#look();
  }

  /** Updates membership and prospects after models were added or removed. */
  #look(): void {
    const { models } = this.#config;
    this.#membership?.changed();
    for (const name of this.#prospects.keys()) {
      if (!models.some((model) => model.name === name)) this.#prospects.delete(name);
    }
    const { fleet } = this.#membership ?? {};
    for (const { name } of models) {
      if (this.#prospects.has(name)) continue;
      this.#prospects.set(
        name,
        fleet === undefined ? this.#pool.dispatcher(name)! : new FleetOutlook(fleet, name),
      );
    }
  }

  /** Fail on an unusable certificate before loading models. */
  async #openTls(): Promise<void> {
    const { tls, admin } = this.#config;
    const serves = this.#role !== "batcher" && this.#part?.kind !== "core";
    if (tls === undefined || (!serves && !admin.tls)) return;
    const certificates = new Certificates("tls", tls, CERTIFICATE_RELOAD_MS, this.#clock, this.events);
    this.#undo.push(() => certificates.stop());
    await certificates.start();
    this.#tls = { ...tls, certificates, http2: true, maxStreams: MAX_STREAMS };
  }

  async #openEngine(): Promise<Opened> {
    const opened = await openEngine(this.#config, () => this.#limits, this.#clock, this.events);
    this.#opened = opened;
    this.#undo.push(() => opened.close());
    if (opened.shared !== undefined) this.durability = opened.shared.durability();
    return opened;
  }

  /** Joins the fleet: from here on it holds its share of the workers. */
  async #join({ engine, registry, id }: Shared): Promise<void> {
    const { engine: settings, zone } = this.#config;
    if (settings.kind !== "redis") throw new Error("a fleet needs a shared engine; this is a bug");
    const { aliveMs } = settings;
    const beatMs = beatMsFor(aliveMs);
    const membership = (this.#membership = new Membership(
      {
        id,
        zone,
        role: this.#role,
        version: version(),
        beatMs,
        aliveMs,
        models: () => this.#config.models.map(({ name }) => name),
        dispatchers: () => this.#pool.running,
      },
      { registry, clock: this.#clock, events: this.events, random: Math.random, orders: this.#orders },
    ));
    this.#look();
    await membership.start();
    if (this.#role !== "gateway") await engine.serve(new FleetDemand(membership.fleet, this.#clock));
  }

  /** Accepts the backlog; call it before `drain`. */
  takeWaiting = async (): Promise<void> => this.#publicApi?.takeWaiting();

  /** Refuses new requests; resolves when waiting ones are answered and no batch runs. */
  async drain(): Promise<void> {
    const { lingerMs, drainMs } = this.#config.limits;
    this.#draining = true;
    this.#core?.leaving();
    if (lingerMs > 0) await this.#publicApi?.linger(Math.min(lingerMs, drainMs / 2));
    this.#publicApi?.refuse();
    await this.#publicApi?.drain();
    await this.#gateways?.left();
    this.#membership?.drain();
    await Promise.all([this.#pool.drain(), this.#opened?.shared?.engine.drain()]);
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
    const queued = this.#publicApi?.waiting ?? 0;
    if (this.#part?.kind === "gateway") return { ...NOTHING_DONE, queued };
    const { requests, batches, tasks, calls, lost } = this.#tally;
    const slots = this.#pool.dispatchers.flatMap(({ workers }) => workers.slots);
    const running = slots.filter(({ batch }) => batch).length;
    return { requests, batches, tasks, calls, lost, queued, running };
  }

  async #stop(): Promise<void> {
    this.#draining = true;
    this.#publicApi?.refuse();
    await this.#publicApi?.settle(LAST_WORDS_MS);
    await this.#change?.abandon();
    for (const undo of this.#undo.toReversed()) await undo();
    await this.#clock.rest?.();
  }

  #dispatcher(rules: () => ModelRules, model: ModelConfig): Dispatcher {
    const { engine, shared } = this.#opened!;
    return new Dispatcher(rules, [], {
      engine,
      clock: this.#clock,
      events: this.events,
      random: Math.random,
      newBatchId: () => randomUUID(),
      // Children belong to one process, and every process numbers its own alike: gpu-1, gpu-2.
      ...(shared !== undefined && ofFleet(model, shared.id)),
    });
  }

  #vault(model: ModelConfig): Vault | undefined {
    if (!forwards(model)) return undefined;
    const { name } = model;
    const rules = (): VaultRules => vaultRules(this.#config, name);
    const vault = this.#vaults.get(name) ?? new Vault(rules, this.#clock, this.#vaultKey);
    this.#vaults.set(name, vault);
    return vault;
  }

  async #openAdmin({ engine, shared, durable, writable }: Opened): Promise<void> {
    const { tiers, limits, admin } = this.#config;
    const clock = this.#clock;
    const known = { config: this.#live, role: this.#role, engine, tally: this.#tally, clock };
    const report = new Report({
      ...known,
      desk: this.#operator(),
      dispatchers: this.#pool.dispatchers,
      fleet: this.#membership?.fleet,
      draining: () => this.#draining,
      prospects: (model) => this.#prospects.get(model)!,
      durability: () => shared?.durability() ?? (durable ? "disk" : "none"),
      reachable: () => shared?.reachable() ?? true,
      writable,
      scaling: () => this.#scaling,
    });
    this.#openScaling(report);
    const observers = await openObservers({
      ...known,
      events: this.events,
      sight: report,
      process: processName(this.#part),
      processes: this.#processes,
      tracing: this.#tracing,
      random: Math.random,
      apiUrl: () => this.apiUrl,
    });
    // Closed last, so that observers see everything that ends.
    this.#undo.unshift(() => observers.close());
    const guarded = { ...observers.guarded, ...reloadRoutes(() => this.onReload) };
    const listener = new Listener(
      adminRoutes(engine, report, tiers, admin.token, { ...observers, guarded }),
      { ...limits, maxHeaders: MAX_HEADERS },
      clock,
      this.events,
      { tls: admin.tls ? this.#tls : undefined, uncounted: true },
    );
    this.#undo.push(() => listener.close());
    this.adminUrl = await listener.listen(admin.listen.host, admin.listen.port);
  }

  #operator(): Operator {
    const [clock, events, pool, orders] = [this.#clock, this.events, this.#pool, this.#orders];
    const models = (): readonly ModelConfig[] => this.#config.models;
    return new Operator({ clock, events, models, pool, orders, membership: this.#membership });
  }

  #openScaling(report: Report): void {
    const { fleet } = this.#membership ?? {};
    const scaling = new ScalingLoop({
      clock: this.#clock,
      events: this.events,
      config: () => this.#config,
      pool: this.#pool,
      see: (model, now) => report.sighting(model, now),
      leads: () => fleet === undefined || fleet.leads(),
    });
    this.#scaling = scaling;
    this.#undo.push(() => scaling.stop());
  }

  #openGates({ engine, shared }: Opened): void {
    const prospects = (model: string) => this.#prospects.get(model);
    const gates = new Gates(this.#config, { engine, prospects, looksForFree: shared === undefined });
    this.#gates = gates;
    if (this.#membership !== undefined) this.#membership.doors = (now) => gates.admitted(now);
  }

  /** The core logs the requests of its gateways. */
  #logLevel({ telemetry: { logLevel } }: Config): LogLevel {
    return this.#part?.kind === "gateway" && logLevel === "debug" ? "info" : logLevel;
  }

  /** Of the bounds that hold for all gateways together, a gateway has its share. */
  #ours(config: Config): Config {
    if (this.#part?.kind !== "gateway") return config;
    const { gateways } = this.#part;
    const { maxConnections, maxPassthrough } = config.limits;
    const share = (whole: number): number => Math.ceil(whole / gateways);
    const limits = {
      ...config.limits,
      maxConnections: share(maxConnections),
      maxPassthrough: share(maxPassthrough),
    };
    return { ...config, limits };
  }

  async #reachCore(part: Part): Promise<void> {
    const { engine } = this.#config;
    const link = new CoreLink(part, {
      clock: this.#clock,
      events: this.events,
      limits: () => this.#limits,
      copied: engine.kind === "memory" && engine.dataDir !== undefined,
    });
    this.#core = link;
    this.#undo.push(() => link.close());
    await link.engine.open();
  }

  #coreAsStore({ dataDir }: MemoryEngineConfig): OpenedStore {
    const { engine } = this.#core!;
    return { engine, durable: dataDir !== undefined, writable: () => this.#core!.writable };
  }

  async #openCore(part: Part, { engine, writable }: Opened): Promise<void> {
    const gateways = new Gateways({
      engine,
      clock: this.#clock,
      events: this.events,
      put: (task, sharing, ofMany) => this.#gates!.put(task, sharing, ofMany),
      processes: this.#processes,
      status: () => this.#status(writable()),
      keep: (name, header) => {
        const model = this.#config.models.find((each) => each.name === name);
        if (model !== undefined) this.#vault(model)?.keep(header);
      },
    });
    this.#gateways = gateways;
    this.#undo.push(() => gateways.close());
    await gateways.listen(part);
  }

  #status(writable: boolean): CoreStatus {
    const { models } = this.#config;
    const workers = models.filter(isReachable).map(({ name }) => [name, this.#workers(name) ?? []] as const);
    return {
      writable,
      healthy: models.map(({ name }) => name).filter((name) => this.#healthy(name)),
      workers: Object.fromEntries(workers),
    };
  }

  #healthy(model: string): boolean {
    return (this.#prospects.get(model)?.horizon(this.#clock.now()).healthy ?? 0) > 0;
  }

  #workers(model: string): readonly KnownWorker[] | undefined {
    const dispatcher = this.#pool.dispatcher(model);
    return dispatcher && knownWorkers(dispatcher, this.#clock.now());
  }

  async #openPublicApi(opened: OpenedStore): Promise<void> {
    const core = this.#config.engine.kind === "memory" ? this.#core : undefined;
    const api = new PublicApi(this.#config, {
      role: this.#role,
      clock: this.#clock,
      events: this.events,
      opened,
      tls: this.#tls,
      tracing: this.#tracing,
      put: (task, sharing, ofMany) => (core?.engine ?? this.#gates!).put(task, sharing, ofMany),
      healthy: (model) => core?.healthy(model) ?? this.#healthy(model),
      workers: (model) => (core === undefined ? this.#workers(model) : core.workers(model)),
      vault: (model) => {
        const vault = this.#vault(model);
        return this.#core && vault ? this.#core.vault(model.name, vault) : vault;
      },
      draining: () => this.#draining,
      random: Math.random,
    });
    this.#publicApi = api;
    this.#undo.push(() => api.close());
    await api.open(this.#config);
  }
}
