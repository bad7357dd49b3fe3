/**
 * What those who look on cost a request, one by one: the events of a request, replayed without a request.
 *
 *   node bench/listeners.ts                 a table, in about a minute
 *   FERRY_CLI=/other/checkout/src/cli.ts node bench/listeners.ts
 *
 * For each part of telemetry a Ferry is started in this process with that part alone, and the events that a request
 * and its share of a batch cause are published on its list, kind by kind, some hundred thousand times. The last
 * line is for an event that comes from a gateway process (`src/observe/relay.ts`). The column
 * `always` is a Ferry without any (its tally counts nevertheless); less that, the others are what each part spends on
 * the requests' own thread: nanoseconds for each event, and below them for a whole request. What the part does later (a frame twice a second, a scrape, rows to PostgreSQL,
 * spans to a collector) is not in it; the scenario `telemetry` has that too.
 *
 * Each figure is the lowest of several rounds: what else runs on the machine can only add to it.
 */
import { join } from "node:path";
import { setImmediate as turn } from "node:timers/promises";
import { pathToFileURL } from "node:url";
import { SystemClock } from "../src/app/clock.ts";
import { type EventFields, type EventName, Events } from "../src/observe/events.ts";
import { EventRelay, replayEvents } from "../src/observe/relay.ts";

const cli = process.env["FERRY_CLI"] ?? join(import.meta.dirname, "../src/cli.ts");
/** Tasks in a batch. */
const size = 32;
/** One request in this many is traced. */
const tracedOneIn = 100;
const rounds = 12;
const perRound = 50_000;
/** So many events are made, then published, then the next. */
const chunk = 250;
const model = "bench";
const tier = "enterprise";
/** Nobody listens there: rows and spans are thrown away in the end. */
const nowhere = "127.0.0.1:9";

const unseen = { metrics: false, dashboard: false, logLevel: "silent" };
const none = { recent: 0 };
/** Column → the settings that turn on this part alone; the first has none. */
const parts: Readonly<Record<string, Settings>> = {
  always: { telemetry: unseen, requestLog: none },
  metrics: { telemetry: { ...unseen, metrics: true }, requestLog: none },
  dashboard: { telemetry: { ...unseen, dashboard: true }, requestLog: none },
  "recent log": { telemetry: unseen, requestLog: {} },
  "PostgreSQL log": {
    telemetry: unseen,
    requestLog: { recent: 0, url: `postgres://ferry@${nowhere}/postgres` },
  },
  traces: {
    telemetry: { ...unseen, otlpUrl: `http://${nowhere}`, sample: 1 / tracedOneIn },
    requestLog: none,
  },
};

interface Settings {
  readonly telemetry: object;
  readonly requestLog: object;
}

/** Makes the n-th event of its kind as its sender would: new objects, since a listener may keep them. */
type Make<Name extends EventName> = (n: number) => EventFields[Name];

const note = (n: number): EventFields["batch.started"]["batch"] => ({
  id: batchId(n),
  size,
  reason: n % 3 === 0 ? "full" : "idle",
  worker: `gpu-${1 + (n % 4)}`,
  startedAt: now(),
  why: "a worker was free",
});

const kinds: { readonly [Name in EventName]?: Make<Name> } = {
  "task.queued": (n) => ({ id: taskId(n), model, tier: 0, at: now() }),
  "request.answered": (n) => ({
    id: taskId(n),
    method: "POST",
    route: "/v1/inference",
    model,
    tier,
    tenant: "anonymous",
    status: 200,
    code: "",
    startedAt: now() - 105,
    latencyMs: 100 + (n % 16),
    work: "own",
    ending: { queuedAt: now() - 104, attempt: 1, settledAt: now() - 1, batch: note(n) },
    trace:
      n % tracedOneIn === 0
        ? { traceId: batchId(n).replaceAll("-", ""), spanId: "00f067aa0ba902b7", parentId: "", state: "" }
        : undefined,
  }),
  "batch.started": (n) => ({
    model,
    batch: note(n),
    maxBatchSize: 64,
    oldestWaitMs: 12,
    tasks: Array.from({ length: size }, (_, at) => batched(n * size + at)),
  }),
  "batch.answered": (n) => ({
    model,
    batchId: batchId(n),
    worker: `gpu-${1 + (n % 4)}`,
    size,
    kind: "answered",
    call: 1,
    startedAt: now() - 100,
    serviceMs: 100,
  }),
  "batch.settled": (n) => ({
    model,
    batchId: batchId(n),
    worker: `gpu-${1 + (n % 4)}`,
    size,
    reason: "idle",
    calls: 1,
    busyMs: 100,
    shape: { rows: size, longest: 96, total: 90 * size, inOrder: 412 },
    savedMs: 31,
  }),
};
const names = Object.keys(kinds) as EventName[];

function batched(n: number): EventFields["batch.started"]["tasks"][number] {
  const traced = n % tracedOneIn === 0;
  const task = {
    id: taskId(n),
    tenant: "anonymous",
    tier: 0,
    model,
    input: '"hello"',
    parameters: "",
    content: "",
    createdAt: now(),
    deadlineAt: now() + 4000,
    ...(traced && { trace: `00-${batchId(n).replaceAll("-", "")}-00f067aa0ba902b7-01` }),
  };
  return { task, attempt: 1, queuedAt: now() };
}

function now(): number {
  return performance.timeOrigin + performance.now();
}

function taskId(n: number): string {
  return `01M7${String(n).padStart(22, "0")}`;
}

function batchId(n: number): string {
  return `00000000-0000-4000-8000-${String(n).padStart(12, "0")}`;
}

