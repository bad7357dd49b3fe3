/**
 * The way into Redis. What a gateway accepts in one tick goes together, in two steps:
 *
 *   1. share index   SET x:<content> <id> NX GET     claims the content, or returns the task that has it
 *   2. bundle        MULTI XADD, HSET, HINCRBY EXEC  one stream entry for all tasks of the tick, one WAIT for replicas
 *
 * No script runs for a new task, and its cost falls with load. A task whose content is taken, that has an
 * Idempotency-Key, may only share (`Sharing.only`) or was put before is looked up first, one by one (`#share`): it
 * joins the record, is answered from it, or takes the key over (compare and swap), and then goes into the next bundle.
 * A key may name a missing task: its gateway is between the two steps, or died there. Then the key is polled for a
 * while before it is taken over. Two identical tasks may run in that case; each has one answer.
 */
import { errors } from "../../core/errors.ts";
import { homeOf } from "../../core/home.ts";
import { Table } from "../../core/table.ts";
import type { Task } from "../../core/task.ts";
import { type Arg, RedisError, type RedisReply, StoreAway } from "./client/nodes.ts";
import type { PutReply, Sharing } from "../engine.ts";
import { newBundle } from "../ids.ts";
import type { Depths } from "./depths.ts";
import { bodyFrame, bundleFrame, entryFrame, metaFrame, outcomeFrame } from "./frames.ts";
import type { EntryMark, FinalRecord, TaskBody } from "./frames.ts";
import { Gathering } from "./gather.ts";
import type { InFlight } from "./in-flight.ts";
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
const BEHIND_AFTER = 0.25; // share of `putWithinMs` after which a waiting backlog makes further puts fail
const MAX_LEFT = 10_000; // remembered bundles that left; a second's worth at full load
const LOOK_AGAIN_MS = [1, 3, 10, 50]; // pauses between lookups of a key that names no task

type IdempotencyKey = NonNullable<Sharing["idempotency"]>;

interface Entering {
  readonly task: Task;
  readonly sharing: Sharing;
  readonly since: number;
  readonly claimed: boolean; // it owns its content and its Idempotency-Key already
  readonly answer: (reply: PutReply) => void;
  readonly fail: (why: Error) => void;
}

/** An Idempotency-Key that this task may take, and its current value. */
interface FreeKey {
  readonly kind: "free";
  readonly from: string;
}

export interface PutParts {
  readonly records: RedisRecords;
  readonly outcomes: Outcomes;
  readonly depths: Depths;
  readonly inFlight: InFlight;
  readonly cluster: boolean;
  /** A caller of this process joins the task: tells its batcher deadline and tier. False: it is ending here. */
  accommodate(id: string, owner: string, caller: Task): boolean;
}

export class RedisPuts {
  readonly #parts: RedisParts;
  readonly #own: PutParts;
  readonly #gathering: Gathering<Entering>;
  /** The open bundle of each model: the prefix of its tasks' ids. */
  readonly #bundles = new Map<string, { readonly prefix: string; tasks: number }>();
  /** The last bundles that left: a task with such an id is late, or put for the second time. */
  readonly #left = new Set<string>();
  readonly #cachedIds = new Set<string>(); // the last tasks answered from the cache, whose bundle may not have left
  readonly #opening: Table<Promise<PutReply>>; // unanswered puts by join key: identical tasks wait for them
  #turn = 0;

  constructor(parts: RedisParts, own: PutParts) {
    this.#parts = parts;
    this.#own = own;
    this.#gathering = new Gathering((gathered) => this.#send(gathered), parts.clock, parts.options.tickMs);
    this.#opening = new Table(own.outcomes.seed);
  }

