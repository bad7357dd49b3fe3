/** From what was asked to a plan: the search with its progress, and the chart. */
import { writeFileSync } from "node:fs";
import { fleetChart } from "./chart.ts";
import { count } from "./terminal/banner.ts";
import { type Ask, type Plan, Planner, TARGET_LOAD } from "./plan/planner.ts";
import { capacityOf, type ServiceTime } from "./plan/service.ts";
import { paint, printable, wantsColor } from "./terminal/terminal.ts";
import { type Call, type Console, Failure } from "./command.ts";
import { fleetOf, readBurst, readCost, readGoal, readRate, readTime, readWorkers } from "./plan-flags.ts";
import type { Settings } from "./plan-flags.ts";
import { planText } from "./plan-text.ts";

/** Undefined where rate or goal are not given. */
export function readAsk(call: Call, settings: Settings, service: ServiceTime): Ask | undefined {
  const [perSecond, goal] = [readRate(call), readGoal(call)];
  if (perSecond === undefined || goal === undefined) return undefined;
  const { tiers, seed, limits } = settings;
  const [burst, durationMs] = [readBurst(call), readTime(call, "duration")];
  if (limits.maxBatchSize === 1) {
    const workers = Math.ceil(perSecond / 1000 / (TARGET_LOAD * capacityOf(service, 1)));
    throw new Failure(
      `with --batch 1 there is nothing to batch: one call for each of ${count(perSecond)} requests a second ` +
        `needs ${count(workers)} workers at ${TARGET_LOAD} load; a model that takes at least 2 inputs is needed`,
    );
  }
  return {
    perSecond,
    goal,
    fleet: fleetOf(call, settings, service),
    tiers,
    seed,
    ...(burst !== undefined && { burst }),
    ...(durationMs !== undefined && { durationMs }),
  };
}

/** Searches, says how far it is, and draws the chart where one is wanted. */
export async function findPlan(call: Call, console: Console, ask: Ask): Promise<Plan & { text: string }> {
  const progress = new Progress(console);
  const planner = new Planner(ask, (workers, runs) => {
    progress.tell(`run ${runs + 1}: ${workers} workers, ${count(requestsOf(planner))} requests`);
  });
  try {
    const found = await planner.plan(readWorkers(call));
    const svg = call.text("svg");
    if (svg !== undefined) write(svg, await draw(planner, found));
    const colors = paint(wantsColor({ ...console, isTTY: console.outIsTTY, noColor: call.is("no-color") }));
    return { ...found, text: planText(found, ask, readCost(call), colors) };
  } finally {
    progress.end();
  }
}

function requestsOf({ perMs, durationMs }: Planner): number {
  return Math.round((perMs * durationMs) / 1000) * 1000;
}

const CHART_POINTS = 12;

/** With more sizes than the table: a curve needs them. */
async function draw(planner: Planner, { recommended, knee }: Plan): Promise<string> {
  const chosen = recommended.workers;
  const first = Math.max(1, (knee?.workers ?? chosen) - 1);
  const last = Math.max(first + 4, Math.ceil(1.4 * chosen));
  const step = Math.max(1, Math.ceil((last - first) / CHART_POINTS));
  const sizes = new Set([chosen, ...(knee === undefined ? [] : [knee.workers])]);
  for (let workers = first; workers <= last; workers += step) sizes.add(workers);
  const points = [];
  for (const workers of [...sizes].sort((one, other) => one - other)) points.push(await planner.run(workers));
  const { perSecond, goal, fleet } = planner.ask;
  const title = `${count(perSecond)} requests/s, batches of up to ${fleet.limits.maxBatchSize}, policy ${fleet.limits.policy}`;
  return fleetChart({ title, points, goal, recommended: chosen, knee: knee?.workers });
}

function write(path: string, text: string): void {
  try {
    writeFileSync(path, text);
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    throw new Failure(`${printable(path)} cannot be written (${code ?? "unknown reason"})`);
  }
}

/** One line that is written over on a terminal; elsewhere only the first one. */
export class Progress {
  readonly #console: Console;
  #told = false;

  constructor(console: Console) {
    this.#console = console;
  }

  tell(what: string): void {
    if (this.#console.errIsTTY) this.#console.err(`\r\u001b[K  ${what}`);
    else if (!this.#told) this.#console.err(`  ${what} …\n`);
    this.#told = true;
  }

  end(): void {
    if (this.#told && this.#console.errIsTTY) this.#console.err("\r\u001b[K");
  }
}
