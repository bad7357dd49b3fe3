/**
 * What a batch of 64 inputs of 128 token ids costs on its way into a Python function: `node bench/tensor-inputs.ts`, about ten
 * seconds, a table on stdout. It has to be alone on the machine.
 *
 *   read       the function looks at nothing: what the worker itself does with a batch
 *   block      it makes one block of numbers of them, as torch.tensor(inputs) has to; of arrays they are one already
 *
 * CPU time of Python and of Node for a batch, µs, and its wall time, with one batch in the worker's hands and with two. The
 * function returns 64 × 768 float32 as one array, as an embedding model does.
 */
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { PythonBackend } from "../src/workers/backend/python.ts";
import { SystemClock } from "../src/app/clock.ts";
import { Events } from "../src/observe/events.ts";
import { childrenCpuMs, killChildren } from "./process.ts";

const BATCH = 64;
const TOKENS = 128;
const BATCHES = 1000;

const MODEL = `
import array, itertools

OUT = memoryview(array.array("f", [0.5] * ${BATCH * 768})).cast("B").cast("f", (${BATCH}, 768))

def read(inputs):
    return OUT

def block(inputs):
    if hasattr(inputs, "flat"):
        assert len(inputs.flat) == ${BATCH * TOKENS}
    else:
        assert len(array.array("i", itertools.chain.from_iterable(inputs))) == ${BATCH * TOKENS}
    return OUT
`;

const dir = mkdtempSync(join(tmpdir(), "ferry-bench-"));
const file = join(dir, "model.py");
writeFileSync(file, MODEL);
const tasks = Array.from({ length: BATCH }, (_, row) => ({
  id: String(row),
  input: JSON.stringify(
    Array.from({ length: TOKENS }, (_each, at) => 1000 + ((row * 7919 + at * 104_729) % 29_000)),
  ),
}));
const never = new AbortController().signal;

function line(name: string, ...figures: readonly string[]): void {
  console.log(`${name.padEnd(34)}${figures.map((each) => each.padStart(16)).join("")}`);
}

async function trial(inputs: "json" | "int32", name: string, hands: number): Promise<void> {
  const options = { workers: 1, python: "python3", startTimeoutMs: 20_000, maxReplyBytes: 1 << 26, inputs };
  const around = { model: "m", clock: new SystemClock(), events: new Events() };
  const backend = new PythonBackend({ ...options, function: `${file}:${name}` }, around);
  await backend.start();
  let left = BATCHES / 4;
  const loop = async (): Promise<void> => {
    for (; left > 0; left--) {
      const { kind } = await backend.workers[0]!.run({ id: "b", tasks, parameters: "" }, never);
      if (kind !== "answered") throw new Error(`${name}: ${kind}`);
    }
  };
  await loop();
  left = BATCHES;
  const [startedAt, cpu, python] = [performance.now(), process.cpuUsage(), childrenCpuMs(process.pid)];
  await Promise.all(Array.from({ length: hands }, loop));
  const { user, system } = process.cpuUsage(cpu);
  const us = (figure: number): string => `${figure.toFixed(0)} µs`;
  line(
    `${name}, ${inputs}, ${hands} in its hands`,
    us((1000 * (childrenCpuMs(process.pid) - python)) / BATCHES),
    us((user + system) / BATCHES),
    us((1000 * (performance.now() - startedAt)) / BATCHES),
  );
  await backend.stop();
}

try {
  line("a batch of 64 × 128 numbers", "Python", "Node", "wall");
  for (const name of ["read", "block"]) {
    for (const inputs of ["json", "int32"] as const) {
      for (const hands of [1, 2]) await trial(inputs, name, hands);
    }
  }
} finally {
  killChildren();
  rmSync(dir, { recursive: true, force: true });
}
