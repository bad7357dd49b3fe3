/**
 * What the terminal can show, and what is safe to show. Colour is decided once, in this order: `--no-color`,
 * `NO_COLOR`, `FORCE_COLOR`, `TERM=dumb`, whether the stream is a terminal. Meaning never rests on colour alone.
 */
import { styleText } from "node:util";

export interface ColorWish {
  readonly env: NodeJS.ProcessEnv;
  readonly isTTY: boolean;
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

const STYLES = ["bold", "dim", "green", "yellow", "cyan", "blue", "red"] as const;
export type Paint = Readonly<Record<(typeof STYLES)[number], (text: string) => string>>;

/** Node would decide by its own stdout; `wantsColor` already has. */
export function paint(color: boolean): Paint {
  const painter = (style: (typeof STYLES)[number]) => (text: string) =>
    color && text !== "" ? styleText(style, text, { validateStream: false }) : text;
  return Object.fromEntries(STYLES.map((style) => [style, painter(style)])) as Paint;
}

/** Untrusted text made safe for a terminal line: control, escape, line-end and bidi characters become `·`. */
export function printable(text: string): string {
  return text.replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, "·");
}
