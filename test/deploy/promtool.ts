/** Runs promtool, which comes with Prometheus, and what it said. */
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";

export interface Said {
  readonly status: number | null;
  readonly text: string;
}

export function promtool(words: readonly string[], cwd: string, input = ""): Said {
  const ran = spawnSync("promtool", words, { cwd, input, encoding: "utf8", timeout: 60_000 });
  assert.equal(ran.error, undefined, "promtool is needed: apt-get install prometheus");
  return { status: ran.status, text: ran.stdout + ran.stderr };
}
