/**
 * State of the whole fleet: every member's last heartbeat, with this process's numbers current. A gateway has no
 * workers and admits by these sums. They are at most 2 × beatMs old, about half of that on average. While the store is
 * unreachable the last numbers stand: the caller is about to get the store's error anyway. A worker between two leases
 * is run by no member for at most a heartbeat. It counts as healthy meanwhile: a request is better queued for its next
 * holder than refused.
 */
import type { Clock } from "../../app/clock.ts";
import type { Dispatcher } from "../../dispatch/dispatcher.ts";
import type { PoolWorker } from "../worker.ts";
import { shownAddress } from "./orders.ts";
import type { BeatReply, Member, ModelBeat, WorkerBeat } from "./registry.ts";

export interface ModelView {
  readonly batchers: number;
  readonly workers: number;
  readonly healthy: number;
  readonly capacityPerMs: number;
  /** Until a worker that is down or paused may be tried; Infinity when none is. */
  readonly nextUsableInMs: number;
  /** Last ten seconds, 0 to 1. */
  readonly utilization: number;
}

/** `batcher`: who runs it; "" between two leases. */
export type FleetWorker = WorkerBeat & { readonly batcher: string; readonly zone: string };

export interface Self {
  readonly id: string;
  readonly zone: string;
  /** Every configured model, served or not. */
  readonly models: readonly string[];
  readonly dispatchers: readonly Dispatcher[];
}

/** Longer than members need to come back, shorter than callers wait. */
const SERVED_FOR_MS = 3000;

export class Fleet {
  readonly self: Self;
  readonly startedAt: number;
  readonly #clock: Clock;
  #members: readonly Member[] = [];
  #unheld: readonly { readonly model: string; readonly name: string }[] = [];
  #heardAt = 0;
  /** When each model was last served, for the time in which no member reports it; one entry per model. */
  readonly #served = new Map<string, { readonly healthy: number; readonly until: number }>();
  /** By configured model; others get an empty sum, kept until the next heartbeat. */
  readonly #others = new Map<string, Sums>();
  readonly #admitted = new Map<string, readonly number[]>();

  constructor(self: Self, clock: Clock) {
    this.self = self;
    this.#clock = clock;
    this.startedAt = clock.now();
  }

  /** Members alive at our last heartbeat, including this process. */
  get members(): readonly Member[] {
    return this.#members;
  }

  /** True for the first by id of the members that run batches, or of all where none does. It speaks for the fleet. */
  leads(): boolean {
    const batchers = this.#members.filter(({ role }) => role !== "gateway");
    const ids = (batchers.length > 0 ? batchers : this.#members).map(({ id }) => id);
    return ids.length === 0 || this.self.id === ids.reduce((a, b) => (a < b ? a : b));
  }

  *others(name: string): Generator<ModelBeat> {
    for (const { models } of this.#otherMembers()) {
      for (const beat of models) if (beat.name === name) yield beat;
    }
  }

  /** Workers of a model between two leases. */
  changingHands(name: string): number {
    let count = 0;
    for (const { model } of this.#unheld) if (model === name) count++;
    return count;
  }

  /** Tasks per ms of a model admitted by other gateways, by tier; summed once per heartbeat. */
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
    // A worker still in its last holder's heartbeat is counted there, once.
    this.#unheld = unheld
      .map(({ model, lease }) => ({ model, name: placeOf(lease.slice(model.length + 1), model, beats) }))
      .filter(({ model, name }) => !has(beats, model, name));
    this.#heardAt = this.#clock.now();
    this.#others.clear();
  }

  /**
   * As in `model`, but cheap enough for every request. When no member reports a worker of the model, the last number
   * stands for a while: after a registry failover members come back one by one, and a request is better queued than
   * refused.
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

  /** Every worker once. One changing hands may be in two heartbeats: ours takes precedence, then the youngest. */
  workers(): FleetWorker[] {
    const now = this.#clock.now();
    const { id, zone, dispatchers } = this.self;
    const rows = heldWorkers(dispatchers, this.startedAt, now).map((own) => ({ ...own, batcher: id, zone }));
    const others = this.#otherMembers().toSorted((one, other) => one.ageMs - other.ageMs);
    for (const { id, zone, workers } of others) {
      // A member's own child is distinct, whatever its name.
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

  /** Summed once per heartbeat. */
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

/** A worker's name from its lease address, as its holders call it. */
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

/** `retryInMs` is 0 for a silent or unwell worker: its return is not scheduled. */
function whyDown({ circuit, worker, silent }: PoolWorker, now: number): Pick<WorkerBeat, "down"> {
  if (circuit.down(now)) {
    return { down: { why: circuit.why, retryInMs: Math.ceil(circuit.usableAt - now) } };
  }
  if (silent) return { down: { why: "what it runs is long overdue", retryInMs: 0 } };
  return worker.health?.well === false ? { down: { why: worker.health.why, retryInMs: 0 } } : {};
}

/** Workers run by this process: all but those leased to others. */
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
