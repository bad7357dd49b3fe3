/**
 * The work of a batcher on Redis: claim, extend, settle.
 *
 * A claim reads the streams that the plan named (`redis-view.ts`); a second round fills up what the first did
 * not find because another batcher was there before. A settle decides a whole batch per server, or per shard
 * on a Cluster. Outcomes cost GPU time: they are offered again until Redis takes them.
 */
import type { BatchNote } from "../core/task.ts";
import type { ClaimRequest, Lease, SettleReply, Verdict } from "./engine.ts";
import { batchFrame, readBody, readMeta, wholeBatchFrame } from "./redis-frames.ts";
import { RedisLeases } from "./redis-leases.ts";
import { RedisError, StoreAway } from "../redis/nodes.ts";
import type { Ended, RedisParts } from "./redis-parts.ts";
import { type CallBuilder, scripts } from "./redis-scripts.ts";
import { type Claimed, tell, type Told } from "./redis-verdicts.ts";
import type { Wanted } from "./redis-view.ts";

const SETTLE_FOR_MS = 30_000;
/** What is known of a batch is kept beyond its lease: its tasks may be asked about until they are claimed again. */
const BATCH_KEPT_MS = 10 * 60_000;
const SETTLE_AGAIN_MS = 100;
/** For a full batch; while rounds find nothing but tasks that have expired there may be more. */
const CLAIM_ROUNDS = 2;
const MAX_EXPIRED_ROUNDS = 100;

const MISSING = "m".charCodeAt(0);
/** What `settle.lua` reads of each verdict at once: place, kind, attempt, how many arguments. */
const NUMBERS_BYTES = 2 + 1 + 2 + 1;
/** Refusals that an operator or time will lift: a full disk, a lost replica, a full Redis. */
const PASSING = new Set(["OOM", "MISCONF", "NOREPLICAS"]);
const REPLIES: Record<string, SettleReply> = { t: "taken", l: "late", g: "gone" };

type Settled = [
  letters: Buffer,
  report: Buffer,
  gateways: Buffer[],
  frames: (number | Buffer)[],
  dropped: number,
];

export class RedisWork {
  readonly #parts: RedisParts;
  readonly #leases: RedisLeases;
  /** What claims learned of their tasks, for as long as somebody holds the lease: it may be late, and right. */
  readonly #claimed = new WeakMap<Lease["tasks"], Map<string, Claimed>>();
  /** Ends these tasks, whose time is over. */
  readonly #expire: (ids: readonly string[]) => Promise<unknown>;
  #claims = 0;
  #closed = false;

