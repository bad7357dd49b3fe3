/**
 * Ferry in front of a real GPU, measured in one run against what the card can do and what other servers make of it.
 *
 *   node bench/gpu/run.ts [--runs N] [--peers] [--processes N] [--quick] [--python python3] [--out FOLDER]
 *                         [graphs] [embed] [generate] [steady] [mixed] [chat]
 *
 *   graphs     a bert-base shape, 128 tokens in, 768 float32 out, the GPU's work replayed (EMBED_GRAPHS)
 *   embed      the same, every kernel started from Python: most of a batch's time is the interpreter's
 *   generate   a gpt2-medium shape, 64 tokens in, 32 generated: batches of hundreds of milliseconds
 *   steady     450 ms for any batch, without a model: what is Ferry's own in the long regime
 *   mixed, chat  inputs of different length, only where they are named (mixed.ts)
 *
 * Of each of the first four:
 *
 *   card       the model's function in a loop on full batches, two on their way (offline.py)
 *   plain      the same function behind an HTTP server that makes one call per request (plain_server.py)
 *   Ferry      memory engine, one Python worker, `inputs: int32`; of graphs through /v1/embeddings as well
 *   peers      with --peers, of graphs: Mosec and LitServe, each with the fastest of the settings in peers.ts
 *
 * Ferry and the peers are measured --runs times (1), each time saturated (closed loop, more callers than can be served)
 * and at 0.7 of what that gave (open loop, Poisson). A figure is the median of the runs; the notes have all of them.
 * --processes: of `ferry serve`; default: a few where there are cores for them.
 *
 * The load comes from processes of their own. Every answer is checked: its first numbers are sums over the tokens of its
 * request, added up on the GPU. Prints each run as it comes, then a table, and writes that as JSON, after each part, and
 * as two charts into FOLDER ($OUT, or bench/results); ends with 1 if an answer was another request's, or none could be
 * checked. `--runs 3 --peers graphs` takes some seven minutes.
 * Needs Python with PyTorch; where there is no GPU it runs on the CPU, which shows that it works and nothing else
 * (EMBED_SHAPE=tiny GENERATE_SHAPE=tiny). `EMBED_TABLE=10 … mixed` needs no PyTorch either (mixed.py). For a machine without Node: bench/kit.
 */
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { availableParallelism, tmpdir } from "node:os";
import { join, relative } from "node:path";
import { parseArgs } from "node:util";
import { chart } from "../chart.ts";
import { childPids, killChildren } from "../process.ts";
import { environment, format, render, type Section } from "../report.ts";
import { figure, isMet } from "../scenario.ts";
import { throughputChart } from "./chart.ts";
import { installedPeers, type Peer, PEERS, type PeerSettings } from "./peers.ts";
import { mixedSubjects, studyMixed } from "./mixed.ts";
import {
  busy,
  CROSSED,
  eachProcess,
  type Findings,
  flawless,
  kernels,
  LOAD,
  type Loads,
  type Options,
  over,
  type Phases,
  round,
  shared,
  spread,
} from "./study.ts";
import { BATCH, type Curve, type Model, offline, type Place, type Run, Server } from "./trials.ts";

/** A peer's settings are compared by so much of a closed loop. */
const PROBE_SECONDS = 3;

interface Goals {
  readonly ofCard: number;
  readonly busy: number;
  /** At 70 % load, in ms or in batches. */
  readonly p99: { readonly ms: number } | { readonly batches: number };
}

interface Subject extends Model, Loads {
  readonly name: string;
  readonly plainCallers: number;
  readonly goals: Goals;
  /** Through OpenAI's API as well, and behind the peers. */
  readonly ways: boolean;
}

const embed: Subject = {
  name: "embed",
  model: "embed",
  tokens: 128,
  env: {},
  sizes: [1, 8, 32, 64, 96, 128],
  waitMs: 5,
  callers: 256,
  plainCallers: 16,
  seconds: { closed: 6, open: 8 },
  goals: { ofCard: 0.8, busy: 90, p99: { ms: 25 } },
  ways: false,
};
const generate: Subject = {
  name: "generate",
  model: "generate",
  tokens: 64,
  env: {},
  sizes: [1, 16, 64],
  waitMs: 50,
  callers: 256,
  plainCallers: 8,
  seconds: { closed: 12, open: 30 },
  goals: { ofCard: 0.8, busy: 90, p99: { batches: 2.1 } },
  ways: false,
};
const subjects: readonly Subject[] = [
  {
    ...embed,
    name: "graphs",
    env: { EMBED_GRAPHS: "1" },
    goals: { ofCard: 0.97, busy: 97, p99: { ms: 15 } },
    ways: true,
  },
  embed,
  generate,
  { ...generate, name: "steady", env: { GENERATE_STEADY_MS: "450" }, sizes: [64] },
];
/** Of the card's, through /v1/embeddings. */
const OPENAI_OF_CARD = 0.95;

