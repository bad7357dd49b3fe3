/**
 * A Redis server in memory, on an injected clock: the commands that Ferry uses, with the replies and errors of Redis 7,
 * and its scripts, which run as the Lua that they are (`lua.ts`). `redis.test.ts` plays random commands against it and
 * against a real server and compares.
 *
 * One call of `execute` is one atomic act. A reader that blocks is served when another command has brought something, in
 * the order in which the readers came. Keys and values are strings with one character per byte (latin1) inside.
 */
import { hash } from "node:crypto";
import type { Alarm, Clock } from "../../../src/app/clock.ts";
import { type Arg, RedisError, type RedisReply } from "../../../src/engine/redis/client/resp.ts";
import { formatNumber, LuaError, Table, type LuaValue } from "./lua-library.ts";
import { compile, type Script } from "./lua.ts";
import {
  acknowledge,
  claim,
  compareIds,
  type Entry,
  type Group,
  idText,
  notZero,
  parseId,
  pendingBetween,
  Stream,
  type StreamId,
  ZERO,
} from "./stream.ts";

/** A simple string, which is not a bulk string for Lua. */
export class Status {
  readonly text: string;

  constructor(text: string) {
    this.text = text;
  }
}

export type Inner = string | number | null | Status | Inner[];
type Value = string | Map<string, string> | SortedSet | Stream;

class SortedSet extends Map<string, number> {
  sorted(): [string, number][] {
    return [...this].sort(([one, a], [other, b]) => a - b || (one < other ? -1 : 1));
  }
}

interface Key {
  value: Value;
  expiresAt: number;
}

interface Blocked {
  readonly words: readonly string[];
  readonly take: (reply: RedisReply | RedisError) => void;
  readonly alarm: Alarm | undefined;
  readonly by: string;
}

const OK = new Status("OK");
const WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value";
const NOT_INTEGER = "ERR value is not an integer or out of range";
const SYNTAX = "ERR syntax error";
const MAX_ID: StreamId = { ms: Number.MAX_SAFE_INTEGER, seq: Number.MAX_SAFE_INTEGER };
const compiled = new Map<string, Script>();

export function latin1(arg: Arg): string {
  if (typeof arg === "number") return String(arg);
  if (typeof arg !== "string") return arg.toString("latin1");
  // eslint-disable-next-line no-control-regex
  return /^[\0-\x7f]*$/.test(arg) ? arg : Buffer.from(arg).toString("latin1");
}

function outer(reply: Inner): RedisReply {
  if (typeof reply === "string") return Buffer.from(reply, "latin1");
  if (reply instanceof Status) return Buffer.from(reply.text, "latin1");
  return Array.isArray(reply) ? reply.map(outer) : reply;
}

function integer(text: string | undefined): number {
  if (text === undefined || !/^-?(0|[1-9]\d*)$/.test(text)) throw new RedisError(NOT_INTEGER);
  return Number(text);
}

function need(words: readonly string[], least: number): void {
  if (words.length < least)
    throw new RedisError(`ERR wrong number of arguments for '${words[0]!.toLowerCase()}' command`);
}

export class FakeRedis {
  readonly #clock: Clock;
  readonly #keys = new Map<string, Key>();
  readonly #subscribers = new Map<string, Set<(channel: string, payload: Buffer) => void>>();
  readonly #scripts = new Map<string, string>();
  #blocked: Blocked[] = [];
  #depth = 0;
  /** Sees each command that has run, also those of scripts, and which client it came from. */
  onCommand: ((words: readonly string[], reply: Inner, by: string) => void) | undefined;
  #by = "";
  /** The digest of the script that runs. */
  script: string | undefined;

  constructor(clock: Clock) {
    this.#clock = clock;
  }

  /** Whole milliseconds, as Redis's commands see them. */
  get #now(): number {
    return Math.floor(this.#clock.now());
  }

