/**
 * The models that this process runs batches for, each with its backend and its dispatcher, and how they change while
 * they run.
 *
 *   prepare   everything that can fail: new backends and new workers are started, and nobody sees them yet
 *   commit    one synchronous step: new models begin, rules change, new workers join, others retire
 *   abandon   instead of commit: what was started is ended, and nothing was changed
 *
 * A worker that retires ends the batch that it has. A backend whose settings changed is replaced as a whole: its
 * successor's workers join at once, but one that is the same machine starts nothing before its predecessor's batch has
 * ended. Workers that somebody added or removed by hand, at a URL or of Ferry's own, stay so. A model that is gone takes nothing new; its queue is served until it is empty, for `limits.drainMs` at most,
 * and what is left then is refused, unless the queue is shared: then it is for others. One that comes back before that goes
 * on where it was. A machine that changes hands, from one model to another, is the new one's when the old one needs it no
 * more.
 */
import type { Backend, Worker } from "../workers/backend/backend.ts";
import type { Clock } from "./clock.ts";
import type { Config, ModelConfig } from "./config/config.ts";
import {
  checkKind,
  isExtra,
  numbersOf,
  sameBackend,
  staying,
  without,
  workerChange,
  worth,
} from "./crew-changes.ts";
import type { Dispatcher } from "../dispatch/dispatcher.ts";
import type { ModelRules } from "../dispatch/model-rules.ts";
import type { PoolWorker } from "../workers/worker.ts";
import type { Engine } from "../engine/engine.ts";
import { LateTasks, refuseRest } from "./refuse-rest.ts";
import { hrefOf, TakenOut } from "../workers/taken-out.ts";
import { rulesOf } from "./rules.ts";

export interface CrewParts {
  readonly clock: Clock;
  /** `numbers`: of its own workers at the start, where it has any; left out: from 1 on. */
  makeBackend(model: ModelConfig, config: Config, numbers?: readonly number[]): Backend;
  /** Without workers. */
  makeDispatcher(rules: () => ModelRules, model: ModelConfig): Dispatcher;
  /** A backend is in use, or is not any more. */
  onBackend(model: string, backend: Backend | undefined, dispatcher: Dispatcher): void;
}

export interface Crew {
  readonly model: ModelConfig;
  readonly backend: Backend;
  readonly dispatcher: Dispatcher;
  /** What the dispatcher goes by; switched by a reload. */
  readonly rules: { now: ModelRules };
}

/** A change that can be made at any moment, or not at all. */
export interface Prepared {
  /** At once, and without fail. */
  commit(): void;
  abandon(): Promise<void>;
}

/** What is to become of one model. */
interface Step {
  readonly model: ModelConfig;
  /** Of the model as it is; left out: it is new. */
  readonly crew?: Crew;
  /** In place of the one it has. */
  readonly backend?: Backend;
  readonly joining: readonly Worker[];
  /** Addresses of workers that go. */
  readonly leaving: ReadonlySet<string>;
  /** How many are to stay, where they have no addresses. */
  readonly count?: number | undefined;
}

const LOOK_EVERY_MS = 50;
const NOBODY: ReadonlySet<string> = new Set();

export class Crews {
  /** In the order of the models; the arrays stay the same, what is in them changes. */
  readonly dispatchers: Dispatcher[] = [];
  readonly backends: Backend[] = [];
  readonly takenOut = new TakenOut();
  readonly #late: LateTasks;
  readonly #parts: CrewParts;
  /** Where tasks are; and whether other processes take them too. */
  #engine: Engine | undefined;
  #shared = false;
  #crews: readonly Crew[] = [];
  /** Of models that are gone from the config, and, once no further batch of theirs starts, their end. */
  readonly #leaving = new Map<Crew, Promise<void> | undefined>();
  /** Those among them that a reload under way may bring back. */
  readonly #wanted = new Set<Crew>();
  /** Backends that were replaced, and end with their last batch. */
  readonly #parting = new Set<Backend>();
  #stopped = false;
  /** Called when a model that was leaving is gone. */
  onGone: (model: string) => void = () => {};

  constructor(parts: CrewParts) {
    this.#parts = parts;
    this.#late = new LateTasks(parts.clock);
  }

