/** Frames of a Ferry that does not exist, in some scenes that a real one shows rarely. Each depends only on time. */
import {
  COLUMNS,
  FILL_STEPS,
  type BatchRow,
  type Column,
  type CostFrame,
  type CurveFrame,
  type ModelFrame,
  type Note,
  type Slots,
  type WorkerRow,
} from "../../../src/observe/dashboard/frames.ts";
import { Refusal } from "../../../src/core/errors.ts";

export const SCENES = ["healthy", "overload", "down", "empty", "crowd", "nasty"] as const;
export type Scene = (typeof SCENES)[number];

export const TIERS = ["enterprise", "paid", "free"];
const NASTY = `<img src=x onerror="document.title='owned'">`;
/** Longest input of a batch, and in order of arrival. */
const LENGTHS = [
  [16, 412],
  [96, 480],
  [512, 512],
] as const;
const COST: CostFrame = {
  kind: "padded",
  words: "0.5 ms + 5 µs a row + 0.46 µs a token of the padded batch",
  paddingRatio: 1.29,
  grouped: true,
};
const WHY = "48 of 64: similar length; 9 longer ones wait for the next worker, at most 12 ms";
/** The same for every run: a wave with some noise. */
function wave(second: number, depth: number): number {
  return (
    1 +
    depth * Math.sin(second / 23) +
    (depth / 3) * Math.sin(second * 1.7) +
    (depth / 4) * Math.sin(second / 5.3)
  );
}

interface Shape {
  readonly workers: number;
  readonly batchMs: number;
  readonly size: number;
  readonly perSecond: number;
  readonly shedShare: number;
  readonly queueMs: number;
}

export const SHAPES: Readonly<Record<Scene, Shape>> = {
  healthy: { workers: 4, batchMs: 100, size: 52, perSecond: 1800, shedShare: 0, queueMs: 15 },
  overload: { workers: 4, batchMs: 100, size: 64, perSecond: 4200, shedShare: 0.39, queueMs: 240 },
  down: { workers: 4, batchMs: 100, size: 60, perSecond: 1800, shedShare: 0.04, queueMs: 45 },
  empty: { workers: 4, batchMs: 100, size: 0, perSecond: 0, shedShare: 0, queueMs: 0 },
  crowd: { workers: 70, batchMs: 200, size: 29, perSecond: 10_000, shedShare: 0.01, queueMs: 30 },
  nasty: { workers: 4, batchMs: 100, size: 40, perSecond: 1500, shedShare: 0.1, queueMs: 20 },
};

function slotsOf(scene: Scene, from: number, length: number): Slots {
  const shape = SHAPES[scene];
  const seconds = Array.from({ length }, (_, at) => from + at);
  const columns = Object.fromEntries(
    COLUMNS.map((name) => [name, seconds.map((second) => columnOf(name, shape, second))]),
  ) as Record<Column, (number | null)[]>;
  const shed =
    shape.shedShare === 0
      ? {}
      : {
          "free capacity": seconds.map((second) =>
            Math.round(shape.perSecond * shape.shedShare * wave(second, 0.2)),
          ),
          "paid deadline": seconds.map((second) =>
            Math.round(shape.perSecond * shape.shedShare * 0.1 * wave(second, 0.3)),
          ),
          "free rate": seconds.map((second) => second % 7),
        };
  const depth = TIERS.map((_, tier) =>
    seconds.map((second) =>
      Math.round((shape.queueMs * shape.perSecond * (tier + 1) ** 2 * wave(second, 0.3)) / 14_000),
    ),
  );
  const fill = Array.from({ length: FILL_STEPS }, (_, step) =>
    seconds.map(() =>
      shape.size === 0 ? 0 : Math.round(30 * Math.exp(-((step - (shape.size / 64) * 7.5) ** 2) / 2)),
    ),
  );
  return { from, length, columns, depth, fill, shed };
}

function columnOf(name: Column, shape: Shape, second: number): number | null {
  const per = shape.perSecond * wave(second, 0.08);
  const batches = shape.size === 0 ? 0 : Math.round((per * (1 - shape.shedShare)) / shape.size);
  const busy = Math.min(1, (batches * shape.batchMs) / 1000 / shape.workers);
  const slow = shape.perSecond === 0 ? null : 1;
  const parts: Partial<Record<Column, number | null>> = {
    requests: Math.round(per),
    refused: Math.round(per * shape.shedShare),
    p50: slow && shape.batchMs + shape.queueMs * wave(second, 0.1),
    p95: slow && shape.batchMs + shape.queueMs * 1.7 * wave(second, 0.2),
    p99: slow && shape.batchMs + shape.queueMs * 2.2 * wave(second, 0.3),
    slowQueueMs: slow && shape.queueMs * 2,
    slowWorkerMs: slow && shape.batchMs,
    slowGatewayMs: slow && 1.3,
    arrivals: Math.round(per * 0.9),
    batches,
    tasks: batches * shape.size,
    full: Math.round(batches * (shape.size === 64 ? 0.97 : 0.36)),
    wait: Math.round(batches * 0.03),
    idle: Math.round(batches * (shape.size === 64 ? 0 : 0.59)),
    deadline: Math.round(batches * 0.02),
    filledMs: (1000 * shape.workers * busy * shape.size) / 64,
    emptyMs: 1000 * shape.workers * busy * (1 - shape.size / 64),
    idleMs: 1000 * shape.workers * (1 - busy),
    paddedCells: per * 90 * wave(second, 0.1),
    inOrderCells: per * 420 * wave(second, 0.05),
    usefulCells: per * 70,
    groupedMs: 1000 * shape.workers * busy,
    savedMs: 1900 * shape.workers * busy,
    oldestWaitMs: shape.queueMs,
    load: (per * shape.batchMs) / 1000 / 64 / shape.workers,
    cached: Math.round(per * 0.12),
    joined: Math.round(per * 0.03),
    loopLateMs: 2 + (second % 5),
  };
  return name in parts ? (parts[name] ?? null) : 0;
}

