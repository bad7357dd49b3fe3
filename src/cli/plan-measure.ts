/** `ferry plan --measure URL`: times a worker's batches, prints the knee and YAML; plans with --rate and --slo. */
import { HttpBackend } from "../workers/backend/http.ts";
import { plural } from "./terminal/banner.ts";
import { SystemClock } from "../app/clock.ts";
import { type Throughput, whatItBuys } from "../core/knee.ts";
import {
  type Fit,
  type ServiceTime,
  type Timing,
  fit,
  fitShapes,
  formatService,
  kneeOf,
  serviceMs,
} from "./plan/fit.ts";
import { type LengthMix, sampleLengths } from "./plan/lengths.ts";
import {
  equalProbes,
  lengthProbes,
  type Measured,
  measureBatches,
  NotMeasured,
  type ProbeBatch,
} from "./plan/measure.ts";
import { Events } from "../observe/events.ts";
import { paint, printable, wantsColor } from "./terminal/terminal.ts";
import { type Call, type Console, Failure, UsageError } from "./command.ts";
import { Progress, type Settings, findPlan, readAsk, readCost, readCount, readTime } from "./plan-find.ts";
import { planJson, serviceJson, table, whole } from "./plan-text.ts";

const ROUNDS = 7;
const TIMEOUT_MS = 30_000;
const MAX_REPLY_BYTES = 256 * 1024 * 1024;

export async function measureWorker(call: Call, console: Console, settings: Settings): Promise<number> {
  const url = readUrl(call.text("measure")!);
  const { maxBatchSize } = settings.limits;
  const { lengths } = settings;
  const input = readInput(call.text("input"));
  const typical = lengths && typicalLengths(lengths);
  const probes = typical
    ? lengthProbes(maxBatchSize, typical, (tokens) => stretched(input, tokens))
    : equalProbes(maxBatchSize, input);
  const timings = await time(url, call, console, settings, probes);
  const found = typical ? fitLengths(timings, typical) : fit(timings);
  const limits = { ...settings.limits, maxBatchSize: found.knee };
  // Where batching gains nothing there is nothing to plan.
  const ask = found.knee === 1 ? undefined : await readAsk(call, { ...settings, limits }, found.service);
  const planned = ask && (await findPlan(call, console, ask));
  const workers = planned?.recommended.workers;
  const yaml = yamlFor(url, settings, found, workers);
  if (call.is("json")) {
    const measured = {
      url: shown(url),
      timings: timings.map(({ size, longest, total, ms, minMs, maxMs }) => ({
        size,
        ...(typical && { longest, total }),
        ms,
        min_ms: minMs,
        max_ms: maxMs,
      })),
      service: serviceJson(found.service),
      knee: found.knee,
      yaml,
    };
    console.out(
      `${JSON.stringify({ measured, ...(planned && { plan: planJson(planned, planned.inOrder, ask, readCost(call)) }) })}\n`,
    );
    return 0;
  }
  const colors = paint(wantsColor({ ...console, isTTY: console.outIsTTY, noColor: call.is("no-color") }));
  const rows = typical ? lengthsTable(timings, found.knee) : sizesTable(timings, found.knee);
  const equal = typical ? timings.filter((one) => isMedian(one, typical)) : timings;
  console.out(`${[...rows, "", ...conclusions(equal, found, maxBatchSize), ""].join("\n")}\n`);
  if (planned !== undefined) console.out(`${planned.text}\n`);
  console.out(`${colors.dim("# paste into ferry.yaml")}\n${yaml}`);
  return 0;
}

async function time(
  url: URL,
  call: Call,
  console: Console,
  { model }: Settings,
  probes: readonly ProbeBatch[],
): Promise<Measured[]> {
  const clock = new SystemClock();
  const rounds = readCount(call, "rounds", 1000) ?? ROUNDS;
  const timeoutMs = readTime(call, "timeout") ?? TIMEOUT_MS;
  const tls = model.backend.kind === "http" ? model.backend.tls : {};
  const options = { workers: [url.href], maxReplyBytes: MAX_REPLY_BYTES, health: model.health, tls };
  const backend = new HttpBackend(options, { model: "measure", clock, events: new Events() });
  const progress = new Progress(console);
  try {
    await backend.start();
    const tell = (size: number, sent: number, all: number): void =>
      progress.tell(`batch ${sent + 1} of ${all} to ${printable(shown(url))}, ${plural(size, "input")}`);
    return await measureBatches(backend.workers[0]!, clock, { probes, rounds, timeoutMs, tell });
  } catch (error) {
    if (!(error instanceof NotMeasured)) throw error;
    throw new Failure(`${printable(shown(url))}: ${error.message}`);
  } finally {
    progress.end();
    await backend.stop();
  }
}

function readUrl(text: string): URL {
  const url = URL.parse(text);
  if (url === null || !/^https?:$/.test(url.protocol)) {
    throw new UsageError(`--measure must be the worker's full URL, such as http://gpu-1:9000/infer`);
  }
  return url;
}

function shown(url: URL): string {
  return `${url.origin}${url.pathname}`;
}

function readInput(text: string | undefined): string {
  if (text === undefined) return '"hello"';
  try {
    return JSON.stringify(JSON.parse(text));
  } catch {
    throw new UsageError(`--input is no JSON; a text needs its quotes: --input '"hello"'`);
  }
}

const TYPICAL_SAMPLE = 1001;

/** The shortest, the median and the longest. */
function typicalLengths(mix: LengthMix): number[] {
  const sample = sampleLengths(mix, TYPICAL_SAMPLE, 1).sort((one, other) => one - other);
  return [...new Set([sample[0]!, sample[TYPICAL_SAMPLE >> 1]!, mix.longest])];
}

