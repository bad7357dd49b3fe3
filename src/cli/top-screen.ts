/**
 * What `ferry top` draws: lines of text from what it knows, for a terminal of any size. Pure.
 *
 * From the top: where one looks and at what, the verdict, the numbers, the queues by tier, a line for each
 * worker, what happened last. A worker's line runs from left to right and ends now; a letter stands for the
 * batch that ran then, by the reason why it left: F full, W wait, I idle, D deadline; · is a free worker. What
 * does not fit is cut, the less important first; every number is there without colour.
 */
import type { ModelFrame, Verdict, WorkerRow } from "../observe/dashboard/frames.ts";
import { type Paint, printable } from "./terminal/terminal.ts";
import { SHOWN_MS, type TopView } from "./top-view.ts";

export interface Size {
  readonly columns: number;
  readonly rows: number;
}

type Style = (text: string) => string;
type Piece = readonly [text: string, style?: Style];

const KEYS = "q quit  m model  r reason  p pause";
const FREE = "·";
/** Stands for a batch of a reason that was not asked for. */
const OTHER = "-";
const BARS = "▏▎▍▌▋▊▉█";
/** A line of a worker is not drawn shorter. */
const LEAST_STRIP = 10;
/** Milliseconds that a letter stands for. */
const LETTER_MS = 50;
const NAME_WIDTH = 24;
const NOTES_ROWS = 5;
const SAID_ROWS = 4;

export function drawTop(view: TopView, size: Size, paint: Paint): string[] {
  const { columns, rows } = size;
  const draw = (pieces: readonly Piece[]): string => fit(pieces, columns);
  const { shown } = view;
  if (shown === undefined) return [draw([["FERRY", paint.bold], ["  waiting for the first frame"]])];
  const top = [...heading(view, columns, paint), ...verdict(shown.verdict, columns, paint)];
  const sizes = curve(shown, columns, paint);
  const middle = [[], ...numbers(view, shown, columns, paint), ...queues(view, shown, columns), ...sizes, []];
  const lines = [...top, ...middle];
  const room = Math.max(1, rows - lines.length - 2);
  const workers = workerLines(view, shown, columns, room, paint);
  lines.push(...workers, ...legend(view, columns, paint));
  const left = rows - lines.length - 1;
  if (left >= 2) lines.push(...notes(view, Math.min(left - 1, NOTES_ROWS), paint));
  return lines.slice(0, rows).map(draw);
}

function heading(view: TopView, columns: number, paint: Paint): Piece[][] {
  const { hello, frame, link } = view;
  const model = printable(hello?.models[view.model]?.name ?? "");
  const scope = printable(frame?.process.scope ?? "");
  const state: Piece = !link.up
    ? [` · ${printable(link.why)}`, paint.red]
    : view.paused
      ? [" · PAUSED", paint.yellow]
      : ["", paint.dim];
  const demo: Piece = hello?.demo === true ? [" · DEMO", paint.yellow] : [""];
  const pieces: Piece[] = [["FERRY ", paint.bold], [model, paint.bold], state, [` · ${scope}`], demo];
  const gap = columns - widthOf(pieces) - KEYS.length;
  if (view.interactive && gap >= 2) return [[...pieces, [" ".repeat(gap)], [KEYS, paint.dim]]];
  return [pieces];
}

function verdict({ level, sentence, advice }: Verdict, columns: number, paint: Paint): Piece[][] {
  const style = { ok: paint.green, quiet: paint.dim, busy: paint.yellow, bad: paint.red }[level];
  const said = wrap(printable(sentence), columns).slice(0, SAID_ROWS);
  const more = advice === "" ? [] : wrap(printable(advice), columns).slice(0, 2);
  return [
    ...said.map((line): Piece[] => [[line, style]]),
    ...more.map((line): Piece[] => [[line, paint.dim]]),
  ];
}

function numbers(view: TopView, { recent }: ModelFrame, columns: number, paint: Paint): Piece[][] {
  const { deadLetters, totals } = view.frame!.process;
  const alarming = (value: number): Style => (value > 0 ? paint.red : plain);
  const ms = (value: number | null): string => (value === null ? "–" : String(value));
  const parts: Piece[] = [
    [`${count(recent.requestsPerSecond)} req/s`, paint.bold],
    [`load ${percent(recent.load)}`],
    [`p50 ${ms(recent.p50)}`],
    [`p99 ${ms(recent.p99)} ms`, paint.bold],
    [`refused ${percent(recent.refusedShare)}`, alarming(recent.refusedShare)],
    [`dead ${count(deadLetters)}`, deadLetters > 0 ? paint.yellow : plain],
    [`lost ${count(totals.lost)}`, alarming(totals.lost)],
    ...(recent.fill === null ? [] : [[`seats taken ${percent(recent.fill)}`] satisfies Piece]),
  ];
  return flow(parts, columns);
}

