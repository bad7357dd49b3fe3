/**
 * `ferry top`: the dashboard in a terminal, from the same stream. On a terminal it draws until q; elsewhere and with
 * --once it prints one picture, with --json one object per frame. A listener unreachable at the start is a failure; one
 * that goes away later is waited for, and shown as gone.
 */
import { type Clock, SystemClock } from "../app/clock.ts";
import { didYouMean } from "../app/config/spelling.ts";
import type {
  BatchRow,
  Frame,
  Hello,
  ModelFrame,
  Note,
  VerdictFrame,
  WorkerRow,
} from "../observe/dashboard/frames.ts";
import { AdminClient } from "./admin-client.ts";
import { type Call, type Command, type Console, Failure, UsageError, expectNoWords } from "./command.ts";
import { chooseConfig, configFlag } from "./config-file.ts";
import { parseAdminUrl } from "./dead.ts";
import type { StreamEvent } from "./event-stream.ts";
import { urlOf } from "./terminal/banner.ts";
import { type Paint, paint, printable, wantsColor } from "./terminal/terminal.ts";

export const top: Command = {
  summary: "watch a running Ferry",
  usage: "top [-c FILE] [--model NAME] [--once] [--json]",
  examples: [
    { line: "ferry top -c ferry.yaml", doc: "live: verdict, queues, one line a worker; q quits" },
    { line: "ferry top --once --json", doc: "one look, for scripts" },
  ],
  flags: {
    config: { ...configFlag, doc: "the config file of the running Ferry; default ./ferry.yaml" },
    admin: { type: "string", value: "URL", doc: "another admin listener than the config's" },
    model: { type: "string", value: "NAME", doc: "the model to show first; default the first one" },
    once: { type: "boolean", doc: "one picture, then exit; so it is wherever stdout is no terminal" },
    json: { type: "boolean", doc: "JSON on stdout, one object a frame (twice a second)" },
  },

  async run(call: Call, console: Console): Promise<number> {
    expectNoWords(call);
    const chosen = chooseConfig(call, console, "nothing was done");
    if (chosen === undefined) return 1;
    const { admin, tls } = chosen.config;
    const other = call.text("admin");
    const base = other === undefined ? urlOf(admin.listen, admin.tls) : parseAdminUrl(other);
    const client = new AdminClient(base, admin.token, "top", tls?.certFile);
    const colors = paint(wantsColor({ ...console, isTTY: console.outIsTTY, noColor: call.is("no-color") }));
    const json = call.is("json");
    const watch = { client, clock: new SystemClock(), model: call.text("model") };
    if (json || call.is("once") || !console.outIsTTY) {
      return print({ ...watch, once: !json || call.is("once"), json }, console, colors);
    }
    const terminal = new ProcessTerminal(process.stdin, process.stdout);
    return new TopSession(watch, terminal, colors).run();
  },
};

interface Watch {
  readonly client: Pick<AdminClient, "live">;
  readonly clock: Clock;
  readonly model: string | undefined;
}

const FIRST_RETRY_MS = 500;
const MAX_RETRY_MS = 5000;
/** Size of a picture written to a file or a pipe. */
const PLAIN_SIZE = { columns: 120, rows: 200 };

async function print(
  { client, clock, model, once, json }: Watch & { once: boolean; json: boolean },
  console: Console,
  colors: Paint,
): Promise<number> {
  const view = new TopView();
  const stop = new AbortController();
  let retryMs = FIRST_RETRY_MS;
  for (;;) {
    try {
      for await (const event of client.live(clock, stop.signal)) {
        if (!view.take(event)) throw notFerry();
        if (view.frame === undefined) continue;
        chooseModel(view, model);
        retryMs = FIRST_RETRY_MS;
        if (json) console.out(`${JSON.stringify(view.plain())}\n`);
        else console.out(`${drawTop(view, PLAIN_SIZE, colors).join("\n")}\n`);
        if (once) return 0;
      }
    } catch (error) {
      // After the first hello a lost listener is waited for; errors at the start are not fixed by waiting.
      if (once || view.hello === undefined || !(error instanceof Failure)) throw error;
      console.err(`ferry: ${error.message}; trying again\n`);
    }
    await new Promise<void>((resolve) => clock.at(clock.now() + retryMs, resolve));
    retryMs = Math.min(MAX_RETRY_MS, 2 * retryMs);
  }
}

