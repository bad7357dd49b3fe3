/**
 * `tenants`: what one tenant's flood does to the others of its tier.
 *
 * Twenty tenants of one tier, each with an API key, send the same, together 0.7 of what the workers can do
 * (C = 1,280 a second; BENCH_WORKERS=1 for less). Then one of them sends ten times as much, and with it the
 * load is a little more than C. Calm, flood, a pause for what it left behind, and calm again, on one server:
 * what drifts meanwhile is in both halves of the calm.
 *
 * The figure is p99 of the nineteen others with the flood over p99 without it. That one of them is refused
 * would be the cheapest way to keep it low, so refusals and failures of theirs are counted, too.
 */
import {
  admissionNotes,
  authSettings,
  capacity,
  count,
  errors,
  kindWithKey,
  maxFiles,
  progress,
  showTimeline,
  phasedLoad,
  statusText,
  timeouts,
  workers,
} from "../admission.ts";
import { measure, type Measured } from "../generator.ts";
import { FerryServer } from "../server.ts";
import { figure, type Bench, type Report, type Scenario } from "../scenario.ts";

const tenantCount = 20;
const loud = "t0";
const times = 10;
const load = 0.7;

export const tenants: Scenario = {
  name: "tenants",
  summary: "20 tenants at 0.7 of the capacity, then one of them at 10 times its share: p99 of the others",
  run,
};

async function run(bench: Bench): Promise<Report> {
  const names = Array.from({ length: tenantCount }, (_, i) => `t${i}`);
  bench.progress(`making ${tenantCount} keys`);
  await using server = await FerryServer.start({
    dir: bench.dir,
    core: bench.cores?.server,
    maxFiles,
    models: [{ name: "bench", workers, baseMs: 200, maxBatchSize: 64, timeouts }],
    settings: authSettings(),
    keys: names.map((user) => ({ user, tier: "paid" })),
  });
  const calm = capacity * load;
  const flood = (calm * (tenantCount - 1 + times)) / tenantCount;
  const [calmMs, floodMs, pauseMs] = bench.quick ? [4000, 6000, 2000] : [15_000, 30_000, 5000];
  const phases = [
    { name: "calm", ms: calmMs, rate: calm },
    { name: "flood", ms: floodMs, rate: flood, shares: { [loud]: times } },
    { name: "pause", ms: pauseMs, rate: calm },
    { name: "calm again", ms: calmMs, rate: calm },
  ];
  const { spec, seconds } = phasedLoad(bench, server.target, phases, {
    warmRate: calm,
    warmS: 8,
    connections: 2048,
    kinds: names.map((name, i) => kindWithKey(name, 1, server.keys[i]!)),
  });
  const onTick = progress(bench, "", seconds);
  const core = bench.cores?.generator;
  return report(await measure(spec, { core, maxFiles, serverPid: server.pid, onTick }));
}

function report(run: Measured): Report {
  showTimeline(run);
  const { tally } = run;
  const others = (...phases: string[]) => tally.account(phases, (label) => label !== loud);
  const calm = others("calm", "calm again");
  const flood = others("flood");
  const loudest = tally.account(["flood"], (label) => label === loud);
  const p99 = (account: typeof calm): number => account.latencies.ok.percentileMs(99);
  const { fromMs, toMs } = tally.span("flood");
  const window = tally.window(fromMs, toMs);
  const { server = NaN } = run.phaseCpu["flood"] ?? {};
  return {
    figures: [
      figure("p99 of the others, with the flood to without", p99(flood) / p99(calm), "ratio", "<=", 1.2),
      figure("others not answered, with the flood", flood.sent - count(flood, 200), "count", "<=", 0),
      figure("errors", errors(run), "count", "<=", 0),
      figure("others' p50, without", calm.latencies.ok.percentileMs(50), "ms"),
      figure("others' p50, with", flood.latencies.ok.percentileMs(50), "ms"),
      figure("others' p99, without", p99(calm), "ms"),
      figure("others' p99, with", p99(flood), "ms"),
      figure("others' p99, calm again to calm", p99(others("calm again")) / p99(others("calm")), "ratio"),
      figure("the loud one's p50", loudest.latencies.ok.percentileMs(50), "ms"),
      figure("the loud one, answered", (count(loudest, 200) / loudest.sent) * 100, "%"),
      figure(
        "goodput in the flood, share of capacity",
        window.arrivedOk / window.seconds / capacity,
        "ratio",
      ),
      figure("ferry CPU, flood", server * 100, "%"),
    ],
    notes: [
      `flood: the loud one ${statusText(loudest)}; the others ${statusText(flood)}`,
      ...admissionNotes(run),
    ],
  };
}
