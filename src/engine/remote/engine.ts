/**
 * A gateway process's half of an engine that lives in the core process (`server.ts`), reached through a link.
 *
 * While the core is away: what it has not answered is held for HOLD_MS after the connection was lost and sent again on
 * the next one (a task that is put twice is queued once), then refused; later requests are refused at once. What it has
 * accepted stays awaited: the next connection begins with the ids of all awaited tasks, and the core sends the outcomes
 * of ended tasks and names unknown ones. Unknown tasks are reported as failed, so that their callers send them again. A core that hangs leaves requests unanswered: they are refused after ANSWER_WITHIN_MS, a put at
 * its task's deadline if that is sooner; from then on requests are refused at once, until it is heard again.
 */
import { randomInt } from "node:crypto";
import type { Alarm, Clock } from "../../app/clock.ts";
import { Refusal } from "../../core/errors.ts";
import { Table } from "../../core/table.ts";
import type { Outcome, Task } from "../../core/task.ts";
import type { Spent } from "../../core/window.ts";
import type { Events } from "../../observe/events.ts";
import {
  type CancelReply,
  type EngineLimits,
  type EngineListener,
  neverFits,
  type Placed,
  type RecordView,
  type Sharing,
  type TaskStore,
} from "../engine.ts";
import { Channel, type Link } from "./channel.ts";
import * as wire from "./wire.ts";

export interface RemoteEngineParts {
  /** A new connection to the core process; rejects if there is none. */
  connect(): Link | Promise<Link>;
  /** Agrees with the core's. */
  readonly clock: Clock;
  readonly events: Events;
  readonly limits: () => EngineLimits;
  /** The core stores each task with a copy of its parameters (it has a journal). */
  readonly copied: boolean;
  /** Of this program: both processes must have the same. */
  readonly version: string;
  /** Called on each connection, before anything that was held is sent: what is told here comes first. */
  connected?(): void;
}

export const HOLD_MS = 1000;
export const ANSWER_WITHIN_MS = 5000;
const OPEN_WITHIN_MS = 30_000;
const RECONNECT_MS = 50;
const CLOSE_WITHIN_MS = 1000;
const RETRY_AFTER_MS = 1000;
/** How long after a task's deadline its end is still awaited, and how often that is checked. */
const PATIENCE_MS = 60_000;
/** Bounds: requests without an answer, bytes to be sent, and awaited tasks (which the core's own bounds limit too). */
const MAX_UNANSWERED = 1 << 17;
const MAX_UNSENT_BYTES = 128 << 20;
const MAX_AWAITED = 1 << 20;

const AWAY = "it is away";
const SILENT = "it does not answer";
const BEHIND = "it takes tasks in more slowly than they come";
const NOT_ACCEPTED = "nothing was accepted; send it again";
const MAYBE = "the task may have been accepted; it is safe to send it again";
const ASK_AGAIN = "ask again";
const LOST: Outcome = {
  ok: false,
  code: "SERVICE_OVERLOADED",
  message: "the task was lost when the process that held it ended; send the request again",
};

/** A request without an answer. */
interface Unanswered {
  readonly kind: number;
  /** Task id, or the key of a rate. */
  readonly id: string;
  readonly tenant: string | undefined;
  readonly task: Task | undefined;
  readonly sharing: Sharing;
  readonly ofMany: boolean;
  readonly perMinute: number;
  readonly since: number;
  /** When it is given up: after ANSWER_WITHIN_MS, or at the task's deadline. */
  readonly until: number;
  /** How often it was sent. */
  sent: number;
  resolve(reply: unknown): void;
  reject(error: unknown): void;
}

/** A task whose end this process will be told. */
interface AwaitedTask {
  readonly task: Pick<Task, "id" | "tenant" | "tier" | "model" | "createdAt" | "deadlineAt">;
  until: number;
  /** The core has it; before that it may be missing there. */
  accepted: boolean;
}

const NOTHING_SHARED: Sharing = {};

