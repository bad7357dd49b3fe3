/**
 * What this process knows of the whole fleet: everybody's last beat, its own numbers fresh.
 *
 * A gateway has no worker of its own and admits by these sums. They are as old as the members' last beats
 * and ours: at most 2 × beatMs, about half of it on average. While the store is away the last numbers
 * stand, because whatever asks for them is about to hear from the store itself.
 *
 * A worker that changes hands is run by nobody for at most a beat. It counts as healthy for that time: a
 * request is better queued for its next holder than refused.
 */
import type { Clock } from "../../app/clock.ts";
import type { Dispatcher } from "../../dispatch/dispatcher.ts";
import type { PoolWorker } from "../worker.ts";
import { shownAddress } from "./orders.ts";
import type { BeatReply, Member, ModelBeat, WorkerBeat } from "./registry.ts";

export interface ModelView {
  /** Members that run a worker of it. */
  readonly batchers: number;
  readonly workers: number;
  readonly healthy: number;
  readonly capacityPerMs: number;
  /** Until a worker that is down or paused may be tried; Infinity when none is. */
  readonly nextUsableInMs: number;
  /** Over the last ten seconds, 0 to 1. */
  readonly utilization: number;
}

/** Who runs a worker; "" for one that is changing hands. */
export type FleetWorker = WorkerBeat & { readonly batcher: string; readonly zone: string };

export interface Self {
  readonly id: string;
  readonly zone: string;
  /** Every model that is configured, whether or not anybody serves it. */
  readonly models: readonly string[];
  readonly dispatchers: readonly Dispatcher[];
}

/** Longer than the members need to come back, shorter than callers wait. */
const SERVED_FOR_MS = 3000;

export class Fleet {
  readonly self: Self;
  readonly startedAt: number;
  readonly #clock: Clock;
  #members: readonly Member[] = [];
  #unheld: readonly { readonly model: string; readonly name: string }[] = [];
  #heardAt = 0;
  /** When each model was last served, for those who ask while nobody says so; as many as models. */
  readonly #served = new Map<string, { readonly healthy: number; readonly until: number }>();
  /** Of the configured models: whoever asks for another gets an empty sum, kept until the next beat. */
  readonly #others = new Map<string, Sums>();
  readonly #admitted = new Map<string, readonly number[]>();

  constructor(self: Self, clock: Clock) {
    this.self = self;
    this.#clock = clock;
    this.startedAt = clock.now();
  }

  /** All who lived at our last beat, ourselves included. */
  get members(): readonly Member[] {
    return this.#members;
  }

