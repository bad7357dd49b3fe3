/**
 * `embeddings`: what Ferry gains in front of a server that takes as long for one input as for many.
 *
 * The server (bench/embeddings.ts) has OpenAI's embeddings API, takes 100 ms for a call and does one at a time. A
 * thousand callers in a closed loop send one text each: first to the server, then to Ferry in front of it, in the same
 * run, by the same generator, each time with a server that has just started. They ask for base64, as OpenAI's SDKs
 * do; each looks for its own input's marker in its embedding. Everything but the URL and the timeouts is left at
 * Ferry's defaults, so a batch has 64 at most and the bound is 64 times.
 *
 * Without Ferry a thousand callers wait 100 s each: the run ends with most of them unanswered, which is not an error
 * of the server. A status other than 200, a broken connection or another's embedding is.
 */
import { join } from "node:path";
import type { Target } from "../../src/cli/bench/connection.ts";
import { measure, type Measured } from "../generator.ts";
import { Child } from "../process.ts";
import {
  durationMs,
  figure,
  loadNotes,
  tickText,
  type Bench,
  type Report,
  type Scenario,
} from "../scenario.ts";
import { FerryServer, freePorts, host, ready, workBetween, type Counters } from "../server.ts";

const callers = 1000;
const callMs = 100;
const maxFiles = 4096;
const path = "/v1/embeddings";
/** A thousand callers at 640 a second wait 1.6 s, and the default deadline is 4 s. */
const timeouts = { queueMs: 10_000, workerMs: 5000, totalMs: 15_000 };

export const embeddings: Scenario = {
  name: "embeddings",
  summary: "1,000 callers of one text each, a server of 100 ms per call: with and without Ferry",
  run,
};

async function run(bench: Bench): Promise<Report> {
  bench.progress("without Ferry");
  const direct = await withoutFerry(bench);
  await using model = await startModel();
  await using server = await FerryServer.start({
    dir: bench.dir,
    core: bench.cores?.server,
    maxFiles,
    models: [{ name: "bench", protocol: "openai-embeddings", urls: [model.url], timeouts }],
  });
  const counters: Counters[] = [];
  const read = async (): Promise<void> => void counters.push(await server.counters());
  const ferry = await load(bench, { ...server.target, path }, server.pid, {
    drainMs: 5000,
    behind: { model: model.pid },
    onStart: read,
    onStop: read,
  });
  const work = workBetween(counters[0]!, counters[1]!);
  const faults = direct.errors - direct.unanswered;
  return {
    figures: [
      figure("throughput, times that without Ferry", ferry.rate / direct.rate, "ratio", ">=", 15),
      figure("throughput without Ferry", direct.rate, "req/s"),
      figure("throughput with Ferry", ferry.rate, "req/s"),
      figure("latency with Ferry, p50", ferry.latency.percentileMs(50), "ms"),
      figure("latency with Ferry, p99", ferry.latency.percentileMs(99), "ms"),
      figure("mean batch", work.meanBatch, "count"),
      figure("server busy, with Ferry", work.busyShare * 100, "%"),
      figure("ferry CPU", ferry.serverCpuShare * 100, "%"),
      figure("crossed", direct.crossed + ferry.crossed, "count", "<=", 0),
      figure("errors", faults + ferry.errors, "count", "<=", 0),
    ],
    notes: [...loadNotes(ferry), ...(faults > 0 ? loadNotes(direct, "the generator without Ferry") : [])],
  };
}

/** With a server of its own: what it was asked and nobody waits for any more would hold up the next turn. */
async function withoutFerry(bench: Bench): Promise<Measured> {
  await using model = await startModel();
  return await load(bench, { host, port: model.port, path }, model.pid, { drainMs: 0 });
}

async function startModel(): Promise<AsyncDisposable & { url: string; port: number; pid: number }> {
  const [port] = await freePorts(1);
  const file = join(import.meta.dirname, "../embeddings.ts");
  const child = new Child(file, [String(port), String(callMs)], { maxFiles });
  await ready(child);
  return {
    url: `http://${host}:${port}${path}`,
    port: port!,
    pid: child.pid,
    [Symbol.asyncDispose]: () => child[Symbol.asyncDispose](),
  };
}

interface Turn {
  readonly behind?: Readonly<Record<string, number>>;
  readonly drainMs: number;
  onStart?(): Promise<void>;
  onStop?(): Promise<void>;
}

function load(bench: Bench, target: Target, serverPid: number, turn: Turn): Promise<Measured> {
  const { drainMs, ...heard } = turn;
  const measureMs = durationMs(bench, 20);
  return measure(
    {
      target,
      bodyBytes: 256,
      fields: { model: "bench", encoding_format: "base64" },
      verify: true,
      warmMs: 3000,
      measureMs,
      drainMs,
      load: { kind: "closed", callers: bench.quick ? callers / 5 : callers },
    },
    {
      core: bench.cores?.generator,
      maxFiles,
      serverPid,
      onTick: (tick) => bench.progress(tickText(tick, measureMs / 1000)),
      ...heard,
    },
  );
}