export class RemoteEngine implements TaskStore {
  readonly #parts: RemoteEngineParts;
  readonly #listeners = new Set<EngineListener>();
  readonly #statusListeners = new Set<(status: string) => void>();
  readonly #unanswered = new NumberedRequests();
  readonly #awaited = new Table<AwaitedTask>(randomInt(2 ** 32));
  #channel: Channel | undefined; // set while connected
  #trying: Channel | undefined; // connected, without a welcome yet
  #lostAt = -Infinity; // when the last connection was lost
  #silent = false; // it left a request unanswered for too long and was not heard since
  #status = "";
  #trouble = ""; // why the last attempt to connect failed
  #opened: PromiseWithResolvers<void> | undefined;
  #closed: PromiseWithResolvers<void> | undefined;
  #holdAlarm: Alarm | undefined;
  #answerAlarm: Alarm | undefined;
  #answerAt = Infinity;
  #retryAlarm: Alarm | undefined;
  #sweepAlarm: Alarm | undefined;

  constructor(parts: RemoteEngineParts) {
    this.#parts = parts;
  }

  /** Resolves when connected; rejects if the core is not there in time, or is of another version. */
  async open(withinMs = OPEN_WITHIN_MS): Promise<void> {
    const { clock } = this.#parts;
    this.#opened = Promise.withResolvers();
    const alarm = clock.at(clock.now() + withinMs, () => {
      const why = this.#trouble === "" ? SILENT : this.#trouble;
      this.#opened?.reject(new Error(`the core process cannot be reached (${why}) within ${withinMs} ms`));
    });
    void this.#connect();
    try {
      await this.#opened.promise;
    } finally {
      alarm.cancel();
      this.#opened = undefined;
    }
  }

  get connected(): boolean {
    return this.#channel !== undefined;
  }

  /** Requests without an answer, and tasks whose end is awaited. */
  get pending(): number {
    return this.#unanswered.size + this.#awaited.size;
  }

  /** The latest text that the core published; "" before the first. */
  get status(): string {
    return this.#status;
  }

  onStatus(listener: (status: string) => void): () => void {
    this.#statusListeners.add(listener);
    return () => this.#statusListeners.delete(listener);
  }

  /** Sends a text to the core, in order with the puts; dropped while disconnected, or while too much is unsent. */
  tell(message: string): void {
    const channel = this.#channel;
    if (channel === undefined || channel.waiting > MAX_UNSENT_BYTES) return;
    channel.message(wire.TELL).text(message).end();
  }

  put(task: Task, sharing: Sharing = NOTHING_SHARED, ofMany = false): Promise<Placed> {
    if (wire.putBytes(task) > wire.MAX_MESSAGE_BYTES) {
      return Promise.reject(new Refusal("PAYLOAD_TOO_LARGE", "the input is too large; send less"));
    }
    return this.#ask<Placed>(wire.PUT, task.id, task.tenant, task, sharing, ofMany);
  }

  neverFits(tasks: number, inputBytes: number, parameterBytes: number): string | undefined {
    const { limits, copied } = this.#parts;
    return neverFits(limits(), { tasks, inputBytes, parameterBytes }, copied);
  }

  together<Puts>(puts: () => Puts): Puts {
    const channel = this.#channel;
    channel?.message(wire.TOGETHER).end();
    try {
      return puts();
    } finally {
      channel?.message(wire.APART).end();
    }
  }

  /** An abandoned one is not sent twice, as the core counts who leaves. */
  async cancel(id: string, tenant: string, abandoned = false): Promise<CancelReply> {
    if (!abandoned) return this.#ask(wire.CANCEL, id, tenant);
    if (this.#channel === undefined) return "kept";
    return this.#ask<CancelReply>(wire.CANCEL, id, tenant, undefined, NOTHING_SHARED, true).catch(
      () => "kept",
    );
  }

  outcome(id: string, tenant?: string): Promise<RecordView | undefined> {
    return this.#ask(wire.OUTCOME, id, tenant);
  }

  follow(id: string, tenant: string): Promise<RecordView | undefined> {
    return this.#ask(wire.FOLLOW, id, tenant);
  }

  delivered(id: string): void {
    this.#channel?.message(wire.DELIVERED).text(id).end();
  }

  /** A unit may be spent twice if the connection is lost before the answer. */
  spend(key: string, perMinute: number): Promise<Spent> {
    return this.#ask(wire.SPEND, key, undefined, undefined, NOTHING_SHARED, false, perMinute);
  }

