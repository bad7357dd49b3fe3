/**
 * What each way makes of the card, as a picture (SVG): requests per second, one group of bars for each model.
 *
 *   node bench/gpu/chart.ts bench/results/gpu-TIME.json > gpu.svg
 *
 * Each group has its own scale: the card's own pace is its full width. Nothing in it comes from elsewhere.
 */
import { readFileSync } from "node:fs";
import { type Environment, format, type Section } from "../report.ts";

/** In the order in which they stand below each other; what was not measured is left out. */
const WAYS = [
  ["card, full batches of 64", "the card, full batches in a loop", "card"],
  ["card, sorted, full batches of 64", "the card, inputs sorted by length", "card"],
  ["Ferry, saturated", "Ferry", "ferry"],
  ["Ferry, lengths: auto, saturated", "Ferry, grouped by length", "ferry"],
  ["Ferry, lengths: off, saturated", "Ferry, in order of arrival", "ferry"],
  ["Ferry, /v1/embeddings, saturated", "Ferry, OpenAI's API", "ferry"],
  ["Mosec, saturated", "Mosec", "peer"],
  ["LitServe, saturated", "LitServe", "peer"],
  ["plain server, one call each", "a server, one call per request", "plain"],
] as const;

const WIDTH = 920;
const ROW = 26;
const BAR_X = 320;
const BAR_WIDTH = 420;

const STYLE = `
  .ground { fill: #ffffff } .text { fill: #1b2330 } .dim { fill: #5b6675 }
  .card { fill: #b9c2cf } .ferry { fill: #163ab3 } .peer { fill: #6b7f4a } .plain { fill: #b45309 }
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; font-variant-numeric: tabular-nums }
  .head { font-size: 16px; font-weight: 600 } .name { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #12161c } .text { fill: #e6eaf0 } .dim { fill: #9aa5b4 }
    .card { fill: #4b5665 } .ferry { fill: #6172ff } .peer { fill: #a3b97d } .plain { fill: #f0a24b }
  }`;

const rateIn = ({ report }: Section, name: string): number | undefined =>
  report.figures.find((figure) => figure.name === name)?.value;

/** The card's own pace; 0 where it is not known. */
function ceilingOf(section: Section): number {
  for (const [name, , kind] of WAYS) {
    const rate = kind === "card" ? rateIn(section, name) : undefined;
    if (rate !== undefined) return rate;
  }
  return 0;
}

/** Without those of which the card's own pace is not known: there is nothing to compare with. */
export function throughputChart(env: Environment, all: readonly Section[]): string {
  const sections = all.filter((section) => ceilingOf(section) > 0);
  const parts: string[] = [];
  let y = 68;
  for (const section of sections) {
    const ceiling = ceilingOf(section);
    parts.push(text(20, y + 17, section.scenario, "text name"));
    for (const [name, shown, kind] of WAYS) {
      const rate = rateIn(section, name);
      if (rate === undefined) continue;
      const share = rate / ceiling;
      const width = Math.max(1.5, Math.min(share, 1.05) * BAR_WIDTH);
      const figure = format(rate, "req/s") + (kind === "card" ? "" : ` (${share.toFixed(2)})`);
      parts.push(
        text(BAR_X - 12, y + 17, shown, "text", "end"),
        `<rect class="${kind}" x="${BAR_X}" y="${y + 5}" width="${width.toFixed(1)}" height="${ROW - 10}" rx="2"/>`,
        text(BAR_X + width + 10, y + 17, figure, "text"),
      );
      y += ROW;
    }
    y += 14;
  }
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${y}" width="${WIDTH}" height="${y}" role="img">`,
    `<title>Requests per second on one GPU: ${sections.map(({ scenario }) => scenario).join(", ")}</title>`,
    `<style>${STYLE}</style>`,
    `<rect class="ground" width="${WIDTH}" height="${y}"/>`,
    text(20, 30, "Requests per second on one GPU", "text head"),
    text(20, 50, `bench/gpu, ${env.time.slice(0, 10)}; ${sections[0]?.report.notes[0] ?? ""}`, "dim"),
    ...parts,
    "</svg>",
    "",
  ].join("\n");
}

function text(x: number, y: number, words: string, names: string, anchor = "start"): string {
  const escaped = words.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  return `<text x="${x}" y="${y}" class="${names}" text-anchor="${anchor}">${escaped}</text>`;
}

if (import.meta.main) {
  const { environment, sections } = JSON.parse(readFileSync(process.argv[2]!, "utf8")) as {
    environment: Environment;
    sections: Section[];
  };
  process.stdout.write(throughputChart(environment, sections));
}
