/**
 * The benchmark: named scenarios against a real Ferry on this machine, judged by their goals.
 *
 *   npm run bench                          all scenarios, about forty minutes
 *   npm run bench -- latency-idle 10k      some of them
 *   npm run bench -- --quick               a fifth of the time: to see that it works
 *   npm run bench -- --json out.json       the same figures for a script; --svg out.svg as a chart
 *
 * The table goes to stdout, progress to stderr. Figures and chart are also written to bench/results/, which git
 * ignores, under the time at which the run began. Exit code 0: every goal met; 1: one missed, or a
 * scenario failed; 2: usage. What the scenarios are and why is in bench/README.md.
 */
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, relative } from "node:path";
import { parseArgs } from "node:util";
import { chart } from "./chart.ts";
import { killChildren, pickCores } from "./process.ts";
import { environment, render, type Environment, type Section } from "./report.ts";
import { figure, isMet, type Bench, type Scenario } from "./scenario.ts";
import { auth } from "./scenarios/auth.ts";
import { embedded } from "./scenarios/embedded.ts";
import { embeddings } from "./scenarios/embeddings.ts";
import { floor } from "./scenarios/floor.ts";
import { halved } from "./scenarios/halved.ts";
import { held } from "./scenarios/held.ts";
import { latencyIdle } from "./scenarios/latency-idle.ts";
import { oip } from "./scenarios/oip.ts";
import { overload } from "./scenarios/overload.ts";
import { redisLatency } from "./scenarios/redis-latency.ts";
import { saturated } from "./scenarios/saturated.ts";
import { soak } from "./scenarios/soak.ts";
import { start } from "./scenarios/start.ts";
import { tenants } from "./scenarios/tenants.ts";
import { telemetry } from "./scenarios/telemetry.ts";
import { tenThousand } from "./scenarios/ten-thousand.ts";
import { tiers } from "./scenarios/tiers.ts";

const scenarios: readonly Scenario[] = [
  start,
  latencyIdle,
  saturated,
  floor,
  embedded,
  oip,
  auth,
  telemetry,
  tenThousand,
  held,
  overload,
  tiers,
  tenants,
  halved,
  embeddings,
  redisLatency,
  soak,
];

interface Command {
  readonly chosen: readonly Scenario[];
  readonly quick: boolean;
  readonly json: string | undefined;
  readonly svg: string | undefined;
}

function usage(): string {
  const list = scenarios.map(({ name, summary }) => `  ${name.padEnd(14)}${summary}`);
  return [
    "npm run bench -- [scenario…] [--quick] [--json FILE] [--svg FILE]",
    "",
    ...list,
    "",
    "  --quick       a fifth of the time and of the connections; not to be quoted",
    "  --json FILE   write environment, figures and notes as JSON; default bench/results/TIME.json",
    "  --svg FILE    write a chart: each figure against its goal; default bench/results/TIME.svg",
    "",
  ].join("\n");
}

function parse(args: readonly string[]): Command {
  const { values, positionals } = parseArgs({
    args: [...args],
    allowPositionals: true,
    options: {
      quick: { type: "boolean", default: false },
      json: { type: "string" },
      svg: { type: "string" },
      help: { type: "boolean", short: "h", default: false },
    },
  });
  if (values.help) {
    process.stdout.write(usage());
    process.exit(0);
  }
  const unknown = positionals.filter((name) => !scenarios.some((scenario) => scenario.name === name));
  if (unknown.length > 0) throw new Error(`unknown scenario ${unknown.join(", ")}`);
  const chosen = scenarios.filter(({ name }) => positionals.length === 0 || positionals.includes(name));
  return { chosen, quick: values.quick, json: values.json, svg: values.svg };
}

/** On a terminal one line that is written over; elsewhere a line each, but not more than one in 5 s. */
function progressOf(scenario: string): (text: string) => void {
  const tty = process.stderr.isTTY;
  let lastAt = -Infinity;
  return (text) => {
    if (!tty && performance.now() - lastAt < 5000) return;
    lastAt = performance.now();
    process.stderr.write(tty ? `\r\x1b[K${scenario}: ${text}` : `${scenario}: ${text}\n`);
  };
}

async function runScenario(scenario: Scenario, common: Omit<Bench, "progress">): Promise<Section> {
  const progress = progressOf(scenario.name);
  progress(scenario.summary);
  try {
    return { scenario: scenario.name, report: await scenario.run({ ...common, progress }) };
  } catch (error) {
    // One scenario that cannot run must not take the figures of the others with it.
    const notes = [`failed: ${error instanceof Error ? error.message : String(error)}`];
    return { scenario: scenario.name, report: { figures: [figure("failed", NaN, "count", "<=", 0)], notes } };
  } finally {
    if (process.stderr.isTTY) process.stderr.write("\r\x1b[K");
  }
}

const results = join(import.meta.dirname, "results");

function write({ json, svg }: Command, env: Environment, sections: readonly Section[]): void {
  const name = env.time.replaceAll(":", "-").replace(/\.\d+/, "");
  if (json === undefined || svg === undefined) mkdirSync(results, { recursive: true });
  const files = [json ?? join(results, `${name}.json`), svg ?? join(results, `${name}.svg`)] as const;
  writeFileSync(files[0], `${JSON.stringify({ environment: env, sections }, null, 2)}\n`);
  writeFileSync(files[1], chart(env, sections));
  process.stderr.write(`wrote ${files.map((file) => relative(process.cwd(), file)).join(" and ")}\n`);
}

async function main(command: Command): Promise<number> {
  const cores = pickCores();
  const env = environment(cores, command.quick);
  const dir = mkdtempSync(join(tmpdir(), "ferry-bench-"));
  process.on("exit", () => {
    killChildren();
    rmSync(dir, { recursive: true, force: true });
  });
  for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"] as const) {
    // Cleaned up, it dies by the same signal, so that a shell or a CI sees what happened.
    process.once(signal, () => {
      killChildren();
      rmSync(dir, { recursive: true, force: true });
      process.kill(process.pid, signal);
    });
  }
  const sections: Section[] = [];
  for (const scenario of command.chosen) {
    sections.push(await runScenario(scenario, { dir, quick: command.quick, cores }));
  }
  process.stdout.write(render(env, sections));
  write(command, env, sections);
  return sections.every(({ report }) => report.figures.every(isMet)) ? 0 : 1;
}

let command: Command;
try {
  command = parse(process.argv.slice(2));
} catch (error) {
  process.stderr.write(`${error instanceof Error ? error.message : String(error)}\n\n${usage()}`);
  process.exit(2);
}
process.exitCode = await main(command);
