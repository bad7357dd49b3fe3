/**
 * `ferry plan --learned FILE`: service times per batch size that a running Ferry has learned (GET /internal/workers),
 * the knee, and with --rate and --slo a plan. Never plans beyond the knee: larger batches only take proportionally
 * longer. With --lengths, where time depends on them, by the learned cost of lengths and without a knee.
 */
import { readFileSync } from "node:fs";
import { type ServiceTime, type Timing, fitLine, formatService } from "./plan/fit.ts";
import { didYouMean } from "../app/config/spelling.ts";
import { printable } from "./terminal/terminal.ts";
import { type Call, type Console, Failure } from "./command.ts";
import { type Settings, findPlan, readAsk, readCost } from "./plan-find.ts";
import { planJson, serviceJson, table, whole } from "./plan-text.ts";

interface Learned {
  readonly name: string;
  readonly maxBatchSize: number;
  readonly points: readonly (Timing & { readonly batches: number })[];
  readonly knee: number | undefined;
  readonly hint: string;
  /** Undefined where time does not depend on the inputs' length, or is not known to. */
  readonly byLength: ServiceTime | undefined;
}

export async function planLearned(call: Call, console: Console, settings: Settings): Promise<number> {
  const learned = choose(readLearned(call.text("learned")!), call);
  const { points, knee, hint } = learned;
  const asked = call.text("batch") === undefined ? learned.maxBatchSize : settings.limits.maxBatchSize;
  const byLength = settings.lengths && learned.byLength;
  // Where lengths matter, sizes alone have no knee: which inputs were in the batches decided their time.
  const maxBatchSize = byLength ? asked : Math.min(asked, knee ?? Infinity);
  const service =
    byLength ?? fitLine(points.filter(({ size }) => size <= maxBatchSize || size === points[0]!.size));
  const limits = { ...settings.limits, maxBatchSize };
  const ask = maxBatchSize === 1 ? undefined : await readAsk(call, { ...settings, limits }, service);
  const planned = ask && (await findPlan(call, console, ask));
  if (call.is("json")) {
    const known = { model: learned.name, timings: points, knee: knee ?? null, hint: hint || null };
    const told = { ...known, service: serviceJson(service) };
    const plan = planned && { plan: planJson(planned, planned.inOrder, ask, readCost(call)) };
    console.out(`${JSON.stringify({ learned: told, ...plan })}\n`);
    return 0;
  }
  const line = `${formatService(service)} for a batch of n, up to ${maxBatchSize}`;
  console.out(`${[...rows(learned), "", `  ${line}`, `  ${sentence(learned)}`, ""].join("\n")}\n`);
  if (planned !== undefined) console.out(planned.text);
  return 0;
}

function rows({ points, knee }: Learned): string[] {
  // The knee lies on a step; the mean size observed in that step may be a little larger.
  const at = knee === undefined ? -1 : points.findIndex(({ size }) => size >= knee);
  const lines = points.map(({ size, ms, batches }, index) => [
    `${index === at ? "➜" : " "} ${size}`,
    whole(ms),
    String(batches),
    ((1000 * size) / ms).toFixed(0),
  ]);
  return table([["  batch", "ms", "batches", "inputs/s"], ...lines]);
}

function sentence({ knee, hint, points }: Learned): string {
  const known = printable(hint);
  if (known !== "") return known;
  if (knee !== undefined) return `the knee is at ${knee}: larger batches buy little`;
  return `no knee up to ${points.at(-1)!.size}: larger batches may pay still more, if your model takes them`;
}

function choose(models: readonly Learned[], call: Call): Learned {
  const name = call.text("model");
  const found = name === undefined ? models[0] : models.find((each) => each.name === name);
  if (found === undefined) {
    const names = models.map((each) => each.name);
    throw new Failure(
      name === undefined
        ? "nothing is learned there: ask a process that runs batches"
        : `nothing is learned of model ${printable(name)}${didYouMean(name, names)}`,
    );
  }
  if (found.points.length > 0) return found;
  throw new Failure(
    `nothing is learned of model ${printable(found.name)} yet: three batches of a size must have come back`,
  );
}

function readLearned(path: string): Learned[] {
  let text: string;
  try {
    text = readFileSync(path, "utf8");
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    throw new Failure(`${printable(path)} cannot be read (${code ?? "unknown reason"})`);
  }
  const models = parse(text);
  if (models !== undefined) return models;
  throw new Failure(`${printable(path)} is not what GET /internal/workers answers; save that and try again`);
}

function parse(text: string): Learned[] | undefined {
  try {
    const { models } = JSON.parse(text) as { models: readonly Record<string, unknown>[] };
    return models.map(({ name, max_batch_size, curve, knee, hint, cost }) => ({
      name: String(name),
      maxBatchSize: positive(max_batch_size),
      points: (curve as Record<string, unknown>[]).map(({ size, ms, batches }) => ({
        size: positive(size),
        ms: positive(ms),
        batches: positive(batches),
      })),
      knee: knee === null ? undefined : positive((knee as Record<string, unknown>)["size"]),
      hint: typeof hint === "string" ? hint : "",
      byLength: serviceOf(cost),
    }));
  } catch {
    return undefined;
  }
}

/** The learned cost model, where it has a term in length. */
function serviceOf(cost: unknown): ServiceTime | undefined {
  const { kind, base_ms, per_row_ms, per_token_ms } = (cost ?? {}) as Record<string, unknown>;
  if (kind !== "padded" && kind !== "packed") return undefined;
  const perToken = positive(per_token_ms);
  const line = { baseMs: Number(base_ms), perTaskMs: Number(per_row_ms) };
  return kind === "padded" ? { ...line, perCellMs: perToken } : { ...line, perTokenMs: perToken };
}

function positive(value: unknown): number {
  if (typeof value === "number" && value > 0) return value;
  throw new TypeError("no number");
}
