/**
 * The dashboard: takes frames from the stream and shows them.
 *
 *   stream.js → state.js → (twice a second) the panels     (thirty times a second) the lanes
 *
 * Pausing stops the showing, never the listening. Nothing is drawn in a hidden tab, except its title and icon.
 */
/** @import { Frame, Hello, ModelFrame } from "../frames.ts" */
/** @import { Batches, History } from "./state.js" */
import { hasToken, setToken, tokenHeaders } from "./api.js";
import { DeadLetters } from "./dead-letters.js";
import { byId, copy, h, keep, mark, recall, say, show, the } from "./dom.js";
import { age, ms, quoted, short, span } from "./format.js";
import { Graphs } from "./graphs.js";
import { showKeys, startKeys } from "./keys.js";
import { Curve, Notes, Process, Queues, Reasons, Refused, Saved } from "./panels.js";
import { State } from "./state.js";
import { showStory } from "./story.js";
import { Stream } from "./stream.js";
import { onTheme, startTheme, toggleTheme } from "./theme.js";
import { Tiles } from "./tiles.js";
import { Workers } from "./workers.js";

/**
 * What is shown now.
 * @typedef {object} View
 * @property {State} state
 * @property {Hello} hello
 * @property {Frame} frame
 * @property {number} at position of the model
 * @property {ModelFrame} model
 * @property {History} history
 * @property {Batches} batches
 * @property {number} rangeS
 * @property {Set<number>} only reasons that stand out on the lanes
 * @property {boolean} tables
 */

const RANGES = [60, 300, 900];
const STALE_MS = 3000;
const ICONS = { ok: "✓", busy: "▲", bad: "✕", quiet: "○" };

startTheme();
const state = new State();
/** @type {Set<number>} */
const only = new Set();
const picker = the("model", HTMLSelectElement);
/** What was chosen lives as long as the tab: a new version of Ferry loads the page anew. */
const CHOICE = "ferry-choice";
/** @type {[model: string, rangeS: number]} */
let [chosen, rangeS] = JSON.parse(recall("sessionStorage", CHOICE) ?? '["", 300]');
/** What is shown while one pauses. @type {State | undefined} */
let still;
let tables = false;
let lost = false;
let lastKey = "";

const workers = new Workers();
const graphs = new Graphs();
const letters = new DeadLetters();
/** Each with an element of it, so that one that fails can say so itself. */
const panels = /** @type {const} */ ([
  ["tiles", new Tiles()],
  ["lanes", workers],
  ["reasons", new Reasons(toggleReason)],
  ["latency", graphs],
  ["queues", new Queues()],
  ["refused", new Refused()],
  ["saved", new Saved()],
  ["curve", new Curve()],
  ["dead", letters],
  ["notes", new Notes()],
  ["process", new Process()],
]);

const remember = () => keep("sessionStorage", CHOICE, JSON.stringify([chosen, rangeS]));

/** @param {State} state @returns {View | undefined} */
function view(state) {
  const { hello, frame } = state;
  if (hello === undefined || frame === undefined) return undefined;
  const at = Math.max(
    0,
    hello.models.findIndex(({ name }) => name === chosen),
  );
  const [model, history, batches] = [frame.models[at], state.histories[at], state.batches[at]];
  if (model === undefined || history === undefined || batches === undefined) return undefined;
  return { state, hello, frame, at, model, history, batches, rangeS, only, tables };
}

// ── showing ─────────────────────────────────────────────────────────────────────────────────────

function render() {
  const now = view(still ?? state);
  if (now === undefined || document.hidden) return;
  document.body.classList.remove("loading");
  showVerdict(now);
  say(byId("scope"), now.frame.process.scope);
  for (const [id, panel] of panels) {
    const box = byId(id).closest(".panel") ?? byId(id);
    try {
      panel.update(now);
      mark(box, "data-broken", false);
    } catch (error) {
      // The others still have something to show.
      if (!box.hasAttribute("data-broken")) reportError(error);
      mark(box, "data-broken", error instanceof Error ? error.message : String(error));
    }
  }
}

/** Something new is known. */
function heard() {
  const now = view(state);
  if (now !== undefined) showTab(now);
  if (still === undefined) render();
}