  watch(listener: EngineListener): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** Sends what was told; the core keeps the tasks. */
  async close(): Promise<void> {
    if (this.#closed !== undefined) return this.#closed.promise;
    this.#closed = Promise.withResolvers();
    for (const alarm of [this.#holdAlarm, this.#answerAlarm, this.#retryAlarm, this.#sweepAlarm])
      alarm?.cancel();
    this.#refuseAll("this process is ending");
    const { clock } = this.#parts;
    const channel = this.#channel ?? this.#trying;
    const alarm = clock.at(clock.now() + CLOSE_WITHIN_MS, () => channel?.fail("closed"));
    if (channel === undefined) this.#closed.resolve();
    else channel.end();
    await this.#closed.promise;
    alarm.cancel();
  }

  #ask<Reply>(
    kind: number,
    id: string,
    tenant?: string,
    task?: Task,
    sharing = NOTHING_SHARED,
    ofMany = false,
    perMinute = 0,
  ): Promise<Reply> {
    const since = this.#parts.clock.now();
    const refusal = this.#refusal(since);
    if (refusal !== undefined) return Promise.reject(refused(refusal, kind, 0));
    return new Promise<Reply>((resolve, reject) => {
      const request: Unanswered = {
        kind,
        id,
        tenant,
        task,
        sharing,
        ofMany,
        perMinute,
        since,
        until: Math.min(since + ANSWER_WITHIN_MS, task?.deadlineAt ?? Infinity),
        sent: 0,
        resolve,
        reject,
      };
      // Before it is sent: its end may be told before the reply.
      if (task !== undefined) this.#expect(task, task.deadlineAt, false);
      const number = this.#unanswered.add(request);
      if (request.until < this.#answerAt) this.#giveUpAt(request.until);
      if (this.#channel !== undefined) this.#send(this.#channel, number, request);
    });
  }

  /** Why a request cannot be sent or held now. */
  #refusal(now: number): string | undefined {
    if (this.#closed !== undefined) return "this process is ending";
    const channel = this.#channel;
    if (channel === undefined && now - this.#lostAt >= HOLD_MS) return AWAY;
    if (this.#silent) return SILENT;
    if (this.#unanswered.full || this.#awaited.size >= MAX_AWAITED) return BEHIND;
    return channel !== undefined && channel.waiting > MAX_UNSENT_BYTES ? BEHIND : undefined;
  }

  #send(channel: Channel, number: number, request: Unanswered): void {
    request.sent++;
    const { kind, id, tenant, task } = request;
    const out = channel.message(kind).uint(number);
    if (task !== undefined) wire.writePut(out, task, request.sharing, request.ofMany);
    else if (kind === wire.CANCEL)
      out
        .text(id)
        .text(tenant!)
        .byte(request.ofMany ? 1 : 0);
    else if (kind === wire.OUTCOME)
      out
        .text(id)
        .byte(tenant === undefined ? 0 : 1)
        .text(tenant ?? "");
    else if (kind === wire.FOLLOW) out.text(id).text(tenant!);
    else out.text(id).double(request.perMinute);
    out.end();
  }

  /** Listens for the end of a task. */
  #expect(task: AwaitedTask["task"], until: number, accepted: boolean): void {
    const awaited = this.#awaited.get(task.id);
    if (awaited !== undefined) {
      awaited.until = Math.max(awaited.until, until);
      awaited.accepted ||= accepted;
      return;
    }
    const { id, tenant, tier, model, createdAt, deadlineAt } = task;
    this.#awaited.set(id, { task: { id, tenant, tier, model, createdAt, deadlineAt }, until, accepted });
    this.#sweepAlarm ??= this.#sweepLater();
  }

  #ended(record: RecordView): void {
    if (!this.#awaited.delete(record.task.id)) return;
    for (const listener of this.#listeners) listener.settled?.(record);
  }

  async #connect(): Promise<void> {
    if (this.#closed !== undefined) return;
    let link: Link;
    try {
      link = await this.#parts.connect();
    } catch (error) {
      this.#trouble = error instanceof Error ? error.message : String(error);
      this.#retryLater();
      return;
    }
    if (this.#closed !== undefined) return link.destroy();
    const channel: Channel = new Channel(
      link,
      (from) => this.#received(channel, from),
      (why) => this.#lost(channel, why),
    );
    this.#trying = channel;
    channel.message(wire.HELLO).text(this.#parts.version).end();
  }

  #retryLater(): void {
    const { clock } = this.#parts;
    this.#retryAlarm = clock.at(clock.now() + RECONNECT_MS, () => void this.#connect());
  }

  #lost(channel: Channel, why: string): void {
    const { clock, events } = this.#parts;
    if (this.#closed !== undefined) return this.#closed.resolve();
    this.#trying = undefined;
    if (this.#channel !== channel) {
      if (why !== this.#trouble && this.#opened === undefined) {
        events.emit("notice", { level: "error", message: `the core process cannot be reached: ${why}` });
      }
      this.#trouble = why;
      return this.#retryLater();
    }
    this.#channel = undefined;
    this.#silent = false;
    this.#trouble = why;
    this.#lostAt = clock.now();
    events.emit("notice", { level: "warn", message: `the connection to the core process was lost: ${why}` });
    this.#unanswered.take(({ kind, ofMany }) => kind === wire.CANCEL && ofMany, resolveKept);
    this.#holdAlarm = clock.at(this.#lostAt + HOLD_MS, () => this.#refuseAll(AWAY));
    void this.#connect();
  }

  #refuseAll(why: string): void {
    this.#unanswered.take(
      () => true,
      (request) => this.#refuse(request, why),
    );
  }

  #refuse(request: Unanswered, why: string): void {
    const { kind, task, sent } = request;
    if (task !== undefined && this.#awaited.get(task.id)?.accepted === false) this.#awaited.delete(task.id);
    request.reject(refused(why, kind, sent));
  }

  #giveUpAt(at: number): void {
    const { clock } = this.#parts;
    this.#answerAlarm?.cancel();
    this.#answerAt = at;
    if (at === Infinity) return;
    this.#answerAlarm = clock.at(at, () => {
      const now = clock.now();
      const connected = this.#channel !== undefined;
      this.#unanswered.take(
        ({ until }) => until <= now,
        (request) => {
          if (connected && request.since + ANSWER_WITHIN_MS <= now) this.#silent = true;
          this.#refuse(request, connected ? SILENT : AWAY);
        },
      );
      let next = Infinity;
      this.#unanswered.each((_, { until }) => (next = Math.min(next, until)));
      this.#giveUpAt(next);
    });
  }

  #sweepLater(): Alarm {
    const { clock } = this.#parts;
    return clock.at(clock.now() + PATIENCE_MS, () => {
      const now = clock.now();
      for (const { task, until } of this.#awaited.unordered()) {
        if (until + PATIENCE_MS < now) this.#awaited.delete(task.id);
      }
      this.#sweepAlarm = this.#awaited.size === 0 ? undefined : this.#sweepLater();
    });
  }

