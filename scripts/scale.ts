/**
 * How many processes and servers a rate needs: the arithmetic of `docs/scale.md`, and its tables.
 *
 *   node scripts/scale.ts                                    # writes the tables into docs/scale.md
 *   node scripts/scale.ts --check                            # exit 1 when they are stale
 *   node scripts/scale.ts --rate 50000 --set redisUs=60,batchMs=40     # prints them for a rate and figures of yours
 *
 * What was measured stands in MEASURED, with the command that measured it, and what was chosen in CHOSEN; nothing else
 * has a number. A rate above `cell` is divided over cells, each a fleet on its own Redis. No cell is larger
 * than a fleet that was measured. `test/repository/scale.test.ts` checks that the page has what this makes.
 */
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { parseArgs } from "node:util";

interface Input {
  readonly value: number;
  readonly unit: string;
  readonly what: string;
  readonly from: string;
}

const SCALEOUT = "`node bench/scaleout.ts --cores 16`";
const FOOTPRINT = "`node bench/footprint.ts`";

/** A task has 2 KB in and 2 KB out. */
export const MEASURED = {
  gatewayUs: {
    value: 169,
    unit: "µs",
    what: "gateway CPU per task",
    from: `${SCALEOUT}, case \`40k-cluster\``,
  },
  batcherUs: { value: 62, unit: "µs", what: "batcher CPU per task", from: "the same" },
  redisUs: { value: 28, unit: "µs", what: "CPU per task of one Redis server", from: "the same, case `10k`" },
  clusterUs: {
    value: 35,
    unit: "µs",
    what: "CPU per task of all primaries of a Cluster of 3",
    from: "the same, case `40k-cluster`",
  },
  uneven: {
    value: 1.07,
    unit: "",
    what: "load of the busiest primary ÷ mean of the primaries",
    from: "the same",
  },
  inKb: { value: 7.9, unit: "KB", what: "into Redis per task", from: FOOTPRINT },
  outKb: { value: 4.9, unit: "KB", what: "out of Redis per task, without replication", from: FOOTPRINT },
  replicaKb: { value: 7.8, unit: "KB", what: "to a replica per task", from: FOOTPRINT },
  fileKb: { value: 5.4, unit: "KB", what: "append-only file per task", from: FOOTPRINT },
  memoryKb: { value: 3.0, unit: "KB", what: "Redis memory per kept result", from: FOOTPRINT },
  heldKb: {
    value: 15.1,
    unit: "KB",
    what: "gateway memory per waiting request",
    from: "`npm run bench -- held`",
  },
} satisfies Record<string, Input>;

export const CHOSEN = {
  cell: {
    value: 40_000,
    unit: "/s",
    what: "most that one cell gets",
    from: "the largest fleet measured with an open load, `40k-cluster`",
  },
  share: {
    value: 0.7,
    unit: "",
    what: "of a core is planned with",
    from: "30 % for bursts and for a process that died",
  },
  batch: { value: 64, unit: "", what: "tasks in a full batch", from: "`maxBatchSize`" },
  batchMs: {
    value: 200,
    unit: "ms",
    what: "service time of a batch",
    from: "yours: `ferry plan --measure URL`",
  },
  load: { value: 0.85, unit: "", what: "load of the workers", from: "yours: `ferry plan --slo …`" },
  latencyMs: { value: 300, unit: "ms", what: "a request waits for its answer", from: "yours" },
  keptS: {
    value: 124,
    unit: "s",
    what: "a result stays in Redis",
    from: "`results.ttlMs` and `cache.ttlMs` of a minute, `timeouts.totalMs` of 4 s and a minute; with the defaults 664 s",
  },
  memoryRoom: {
    value: 1.5,
    unit: "",
    what: "`maxmemory` over what is kept",
    from: "[sizing](operations.md#sizing)",
  },
  gpuPrice: { value: 2.5, unit: "$/h", what: "a GPU, with its machine", from: "an example; yours" },
  corePrice: { value: 0.05, unit: "$/h", what: "a core", from: "an example; yours" },
  gbPrice: { value: 0.005, unit: "$/h", what: "a GB of memory", from: "an example; yours" },
  zonePrice: { value: 0.02, unit: "$", what: "a GB from one zone to another", from: "an example; yours" },
} satisfies Record<string, Input>;

export type Figures = Readonly<Record<keyof typeof MEASURED | keyof typeof CHOSEN, number>>;

export const FIGURES = Object.fromEntries(
  Object.entries({ ...MEASURED, ...CHOSEN }).map(([name, { value }]) => [name, value]),
) as Figures;

