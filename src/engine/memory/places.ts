/**
 * Where records that are not final are, each in exactly one place, with an alarm: when `reap` must look at it.
 *
 *   in a queue            state queued, `list` set
 *   waiting for a retry   state queued, `retryAt` set
 *   under a lease         state running, `lease` and `leaseUntil` set
 */
import { Heap } from "../../core/heap.ts";
import type { BatchNote, Json, Task } from "../../core/task.ts";
import { type Composition, MAX_GROUPS } from "../engine.ts";
import type { EngineLimits, EngineListener, EngineStats, PutReply, QueueView } from "../engine.ts";
import { type Group, ModelQueues, type TakenBatch } from "./queues.ts";
import type { TaskRecord } from "./record.ts";

const NOTHING: readonly never[] = [];

interface Arrivals {
  readonly model: string;
  readonly parameters: string;
  readonly depth: number; // queue depth, these included
  readonly count: number;
}

export class Places {
  readonly #limits: () => EngineLimits;
  readonly #listeners: ReadonlySet<EngineListener>;
  readonly #fallsDue: (at: number) => void;
  readonly #seed: number;
  readonly #journaled: boolean; // a journal stores parameters with each task; in memory tasks share their text
  readonly #queues = new Map<string, ModelQueues>();
  readonly #alarms = new Heap<TaskRecord>();
  waiting = 0; // queued, or waiting for a retry
  waitingBytes = 0;
  running = 0;
  readonly #afterTurn: ((run: () => void) => void) | undefined;
  #untold: Map<Group, Arrivals> | undefined; // arrivals of one `together` or turn, by queue

  constructor(
    limits: () => EngineLimits,
    seed: number,
    journaled: boolean,
    listeners: ReadonlySet<EngineListener>,
    fallsDue: (at: number) => void,
    afterTurn?: (run: () => void) => void,
  ) {
    this.#afterTurn = afterTurn;
    this.#limits = limits;
    this.#seed = seed;
    this.#journaled = journaled;
    this.#listeners = listeners;
    this.#fallsDue = fallsDue;
  }

  /** The queues of a model that is configured or has tasks left. */
  #of(model: string): ModelQueues | undefined {
    let queues = this.#queues.get(model);
    if (queues !== undefined) return queues;
    const { models, tiers } = this.#limits();
    if (!models.has(model)) return undefined;
    queues = new ModelQueues(tiers, this.#seed);
    this.#queues.set(model, queues);
    return queues;
  }

