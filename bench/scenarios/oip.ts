/**
 * `oip`: what a request of the Open Inference Protocol costs Ferry, as bytes against as numbers.
 *
 * One row of 1,536 FP32 goes in and comes back, through an HTTP worker that echoes (tensor-worker.ts) in batches.
 * The two forms take turns against the same Ferry, each after a warm-up of its own. What counts is Ferry's CPU time,
 * not the rate: numbers also cost the generator and the worker more, and those share a core.
 */
import { median } from "../../src/core/median.ts";
import { join } from "node:path";
import { measure, type Measured } from "../generator.ts";
import { Child } from "../process.ts";
import { FerryServer, freePorts, host, ready, workBetween } from "../server.ts";
import type { TensorForm } from "../tensors.ts";
import { durationMs, figure, loadNotes, type Bench, type Report, type Scenario } from "../scenario.ts";

const callers = 64;

export const oip: Scenario = {
  name: "oip",
  summary:
    "Open Inference Protocol, 1,536 FP32 in and out: bytes against numbers, by Ferry's CPU time, in turns",
  run,
};

async function run(bench: Bench): Promise<Report> {
  const [port] = await freePorts(1);
  const file = join(import.meta.dirname, "../tensor-worker.ts");
  await using worker = new Child(file, [String(port)], { core: bench.cores?.generator });
  await ready(worker);
  await using ferry = await FerryServer.start({
    dir: bench.dir,
    core: bench.cores?.server,
    models: [{ name: "bench", protocol: "oip-v2", urls: [`http://${host}:${port}/v2/models/x/infer`] }],
  });
  const runs: Record<TensorForm, Measured[]> = { json: [], binary: [] };
  const slice = (form: TensorForm, seconds: number): Promise<Measured> => {
    const spec = {
      target: { ...ferry.target, path: "/v2/models/bench/infer" },
      bodyBytes: 0,
      tensor: form,
      verify: true,
      warmMs: 1000,
      measureMs: durationMs(bench, seconds),
      drainMs: 2000,
      load: { kind: "closed" as const, callers },
    };
    return measure(spec, {
      core: bench.cores?.generator,
      serverPid: ferry.pid,
      behind: { worker: worker.pid },
    });
  };
  const turns = bench.quick ? 1 : 4;
  // Before the first turn that counts: both then run optimised code.
  await slice("json", 4);
  await slice("binary", 4);
  const before = await ferry.counters();
  for (let turn = 1; turn <= turns; turn++) {
    for (const form of ["json", "binary"] as const) {
      bench.progress(`turn ${turn} of ${turns}: ${form}`);
      runs[form].push(await slice(form, 4));
    }
  }
  return report(runs, workBetween(before, await ferry.counters()).meanBatch);
}

/** Answers per second of Ferry's CPU time. */
function perCpuSecond(runs: readonly Measured[]): number {
  return median(runs.map((run) => run.rate / run.serverCpuShare));
}

function report(runs: Readonly<Record<TensorForm, readonly Measured[]>>, meanBatch: number): Report {
  const { json, binary } = runs;
  const all = [...json, ...binary];
  return {
    figures: [
      figure(
        "requests per CPU second, bytes to numbers",
        perCpuSecond(binary) / perCpuSecond(json),
        "ratio",
        ">=",
        2,
      ),
      figure("bytes, per CPU second", perCpuSecond(binary), "req/s"),
      figure("numbers, per CPU second", perCpuSecond(json), "req/s"),
      figure("bytes, CPU of a request", 1e6 / perCpuSecond(binary), "µs"),
      figure("numbers, CPU of a request", 1e6 / perCpuSecond(json), "µs"),
      figure("bytes, throughput", median(binary.map(({ rate }) => rate)), "req/s"),
      figure("numbers, throughput", median(json.map(({ rate }) => rate)), "req/s"),
      figure("mean batch", meanBatch, "count"),
      figure(
        "errors",
        all.reduce((sum, each) => sum + each.errors, 0),
        "count",
        "<=",
        0,
      ),
    ],
    notes: all.flatMap((each) => loadNotes({ ...each, cpuShare: 0 })),
  };
}
