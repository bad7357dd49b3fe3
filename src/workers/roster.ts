/**
 * The workers of every model while the process runs: added, put aside, let back in, removed, by people
 * (`/internal/workers`, `ferry workers`) or by what DNS says (`discovery.ts`).
 *
 *   add      one worker more: at a URL, or, where Ferry starts its workers itself, one more of its own
 *   drain    it gets no further batch and is no capacity; what it runs ends as it would have. It stays in the list
 *   resume   it gets batches again
 *   remove   drained, and gone when it runs nothing: a child is ended, another one is only forgotten. It stays away until
 *            it is added again, or the config lists it no more (`taken-out.ts`)
 *
 * Nothing of this is written down: a restart begins with the config. On the Redis engine `add` and `remove` are about
 * the list of this process alone, since a worker belongs to whoever lists it: others that list it take it over. `drain`
 * and `resume` are orders to the whole fleet (`workers/fleet/orders.ts`), whichever process is told.
 */
import type { Backend } from "./backend/backend.ts";
import type { Config, ModelConfig } from "../app/config/config.ts";
import type { Clock } from "../app/clock.ts";
import { Refusal } from "../core/errors.ts";
import { Discovery } from "./discovery.ts";
import type { Dispatcher } from "../dispatch/dispatcher.ts";
import type { PoolWorker } from "./worker.ts";
import {
  dnsName,
  fixedWorkers,
  hasAddresses,
  isDns,
  type NetworkBackend,
} from "../app/config/worker-addresses.ts";
import { shownAddress } from "./fleet/lease-names.ts";
import type { Membership } from "./fleet/membership.ts";
import { Orders, workerKey } from "./fleet/orders.ts";
import type { WorkerDesk, WorkerName } from "../gateway/admin.ts";
import { type Resolve, systemResolve } from "./resolver.ts";
import { type RosterModel, rosterModels, type Running } from "./models.ts";
import {
  beatName,
  checked,
  conflict,
  drainedElsewhere,
  EXAMPLES,
  type Found,
  nameOf,
  same,
  shownName,
  wrong,
} from "./names.ts";
import { didYouMean } from "../app/config/spelling.ts";
import { hrefOf, type TakenOut } from "./taken-out.ts";
import type { Events, WorkerState } from "../observe/events.ts";

export interface RosterParts {
  readonly clock: Clock;
  readonly events: Events;
  /** Left out: there is only this process. */
  readonly membership?: Pick<Membership, "orders" | "changed" | "fleet"> | undefined;
  /** Workers of the config that people removed. */
  readonly takenOut?: TakenOut | undefined;
  /** Left out: as the system does. */
  readonly resolve?: Resolve;
}

/** Lookups in which an address must be missing before its worker is removed: DNS servers disagree for a while. */
const MISSING_LOOKUPS = 3;
/** Of one name: as many as a config may list one by one. */
const MAX_ADDRESSES = 1024;

/** Where a model's workers are, as the config has it. */
export type FollowedNames = Pick<NetworkBackend, "kind" | "workers" | "dnsMs" | "dnsServers">;

export class Roster implements WorkerDesk {
  /** By name; models may come and go. */
  readonly models: Map<string, RosterModel>;
  readonly #parts: RosterParts;
  readonly #orders: Orders;
  /** By model and address: the name of DNS that brought it. */
  readonly #from = new Map<string, string>();
  readonly #ending = new Map<PoolWorker, Promise<void>>();
  /** URLs that are on their way in: two of the same at once would be two workers. */
  readonly #coming = new Set<string>();
  /** By model, and by kind and what the config says. */
  readonly #names = new Map<string, Map<string, Discovery>>();

  constructor(models: readonly RosterModel[], parts: RosterParts) {
    this.models = new Map(models.map((model) => [model.name, model]));
    this.#parts = parts;
    this.#orders = parts.membership?.orders ?? new Orders();
  }