  /** Of those who run batches, or of all where none does: the first by id. One process speaks for the fleet. */
  leads(): boolean {
    const batchers = this.#members.filter(({ role }) => role !== "gateway");
    const ids = (batchers.length > 0 ? batchers : this.#members).map(({ id }) => id);
    return ids.length === 0 || this.self.id === ids.reduce((a, b) => (a < b ? a : b));
  }

  /** Beats of other members that have something to say of a model. */
  *others(name: string): Generator<ModelBeat> {
    for (const { models } of this.#otherMembers()) {
      for (const beat of models) if (beat.name === name) yield beat;
    }
  }

  /** Workers of a model that change hands: nobody speaks for them now. */
  changingHands(name: string): number {
    let count = 0;
    for (const { model } of this.#unheld) if (model === name) count++;
    return count;
  }

  /** Tasks per ms of a model that other gateways let in, by tier; summed once a beat. */
  admittedByOthers(name: string): readonly number[] {
    let sums = this.#admitted.get(name);
    if (sums !== undefined) return sums;
    const rates = this.#otherMembers()
      .flatMap(({ doors }) => doors)
      .filter((door) => door.name === name)
      .map(({ admittedPerMs }) => admittedPerMs);
    const tiers = Math.max(0, ...rates.map(({ length }) => length));
    sums = Array.from({ length: tiers }, (_, tier) =>
      rates.reduce((sum, each) => sum + (each[tier] ?? 0), 0),
    );
    this.#admitted.set(name, sums);
    return sums;
  }

  hear({ members, unheld }: BeatReply): void {
    this.#admitted.clear();
    this.#members = members;
    const beats = this.#otherMembers().flatMap(({ workers }) => workers);
    // One that its last holder still speaks for counts there, and once.
    this.#unheld = unheld
      .map(({ model, lease }) => ({ model, name: placeOf(lease.slice(model.length + 1), model, beats) }))
      .filter(({ model, name }) => !has(beats, model, name));
    this.#heardAt = this.#clock.now();
    this.#others.clear();
  }

  /**
   * As in `model`, and cheap enough to ask for every request. When nobody says that it runs a worker of the
   * model, the last number stands for a while: after a failover of the registry its members come back one by
   * one, and a request is better queued for them than refused.
   */
  healthy(name: string): number {
    const now = this.#clock.now();
    let { healthy, workers } = this.#sumOthers(name);
    for (const dispatcher of this.self.dispatchers) {
      if (dispatcher.rules.name !== name) continue;
      healthy += dispatcher.workers.healthy(now);
      workers += dispatcher.workers.held(now);
    }
    const last = this.#served.get(name);
    if (workers === 0) return last !== undefined && now < last.until ? last.healthy : 0;
    if (healthy === 0) this.#served.delete(name);
    else if (last?.healthy !== healthy || now > last.until - SERVED_FOR_MS / 2)
      this.#served.set(name, { healthy, until: now + SERVED_FOR_MS });
    return healthy;
  }

  model(name: string): ModelView {
    const now = this.#clock.now();
    const { nextUsableAt, busy, ...others } = this.#sumOthers(name);
    const view = { ...others, nextUsableInMs: Math.max(0, nextUsableAt - now), busy };
    for (const dispatcher of this.self.dispatchers) {
      if (dispatcher.rules.name !== name) continue;
      const own = modelBeat(dispatcher, now);
      add(view, own);
      view.nextUsableInMs = Math.min(view.nextUsableInMs, own.nextUsableInMs ?? Infinity);
    }
    const { busy: all, ...rest } = view;
    return { ...rest, utilization: all / Math.max(1, view.workers) };
  }

  /**
   * Every worker once, under the member that runs it. One that changes hands may be in its last holder's beat still,
   * and in that of its next one already: our own word comes first, then the youngest.
   */
  workers(): FleetWorker[] {
    const now = this.#clock.now();
    const { id, zone, dispatchers } = this.self;
    const rows = heldWorkers(dispatchers, this.startedAt, now).map((own) => ({ ...own, batcher: id, zone }));
    const others = this.#otherMembers().toSorted((one, other) => one.ageMs - other.ageMs);
    for (const { id, zone, workers } of others) {
      // A child of its member is nobody else's, whatever its name.
      const news = workers.filter(({ leased, model, name }) => !(leased && has(rows, model, name)));
      rows.push(...news.map((worker) => ({ ...worker, batcher: id, zone })));
    }
    for (const { model, name } of this.#unheld) {
      if (!has(rows, model, name)) rows.push({ ...UNHELD, model, name });
    }
    return rows;
  }

  #otherMembers(): Member[] {
    return this.#members.filter(({ id }) => id !== this.self.id);
  }

  /** Summed once a beat. */
  #sumOthers(name: string): Sums {
    let sums = this.#others.get(name);
    if (sums !== undefined) return sums;
    const unheld = this.#unheld.filter(({ model }) => model === name).length;
    sums = {
      batchers: 0,
      workers: unheld,
      healthy: unheld,
      capacityPerMs: 0,
      busy: 0,
      nextUsableAt: Infinity,
    };
    for (const { models, ageMs } of this.#otherMembers()) {
      for (const beat of models) {
        if (beat.name !== name) continue;
        add(sums, beat);
        const nextUsableAt = this.#heardAt - ageMs + (beat.nextUsableInMs ?? Infinity);
        sums.nextUsableAt = Math.min(sums.nextUsableAt, nextUsableAt);
      }
    }
    this.#others.set(name, sums);
    return sums;
  }
}

