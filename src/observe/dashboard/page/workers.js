/**
 * The workers' panel: names and numbers beside the lanes, what is known of a chosen batch, and the same as a table.
 *
 * At most 32 workers at once (8 on a narrow screen), by zone and name; the others are a page further, and then
 * those that are down come first.
 */
/** @import { WorkerRow } from "../frames.ts" */
/** @import { Batch, Lengths } from "./state.js" */
/** @import { View } from "./app.js" */
import { byId, copy, h, mark, Rows, say, show, table, the } from "./dom.js";
import { age, count, ms, plural, share, times } from "./format.js";
import { LAG_MS, Lanes } from "./lanes.js";

const WORDS = [
  "it was full",
  "a task in it had waited for maxWaitMs",
  "a worker was free and waiting for more would not have paid",
  "a task in it would have been late",
];
const narrow = matchMedia("(max-width: 700px)");

const natural = new Intl.Collator("en", { numeric: true });

/**
 * By zone and name, so that each keeps its place; where they do not fit on one page, those that are down first.
 * @param {readonly WorkerRow[]} workers
 * @param {number} most
 */
export function inOrder(workers, most) {
  const rank = (/** @type {WorkerRow} */ { state }) => (state === "down" && workers.length > most ? 0 : 1);
  return workers.toSorted(
    (a, b) => rank(a) - rank(b) || natural.compare(a.zone, b.zone) || natural.compare(a.name, b.name),
  );
}

export class Workers {
  lanes = new Lanes(the("lane-canvas", HTMLCanvasElement));
  #page = 0;
  #pages = 1;
  #rows;
  #card = byId("batch");
  /** @type {View | undefined} */
  #view;
  /** @type {number | undefined} */
  #frozenAt;

