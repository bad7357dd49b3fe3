/**
 * The way into Redis: the tasks of one tick, and those that come while a call is on its way, go together, in
 * one call of the `put` script per server (per shard on a Cluster), followed by one WAIT where a replica must
 * confirm them.
 *
 * While what gathers has to wait longer than a quarter of the time that it may, Redis (or this process) is
 * behind: more is refused then, so that what was taken on gets through instead of all timing out together.
 *
 * An Idempotency-Key belongs to the body it first came with. That is checked at the key's own shard before
 * the task is put at the home of its body, where joining and reusing are one atomic act. Between the two the task
 * is on its way in: another body that comes with the key then is a conflict already. A task that may only
 * share what is there (`Sharing.only`) looks at the key and binds it when something came of it: refusals, of
 * which there may be many, write nothing.
 */
import { homeOf } from "../core/home.ts";
import type { Task } from "../core/task.ts";
import type { PutReply, Sharing } from "./engine.ts";
import { bodyFrame, frame, readOutcome, texts } from "./redis-frames.ts";
import { COMMON, type Holder } from "./redis-crowds.ts";
import { Gathering } from "./redis-gather.ts";
import { digest, INDEX_GRACE_MS, indexName, streamFamily } from "./redis-keys.ts";
import { type Arg, RedisError, type RedisReply, type Script, StoreAway } from "../redis/nodes.ts";
import { overloaded, type RedisParts } from "./redis-parts.ts";
import { scripts } from "./redis-scripts.ts";

interface Pending {
  readonly since: number;
  readonly task: Task;
  readonly shard: number;
  readonly family: string;
  readonly indexTtlMs: number;
  readonly args: readonly Arg[];
  /** Which of them are there, as the script says it. */
  readonly marks: number;
  readonly body: Buffer;
  readonly names: readonly string[];
  /** The kind of stream that it is queued in; "" never. */
  readonly kind: string;
  readonly holder: Holder | undefined;
  answer(reply: PutReply): void;
  fail(why: Error): void;
}

const QUEUED = "q".charCodeAt(0);
const MISSING = "m".charCodeAt(0);
/** Marks of a task: with a cache key that is not its join key, with an Idempotency-Key. */
const CACHED = 1;
const KEYED = 2;
/** The numbers of a task as `put.lua` reads them: place, kind, deadline, bytes, marks. */
const NUMBERS_BYTES = 2 + 2 + 8 + 4 + 1;
const MAYBE = "the task may have been accepted; it is safe to send it again";
const NOTHING_TO_SHARE = "nothing to share, and no room for more";
const NOT_ACCEPTED = "nothing was accepted; send it again";
const BEHIND = "Redis takes tasks in more slowly than they come";
/** Of the time that a task may take to get in. */
const BEHIND_AFTER = 0.25;
/** An Idempotency-Key's binding outlives its record by so much: joins may have given the task more time. */
const KEY_GRACE_MS = 10 * 60_000;
/** A body whose task is not queued goes by itself, so long after the last moment at which the task could be. */
const BODY_GRACE_MS = 60_000;

export class RedisPuts {
  readonly #parts: RedisParts;
  readonly #gathering = new Gathering<Pending>((gathered) => this.#send(gathered));

  constructor(parts: RedisParts) {
    this.#parts = parts;
  }

  async put(task: Task, sharing: Sharing): Promise<PutReply> {
    const { idempotency } = sharing;
    try {
      this.#parts.reach(this.#parts.shardOf(task.id));
    } catch (error) {
      throw overloaded(error, NOT_ACCEPTED, NOT_ACCEPTED);
    }
    if (this.#behind(task)) return { kind: "full", message: BEHIND };
    if (sharing.only === true) return this.#share(task, sharing);
    if (idempotency !== undefined) {
      const conflict = await this.#bind(task, idempotency.key, idempotency.fingerprint);
      if (conflict !== undefined) return { kind: "conflict", id: conflict };
    }
    const reply = await this.#enter(task, sharing);
    if (reply.kind === "full" && idempotency !== undefined) await this.#unbind(task, idempotency);
    return reply;
  }

  /** Those that gather for the next call have been waiting for too long. */
  #behind(task: Task): boolean {
    const first = this.#gathering.first(this.#parts.groupOf(this.#parts.shardOf(task.id)));
    if (first === undefined) return false;
    return this.#parts.clock.now() - first.since > BEHIND_AFTER * this.#parts.options.putWithinMs;
  }

