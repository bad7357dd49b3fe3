/** What the tests and the benchmark of metrics share: a process to look at, requests, batches, and a reader. */
import type { AnsweredRequest, BatchedTask, EventFields } from "../../src/observe/events.ts";
import type { ModelSight, ProcessSight, Sight } from "../../src/observe/sight.ts";

export const TIERS = ["enterprise", "paid", "free"];

export const PROCESS: ProcessSight = {
  id: "",
  role: "all",
  members: 1,
  engine: "memory",
  durability: "none",
  reachable: true,
  draining: false,
  queued: 0,
  running: 0,
  deadLetters: 0,
  startedAt: 0,
};

export const PROCESSES = {
  take: () => [{ process: "ferry", pid: 7, cpuSeconds: 1.5, residentBytes: 2048, loopDelayMs: 30 }],
};

const MODEL: ModelSight = {
  name: "",
  maxBatchSize: 64,
  queuedByTier: [0, 0, 0],
  oldestWaitMs: 0,
  workers: [],
  healthy: 0,
  utilization: 0,
  capacityPerSecond: 0,
  arrivalsPerSecond: 0,
  load: 0,
  desiredWorkers: 0,
};

export function sightOf(
  models: readonly (Partial<ModelSight> & { readonly name: string })[],
  process: Partial<ProcessSight> = {},
): Sight {
  const all = models.map((model) => ({ ...MODEL, ...model }));
  return { models: () => all, process: () => ({ ...PROCESS, ...process }) };
}

/** A request that waited 120 ms for its outcome, and what is different about it. */
export function answered(more: Partial<AnsweredRequest> = {}): AnsweredRequest {
  return {
    id: "id",
    method: "POST",
    route: "/v1/inference",
    model: "embed",
    tier: "paid",
    tenant: "somebody",
    status: 200,
    code: "",
    startedAt: 1_790_000_000_000,
    latencyMs: 120,
    work: "own",
    ending: { queuedAt: 0, attempt: 1 },
    trace: undefined,
    ...more,
  };
}

/** A batch that leaves at 100, of tasks that were queued at these instants, in these tiers in turn. */
export function started(
  model: string,
  queuedAt: readonly number[],
  tiers: readonly number[] = [0],
): EventFields["batch.started"] {
  const tasks = queuedAt.map((at, n): BatchedTask => {
    const task = { id: String(n), tenant: "somebody", model, input: "1", parameters: "", content: "" };
    const tier = tiers[n % tiers.length]!;
    return { task: { ...task, tier, createdAt: 0, deadlineAt: 0 }, attempt: 1, queuedAt: at };
  });
  const batch = {
    id: "b",
    size: tasks.length,
    reason: "full",
    worker: "w",
    startedAt: 100,
    why: "",
  } as const;
  return { model, batch, maxBatchSize: 64, oldestWaitMs: 64, tasks };
}

/** One call for that batch came back after so many ms. */
export function called(model: string, serviceMs: number, size = 1): EventFields["batch.answered"] {
  const call = { batchId: "b", worker: "w", kind: "answered", call: 1, startedAt: 100 };
  return { ...call, model, size, serviceMs };
}

/** The samples of an exposition: `name{labels}` with its labels in order of the alphabet → value. */
export function samplesOf(text: string): Map<string, number> {
  const samples = new Map<string, number>();
  for (const line of text.split("\n")) {
    const found = /^([a-z_]+)(?:\{([^}]*)\})? (\S+)/.exec(line);
    if (found === null) continue;
    const labels = (found[2] ?? "").split(",").filter(Boolean).sort().join(",");
    samples.set(labels === "" ? found[1]! : `${found[1]}{${labels}}`, Number(found[3]));
  }
  return samples;
}

/** The names of the families in an exposition in the older text. */
export function namesOf(text: string): string[] {
  return [...text.matchAll(/^# TYPE (\S+) /gm)].map(([, name]) => name!);
}
