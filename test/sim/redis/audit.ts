/**
 * Watches every command that the fake Redis runs, and holds the engine to what must be true of its data whatever
 * happened to its processes: an outcome is never replaced, an entry is acknowledged only when nothing is left to do for it,
 * bad news comes from the batcher that ran the task last, what was settled when its bundle was taken over is not run again,
 * attempts are not forgotten. Tells the ledger of each task that was written and of each that has ended.
 */
import {
  OutcomeReader,
  readBody,
  readEntry,
  readMeta,
  RedisClock,
} from "../../../src/engine/redis/frames.ts";
import { GROUP } from "../../../src/engine/redis/keys.ts";
import { scripts } from "../../../src/engine/redis/scripts.ts";
import type { Ledger } from "../ledger.ts";
import type { FakeRedis, Inner } from "./redis.ts";

const FIELD = /^[0-9A-HJKMNP-TV-Z]{15}$/;
const clock = new RedisClock();

interface Written {
  readonly key: string;
  readonly tasks: readonly string[];
}

export class Audit {
  readonly #redis: FakeRedis;
  readonly #ledger: Ledger;
  readonly #reader = new OutcomeReader(clock);
  /** Entries that are in a stream, by stream and id; and of each task those that hold it. */
  readonly #entries = new Map<string, Written>();
  readonly #entriesOf = new Map<string, Set<string>>();
  /** Outcomes as they stand, by task id. */
  readonly #outcomes = new Map<string, string>();
  /** Tasks that have not ended. */
  readonly #open = new Set<string>();
  /** Tasks that had ended when a batcher took their bundle over, by batcher. */
  readonly #settledBefore = new Map<string, Set<string>>();
  #mostOpen = 0;

  constructor(redis: FakeRedis, ledger: Ledger) {
    this.#redis = redis;
    this.#ledger = ledger;
    redis.onCommand = (words, reply, by) => this.#ran(words, reply, by);
  }

  /** Tasks that were written and have not ended. */
  get open(): ReadonlySet<string> {
    return this.#open;
  }

  /** The most that were open at a time. */
  get mostOpen(): number {
    return this.#mostOpen;
  }

