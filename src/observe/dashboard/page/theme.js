/**
 * Light or dark: as the system says, or as `t` chose. Canvases cannot read style sheets while they draw, so the
 * colours that they need are read once for each theme.
 */
import { keep, recall } from "./dom.js";

const KEY = "ferry-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

/**
 * @typedef {object} Palette
 * @property {string[]} reasons in the order of `Hello.reasons`
 * @property {string[]} inks what is written on them
 * @property {string} card
 * @property {string} text
 * @property {string} soft
 * @property {string} line
 * @property {string} strong
 * @property {string} middle
 * @property {string} faint
 * @property {string} area
 * @property {string} bad
 */

/** @type {(() => void)[]} */
const followers = [];

/** @type {Palette | undefined} */
let palette;

/** @returns {Palette} */
export function colours() {
  palette ??= read();
  return palette;
}

function read() {
  const style = getComputedStyle(document.documentElement);
  const of = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
  const names = ["full", "wait", "idle", "deadline"];
  return {
    reasons: names.map((name) => of(name)),
    inks: names.map((name) => of(`${name}-ink`)),
    card: of("card"),
    text: of("text"),
    soft: of("soft"),
    line: of("line"),
    strong: of("strong"),
    middle: of("middle"),
    faint: of("faint"),
    area: of("area"),
    bad: of("bad"),
  };
}

/** @param {() => void} act */
export function onTheme(act) {
  followers.push(act);
}

export function isDark() {
  const chosen = document.documentElement.dataset["theme"];
  return chosen === "dark" || (chosen !== "light" && dark.matches);
}

/** @param {string} theme "auto", "light" or "dark" */
function choose(theme) {
  document.documentElement.dataset["theme"] = theme;
  palette = undefined;
  for (const act of followers) act();
}

/** To the other one, and stays there; back to the system's when that is the same. */
export function toggleTheme() {
  const next = isDark() ? "light" : "dark";
  const theme = (next === "dark") === dark.matches ? "auto" : next;
  keep("localStorage", KEY, theme);
  choose(theme);
}

export function startTheme() {
  document.documentElement.dataset["theme"] = recall("localStorage", KEY) ?? "auto";
  dark.addEventListener("change", () => choose(document.documentElement.dataset["theme"] ?? "auto"));
}
