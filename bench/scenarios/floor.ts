/**
 * `floor`: the bare `node:http` echo alone, to know this machine and the generator.
 *
 * No goal for Ferry. The generator's CPU share says how far it could go: its rate divided by its share
 * is what it would send on a whole core.
 */
import { measure } from "../generator.ts";
import { FloorServer } from "../server.ts";
import {
  durationMs,
  figure,
  loadNotes,
  tickText,
  type Bench,
  type Report,
  type Scenario,
} from "../scenario.ts";

export const floor: Scenario = {
  name: "floor",
  summary: "a bare node:http echo, 2 KB body, 128 callers: what one core of this machine can do at most",
  run,
};

async function run(bench: Bench): Promise<Report> {
  await using server = await FloorServer.start({ core: bench.cores?.server });
  const measureMs = durationMs(bench, 8);
  const run = await measure(
    {
      target: server.target,
      bodyBytes: 2048,
      verify: false,
      warmMs: 2000,
      measureMs,
      drainMs: 2000,
      load: { kind: "closed", callers: 128 },
    },
    {
      core: bench.cores?.generator,
      serverPid: server.pid,
      onTick: (tick) => bench.progress(tickText(tick, measureMs / 1000)),
    },
  );
  return {
    figures: [
      figure("floor throughput", run.rate, "req/s"),
      figure("floor CPU", run.serverCpuShare * 100, "%"),
      figure("generator CPU", run.cpuShare * 100, "%"),
      figure("generator, on a whole core", run.rate / run.cpuShare, "req/s"),
      figure("errors", run.errors, "count", "<=", 0),
    ],
    notes: loadNotes(run),
  };
}