  /** Only what is there: nothing is queued, and a key that stood for nothing still does afterwards. */
  async #share(task: Task, sharing: Sharing): Promise<PutReply> {
    const { idempotency, joinKey, cacheKey } = sharing;
    const keyed = idempotency !== undefined && (await this.#bound(idempotency.key));
    if (keyed) {
      const conflict = await this.#bind(task, idempotency.key, idempotency.fingerprint);
      if (conflict !== undefined) return { kind: "conflict", id: conflict };
    } else if (joinKey === undefined && cacheKey === undefined) {
      return { kind: "full", message: NOTHING_TO_SHARE };
    }
    const reply = await this.#enter(task, sharing);
    if (keyed && reply.kind === "full") await this.#unbind(task, idempotency);
    if (idempotency === undefined || keyed || reply.kind === "full") return reply;
    const conflict = await this.#bind(task, idempotency.key, idempotency.fingerprint);
    return conflict === undefined ? reply : { kind: "conflict", id: conflict };
  }

  /** Whether the key is bound to a body. */
  async #bound(key: string): Promise<boolean> {
    const { keys, nodes, shards } = this.#parts;
    const name = digest(key);
    const shard = homeOf(name) % shards;
    const get = ["GET", `${keys.bases[shard]!}f:${name}`];
    const value = await nodes.command(shard, get, { resend: true }).catch((error: unknown) => {
      throw overloaded(error, NOT_ACCEPTED, NOT_ACCEPTED);
    });
    return value !== null;
  }

  #enter(task: Task, sharing: Sharing): Promise<PutReply> {
    const { nodes, shared, options, crowds, mirror } = this.#parts;
    const { model, tier, tenant } = task;
    const shard = this.#parts.shardOf(task.id);
    const { joinKey = "", cacheKey, idempotency } = sharing;
    const family = streamFamily(task.model, task.parameters, options.zone);
    const join = indexName(joinKey);
    const cache = cacheKey === joinKey ? join : indexName(cacheKey ?? "");
    const key = idempotency === undefined ? "" : digest(idempotency.key);
    // Of what is never queued the meta is enough: an answer from the cache carries it.
    const body = bodyFrame(sharing.only === true ? { ...task, input: "" } : task, sharing, shared);
    const holder =
      sharing.only === true ? undefined : crowds.enter(model, tier, tenant, mirror.waiting(model)[tier] ?? 0);
    const kind = holder?.kind ?? "";
    if (holder !== undefined) mirror.expect(model, tier, kind, 1);
    const { promise, resolve, reject } = Promise.withResolvers<PutReply>();
    const args: Arg[] = [task.id, join];
    if (cache !== join) args.push(cache);
    if (idempotency !== undefined) args.push(key, idempotency.fingerprint);
    const names = !nodes.cluster
      ? []
      : putNames(task.id, `${family}${tier}:${kind || COMMON}`, cache, join, key);
    const indexTtlMs = task.deadlineAt - task.createdAt + (sharing.cacheTtlMs ?? 0) + INDEX_GRACE_MS;
    this.#gathering.add(this.#parts.groupOf(shard), {
      since: this.#parts.clock.now(),
      task,
      shard,
      family,
      indexTtlMs: Math.ceil(indexTtlMs),
      args,
      marks: (cache === join ? 0 : CACHED) + (idempotency === undefined ? 0 : KEYED),
      body,
      names,
      kind,
      holder,
      answer: resolve,
      fail: reject,
    });
    return promise;
  }

  async #send(gathered: readonly Pending[]): Promise<void> {
    const { nodes, keys, shards, mirror, shared, options } = this.#parts;
    const [pending, withinMs] = this.#inTime(gathered);
    if (pending.length === 0) return;
    const { maxQueued, maxQueuedBytes, results } = options;
    const bodyMs = options.putWithinMs + BODY_GRACE_MS;
    const kinds = new Map<string, number>();
    const about: Arg[] = [];
    const tasks: Arg[] = [];
    const numbers = Buffer.allocUnsafe(NUMBERS_BYTES * pending.length);
    let at = 0;
    const call = this.#parts.call(scripts.put);
    for (const { task, shard, family, indexTtlMs, args, marks, body, names, kind: stream } of pending) {
      const { id, tenant, tier, model, parameters } = task;
      const key = `${family}${tier}${stream} ${indexTtlMs} ${tenant}`;
      let kind = kinds.get(key);
      if (kind === undefined) {
        kinds.set(key, (kind = kinds.size + 1));
        const queueMs = options.models.get(model)?.queueMs ?? 0;
        about.push(tenant, family, tier, queueMs, indexTtlMs, parameters, stream);
      }
      at = numbers.writeUInt16BE(call.place(shard), at);
      at = numbers.writeUInt16BE(kind, at);
      at = numbers.writeDoubleBE(shared.instant(task.deadlineAt), at);
      at = numbers.writeUInt32BE(Buffer.byteLength(task.input) + Buffer.byteLength(parameters), at);
      at = numbers.writeUInt8(marks, at);
      tasks.push(...args);
      call.names(shard, ...names);
      // NX: the body of a task that is queued already stays for as long as that is.
      call.before("SET", `${keys.bases[shard]!}b:${id}`, body, "NX", "PX", bodyMs);
    }
    const bounds = [Math.ceil(maxQueued / shards), Math.ceil(maxQueuedBytes / shards)] as const;
    call
      .head(
        this.#parts.name,
        ...bounds,
        results.ttlMs,
        this.#keyTtlMs(),
        kinds.size,
        options.leaseMs,
        numbers,
        bodyMs,
      )
      .add(...about, ...tasks);
    try {
      const reply = await nodes.runDurably(call.shard, call.build(), withinMs);
      const [letters, replies, report] = reply as [Buffer, Buffer[][], Buffer];
      mirror.told(report.toString());
      let explained = 0;
      pending.forEach((each, which) => {
        const letter = letters[which]!;
        if (letter === MISSING) this.#missing(each);
        else this.#answer(each, letter === QUEUED ? undefined : replies[explained++]!);
      });
    } catch (error) {
      const why = overloaded(error, MAYBE, NOT_ACCEPTED);
      for (const each of pending) this.#fail(each, why);
      if (error instanceof RedisError) this.#drop(pending);
    }
  }

  /** Refused: a server that is full must not keep what was written for these tasks until its time is over. */
  #drop(pending: readonly Pending[]): void {
    const call = this.#parts.call(scripts.drop);
    for (const { shard, task } of pending) call.add(call.place(shard), task.id).names(shard, `b:${task.id}`);
    this.#parts.nodes.run(call.shard, call.build(), { resend: true }).catch(() => {});
  }

  #missing(pending: Pending): void {
    const why = new StoreAway("the input could not be written", false);
    this.#fail(pending, overloaded(why, NOT_ACCEPTED, NOT_ACCEPTED));
  }

  /** Without a reply: it is queued. */
  #answer(pending: Pending, reply: readonly Buffer[] | undefined): void {
    const read = this.#read(pending.task, reply);
    this.#arrived(pending, read.kind === "queued");
    pending.answer(read);
  }

  #fail(pending: Pending, why: Error): void {
    this.#arrived(pending, false);
    pending.fail(why);
  }

  /** It is no longer on its way in: if it was queued the streams count it, and its tenant until its end. */
  #arrived({ task, kind, holder }: Pending, queued: boolean): void {
    if (holder === undefined) return;
    const { mirror, news } = this.#parts;
    mirror.expect(task.model, task.tier, kind, -1);
    if (queued) news.holds(task.id, holder);
    else holder.leave();
  }

  /**
   * Those that have not waited too long for the call before theirs, and how long theirs may take. The others,
   * and all when the server is away, are refused now: nobody waits for two timeouts.
   */
  #inTime(gathered: readonly Pending[]): [pending: readonly Pending[], withinMs: number] {
    const { nodes, clock, options } = this.#parts;
    const since = clock.now() - options.putWithinMs;
    const inTime = gathered.filter((each) => each.since > since && nodes.up(each.shard));
    if (inTime.length < gathered.length) {
      const why = overloaded(new StoreAway("it does not answer", false), NOT_ACCEPTED, NOT_ACCEPTED);
      for (const each of gathered) if (!inTime.includes(each)) this.#fail(each, why);
    }
    return [inTime, Math.max(1, Math.ceil((inTime[0]?.since ?? since) - since))];
  }

  #read(task: Task, reply: readonly Buffer[] | undefined): PutReply {
    if (reply === undefined) return { kind: "queued", id: task.id };
    const [kind, value, bytes, cached] = reply;
    const id = value!.toString();
    switch (kind!.toString()) {
      case "j":
        return { kind: "joined", id };
      case "d": {
        const record = readOutcome(id, bytes!, this.#parts.shared);
        return { kind: "done", id, record, cached: cached!.toString() === "1" };
      }
      case "c":
        return { kind: "conflict", id };
      default:
        return { kind: "full", message: this.#boundReached(id), never: this.#neverFits(task) };
    }
  }

  #boundReached(which: string): string {
    if (which === "o") return NOTHING_TO_SHARE;
    const { maxQueued, maxQueuedBytes } = this.#parts.options;
    return which === "n"
      ? `the queue is full (limits.maxQueued ${maxQueued})`
      : `the queue is full (limits.maxQueuedBytes ${maxQueuedBytes})`;
  }

  /** Alone it is more than its shard may hold. */
  #neverFits({ input, parameters }: Task): boolean {
    const { shards, options } = this.#parts;
    return (
      Buffer.byteLength(input) + Buffer.byteLength(parameters) > Math.ceil(options.maxQueuedBytes / shards)
    );
  }

  #keyTtlMs(): number {
    let totalMs = 0;
    const { models, results } = this.#parts.options;
    for (const model of models.values()) totalMs = Math.max(totalMs, model.totalMs);
    return totalMs + results.ttlMs + KEY_GRACE_MS;
  }

  /** Binds the key to this body. Resolves with the task that it stands for when it came with another. */
  async #bind(task: Task, key: string, fingerprint: string): Promise<string | undefined> {
    const name = digest(key);
    const home = this.#parts.shardOf(task.id);
    let replacing: Arg = "";
    for (;;) {
      const args = [fingerprint, home, this.#keyTtlMs(), replacing, task.id, this.#underwayMs()];
      const reply = await this.#atKey(name, scripts.bind, args).catch((error: unknown) => {
        throw overloaded(error, NOT_ACCEPTED, NOT_ACCEPTED);
      });
      if (reply === null) return undefined;
      const [bound, underway] = reply as [Buffer, Buffer];
      const [boundFingerprint, boundHome] = texts(bound) as [string, string];
      const holder = await this.#holder(Number(boundHome), name, boundFingerprint, underway.toString());
      if (holder !== undefined) return holder;
      // Nothing came of the task that it was bound to, or that is forgotten.
      replacing = frame([boundFingerprint, boundHome]);
    }
  }

  /** Its task was refused. If this fails, the key is free for another body when its time on the way in is over. */
  async #unbind(task: Task, { key, fingerprint }: NonNullable<Sharing["idempotency"]>): Promise<void> {
    const args = [fingerprint, this.#parts.shardOf(task.id), task.id];
    await this.#atKey(digest(key), scripts.unbind, args).catch(() => {});
  }

  /** How long a task that a key was bound for may take to get in, an attempt that is under way at the end included. */
  #underwayMs(): number {
    return 2 * this.#parts.options.putWithinMs;
  }

  /** Runs a script at the key's own shard. */
  #atKey(name: string, script: Script, args: readonly Arg[]): Promise<RedisReply> {
    const { keys, nodes, shards } = this.#parts;
    const shard = homeOf(name) % shards;
    const base = keys.bases[shard]!;
    const call = { script, keys: [`${base}f:${name}`, `${base}p:${name}`] };
    const head = [this.#parts.now(), this.#parts.name];
    return nodes.run(shard, { ...call, args: [...head, ...args] }, { resend: true });
  }

  /** The task that the key stands for at its home, if it is still known there, or on its way there. */
  async #holder(
    shard: number,
    key: string,
    fingerprint: string,
    underway: string,
  ): Promise<string | undefined> {
    const { keys, nodes } = this.#parts;
    const command = ["GET", `${keys.bases[shard]!}k:${key}`];
    const value = await nodes.command(shard, command, { resend: true }).catch((error: unknown) => {
      throw overloaded(error, NOT_ACCEPTED, NOT_ACCEPTED);
    });
    if (value === null) return underway === "" ? undefined : underway;
    const [id, bound] = texts(value as Buffer) as [string, string];
    const known = id !== "" && bound === fingerprint && (await this.#parts.record(id)) !== undefined;
    return known ? id : undefined;
  }
}

function putNames(id: string, stream: string, cache: string, join: string, key: string): string[] {
  const names = [stream, `r:${id}`, `b:${id}`];
  if (cache !== "") names.push(`x:${cache}`);
  if (join !== "" && join !== cache) names.push(`x:${join}`);
  if (key !== "") names.push(`k:${key}`);
  return names;
}