  constructor() {
    /** @type {Rows<{ worker: WorkerRow, zones: boolean }, ReturnType<typeof makeRow>>} */
    this.#rows = new Rows(byId("lanes"), makeRow, fillRow);
    const canvas = the("lane-canvas", HTMLCanvasElement);
    canvas.addEventListener("click", (event) => {
      this.lanes.chosen = this.lanes.at(event.offsetX, event.offsetY);
      this.#showBatch();
    });
    canvas.addEventListener("mousemove", (event) => {
      const batch = this.lanes.at(event.offsetX, event.offsetY);
      mark(canvas, "title", batch === undefined ? false : whyWords(batch));
    });
    canvas.addEventListener("keydown", (event) => this.#key(event));
    byId("lanes-before").addEventListener("click", () => this.#turn(-1));
    byId("lanes-after").addEventListener("click", () => this.#turn(1));
  }

  /** Time stands still on the lanes, or goes on. @param {boolean} still */
  freeze(still) {
    this.#frozenAt = still ? this.lanes.now : undefined;
  }

  /** @param {View} view */
  update(view) {
    this.#view = view;
    const { model, hello, batches } = view;
    const about = hello.models[view.at];
    const most = narrow.matches ? 8 : 32;
    const all = inOrder(model.workers, most);
    this.#pages = Math.max(1, Math.ceil(all.length / most));
    this.#page = Math.min(this.#page, this.#pages - 1);
    const shown = all.slice(this.#page * most, this.#page * most + most);
    const zones = new Set(all.map(({ zone }) => zone)).size > 1;
    // As high as the panel beside it, as long as that lets one read them.
    const tallest = narrow.matches ? 40 : 66;
    const rowPx = Math.max(17, Math.min(tallest, Math.floor(264 / Math.max(1, shown.length))));
    const grid = byId("lanes");
    mark(grid, "data-dense", rowPx < 34);
    const size = `--row: ${rowPx}px; --rows: ${Math.max(1, shown.length)}`;
    if (grid.style.cssText !== size) grid.style.cssText = size;
    this.#rows.set(
      shown.map((worker) => ({ worker, zones })),
      ({ worker }) => worker.name,
    );
    const rows = shown.map(({ name, state, batchMs }) => ({ name, down: state === "down", batchMs }));
    this.lanes.show(rows, batches, about?.maxBatchSize ?? 1, rowPx);
    show(byId("lane-pages"), this.#pages > 1);
    const first = this.#page * most;
    say(byId("lanes-shown"), `${first + 1}–${first + shown.length} of ${all.length}`);
    const hint =
      all.length === 0
        ? "none is known yet"
        : `last ${this.lanes.spanS} s · width = time · height = fill${model.cost === null ? "" : " · ≤ longest input"}`;
    say(
      byId("workers-hint"),
      model.batchesLeftOut > 0 ? `${hint} · ${count(model.batchesLeftOut)} not drawn` : hint,
    );
    if (view.tables) byId("lanes-twin").replaceChildren(this.#table(view));
    if (this.lanes.chosen !== undefined) this.#showBatch();
  }

  /** @param {number} hereNow @param {View} view */
  draw(hereNow, view) {
    // Nothing is known after the last frame: when none comes, the lanes stand still.
    const edge = Math.min(view.state.clock.at(hereNow) - LAG_MS, view.frame.now - 50);
    this.lanes.draw(hereNow, this.#frozenAt ?? edge);
  }

  clear() {
    // Who closes the card goes back to where it was opened from.
    if (this.#card.contains(document.activeElement)) byId("lane-canvas").focus();
    this.lanes.chosen = undefined;
    this.#showBatch();
  }

  /** @param {number} by */
  #turn(by) {
    this.#page = (this.#page + by + this.#pages) % this.#pages;
    this.clear();
    if (this.#view !== undefined) this.update(this.#view);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const along = { ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? 0;
    const across = { ArrowUp: -1, ArrowDown: 1 }[event.key] ?? 0;
    if (along !== 0 || across !== 0) {
      this.lanes.step(along, across);
      this.#showBatch();
    } else if (event.key === "Enter" && this.lanes.chosen !== undefined) this.#card.focus();
    else return;
    event.preventDefault();
  }

  #showBatch() {
    const batch = this.lanes.chosen;
    show(this.#card, batch !== undefined);
    if (batch === undefined || this.#view === undefined) return;
    const state = JSON.stringify(batch);
    if (this.#card.dataset["shown"] === state) return;
    this.#card.dataset["shown"] = state;
    const { hello, at } = this.#view;
    this.#card.replaceChildren(
      ...describe(batch, hello.models[at]?.maxBatchSize ?? 1, hello, () => this.clear()),
    );
  }

  /** @param {View} view */
  #table({ batches, hello }) {
    const lines = batches
      .latest(20)
      .map((batch) => [
        batch.worker,
        new Date(batch.start).toISOString().slice(11, 23),
        batch.end === 0 ? "runs" : ms(batch.end - batch.start),
        String(batch.size),
        hello.reasons[batch.reason] ?? "?",
        ms(batch.oldestWaitMs),
        count(batch.lengths?.longest),
      ]);
    const heads = ["Worker", "Began (UTC)", "Time", "Tasks", "Reason", "Oldest wait", "Longest input"];
    return table(heads, lines, "The latest 20 batches");
  }
}

/** @param {Batch} batch @param {number} most @param {View["hello"]} hello @param {() => void} close */
function describe(batch, most, hello, close) {
  const reason = hello.reasons[batch.reason] ?? "?";
  const json = { ...batch, reason, maxBatchSize: most, start: new Date(batch.start).toISOString() };
  const tiers = batch.tiers.split("/").map((tasks, at) => `${tasks} ${hello.tiers[at] ?? "?"}`);
  const facts = [
    ["Filled", `${batch.size} of ${most} (${share(batch.size / most)})`],
    ["Worker", batch.worker],
    ["Time", batch.end === 0 ? "still running" : ms(batch.end - batch.start)],
    ["Oldest wait", ms(batch.oldestWaitMs)],
    batch.tiers === "" ? [] : ["Tasks", tiers.join(", ")],
    batch.lengths === undefined ? [] : ["Lengths", lengthWords(batch.size, batch.lengths)],
    batch.attempt > 1 ? ["Tried before", `holds tasks at attempt ${batch.attempt}`] : [],
    batch.calls > 1 ? ["Calls", `${batch.calls}: it was cut to find a bad input`] : [],
    ["Batch", batch.id],
  ].filter((fact) => fact.length > 0);
  const copyButton = h("button", { type: "button" }, "Copy as JSON");
  copyButton.addEventListener("click", () => void copy(copyButton, JSON.stringify(json, null, 2)));
  return [
    h(
      "p",
      { class: "card-head" },
      h("span", { class: `swatch ${reason}`, "aria-hidden": "true" }, reason[0]?.toUpperCase() ?? ""),
      h("strong", {}, whyWords(batch)),
      h("span", { class: "grow" }),
      copyButton,
      h("button", { type: "button", onclick: close, "aria-label": "Close the batch" }, "✕"),
    ),
    h(
      "dl",
      {},
      ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name ?? ""), h("dd", {}, value ?? ""))),
    ),
  ];
}

/** @param {Batch} batch */
function whyWords({ why, reason }) {
  if (why === "") return `Left because ${WORDS[reason] ?? "?"}.`;
  return `${why[0]?.toUpperCase()}${why.slice(1)}.`;
}

/** @param {number} rows @param {Lengths} lengths */
function lengthWords(rows, { longest, total, inOrder }) {
  const padding = `${times((rows * longest) / total)} padding`;
  const instead = inOrder === longest ? "" : `; in order of arrival up to ${count(inOrder)}`;
  return `up to ${plural(longest, "token")}, ${count(total / rows)} on average, ${padding}${instead}`;
}

function makeRow() {
  const name = h("span", { class: "name" });
  const why = h("span", { class: "down-why" });
  const state = h("span", { class: "worker-state" });
  const facts = h("span");
  const pace = h("span", { class: "pace" });
  const more = h("span", { class: "facts" }, facts, " ", pace);
  const node = h("div", { class: "lane" }, name, why, h("span", { class: "numbers" }, state, more));
  return { node, name, why, state, facts, pace };
}

/** @param {ReturnType<typeof makeRow>} row @param {{ worker: WorkerRow, zones: boolean }} item @param {number} at */
function fillRow(row, { worker, zones }, at) {
  const { name, state, busy, filled, ratio, batchMs, down, zone } = worker;
  say(row.name, zones && zone !== "" ? `${zone} · ${name}` : name);
  mark(row.name, "title", name);
  mark(row.node, "data-state", state);
  row.node.style.gridRow = String(at + 1);
  const slow = ratio >= 1.5 ? `${count(Math.round(ratio * 10) / 10)}× slower` : "";
  if (state === "down") {
    const next =
      down === undefined || down.retryInMs <= 0 ? "" : `, next try in ${age(down.retryInMs + 999)}`;
    say(row.state, `✕ down ${down === undefined ? "" : age(down.sinceMs)}`);
    say(row.why, down === undefined ? "" : `${down.why}${next}`);
    say(row.facts, "");
    say(row.pace, "");
    return;
  }
  say(row.why, "");
  say(row.state, state === "draining" ? "draining" : `${share(Math.round(busy * 100) / 100)} busy`);
  say(row.facts, slow || `${share(Math.round(filled * 100) / 100)} filled`);
  say(row.pace, batchMs > 0 ? `· ${ms(Math.round(batchMs))}` : "");
  mark(row.node, "data-slow", slow !== "");
}

/** Said in words, for those who do not see the lanes. @param {readonly WorkerRow[]} workers */
export function summary(workers) {
  const down = workers.filter(({ state }) => state === "down").length;
  return `${plural(workers.length, "worker")}, ${down} down`;
}
