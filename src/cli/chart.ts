/**
 * Latency by number of workers, as one self-contained SVG. Colours follow the reader's light or dark scheme; lines also
 * differ by dashes and labels, so print and monochrome work. The axis ends a little above the goal and clips the rest:
 * the latency of an overloaded fleet depends only on how long it is watched.
 */
export interface ChartPoint {
  readonly workers: number;
  readonly p50: number;
  readonly p95: number;
  readonly p99: number;
}

export interface ChartOptions {
  readonly title: string;
  readonly points: readonly ChartPoint[];
  readonly goal: { readonly name: string; readonly ms: number };
  readonly recommended: number;
  readonly knee: number | undefined;
}

const WIDTH = 760;
const HEIGHT = 420;
const LEFT = 64;
const RIGHT = 70;
const TOP = 56;
const BOTTOM = 62;
/** Vertical space per line label. */
const LABEL_GAP = 15;

const STYLE = `
  :root { color-scheme: light dark }
  svg { --paper: #ffffff; --ink: #1b2330; --quiet: #5b6675; --grid: #e3e7ec; --p50: #1399c3; --p95: #163ab3;
    --p99: #771e2f; --goal: #b42318; --pick: #1a7f4b; font: 13px system-ui, sans-serif }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #12161c; --ink: #e6eaf0; --quiet: #9aa5b4; --grid: #2a323d; --p50: #7cdcff; --p95: #8f9bff;
      --p99: #ff9aaa; --goal: #ff6b5e; --pick: #5fd39a }
  }
  text { fill: var(--ink) } .quiet { fill: var(--quiet) } .title { font-size: 15px; font-weight: 600 }
  .grid { stroke: var(--grid) } .line { fill: none; stroke-width: 2.5; stroke-linejoin: round }
  .goal { stroke: var(--goal); stroke-width: 1.5; stroke-dasharray: 7 4 } .pick { stroke: var(--pick); stroke-width: 1.5 }
`;

const SERIES = [
  { name: "p50", dash: "" },
  { name: "p95", dash: "9 4" },
  { name: "p99", dash: "" },
] as const;

