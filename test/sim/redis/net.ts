/**
 * The network between the processes of a fleet and the fake Redis, on virtual time: connections as `src/engine/redis/client/link.ts`
 * makes them, so that everything above them is the real client.
 *
 * What one connection writes arrives in order, and so do the replies. A connection breaks in the middle of a write: none or
 * some of its commands have run, or all and the replies are lost, or they run when nobody waits any longer. The client
 * notices at once, or when a command has had no answer for `commandTimeoutMs`. A message to a subscriber may be lost,
 * late or repeated on a connection that lives; TCP is kinder.
 *
 * Of a process that is killed, what it wrote last arrives or does not; nothing is written after.
 */
import type { Clock } from "../../../src/app/clock.ts";
import { scripts } from "../../../src/engine/redis/scripts.ts";
import type { VirtualClock } from "../../../src/cli/plan/virtual-clock.ts";
import {
  type Arg,
  LinkDown,
  type LinkOptions,
  RedisError,
  type RedisLink,
  type RedisReply,
} from "../../../src/engine/redis/client/link.ts";
import type { Host } from "../host.ts";
import type { Ledger } from "../ledger.ts";
import type { Dice, NetFaults } from "../plan.ts";
import { FakeRedis } from "./redis.ts";

const NO_FAULTS: NetFaults = { lost: 0, replyLost: 0, late: 0, noteLost: 0, noteTwice: 0, noteLate: 0 };
/** Of the faults that a plan draws for each call, so many break a connection, which takes more than one call with it. */
const BREAKS = 0.25;
/** A late command arrives when its client has certainly given up. */
const LATE = 1.2;

export class RedisServer {
  readonly redis: FakeRedis;
  readonly #time: VirtualClock;
  readonly dice: Dice;
  readonly ledger: Ledger;
  readonly #links = new Set<FakeLink>();
  /** A replica that confirms what WAIT asks for. */
  readonly #replicas: number;
  #net: NetFaults;
  #awayUntil = -Infinity;
  /** How far its clock was set. */
  stepMs = 0;

  constructor(time: VirtualClock, dice: Dice, net: NetFaults, replicas: number, ledger: Ledger) {
    this.#time = time;
    this.dice = dice;
    this.#net = net;
    this.#replicas = replicas;
    this.ledger = ledger;
    const clock: Clock = {
      now: () => this.now(),
      wall: () => this.now(),
      at: (at, ring) => time.at(at - this.stepMs, ring),
    };
    this.redis = new FakeRedis(clock);
  }

  /** By its own clock. */
  now(): number {
    return this.#time.now() + this.stepMs;
  }

  get away(): boolean {
    return this.#time.now() < this.#awayUntil;
  }