  /** Throws a RedisError. A read that would block finds nothing instead. */
  execute(command: readonly Arg[], by = ""): RedisReply {
    this.#by = by;
    const reply = outer(this.#run(command.map(latin1)));
    this.#serve();
    return reply;
  }

  /** A read that nobody hears of. */
  peek(command: readonly Arg[]): RedisReply {
    const words = command.map(latin1);
    return outer(COMMANDS[words[0]!]!(words, this.#commands));
  }

  /** MULTI and EXEC. One that fails does not stop the others; the reply is then its error, as the client's parser has it. */
  transaction(commands: readonly (readonly Arg[])[], by = ""): RedisReply[] {
    this.#by = by;
    let failure: RedisError | undefined;
    const replies = commands.map((command) => {
      try {
        return outer(this.#run(command.map(latin1)));
      } catch (error) {
        if (!(error instanceof RedisError)) throw error;
        failure ??= error;
        return null;
      }
    });
    this.#serve();
    if (failure !== undefined) throw failure;
    return replies;
  }

  /** As `execute`, for a connection: `take` is given the reply, later where the command blocks. Returns what gives up. */
  submit(command: readonly Arg[], take: (reply: RedisReply | RedisError) => void, by = ""): () => void {
    this.#by = by;
    let reply: RedisReply | RedisError;
    const words = command.map(latin1);
    try {
      reply = outer(this.#run(words));
    } catch (error) {
      if (!(error instanceof RedisError)) throw error;
      reply = error;
    }
    const blockMs = reply === null ? blockOf(words) : undefined;
    if (blockMs === undefined) {
      take(reply);
      this.#serve();
      return () => {};
    }
    const end = (): void => void (this.#blocked = this.#blocked.filter((each) => each !== blocked));
    const alarm =
      blockMs === 0
        ? undefined
        : this.#clock.at(this.#clock.now() + blockMs, () => {
            end();
            take(null);
          });
    const blocked: Blocked = { words, take, alarm, by };
    this.#blocked = [...this.#blocked, blocked];
    return () => {
      end();
      alarm?.cancel();
    };
  }

  #serve(): void {
    for (const blocked of this.#blocked) {
      this.#by = blocked.by;
      let reply: RedisReply | RedisError;
      try {
        reply = outer(this.#run(blocked.words));
      } catch (error) {
        if (!(error instanceof RedisError)) throw error;
        reply = error;
      }
      if (reply === null) continue;
      this.#blocked = this.#blocked.filter((each) => each !== blocked);
      blocked.alarm?.cancel();
      blocked.take(reply);
    }
  }

  /** Whoever hears a channel is told of each message at once. */
  subscribe(channel: string, heard: (channel: string, payload: Buffer) => void): () => void {
    const name = latin1(channel);
    let listeners = this.#subscribers.get(name);
    if (listeners === undefined) this.#subscribers.set(name, (listeners = new Set()));
    listeners.add(heard);
    return () => listeners.delete(heard);
  }

  /** As after a restart: the data is there, the scripts are not. */
  forgetScripts(): void {
    this.#scripts.clear();
  }

  /** The names of all keys that have not expired. */
  names(): string[] {
    return [...this.#keys.keys()].filter((name) => this.#find(name) !== undefined);
  }

  #run(words: readonly string[]): Inner {
    const name = words[0]!.toUpperCase();
    const command = Object.hasOwn(COMMANDS, name) ? COMMANDS[name] : undefined;
    if (command === undefined) throw new RedisError(`ERR unknown command '${words[0]!}'`);
    const reply = command(words, this.#commands);
    this.onCommand?.(words, reply, this.#by);
    return reply;
  }

  // ── keys ──────────────────────────────────────────────────────────────────────────────────────────

  #find(name: string): Key | undefined {
    const key = this.#keys.get(name);
    if (key === undefined || this.#now <= key.expiresAt) return key;
    this.#keys.delete(name);
    return undefined;
  }

  #typed<Type extends Value>(name: string, is: (value: Value) => value is Type): Type | undefined {
    const value = this.#find(name)?.value;
    if (value !== undefined && !is(value)) throw new RedisError(WRONG_TYPE);
    return value;
  }

  #made<Type extends Value>(name: string, is: (value: Value) => value is Type, make: () => Type): Type {
    let value = this.#typed(name, is);
    if (value === undefined) this.#keys.set(name, { value: (value = make()), expiresAt: Infinity });
    return value;
  }

  /** What the table of commands needs of this server. */
  readonly #commands: Ground = {
    now: () => this.#now,
    exactNow: () => this.#clock.now(),
    find: (name) => this.#find(name),
    put: (name, value, expiresAt) => void this.#keys.set(name, { value, expiresAt }),
    remove: (name) => this.#find(name) !== undefined && this.#keys.delete(name),
    text: (name) => this.#typed(name, isText),
    hash: (name) => this.#typed(name, isHash),
    newHash: (name) => this.#made(name, isHash, () => new Map()),
    sorted: (name) => this.#typed(name, isSorted),
    newSorted: (name) => this.#made(name, isSorted, () => new SortedSet()),
    stream: (name) => this.#typed(name, isStream),
    newStream: (name) => this.#made(name, isStream, () => new Stream()),
    publish: (channel, payload) => {
      const listeners = this.#subscribers.get(channel) ?? [];
      for (const heard of listeners) heard(channel, Buffer.from(payload, "latin1"));
      return this.#subscribers.get(channel)?.size ?? 0;
    },
    script: (sha) => this.#scripts.get(sha),
    load: (source) => {
      const sha = hash("sha1", Buffer.from(source, "latin1"));
      this.#scripts.set(sha, source);
      return sha;
    },
    evaluate: (source, keys, args) => this.#evaluate(source, keys, args),
  };

  // ── scripts ───────────────────────────────────────────────────────────────────────────────────────

  #evaluate(source: string, keys: readonly string[], args: readonly string[]): Inner {
    let script = compiled.get(source);
    if (script === undefined)
      compiled.set(source, (script = compile(Buffer.from(source, "latin1").toString())));
    if (this.#depth > 0) throw new RedisError("ERR This Redis command is not allowed from script");
    this.#depth++;
    this.script = hash("sha1", Buffer.from(source, "latin1"));
    try {
      const redis = new Table([], [
        ["call", (...words) => [fromReply(this.#run(words.map(argument)))]],
        [
          "pcall",
          (...words) => {
            try {
              return [fromReply(this.#run(words.map(argument)))];
            } catch (error) {
              if (!(error instanceof RedisError)) throw error;
              return [new Table([], [["err", error.message]])];
            }
          },
        ],
        ["error_reply", (text) => [new Table([], [["err", errorText(String(text))]])]],
        ["status_reply", (text) => [new Table([], [["ok", text]])]],
        ["sha1hex", (text) => [hash("sha1", Buffer.from(String(text), "latin1"))]],
        ["log", () => []],
        ["LOG_WARNING", 3],
        ["LOG_NOTICE", 2],
      ] satisfies [string, LuaValue][]);
      const [result] = script({ KEYS: new Table(keys), ARGV: new Table(args), redis });
      return toReply(result);
    } catch (error) {
      if (!(error instanceof LuaError)) throw error;
      throw new RedisError(errorText(error.message));
    } finally {
      this.#depth--;
      this.script = undefined;
    }
  }
}

/** An error's text starts with its code. */
function errorText(text: string): string {
  const said = text.startsWith("-") ? text.slice(1) : text;
  return said.includes(" ") && /^[A-Z]+ /.test(said) ? said : `ERR ${said}`;
}

function argument(value: LuaValue): string {
  if (typeof value === "string") return value;
  if (typeof value === "number") return formatNumber(value, 17);
  throw new LuaError("ERR Lua redis lib command arguments must be strings or integers");
}

function fromReply(reply: Inner): LuaValue {
  if (reply === null) return false;
  if (reply instanceof Status) return new Table([], [["ok", reply.text]]);
  return Array.isArray(reply) ? new Table(reply.map(fromReply)) : reply;
}

function toReply(value: LuaValue): Inner {
  if (typeof value === "string") return value;
  if (typeof value === "number") return Math.trunc(value);
  if (value === true) return 1;
  if (!(value instanceof Table)) return null;
  const failure = value.get("err");
  if (failure !== undefined) throw new RedisError(String(failure));
  const status = value.get("ok");
  return status === undefined ? value.list().map(toReply) : new Status(String(status));
}

const isText = (value: Value): value is string => typeof value === "string";
const isHash = (value: Value): value is Map<string, string> => value instanceof Map && !isSorted(value);
const isSorted = (value: Value): value is SortedSet => value instanceof SortedSet;
const isStream = (value: Value): value is Stream => value instanceof Stream;

/** How long an XREADGROUP that found nothing waits; 0: for ever; undefined: it does not. */
function blockOf(words: readonly string[]): number | undefined {
  if (words[0]!.toUpperCase() !== "XREADGROUP") return undefined;
  for (let at = 4; at < words.length && words[at]!.toUpperCase() !== "STREAMS"; at++) {
    if (words[at]!.toUpperCase() === "BLOCK") return integer(words[at + 1]);
  }
  return undefined;
}

// ── commands ───────────────────────────────────────────────────────────────────────────────────────────

interface Ground {
  now(): number;
  exactNow(): number;
  find(name: string): Key | undefined;
  put(name: string, value: Value, expiresAt: number): void;
  remove(name: string): boolean;
  text(name: string): string | undefined;
  hash(name: string): Map<string, string> | undefined;
  newHash(name: string): Map<string, string>;
  sorted(name: string): SortedSet | undefined;
  newSorted(name: string): SortedSet;
  stream(name: string): Stream | undefined;
  newStream(name: string): Stream;
  publish(channel: string, payload: string): number;
  script(sha: string): string | undefined;
  load(source: string): string;
  evaluate(source: string, keys: readonly string[], args: readonly string[]): Inner;
}

type Command = (words: readonly string[], on: Ground) => Inner;

/** Options after a command's fixed words, with so many values each. */
function options(words: readonly string[], from: number, known: Readonly<Record<string, number>>) {
  const found = new Map<string, string[]>();
  for (let at = from; at < words.length;) {
    const name = words[at]!.toUpperCase();
    const count = Object.hasOwn(known, name) ? known[name]! : -1;
    if (count < 0 || at + count >= words.length + (count === 0 ? 1 : 0)) throw new RedisError(SYNTAX);
    found.set(name, words.slice(at + 1, at + 1 + count));
    at += 1 + count;
  }
  return found;
}

function scoreText(score: number): string {
  return formatNumber(score, 17).replace(/^(-?)inf$/, "$1inf");
}

function score(text: string): number {
  const infinite = /^([+-]?)inf(inity)?$/i.exec(text);
  if (infinite !== null) return infinite[1] === "-" ? -Infinity : Infinity;
  if (text === "" || !Number.isFinite(Number(text))) throw new RedisError("ERR value is not a valid float");
  return Number(text);
}

function scoreBounds(low: string, high: string): (value: number) => boolean {
  const limits = [low, high].map((text) => {
    try {
      return { open: text.startsWith("("), value: score(text.replace(/^\(/, "")) };
    } catch {
      throw new RedisError("ERR min or max is not a float");
    }
  });
  const [from, to] = limits as [(typeof limits)[0], (typeof limits)[0]];
  return (value) =>
    (from.open ? value > from.value : value >= from.value) &&
    (to.open ? value < to.value : value <= to.value);
}

function slice<Item>(items: readonly Item[], from: number, to: number): Item[] {
  const start = from < 0 ? Math.max(0, items.length + from) : from;
  const end = to < 0 ? items.length + to : to;
  return items.slice(start, Math.max(0, end + 1));
}

function limited<Item>(items: readonly Item[], said: readonly string[] | undefined): Item[] {
  if (said === undefined) return [...items];
  const [from, count] = [integer(said[0]), integer(said[1])];
  return from < 0 ? [] : items.slice(from, count < 0 ? undefined : from + count);
}

function pairsOf(items: readonly (readonly [string, number])[], scores: boolean): string[] {
  return items.flatMap(([member, value]) => (scores ? [member, scoreText(value)] : [member]));
}

function entryReply({
  id,
  fields,
}: {
  readonly id: StreamId;
  readonly fields: readonly string[] | null;
}): Inner {
  return [idText(id), fields === null ? null : [...fields]];
}

function rangeId(text: string, missingSeq: number): StreamId {
  if (text === "-") return ZERO;
  if (text === "+") return MAX_ID;
  if (!text.startsWith("(")) return parseId(text, missingSeq);
  const { ms, seq } = parseId(text.slice(1), missingSeq);
  return missingSeq === 0
    ? { ms, seq: seq + 1 }
    : seq === 0
      ? { ms: ms - 1, seq: MAX_ID.seq }
      : { ms, seq: seq - 1 };
}

function groupOf(on: Ground, key: string, name: string, why = ""): { stream: Stream; group: Group } {
  const stream = on.stream(key);
  const group = stream?.groups.get(name);
  if (stream === undefined || group === undefined) {
    throw new RedisError(`NOGROUP No such key '${key}' or consumer group '${name}'${why}`);
  }
  return { stream, group };
}

function expiry(on: Ground, said: readonly string[] | undefined, unit: number): number | undefined {
  if (said === undefined) return undefined;
  const value = integer(said[0]);
  if (value <= 0) throw new RedisError("ERR invalid expire time in 'set' command");
  return on.now() + unit * value;
}

function hashEmptied(on: Ground, key: string, value: { readonly size: number }): void {
  if (value.size === 0) on.remove(key);
}

const COMMANDS: Record<string, Command> = {
  PING: () => new Status("PONG"),
  TIME: (_, on) => {
    const now = on.exactNow();
    return [String(Math.floor(now / 1000)), String(Math.floor((now % 1000) * 1000))];
  },
  WAIT: () => 1,
  SPUBLISH: (words, on) => (need(words, 3), on.publish(words[1]!, words[2]!)),
  EVAL: (words, on) => {
    need(words, 3);
    const count = integer(words[2]);
    return on.evaluate(words[1]!, words.slice(3, 3 + count), words.slice(3 + count));
  },
  EVALSHA: (words, on) => {
    need(words, 3);
    const source = on.script(words[1]!.toLowerCase());
    if (source === undefined) throw new RedisError("NOSCRIPT No matching script. Please use EVAL.");
    const count = integer(words[2]);
    return on.evaluate(source, words.slice(3, 3 + count), words.slice(3 + count));
  },
  SCRIPT: (words, on) => on.load(words[2]!),

  // ── keys and strings ──

  EXISTS: (words, on) => words.slice(1).filter((name) => on.find(name) !== undefined).length,
  DEL: (words, on) => (need(words, 2), words.slice(1).filter((name) => on.remove(name)).length),
  UNLINK: (words, on) => (need(words, 2), words.slice(1).filter((name) => on.remove(name)).length),
  TYPE: (words, on) => {
    const value = on.find(words[1]!)?.value;
    if (value === undefined) return new Status("none");
    if (isText(value)) return new Status("string");
    return new Status(isStream(value) ? "stream" : isSorted(value) ? "zset" : "hash");
  },
  PEXPIRE: (words, on) => {
    need(words, 3);
    const [ms, key] = [integer(words[2]), on.find(words[1]!)];
    const { size } = options(words, 3, { NX: 0, XX: 0, GT: 0, LT: 0 });
    if (key === undefined) return 0;
    const at = on.now() + ms;
    if (size > 0) {
      const chosen = new Set(words.slice(3).map((word) => word.toUpperCase()));
      if (chosen.has("NX") && key.expiresAt !== Infinity) return 0;
      if (chosen.has("XX") && key.expiresAt === Infinity) return 0;
      if (chosen.has("GT") && at <= key.expiresAt) return 0;
      if (chosen.has("LT") && at >= key.expiresAt) return 0;
    }
    if (ms <= 0) on.remove(words[1]!);
    else key.expiresAt = at;
    return 1;
  },
  PERSIST: (words, on) => {
    const key = on.find(words[1]!);
    if (key === undefined || key.expiresAt === Infinity) return 0;
    key.expiresAt = Infinity;
    return 1;
  },
  PTTL: (words, on) => {
    const key = on.find(words[1]!);
    if (key === undefined) return -2;
    return key.expiresAt === Infinity ? -1 : key.expiresAt - on.now();
  },
  GET: (words, on) => on.text(words[1]!) ?? null,
  GETDEL: (words, on) => {
    const value = on.text(words[1]!) ?? null;
    on.remove(words[1]!);
    return value;
  },
  MGET: (words, on) =>
    words.slice(1).map((name) => {
      const value = on.find(name)?.value;
      return typeof value === "string" ? value : null;
    }),
  MSET: (words, on) => {
    need(words, 3);
    if (words.length % 2 === 0) throw new RedisError("ERR wrong number of arguments for 'mset' command");
    for (let at = 1; at < words.length; at += 2) on.put(words[at]!, words[at + 1]!, Infinity);
    return OK;
  },
  SET: (words, on) => {
    need(words, 3);
    const [, name, value] = words as [string, string, string];
    const chosen = options(words, 3, { NX: 0, XX: 0, GET: 0, KEEPTTL: 0, PX: 1, EX: 1 });
    if (chosen.has("NX") && chosen.has("XX")) throw new RedisError(SYNTAX);
    const wait = expiry(on, chosen.get("PX"), 1) ?? expiry(on, chosen.get("EX"), 1000);
    const found = on.find(name);
    const old = chosen.has("GET") ? (on.text(name) ?? null) : null;
    if ((chosen.has("NX") && found !== undefined) || (chosen.has("XX") && found === undefined)) return old;
    const keep = chosen.has("KEEPTTL") ? found?.expiresAt : undefined;
    on.put(name, value, wait ?? keep ?? Infinity);
    return chosen.has("GET") ? old : OK;
  },
  INCRBY: (words, on) => {
    need(words, 3);
    const by = integer(words[2]);
    const found = on.text(words[1]!);
    const next = (found === undefined ? 0 : integer(found)) + by;
    on.put(words[1]!, String(next), on.find(words[1]!)?.expiresAt ?? Infinity);
    return next;
  },
  INCR: (words, on) => COMMANDS["INCRBY"]!(["INCRBY", words[1]!, "1"], on),

  // ── hashes ──

  HSET: (words, on) => {
    need(words, 4);
    if (words.length % 2 === 1) throw new RedisError("ERR wrong number of arguments for 'hset' command");
    const fields = on.newHash(words[1]!);
    const before = fields.size;
    for (let at = 2; at < words.length; at += 2) fields.set(words[at]!, words[at + 1]!);
    return fields.size - before;
  },
  HSETNX: (words, on) => {
    need(words, 4);
    const fields = on.newHash(words[1]!);
    if (fields.has(words[2]!)) return 0;
    fields.set(words[2]!, words[3]!);
    return 1;
  },
  HGET: (words, on) => (need(words, 3), on.hash(words[1]!)?.get(words[2]!) ?? null),
  HMGET: (words, on) => {
    need(words, 3);
    const fields = on.hash(words[1]!);
    return words.slice(2).map((field) => fields?.get(field) ?? null);
  },
  HGETALL: (words, on) => [...(on.hash(words[1]!) ?? [])].flat(),
  HKEYS: (words, on) => [...(on.hash(words[1]!)?.keys() ?? [])],
  HVALS: (words, on) => [...(on.hash(words[1]!)?.values() ?? [])],
  HLEN: (words, on) => on.hash(words[1]!)?.size ?? 0,
  HEXISTS: (words, on) => (need(words, 3), on.hash(words[1]!)?.has(words[2]!) === true ? 1 : 0),
  HSTRLEN: (words, on) => (need(words, 3), on.hash(words[1]!)?.get(words[2]!)?.length ?? 0),
  HDEL: (words, on) => {
    need(words, 3);
    const fields = on.hash(words[1]!);
    if (fields === undefined) return 0;
    const { length } = words.slice(2).filter((field) => fields.delete(field));
    hashEmptied(on, words[1]!, fields);
    return length;
  },
  HINCRBY: (words, on) => {
    need(words, 4);
    const by = integer(words[3]);
    const found = on.hash(words[1]!)?.get(words[2]!);
    if (found !== undefined && !/^-?(0|[1-9]\d*)$/.test(found))
      throw new RedisError("ERR hash value is not an integer");
    const next = Number(found ?? 0) + by;
    on.newHash(words[1]!).set(words[2]!, String(next));
    return next;
  },

  // ── sorted sets ──

  ZADD: (words, on) => {
    need(words, 4);
    const flags = new Set<string>();
    let at = 2;
    while (["NX", "XX", "GT", "LT", "CH"].includes(words[at]?.toUpperCase() ?? ""))
      flags.add(words[at++]!.toUpperCase());
    const pairs = words.slice(at);
    if (
      pairs.length === 0 ||
      pairs.length % 2 === 1 ||
      (flags.has("NX") && flags.size > (flags.has("CH") ? 2 : 1))
    )
      throw new RedisError(SYNTAX);
    const scores = pairs.filter((_, place) => place % 2 === 0).map(score);
    const set = on.newSorted(words[1]!);
    let changed = 0;
    scores.forEach((value, place) => {
      const member = pairs[2 * place + 1]!;
      const old = set.get(member);
      if (old === undefined ? flags.has("XX") : flags.has("NX")) return;
      if (old !== undefined && ((flags.has("GT") && value <= old) || (flags.has("LT") && value >= old)))
        return;
      set.set(member, value);
      if (old === undefined || (flags.has("CH") && old !== value)) changed++;
    });
    hashEmptied(on, words[1]!, set);
    return changed;
  },
  ZREM: (words, on) => {
    need(words, 3);
    const set = on.sorted(words[1]!);
    if (set === undefined) return 0;
    const { length } = words.slice(2).filter((member) => set.delete(member));
    hashEmptied(on, words[1]!, set);
    return length;
  },
  ZCARD: (words, on) => on.sorted(words[1]!)?.size ?? 0,
  ZSCORE: (words, on) => {
    const value = on.sorted(words[1]!)?.get(words[2]!);
    return value === undefined ? null : scoreText(value);
  },
  ZCOUNT: (words, on) => {
    const within = scoreBounds(words[2]!, words[3]!);
    return (on.sorted(words[1]!)?.sorted() ?? []).filter(([, value]) => within(value)).length;
  },
  ZRANGE: (words, on) => {
    need(words, 4);
    const chosen = options(words, 4, { BYSCORE: 0, REV: 0, LIMIT: 2, WITHSCORES: 0 });
    if (chosen.has("LIMIT") && !chosen.has("BYSCORE")) {
      throw new RedisError(
        "ERR syntax error, LIMIT is only supported in combination with either BYSCORE or BYLEX",
      );
    }
    const reverse = chosen.has("REV");
    let items: [string, number][];
    if (chosen.has("BYSCORE")) {
      const within = reverse ? scoreBounds(words[3]!, words[2]!) : scoreBounds(words[2]!, words[3]!);
      items = (on.sorted(words[1]!)?.sorted() ?? []).filter(([, value]) => within(value));
      if (reverse) items.reverse();
      items = limited(items, chosen.get("LIMIT"));
    } else {
      const [from, to] = [integer(words[2]), integer(words[3])];
      items = on.sorted(words[1]!)?.sorted() ?? [];
      if (reverse) items.reverse();
      items = slice(items, from, to);
    }
    return pairsOf(items, chosen.has("WITHSCORES"));
  },
  ZRANGEBYSCORE: (words, on) => {
    need(words, 4);
    const chosen = options(words, 4, { LIMIT: 2, WITHSCORES: 0 });
    const within = scoreBounds(words[2]!, words[3]!);
    const items = (on.sorted(words[1]!)?.sorted() ?? []).filter(([, value]) => within(value));
    return pairsOf(limited(items, chosen.get("LIMIT")), chosen.has("WITHSCORES"));
  },
  ZREMRANGEBYSCORE: (words, on) => {
    need(words, 4);
    const within = scoreBounds(words[2]!, words[3]!);
    const set = on.sorted(words[1]!);
    if (set === undefined) return 0;
    const old = [...set].filter(([, value]) => within(value));
    for (const [member] of old) set.delete(member);
    hashEmptied(on, words[1]!, set);
    return old.length;
  },
  ZPOPMIN: (words, on) => {
    const count = words[2] === undefined ? 1 : integer(words[2]);
    if (count < 0) throw new RedisError("ERR value is out of range, must be positive");
    const set = on.sorted(words[1]!);
    if (set === undefined) return [];
    const old = set.sorted().slice(0, count);
    for (const [member] of old) set.delete(member);
    hashEmptied(on, words[1]!, set);
    return pairsOf(old, true);
  },

  // ── streams ──

  XADD: (words, on) => {
    need(words, 5);
    let at = 2;
    let trim: (stream: Stream) => void = () => {};
    let make = true;
    for (;;) {
      const option = words[at]?.toUpperCase();
      if (option === "NOMKSTREAM") make = false;
      else if (option === "MAXLEN" || option === "MINID") {
        if (words[at + 1] === "~" || words[at + 1] === "=") at++;
        const limit = words[++at]!;
        trim = (stream) =>
          option === "MAXLEN" ? stream.trimToLength(integer(limit)) : stream.trimBefore(parseId(limit));
      } else break;
      at++;
    }
    const fields = words.slice(at + 1);
    if (fields.length === 0 || fields.length % 2 === 1) need(["xadd"], 2);
    if (words[at] !== "*" && !/^\d+-\*$/.test(words[at]!)) notZero(parseId(words[at]!));
    if (!make && on.find(words[1]!) === undefined) return null;
    const existed = on.find(words[1]!) !== undefined;
    const stream = on.newStream(words[1]!);
    try {
      const id = stream.add(words[at]!, fields, on.now());
      trim(stream);
      return idText(id);
    } catch (error) {
      if (!existed) on.remove(words[1]!);
      throw error;
    }
  },
  XLEN: (words, on) => on.stream(words[1]!)?.entries.length ?? 0,
  XDEL: (words, on) => {
    need(words, 3);
    const stream = on.stream(words[1]!);
    if (stream === undefined) return 0;
    const ids = words.slice(2).map((each) => parseId(each));
    return ids.filter((id) => stream.delete(id)).length;
  },
  XTRIM: (words, on) => {
    need(words, 4);
    const byLength = words[2]!.toUpperCase() === "MAXLEN";
    const [length, from] = byLength ? [integer(words.at(-1)), ZERO] : [0, parseId(words.at(-1)!)];
    const stream = on.stream(words[1]!);
    if (stream === undefined) return 0;
    return byLength ? stream.trimToLength(length) : stream.trimBefore(from);
  },
  XRANGE: (words, on) => {
    need(words, 4);
    const count = words[4] === undefined ? Infinity : integer(words[5]);
    const [from, to] = [rangeId(words[2]!, 0), rangeId(words[3]!, MAX_ID.seq)];
    if (count === 0) return on.stream(words[1]!) === undefined ? [] : null;
    return (on.stream(words[1]!)?.range(from, to, count) ?? []).map(entryReply);
  },
  XREVRANGE: (words, on) => {
    need(words, 4);
    const count = words[4] === undefined ? Infinity : integer(words[5]);
    const [from, to] = [rangeId(words[3]!, 0), rangeId(words[2]!, MAX_ID.seq)];
    if (count === 0) return on.stream(words[1]!) === undefined ? [] : null;
    return (on.stream(words[1]!)?.range(from, to) ?? []).reverse().slice(0, count).map(entryReply);
  },
  XREADGROUP: (words, on) => {
    need(words, 7);
    const start = words.findIndex((word, place) => place >= 4 && word.toUpperCase() === "STREAMS");
    if (start < 0 || words[1]!.toUpperCase() !== "GROUP") throw new RedisError(SYNTAX);
    const chosen = options(words.slice(0, start), 4, { COUNT: 1, BLOCK: 1, NOACK: 0 });
    const rest = words.slice(start + 1);
    if (rest.length === 0 || rest.length % 2 === 1) {
      throw new RedisError(
        "ERR Unbalanced XREADGROUP list of streams: for each stream key an ID or '$' must be specified.",
      );
    }
    const count = chosen.has("COUNT") ? integer(chosen.get("COUNT")![0]) : 0;
    const [group, consumer] = [words[2]!, words[3]!];
    const half = rest.length / 2;
    const wanted = rest.slice(0, half).map((key, place) => {
      const from = rest[half + place]!;
      const ids = from === ">" ? undefined : parseId(from);
      const why = " in XREADGROUP with GROUP option";
      return { key, ids, ...groupOf(on, key, group, why) };
    });
    const reply: Inner[] = [];
    for (const { key, ids, stream, group: of } of wanted) {
      const most = count === 0 ? Infinity : count;
      const fresh = ids === undefined && compareIds(stream.lastId, of.lastDelivered) > 0;
      if (ids === undefined && !fresh) continue;
      of.consumers.set(consumer, on.now());
      if (ids !== undefined) {
        reply.push([key, stream.readPending(of, consumer, ids, most, on.now()).map(entryReply)]);
        continue;
      }
      const entries = stream.readNew(of, consumer, most, chosen.has("NOACK"), on.now());
      // Everything after the last delivered one was deleted.
      if (entries.length === 0) continue;
      reply.push([key, entries.map(entryReply)]);
    }
    return reply.length === 0 ? null : reply;
  },
  XACK: (words, on) => {
    need(words, 4);
    const group = on.stream(words[1]!)?.groups.get(words[2]!);
    if (group === undefined) return 0;
    const ids = words.slice(3).map((each) => parseId(each));
    return ids.filter((id) => acknowledge(group, id)).length;
  },
  XPENDING: (words, on) => {
    need(words, 3);
    const idle = words[3]?.toUpperCase() === "IDLE" ? integer(words[4]) : 0;
    const rest = words.slice(words[3]?.toUpperCase() === "IDLE" ? 5 : 3);
    const { group } = groupOf(on, words[1]!, words[2]!);
    if (words.length === 3) {
      const counts = new Map<string, number>();
      for (const { consumer } of group.pending) counts.set(consumer, (counts.get(consumer) ?? 0) + 1);
      if (counts.size === 0) return [0, null, null, null];
      const [first, last] = [group.pending[0]!, group.pending.at(-1)!];
      const names = [...counts].sort(([one], [other]) => (one < other ? -1 : 1));
      return [
        group.pending.length,
        idText(first.id),
        idText(last.id),
        names.map(([name, count]) => [name, String(count)]),
      ];
    }
    if (rest.length < 3) throw new RedisError(SYNTAX);
    const [from, to, count] = [rangeId(rest[0]!, 0), rangeId(rest[1]!, MAX_ID.seq), integer(rest[2])];
    return pendingBetween(group, from, to)
      .filter(({ consumer }) => rest[3] === undefined || rest[3] === consumer)
      .filter(({ deliveredAt }) => on.now() - deliveredAt >= idle)
      .slice(0, Math.max(0, count))
      .map(({ id, consumer, deliveredAt, count: times }) => [
        idText(id),
        consumer,
        Math.max(0, on.now() - deliveredAt),
        times,
      ]);
  },
  XCLAIM: (words, on) => {
    need(words, 6);
    const { stream, group } = groupOf(on, words[1]!, words[2]!);
    const minIdleMs = integer(words[4]);
    let end = 5;
    while (end < words.length && /^\d+(-\d+)?$/.test(words[end]!)) end++;
    if (end === 5) parseId(words[5]!);
    const chosen = options(words, end, { IDLE: 1, TIME: 1, RETRYCOUNT: 1, FORCE: 0, JUSTID: 0 });
    const at = chosen.has("IDLE")
      ? on.now() - integer(chosen.get("IDLE")![0])
      : chosen.has("TIME")
        ? integer(chosen.get("TIME")![0])
        : on.now();
    const how = {
      consumer: words[3]!,
      minIdleMs,
      deliveredAt: Math.min(at, on.now()),
      retryCount: chosen.has("RETRYCOUNT") ? integer(chosen.get("RETRYCOUNT")![0]) : undefined,
      force: chosen.has("FORCE"),
      justId: chosen.has("JUSTID"),
    };
    const taken: Entry[] = [];
    for (const text of words.slice(5, end)) {
      const entry = claim(stream, group, parseId(text), how, on.now());
      if (typeof entry !== "string") taken.push(entry);
    }
    return how.justId ? taken.map(({ id }) => idText(id)) : taken.map(entryReply);
  },
  XAUTOCLAIM: (words, on) => {
    need(words, 6);
    const chosen = options(words, 6, { COUNT: 1, JUSTID: 0 });
    const from = rangeId(words[5]!, 0);
    const count = chosen.has("COUNT") ? integer(chosen.get("COUNT")![0]) : 100;
    const { stream, group } = groupOf(on, words[1]!, words[2]!);
    const how = {
      consumer: words[3]!,
      minIdleMs: integer(words[4]),
      deliveredAt: on.now(),
      retryCount: undefined,
      force: false,
      justId: chosen.has("JUSTID"),
    };
    const [taken, gone]: [Entry[], string[]] = [[], []];
    let attempts = 10 * count;
    let left = count;
    let next = ZERO;
    for (const { id } of pendingBetween(group, from, MAX_ID)) {
      if (attempts-- === 0 || left === 0) {
        next = id;
        break;
      }
      const entry = claim(stream, group, id, how, on.now());
      if (entry === "gone") {
        gone.push(idText(id));
        left--;
      } else if (entry !== "kept") {
        taken.push(entry);
        left--;
      }
    }
    return [idText(next), how.justId ? taken.map(({ id }) => idText(id)) : taken.map(entryReply), gone];
  },
  XGROUP: (words, on) => {
    need(words, 4);
    const [, verb, key, name] = words as [string, string, string, string];
    const at = verb.toUpperCase();
    const stream = on.stream(key);
    if (at === "CREATE") {
      const make = words.slice(5).some((word) => word.toUpperCase() === "MKSTREAM");
      if (stream === undefined && !make) {
        throw new RedisError(
          "ERR The XGROUP subcommand requires the key to exist. Note that for CREATE you may want to use the MKSTREAM option to create an empty stream automatically.",
        );
      }
      const target = stream ?? on.newStream(key);
      target.createGroup(name, words[4] === "$" ? target.lastId : parseId(words[4]!));
      return OK;
    }
    if (stream === undefined) {
      throw new RedisError(
        "ERR The XGROUP subcommand requires the key to exist. Note that for CREATE you may want to use the MKSTREAM option to create an empty stream automatically.",
      );
    }
    if (at === "DESTROY") return stream.groups.delete(name) ? 1 : 0;
    const group = stream.groups.get(name);
    if (group === undefined)
      throw new RedisError(`NOGROUP No such consumer group '${name}' for key name '${key}'`);
    if (at === "SETID") {
      group.lastDelivered = words[4] === "$" ? stream.lastId : parseId(words[4]!);
      group.entriesRead = undefined;
      return OK;
    }
    const consumer = words[4]!;
    if (at === "CREATECONSUMER") {
      if (group.consumers.has(consumer)) return 0;
      group.consumers.set(consumer, on.now());
      return 1;
    }
    if (at !== "DELCONSUMER") throw new RedisError(`ERR unknown subcommand '${verb}'. Try XGROUP HELP.`);
    const own = group.pending.filter((each) => each.consumer === consumer);
    for (const { id } of own) acknowledge(group, id);
    group.consumers.delete(consumer);
    return own.length;
  },
  XINFO: (words, on) => {
    const stream = on.stream(words[2]!);
    if (stream === undefined) throw new RedisError("ERR no such key");
    if (words[1]!.toUpperCase() === "GROUPS") {
      return [...stream.groups]
        .sort(([one], [other]) => (one < other ? -1 : 1))
        .map(([name, group]) => [
          "name",
          name,
          "consumers",
          group.consumers.size,
          "pending",
          group.pending.length,
          "last-delivered-id",
          idText(group.lastDelivered),
          "entries-read",
          group.entriesRead ?? null,
          "lag",
          stream.lag(group),
        ]);
    }
    const group = stream.groups.get(words[3]!);
    if (group === undefined)
      throw new RedisError(`NOGROUP No such consumer group '${words[3]!}' for key name '${words[2]!}'`);
    return [...group.consumers]
      .sort(([one], [other]) => (one < other ? -1 : 1))
      .map(([name, seenAt]) => [
        "name",
        name,
        "pending",
        group.pending.filter(({ consumer }) => consumer === name).length,
        "idle",
        Math.max(0, on.now() - seenAt),
      ]);
  },
};
