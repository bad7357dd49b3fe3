/**
 * The way into Redis. What a gateway accepts in one tick goes together, in two steps:
 *
 *   1. share index   SET x:<content> <id> NX GET     claims the content, or names the task that has it
 *   2. bundle        MULTI XADD, HSET, HINCRBY EXEC  one stream entry for all tasks of the tick, one WAIT where a replica must confirm
 *
 * No script runs on the way of a new task, and its cost falls with load. What finds its content taken, carries an
 * Idempotency-Key or may only share (`Sharing.only`) goes the careful way, one by one: it reads the record of the task
 * that is there, and joins it, is answered from it, or takes the key over (compare and swap).
 *
 * A key may name a task that is not there: its gateway is between the two steps, or died there. Then the key is
 * looked at again for a while before it is taken over. Two identical tasks may run in that case; each has one answer.
 */
import { errors } from "../../core/errors.ts";
import { homeOf } from "../../core/home.ts";
import { Table } from "../../core/table.ts";
import type { Task } from "../../core/task.ts";
import { type Arg, RedisError, type RedisReply, StoreAway } from "./client/nodes.ts";
import type { PutReply, Sharing } from "../engine.ts";
import { newBundle } from "../ids.ts";
import { DEPTH_SHARD, type Depths } from "./depths.ts";
import {
  bodyFrame,
  bundleFrame,
  entryFrame,
  type EntryMark,
  type FinalRecord,
  metaFrame,
  outcomeFrame,
  type TaskBody,
} from "./frames.ts";
import { Gathering } from "./gather.ts";
import type { GroupShares } from "./groups.ts";
import { digest, FIELD_DIGITS, fieldOf, GRACE_MS, indexName } from "./keys.ts";
import type { Outcomes } from "./outcomes.ts";
import { nothingHappened, overloaded, type RedisParts } from "./parts.ts";
import type { FoundRecord, RedisRecords } from "./records.ts";
import { scripts } from "./scripts.ts";

const MAX_BUNDLE_TASKS = 64;
const MAX_BUNDLE_BYTES = 256 * 1024;
const MAYBE = "the task may have been accepted; it is safe to send it again";
const NOTHING_TO_SHARE = "nothing to share, and no room for more";
const NOT_ACCEPTED = "nothing was accepted; send it again";
const BEHIND = "Redis takes tasks in more slowly than they come";
/** Of the time that a task may take to get in: when what gathers has waited longer, more is refused. */
const BEHIND_AFTER = 0.25;
/** Bundles that are remembered after they left; a second's worth at full load. */
const MAX_LEFT = 10_000;
/** How long after one another a key that names no task is looked at again. */
const LOOK_AGAIN_MS = [1, 3, 10, 50];

interface Pending {
  readonly task: Task;
  readonly sharing: Sharing;
  readonly since: number;
  /** It counts among what is on its way in. */
  counted: boolean;
  readonly answer: (reply: PutReply) => void;
  readonly fail: (why: Error) => void;
}

/** An Idempotency-Key that this task may have, and what it holds now. */
interface FreeKey {
  readonly kind: "free";
  readonly from: string;
}

/** A task that goes into a bundle. */
interface Entering {
  readonly task: Task;
  readonly sharing: Sharing;
  readonly keyed: boolean;
  /** Its bundle has left before it, or holds another's tasks: it brings its own meta. */
  readonly late: boolean;
}

export interface PutParts {
  readonly records: RedisRecords;
  readonly outcomes: Outcomes;
  readonly depths: Depths;
  readonly groups: GroupShares;
  /** Whether the client speaks to a Cluster. */
  readonly cluster: boolean;
  /** A caller of this process joins the task: its batcher shall know of deadline and tier. False: it is ending here. */
  accommodate(id: string, owner: string, caller: Task): boolean;
}

export class RedisPuts {
  readonly #parts: RedisParts;
  readonly #own: PutParts;
  readonly #gathering: Gathering<Pending>;
  /** The bundle that gathers for each model; its tasks' ids begin with it. */
  readonly #bundles = new Map<string, { readonly prefix: string; tasks: number }>();
  /** The last bundles that left: a task whose id names one of them comes late, or for the second time. */
  readonly #left = new Set<string>();
  /** The last tasks that left by themselves. */
  readonly #leftAlone = new Set<string>();
  /** Bundles of the last tasks that left by themselves. */
  readonly #parted = new Set<string>();
  /** Puts that have not been answered, by join key: what is identical waits for them. */
  readonly #opening: Table<Promise<PutReply>>;
  #turn = 0;