/** The knee, and what follows; nothing while it is not known. */
function curve({ curve }: ModelFrame, columns: number, paint: Paint): Piece[][] {
  if (!curve || (curve.knee === null && curve.hint === "")) return [];
  const { knee, hint } = curve;
  const at =
    knee === null ? "" : `knee at ${knee.size}: ${time(knee.ms)}, ${count(knee.perSecond)}/s a worker`;
  const said = hint === "" ? at : hint;
  return wrap(printable(said), columns)
    .slice(0, 2)
    .map((line): Piece[] => [[line, paint.dim]]);
}

function queues(view: TopView, { queues, oldestWaitMs }: ModelFrame, columns: number): Piece[][] {
  const most = Math.max(
    view.hello!.models[view.model]?.maxBatchSize ?? 1,
    ...queues.map(({ depth }) => depth),
  );
  const parts = queues.map(({ depth }, tier): Piece => {
    const step = Math.min(BARS.length - 1, Math.floor((depth / most) * BARS.length));
    return [`${printable(view.hello!.tiers[tier] ?? "?")} ${BARS[step]!} ${count(depth).padStart(3)}`];
  });
  return flow([...parts, [`oldest waits ${time(oldestWaitMs)}`]], columns);
}

function workerLines(
  view: TopView,
  { workers, batchesLeftOut }: ModelFrame,
  columns: number,
  room: number,
  paint: Paint,
): Piece[][] {
  if (workers.length === 0) return [[["no worker is known", paint.dim]]];
  const shown = workers.length <= room ? workers : workers.slice(0, Math.max(1, room - 1));
  const nameWidth = Math.min(NAME_WIDTH, Math.max(...shown.map(({ name }) => printable(name).length)));
  const facts = shown.map((worker) => factsOf(worker, view.hello!.models[view.model]?.maxBatchSize ?? 1));
  const factsWidth = Math.max(...facts.map((fact) => fact.length));
  // The name, two brackets, two gaps of two.
  const stripWidth = Math.min(SHOWN_MS / LETTER_MS, columns - nameWidth - factsWidth - 6);
  const lines = shown.map((worker, at): Piece[] => {
    const name = cut(printable(worker.name), nameWidth).padEnd(nameWidth);
    if (worker.state === "down") return [[name], ["  ✕ ", paint.red], [downWords(worker), paint.red]];
    if (stripWidth < LEAST_STRIP) return [[name], [`  ${facts[at]!}`]];
    const strip = stripOf(view, worker.name, stripWidth);
    return [[name], ["  ["], ...paintStrip(strip, paint), ["]  "], [facts[at]!]];
  });
  const hidden = workers.length - shown.length;
  if (hidden > 0) lines.push([[`+${hidden} more`, paint.dim]]);
  else if (batchesLeftOut > 0) lines.push([[`${batchesLeftOut} batches are not drawn`, paint.dim]]);
  return lines;
}

/** "56/64  busy 81 %  100 ms" */
function factsOf({ busy, filled, batchMs, state, ratio }: WorkerRow, maxBatchSize: number): string {
  const seats = busy > 0 ? Math.min(maxBatchSize, Math.round((filled / busy) * maxBatchSize)) : 0;
  const width = String(maxBatchSize).length;
  const pace = ratio >= 1.5 ? `  ${ratio}× slower` : "";
  const word = state === "draining" ? "  draining" : "";
  const time = `${batchMs === 0 ? "–" : batchMs} ms`;
  return `${String(seats).padStart(width)}/${maxBatchSize}  busy ${percent(busy).padStart(5)}  ${time.padStart(7)}${pace}${word}`;
}

function downWords({ down }: WorkerRow): string {
  if (down === undefined) return "down";
  const why = down.why === "" ? "" : `, ${printable(down.why)}`;
  const next = down.retryInMs > 0 ? `, next try ${time(down.retryInMs)}` : "";
  return `down ${time(down.sinceMs)}${why}${next}`;
}