/** Batches that cross [from, to): on each worker one after the other, from a plan that depends only on time. */
function batchesOf(scene: Scene, from: number, to: number, now: number): BatchRow[] {
  const { workers, batchMs, size } = SHAPES[scene];
  if (size === 0) return [];
  const rows: BatchRow[] = [];
  for (let worker = 0; worker < workers; worker++) {
    if (scene === "down" && worker === 2) continue;
    const period = batchMs * (size === 64 ? 1.02 : 1.22);
    const shift = (worker * period) / workers;
    for (let n = Math.floor((from - shift) / period); shift + n * period < to; n++) {
      const start = shift + n * period;
      const end = start + Math.min(period - 1, batchMs * (0.92 + 0.15 * Math.abs(Math.sin(n * 7 + worker))));
      if (start < from && end < from) continue;
      rows.push(batchRow(scene, worker, n, start, end > now ? 0 : end));
    }
  }
  return rows;
}

function batchRow(scene: Scene, worker: number, n: number, start: number, end: number): BatchRow {
  const { size, queueMs } = SHAPES[scene];
  const dice = Math.abs((n * 7919 + worker * 104_729) % 100);
  const reason = size === 64 ? (dice < 97 ? 0 : 3) : dice < 36 ? 0 : dice < 40 ? 1 : dice < 97 ? 2 : 3;
  const taken = reason === 0 ? 64 : Math.max(1, Math.min(63, size - 14 + (dice % 23)));
  const lengths = LENGTHS[dice % LENGTHS.length]!;
  const [best, second] = [Math.round(taken * 0.1), Math.round(taken * 0.3)];
  const tiers = `${best}/${second}/${taken - best - second}`;
  return [
    `b-${worker}-${n}`,
    nameOf(scene, worker),
    start,
    end,
    taken,
    reason,
    queueMs,
    end === 0 ? 0 : 1,
    dice === 50 ? 2 : 1,
    tiers,
    end === 0 ? "" : `${lengths[0]}/${Math.round(taken * lengths[0] * 0.8)}/${lengths[1]}`,
    scene === "overload" && lengths[1] > lengths[0] ? WHY : "",
  ];
}

function nameOf(scene: Scene, worker: number): string {
  if (scene === "nasty" && worker === 1) return NASTY;
  if (scene === "nasty" && worker === 2)
    return `gpu-with-a-very-long-name-${"x".repeat(80)}.cluster.internal`;
  return `gpu-${worker + 1}`;
}

function workersOf(scene: Scene, now: number): WorkerRow[] {
  const { workers, batchMs, size } = SHAPES[scene];
  return Array.from({ length: workers }, (_, at): WorkerRow => {
    const busy = size === 0 ? 0 : size === 64 ? 0.98 : 0.81 + 0.01 * (at % 3);
    const down = scene === "down" && at === 2;
    return {
      name: nameOf(scene, at),
      state: down ? "down" : size === 0 ? "idle" : "busy",
      busy: down ? 0 : busy,
      filled: down ? 0 : (busy * size) / 64,
      inFlight: size,
      ratio: scene === "down" && at === 3 ? 1.8 : 1,
      batchMs: size === 0 ? 0 : batchMs,
      zone: scene === "crowd" ? "abc"[at % 3]! : "",
      ...(down && {
        down: { why: "connect ECONNREFUSED 10.0.0.7:9000", sinceMs: now % 60_000, retryInMs: 2000 },
      }),
    };
  });
}

const SENTENCES: Readonly<Record<Scene, ModelFrame["verdict"]>> = {
  healthy: {
    level: "ok",
    key: "ok",
    sentence:
      "Healthy. 1,804 requests/s is 70 % of capacity. p99 131 ms: 100 ms worker, 31 ms queue. Nobody is refused.",
    advice: "",
  },
  overload: {
    level: "bad",
    key: "over",
    sentence: "Too much comes in. 4,200 requests/s is 164 % of capacity; 39 % are refused, free first.",
    advice:
      "Add 3 workers: 7 would hold this load at 70 %. Until then free is refused first, then paid; enterprise is served.",
  },
  down: {
    level: "busy",
    key: "down",
    sentence: "gpu-3 is down: connect ECONNREFUSED. The other 3 do 94 % of what they can.",
    advice:
      "Start gpu-3 again, or take it out of the config. Its tasks were done elsewhere; nothing is lost.",
  },
  empty: {
    level: "quiet",
    key: "quiet",
    sentence: "Quiet. No request in the last ten seconds; 4 workers are ready.",
    advice: "",
  },
  crowd: { level: "ok", key: "ok", sentence: "Healthy. 10,000 requests/s is 45 % of capacity.", advice: "" },
  nasty: { level: "busy", key: "n", sentence: `Somebody tries ${NASTY}.`, advice: NASTY },
};