/** Three is the smallest Cluster; a primary takes new tasks only if it owns one of the sixteen slots. */
const PRIMARIES = [1, 3, 4, 8, 16];

export interface Scale {
  readonly cells: number;
  /** Tasks per second of one cell. */
  readonly cellRate: number;
  readonly gateways: number;
  readonly batchers: number;
  readonly primaries: number;
  /** CPU of the busiest primary, in cores. */
  readonly redisLoad: number;
  readonly maxmemoryGb: number;
  readonly redisGbits: number;
  readonly fileMbs: number;
  readonly heldMb: number;
  readonly workers: number;
  readonly cores: number;
  readonly memoryGb: number;
  readonly dollars: { readonly gpus: number; readonly cores: number; readonly memory: number };
  readonly zoneDollars: { readonly replica: number; readonly spread: number };
}

const MICRO = 1e6;

export function scale(rate: number, f: Figures): Scale {
  const cells = Math.ceil(rate / f.cell);
  const cellRate = rate / cells;
  const processes = (us: number): number => Math.max(2, Math.ceil((cellRate * us) / MICRO / f.share));
  const loadOf = (primaries: number): number =>
    primaries === 1
      ? (cellRate * f.redisUs) / MICRO
      : (cellRate * f.clusterUs * f.uneven) / primaries / MICRO;
  const primaries = PRIMARIES.find((count) => loadOf(count) <= f.share);
  if (primaries === undefined) throw new Error(`16 primaries are too few for cells of ${cellRate}/s`);
  const gateways = processes(f.gatewayUs);
  const batchers = processes(f.batcherUs);
  const ofBusiest = (cellRate * (primaries === 1 ? 1 : f.uneven)) / primaries;
  const maxmemoryGb = (ofBusiest * f.keptS * f.memoryKb * f.memoryRoom) / MICRO;
  const workers = Math.ceil(rate / ((f.batch / (f.batchMs / 1000)) * f.load));
  const servers = 2 * primaries * cells;
  // One core per process, two per Redis server: a child rewrites its file.
  const cores = cells * (gateways + batchers) + 2 * servers;
  // A Redis machine has maxmemory / 0.6, a Ferry process one GB.
  const memoryGb = (servers * maxmemoryGb) / 0.6 + cells * (gateways + batchers);
  const gbHour = (kb: number): number => (rate * kb * 3600) / MICRO;
  return {
    cells,
    cellRate,
    gateways,
    batchers,
    primaries,
    redisLoad: loadOf(primaries),
    maxmemoryGb,
    redisGbits: (ofBusiest * (f.inKb + f.outKb + f.replicaKb) * 8) / MICRO,
    fileMbs: (ofBusiest * f.fileKb) / 1000,
    heldMb: ((cellRate / gateways) * (f.latencyMs / 1000) * f.heldKb) / 1000,
    workers,
    cores,
    memoryGb,
    dollars: { gpus: workers * f.gpuPrice, cores: cores * f.corePrice, memory: memoryGb * f.gbPrice },
    zoneDollars: {
      replica: gbHour(f.replicaKb) * f.zonePrice,
      spread: gbHour(f.replicaKb + (2 / 3) * (f.inKb + f.outKb)) * f.zonePrice,
    },
  };
}

const number = (value: number, digits = 0): string =>
  value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (share: number): string => `${number(100 * share)} %`;

