/**
 * `mixed` and `chat` of bench/gpu: inputs of different length in front of a model that pads (mixed.py), composed by
 * length (`lengths: auto`, the default) and in order of arrival (`lengths: off`), against the best that any composition
 * could do: the same lengths sorted, in full batches, without a server (the bound).
 *
 * Each run has its own servers, which know nothing at first; `auto` must learn in the four seconds before the first
 * measurement what a batch costs. Both are up at the same time and loaded in turn, the other first in the next run.
 * Each is loaded as the other studies do it (round), then both with half the rate that `off` reaches saturated: there
 * grouping must cost nothing. After the last run, the highest rate of Poisson arrivals with p99 ≤ 60 ms, of each, by
 * bisection.
 *
 * That all did the same work shows in the tokens per input, which the worker counts: a server that left long inputs for
 * later would have fewer.
 *
 * Callers in the closed loop: some 8 % of `mixed` are padded to 512 tokens, so that 64 of those wait when 800 do; with the
 * two batches of 64 at the worker that is 928, rounded up to 1,024. With fewer the load limits what can be composed.
 */
import { format } from "../report.ts";
import { figure } from "../scenario.ts";
import { CLASSES } from "./requests.ts";
import {
  busy,
  eachProcess,
  type Findings,
  flawless,
  LOAD,
  type Loads,
  type Options,
  over,
  type Phases,
  round,
  shared,
  spread,
} from "./study.ts";
import { BATCH, type Bound, bound, type Model, type Place, type Run, Server } from "./trials.ts";

interface MixedSubject extends Model, Loads {
  readonly name: string;
}

/** Without a model batches take the H200's times, times this (mixed.py). */
const FACTOR = Number(process.env["EMBED_TABLE"] ?? 0) || 1;

const mixed: MixedSubject = {
  name: "mixed",
  model: "mixed",
  tokens: "mixed",
  env: {},
  sizes: [],
  // Ferry's default.
  waitMs: 50 * FACTOR,
  callers: 1024,
  seconds: { closed: 6, open: 6 },
};
export const mixedSubjects: readonly MixedSubject[] = [mixed, { ...mixed, name: "chat", tokens: "chat" }];

const LEAST_GAIN = 2.5;
const LEAST_OF_BOUND = 0.8;
/** In bfloat16 (on a CPU) it is 0.0002, and 0.14 without the mask. */
const MOST_DIFFERENCE = 0.01;

const GOAL_MS = 60 * FACTOR;
/** Shares of the saturated rate between which the highest rate is looked for, to 1/32 of their distance. */
const [LEAST_SHARE, MOST_SHARE] = [0.3, 1.1];
const STEPS = 5;
const PROBE = { warmMs: 1000, seconds: 3 } as const;
/** Of what `off` reaches saturated, for both. */
const LOW = 0.5;
/** Of each generator, open before it measures: enough for p99 at the highest rates. */
const CONNECTIONS = 128;

interface Arm extends Phases {
  readonly name: string;
  readonly settings: object;
  /** At a low rate, the same for both. */
  readonly low: Run[];
  readonly probes: Run[];
  /** Requests per second with p99 within the goal; NaN: none that was tried. */
  highest: number;
}

export async function studyMixed(
  subject: MixedSubject,
  { runs }: Options,
  place: Place,
  found: Findings,
): Promise<void> {
  const off = armOf("Ferry, lengths: off", { lengths: "off" });
  const auto = armOf("Ferry, lengths: auto", {});
  const bounds: Bound[] = [];
  for (let run = 0; run < runs; run++) {
    bounds.push(await bound(subject, place));
    const { sorted, in_order } = bounds[run]!;
    const inOrder = in_order.map((each) => `${each.size} in order ${inOneLine(each)}`);
    place.tell(`sorted ${inOneLine(sorted)}; ${inOrder.join("; ")}`);
    const arms = run % 2 === 0 ? [off, auto] : [auto, off];
    await using servers = new AsyncDisposableStack();
    const started = await Promise.all(
      arms.map(async ({ settings }) => servers.use(await Server.ferry(subject, place, settings))),
    );
    for (const [at, arm] of arms.entries()) {
      await round(started[at]!, arm.name, subject, arm, { connections: CONNECTIONS, seed: 1000 * run });
    }
    for (const [at, arm] of arms.entries()) {
      const rate = LOW * off.saturated.at(-1)!.rate;
      arm.low.push(await open(started[at]!, `${arm.name} at ${Math.round(rate)}/s`, rate, 1000 * run));
    }
    if (run === runs - 1) {
      for (const [at, arm] of arms.entries()) arm.highest = await highestRate(started[at]!, arm, place);
    }
    found.figures.length = 0;
    found.notes.length = 0;
    describe(found, subject, place, bounds, off, auto);
    found.save();
  }
}