  /** Drops the queues of removed models once nothing can return to them. */
  dropGone(): void {
    if (this.running > 0 || this.waiting > 0) return;
    const { models } = this.#limits();
    for (const model of this.#queues.keys()) if (!models.has(model)) this.#queues.delete(model);
  }

  queues(model: string, perTier?: number): Iterable<QueueView> {
    return this.#of(model)?.groups(perTier) ?? NOTHING;
  }

  depths(model: string): readonly number[] {
    return this.#of(model)?.depths ?? NOTHING;
  }

  turn(model: string, tier: number, tenant: string): number {
    return this.#of(model)?.turn(tier, tenant) ?? 0;
  }

  stats(): Pick<EngineStats, "queued" | "running" | "depth"> {
    const models = new Set([...this.#limits().models.keys(), ...this.#queues.keys()]);
    const depth = new Map(Array.from(models, (model) => [model, [...this.#of(model)!.depths]]));
    return { queued: this.waiting, running: this.running, depth };
  }

  /** When a task that enters its queue at `from` expires there. */
  expiry(model: string, from: number, deadlineAt: number): number {
    return Math.min(deadlineAt, from + (this.#limits().models.get(model)?.queueMs ?? 0));
  }

  /** The bound that leaves no room for this task. */
  full(task: Task): Full | undefined {
    const { maxQueued, maxQueuedBytes } = this.#limits();
    const never = task.input.length + task.parameters.length > maxQueuedBytes;
    if (this.waiting >= maxQueued) return full(`the queue is full (limits.maxQueued ${maxQueued})`, never);
    const queues = this.#of(task.model)!;
    const shared = !this.#journaled && queues.has(task.parameters);
    const bytes = task.input.length + (shared ? 0 : task.parameters.length);
    if (this.waitingBytes + bytes > maxQueuedBytes) {
      return full(`the queue is full (limits.maxQueuedBytes ${maxQueuedBytes})`, never);
    }
    if (!queues.noGroupFor(task)) return undefined;
    const message =
      `too many different parameters are queued for this model at once (${MAX_GROUPS}, shared by all tenants); ` +
      "send equal parameters, or fewer requests at once";
    return { kind: "full", message, own: true };
  }

  /** `since`: arrival of a task that goes to the back; one that returns keeps its age and place. */
  enqueue(record: TaskRecord, since?: number): void {
    const place = since === undefined ? "arrival" : "back";
    record.state = "queued";
    record.retryAt = 0;
    if (since !== undefined) record.queuedAt = since;
    const { model, parameters } = record.task;
    this.#wait(record);
    const depth = this.#of(model)!.push(record, place);
    this.#setAlarm(record, record.expiresAt);
    // One that returns is told at once: the dispatcher waits for it.
    const later = this.#afterTurn === undefined ? this.#untold !== undefined : since !== undefined;
    if (later) this.#tellLater(record, depth);
    else for (const listener of this.#listeners) listener.queued?.(model, parameters, depth, 1);
  }

  /** Arrivals during `puts` are reported when it is over. */
  together<Puts>(puts: () => Puts): Puts {
    if (this.#untold !== undefined || this.#afterTurn !== undefined) return puts();
    this.#untold = new Map();
    try {
      return puts();
    } finally {
      this.#tellAll();
    }
  }

  #tellAll(): void {
    const untold = this.#untold!;
    this.#untold = undefined;
    for (const { model, parameters, depth, count } of untold.values()) {
      for (const listener of this.#listeners) listener.queued?.(model, parameters, depth, count);
    }
  }

  #tellLater({ group, task }: TaskRecord, depth: number): void {
    const { model, parameters } = task;
    if (this.#untold === undefined) this.#afterTurn!(() => this.#tellAll());
    const untold = (this.#untold ??= new Map());
    const count = (untold.get(group!)?.count ?? 0) + 1;
    untold.set(group!, { model, parameters, depth, count });
  }

  /** Hidden until `at`, when `reap` requeues it. */
  sitOut(record: TaskRecord, at: number): void {
    record.state = "queued";
    record.retryAt = at;
    this.#wait(record);
    this.#setAlarm(record, Math.min(at, record.deadlineAt));
  }

  /** Removes one batch's records from their queue; the caller puts each into its next place at once. */
  take(
    model: string,
    parameters: Json,
    max: number,
    now: number,
    composition?: Composition,
  ): TakenBatch | undefined {
    const taken = this.#of(model)?.take(parameters, max, now, composition);
    for (const record of taken?.records ?? NOTHING) this.#unwait(record);
    return taken;
  }

  lease(record: TaskRecord, token: string, until: number, batch: BatchNote): void {
    record.state = "running";
    record.attempt++;
    record.batch = batch;
    record.lease = token;
    record.overtakenUntil = 0;
    this.running++;
    this.extend(record, until);
  }

  extend(record: TaskRecord, until: number): void {
    record.leaseUntil = until;
    const at = Math.min(until, record.deadlineAt);
    // An earlier alarm fires in vain and is snoozed, which is much rarer than a lease.
    if (record.dueAt > at || record.place < 0) this.#setAlarm(record, at);
  }

  /** Removes a record from any place; the caller puts it into its next one at once. */
  leave(record: TaskRecord): void {
    if (record.state === "running") this.running--;
    else {
      if (record.list !== undefined) this.#queues.get(record.task.model)!.remove(record);
      this.#unwait(record);
    }
    record.lease = "";
  }

  /** A joining caller brings the later deadline and the better tier. */
  accommodate(record: TaskRecord, newcomer: Task, now: number): void {
    record.deadlineAt = Math.max(record.deadlineAt, newcomer.deadlineAt);
    const expiresAt = this.expiry(newcomer.model, now, record.deadlineAt);
    record.expiresAt = Math.max(record.expiresAt, expiresAt);
    if (newcomer.tier < record.tier) this.#promote(record, newcomer.tier);
  }

  /** A better tier joined: moves it there if it is in a queue. */
  #promote(record: TaskRecord, tier: number): void {
    const queued = record.list !== undefined;
    if (queued) this.leave(record);
    record.tier = tier;
    if (queued) this.enqueue(record);
  }

  retire(record: TaskRecord): void {
    this.#alarms.remove(record);
  }

  /** The record whose alarm is first, if it fired by `now`. */
  rung(now: number): TaskRecord | undefined {
    return this.#alarms.firstAt <= now ? this.#alarms.first : undefined;
  }

  get nextAlarmAt(): number {
    return this.#alarms.firstAt;
  }

  /** Nothing is due yet: its time was extended. */
  snooze(record: TaskRecord): void {
    const { state, list, retryAt, deadlineAt, expiresAt, leaseUntil } = record;
    const running = Math.min(leaseUntil, deadlineAt);
    const waiting = list === undefined ? Math.min(retryAt, deadlineAt) : expiresAt;
    this.#setAlarm(record, state === "running" ? running : waiting);
  }

  #setAlarm(record: TaskRecord, at: number): void {
    this.#alarms.set(record, at);
    this.#fallsDue(at);
  }

  #wait(record: TaskRecord): void {
    const { model, input, parameters } = record.task;
    const opened = this.#of(model)!.hold(record);
    this.waiting++;
    this.waitingBytes += input.length + (opened || this.#journaled ? parameters.length : 0);
  }

  #unwait(record: TaskRecord): void {
    const { model, input, parameters } = record.task;
    const gone = this.#of(model)!.release(record);
    this.waiting--;
    this.waitingBytes -= input.length + (gone || this.#journaled ? parameters.length : 0);
  }
}

type Full = PutReply & { readonly kind: "full" };

function full(message: string, never: boolean): Full {
  return { kind: "full", message, never };
}