/** A text of four characters a token, or an array of so many integers, made of `input` again and again. */
function stretched(input: string, tokens: number): string {
  const value = JSON.parse(input) as unknown;
  if (typeof value === "string" && value !== "") {
    return JSON.stringify(
      `${value} `.repeat(Math.ceil((4 * tokens) / (value.length + 1))).slice(0, 4 * tokens),
    );
  }
  if (Array.isArray(value) && value.length > 0 && value.every(Number.isInteger)) {
    return JSON.stringify(Array.from({ length: tokens }, (_, at) => value[at % value.length] as number));
  }
  throw new UsageError(
    "--lengths makes inputs of a text or an array of integers; give one of them as --input",
  );
}

function isMedian({ size, total }: Measured, lengths: readonly number[]): boolean {
  return total === size * lengths[lengths.length >> 1]!;
}

/** The knee is that of inputs of median length. */
function fitLengths(timings: readonly Measured[], lengths: readonly number[]): Fit {
  const equal = timings.filter((one) => isMedian(one, lengths));
  const knee = kneeOf(equal);
  const service = fitShapes(timings.filter(({ size }) => size <= knee));
  return { service, knee, open: knee === equal.at(-1)!.size };
}

/** A line for each size, a column for each length. */
function lengthsTable(timings: readonly Measured[], knee: number): string[] {
  const isMixed = ({ size, longest, total }: Measured): boolean => total < size * longest;
  const name = (one: Measured): string =>
    isMixed(one)
      ? `one of ${one.longest} among ${(one.total - one.longest) / (one.size - 1)}`
      : `${one.longest}`;
  const columns = [...new Set(timings.map(name))];
  const sizes = [...new Set(timings.map(({ size }) => size))];
  const rows = sizes.map((size) => [
    `${size === knee ? "➜" : " "} ${size}`,
    ...columns.map((column) => {
      const found = timings.find((one) => one.size === size && name(one) === column);
      return found === undefined ? "" : whole(found.ms);
    }),
  ]);
  const head = ["  batch", ...columns.map((column, at) => (at === 0 ? `ms at ${column} tokens` : column))];
  return table([head, ...rows]);
}

function sizesTable(timings: readonly Measured[], knee: number): string[] {
  const rows = timings.map(({ size, ms, minMs, maxMs }) => [
    `${size === knee ? "➜" : " "} ${size}`,
    whole(ms),
    whole(minMs),
    whole(maxMs),
    (ms / size).toPrecision(3),
    ((1000 * size) / ms).toFixed(0),
  ]);
  return table([["  batch", "ms, median", "min", "max", "ms per input", "inputs/s"], ...rows]);
}

function conclusions(
  timings: readonly Measured[],
  { service, knee, open }: Fit,
  maxBatchSize: number,
): string[] {
  return [
    `  ${formatService(service)} for a batch of n, up to ${knee}${explained(service)}`,
    open
      ? knee === 1
        ? "  only batches of one were timed; give --batch"
        : `  no knee up to ${maxBatchSize}: larger batches may pay still more, if your model takes them (--batch ${2 * maxBatchSize})`
      : knee === 1
        ? "  time grows in proportion to the size from the first input on: batching buys nothing here"
        : `  the knee is at ${knee}: larger batches take longer in proportion. ${beyond(timings, knee)}`,
  ];
}

function explained({ perCellMs = 0, perTokenMs = 0 }: ServiceTime): string {
  if (perCellMs > 0) return "; l: tokens of the longest, to which the others are padded";
  return perTokenMs > 0 ? "; t: tokens of all, none is padded" : "";
}

/** Gain of the largest batch timed over one at the knee. */
function beyond(timings: readonly Timing[], knee: number): string {
  const [atKnee, full] = [timings.find(({ size }) => size === knee)!, timings.at(-1)!];
  const buys = whatItBuys(throughput(atKnee), throughput(full));
  return `${buys[0]!.toUpperCase()}${buys.slice(1)}: set maxBatchSize: ${knee}`;
}

function throughput({ size, ms }: Timing): Throughput {
  return { size, ms, perSecond: (1000 * size) / ms };
}

/** Timeouts leave room for a slow batch and one retry. */
function yamlFor(
  url: URL,
  { model, limits, config, lengths }: Settings,
  { service, knee }: Fit,
  workers: number | undefined,
): string {
  const fullMs = serviceMs(service, knee, lengths?.longest);
  const up = (ms: number): number => Math.ceil(ms / 100) * 100;
  const { queueMs } = model.timeouts;
  const workerMs = Math.max(1000, up(10 * fullMs));
  const totalMs = Math.max(model.timeouts.totalMs, queueMs + workerMs);
  const maxWaitMs = Math.min(limits.maxWaitMs, Math.max(5, Math.round(fullMs / 2)));
  const others = workers === undefined || workers < 2 ? "" : `   # ${workers} of them are planned for`;
  const name =
    config.models[0] === model && config.models.length === 1 && model.name === "demo"
      ? "my-model"
      : model.name;
  return [
    "models:",
    `  - name: ${name}`,
    `    backend: { kind: http, protocol: batch, workers: ["${shown(url)}"] }${others}`,
    `    maxBatchSize: ${knee}`,
    `    maxWaitMs: ${maxWaitMs}`,
    `    policy: ${limits.policy}`,
    `    timeouts: { queueMs: ${queueMs}, workerMs: ${workerMs}, totalMs: ${totalMs} }`,
    "",
  ].join("\n");
}