/** Flat up to 32, and in proportion from there on; nothing where nothing ran. */
function curveOf(scene: Scene): CurveFrame {
  const { batchMs } = SHAPES[scene];
  const sizes = scene === "empty" ? [] : [1, 2, 4, 8, 16, 32, 48, 64];
  const points = sizes.map((size) => [size, (batchMs * Math.max(32, size)) / 64, 3 * size] as const);
  const hint =
    scene === "nasty"
      ? NASTY
      : "maxBatchSize 64 lies beyond the knee at 32: batches of 64 buy no throughput and take 50 ms longer; set maxBatchSize: 32";
  if (scene === "empty" || scene === "crowd") return { points, knee: null, hint: "" };
  return { points, knee: { size: 32, ms: batchMs / 2, perSecond: (1000 * 64) / batchMs }, hint };
}

export function modelFrame(scene: Scene, now: number, fromSecond: number, batchesFrom: number): ModelFrame {
  const shape = SHAPES[scene];
  const second = Math.floor(now / 1000);
  const capacity = (shape.workers * 64 * 1000) / shape.batchMs;
  const some = shape.perSecond > 0;
  const shed = shape.shedShare > 0;
  return {
    verdict: SENTENCES[scene],
    recent: {
      requestsPerSecond: shape.perSecond * wave(second, 0.03),
      p50: some ? shape.batchMs + shape.queueMs : null,
      p95: some ? shape.batchMs + shape.queueMs * 1.7 : null,
      p99: some ? shape.batchMs + shape.queueMs * 2.1 * wave(second, 0.05) : null,
      slow: some ? { queueMs: shape.queueMs * 2, workerMs: shape.batchMs, gatewayMs: 1.3 } : null,
      meanMs: some ? shape.batchMs + shape.queueMs : null,
      refusedShare: shape.shedShare,
      load: shape.perSecond / capacity,
      capacityPerSecond: scene === "empty" ? 0 : capacity,
      utilization: 0.8,
      fill: some ? shape.size / 64 : null,
      desiredWorkers: Math.ceil((shape.perSecond / capacity / 0.7) * shape.workers),
    },
    queues: TIERS.map((_, tier) => ({
      depth: Math.round((shape.queueMs * shape.perSecond * (tier + 1) ** 2 * wave(second, 0.3)) / 14_000),
      admittedPerSecond: (shape.perSecond * (1 - shape.shedShare) * (tier + 1)) / 6,
    })),
    oldestWaitMs: shape.queueMs,
    workers: workersOf(scene, now),
    curve: curveOf(scene),
    cost: scene === "overload" ? COST : null,
    slots: slotsOf(scene, fromSecond, Math.max(0, second - fromSecond)),
    batches: batchesOf(scene, batchesFrom, now, now),
    batchesLeftOut: 0,
    refusedTenants: shed
      ? [
          [scene === "nasty" ? NASTY : "acme-research", 812, 1200],
          ["batch-importer-7", 230, 2400],
          ["somebody@example.org", 31, 600],
        ]
      : [],
  };
}

export function notesOf(scene: Scene, now: number): Note[] {
  if (scene === "empty") return [{ at: now - 2000, level: "info", text: "ready" }];
  return [
    { at: now - 260_000, level: "info", text: "gpu-2 is up again after 4.1 s" },
    {
      at: now - 50_000,
      level: "warn",
      text: scene === "nasty" ? NASTY : "gpu-3 is down: connect ECONNREFUSED 10.0.0.7:9000",
    },
    {
      at: now - 20_000,
      level: "error",
      text: "01JZ8Q7K is a dead letter: INFERENCE_FAILED after 4 attempts",
    },
  ];
}

export function storyOf(id: string): object {
  if (!id.startsWith("0")) throw new Refusal("NOT_FOUND", "no such task, or its time to live has passed");
  const at = (ms: number): string => new Date(1_800_000_000_000 + ms).toISOString();
  return {
    task_id: id,
    tenant: "acme-research",
    model: "embed",
    tier: "paid",
    state: "done",
    attempts: 1,
    created_at: at(0),
    queued_at: at(1),
    deadline_at: at(4000),
    batch: {
      id: "b-1",
      size: 56,
      reason: "idle",
      why: "56 of 64: a worker was free, waiting for one more would cost 3.1 ms and save 0.4",
      worker: "gpu-2",
      started_at: at(16),
      queue_ms: 15,
    },
    settled_at: at(117),
    total_ms: 117,
    outcome: { ok: true, output_bytes: 8211 },
  };
}
