/**
 * What the scenarios of admission share: the settings, the callers, and how their runs are judged.
 *
 * A request that was let in is answered with 200 or, too late, with 504; one that was not, with 429 or 503.
 * In time means within the model's total timeout, counted from when the request should have left. Whatever
 * else comes (another status, a broken connection, no answer, somebody else's output) is an error.
 */
import type { CallerKind, Phase } from "../src/cli/bench/arrivals.ts";
import type { Target } from "../src/cli/bench/connection.ts";
import type { Measured } from "./generator.ts";
import type { LoadSpec, Tick } from "./load.ts";
import { loadNotes, type Bench } from "./scenario.ts";
import type { Account } from "./tally.ts";

/** The default timeouts of a model, written down because the figures depend on them. */
export const timeouts = { queueMs: 2000, workerMs: 3000, totalMs: 4000 };
/** Simulated workers of 200 ms with batches of 64, and the tasks per second that they can do. */
export const workers = Number(process.env["BENCH_WORKERS"] ?? 4);
export const capacity = (workers * 64) / 0.2;
/** Of the tally over time. */
export const sliceMs = 250;
export const maxFiles = 20_000;
/** More than anybody sends, so that no quota has a say. */
const unlimited = 1_000_000_000;

/**
 * The generator's pool stays open also while there is little to send. By default Ferry closes a connection on
 * which nothing came for 10 s, and a request that leaves at that moment would be counted as an error.
 */
const patient = 600_000;
export const poolLimits = {
  headersTimeoutMs: patient,
  requestTimeoutMs: patient,
  keepAliveTimeoutMs: patient,
};

export const tierNames = ["enterprise", "paid", "free"] as const;

/** Credentials are asked for, and limits are counted but never reached. */
export function authSettings(auth: Readonly<Record<string, unknown>> = {}): Record<string, unknown> {
  return {
    auth: { mode: "required", keysFile: "./keys.json", ...auth },
    tiers: Object.fromEntries(tierNames.map((name) => [name, { ratePerMinute: unlimited }])),
    limits: { ...poolLimits, perUserPerMinute: unlimited },
  };
}

export function kindWithKey(label: string, share: number, key: string): CallerKind {
  return { label, share, headers: { authorization: `Bearer ${key}` } };
}

/** An open load in phases, and how long it takes. */
export function phasedLoad(
  bench: Bench,
  target: Target,
  phases: readonly Phase[],
  more: { warmRate: number; warmS?: number; connections?: number; kinds?: readonly CallerKind[] },
): { spec: LoadSpec; seconds: number } {
  const { warmRate, warmS = 5, connections = 4096, kinds } = more;
  const seconds = phases.reduce((sum, { ms }) => sum + ms / 1000, 0);
  const spec: LoadSpec = {
    target,
    bodyBytes: 256,
    verify: true,
    warmMs: bench.quick ? 2000 : warmS * 1000,
    measureMs: seconds * 1000,
    drainMs: 6000,
    sliceMs,
    ...(kinds && { kinds }),
    load: { kind: "open", rate: phases[0]!.rate, arrivals: "even", warmRate, connections, phases },
  };
  return { spec, seconds };
}

export function count(account: Account, ...statuses: readonly number[]): number {
  return statuses.reduce((sum, status) => sum + (account.statuses[status] ?? 0), 0);
}

/** 200s that came in time. */
export function inTime(account: Account): number {
  return count(account, 200) - account.latencies.ok.countAbove(timeouts.totalMs);
}

/** The share of those let in that were not answered in time. */
export function missedShare(account: Account): number {
  const accepted = count(account, 200, 504);
  return (accepted - inTime(account)) / accepted;
}

/** What must not happen under any load. */
export function errors(run: Measured): number {
  const known = [200, 429, 503, 504].reduce((sum, status) => sum + (run.statuses[status] ?? 0), 0);
  return run.answered - known + run.crossed + run.broken + run.unanswered + run.unsent;
}

/** Here refusals are no errors; a core that is full is worth a note. */
export function admissionNotes(run: Measured, what = "the generator"): string[] {
  const notes = loadNotes({ ...run, errors: errors(run) }, what);
  for (const [phase, { server, generator }] of Object.entries(run.phaseCpu)) {
    const busy = Math.max(server, generator);
    if (busy < 0.9) continue;
    const who = server > generator ? "the server" : "the generator";
    notes.push(
      `${phase}: ${who} used ${(busy * 100).toFixed(0)} % of a core, not only the workers were full`,
    );
  }
  return notes;
}

/** "200: 1,280, 429: 5,120" */
export function statusText(account: Account): string {
  const entries = Object.entries(account.statuses);
  return entries.map(([status, n]) => `${status}: ${n.toLocaleString("en-US")}`).join(", ") || "nothing";
}

/** Says how far a run is. */
export function progress(bench: Bench, what: string, seconds: number): (tick: Tick) => void {
  return (tick) => {
    if (tick.event !== "tick") return;
    const at = tick.seconds === 0 ? "warming up" : `${tick.seconds.toFixed(0)} s of ${seconds.toFixed(0)} s`;
    bench.progress(`${what}${at}, answered ${tick.answered.toLocaleString("en-US")}`);
  };
}

/** With BENCH_TIMELINE=1: what came of each second's requests, on stderr. */
export function showTimeline({ tally }: Measured): void {
  if (process.env["BENCH_TIMELINE"] !== "1") return;
  const cells = ["second", "ok", "refused", "failed", "p50 ms", "p99 ms", "200s in"];
  const lines = [cells];
  for (let at = 0; at < tally.endMs; at += 1000) {
    const { ok, refused, failed, arrivedOk } = tally.window(at, at + 1000);
    const times = [50, 99].map((p) => ok.percentileMs(p).toFixed(0));
    lines.push([at / 1000, ok.count, refused, failed, ...times, arrivedOk].map(String));
  }
  const text = lines.map((line) => line.map((cell) => cell.padStart(8)).join(""));
  process.stderr.write(`${text.join("\n")}\n`);
}