  /**
   * From now on these are the names of DNS that a model has workers behind. Those of other names are drained and removed,
   * after each new one was looked up once: who is behind that too stays. Resolves then.
   */
  async follow(model: string, wanted: FollowedNames): Promise<void> {
    const before = this.#names.get(model) ?? new Map<string, Discovery>();
    const names = new Map<string, Discovery>();
    this.#names.set(model, names);
    const { clock, events, resolve = systemResolve } = this.#parts;
    const { dnsMs: everyMs, dnsServers: servers } = wanted;
    const rules = { everyMs, graceMs: MISSING_LOOKUPS * everyMs, maxAddresses: MAX_ADDRESSES, servers };
    const joining = {
      join: (url: string, host: string, from: string) => this.join(model, url, host, from),
      leave: (url: string) => this.leave(model, url),
    };
    const started: Promise<void>[] = [];
    for (const written of wanted.workers.filter(isDns)) {
      const key = `${wanted.kind} ${written}`;
      const known = before.get(key);
      const name = dnsName(written, wanted.kind);
      const discovery = known ?? new Discovery(model, name, rules, joining, { clock, events, resolve });
      names.set(key, discovery);
      if (known === undefined) started.push(discovery.start());
      else known.retune(rules);
    }
    const old = [...before.keys()].filter((key) => !names.has(key)).map((key) => before.get(key)!);
    for (const discovery of old) discovery.stop();
    await Promise.all(started);
    for (const { shown } of old) this.#unfollow(model, shown);
  }

  async followAll(models: readonly ModelConfig[]): Promise<void> {
    const here = models.filter(({ name }) => this.models.get(name)?.dispatcher !== undefined);
    const all = here.flatMap(({ name, backend }) =>
      hasAddresses(backend) ? [this.follow(name, backend)] : [],
    );
    await Promise.all(all);
  }

