/**
 * What the terminal can show, and what may be shown on it.
 *
 * Colour is decided once, in this order: `--no-color`, `NO_COLOR`, `FORCE_COLOR`, `TERM=dumb`, whether
 * the stream is a terminal. Meaning never rests on colour alone.
 */

export interface ColorWish {
  readonly env: NodeJS.ProcessEnv;
  readonly isTTY: boolean;
  /** `--no-color` was given. */
  readonly noColor: boolean;
}

export function wantsColor({ env, isTTY, noColor }: ColorWish): boolean {
  if (noColor) return false;
  if (isSet(env["NO_COLOR"])) return false;
  const forced = env["FORCE_COLOR"];
  if (isSet(forced)) return forced !== "0" && forced !== "false";
  return isTTY && env["TERM"] !== "dumb";
}

/** By no-color.org an empty variable counts as not set. */
function isSet(value: string | undefined): boolean {
  return value !== undefined && value !== "";
}

export interface Paint {
  readonly bold: (text: string) => string;
  readonly dim: (text: string) => string;
  readonly green: (text: string) => string;
  readonly yellow: (text: string) => string;
  readonly cyan: (text: string) => string;
  readonly blue: (text: string) => string;
  readonly red: (text: string) => string;
}

export function paint(color: boolean): Paint {
  const style = (on: number, off: number) => (text: string) =>
    color && text !== "" ? `\u001b[${on}m${text}\u001b[${off}m` : text;
  return {
    bold: style(1, 22),
    dim: style(2, 22),
    green: style(32, 39),
    yellow: style(33, 39),
    cyan: style(36, 39),
    blue: style(34, 39),
    red: style(31, 39),
  };
}

/**
 * Text from outside, made safe for a terminal and for one line: control characters, escape
 * sequences, line ends and characters that reverse the writing direction become `·`.
 */
export function printable(text: string): string {
  return text.replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, "·");
}
