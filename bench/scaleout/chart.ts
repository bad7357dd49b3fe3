/**
 * Throughput against the number of gateways, as a picture (SVG): a line for one Redis and one for a Cluster of three.
 *
 * The dashed line is what the first point of the first line promises, n times one gateway; the dotted one is a single process
 * with the memory engine. Whiskers reach from the smallest to the largest run. Lines differ in the shape of their points,
 * not in colour alone. Nothing in it comes from elsewhere: system fonts, colours for light and dark in its own style sheet.
 */
import { median } from "../../src/core/median.ts";
import { GATEWAY_COUNTS } from "./cases.ts";
import { head, seriesOf, type Results, type Series } from "./report.ts";

const WIDTH = 960;
const HEIGHT = 532;
const PLOT = { left: 86, right: 758, top: 84, bottom: 450 } as const;
const MOST_GATEWAYS = Math.max(...GATEWAY_COUNTS);
const LABEL_HEIGHT = 18;
/** About so many lines of the grid. */
const GRID_LINES = 6;

const STYLE = `
  .ground { fill: #ffffff } .text { fill: #1b2330 } .dim { fill: #5b6675 }
  .grid { stroke: #dfe4ea } .ideal, .memory { stroke: #5b6675; stroke-width: 1.5; fill: none }
  .ideal { stroke-dasharray: 7 5 } .memory { stroke-dasharray: 2 4 }
  .line { stroke-width: 2.5; fill: none } .whisker { stroke-width: 1.5 }
  .redis { stroke: #163ab3 } .redis.point { fill: #163ab3 }
  .cluster { stroke: #b45309 } .cluster.point { fill: #b45309 }
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; font-variant-numeric: tabular-nums }
  .head { font-size: 17px; font-weight: 600 } .name { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #12161c } .text { fill: #e6eaf0 } .dim { fill: #9aa5b4 }
    .grid { stroke: #2a323d } .ideal, .memory { stroke: #9aa5b4 }
    .redis { stroke: #6172ff } .redis.point { fill: #6172ff }
    .cluster { stroke: #f0a24b } .cluster.point { fill: #f0a24b }
  }`;

interface Scale {
  readonly most: number;
  readonly step: number;
}

export function scaleoutChart(results: Results): string {
  const redis = seriesOf(results, "redis", "one Redis");
  const cluster = seriesOf(results, "cluster", "Cluster of 3");
  const memory = (results.get("memory") ?? []).map(({ rate }) => rate);
  const scale = scaleOf([...[...redis.points, ...cluster.points].map(({ max }) => max), ...memory]);
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${HEIGHT}" width="${WIDTH}" height="${HEIGHT}" role="img">`,
    "<title>Ferry on Redis: requests per second by number of gateways</title>",
    `<style>${STYLE}</style>`,
    `<rect class="ground" width="${WIDTH}" height="${HEIGHT}"/>`,
    text(20, 34, "Requests per second by number of gateways", "text head"),
    text(
      20,
      56,
      "bench/scaleout.ts: 2 KB in and out, three batchers, append-only file on, closed loop",
      "dim",
    ),
    ...axes(scale),
    ...idealLine(redis.points.length > 0 ? redis : cluster, scale),
    ...memoryLine(memory, scale),
    ...drawSeries(redis, "redis", scale),
    ...drawSeries(cluster, "cluster", scale),
    ...labels([redis, cluster], scale),
    text(20, HEIGHT - 14, head(results)[0] ?? "", "dim"),
    "</svg>",
    "",
  ].join("\n");
}

/** Steps of 1, 2 or 5 times a power of ten, and a top that is a whole number of them. */
function scaleOf(rates: readonly number[]): Scale {
  const largest = Math.max(1, ...rates);
  const rough = largest / GRID_LINES;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough)!;
  return { step, most: Math.ceil(largest / step) * step };
}

function xOf(gateways: number): number {
  return PLOT.left + (gateways / MOST_GATEWAYS) * (PLOT.right - PLOT.left);
}

