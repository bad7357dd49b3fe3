/**
 * The scripts of `lua/`, and how they are called.
 *
 * Each is a function of its arguments and of what Redis holds. All begin with the same arguments: the instant
 * on the shared clock, then who calls. Which shards a call touches is an argument too: on one server a single
 * call may span all of them, on a Cluster each call keeps to one.
 */
import { hash } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { RedisKeys } from "./redis-keys.ts";
import type { Arg, Script, ScriptCall } from "../redis/nodes.ts";

const folder = join(import.meta.dirname, "lua");

function load(name: string): Script {
  const [flags, ...lines] = readFileSync(join(folder, `${name}.lua`), "utf8").split("\n");
  const common = readFileSync(join(folder, "common.lua"), "utf8");
  const source = `${flags!}\n${withoutComments(common)}\n${withoutComments(lines.join("\n"))}`;
  return { name, source, sha: hash("sha1", source) };
}

function withoutComments(lua: string): string {
  return lua.replace(/^\s*--.*\n/gm, "");
}

export const scripts = {
  put: load("put"),
  drop: load("drop"),
  claim: load("claim"),
  settle: load("settle"),
  extend: load("extend"),
  reap: load("reap"),
  cancel: load("cancel"),
  join: load("join"),
  replay: load("replay"),
  purge: load("purge"),
  look: load("look"),
  tend: load("tend"),
  spend: load("spend"),
  bind: load("bind"),
  unbind: load("unbind"),
} as const;

/** Keys that every script may touch in its shard; the rest depend on the tasks. */
const FIXED = ["s", "due", "w", "qs", "n", "d", "dz"] as const;
/**
 * A key that is never written. While a slot moves to another node, Redis runs a script only if every key it declares is
 * there, and fails in the middle of one that touches another key which is not. With this one declared it answers TRYAGAIN
 * before the script begins, for as long as the slot moves: no script is ever half done.
 */
const NEVER_WRITTEN = "none";

/** A call over shards: its first arguments, then which shards, then what belongs to tasks. */
export class CallBuilder {
  readonly #keys: RedisKeys;
  readonly #script: Script;
  readonly #head: Arg[];
  /** On a Cluster all keys are named, so that a slot that is moving answers before the script begins. */
  readonly #cluster: boolean;
  readonly #places = new Map<number, number>();
  readonly #named: string[] = [];
  readonly #tail: Arg[] = [];
  readonly #before: Arg[][] = [];

  constructor(script: Script, head: Arg[], keys: RedisKeys, cluster: boolean) {
    this.#script = script;
    this.#head = head;
    this.#keys = keys;
    this.#cluster = cluster;
  }

  /** Plays the call at another instant than the one it was made at, on the shared clock. */
  at(instant: string): this {
    this.#head[0] = instant;
    return this;
  }

  /** Further first arguments. */
  head(...args: Arg[]): this {
    this.#head.push(...args);
    return this;
  }

  /** The place of a shard in this call. */
  place(shard: number): number {
    let place = this.#places.get(shard);
    if (place === undefined) this.#places.set(shard, (place = this.#places.size + 1));
    return place;
  }

  add(...args: Arg[]): this {
    this.#tail.push(...args);
    return this;
  }

  /** A plain command that goes right before the script. */
  before(...command: Arg[]): this {
    this.#before.push(command);
    return this;
  }

  /** Names a key of `shard` that this call may make or read. */
  names(shard: number, ...keys: string[]): this {
    if (this.#cluster) for (const key of keys) this.#named.push(this.#keys.bases[shard]! + key);
    return this;
  }

  get shard(): number {
    return this.#places.keys().next().value ?? 0;
  }

  build(): ScriptCall {
    const { bases } = this.#keys;
    const shards: Arg[] = [this.#places.size];
    const keys: string[] = [];
    for (const shard of this.#places.keys()) {
      shards.push(bases[shard]!, shard);
      if (this.#cluster) for (const name of [...FIXED, NEVER_WRITTEN]) keys.push(bases[shard]! + name);
      else if (keys.length === 0) keys.push(`${bases[shard]!}s`);
    }
    keys.push(...this.#named);
    const args = [...this.#head, ...shards, ...this.#tail];
    return { script: this.#script, keys, args, before: this.#before };
  }
}
