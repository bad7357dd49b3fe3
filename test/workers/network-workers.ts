/** Workers with addresses on virtual time: simulated ones behind URLs, as the http backend has them. */
import type { Backend, Worker } from "../../src/workers/backend/backend.ts";
import type { RosterModel } from "../../src/workers/models.ts";
import { Roster } from "../../src/workers/roster.ts";
import { type Changes, simulate } from "../dispatch/simulated.ts";
import type { Simulation } from "../../src/cli/plan/simulation.ts";

export class NetworkBackend implements Backend {
  readonly #simulation: Simulation;
  readonly #workers = new Map<Worker, Worker>();
  /** `host` of those that were added, by address. */
  readonly hosts = new Map<string, string | undefined>();
  readonly retired: string[] = [];

  constructor(simulation: Simulation) {
    this.#simulation = simulation;
  }

  get workers(): Worker[] {
    return [...this.#workers.keys()];
  }

  start(): Promise<void> {
    return Promise.resolve();
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

/** A model without workers, and the roster that can give it some. */
export function emptyModel(changes: Changes = {}, more: Partial<RosterModel> = {}) {
  const simulation = simulate(changes);
  const [first] = simulation.dispatcher.workers.slots;
  void simulation.dispatcher.retire(first!);
  const backend = new NetworkBackend(simulation);
  const { dispatcher, clock, events } = simulation;
  const model: RosterModel = {
    name: dispatcher.rules.name,
    kind: "http",
    scaled: false,
    dispatcher,
    backend,
    ...more,
  };
  const notices: string[] = [];
  events.on("notice", ({ level, message }) => notices.push(`${level}: ${message}`));
  const roster = new Roster([model], { clock, events });
  const names = (): string[] => dispatcher.workers.slots.map(({ name }) => name).sort();
  return { simulation, dispatcher, backend, model, roster, clock, events, notices, names };
}
