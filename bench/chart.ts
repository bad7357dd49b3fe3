/**
 * The figures of a run as a picture (SVG): one bar for each figure with a goal, measured against that goal.
 *
 * The goal is the same line for every bar, so that all of them share a scale: a bar is as long as measured / goal.
 * Where at least the goal is wanted (≥) it must reach the line, where at most (≤, <) it must not pass it; bars of more than
 * `MOST` goals are cut and end in a point. Whether a goal is met is said by the sign behind the bar and by the bar's
 * pattern, not by its colour alone. A goal of 0 has no length: those (errors, mostly) are one line of text.
 *
 * Nothing in it comes from elsewhere: system fonts, colours for light and dark in its own style sheet.
 */
import { format, signs, type Environment, type Section } from "./report.ts";
import { isMet, type Figure } from "./scenario.ts";

const WIDTH = 960;
const ROW = 24;
const NAME_X = 126;
const BAR_X = 440;
const BAR_WIDTH = 240;
/** How many goals fit beside each other. */
const MOST = 1.5;
const GOAL_X = BAR_X + BAR_WIDTH / MOST;
const VALUE_X = BAR_X + BAR_WIDTH + 14;

const STYLE = `
  .ground { fill: #ffffff } .text { fill: #1b2330 } .dim { fill: #5b6675 } .goal { stroke: #1b2330 }
  .met { fill: #163ab3 } .missed { fill: url(#hatch); stroke: #b42318 } .hatch { stroke: #b42318; stroke-width: 5 }
  .bad { fill: #b42318 } .band { fill: #f3f5f8 }
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; font-variant-numeric: tabular-nums }
  .head { font-size: 17px; font-weight: 600 } .name { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #12161c } .text { fill: #e6eaf0 } .dim { fill: #9aa5b4 } .goal { stroke: #e6eaf0 }
    .met { fill: #6172ff } .hatch, .missed { stroke: #ff6b5e } .bad { fill: #ff6b5e } .band { fill: #1a2028 }
  }`;

export function chart(env: Environment, sections: readonly Section[]): string {
  const groups = sections
    .map(({ scenario, report }) => ({ scenario, figures: report.figures.filter(hasLength) }))
    .filter(({ figures }) => figures.length > 0);
  const rows = groups.reduce((sum, { figures }) => sum + figures.length, 0);
  const top = 92;
  const bottom = top + rows * ROW;
  const height = bottom + 74;
  const parts = [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${height}" width="${WIDTH}" height="${height}" role="img">`,
    `<title>${escape(`Ferry bench, ${env.commit}: measured against goals`)}</title>`,
    `<style>${STYLE}</style>`,
    '<defs><pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">' +
      '<line class="hatch" x1="0" y1="0" x2="0" y2="8"/></pattern></defs>',
    `<rect class="ground" width="${WIDTH}" height="${height}"/>`,
    ...heading(env),
    ...groups.flatMap((group, at) => {
      const before = groups.slice(0, at).reduce((sum, { figures }) => sum + figures.length, 0);
      return drawGroup(group.scenario, group.figures, top + before * ROW, at % 2 === 1);
    }),
    `<line class="goal" x1="${GOAL_X}" y1="${top - 8}" x2="${GOAL_X}" y2="${bottom + 4}" stroke-width="1.5"/>`,
    text(GOAL_X, top - 14, "goal", "dim", "middle"),
    ...zeroLine(sections, bottom + 30),
    text(
      20,
      bottom + 52,
      "A bar is measured / goal: ≥ must reach the line, ≤ and < must stay before it.",
      "dim",
    ),
    "</svg>",
  ];
  return `${parts.join("\n")}\n`;
}

function heading(env: Environment): string[] {
  const quick = env.quick ? "  QUICK: not to be quoted" : "";
  const machine = `${env.cpu}, ${env.cores} cores, ${env.memoryGb} GB, ${env.kernel}, Node ${env.node}`;
  return [
    text(20, 34, `Ferry: measured against goals${quick}`, "text head"),
    text(20, 56, `npm run bench, ${env.time}, commit ${env.commit}; ${machine}`, "dim"),
  ];
}

function drawGroup(scenario: string, figures: readonly Judged[], y: number, banded: boolean): string[] {
  const band = banded
    ? [`<rect class="band" x="10" y="${y}" width="${WIDTH - 20}" height="${figures.length * ROW}" rx="4"/>`]
    : [];
  return [
    ...band,
    text(20, y + 16, scenario, "text name"),
    ...figures.flatMap((figure, at) => drawBar(figure, y + at * ROW)),
  ];
}

function drawBar(figure: Judged, y: number): string[] {
  const { name, value, unit, goal } = figure;
  const met = isMet(figure);
  const share = value / goal.value;
  const length = Math.max(1.5, (Math.min(share, MOST) * BAR_WIDTH) / MOST);
  const [from, to] = [y + 6, y + ROW - 6];
  const right = BAR_X + length;
  // Longer than there is room for: it ends in a point.
  const points =
    share > MOST
      ? `${BAR_X},${from} ${right - 8},${from} ${right},${(from + to) / 2} ${right - 8},${to} ${BAR_X},${to}`
      : `${BAR_X},${from} ${right},${from} ${right},${to} ${BAR_X},${to}`;
  const bar = Number.isFinite(value) ? `<polygon class="${met ? "met" : "missed"}" points="${points}"/>` : "";
  const wanted = `goal ${signs[goal.is]} ${format(goal.value, unit)}`;
  const verdict = `${met ? "✓" : "✗"} ${format(value, unit)}, ${wanted}`;
  return [text(NAME_X, y + 16, name, "text"), bar, text(VALUE_X, y + 16, verdict, met ? "text" : "bad name")];
}

type Judged = Figure & { readonly goal: NonNullable<Figure["goal"]> };

function hasLength(figure: Figure): figure is Judged {
  return figure.goal !== undefined && figure.goal.value !== 0;
}

/** Goals of 0 and what came of them. */
function zeroLine(sections: readonly Section[], y: number): string[] {
  const zeros = sections.flatMap(({ scenario, report }) =>
    report.figures
      .filter(({ goal }) => goal?.value === 0)
      .map((figure) => ({ figure, name: `${scenario}: ${figure.name}` })),
  );
  if (zeros.length === 0) return [];
  const missed = zeros.filter(({ figure }) => !isMet(figure));
  if (missed.length === 0) {
    return [text(20, y, `✓ errors and the like: none, ${zeros.length} figures whose goal is 0`, "text")];
  }
  const list = missed.map(({ name, figure }) => `${name} ${format(figure.value, figure.unit)}`);
  return [text(20, y, `✗ the goal was 0: ${list.join(", ")}`, "bad name")];
}

function text(x: number, y: number, words: string, names: string, anchor = "start"): string {
  return `<text x="${x}" y="${y}" class="${names}" text-anchor="${anchor}">${escape(words)}</text>`;
}

function escape(words: string): string {
  return words.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
