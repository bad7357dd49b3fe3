/**
 * One connection to one Redis server, and one that reconnects (`KeptLink`).
 *
 * Commands of one event loop turn leave in one write (`setImmediate`), those of a `callAll` at once; replies are
 * matched by order, all that RESP2 offers. So when a reply does not come within `commandTimeoutMs` of its write, or
 * anything unexpected arrives, the socket is destroyed and everything in flight rejects with `LinkDown`. A link that is
 * down stays down; nothing is queued or resent. That timeout also bounds what is in flight.
 *
 * Subscriptions: one channel per SUBSCRIBE or SSUBSCRIBE; the confirmation is the call's reply, messages go to
 * `onMessage`. The server ends a subscription when its slot moves: `onUnsubscribed`. There is no unsubscribing, because
 * its confirmation looks the same: close the link.
 */
import assert from "node:assert/strict";
import * as net from "node:net";
import * as tls from "node:tls";
import type { Alarm, Clock } from "../../../app/clock.ts";
import { Fifo } from "../../../core/fifo.ts";
import { CommandWriter, RedisError, ReplyParser } from "./resp.ts";
import type { Arg, RedisReply } from "./resp.ts";

export { RedisError };
export type { Arg, RedisReply };

export interface LinkOptions {
  readonly host: string;
  readonly port: number;
  readonly tls?: boolean | undefined;
  readonly username?: string | undefined;
  readonly password?: string | undefined;
  readonly db?: number | undefined;
  readonly connectTimeoutMs: number;
  readonly commandTimeoutMs: number;
  /** For CLIENT LIST. */
  readonly name: string;
  /** `RedisLink.connect` unless a simulation replaces it. */
  readonly connect?: Connect | undefined;
}

export type Connect = (options: LinkOptions, clock: Clock, signal?: AbortSignal) => Promise<RedisLink>;

/** The connection is gone, and with it every outstanding reply. */
export class LinkDown extends Error {
  readonly written: boolean; // false if no byte of the command was handed to the socket: it certainly did not happen

  constructor(message: string, written: boolean) {
    super(message);
    this.name = "LinkDown";
    this.written = written;
  }
}

/** One `call`, or one `callAll` with `replies`. */
interface InFlight {
  writtenAt: number; // when it was handed to the socket; 0 before
  left: number;
  readonly replies: (RedisReply | RedisError)[] | undefined;
  readonly resolve: (reply: never) => void;
  readonly reject: (why: Error) => void;
}

export class RedisLink {
  readonly address: string;
  onMessage: ((channel: string, payload: Buffer) => void) | undefined;
  /** The server ended a subscription: this channel's slot has moved. */
  onUnsubscribed: ((channel: string) => void) | undefined;
  onDown: ((why: Error) => void) | undefined; // exactly once, whatever ended it, also `close`
  readonly #socket: net.Socket;
  readonly #clock: Clock;
  readonly #timeoutMs: number;
  readonly #writer = new CommandWriter();
  readonly #inFlight = new Fifo<InFlight>();
  #said: InFlight[] = []; // commands of this turn; they join `#inFlight` when written
  #subscriber = false;
  #alarm: Alarm | undefined;
  #down: Error | undefined;

