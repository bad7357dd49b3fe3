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
 * ended. A model that is gone takes nothing new; its queue is served until it is empty, for `limits.drainMs` at most,
 * and what is left then is refused, unless the queue is shared: then it is for others.
 */
import { isDeepStrictEqual } from "node:util";
import type { Backend, Worker } from "./backend/backend.ts";
import { hasAddresses } from "./banner.ts";
import type { Clock } from "./clock.ts";
import type { BackendConfig, Config, ModelConfig } from "./config.ts";
import type { Dispatcher } from "./dispatch/dispatcher.ts";
import type { ModelRules } from "./dispatch/model-rules.ts";
import type { Slot } from "./dispatch/workers.ts";
import { fixedWorkers } from "./dns-workers.ts";
import type { Engine } from "./engine/engine.ts";
import { rulesOf } from "./wiring.ts";

export interface CrewParts {
  readonly clock: Clock;
  makeBackend(model: ModelConfig, config: Config): Backend;
  makeDispatcher(rules: ModelRules, model: ModelConfig, backend: Backend): Dispatcher;
  /** A backend is in use, or is not any more. */
  onBackend(model: string, backend: Backend | undefined, dispatcher: Dispatcher): void;
}

export interface Crew {
  readonly model: ModelConfig;
  readonly backend: Backend;
  readonly dispatcher: Dispatcher;
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
  /** How many go, of those that have no address. */
  readonly fewer: number;
}

const LOOK_EVERY_MS = 50;
const LEASE_MS = 10_000;
const AT_ONCE = 256;
const NOBODY: ReadonlySet<string> = new Set();

export class Crews {
  /** In the order of the models; the arrays stay the same, what is in them changes. */
  readonly dispatchers: Dispatcher[] = [];
  readonly backends: Backend[] = [];
  readonly #parts: CrewParts;
  /** Where tasks are; and whether other processes take them too. */
  #engine: Engine | undefined;
  #shared = false;
  #crews: readonly Crew[] = [];
  /** Of models that are gone from the config. */
  readonly #leaving = new Set<Crew>();
  /** Backends that were replaced, and end with their last batch. */
  readonly #parting = new Set<Backend>();
  /** Workers that retire, by model and address. */
  readonly #going = new Map<string, Promise<void>>();
  #stopped = false;
  /** Called when a model that was leaving is gone. */
  onGone: (model: string) => void = () => {};

  constructor(parts: CrewParts) {
    this.#parts = parts;
  }