  #received(channel: Channel, from: wire.WireReader): void {
    this.#silent = false;
    switch (from.kind) {
      case wire.WELCOME:
        return this.#welcomed(channel, from.text());
      case wire.STATUS:
        this.#status = from.text();
        for (const listener of this.#statusListeners) listener(this.#status);
        return;
      case wire.SETTLED:
        return this.#ended(wire.readRecordView(from));
      case wire.LOST:
        return this.#missing(from.text());
      default:
        return this.#answered(from.uint(), from);
    }
  }

  #welcomed(channel: Channel, version: string): void {
    const { events, version: own } = this.#parts;
    if (version !== own) {
      const why = `the core process runs version ${version}, this process ${own}; start both from the same`;
      this.#opened?.reject(new Error(why));
      return channel.fail(why);
    }
    this.#holdAlarm?.cancel();
    this.#trying = undefined;
    this.#channel = channel;
    if (this.#trouble !== "" && this.#opened === undefined) {
      events.emit("notice", { level: "info", message: "the core process is back" });
    }
    this.#trouble = "";
    this.#parts.connected?.();
    for (const { task, until, accepted } of this.#awaited.values()) {
      if (accepted) channel.message(wire.AWAIT).text(task.id).double(until).end();
    }
    this.#unanswered.each((number, request) => this.#send(channel, number, request));
    this.#opened?.resolve();
  }

  /** The core does not know a task that it had accepted. */
  #missing(id: string): void {
    const awaited = this.#awaited.get(id);
    if (awaited === undefined) return;
    const task = { ...awaited.task, input: "", parameters: "", content: "" };
    const settledAt = this.#parts.clock.now();
    const { createdAt: queuedAt } = task;
    this.#ended({ task, state: "failed", attempt: 0, queuedAt, settledAt, outcome: LOST, cached: false });
  }

  #answered(number: number, from: wire.WireReader): void {
    const request = this.#unanswered.remove(number);
    switch (from.kind) {
      case wire.PLACED: {
        const placed = wire.readPlaced(from, request?.id ?? "");
        if (request?.task !== undefined)
          request.resolve(this.#placed(request.task, placed, request.sent > 1));
        return;
      }
      case wire.CANCELLED:
        return answer(request, from.one(wire.CANCEL_REPLIES));
      case wire.FOUND: {
        const record = from.byte() === 1 ? wire.readRecordView(from) : undefined;
        if (request?.kind === wire.FOLLOW && record !== undefined && record.outcome === undefined) {
          this.#expect(record.task, record.task.deadlineAt, true);
        }
        return answer(request, record);
      }
      case wire.SPENT:
        return answer(request, { allowed: from.byte() === 1, left: from.double(), resetMs: from.double() });
      case wire.REFUSED: {
        const refusal = wire.readRefusal(from);
        if (request === undefined) return;
        if (request.task !== undefined) this.#unexpect(request.task.id);
        return request.reject(refusal);
      }
      default:
        throw new wire.WireError(`the core sent a message of the unknown kind ${from.kind}`);
    }
  }

  #placed(task: Task, placed: Placed, again: boolean): Placed {
    const { id } = task;
    if (placed.kind === "queued" || (placed.kind === "joined" && placed.id === id)) {
      const awaited = this.#awaited.get(id);
      if (awaited !== undefined) awaited.accepted = true;
      // It was queued already when it was sent again.
      return again ? { kind: "queued", id } : placed;
    }
    if (placed.kind === "done" && placed.cached) this.#ended(placed.record);
    else this.#unexpect(id);
    if (placed.kind === "joined") this.#expect({ ...task, id: placed.id }, task.deadlineAt, true);
    return placed;
  }

  /** Unless an earlier put of the same task was accepted. */
  #unexpect(id: string): void {
    if (this.#awaited.get(id)?.accepted === false) this.#awaited.delete(id);
  }
}

