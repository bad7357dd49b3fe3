/**
 * How many of everything a rate takes: the arithmetic of `docs/scale.md`, and its tables.
 *
 *   node scripts/scale.ts                                    # writes the tables into docs/scale.md
 *   node scripts/scale.ts --check                            # exit 1 when they are stale
 *   node scripts/scale.ts --rate 50000 --set redisUs=60,batchMs=40     # prints them for a rate and figures of yours
 *
 * What was measured stands in MEASURED, with the command that measured it, and what was chosen in CHOSEN; nothing else
 * has a number. A rate is shared out to cells, each a fleet on a Redis of its own, so that what is extrapolated is one
 * cell; the rest is multiplication. `test/scale.test.ts` checks that the page has what this makes.
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

const FANOUT = "`node bench/fanout.ts --rate 3000 --seconds 5 4x2`";

/** A task is one of 2 KB in and 2 KB out. */
export const MEASURED = {
  gatewayUs: {
    value: 113,
    unit: "µs",
    what: "CPU of a gateway for a task, with 9,456 connections (79 with 512)",
    from: "`BENCH_RATE=8000 npm run bench -- redis-10k`: 90 % of a core at 8,000/s; `npm run bench -- redis`",
  },
  batcherUs: {
    value: 27,
    unit: "µs",
    what: "CPU of a batcher for a task",
    from: "`npm run bench -- redis`",
  },
  redisUs: {
    value: 124,
    unit: "µs",
    what: "CPU of Redis for a task, file on, seven processes (78 with two that keep it busy)",
    from: `${FANOUT}; \`npm run bench -- redis\``,
  },
  scripts: {
    value: 0.42,
    unit: "",
    what: "calls of a script for a task; each rings the bell once",
    from: FANOUT,
  },
  noteUs: {
    value: 35,
    unit: "µs",
    what: "CPU of every process to hear the bell once",
    from: "the same: the listener, at 1,350 notes/s (38 to 84 at 210 to 640/s)",
  },
  inKb: { value: 7.6, unit: "KB", what: "into Redis for a task", from: FANOUT },
  outKb: { value: 5.4, unit: "KB", what: "out of Redis for a task", from: FANOUT },
  fileKb: { value: 6.2, unit: "KB", what: "in Redis's file for a task", from: FANOUT },
  memoryKb: { value: 3.0, unit: "KB", what: "in Redis's memory for a kept result", from: FANOUT },
  replicaKb: {
    value: 8.9,
    unit: "KB",
    what: "to a replica for a task",
    from: "[sizing](operations.md#sizing), by hand: no command repeats it",
  },
  heldKb: {
    value: 17.6,
    unit: "KB",
    what: "in a gateway's memory for a request that waits",
    from: "`npm run bench -- held`",
  },
} satisfies Record<string, Input>;

