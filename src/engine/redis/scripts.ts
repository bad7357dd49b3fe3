/** The scripts of `lua/`: acts over several keys of one shard that must be atomic. None is on the way in of a task. */
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
 * A key that is never written. While a slot moves to another node, Redis runs a script only if every key it declares is
 * there, and fails in the middle of one that touches another key which is not. With this one declared it answers TRYAGAIN
 * before the script begins, for as long as the slot moves: no script is ever half done.
 */
export const NEVER_WRITTEN = "none";
