/**
 * Compares two runs: what changed, in which direction, and whether it is more than noise. "within noise": the 95 %
 * intervals overlap. Percentiles and the mean use results.ts' intervals; counts and shares use Wilson's, which assumes
 * independent requests. `max`, fill and the client's figures have no interval and no verdict.
 */
import type { Interval, Result } from "./results.ts";

export interface ComparisonRow {
  readonly name: string;
  readonly unit: "ms" | "%" | "req/s" | "";
  readonly a: number | null;
  readonly b: number | null;
  /** (b - a) / a; null where a is 0 or one is missing. */
  readonly change: number | null;
  /** unknown: no interval to judge by. */
  readonly verdict: "better" | "worse" | "within noise" | "same" | "unknown";
}

const LATENCIES = ["p50", "p90", "p95", "p99", "p99.9", "max", "mean"] as const;

export function compare(a: Result, b: Result): ComparisonRow[] {
  const rows: ComparisonRow[] = LATENCIES.map((name) =>
    row(name, "ms", a.latencyMs[name], b.latencyMs[name], "less", a.intervals.of[name], b.intervals.of[name]),
  );
  rows.push(
    row("served", "req/s", a.servedPerSecond, b.servedPerSecond, "more", rateInterval(a), rateInterval(b)),
  );
  for (const name of ["refused", "failed", "lost", "unsent"] as const) {
    rows.push(
      row(name, "%", share(a, name), share(b, name), "less", shareInterval(a, name), shareInterval(b, name)),
    );
  }
  rows.push(
    row("fill", "", a.fill, b.fill, "neither"),
    row("batches/1,000", "", perThousand(a), perThousand(b), "neither"),
    row("client CPU", "%", a.client.cpuShare * 100, b.client.cpuShare * 100, "neither"),
  );
  return rows;
}

function row(
  name: string,
  unit: ComparisonRow["unit"],
  a: number | null,
  b: number | null,
  good: "less" | "more" | "neither",
  ofA?: Interval,
  ofB?: Interval,
): ComparisonRow {
  const change = a === null || b === null || a === 0 ? null : (b - a) / a;
  return { name, unit, a, b, change, verdict: verdictOf(a, b, good, ofA, ofB) };
}

function verdictOf(
  a: number | null,
  b: number | null,
  good: "less" | "more" | "neither",
  ofA?: Interval,
  ofB?: Interval,
): ComparisonRow["verdict"] {
  if (a === null || b === null) return "unknown";
  if (a === b) return "same";
  if (good === "neither" || ofA === undefined || ofB === undefined) return "unknown";
  if (ofA.low <= ofB.high && ofB.low <= ofA.high) return "within noise";
  return b < a === (good === "less") ? "better" : "worse";
}

type Share = "refused" | "failed" | "lost" | "unsent";

function share({ counts }: Result, name: Share): number | null {
  return counts.offered === 0 ? null : (100 * counts[name]) / counts.offered;
}

function shareInterval({ counts }: Result, name: Share): Interval {
  const { low, high } = wilson(counts[name], counts.offered);
  return { low: 100 * low, high: 100 * high };
}

function wilson(count: number, n: number): Interval {
  if (n === 0) return { low: 0, high: 1 };
  const z = 1.96;
  const p = count / n;
  const middle = p + z ** 2 / (2 * n);
  const half = z * Math.sqrt((p * (1 - p)) / n + z ** 2 / (4 * n ** 2));
  return { low: (middle - half) / (1 + z ** 2 / n), high: (middle + half) / (1 + z ** 2 / n) };
}

/** Poisson: the standard deviation of a count is its square root. */
function rateInterval({ counts, load, servedPerSecond }: Result): Interval {
  const half = (1.96 * Math.sqrt(counts.served)) / load.seconds;
  return { low: servedPerSecond - half, high: servedPerSecond + half };
}

function perThousand({ server }: Result): number | null {
  return server === null || server.tasks === 0 ? null : (1000 * server.batches) / server.tasks;
}

type Fact = string | number | null | undefined;

/** What makes the two runs hard to compare; one line each. */
export function differences(a: Result, b: Result): string[] {
  const lines: string[] = [];
  const differ = (what: string, x: Fact, y: Fact): void => {
    if (x !== y) lines.push(`${what}: ${x ?? "none"} and ${y ?? "none"}`);
  };
  differ("load", a.load.kind, b.load.kind);
  differ("rate", a.load.rate, b.load.rate);
  differ("callers", a.load.callers, b.load.callers);
  differ("arrivals", a.load.arrivals, b.load.arrivals);
  differ("seconds", Math.round(a.load.seconds), Math.round(b.load.seconds));
  differ("model", a.target.model, b.target.model);
  for (const name of ["cpu", "cores", "node"]) differ(name, a.environment[name], b.environment[name]);
  return lines;
}
