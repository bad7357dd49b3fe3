/**
 * The cases of bench/scaleout.ts: which processes, which workers behind them, which load.
 *
 * Names are `STORE-GATEWAYSxBATCHERS`, or `cores-GATEWAYS` without Redis, where the loop is closed, and say the load where it is open.
 */
import type { SimulatedModel } from "../server.ts";

export interface ScaleCase {
  readonly name: string;
  /** The machine whose set has it: `--cores`. */
  readonly cores: 2 | 16;
  /** Redis servers; three are a Cluster. 0: one process with the memory engine. */
  readonly redis: 0 | 1 | 3;
  readonly gateways: number;
  readonly batchers: number;
  /** Without Redis: gateway processes of `--processes`, beside one core process. Undefined: one process for all. */
  readonly processes?: number;
  /** Further gateways that get no request. */
  readonly idleGateways?: number;
  /** Simulated workers of all batchers together, `baseMs` for a batch of any size up to 64. */
  readonly workers: number;
  readonly baseMs: number;
  readonly policy?: SimulatedModel["policy"];
  /** Requests per second over all gateways, Poisson. Undefined: a closed loop of `CALLERS` for each gateway. */
  readonly rate?: number;
  readonly warmSeconds: number;
  readonly seconds: number;
}

/** Connections of the closed loop for each gateway. */
export const CALLERS = 384;

/** 64 workers of 1 ms: none is ever waited for, so that the processes are the limit. */
const SATURATED = { workers: 64, baseMs: 1, warmSeconds: 4, seconds: 5 };
/** 64 x 9 / 0.2 s = 2,880/s: 200/s is thin. Nine, so that three batchers have three workers each. */
const THIN = { cores: 16, workers: 9, baseMs: 200, rate: 200, warmSeconds: 2, seconds: 8 } as const;
const MEMORY = { redis: 0, gateways: 1, batchers: 0 } as const;

/** `cores-N`: gateway processes and a core process on one machine, without Redis. */
export const PROCESS_COUNTS = [2, 4, 6, 8] as const;

/** How many gateways the chart has points for. */
export const GATEWAY_COUNTS = [1, 2, 4, 6, 8] as const;

export const cases: readonly ScaleCase[] = [
  { name: "memory", cores: 16, ...MEMORY, ...SATURATED },
  ...PROCESS_COUNTS.map((processes): ScaleCase => {
    return { name: `cores-${processes}`, cores: 16, ...MEMORY, processes, ...SATURATED };
  }),
  // 180 x 64 / 0.2 s = 57,600/s: 87 % load.
  { name: "cores-50k", ...poisson(50_000, 180), ...MEMORY, processes: 6 },
  { name: "redis-1x1", cores: 16, redis: 1, gateways: 1, batchers: 1, ...SATURATED },
  ...GATEWAY_COUNTS.map((n) => saturated("redis", n)),
  ...GATEWAY_COUNTS.map((n) => saturated("cluster", n)),
  // 36 x 64 / 0.2 s = 11,520/s: 87 % load.
  { name: "10k", ...poisson(10_000, 36), redis: 1, gateways: 2, batchers: 1 },
  // 140 x 64 / 0.2 s = 44,800/s: 89 % load.
  { name: "40k", ...poisson(40_000, 140), redis: 1, gateways: 8, batchers: 3 },
  { name: "40k-cluster", ...poisson(40_000, 140), redis: 3, gateways: 8, batchers: 3 },
  { name: "thin-memory", ...THIN, ...MEMORY },
  { name: "thin", ...THIN, redis: 1, gateways: 6, batchers: 3 },
  { name: "thin-fixed-memory", ...THIN, ...MEMORY, policy: "fixed" },
  { name: "thin-fixed", ...THIN, redis: 1, gateways: 6, batchers: 3, policy: "fixed" },
  { name: "idle", ...poisson(2000, 8), redis: 1, gateways: 2, batchers: 1, idleGateways: 1, seconds: 8 },

  // Three or four processes on two cores need longer until their code is optimised.
  { name: "two-memory", cores: 2, ...MEMORY, ...SATURATED, warmSeconds: 10 },
  { name: "two-cores", cores: 2, ...MEMORY, processes: 2, ...SATURATED, warmSeconds: 10 },
  { name: "two-redis", cores: 2, redis: 1, gateways: 1, batchers: 1, ...SATURATED, warmSeconds: 10 },
  {
    ...poisson(10_000, 36),
    name: "two-10k",
    cores: 2,
    redis: 1,
    gateways: 1,
    batchers: 1,
    warmSeconds: 10,
    seconds: 30,
  },
];

function saturated(store: "redis" | "cluster", gateways: number): ScaleCase {
  const redis = store === "redis" ? 1 : 3;
  return { name: `${store}-${gateways}x3`, cores: 16, redis, gateways, batchers: 3, ...SATURATED };
}

function poisson(
  rate: number,
  workers: number,
): Pick<ScaleCase, "cores" | "workers" | "baseMs" | "rate" | "warmSeconds" | "seconds"> {
  return { cores: 16, workers, baseMs: 200, rate, warmSeconds: 3, seconds: 5 };
}
