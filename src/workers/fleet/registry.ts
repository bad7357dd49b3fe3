/**
 * The registry contract: who is in the fleet, and which batcher runs which shared worker.
 *
 * Several batchers may list the same worker; the registry leases it to one of them at a time, so that it
 * never gets two batches at once. A member beats about every `beatMs`; one beat is one atomic act that
 * says "I live", renews every lease the member holds, takes what it should have and says what it should
 * give back. There is one clock, the registry's: a member is alive while its last beat is younger than
 * its own `aliveMs`, and the leases of a dead one are free. Leases are by name, and the name is the same in every
 * process that lists the worker.
 *
 *  - A worker goes only to a live member that lists it. A free one goes to the lister that holds fewest of
 *    its model (then fewest of all, then the first by id), which takes it in its own next beat.
 *  - Nobody should hold two workers of a model more than another lister of one of them does; where models
 *    are even, nobody two workers more in all. Who has too many is told to give back the difference, those
 *    it can best do without first. A fleet that has settled changes nothing.
 *  - Giving back takes two beats: told, it starts no further batch there; idle, it names the worker in
 *    `releasing`. Nothing is taken from a live member without this.
 *  - Grace: for one `aliveMs` nothing changes hands, and members get back exactly what they held, when it
 *    was the registry that was away and not its members: it holds leases but has heard nobody for half of
 *    aliveMs (an outage, or a clock that was set), or a member still holds workers by its own clock and is
 *    unknown here (lost data). Otherwise the first to return would take everything while the others'
 *    batches still run. A batcher that restarts alone after a crash waits for this too.
 *
 * Not covered: a failover that loses the last moments of writes, a clock that is set on by less than
 * half of aliveMs, and lost data of which a newcomer hears first. A worker may then see a second batch once. Tasks
 * are safe from that; their own leases carry tokens.
 */
import type { Horizon } from "../../core/shed.ts";
import type { WorkerState } from "../../observe/events.ts";
import type { Order } from "./orders.ts";

export type Role = "all" | "gateway" | "batcher";

/** One worker that a member runs: its own child, or one that it leases. */
export interface WorkerBeat {
  readonly name: string;
  readonly model: string;
  /** Where it is, without what is secret in it; left out for a child of its member. */
  readonly address?: string;
  readonly state: WorkerState;
  /** Tasks of the batch it runs now. */
  readonly inFlight: number;
  readonly batches: number;
  readonly tasks: number;
  readonly calls: number;
  readonly failures: number;
  readonly busyMs: number;
  /** Share of the time since the member's start. */
  readonly utilization: number;
  /** Its pace against the others of its member: 2 needs twice as long. */
  readonly ratio: number;
  /** Others list it too. */
  readonly leased: boolean;
  /** Batches that it may have in its hands, where that is more than one. */
  readonly pipeline?: number;
  /** The batch that it has behind the one it runs. */
  readonly ahead?: string;
  /** How full it last said it is, 0 to 1; left out where it never says. */
  readonly load?: number;
  readonly down?: { readonly why: string; readonly retryInMs: number };
}

/** The numbers of a `Horizon`; the free times are too old when they arrive to be worth sending. */
export type CapacityBeat = Omit<Horizon, "healthy" | "freeAt" | "nextUsableAt"> & {
  /** Workers that count. */
  readonly counted: number;
};

/** How fast a gateway lets tasks of one model in, by tier. */
export interface DoorBeat {
  readonly name: string;
  readonly admittedPerMs: readonly number[];
}

/** What a member can do for one model, with the workers it runs. */
export interface ModelBeat {
  readonly name: string;
  readonly workers: number;
  readonly healthy: number;
  readonly capacity: CapacityBeat;
  /** Until a worker that is down or paused may be tried; null when none is. */
  readonly nextUsableInMs: number | null;
  readonly arrivalsPerMs: number;
  /** Over the last ten seconds, 0 to 1. */
  readonly utilization: number;
}

export interface Member {
  /** Unique to this start of the process. */
  readonly id: string;
  readonly zone: string;
  readonly role: Role;
  readonly version: string;
  readonly models: readonly ModelBeat[];
  readonly workers: readonly WorkerBeat[];
  /** None in a batcher. */
  readonly doors: readonly DoorBeat[];
  /** Workers that somebody put aside, or let back in; left out by those who know of none. */
  readonly orders?: readonly Order[];
  /** Since its last beat. */
  readonly ageMs: number;
}

export interface Beat {
  readonly member: Omit<Member, "ageMs">;
  /** The shared workers that this member may run, under their lease names. */
  readonly listed: readonly { readonly model: string; readonly leases: readonly string[] }[];
  /** What it holds by its own clock, the one it can best do without first. */
  readonly held: readonly string[];
  /** Those of `held` that it was told to give back and that run nothing; it starts nothing there. */
  readonly releasing: readonly string[];
}

export interface BeatReply {
  /** Held for another `aliveMs` from when the beat was sent. Whatever is not here is lost. */
  readonly held: readonly string[];
  /** Those of `held` on which no further batch may start. */
  readonly giveBack: readonly string[];
  /** Changing hands: listed by somebody who lives, and not yet in what any member says of itself. */
  readonly unheld: readonly { readonly model: string; readonly lease: string }[];
  /** All who live, the caller included. */
  readonly members: readonly Member[];
}

export interface Registry {
  /** Rejects when the store is away or may not have heard it; the next beat repairs whatever that did. */
  beat(beat: Beat): Promise<BeatReply>;

  /** What the member holds is free at once. It must run nothing and not beat again. */
  leave(id: string): Promise<void>;
}
