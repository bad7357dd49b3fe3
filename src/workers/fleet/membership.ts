/**
 * This process's heartbeat in the fleet, and the leases of shared workers that it renews.
 *
 * Time from kill -9 of a batcher to the next holder's first batch on its workers:
 *
 *   it is dead      aliveMs after its last heartbeat, which was before the kill            ≤ 2000 ms
 *   we notice       after a member was late, our next heartbeat is set for the instant
 *                   at which it counts as dead; otherwise within beatMs                    ≤  500 ms
 *   and act         a round trip, then claim and call                                      ~   10 ms
 *
 * At most 2.5 s with the defaults (beatMs 500, aliveMs 2000); measured 1.5 to 2.0 s over 12 kills. Two heartbeats in a
 * row may be lost before a lease is.
 *
 * The zombie rule: a process that slept through its lease (SIGSTOP, a stalled event loop) must not start a batch when
 * it wakes. So on our own clock a lease ends when the heartbeat was sent + aliveMs − margin, with margin = aliveMs /
 * 10; the registry counts from when it received it, which was later. The margin covers clock drift and the way from the
 * decision to the worker. Not covered: our clock stands still while the machine is suspended, and a process stopped
 * between decision and call continues when it wakes. Either may send a worker a second batch once. (On a starved
 * machine 2 of 8 stops at random did; of 8 in which the process was waiting for events, none.)
 *
 * Urgent changes (a worker to give back became idle, one went down or came back, was taken or lost) send a heartbeat at
 * once, at most every beatMs / 10. A failed heartbeat is retried after beatMs / 4; leases last meanwhile.
 */
import type { Alarm, Clock } from "../../app/clock.ts";
import type { Dispatcher } from "../../dispatch/dispatcher.ts";
import { type PoolWorker, UNHELD } from "../worker.ts";
import type { Events } from "../../observe/events.ts";
import { Fleet, heldWorkers, modelBeat } from "./fleet.ts";
import { leaseNames, Orders } from "./orders.ts";
import type { Beat, BeatReply, DoorBeat, Registry, MemberRole } from "./registry.ts";

/** Twice a second, and four times in `aliveMs`: two late heartbeats do not make a live batcher dead. */
export function beatMsFor(aliveMs: number): number {
  return Math.min(500, aliveMs / 4);
}

export interface MembershipOptions {
  /** Unique to this process start. */
  readonly id: string;
  readonly zone: string;
  readonly role: MemberRole;
  readonly version: string;
  readonly beatMs: number;
  readonly aliveMs: number;
  readonly models: () => readonly string[];
  /** Of every model that runs here, including removed ones still draining; the same array until that changes. */
  readonly dispatchers: () => readonly Dispatcher[];
}

export interface MembershipParts {
  readonly registry: Registry;
  readonly clock: Clock;
  readonly events: Events;
  readonly random: () => number;
  /** Drained workers; omitted: a private list. */
  readonly orders?: Orders;
}

interface Shared {
  readonly lease: string;
  readonly slot: PoolWorker;
  /** Retiring predecessors of the same worker: the lease covers all of them. */
  readonly before: readonly PoolWorker[];
  readonly dispatcher: Dispatcher;
}

const MARGIN = 0.1;
/** Heartbeats are up to this fraction early, so that processes started together spread out. */
const JITTER = 0.1;
const LATE_BEATS = 1.5;
/** A single lost connection is repaired by the next try and not logged. */
const FAILURES_TO_TELL = 2;

export class Membership {
  readonly fleet: Fleet;
  readonly orders: Orders;
  /** Admission rates of this gateway; none in a batcher. */
  doors: (now: number) => readonly DoorBeat[] = () => [];
  readonly #options: MembershipOptions;
  readonly #parts: MembershipParts;
  /** As of the last heartbeat. */
  #shared: readonly Shared[] = [];
  /** Leases held for workers that are gone from here: they run nothing and are given back. */
  #orphans: readonly string[] = [];
  readonly #unwatch: () => void;
  #beating: Promise<void> | undefined;
  #alarm: Alarm | undefined;
  #alarmAt = Infinity;
  #sentAt = -Infinity;
  /** Something changed while a heartbeat was in flight. */
  #again = false;
  #failures = 0;
  #draining = false;
  #stopped = false;

