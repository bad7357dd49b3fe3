/**
 * A command: its flags, its help, and a function from parsed arguments to an exit code. Exit codes: 0 success, 1
 * failure (a bad config included), 2 usage error. Results go to `out`, everything else to `err`. A command never
 * touches `process`, so tests can call it.
 */
import { parseArgs } from "node:util";
import { didYouMean } from "../app/config/spelling.ts";
import { printable } from "./terminal/terminal.ts";

export interface Flag {
  readonly type: "string" | "boolean";
  readonly short?: string;
  /** May be repeated; `Call.texts` has all values. */
  readonly multiple?: boolean;
  readonly value?: string;
  readonly doc: string;
}

export interface Example {
  readonly line: string;
  readonly doc: string;
}

export interface Command {
  readonly summary: string;
  /** What follows `ferry `. */
  readonly usage: string;
  readonly examples: readonly [Example, Example];
  readonly flags: { readonly [name: string]: Flag };
  run(call: Call, console: Console): Promise<number>;
}

export interface Console {
  out(text: string): void;
  err(text: string): void;
  readonly env: NodeJS.ProcessEnv;
  readonly outIsTTY: boolean;
  readonly errIsTTY: boolean;
  /** Prompts the user; undefined without a terminal. */
  ask?(question: string): Promise<string>;
  /** Passes on key presses until the result is called. Undefined: no terminal, or (resolved) not in the foreground. */
  keys?(pressed: (key: string) => void): Promise<(() => void) | undefined>;
}

export interface Call {
  readonly words: readonly string[];
  text(flag: string): string | undefined;
  texts(flag: string): readonly string[];
  is(flag: string): boolean;
}

/** Wrong command line: exit 2. */
export class UsageError extends Error {}

/** The command failed: exit 1. The message is one line. */
export class Failure extends Error {}

export const commonFlags: Command["flags"] = {
  help: { type: "boolean", short: "h", doc: "show this" },
  "no-color": { type: "boolean", doc: "no colour (also NO_COLOR=1)" },
};

export function parseCall(flags: Command["flags"], args: readonly string[]): Call {
  const options = { ...flags, ...commonFlags };
  try {
    const { values, positionals } = parseArgs({
      args: [...args],
      options,
      allowPositionals: true,
      strict: true,
    });
    return {
      words: positionals,
      text: (flag) => (typeof values[flag] === "string" ? values[flag] : undefined),
      texts: (flag) => [values[flag] ?? []].flat().map(String),
      is: (flag) => values[flag] === true,
    };
  } catch (error) {
    throw new UsageError(flagMessage(error as NodeJS.ErrnoException, Object.keys(options)));
  }
}

/** Node's messages explain its parser; ours say what to write. */
function flagMessage(error: NodeJS.ErrnoException, known: readonly string[]): string {
  const flag = printable(/'(?:-\w, )?(-[^' ]*)/.exec(error.message)?.[1] ?? "");
  if (error.code === "ERR_PARSE_ARGS_UNKNOWN_OPTION") {
    const names = known.map((name) => `--${name}`);
    return `unknown flag ${flag}${didYouMean(flag, names)}`;
  }
  if (error.message.includes("does not take an argument")) return `${flag} takes no value`;
  return `${flag} needs a value`;
}

/** Examples first: most readers look for a line to copy. */
export function helpText(name: string, command: Command): string {
  const width = Math.max(...command.examples.map(({ line }) => line.length));
  const flags = Object.entries({ ...command.flags, ...commonFlags }).map(([flag, about]) => {
    const { short, value = "" } = about;
    return [
      `${short === undefined ? "    " : `-${short}, `}--${flag}${value === "" ? "" : ` ${value}`}`,
      about.doc,
    ];
  });
  const flagWidth = Math.max(...flags.map(([left]) => left!.length));
  return [
    `ferry ${name}: ${command.summary}`,
    "",
    ...command.examples.map(({ line, doc }) => `  ${line.padEnd(width)}   # ${doc}`),
    "",
    `Usage: ferry ${command.usage}`,
    "",
    ...flags.map(([left, doc]) => `  ${left!.padEnd(flagWidth)}   ${doc}`),
    "",
  ].join("\n");
}

/** Commands take flags; a stray word is usually a forgotten -c. */
export function expectNoWords({ words }: Call): void {
  const word = words[0];
  if (word === undefined) return;
  const hint = /\.ya?ml$/.test(word) ? `; did you mean -c ${printable(word)}?` : "";
  throw new UsageError(`unexpected ${printable(word)}${hint}`);
}