  bundle(model: string): string {
    let bundle = this.#bundles.get(model);
    if (bundle === undefined || bundle.tasks === MAX_BUNDLE_TASKS) {
      const active = this.#parts.nodes.activeShards();
      // One shard per tick: the tasks of a tick are one bundle.
      const shard = (active[this.#turn % active.length] ?? 0) % this.#parts.keys.shards;
      bundle = { prefix: newBundle(this.#parts.clock.wall(), shard), tasks: 0 };
      this.#bundles.set(model, bundle);
    }
    bundle.tasks++;
    return bundle.prefix;
  }

  async put(task: Task, sharing: Sharing): Promise<PutReply> {
    const { nodes, keys, clock, options } = this.#parts;
    if (!nodes.up(keys.shardOf(task.id))) {
      throw overloaded(new RedisError("the server of this shard is away"), NOT_ACCEPTED, NOT_ACCEPTED);
    }
    const first = this.#gathering.first(0);
    if (first !== undefined && clock.now() - first.since > BEHIND_AFTER * options.putWithinMs)
      return { kind: "full", message: BEHIND };
    const { joinKey } = sharing;
    if (joinKey === undefined) return this.#enter(task, sharing);
    const opening = this.#opening.get(joinKey);
    if (opening !== undefined) {
      // An identical task is on its way in from here: its answer decides.
      await opening.catch(() => undefined);
      return this.#lookUp(task, sharing);
    }
    const entering = this.#enter(task, sharing);
    this.#opening.set(joinKey, entering);
    try {
      return await entering;
    } finally {
      this.#opening.delete(joinKey);
    }
  }

  #enter(task: Task, sharing: Sharing): Promise<PutReply> {
    const { depths, inFlight, outcomes } = this.#own;
    const { joinKey, idempotency, only } = sharing;
    const local = joinKey !== undefined && outcomes.joinable(joinKey) !== undefined;
    const known = outcomes.get(task.id)?.accepted === true || this.#putBefore(task);
    if (local || known || only === true || idempotency !== undefined) return this.#lookUp(task, sharing);
    if (depths.full(task) ?? inFlight.full(task)) return this.#lookUp(task, sharing);
    return this.#gather(task, sharing, false);
  }

  /** Perhaps: its bundle has left, or it was answered at once. */
  #putBefore({ id }: Task): boolean {
    return this.#left.has(prefixOf(id)) || this.#cachedIds.has(id);
  }

  /** Into the next bundle. Counted as on its way in until then. */
  #gather(task: Task, sharing: Sharing, claimed: boolean): Promise<PutReply> {
    this.#own.depths.enters(task, 1);
    this.#own.inFlight.entered(task);
    const { promise, resolve, reject } = Promise.withResolvers<PutReply>();
    const since = this.#parts.clock.now();
    this.#gathering.add(0, { task, sharing, since, claimed, answer: resolve, fail: reject });
    return promise;
  }

  /** It is in (its group counts until its end), or takes another path. */
  #uncount({ task }: Entering, queued: boolean): void {
    this.#own.depths.enters(task, -1);
    if (!queued) this.#own.inFlight.left(task);
  }

