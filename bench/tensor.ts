/**
 * What an output of 768 float32 costs on its way from a Python function to a client: `node bench/tensor.ts`, about
 * fifty seconds, a table on stdout. It has to be alone on the machine.
 *
 *   steps      each step in Ferry by itself, µs an output: base64 from the block, its text, what the client is sent
 *   worker     a Python worker by itself, batches of 64 in a loop, one or two in its hands: ms a batch, and CPU time of
 *              Node and of Python, µs an output. The function computes nothing: this is what a GPU would wait for.
 *   ferry      a whole Ferry under 128 callers, on a core of its own where there are two: requests a second, and CPU
 *              time of Ferry's process, µs a request
 *
 * Functions: `rows` returns one array, `later` a callable that does, `list` lists of floats, as JSON. Clients of `rows`
 * take base64, bytes or numbers.
 */
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { PythonBackend } from "../src/workers/backend/python.ts";
import { SystemClock } from "../src/app/clock.ts";
import { readBinary, tensorHead, withHead } from "../src/core/tensor.ts";
import { outputText } from "../src/gateway/reply.ts";
import { Events } from "../src/observe/events.ts";
import { measure } from "./generator.ts";
import { childrenCpuMs, killChildren, pickCores } from "./process.ts";
import { FerryServer, workBetween } from "./server.ts";

const BATCH = 64;
const WIDTH = 768;
const CALLERS = 128;

const MODEL = `
import array, math

FLOATS = array.array("f", [math.sin(at + 1) for at in range(${BATCH * WIDTH})])
LISTS = [[float(each) for each in FLOATS[at * ${WIDTH} : (at + 1) * ${WIDTH}]] for at in range(${BATCH})]

def rows(inputs):
    count = len(inputs)
    return memoryview(FLOATS)[: count * ${WIDTH}].cast("B").cast("f", (count, ${WIDTH}))

def later(inputs):
    return lambda: rows(inputs)

def list(inputs):
    return LISTS[: len(inputs)]
`;

const dir = mkdtempSync(join(tmpdir(), "ferry-bench-"));
const file = join(dir, "model.py");
writeFileSync(file, MODEL);

function line(name: string, ...figures: readonly string[]): void {
  console.log(`${name.padEnd(34)}${figures.map((each) => each.padStart(18)).join("")}`);
}

/** µs a call; the best of five, since whatever disturbs only makes it slower. */
function time(call: (at: number) => unknown, calls = 20_000): number {
  let best = Infinity;
  for (let run = 0; run < 5; run++) {
    const startedAt = performance.now();
    for (let at = 0; at < calls; at++) call(at);
    best = Math.min(best, (1000 * (performance.now() - startedAt)) / calls);
  }
  return best;
}

function steps(): void {
  const floats = Float32Array.from({ length: BATCH * WIDTH }, (_, at) => Math.sin(at + 1));
  const block = Buffer.from(floats.buffer);
  const head = tensorHead("float32", [WIDTH]);
  const rowBytes = 4 * WIDTH;
  const row = (at: number): string => {
    const start = (at % BATCH) * rowBytes;
    return withHead(head, block.toString("base64", start, start + rowBytes));
  };
  const texts = Array.from({ length: BATCH }, (_, at) => row(at));
  const jsons = Array.from({ length: BATCH }, (_, at) =>
    JSON.stringify([...floats.subarray(at * WIDTH, (at + 1) * WIDTH)]),
  );
  const jsonBlock = Buffer.from(jsons.join(""));
  const us = (figure: number): string => `${figure.toFixed(2)} µs`;
  const body = Buffer.alloc(64 * 1024);
  const sent = (text: string): number => body.write(`{"request_id":"01",${text},"metadata":{}}`, "latin1");
  line("steps, an output", "µs");
  line("base64 and text of a row", us(time(row)));
  line("cut out again", us(time((at) => readBinary(texts[at % BATCH]!))));
  const binary = (at: number) => readBinary(texts[at % BATCH]!)!;
  line("as base64, written", us(time((at) => sent(outputText(binary(at), "base64")))));
  line("as bytes", us(time((at) => Buffer.from(binary(at).base64, "base64"))));
  line("as numbers, written", us(time((at) => sent(outputText(binary(at), "json")), 2000)));
  const length = jsons[0]!.length;
  line("JSON: text of a list", us(time((at) => jsonBlock.toString("utf8", 0, length + (at % 2)))));
  line(
    "JSON: counted and written",
    us(time((at) => Buffer.byteLength(jsons[at % BATCH]!) + sent(jsons[at % BATCH]!))),
  );
  console.log();
}