  get leaving(): readonly Crew[] {
    return [...this.#leaving];
  }

  dispatcher(model: string): Dispatcher | undefined {
    return this.#crews.find((crew) => crew.model.name === model)?.dispatcher;
  }

  /** Resolves when every worker can take a batch. */
  async open(config: Config): Promise<void> {
    for (const model of config.models) this.backends.push(this.#parts.makeBackend(model, config));
    await Promise.all(this.backends.map((backend) => backend.start()));
  }

  /** From here on batches run. */
  begin(config: Config, engine: Engine, shared: boolean): void {
    this.#engine = engine;
    this.#shared = shared;
    this.#take(config.models.map((model, at) => this.#crew(model, this.backends[at]!, config)));
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
    await Promise.all([...this.#crews, ...this.#leaving].map(({ dispatcher }) => dispatcher.drain()));
  }

  async stopDispatchers(): Promise<void> {
    this.#stopped = true;
    await Promise.all([...this.#crews, ...this.#leaving].map(({ dispatcher }) => dispatcher.stop()));
  }

  async stopBackends(): Promise<void> {
    const leaving = this.leaving.map(({ backend }) => backend);
    await Promise.all([...this.backends, ...leaving, ...this.#parting].map((backend) => backend.stop()));
  }

  #crew(model: ModelConfig, backend: Backend, config: Config): Crew {
    const dispatcher = this.#parts.makeDispatcher(
      rulesOf(model, config.admission.maxWorkerLoad),
      model,
      backend,
    );
    this.#parts.onBackend(model.name, backend, dispatcher);
    return { model, backend, dispatcher };
  }

  #take(crews: readonly Crew[]): void {
    this.#crews = crews;
    this.dispatchers.splice(0, Infinity, ...crews.map(({ dispatcher }) => dispatcher));
    this.backends.splice(0, Infinity, ...crews.map(({ backend }) => backend));
  }

  /** Starts what a model needs that it does not have; `started` says how to end that. */
  async #step(model: ModelConfig, next: Config, started: (() => Promise<void>)[]): Promise<Step> {
    const crew = this.#crews.find((each) => each.model.name === model.name);
    if (crew === undefined || !sameBackend(crew.model, model)) {
      if (crew !== undefined && this.#shared) checkKind(crew.model, model);
      const backend = this.#parts.makeBackend(model, next);
      started.push(() => backend.stop());
      await backend.start();
      if (crew !== undefined) await carryOver(crew, backend, model.backend);
      return { model, ...(crew && { crew }), backend, joining: backend.workers, leaving: NOBODY, fewer: 0 };
    }
    const joining: Worker[] = [];
    const { backend } = crew;
    const grow = async (address?: string): Promise<void> => {
      const worker = await backend.grow(address);
      started.push(() => backend.retire(worker));
      joining.push(worker);
    };
    const { came, went, more } = workerChange(crew.model.backend, model.backend);
    // One that was added by hand before it stood in the config is there already.
    for (const address of came) {
      await this.#going.get(`${model.name} ${hrefOf(address)}`);
      if (!backend.workers.some((worker) => worker.address === hrefOf(address))) await grow(address);
    }
    // Where the autoscaler starts and ends workers it goes by the new number itself.
    const count = model.scaling.apply ? 0 : more;
    await Promise.all(Array.from({ length: Math.max(0, count) }, () => grow()));
    return { model, crew, joining, leaving: new Set(went.map(hrefOf)), fewer: Math.max(0, -count) };
  }

  #commit(steps: readonly Step[], next: Config): void {
    const gone = this.#crews.filter(({ model }) => !next.models.some(({ name }) => name === model.name));
    this.#take(
      steps.map((step): Crew => {
        const { model, crew, backend } = step;
        if (crew === undefined) return this.#crew(model, backend!, next);
        crew.dispatcher.retune(rulesOf(model, next.admission.maxWorkerLoad));
        if (backend !== undefined) this.#replace(crew, backend);
        else this.#exchange(crew, step);
        return { ...crew, model, backend: backend ?? crew.backend };
      }),
    );
    for (const crew of gone) void this.#leave(crew, next.limits.drainMs);
  }

  #exchange({ dispatcher, backend }: Crew, { joining, leaving, fewer }: Step): void {
    for (const worker of joining) dispatcher.join(worker);
    const slots = dispatcher.workers.slots.filter((slot) => !slot.retiring);
    const going = slots.filter(({ worker }) => worker.address !== undefined && leaving.has(worker.address));
    const idleFirst = slots.toReversed().toSorted((one, other) => busy(one) - busy(other));
    for (const slot of [...going, ...idleFirst.slice(0, fewer)]) {
      this.#retire(dispatcher, slot, backend);
    }
  }

  #retire(dispatcher: Dispatcher, slot: Slot, backend: Backend): void {
    const key = `${dispatcher.rules.name} ${slot.worker.address ?? slot.name}`;
    const gone = dispatcher.retire(slot).then(() => backend.retire(slot.worker));
    this.#going.set(key, gone);
    void gone.finally(() => this.#going.delete(key));
  }

  #replace({ model, dispatcher, backend: old }: Crew, backend: Backend): void {
    const before = dispatcher.workers.slots.filter((slot) => !slot.retiring);
    for (const worker of backend.workers) {
      const same = ({ worker: other }: Slot): boolean => other.address === worker.address;
      dispatcher.join(worker, worker.address === undefined ? undefined : before.find(same));
    }
    this.#parting.add(old);
    this.#parts.onBackend(model.name, backend, dispatcher);
    void Promise.all(before.map((slot) => dispatcher.retire(slot))).then(async () => {
      dispatcher.wake();
      await old.stop();
      this.#parting.delete(old);
    });
  }

  async #leave(crew: Crew, withinMs: number): Promise<void> {
    const { model, dispatcher, backend } = crew;
    const { clock } = this.#parts;
    this.#leaving.add(crew);
    this.#parts.onBackend(model.name, undefined, dispatcher);
    const until = clock.now() + withinMs;
    const over = (): boolean => clock.now() >= until || this.#stopped || !this.#busy(crew);
    while (!over()) await new Promise<void>((resolve) => clock.at(clock.now() + LOOK_EVERY_MS, resolve));
    if (this.#stopped) return;
    const drained = dispatcher.drain();
    // It may have come back meanwhile.
    if (!this.#shared && this.dispatcher(model.name) === undefined) await this.#refuseRest(model.name);
    await drained;
    await dispatcher.stop();
    await backend.stop();
    this.#leaving.delete(crew);
    this.onGone(model.name);
  }

  #busy({ model, dispatcher }: Crew): boolean {
    const runs = dispatcher.workers.slots.some(({ batch }) => batch !== undefined);
    return runs || this.#engine!.waiting(model.name).some((depth) => depth > 0);
  }

  /** Better a word now than silence until the deadline. */
  async #refuseRest(model: string): Promise<void> {
    const engine = this.#engine!;
    const message = `the model ${JSON.stringify(model)} was removed before this task had its turn`;
    for (;;) {
      const [queue] = engine.queues(model);
      if (queue === undefined) return;
      const batch = {
        id: "removed",
        reason: "full",
        worker: "",
        startedAt: this.#parts.clock.now(),
        why: message,
      } as const;
      const { parameters } = queue;
      const lease = await engine.claim({ model, parameters, max: AT_ONCE, leaseMs: LEASE_MS, batch });
      const failed = { kind: "failed", code: "NOT_FOUND", message } as const;
      await engine.settle(
        lease,
        lease.tasks.map(({ task }) => ({ id: task.id, ...failed })),
      );
      if (lease.tasks.length === 0) return;
    }
  }
}