async function study(subject: Subject, options: Options, place: Place, found: Findings): Promise<void> {
  const card = await offline(subject, place);
  const full = card.curve.find(({ size }) => size === BATCH)!;
  found.notes.push(`${card.device}, PyTorch ${card.torch}; Ferry with ${place.processes} processes`);
  found.figures.push(
    ...card.curve.map(({ size, ms }) => figure(`card, a batch of ${size}`, ms, "ms")),
    figure(`card, full batches of ${BATCH}`, full.per_second, "req/s"),
  );
  const one = await alone(subject, place);
  found.figures.push(
    figure("plain server, one call each", one.rate, "req/s"),
    figure("plain server, p50", one.latency.percentileMs(50), "ms"),
  );
  found.notes.push(...one.notes);
  found.save();
  const all = [one, ...(await ferry(subject, place, options, full, found))];
  if (subject.ways && options.peers !== undefined) {
    for (const peer of PEERS) all.push(...(await behind(peer, subject, place, options, full, found)));
  }
  found.figures.push(...flawless(all));
  found.save();
}

async function alone(subject: Subject, place: Place): Promise<Run> {
  await using server = await Server.plain(subject, place);
  const load = { kind: "closed", callers: subject.plainCallers } as const;
  return await server.under("a plain server", { load, seconds: subject.seconds.closed / 2 });
}

type Full = Curve["curve"][number];

async function ferry(
  subject: Subject,
  place: Place,
  { runs }: Options,
  full: Full,
  found: Findings,
): Promise<readonly Run[]> {
  await using server = await Server.ferry(subject, place);
  const native: Phases = { saturated: [], loaded: [] };
  const openai: Phases = { saturated: [], loaded: [] };
  for (let run = 0; run < runs; run++) {
    await round(server, "Ferry", subject, native);
    if (subject.ways) await round(server, "Ferry, /v1/embeddings", subject, openai, { shape: "openai" });
  }
  add(found, "Ferry", native, full, subject.goals);
  if (subject.ways)
    add(found, "Ferry, /v1/embeddings", openai, full, { ...subject.goals, ofCard: OPENAI_OF_CARD });
  found.save();
  return [native, openai].flatMap(({ saturated, loaded }) => [...saturated, ...loaded]);
}

async function behind(
  peer: Peer,
  subject: Subject,
  place: Place,
  { runs, peers }: Options,
  full: Full,
  found: Findings,
): Promise<readonly Run[]> {
  const { settings, probes } = await fastest(peer, subject, place);
  const told = `${peer.name} ${peers!.get(peer.package)}`;
  found.notes.push(
    `${told}: ${JSON.stringify(settings)}, the fastest of ${probes
      .map(([each, rate]) => `${JSON.stringify(each)} (${format(rate, "req/s")})`)
      .join(", ")}`,
  );
  await using server = await Server.peer(peer, settings, subject, place);
  const phases: Phases = { saturated: [], loaded: [] };
  for (let run = 0; run < runs; run++) await round(server, peer.name, subject, phases);
  add(found, peer.name, phases, full);
  found.save();
  return [...phases.saturated, ...phases.loaded];
}

async function fastest(
  peer: Peer,
  subject: Subject,
  place: Place,
): Promise<{ settings: PeerSettings; probes: readonly (readonly [PeerSettings, number])[] }> {
  const probes: [PeerSettings, number][] = [];
  const load = { kind: "closed", callers: subject.callers } as const;
  for (const each of peer.settings) {
    const settings = { batch: BATCH, wait_ms: subject.waitMs, ...each };
    await using server = await Server.peer(peer, settings, subject, place);
    const name = `${peer.name} ${JSON.stringify(settings)}`;
    probes.push([settings, (await server.under(name, { load, seconds: PROBE_SECONDS })).rate]);
  }
  const [settings] = probes.reduce((best, each) => (each[1] > best[1] ? each : best));
  return { settings, probes };
}

