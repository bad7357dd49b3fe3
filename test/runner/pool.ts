/**
 * Runs test files, in a process each or some together, some processes at a time, and collects what became of them.
 *
 * A process writes its results through `reporter.ts`; its output is kept and shown only when it failed. It fails when
 * a test of it fails or is skipped, when it has none, when it ends with another code than 0, and when it takes longer
 * than `LIMIT_MS`.
 */
import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { stripVTControlCharacters } from "node:util";
import type { CpuLine, TestLine } from "./reporter.ts";

export interface Result {
  readonly files: readonly string[];
  readonly seconds: number;
  /** Of its process and the children that it waited for. */
  readonly cpuSeconds: number;
  readonly tests: number;
  readonly failures: readonly string[];
}

export interface PoolOptions {
  readonly root: string;
  /** The files of each. */
  readonly processes: readonly (readonly string[])[];
  /** How many run at a time. */
  readonly jobs: number;
  readonly env: NodeJS.ProcessEnv;
  readonly done: (result: Result) => void;
}

/** Far beyond the slowest file on a busy machine: what takes longer hangs. */
const LIMIT_MS = 400_000;
/** Of the output of a failed file, from its end. */
const OUTPUT_LIMIT = 6000;

const running = new Set<ChildProcess>();

/** Ends the files that run, for a runner that is interrupted. */
export function endAll(): void {
  for (const child of running) endGroup(child);
}

function endGroup({ pid }: ChildProcess): void {
  try {
    if (pid !== undefined) process.kill(-pid, "SIGKILL");
  } catch {
    // It has ended by itself.
  }
}

const REPORTER = join(import.meta.dirname, "reporter.ts");

export async function runFiles({ root, processes, jobs, env, done }: PoolOptions): Promise<Result[]> {
  const folder = mkdtempSync(join(tmpdir(), "ferry-tests-"));
  const queue = processes.entries();
  const results: Result[] = [];
  const work = async (): Promise<void> => {
    for (const [number, files] of queue) {
      const result = await runProcess(root, files, join(folder, String(number)), env);
      results.push(result);
      done(result);
    }
  };
  try {
    await Promise.all(Array.from({ length: jobs }, work));
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
  return results;
}

async function runProcess(
  root: string,
  files: readonly string[],
  report: string,
  env: NodeJS.ProcessEnv,
): Promise<Result> {
  const startedAt = performance.now();
  const together = files.length > 1 ? ["--test", "--test-isolation=none"] : [];
  const child = spawn(
    process.execPath,
    [...together, `--test-reporter=${REPORTER}`, `--test-reporter-destination=${report}`, ...files],
    {
      cwd: root,
      stdio: ["ignore", "pipe", "pipe"],
      // Its own process group, so that a file that hangs ends with the processes that it started.
      detached: true,
      env: { ...env, FERRY_TEST_CPU_FILE: `${report}.cpu` },
    },
  );
  let output = "";
  for (const stream of [child.stdout, child.stderr]) {
    stream.setEncoding("utf8").on("data", (text: string) => {
      output = (output + text).slice(-OUTPUT_LIMIT);
    });
  }
  running.add(child);
  const late = AbortSignal.timeout(LIMIT_MS);
  const end = (): void => endGroup(child);
  late.addEventListener("abort", end);
  const [code, signal] = (await once(child, "exit")) as [number | null, NodeJS.Signals | null];
  late.removeEventListener("abort", end);
  running.delete(child);
  // A process that the file left behind may hold the pipes open.
  child.stdout.destroy();
  child.stderr.destroy();

  const lines = readLines<TestLine>(report);
  const failures = lines
    .filter(({ kind }) => kind !== "pass")
    .map(({ name, at, error }) => {
      const where = at.replace(`${root}/`, "");
      return `${name} (${where})\n${error ?? "skipped: a test that cannot run here must fail and say why"}`;
    });
  if (late.aborted) failures.push(`did not end within ${LIMIT_MS / 1000} s`);
  else if (code !== 0 && failures.length === 0) failures.push(`ended with ${signal ?? `exit code ${code}`}`);
  else if (lines.length === 0) failures.push("has no tests");
  const said = stripVTControlCharacters(output).trim();
  if (failures.length > 0 && said !== "") failures.push(`its output ends with:\n${said}`);
  return {
    files,
    seconds: (performance.now() - startedAt) / 1000,
    cpuSeconds: readLines<CpuLine>(`${report}.cpu`).at(-1)?.seconds ?? 0,
    tests: lines.length,
    failures,
  };
}

/** None where the process did not get to write them; a last line that is cut off is left out. */
function readLines<Line>(path: string): Line[] {
  let text = "";
  try {
    text = readFileSync(path, "utf8");
  } catch {
    // Its process ended before it reported anything; the exit code says so.
  }
  const whole = text.slice(0, text.lastIndexOf("\n") + 1);
  return whole
    .split("\n")
    .filter(Boolean)
    .map((line) => JSON.parse(line) as Line);
}
