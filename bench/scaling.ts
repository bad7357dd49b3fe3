/**
 * The autoscaler against fleets that never change: `node bench/scaling.ts`, a minute of CPU for 32 hours of traffic.
 *
 * The real dispatcher, engine and admission on virtual time (test/sim/scaling-lab.ts): workers of 8 requests in a
 * second that take a minute to start, the default rules. A request misses when it is refused, fails or takes longer
 * than 3 s. The fixed fleets are the one at the start, and one for the worst hour at 70 % load.
 */
import {
  day,
  PACE,
  play,
  RULES,
  steady,
  step,
  turns,
  type Plan,
  type Traffic,
} from "../test/sim/scaling-lab.ts";

interface Case {
  readonly name: string;
  readonly traffic: Traffic;
  readonly workers: number;
  readonly loss?: Plan["loss"];
}

const cases: readonly Case[] = [
  { name: "traffic × 2 for two hours", traffic: step(0.6 * 4 * PACE, 2, 2), workers: 4 },
  { name: "traffic × 5 for two hours", traffic: step(0.6 * 4 * PACE, 5, 2), workers: 4 },
  { name: "a day, 5 to 40 requests/s", traffic: day(5, 40), workers: 2 },
  {
    name: "half of 8 workers lost at 60 % load",
    traffic: steady(0.6 * 8 * PACE, 1),
    workers: 8,
    loss: { atMs: 1_800_000, workers: 4 },
  },
];

const rows: string[][] = [["traffic", "fleet", "requests", "missed", "worker hours", "changes", "turns"]];
for (const { name, traffic, workers, loss } of cases) {
  const worst = Math.ceil(traffic.most / (0.7 * PACE));
  const fleets: readonly [string, Plan][] = [
    ["autoscaled", { traffic, workers, rules: RULES, ...(loss && { loss }) }],
    [`${workers} fixed`, { traffic, workers, ...(loss && { loss }) }],
    [`${worst} fixed`, { traffic, workers: worst, ...(loss && { loss }) }],
  ];
  for (const [fleet, plan] of fleets) {
    const { requests, missed, workerHours, wanted } = await play(plan);
    const share = `${((100 * missed) / requests).toFixed(2)} %`;
    const changes = plan.rules === undefined ? "" : String(wanted.length);
    const turned = plan.rules === undefined ? "" : String(turns(wanted, workers));
    rows.push([
      name,
      fleet,
      requests.toLocaleString("en-US"),
      share,
      workerHours.toFixed(1),
      changes,
      turned,
    ]);
  }
}
process.stdout.write(`${rows.map((row) => `| ${row.join(" | ")} |`).join("\n")}\n`);
