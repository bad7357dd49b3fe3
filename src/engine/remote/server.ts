/**
 * The core process's end: one session per gateway process around the engine. Outcomes go to the sessions that wait for
 * them, having put, joined or followed the task.
 *
 * A gateway that leaves, or dies, abandons nothing: the core cannot know which of its tasks were answered with 202, the
 * gateway may be reconnecting, and at most what it had in flight runs without a caller. Outcomes are kept as ever.
 */
import { randomInt } from "node:crypto";
import { chmod, mkdir, rm } from "node:fs/promises";
import { createServer, type Server } from "node:net";
import { dirname } from "node:path";
import type { Alarm, Clock } from "../../app/clock.ts";
import { Refusal } from "../../core/errors.ts";
import { Table } from "../../core/table.ts";
import type { Task } from "../../core/task.ts";
import type { Events } from "../../observe/events.ts";
import type { Engine, Placed, RecordView, Sharing } from "../engine.ts";
import { Channel, type Link, socketLink } from "./channel.ts";
import * as wire from "./wire.ts";

export interface RemoteServerParts {
  readonly engine: Engine;
  /** The engine's put, behind the capacity gate. */
  put(task: Task, sharing: Sharing, ofMany: boolean): Placed | Promise<Placed>;
  /** JSON text for all gateways. */
  status(): string;
  /** A gateway's message. `gateway`: number of its connection; a later one has another. */
  told(gateway: number, message: string): void;
  readonly clock: Clock;
  readonly events: Events;
  /** Of this program: both processes must have the same. */
  readonly version: string;
}

/** A gateway that leaves this much unread is cut off; it may connect again and ask for its outcomes. */
const MAX_UNREAD_BYTES = 512 << 20;
const CLOSE_WITHIN_MS = 1000;
/** Longest path of a Unix socket on Linux, in bytes. */
const MAX_PATH_BYTES = 107;
/** How long after a task's deadline its end is still awaited, and how often that is checked. */
const PATIENCE_MS = 60_000;

/** Who waits for a task: most often one session. */
interface Wait {
  readonly id: string;
  session: Session;
  others: Session[] | undefined;
  until: number;
}

export class RemoteServer {
  readonly #parts: RemoteServerParts;
  readonly #waits = new Table<Wait>(randomInt(2 ** 32));
  readonly #connections = new Set<Session>();
  readonly #sessions = new Set<Session>(); // after their hello
  readonly #unwatch: () => void;
  readonly #listening: Server;
  #numbers = 0;
  #status = "";
  #empty: PromiseWithResolvers<void> | undefined;
  #sweep: Alarm | undefined;

  constructor(parts: RemoteServerParts) {
    this.#parts = parts;
    this.#unwatch = parts.engine.watch({ settled: (record) => this.#settled(record) });
    this.#listening = createServer((socket) => this.accept(socketLink(socket)));
  }

  /** Makes the socket's folder, which only this user may enter, and replaces a socket that an earlier process left. */
  async listen(path: string): Promise<void> {
    if (Buffer.byteLength(path) > MAX_PATH_BYTES) {
      throw new Error(
        `the socket's path is longer than ${MAX_PATH_BYTES} bytes: ${path}; choose a shorter one`,
      );
    }
    await mkdir(dirname(path), { recursive: true, mode: 0o700 });
    await rm(path, { force: true });
    const { promise, resolve, reject } = Promise.withResolvers<void>();
    this.#listening.once("error", reject);
    // Exclusive: under node:cluster the parent would listen and hand connections out.
    this.#listening.listen({ path, exclusive: true }, resolve);
    await promise;
    await chmod(path, 0o600);
  }