  private constructor(socket: net.Socket, options: LinkOptions, clock: Clock) {
    this.address = addressOf(options.host, options.port);
    this.#socket = socket;
    this.#clock = clock;
    this.#timeoutMs = options.commandTimeoutMs;
    const parser = new ReplyParser((reply) => this.#received(reply));
    socket.on("data", (chunk: Buffer) => {
      try {
        parser.feed(chunk);
      } catch (error) {
        this.#end(`redis ${this.address} does not speak RESP2: ${(error as Error).message}`);
      }
    });
    socket.on("error", (error) =>
      this.#end(`the connection to redis ${this.address} broke: ${reason(error)}`),
    );
    socket.on("close", () => this.#end(`redis ${this.address} closed the connection`));
  }

  /** Connects, authenticates, selects the database and sets the name; rejects with one line that says why not. */
  static async connect(options: LinkOptions, clock: Clock, signal?: AbortSignal): Promise<RedisLink> {
    if (options.connect !== undefined) return options.connect(options, clock, signal);
    const socket = await openSocket(options, clock, signal);
    const link = new RedisLink(socket, options, clock);
    const { username, password, db = 0, name } = options;
    const hello: Arg[][] = [];
    if (password !== undefined) hello.push(["AUTH", ...(username ? [username] : []), password]);
    if (db > 0) hello.push(["SELECT", db]);
    hello.push(["CLIENT", "SETNAME", name.replaceAll(/[^!-~]/g, "-")]);
    try {
      const replies = await link.callAll(hello);
      const refusal = replies.find((reply, at) => refuses(reply, at === hello.length - 1));
      if (refusal !== undefined) throw new Error(refusedBy(link.address, refusal as RedisError));
      return link;
    } catch (error) {
      link.close();
      throw error;
    }
  }

  get up(): boolean {
    return this.#down === undefined;
  }

  /** Rejects with RedisError or LinkDown. */
  call(command: readonly Arg[]): Promise<RedisReply> {
    return new Promise((resolve, reject) => {
      if (this.#down !== undefined) return reject(new LinkDown(this.#down.message, false));
      this.#write(command);
      this.#say({ writtenAt: 0, left: 1, replies: undefined, resolve, reject });
    });
  }

  /** One write and one promise for all. Error replies are values; rejects only with LinkDown. */
  callAll(commands: readonly (readonly Arg[])[]): Promise<(RedisReply | RedisError)[]> {
    return new Promise((resolve, reject) => {
      if (commands.length === 0) return resolve([]);
      if (this.#down !== undefined) return reject(new LinkDown(this.#down.message, false));
      for (const command of commands) this.#write(command);
      this.#say({ writtenAt: 0, left: commands.length, replies: [], resolve, reject });
      // Its caller has batched already; earlier commands go with it.
      this.#flush();
    });
  }

  close(): void {
    this.#end(`the connection to redis ${this.address} was closed here`);
  }

  #write(command: readonly Arg[]): void {
    const verb = command[0];
    // No hot-path command is that long; the cheap test comes first.
    if (typeof verb === "string" && verb.length >= 9 && /SUBSCRIBE$/i.test(verb)) {
      assert.ok(!/UNSUBSCRIBE$/i.test(verb), "close the link to unsubscribe");
      assert.equal(command.length, 2, "one channel per subscribe: each is confirmed by itself");
      this.#subscriber = true;
    }
    this.#writer.add(command);
  }

  #say(asked: InFlight): void {
    if (this.#said.push(asked) === 1) setImmediate(() => this.#flush());
  }

  #flush(): void {
    if (this.#down !== undefined || this.#said.length === 0) return;
    const now = this.#clock.now();
    for (const asked of this.#said) {
      asked.writtenAt = now;
      this.#inFlight.push(asked);
    }
    this.#said = [];
    const pieces = this.#writer.take();
    if (pieces.length === 1) this.#socket.write(pieces[0]!);
    else {
      this.#socket.cork();
      for (const piece of pieces) this.#socket.write(piece);
      this.#socket.uncork();
    }
    this.#alarm ??= this.#clock.at(now + this.#timeoutMs, () => this.#watch());
  }

  /** Checks whether the oldest command is overdue. Replies do not move the alarm: one per `commandTimeoutMs`. */
  #watch(): void {
    this.#alarm = undefined;
    const oldest = this.#inFlight.first;
    if (oldest === undefined || this.#down !== undefined) return;
    const dueAt = oldest.writtenAt + this.#timeoutMs;
    if (this.#clock.now() < dueAt) {
      this.#alarm = this.#clock.at(dueAt, () => this.#watch());
      return;
    }
    // If this process was stalled, the reply is in the socket and is read before this runs.
    setImmediate(() => {
      if (this.#inFlight.first === oldest)
        this.#end(`redis ${this.address} did not answer within ${this.#timeoutMs} ms`);
      else this.#watch();
    });
  }

  #received(reply: RedisReply | RedisError): void {
    if (this.#down !== undefined) return;
    if (this.#subscriber && Array.isArray(reply) && this.#pushed(reply)) return;
    const asked = this.#inFlight.first;
    if (asked === undefined) {
      if (reply instanceof RedisError) return this.#end(refusedBy(this.address, reply));
      return this.#end(`redis ${this.address} answered what nobody asked`);
    }
    asked.left--;
    if (asked.left === 0) this.#inFlight.shift();
    if (asked.replies === undefined) {
      if (reply instanceof RedisError) asked.reject(reply);
      else asked.resolve(reply as never);
      return;
    }
    asked.replies.push(reply);
    if (asked.left === 0) asked.resolve(asked.replies as never);
  }

  #pushed(reply: readonly RedisReply[]): boolean {
    const [kind, channel, payload] = reply;
    if (!Buffer.isBuffer(kind) || !Buffer.isBuffer(channel)) return false;
    switch (kind.toString("latin1")) {
      case "message":
      case "smessage":
        this.onMessage?.(channel.toString(), payload as Buffer);
        return true;
      case "unsubscribe":
      case "sunsubscribe":
        this.onUnsubscribed?.(channel.toString());
        return true;
      default:
        return false;
    }
  }

  #end(why: string): void {
    if (this.#down !== undefined) return;
    this.#down = new Error(why);
    this.#alarm?.cancel();
    this.#socket.destroy();
    const lost = new LinkDown(why, true);
    for (let asked = this.#inFlight.shift(); asked !== undefined; asked = this.#inFlight.shift())
      asked.reject(lost);
    const unsent = new LinkDown(why, false);
    for (const asked of this.#said) asked.reject(unsent);
    this.#said = [];
    this.onDown?.(this.#down);
  }
}

const FIRST_WAIT_MS = 50;
const MAX_WAIT_MS = 1000;

/**
 *   connecting ──► preparing ──► up ──► down ──► wait ──► connecting …      close() from every state
 *
 * The wait before attempt n (from 0) is min(1000, 50·2^n) ms · (1 + random/2); a link that came up resets n.
 */
export interface Keeping {
  readonly clock: Clock;
  readonly random: () => number;
  /** Checks that the server is a primary, subscribes, before the link is shown; a rejection drops it. */
  readonly prepare: (link: RedisLink) => Promise<void>;
  /** A link is up (`why` undefined), went down, or an attempt failed. */
  readonly changed: (why: Error | undefined) => void;
}

interface Waiter {
  readonly resolve: (link: RedisLink) => void;
  readonly reject: (why: Error) => void;
  readonly alarm: Alarm;
}

export class KeptLink {
  readonly #options: LinkOptions;
  readonly #address: string;
  readonly #keeping: Keeping;
  readonly #waiters = new Set<Waiter>();
  link: RedisLink | undefined;
  why: Error; // why there is no link
  #fresh: RedisLink | undefined; // connected, not yet prepared
  #attempt = 0;
  #alarm: Alarm | undefined;
  readonly #closing = new AbortController();

  constructor(options: LinkOptions, keeping: Keeping) {
    this.#options = options;
    this.#keeping = keeping;
    this.#address = addressOf(options.host, options.port);
    this.why = new Error(`redis ${this.#address} is not connected yet`);
    void this.#connect();
  }

  /** The link, now or when it is up; rejects with LinkDown (nothing written) at `until`. */
  ready(until: number): Promise<RedisLink> {
    if (this.link !== undefined) return Promise.resolve(this.link);
    if (this.#closed) return Promise.reject(new LinkDown(this.why.message, false));
    return new Promise((resolve, reject) => {
      const alarm = this.#keeping.clock.at(until, () => {
        this.#waiters.delete(waiter);
        reject(new LinkDown(this.why.message, false));
      });
      const waiter = { resolve, reject, alarm };
      this.#waiters.add(waiter);
    });
  }

  /** Replaces the link: it leads to a server that is no longer the right one. */
  renew(): void {
    this.link?.close();
  }

  /** Rejects everything that waits in `ready`: its target may be elsewhere now. */
  release(): void {
    for (const { reject, alarm } of this.#waiters) {
      alarm.cancel();
      reject(new LinkDown(this.why.message, false));
    }
    this.#waiters.clear();
  }

  close(): void {
    if (this.#closed) return;
    this.#closing.abort();
    this.why = new Error(`the connection to redis ${this.#address} was closed here`);
    this.#alarm?.cancel();
    this.#fresh?.close();
    this.link?.close();
    this.release();
  }

  get #closed(): boolean {
    return this.#closing.signal.aborted;
  }

  async #connect(): Promise<void> {
    try {
      const link = await RedisLink.connect(this.#options, this.#keeping.clock, this.#closing.signal);
      if (this.#closed) return link.close();
      this.#fresh = link;
      await this.#keeping.prepare(link);
      this.#fresh = undefined;
      if (this.#closed) return link.close();
      if (!link.up) throw new Error(`redis ${link.address} closed the connection`);
      this.#show(link);
    } catch (error) {
      this.#fresh?.close();
      this.#fresh = undefined;
      this.#lost(error as Error);
    }
  }

  #show(link: RedisLink): void {
    this.#attempt = 0;
    this.link = link;
    link.onDown = (why) => {
      this.link = undefined;
      this.#lost(why);
    };
    this.#keeping.changed(undefined);
    for (const { resolve, alarm } of this.#waiters) {
      alarm.cancel();
      resolve(link);
    }
    this.#waiters.clear();
  }

  #lost(why: Error): void {
    if (this.#closed) return;
    this.why = why;
    const { clock, random } = this.#keeping;
    const waitMs = Math.min(MAX_WAIT_MS, FIRST_WAIT_MS * 2 ** Math.min(this.#attempt++, 10));
    this.#alarm = clock.at(clock.now() + waitMs * (1 + random() / 2), () => void this.#connect());
    this.#keeping.changed(why);
  }
}

export function addressOf(host: string, port: number): string {
  return host.includes(":") ? `[${host}]:${port}` : `${host}:${port}`;
}

function openSocket(options: LinkOptions, clock: Clock, signal?: AbortSignal): Promise<net.Socket> {
  const { host, port, connectTimeoutMs } = options;
  const address = addressOf(host, port);
  return new Promise((resolve, reject) => {
    const servername = net.isIP(host) === 0 ? { servername: host } : {};
    const socket = options.tls ? tls.connect({ host, port, ...servername }) : net.connect({ host, port });
    const broke = (error: Error): void => fail(`redis ${address} is not reachable: ${reason(error)}`);
    const closed = (): void => fail(`redis ${address} closed the connection`);
    const given = (): void => fail(`the connection to redis ${address} was given up`);
    const fail = (why: string): void => {
      alarm.cancel();
      signal?.removeEventListener("abort", given);
      socket.destroy();
      reject(new Error(why));
    };
    const alarm = clock.at(clock.now() + connectTimeoutMs, () =>
      fail(`redis ${address} did not take the connection within ${connectTimeoutMs} ms`),
    );
    socket.on("error", broke).on("close", closed);
    signal?.addEventListener("abort", given);
    socket.once(options.tls ? "secureConnect" : "connect", () => {
      alarm.cancel();
      signal?.removeEventListener("abort", given);
      socket.off("error", broke).off("close", closed);
      socket.setNoDelay(true).setKeepAlive(true, 30_000);
      resolve(socket);
    });
  });
}

/**
 * A user without permission for CLIENT SETNAME can still work. What a server says before it closes a new connection
 * looks like an answer to the first command, and applies to all of them.
 */
function refuses(reply: RedisReply | RedisError, toName: boolean): boolean {
  if (!(reply instanceof RedisError)) return false;
  return !toName || reply.code === "DENIED" || reply.message.startsWith("ERR max number of clients");
}

/** Redis explains protected mode at length; keep the first sentence. */
function refusedBy(address: string, { message }: RedisError): string {
  return `redis ${address} refuses us: ${message.split(". ", 1)[0]}`;
}

/** Node's errors in words; a name with two addresses gives an AggregateError without a message. */
function reason(error: Error): string {
  const { code } = error as NodeJS.ErrnoException;
  const first = error instanceof AggregateError ? (error.errors[0] as Error) : error;
  if (code === "ECONNREFUSED") return "nothing listens there (ECONNREFUSED)";
  if (code === "ENOTFOUND") return "no such host (ENOTFOUND)";
  return first.message;
}