  /** A batch leaves for a worker. */
  sent(process: string, ids: readonly string[]): void {
    for (const id of ids) {
      const again = this.#settledBefore.get(process)?.has(id) === true;
      this.#ledger.check(
        !again,
        `${this.#ledger.name(id)} had ended when its bundle was taken over, and runs again`,
      );
    }
  }

  /** What is left in streams and pending lists. */
  leftovers(): string[] {
    const left: string[] = [];
    for (const name of this.#redis.names()) {
      if (!name.includes("}:q:")) continue;
      const length = Number(this.#redis.peek(["XLEN", name]));
      if (length > 0) left.push(`${length} entries in ${name}`);
      const groups = this.#redis.peek(["XINFO", "GROUPS", name]) as (Buffer | number)[][];
      for (const [, , , , , pending] of groups)
        if (pending !== 0) left.push(`${String(pending)} pending in ${name}`);
    }
    return left;
  }

  /** Counts of waiting and running tasks that are not 0. */
  counts(): string[] {
    const found: string[] = [];
    for (const name of this.#redis.names()) {
      if (!name.endsWith("}:depth")) continue;
      const fields = (this.#redis.peek(["HGETALL", name]) as Buffer[]).map(String);
      for (let at = 0; at < fields.length; at += 2) {
        if (fields[at + 1] !== "0") found.push(`${fields[at]} ${fields[at + 1]}`);
      }
    }
    return found;
  }

  #ran(words: readonly string[], reply: Inner, by: string): void {
    const verb = words[0]!;
    const key = words[1] ?? "";
    if (key.includes("}:q:")) this.#stream(verb, key, words, reply);
    else if (key.includes("}:r:")) this.#bundle(verb, key, words, reply, by);
    else if (verb === "XREADGROUP" && reply !== null)
      this.#ledger.count("bundle read", (reply as Inner[]).length);
  }

  #stream(verb: string, key: string, words: readonly string[], reply: Inner): void {
    if (verb === "XADD" && typeof reply === "string") this.#added(`${key} ${reply}`, words.at(-1)!);
    else if (verb === "XACK" && reply !== 0)
      for (const id of words.slice(3)) this.#dropped(`${key} ${id}`, "acknowledged");
    else if (verb === "XDEL") {
      for (const id of words.slice(2)) {
        this.#dropped(`${key} ${id}`, "deleted");
        this.#forget(`${key} ${id}`);
      }
    } else if (verb === "XCLAIM" && Array.isArray(reply)) {
      for (const each of reply as (string | [string, Inner])[])
        this.#takenOver(`${key} ${typeof each === "string" ? each : each[0]}`, words[3]!);
    }
  }

  #added(entry: string, payload: string): void {
    const { tasks, mark } = readEntry(Buffer.from(payload, "latin1"));
    this.#entries.set(entry, { key: entry, tasks: tasks.map(({ id }) => id) });
    if (mark === "check") this.#ledger.count("bundle written again or handed back");
    if (tasks.length > 1) this.#ledger.count("bundle of several tasks");
    for (const { id, body } of tasks) {
      if (!this.#entriesOf.has(id)) this.#entriesOf.set(id, new Set());
      this.#entriesOf.get(id)!.add(entry);
      if (!this.#outcomes.has(id)) this.#open.add(id);
      const { meta, input } = readBody(body);
      this.#ledger.written(id, input, readMeta(meta, clock).task.parameters);
    }
    this.#mostOpen = Math.max(this.#mostOpen, this.#open.size);
  }

  #forget(entry: string): void {
    for (const id of this.#entries.get(entry)?.tasks ?? []) this.#entriesOf.get(id)?.delete(entry);
    this.#entries.delete(entry);
  }

  /** Nothing may be left to do for it, unless another entry holds what is left. */
  #dropped(entry: string, how: string): void {
    for (const id of this.#entries.get(entry)?.tasks ?? []) {
      const elsewhere = [...(this.#entriesOf.get(id) ?? [])].some((each) => each !== entry);
      const done = this.#outcomes.has(id) || elsewhere;
      this.#ledger.check(done, `${this.#ledger.name(id)} has not ended, and its entry was ${how}`);
    }
  }

  #takenOver(entry: string, by: string): void {
    const { tasks } = this.#entries.get(entry) ?? { tasks: [] };
    const ended = tasks.filter((id) => this.#outcomes.has(id));
    this.#ledger.count("bundle taken over");
    this.#ledger.say(by, `takes over ${tasks.map((id) => this.#ledger.name(id)).join(" ")}`);
    if (ended.length > 0 && ended.length < tasks.length) this.#ledger.count("half-settled bundle taken over");
    let known = this.#settledBefore.get(by);
    if (known === undefined) this.#settledBefore.set(by, (known = new Set()));
    for (const id of ended) known.add(id);
  }

  #bundle(verb: string, key: string, words: readonly string[], reply: Inner, by: string): void {
    const bundle = key.slice(key.indexOf("}:r:") + 4);
    if (verb === "HDEL") {
      for (const field of words.slice(2).filter((word) => FIELD.test(word)))
        this.#outcomes.delete(bundle + field);
      return;
    }
    if (verb !== "HSET" && (verb !== "HSETNX" || reply !== 1)) return;
    for (let at = 2; at + 1 < words.length; at += 2) {
      const [field, value] = [words[at]!, words[at + 1]!];
      if (!FIELD.test(field)) continue;
      // Where its owner deletes it, what is left of the outcome is written beside the mark.
      if (words.includes(`g${field}`)) this.#outcomes.set(bundle + field, value);
      else this.#outcome(key, bundle, field, value, by);
    }
  }

  /** Batchers under whose names entries of a task are pending. */
  #holders(id: string): string[] {
    return [...(this.#entriesOf.get(id) ?? [])].flatMap((entry) => {
      const [stream, entryId] = entry.split(" ") as [string, string];
      const rows = this.#redis.peek(["XPENDING", stream, GROUP, entryId, entryId, 1]) as Buffer[][];
      return rows.map(([, consumer]) => String(consumer));
    });
  }

  #outcome(key: string, bundle: string, field: string, value: string, by: string): void {
    const id = bundle + field;
    const ledger = this.#ledger;
    const before = this.#outcomes.get(id);
    ledger.check(before === undefined || before === value, `the outcome of ${ledger.name(id)} was replaced`);
    if (before !== undefined) return;
    this.#outcomes.set(id, value);
    this.#open.delete(id);
    const record = this.#reader.read(id, Buffer.from(value, "latin1"));
    const { outcome, attempt } = record;
    if (!outcome!.ok && this.#redis.script !== scripts.drop.sha) {
      const last = ledger.lastSender(id);
      const holders = this.#holders(id);
      const stale = last !== by && holders.includes(last ?? "") && !holders.includes(by);
      ledger.check(!stale, `${ledger.name(id)}: ${outcome!.code} from ${by}, and ${last} holds and runs it`);
    }
    const [state, own, owner] = this.#redis.peek([
      "HMGET",
      key,
      `s${field}`,
      `o${field}`,
      "o",
    ]) as (Buffer | null)[];
    const tried = state == null ? 0 : Number(String(state).split(" ", 1)[0]);
    // A good outcome may come from a batcher that no longer holds it.
    if (attempt > 0 && String(own ?? owner ?? by) === by) {
      ledger.check(
        attempt >= tried,
        `${ledger.name(id)} ended in attempt ${attempt}, and ${tried} were noted`,
      );
    }
    ledger.settled(record);
  }
}
