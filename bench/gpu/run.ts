/**
 * Ferry in front of a real GPU, measured in one run against what the card can do and what a plain server makes of it.
 *
 *   node bench/gpu/run.ts [--quick] [--python python3] [--out FOLDER] [graphs] [embed] [generate] [steady]
 *
 *   graphs     a bert-base shape, 128 tokens in, 768 float32 out, the GPU's work replayed (EMBED_GRAPHS)
 *   embed      the same, every kernel started from Python: most of a batch's time is the interpreter's
 *   generate   a gpt2-medium shape, 64 tokens in, 32 generated: batches of hundreds of milliseconds
 *   steady     450 ms for any batch, without a model: what is Ferry's own in the long regime
 *
 * Of each:
 *
 *   ceiling    the model's function in a loop on full batches, two on their way (offline.py)
 *   plain      the same function behind an HTTP server that makes one call per request (plain_server.py)
 *   saturated  Ferry, embedded engine, one Python worker, more callers than it can serve: closed loop
 *   early off  the same with `pipeline: 1`
 *   openai     the same through /v1/embeddings
 *   at 70 %    Ferry at 0.7 of what it did saturated: open loop, Poisson
 *
 * The load comes from processes of their own. Every answer is checked: its first numbers are sums over the tokens of its
 * request, added up on the GPU. Prints a table, and writes it as JSON and as two charts into FOLDER (bench/results).
 * Needs Python with PyTorch; where there is no GPU it runs on the CPU, which shows that it works and nothing else
 * (EMBED_SHAPE=tiny GENERATE_SHAPE=tiny). For a machine without Node: bench/kit.
 */
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, relative } from "node:path";
import { parseArgs } from "node:util";
import { chart } from "../chart.ts";
import { childPids, killChildren } from "../process.ts";
import { environment, render, type Section } from "../report.ts";
import { type Figure, figure, type Report } from "../scenario.ts";
import { throughputChart } from "./chart.ts";
import { offline, type Place, type Run, Server } from "./trials.ts";

const LOAD = 0.7;
const SIZE = 64;

interface Subject {
  readonly name: string;
  readonly model: "embed" | "generate";
  readonly tokens: number;
  readonly env: Readonly<Record<string, string>>;
  readonly sizes: readonly number[];
  /** In the closed loops. */
  readonly callers: number;
  readonly plainCallers: number;
  /** At 70 % load, in ms or in batches. */
  readonly p99: { readonly ms: number } | { readonly batches: number };
  readonly seconds: { readonly closed: number; readonly open: number };
  /** With `pipeline: 1` and through OpenAI's API as well. */
  readonly ways: boolean;
}

const embed: Subject = {
  name: "embed",
  model: "embed",
  tokens: 128,
  env: {},
  sizes: [1, 8, 32, 64, 96, 128],
  callers: 256,
  plainCallers: 16,
  p99: { ms: 25 },
  seconds: { closed: 10, open: 20 },
  ways: false,
};
const generate: Subject = {
  name: "generate",
  model: "generate",
  tokens: 64,
  env: {},
  sizes: [1, 16, 64],
  callers: 256,
  plainCallers: 8,
  p99: { batches: 2.1 },
  seconds: { closed: 12, open: 30 },
  ways: false,
};
const subjects: readonly Subject[] = [
  { ...embed, name: "graphs", env: { EMBED_GRAPHS: "1" }, ways: true },
  embed,
  generate,
  { ...generate, name: "steady", env: { GENERATE_STEADY_MS: "450" }, sizes: [64] },
];

