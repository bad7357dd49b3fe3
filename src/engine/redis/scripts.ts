/** The scripts of `lua/`: atomic operations on several keys of one shard. None runs for a new task. */
import { hash } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { Script } from "./client/nodes.ts";

function load(name: string): Script {
  const text = readFileSync(join(import.meta.dirname, "lua", `${name}.lua`), "utf8");
  const source = text.replace(/^\s*--.*\n/gm, "");
  return { name, source, sha: hash("sha1", source) };
}

export const scripts = {
  join: load("join"),
  leave: load("leave"),
  drop: load("drop"),
  renew: load("renew"),
  settle: load("settle"),
  bury: load("bury"),
  replay: load("replay"),
  swap: load("swap"),
  spend: load("spend"),
  retire: load("retire"),
} as const;

/**
 * A key that is never written. While a slot migrates, Redis runs a script only if every declared key is there, and
 * fails in the middle of one that touches a missing undeclared key. With this one declared it answers TRYAGAIN before
 * the script begins, as long as the slot migrates: no script is ever half done.
 */
export const NEVER_WRITTEN = "none";