  /** New tasks: claims their contents together and sends their bundles together. Never rejects. */
  async #send(gathered: readonly Entering[]): Promise<void> {
    this.#bundles.clear();
    this.#turn++;
    // What gathered while a server did not answer has waited already, and does not wait that long again.
    const until = gathered[0]!.since + this.#parts.options.putWithinMs;
    let mine = gathered; // tasks answered by this call
    try {
      mine = await this.#claimContents(gathered, until);
      // Near the queue's bounds tasks are counted before the write, so that concurrent gateways do not pass them.
      const reserved = mine.length > 0 && this.#own.depths.near();
      if (reserved) mine = await this.#reserve(mine);
      await this.#write(mine, reserved, until);
      for (const each of mine) {
        this.#uncount(each, true);
        each.answer({ kind: "queued", id: each.task.id });
      }
    } catch (error) {
      const refusal = overloaded(error, MAYBE, NOT_ACCEPTED);
      for (const each of mine) {
        this.#unclaim(each);
        this.#uncount(each, false);
        each.fail(refusal);
      }
    }
  }

  /** Those for which there is room; the others are answered here. */
  async #reserve(claimed: readonly Entering[]): Promise<readonly Entering[]> {
    const refused = await this.#own.depths.reserve(claimed.map(({ task }) => task));
    const admitted = claimed.slice(0, claimed.length - refused.length);
    for (const [at, each] of claimed.slice(admitted.length).entries()) {
      const { task, sharing } = each;
      const { idempotency } = sharing;
      this.#unclaim(each);
      if (idempotency !== undefined)
        await this.#swap("k", idempotency.key, keyValue(task.id, idempotency), "", 0).catch(() => {});
      this.#uncount(each, false);
      each.answer(refused[at]!);
    }
    return admitted;
  }

  /** Tasks that own their content now; the others are looked up. */
  async #claimContents(gathered: readonly Entering[], until: number): Promise<readonly Entering[]> {
    const { nodes } = this.#parts;
    const asked: { readonly by: Entering; readonly shard: number; readonly command: Arg[] }[] = [];
    for (const by of gathered) {
      const { joinKey, cacheKey } = by.sharing;
      if (by.claimed) continue;
      if (joinKey !== undefined) {
        const { shard, key } = this.#index("x", joinKey);
        const ttlMs = this.#contentTtlMs(by.task, by.sharing);
        asked.push({ by, shard, command: ["SET", key, by.task.id, "NX", "GET", "PX", ttlMs] });
      }
      if (cacheKey !== undefined && cacheKey !== joinKey) {
        const { shard, key } = this.#index("c", cacheKey);
        asked.push({ by, shard, command: ["GET", key] });
      }
    }
    // Do not wait for a server that is away: tasks get in, and an identical one may run in parallel.
    const reachable = asked.filter(({ shard }) => nodes.up(shard));
    if (reachable.length === 0) return gathered;
    const replies = await nodes.scatter(reachable, { resend: true, withinMs: this.#leftMs(until) });
    const taken = new Set<Entering>();
    replies.forEach((reply, at) => {
      const { by } = reachable[at]!;
      if (reply instanceof RedisError) throw reply;
      if (reply !== null && !(reply instanceof StoreAway) && String(reply) !== by.task.id) taken.add(by);
    });
    for (const each of taken) {
      this.#uncount(each, false);
      this.#lookUp(each.task, each.sharing).then(each.answer, each.fail);
    }
    return taken.size === 0 ? gathered : gathered.filter((each) => !taken.has(each));
  }

  #contentTtlMs({ createdAt, deadlineAt }: Task, { cacheTtlMs = 0 }: Sharing): number {
    return Math.ceil(Math.max(0, deadlineAt - createdAt) + cacheTtlMs + GRACE_MS);
  }

  /** Share index: content ("x"), reusable outcomes ("c"), Idempotency-Keys ("k"). */
  #index(kind: "x" | "c" | "k", text: string): { readonly shard: number; readonly key: string } {
    const name = kind === "k" ? digest(text) : indexName(text);
    const shard = homeOf(name) % this.#parts.keys.shards;
    return { shard, key: this.#parts.key(shard, `${kind}:${name}`) };
  }

  /** Sets an index key to `value`, or only reads it; resolves with the other value if it is taken. */
  async #claim(
    kind: "x" | "k",
    text: string,
    value: string,
    ttlMs: number,
    only: boolean,
  ): Promise<string | undefined> {
    const { shard, key } = this.#index(kind, text);
    const command = only ? ["GET", key] : ["SET", key, value, "NX", "GET", "PX", ttlMs];
    const found = await this.#parts.nodes.command(shard, command, { resend: true });
    return found === null || String(found) === value ? undefined : String(found);
  }

  /** Compare and swap of an index key; resolves with the other value if it fails. */
  async #swap(
    kind: "x" | "k",
    text: string,
    from: string,
    to: string,
    ttlMs: number,
  ): Promise<string | undefined> {
    const { shard, key } = this.#index(kind, text);
    const found = await this.#parts.run(shard, scripts.swap, [key], [from, to, ttlMs]);
    return found === null ? undefined : String(found);
  }

  /** The task did not get in: frees its content. */
  #unclaim({ task, sharing: { joinKey } }: Entering): void {
    if (joinKey !== undefined) this.#swap("x", joinKey, task.id, "", 0).catch(() => {});
  }

  /** Writes bundles; resolves when as safe as `durability` asks. `reserved`: the tasks are counted already. */
  async #write(entering: readonly Entering[], reserved: boolean, until: number): Promise<void> {
    const { keys } = this.#parts;
    const byShard = Map.groupBy(entering, ({ task }) => keys.shardOf(task.id));
    await Promise.all(Array.from(byShard, ([shard, some]) => this.#writeShard(shard, some, reserved, until)));
  }

  #leftMs(until: number): number {
    return Math.max(0, until - this.#parts.clock.now());
  }

  async #writeShard(
    shard: number,
    entering: readonly Entering[],
    reserved: boolean,
    until: number,
  ): Promise<void> {
    const { nodes, shared, options, name, keys } = this.#parts;
    const { depths, cluster } = this.#own;
    const entries: { stream: string; mark: EntryMark; tasks: readonly TaskBody[] }[] = [];
    const records: Arg[][] = [];
    // A task whose bundle left before goes separately, with its own meta.
    const bundles = Map.groupBy(entering, ({ task: { id } }) =>
      this.#left.has(prefixOf(id)) ? id : prefixOf(id),
    );
    for (const [group, some] of bundles) {
      const [{ task }] = some as [Entering];
      const late = group === task.id;
      const tasks = some.map((each) => ({
        id: each.task.id,
        body: bodyFrame(each.task, each.sharing, shared),
      }));
      const stream = keys.stream(shard, task.model, options.zone);
      const chunks = [...chunksOf(tasks)];
      const mark = late || chunks.length > 1 ? "part" : "";
      for (const chunk of chunks) entries.push({ stream, mark, tasks: chunk });
      const bundle = keys.bundle(task.id);
      const keyed = some.filter(({ sharing }) => sharing.idempotency !== undefined);
      const marks = keyed.flatMap((each) => [`k${fieldOf(each.task.id)}`, "1", "x", "1"]);
      records.push(["HSET", bundle, late ? `m${fieldOf(task.id)}` : "m", bundleFrame(tasks), ...marks]);
      const keepMs = Math.max(...some.map((each) => this.#keepMs(each.task, each.sharing)));
      // The rest of the bundle may need it for longer.
      if (late) records.push(["PEXPIRE", bundle, keepMs, "NX"], ["PEXPIRE", bundle, keepMs, "GT"]);
      else records.push(["PEXPIRE", bundle, keepMs]);
      remember(this.#left, prefixOf(task.id));
    }
    const tasks = entering.map(({ task }) => task);
    const counts = reserved ? new Map() : depths.of(tasks);
    const counting = depths.commands(counts);
    const counted = counting.length > 0 && !cluster;
    const all = (again: boolean): Arg[][] => [
      ...entries.map((each) => {
        const mark = again ? (counted ? "check" : "copy") : each.mark;
        return ["XADD", each.stream, "*", "b", entryFrame(name, mark, each.tasks)];
      }),
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
    if (counted) depths.heard(counts, replies.slice(-counting.length));
    // Another slot: outside the transaction.
    else if (counting.length > 0) void depths.add(counts);
  }

  /** As long as the outcome may be polled or reused. */
  #keepMs({ deadlineAt }: Task, { cacheTtlMs = 0 }: Sharing = {}): number {
    const reuseMs = Math.max(this.#parts.limits.results.ttlMs, cacheTtlMs);
    return Math.ceil(Math.max(0, deadlineAt - this.#parts.clock.now() + reuseMs) + GRACE_MS);
  }

  /** A task that may find its content or key taken, or that was put before. */
  async #lookUp(task: Task, sharing: Sharing): Promise<PutReply> {
    try {
      return await this.#share(task, sharing);
    } catch (error) {
      throw overloaded(error, MAYBE, NOT_ACCEPTED);
    }
  }

  async #share(task: Task, sharing: Sharing): Promise<PutReply> {
    const { depths, inFlight, records } = this.#own;
    const { idempotency, only = false } = sharing;
    const known = this.#putBefore(task) ? await records.look(task.id, { waits: true }) : undefined;
    if (known?.final !== undefined) return { kind: "done", id: task.id, record: known.final, cached: false };
    if (known !== undefined) return { kind: "joined", id: task.id };
    const full = only
      ? { kind: "full" as const, message: NOTHING_TO_SHARE }
      : (depths.full(task) ?? inFlight.full(task));
    const bound = idempotency && (await this.#bind(task, idempotency, full !== undefined));
    if (bound !== undefined && bound.kind !== "free") return bound;
    const shared = await this.#join(task, sharing, full !== undefined);
    if (shared !== undefined) {
      if (bound === undefined) return shared;
      return (await this.#rebind(task, idempotency!, bound.from, shared.id)) ?? shared;
    }
    return full ?? this.#gather(task, sharing, true);
  }

  /**
   * Points the key at this task; resolves with an answer if it is taken. `only`: writes nothing, returns its stale
   * value.
   */
  async #bind(task: Task, idempotency: IdempotencyKey, only: boolean): Promise<PutReply | FreeKey> {
    const { clock, options } = this.#parts;
    const { records } = this.#own;
    const { key, fingerprint } = idempotency;
    // How long the key's task may still be on its way in: one key, one task.
    const patientUntil = clock.now() + options.putWithinMs;
    const value = keyValue(task.id, idempotency);
    const ttlMs = this.#keepMs(task);
    for (let looks = 0; ; looks++) {
      const stands = await this.#claim("k", key, value, ttlMs, only);
      if (stands === undefined) return { kind: "free", from: value };
      const id = stands.slice(0, stands.indexOf(" "));
      const conflict = stands.slice(id.length + 1) !== fingerprint;
      const found = await records.look(id, conflict ? {} : { waits: true, keyed: true, caller: task });
      const final = found?.final;
      const gone = final !== undefined && (found!.deleted || !records.lives(final));
      if (found === undefined || gone) {
        // On its way in, or gone. Lookups count too: this process may have stalled itself.
        const patient = looks < LOOK_AGAIN_MS.length || clock.now() < patientUntil;
        if (found === undefined && patient && !only) {
          // The other body's conflict stands while it may be on its way.
          if (conflict) return { kind: "conflict", id };
          await this.#parts.pause(LOOK_AGAIN_MS[looks] ?? LOOK_AGAIN_MS.at(-1)!);
          continue;
        }
      } else {
        if (conflict) return { kind: "conflict", id };
        if (final === undefined) {
          // The same caller once more, not a further one.
          const joined = this.#joined(id, found, task, 0);
          if (joined !== undefined) return joined;
          await this.#parts.pause(1);
          continue;
        }
        const outcome = final.outcome!;
        // A retryable failure does not occupy the key.
        if (outcome.ok || !errors[outcome.code].retryable)
          return { kind: "done", id, record: final, cached: false };
      }
      if (only) return { kind: "free", from: stands };
      if ((await this.#swap("k", key, stands, value, ttlMs)) === undefined)
        return { kind: "free", from: value };
    }
  }

  /** Points the key at the task that was joined or answered from the cache; an answer if another body was quicker. */
  async #rebind(
    task: Task,
    idempotency: IdempotencyKey,
    from: string,
    id: string,
  ): Promise<PutReply | undefined> {
    if (id !== task.id) await this.#own.records.look(id, { keyed: true });
    const value = keyValue(id, idempotency);
    const other = await this.#swap("k", idempotency.key, from, value, this.#keepMs(task));
    if (other === undefined || other === value) return undefined;
    const stands = other.slice(0, other.indexOf(" "));
    if (other.slice(stands.length + 1) !== idempotency.fingerprint) return { kind: "conflict", id: stands };
    // The same request was quicker elsewhere: its task answers.
    const bound = await this.#bind(task, idempotency, false);
    return bound.kind === "free" ? undefined : bound;
  }

  /** Joins work in flight or reuses an outcome. `only`: an unclaimed content stays unclaimed. */
  async #join(
    task: Task,
    sharing: Sharing,
    only: boolean,
  ): Promise<(PutReply & { readonly kind: "joined" | "done" }) | undefined> {
    const { joinKey, cacheKey } = sharing;
    const { outcomes, records } = this.#own;
    if (cacheKey !== undefined && cacheKey !== joinKey) {
      const { shard, key } = this.#index("c", cacheKey);
      const id = await this.#parts.nodes.command(shard, ["GET", key], { resend: true });
      const found = id === null ? undefined : await records.look(String(id));
      if (this.#reusable(found?.final)) return this.#cached(task, sharing, found.final);
    }
    if (joinKey === undefined) return undefined;
    const local = outcomes.joinable(joinKey);
    if (local !== undefined && local.id !== task.id) {
      const joined = this.#joined(local.id, await records.look(local.id, { caller: task }), task);
      if (joined !== undefined) return joined;
    }
    const ttlMs = this.#contentTtlMs(task, sharing);
    for (let looks = 0; ; looks++) {
      const id = await this.#claim("x", joinKey, task.id, ttlMs, only);
      if (id === undefined) return undefined;
      const found = await records.look(id, { waits: true, caller: task });
      const joined = this.#joined(id, found, task);
      if (joined !== undefined) return joined;
      if (cacheKey === joinKey && this.#reusable(found?.final))
        return this.#cached(task, sharing, found.final);
      if (only) return undefined;
      const waitMs = LOOK_AGAIN_MS[looks];
      if (found?.final === undefined && waitMs !== undefined) await this.#parts.pause(waitMs);
      else if ((await this.#swap("x", joinKey, id, task.id, ttlMs)) === undefined) return undefined;
    }
  }

  #reusable(final: FinalRecord | undefined): final is FinalRecord {
    return final !== undefined && this.#parts.clock.now() < final.reusableUntil;
  }

  /** Undefined: it is not there, has ended, or is about to end. */
  #joined(
    id: string,
    found: FoundRecord | undefined,
    task: Task,
    callers = 1,
  ): (PutReply & { kind: "joined" }) | undefined {
    if (found === undefined || found.final !== undefined) return undefined;
    const { outcomes } = this.#own;
    if (!this.#own.accommodate(id, found.owner, task)) return undefined;
    const known = outcomes.get(id);
    const awaited = outcomes.expect(id, task.deadlineAt);
    if (known?.accepted === true) awaited.joins += callers;
    awaited.accepted = true;
    return { kind: "joined", id };
  }

  /** Answers from a cached outcome: writes a finished record under the task's id. */
  async #cached(
    task: Task,
    { idempotency }: Sharing,
    { outcome, batch }: FinalRecord,
  ): Promise<PutReply & { kind: "done" }> {
    const { shared, clock, keys, options, nodes, limits } = this.#parts;
    const { id, createdAt } = task;
    remember(this.#cachedIds, id);
    const meta = metaFrame(task, {}, shared);
    const fields = { meta, attempt: 0, queuedAt: createdAt, settledAt: clock.now(), cached: true };
    const bytes = outcomeFrame(fields, outcome!, shared);
    const bundle = keys.bundle(id);
    const ttlMs = Math.ceil(limits.results.ttlMs + GRACE_MS);
    const marks = idempotency === undefined ? [] : [`k${fieldOf(id)}`, "1"];
    const commands: Arg[][] = [
      ["HSET", bundle, fieldOf(id), bytes, ...marks],
      // The bundle may hold tasks that need it for longer.
      ["PEXPIRE", bundle, ttlMs, "NX"],
      ["PEXPIRE", bundle, ttlMs, "GT"],
    ];
    await nodes.transact(keys.shardOf(id), () => commands, options.putWithinMs);
    const record = { ...this.#own.records.read(id, bytes), ...(batch && { batch }) };
    return { kind: "done", id, record, cached: true };
  }
}

function keyValue(id: string, { fingerprint }: IdempotencyKey): string {
  return `${id} ${fingerprint}`;
}

function remember(texts: Set<string>, text: string): void {
  texts.add(text);
  if (texts.size > MAX_LEFT) for (const oldest of texts) return void texts.delete(oldest);
}

const prefixOf = (id: string): string => id.slice(0, -FIELD_DIGITS);

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