  /** The config changed: other models, perhaps in other hands, and other names of DNS. Who is put aside stays so. */
  retune(models: readonly ModelConfig[], running: Running): void {
    // Perhaps somebody in the fleet has let it back in under its new name.
    const drained = drainedElsewhere(this.models.keys(), models, (key) => this.#orders.isAside(key));
    for (const key of drained) if (!this.#orders.knows(key)) this.#orders.give(key, true);
    this.models.clear();
    for (const model of rosterModels(models, running)) this.models.set(model.name, model);
    for (const { name, backend } of models) {
      // Who stands in the config stays, whatever DNS says.
      const fixed = hasAddresses(backend) ? fixedWorkers(backend.workers) : [];
      for (const each of fixed) this.#from.delete(`${name} ${hrefOf(each)}`);
    }
    for (const [model, names] of this.#names) {
      if (models.some(({ name, backend }) => name === model && hasAddresses(backend))) continue;
      for (const discovery of names.values()) discovery.stop();
      this.#names.delete(model);
    }
    void this.followAll(models);
    for (const dispatcher of running.dispatchers) this.#orders.apply(dispatcher);
  }

  #follows(model: string, shown: string): boolean {
    const names = [...(this.#names.get(model)?.values() ?? [])];
    return names.some((each) => each.shown === shown);
  }

  #unfollow(model: string, shown: string): void {
    if (this.#follows(model, shown)) return;
    const slots = this.models.get(model)?.dispatcher?.workers.slots ?? [];
    const found = slots.filter((slot) => !slot.retiring && this.foundBy(model, slot) === shown);
    for (const slot of found) void this.#end(model, slot);
  }

  /** The name of DNS that brought this worker; undefined: somebody wrote it down. */
  foundBy(model: string, { worker: { address } }: PoolWorker): string | undefined {
    return address === undefined ? undefined : this.#from.get(`${model} ${address}`);
  }

  stop(): void {
    for (const names of this.#names.values()) for (const discovery of names.values()) discovery.stop();
  }

  async add(given: string | undefined, written: string | undefined): Promise<WorkerName> {
    const { name, kind, scaled } = this.#model(given);
    if (kind === "http" || kind === "grpc") {
      if (written === undefined) throw wrong(`say where the worker is: url, like ${EXAMPLES[kind]}`);
      return this.join(name, checked(written, kind));
    }
    if (written !== undefined)
      throw wrong(`Ferry starts the workers of ${name} itself (${kind}); leave out url`);
    if (scaled) throw conflict(`scaling.apply says how many workers ${name} has; raise scaling.min instead`);
    return this.join(name);
  }

  /** `from` is the name of DNS behind it, and `host` what it is asked by then. */
  async join(name: string, url?: string, host?: string, from?: string): Promise<WorkerName> {
    const { dispatcher, backend } = this.#running(this.#model(name));
    const known = from === undefined ? undefined : this.#adopt(name, dispatcher, url!, from);
    if (known !== undefined) return nameOf(name, known);
    if (url !== undefined) this.#checkNew(url);
    if (from !== undefined) this.#checkWanted(name, url!);
    let slot: PoolWorker;
    try {
      if (url !== undefined) this.#coming.add(url);
      const worker = await backend.grow(url, host);
      if (this.models.get(name)?.backend !== backend) {
        await backend.retire(worker);
        throw new Error("the config was read again meanwhile; ask again");
      }
      slot = dispatcher.join(worker);
    } catch (error) {
      throw conflict(error instanceof Error ? error.message : String(error));
    } finally {
      if (url !== undefined) this.#coming.delete(url);
    }
    this.#parts.takenOut?.giveBack(name, slot.name, slot.worker.address);
    this.#from.delete(`${name} ${url}`);
    if (from !== undefined) this.#from.set(`${name} ${url}`, from);
    this.#orders.apply(dispatcher);
    this.#tell(
      name,
      slot.name,
      slot.drained ? "draining" : "idle",
      from ? `${from} names it` : "it was added",
    );
    this.#parts.membership?.changed();
    return nameOf(name, slot);
  }

  /** One that this name of DNS brought, or one that is followed no more. */
  #adopt(model: string, { workers }: Dispatcher, url: string, from: string): PoolWorker | undefined {
    const slot = workers.slots.find(({ worker, retiring }) => worker.address === url && !retiring);
    const by = slot && this.foundBy(model, slot);
    if (by === undefined || (by !== from && this.#follows(model, by))) return undefined;
    this.#from.set(`${model} ${url}`, from);
    return slot;
  }

  drain(name: string, model?: string): WorkerName {
    return this.#order(name, model, true);
  }

  resume(name: string, model?: string): WorkerName {
    return this.#order(name, model, false);
  }

  async remove(name: string, given?: string): Promise<WorkerName & { readonly gone: boolean }> {
    const { model, slot, ...found } = this.#find(name, given);
    if (slot === undefined) {
      throw conflict(
        `another process lists ${name}; ask that one, or drain it, which holds for the whole fleet`,
      );
    }
    const from = this.foundBy(model, slot);
    if (from !== undefined) throw conflict(`${from} names ${name}; drain it, or take it out of DNS`);
    if (slot.retiring && !this.#ending.has(slot)) return { model, ...found, gone: false };
    this.#parts.takenOut?.take(model, slot.name, slot.worker.address);
    const idle = slot.batch === undefined;
    const ended = this.#end(model, slot);
    if (idle) await ended;
    return { model, ...found, gone: idle };
  }

  /** Those of the config that were removed by hand. */
  removed(): readonly (WorkerName & { readonly model: string })[] {
    return (this.#parts.takenOut?.all ?? []).map(shownName);
  }

  /** Drains the worker at this URL and removes it; resolves when it is gone, or was not there. */
  async leave(name: string, url: string): Promise<void> {
    const slot = this.models
      .get(name)
      ?.dispatcher?.workers.slots.find(({ worker, retiring }) => worker.address === url && !retiring);
    if (slot !== undefined && this.foundBy(name, slot) !== undefined) await this.#end(name, slot);
  }

  #end(model: string, slot: PoolWorker): Promise<void> {
    const known = this.#ending.get(slot);
    if (known !== undefined) return known;
    const { dispatcher, backend } = this.#running(this.models.get(model)!);
    const why = this.foundBy(model, slot) === undefined ? "it is removed" : "DNS names it no more";
    this.#from.delete(`${model} ${slot.worker.address}`);
    this.#tell(model, slot.name, "draining", why);
    const end = async (): Promise<void> => {
      const retired = dispatcher.retire(slot);
      this.#parts.membership?.changed();
      await retired;
      await backend.retire(slot.worker).catch((error: unknown) => this.#failed(model, slot, error));
      // Whoever comes to the same address later is another one.
      const { name, address } = nameOf(model, slot);
      this.#orders.give(workerKey(model, name, address), false);
      this.#orders.apply(dispatcher);
      this.#ending.delete(slot);
      this.#parts.membership?.changed();
    };
    const ended = end();
    this.#ending.set(slot, ended);
    return ended;
  }

  #order(name: string, given: string | undefined, aside: boolean): WorkerName {
    const { model, slot, ...found } = this.#find(name, given);
    if (slot !== undefined && this.#ending.has(slot))
      throw conflict(`${name} is being removed; add it again when it is gone`);
    this.#orders.give(workerKey(model, name, found.address), aside);
    const changes = slot !== undefined && slot.drained !== aside;
    for (const { dispatcher } of this.models.values()) if (dispatcher) this.#orders.apply(dispatcher);
    if (changes)
      this.#tell(model, name, slot.state(this.#parts.clock.now()), aside ? "put aside" : "let back in");
    this.#parts.membership?.changed();
    return { model, ...found };
  }

  #find(name: string, model: string | undefined): Found {
    if (model !== undefined) this.#model(model);
    const own = [...this.models.values()].flatMap(({ name: each, dispatcher }) =>
      (dispatcher?.workers.slots ?? []).map((slot): Found => ({ ...nameOf(each, slot), slot })),
    );
    const others = (this.#parts.membership?.fleet.workers() ?? []).map(beatName);
    const fits = (each: Found): boolean => each.name === name && (model ?? each.model) === each.model;
    const here = own.filter(fits);
    const found = [...here, ...others.filter((each) => fits(each) && !here.some(same(each)))];
    if (found.length === 1) return found[0]!;
    if (found.length > 1) {
      const models = found.map((each) => each.model).join(", ");
      throw conflict(`several models have a worker ${name}: ${models}; say which with model`);
    }
    this.#checkOut(name, model);
    const guess = didYouMean(
      name,
      [...own, ...others].map((each) => each.name),
    );
    throw new Refusal("NOT_FOUND", `there is no worker ${name}${guess}; GET /internal/workers lists them`);
  }

  #model(given: string | undefined): RosterModel {
    const names = [...this.models.keys()];
    if (given === undefined && names.length > 1) {
      throw wrong(`say for which model: ${names.join(", ")}`);
    }
    const model = this.models.get(given ?? names[0]!);
    if (model !== undefined) return model;
    throw new Refusal("NOT_FOUND", `there is no model ${given}; one of ${names.join(", ")}`);
  }

  #running({ dispatcher, backend }: RosterModel): { dispatcher: Dispatcher; backend: Backend } {
    if (dispatcher !== undefined && backend !== undefined) return { dispatcher, backend };
    throw conflict("this process runs no batches, it is a gateway; ask a batcher");
  }

  /** Two slots on one worker would send it two batches at once, in one model or in two. */
  #checkNew(url: string): void {
    if (this.#coming.has(url)) throw conflict(`${shownAddress(url)} is on its way in already`);
    for (const { name, dispatcher } of this.models.values()) {
      const slot = dispatcher?.workers.slots.find(({ worker }) => worker.address === url);
      if (slot === undefined) continue;
      const state = slot.retiring ? "is being removed from" : "is a worker of";
      throw conflict(`${shownAddress(url)} ${state} model ${name}; it would get two batches at once`);
    }
  }

  /** What DNS names is no reason to bring it back. */
  #checkWanted(model: string, url: string): void {
    if (this.#parts.takenOut?.keeps(model, url) !== true) return;
    throw conflict(`${shownAddress(url)} was removed by hand; add it again, or take it out of the config`);
  }

  #checkOut(name: string, model: string | undefined): void {
    const out = this.removed().find((each) => each.name === name && (model ?? each.model) === each.model);
    if (out === undefined) return;
    const where = out.address === undefined ? "" : ` ${out.address}`;
    throw new Refusal("NOT_FOUND", `${name} was removed by hand; ferry workers add${where} takes it back`);
  }

  #failed(model: string, { name }: PoolWorker, error: unknown): void {
    const why = error instanceof Error ? error.message : String(error);
    const message = `model ${model}: ${name} gets no more batches, but could not be ended: ${why}`;
    this.#parts.events.emit("notice", { level: "error", message });
  }

  #tell(model: string, worker: string, state: WorkerState, why: string): void {
    this.#parts.events.emit("worker.changed", { model, worker, state, why });
  }
}

/** From the config; resolves when every name of DNS in it was looked up once. */
export async function openRoster({ models }: Config, running: Running, parts: RosterParts): Promise<Roster> {
  const roster = new Roster(rosterModels(models, running), parts);
  await roster.followAll(models);
  return roster;
}
