/**
 * The figures of a chaos run, from the callers' ledger, the list of faults and what the workers saw.
 *
 *   lost           accepted (202), and not answered when all callers have given up, or answered 404
 *   crossed        answered with an output that does not hold the task's own marker
 *   run twice      markers that workers saw in more than one batch, of all they saw
 *   503s after     from a fault of Redis to the last 503 before a second without any, or before Redis's next
 *   a fault        fault; what gateways and batchers suffer in that time is in it
 *   recovery       of the tasks that were at a worker when their batcher was killed: from the kill to the
 *                  answer at the caller
 */
import type { Ledger, Refusal, Row } from "../../test/e2e/fleet-load.ts";
import type { Fault } from "./faults.ts";
import type { Workers } from "./workers.ts";

const QUIET_MS = 1000;
const REASONS = 8;

export interface Goals {
  readonly twiceShare: number;
  readonly recoveryMs: number;
  readonly failoverMs: number;
}

export interface Outcome {
  readonly ledger: Ledger;
  readonly faults: readonly Fault[];
  readonly deaths: readonly string[];
  readonly workers: Workers;
  /** Tasks that a gateway still counted as queued or running after the drain. */
  readonly left: number;
  /** How many tasks Ferry's own log calls lost. */
  readonly saidLost: number;
}

type Line = readonly [name: string, value: string, goal?: string, met?: boolean];

export function isWhole({ ledger, deaths }: Outcome): boolean {
  return ledger.lost.length === 0 && ledger.crossed.length === 0 && deaths.length === 0;
}

export function render(outcome: Outcome, goals: Goals): string {
  const lines = [
    ...promised(outcome),
    ...effort(outcome, goals),
    ...outages(outcome, goals),
    ...recovery(outcome, goals),
    ...latency(outcome.ledger),
    ...kinds(outcome.faults),
    ...refusals(outcome.ledger),
  ];
  const widths = [0, 1].map((at) => Math.max(...lines.map((line) => String(line[at]).length)));
  const table = lines.map(([name, value, goal = "", met]) => {
    const mark = met === undefined ? "" : met ? "✓" : "✗";
    return `${name.padEnd(widths[0]!)}  ${value.padStart(widths[1]!)}  ${goal.padEnd(10)} ${mark}`.trimEnd();
  });
  return [...table, "", "refused because", ...reasons(outcome.ledger)].join("\n");
}

/** What happened to the first few that were lost or crossed, for whoever looks for the reason. */
export function accounts({ ledger, faults }: Outcome, startedAt: number): string[] {
  return [...ledger.lost, ...ledger.crossed].slice(0, 10).map((row) => {
    const since = (at: number | undefined): string =>
      at === undefined ? "never" : `${((at - startedAt) / 1000).toFixed(3)} s`;
    const before = faults.filter(({ at }) => at < (row.acceptedAt ?? 0) + 5000).slice(-4);
    const told = before.map(({ kind, at }) => `${kind} at ${since(at)}`).join("; ");
    return (
      `${row.marker} (${[...row.ids].join(", ")}): ${row.end ?? "no answer"}; sent ${since(row.sentAt)}, ` +
      `accepted ${since(row.acceptedAt)}, ended ${since(row.endedAt)}; around it: ${told}`
    );
  });
}

function promised({ ledger, deaths, left, saidLost }: Outcome): Line[] {
  const failures = [...ledger.ends].filter(([end]) => !["ok", "gone", "crossed"].includes(end));
  return [
    ["sent", count(ledger.rows.size)],
    ["accepted", count(ledger.accepted)],
    ["answered with their own output", count(ledger.ends.get("ok") ?? 0)],
    ...failures.map(([code, times]): Line => [`answered with ${code}`, count(times)]),
    goal("lost", ledger.lost.length, 0),
    goal("lost, says Ferry's log", saidLost, 0),
    goal("crossed", ledger.crossed.length, 0),
    ["never accepted, caller gave up", count(ledger.rows.size - ledger.accepted)],
    ["still queued or running after the drain", count(left)],
    goal("processes that ended by themselves", deaths.length, 0),
  ];
}

function effort({ workers }: Outcome, { twiceShare }: Goals): Line[] {
  const [seen, twice] = [workers.runs.size, workers.runTwice];
  const share = seen === 0 ? 0 : twice / seen;
  return [
    ["batches", count(workers.calls)],
    goal("most batches at once at one worker", workers.mostAtOnce, 1),
    [
      "run twice",
      `${count(twice)} = ${(share * 100).toFixed(2)} %`,
      `≤ ${twiceShare * 100} %`,
      share <= twiceShare,
    ],
  ];
}

