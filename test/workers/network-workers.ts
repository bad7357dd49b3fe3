/** Workers with addresses on virtual time: simulated ones behind URLs, as the http backend has them. */
import assert from "node:assert/strict";
import type { Config, ModelConfig } from "../../src/app/config/config.ts";
import { parseConfig } from "../../src/app/config/load.ts";
import { fixedWorkers, hasAddresses } from "../../src/app/config/worker-addresses.ts";
import type { Simulation } from "../../src/cli/plan/simulation.ts";
import type { Backend, Worker } from "../../src/workers/backend/backend.ts";
import { Orders } from "../../src/workers/fleet/orders.ts";
import { Operator } from "../../src/workers/operator.ts";
import { type PoolParts, WorkerPool } from "../../src/workers/pool.ts";
import { type Changes, simulate } from "../dispatch/simulated.ts";

export class NetworkBackend implements Backend {
  readonly #simulation: Simulation;
  readonly #workers = new Map<Worker, Worker>();
  /** `host` of those that were added, by address. */
  readonly hosts = new Map<string, string | undefined>();
  readonly retired: string[] = [];

  readonly #listed: readonly string[];

  constructor(simulation: Simulation, listed: readonly string[] = []) {
    this.#simulation = simulation;
    this.#listed = listed;
  }

  get workers(): Worker[] {
    return [...this.#workers.keys()];
  }

  async start(): Promise<void> {
    for (const address of this.#listed) await this.grow(address);
  }

  stop(): Promise<void> {
    return Promise.resolve();
  }

  async grow(address?: string, host?: string): Promise<Worker> {
    const behind = await this.#simulation.backend.grow();
    const { host: name } = new URL(address!);
    const worker: Worker = { name, address: address!, host, run: (...call) => behind.run(...call) };
    this.#workers.set(worker, behind);
    this.hosts.set(address!, host);
    return worker;
  }

  async retire(worker: Worker): Promise<void> {
    await this.#simulation.backend.retire(this.#workers.get(worker)!);
    this.#workers.delete(worker);
    this.retired.push(worker.name);
  }
}

/** Of one model; `workers` as the config would have them. */
export function httpModel(workers: readonly string[] = [], name = "m", more: object = {}): ModelConfig {
  const backend = { kind: "http", workers: ["http://none:1/"], ...more };
  return modelOf({ name, backend }, { workers });
}

export function modelOf(written: object, more: object = {}): ModelConfig {
  const { config, problems } = parseConfig(JSON.stringify({ models: [written] }), "f.yaml", {});
  assert.ok(config, JSON.stringify(problems));
  const [model] = config.models;
  return { ...model!, backend: { ...model!.backend, ...more } };
}

/** A pool of simulated models, and the operator of it. The workers that the simulations have are not in it. */
export function poolOf(
  simulations: readonly Simulation[],
  models: readonly ModelConfig[],
  more: Partial<PoolParts> = {},
) {
  const [{ clock, events, engine }] = simulations as [Simulation];
  const orders = new Orders();
  const of = (name: string): Simulation => simulations.find(({ rules }) => rules.name === name)!;
  for (const { dispatcher } of simulations) {
    for (const slot of dispatcher.workers.slots.slice()) void dispatcher.retire(slot);
  }
  const pool = new WorkerPool({
    clock,
    events,
    orders,
    makeBackend: ({ name, backend }) =>
      hasAddresses(backend) ? new NetworkBackend(of(name), fixedWorkers(backend.workers)) : of(name).backend,
    makeDispatcher: (_, { name }) => of(name).dispatcher,
    rulesOf: ({ name }) => of(name).rules,
    ...more,
  });
  let current = models;
  const operator = new Operator({ clock, events, models: () => current, pool, orders });
  const configOf = (next: readonly ModelConfig[]): Config =>
    ({ models: next, limits: { drainMs: 1000 } }) as unknown as Config;
  void pool.open(configOf(models));
  pool.begin(configOf(models), engine, false);
  /** A reload. */
  const change = async (...next: readonly ModelConfig[]): Promise<void> => {
    const prepared = await pool.prepare(configOf(next));
    current = next;
    prepared.commit();
  };
  return { pool, operator, orders, change };
}

/** A model without workers, and the operator who can give it some. */
export function emptyModel(
  changes: Changes = {},
  model: ModelConfig = httpModel(),
  more: Partial<PoolParts> = {},
) {
  const simulation = simulate(changes);
  const { dispatcher, clock, events } = simulation;
  const notices: string[] = [];
  events.on("notice", ({ level, message }) => notices.push(`${level}: ${message}`));
  const stage = poolOf([simulation], [model], more);
  const names = (): string[] => dispatcher.workers.slots.map(({ name }) => name).sort();
  const backend = stage.pool.of("m")!.backend as NetworkBackend;
  return { ...stage, simulation, dispatcher, backend, clock, events, notices, names };
}
