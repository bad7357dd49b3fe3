/**
 * How long everybody else waits while somebody gets a large tensor as JSON numbers: `node bench/tensor-numbers.ts`, about
 * twenty seconds, a table on stdout. It has to be alone on the machine.
 *
 * A whole Ferry in this process, with a JavaScript function that returns as many float32 as it is asked for. While one
 * caller, or four at once, take them as numbers, the largest delay of the event loop is measured (perf_hooks, 1 ms), as is
 * how long it takes until the answer is there. The callers are a process of their own. As base64 it is for comparison. `small`: outputs of 768, one after the
 * other, µs each, best of five.
 */
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { monitorEventLoopDelay } from "node:perf_hooks";
import { parseConfig } from "../src/app/config/load.ts";
import { startFerry } from "../src/app/ferry.ts";
import { freePorts, host } from "./server.ts";

const MIB = 1 << 20;
const FUNCTION = `
export default (inputs) => inputs.map((count) => Float32Array.from({ length: count }, (_, at) => Math.sin(at + 1)));
`;
const CALLER = `
const [url, callers, times, body] = process.argv.slice(1);
const call = async () => {
  const init = { method: "POST", headers: { "content-type": "application/json" }, body };
  const response = await fetch(url, init);
  const { byteLength } = await response.arrayBuffer();
  if (!response.ok) throw new Error("status " + response.status);
  return byteLength;
};
await call();
process.stdout.write("warm\\n");
process.stdin.once("data", async () => {
  const startedAt = performance.now();
  for (let at = 0; at < Number(times); at++) await Promise.all(Array.from({ length: Number(callers) }, call));
  process.stdout.write(String((performance.now() - startedAt) / Number(times)));
  process.exit(0);
});
`;

async function trial(url: string, callers: number, times: number, body: unknown): Promise<[number, number]> {
  const args = [
    "--input-type=module",
    "-e",
    CALLER,
    url,
    String(callers),
    String(times),
    JSON.stringify(body),
  ];
  const child = spawn(process.execPath, args, { stdio: ["pipe", "pipe", "inherit"] });
  const ended = once(child, "exit");
  let said = "";
  child.stdout.on("data", (chunk: Buffer) => (said += chunk.toString()));
  await once(child.stdout, "data");
  const delay = monitorEventLoopDelay({ resolution: 1 });
  delay.enable();
  child.stdin.write("go\n");
  await ended;
  delay.disable();
  return [Number(said.split("\n")[1]), delay.max / 1e6];
}

const dir = mkdtempSync(join(tmpdir(), "ferry-bench-"));
const file = join(dir, "model.mjs");
writeFileSync(file, FUNCTION);
const [port, adminPort] = await freePorts(2);
const { config, problems } = parseConfig(
  `
listen: ${host}:${port}
admin: { listen: "${host}:${adminPort}" }
models:
  - name: numbers
    backend: { kind: module, function: ${JSON.stringify(file)}, workers: 1 }
    timeouts: { workerMs: 20000, totalMs: 30000 }
    cache: { ttlMs: 600000 }
telemetry: { logLevel: silent }
`,
  "tensor-numbers.yaml",
  {},
);
if (config === undefined) throw new Error(JSON.stringify(problems));
const ferry = await startFerry(config);
try {
  const url = `http://${host}:${port}/v1/inference`;
  const row = (name: string, ...figures: readonly string[]): void =>
    console.log(name.padEnd(34) + figures.map((each) => each.padStart(20)).join(""));
  row("", "until the answers", "largest loop delay");
  for (const [name, mib, callers, encoding] of [
    ["16 MiB as numbers", 16, 1, "json"],
    ["4 × 4 MiB as numbers", 4, 4, "json"],
    ["1 MiB as numbers", 1, 1, "json"],
    ["16 MiB as base64", 16, 1, "base64"],
  ] as const) {
    const [ms, delayMs] = await trial(url, callers, 2, { input: (mib * MIB) / 4, encoding });
    row(name, `${ms.toFixed(0)} ms`, `${delayMs.toFixed(1)} ms`);
  }
  let best = Infinity;
  for (let run = 0; run < 5; run++) {
    const [ms] = await trial(url, 1, 2000, { input: 768, encoding: "json" });
    best = Math.min(best, ms);
  }
  row("small: 768 as numbers", `${(1000 * best).toFixed(0)} µs`);
} finally {
  await ferry.stop();
  rmSync(dir, { recursive: true, force: true });
}
