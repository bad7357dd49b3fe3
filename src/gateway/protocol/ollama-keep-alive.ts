/**
 * Ollama's `keep_alive`: for how long a model stays loaded after a call.
 *
 *   "5m", "1h30m", "1.5h", "250ms"   a duration     10, "10"   seconds
 *   anything below 0                 for ever       0          it is unloaded at once
 *
 * Of a batch the longest is sent. Whoever says nothing wants the server's default, which is 5 minutes unless its
 * operator changed that; where that is the longest, nothing is sent.
 */
import type { Json } from "../../core/task.ts";
import { invalid } from "./fields.ts";

const DEFAULT_SECONDS = 300;
const UNITS: Readonly<Record<string, number>> = {
  h: 3600,
  m: 60,
  s: 1,
  ms: 1e-3,
  us: 1e-6,
  µs: 1e-6,
  μs: 1e-6,
  ns: 1e-9,
};
const DURATION =
  /^[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:h|m|s|ms|us|µs|μs|ns)(?:(?:\d+(?:\.\d*)?|\.\d+)(?:h|m|s|ms|us|µs|μs|ns))*$/;
const PART = /(\d+(?:\.\d*)?|\.\d+)(h|ms|m|s|us|µs|μs|ns)/g;

/** The text as it came; undefined where it is left out. Throws a Refusal for what is no duration. */
export function readKeepAlive(text: Json | undefined): Json | undefined {
  if (text === undefined || text === "null") return undefined;
  if (secondsOf(text) === undefined)
    throw invalid('"keep_alive" must be a duration such as "5m", or seconds');
  return text;
}

/** Infinity: for ever. Undefined: it is no duration. */
export function secondsOf(text: Json): number | undefined {
  const plain = text.startsWith('"') ? (JSON.parse(text) as string) : text;
  if (plain.length > 64) return undefined;
  let seconds: number;
  if (/^[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?$/.test(plain)) seconds = Number(plain);
  else if (DURATION.test(plain)) {
    seconds = 0;
    for (const [, count, unit] of plain.matchAll(PART)) seconds += Number(count) * UNITS[unit!]!;
    if (plain.startsWith("-")) seconds = -seconds;
  } else return undefined;
  return seconds < 0 ? Infinity : seconds;
}

/** Of those of a batch, each undefined where a caller said nothing; undefined: send none. */
export function longest(texts: readonly (Json | undefined)[]): Json | undefined {
  let best: Json | undefined;
  let most = texts.includes(undefined) ? DEFAULT_SECONDS : -1;
  for (const text of texts) {
    const seconds = text === undefined ? undefined : secondsOf(text);
    if (seconds === undefined || seconds <= most) continue;
    most = seconds;
    best = text;
  }
  return best;
}