function answer(request: Unanswered | undefined, reply: unknown): void {
  request?.resolve(reply);
}

function resolveKept(request: Unanswered): void {
  request.resolve("kept" satisfies CancelReply);
}

function refused(why: string, kind: number, sent: number): Refusal {
  const advice = kind !== wire.PUT ? ASK_AGAIN : sent === 0 ? NOT_ACCEPTED : MAYBE;
  const message = `the task store cannot be used now (${why}); ${advice}`;
  return new Refusal("SERVICE_OVERLOADED", message, { retryAfterMs: RETRY_AFTER_MS });
}

/** Requests by number, in the order in which they were made: a ring, as they are answered in nearly that order. */
class NumberedRequests {
  #ring: (Unanswered | undefined)[] = new Array<undefined>(64).fill(undefined);
  #first = 0; // number of the oldest
  #next = 0;

  get size(): number {
    let size = 0;
    this.each(() => size++);
    return size;
  }

  get full(): boolean {
    return this.#next - this.#first >= MAX_UNANSWERED;
  }

  add(request: Unanswered): number {
    if (this.#next - this.#first === this.#ring.length) this.#grow();
    const number = this.#next++;
    this.#ring[number & (this.#ring.length - 1)] = request;
    return number;
  }

  /** `low`: the lower 32 bits of its number. */
  remove(low: number): Unanswered | undefined {
    const number = this.#first + ((low - this.#first) >>> 0);
    if (number >= this.#next) return undefined;
    const mask = this.#ring.length - 1;
    const request = this.#ring[number & mask];
    this.#ring[number & mask] = undefined;
    while (this.#first < this.#next && this.#ring[this.#first & mask] === undefined) this.#first++;
    return request;
  }

  each(call: (number: number, request: Unanswered) => void): void {
    for (let number = this.#first; number < this.#next; number++) {
      const request = this.#ring[number & (this.#ring.length - 1)];
      if (request !== undefined) call(number, request);
    }
  }

  /** Removes matching requests. */
  take(matches: (request: Unanswered) => boolean, call: (request: Unanswered) => void): void {
    const taken: Unanswered[] = [];
    this.each((number, request) => {
      if (!matches(request)) return;
      taken.push(request);
      this.remove(number);
    });
    for (const request of taken) call(request);
  }

  #grow(): void {
    const larger = new Array<Unanswered | undefined>(2 * this.#ring.length).fill(undefined);
    this.each((number, request) => (larger[number & (larger.length - 1)] = request));
    this.#ring = larger;
  }
}
