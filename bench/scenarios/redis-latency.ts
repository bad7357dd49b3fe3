/**
 * `redis-latency`: what the way through Redis adds when nothing stands in the way, and how soon a waiting
 * caller hears of an end at another gateway.
 *
 * Idle latency is measured as in `latency-idle` (one idle worker of 100 ms, one request at a time), for the
 * embedded engine and for gateway + Redis + batcher, in turns; nothing is pinned in either. The figure is the
 * difference of the two p50: the worker and the lateness of its timer are in both, so only the engines are
 * left. Percentiles are over all turns of an engine together.
 *
 * The wake-up: two gateways. Each task is put at A with `Prefer: respond-async`, and its result is waited for
 * at B (`GET /v1/result/{id}?wait=10`) while a worker of 300 ms has it. Wake-up latency is the instant at
 * which B's answer has arrived here minus the task's `settled_at`, which is taken by the batcher before it
 * tells Redis: the write, the wake-up and the answer are all in it. All clocks are those of one machine;
 * `settled_at` is cut to whole milliseconds, so the figures are up to 1 ms too high, never too low. A poll
 * that came after the end has measured nothing, and is counted.
 */
import { Agent, request, type IncomingMessage, type RequestOptions } from "node:http";
import { text } from "node:stream/consumers";
import { setTimeout as pause } from "node:timers/promises";
import { Markers, type Target } from "../../src/cli/bench/connection.ts";
import { measure, type Measured } from "../generator.ts";
import { Histogram } from "../../src/cli/bench/histogram.ts";
import { cpuMs, machineCpuMs } from "../process.ts";
import { Fleet } from "../redis.ts";
import { FerryServer } from "../server.ts";
import { figure, loadNotes, type Bench, type Figure, type Report, type Scenario } from "../scenario.ts";

const workerMs = 100;
const wakeWorkerMs = 300;
const wakeRate = 50;

export const redisLatency: Scenario = {
  name: "redis-latency",
  summary: "one request at a time through Redis and without it, in turns; and the wake-up at another gateway",
  run,
};

async function run(bench: Bench): Promise<Report> {
  const idle = await idleLatency(bench);
  const wakes = await wakeUps(bench);
  return { figures: [...idle.figures, ...wakes.figures], notes: [...idle.notes, ...wakes.notes] };
}

async function idleLatency(bench: Bench): Promise<Report> {
  const setup = { dir: bench.dir, models: [{ name: "bench", workers: 1, baseMs: workerMs }] };
  await using embedded = await FerryServer.start(setup);
  await using fleet = await Fleet.start(setup);
  const turns = bench.quick ? 2 : 5;
  const embeddedRuns: Measured[] = [];
  const redisRuns: Measured[] = [];
  for (let turn = 1; turn <= turns; turn++) {
    // Code that has not run yet is slow, and no server in use is in that state.
    const warmMs = turn === 1 ? 3000 : 500;
    bench.progress(`turn ${turn} of ${turns}: embedded`);
    embeddedRuns.push(await slice(bench, embedded, warmMs, {}));
    bench.progress(`turn ${turn} of ${turns}: redis`);
    redisRuns.push(await slice(bench, fleet.gateway, warmMs, fleet.behind));
  }
  return idleReport(embeddedRuns, redisRuns);
}

function slice(
  bench: Bench,
  server: FerryServer,
  warmMs: number,
  behind: Readonly<Record<string, number>>,
): Promise<Measured> {
  const requests = bench.quick ? 30 : 60;
  return measure(
    {
      target: server.target,
      bodyBytes: 256,
      verify: true,
      lessMs: workerMs,
      warmMs,
      measureMs: requests * workerMs * 3,
      drainMs: 2000,
      load: { kind: "closed", callers: 1, requests },
    },
    { serverPid: server.pid, behind },
  );
}

function idleReport(embeddedRuns: readonly Measured[], redisRuns: readonly Measured[]): Report {
  const embedded = together(embeddedRuns);
  const redis = together(redisRuns);
  const added = redis.percentileMs(50) - embedded.percentileMs(50);
  const errors = [...embeddedRuns, ...redisRuns].reduce((sum, run) => sum + run.errors, 0);
  return {
    figures: [
      figure("added over embedded, p50", added, "ms", "<", 3),
      figure("embedded, added to the worker's time, p50", embedded.percentileMs(50), "ms"),
      figure("redis, added to the worker's time, p50", redis.percentileMs(50), "ms"),
      figure("embedded, added to the worker's time, p99", embedded.percentileMs(99), "ms"),
      figure("redis, added to the worker's time, p99", redis.percentileMs(99), "ms"),
      figure("requests, each engine", Math.min(embedded.count, redis.count), "count"),
      figure("errors, idle", errors, "count", "<=", 0),
    ],
    notes: [
      ...embeddedRuns.flatMap((run, i) => loadNotes(run, `the generator, embedded turn ${i + 1},`)),
      ...redisRuns.flatMap((run, i) => loadNotes(run, `the generator, redis turn ${i + 1},`)),
    ],
  };
}

function together(runs: readonly Measured[]): Histogram {
  const all = new Histogram();
  for (const run of runs) all.merge(run.latency);
  return all;
}

/** One task, put at A and waited for at B. */
interface Wait {
  readonly id: string;
  /** Milliseconds since 1970, as Ferry counts them: when the poll was sent, and when its answer was here. */
  readonly askedAt: number;
  readonly answeredAt: number;
}