async function study(subject: Subject, place: Place): Promise<Report> {
  const { seconds, callers, plainCallers } = subject;
  const card = await offline(subject, place);
  const full = card.curve.find(({ size }) => size === SIZE)!;
  const one = await alone(subject, place, plainCallers, seconds.closed / 2);
  const closed = { load: { kind: "closed", callers }, seconds: seconds.closed } as const;
  await using server = await Server.ferry(subject, place);
  const saturated = await server.under("Ferry, saturated", closed);
  const rate = LOAD * saturated.rate;
  const open = { load: { kind: "open", rate, arrivals: "poisson" }, seconds: seconds.open } as const;
  const loaded = await server.under(`Ferry at ${LOAD * 100} % load`, open);
  const runs = [saturated, loaded];
  const ways: Figure[] = [];
  if (subject.ways) {
    const openai = await server.under("Ferry, /v1/embeddings", { ...closed, shape: "openai" });
    await using other = await Server.ferry(subject, place, { pipeline: 1 });
    const late = await other.under("Ferry, pipeline: 1", closed);
    runs.push(late, openai);
    ways.push(
      figure("with pipeline: 1", late.rate, "req/s"),
      figure("  GPU had a batch", 100 * late.card.batches, "%"),
      figure("through /v1/embeddings", openai.rate, "req/s"),
    );
  }
  return {
    figures: [
      ...card.curve.map(({ size, ms }) => figure(`card, a batch of ${size}`, ms, "ms")),
      figure(`card, full batches of ${SIZE}`, full.per_second, "req/s"),
      figure("plain server, one call each", one.rate, "req/s"),
      figure("plain server, p50", one.latency.percentileMs(50), "ms"),
      figure("Ferry, saturated", saturated.rate, "req/s"),
      figure("  of the card's", saturated.rate / full.per_second, "ratio", ">=", 0.8),
      figure("  times the plain server's", saturated.rate / one.rate, "ratio", ">=", 30),
      busy(saturated),
      figure("  GPU ran kernels (nvidia-smi)", 100 * saturated.card.kernels, "%"),
      ...work(saturated),
      ...ways,
      figure(`Ferry at ${LOAD * 100} % of that`, loaded.rate, "req/s"),
      figure("  p50", loaded.latency.percentileMs(50), "ms"),
      "ms" in subject.p99
        ? figure("  p99", loaded.latency.percentileMs(99), "ms", "<=", subject.p99.ms)
        : figure("  p99", loaded.latency.percentileMs(99), "ms", "<=", subject.p99.batches * full.ms),
      figure("  GPU had a batch", 100 * loaded.card.batches, "%"),
      ...work(loaded),
      figure("answers crossed", sum([one, ...runs], "crossed"), "count", "<=", 0),
      figure("errors", sum([one, ...runs], "errors"), "count", "<=", 0),
    ],
    notes: [`${card.device}, PyTorch ${card.torch}`, ...[one, ...runs].flatMap((run) => run.notes)],
  };
}

async function alone(subject: Subject, place: Place, callers: number, seconds: number): Promise<Run> {
  await using server = await Server.plain(subject, place);
  return await server.under("a plain server", { load: { kind: "closed", callers }, seconds });
}

function work({ fill, serverCpu, workerCpu }: Run): Figure[] {
  return [
    figure("  mean batch", fill, "count"),
    figure("  Ferry CPU", 100 * serverCpu, "%"),
    figure("  Python CPU", 100 * workerCpu, "%"),
  ];
}

/** Without a GPU there is nothing to hold to the goal. */
function busy({ card: { batches } }: Run): Figure {
  return Number.isNaN(batches)
    ? figure("  GPU had a batch", NaN, "%")
    : figure("  GPU had a batch", 100 * batches, "%", ">=", 90);
}

function sum(runs: readonly Run[], name: "crossed" | "errors"): number {
  return runs.reduce((all, run) => all + run[name], 0);
}

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    quick: { type: "boolean", default: false },
    python: { type: "string", default: "python3" },
    out: { type: "string", default: join(import.meta.dirname, "../results") },
  },
});
const chosen = subjects.filter(({ name }) => positionals.length === 0 || positionals.includes(name));
const dir = mkdtempSync(join(tmpdir(), "ferry-gpu-"));
process.on("exit", killChildren);
const env = environment(undefined, values.quick);
const sections: Section[] = [];
try {
  for (const subject of chosen) {
    const tell = (text: string): void => void process.stderr.write(`${subject.name}: ${text}\n`);
    const place = { dir, python: values.python, quick: values.quick, tell };
    sections.push({ scenario: subject.name, report: await study(subject, place) });
    process.stderr.write(`${render(env, sections.slice(-1))}\n`);
  }
} finally {
  rmSync(dir, { recursive: true, force: true });
}
mkdirSync(values.out, { recursive: true });
const name = join(values.out, `gpu-${env.time.replaceAll(":", "-").slice(0, 19)}`);
writeFileSync(`${name}.json`, `${JSON.stringify({ environment: env, sections }, null, 2)}\n`);
writeFileSync(`${name}.svg`, throughputChart(env, sections));
writeFileSync(`${name}-goals.svg`, chart(env, sections));
process.stdout.write(`${render(env, sections)}\n`);
process.stderr.write(`wrote ${relative(process.cwd(), name)}.json, .svg and -goals.svg\n`);
if (childPids(process.pid).length > 0) killChildren();