function add(found: Findings, name: string, { saturated, loaded }: Phases, full: Full, goals?: Goals): void {
  const p99 = goals && ("ms" in goals.p99 ? goals.p99.ms : goals.p99.batches * full.ms);
  found.figures.push(
    over(`${name}, saturated`, saturated, ({ rate }) => rate, "req/s"),
    over("  of the card's", saturated, ({ rate }) => rate / full.per_second, "ratio", ">=", goals?.ofCard),
    ...shared(saturated, goals?.busy),
    over(`${name} at ${LOAD * 100} % of that`, loaded, ({ rate }) => rate, "req/s"),
    ...shared(loaded, undefined, p99),
  );
  found.notes.push(
    `${name}: saturated ${spread(saturated, ({ rate }) => rate, 0)} req/s, ` +
      `${spread(saturated, ({ rate }) => rate / full.per_second, 3)} of the card's, ` +
      `GPU had a batch ${spread(saturated, busy, 1)} %, ran kernels ${spread(saturated, kernels, 0)} %; ` +
      `at ${LOAD * 100} % p99 ${spread(loaded, ({ latency }) => latency.percentileMs(99), 1)} ms`,
    `${name}: % of a core, saturated: ${eachProcess(saturated[0]!)}`,
    ...[...saturated, ...loaded].flatMap(({ notes }) => notes),
  );
}

/** Leaves cores for the worker, the card's driver and the load. */
function fittingProcesses(): number {
  return Math.max(1, Math.min(4, Math.floor((availableParallelism() - 4) / 2)));
}

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    quick: { type: "boolean", default: false },
    peers: { type: "boolean", default: false },
    runs: { type: "string", default: "1" },
    processes: { type: "string", default: String(fittingProcesses()) },
    python: { type: "string", default: "python3" },
    out: { type: "string", default: process.env["OUT"] ?? join(import.meta.dirname, "../results") },
  },
});
type Study = (place: Place, found: Findings) => Promise<void>;
const studies: readonly (readonly [name: string, Study])[] = [
  ...subjects.map((each) => [each.name, (...of: Parameters<Study>) => study(each, options, ...of)] as const),
  ...mixedSubjects.map(
    (each) => [each.name, (...of: Parameters<Study>) => studyMixed(each, options, ...of)] as const,
  ),
];
const names = positionals.length === 0 ? subjects.map(({ name }) => name) : positionals;
const chosen = studies.filter(([name]) => names.includes(name));
const installed = values.peers ? installedPeers(values.python) : undefined;
if (typeof installed === "string") {
  process.stderr.write(`${installed}\n`);
  process.exit(2);
}
const options: Options = { runs: Number(values.runs), peers: installed?.versions };
const dir = mkdtempSync(join(tmpdir(), "ferry-gpu-"));
process.on("exit", killChildren);
const env = environment(undefined, values.quick);
const sections: Section[] = [];
mkdirSync(values.out, { recursive: true });
const name = join(values.out, `gpu-${env.time.replaceAll(":", "-").slice(0, 19)}`);
const save = (): void =>
  writeFileSync(`${name}.json`, `${JSON.stringify({ environment: env, sections }, null, 2)}\n`);
try {
  for (const [scenario, begin] of chosen) {
    const startedAt = performance.now();
    const tell = (text: string): void => {
      const seconds = Math.round((performance.now() - startedAt) / 1000);
      process.stderr.write(`${scenario} ${String(seconds).padStart(4)} s  ${text}\n`);
    };
    const { quick, python } = values;
    const place = { dir, python, quick, processes: Number(values.processes), tell };
    const report = { figures: [], notes: [] };
    sections.push({ scenario, report });
    await begin(place, { ...report, save });
    if (chosen.length > 1) process.stderr.write(`${render(env, sections.slice(-1))}\n`);
  }
} finally {
  rmSync(dir, { recursive: true, force: true });
}
writeFileSync(`${name}.svg`, throughputChart(env, sections));
writeFileSync(`${name}-goals.svg`, chart(env, sections));
process.stdout.write(`${render(env, sections)}\n`);
process.stderr.write(`wrote ${relative(process.cwd(), name)}.json, .svg and -goals.svg\n`);
const crossed = sections.flatMap(({ report }) => report.figures).filter(({ name: of }) => of === CROSSED);
if (!crossed.every(isMet)) process.exitCode = 1;
if (childPids(process.pid).length > 0) killChildren();