export const CHOSEN = {
  cell: {
    value: 20_000,
    unit: "/s",
    what: "the most that one cell is given",
    from: "less than half of what hearing would bear",
  },
  share: {
    value: 0.7,
    unit: "",
    what: "of a core that is planned with",
    from: "30 % for bursts and a dead neighbour",
  },
  batch: { value: 64, unit: "", what: "tasks in a full batch", from: "`maxBatchSize`" },
  batchMs: {
    value: 200,
    unit: "ms",
    what: "a worker needs for it",
    from: "yours: `ferry plan --measure URL`",
  },
  load: { value: 0.85, unit: "", what: "load of the workers", from: "yours: `ferry plan --slo …`" },
  latencyMs: { value: 300, unit: "ms", what: "a request waits for its answer", from: "yours" },
  keptS: {
    value: 60,
    unit: "s",
    what: "a result is kept",
    from: "`results.ttlMs`, `cache.ttlMs`: ten and five minutes by default",
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

/** Primaries → what part of the tasks the fullest has; of sixteen shards three have 6, 5 and 5. */
const FULLEST: readonly (readonly [primaries: number, share: number])[] = [
  [1, 1],
  [3, 6 / 16],
  [4, 1 / 4],
  [8, 1 / 8],
  [16, 1 / 16],
];

export interface Scale {
  readonly cells: number;
  /** Tasks a second of one. */
  readonly cellRate: number;
  /** Of each process's core, for hearing of what others do. */
  readonly hearing: number;
  readonly gateways: number;
  readonly batchers: number;
  readonly primaries: number;
  readonly fullest: number;
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
  const hearing = (cellRate * f.scripts * f.noteUs) / MICRO;
  const room = f.share - hearing;
  if (room <= 0) throw new Error(`cells of ${cellRate}/s hear too much: ${hearing.toFixed(2)} of every core`);
  const processes = (us: number): number => Math.max(2, Math.ceil((cellRate * us) / MICRO / room));
  const redisCores = (cellRate * f.redisUs) / MICRO;
  const found = FULLEST.find(([, part]) => redisCores * part <= f.share);
  if (found === undefined) throw new Error(`sixteen shards are too few for cells of ${cellRate}/s`);
  const [primaries, fullest] = found;
  const gateways = processes(f.gatewayUs);
  const batchers = processes(f.batcherUs);
  const ofFullest = cellRate * fullest;
  const maxmemoryGb = (ofFullest * f.keptS * f.memoryKb * f.memoryRoom) / MICRO;
  const workers = Math.ceil(rate / ((f.batch / (f.batchMs / 1000)) * f.load));
  const servers = 2 * primaries * cells;
  // One core a process, two a Redis server: its file is rewritten by a child.
  const cores = cells * (gateways + batchers) + 2 * servers;
  // A machine of Redis's has maxmemory / 0.6, a process of Ferry's one GB.
  const memoryGb = (servers * maxmemoryGb) / 0.6 + cells * (gateways + batchers);
  const gbHour = (kb: number): number => (rate * kb * 3600) / MICRO;
  return {
    cells,
    cellRate,
    hearing,
    gateways,
    batchers,
    primaries,
    fullest,
    redisLoad: redisCores * fullest,
    maxmemoryGb,
    redisGbits: (ofFullest * (f.inKb + f.outKb + f.replicaKb) * 8) / MICRO,
    fileMbs: (ofFullest * f.fileKb) / 1000,
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

/** What is in a row, how it comes about, and its value. */
const ROWS: readonly (readonly [string, string, (scale: Scale) => string])[] = [
  ["cells", "rate ÷ `cell`, rounded up", (s) => number(s.cells)],
  ["rate of a cell", "rate ÷ cells", (s) => `${number(s.cellRate)}/s`],
  ["a process hears", "rate of a cell × `scripts` × `noteUs`", (s) => `${percent(s.hearing)} of its core`],
  [
    "gateways in a cell",
    "rate of a cell × `gatewayUs` ÷ (`share` − heard), at least 2",
    (s) => number(s.gateways),
  ],
  [
    "batchers in a cell",
    "rate of a cell × `batcherUs` ÷ (`share` − heard), at least 2",
    (s) => number(s.batchers),
  ],
  [
    "Redis primaries in a cell, each with a replica",
    "fewest of 1, 3, 4, 8, 16 whose fullest stays below `share`",
    (s) => number(s.primaries),
  ],
  ["the fullest one's core", "rate of a cell × its part × `redisUs`", (s) => percent(s.redisLoad)],
  [
    "its `maxmemory`",
    "rate × part × `keptS` × `memoryKb` × `memoryRoom`",
    (s) => `${number(s.maxmemoryGb, 1)} GB`,
  ],
  [
    "its network",
    "rate × part × (`inKb` + `outKb` + `replicaKb`)",
    (s) => `${number(s.redisGbits, 2)} Gbit/s`,
  ],
  ["its file", "rate × part × `fileKb`", (s) => `${number(s.fileMbs)} MB/s`],
  ["held requests in a gateway", "rate ÷ gateways × `latencyMs` × `heldKb`", (s) => `${number(s.heldMb)} MB`],
  [
    "**all cells:** gateways, batchers",
    "× cells",
    (s) => `${number(s.cells * s.gateways)}, ${number(s.cells * s.batchers)}`,
  ],
  ["Redis servers, replicas included", "2 × primaries × cells", (s) => number(2 * s.primaries * s.cells)],
  ["workers (GPUs)", "rate ÷ (`batch` ÷ `batchMs` × `load`)", (s) => number(s.workers)],
  ["cores for Ferry and Redis", "1 a process, 2 a Redis server", (s) => number(s.cores)],
  ["memory for them", "`maxmemory` ÷ 0.6 a Redis server, 1 GB a process", (s) => `${number(s.memoryGb)} GB`],
  ["GPUs cost", "× `gpuPrice`", (s) => `$${number(s.dollars.gpus)}/h`],
  [
    "Ferry and Redis cost",
    "cores × `corePrice` + memory × `gbPrice`",
    (s) => `$${number(s.dollars.cores + s.dollars.memory, 1)}/h`,
  ],
  [
    "replicas in another zone cost",
    "rate × `replicaKb` × `zonePrice`",
    (s) => `$${number(s.zoneDollars.replica, 1)}/h`,
  ],
  [
    "cells over three zones cost instead",
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
const RATES = [10_000, 100_000, 1_000_000];
const BLOCK = /(<!-- from scripts\/scale\.ts -->\n)[^]*?(\n<!-- to here -->)/;

/** The page as it is, and as it should be. */
export function page(): { readonly text: string; readonly wanted: string } {
  const text = readFileSync(PAGE, "utf8");
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