function armOf(name: string, settings: object): Arm {
  return { name, settings, saturated: [], loaded: [], low: [], probes: [], highest: NaN };
}

async function open(server: Server, what: string, rate: number, seed: number): Promise<Run> {
  const load = { kind: "open", rate, arrivals: "poisson", connections: CONNECTIONS, seed } as const;
  return await server.under(what, { load, ...PROBE });
}

async function highestRate(
  server: Server,
  { name, saturated, probes }: Arm,
  { quick }: Place,
): Promise<number> {
  const { rate: most } = saturated.at(-1)!;
  let [passed, failed] = [LEAST_SHARE, MOST_SHARE];
  let highest = NaN;
  for (let step = 0; step < (quick ? 2 : STEPS); step++) {
    const share = (passed + failed) / 2;
    const run = await open(server, `${name} at ${(100 * share).toFixed(1)} %`, share * most, 1);
    probes.push(run);
    if (run.errors === 0 && run.latency.percentileMs(99) <= GOAL_MS) [passed, highest] = [share, run.rate];
    else failed = share;
  }
  return highest;
}

function describe(
  found: Findings,
  { callers, name }: MixedSubject,
  { processes }: Place,
  bounds: readonly Bound[],
  off: Arm,
  auto: Arm,
): void {
  const { device, torch, difference } = bounds[0]!;
  found.notes.push(
    `${device}, PyTorch ${torch}; Ferry with ${processes} processes`,
    `lengths of ${name}, the same in all runs; ${callers} callers in the closed loops; a new server for each run`,
  );
  found.figures.push(
    over(`card, sorted, full batches of ${BATCH}`, bounds, ({ sorted }) => sorted.per_second, "req/s"),
    over("  GPU had a batch", bounds, ({ sorted }) => 100 * (sorted.busy ?? NaN), "%"),
    over("  computed over useful cells", bounds, ({ sorted }) => sorted.padding, "ratio"),
    ...bounds[0]!.in_order.flatMap(({ size }, at) => [
      over(
        `card, in order of arrival, batches of ${size}`,
        bounds,
        (b) => b.in_order[at]!.per_second,
        "req/s",
      ),
      over("  computed over useful cells", bounds, (b) => b.in_order[at]!.padding, "ratio"),
    ]),
    over("tokens per input", bounds, ({ tokens }) => tokens, "count"),
    over("graphs recorded in", bounds, ({ recorded_s }) => recorded_s, "s"),
  );
  if (difference !== null)
    found.figures.push(
      figure(
        "a vector alone against in a batch, largest difference",
        difference,
        "ratio",
        "<=",
        MOST_DIFFERENCE,
      ),
    );
  for (const arm of [off, auto]) describeArm(found, arm);
  const pairs = auto.saturated.map((run, at) => ({
    gain: run.rate / off.saturated[at]!.rate,
    ofBound: run.rate / bounds[at]!.sorted.per_second,
    ofBlind: run.rate / Math.max(...bounds[at]!.in_order.map(({ per_second }) => per_second)),
  }));
  found.figures.push(
    over("grouped against lengths: off, saturated", pairs, ({ gain }) => gain, "ratio", ">=", LEAST_GAIN),
    over("  against the card in order of arrival, best size", pairs, ({ ofBlind }) => ofBlind, "ratio"),
    over("grouped of the card's, sorted", pairs, ({ ofBound }) => ofBound, "ratio", ">=", LEAST_OF_BOUND),
  );
  const rank = (of: number) => (run: Run) => run.latency.percentileMs(of);
  found.figures.push(
    over(`both at ${LOW * 100} % of lengths: off, saturated`, off.low, ({ rate }) => rate, "req/s"),
    over("  p50, lengths: off", off.low, rank(50), "ms"),
    over("  p50, grouped", auto.low, rank(50), "ms"),
    over("  p99, lengths: off", off.low, rank(99), "ms"),
    over("  p99, grouped", auto.low, rank(99), "ms"),
  );
  if (!Number.isNaN(off.highest + auto.highest)) {
    const tail = `highest rate with p99 ≤ ${format(GOAL_MS, "ms")}`;
    found.figures.push(
      figure(`${off.name}, ${tail}`, off.highest, "req/s"),
      figure(`${auto.name}, ${tail}`, auto.highest, "req/s"),
      figure("  grouped against lengths: off", auto.highest / off.highest, "ratio"),
    );
  }
  const all = [off, auto].flatMap(({ saturated, loaded, low }) => [...saturated, ...loaded, ...low]);
  // A probe above what the server can do has errors, but no answer of another request.
  const probes = [off, auto].flatMap((arm) => arm.probes.map((run) => ({ ...run, errors: 0 })));
  found.figures.push(...flawless([...all, ...probes]));
  found.notes.push(
    `sorted ${spread(bounds, ({ sorted }) => sorted.per_second, 0)} req/s; ` +
      `grouped against off ${spread(pairs, ({ gain }) => gain, 2)}; ` +
      `grouped of sorted ${spread(pairs, ({ ofBound }) => ofBound, 3)}; ` +
      `p99 at the same low rate ${spread(off.low, rank(99), 1)} off, ${spread(auto.low, rank(99), 1)} grouped`,
  );
}