  constructor(parts: RedisParts, own: PutParts) {
    this.#parts = parts;
    this.#own = own;
    this.#gathering = new Gathering((gathered) => this.#send(gathered), parts.clock, parts.options.tickMs);
    this.#opening = new Table(own.outcomes.seed);
  }

  /** What the id of the next task of a model shall begin with. */
  bundle(model: string): string {
    let bundle = this.#bundles.get(model);
    if (bundle === undefined || bundle.tasks === MAX_BUNDLE_TASKS) {
      const active = this.#parts.nodes.activeShards();
      // One shard a tick: the tasks of a tick are one bundle.
      const shard = (active[this.#turn % active.length] ?? 0) % this.#parts.keys.shards;
      bundle = { prefix: newBundle(this.#parts.clock.wall(), shard), tasks: 0 };
      this.#bundles.set(model, bundle);
    }
    bundle.tasks++;
    return bundle.prefix;
  }

  async put(task: Task, sharing: Sharing): Promise<PutReply> {
    const { nodes, keys } = this.#parts;
    if (!nodes.up(keys.shardOf(task.id))) {
      throw overloaded(new RedisError("the server of this shard is away"), NOT_ACCEPTED, NOT_ACCEPTED);
    }
    if (this.#behind()) return { kind: "full", message: BEHIND };
    const { joinKey } = sharing;
    if (joinKey === undefined) return this.#enter(task, sharing);
    const opening = this.#opening.get(joinKey);
    if (opening !== undefined) {
      // An identical task is on its way in from here: its answer decides.
      await opening.catch(() => undefined);
      return this.#carefully(task, sharing);
    }
    const entering = this.#enter(task, sharing);
    this.#opening.set(joinKey, entering);
    try {
      return await entering;
    } finally {
      this.#opening.delete(joinKey);
    }
  }

  /** What gathers for the next call has been waiting for too long. */
  #behind(): boolean {
    const first = this.#gathering.first(0);
    if (first === undefined) return false;
    return this.#parts.clock.now() - first.since > BEHIND_AFTER * this.#parts.options.putWithinMs;
  }

  #enter(task: Task, sharing: Sharing): Promise<PutReply> {
    const { depths, groups, outcomes } = this.#own;
    const { joinKey, idempotency, only } = sharing;
    const local = joinKey !== undefined && outcomes.joinable(joinKey) !== undefined;
    const known = outcomes.get(task.id)?.accepted === true;
    const late = this.#left.has(prefixOf(task.id)) || this.#leftAlone.has(task.id);
    if (local || known || late || only === true || idempotency !== undefined)
      return this.#carefully(task, sharing);
    if (depths.full(task) ?? groups.full(task)) return this.#carefully(task, sharing);
    depths.enters(task, 1);
    groups.entered(task);
    const { promise, resolve, reject } = Promise.withResolvers<PutReply>();
    const since = this.#parts.clock.now();
    this.#gathering.add(0, { task, sharing, since, counted: true, answer: resolve, fail: reject });
    return promise;
  }

  /** It is in (its group counts until its end), or goes another way. */
  #uncount(pending: Pending, queued: boolean): void {
    if (!pending.counted) return;
    pending.counted = false;
    this.#own.depths.enters(pending.task, -1);
    if (!queued) this.#own.groups.left(pending.task);
  }

  /** New tasks, whose contents are claimed together and whose bundles leave together. Never rejects. */
  async #send(gathered: readonly Pending[]): Promise<void> {
    this.#bundles.clear();
    this.#turn++;
    // What gathered while a server did not answer has waited already, and is not held for as long again.
    const until = gathered[0]!.since + this.#parts.options.putWithinMs;
    /** Those whose answer depends on this call. */
    let mine = gathered;
    try {
      const claimed = (mine = await this.#claimContents(gathered, until));
      const { admitted, reserved } = await this.#reserve(claimed);
      mine = admitted;
      const entering = admitted.map(({ task, sharing }) => {
        const late = this.#left.has(prefixOf(task.id));
        return { task, sharing, keyed: false, late };
      });
      this.#leave(entering);
      await this.#write(entering, reserved, until);
      for (const pending of admitted) {
        this.#uncount(pending, true);
        pending.answer({ kind: "queued", id: pending.task.id });
      }
    } catch (error) {
      const refusal = overloaded(error, MAYBE, NOT_ACCEPTED);
      for (const pending of mine) {
        this.#unclaim(pending.task, pending.sharing);
        this.#uncount(pending, false);
        pending.fail(refusal);
      }
    }
  }

  /**
   * Near the bounds of the queue tasks are counted before they are written, so that gateways that fill it together do not
   * pass them. Those for which there is no room are answered here.
   */
  async #reserve(claimed: readonly Pending[]): Promise<{ admitted: readonly Pending[]; reserved: boolean }> {
    const { depths } = this.#own;
    if (claimed.length === 0 || !depths.near()) return { admitted: claimed, reserved: false };
    const refused = await depths.reserve(claimed.map(({ task }) => task));
    const admitted = claimed.slice(0, claimed.length - refused.length);
    claimed.slice(admitted.length).forEach((pending, at) => {
      this.#unclaim(pending.task, pending.sharing);
      this.#uncount(pending, false);
      pending.answer(refused[at]!);
    });
    return { admitted, reserved: true };
  }

  #leave(entering: readonly Entering[]): void {
    for (const { task, late } of entering) {
      if (late) {
        remember(this.#leftAlone, task.id);
        remember(this.#parted, prefixOf(task.id));
      } else remember(this.#left, prefixOf(task.id));
    }
  }

  /** Those whose content is theirs now; the others go on the careful way. */
  async #claimContents(gathered: readonly Pending[], until: number): Promise<readonly Pending[]> {
    const asked: { shard: number; command: Arg[] }[] = [];
    for (const { task, sharing } of gathered) {
      const { joinKey, cacheKey } = sharing;
      if (joinKey !== undefined) asked.push(this.#claimContent(task, joinKey, sharing));
      if (cacheKey !== undefined && cacheKey !== joinKey)
        asked.push(this.#index("c", cacheKey, (key) => ["GET", key]));
    }
    if (asked.length === 0) return gathered;
    const { nodes } = this.#parts;
    // A server that is known to be away is not waited for.
    const up = asked.map(({ shard }) => nodes.up(shard));
    const answers = await nodes.scatter(
      asked.filter((_, at) => up[at]),
      { resend: true, withinMs: this.#leftMs(until) },
    );
    let answered = 0;
    const replies = up.map((there) => (there ? answers[answered++]! : null));
    const refused = replies.find((reply) => reply instanceof RedisError);
    if (refused !== undefined) throw refused;
    const claimed: Pending[] = [];
    let at = 0;
    for (const pending of gathered) {
      const { task, sharing } = pending;
      const { joinKey, cacheKey } = sharing;
      const keys = (joinKey === undefined ? 0 : 1) + (cacheKey === undefined || cacheKey === joinKey ? 0 : 1);
      const found = replies.slice(at, (at += keys));
      // Where the index is away, tasks whose bundle is not get in all the same: an identical one may run beside it.
      const free = (reply: (typeof found)[number]): boolean =>
        reply === null || reply instanceof StoreAway || String(reply) === task.id;
      if (found.every(free)) claimed.push(pending);
      else {
        this.#uncount(pending, false);
        this.#carefully(task, sharing).then(pending.answer, pending.fail);
      }
    }
    return claimed;
  }

  #index(
    kind: "x" | "c" | "k",
    key: string,
    command: (key: string) => Arg[],
  ): { shard: number; command: Arg[] } {
    const name = kind === "k" ? digest(key) : indexName(key);
    const shard = homeOf(name) % this.#parts.keys.shards;
    return { shard, command: command(this.#parts.key(shard, `${kind}:${name}`)) };
  }

  #claimContent(task: Task, joinKey: string, sharing: Sharing): { shard: number; command: Arg[] } {
    const ttlMs = this.#contentTtlMs(task, sharing);
    return this.#index("x", joinKey, (key) => ["SET", key, task.id, "NX", "GET", "PX", ttlMs]);
  }

  #contentTtlMs({ createdAt, deadlineAt }: Task, { cacheTtlMs = 0 }: Sharing): number {
    return Math.ceil(Math.max(0, deadlineAt - createdAt) + cacheTtlMs + GRACE_MS);
  }

  /** The task did not get in: its content is free for the next one. */
  #unclaim({ id }: Task, { joinKey }: Sharing): void {
    if (joinKey !== undefined) this.#swap("x", joinKey, id, "", 0).catch(() => {});
  }

  /** Compare and swap of an index key; resolves with what it stands for otherwise. */
  async #swap(
    kind: "x" | "k",
    key: string,
    from: string,
    to: string,
    ttlMs: number,
  ): Promise<string | undefined> {
    const { shard, command } = this.#index(kind, key, (name) => [name]);
    const found = await this.#parts.run(shard, scripts.swap, [String(command[0])], [from, to, ttlMs]);
    return found === null ? undefined : String(found);
  }

  async #get(kind: "x" | "c" | "k", key: string): Promise<string | undefined> {
    const { shard, command } = this.#index(kind, key, (name) => ["GET", name]);
    const found = await this.#parts.nodes.command(shard, command, { resend: true });
    return found === null ? undefined : String(found);
  }

  /** Writes bundles; resolves when they are as safe as `durability` asks. */
  async #write(entering: readonly Entering[], reserved: boolean, until: number): Promise<void> {
    const { keys } = this.#parts;
    const byShard = Map.groupBy(entering, ({ task }) => keys.shardOf(task.id));
    await Promise.all(Array.from(byShard, ([shard, some]) => this.#writeShard(shard, some, reserved, until)));
  }

  #leftMs(until: number): number {
    return Math.max(0, until - this.#parts.clock.now());
  }

  /** `reserved`: its tasks are counted already. */
  async #writeShard(
    shard: number,
    entering: readonly Entering[],
    reserved: boolean,
    until: number,
  ): Promise<void> {
    const { nodes, shared, options, name, keys } = this.#parts;
    const { depths, cluster } = this.#own;
    const bodies = entering.map(({ task, sharing }) => bodyFrame(task, sharing, shared));
    const entries: {
      readonly stream: string;
      readonly mark: EntryMark;
      readonly tasks: readonly TaskBody[];
    }[] = [];
    const records: Arg[][] = [];
    for (const places of bundlesOf(entering)) {
      const some = places.map((at) => entering[at]!);
      const tasks = places.map((at) => ({ id: entering[at]!.task.id, body: bodies[at]! }));
      const [{ task, late }] = some as [Entering];
      const stream = keys.stream(shard, task.model, options.zone);
      const chunks = [...chunksOf(tasks)];
      const mark = late || chunks.length > 1 ? "part" : "";
      for (const chunk of chunks) entries.push({ stream, mark, tasks: chunk });
      const bundle = keys.bundle(task.id);
      const marks = some.flatMap((each) => (each.keyed ? [`k${fieldOf(each.task.id)}`, "1", "x", "1"] : []));
      records.push(["HSET", bundle, late ? `m${fieldOf(task.id)}` : "m", bundleFrame(tasks), ...marks]);
      const keepMs = this.#keepMs(some);
      // What else is in the bundle may need it for longer.
      if (late || this.#parted.has(prefixOf(task.id))) {
        records.push(["PEXPIRE", bundle, keepMs, "NX"], ["PEXPIRE", bundle, keepMs, "GT"]);
      } else records.push(["PEXPIRE", bundle, keepMs]);
    }
    const tasks = entering.map(({ task }) => task);
    const counts = reserved ? new Map() : depths.of(tasks);
    const counting = depths.commands(counts);
    const counted = counting.length > 0 && !cluster;
    const all = (again: boolean): Arg[][] => [
      ...entries.map(({ stream, mark, tasks }) => [
        "XADD",
        stream,
        "*",
        "b",
        entryFrame(name, again ? (counted ? "check" : "copy") : mark, tasks),
      ]),
      ...records,
      ...(counted ? counting : []),
    ];
    let replies: RedisReply[];
    try {
      replies = await nodes.transact(shard, all, this.#leftMs(until));
    } catch (error) {
      if (reserved && nothingHappened(error)) void depths.unreserve(tasks);
      throw error;
    }
    if (counted) return depths.heard(counts, replies.slice(-counting.length));
    if (counting.length === 0) return;
    // Another slot: beside the transaction.
    void nodes.pipeline(DEPTH_SHARD, counting).then(
      (heard) => depths.heard(counts, heard),
      () => {},
    );
  }

  /** For as long as the outcome of one of them may be asked for or reused. */
  #keepMs(entering: readonly Entering[]): number {
    const { clock } = this.#parts;
    let keepMs = 0;
    for (const { task, sharing } of entering) {
      const reuseMs = Math.max(this.#parts.limits.results.ttlMs, sharing.cacheTtlMs ?? 0);
      keepMs = Math.max(keepMs, task.deadlineAt - clock.now() + reuseMs);
    }
    return Math.ceil(keepMs + GRACE_MS);
  }

  /** One task that may find its content or its key taken. */
  async #carefully(task: Task, sharing: Sharing): Promise<PutReply> {
    try {
      return await this.#share(task, sharing);
    } catch (error) {
      throw overloaded(error, MAYBE, NOT_ACCEPTED);
    }
  }

  async #share(task: Task, sharing: Sharing): Promise<PutReply> {
    const { depths, groups, outcomes } = this.#own;
    const { idempotency, only = false } = sharing;
    const known = await this.#known(task);
    if (known !== undefined) return known;
    const full = only
      ? { kind: "full" as const, message: NOTHING_TO_SHARE }
      : (depths.full(task) ?? groups.full(task));
    const bound = idempotency && (await this.#bind(task, idempotency, full !== undefined));
    if (bound !== undefined && bound.kind !== "free") return bound;
    const shared = await this.#join(task, sharing, full !== undefined);
    if (shared !== undefined) {
      if (bound === undefined) return shared;
      return (await this.#rebind(task, idempotency!, bound.from, shared.id)) ?? shared;
    }
    if (full !== undefined) return full;
    const near = depths.near();
    const [refused] = near ? await depths.reserve([task]) : [];
    if (refused !== undefined) {
      this.#unclaim(task, sharing);
      if (idempotency !== undefined)
        await this.#swap("k", idempotency.key, `${task.id} ${idempotency.fingerprint}`, "", 0);
      return refused;
    }
    groups.entered(task);
    depths.enters(task, 1);
    try {
      const entering = [{ task, sharing, keyed: idempotency !== undefined, late: true }];
      this.#leave(entering);
      await this.#write(entering, near, this.#parts.clock.now() + this.#parts.options.putWithinMs);
    } catch (error) {
      this.#unclaim(task, sharing);
      groups.left(task);
      throw error;
    } finally {
      depths.enters(task, -1);
    }
    if (idempotency !== undefined) outcomes.expect(task.id, task.deadlineAt).keyed = true;
    return { kind: "queued", id: task.id };
  }

  /** The same id was put before. */
  async #known(task: Task): Promise<PutReply | undefined> {
    if (!this.#left.has(prefixOf(task.id)) && !this.#leftAlone.has(task.id)) return undefined;
    const found = await this.#own.records.look(task.id, { waits: true });
    if (found === undefined) return undefined;
    if (found.final === undefined) return { kind: "joined", id: task.id };
    return { kind: "done", id: task.id, record: found.final, cached: false };
  }

  /**
   * Lets the Idempotency-Key stand for this task; resolves with an answer where it stands for another. `only`: it writes
   * nothing, and returns the stale value that the key holds.
   */
  async #bind(
    task: Task,
    { key, fingerprint }: NonNullable<Sharing["idempotency"]>,
    only: boolean,
  ): Promise<PutReply | FreeKey> {
    const { nodes, clock, options } = this.#parts;
    // So long the task that the key stands for may be on its way in: one key, one task.
    const patientUntil = clock.now() + options.putWithinMs;
    const value = `${task.id} ${fingerprint}`;
    const free: FreeKey = { kind: "free", from: value };
    const ttlMs = this.#keepMs([{ task, sharing: {}, keyed: true, late: true }]);
    for (let looks = 0; ; looks++) {
      const claim = this.#index("k", key, (name) => ["SET", name, value, "NX", "GET", "PX", ttlMs]);
      const reply = only
        ? await this.#get("k", key)
        : await nodes.command(claim.shard, claim.command, { resend: true });
      if (reply === null || reply === undefined || String(reply) === value) return free;
      const stands = String(reply);
      const id = stands.slice(0, stands.indexOf(" "));
      const conflict = stands.slice(id.length + 1) !== fingerprint;
      const found = await this.#own.records.look(
        id,
        conflict ? {} : { waits: true, keyed: true, caller: task },
      );
      const gone = found?.final !== undefined && (found.deleted || !this.#own.records.lives(found.final));
      if (found === undefined || gone) {
        // On its way in, or gone. The other body's conflict stands while it may be on its way.
        const waitMs = LOOK_AGAIN_MS[Math.min(looks, LOOK_AGAIN_MS.length - 1)]!;
        // Looks count too: this process may have stood still itself.
        const patient = looks < LOOK_AGAIN_MS.length || clock.now() < patientUntil;
        const missing = found === undefined && patient && !only;
        if (missing && conflict) return { kind: "conflict", id };
        if (missing) await this.#pause(waitMs);
        else if (only) return { kind: "free", from: stands };
        else if ((await this.#swap("k", key, stands, value, ttlMs)) === undefined) return free;
        continue;
      }
      if (conflict) return { kind: "conflict", id };
      const { final } = found;
      if (final === undefined) {
        const joined = this.#joined(id, found, task);
        if (joined !== undefined) return joined;
        await this.#pause(1);
        continue;
      }
      const failure = final.outcome!.ok ? undefined : final.outcome!.code;
      if (failure === undefined || !errors[failure].retryable) {
        return { kind: "done", id, record: final, cached: false };
      }
      // A failure that time may heal is not held against the key.
      if (only) return { kind: "free", from: stands };
      if ((await this.#swap("k", key, stands, value, ttlMs)) === undefined) return free;
    }
  }

  /** The key stands for the task that was joined, or answered from the cache; an answer where another body was quicker. */
  async #rebind(
    task: Task,
    { key, fingerprint }: NonNullable<Sharing["idempotency"]>,
    from: string,
    id: string,
  ): Promise<PutReply | undefined> {
    if (id !== task.id) await this.#own.records.look(id, { keyed: true });
    const ttlMs = this.#keepMs([{ task, sharing: {}, keyed: true, late: true }]);
    const other = await this.#swap("k", key, from, `${id} ${fingerprint}`, ttlMs);
    if (other === undefined || other === `${id} ${fingerprint}`) return undefined;
    const stands = other.slice(0, other.indexOf(" "));
    if (other.slice(stands.length + 1) !== fingerprint) return { kind: "conflict", id: stands };
    // The same request was quicker elsewhere: its task answers.
    const bound = await this.#bind(task, { key, fingerprint }, false);
    return bound.kind === "free" ? undefined : bound;
  }

  /** Joins work in flight or reuses an outcome. `only`: a content that stood for nothing still does afterwards. */
  async #join(
    task: Task,
    sharing: Sharing,
    only: boolean,
  ): Promise<(PutReply & { readonly kind: "joined" | "done" }) | undefined> {
    const { joinKey, cacheKey } = sharing;
    const { outcomes, records } = this.#own;
    if (cacheKey !== undefined && cacheKey !== joinKey) {
      const id = await this.#get("c", cacheKey);
      const found = id === undefined ? undefined : await records.look(id);
      if (found?.final !== undefined && this.#reusable(found.final))
        return this.#cached(task, sharing, found.final);
    }
    if (joinKey === undefined) return undefined;
    const local = outcomes.joinable(joinKey);
    if (local !== undefined && local.id !== task.id) {
      const found = await records.look(local.id, { caller: task });
      const joined = found?.final === undefined && found && this.#joined(local.id, found, task);
      if (joined) return joined;
    }
    for (let looks = 0; ; looks++) {
      const claim = this.#claimContent(task, joinKey, sharing);
      const reply = only
        ? await this.#get("x", joinKey)
        : await this.#parts.nodes.command(claim.shard, claim.command, { resend: true });
      if (reply === null || reply === undefined || String(reply) === task.id) return undefined;
      const id = String(reply);
      const found = await records.look(id, { waits: true, caller: task });
      const joined = found?.final === undefined && found && this.#joined(id, found, task);
      if (joined) return joined;
      if (found?.final && cacheKey === joinKey && this.#reusable(found.final))
        return this.#cached(task, sharing, found.final);
      const waitMs = LOOK_AGAIN_MS[looks];
      if (found?.final === undefined && waitMs !== undefined && !only) await this.#pause(waitMs);
      else if (only) return undefined;
      else if (
        (await this.#swap("x", joinKey, id, task.id, this.#contentTtlMs(task, sharing))) === undefined
      ) {
        return undefined;
      }
    }
  }

  #reusable({ reusableUntil }: FinalRecord): boolean {
    return this.#parts.clock.now() < reusableUntil;
  }

  /** Undefined: it is about to end, and its caller came too late for it. */
  #joined(id: string, { owner }: FoundRecord, task: Task): (PutReply & { kind: "joined" }) | undefined {
    const { outcomes } = this.#own;
    if (!this.#own.accommodate(id, owner, task)) return undefined;
    const known = outcomes.get(id);
    const awaited = outcomes.expect(id, task.deadlineAt);
    if (known !== undefined && known.accepted) awaited.joins++;
    awaited.accepted = true;
    return { kind: "joined", id };
  }

  /** Answers from a cached outcome: writes a finished record under the task's own id. */
  async #cached(
    task: Task,
    { idempotency }: Sharing,
    { outcome, batch }: FinalRecord,
  ): Promise<PutReply & { kind: "done" }> {
    const { shared, clock, keys, options, nodes } = this.#parts;
    const now = clock.now();
    remember(this.#leftAlone, task.id);
    const bytes = outcomeFrame(
      {
        meta: metaFrame(task, {}, shared),
        attempt: 0,
        queuedAt: task.createdAt,
        settledAt: now,
        batch: Buffer.alloc(0),
        cached: true,
        cacheTtlMs: 0,
      },
      outcome!,
      shared,
    );
    const bundle = keys.bundle(task.id);
    const ttlMs = Math.ceil(this.#parts.limits.results.ttlMs + GRACE_MS);
    const commands: Arg[][] = [
      [
        "HSET",
        bundle,
        fieldOf(task.id),
        bytes,
        ...(idempotency === undefined ? [] : [`k${fieldOf(task.id)}`, "1"]),
      ],
      ["PEXPIRE", bundle, ttlMs],
    ];
    // The bundle may hold tasks that need it for longer.
    const kept = (await nodes.command(keys.shardOf(task.id), ["PTTL", bundle], { resend: true })) as number;
    await nodes.transact(
      keys.shardOf(task.id),
      () => (kept < ttlMs ? commands : commands.slice(0, 1)),
      options.putWithinMs,
    );
    const record = { ...this.#own.records.read(task.id, bytes), ...(batch && { batch }) };
    return { kind: "done", id: task.id, record, cached: true };
  }

  #pause(ms: number): Promise<void> {
    const { clock } = this.#parts;
    return new Promise((resolve) => clock.at(clock.now() + ms, () => resolve()));
  }
}

function remember(texts: Set<string>, text: string): void {
  texts.add(text);
  if (texts.size > MAX_LEFT) for (const oldest of texts) return void texts.delete(oldest);
}

const prefixOf = (id: string): string => id.slice(0, -FIELD_DIGITS);

/** Places of tasks whose records are written together: of the same bundle; a late one by itself. */
function bundlesOf(entering: readonly Entering[]): Iterable<number[]> {
  return Map.groupBy(entering.keys(), (at) => {
    const { task, late } = entering[at]!;
    return late ? task.id : prefixOf(task.id);
  }).values();
}

/** The entries of one bundle, each within its bound. */
function* chunksOf(tasks: readonly TaskBody[]): Generator<readonly TaskBody[]> {
  let from = 0;
  let bytes = 0;
  for (let at = 0; at < tasks.length; at++) {
    const { length } = tasks[at]!.body;
    if (at > from && bytes + length > MAX_BUNDLE_BYTES) {
      yield tasks.slice(from, at);
      from = at;
      bytes = 0;
    }
    bytes += length;
  }
  yield tasks.slice(from);
}