export class TopSession {
  readonly #watch: Watch;
  readonly #terminal: TopTerminal;
  readonly #colors: Paint;
  readonly #view = new TopView();
  readonly #stop = new AbortController();
  #code = 0;
  #wake: (() => void) | undefined;

  constructor(watch: Watch, terminal: TopTerminal, colors: Paint) {
    this.#watch = watch;
    this.#terminal = terminal;
    this.#colors = colors;
  }

  async run(): Promise<number> {
    let retryMs = FIRST_RETRY_MS;
    try {
      while (!this.#stop.signal.aborted) {
        const began = this.#view.hello;
        try {
          await this.#follow();
        } catch (error) {
          // Errors at the start are not fixed by waiting.
          if (!(error instanceof Failure) || this.#view.hello === undefined) throw error;
          if (this.#view.hello !== began) retryMs = FIRST_RETRY_MS;
          await this.#wait(error.message, retryMs);
          retryMs = Math.min(MAX_RETRY_MS, 2 * retryMs);
        }
      }
    } finally {
      this.#terminal.close();
    }
    return this.#code;
  }

  async #follow(): Promise<void> {
    const { client, clock, model } = this.#watch;
    const view = this.#view;
    for await (const event of client.live(clock, this.#stop.signal)) {
      const first = view.hello === undefined;
      if (!view.take(event)) throw notFerry();
      if (view.frame === undefined) continue;
      view.link = { up: true };
      if (first) {
        chooseModel(view, model);
        this.#open();
      }
      if (!view.paused) this.#draw();
    }
  }

  /** Only once there is something to show: an earlier failure is printed as a plain line. */
  #open(): void {
    this.#view.interactive = true;
    this.#terminal.open({
      key: (key) => this.#key(key),
      resized: () => this.#draw(),
      ended: (signal) => this.#end({ SIGINT: 130, SIGTERM: 143, SIGHUP: 129 }[signal as string] ?? 1),
    });
  }

  async #wait(why: string, ms: number): Promise<void> {
    if (this.#stop.signal.aborted) return;
    const { clock } = this.#watch;
    this.#view.link = { up: false, why: `${why.replace(/^top: /, "")}; trying again` };
    this.#draw();
    await new Promise<void>((resolve) => {
      const alarm = clock.at(clock.now() + ms, resolve);
      this.#wake = () => {
        alarm.cancel();
        resolve();
      };
    });
    this.#wake = undefined;
  }

  #key(key: string): void {
    const view = this.#view;
    if (key === "q" || key === "Q" || key === "\u0003") return this.#end(0);
    if (key === "m") view.nextModel();
    else if (key === "r") view.nextReason();
    else if (key === "p" || key === " ") view.paused = !view.paused;
    else return;
    this.#draw();
  }

  #end(code: number): void {
    this.#code = code;
    this.#stop.abort();
    this.#wake?.();
  }

  #draw(): void {
    this.#terminal.draw(drawTop(this.#view, this.#terminal.size(), this.#colors));
  }
}

function chooseModel(view: TopView, wanted: string | undefined): void {
  const names = view.hello!.models.map(({ name }) => name);
  if (wanted === undefined) return;
  const at = names.indexOf(wanted);
  if (at < 0) {
    const known = didYouMean(wanted, names) || `; one of ${names.map(printable).join(", ")}`;
    throw new UsageError(`--model ${printable(wanted)} is not there${known}`);
  }
  view.model = at;
}

function notFerry(): Failure {
  return new Failure("top: what the stream says cannot be read; is this Ferry of another version?");
}

/** State of `ferry top`. It comes from another process, perhaps another version, so its shape is validated. */

/** Time span of a worker's line. */
const SHOWN_MS = 6000;
const MAX_NOTES = 20;

type Link = { readonly up: true } | { readonly up: false; readonly why: string };

export class TopView {
  hello: Hello | undefined;
  frame: Frame | undefined;
  notes: Note[] = [];
  link: Link = { up: true };
  /** Index in `Hello.models` of the model shown. */
  model = 0;
  /** Filter: index in `Hello.reasons`; -1 for all. */
  reason = -1;
  paused = false;
  interactive = false;
  /** By model, then batch id. */
  #batches: Map<string, BatchRow>[] = [];

