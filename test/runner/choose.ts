/** Which test files a run takes, in which order, and which of them share a process. */
import { globSync, readFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";

/** What they start is not Node's own: a file that imports one of them needs a package of the system. */
const SERVICES: readonly string[] = [
  "test/deploy/promtool.ts",
  "test/e2e/chromium.ts",
  "test/e2e/nginx.ts",
  "test/e2e/prometheus.ts",
  "test/engine/redis-client/server.ts",
  "test/fixtures/certificates.ts",
  "test/observe/postgres/program.ts",
];

/** Too slow for a quick run, or of the whole system. */
const NOT_QUICK: readonly RegExp[] = [
  /^test\/(?:deploy|e2e|security|sim)\//,
  /^test\/cli\/plan\/plan\.test\.ts$/,
  /^test\/engine\/journal\.test\.ts$/,
  /^test\/gateway\/delivery\.test\.ts$/,
  // They start python3.
  /\/python[^/]*\.test\.ts$/,
  /^test\/workers\/backend\/(?:load|restart)\.test\.ts$/,
];

/** They take longest, so they begin first: a run takes at least as long as the last of its files. */
const SLOW: readonly string[] = [
  "test/e2e/redis-acl.test.ts",
  "test/e2e/processes.test.ts",
  "test/sim/faults.test.ts",
  "test/e2e/redis-outage.test.ts",
  "test/e2e/process-load.test.ts",
  "test/engine/redis.test.ts",
  "test/e2e/failure-retry.test.ts",
  "test/e2e/request-log.test.ts",
  "test/e2e/crash.test.ts",
  "test/e2e/redis-workers.test.ts",
  "test/e2e/rolling.test.ts",
  "test/engine/journal.test.ts",
  "test/e2e/dashboard-page.test.ts",
  "test/e2e/redis-crash.test.ts",
  "test/engine/memory.test.ts",
  "test/sim/overload.test.ts",
  "test/cli/plan/plan.test.ts",
  "test/e2e/admission.test.ts",
  "test/e2e/dashboard-trials.test.ts",
  "test/security/workers.test.ts",
  "test/e2e/blame.test.ts",
];

/**
 * Of the files that need no service, those of a folder share one process: most of their time is its start. They may
 * leave nothing behind that another one meets, and a hook outside of a suite would be one of all of them.
 */
const TOGETHER: readonly RegExp[] = [
  /^test\/core\//,
  /^test\/dispatch\//,
  /^test\/engine\//,
  /^test\/gateway\//,
  /^test\/(?:app|cli)\//,
  /^test\/workers\//,
  /^(?:test\/(?:contract|observe|repository|runner)|bench)\//,
];

/** Slow, or wait for processes that they start. */
const ALONE: readonly RegExp[] = [/^test\/cli\/serve/, /^test\/engine\/memory\.test\.ts$/];

const SMOKE = "test/e2e/smoke.test.ts";

export function allFiles(root: string): string[] {
  const files = globSync(["test/**/*.test.ts", "bench/**/*.test.ts"], { cwd: root }).sort();
  const rank = (file: string): number => (SLOW.includes(file) ? SLOW.indexOf(file) : SLOW.length);
  return files.sort((one, other) => rank(one) - rank(other));
}

/** Files that run wherever Node does, in seconds, and the smoke tests. */
export function quickFiles(root: string): string[] {
  const services = new Set(SERVICES);
  const needs = (file: string): boolean => importsAny(root, file, services, new Set());
  return allFiles(root).filter(
    (file) => file === SMOKE || (!NOT_QUICK.some((pattern) => pattern.test(file)) && !needs(file)),
  );
}

/** The files of each process, in the order of the first of them. */
export function inProcesses(root: string, files: readonly string[]): string[][] {
  const quick = new Set(quickFiles(root));
  const shared = new Map<RegExp, string[]>();
  const processes: string[][] = [];
  for (const file of files) {
    const folder = TOGETHER.find((pattern) => pattern.test(file));
    const alone = folder === undefined || !quick.has(file) || ALONE.some((pattern) => pattern.test(file));
    const others = alone ? undefined : shared.get(folder);
    if (others !== undefined) others.push(file);
    else {
      const first = [file];
      processes.push(first);
      if (!alone) shared.set(folder, first);
    }
  }
  return processes;
}

/** Files that play more when they are told to: see test/fixtures/long.ts. */
export function longFiles(root: string): string[] {
  const long = new Set(["test/fixtures/long.ts"]);
  return allFiles(root).filter((file) => importsAny(root, file, long, new Set()));
}

const IMPORT = /^(?:import|export)\s[^;]*?from\s+"(\.[^"]+)";|\bimport\("(\.[^"]+)"\)/gms;

/** Whether a file imports one of `wanted`, itself or by another file. */
function importsAny(root: string, file: string, wanted: ReadonlySet<string>, seen: Set<string>): boolean {
  if (wanted.has(file)) return true;
  if (seen.has(file) || !file.startsWith("test/")) return false;
  seen.add(file);
  return [...readFileSync(join(root, file), "utf8").matchAll(IMPORT)].some((found) => {
    const target = relative(root, join(root, dirname(file), (found[1] ?? found[2])!));
    return target.endsWith(".ts") && importsAny(root, target, wanted, seen);
  });
}