/** Name of a row, its formula, its value. */
const ROWS: readonly (readonly [string, string, (scale: Scale) => string])[] = [
  ["cells", "rate ÷ `cell`, rounded up", (s) => number(s.cells)],
  ["rate of a cell", "rate ÷ cells", (s) => `${number(s.cellRate)}/s`],
  ["gateways in a cell", "rate of a cell × `gatewayUs` ÷ `share`, at least 2", (s) => number(s.gateways)],
  ["batchers in a cell", "rate of a cell × `batcherUs` ÷ `share`, at least 2", (s) => number(s.batchers)],
  [
    "Redis primaries in a cell, each with a replica",
    "fewest of 1, 3, 4, 8, 16 whose busiest stays below `share`",
    (s) => number(s.primaries),
  ],
  [
    "core of the busiest primary",
    "rate of a cell × `redisUs`; on a Cluster × `clusterUs` × `uneven` ÷ primaries",
    (s) => percent(s.redisLoad),
  ],
  [
    "its `maxmemory`",
    "its rate × `keptS` × `memoryKb` × `memoryRoom`",
    (s) => `${number(s.maxmemoryGb, 1)} GB`,
  ],
  ["its network", "its rate × (`inKb` + `outKb` + `replicaKb`)", (s) => `${number(s.redisGbits, 2)} Gbit/s`],
  ["its file", "its rate × `fileKb`", (s) => `${number(s.fileMbs)} MB/s`],
  [
    "waiting requests in a gateway",
    "rate ÷ gateways × `latencyMs` × `heldKb`",
    (s) => `${number(s.heldMb)} MB`,
  ],
  [
    "**all cells:** gateways, batchers",
    "× cells",
    (s) => `${number(s.cells * s.gateways)}, ${number(s.cells * s.batchers)}`,
  ],
  ["Redis servers, replicas included", "2 × primaries × cells", (s) => number(2 * s.primaries * s.cells)],
  ["workers (GPUs)", "rate ÷ (`batch` ÷ `batchMs` × `load`)", (s) => number(s.workers)],
  ["cores for Ferry and Redis", "1 per process, 2 per Redis server", (s) => number(s.cores)],
  [
    "memory for them",
    "`maxmemory` ÷ 0.6 per Redis server, 1 GB per process",
    (s) => `${number(s.memoryGb)} GB`,
  ],
  ["cost of the GPUs", "× `gpuPrice`", (s) => `$${number(s.dollars.gpus)}/h`],
  [
    "cost of Ferry and Redis",
    "cores × `corePrice` + memory × `gbPrice`",
    (s) => `$${number(s.dollars.cores + s.dollars.memory, 1)}/h`,
  ],
  [
    "cost of replicas in another zone",
    "rate × `replicaKb` × `zonePrice`",
    (s) => `$${number(s.zoneDollars.replica, 1)}/h`,
  ],
  [
    "cost of cells that span three zones instead",
    "rate × (`replicaKb` + ⅔ × (`inKb` + `outKb`)) × `zonePrice`",
    (s) => `$${number(s.zoneDollars.spread, 1)}/h`,
  ],
];

export function tables(rates: readonly number[], figures: Figures): string {
  const row = (cells: readonly string[]): string => `| ${cells.join(" | ")} |`;
  const inputs = (named: Readonly<Record<string, Input>>): string[] =>
    Object.entries(named).map(([name, { unit, what, from }]) =>
      row([
        `\`${name}\``,
        `${number(figures[name as keyof Figures], 3).replace(/\.?0+$/, "")} ${unit}`.trim(),
        what,
        from,
      ]),
    );
  const scales = rates.map((rate) => scale(rate, figures));
  return [
    row(["measured", "", "", "by"]),
    "|---|---|---|---|",
    ...inputs(MEASURED),
    "",
    row(["chosen", "", "", ""]),
    "|---|---|---|---|",
    ...inputs(CHOSEN),
    "",
    row(["", "how", ...rates.map((rate) => `${number(rate)}/s`)]),
    row(["---", "---", ...rates.map(() => "---")]),
    ...ROWS.map(([name, how, value]) => row([name, how, ...scales.map(value)])),
  ].join("\n");
}

const PAGE = join(import.meta.dirname, "../docs/scale.md");
const RATES = [10_000, 40_000, 100_000, 1_000_000];
const BLOCK = /(<!-- from scripts\/scale\.ts -->\n)[^]*?(\n<!-- to here -->)/;

/** The page as it is, and as it should be. */
export function page(): { readonly text: string; readonly wanted: string } {
  const text = readFileSync(PAGE, "utf8");
  if (!BLOCK.test(text)) throw new Error("docs/scale.md has no place for the tables");
  return {
    text,
    wanted: text.replace(BLOCK, (_, from: string, to: string) => from + tables(RATES, FIGURES) + to),
  };
}

function changed(text: string): Figures {
  const pairs = text.split(",").map((pair) => {
    const [name = "", value] = pair.split("=");
    if (!Object.hasOwn(FIGURES, name) || !(Number(value) > 0))
      throw new Error(`--set ${pair}: write NAME=NUMBER, of ${Object.keys(FIGURES).join(", ")}`);
    return [name, Number(value)];
  });
  return { ...FIGURES, ...(Object.fromEntries(pairs) as Partial<Figures>) };
}

if (import.meta.main) {
  const { values } = parseArgs({
    options: {
      rate: { type: "string", multiple: true },
      set: { type: "string" },
      check: { type: "boolean", default: false },
    },
  });
  const { text, wanted } = page();
  if (values.rate !== undefined || values.set !== undefined) {
    console.log(
      tables(values.rate?.map(Number) ?? RATES, values.set === undefined ? FIGURES : changed(values.set)),
    );
  } else if (!values.check) writeFileSync(PAGE, wanted);
  else if (text !== wanted) {
    console.error("stale: docs/scale.md; run node scripts/scale.ts");
    process.exitCode = 1;
  }
}