/** All but the workers, which come and go by themselves; how they are asked is theirs too. */
function sameBackend(one: ModelConfig, other: ModelConfig): boolean {
  const settings = ({ backend, health: { askMs, askTimeoutMs } }: ModelConfig): object => ({
    ...backend,
    workers: undefined,
    ...(hasAddresses(backend) && { dnsMs: undefined, dnsGraceMs: undefined, askMs, askTimeoutMs }),
  });
  return isDeepStrictEqual(settings(one), settings(other));
}

/** Whether a worker is one process's own or everybody's is settled when its model begins. */
function checkKind({ name, backend }: ModelConfig, next: ModelConfig): void {
  if (hasAddresses(backend) === hasAddresses(next.backend)) return;
  throw new Error(
    `models[${name}].backend: ${backend.kind} → ${next.backend.kind} needs a restart on Redis; ` +
      `or give the model another name`,
  );
}

function workerChange(
  before: BackendConfig,
  after: BackendConfig,
): { came: readonly string[]; went: readonly string[]; more: number } {
  if (hasAddresses(before) && hasAddresses(after)) {
    // Those that a name of DNS stands for are the roster's.
    const [were, are] = [fixedWorkers(before.workers), fixedWorkers(after.workers)];
    const came = are.filter((each) => !were.includes(each));
    return { came, went: were.filter((each) => !are.includes(each)), more: 0 };
  }
  const count = ({ workers }: BackendConfig): number => (typeof workers === "number" ? workers : 0);
  return { came: [], went: [], more: count(after) - count(before) };
}

/** Workers that no config lists, found by DNS or added by hand, are the new backend's too. */
async function carryOver({ model, dispatcher }: Crew, backend: Backend, next: BackendConfig): Promise<void> {
  if (!hasAddresses(model.backend) || model.backend.kind !== next.kind) return;
  const listed = new Set(fixedWorkers(model.backend.workers).map(hrefOf));
  for (const { worker, retiring } of dispatcher.workers.slots) {
    const { address, host } = worker;
    if (address === undefined || retiring || listed.has(address)) continue;
    if (!backend.workers.some((other) => other.address === address)) await backend.grow(address, host);
  }
}

function hrefOf(address: string): string {
  return URL.parse(address)?.href ?? address;
}

function busy({ batch }: Slot): number {
  return batch === undefined ? 0 : 1;
}
