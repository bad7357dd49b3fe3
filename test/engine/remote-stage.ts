/** Gateways and a core in one process: over a real Unix socket, or over links that a test can cut, hold and garble. */
import fs from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import type { Engine, EngineLimits } from "../../src/engine/engine.ts";
import type { MemoryEngine } from "../../src/engine/memory/engine.ts";
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