  constructor(parts: RedisParts, expire: (ids: readonly string[]) => Promise<unknown>) {
    this.#parts = parts;
    this.#expire = expire;
    this.#leases = new RedisLeases(parts.options.leaseMs, parts.clock, (lease, ids, until) =>
      this.#extend(lease, ids, until),
    );
  }

  async claim(request: ClaimRequest): Promise<Lease> {
    const { name, clock, mirror } = this.#parts;
    const token = `${name}.${++this.#claims}`;
    const until = clock.now() + request.leaseMs;
    const known = new Map<string, Claimed>();
    let most = request.max;
    let expired = 0;
    const mayGoOn = (round: number): boolean =>
      round < CLAIM_ROUNDS || (known.size === 0 && expired > 0 && round < MAX_EXPIRED_ROUNDS);
    for (let round = 0; known.size < most && mayGoOn(round); round++) {
      const wanted = mirror.plan(request.model, request.parameters, most - known.size, known.size);
      if (wanted.length === 0) break;
      for (const { stream } of wanted) most = Math.min(most, stream.limit);
      expired = await this.#take(request, token, until, wanted, known);
    }
    const batch = { ...request.batch, size: known.size };
    const lease = { token, batch, tasks: [...known.values()].map(({ claimed }) => claimed) };
    this.#claimed.set(lease.tasks, known);
    this.#leases.hold(lease, until);
    return lease;
  }

  /** Resolves with how many it met that had expired. */
  async #take(
    { batch }: ClaimRequest,
    token: string,
    until: number,
    wanted: readonly Wanted[],
    known: Map<string, Claimed>,
  ): Promise<number> {
    const { nodes, shared, mirror } = this.#parts;
    let late = 0;
    const leaseUntil = this.#leases.first(until);
    this.#parts.fallsDue(leaseUntil);
    let failure: Error | undefined;
    await this.#parts.spread(
      wanted,
      ({ stream }) => stream.shard,
      async (some, shards) => {
        const call = this.#parts.call(
          scripts.claim,
          token,
          shared.shared(leaseUntil),
          batchFrame(batch, shared),
          Math.ceil(until - this.#parts.clock.now()) + BATCH_KEPT_MS,
        );
        for (const { stream, count } of some) {
          call.add(call.place(stream.shard), stream.name, count).names(stream.shard, stream.name);
        }
        try {
          const reply = await nodes.run(call.shard, call.build()).finally(() => mirror.release(some));
          const [tasks, report, expired] = reply as [(Buffer | number)[], Buffer, Buffer[]];
          mirror.told(report.toString());
          await this.#learn(call.shard, tasks, known);
          late += expired.length;
          if (expired.length > 0) await this.#expire(expired.map((id) => id.toString()));
        } catch (error) {
          mirror.forget(shards);
          failure = error as Error;
        }
      },
    );
    // What other shards gave is worth running.
    if (failure !== undefined && known.size === 0) throw failure;
    return late;
  }

  /** Fetches the bodies of what a claim took. */
  async #learn(
    shard: number,
    tasks: readonly (Buffer | number)[],
    known: Map<string, Claimed>,
  ): Promise<void> {
    if (tasks.length === 0) return;
    const { nodes, keys, shared } = this.#parts;
    const ids: string[] = [];
    for (let at = 0; at < tasks.length; at += 3) ids.push((tasks[at] as Buffer).toString("latin1"));
    const names = ids.map((id) => `${keys.bases[this.#parts.shardOf(id)]!}b:${id}`);
    const bodies = (await nodes.command(shard, ["MGET", ...names], { resend: true })) as (Buffer | null)[];
    bodies.forEach((body, at) => {
      // It ended between the two: by its time, or by an answer from an earlier lease.
      if (body === null) return;
      const id = ids[at]!;
      const { meta, input } = readBody(body);
      const { task, joinKey, cacheKey, cacheTtlMs } = readMeta(meta, shared);
      const claimed = {
        task: { id, input, ...task },
        attempt: tasks[3 * at + 1] as number,
        queuedAt: shared.own(tasks[3 * at + 2] as Buffer),
      };
      this.#parts.mirror.served(task.model, task.tier, task.tenant);
      known.set(id, { claimed, meta, joinKey, cacheKey, cacheTtlMs });
    });
  }

  async extend(lease: Lease, leaseMs: number): Promise<readonly string[]> {
    const until = this.#parts.clock.now() + leaseMs;
    this.#leases.extended(lease, until);
    const ids = lease.tasks.map(({ task }) => task.id);
    return this.#extend(lease, ids, this.#leases.first(until));
  }

  async #extend({ token }: Lease, ids: readonly string[], until: number): Promise<string[]> {
    const { nodes, shared } = this.#parts;
    this.#parts.fallsDue(until);
    const shardOf = (id: string): number => this.#parts.shardOf(id);
    const lost = await this.#parts.spread(ids, shardOf, async (some) => {
      const call = this.#parts.call(scripts.extend, token, shared.shared(until));
      for (const id of some) call.add(call.place(shardOf(id)), id);
      const places = (await nodes.run(call.shard, call.build(), { resend: true })) as number[];
      return places.map((place) => some[place]!);
    });
    return lost.flat();
  }

  async settle(lease: Lease, verdicts: readonly Verdict[]): Promise<readonly SettleReply[]> {
    const { clock, shared } = this.#parts;
    const known = this.#claimed.get(lease.tasks);
    const now = clock.now();
    const { ttlMs } = this.#parts.options.results;
    const all = { lease, batch: wholeBatchFrame(lease.batch, shared), ttlMs, now, clock: shared };
    const told = verdicts.map((each) => tell(each, known?.get(each.id), all));
    const replies: SettleReply[] = verdicts.map(() => "gone");
    const shardOf = (at: number): number => this.#parts.shardOf(verdicts[at]!.id);
    await this.#parts.spread(verdicts.keys(), shardOf, async (some) => {
      const said = await this.#settleGroup(lease, verdicts, told, some);
      some.forEach((at, which) => {
        replies[at] = said[which]!;
        const verdict = verdicts[at]!;
        if (said[which] === "taken")
          this.#taken(verdict, told[at]!, lease.batch, known?.get(verdict.id), now);
      });
    });
    this.#leases.settled(
      lease,
      verdicts.map(({ id }) => id),
    );
    return replies;
  }

  async #settleGroup(
    lease: Lease,
    verdicts: readonly Verdict[],
    told: readonly Told[],
    some: readonly number[],
  ): Promise<SettleReply[]> {
    const reply = await this.#insist((full) => this.#settleCall(lease, verdicts, told, some, full));
    const [letters, report, gateways, frames, dropped] = reply;
    this.#parts.mirror.told(report.toString());
    this.#parts.lettersDropped(dropped);
    const replies = Array.from(letters.toString("latin1"), (letter) => REPLIES[letter]!);
    const ended: Ended[] = [];
    some.forEach((at, which) => {
      const { kind, record, bytes } = told[at]!;
      if (replies[which] !== "taken" || kind === "r") return;
      const waiting = gateways[ended.length]!.toString("latin1");
      ended.push({ id: verdicts[at]!.id, gateways: waiting, record, bytes });
    });
    for (let at = 0; at < frames.length; at += 2) {
      const which = frames[at] as number;
      ended[which] = { ...ended[which]!, record: undefined, bytes: frames[at + 1] as Buffer };
    }
    this.#parts.announce(this.#parts.shardOf(verdicts[some[0]!]!.id), ended);
    return replies;
  }

  /** `full`: Redis has no memory for plain writes; what finishing needs goes through the script, which may. */
  #settleCall(
    lease: Lease,
    verdicts: readonly Verdict[],
    told: readonly Told[],
    some: readonly number[],
    full: boolean,
  ): CallBuilder {
    const { shards, keys, options } = this.#parts;
    const { results, deadLetters, models } = options;
    const queueMs = models.get(lease.tasks[0]?.task.model ?? "")?.queueMs ?? 0;
    const most = Math.ceil(deadLetters.max / shards);
    const numbers = Buffer.allocUnsafe(NUMBERS_BYTES * some.length);
    let to = 0;
    const call = this.#parts.call(scripts.settle, lease.token, results.ttlMs, most, queueMs, numbers);
    for (const at of some) {
      const { id } = verdicts[at]!;
      const shard = this.#parts.shardOf(id);
      const { kind, attempt, args, names, output } = told[at]!;
      call.names(shard, ...names);
      const given = full && output !== undefined ? [output.value, args[1] ?? "", output.ttlMs] : args;
      to = numbers.writeUInt16BE(call.place(shard), to);
      to = numbers.writeUInt8(kind.charCodeAt(0), to);
      to = numbers.writeUInt16BE(attempt, to);
      to = numbers.writeUInt8(given.length, to);
      call.add(id, ...given);
      if (output !== undefined && !full)
        call.before("SET", `${keys.bases[shard]!}${output.name}`, output.value, "PX", output.ttlMs);
    }
    return call;
  }

  /** Outcomes cost GPU time: they are offered until Redis takes them, or their callers are long gone. */
  async #insist(make: (full: boolean) => CallBuilder): Promise<Settled> {
    const { nodes, clock } = this.#parts;
    const until = clock.now() + SETTLE_FOR_MS;
    for (let full = false; ;) {
      const call = make(full);
      try {
        const reply = await nodes.run(call.shard, call.build(), { resend: true });
        const settled = reply as unknown as Settled;
        if (settled[0].includes(MISSING)) throw new StoreAway("an output was not written", false);
        return settled;
      } catch (error) {
        const refused = error instanceof RedisError;
        if (refused && error.code === "OOM" && !full) full = true;
        else if (refused && !PASSING.has(error.code)) throw error;
        else if (clock.now() >= until || this.#closed) throw error;
        else await new Promise<void>((resolve) => void clock.at(clock.now() + SETTLE_AGAIN_MS, resolve));
      }
    }
  }

  #taken(
    verdict: Verdict,
    { record }: Told,
    batch: BatchNote,
    known: Claimed | undefined,
    now: number,
  ): void {
    const { options, events } = this.#parts;
    if (record !== undefined) {
      this.#parts.fallsDue(now + options.results.ttlMs);
      if (verdict.kind === "dead") this.#parts.fallsDue(now + options.deadLetters.ttlMs);
    } else if (verdict.kind === "retry") {
      const { id, at, message, spared } = verdict;
      const model = known?.claimed.task.model ?? "";
      this.#parts.fallsDue(at > now ? at : now + (options.models.get(model)?.queueMs ?? 0));
      if (verdict.unsent === true) return;
      const attempt = (known?.claimed.attempt ?? 0) - (spared === true ? 1 : 0);
      const { id: batchId, worker } = batch;
      const trace = known?.claimed.task.trace;
      events.emit("task.retried", { id, model, attempt, at, message, batchId, worker, trace });
    }
  }

  /** What this process still holds goes back to its queues at once, with the attempt not counted. */
  async close(): Promise<void> {
    const left = this.#leases.close();
    const now = this.#parts.clock.now();
    const message = "its batcher was stopped";
    const returns = left.map(({ lease, ids }) =>
      this.settle(
        lease,
        ids.map((id) => ({ id, kind: "retry", at: now, message, spared: true })),
      ),
    );
    this.#closed = true;
    await Promise.allSettled(returns);
  }
}
