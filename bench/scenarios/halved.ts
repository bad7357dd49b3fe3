/**
 * `halved`: half of the workers die, first loudly, then in silence.
 *
 * Eight workers behind HTTP, each a process (worker.ts) that takes 200 ms for a batch of up to 64: 2,560 a
 * second, and 0.85 of that is sent, 10/30/60 % enterprise/paid/free with API keys. Ten seconds in, four are
 * killed with SIGKILL: their connections break and their ports refuse. On a second server four are stopped
 * with SIGSTOP instead: they still accept connections and never answer, which only time can tell.
 *
 * What is left can do 1,280 a second, 0.59 of what is sent. Of the requests that should have left after the
 * blow:
 *
 *   admission follows   until a stretch of one second begins in which no more than 1.05 of the remaining
 *                       capacity is let in (200 and everything that failed; not 429 and 503)
 *   missed              504s, other failures and 200s later than the deadline, over those that were let in
 *   goodput             200s that arrived per second from 2 s after the blow on, over the remaining capacity
 *
 * Requests that were under way at that moment count to the time before it; those that failed stand apart.
 */
import { join } from "node:path";
import {
  admissionNotes,
  authSettings,
  count,
  errors,
  inTime,
  kindWithKey,
  maxFiles,
  progress,
  showTimeline,
  phasedLoad,
  statusText,
  tierNames,
  timeouts,
} from "../admission.ts";
import { measure, type Measured } from "../generator.ts";
import { Child } from "../process.ts";
import { FerryServer, freePorts, host, ready } from "../server.ts";
import { figure, type Bench, type Figure, type Report, type Scenario } from "../scenario.ts";

const workerCount = Number(process.env["BENCH_WORKERS"] ?? 8);
const workerMs = 200;
const maxBatchSize = 64;
const capacity = (workerCount * maxBatchSize * 1000) / workerMs;
const left = capacity / 2;
const load = 0.85;
const shares = { enterprise: 0.1, paid: 0.3, free: 0.6 };
const onsetMs = 2000;

type Blow = "SIGKILL" | "SIGSTOP";

export const halved: Scenario = {
  name: "halved",
  summary: "8 worker processes at 0.85 of their capacity; half of them get SIGKILL, then SIGSTOP",
  run,
};

async function run(bench: Bench): Promise<Report> {
  const figures: Figure[] = [];
  const notes: string[] = [];
  for (const blow of ["SIGKILL", "SIGSTOP"] as const) {
    const run = await strike(bench, blow);
    showTimeline(run);
    figures.push(...figuresOf(run, blow));
    notes.push(...notesOf(run, blow));
  }
  return { figures, notes };
}

async function strike(bench: Bench, blow: Blow): Promise<Measured> {
  bench.progress(`${blow}: starting ${workerCount} workers`);
  await using stack = new AsyncDisposableStack();
  const ports = await freePorts(workerCount);
  const children = ports.map((port) =>
    stack.use(new Child(join(import.meta.dirname, "../worker.ts"), [String(port), String(workerMs)])),
  );
  await Promise.all(children.map((child) => ready(child)));
  const doomed = children.filter((_, i) => i % 2 === 0);
  // A process that is stopped does not hear that it should end.
  stack.defer(() => doomed.forEach((child) => child.signal("SIGCONT")));
  const server = stack.use(
    await FerryServer.start({
      dir: bench.dir,
      core: bench.cores?.server,
      maxFiles,
      models: [
        { name: "bench", urls: ports.map((port) => `http://${host}:${port}/`), maxBatchSize, timeouts },
      ],
      settings: authSettings(),
      keys: tierNames.map((tier) => ({ user: `u-${tier}`, tier })),
    }),
  );
  const rate = capacity * load;
  const phases = [
    { name: "whole", ms: bench.quick ? 4000 : 10_000, rate },
    { name: "half", ms: bench.quick ? 8000 : 20_000, rate },
  ];
  const { spec, seconds } = phasedLoad(bench, server.target, phases, {
    warmRate: rate,
    kinds: tierNames.map((tier, i) => kindWithKey(tier, shares[tier], server.keys[i]!)),
  });
  // Awaited here: what is used must not end before.
  return await measure(spec, {
    core: bench.cores?.generator,
    maxFiles,
    serverPid: server.pid,
    behind: Object.fromEntries(children.filter((child) => !doomed.includes(child)).map((c, i) => [i, c.pid])),
    onTick: progress(bench, `${blow}: `, seconds),
    onPhase: () => doomed.forEach((child) => child.signal(blow)),
  });
}

function figuresOf(run: Measured, blow: Blow): Figure[] {
  const { tally } = run;
  const { fromMs, toMs } = tally.span("half");
  const after = tally.account(["half"]);
  const before = tally.account(["whole"]);
  const first = tally.account(["half"], (label) => label === "enterprise");
  const follows = tally.msUntil(
    fromMs,
    toMs,
    1000,
    ({ ok, failed }) => ok.count + failed <= 1.05 * (left + Math.sqrt(left)),
  );
  const refusing = tally.msUntil(fromMs, toMs, tally.sliceMs, ({ refused }) => refused > 0);
  const steady = tally.window(fromMs + onsetMs, toMs);
  const letIn = after.sent - count(after, 429, 503);
  const letInFirst = first.sent - count(first, 429, 503);
  const name = (what: string): string => `${blow}: ${what}`;
  return [
    figure(name("admission follows within"), follows / 1000, "s", "<=", 2),
    figure(name("accepted, missed their deadline"), ((letIn - inTime(after)) / letIn) * 100, "%", "<", 1),
    figure(
      name("enterprise accepted and not answered in time"),
      letInFirst - inTime(first),
      "count",
      "<=",
      0,
    ),
    figure(name("goodput, share of what is left"), steady.arrivedOk / steady.seconds / left, "ratio"),
    figure(name("first refusal after"), refusing / 1000, "s"),
    figure(name("enterprise refused"), count(first, 429, 503), "count"),
    figure(name("under way at the blow and failed"), before.sent - count(before, 200, 429, 503), "count"),
    figure(name("refusals, p99"), after.latencies.refused.percentileMs(99), "ms"),
    figure(name("p99 before"), before.latencies.ok.percentileMs(99), "ms"),
    figure(name("p99 after"), after.latencies.ok.percentileMs(99), "ms"),
    figure(name("errors"), errors(run), "count", "<=", 0),
  ];
}

function notesOf(run: Measured, blow: Blow): string[] {
  const after = tierNames.map(
    (tier) => `${tier} ${statusText(run.tally.account(["half"], (label) => label === tier))}`,
  );
  return [`${blow}, after it: ${after.join("; ")}`, ...admissionNotes(run, `the generator, ${blow},`)];
}