  constructor(options: MembershipOptions, parts: MembershipParts) {
    this.#options = options;
    this.#parts = parts;
    this.orders = parts.orders ?? new Orders();
    const { id, zone, models, dispatchers } = options;
    const self = {
      id,
      zone,
      get models() {
        return models();
      },
      get dispatchers() {
        return dispatchers();
      },
    };
    this.fleet = new Fleet(self, parts.clock);
    const unwatch = [
      parts.events.on("worker.changed", () => this.#soon()),
      parts.events.on("worker.released", () => this.#soon()),
    ];
    this.#unwatch = () => unwatch.forEach((each) => each());
  }

  /** Resolves when the first heartbeat was answered or failed; then continues by itself. */
  start(): Promise<void> {
    return this.#beat();
  }

  /** From now on gives every shared worker back as soon as it is idle. */
  drain(): void {
    this.#draining = true;
    this.#soon();
  }

  /**
   * Frees all leases at once. Call after the dispatchers have stopped; where a batch still runs nothing is freed, and
   * the leases expire as after a crash. Idempotent; never rejects.
   */
  async stop(): Promise<void> {
    if (this.#stopped) return;
    this.#stopped = true;
    this.#unwatch();
    this.#alarm?.cancel();
    await this.#beating;
    for (const { slot } of this.#shared) slot.transition({ type: "lease", lease: UNHELD });
    if (this.#shared.some(runs)) return;
    try {
      await this.#parts.registry.leave(this.#options.id);
    } catch {
      // The store is unreachable; the leases expire.
    }
  }

  #soon(): void {
    if (this.#beating !== undefined) this.#again = true;
    else if (this.#sentAt !== -Infinity) this.#arm(this.#sentAt + this.#options.beatMs / 10);
  }

  #arm(at: number): void {
    if (this.#stopped || at >= this.#alarmAt) return;
    this.#alarm?.cancel();
    this.#alarmAt = at;
    this.#alarm = this.#parts.clock.at(at, () => void this.#beat());
  }

  #beat(): Promise<void> {
    this.#alarmAt = Infinity;
    this.#beating = this.#exchange().then((nextAt) => {
      this.#beating = undefined;
      this.#arm(nextAt);
      if (this.#again) this.#soon();
    });
    return this.#beating;
  }

  /** One heartbeat and its consequences; resolves with the instant of the next. */
  async #exchange(): Promise<number> {
    const { registry, clock, random } = this.#parts;
    const { beatMs } = this.#options;
    const sentAt = (this.#sentAt = clock.now());
    this.#again = false;
    let reply: BeatReply;
    try {
      reply = await registry.beat(this.#describe(sentAt));
    } catch (error) {
      this.#failed(error);
      return sentAt + beatMs / 4;
    }
    this.#succeeded();
    this.fleet.hear(reply);
    for (const { orders } of reply.members) this.orders.hear(orders);
    for (const dispatcher of this.#options.dispatchers()) this.orders.apply(dispatcher);
    this.#apply(reply, sentAt);
    return Math.min(sentAt + beatMs * (1 - JITTER * random()), this.#nextDeathAt(reply));
  }

  /** Models or workers were added, removed or drained: tell the others. */
  changed(): void {
    this.#soon();
  }

  /** A retiring worker is no longer listed, and given back as soon as it is idle. */
  #listed(): Beat["listed"] {
    return this.#options.dispatchers().map((dispatcher) => ({
      model: dispatcher.rules.name,
      leases: this.#shared
        .filter((each) => each.dispatcher === dispatcher && !each.slot.retiring)
        .map(({ lease }) => lease),
    }));
  }

  #describe(now: number): Beat {
    const { id, zone, role, version } = this.#options;
    const dispatchers = this.#options.dispatchers();
    this.#shared = dispatchers.flatMap(sharedWorkers);
    const held = this.#shared.filter(({ slot }) => slot.held(now));
    const releasing = held.filter((each) => goes(each.slot) && !runs(each)).map(({ lease }) => lease);
    const orphans = this.#orphans.filter((orphan) => !this.#shared.some(({ lease }) => lease === orphan));
    const worth = (each: Shared): number => (goes(each.slot) ? 0 : runs(each) ? 2 : 1);
    return {
      member: {
        id,
        zone,
        role,
        version,
        models: dispatchers.map((dispatcher) => modelBeat(dispatcher, now)),
        workers: heldWorkers(dispatchers, this.fleet.startedAt, now),
        doors: this.doors(now),
        ...(this.orders.all.length > 0 && { orders: this.orders.all }),
      },
      listed: this.#draining ? [] : this.#listed(),
      held: held.toSorted((a, b) => worth(a) - worth(b)).map(({ lease }) => lease),
      // Only what was leaving before: a batch may start on any other slot while this heartbeat is in flight.
      releasing: [...releasing, ...orphans],
    };
  }

  #apply(reply: BeatReply, sentAt: number): void {
    const now = this.#parts.clock.now();
    const heldUntil = sentAt + this.#options.aliveMs * (1 - MARGIN);
    const held = new Set(reply.held);
    const giveBack = new Set(reply.giveBack);
    const gained = new Set<Dispatcher>();
    for (const { workers } of this.#options.dispatchers()) workers.noteUsage(now);
    for (const each of this.#shared) {
      const { lease, slot, before, dispatcher } = each;
      const had = slot.held(now);
      const usable = had && !slot.lease.release;
      const release = giveBack.has(lease);
      const next = { until: held.has(lease) ? heldUntil : -Infinity, release };
      for (const holder of [slot, ...before]) holder.transition({ type: "lease", lease: next });
      const has = slot.held(now);
      if (!usable && has && !release) gained.add(dispatcher);
      // Our report is no longer true, or there is something to give back.
      if (had !== has || (release && !runs(each))) this.#again = true;
    }
    const known = new Set(this.#shared.map(({ lease }) => lease));
    this.#orphans = reply.held.filter((lease) => !known.has(lease));
    if (this.#orphans.length > 0) this.#again = true;
    for (const dispatcher of gained) dispatcher.wake();
  }

  /** When the first late member will count as dead, freeing its leases. */
  #nextDeathAt({ members }: BeatReply): number {
    const { beatMs, aliveMs } = this.#options;
    const ages = members.map(({ ageMs }) => ageMs).filter((ageMs) => ageMs > LATE_BEATS * beatMs);
    if (this.#shared.length === 0 || ages.length === 0) return Infinity;
    // The age is rounded down to a whole number.
    return this.#parts.clock.now() + aliveMs - Math.max(...ages) + 1;
  }

  #succeeded(): void {
    if (this.#failures >= FAILURES_TO_TELL) this.#tell("info", "the fleet's registry answers again");
    this.#failures = 0;
  }

  #failed(error: unknown): void {
    if (++this.#failures !== FAILURES_TO_TELL) return;
    const why = error instanceof Error ? error.message : String(error);
    const shared =
      this.#shared.length > 0 ? "; shared workers get no batch once their leases have run out" : "";
    this.#tell("warn", `the fleet's registry does not answer${shared}: ${why}`);
  }

  #tell(level: "info" | "warn", message: string): void {
    this.#parts.events.emit("notice", { level, message });
  }
}

function goes({ lease, retiring }: PoolWorker): boolean {
  return lease.release || retiring;
}

function runs({ slot, before }: Shared): boolean {
  return slot.batch !== undefined || before.some(({ batch }) => batch !== undefined);
}

function sharedWorkers(dispatcher: Dispatcher): Shared[] {
  const all = dispatcher.workers.slots.filter(({ shared }) => shared);
  const staying = new Set(all.filter(({ retiring }) => !retiring).map(({ worker }) => worker.address));
  const isReplaced = ({ retiring, worker }: PoolWorker): boolean => retiring && staying.has(worker.address);
  const slots = all.filter((slot) => !isReplaced(slot));
  const names = leaseNames(
    dispatcher.rules.name,
    slots.map((slot) => slot.worker.address ?? slot.name),
  );
  return slots.map((slot, at) => ({
    lease: names[at]!,
    slot,
    before: all.filter((each) => isReplaced(each) && each.worker.address === slot.worker.address),
    dispatcher,
  }));
}
