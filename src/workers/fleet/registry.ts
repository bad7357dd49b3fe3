/**
 * Who is in the fleet, and which batcher runs which shared worker.
 *
 * Several batchers may list the same worker; the registry leases it to one of them at a time, so that it never gets two
 * batches at once. A member sends a heartbeat about every `beatMs`; one beat is one atomic act that says "I live", renews every
 * lease the member holds, takes what it should have and says what it should give back. There is one clock, the registry's: a
 * member is alive while its last beat is younger than its own `aliveMs`, and the leases of a dead one are free.
 *
 *  - A worker goes only to a live member that lists it. A free one goes to the lister that holds fewest of its model (then
 *    fewest of all, then the first by id), which takes it in its own next beat.
 *  - No member should hold two workers of a model more than another lister of one of them; where models are even, none two
 *    workers more in all. A member with too many is told to give back the difference, those it can best do without first.
 *  - Giving back takes two beats: told, it starts no further batch there; idle, it names the worker in `releasing`. Nothing is
 *    taken from a live member without this.
 *  - Grace: for one `aliveMs` nothing changes hands, and members get back exactly what they held, when the registry was away
 *    and not its members: it holds leases but has heard nobody for half of aliveMs (an outage, or a clock that was set), or a
 *    member still holds workers by its own clock and is unknown here (lost data). Otherwise the first to return would take
 *    everything while the others' batches still run. A batcher that restarts alone after a crash waits for this too.
 *
 * Not covered: a failover that loses the last moments of writes, a clock that is set on by less than half of aliveMs, and lost
 * data of which a newcomer hears first. A worker may then see a second batch once. Tasks are safe: their own leases have tokens.
 *
 * In Redis it is seven keys under one hash tag and two scripts. A member costs one script call per beat. Measured there (Redis
 * 7.0, one core of a small machine), with the size of the reply:
 *
 *    4 batchers,  4 gateways,  16 workers     0.1 ms      4 KB
 *    8 batchers,  4 gateways,  64 workers     0.2 ms     15 KB
 *   16 batchers, 32 gateways, 256 workers     0.7 ms     60 KB      7 % of the server at 96 beats a second
 *
 * A beat is never sent again by the client: each carries a number, and the script refuses one that a later beat has overtaken,
 * so that a request that was given up but still lies in a socket does no harm.
 */
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import type { Horizon } from "../../core/shed.ts";
import type { RedisNodes } from "../../engine/redis/client/nodes.ts";
import type { WorkerState } from "../../observe/events.ts";
import type { WorkerOrder } from "./orders.ts";

export type MemberRole = "all" | "gateway" | "batcher";

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
  readonly role: MemberRole;
  readonly version: string;
  readonly models: readonly ModelBeat[];
  readonly workers: readonly WorkerBeat[];
  /** None in a batcher. */
  readonly doors: readonly DoorBeat[];
  /** Workers that somebody put aside, or let back in; left out by those who know of none. */
  readonly orders?: readonly WorkerOrder[];
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

type Store = Pick<RedisNodes, "run">;
type Script = Parameters<Store["run"]>[1]["script"];
type StoreReply = Awaited<ReturnType<Store["run"]>>;

export interface RedisRegistryOptions {
  /** This member is dead when its last beat is this old. */
  readonly aliveMs: number;
  /** From a short name to a key of shard 0. */
  key(name: string): string;
  /** The registry's clock; the server's when left out, which only tests do not. */
  now?(): number;
}

const SHARD = 0;
const KEYS = ["beats", "members", "lists", "leases", "texts", "grace", "alive"];
const beatScript = load("beat");
const leaveScript = load("leave");

export class RedisRegistry implements Registry {
  readonly #store: Store;
  readonly #options: RedisRegistryOptions;
  readonly #keys: readonly string[];
  #beats = 0;

  constructor(store: Store, options: RedisRegistryOptions) {
    this.#store = store;
    this.#options = options;
    this.#keys = KEYS.map((name) => options.key(name));
  }

  async beat({ member, listed, held, releasing }: Beat): Promise<BeatReply> {
    const args = [
      member.id,
      this.#options.aliveMs,
      ++this.#beats,
      JSON.stringify(member),
      JSON.stringify(listed.map(({ model, leases }) => [model, leases])),
      JSON.stringify(held),
      JSON.stringify(releasing),
    ];
    const now = this.#options.now?.();
    if (now !== undefined) args.push(now);
    const reply = await this.#store.run(SHARD, { script: beatScript, keys: this.#keys, args });
    const [mine, giveBack, unheld, members] = list(reply);
    return {
      held: list(mine).map(text),
      giveBack: list(giveBack).map(text),
      unheld: list(unheld).map((pair) => {
        const [model, lease] = list(pair);
        return { model: text(model), lease: text(lease) };
      }),
      members: list(members).flatMap((row) => readMember(list(row))),
    };
  }

  async leave(id: string): Promise<void> {
    await this.#store.run(SHARD, { script: leaveScript, keys: this.#keys, args: [id] }, { resend: true });
  }
}

function load(name: string): Script {
  const source = readFileSync(new URL(`lua/${name}.lua`, import.meta.url), "utf8");
  return { name, source, sha: createHash("sha1").update(source).digest("hex") };
}

/** Another version of Ferry may have written it: what cannot be read is left out, not fatal. */
function readMember([id, ageMs, doc]: readonly StoreReply[]): Member[] {
  try {
    const said = JSON.parse(text(doc)) as Partial<Member>;
    const { zone = "", role = "batcher", version = "", models = [], workers = [], doors = [] } = said;
    const { orders = [] } = said;
    return [{ id: text(id), zone, role, version, models, workers, doors, orders, ageMs: Number(ageMs) }];
  } catch {
    return [];
  }
}

function list(reply: StoreReply | undefined): readonly StoreReply[] {
  if (!Array.isArray(reply)) throw new Error("the registry's script gave a reply of another shape");
  return reply;
}

function text(reply: StoreReply | undefined): string {
  return reply instanceof Buffer ? reply.toString() : String(reply);
}