  /** A gateway connected. */
  accept(link: Link): void {
    const number = ++this.#numbers;
    const session = new Session(number, link, this.#parts, {
      status: () => {
        this.publish();
        return this.#status;
      },
      entered: () => this.#sessions.add(session),
      left: (why) => this.#left(session, why),
      await: (id, until) => this.#await(session, id, until),
      unwait: (id) => this.#unwait(session, id),
    });
    this.#connections.add(session);
  }

  get gateways(): number {
    return this.#sessions.size;
  }

  /** Tasks whose end gateways wait for. */
  get pending(): number {
    return this.#waits.size;
  }

  /** Resolves when no gateway is connected. */
  async whenEmpty(): Promise<void> {
    if (this.#sessions.size === 0) return;
    this.#empty ??= Promise.withResolvers();
    await this.#empty.promise;
  }

  /** Sends the status to all gateways if it has changed. */
  publish(): void {
    const status = this.#parts.status();
    if (status === this.#status) return;
    this.#status = status;
    for (const session of this.#sessions) session.publish(status);
  }

  /** Ends all connections once what they hold is written, or after a while; the engine stays open. */
  async close(): Promise<void> {
    const { clock } = this.#parts;
    this.#unwatch();
    this.#sweep?.cancel();
    for (const session of this.#connections) session.end();
    if (!this.#listening.listening) return;
    const alarm = clock.at(clock.now() + CLOSE_WITHIN_MS, () => {
      for (const session of this.#connections) session.cut("it read nothing while this process ended");
    });
    const { promise, resolve } = Promise.withResolvers<void>();
    this.#listening.close(() => resolve());
    await promise;
    alarm.cancel();
  }

  #left(session: Session, why: string | undefined): void {
    if (why !== undefined) {
      const message = `the connection to a gateway process was ended: ${why}`;
      this.#parts.events.emit("notice", { level: "error", message });
    }
    this.#connections.delete(session);
    if (!this.#sessions.delete(session)) return;
    for (const { id } of this.#waits.unordered()) this.#unwait(session, id);
    if (this.#sessions.size > 0) return;
    this.#empty?.resolve();
    this.#empty = undefined;
  }

  /** Returns whether it is new. */
  #await(session: Session, id: string, until: number): boolean {
    if (!this.#sessions.has(session)) return false;
    const wait = this.#waits.get(id);
    if (wait === undefined) {
      this.#waits.set(id, { id, session, others: undefined, until });
      this.#sweep ??= this.#sweepLater();
      return true;
    }
    wait.until = Math.max(wait.until, until);
    if (wait.session === session || wait.others?.includes(session) === true) return false;
    wait.others = [...(wait.others ?? []), session];
    return true;
  }

  #unwait(session: Session, id: string): void {
    const wait = this.#waits.get(id);
    if (wait === undefined) return;
    if (wait.session === session) {
      const next = wait.others?.shift();
      if (next === undefined) this.#waits.delete(id);
      else wait.session = next;
    } else wait.others = wait.others?.filter((other) => other !== session);
  }

  #settled(record: RecordView): void {
    const { id } = record.task;
    const wait = this.#waits.get(id);
    if (wait === undefined) return;
    this.#waits.delete(id);
    wait.session.settled(record);
    if (wait.others !== undefined) for (const other of wait.others) other.settled(record);
  }

  /** An engine that lost a task never tells of its end. */
  #sweepLater(): Alarm {
    const { clock } = this.#parts;
    return clock.at(clock.now() + PATIENCE_MS, () => {
      const now = clock.now();
      for (const { id, until } of this.#waits.unordered()) {
        if (until + PATIENCE_MS < now) this.#waits.delete(id);
      }
      this.#sweep = this.#waits.size === 0 ? undefined : this.#sweepLater();
    });
  }
}

interface SessionEvents {
  status(): string;
  entered(): void;
  /** `why`: it was cut off. */
  left(why: string | undefined): void;
  await(id: string, until: number): boolean;
  unwait(id: string): void;
}

/** One gateway's connection. */
class Session {
  readonly #number: number;
  readonly #parts: RemoteServerParts;
  readonly #channel: Channel;
  readonly #on: SessionEvents;
  #welcome = false;
  #mismatch: string | undefined;
  #together: (wire.PutMessage & { readonly number: number })[] | undefined;

  constructor(number: number, link: Link, parts: RemoteServerParts, on: SessionEvents) {
    this.#number = number;
    this.#parts = parts;
    this.#on = on;
    this.#channel = new Channel(
      link,
      (from) => this.#received(from),
      (why, failed) => on.left(failed ? why : this.#mismatch),
    );
  }

  publish(status: string): void {
    this.#channel.message(wire.STATUS).text(status).end();
  }

  settled(record: RecordView): void {
    const out = this.#channel.message(wire.SETTLED);
    wire.writeRecordView(out, record);
    out.end();
    const { waiting } = this.#channel;
    if (waiting > MAX_UNREAD_BYTES) this.cut(`it left ${waiting} bytes unread`);
  }

  end(): void {
    this.#channel.end();
  }

  cut(why: string): void {
    this.#channel.fail(why);
  }

  #received(from: wire.WireReader): void {
    const { engine } = this.#parts;
    if (from.kind === wire.HELLO) return this.#hello(from.text());
    if (!this.#welcome) throw new wire.WireError("its first message is not a hello");
    switch (from.kind) {
      case wire.PUT:
        return this.#put(from.uint(), wire.readPut(from));
      case wire.TOGETHER:
        this.#together = [];
        return;
      case wire.APART:
        return this.#apart();
      case wire.DELIVERED:
        return engine.delivered(from.text());
      case wire.CANCEL:
        return void this.#cancel(from.uint(), from.text(), from.text(), from.byte() === 1);
      case wire.OUTCOME:
        return void this.#outcome(from.uint(), from.text(), from.byte() === 1, from.text());
      case wire.FOLLOW:
        return void this.#follow(from.uint(), from.text(), from.text());
      case wire.AWAIT:
        return void this.#await(from.text(), from.double());
      case wire.SPEND:
        return void this.#spend(from.uint(), from.text(), from.double());
      case wire.TELL:
        return this.#parts.told(this.#number, from.text());
      default:
        throw new wire.WireError(`it sent a message of the unknown kind ${from.kind}`);
    }
  }

  #hello(version: string): void {
    const { version: own } = this.#parts;
    if (this.#welcome) throw new wire.WireError("it said hello twice");
    this.#welcome = version === own;
    // First: a gateway that is welcome knows the status.
    if (this.#welcome) this.publish(this.#on.status());
    this.#channel.message(wire.WELCOME).text(own).end();
    if (this.#welcome) return this.#on.entered();
    this.#mismatch = `it runs version ${version}, this process ${own}; start both from the same`;
    this.#channel.end();
  }

  #put(number: number, message: wire.PutMessage): void {
    if (this.#together === undefined) this.#place(number, message);
    else this.#together.push({ number, ...message });
  }

  #apart(): void {
    const puts = this.#together ?? [];
    this.#together = undefined;
    this.#parts.engine.together(() => {
      for (const put of puts) this.#place(put.number, put);
    });
  }

  /** Waits for its end from before the put: it may end before the reply. */
  #place(number: number, { task, sharing, ofMany }: wire.PutMessage): void {
    const fresh = this.#on.await(task.id, task.deadlineAt);
    try {
      const placed = this.#parts.put(task, sharing, ofMany);
      if (!(placed instanceof Promise)) return this.#placed(number, task, placed, fresh);
      placed.then(
        (known) => {
          this.#placed(number, task, known, fresh);
          // It may have ended since it was joined.
          if (known.kind === "joined") void this.#await(known.id, task.deadlineAt);
        },
        (error: unknown) => this.#unplaced(number, task.id, error, fresh),
      );
    } catch (error) {
      this.#unplaced(number, task.id, error, fresh);
    }
  }

  #placed(number: number, { id, deadlineAt }: Task, placed: Placed, fresh: boolean): void {
    if (placed.kind !== "queued") {
      const own = placed.kind === "joined" && placed.id === id;
      if (placed.kind === "joined") this.#on.await(placed.id, deadlineAt);
      if (fresh && !own) this.#on.unwait(id);
    }
    const out = this.#channel.message(wire.PLACED).uint(number);
    wire.writePlaced(out, placed, id);
    out.end();
  }

  #unplaced(number: number, id: string, error: unknown, fresh: boolean): void {
    if (fresh) this.#on.unwait(id);
    this.#refused(number, error);
  }

  #refused(number: number, error: unknown): void {
    if (!(error instanceof Refusal)) {
      const message = `a request of a gateway process failed: ${String(error)}`;
      this.#parts.events.emit("notice", { level: "error", message });
    }
    const out = this.#channel.message(wire.REFUSED).uint(number);
    wire.writeRefusal(out, error);
    out.end();
  }

  async #cancel(number: number, id: string, tenant: string, abandoned: boolean): Promise<void> {
    try {
      const reply = await this.#parts.engine.cancel(id, tenant, abandoned);
      this.#channel.message(wire.CANCELLED).uint(number).byte(wire.CANCEL_REPLIES.indexOf(reply)).end();
    } catch (error) {
      this.#refused(number, error);
    }
  }

  async #outcome(number: number, id: string, owned: boolean, tenant: string): Promise<void> {
    try {
      this.#found(number, await this.#parts.engine.outcome(id, owned ? tenant : undefined));
    } catch (error) {
      this.#refused(number, error);
    }
  }

  async #follow(number: number, id: string, tenant: string): Promise<void> {
    const { engine, clock } = this.#parts;
    const fresh = this.#on.await(id, clock.now());
    try {
      const record = await engine.follow(id, tenant);
      if (record !== undefined && record.outcome === undefined) this.#on.await(id, record.task.deadlineAt);
      else if (fresh) this.#on.unwait(id);
      this.#found(number, record);
    } catch (error) {
      if (fresh) this.#on.unwait(id);
      this.#refused(number, error);
    }
  }

  #found(number: number, record: RecordView | undefined): void {
    const out = this.#channel
      .message(wire.FOUND)
      .uint(number)
      .byte(record === undefined ? 0 : 1);
    if (record !== undefined) wire.writeRecordView(out, record);
    out.end();
  }

  /** Sends its end if that is known already, and says if the task is not. */
  async #await(id: string, until: number): Promise<void> {
    this.#on.await(id, until);
    // An engine that is away now tells later, or the sweep ends the wait.
    const record = await this.#parts.engine.outcome(id).catch(() => null);
    if (record === null || (record !== undefined && record.outcome === undefined)) return;
    this.#on.unwait(id);
    if (record === undefined) this.#channel.message(wire.LOST).text(id).end();
    else this.settled(record);
  }

  async #spend(number: number, key: string, perMinute: number): Promise<void> {
    try {
      const { allowed, left, resetMs } = await this.#parts.engine.spend(key, perMinute);
      const out = this.#channel.message(wire.SPENT).uint(number);
      out
        .byte(allowed ? 1 : 0)
        .double(left)
        .double(resetMs)
        .end();
    } catch (error) {
      this.#refused(number, error);
    }
  }
}