function outages({ ledger, faults }: Outcome, { failoverMs }: Goals): Line[] {
  const refused = ledger.refusals
    .filter(({ status }) => status === 503)
    .sort((a, b) => a.at + a.ms - b.at - b.ms);
  const longest = new Map<string, number>();
  const ofRedis = faults.filter((fault) => fault.ofRedis);
  for (const [at, fault] of ofRedis.entries()) {
    const ms = refusedMs(refused, fault.at, ofRedis[at + 1]?.at ?? Infinity);
    longest.set(fault.kind, Math.max(ms, longest.get(fault.kind) ?? 0));
  }
  return [...longest].sort(byName).map(([kind, ms]) => {
    const name = `503s after: ${kind}, longest`;
    return kind.startsWith("primary killed") ? goalMs(name, ms, failoverMs) : [name, seconds(ms)];
  });
}

function refusedMs(refused: readonly Refusal[], since: number, before: number): number {
  let last = since;
  for (const { at, ms } of refused) {
    const end = at + ms;
    if (end <= since) continue;
    if (end - last > QUIET_MS + (last === since ? QUIET_MS : 0) || at >= before) break;
    last = end;
  }
  return last - since;
}

function recovery({ ledger, faults }: Outcome, { recoveryMs }: Goals): Line[] {
  const all: number[] = [];
  const whileWell: number[] = [];
  for (const { at, cut, redisWell } of faults) {
    for (const marker of cut) {
      const ms = (ledger.rows.get(marker)?.endedAt ?? Infinity) - at;
      all.push(ms);
      if (redisWell) whileWell.push(ms);
    }
  }
  if (all.length === 0) return [["tasks in a killed batcher", "0"]];
  return [
    ["tasks in a killed batcher", count(all.length)],
    goalMs("their recovery, p99", percentile(all, 99), recoveryMs),
    ["their recovery, longest", seconds(Math.max(...all))],
    ["their recovery, Redis well, p99", whileWell.length === 0 ? "–" : seconds(percentile(whileWell, 99))],
  ];
}

function latency(ledger: Ledger): Line[] {
  const took = [...ledger.rows.values()]
    .filter((row): row is Row & Required<Pick<Row, "endedAt">> => row.endedAt !== undefined)
    .map(({ acceptedAt, endedAt, sentAt }) => endedAt - (acceptedAt ?? sentAt));
  if (took.length === 0) return [];
  const part = (p: number): Line => [`accepted to answered, p${p}`, seconds(percentile(took, p))];
  return [part(50), part(99), ["accepted to answered, longest", seconds(percentile(took, 100))]];
}

function kinds(faults: readonly Fault[]): Line[] {
  const times = Map.groupBy(faults, ({ kind }) => kind);
  return [
    ["faults", count(faults.length)],
    ...[...times].sort(byName).map(([kind, each]): Line => [`  ${kind}`, count(each.length)]),
  ];
}

function refusals({ refusals, odd }: Ledger): Line[] {
  const ms = refusals.filter(({ status }) => status === 503).map((refusal) => refusal.ms);
  return [
    ["refusals, each tried again", count(refusals.length)],
    goal("callers that were left without any answer", refusals.filter(isSilence).length, 0),
    ...(ms.length === 0
      ? []
      : ([
          ["a 503 took, p99", seconds(percentile(ms, 99))],
          ["a 503 took, longest", seconds(percentile(ms, 100))],
        ] as const)),
    ["answers that no good client should meet", count(odd.length)],
  ];
}

/** Why callers were refused, most often first. */
function reasons({ refusals, odd }: Ledger): string[] {
  const groups = Map.groupBy(refusals, ({ status, text }) => `${status} ${reasonOf(text)}`);
  const most = [...groups].sort((a, b) => b[1].length - a[1].length).slice(0, REASONS);
  return [
    ...most.map(([reason, each]) => `  ${count(each.length).padStart(7)} × ${reason}`),
    ...odd.slice(0, 3).map((text) => `  odd: ${text}`),
  ];
}

/** Nothing came within the time that a caller gives one exchange. */
function isSilence({ status, text }: Refusal): boolean {
  return status === 0 && text.startsWith("TimeoutError");
}

/** Without what differs each time: ids, numbers. */
function reasonOf(text: string): string {
  let reason = text;
  try {
    reason = (JSON.parse(text) as { message?: string }).message ?? text;
  } catch {
    // Not an answer of Ferry's: the error of a connection that broke.
  }
  return reason.replaceAll(/\d+(\.\d+)*/g, "n").replaceAll("\n", " ");
}

function percentile(values: readonly number[], p: number): number {
  const sorted = values.toSorted((a, b) => a - b);
  return sorted[Math.max(0, Math.ceil((p / 100) * sorted.length) - 1)]!;
}

function goal(name: string, value: number, most: number): Line {
  return [name, count(value), `≤ ${most}`, value <= most];
}

function goalMs(name: string, ms: number, most: number): Line {
  return [name, seconds(ms), `≤ ${most / 1000} s`, ms <= most];
}

function seconds(ms: number): string {
  return `${(ms / 1000).toFixed(2)} s`;
}

function count(value: number): string {
  return value.toLocaleString("en-US");
}

function byName(a: readonly [string, unknown], b: readonly [string, unknown]): number {
  return a[0].localeCompare(b[0]);
}
