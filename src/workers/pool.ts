/**
 * The worker pool of this process: for each model its backend, its dispatcher, and one reconcile loop.
 *
 * The config, DNS (`discovery.ts`), operators (`operator.ts`) and the autoscaler (`scaling.ts`) change the inputs of
 * the desired set (`desired.ts`) and request a reconcile, which starts missing workers and retires unwanted ones. A
 * reload must be able to fail without having changed anything:
 *
 *   prepare   everything that can fail: new backends and workers are started, and get no batch yet
 *   commit    one synchronous step: new models begin, rules change, new workers join, others retire
 *   abandon   instead of commit: what was started is stopped
 *
 * A retiring worker finishes its batch. A backend whose settings changed is replaced as a whole: its successor's
 * workers join at once, and start nothing until their predecessor on the same machine is gone. A removed model accepts
 * nothing new; its queue is served until empty, for at most `limits.drainMs`. Then the rest is refused, unless other
 * processes share the queue. A model that comes back before that continues.
 */
import { isDeepStrictEqual } from "node:util";
import type { Clock } from "../app/clock.ts";
import type { Config, ModelConfig } from "../app/config/config.ts";
import { dnsName, hasAddresses, isDns } from "../app/config/worker-addresses.ts";
import type { Dispatcher } from "../dispatch/dispatcher.ts";
import type { ModelRules } from "../dispatch/model-rules.ts";
import type { Engine } from "../engine/engine.ts";
import type { Events } from "../observe/events.ts";
import type { Backend, Worker } from "./backend/backend.ts";
import {
  type ActualWorker,
  type DesiredWorker,
  desiredAddresses,
  type FoundAddress,
  hrefOf,
  inputsAfter,
  isListed,
  listedAddresses,
  newInputs,
  numberOf,
  planOf,
  type PoolInputs,
  sameNumber,
} from "./desired.ts";
import { Discovery, type DiscoveryRules, type Resolve, systemResolve } from "./discovery.ts";
import { type Orders, shownAddress, workerKey } from "./fleet/orders.ts";
import { LateTasks, refuseRest } from "./refuse-rest.ts";
import type { PoolWorker } from "./worker.ts";

export interface PoolParts {
  readonly clock: Clock;
  readonly events: Events;
  /** Workers drained by operators, in this process or in the fleet. */
  readonly orders: Orders;
  /** `numbers`: its own workers at the start; omitted: the config's count, from 1. */
  makeBackend(model: ModelConfig, numbers?: readonly number[]): Backend;
  /** Without workers. */
  makeDispatcher(rules: () => ModelRules, model: ModelConfig): Dispatcher;
  rulesOf(model: ModelConfig): ModelRules;
  /** A backend came into use, or is no longer used. */
  onBackend?(model: string, backend: Backend | undefined, dispatcher: Dispatcher): void;
  /** A removed model has run its last batch. */
  onGone?(model: string): void;
  /** Workers were added, removed or drained: the fleet should know. */
  onWorkers?(): void;
  readonly resolve?: Resolve;
}

export interface Prepared {
  /** Synchronous; cannot fail. */
  commit(): void;
  abandon(): Promise<void>;
}

/** One model. Only the pool writes it. */
export class ModelPool {
  inputs: PoolInputs;
  backend: Backend;
  readonly dispatcher: Dispatcher;
  /** Read by the dispatcher; switched by a reload. */
  readonly rules: { now: ModelRules };
  /** By kind and configured name. */
  readonly names = new Map<string, Discovery>();
  /** Names no longer followed; their workers stay until the new names were resolved once. */
  former: Discovery[] = [];
  readonly starting = new Set<string>();
  growing = 0;
  retryAt = -Infinity;
  /** Why the last own worker could not be started; undefined: it could. */
  trouble: string | undefined;
  /** For the autoscaler: start-up time of each worker that it requested. */
  onStarted: ((ms: number) => void) | undefined;
  /** Workers removed by an operator or DNS, until they are gone. */
  readonly ending = new Map<PoolWorker, Promise<void>>();
  /** Workers of the previous backend: their successors inherit the leases. */
  replaced: readonly PoolWorker[] = [];

