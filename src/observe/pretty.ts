/**
 * Formats a JSON log line for people, in local time:
 *
 *   10:00:00.180 WARN  dead letter  model=embed code=INFERENCE_FAILED task_id=01J…
 *
 * Some fields quote workers or Redis, so control characters and line ends are escaped.
 */
import { styleText } from "node:util";

type Color = "gray" | "green" | "yellow" | "red";

const LEVELS: Readonly<Record<string, readonly [word: string, color: Color]>> = {
  debug: ["DEBUG", "gray"],
  info: ["INFO ", "green"],
  warn: ["WARN ", "yellow"],
  error: ["ERROR", "red"],
};

/** Anything but a JSON object is shown unchanged, escaped. */
export function prettyLine(line: string, color: boolean): string {
  const paint = (style: Color, text: string): string =>
    color ? styleText(style, text, { validateStream: false }) : text;
  const facts = read(line);
  if (facts === undefined) return `${safe(line.trimEnd())}\n`;
  const { level, time, msg, ...rest } = facts;
  const [word, style] = LEVELS[String(level)] ?? [safe(String(level)), "gray"];
  const fields = Object.entries(rest).filter(([, value]) => value !== "" && value !== undefined);
  const shown = fields.map(([name, value]) => `${paint("gray", `${safe(name)}=`)}${fieldText(value)}`);
  const head = `${paint("gray", clockTime(String(time)))} ${paint(style, word)} ${safe(String(msg))}`;
  return `${head}${shown.length === 0 ? "" : `  ${shown.join(" ")}`}\n`;
}

function read(line: string): Record<string, unknown> | undefined {
  try {
    const value: unknown = JSON.parse(line);
    return typeof value === "object" && value !== null ? (value as Record<string, unknown>) : undefined;
  } catch {
    return undefined;
  }
}

function clockTime(iso: string): string {
  const time = new Date(iso);
  if (Number.isNaN(time.getTime())) return safe(iso);
  const two = (value: number): string => String(value).padStart(2, "0");
  const ms = String(time.getMilliseconds()).padStart(3, "0");
  return `${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}.${ms}`;
}

/** Quoted unless unambiguous; numbers with at most three decimals. */
function fieldText(value: unknown): string {
  if (typeof value === "number") return String(Math.round(value * 1000) / 1000);
  if (typeof value !== "string") return safe(JSON.stringify(value));
  return /^[^\s"=]+$/.test(value) ? safe(value) : safe(JSON.stringify(value));
}

/** Control characters, bidirectional overrides and line ends, as \\u escapes. */
function safe(text: string): string {
  return text.replace(
    /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g,
    (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}
