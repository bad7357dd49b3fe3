/**
 * Goals of a run, and whether they were met.
 *
 *   p50=20ms p90=… p95=… p99=150ms p99.9=1s max=2s mean=80ms   latency of served requests, at most
 *   errors=0 errors=0.1%                                       failed, lost, crossed or unsent, at most
 *   refused=5%  refused=100                                    429 and 503, at most
 *   rate=1750                                                  served per second, at least
 *
 * Shares are of what was offered. A figure that was not measured is NaN and meets no goal.
 */

export interface Slo {
  readonly text: string;
  readonly of: "latency" | "errors" | "refused" | "rate";
  /** With `latency`: 0 to 100 (max is 100), or "mean". */
  readonly percentile?: number | "mean";
  /** ms, requests, a share of 0 to 1, or requests per second. */
  readonly limit: number;
  readonly isShare: boolean;
}

export interface Judged {
  readonly offered: number;
  readonly refused: number;
  readonly errors: number;
  readonly servedPerSecond: number;
  /** 100 is the maximum. */
  percentileMs(percentile: number): number;
  readonly meanMs: number;
}

export interface SloResult {
  readonly slo: string;
  readonly met: boolean;
  readonly name: string;
  /** In the goal's unit; null: not measured. */
  readonly measured: number | null;
  readonly limit: number;
  readonly unit: "ms" | "%" | "req/s" | "";
}

const PERCENTILES: Readonly<Record<string, number | "mean">> = {
  p50: 50,
  p90: 90,
  p95: 95,
  p99: 99,
  "p99.9": 99.9,
  max: 100,
  mean: "mean",
};
export const SLO_NAMES = [...Object.keys(PERCENTILES), "errors", "refused", "rate"];

const UNIT_MS: Readonly<Record<string, number>> = { us: 0.001, ms: 1, s: 1000, m: 60_000, h: 3_600_000 };

/** "150ms", "30s", "1.5m" in ms; undefined when invalid. */
export function parseDuration(text: string): number | undefined {
  const [, number, unit] = /^(\d{1,9}(?:\.\d{1,6})?)(us|ms|s|m|h)$/.exec(text) ?? [];
  return number === undefined ? undefined : Number(number) * UNIT_MS[unit!]!;
}

export function parseSlo(text: string): Slo | string {
  const cut = text.indexOf("=");
  const [name, value] = cut < 0 ? [text, ""] : [text.slice(0, cut).trim(), text.slice(cut + 1).trim()];
  const percentile = Object.hasOwn(PERCENTILES, name) ? PERCENTILES[name]! : undefined;
  if (percentile !== undefined) {
    const limit = parseDuration(value);
    if (limit === undefined) return `${name} needs a duration, like ${name}=150ms`;
    return { text, of: "latency", percentile, limit, isShare: false };
  }
  if (name !== "errors" && name !== "refused" && name !== "rate")
    return `its name is not one of ${SLO_NAMES.join(", ")}`;
  const [, number, percent] = /^(\d{1,12}(?:\.\d{1,6})?) ?(%?)$/.exec(value) ?? [];
  if (number === undefined || (percent !== "" && name === "rate")) {
    return name === "rate"
      ? "rate needs requests a second, like rate=1750"
      : `${name} needs a count or a share, like ${name}=0 or ${name}=0.1%`;
  }
  const isShare = percent !== "";
  return { text, of: name, limit: Number(number) / (isShare ? 100 : 1), isShare };
}

export function judge(slo: Slo, run: Judged): SloResult {
  const value = measuredFor(slo, run);
  const met = slo.of === "rate" ? value >= slo.limit : value <= slo.limit;
  const scale = slo.isShare ? 100 : 1;
  return {
    slo: slo.text,
    met,
    name: slo.of === "latency" ? slo.text.slice(0, slo.text.indexOf("=")).trim() : slo.of,
    measured: Number.isNaN(value) ? null : value * scale,
    limit: slo.limit * scale,
    unit: slo.isShare ? "%" : slo.of === "latency" ? "ms" : slo.of === "rate" ? "req/s" : "",
  };
}

function measuredFor(slo: Slo, run: Judged): number {
  if (slo.of === "latency")
    return slo.percentile === "mean" ? run.meanMs : run.percentileMs(slo.percentile ?? 100);
  if (slo.of === "rate") return run.servedPerSecond;
  const count = slo.of === "errors" ? run.errors : run.refused;
  return slo.isShare ? count / run.offered : count;
}