/** @param {View} now */
function showVerdict({ model, hello, frame, at, history }) {
  const { level, sentence, key, advice } = model.verdict;
  mark(byId("verdict"), "data-level", level);
  say(byId("verdict-icon"), ICONS[level]);
  say(byId("sentence"), sentence);
  show(byId("advice"), advice !== "");
  say(byId("advice-text"), advice);
  if (key !== lastKey) say(byId("announce"), sentence);
  lastKey = key;
  const asked = frame.process.totals.requests > 0 || history.sum("requests", 900) > 0;
  show(byId("empty"), !asked && hello.apiUrl !== "");
  const body = JSON.stringify({
    ...(hello.models.length > 1 && { model: hello.models[at]?.name }),
    input: "hello",
  });
  say(byId("empty-curl"), `curl -s --json ${quoted(body)} ${hello.apiUrl}/v1/inference`);
}

/** @param {View} now */
function showTab({ model }) {
  const { requestsPerSecond, p99 } = model.recent;
  const sick = { ok: "", quiet: "", busy: "▲ ", bad: "✕ " }[model.verdict.level];
  const numbers = `${short(requestsPerSecond)}/s${p99 === null ? "" : ` · ${ms(p99)}`}`;
  const title = lost ? "○ no connection · Ferry" : `${sick}${numbers} · Ferry`;
  if (document.title !== title) document.title = title;
  mark(byId("favicon"), "href", `/assets/icon-${lost ? "quiet" : model.verdict.level}.svg`);
}

/** How fresh the page is; also while no frame comes. */
function showLife() {
  const since = performance.now() - state.heardAt;
  const known = state.hello !== undefined;
  const stale = known && since > STALE_MS;
  const paused = still !== undefined;
  document.body.classList.toggle("stale", (stale || lost) && !paused);
  const [kind, words] = lost
    ? ["lost", known ? `last update ${age(since)} ago` : "no connection"]
    : paused
      ? ["paused", "paused"]
      : !known
        ? ["waiting", "connecting"]
        : stale
          ? ["stale", `last update ${age(since)} ago`]
          : ["live", "live"];
  mark(byId("live"), "data-state", kind);
  say(byId("live-text"), words);
}

function loop(/** @type {number} */ hereNow) {
  requestAnimationFrame(loop);
  const now = view(still ?? state);
  if (now !== undefined && !document.hidden) workers.draw(hereNow, now);
}

/** `more` changes too often to be spoken each time. @param {string} text @param {string} [more] @param {string} [action] */
function alertBar(text, more = "", action = "") {
  show(byId("alert"), text !== "");
  say(byId("alert-text"), text);
  say(byId("alert-more"), more);
  show(byId("alert-act"), action !== "");
  say(byId("alert-act"), action);
}

// ── what people do ──────────────────────────────────────────────────────────────────────────────

/** @param {number} reason */
function toggleReason(reason) {
  if (!only.delete(reason)) only.add(reason);
  workers.lanes.only = only;
  render();
}

/** @param {number} seconds */
function setRange(seconds) {
  rangeS = seconds;
  remember();
  for (const button of byId("ranges").children) {
    mark(
      button,
      "aria-pressed",
      String(Number(/** @type {HTMLElement} */ (button).dataset["seconds"]) === seconds),
    );
  }
  for (const hint of document.querySelectorAll("[data-range]")) say(hint, `last ${span(seconds)}`);
  render();
}

function togglePause() {
  if (state.hello === undefined) return;
  still = still === undefined ? state.copy() : undefined;
  const paused = still !== undefined;
  workers.freeze(paused);
  // Another Ferry, with other models, may have come meanwhile.
  if (!paused) fillPicker(state.hello);
  mark(byId("pause"), "aria-pressed", String(paused));
  say(byId("pause"), paused ? "Go on" : "Pause");
  showLife();
  render();
}

function toggleTables() {
  tables = !tables;
  document.body.classList.toggle("tables", tables);
  render();
}

function nextModel() {
  if (picker.options.length < 2) picker.focus();
  else {
    picker.selectedIndex = (picker.selectedIndex + 1) % picker.options.length;
    pickModel();
  }
}

function pickModel() {
  chosen = picker.value;
  remember();
  lastKey = "";
  workers.clear();
  render();
}

/** @param {Hello} hello */
function fillPicker(hello) {
  const names = hello.models.map(({ name }) => name);
  if (!names.includes(chosen)) chosen = names[0] ?? "";
  picker.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
  picker.value = chosen;
  show(byId("demo"), hello.demo);
  mark(document.body, "data-role", hello.role);
}

function openFind() {
  openControls(true);
  the("find-id", HTMLInputElement).select();
}

/** @param {boolean} open */
function openControls(open) {
  byId("controls").classList.toggle("open", open);
  mark(byId("more"), "aria-expanded", String(open));
}

function escape() {
  workers.clear();
  openControls(false);
  if (only.size > 0) {
    only.clear();
    render();
  }
}