function yOf(rate: number, { most }: Scale): number {
  return PLOT.bottom - (rate / most) * (PLOT.bottom - PLOT.top);
}

function axes(scale: Scale): string[] {
  const rates = Array.from({ length: Math.round(scale.most / scale.step) + 1 }, (_, i) => i * scale.step);
  return [
    ...rates.flatMap((rate) => {
      const y = yOf(rate, scale).toFixed(1);
      return [
        `<line class="grid" x1="${PLOT.left}" y1="${y}" x2="${PLOT.right}" y2="${y}"/>`,
        text(PLOT.left - 10, Number(y) + 4, rate.toLocaleString("en-US"), "dim", "end"),
      ];
    }),
    ...GATEWAY_COUNTS.map((n) => text(xOf(n), PLOT.bottom + 22, String(n), "dim", "middle")),
    text((PLOT.left + PLOT.right) / 2, PLOT.bottom + 42, "gateways", "dim", "middle"),
  ];
}

/** Up to where it leaves the picture. */
function idealLine({ points }: Series, scale: Scale): string[] {
  const one = points.find(({ gateways }) => gateways === 1)?.median;
  if (one === undefined) return [];
  const end = Math.min(MOST_GATEWAYS, scale.most / one);
  const [x, y] = [xOf(end), yOf(one * end, scale)];
  return [
    `<line class="ideal" x1="${PLOT.left}" y1="${PLOT.bottom}" x2="${x.toFixed(1)}" y2="${y.toFixed(1)}"/>`,
    text(x, y - 8, "n × one gateway", "dim", "end"),
  ];
}

function memoryLine(rates: readonly number[], scale: Scale): string[] {
  if (rates.length === 0) return [];
  const y = yOf(median(rates), scale);
  return [
    `<line class="memory" x1="${PLOT.left}" y1="${y.toFixed(1)}" x2="${PLOT.right}" y2="${y.toFixed(1)}"/>`,
    text(
      PLOT.right + 12,
      y + 4,
      `memory engine: ${Math.round(median(rates)).toLocaleString("en-US")}/s`,
      "dim",
    ),
  ];
}

function drawSeries({ points }: Series, kind: "redis" | "cluster", scale: Scale): string[] {
  const at = points.map((point) => ({ ...point, x: xOf(point.gateways), y: yOf(point.median, scale) }));
  const path = at.map(({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
  if (at.length === 0) return [];
  return [
    `<polyline class="line ${kind}" points="${path}"/>`,
    ...at.flatMap(({ x, y, min, max }) => [
      `<line class="whisker ${kind}" x1="${x.toFixed(1)}" y1="${yOf(min, scale).toFixed(1)}" x2="${x.toFixed(1)}" y2="${yOf(max, scale).toFixed(1)}"/>`,
      kind === "redis"
        ? `<circle class="point ${kind}" cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="4.5"/>`
        : `<rect class="point ${kind}" x="${(x - 4.5).toFixed(1)}" y="${(y - 4.5).toFixed(1)}" width="9" height="9"/>`,
    ]),
  ];
}

/** Beside the last points; where two would overlap, the lower one moves down. */
function labels(series: readonly Series[], scale: Scale): string[] {
  const ends = series
    .flatMap(({ name, points }) => points.slice(-1).map((point) => ({ name, ...point })))
    .toSorted((a, b) => b.median - a.median);
  let lowest = -Infinity;
  return ends.map(({ name, gateways, median: rate }) => {
    lowest = Math.max(yOf(rate, scale) + 4, lowest + LABEL_HEIGHT);
    const words = `${name}: ${Math.round(rate).toLocaleString("en-US")}/s`;
    return text(xOf(gateways) + 12, lowest, words, "text name");
  });
}

function text(x: number, y: number, words: string, names: string, anchor = "start"): string {
  const escaped = words.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  return `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" class="${names}" text-anchor="${anchor}">${escaped}</text>`;
}
