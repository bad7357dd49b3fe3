/**
 * How far a fleet scales: throughput, latency and CPU per task of each kind of process, case by case.
 *
 *   node bench/scaleout.ts                                  the cases for two cores, about two minutes
 *   node bench/scaleout.ts --cores 16 --out results.jsonl   those for sixteen, about four minutes
 *   node bench/scaleout.ts --only 'redis-*,10k' --runs 3    some of them, three times
 *   node bench/scaleout.ts --report a.jsonl b.jsonl         puts several files together: tables and chart
 *
 * Every case starts its own processes (cases.ts says which, measure.ts how they are loaded): 2 KB in and out, append-only file
 * on, no input sent twice, every answer checked against its request. With --runs all cases are run, then all of them
 * again, so that cases that are compared lie close together. Each result is a line of JSON, appended as soon as it is there: a
 * run that is cut short loses one case. The tables go to stdout, progress to stderr.
 *
 * Nothing is pinned. `taskset -c 0,1 node bench/scaleout.ts` gives a larger machine two cores.
 *
 * Exit code 1: a case failed to run. Missed goals only show in the table. 2: usage.
 */
import { appendFileSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, matchesGlob } from "node:path";
import { parseArgs } from "node:util";
import { killChildren } from "./process.ts";
import { environment, format } from "./report.ts";
import { cases, type ScaleCase } from "./scaleout/cases.ts";
import { scaleoutChart } from "./scaleout/chart.ts";
import { measureCase, type MeasureOptions, type ScaleResult } from "./scaleout/measure.ts";
import { markdown, parseResults } from "./scaleout/report.ts";

const resultsDir = join(import.meta.dirname, "results");

const usage = `node bench/scaleout.ts [--cores 2|16] [--only NAMES] [--runs N] [--out FILE] [options]
node bench/scaleout.ts --report FILE... [--svg FILE]

  --cores N        the set for a machine with that many cores: 2 (default) or 16
  --only NAMES     these cases of any set, with commas between them; * stands for anything
  --runs N         how often to run them all; default 1
  --out FILE       append a line of JSON for each result; default bench/results/scaleout-TIME.jsonl
  --seconds S      measure so long instead of the case's own time
  --warm S         the same for the warm-up
  --generators N   load generators for each gateway; default 1
  --commit ID      what to call the commit where there is no repository
  --report         print the tables of the files that are named, write the chart
  --svg FILE       where; default bench/results/scaleout.svg

cases for 2 cores:  ${namesOf(2)}
cases for 16 cores: ${namesOf(16)}
`;

function namesOf(cores: number): string {
  return cases
    .filter((one) => one.cores === cores)
    .map(({ name }) => name)
    .join(" ");
}

function parse(args: readonly string[]) {
  const { values, positionals } = parseArgs({
    args: [...args],
    allowPositionals: true,
    options: {
      cores: { type: "string", default: "2" },
      only: { type: "string" },
      runs: { type: "string", default: "1" },
      out: { type: "string" },
      seconds: { type: "string" },
      warm: { type: "string" },
      generators: { type: "string", default: "1" },
      commit: { type: "string" },
      report: { type: "boolean", default: false },
      svg: { type: "string", default: join(resultsDir, "scaleout.svg") },
      help: { type: "boolean", short: "h", default: false },
    },
  });
  if (values.report !== positionals.length > 0) throw new Error("files are what --report reads: name both");
  return {
    ...values,
    files: positionals,
    chosen: choose(values.only, Number(values.cores)),
    runs: positive("runs", values.runs),
    generators: positive("generators", values.generators),
    seconds: values.seconds === undefined ? undefined : positive("seconds", values.seconds),
    warmSeconds: values.warm === undefined ? undefined : positive("warm", values.warm),
  };
}

function choose(only: string | undefined, cores: number): readonly ScaleCase[] {
  const patterns = only?.split(",");
  const unknown = patterns?.filter((pattern) => !cases.some(({ name }) => matchesGlob(name, pattern)));
  if (unknown !== undefined && unknown.length > 0) throw new Error(`no case is named ${unknown.join(", ")}`);
  const chosen = cases.filter((one) =>
    patterns === undefined ? one.cores === cores : patterns.some((pattern) => matchesGlob(one.name, pattern)),
  );
  if (chosen.length === 0) throw new Error(`--cores ${cores}: there are sets for 2 and for 16`);
  return chosen;
}

function positive(name: string, text: string): number {
  const value = Number(text);
  if (!(value > 0)) throw new Error(`--${name} ${text}: must be a number above 0`);
  return value;
}

function report(files: readonly string[], svg: string): void {
  const results = parseResults(files.map((file) => readFileSync(file, "utf8")));
  process.stdout.write(markdown(results));
  mkdirSync(dirname(svg), { recursive: true });
  writeFileSync(svg, scaleoutChart(results));
  process.stderr.write(`wrote ${svg}\n`);
}

/** Whether every case ran. */
async function run(command: ReturnType<typeof parse>): Promise<boolean> {
  const env = environment(undefined, false);
  const machine = { ...env, commit: command.commit ?? env.commit };
  const { cpu, cores, memoryGb, kernel, node, commit } = machine;
  const dir = mkdtempSync(join(tmpdir(), "ferry-scaleout-"));
  cleanUpAtExit(dir);
  const options: MeasureOptions = {
    dir,
    machine: { cpu, cores, memoryGb, kernel, node, commit },
    generators: command.generators,
    seconds: command.seconds,
    warmSeconds: command.warmSeconds,
  };
  const out = command.out ?? join(resultsDir, `scaleout-${env.time.slice(0, 19).replaceAll(":", "-")}.jsonl`);
  mkdirSync(dirname(out), { recursive: true });
  const lines: string[] = [];
  let failed = 0;
  for (let turn = 1; turn <= command.runs; turn++) {
    for (const one of command.chosen) {
      const startedAt = performance.now();
      const say = (text: string): void => {
        const seconds = ((performance.now() - startedAt) / 1000).toFixed(1);
        process.stderr.write(`${one.name}, run ${turn} of ${command.runs}: ${text} (${seconds} s)\n`);
      };
      try {
        const result = await measureCase(one, options);
        lines.push(JSON.stringify(result));
        appendFileSync(out, `${lines.at(-1)}\n`);
        say(summary(result));
      } catch (error) {
        // One case that cannot run must not cost the others.
        failed += 1;
        say(`failed: ${error instanceof Error ? error.message : String(error)}`);
      }
    }
  }
  process.stdout.write(markdown(parseResults(lines)));
  process.stderr.write(`wrote ${out}\n`);
  return failed === 0;
}

function summary({ rate, latencyMs, errors, crossed }: ScaleResult): string {
  return `${format(rate, "req/s")}, p99 ${format(latencyMs.p99, "ms")}, ${errors} errors, ${crossed} crossed`;
}

function cleanUpAtExit(dir: string): void {
  const cleanUp = (): void => {
    killChildren();
    rmSync(dir, { recursive: true, force: true, maxRetries: 3 });
  };
  process.on("exit", cleanUp);
  for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"] as const) {
    process.once(signal, () => {
      cleanUp();
      process.kill(process.pid, signal);
    });
  }
}

let command: ReturnType<typeof parse>;
try {
  command = parse(process.argv.slice(2));
} catch (error) {
  process.stderr.write(`${error instanceof Error ? error.message : String(error)}\n\n${usage}`);
  process.exit(2);
}
if (command.help) process.stdout.write(usage);
else if (command.report) report(command.files, command.svg);
else process.exitCode = (await run(command)) ? 0 : 1;