  constructor(inputs: PoolInputs, backend: Backend, dispatcher: Dispatcher, rules: { now: ModelRules }) {
    this.inputs = inputs;
    this.backend = backend;
    this.dispatcher = dispatcher;
    this.rules = rules;
  }

  get model(): ModelConfig {
    return this.inputs.config;
  }

  get name(): string {
    return this.model.name;
  }

  get workers(): readonly PoolWorker[] {
    return this.dispatcher.workers.slots;
  }

  get live(): PoolWorker[] {
    return this.workers.filter(({ retiring }) => !retiring);
  }

  /** The DNS name a worker comes from; undefined: the config or an operator names it. */
  foundBy({ worker: { address } }: PoolWorker): string | undefined {
    return address === undefined ? undefined : desiredAddresses(this.inputs).get(address)?.from;
  }
}

interface Step {
  readonly model: ModelConfig;
  /** Omitted: the model is new. */
  readonly pool?: ModelPool;
  /** Replaces the current one. */
  readonly backend?: Backend;
  /** Started for the current backend. */
  readonly joining: readonly Worker[];
  /** Own workers that the new backend took over; omitted: the config's count. */
  readonly numbers?: readonly number[] | undefined;
}

const LOOK_EVERY_MS = 50;
const TRY_AGAIN_MS = 10_000;

export class WorkerPool {
  /** In model order; the array stays the same, its contents change. */
  readonly dispatchers: Dispatcher[] = [];
  /** `dispatchers`, and those of removed models still draining. */
  running: readonly Dispatcher[] = [];
  readonly #parts: PoolParts;
  readonly #late: LateTasks;
  readonly #started = new Map<string, Backend>();
  /** Where tasks are, and whether other processes take them too. */
  #engine: Engine | undefined;
  #shared = false;
  #pools: readonly ModelPool[] = [];
  /** Removed models and, once no further batch of theirs starts, their end. */
  readonly #leaving = new Map<ModelPool, Promise<void> | undefined>();
  /** Removed models that a reload in progress may bring back. */
  readonly #wanted = new Set<ModelPool>();
  /** Replaced backends that stop after their last batch. */
  readonly #parting = new Set<Backend>();
  /** The last call of `#follow`; earlier ones have no effect. */
  #follows = 0;
  #reconciling = false;
  #stopped = false;

  constructor(parts: PoolParts) {
    this.#parts = parts;
    this.#late = new LateTasks(parts.clock);
  }

  get pools(): readonly ModelPool[] {
    return this.#pools;
  }