function describeArm(found: Findings, { name, saturated, loaded }: Arm): void {
  found.figures.push(
    over(`${name}, saturated`, saturated, ({ rate }) => rate, "req/s"),
    ...shared(saturated),
    ...padding(saturated),
    over("  tokens per input", saturated, ({ card, rate }) => card.tokensPerSecond / rate, "count"),
    over(`${name} at ${LOAD * 100} % of that`, loaded, ({ rate }) => rate, "req/s"),
    ...shared(loaded),
    ...padding(loaded),
    ...CLASSES.flatMap(({ label }) => {
      const of = (rank: number) => (run: Run) => run.classes.get(label)?.percentileMs(rank) ?? NaN;
      return [over(`  p50, ${label}`, loaded, of(50), "ms"), over(`  p99, ${label}`, loaded, of(99), "ms")];
    }),
  );
  found.notes.push(
    `${name}: saturated ${spread(saturated, ({ rate }) => rate, 0)} req/s, ` +
      `GPU had a batch ${spread(saturated, busy, 1)} %; ` +
      `at ${LOAD * 100} % p99 ${spread(loaded, ({ latency }) => latency.percentileMs(99), 1)} ms`,
    `${name}: % of a core, saturated: ${eachProcess(saturated[0]!)}`,
    ...[...saturated, ...loaded].flatMap(({ notes }) => notes),
  );
}

/** The worker counts what was measured; the metric fades over a minute and does not know how the model rounds. */
function padding(runs: readonly Run[]): ReturnType<typeof over>[] {
  return [
    over("  computed over useful cells", runs, ({ card }) => card.padding, "ratio"),
    over("  ferry_padding_ratio", runs, ({ paddingRatio }) => paddingRatio, "ratio"),
  ].filter(({ value }) => !Number.isNaN(value));
}

function inOneLine({ per_second, ms, padding: cells }: Bound["sorted"]): string {
  return `${format(per_second, "req/s")}, ${ms.toFixed(2)} ms a batch, computed over useful ${cells.toFixed(2)}`;
}