  get leaving(): readonly Crew[] {
    return [...this.#leaving.keys()];
  }

  get #all(): readonly Crew[] {
    return [...this.#crews, ...this.#leaving.keys()];
  }

  dispatcher(model: string): Dispatcher | undefined {
    return this.#crews.find((crew) => crew.model.name === model)?.dispatcher;
  }

  /** Resolves when every worker can take a batch. */
  async open(config: Config): Promise<void> {
    this.takenOut.retune(config.models);
    for (const model of config.models) this.backends.push(this.#parts.makeBackend(model, config));
    await Promise.all(this.backends.map((backend) => backend.start()));
  }

  /** From here on batches run. */
  begin(config: Config, engine: Engine, shared: boolean): void {
    this.#engine = engine;
    this.#shared = shared;
    this.#take(config.models.map((model, at) => this.#crew(model, this.backends[at]!)));
  }

  async prepare(next: Config): Promise<Prepared> {
    const started: (() => Promise<void>)[] = [];
    const abandon = async (): Promise<void> => {
      await Promise.all(started.map((undo) => undo()));
    };
    // All of them to their end: what is still being started cannot be ended.
    const steps = await Promise.allSettled(next.models.map((model) => this.#step(model, next, started)));
    const failure = steps.find((step) => step.status === "rejected");
    if (failure !== undefined) {
      await abandon();
      throw failure.reason;
    }
    const ready = steps.flatMap((step) => (step.status === "fulfilled" ? [step.value] : []));
    return { commit: () => this.#commit(ready, next), abandon };
  }

  /** No further batch is started; resolves when the running ones are settled. */
  async drain(): Promise<void> {
    this.#stopped = true;
    await Promise.all(this.#all.map(({ dispatcher }) => dispatcher.drain()));
  }

  async stopDispatchers(): Promise<void> {
    this.#stopped = true;
    this.#late.stop();
    await Promise.all(this.#all.map(({ dispatcher }) => dispatcher.stop()));
  }

  async stopBackends(): Promise<void> {
    const leaving = this.leaving.map(({ backend }) => backend);
    await Promise.all([...this.backends, ...leaving, ...this.#parting].map((backend) => backend.stop()));
  }

  #crew(model: ModelConfig, backend: Backend): Crew {
    const rules = { now: rulesOf(model) };
    const dispatcher = this.#parts.makeDispatcher(() => rules.now, model);
    for (const worker of backend.workers)
      dispatcher.join(worker, { predecessors: this.#predecessors(worker, dispatcher) });
    this.#parts.onBackend(model.name, backend, dispatcher);
    return { model, backend, dispatcher, rules };
  }

  #take(crews: readonly Crew[]): void {
    this.#crews = crews;
    for (const { model } of crews) this.#late.forget(model.name);
    this.dispatchers.splice(0, Infinity, ...crews.map(({ dispatcher }) => dispatcher));
    this.backends.splice(0, Infinity, ...crews.map(({ backend }) => backend));
  }

  /** Starts what a model needs that it does not have; `started` says how to end that. */
  async #step(model: ModelConfig, next: Config, started: (() => Promise<void>)[]): Promise<Step> {
    const known = this.#crews.find((each) => each.model.name === model.name);
    const crew = known ?? (await this.#back(model.name, started));
    if (crew === undefined || !sameBackend(crew.model, model)) {
      if (crew !== undefined && this.#shared) checkKind(crew.model, model);
      const slots = crew === undefined ? [] : staying(crew.dispatcher);
      const numbers = crew && numbersOf(slots, crew.model, model);
      const backend = this.#parts.makeBackend(without(model, this.#staysOut(model, next)), next, numbers);
      started.push(() => backend.stop());
      await backend.start();
      return { model, ...(crew && { crew }), backend, joining: backend.workers, leaving: NOBODY };
    }
    const joining: Worker[] = [];
    const { backend, dispatcher } = crew;
    const grow = async (address?: string): Promise<void> => {
      const worker = await backend.grow(address);
      started.push(() => backend.retire(worker));
      joining.push(worker);
    };
    const { came, went, count } = workerChange(crew.model.backend, model.backend);
    for (const address of came) {
      const here = dispatcher.workers.slots.filter(({ worker }) => worker.address === hrefOf(address));
      // One that was added by hand before it stood in the config is there already.
      if (here.some(({ retiring }) => !retiring)) continue;
      for (const slot of here) await dispatcher.retire(slot).then(() => backend.retire(slot.worker));
      await grow(address);
    }
    // Where the autoscaler starts and ends workers it goes by the new number itself.
    if (count === undefined || model.scaling.apply) {
      return { model, crew, joining, leaving: new Set(went.map(hrefOf)) };
    }
    const more = Math.max(0, count - staying(dispatcher).length);
    await Promise.all(Array.from({ length: more }, () => grow()));
    return { model, crew, joining, leaving: NOBODY, count };
  }

  /** The crew of a model that is on its way out; one whose last batches run is waited for, and is none any more. */
  async #back(model: string, started: (() => Promise<void>)[]): Promise<Crew | undefined> {
    for (const [crew, end] of this.#leaving) {
      if (crew.model.name !== model) continue;
      if (end !== undefined) await end;
      if (end !== undefined) continue;
      this.#wanted.add(crew);
      started.push(async () => void this.#wanted.delete(crew));
      return crew;
    }
    return undefined;
  }

  #commit(steps: readonly Step[], next: Config): void {
    const gone = this.#crews.filter(({ model }) => !next.models.some(({ name }) => name === model.name));
    for (const crew of gone) this.#leaving.set(crew, undefined);
    // Whoever goes does so before others come: a machine may only change hands.
    const replaced = steps.map((step) => {
      const { crew, backend, leaving } = step;
      const slots = crew === undefined ? [] : staying(crew.dispatcher);
      for (const slot of slots) if (leaving.has(slot.worker.address ?? "")) this.#retire(crew!, slot);
      if (backend === undefined) return [];
      this.#leaveOut(step, next, slots);
      for (const slot of slots) void crew!.dispatcher.retire(slot);
      return slots;
    });
    this.#take(steps.map((step, at) => this.#became(step, replaced[at]!)));
    this.#noteModels(next.models);
    for (const crew of gone) void this.#leave(crew, next.limits.drainMs);
  }

  #noteModels(models: readonly ModelConfig[]): void {
    this.takenOut.retune(
      models,
      this.leaving.map(({ model }) => model),
    );
  }

  #staysOut({ name }: ModelConfig, { models }: Config): (address: string) => boolean {
    return (address) => this.takenOut.keeps(name, address, models);
  }

  /** What was removed by hand while its next backend was prepared is not in that one either. */
  #leaveOut({ model, crew, backend }: Step, next: Config, slots: readonly PoolWorker[]): void {
    const numbers = crew && numbersOf(slots, crew.model, model);
    const names = numbers && new Set(slots.map(({ worker }) => worker.name));
    const staysOut = this.#staysOut(model, next);
    const out = backend!.workers.filter(({ name, address }) =>
      address === undefined ? names?.has(name) === false : staysOut(address),
    );
    for (const worker of out) void backend!.retire(worker);
  }

  /** `replaced`: the workers of its old backend, which retire. */
  #became(step: Step, replaced: readonly PoolWorker[]): Crew {
    const { model, crew, backend, joining, count = Infinity } = step;
    if (crew === undefined) return this.#crew(model, backend!);
    const { dispatcher } = crew;
    const returns = this.#leaving.delete(crew);
    this.#wanted.delete(crew);
    crew.rules.now = rulesOf(model);
    dispatcher.wake();
    if (backend !== undefined) this.#replace(crew, backend, replaced, model);
    else {
      for (const worker of joining)
        dispatcher.join(worker, { predecessors: this.#predecessors(worker, dispatcher) });
      if (returns) this.#parts.onBackend(model.name, crew.backend, dispatcher);
      const slots = staying(dispatcher);
      const leastMissed = slots.toReversed().toSorted((one, other) => worth(one) - worth(other));
      for (const slot of leastMissed.slice(0, Math.max(0, slots.length - count))) this.#retire(crew, slot);
    }
    return { ...crew, model, backend: backend ?? crew.backend };
  }

  /**
   * Who still uses a worker's machine: workers that retire, here or in another model, and those of a model that is on its
   * way out. Where machines are leased, each model's leases are its own, and a queue that others fill too has no
   * end to wait for.
   */
  #predecessors({ address, name }: Worker, own: Dispatcher): PoolWorker[] {
    const crews = this.#shared ? this.#all.filter(({ dispatcher }) => dispatcher === own) : this.#all;
    return crews.flatMap((crew) =>
      crew.dispatcher.workers.slots.filter(({ worker, retiring }) => {
        const same =
          address === undefined
            ? crew.dispatcher === own && worker.name === name
            : worker.address === address;
        return same && (retiring || this.#leaving.has(crew));
      }),
    );
  }

  #retire({ dispatcher, backend }: Crew, slot: PoolWorker): void {
    void dispatcher.retire(slot).then(() => backend.retire(slot.worker));
  }

  #replace(
    { model, dispatcher, backend: old }: Crew,
    backend: Backend,
    replaced: readonly PoolWorker[],
    next: ModelConfig,
  ): void {
    for (const worker of backend.workers) {
      const { name, address } = worker;
      const last = replaced.findLast(({ worker }) =>
        address === undefined ? worker.name === name : worker.address === address,
      );
      // A lease is the machine's, by whichever rules it runs.
      const { lease, drained = false } = last ?? {};
      dispatcher.join(worker, { predecessors: this.#predecessors(worker, dispatcher), lease, drained });
    }
    for (const slot of replaced) {
      if (isExtra(slot, model, next)) void this.#carryOver(slot, dispatcher, backend);
    }
    this.#parting.add(old);
    this.#parts.onBackend(model.name, backend, dispatcher);
    void Promise.all(
      dispatcher.workers.slots.filter(({ retiring }) => retiring).map(({ gone }) => gone),
    ).then(async () => {
      await old.stop();
      this.#parting.delete(old);
    });
  }

  /** Found by DNS or added by hand, it is the new backend's too. */
  async #carryOver(slot: PoolWorker, dispatcher: Dispatcher, backend: Backend): Promise<void> {
    const { name, address, host } = slot.worker;
    const same = (other: Worker): boolean => (address ?? other.name) === (other.address ?? name);
    if (backend.workers.some(same)) return;
    // Whoever is there already came by another way.
    const worker = await backend.grow(address, host).catch(() => undefined);
    if (worker === undefined) return;
    // Meanwhile the config may have changed again.
    if (this.backends.includes(backend)) {
      const { lease, drained } = slot;
      dispatcher.join(worker, { predecessors: [slot], lease, drained });
    } else await backend.retire(worker);
  }

  async #leave(crew: Crew, withinMs: number): Promise<void> {
    const { model, dispatcher } = crew;
    const { clock } = this.#parts;
    this.#parts.onBackend(model.name, undefined, dispatcher);
    const until = clock.now() + withinMs;
    const over = (): boolean => clock.now() >= until || !this.#busy(crew);
    const goesOn = (): boolean => this.#wanted.has(crew) || !over();
    const here = (): boolean => this.#leaving.has(crew) && !this.#stopped;
    while (here() && goesOn()) {
      await new Promise<void>((resolve) => clock.at(clock.now() + LOOK_EVERY_MS, resolve));
    }
    if (here()) this.#leaving.set(crew, this.#end(crew));
  }

  /** No further batch of it starts. */
  async #end(crew: Crew): Promise<void> {
    const { model, dispatcher, backend } = crew;
    const drained = dispatcher.drain();
    // Another model may have the machines as soon as they run nothing.
    for (const slot of staying(dispatcher)) void dispatcher.retire(slot);
    if (!this.#shared) await refuseRest(model.name, this.#engine!, this.#parts.clock);
    await drained;
    await dispatcher.stop();
    await backend.stop();
    this.#leaving.delete(crew);
    if (!this.#shared && !this.#stopped) this.#late.refuse(model.name, this.#engine!, model.timeouts.totalMs);
    this.#noteModels(this.#crews.map((each) => each.model));
    this.onGone(model.name);
  }

  #busy({ model, dispatcher }: Crew): boolean {
    const { slots, retriesUntil } = dispatcher.workers;
    const runs = slots.some(({ batch }) => batch !== undefined);
    // They are put back a moment later.
    const sitOut = this.#parts.clock.now() < retriesUntil + 2 * LOOK_EVERY_MS;
    return runs || sitOut || this.#engine!.waiting(model.name).some((depth) => depth > 0);
  }
}