async function worker(name: string, batches: number): Promise<void> {
  const options = { workers: 1, python: "python3", startTimeoutMs: 20_000, maxReplyBytes: 1 << 26 };
  const around = { model: "m", clock: new SystemClock(), events: new Events() };
  const backend = new PythonBackend({ ...options, function: `${file}:${name}` }, around);
  await backend.start();
  const tasks = Array.from({ length: BATCH }, (_, at) => ({
    id: `${at}`,
    input: JSON.stringify("x".repeat(500)),
  }));
  const never = new AbortController().signal;
  for (const hands of [1, 2]) {
    let left = batches;
    const loop = async (): Promise<void> => {
      for (; left > 0; left--) {
        const { kind } = await backend.workers[0]!.run({ id: "b", tasks, parameters: "" }, never);
        if (kind !== "answered") throw new Error(`${name}: ${kind}`);
      }
    };
    left = Math.ceil(batches / 5);
    await loop();
    left = batches;
    const [startedAt, cpu, python] = [performance.now(), process.cpuUsage(), childrenCpuMs(process.pid)];
    await Promise.all(Array.from({ length: hands }, loop));
    const ms = (performance.now() - startedAt) / batches;
    const { user, system } = process.cpuUsage(cpu);
    const outputs = batches * BATCH;
    line(
      `worker, ${name}, ${hands} in its hands`,
      `${ms.toFixed(3)} ms`,
      `${((user + system) / outputs).toFixed(2)} µs`,
      `${((1000 * (childrenCpuMs(process.pid) - python)) / outputs).toFixed(2)} µs`,
    );
  }
  await backend.stop();
}

async function ferry(name: string, as: "base64" | "bytes" | "json"): Promise<void> {
  const cores = pickCores();
  const models = [
    { name: "m", backend: { kind: "python", function: `${file}:${name}`, workers: 1 }, maxBatchSize: BATCH },
  ];
  await using server = await FerryServer.start({
    dir,
    core: cores?.server,
    models: [],
    settings: { models },
  });
  const before = await server.counters();
  const run = await measure(
    {
      target: server.target,
      bodyBytes: 600,
      verify: false,
      ...(as === "json" && { fields: { encoding: "json" } }),
      kinds: [
        {
          label: "all",
          share: 1,
          ...(as === "bytes" && { headers: { accept: "application/octet-stream" } }),
        },
      ],
      warmMs: 2000,
      measureMs: 5000,
      drainMs: 1000,
      load: { kind: "closed", callers: CALLERS },
    },
    { core: cores?.generator, serverPid: server.pid },
  );
  const { meanBatch } = workBetween(before, await server.counters());
  if (run.errors > 0) throw new Error(`${run.errors} errors`);
  line(
    `ferry, ${name}, as ${as}`,
    `${run.rate.toFixed(0)} req/s`,
    `${((1e6 * run.serverCpuShare) / run.rate).toFixed(1)} µs`,
    meanBatch.toFixed(1),
  );
}

try {
  steps();
  line("", "a batch of 64", "Node, an output", "Python, an output");
  await worker("rows", 600);
  await worker("later", 600);
  await worker("list", 30);
  console.log();
  line("", "throughput", "CPU of a request", "mean batch");
  await ferry("rows", "base64");
  await ferry("rows", "bytes");
  await ferry("rows", "json");
  await ferry("list", "base64");
} finally {
  killChildren();
  rmSync(dir, { recursive: true, force: true });
}
