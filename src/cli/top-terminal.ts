/**
 * The terminal as `ferry top` uses it: the alternate screen, redrawn in place, and given back as it was.
 *
 * Each picture is one write that goes over the old one and clears what is left of it, so that nothing flickers.
 * However the process ends (a key, a signal, a crash), the screen, the cursor and the keyboard are restored:
 * `exit` is the last thing that happens to a process, and a terminal takes a write at once.
 */
import type { Size } from "./top-screen.ts";

/** What people can do to it. */
export interface TopInput {
  key(key: string): void;
  resized(): void;
  /** A signal asks for the end. */
  ended(signal: NodeJS.Signals): void;
}

export interface TopTerminal {
  size(): Size;
  open(input: TopInput): void;
  draw(lines: readonly string[]): void;
  close(): void;
}

/** Without wrapping: a character may be wider than one column, and a line that wraps pushes all others down. */
const ENTER = "\u001b[?1049h\u001b[?25l\u001b[?7l\u001b[2J";
const LEAVE = "\u001b[?7h\u001b[?25h\u001b[?1049l";
/** Terminals that know it show nothing in between; others ignore it. */
const BEGIN = "\u001b[?2026h\u001b[H";
const END = "\u001b[?2026l";
const CLEAR_LINE = "\u001b[K";
const CLEAR_BELOW = "\u001b[J";
const SIGNALS: readonly NodeJS.Signals[] = ["SIGINT", "SIGTERM", "SIGHUP"];

export class ProcessTerminal implements TopTerminal {
  readonly #stdin: NodeJS.ReadStream;
  readonly #stdout: NodeJS.WriteStream;
  #undo: (() => void)[] = [];

  constructor(stdin: NodeJS.ReadStream, stdout: NodeJS.WriteStream) {
    this.#stdin = stdin;
    this.#stdout = stdout;
  }

  size(): Size {
    // A terminal that does not say how large it is says 0.
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
