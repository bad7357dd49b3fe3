/**
 * The tests, for contributors and for CI:
 *
 *   npm test                       everything that must hold before a change lands
 *   npm run test:quick             without services: types, lint, unit tests, some seeds, the smoke tests
 *   npm run test:long              soak and long simulation
 *   npm test -- test/core/*.ts     these files alone
 *
 * Ends with what failed, the slowest files and the time. Exit code 0: all of it passed.
 */
import { spawn } from "node:child_process";
import { once } from "node:events";
import { availableParallelism } from "node:os";
import { join } from "node:path";
import { setUp } from "./setup.ts";
import { allFiles, inProcesses, longFiles, quickFiles } from "./runner/choose.ts";
import { endAll, type Result, runFiles } from "./runner/pool.ts";
import { cpuSeconds } from "./runner/reporter.ts";

const root = join(import.meta.dirname, "..");
const tools = join(root, "node_modules", ".bin");
const SLOWEST = 20;

/** Not `$PATH`'s Node for what the tests start; and what Node compiled once is not compiled by each of 300 processes. */
const env: NodeJS.ProcessEnv = {
  ...process.env,
  NODE_COMPILE_CACHE: process.env["NODE_COMPILE_CACHE"] ?? join(root, "node_modules", ".cache", "node"),
};

interface Failure {
  readonly what: string;
  readonly texts: readonly string[];
}

const failures: Failure[] = [];

/** A step that is one command; its output is shown as it comes. */
async function step(name: string, command: string, ...words: string[]): Promise<void> {
  const startedAt = performance.now();
  const child = spawn(command, words, { cwd: root, stdio: "inherit", env });
  const [status] = (await once(child, "exit")) as [number | null];
  const time = seconds((performance.now() - startedAt) / 1000);
  if (status === 0) console.error(`✔ ${name} ${time}`);
  else {
    console.error(`✖ ${name} ${time}`);
    failures.push({ what: name, texts: [`exit code ${status}; its output is above`] });
  }
}

async function check(): Promise<void> {
  await step("types", join(tools, "tsc"));
  await step("types of the page", join(tools, "tsc"), "-p", "tsconfig.page.json");
  await step("lint", join(tools, "oxlint"), "--type-aware", "--deny-warnings");
  await step("format", join(tools, "oxfmt"), "--check");
  // What does not compile would fail in a hundred files.
  if (failures.length > 0) finish([]);
}

async function test(processes: readonly (readonly string[])[]): Promise<Result[]> {
  // Most e2e tests wait more than they compute: with one process a core, half of the machine would be idle.
  const jobs = Number(process.env["FERRY_TEST_JOBS"] ?? 2 * availableParallelism());
  const done = ({ files, failures: texts, seconds: took, tests }: Result): void => {
    const sign = texts.length === 0 ? "✔" : "✖";
    const what = nameOf(files);
    console.error(`${sign} ${what} ${seconds(took)}, ${tests} tests`);
    if (texts.length > 0)
      console.error(texts[0]!.split("\n").slice(0, 3).join("\n").replaceAll(/^/gm, "    "));
    if (texts.length > 0) failures.push({ what, texts });
  };
  return runFiles({ root, processes, jobs, env, done });
}

function nameOf([first, ...others]: readonly string[]): string {
  return others.length === 0 ? first! : `${first} and ${others.length} more`;
}

function finish(results: readonly Result[]): never {
  const slowest = results.toSorted((one, other) => other.seconds - one.seconds).slice(0, SLOWEST);
  if (slowest.length > 1) console.error(`\nthe slowest ${slowest.length} of ${results.length} processes:`);
  for (const { files, seconds: took, cpuSeconds: cpu } of slowest)
    console.error(`${seconds(took).padStart(9)}, CPU ${seconds(cpu).padStart(7)}  ${nameOf(files)}`);
  for (const { what, texts } of failures) {
    console.error(`\n✖ ${what}`);
    for (const text of texts) console.error(text.replaceAll(/^/gm, "    "));
  }
  const tests = results.reduce((sum, result) => sum + result.tests, 0);
  const files = results.reduce((sum, result) => sum + result.files.length, 0);
  const total = `${tests} tests in ${files} files, ${seconds(performance.now() / 1000)}, CPU ${seconds(cpuSeconds())}`;
  if (failures.length === 0) console.error(`\n✔ all passed: ${total}`);
  else console.error(`\n✖ failed: ${failures.map(({ what }) => what).join(", ")}\n${total}`);
  process.exit(failures.length === 0 ? 0 : 1);
}

function seconds(count: number): string {
  return `${count.toFixed(1)} s`;
}

for (const signal of ["SIGINT", "SIGTERM"] as const) {
  process.once(signal, () => {
    endAll();
    process.exit(1);
  });
}

const [mode, ...more] = process.argv.slice(2);
switch (mode) {
  case undefined:
    setUp();
    await check();
    finish(await test(inProcesses(root, allFiles(root))));
    break;
  case "quick": {
    await check();
    const seeds = ["test/sim/simulate.ts", "--seeds", "200", "--brief"];
    // Beside the tests: it keeps one core busy.
    const played = step("200 seeds", process.execPath, ...seeds);
    const results = await test(inProcesses(root, quickFiles(root)));
    await played;
    finish(results);
    break;
  }
  case "long":
    setUp();
    env["FERRY_TEST_LONG"] = "1";
    await step("10,000 seeds", process.execPath, "test/sim/simulate.ts", "--seeds", "10000", "--brief");
    await step(
      "200,000 drop-in requests",
      process.execPath,
      "test/sim/simulate.ts",
      "--dropin",
      "--requests",
      "200000",
    );
    finish(await test(longFiles(root).map((file) => [file])));
    break;
  default:
    finish(await test([mode, ...more].map((file) => [file])));
}
