/**
 * `npm run simulate`: the whole system on virtual time, one fault schedule per seed.
 *
 * Seeds are dealt out to threads in small hands, so that all end together. The first failures are printed as they
 * come, each with the command that replays it.
 */
import { availableParallelism } from "node:os";
import { parseArgs } from "node:util";
import { deal } from "./deal.ts";
import { simulateDropIns } from "./dropin-many.ts";
import { describePlan } from "./describe.ts";
import { draw, TOPOLOGIES } from "./plan.ts";
import { replayCommand, type Sums, Totals } from "./totals.ts";
import { play } from "./world.ts";

const HELP = `npm run simulate -- --seeds 10000              # seeds 1 to 10,000
npm run simulate -- --seed 4544 --trace        # one seed alone, with its timeline
npm run simulate -- --dropin --requests 1000000

Plays gateways, batchers or a core, Redis and workers on virtual time under seeded faults, and checks after each seed that
nothing was lost, crossed, settled twice or answered too late. CONTRIBUTING.md says what it covers.

  --seeds N      how many seeds (2000)
  --from K       the first of them (1)
  --only KIND    of these seeds those that play one topology: one, cores or fleet (plan.ts)
  --seed S       this seed alone; where it fails, the end of its timeline is printed
  --trace        with --seed: the whole timeline
  --dropin       the drop-in protocols instead: arrays of inputs, clients that leave, workers that lie
  --requests N   with --dropin: how many requests (20000), 500 to a seed
  --threads N    how many at a time (one per core)
  --json         one object instead of the tables
  --brief        the last line instead of the tables

Exit code: 0 all well, 1 a seed failed, 2 called wrongly.
`;
const TAIL_LINES = 60;
const TELL_EVERY_MS = 1000;
const TELL_A_FILE_EVERY_MS = 10_000;

function options() {
  const { values } = parseArgs({
    options: {
      seeds: { type: "string", default: "2000" },
      from: { type: "string", default: "1" },
      only: { type: "string" },
      seed: { type: "string" },
      trace: { type: "boolean", default: false },
      dropin: { type: "boolean", default: false },
      requests: { type: "string", default: "20000" },
      threads: { type: "string", default: String(availableParallelism()) },
      json: { type: "boolean", default: false },
      brief: { type: "boolean", default: false },
      help: { type: "boolean", short: "h", default: false },
    },
  });
  const whole = (name: "seeds" | "from" | "seed" | "threads" | "requests"): number => {
    const number = Number(values[name]);
    if (!Number.isSafeInteger(number) || number < 1)
      throw new Error(`--${name} must be a whole number from 1`);
    return number;
  };
  const only = TOPOLOGIES.find((topology) => topology === values.only);
  if (values.only !== only) throw new Error(`--only must be one of ${TOPOLOGIES.join(", ")}`);
  return {
    ...values,
    only,
    seeds: whole("seeds"),
    requests: whole("requests"),
    from: whole("from"),
    threads: whole("threads"),
    seed: values.seed === undefined ? undefined : whole("seed"),
  };
}

/** One seed, for somebody who wants to know why. */
async function replay(seed: number, whole: boolean, json: boolean): Promise<number> {
  const trace: string[] = [];
  const run = await play(seed, trace);
  const { tasks, failure } = run;
  if (json) {
    const counts = Object.fromEntries(run.counts);
    const failed = failure === undefined ? null : failure.message;
    process.stdout.write(`${JSON.stringify({ seed, tasks, failed, counts, ...(whole && { trace }) })}\n`);
    return failure === undefined ? 0 : 1;
  }
  process.stdout.write(describePlan(seed));
  const lines = whole ? trace : failure === undefined ? [] : trace.slice(-TAIL_LINES);
  if (lines.length < trace.length && lines.length > 0) {
    process.stdout.write(`… ${trace.length - lines.length} lines before this: --trace shows them\n`);
  }
  for (const line of lines) process.stdout.write(`${line}\n`);
  if (failure === undefined) process.stdout.write(`✔ seed ${seed}: ${tasks} tasks, all well\n`);
  else process.stdout.write(`✖ seed ${seed}: ${failure.message}\n${failure.stack ?? ""}\n`);
  return failure === undefined ? 0 : 1;
}

/** Deals the seeds to threads and adds up what they say. */
async function playMany({ seeds: count, from, threads, only }: ReturnType<typeof options>): Promise<Totals> {
  const all = Array.from({ length: count }, (_, at) => from + at);
  const seeds = only === undefined ? all : all.filter((seed) => draw(seed).topology === only);
  const totals = new Totals();
  const progress = new Progress(seeds.length, totals);
  const add = (sums: Sums): number => {
    totals.merge(sums);
    for (const { seed, message } of sums.failed) {
      process.stderr.write(`\r✖ seed ${seed}: ${message}\n  ${replayCommand(seed)}\n`);
    }
    progress.tell();
    return totals.failed.length;
  };
  await deal({ thread: "thread.ts", seeds, threads, add });
  progress.tell(true);
  return totals;
}

class Progress {
  readonly #seeds: number;
  readonly #totals: Totals;
  readonly #startedAt = performance.now();
  readonly #everyMs = process.stderr.isTTY ? TELL_EVERY_MS : TELL_A_FILE_EVERY_MS;
  #toldAt = performance.now();

  constructor(seeds: number, totals: Totals) {
    this.#seeds = seeds;
    this.#totals = totals;
  }

  tell(last = false): void {
    const now = performance.now();
    if (!last && now - this.#toldAt < this.#everyMs) return;
    this.#toldAt = now;
    const { seeds, tasks, failed } = this.#totals;
    const perMs = seeds / Math.max(1, now - this.#startedAt);
    const left = last ? "" : `, ${Math.ceil((this.#seeds - seeds) / perMs / 1000)} s left`;
    const line = `${seeds} of ${this.#seeds} seeds, ${tasks} tasks, ${(1000 * perMs).toFixed(0)} a second${left}`;
    const wrong = failed.length === 0 ? "" : `, ${failed.length} failed`;
    process.stderr.write(process.stderr.isTTY && !last ? `\r${line}${wrong}  ` : `\r${line}${wrong}\n`);
  }
}

async function main(): Promise<number> {
  let asked: ReturnType<typeof options>;
  try {
    asked = options();
  } catch (error) {
    process.stderr.write(`simulate: ${(error as Error).message}; see --help\n`);
    return 2;
  }
  if (asked.help) {
    process.stdout.write(HELP);
    return 0;
  }
  if (asked.dropin) return simulateDropIns(asked);
  if (asked.seed !== undefined) return replay(asked.seed, asked.trace, asked.json);
  const startedAt = performance.now();
  const totals = await playMany(asked);
  const seconds = Math.round(performance.now() - startedAt) / 1000;
  const { seeds, tasks, failed, counts } = totals;
  if (asked.json) {
    const object = { seeds, from: asked.from, tasks, seconds, failed, counts: Object.fromEntries(counts) };
    process.stdout.write(`${JSON.stringify(object)}\n`);
  } else {
    if (!asked.brief) process.stdout.write(totals.toString());
    process.stdout.write(`${seeds} seeds, ${tasks} tasks, ${seconds} s: `);
    process.stdout.write(failed.length === 0 ? "0 lost, 0 crossed, all well\n" : `${failed.length} failed\n`);
    for (const { seed, message } of failed)
      process.stdout.write(`✖ seed ${seed}: ${message}\n  ${replayCommand(seed)}\n`);
  }
  return failed.length === 0 ? 0 : 1;
}

process.exitCode = await main();
