/**
 * Numbers as people read them: three significant digits, a unit always, no digit that only flickers.
 * A number that is not known is "–".
 */

const NONE = "–";
const thousands = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const whole = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3, useGrouping: false });

/** 0.123 → "0.123", 15.44 → "15.4", 1804.2 → "1,804", 123456 → "123k". @param {number | null | undefined} value */
export function count(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (size < 1000) return whole.format(size < 0.005 ? 0 : value);
  if (size < 100_000) return thousands.format(value);
  return size < 999_500 ? `${whole.format(value / 1000)}k` : `${whole.format(value / 1e6)}M`;
}

/** For a row of tabs: 1804 → "1.8k". @param {number} value */
export function short(value) {
  return value < 1000 ? thousands.format(value) : `${(value / 1000).toFixed(value < 10_000 ? 1 : 0)}k`;
}

/** A rate: whole numbers above 10, so that it does not flicker. @param {number | null | undefined} value */
export function rate(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 10 ? count(Math.round(value)) : count(Math.round(value * 10) / 10);
}

/** Milliseconds below 10 s, then seconds, then minutes. @param {number | null | undefined} value */
export function ms(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (value < 10_000) return `${count(value < 100 ? Math.round(value * 10) / 10 : Math.round(value))} ms`;
  if (value < 120_000) return `${count(value / 1000)} s`;
  return age(value);
}

/** "4 s", "3 m", "2 h", "5 d"; of something that lasts. @param {number} value */
export function age(value) {
  const seconds = Math.max(0, Math.floor(value / 1000));
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} m`;
  if (seconds < 172_800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86_400)} d`;
}

/** 0.7 → "70 %"; what is there but small is not 0. @param {number | null | undefined} value */
export function share(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const percent = value * 100;
  if (percent > 0 && percent < 0.1) return "< 0.1 %";
  return `${percent < 10 ? Math.round(percent * 10) / 10 : thousands.format(percent)} %`;
}

/** 1.236 → "1.24×", 12.34 → "12.3×". @param {number | null | undefined} value */
export function times(value) {
  return value === null || value === undefined || !Number.isFinite(value) ? NONE : `${count(value)}×`;
}

/** HH:MM:SS on the viewer's clock. @param {number} instant */
export function time(instant) {
  const at = new Date(instant);
  const two = (/** @type {number} */ part) => String(part).padStart(2, "0");
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** @param {number} value @param {string} noun */
export function plural(value, noun) {
  return `${count(value)} ${value === 1 ? noun : noun.endsWith("ch") ? `${noun}es` : `${noun}s`}`;
}

/** "1 min", "15 min". @param {number} seconds */
export function span(seconds) {
  return seconds < 60 ? `${seconds} s` : `${seconds / 60} min`;
}

/** What stands between single quotes in a shell. @param {string} text */
export function quoted(text) {
  return `'${text.replaceAll("'", String.raw`'\''`)}'`;
}