  /** It restarts, with all its data. */
  goAway(forMs: number): void {
    this.#awayUntil = this.#time.now() + forMs;
    this.redis.forgetScripts();
    for (const link of this.#links) link.breaks();
    this.#links.clear();
  }

  /** From here on nothing is lost. */
  heal(): void {
    this.#net = NO_FAULTS;
    this.#awayUntil = -Infinity;
  }

  latency(): number {
    return 0.1 + this.dice.exponential(0.4);
  }

  get net(): NetFaults {
    return this.#net;
  }

  /** As `RedisLink.connect`, for a process. */
  async connect(host: Host, options: LinkOptions): Promise<RedisLink> {
    await new Promise<void>((resolve) => host.deliver(2 * this.latency(), resolve));
    if (this.away) throw new Error("redis is not reachable: nothing listens there (ECONNREFUSED)");
    const link = new FakeLink(host, this, this.#time, options.commandTimeoutMs);
    this.#links.add(link);
    return link as unknown as RedisLink;
  }

  closed(link: FakeLink): void {
    this.#links.delete(link);
  }

  info(): string {
    const lines = ["redis_version:7.0.15", "role:master", "cluster_enabled:0", "master_repl_offset:0"];
    for (let at = 0; at < this.#replicas; at++)
      lines.push(`slave${at}:ip=1,port=1,state=online,offset=0,lag=0`);
    return lines.join("\r\n");
  }
}

interface Asked {
  readonly command: readonly Arg[];
  readonly take: (reply: RedisReply | RedisError) => void;
  readonly lost: (why: LinkDown) => void;
  writtenAt: number;
}

export class FakeLink {
  readonly address = "redis:6379";
  onMessage: ((channel: string, payload: Buffer) => void) | undefined;
  onUnsubscribed: ((channel: string) => void) | undefined;
  onDown: ((why: Error) => void) | undefined;
  readonly #host: Host;
  readonly #server: RedisServer;
  readonly #time: VirtualClock;
  readonly #timeoutMs: number;
  /** Of this tick, not written yet. */
  #said: Asked[] = [];
  readonly #inFlight: Asked[] = [];
  #down: Error | undefined;
  #watching = false;
  /** Nothing gets through any more; the client may not know. */
  #broken = false;
  #writes = 0;
  /** From this write on nothing arrives. */
  #cutFrom = Infinity;
  #lastOutAt = 0;
  #lastBackAt = 0;
  readonly #leaving: (() => void)[] = [];
  readonly #arriving: (() => void)[] = [];
  readonly #peer: Peer;

  constructor(host: Host, server: RedisServer, time: VirtualClock, timeoutMs: number) {
    this.#host = host;
    this.#server = server;
    this.#time = time;
    this.#timeoutMs = timeoutMs;
    this.#peer = new Peer(
      server,
      host.name,
      (asked, reply) => this.#reply(asked, reply),
      (channel, payload) => this.#message(channel, payload),
    );
    host.onDeath.add(this.#died);
  }

  get up(): boolean {
    return this.#down === undefined;
  }

  call(command: readonly Arg[]): Promise<RedisReply> {
    return new Promise((resolve, reject) => {
      if (this.#down !== undefined) return reject(new LinkDown(this.#down.message, false));
      const take = (reply: RedisReply | RedisError): void =>
        reply instanceof RedisError ? reject(reply) : resolve(reply);
      this.#said.push({ command, take, lost: reject, writtenAt: 0 });
      if (this.#said.length === 1) this.#host.at(this.#host.now(), () => this.#flush());
    });
  }

  callAll(commands: readonly (readonly Arg[])[]): Promise<(RedisReply | RedisError)[]> {
    return new Promise((resolve, reject) => {
      if (commands.length === 0) return resolve([]);
      if (this.#down !== undefined) return reject(new LinkDown(this.#down.message, false));
      const replies: (RedisReply | RedisError)[] = [];
      const take = (reply: RedisReply | RedisError): void => {
        if (replies.push(reply) === commands.length) resolve(replies);
      };
      for (const command of commands) this.#said.push({ command, take, lost: reject, writtenAt: 0 });
      this.#flush();
    });
  }

  close(): void {
    this.#end("the connection was closed here");
  }

  /** Cut: the client notices now or later. */
  breaks(): void {
    if (this.#broken) return;
    this.#broken = true;
    this.#cutFrom = 0;
    this.#peer.close();
    const { dice } = this.#server;
    if (dice.chance(0.7))
      this.#host.deliver(this.#server.latency() + dice.share() * 20, () => this.#end("the connection broke"));
  }

  readonly #died = (): void => {
    // The kernel sends what it was given, or resets the connection first.
    if (this.#server.dice.chance(0.4)) this.#cutFrom = 0;
    this.#time.at(Math.max(this.#lastOutAt, this.#time.now()) + this.#server.latency(), () =>
      this.#peer.close(),
    );
  };

  #flush(): void {
    const said = this.#said;
    this.#said = [];
    if (this.#down !== undefined || said.length === 0) return;
    // Written while it stood still: in the turn in which it stopped.
    if (!this.#host.alive) return;
    const now = this.#host.now();
    for (const asked of said) {
      asked.writtenAt = now;
      this.#inFlight.push(asked);
    }
    this.#watch();
    for (const name of new Set(said.map(({ command }) => callOf(command))))
      if (name !== undefined) this.#host.called(name);
    if (!this.#broken) this.#send(said);
  }

  #send(said: readonly Asked[]): void {
    const server = this.#server;
    const { lost, replyLost, late } = server.net;
    const roll = server.dice.share() / BREAKS;
    let arriving = said;
    let outAt = Math.max(this.#lastOutAt, this.#time.now() + server.latency());
    let mute = false;
    if (roll < lost) {
      arriving = said.slice(0, server.dice.upTo(said.length));
      server.ledger.count(arriving.length === 0 ? "call lost" : "pipeline cut");
    } else if (roll < lost + replyLost) server.ledger.count("call reply lost");
    else if (roll < lost + replyLost + late) {
      outAt += LATE * this.#timeoutMs;
      server.ledger.count("call late");
    }
    if (roll < lost + replyLost + late) {
      mute = true;
      server.ledger.say(
        this.#host.name,
        `connection breaks: ${said.map(({ command }) => String(command[0])).join(" ")}`,
      );
    }
    this.#lastOutAt = outAt;
    const number = ++this.#writes;
    this.#leaving.push(() => {
      if (!server.away && number < this.#cutFrom) this.#peer.receive(arriving, mute);
    });
    this.#time.at(outAt, () => this.#leaving.shift()!());
    if (mute) {
      this.#broken = true;
      this.#cutFrom = number + 1;
      this.#time.at(outAt + server.latency(), () => this.#peer.close());
      if (server.dice.chance(0.5))
        this.#host.deliver(server.latency() + server.dice.share() * 20, () =>
          this.#end("the connection broke"),
        );
    }
  }

  #reply(asked: Asked, reply: RedisReply | RedisError): void {
    const at = Math.max(this.#lastBackAt, this.#time.now() + this.#server.latency());
    this.#lastBackAt = at;
    // Alarms of one instant may ring in any order; replies come as they were sent.
    this.#arriving.push(() => asked.take(reply));
    this.#host.deliver(at - this.#time.now(), () => {
      const take = this.#arriving.shift()!;
      if (this.#down !== undefined) return;
      this.#inFlight.shift();
      take();
    });
  }

  #message(channel: string, payload: Buffer): void {
    const server = this.#server;
    const { noteLost, noteTwice, noteLate } = server.net;
    const { dice, ledger } = server;
    if (dice.chance(noteLost)) return ledger.count("message lost");
    let afterMs = server.latency();
    if (dice.chance(noteLate)) {
      afterMs += dice.share() * 300;
      ledger.count("message late");
    }
    const take = (): void => {
      if (this.#down === undefined) this.onMessage?.(channel, payload);
    };
    this.#host.deliver(afterMs, take);
    if (!dice.chance(noteTwice)) return;
    this.#host.deliver(afterMs + dice.share() * 100, take);
    ledger.count("message repeated");
  }

  /** One alarm for the oldest command in flight. */
  #watch(): void {
    const [oldest] = this.#inFlight;
    if (this.#watching || oldest === undefined || this.#down !== undefined) return;
    this.#watching = true;
    this.#host.at(oldest.writtenAt + this.#timeoutMs, () => {
      this.#watching = false;
      const [first] = this.#inFlight;
      if (first !== undefined && this.#host.now() >= first.writtenAt + this.#timeoutMs) {
        // What arrived while the process stood still is read first.
        this.#host.deliver(0, () => {
          if (this.#inFlight[0] === first) this.#end(`redis did not answer within ${this.#timeoutMs} ms`);
          else this.#watch();
        });
      } else this.#watch();
    });
  }

  #end(why: string): void {
    if (this.#down !== undefined) return;
    this.#down = new Error(why);
    this.#broken = true;
    this.#host.onDeath.delete(this.#died);
    this.#server.closed(this);
    // What was written may still arrive; then the server sees the end of the connection.
    this.#time.at(Math.max(this.#lastOutAt, this.#time.now()) + this.#server.latency(), () =>
      this.#peer.close(),
    );
    for (const { lost } of this.#inFlight.splice(0)) lost(new LinkDown(why, true));
    for (const { lost } of this.#said.splice(0)) lost(new LinkDown(why, false));
    this.onDown?.(this.#down);
  }
}

/** The server's side of a connection. */
class Peer {
  readonly #server: RedisServer;
  readonly #name: string;
  readonly #reply: (asked: Asked, reply: RedisReply | RedisError) => void;
  readonly #message: (channel: string, payload: Buffer) => void;
  readonly #ends: (() => void)[] = [];
  /** Commands that wait behind one that blocks. */
  #waiting: Asked[] = [];
  #blocked: (() => void) | undefined;
  #multi: Asked[] | undefined;
  #closed = false;

  constructor(
    server: RedisServer,
    name: string,
    reply: (asked: Asked, reply: RedisReply | RedisError) => void,
    message: (channel: string, payload: Buffer) => void,
  ) {
    this.#server = server;
    this.#name = name;
    this.#reply = reply;
    this.#message = message;
  }

  /** `mute`: no reply gets back. */
  receive(commands: readonly Asked[], mute: boolean): void {
    if (this.#closed) return;
    this.#waiting.push(...commands);
    this.#run(mute);
  }

  close(): void {
    this.#closed = true;
    this.#waiting = [];
    this.#blocked?.();
    for (const end of this.#ends) end();
  }

  #run(mute: boolean): void {
    while (this.#waiting.length > 0 && this.#blocked === undefined) {
      const asked = this.#waiting.shift()!;
      const verb = String(asked.command[0]).toUpperCase();
      const answer = (reply: RedisReply | RedisError): void => {
        if (!mute) this.#reply(asked, reply);
      };
      if (verb === "INFO") answer(Buffer.from(this.#server.info()));
      else if (verb === "SSUBSCRIBE") this.#subscribe(String(asked.command[1]), answer);
      else if (verb === "MULTI") {
        this.#multi = [];
        answer(Buffer.from("OK"));
      } else if (verb === "EXEC") this.#exec(answer);
      else if (this.#multi !== undefined) {
        this.#multi.push(asked);
        answer(Buffer.from("QUEUED"));
      } else this.#submit(asked.command, answer, mute);
    }
  }

  #subscribe(channel: string, answer: (reply: RedisReply) => void): void {
    this.#ends.push(this.#server.redis.subscribe(channel, (name, payload) => this.#message(name, payload)));
    answer([Buffer.from("ssubscribe"), Buffer.from(channel), this.#ends.length]);
  }

  #exec(answer: (reply: RedisReply | RedisError) => void): void {
    const commands = (this.#multi ?? []).map(({ command }) => command);
    this.#multi = undefined;
    let reply: RedisReply | RedisError;
    try {
      reply = this.#server.redis.transaction(commands, this.#name);
    } catch (error) {
      if (!(error instanceof RedisError)) throw error;
      reply = error;
    }
    answer(reply);
  }

  #submit(command: readonly Arg[], answer: (reply: RedisReply | RedisError) => void, mute: boolean): void {
    let done = false;
    const giveUp = this.#server.redis.submit(
      command,
      (reply) => {
        done = true;
        answer(reply);
        if (this.#blocked === undefined) return;
        this.#blocked = undefined;
        this.#run(mute);
      },
      this.#name,
    );
    if (!done) this.#blocked = giveUp;
  }
}

/** What a fault may be aimed at, by the command that stands for it. */
function callOf([verb, first, , key]: readonly Arg[]): string | undefined {
  switch (String(verb)) {
    case "XADD":
      return "put";
    case "XCLAIM":
      return "takeover";
    case "HSETNX":
      return "settle";
    case "HSET":
      return String(first).includes("}:run:") ? "claim" : undefined;
    case "EVALSHA":
      if (String(key).endsWith("}:beats")) return "beat";
      if (first === scripts.renew.sha) return "extend";
      return first === scripts.settle.sha || first === scripts.bury.sha ? "settle" : undefined;
    default:
      return undefined;
  }
}
