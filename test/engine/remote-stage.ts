/** Gateways and a core in one process: over a real Unix socket, or over links that a test can cut, hold and garble. */
import fs from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import type { Engine, EngineLimits } from "../../src/engine/engine.ts";
import { MemoryEngine } from "../../src/engine/memory/engine.ts";
import { connectLink, type Link } from "../../src/engine/remote/channel.ts";
import { RemoteEngine, type RemoteEngineParts } from "../../src/engine/remote/engine.ts";
import { RemoteServer, type RemoteServerParts } from "../../src/engine/remote/server.ts";
import { Events } from "../../src/observe/events.ts";

export const VERSION = "1.2.3";

export const home = fs.mkdtempSync(join(tmpdir(), "ferry-remote-"));
let paths = 0;
export const newPath = (): string => join(home, String(++paths));

export function makeServer(
  engine: Engine,
  clock: VirtualClock,
  more: Partial<RemoteServerParts> = {},
): RemoteServer {
  return new RemoteServer({
    engine,
    put: (task, sharing) => engine.put(task, sharing),
    status: () => "{}",
    told: () => {},
    clock,
    events: new Events(),
    version: VERSION,
    ...more,
  });
}

export function makeRemote(
  connect: RemoteEngineParts["connect"],
  clock: VirtualClock,
  limits: () => EngineLimits,
  more: Partial<RemoteEngineParts> = {},
): RemoteEngine {
  return new RemoteEngine({
    connect,
    clock,
    limits,
    events: new Events(),
    copied: false,
    version: VERSION,
    ...more,
  });
}

/**
 * One engine of two halves: a gateway's verbs by way of a Unix socket, the others at the core itself. The gateway
 * outlives the core and connects to the next one.
 */
export class Halves {
  readonly #clock: VirtualClock;
  readonly #path = newPath();
  readonly #remote: RemoteEngine;
  #core!: MemoryEngine;
  #server!: RemoteServer;
  #limits!: EngineLimits;
  #listens = Promise.withResolvers<void>();