/** @param {number} by */
const stepRange = (by) => {
  const at = RANGES.indexOf(rangeS) + by;
  setRange(RANGES[Math.max(0, Math.min(RANGES.length - 1, at))] ?? 300);
};

const shortcuts = [
  { keys: "/", names: ["/"], what: "find a task by its id", hit: openFind },
  { keys: "space", names: [" "], what: "pause, and go on", hit: togglePause },
  { keys: "m", names: ["m"], what: "the next model", hit: nextModel },
  {
    keys: "[ ]",
    names: ["[", "]"],
    what: "a shorter or longer time range",
    hit: (/** @type {string} */ key) => stepRange(key === "[" ? -1 : 1),
  },
  {
    keys: "1 2 3 4",
    names: ["1", "2", "3", "4"],
    what: "show only batches that left full, by wait, idle, by deadline",
    hit: (/** @type {string} */ key) => toggleReason(Number(key) - 1),
  },
  { keys: "← → ↑ ↓", names: [], what: "on the lanes: from batch to batch; Enter reads it", hit: () => {} },
  { keys: "d", names: ["d"], what: "dead letters", hit: () => letters.show() },
  { keys: "v", names: ["v"], what: "the charts as tables", hit: toggleTables },
  { keys: "t", names: ["t"], what: "light or dark", hit: toggleTheme },
  { keys: "l", names: ["l"], what: "to the lanes", hit: () => byId("lane-canvas").focus() },
  { keys: "?", names: ["?"], what: "these keys", hit: () => showKeys(shortcuts) },
  { keys: "Esc", names: ["Escape"], what: "close, or forget what was chosen", hit: escape },
];

function startControls() {
  picker.addEventListener("change", pickModel);
  byId("ranges").addEventListener("click", (event) => {
    const seconds = event.target instanceof HTMLElement ? Number(event.target.dataset["seconds"]) : 0;
    if (seconds > 0) setRange(seconds);
  });
  byId("pause").addEventListener("click", togglePause);
  byId("theme").addEventListener("click", toggleTheme);
  byId("keys").addEventListener("click", () => showKeys(shortcuts));
  byId("more").addEventListener("click", () => openControls(!byId("controls").classList.contains("open")));
  byId("find").addEventListener("submit", (event) => {
    event.preventDefault();
    void showStory(the("find-id", HTMLInputElement).value);
  });
  byId("find-id").addEventListener("keydown", (event) => {
    if (event.key === "Escape") byId("find-id").blur();
  });
  byId("empty-copy").addEventListener(
    "click",
    () => void copy(byId("empty-copy"), byId("empty-curl").textContent ?? ""),
  );
  byId("alert-act").addEventListener("click", () => stream.hurry());
  document.addEventListener("visibilitychange", render);
  onTheme(() => {
    graphs.repaint();
    workers.lanes.repaint();
    render();
  });
  // Without a token there is nothing behind it to go back to.
  byId("token").addEventListener("cancel", (event) => event.preventDefault());
  startKeys(shortcuts);
}

/** Asks for the token; resolves when there is one to try. */
function askToken() {
  const dialog = the("token", HTMLDialogElement);
  const field = the("token-field", HTMLInputElement);
  const wrong = byId("token-wrong");
  show(wrong, hasToken());
  say(wrong, hasToken() ? "That token was refused." : "");
  alertBar("");
  if (!dialog.open) dialog.showModal();
  return new Promise((/** @type {(value: void) => void} */ resolve) => {
    const take = () => {
      const given = field.value.trim();
      // A browser closes a dialog at the second Escape, whatever the page says.
      if (given === "") return dialog.showModal();
      dialog.removeEventListener("close", take);
      setToken(given);
      field.value = "";
      resolve();
    };
    dialog.addEventListener("close", take);
  });
}

const stream = new Stream({
  headers: tokenHeaders,
  hello(hello) {
    // Another version's frames may mean something else.
    if (state.hello !== undefined && state.hello.version !== hello.version) return location.reload();
    lost = false;
    alertBar("");
    state.welcome(hello, performance.now());
    if (still === undefined) fillPicker(hello);
    heard();
    showLife();
  },
  frame(frame) {
    state.apply(frame, performance.now());
    heard();
  },
  lost(seconds, why) {
    lost = true;
    const what = why === "" ? "Connection lost" : `No stream: ${why}`;
    alertBar(what, `, retrying in ${seconds} s`, "Retry now");
    showLife();
    heard();
  },
  denied: askToken,
});

startControls();
setRange(rangeS);
setInterval(showLife, 500);
requestAnimationFrame(loop);
void stream.run();
