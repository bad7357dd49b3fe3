/**
 * Where a request's CPU time and allocations go: `node bench/profile.ts [DIR]`, a minute; FERRY_CLI=… profiles another
 * checkout.
 *
 * The load of the `embedded` scenario (2 KB bodies, 256 callers, 64 workers of 1 ms, the server on one core), first with V8's
 * CPU profiler in the server, then with its sampling heap profiler. The CPU time of the last seconds is summed up by room of
 * the source and by part of Node, and then by function, and shared out over what the process used per request. The
 * profiler's own cost is in it (some percent), so the sum is a little more than what `embedded` measures. V8's other threads
 * (most of the garbage collector) share the core: their time is in whatever they interrupted. Allocations are those of the
 * V8 heap, collected or not; buffers outside of it are not seen.
 *
 * DIR (default: `ferry-profile` in the temporary folder) then holds `flame.svg`, for any browser, and `cpu.cpuprofile` and
 * `allocations.heapprofile`, for Chrome's DevTools or speedscope.app.
 */
import {
  copyFileSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { measure } from "./generator.ts";
import { pickCores } from "./process.ts";
import { FerryServer } from "./server.ts";

const warmMs = 10_000;
const measureMs = 8000;
const callers = 256;
const topFunctions = 40;

interface Frame {
  readonly functionName: string;
  readonly url: string;
  readonly lineNumber: number;
}

interface CpuProfile {
  readonly nodes: readonly { readonly id: number; readonly callFrame: Frame; readonly children?: number[] }[];
  readonly samples: readonly number[];
  /** Microseconds, as the times. */
  readonly timeDeltas: readonly number[];
  readonly startTime: number;
  readonly endTime: number;
}

interface HeapNode {
  readonly callFrame: Frame;
  readonly selfSize: number;
  readonly children: readonly HeapNode[];
}

/** One function in one stack, with its own cost per request. */
interface Stack {
  readonly frame: Frame;
  readonly self: number;
  readonly calls: readonly Stack[];
}

const native: ReadonlyMap<string, string> = new Map([
  ["(garbage collector)", "garbage collection, main thread"],
  ["(program)", "native code without a name (kernel, parser, loop)"],
  ["writeLatin1String", "writing to the socket"],
  ["writeUtf8String", "writing to the socket"],
  ["writeBuffer", "writing to the socket"],
  ["writev", "writing to the socket"],
]);

/** Runs in the server before its own code. `--heap-prof` would leave out what is collected, which is nearly all. */
const sampleAllocations = (file: string): string => `
  import { Session } from "node:inspector";
  import { writeFileSync } from "node:fs";
  const session = new Session();
  session.connect();
  session.post("HeapProfiler.startSampling", {
    samplingInterval: 65536,
    includeObjectsCollectedByMajorGC: true,
    includeObjectsCollectedByMinorGC: true,
  });
  process.on("exit", () => session.post("HeapProfiler.stopSampling", (_, { profile }) =>
    writeFileSync(${JSON.stringify(file)}, JSON.stringify(profile))));`;

const results = process.argv[2] ?? join(tmpdir(), "ferry-profile");
mkdirSync(results, { recursive: true });
const dir = mkdtempSync(join(tmpdir(), "ferry-profile-"));
try {
  await profileCpu(join(results, "cpu.cpuprofile"));
  await profileAllocations(join(results, "allocations.heapprofile"));
} finally {
  rmSync(dir, { recursive: true, force: true });
}

async function profileCpu(file: string): Promise<void> {
  const profiled = `--cpu-prof --cpu-prof-interval=500 --cpu-prof-dir=${dir}`;
  const { rate, cpuShare } = await run(profiled);
  // The main thread's profile is the largest: threads write one each.
  const files = readdirSync(dir).filter((name) => name.endsWith(".cpuprofile"));
  const sizes = files.map((name) => ({ name, length: readFileSync(join(dir, name)).length }));
  copyFileSync(join(dir, sizes.sort((a, b) => b.length - a.length)[0]!.name), file);
  const perRequest = (cpuShare / rate) * 1e6;
  const root = cpuStacks(JSON.parse(readFileSync(file, "utf8")) as CpuProfile, perRequest);
  say(`${Math.round(rate).toLocaleString("en-US")} requests/s, ${perRequest.toFixed(1)} µs of CPU a request`);
  print(root, stepOf, "µs");
  print(root, placeOf, "µs");
  const flame = join(results, "flame.svg");
  writeFileSync(flame, flameGraph(root));
  say(`\nflame graph: ${flame}`);
}

async function profileAllocations(file: string): Promise<void> {
  const code = encodeURIComponent(sampleAllocations(file));
  const { tasks } = await run(`--import=data:text/javascript,${code}`);
  const { head } = JSON.parse(readFileSync(file, "utf8")) as { head: HeapNode };
  const stackOf = ({ callFrame: frame, selfSize, children }: HeapNode): Stack => ({
    frame,
    self: selfSize / tasks,
    calls: children.map(stackOf),
  });
  const root = stackOf(head);
  say(`\n${Math.round(totalOf(root))} bytes of the heap allocated a request`);
  print(root, stepOf, "bytes");
  print(root, placeOf, "bytes");
}

async function run(options: string): Promise<{ rate: number; cpuShare: number; tasks: number }> {
  const cores = pickCores();
  const env = { NODE_OPTIONS: options };
  const models = [{ name: "bench", workers: 64, baseMs: 1 }];
  await using server = await FerryServer.start({ dir, core: cores?.server, models, env });
  const { target, pid } = server;
  const load = { kind: "closed", callers } as const;
  const spec = { target, bodyBytes: 2048, verify: true, warmMs, measureMs, drainMs: 500, load };
  const { rate, serverCpuShare } = await measure(spec, { core: cores?.generator, serverPid: pid });
  return { rate, cpuShare: serverCpuShare, tasks: (await server.counters()).tasks };
}

/** The measured part, without idle time, scaled to `perRequest`. */
function cpuStacks(
  { nodes, samples, timeDeltas, startTime, endTime }: CpuProfile,
  perRequest: number,
): Stack {
  const self = new Map<number, number>();
  const idle = new Set(
    nodes.filter(({ callFrame }) => callFrame.functionName === "(idle)").map(({ id }) => id),
  );
  const to = endTime - 1_000_000;
  let at = startTime;
  let busy = 0;
  samples.forEach((id, which) => {
    at += timeDeltas[which]!;
    if (at < to - measureMs * 1000 || at > to || idle.has(id)) return;
    busy += timeDeltas[which]!;
    self.set(id, (self.get(id) ?? 0) + timeDeltas[which]!);
  });
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const stackOf = (id: number): Stack => {
    const { callFrame: frame, children = [] } = byId.get(id)!;
    return { frame, self: ((self.get(id) ?? 0) / busy) * perRequest, calls: children.map(stackOf) };
  };
  return stackOf(nodes[0]!.id);
}

function totalOf({ self, calls }: Stack): number {
  return calls.reduce((sum, call) => sum + totalOf(call), self);
}

/** A room of the source, a part of Node, or a native function. */
function stepOf({ functionName, url }: Frame): string {
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

function placeOf({ functionName, url, lineNumber }: Frame): string {
  const file = url.replace(/^.*\/src\//, "").replace(/^file:.*\//, "");
  return `${functionName || "(anonymous)"} ${file === "" ? "" : `${file}:${lineNumber + 1}`}`;
}

function print(root: Stack, groupOf: (frame: Frame) => string, unit: string): void {
  const groups = new Map<string, number>();
  const visit = ({ frame, self, calls }: Stack): void => {
    const group = groupOf(frame);
    groups.set(group, (groups.get(group) ?? 0) + self);
    calls.forEach(visit);
  };
  visit(root);
  const rows = [...groups].sort(([, a], [, b]) => b - a).slice(0, topFunctions);
  const digits = unit === "µs" ? 1 : 0;
  say("");
  for (const [group, cost] of rows) say(`${group.padEnd(64)} ${cost.toFixed(digits).padStart(7)} ${unit}`);
}

/** Width is time; a function stands on its caller. Titles show on hovering. */
function flameGraph(root: Stack): string {
  const [width, height] = [1600, 17];
  const whole = totalOf(root);
  const boxes: string[] = [];
  let deepest = 0;
  const draw = (stack: Stack, x: number, depth: number): void => {
    const total = totalOf(stack);
    const w = (total / whole) * width;
    if (w < 0.5) return;
    deepest = Math.max(deepest, depth);
    const place = placeOf(stack.frame).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
    const hue = stack.frame.url.includes("/src/") ? 25 : stack.frame.url.startsWith("node:") ? 200 : 100;
    const label = w < 40 ? "" : `<text x="3" y="12">${place.slice(0, Math.floor(w / 6.5))}</text>`;
    boxes.push(
      `<g transform="translate(${x.toFixed(1)} ${depth * height})"><title>${place}: ${total.toFixed(2)} µs</title>` +
        `<rect width="${w.toFixed(1)}" height="${height - 1}" fill="hsl(${hue} 70% 75%)"/>${label}</g>`,
    );
    let left = x;
    for (const call of stack.calls) {
      draw(call, left, depth + 1);
      left += (totalOf(call) / whole) * width;
    }
  };
  draw(root, 0, 0);
  const size = `width="${width}" height="${(deepest + 1) * height}"`;
  return `<svg xmlns="http://www.w3.org/2000/svg" ${size} font-family="monospace" font-size="11">${boxes.join("\n")}</svg>\n`;
}

function say(line: string): void {
  process.stdout.write(`${line}\n`);
}