  get leaving(): readonly ModelPool[] {
    return [...this.#leaving.keys()];
  }

  get #all(): readonly ModelPool[] {
    return [...this.#pools, ...this.#leaving.keys()];
  }

  of(model: string): ModelPool | undefined {
    return this.#pools.find(({ name }) => name === model);
  }

  dispatcher(model: string): Dispatcher | undefined {
    return this.of(model)?.dispatcher;
  }

  /** Resolves when every configured worker can take a batch. */
  async open({ models }: Config): Promise<void> {
    for (const model of models) this.#started.set(model.name, this.#parts.makeBackend(model));
    await Promise.all([...this.#started.values()].map((backend) => backend.start()));
  }

  begin(config: Config, engine: Engine, shared: boolean): void {
    this.#engine = engine;
    this.#shared = shared;
    this.#take(config.models.map((model) => this.#begun(newInputs(model), this.#started.get(model.name)!)));
    this.#started.clear();
  }

  /** Resolves when every DNS name was resolved once and its workers have joined. */
  async follow(): Promise<void> {
    const turn = ++this.#follows;
    await Promise.all(this.#pools.map((pool) => this.#follow(pool)));
    if (turn !== this.#follows) return;
    for (const pool of this.#pools) pool.former = [];
    await this.#found();
  }

  /** Starts no further batch; resolves when the running ones are settled. */
  async drain(): Promise<void> {
    this.#stop();
    await Promise.all(this.#all.map(({ dispatcher }) => dispatcher.drain()));
  }

  async stopDispatchers(): Promise<void> {
    this.#stop();
    this.#late.stop();
    await Promise.all(this.#all.map(({ dispatcher }) => dispatcher.stop()));
  }

  async stopBackends(): Promise<void> {
    const backends = [
      ...this.#started.values(),
      ...this.#all.map(({ backend }) => backend),
      ...this.#parting,
    ];
    await Promise.all(backends.map((backend) => backend.stop()));
  }

  #stop(): void {
    this.#stopped = true;
    for (const { names } of this.#all) for (const discovery of names.values()) discovery.stop();
  }

  // ── Reconcile ───────────────────────────────────────────────────────────────────────────────────

  /** Resolves when missing network workers have joined; own ones may take long to start. */
  async reconcile(): Promise<void> {
    await Promise.all(this.#pools.map((pool) => this.#reconcile(pool)));
  }

  /** Coalesces requests made in the same turn. */
  #reconcileSoon(): void {
    if (this.#reconciling) return;
    this.#reconciling = true;
    queueMicrotask(() => {
      this.#reconciling = false;
      void this.reconcile();
    });
  }

  async #reconcile(pool: ModelPool): Promise<void> {
    if (this.#stopped) return;
    const now = this.#parts.clock.now();
    const { retire, start, grow } = planOf(pool.inputs, actualOf(pool, now), pool.growing);
    const why = hasAddresses(pool.model.backend) ? "DNS names it no more" : undefined;
    for (const { of } of retire) void this.#end(pool, of, why);
    // One at a time: each takes memory and time to load.
    if (grow > 0 && pool.growing === 0 && now >= pool.retryAt) void this.#grow(pool);
    for (const wanted of start) {
      const { address, from } = wanted;
      if (this.#refusal(address) !== undefined) continue;
      const why = from === undefined ? "it was added" : `${from} names it`;
      await this.#start(pool, wanted, why).catch(() => {});
    }
  }

  /** Undefined: its backend was replaced meanwhile. Rejects with a one-line reason. */
  async #start(
    pool: ModelPool,
    wanted: DesiredWorker | undefined,
    why: string,
  ): Promise<PoolWorker | undefined> {
    const { backend } = pool;
    if (wanted !== undefined) pool.starting.add(wanted.address);
    else pool.growing++;
    try {
      const worker = await backend.grow(wanted?.address, wanted?.host);
      if (pool.backend !== backend || !this.#pools.includes(pool)) {
        await backend.retire(worker);
        return undefined;
      }
      const joined = this.#join(pool, worker);
      this.#tell(pool, joined, why);
      return joined;
    } finally {
      if (wanted !== undefined) pool.starting.delete(wanted.address);
      else pool.growing--;
    }
  }

  async #grow(pool: ModelPool): Promise<void> {
    const startedAt = this.#parts.clock.now();
    try {
      const started = await this.#start(pool, undefined, "it was added");
      pool.trouble = undefined;
      if (started !== undefined) pool.onStarted?.(this.#parts.clock.now() - startedAt);
    } catch (error) {
      this.#couldNotStart(pool, error);
    }
    await this.#reconcile(pool);
  }

  #couldNotStart(pool: ModelPool, error: unknown): void {
    pool.retryAt = this.#parts.clock.now() + TRY_AGAIN_MS;
    const known = pool.trouble !== undefined;
    pool.trouble = `a worker could not be started: ${wordsOf(error)}`;
    if (known || this.#stopped) return;
    this.#notice("warn", `${pool.name}: ${pool.trouble}; it is tried again`);
  }

  #join(pool: ModelPool, worker: Worker): PoolWorker {
    const { workers } = pool.dispatcher;
    const { address } = worker;
    const last = pool.replaced.findLast((each) => sameMachine(each.worker, worker));
    const key = workerKey(pool.name, workers.nameOf(worker), address && shownAddress(address));
    return workers.join(worker, {
      predecessors: this.#predecessors(worker, pool),
      // A lease belongs to the machine, whichever rules it runs by.
      lease: last?.lease,
      drained: this.#parts.orders.isAside(key),
    });
  }

  /**
   * Workers that may still use a worker's machine: retiring ones, here or in another model, and those of a removed
   * model. With leases each model has its own, and a shared queue has no end to wait for.
   */
  #predecessors(worker: Worker, own: ModelPool): PoolWorker[] {
    const pools = this.#shared ? [own] : [own, ...this.#all.filter((pool) => pool !== own)];
    return pools.flatMap((pool) =>
      pool.workers.filter((each) => {
        if (pool !== own && worker.address === undefined) return false;
        return sameMachine(each.worker, worker) && (each.retiring || this.#leaving.has(pool));
      }),
    );
  }

  /** Retires a worker, and stops it once idle. `why`: to be logged; omitted: the config or the autoscaler wants it. */
  #end(pool: ModelPool, worker: PoolWorker, why?: string): Promise<void> {
    const known = pool.ending.get(worker);
    if (known !== undefined) return known;
    const { backend, dispatcher } = pool;
    if (why !== undefined) this.#tell(pool, worker, why, "draining");
    const end = async (): Promise<void> => {
      await dispatcher.retire(worker);
      await backend.retire(worker.worker).catch((error: unknown) => {
        const what = `${worker.name} gets no more batches, but could not be ended`;
        this.#notice("error", `model ${pool.name}: ${what}: ${wordsOf(error)}`);
      });
      // A later worker at the same address is a new one.
      if (why !== undefined) this.#parts.orders.give(keyOf(pool, worker), false);
      pool.ending.delete(worker);
      this.#parts.onWorkers?.();
      this.#reconcileSoon();
    };
    const ended = end();
    if (why !== undefined) pool.ending.set(worker, ended);
    return ended;
  }

  // ── Inputs ──────────────────────────────────────────────────────────────────────────────────────

  /** Adds a worker for an operator: at an address, or one more of Ferry's own. Rejects with one line. */
  async add(pool: ModelPool, address?: string): Promise<PoolWorker> {
    const refusal = address === undefined ? undefined : this.#refusal(address);
    if (refusal !== undefined) throw new Error(refusal);
    const worker = await this.#start(pool, address === undefined ? undefined : { address }, "it was added");
    if (worker === undefined) throw new Error("the config was read again meanwhile; ask again");
    const { config, added, removed, size } = pool.inputs;
    const back = new Map(removed);
    back.delete(address ?? numberOf(worker.name) ?? "");
    const more = address !== undefined && !isListed(config, address);
    pool.inputs = {
      ...pool.inputs,
      added: more ? new Set([...added, address]) : added,
      removed: back,
      size: address === undefined ? size + 1 : size,
    };
    return worker;
  }

  /** Removes a worker for an operator. Resolves when it is gone. */
  remove(pool: ModelPool, worker: PoolWorker): Promise<void> {
    const { config, added, removed, size } = pool.inputs;
    const { address } = worker.worker;
    const key = address ?? numberOf(worker.name) ?? "";
    const fewer = address === undefined && !config.scaling.apply && !pool.ending.has(worker);
    pool.inputs = {
      ...pool.inputs,
      added: new Set([...added].filter((each) => each !== address)),
      removed: isListed(config, key) ? new Map([...removed, [key, worker.name]]) : removed,
      size: fewer ? size - 1 : size,
    };
    return this.#end(pool, worker, "it is removed");
  }

  /** Called by the autoscaler: how many own workers to run. */
  resize(model: string, size: number, onStarted?: (ms: number) => void): void {
    const pool = this.of(model);
    if (pool === undefined) return;
    pool.onStarted = onStarted;
    if (pool.inputs.size !== size) pool.inputs = { ...pool.inputs, size };
    void this.#reconcile(pool);
  }

  /** Why a worker at this address may not join; undefined: it may. */
  #refusal(address: string): string | undefined {
    if (this.#all.some(({ starting }) => starting.has(address)))
      return `${shownAddress(address)} is on its way in already`;
    for (const { name, workers, backend } of this.#pools) {
      const worker = workers.find((each) => each.worker.address === address);
      // A worker of a replaced backend is a predecessor, and waited for.
      if (worker === undefined || (worker.retiring && !backend.workers.includes(worker.worker))) continue;
      const state = worker.retiring ? "is being removed from" : "is a worker of";
      return `${shownAddress(address)} ${state} model ${name}; it would get two batches at once`;
    }
    return undefined;
  }

  async #follow(pool: ModelPool): Promise<void> {
    const { clock, events, resolve = systemResolve } = this.#parts;
    const { backend } = pool.model;
    const wanted = new Map<string, string>();
    if (hasAddresses(backend)) {
      for (const written of backend.workers.filter(isDns)) wanted.set(`${backend.kind} ${written}`, written);
    }
    const first: Promise<void>[] = [];
    for (const [key, written] of wanted) {
      const known = pool.names.get(key);
      known?.wake();
      if (known !== undefined || !hasAddresses(backend)) continue;
      const rules = (): DiscoveryRules => lookupRules(pool.model);
      const name = dnsName(written, backend.kind);
      const found = (): Promise<void> => this.#found();
      const discovery = new Discovery(pool.name, name, rules, found, { clock, events, resolve });
      pool.names.set(key, discovery);
      first.push(discovery.start());
    }
    for (const [key, discovery] of pool.names) if (!wanted.has(key)) this.#forget(pool, key, discovery);
    await Promise.all(first);
  }

  #forget(pool: ModelPool, key: string, discovery: Discovery): void {
    discovery.stop();
    pool.names.delete(key);
    pool.former.push(discovery);
  }

  async #found(): Promise<void> {
    for (const pool of this.#pools) {
      const before = pool.inputs.found;
      const found = new Map<string, FoundAddress>();
      for (const { name, urls } of [...pool.names.values(), ...pool.former]) {
        // Shown under the first name that has the address.
        for (const url of urls) if (!found.has(url)) found.set(url, { host: name.host, from: name.shown });
      }
      pool.inputs = { ...pool.inputs, found };
      for (const [url, { from }] of pool.inputs.found)
        if (!before.has(url)) this.#tellRefused(pool, url, from);
    }
    await this.reconcile();
  }

  /** DNS names an address that is already there, or not allowed: logged once. */
  #tellRefused(pool: ModelPool, address: string, from: string): void {
    const removed = pool.inputs.removed.has(address)
      ? `${shownAddress(address)} was removed by hand; add it again, or take it out of the config`
      : undefined;
    const refusal = removed ?? this.#refusal(address);
    if (refusal !== undefined) this.#notice("warn", `model ${pool.name}: ${from}: ${refusal}`);
  }

  // ── Reload ──────────────────────────────────────────────────────────────────────────────────────

  async prepare(next: Config): Promise<Prepared> {
    const started: (() => Promise<void>)[] = [];
    const abandon = async (): Promise<void> => {
      await Promise.all(started.map((undo) => undo()));
    };
    // Wait for all: a worker that is still starting cannot be stopped.
    const steps = await Promise.allSettled(next.models.map((model) => this.#step(model, next, started)));
    const failure = steps.find((step) => step.status === "rejected");
    if (failure !== undefined) {
      await abandon();
      throw failure.reason;
    }
    const ready = steps.flatMap((step) => (step.status === "fulfilled" ? [step.value] : []));
    return { commit: () => this.#commit(ready, next), abandon };
  }

  /** Starts what a model lacks; `started` collects how to stop it. */
  async #step(model: ModelConfig, next: Config, started: (() => Promise<void>)[]): Promise<Step> {
    const pool = this.of(model.name) ?? (await this.#returning(model.name, started));
    const inputs = this.#inputs(model, pool, next);
    if (pool === undefined || !sameBackend(pool.model, model)) {
      if (pool !== undefined && this.#shared) checkKind(pool.model, model);
      const numbers = pool && keptNumbers(pool, model);
      const backend = this.#parts.makeBackend(without(model, inputs.removed), numbers);
      started.push(() => backend.stop());
      await backend.start();
      return { model, ...(pool && { pool }), backend, joining: [], numbers };
    }
    const { backend } = pool;
    const joining: Worker[] = [];
    const grow = async (address?: string): Promise<void> => {
      const worker = await backend.grow(address);
      started.push(() => backend.retire(worker));
      joining.push(worker);
    };
    // A worker listed again during its last batch is started anew when it is gone: the model may have no other.
    const desired = desiredAddresses(inputs);
    const returning = pool.workers.filter(({ retiring, worker }) => {
      return retiring && desired.has(worker.address ?? "") && backend.workers.includes(worker);
    });
    await Promise.all(returning.map((worker) => this.#end(pool, worker)));
    const plan = planOf(inputs, actualOf(pool, this.#parts.clock.now()), pool.growing);
    for (const { address, from } of plan.start) {
      if (from === undefined && !pool.starting.has(address)) await grow(address);
    }
    await Promise.all(Array.from({ length: plan.grow }, () => grow()));
    return { model, pool, joining };
  }

  /** A removed model that comes back; one in its last batches is waited for instead. */
  async #returning(model: string, started: (() => Promise<void>)[]): Promise<ModelPool | undefined> {
    for (const [pool, end] of this.#leaving) {
      if (pool.name !== model) continue;
      await end;
      if (end !== undefined) continue;
      this.#wanted.add(pool);
      started.push(async () => void this.#wanted.delete(pool));
      return pool;
    }
    return undefined;
  }

  /** The inputs under `next`. A new model listing a worker removed from a vanished one is that model renamed. */
  #inputs(model: ModelConfig, pool: ModelPool | undefined, next: Config): PoolInputs {
    if (pool !== undefined) return inputsAfter(pool.inputs, model);
    const listed = listedAddresses(model);
    const renamed = this.#all.filter(({ name }) => !next.models.some((each) => each.name === name));
    const removed = renamed.flatMap(({ inputs }) => [...inputs.removed]);
    return { ...newInputs(model), removed: new Map(removed.filter(([each]) => listed.includes(each))) };
  }

  #commit(steps: readonly Step[], next: Config): void {
    const gone = this.#pools.filter(({ name }) => !next.models.some((model) => model.name === name));
    this.#keepDrained(next.models);
    const inputs = steps.map(({ model, pool }) => this.#inputs(model, pool, next));
    for (const pool of gone) this.#leaving.set(pool, undefined);
    // Retire before joining: a machine may only change models.
    const replaced = steps.map(({ pool, backend }, at) => {
      if (pool === undefined) return [];
      pool.inputs = inputs[at]!;
      const { live } = pool;
      const plan = planOf(pool.inputs, actualOf(pool, this.#parts.clock.now()));
      if (backend === undefined) for (const { of } of plan.retire) void this.#end(pool, of);
      else for (const worker of live) void pool.dispatcher.retire(worker);
      return live;
    });
    const pools = steps.map((step, at) =>
      step.pool === undefined
        ? this.#begun(inputs[at]!, step.backend!)
        : this.#changed(step, step.pool, replaced[at]!),
    );
    this.#take(pools);
    for (const pool of gone) void this.#leave(pool, next.limits.drainMs);
    void this.follow();
    void this.reconcile();
  }

  /** A worker drained in a vanished model stays drained in a new one that lists it: the model was renamed. */
  #keepDrained(models: readonly ModelConfig[]): void {
    const { orders } = this.#parts;
    const gone = this.#pools.filter(({ name }) => models.every((model) => model.name !== name));
    for (const model of models) {
      if (this.of(model.name) !== undefined) continue;
      for (const shown of listedAddresses(model).map(shownAddress)) {
        const key = workerKey(model.name, "", shown);
        const drained = gone.some(({ name }) => orders.isAside(workerKey(name, "", shown)));
        // The fleet may have resumed it under its new name.
        if (drained && !orders.knows(key)) orders.give(key, true);
      }
    }
  }

  #begun(inputs: PoolInputs, backend: Backend): ModelPool {
    const { config: model } = inputs;
    const rules = { now: this.#parts.rulesOf(model) };
    const dispatcher = this.#parts.makeDispatcher(() => rules.now, model);
    const pool = new ModelPool(inputs, backend, dispatcher, rules);
    for (const worker of backend.workers) this.#join(pool, worker);
    this.#parts.onBackend?.(model.name, backend, dispatcher);
    return pool;
  }

  /** `before`: its previous workers. */
  #changed(step: Step, pool: ModelPool, before: readonly PoolWorker[]): ModelPool {
    const { model, backend, joining } = step;
    const { dispatcher } = pool;
    const returns = this.#leaving.delete(pool);
    this.#wanted.delete(pool);
    pool.rules.now = this.#parts.rulesOf(model);
    dispatcher.wake();
    if (backend !== undefined) this.#replace(pool, backend, step.numbers, before);
    const desired = desiredAddresses(pool.inputs);
    for (const worker of joining) {
      if (worker.address === undefined || desired.has(worker.address)) this.#join(pool, worker);
      else void pool.backend.retire(worker);
    }
    if (returns || backend !== undefined) this.#parts.onBackend?.(model.name, pool.backend, dispatcher);
    return pool;
  }

  #replace(pool: ModelPool, backend: Backend, numbers: Step["numbers"], before: readonly PoolWorker[]): void {
    const { backend: old, inputs } = pool;
    const names = numbers && new Set(before.map(({ worker }) => worker.name));
    pool.backend = backend;
    pool.replaced = before;
    this.#parting.add(old);
    for (const worker of backend.workers.slice()) {
      const { name, address } = worker;
      // An operator may have removed it while the backend was prepared.
      const out = address === undefined ? names?.has(name) === false : inputs.removed.has(address);
      if (out) void backend.retire(worker);
      else this.#join(pool, worker);
    }
    void Promise.all(pool.workers.filter(({ retiring }) => retiring).map(({ gone }) => gone)).then(
      async () => {
        await old.stop();
        this.#parting.delete(old);
        this.#reconcileSoon();
      },
    );
  }

  #take(pools: readonly ModelPool[]): void {
    this.#pools = pools;
    for (const { name } of pools) this.#late.forget(name);
    this.dispatchers.splice(0, Infinity, ...pools.map(({ dispatcher }) => dispatcher));
    this.running = this.#all.map(({ dispatcher }) => dispatcher);
  }

  // ── Models that are removed ─────────────────────────────────────────────────────────────────────

  async #leave(pool: ModelPool, withinMs: number): Promise<void> {
    const { clock } = this.#parts;
    this.#parts.onBackend?.(pool.name, undefined, pool.dispatcher);
    for (const [key, discovery] of pool.names) this.#forget(pool, key, discovery);
    const until = clock.now() + withinMs;
    const over = (): boolean => clock.now() >= until || !this.#busy(pool);
    const here = (): boolean => this.#leaving.has(pool) && !this.#stopped;
    while (here() && (this.#wanted.has(pool) || !over())) {
      await new Promise<void>((resolve) => clock.at(clock.now() + LOOK_EVERY_MS, resolve));
    }
    if (here()) this.#leaving.set(pool, this.#endModel(pool));
  }

  /** Starts no further batch of it. */
  async #endModel(pool: ModelPool): Promise<void> {
    const { model, dispatcher, backend } = pool;
    const drained = dispatcher.drain();
    // Another model may use the machines once they are idle.
    for (const worker of pool.live) void dispatcher.retire(worker);
    if (!this.#shared) await refuseRest(model.name, this.#engine!, this.#parts.clock);
    await drained;
    await dispatcher.stop();
    await backend.stop();
    this.#leaving.delete(pool);
    this.running = this.#all.map(({ dispatcher }) => dispatcher);
    if (!this.#shared && !this.#stopped) this.#late.refuse(model.name, this.#engine!, model.timeouts.totalMs);
    this.#parts.onGone?.(model.name);
  }

  #busy({ name, dispatcher }: ModelPool): boolean {
    const { slots, retriesUntil } = dispatcher.workers;
    const runs = slots.some(({ batch }) => batch !== undefined);
    // Tasks waiting for a retry are requeued a moment later.
    const sitOut = this.#parts.clock.now() < retriesUntil + 2 * LOOK_EVERY_MS;
    return runs || sitOut || this.#engine!.waiting(name).some((depth) => depth > 0);
  }

  #tell(
    pool: ModelPool,
    worker: PoolWorker,
    why: string,
    state = worker.state(this.#parts.clock.now()),
  ): void {
    this.#parts.events.emit("worker.changed", { model: pool.name, worker: worker.name, state, why });
    this.#parts.onWorkers?.();
  }

  #notice(level: "warn" | "error", message: string): void {
    this.#parts.events.emit("notice", { level, message });
  }
}

/** The same in every process. */
export function keyOf({ name: model }: ModelPool, { name, worker: { address } }: PoolWorker): string {
  return workerKey(model, name, address && shownAddress(address));
}

function actualOf(pool: ModelPool, now: number): (ActualWorker & { readonly of: PoolWorker })[] {
  const own = new Set(pool.backend.workers);
  return pool.workers.map((of) => {
    const { worker, name, retiring, drained, batch } = of;
    const pace = of.healthy(now) ? 1 / of.usualRatio : 0;
    const [busy, replaced] = [batch !== undefined, !own.has(worker)];
    const { address } = worker;
    const number = address === undefined ? numberOf(name) : undefined;
    return { of, address, number, retiring, replaced, drained, busy, pace };
  });
}

function sameMachine(one: Worker, other: Worker): boolean {
  return one.address === undefined && other.address === undefined
    ? one.name === other.name
    : one.address === other.address;
}

/** Ignores workers, which are reconciled separately, and DNS settings. */
function sameBackend(one: ModelConfig, other: ModelConfig): boolean {
  const settings = ({ backend, health: { askMs } }: ModelConfig): object => ({
    ...backend,
    workers: undefined,
    ...(hasAddresses(backend) && { ...NO_LOOKUPS, askMs }),
  });
  return isDeepStrictEqual(settings(one), settings(other));
}

const NO_LOOKUPS = {
  dnsMs: undefined,
  dnsServers: undefined,
} as const;

function lookupRules({ backend }: ModelConfig): DiscoveryRules {
  const { dnsMs = Infinity, dnsServers = [] } = hasAddresses(backend) ? backend : {};
  return { everyMs: dnsMs, servers: dnsServers };
}

/** Whether workers are own or shared is fixed when their model begins. */
function checkKind({ name, backend }: ModelConfig, next: ModelConfig): void {
  if (hasAddresses(backend) === hasAddresses(next.backend)) return;
  throw new Error(
    `models[${name}].backend: ${backend.kind} → ${next.backend.kind} needs a restart on Redis; ` +
      `or give the model another name`,
  );
}

/** The model without the workers that operators removed. */
function without(model: ModelConfig, removed: ReadonlyMap<string, string>): ModelConfig {
  const { backend } = model;
  if (!hasAddresses(backend)) return model;
  const workers = backend.workers.filter((each) => isDns(each) || !removed.has(hrefOf(each)));
  return { ...model, backend: { ...backend, workers } };
}

/** Numbers of the current own workers, where the next list is the same; undefined: the config's count. */
function keptNumbers({ model, live }: ModelPool, next: ModelConfig): number[] | undefined {
  if (hasAddresses(next.backend) || !sameNumber(model, next)) return undefined;
  return live.flatMap(({ name }) => numberOf(name) ?? []).map(Number);
}

function wordsOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