  constructor(clock: VirtualClock, copied: boolean) {
    this.#clock = clock;
    const connect = async (): Promise<Link> => {
      await this.#listens.promise;
      return connectLink(this.#path);
    };
    this.#remote = makeRemote(connect, clock, () => this.#limits, { copied });
  }

  async start(core: MemoryEngine, limits: EngineLimits): Promise<Engine> {
    this.#core = core;
    this.#limits = limits;
    this.#server = makeServer(core, this.#clock);
    await this.#server.listen(this.#path);
    this.#listens.resolve();
    if (!this.#remote.connected) await this.#remote.open();
    return this.#engine(core);
  }

  async stopCore(): Promise<void> {
    this.#listens = Promise.withResolvers();
    await this.#server.close();
    await this.#core.close();
  }

  /** Messages are in order: what the gateway sent and the core told before was heard. */
  readonly refresh = async (): Promise<void> => void (await this.#remote.outcome("nobody"));

  #engine(core: MemoryEngine): Engine {
    const remote = this.#remote;
    const { refresh } = this;
    return {
      put: (task, sharing) => remote.put(task, sharing) as ReturnType<Engine["put"]>,
      neverFits: (tasks, inputs, parameters) => remote.neverFits(tasks, inputs, parameters),
      together: (puts) => remote.together(puts),
      cancel: (id, tenant, abandoned) => remote.cancel(id, tenant, abandoned),
      outcome: (id, tenant) => remote.outcome(id, tenant),
      follow: (id, tenant) => remote.follow(id, tenant),
      delivered: (id) => remote.delivered(id),
      spend: (key, perMinute) => remote.spend(key, perMinute),
      watch: (listener) => {
        const settled = remote.watch({ settled: (record) => listener.settled?.(record) });
        const others = core.watch({
          queued: (...arrival) => listener.queued?.(...arrival),
          due: (at) => listener.due?.(at),
        });
        return () => {
          settled();
          others();
        };
      },
      claim: (request) => core.claim(request),
      extend: (lease, leaseMs) => core.extend(lease, leaseMs),
      settle: async (lease, verdicts) => {
        await refresh();
        return core.settle(lease, verdicts);
      },
      reap: (now) => core.reap(now),
      queues: (model, perTier) => core.queues(model, perTier),
      waiting: (model) => core.waiting(model),
      turn: (model, tier, tenant) => core.turn(model, tier, tenant),
      stats: () => core.stats(),
      deadLetters: {
        list: () => core.deadLetters.list(),
        get: (id) => core.deadLetters.get(id),
        purge: (id) => core.deadLetters.purge(id),
        replay: async (id) => {
          const replayed = await core.deadLetters.replay(id);
          const tenant = (await core.outcome(id))?.task.tenant;
          // An operator's command concerns no gateway; this one wants to hear of its end.
          if (replayed) await remote.follow(id, tenant!);
          return replayed;
        },
      },
      close: async () => {
        await remote.close();
        await this.stopCore();
      },
    };
  }
}

/** The two ends of a connection in memory. Bytes arrive in a later microtask, or when the test lets them. */
export class Cable {
  readonly gateway: CableEnd;
  readonly core: CableEnd;

  constructor() {
    this.gateway = new CableEnd();
    this.core = new CableEnd();
    this.gateway.peer = this.core;
    this.core.peer = this.gateway;
  }

  cut(): void {
    for (const end of [this.gateway, this.core]) end.close("cut");
  }
}

export class CableEnd implements Link {
  peer!: CableEnd;
  /** What this end sends arrives only up to so many bytes; the rest is lost, and the cable is cut. */
  cutAfter = Infinity;
  sent = 0;
  #held: [bytes: Buffer, left: () => void][] | undefined;
  #data: (bytes: Buffer) => void = () => {};
  #closed: ((why: string) => void) | undefined;
  #open = true;

  on(data: (bytes: Buffer) => void, closed: (why: string) => void): void {
    this.#data = data;
    this.#closed = closed;
  }

  write(bytes: Buffer, left: () => void): void {
    if (this.#held === undefined) this.#deliver(Buffer.from(bytes), left);
    else this.#held.push([Buffer.from(bytes), left]);
  }

  /** From now on nothing that this end sends arrives, as if the receiver were stopped. */
  hold(): void {
    this.#held ??= [];
  }

  release(): void {
    const held = this.#held ?? [];
    this.#held = undefined;
    for (const [bytes, left] of held) this.#deliver(bytes, left);
  }

  /** As if the other process had sent this. */
  receive(bytes: Buffer): void {
    if (this.#open) this.#data(bytes);
  }

  #deliver(bytes: Buffer, left: () => void): void {
    const arrives = Math.min(bytes.length, this.cutAfter - this.sent);
    this.sent += bytes.length;
    queueMicrotask(() => {
      left();
      this.peer.receive(bytes.subarray(0, arrives));
      if (arrives < bytes.length) this.end();
    });
  }

  end(): void {
    queueMicrotask(() => {
      this.close("ended");
      this.peer.close("ended by the other side");
    });
  }

  destroy(): void {
    this.end();
  }

  close(why: string): void {
    if (!this.#open) return;
    this.#open = false;
    this.#closed?.(why);
  }
}

const STEP_MS = 20;
/** A message and its answer take one turn each; hello, welcome, what was held, and its answer. */
const TURNS = 6;

/** A core that can be exchanged, and gateways that find it. */
export class Machine {
  readonly clock = new VirtualClock();
  readonly notices: string[] = [];
  readonly told: string[] = [];
  readonly cables: Cable[] = [];
  status = "{}";
  /** Called with each new cable, before it is used. */
  onCable: (cable: Cable) => void = () => {};
  core: MemoryEngine | undefined;
  server: RemoteServer | undefined;
  readonly #limits: EngineLimits;
  readonly #events = new Events();

  constructor(limits: EngineLimits) {
    this.#limits = limits;
    this.#events.on("notice", ({ message }) => void this.notices.push(message));
    this.start();
  }

  /** A core process, around the tasks of an earlier one if there are any. */
  start(core?: MemoryEngine, more: Partial<RemoteServerParts> = {}): void {
    const engine = core ?? new MemoryEngine(() => this.#limits, this.clock, this.#events);
    this.core = engine;
    this.server = makeServer(engine, this.clock, {
      status: () => this.status,
      told: (_, message) => void this.told.push(message),
      events: this.#events,
      ...more,
    });
  }

  /** The core process is gone. */
  stop(): void {
    this.server = undefined;
    for (const cable of this.cables) cable.cut();
  }

  gateway(more: Partial<RemoteEngineParts> = {}): RemoteEngine {
    const connect = (): Link => this.connect();
    return makeRemote(connect, this.clock, () => this.#limits, { events: this.#events, ...more });
  }

  connect(): Link {
    if (this.server === undefined) throw new Error("nothing listens there");
    const cable = new Cable();
    this.cables.push(cable);
    this.onCable(cable);
    this.server.accept(cable.core);
    return cable.gateway;
  }

  async opened(more: Partial<RemoteEngineParts> = {}): Promise<RemoteEngine> {
    const remote = this.gateway(more);
    await remote.open();
    return remote;
  }

  /** Time goes by in steps, and after each everything sent has arrived. */
  async pass(ms: number): Promise<void> {
    const until = this.clock.now() + ms;
    while (this.clock.now() < until) {
      await this.clock.run(Math.min(until, this.clock.now() + STEP_MS));
      for (let turn = 0; turn < TURNS; turn++) await new Promise((resolve) => setImmediate(resolve));
    }
  }
}