async function wakeUps(bench: Bench): Promise<Report> {
  // Each task has a worker for itself: the load is light, and no end waits for another's.
  const workers = Math.ceil((wakeRate * wakeWorkerMs) / 1000) * 2;
  const models = [{ name: "bench", workers, baseMs: wakeWorkerMs, policy: "latency" as const }];
  await using fleet = await Fleet.start({ dir: bench.dir, models }, 2);
  const [a, b] = fleet.gateways as [FerryServer, FerryServer];
  const client = new Client(a.target, b.target);
  bench.progress("wake-up: warming up");
  await client.run(bench.quick ? 50 : 150);
  const tasks = bench.quick ? 150 : 600;
  bench.progress(`wake-up: ${tasks} tasks, ${wakeRate} a second`);
  const others = othersMs([process.pid, a.pid, b.pid, fleet.batcher.pid, fleet.redis.pid]);
  const { waits, failures } = await client.run(tasks);
  const otherCores = others() / ((tasks * 1000) / wakeRate);
  client.close();
  // After the load, so that asking does not disturb it.
  const latency = new Histogram();
  let late = 0;
  for (const { id, askedAt, answeredAt } of waits) {
    const settledAt = await b.settledAt(id);
    if (askedAt < settledAt) latency.record(answeredAt - settledAt);
    else late += 1;
  }
  return { figures: wakeFigures(latency, tasks, late, failures), notes: wakeNotes(failures, otherCores) };
}

function wakeFigures(latency: Histogram, tasks: number, late: number, failures: readonly string[]): Figure[] {
  return [
    figure("wake-up at another gateway, p50", latency.percentileMs(50), "ms"),
    figure("wake-up at another gateway, p99", latency.percentileMs(99), "ms", "<=", 10),
    figure("wake-up at another gateway, max", latency.maxMs, "ms"),
    figure("wake-ups", latency.count, "count", ">=", Math.min(500, tasks)),
    figure("polls after the end", late, "count"),
    figure("errors, wake-up", failures.length, "count", "<=", 0),
  ];
}

function wakeNotes(failures: readonly string[], otherCores: number): string[] {
  const notes = ["wake-up: one machine's clocks; settled_at is in whole ms, so up to 1 ms too high"];
  if (otherCores > 0.1) {
    const share = `${(otherCores * 100).toFixed(0)} % of a core`;
    notes.push(`wake-up: the machine was shared: others used ${share}; measure again in quiet`);
  }
  if (failures.length > 0) notes.push(`wake-up: the first of the errors: ${failures[0]}`);
  return notes;
}

/** What the machine used since, beside these processes. */
function othersMs(pids: readonly number[]): () => number {
  const read = (): number => {
    const { usedMs, stolenMs } = machineCpuMs();
    return pids.reduce((rest, pid) => rest - cpuMs(pid), usedMs + stolenMs);
  };
  const before = read();
  return () => read() - before;
}

/** In this process, which has nothing else to do meanwhile. */
class Client {
  readonly #a: Target;
  readonly #b: Target;
  readonly #agent = new Agent({ keepAlive: true });
  readonly #markers = new Markers();

  constructor(a: Target, b: Target) {
    this.#a = a;
    this.#b = b;
  }

  /** Tasks leave at their instants, whatever became of the ones before. */
  async run(tasks: number): Promise<{ waits: Wait[]; failures: string[] }> {
    const startAt = performance.now();
    const running: Promise<Wait>[] = [];
    for (let i = 0; i < tasks; i++) {
      await pause(Math.max(0, startAt + (i * 1000) / wakeRate - performance.now()));
      const waiting = this.#one();
      // Heard at the end; until then a failure must not count as one that nobody hears.
      waiting.catch(() => {});
      running.push(waiting);
    }
    const ends = await Promise.allSettled(running);
    return {
      waits: ends.flatMap((end) => (end.status === "fulfilled" ? [end.value] : [])),
      failures: ends.flatMap((end) => (end.status === "rejected" ? [String(end.reason)] : [])),
    };
  }

  close(): void {
    this.#agent.destroy();
  }

  async #one(): Promise<Wait> {
    const marker = this.#markers.take();
    const { host, port, path } = this.#a;
    const headers = { "content-type": "application/json", prefer: "respond-async" };
    const body = JSON.stringify({ input: marker });
    const put = await this.#ask({ host, port, path, method: "POST", headers }, 202, body);
    const id = (JSON.parse(put) as { task_id: string }).task_id;
    const askedAt = now();
    const poll = { host: this.#b.host, port: this.#b.port, path: `/v1/result/${id}?wait=10` };
    const result = await this.#ask(poll, 200);
    const answeredAt = now();
    if (!result.includes(marker)) throw new Error(`the answer is not this task's: ${result.slice(0, 200)}`);
    return { id, askedAt, answeredAt };
  }

  /** Resolves with the body once all of it is here. */
  async #ask(options: RequestOptions, status: number, body?: string): Promise<string> {
    const response = await new Promise<IncomingMessage>((resolve, reject) => {
      const signal = AbortSignal.timeout(15_000);
      request({ ...options, agent: this.#agent, signal }, resolve)
        .on("error", reject)
        .end(body);
    });
    const answer = await text(response);
    if (response.statusCode === status) return answer;
    throw new Error(`${options.path} answered ${response.statusCode}: ${answer.slice(0, 200)}`);
  }
}

/** As `clock.ts` reads it. */
function now(): number {
  return performance.timeOrigin + performance.now();
}
