/**
 * What those who look on do after a request is answered: rows, spans, frames. CPU of this process, which is Ferry's
 * side of it; of rows and spans also the part that is spent on the requests' own thread, the rest being that of
 * `src/observe/sender.ts`. `listeners.ts` has what they cost at once.
 *
 *   node bench/later.ts                     needs PostgreSQL, half a minute
 *
 * Rows go to a real PostgreSQL, spans to a server in a process of its own that throws them away (`watchers.ts`), frames
 * nowhere. Each figure is the lowest of several rounds; the wall time of a row is the mean of that round. The thread's
 * own start is in none of them.
 */
import { randomUUID } from "node:crypto";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Events } from "../src/observe/events.ts";
import { RowStore } from "../src/observe/request-log-postgres.ts";
import { RequestRow } from "../src/observe/request-log.ts";
import { Sender } from "../src/observe/sender.ts";
import { KIND, sentCollector } from "../src/observe/span-buffer.ts";
import { Stage, workerSight } from "../test/observe/dashboard/stage.ts";
import { PostgresServer } from "./postgres.ts";
import { Child } from "./process.ts";
import { freePorts, ready } from "./server.ts";
import { someRequest } from "./watchers.ts";

const rounds = 8;

interface Cost {
  /** Of all threads, and of the one that requests run on. */
  readonly cpu: number;
  readonly own: number;
  readonly wall: number;
}

/** The best round's CPU and wall time for one of `count`, in µs. */
async function best(count: number, round: () => Promise<unknown>): Promise<Cost> {
  let lowest: Cost = { cpu: Infinity, own: Infinity, wall: Infinity };
  for (let each = 0; each < rounds; each++) {
    const [cpuBefore, ownBefore, wallBefore] = [
      process.cpuUsage(),
      process.threadCpuUsage(),
      performance.now(),
    ];
    await round();
    const { user, system } = process.cpuUsage(cpuBefore);
    const own = process.threadCpuUsage(ownBefore);
    const cpu = (user + system) / count;
    const wall = (1000 * (performance.now() - wallBefore)) / count;
    if (cpu < lowest.cpu) lowest = { cpu, own: (own.user + own.system) / count, wall };
  }
  return lowest;
}

async function rows(dir: string, sender: Sender): Promise<string> {
  await using postgres = await PostgresServer.start(dir, { core: undefined });
  const chunks = Array.from({ length: 20 }, (_, chunk) =>
    Array.from({ length: 1000 }, (__, at) => new RequestRow(1000 * chunk + at + 1, someRequest(at))),
  );
  const stores: RowStore[] = [];
  const { cpu, own, wall } = await best(20_000, async () => {
    // Another instance: the same rows are then others.
    const store = new RowStore(sender, { url: postgres.url, timeoutMs: 10_000, instance: randomUUID() });
    stores.push(store);
    await store.open();
    for (const chunk of chunks) await store.insert(chunk);
  });
  for (const store of stores) store.destroy();
  return (
    `a row of the request log, in chunks of 1,000: ${cpu.toFixed(1)} µs of CPU, ${own.toFixed(1)} of them on the ` +
    `requests' thread; ${wall.toFixed(1)} µs until PostgreSQL has it`
  );
}

async function spans(sender: Sender): Promise<string> {
  const [port] = await freePorts(1);
  await using sink = new Child(join(import.meta.dirname, "watchers.ts"), [String(port)]);
  await ready(sink);
  const url = `http://127.0.0.1:${port}/v1/traces`;
  const about = { "service.name": "ferry" };
  const collector = sentCollector(sender, { url, timeoutMs: 5000, about, version: "0" });
  const place = { traceId: randomUUID().replaceAll("-", ""), spanId: "b7ad6b7169203331" };
  const attributes = {
    "http.request.method": "POST",
    "http.response.status_code": 200,
    "http.route": "/v1/inference",
    "ferry.model": "bench",
    "ferry.tier": "enterprise",
    "ferry.task.id": "01M7FN2R1BHKNK6P2NA70JSWS6B7AA0AWXXF",
    "ferry.attempt": 1,
    "ferry.batch.id": randomUUID(),
  };
  const facts = {
    name: "POST /v1/inference",
    kind: KIND.server,
    place,
    startedAt: 1,
    endedAt: 2,
    attributes,
  };
  const { cpu, own } = await best(5120, async () => {
    for (let bundle = 0; bundle < 20; bundle++) {
      const { kind, why } = await collector.deliver(Array.from({ length: 256 }, () => facts));
      if (kind !== "taken") throw new Error(why);
    }
  });
  await collector.close();
  return `a span, sent in bundles of 256: ${cpu.toFixed(1)} µs of CPU, ${own.toFixed(1)} of them on the requests' thread`;
}

/** 16 workers, 400 batches a second. */
async function frames(): Promise<string> {
  using stage = new Stage();
  const names = Array.from({ length: 16 }, (_, at) => `gpu-${at + 1}`);
  stage.model.workers = names.map((name) => workerSight(name, "busy"));
  let ms = 0;
  let batches = 0;
  let bytes = 0;
  const halfSecond = async (): Promise<void> => {
    for (let step = 0; step < 12; step++) {
      await stage.to((ms += 40));
      for (const worker of names) {
        const id = `b${++batches}`;
        stage.begin(id, worker, [0, 0, 1, 2]);
        stage.end(id, worker, 4, 39);
      }
      for (let request = 0; request < 400; request++) stage.answer(120 + (request % 30));
    }
  };
  for (let half = 0; half < 80; half++) await halfSecond();
  let lowest = Infinity;
  for (let half = 0; half < 40; half++) {
    await halfSecond();
    const before = performance.now();
    bytes = JSON.stringify(stage.fold.frame()).length;
    lowest = Math.min(lowest, performance.now() - before);
  }
  const before = performance.now();
  const hello = JSON.stringify(stage.fold.hello()).length;
  const helloMs = performance.now() - before;
  const size = `${(bytes / 1024).toFixed(1)} KB`;
  return (
    `a frame (16 workers, 400 batches and 10,000 requests a second): ${lowest.toFixed(2)} ms, ${size}\n` +
    `a hello with a minute of that: ${helloMs.toFixed(1)} ms, ${(hello / 1024).toFixed(0)} KB`
  );
}

const dir = mkdtempSync(join(tmpdir(), "ferry-later-"));
const sender = new Sender(new Events());
try {
  for (const line of [await rows(dir, sender), await spans(sender), await frames()]) console.log(line);
} finally {
  await sender.close();
  rmSync(dir, { recursive: true, force: true });
}