/** A letter for each slice of time. The slices are those of the clock, so that a batch keeps its length as it moves. */
export function stripOf(view: TopView, worker: string, width: number): string {
  const slice = (instant: number): number => Math.round(instant / LETTER_MS);
  const { now } = view.frame!;
  const begins = slice(now) - width;
  const letters = view.hello!.reasons.map((reason) => reason.slice(0, 1).toUpperCase());
  const cells = new Array<string>(width).fill(FREE);
  for (const [, , startedAt, endedAt, , reason] of view.batchesOf(worker)) {
    const asked = view.reason < 0 || view.reason === reason;
    const letter = asked ? (letters[reason] ?? "?") : OTHER;
    const first = slice(startedAt) - begins;
    // The shortest batch is a letter too.
    const end = Math.max(first + 1, slice(endedAt === 0 ? now : endedAt) - begins);
    for (let at = Math.max(0, first); at < Math.min(end, width); at++) cells[at] = letter;
  }
  return cells.join("");
}

function paintStrip(strip: string, paint: Paint): Piece[] {
  const styles: Record<string, Style> = {
    F: paint.blue,
    W: paint.yellow,
    I: paint.cyan,
    D: paint.red,
    [FREE]: paint.dim,
    [OTHER]: paint.dim,
  };
  return (strip.match(/(.)\1*/gu) ?? []).map((run): Piece => [run, styles[run[0]!] ?? plain]);
}

function legend(view: TopView, columns: number, paint: Paint): Piece[][] {
  const { reasons } = view.hello!;
  const words = reasons.map((reason) => `${reason.slice(0, 1).toUpperCase()} ${reason}`);
  const only = view.reason < 0 ? "" : `    only ${reasons[view.reason]!}, others ${OTHER}`;
  return wrap(`${words.join("  ")}  ${FREE} free${only}`, columns).map((line): Piece[] => [
    [line, paint.dim],
  ]);
}

function notes(view: TopView, most: number, paint: Paint): Piece[][] {
  const lines = view.notes.slice(-most).map(({ at, level, text }): Piece[] => {
    const style = { info: plain, warn: paint.yellow, error: paint.red }[level] ?? plain;
    return [
      [new Date(at).toISOString().slice(11, 19), paint.dim],
      [`  ${printable(text)}`, style],
    ];
  });
  return lines.length === 0 ? [] : [[], ...lines];
}

/** Pieces side by side, as many in a line as fit. */
function flow(pieces: readonly Piece[], columns: number): Piece[][] {
  const lines: Piece[][] = [];
  let used = Infinity;
  for (const piece of pieces) {
    const width = lengthOf(piece[0]);
    if (used + 3 + width <= columns) {
      lines.at(-1)!.push(["   "], piece);
      used += 3 + width;
    } else {
      lines.push([piece]);
      used = width;
    }
  }
  return lines;
}

function wrap(text: string, columns: number): string[] {
  const lines: string[] = [];
  let line = "";
  for (const word of text.split(" ")) {
    if (line !== "" && lengthOf(line) + 1 + lengthOf(word) > columns) {
      lines.push(line);
      line = word;
    } else line = line === "" ? word : `${line} ${word}`;
  }
  return [...lines, line];
}

/** One line of text, cut at the edge: a line that wraps would push all others down. */
function fit(pieces: readonly Piece[], columns: number): string {
  let left = columns;
  let line = "";
  for (const [text, style = plain] of pieces) {
    const part = cut(text, left);
    line += style(part);
    left -= lengthOf(part);
    if (left <= 0) break;
  }
  return line;
}

function cut(text: string, columns: number): string {
  if (lengthOf(text) <= columns) return text;
  if (columns <= 0) return "";
  return `${Array.from(text)
    .slice(0, columns - 1)
    .join("")}…`;
}

function widthOf(pieces: readonly Piece[]): number {
  return pieces.reduce((sum, [text]) => sum + lengthOf(text), 0);
}

function lengthOf(text: string): number {
  return Array.from(text).length;
}

function plain(text: string): string {
  return text;
}

function count(value: number): string {
  return value.toLocaleString("en-US", { maximumFractionDigits: value >= 100 ? 0 : 1 });
}

function percent(share: number): string {
  const value = 100 * share;
  return `${value === 0 || value >= 10 ? Math.round(value) : value.toFixed(1)} %`;
}

function time(ms: number): string {
  return ms < 10_000 ? `${count(ms)} ms` : `${count(Math.round(ms / 1000))} s`;
}
