/**
 * What each step costs a request: `node bench/steps.ts`, half a minute; FERRY_CLI=… measures another checkout.
 *
 * The load of the `embedded` scenario (2 KB bodies, 256 callers, 64 workers of 1 ms, the server on one core), with
 * V8's profiler in the server for its whole life. What it found in the last seconds is summed up by room of the source,
 * by part of Node, and by native function, and shared out over the CPU time that the process used per request. The
 * profiler's own cost is in it (some percent), so the sum is a little more than what `embedded` measures. V8's own
 * threads (most of the garbage collector) share the core: their time is in whatever step they interrupted.
 */
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { measure } from "./generator.ts";
import { pickCores } from "./process.ts";
import { FerryServer } from "./server.ts";

const warmMs = 10_000;
const measureMs = 8000;
const callers = 256;

interface Profile {
  readonly nodes: readonly {
    readonly id: number;
    readonly callFrame: { readonly functionName: string; readonly url: string };
  }[];
  readonly samples: readonly number[];
  /** Microseconds. */
  readonly timeDeltas: readonly number[];
  readonly endTime: number;
  readonly startTime: number;
}

const native: ReadonlyMap<string, string> = new Map([
  ["(garbage collector)", "garbage collection, main thread"],
  ["(program)", "native code without a name (kernel, parser, loop)"],
  ["writeLatin1String", "writing to the socket"],
  ["writeUtf8String", "writing to the socket"],
  ["writev", "writing to the socket"],
]);

const dir = mkdtempSync(join(tmpdir(), "ferry-steps-"));
try {
  const { perRequest, rate, profile } = await run();
  print(perRequest, rate, stepsOf(profile));
} finally {
  rmSync(dir, { recursive: true, force: true });
}

async function run(): Promise<{ perRequest: number; rate: number; profile: Profile }> {
  const cores = pickCores();
  process.env["NODE_OPTIONS"] = `--cpu-prof --cpu-prof-interval=500 --cpu-prof-dir=${dir}`;
  const server = await FerryServer.start({
    dir,
    core: cores?.server,
    models: [{ name: "bench", workers: 64, baseMs: 1 }],
  });
  delete process.env["NODE_OPTIONS"];
  const { target, pid } = server;
  const load = { kind: "closed", callers } as const;
  const spec = { target, bodyBytes: 2048, verify: true, warmMs, measureMs, drainMs: 500, load };
  const measured = await measure(spec, { core: cores?.generator, serverPid: pid });
  await server[Symbol.asyncDispose]();
  // The main thread's profile is the largest: threads write one each.
  const files = readdirSync(dir).filter((name) => name.endsWith(".cpuprofile"));
  const texts = files.map((name) => readFileSync(join(dir, name), "utf8"));
  const profile = JSON.parse(texts.sort((a, b) => b.length - a.length)[0]!) as Profile;
  return { perRequest: (measured.serverCpuShare / measured.rate) * 1e6, rate: measured.rate, profile };
}

/** Share of the main thread's busy time, by step, in the measured part. */
function stepsOf({ nodes, samples, timeDeltas, startTime, endTime }: Profile): Map<string, number> {
  const steps = new Map(nodes.map(({ id, callFrame }) => [id, stepOf(callFrame)]));
  const spent = new Map<string, number>();
  const to = endTime - 1_000_000;
  const from = to - measureMs * 1000;
  let at = startTime;
  let busy = 0;
  samples.forEach((id, which) => {
    at += timeDeltas[which]!;
    const step = steps.get(id)!;
    if (at < from || at > to || step === "") return;
    busy += timeDeltas[which]!;
    spent.set(step, (spent.get(step) ?? 0) + timeDeltas[which]!);
  });
  return new Map([...spent].map(([step, us]) => [step, us / busy]));
}

/** "" while it idles. */
function stepOf({ functionName, url }: Profile["nodes"][number]["callFrame"]): string {
  if (functionName === "(idle)") return "";
  const known = native.get(functionName);
  if (known !== undefined) return known;
  if (url.startsWith("node:")) {
    if (url.includes("crypto")) return "SHA-256 of the input";
    return /http|streams?|net|buffer/.test(url)
      ? "Node's HTTP and streams"
      : "Node's events, timers, promises";
  }
  const room = /\/src\/(?:([a-z]+)\/)?/.exec(url);
  if (room !== null) return `ferry: ${room[1] ?? "clock and others"}`;
  return "native functions (JSON, strings, microtasks)";
}

function print(perRequest: number, rate: number, shares: Map<string, number>): void {
  const rows = [...shares].sort(([, a], [, b]) => b - a);
  const lines = rows.map(
    ([step, share]) => `${step.padEnd(52)} ${(share * perRequest).toFixed(1).padStart(6)} µs`,
  );
  process.stdout.write(
    `${Math.round(rate).toLocaleString("en-US")} requests/s, ${perRequest.toFixed(1)} µs of CPU a request\n\n${lines.join("\n")}\n`,
  );
}