/** How often it happens for one request. */
function perRequest(name: EventName): number {
  return name.startsWith("batch.") ? 1 / size : 1;
}

/** Nanoseconds that listeners take for one event. They are made outside of the time that is measured. */
async function time(events: Events, name: EventName): Promise<number> {
  const make = kinds[name] as Make<EventName>;
  const chunks = Math.ceil((perRound * perRequest(name)) / chunk);
  const made: EventFields[EventName][] = [];
  let lowest = Infinity;
  let n = 0;
  for (let round = 0; round <= rounds; round++) {
    let ms = 0;
    for (let at = 0; at < chunks; at++) {
      for (let i = 0; i < chunk; i++) made[i] = make(n++);
      const startedAt = performance.now();
      for (let i = 0; i < chunk; i++) events.emit(name, made[i] as never);
      ms += performance.now() - startedAt;
    }
    // The first one only warms up.
    if (round > 0) lowest = Math.min(lowest, (ms * 1e6) / (chunks * chunk));
    await turn(); // what was put off has its turn too
  }
  return lowest;
}

/** As a gateway among several sees it: some requests of each batch are its own. */
function relayable(n: number): EventFields["request.answered"] {
  const request = kinds["request.answered"]!(n);
  return { ...request, ending: { ...request.ending!, batch: note(Math.floor(n / 8)) } };
}

/** Nanoseconds for a request that a gateway process relays: there, and in a core process with its listeners. */
async function timeRelayed(core: Events): Promise<{ gateway: number; replayed: number }> {
  const gateway = new Events();
  const messages: string[] = [];
  const relay = new EventRelay(gateway, new SystemClock(), (text) => messages.push(text) > 0);
  const lowest = { gateway: Infinity, replayed: Infinity };
  let n = 0;
  for (let round = 0; round <= rounds; round++) {
    const ms = { gateway: 0, replayed: 0 };
    for (let at = 0; at < perRound / chunk; at++) {
      const made = Array.from({ length: chunk }, () => relayable(n++));
      const startedAt = performance.now();
      for (const each of made) gateway.emit("request.answered", each);
      relay.flush();
      const sentAt = performance.now();
      for (const text of messages.splice(0)) replayEvents(text, core);
      ms.gateway += sentAt - startedAt;
      ms.replayed += performance.now() - sentAt;
    }
    if (round === 0) continue;
    lowest.gateway = Math.min(lowest.gateway, (ms.gateway * 1e6) / perRound);
    lowest.replayed = Math.min(lowest.replayed, (ms.replayed * 1e6) / perRound);
    await turn();
  }
  relay.close();
  return lowest;
}

async function timesWith(settings: Settings): Promise<number[]> {
  return withFerry(settings, async (events) => {
    const times: number[] = [];
    for (const name of names) times.push(await time(events, name));
    return times;
  });
}

async function withFerry<Result>(
  settings: object,
  use: (events: Events) => Promise<Result>,
): Promise<Result> {
  const at = (file: string): string => pathToFileURL(join(cli, "..", file)).href;
  const { parseConfig } = (await import(
    at("app/config/load.ts")
  )) as typeof import("../src/app/config/load.ts");
  const { startFerry } = (await import(at("app/ferry.ts"))) as typeof import("../src/app/ferry.ts");
  const file = {
    listen: "127.0.0.1:0",
    admin: { listen: "127.0.0.1:0" },
    models: [{ name: model, backend: { kind: "simulated", workers: 4 } }],
    ...settings,
  };
  const { config, problems } = parseConfig(JSON.stringify(file), "listeners.yaml", {});
  if (config === undefined) throw new Error(problems[0]?.message);
  const ferry = await startFerry(config);
  try {
    return await use(ferry.events);
  } finally {
    await ferry.stop();
  }
}

function row(name: string, cells: readonly string[]): string {
  return `${name.padEnd(28)}${cells.map((cell) => cell.padStart(16)).join("")}\n`;
}

const columns = Object.keys(parts);
const measured: number[][] = [];
// The first one runs code that was never optimised for more than one listener.
await timesWith(parts["always"]!);
for (const [column, settings] of Object.entries(parts)) {
  process.stderr.write(`${column}\n`);
  try {
    measured.push(await timesWith(settings));
  } catch (error) {
    // One part that cannot start must not take the figures of the others with it.
    process.stderr.write(`${column}: ${error instanceof Error ? error.message : String(error)}\n`);
    measured.push(names.map(() => NaN));
  }
}
const [baseline, ...others] = measured;
const added = [baseline!, ...others.map((times) => times.map((ns, at) => ns - baseline![at]!))];
const totals = added.map((times) => times.reduce((sum, ns, at) => sum + ns * perRequest(names[at]!), 0));
const cell = (ns: number): string => `${ns.toFixed(0)} ns`;
process.stdout.write(row("one event", columns));
names.forEach((name, at) => {
  const share = perRequest(name) === 1 ? "" : ` (1/${size})`;
  process.stdout.write(
    row(
      name + share,
      added.map((times) => cell(times[at]!)),
    ),
  );
});
process.stdout.write(row("for a request", totals.map(cell)));
const sum = totals.reduce((total, ns) => total + ns, 0);
process.stdout.write(`all together: ${(sum / 1000).toFixed(2)} µs a request\n`);
const relayed = await withFerry({ telemetry: { logLevel: "silent" } }, timeRelayed);
process.stdout.write(
  `relayed from a gateway process: ${cell(relayed.gateway)} there; ${cell(relayed.replayed)} in the core with its ` +
    "default listeners\n",
);
process.exit(0);
