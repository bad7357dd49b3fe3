/**
 * `npm test`: everything that must hold before a change lands.
 *
 *   1. what the tests need beside Node is there, or is installed (test/setup.ts)
 *   2. types, lint, format
 *   3. the tests, one process per file
 *
 * `npm test -- test/core/*.test.ts` runs only those files, without the first two steps.
 */
import { spawnSync } from "node:child_process";
import { globSync } from "node:fs";
import { join } from "node:path";
import { setUp } from "./setup.ts";

const root = join(import.meta.dirname, "..");
const tools = join(root, "node_modules", ".bin");

function run(name: string, command: string, ...words: string[]): void {
  const startedAt = performance.now();
  const { status, error } = spawnSync(command, words, { cwd: root, stdio: "inherit" });
  const seconds = ((performance.now() - startedAt) / 1000).toFixed(1);
  if (status !== 0) {
    console.error(`✖ ${name} failed after ${seconds} s${error === undefined ? "" : `: ${error.message}`}`);
    process.exit(status ?? 1);
  }
  console.error(`✔ ${name} (${seconds} s)`);
}

const chosen = process.argv.slice(2);
if (chosen.length === 0) {
  setUp();
  run("types", join(tools, "tsc"));
  run("types of the page", join(tools, "tsc"), "-p", "tsconfig.page.json");
  run("lint", join(tools, "oxlint"), "--type-aware", "--deny-warnings");
  run("format", join(tools, "oxfmt"), "--check");
}
const files =
  chosen.length > 0 ? chosen : globSync(["test/**/*.test.ts", "bench/**/*.test.ts"], { cwd: root }).sort();
run("tests", process.execPath, "--test", "--test-concurrency=2", ...files);
