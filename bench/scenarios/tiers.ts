/**
 * `tiers`: four times what the workers can do, from three tiers.
 *
 * Workers as in `overload` (C = 1,280 a second; BENCH_WORKERS=1 for less), one caller per tier with an API key,
 * limits that are counted and never reached. 10 % of the load is enterprise, 30 % paid, 60 % free: enterprise
 * needs 0.4 C, paid would fill the rest twice over, free has its floor of 5 % and nothing else.
 *
 * Enterprise is judged over all of the overload, shares of the capacity without its first 2 s. Which status
 * refusals had stands in the notes. Nothing is pinned, as in `overload`.
 */
import {
  admissionNotes,
  authSettings,
  capacity,
  count,
  errors,
  inTime,
  kindWithKey,
  maxFiles,
  missedShare,
  progress,
  showTimeline,
  phasedLoad,
  statusText,
  tierNames,
  timeouts,
  workers,
} from "../admission.ts";
import { measure, type Measured } from "../generator.ts";
import { FerryServer } from "../server.ts";
import { figure, type Bench, type Report, type Scenario } from "../scenario.ts";

const shares = { enterprise: 0.1, paid: 0.3, free: 0.6 };
const times = 4;

export const tiers: Scenario = {
  name: "tiers",
  summary: "open loop, 4 times what 4 workers of 200 ms can do, 10/30/60 % enterprise/paid/free, API keys",
  run,
};

async function run(bench: Bench): Promise<Report> {
  await using server = await FerryServer.start({
    dir: bench.dir,
    maxFiles,
    models: [{ name: "bench", workers, baseMs: 200, maxBatchSize: 64, timeouts }],
    settings: authSettings(),
    keys: tierNames.map((tier) => ({ user: `u-${tier}`, tier })),
  });
  const rate = capacity * times;
  const phases = [
    { name: "onset", ms: 2000, rate },
    { name: "overload", ms: bench.quick ? 8000 : 38_000, rate },
  ];
  const { spec, seconds } = phasedLoad(bench, server.target, phases, {
    warmRate: capacity / 2,
    kinds: tierNames.map((tier, i) => kindWithKey(tier, shares[tier], server.keys[i]!)),
  });
  const onTick = progress(bench, "", seconds);
  return report(await measure(spec, { maxFiles, serverPid: server.pid, onTick }));
}

function report(run: Measured): Report {
  showTimeline(run);
  const { tally } = run;
  const { fromMs, toMs } = tally.span("overload");
  const steady = tally.window(fromMs, toMs);
  const all = (tier: string) => tally.account(["onset", "overload"], (label) => label === tier);
  const share = (tier: string): number => {
    const account = tally.account(["overload"], (label) => label === tier);
    return count(account, 200) / steady.seconds / capacity;
  };
  const said = (tier: string): string => {
    const [onset, later] = ["onset", "overload"].map((phase) =>
      statusText(tally.account([phase], (label) => label === tier)),
    );
    return `first 2 s: ${onset}; later: ${later}`;
  };
  const first = all("enterprise");
  const crowd = tally.account(["onset", "overload"]);
  const { server = NaN, generator = NaN } = run.phaseCpu["overload"] ?? {};
  return {
    figures: [
      figure("enterprise, answered in time", (inTime(first) / first.sent) * 100, "%", ">=", 99.9),
      figure("free, share of capacity", share("free") * 100, "%", ">=", 4.5),
      figure("goodput, share of capacity", steady.arrivedOk / steady.seconds / capacity, "ratio", ">=", 0.95),
      figure("errors", errors(run), "count", "<=", 0),
      figure("paid, share of capacity", share("paid") * 100, "%"),
      figure("enterprise, share of capacity", share("enterprise") * 100, "%"),
      ...tierNames.map((tier) => figure(`${tier}, p99`, all(tier).latencies.ok.percentileMs(99), "ms")),
      ...tierNames.map((tier) => figure(`${tier}, missed their deadline`, missedShare(all(tier)) * 100, "%")),
      figure("refusals, p99", crowd.latencies.refused.percentileMs(99), "ms"),
      figure("ferry CPU", server * 100, "%"),
      figure("generator CPU", generator * 100, "%"),
    ],
    notes: [...tierNames.map((tier) => `${tier}, ${said(tier)}`), ...admissionNotes(run)],
  };
}