  /** False when the event is malformed. */
  take({ name, data }: StreamEvent): boolean {
    const value = parse(data);
    if (name === "hello") {
      if (!isHello(value)) return false;
      this.hello = value;
      this.notes = [];
      this.#batches = value.models.map(() => new Map());
      this.model = Math.min(this.model, Math.max(0, value.models.length - 1));
      this.#apply(value.frame);
      return true;
    }
    // Ignore events that a newer server adds.
    if (name !== "frame") return true;
    if (!isFrame(value) || value.models.length !== this.#batches.length) return false;
    this.#apply(value);
    return true;
  }

  nextModel(): void {
    this.model = (this.model + 1) % Math.max(1, this.hello?.models.length ?? 1);
  }

  nextReason(): void {
    const reasons = this.hello?.reasons.length ?? 0;
    this.reason = this.reason + 1 >= reasons ? -1 : this.reason + 1;
  }

  get shown(): ModelFrame | undefined {
    return this.frame?.models[this.model];
  }

  batchesOf(worker: string): BatchRow[] {
    return [...(this.#batches[this.model]?.values() ?? [])].filter((row) => row[1] === worker);
  }

  /** For programs: names instead of indexes, without history. */
  plain(): object {
    const { hello, frame } = this;
    if (hello === undefined || frame === undefined) return {};
    const { now, process } = frame;
    return {
      now,
      version: hello.version,
      process,
      models: frame.models.map(
        ({ verdict, recent, queues, oldestWaitMs, workers, curve, cost, refusedTenants }, at) => ({
          name: hello.models[at]?.name,
          maxBatchSize: hello.models[at]?.maxBatchSize,
          verdict,
          recent,
          queues: queues.map((queue, tier) => ({ tier: hello.tiers[tier], ...queue })),
          oldestWaitMs,
          workers,
          curve,
          cost,
          refusedTenants,
        }),
      ),
      notes: frame.notes,
    };
  }

  #apply(frame: Frame): void {
    this.frame = frame;
    this.notes = [...this.notes, ...frame.notes].slice(-MAX_NOTES);
    frame.models.forEach(({ batches }, at) => {
      const known = this.#batches[at]!;
      for (const row of batches) known.set(row[0], row);
      for (const [id, [, , , endedAt]] of known) {
        if (endedAt !== 0 && endedAt < frame.now - SHOWN_MS) known.delete(id);
      }
    });
  }
}

function parse(text: string): unknown {
  try {
    return JSON.parse(text) as unknown;
  } catch {
    return undefined;
  }
}

function isHello(value: unknown): value is Hello {
  if (!hasLists(value, "models", "tiers", "reasons")) return false;
  const { frame, models } = value as unknown as Hello;
  return isFrame(frame) && frame.models.length === models.length;
}

function isFrame(value: unknown): value is Frame {
  if (!hasLists(value, "models", "notes") || !isObject(value["process"])) return false;
  return (value as unknown as Frame).models.every(
    (model) =>
      hasLists(model, "queues", "workers", "batches") &&
      isObject(model["verdict"]) &&
      isObject(model["recent"]),
  );
}

function hasLists(value: unknown, ...names: string[]): value is Record<string, unknown> {
  return isObject(value) && names.every((name) => Array.isArray(value[name]));
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/**
 * Renders `ferry top` as lines of text for a terminal of any size. Pure. From the top: target, verdict, numbers, queues
 * by tier, a line per worker, recent notes. A worker's line runs left to right and ends now; each letter is the
 * dispatch reason of the batch that ran then: F full, W wait, I idle, D deadline; · is idle. What does not fit is cut,
 * the least important first; every number is readable without colour.
 */

interface Size {
  readonly columns: number;
  readonly rows: number;
}

type Style = (text: string) => string;
type Piece = readonly [text: string, style?: Style];

const KEYS = "q quit  m model  r reason  p pause";
const FREE = "·";
/** A batch filtered out by `reason`. */
const OTHER = "-";
const BARS = "▏▎▍▌▋▊▉█";
const LEAST_STRIP = 10;
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
  const sizes = [...curve(shown, columns, paint), ...cost(shown, columns, paint)];
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

function verdict({ level, sentence, advice }: VerdictFrame, columns: number, paint: Paint): Piece[][] {
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

/** The knee and its hint; nothing while unknown. */
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

/** What a batch's time follows, where that is its inputs' lengths. */
function cost({ cost }: ModelFrame, columns: number, paint: Paint): Piece[][] {
  if (!cost) return [];
  const { words, grouped, paddingRatio } = cost;
  const how = grouped ? "inputs of similar length share it" : "inputs are not grouped by length";
  const padding = paddingRatio === null ? "" : `; padding ${paddingRatio}×`;
  return wrap(printable(`a batch takes ${words}; ${how}${padding}`), columns)
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

/** One letter per time slice. Slices are aligned to the clock, so a batch keeps its length as it moves. */
function stripOf(view: TopView, worker: string, width: number): string {
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

/** Pieces side by side, as many per line as fit. */
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

/** One line, cut at the edge: a wrapped line would push all others down. */
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

/**
 * The terminal of `ferry top`: the alternate screen, redrawn in place and restored. Each picture is one write over the
 * old one, so nothing flickers. Screen, cursor and keyboard are restored on every exit path, from the `exit` event:
 * terminal writes are synchronous.
 */

export interface TopInput {
  key(key: string): void;
  resized(): void;
  ended(signal: NodeJS.Signals): void;
}

export interface TopTerminal {
  size(): Size;
  open(input: TopInput): void;
  draw(lines: readonly string[]): void;
  close(): void;
}

/** Wrapping off: a character may be wider than one column, and a wrapped line pushes all others down. */
const ENTER = "\u001b[?1049h\u001b[?25l\u001b[?7l\u001b[2J";
const LEAVE = "\u001b[?7h\u001b[?25h\u001b[?1049l";
/** Synchronized update: supporting terminals show no intermediate state; others ignore it. */
const BEGIN = "\u001b[?2026h\u001b[H";
const END = "\u001b[?2026l";
const CLEAR_LINE = "\u001b[K";
const CLEAR_BELOW = "\u001b[J";
const SIGNALS: readonly NodeJS.Signals[] = ["SIGINT", "SIGTERM", "SIGHUP"];

class ProcessTerminal implements TopTerminal {
  readonly #stdin: NodeJS.ReadStream;
  readonly #stdout: NodeJS.WriteStream;
  #undo: (() => void)[] = [];

  constructor(stdin: NodeJS.ReadStream, stdout: NodeJS.WriteStream) {
    this.#stdin = stdin;
    this.#stdout = stdout;
  }

  size(): Size {
    // A terminal that does not know its size reports 0.
    return { columns: this.#stdout.columns || 80, rows: this.#stdout.rows || 24 };
  }

  open(input: TopInput): void {
    const [stdin, stdout] = [this.#stdin, this.#stdout];
    const restore = (): void => this.close();
    process.once("exit", restore);
    this.#undo.push(() => process.off("exit", restore));
    stdout.write(ENTER);
    this.#undo.push(() => stdout.write(LEAVE));
    for (const signal of SIGNALS) {
      const ended = (): void => input.ended(signal);
      process.on(signal, ended);
      this.#undo.push(() => process.off(signal, ended));
    }
    const resized = (): void => input.resized();
    stdout.on("resize", resized);
    this.#undo.push(() => stdout.off("resize", resized));
    if (!stdin.isTTY) return;
    const pressed = (text: string): void => {
      for (const key of text) input.key(key);
    };
    stdin.setRawMode(true);
    stdin.setEncoding("utf8").on("data", pressed).resume();
    this.#undo.push(() => {
      stdin.off("data", pressed).pause();
      stdin.setRawMode(false);
    });
  }

  draw(lines: readonly string[]): void {
    const body = lines.map((line) => line + CLEAR_LINE).join("\r\n");
    this.#stdout.write(`${BEGIN}${body}${CLEAR_BELOW}${END}`);
  }

  close(): void {
    const undo = this.#undo.toReversed();
    this.#undo = [];
    for (const step of undo) step();
  }
}