export function fleetChart({ title, points, goal, recommended, knee }: ChartOptions): string {
  const sizes = points.map(({ workers }) => workers);
  const [first, last] = [Math.min(...sizes), Math.max(...sizes)];
  const top = topOf(points, goal.ms);
  const x = (workers: number): number =>
    LEFT + ((WIDTH - LEFT - RIGHT) * (workers - first)) / Math.max(1, last - first);
  const y = (ms: number): number => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * ms) / top;
  const lines = SERIES.map(({ name, dash }) => {
    const path = points.map((point) => `${round(x(point.workers))},${round(y(point[name]))}`).join(" ");
    return (
      `<polyline class="line" clip-path="url(#plot)" points="${path}" stroke="var(--${name})"` +
      `${dash === "" ? "" : ` stroke-dasharray="${dash}"`}/>` +
      points
        .filter((point) => point[name] <= top)
        .map(
          (point) =>
            `<circle cx="${round(x(point.workers))}" cy="${round(y(point[name]))}" r="3" fill="var(--${name})">` +
            `<title>${point.workers} workers: ${name} ${Math.round(point[name])} ms</title></circle>`,
        )
        .join("")
    );
  });
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label="${escape(title)}">`,
    `<style>${STYLE}</style>`,
    `<rect width="${WIDTH}" height="${HEIGHT}" fill="var(--paper)"/>`,
    `<clipPath id="plot"><rect x="${LEFT}" y="${TOP}" width="${WIDTH - LEFT - RIGHT}" height="${HEIGHT - TOP - BOTTOM}"/></clipPath>`,
    `<text class="title" x="${LEFT}" y="24">${escape(title)}</text>`,
    `<text class="quiet" x="${LEFT}" y="42">latency in ms by number of workers; lines that leave at the top do not keep up</text>`,
    ...axes({ x, y, top, sizes, first, last }),
    mark(x(recommended), `${recommended} recommended`, "pick"),
    ...(knee === undefined || knee === recommended ? [] : [mark(x(knee), `knee ${knee}`, "knee")]),
    `<line class="goal" x1="${LEFT}" x2="${WIDTH - RIGHT}" y1="${round(y(goal.ms))}" y2="${round(y(goal.ms))}"/>`,
    `<text x="${WIDTH - RIGHT - 4}" y="${round(y(goal.ms)) - 6}" text-anchor="end" style="fill:var(--goal)">goal ${escape(goal.name)} ≤ ${goal.ms} ms</text>`,
    ...lines,
    ...names(points.at(-1)!, y),
    "</svg>",
    "",
  ].join("\n");
}

/** A round number above the goal and above the latencies near it. */
function topOf(points: readonly ChartPoint[], goalMs: number): number {
  const near = points.map(({ p99 }) => p99).filter((p99) => p99 <= 1.5 * goalMs);
  const least = 1.15 * Math.max(goalMs, ...near);
  const unit = 10 ** Math.floor(Math.log10(least)) / 2;
  return Math.ceil(least / unit) * unit;
}

interface Scale {
  readonly x: (workers: number) => number;
  readonly y: (ms: number) => number;
  readonly top: number;
  readonly sizes: readonly number[];
  readonly first: number;
  readonly last: number;
}

function axes({ x, y, top, sizes, first, last }: Scale): string[] {
  const parts: string[] = [];
  for (let step = 0; step <= 5; step++) {
    const ms = (top * step) / 5;
    const at = round(y(ms));
    parts.push(`<line class="grid" x1="${LEFT}" x2="${WIDTH - RIGHT}" y1="${at}" y2="${at}"/>`);
    parts.push(
      `<text class="quiet" x="${LEFT - 8}" y="${at + 4}" text-anchor="end">${Number(ms.toPrecision(3))}</text>`,
    );
  }
  const apart = Math.max(1, Math.ceil((last - first) / 12));
  for (const workers of sizes.filter((size) => (size - first) % apart === 0 || size === last)) {
    parts.push(
      `<text class="quiet" x="${round(x(workers))}" y="${HEIGHT - BOTTOM + 18}" text-anchor="middle">${workers}</text>`,
    );
  }
  parts.push(
    `<text class="quiet" x="${(LEFT + WIDTH - RIGHT) / 2}" y="${HEIGHT - 10}" text-anchor="middle">workers</text>`,
  );
  return parts;
}

/** A vertical line at a size. The pick is labelled under the axis, the knee beside its line: they may be neighbours. */
function mark(at: number, name: string, kind: "pick" | "knee"): string {
  const picked = kind === "pick";
  const color = picked ? "var(--pick)" : "var(--quiet)";
  const dash = picked ? "" : ' stroke-dasharray="3 4"';
  const [x, y] = picked ? [at, HEIGHT - BOTTOM + 36] : [at + 6, HEIGHT - BOTTOM - 8];
  return (
    `<line x1="${round(at)}" x2="${round(at)}" y1="${TOP}" y2="${HEIGHT - BOTTOM}" stroke="${color}" stroke-width="1.5"${dash}/>` +
    `<text x="${round(x)}" y="${y}" text-anchor="${picked ? "middle" : "start"}" style="fill:${color}">${escape(name)}</text>`
  );
}

/** Labels at the right end of each line, moved apart where they overlap. */
function names(end: ChartPoint, y: (ms: number) => number): string[] {
  let above = HEIGHT;
  return SERIES.map(({ name }) => {
    above = Math.min(above - LABEL_GAP, Math.max(TOP, y(end[name]) + 4));
    return `<text x="${WIDTH - RIGHT + 8}" y="${round(above)}" style="fill:var(--${name})">${name} ${Math.round(end[name])}</text>`;
  });
}

function round(value: number): number {
  return Math.round(10 * value) / 10;
}

function escape(text: string): string {
  return text.replace(/[&<>"]/g, (sign) => `&#${sign.codePointAt(0)};`);
}