function has(rows: readonly WorkerBeat[], model: string, name: string): boolean {
  return rows.some((row) => row.leased && row.model === model && row.name === name);
}

/** A worker's name from the address that it is leased under, as those who run it say it. */
function placeOf(address: string, model: string, rows: readonly WorkerBeat[]): string {
  const url = URL.parse(address);
  if (url === null) return address;
  const { host, pathname } = url;
  const manyPaths = rows.some((row) => row.model === model && row.name.startsWith(`${host}/`));
  return manyPaths ? host + pathname : host;
}

interface Sums {
  batchers: number;
  workers: number;
  healthy: number;
  capacityPerMs: number;
  /** Workers that are busy, on average. */
  busy: number;
  nextUsableAt: number;
}

function add(sums: Omit<Sums, "nextUsableAt">, beat: ModelBeat): void {
  if (beat.workers > 0) sums.batchers++;
  sums.workers += beat.workers;
  sums.healthy += beat.healthy;
  sums.capacityPerMs += beat.capacity.perMs;
  sums.busy += beat.workers * beat.utilization;
}

const UNHELD = {
  state: "idle",
  inFlight: 0,
  batches: 0,
  tasks: 0,
  calls: 0,
  failures: 0,
  busyMs: 0,
  utilization: 0,
  ratio: 1,
  leased: true,
  batcher: "",
  zone: "",
} as const;

export function modelBeat(dispatcher: Dispatcher, now: number): ModelBeat {
  const { rules, workers } = dispatcher;
  const { healthy, freeAt, nextUsableAt, ...capacity } = dispatcher.horizon(now);
  return {
    name: rules.name,
    workers: workers.held(now),
    healthy,
    capacity: { ...capacity, counted: freeAt.length },
    nextUsableInMs: nextUsableAt === Infinity ? null : nextUsableAt - now,
    arrivalsPerMs: dispatcher.arrivalsPerMs(),
    utilization: thousandths(workers.utilization(now)),
  };
}

export function workerBeat(
  dispatcher: Dispatcher,
  slot: PoolWorker,
  startedAt: number,
  now: number,
): WorkerBeat {
  const { name, batches, tasks, calls, failures, ahead } = slot;
  const pipeline = dispatcher.pipelineOf(slot);
  const busyMs = slot.busyMsUntil(now);
  return {
    name,
    model: dispatcher.rules.name,
    ...(slot.worker.address !== undefined && { address: shownAddress(slot.worker.address) }),
    state: slot.state(now),
    inFlight: slot.batch?.size ?? 0,
    batches,
    tasks,
    calls,
    failures,
    busyMs: Math.round(busyMs),
    utilization: thousandths(busyMs / Math.max(1, now - startedAt)),
    ratio: Math.round(100 * slot.ratio) / 100,
    leased: slot.shared,
    ...(pipeline > 1 && { pipeline }),
    ...(ahead && { ahead: ahead.id }),
    ...(slot.worker.load && { load: thousandths(slot.worker.load.share) }),
    ...whyDown(slot, now),
  };
}

/** Nobody knows when a worker that is silent, or says that it is unwell, will be back. */
function whyDown({ circuit, worker, silent }: PoolWorker, now: number): Pick<WorkerBeat, "down"> {
  if (circuit.down(now)) {
    return { down: { why: circuit.why, retryInMs: Math.ceil(circuit.usableAt - now) } };
  }
  if (silent) return { down: { why: "what it runs is long overdue", retryInMs: 0 } };
  return worker.health?.well === false ? { down: { why: worker.health.why, retryInMs: 0 } } : {};
}

/** The workers that this process runs: all but those whose lease is somebody else's. */
export function heldWorkers(
  dispatchers: readonly Dispatcher[],
  startedAt: number,
  now: number,
): WorkerBeat[] {
  return dispatchers.flatMap((dispatcher) =>
    dispatcher.workers.slots
      .filter((slot) => slot.held(now))
      .map((slot) => workerBeat(dispatcher, slot, startedAt, now)),
  );
}

export function thousandths(share: number): number {
  return Math.round(1000 * share) / 1000;
}
