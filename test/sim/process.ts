/**
 * One process of Ferry, put together as `src/app/ferry.ts` does it, behind its HTTP parser: native protocol,
 * request path, admission, gate, waiters, engine, dispatcher, reaper, membership. A restart is a new one with nothing in its head.
 */
import type { Alarm } from "../../src/app/clock.ts";
import { Admission } from "../../src/gateway/admission/admission.ts";
import type { Credentials } from "../../src/gateway/admission/credentials.ts";
import { CapacityGate, type Prospects } from "../../src/gateway/admission/capacity-gate.ts";
import { Refusal } from "../../src/core/errors.ts";
import { Dispatcher } from "../../src/dispatch/dispatcher.ts";
import { Reaper } from "../../src/dispatch/reaper.ts";
import type { ModelRules } from "../../src/dispatch/model-rules.ts";
import type { Engine, EngineLimits, TaskStore } from "../../src/engine/engine.ts";
import { MemoryEngine } from "../../src/engine/memory/engine.ts";
import { RedisEngine } from "../../src/engine/redis/engine.ts";
import { RedisClock } from "../../src/engine/redis/frames.ts";
import { RedisKeys } from "../../src/engine/redis/keys.ts";
import { RemoteEngine } from "../../src/engine/remote/engine.ts";
import { RemoteServer } from "../../src/engine/remote/server.ts";
import { RecordKeeper } from "../../src/engine/memory/saved.ts";
import { FleetDemand } from "../../src/workers/fleet/demand.ts";
import { Membership } from "../../src/workers/fleet/membership.ts";
import { FleetOutlook } from "../../src/workers/fleet/outlook.ts";
import { RedisRegistry } from "../../src/workers/fleet/registry.ts";
import type { MemberRole } from "../../src/workers/fleet/registry.ts";
import type { Exchange } from "../../src/gateway/exchange.ts";
import { NativeProtocol } from "../../src/gateway/native.ts";
import { RequestPath, type RequestPathParts } from "../../src/gateway/request-path.ts";
import type { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import type { LinkOptions } from "../../src/engine/redis/client/link.ts";
import { RedisNodes } from "../../src/engine/redis/client/nodes.ts";
import { Waiters } from "../../src/gateway/waiters.ts";
import { Events } from "../../src/observe/events.ts";
import type { CoreSocket } from "./core-socket.ts";
import type { Disk } from "./disk.ts";
import type { Talk } from "./exchange.ts";
import type { Gpu } from "./gpu.ts";
import type { Host } from "./host.ts";
import type { Ledger } from "./ledger.ts";
import {
  ALIVE_MS,
  BEAT_MS,
  COMMAND_TIMEOUT_MS,
  type Dice,
  LEASE_MS,
  MODEL,
  type Plan,
  type ProcessRole,
  TIERS,
} from "./plan.ts";
import type { RedisServer } from "./redis/net.ts";

export interface Surroundings {
  readonly plan: Plan;
  readonly time: VirtualClock;
  readonly dice: Dice;
  readonly ledger: Ledger;
  readonly gpus: readonly Gpu[];
  /** In a fleet. */
  readonly redis?: RedisServer;
  /** Between a core and its gateways. */
  readonly socket?: CoreSocket;
  /** Of one process or a core with a journal. */
  readonly disk?: Disk;
  /** After a reload. */
  rules?: ModelRules;
}

const STATUS_MS = 200;

type Route = (exchange: Exchange, id: string) => unknown;

export class Process {
  readonly host: Host;
  readonly role: ProcessRole;
  /** It has started. */
  ready = false;
  readonly #around: Surroundings;
  readonly #events = new Events();
  /** There when it has started. */
  #engine: Engine | undefined;
  /** Of a gateway process: the core's engine. */
  #remote: RemoteEngine | undefined;
  /** Of a core: its gateways. */
  #server: RemoteServer | undefined;
  #reaper: Reaper | undefined;
  #nodes: RedisNodes | undefined;
  #publishing: Alarm | undefined;
  #dispatcher: Dispatcher | undefined;
  #membership: Membership | undefined;
  #waiters: Waiters | undefined;
  #admission: Admission | undefined;
  #routes: ReturnType<NativeProtocol["routes"]> | undefined;

  constructor(host: Host, role: ProcessRole, around: Surroundings) {
    this.host = host;
    this.role = role;
    this.#around = around;
    around.ledger.listen(this.#events, host);
  }

  get engine(): Engine {
    return this.#engine!;
  }

  /** Its doors are open: it takes requests. */
  get open(): boolean {
    return this.#routes !== undefined && this.host.alive && this.#admission?.draining !== true;
  }

  /** It has started, and can reach Redis or its core where it needs it. */
  get well(): boolean {
    return this.ready && this.#nodes?.up(0) !== false && this.#remote?.connected !== false;
  }

  /** What a gateway and its core keep of tasks and requests that have not ended. */
  get pending(): number {
    return this.#remote?.pending ?? this.#server?.pending ?? 0;
  }

  /** At the beginning, when everything is well, or after a crash. */
  async start(): Promise<void> {
    const { plan, redis, socket } = this.#around;
    if (socket !== undefined && this.role === "gateway") return this.#startGateway(socket);
    this.#engine = redis === undefined ? this.#embedded() : await this.#shared(redis);
    this.#reaper = new Reaper(this.engine, this.host);
    if (this.role !== "gateway") this.#dispatch();
    if (this.#nodes !== undefined) await this.#join(this.#nodes);
    if (this.role === "batcher") return void (this.ready = true);
    const gate = new CapacityGate(
      {
        mode: plan.admission,
        model: MODEL,
        tiers: TIERS,
        queueMs: plan.queueMs,
        totalMs: plan.totalMs,
        targetUtilization: 0.7,
        lastTierDepth: 60,
        firstTierDepth: 120,
        looksForFree: !plan.fleet,
      },
      this.#prospects(),
      this.engine,
    );
    if (this.#membership !== undefined) {
      this.#membership.doors = (now) => [{ name: MODEL, admittedPerMs: gate.admittedPerMs(now) }];
    }
    if (socket === undefined) this.#openDoors(this.engine, gate.put.bind(gate));
    else this.#serveGateways(socket, gate);
    this.ready = true;
  }

  async #startGateway(socket: CoreSocket): Promise<void> {
    const { plan, ledger } = this.#around;
    const { host } = this;
    const limits = limitsOf(plan);
    const remote = (this.#remote = new RemoteEngine({
      connect: () => socket.connect(host),
      clock: host,
      events: this.#events,
      limits: () => limits,
      copied: plan.journal,
      version: "",
    }));
    remote.watch({ settled: (record) => ledger.heard(record, host) });
    await remote.open();
    this.#openDoors(remote, async (task, sharing, ofMany) => {
      const placed = remote.put(task, sharing, ofMany);
      host.called("put");
      ledger.answeredPut(task, await placed, host);
      return placed;
    });
    this.ready = true;
  }

  #serveGateways(socket: CoreSocket, gate: CapacityGate): void {
    const { host, engine } = this;
    const dispatcher = this.#dispatcher!;
    const server = (this.#server = new RemoteServer({
      engine,
      clock: host,
      events: this.#events,
      version: "",
      put: (task, sharing, ofMany) => {
        host.called("put");
        return gate.put(task, sharing, ofMany);
      },
      status: () => JSON.stringify({ healthy: dispatcher.horizon(host.now()).healthy }),
      told: () => {},
    }));
    const publish = (): void => {
      server.publish();
      this.#publishing = host.at(host.now() + STATUS_MS, publish);
    };
    publish();
    socket.listen(host, (link) => server.accept(link));
  }

  /** The rules have changed. */
  reload(): void {
    if (this.host.alive) this.#dispatcher?.wake();
  }

  /** A deploy: nothing new is taken, what runs is given up, what is held is given back. */
  async stop(): Promise<void> {
    if (this.#admission !== undefined) this.#admission.draining = true;
    this.#waiters?.releaseAll();
    if (this.#server !== undefined) this.#around.socket!.close();
    this.#publishing?.cancel();
    await this.#server?.close();
    this.#reaper?.stop();
    this.#waiters?.close();
    await this.#dispatcher?.stop();
    await this.#membership?.stop();
    await (this.#engine ?? this.#remote)?.close();
    await this.#nodes?.close();
  }

  /** One request, from its head to its answer. */
  async serve(route: string, method: string, talk: Talk, id = ""): Promise<void> {
    const routes = this.#routes as unknown as Record<string, Record<string, Route>>;
    try {
      await routes[route]![method]!(talk as unknown as Exchange, id);
      await talk.over;
    } catch (error) {
      if (error instanceof Refusal) talk.fail(error);
      else throw error;
    }
  }

  #embedded(): MemoryEngine {
    const { plan, disk, ledger } = this.#around;
    const limits = limitsOf(plan);
    const keeper = disk && new RecordKeeper(disk.open(this.host), disk.found);
    const engine = new MemoryEngine(() => limits, this.host, this.#events, { keeper });
    engine.watch({
      settled: (record) => {
        if (!this.host.alive) return;
        this.host.called("settle");
        ledger.settled(record);
      },
      queued: () => ledger.bounded(engine.stats()),
    });
    ledger.overtaking(engine, this.host, this.#events);
    return ledger.watching(ledger.fencing(engine));
  }

  #dispatch(): void {
    const { plan, gpus, dice } = this.#around;
    let batches = 0;
    this.#dispatcher = new Dispatcher(
      () => this.#around.rules ?? plan.rules,
      gpus.map((gpu) => gpu.asWorker(this.host)),
      {
        engine: this.engine,
        clock: this.host,
        events: this.#events,
        random: () => dice.share(),
        newBatchId: () => `${this.host.name}-b${++batches}`,
        shared: plan.fleet,
      },
    );
  }

  /** The engine on Redis, over the real client. */
  async #shared(redis: RedisServer): Promise<Engine> {
    const { plan, dice, ledger } = this.#around;
    const { host } = this;
    const keys = new RedisKeys("ferry:", plan.shards);
    const random = (): number => dice.share();
    const options = {
      nodes: [{ host: "redis", port: 6379 }],
      tags: keys.tags,
      connectTimeoutMs: COMMAND_TIMEOUT_MS,
      commandTimeoutMs: COMMAND_TIMEOUT_MS,
      waitTimeoutMs: COMMAND_TIMEOUT_MS / 2,
      durability: "auto",
      name: host.name,
      random,
      connect: (asked: LinkOptions) => redis.connect(host, asked),
    } as const;
    const nodes = (this.#nodes = await RedisNodes.open(options, host, this.#events));
    const base = {
      nodes,
      keys,
      clock: host,
      events: this.#events,
      shared: new RedisClock(),
      name: host.name,
    };
    const limits = limitsOf(plan);
    const engine = new RedisEngine(
      base,
      () => limits,
      {
        zone: "",
        zoneSpillMs: 100,
        leaseMs: LEASE_MS,
        sweepMs: 1000,
        putWithinMs: COMMAND_TIMEOUT_MS,
        tickMs: plan.tickMs,
      },
      nodes.cluster,
    );
    await engine.open();
    return ledger.watching(engine);
  }

  async #join(nodes: RedisNodes): Promise<void> {
    const { dice } = this.#around;
    const dispatcher = this.#dispatcher;
    const running = dispatcher === undefined ? [] : [dispatcher];
    const key = (name: string): string => registryKey(name);
    const registry = new RedisRegistry(nodes, { aliveMs: ALIVE_MS, key });
    this.#membership = new Membership(
      {
        id: this.host.name,
        zone: "",
        role: this.role as MemberRole,
        version: "",
        beatMs: BEAT_MS,
        aliveMs: ALIVE_MS,
        models: () => [MODEL],
        dispatchers: () => running,
      },
      { registry, clock: this.host, events: this.#events, random: () => dice.share() },
    );
    await this.#membership.start();
    if (dispatcher === undefined) return;
    await (this.engine as RedisEngine).serve(new FleetDemand(this.#membership.fleet, this.host));
  }

  #prospects(): Prospects {
    if (this.#membership !== undefined) return new FleetOutlook(this.#membership.fleet, MODEL);
    const dispatcher = this.#dispatcher!;
    return {
      horizon: (now) => dispatcher.horizon(now),
      hasRoom: (waiting, now) => dispatcher.hasRoom(waiting, now),
      othersPerMs: () => 0,
    };
  }

  #openDoors(engine: TaskStore, put: RequestPathParts["put"]): void {
    const { plan } = this.#around;
    const { host } = this;
    const waiters = (this.#waiters = new Waiters(engine, host));
    const rules = {
      tiers: ["enterprise", "paid", "free"].map((name) => ({ name })),
      ...(plan.perUserPerMinute !== undefined && { perUserPerMinute: plan.perUserPerMinute }),
    };
    const admission = (this.#admission = new Admission(() => rules, engine, host, this.#events));
    const route = {
      name: MODEL,
      totalMs: plan.totalMs,
      cache: { ttlMs: 300, scope: plan.cache },
      collapse: plan.collapse,
      open: true,
    };
    const shared = { admission, waiters, engine, clock: host };
    const durable = plan.fleet || plan.journal;
    const path = new RequestPath({ ...shared, put, routes: [route], credentials: byHeader, durable });
    const parts = { ...shared, path, authRequired: false };
    this.#routes = new NativeProtocol({ defaultMode: "sync", maxPollMs: 2000 }, parts).routes();
  }
}

/** Who it is stands in the header as "tenant tier". */
const byHeader = {
  required: false,
  identify: (authorization: string | undefined) => {
    const [tenant, tier] = authorization!.split(" ");
    return { tenant: tenant!, tier: Number(tier) };
  },
} as unknown as Credentials;

/** Where the registry keeps what it knows. */
export function registryKey(name: string): string {
  return new RedisKeys("ferry:", 1).bases[0]! + name;
}

export function limitsOf(plan: Plan): EngineLimits {
  return {
    models: new Map([[MODEL, { queueMs: plan.queueMs, totalMs: plan.totalMs }]]),
    tiers: TIERS,
    maxQueued: plan.maxQueued,
    maxQueuedBytes: Infinity,
    results: { ttlMs: 600_000, evictAfterRead: plan.evictAfterRead, maxBytes: Infinity },
    deadLetters: { max: plan.deadLetters, ttlMs: Infinity },
  };
}
