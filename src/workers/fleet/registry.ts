/**
 * Members of the fleet, and which batcher runs which shared worker.
 *
 * Several batchers may list the same worker; the registry leases it to one at a time, so it never gets two batches at
 * once. A heartbeat about every `beatMs` is one atomic operation: it proves liveness, renews the member's leases, takes
 * what it should have and returns what it should give back. The registry's clock is the only one: a member is alive
 * while its last heartbeat is younger than its `aliveMs`; leases of a dead one are free.
 *
 * - A worker goes only to a live member that lists it. A free one goes to the lister that holds fewest of its model
 *   (then fewest of all, then the first by id), which takes it in its own next heartbeat.
 * - No member should hold two workers of a model more than another lister of one of them; where models are even, none
 *   two workers more in all. A member with too many is told to give back the difference, least useful first.
 * - Giving back takes two heartbeats: told, it starts no further batch there; idle, it names the worker in `releasing`.
 *   Nothing is taken from a live member otherwise.
 * - Grace: for one `aliveMs` nothing changes hands, and members get back exactly what they held, when the registry was
 *   away and not its members: it holds leases but has heard no member for half of aliveMs (an outage, or a clock that
 *   was set), or a member still holds workers by its own clock and is unknown here (lost data). Otherwise the first to
 *   return would take everything while the others' batches still run. A lone batcher that restarts after a crash waits
 *   for this too.
 *
 * Not covered: a failover that loses the last writes, a clock set forward by less than half of aliveMs, and lost data
 * noticed first by a new member. A worker may then get a second batch once. Tasks are safe: their leases have tokens.
 *
 * In Redis: seven keys under one hash tag and two scripts; one script call per heartbeat. Measured (Redis 7.0, one core
 * of a small machine), with the size of the reply:
 *
 *    4 batchers,  4 gateways,  16 workers     0.1 ms      4 KB
 *    8 batchers,  4 gateways,  64 workers     0.2 ms     15 KB
 *   16 batchers, 32 gateways, 256 workers     0.7 ms     60 KB      7 % of the server at 96 heartbeats a second
 *
 * The client never resends a heartbeat: each has a number, and the script refuses one that a later one has overtaken,
 * so an abandoned request still in a socket does no harm.
 */
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import type { Horizon } from "../../core/shed.ts";
import type { RedisNodes } from "../../engine/redis/client/nodes.ts";
import type { WorkerState } from "../../observe/events.ts";
import type { WorkerOrder } from "./orders.ts";

export type MemberRole = "all" | "gateway" | "batcher";

/** One worker run by a member: its own child, or leased. */
export interface WorkerBeat {
  readonly name: string;
  readonly model: string;
  /** Without secrets; omitted for a child of its member. */
  readonly address?: string;
  readonly state: WorkerState;
  /** Tasks of its current batch. */
  readonly inFlight: number;
  readonly batches: number;
  readonly tasks: number;
  readonly calls: number;
  readonly failures: number;
  readonly busyMs: number;
  /** Busy share since the member's start. */
  readonly utilization: number;
  /** Service time relative to the member's others: 2 takes twice as long. */
  readonly ratio: number;
  /** Other members list it too. */
  readonly leased: boolean;
  /** Batches it may hold, where more than one. */
  readonly pipeline?: number;
  /** The batch behind the running one. */
  readonly ahead?: string;
  /** Last reported load, 0 to 1; omitted where it reports none. */
  readonly load?: number;
  readonly down?: { readonly why: string; readonly retryInMs: number };
}

/** A `Horizon` without free times, which would be outdated on arrival. */
export type CapacityBeat = Omit<Horizon, "healthy" | "freeAt" | "nextUsableAt"> & {
  /** Workers that count as capacity. */
  readonly counted: number;
};

/** Admission rate of a gateway for one model, by tier. */
export interface DoorBeat {
  readonly name: string;
  readonly admittedPerMs: readonly number[];
}

export interface ModelBeat {
  readonly name: string;
  readonly workers: number;
  readonly healthy: number;
  readonly capacity: CapacityBeat;
  /** Until a worker that is down or paused may be tried; null when none is. */
  readonly nextUsableInMs: number | null;
  readonly arrivalsPerMs: number;
  /** Last ten seconds, 0 to 1. */
  readonly utilization: number;
}

export interface Member {
  /** Unique to this process start. */
  readonly id: string;
  readonly zone: string;
  readonly role: MemberRole;
  readonly version: string;
  readonly models: readonly ModelBeat[];
  readonly workers: readonly WorkerBeat[];
  /** Empty in a batcher. */
  readonly doors: readonly DoorBeat[];
  /** Drained and resumed workers; omitted when there are none. */
  readonly orders?: readonly WorkerOrder[];
  readonly ageMs: number;
}

export interface Beat {
  readonly member: Omit<Member, "ageMs">;
  /** Shared workers that this member may run, by lease name. */
  readonly listed: readonly { readonly model: string; readonly leases: readonly string[] }[];
  /** Held by its own clock, least useful first. */
  readonly held: readonly string[];
  /** Those of `held` that it was told to give back and that are idle; it starts nothing there. */
  readonly releasing: readonly string[];
}

export interface BeatReply {
  /** Held for another `aliveMs` from when the heartbeat was sent. Anything else is lost. */
  readonly held: readonly string[];
  /** Those of `held` on which no further batch may start. */
  readonly giveBack: readonly string[];
  /** Changing hands: listed by a live member, and not yet in any member's report. */
  readonly unheld: readonly { readonly model: string; readonly lease: string }[];
  /** All live members, including the caller. */
  readonly members: readonly Member[];
}

export interface Registry {
  /** Rejects when the store is unreachable or may not have received it; the next heartbeat repairs the effects. */
  beat(beat: Beat): Promise<BeatReply>;

  /** Frees the member's leases at once. It must be idle and not send another heartbeat. */
  leave(id: string): Promise<void>;
}

type Store = Pick<RedisNodes, "run">;
type Script = Parameters<Store["run"]>[1]["script"];
type StoreReply = Awaited<ReturnType<Store["run"]>>;

export interface RedisRegistryOptions {
  /** This member is dead when its last heartbeat is this old. */
  readonly aliveMs: number;
  /** From a short name to a key of shard 0. */
  key(name: string): string;
  /** The registry's clock, for tests; default: the server's. */
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

/** Another version of Ferry may have written it: unreadable members are skipped. */
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
