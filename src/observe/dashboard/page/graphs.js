/** The charts over time, and the bars under them. */
/** @import { Column, CostFrame } from "../frames.ts" */
/** @import { View } from "./app.js" */
import { Chart } from "./charts.js";
import { byId, say, show, table } from "./dom.js";
import { count, ms, rate, share, times } from "./format.js";
import { Split } from "./panels.js";

const LATENCIES = /** @type {const} */ (["p50", "p95", "p99"]);
const GPU_PARTS = /** @type {const} */ (["filledMs", "emptyMs", "idleMs"]);
const CELLS = /** @type {const} */ (["paddedCells", "inOrderCells", "usefulCells"]);
const TABLE_ROWS = 12;

/** As the five numbers: what a header says of the last second alone would contradict them. */
const RECENT_S = 10;

/** @param {number | undefined} secondsAgo */
const when = (secondsAgo) =>
  secondsAgo === undefined ? `last ${RECENT_S} s: ` : secondsAgo === 0 ? "now: " : `${secondsAgo} s ago: `;

export class Graphs {
  #latency = new Chart("latency", {
    lines: [
      { name: "p50", colour: "faint", width: 1.5 },
      { name: "p95", colour: "middle", width: 1.5, dash: [5, 3] },
      { name: "p99", colour: "strong", width: 2 },
    ],
    axis: (value) => ms(value),
    read: ([p50, p95, p99], ago) => `${when(ago)}━ p99 ${ms(p99)} ┅ p95 ${ms(p95)} ─ p50 ${ms(p50)}`,
  });
  #rate = new Chart("rate", {
    lines: [
      { name: "all", colour: "strong", width: 1.5, fill: "soft" },
      { name: "refused", colour: "bad", width: 1.5 },
      { name: "failed", colour: "bad", width: 1.5, dash: [3, 3] },
    ],
    axis: (value) => `${count(value)}/s`,
    read: ([all, refused, failed], ago) => {
      const bad = [refused ? `${rate(refused)} refused` : "", failed ? `${rate(failed)} failed` : ""];
      return `${when(ago)}${[`${rate(all)}/s`, ...bad].filter((part) => part !== "").join(" · ")}`;
    },
  });
  /** Whether its time follows rows × longest: then not empty seats are waste, but padding. */
  #pads = false;
  #gpu = new Chart("gpu", {
    top: 1,
    lines: [
      { name: "with waste", colour: "middle", width: 1, fill: "hatch" },
      { name: "used", colour: "area", width: 1, fill: "solid" },
    ],
    axis: (value) => share(value),
    read: ([busy, filled], ago) => {
      if (busy === null || busy === undefined) return `${when(ago)}–`;
      const [used, waste] = this.#pads ? ["useful", "padding"] : ["filled", "empty"];
      return `${when(ago)}${share(filled)} ${used} · ${share(busy - (filled ?? 0))} ${waste} · ${share(1 - busy)} idle`;
    },
  });
  #padding = new Chart("padding", {
    bottom: 1,
    lines: [
      { name: "in order of arrival", colour: "middle", width: 1.5, dash: [5, 3] },
      { name: "computed over useful cells", colour: "strong", width: 2 },
    ],
    axis: (value) => times(value),
    read: ([inOrder, padded], ago) =>
      `${when(ago)}━ ${times(padded)} ┅ ${times(inOrder)} in order of arrival`,
  });
  #split = new Split("split", [
    ["queue", "cut-queue"],
    ["worker", "cut-worker"],
    ["gateway", "cut-gateway"],
  ]);
  #rateSplit = new Split("rate-split", [
    ["answered", "cut-worker"],
    ["refused", "cut-bad"],
    ["failed", "cut-failed"],
  ]);
  #gpuSplit = new Split("gpu-split", [
    ["", "cut-worker"],
    ["", "cut-queue"],
    ["", "cut-gateway"],
  ]);
  #paddingSplit = new Split("padding-split", [
    ["useful cells", "cut-worker"],
    ["padding", "cut-queue"],
  ]);
  #drawn = "";

  /** @param {View} view */
  update(view) {
    const { history, rangeS, model, at } = view;
    const { slow, capacityPerSecond, requestsPerSecond, refusedShare, ...recent } = model.recent;
    this.#split.update(slow === null ? null : [slow.queueMs, slow.workerMs, slow.gatewayMs], ms);
    // A second is added once a second; the other frames bring nothing for a chart.
    const sum = (/** @type {Column} */ name) => history.sum(name, rangeS);
    this.#pads = model.cost?.kind === "padded";
    this.#gpuSplit.rename(gpuNames(this.#pads));
    const drawn = `${at} ${rangeS} ${history.from + history.length} ${view.tables}`;
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    this.#latency.update(
      LATENCIES.map((name) => history.last(name, rangeS)),
      rangeS,
      LATENCIES.map((name) => recent[name]),
    );
    this.#rate.limit = capacityPerSecond > 0 ? { at: capacityPerSecond, name: "capacity" } : undefined;
    const [requests, refused, failed] = [sum("requests"), sum("refused"), sum("failed")];
    // A red line that is 0 all along would only look like trouble.
    const line = (/** @type {Column} */ name, /** @type {number} */ times) =>
      times === 0 ? [] : history.last(name, rangeS);
    this.#rate.update([requestsOf(view), line("refused", refused), line("failed", failed)], rangeS, [
      requestsPerSecond,
      requestsPerSecond * refusedShare,
      history.sum("failed", RECENT_S) / Math.max(1, Math.min(RECENT_S, history.length)),
    ]);
    this.#rateSplit.update([Math.max(0, requests - refused - failed), refused, failed], count);
    const [filled = [], empty = [], idle = []] = GPU_PARTS.map((name) => history.last(name, rangeS));
    const whole = filled.map((each, i) => (each ?? 0) + (empty[i] ?? 0) + (idle[i] ?? 0));
    const part = (/** @type {readonly (number | null)[][]} */ ...lists) =>
      whole.map((all, i) => (all === 0 ? null : lists.reduce((sum, list) => sum + (list[i] ?? 0), 0) / all));
    const lately = GPU_PARTS.map((name) => history.sum(name, RECENT_S));
    const [full = 0, bare = 0] = lately;
    const time = lately.reduce((sum, each) => sum + each, 0);
    this.#gpu.update(
      [part(filled, empty), part(filled)],
      rangeS,
      time === 0 ? [null, null] : [(full + bare) / time, full / time],
    );
    const sums = GPU_PARTS.map(sum);
    const all = sums.reduce((sum, each) => sum + each, 0);
    this.#gpuSplit.update(sums, (value) => share(value / all));
    this.#showPadding(view);
    if (view.tables) this.#tables(view);
  }

  repaint() {
    for (const chart of [this.#latency, this.#rate, this.#gpu, this.#padding]) chart.repaint();
  }

  /** Only of a model whose inputs are measured and matter. @param {View} view */
  #showPadding({ history, rangeS, model: { cost } }) {
    const ofLate = cost !== null || history.sum("groupedMs", history.length) > 0;
    const shown = ofLate && history.sum("usefulCells", history.length) > 0;
    show(byId("padding-panel"), shown);
    if (!shown) return;
    const [padded = [], inOrder = [], useful = []] = CELLS.map((name) => history.last(name, rangeS));
    const over = (/** @type {readonly (number | null)[]} */ cells) =>
      cells.map((each, at) => (useful[at] ? (each ?? 0) / useful[at] : null));
    const lately = CELLS.map((name) => history.sum(name, RECENT_S));
    const recent = (/** @type {number | undefined} */ cells) => (lately[2] ? (cells ?? 0) / lately[2] : null);
    this.#padding.update([over(inOrder), over(padded)], rangeS, [recent(lately[1]), recent(lately[0])]);
    const [all, used] = [history.sum("paddedCells", rangeS), history.sum("usefulCells", rangeS)];
    this.#paddingSplit.update([used, Math.max(0, all - used)], (value) => share(value / all));
    say(byId("padding-saved"), savedWords(history.sum("groupedMs", rangeS), history.sum("savedMs", rangeS)));
    say(byId("padding-cost"), cost === null ? "" : costWords(cost));
  }

  /** @param {View} view */
  #tables({ history }) {
    const seconds = Math.min(TABLE_ROWS, history.length);
    const lines = (
      /** @type {readonly Column[]} */ names,
      /** @type {(value: number | null) => string} */ write,
    ) =>
      Array.from({ length: seconds }, (_, back) => {
        const second = history.from + history.length - 1 - back;
        const values = names.map((name) => write(history.columns.get(name)?.at(-1 - back) ?? null));
        return [new Date(second * 1000).toISOString().slice(11, 19), ...values];
      });
    const put = (/** @type {string} */ id, /** @type {string[]} */ heads, /** @type {string[][]} */ rows) =>
      byId(`${id}-twin`).replaceChildren(
        table(["Second (UTC)", ...heads], rows, `The last ${seconds} seconds`),
      );
    put("latency", ["p50", "p95", "p99"], lines(LATENCIES, ms));
    put("rate", ["all", "refused", "failed"], lines(["requests", "refused", "failed"], rate));
    put("gpu", gpuNames(this.#pads), lines(GPU_PARTS, ms));
    put("padding", ["computed cells", "in order of arrival", "useful"], lines(CELLS, count));
  }
}

/** @param {boolean} pads */
const gpuNames = (pads) => [pads ? "useful" : "filled seats", pads ? "padding" : "empty seats", "idle"];

/** A gap in the history is no second without requests. @param {View} view */
function requestsOf({ history, rangeS }) {
  const load = history.last("load", rangeS);
  return history.last("requests", rangeS).map((each, i) => (load[i] === null && each === 0 ? null : each));
}

/** Against batches of as many inputs in order of arrival; "" where inputs are not grouped. @param {number} busyMs @param {number} savedMs */
function savedWords(busyMs, savedMs) {
  if (busyMs === 0 || savedMs === 0) return "";
  const seconds = `${count(Math.abs(savedMs) / 1000)} s of GPU time`;
  if (savedMs < 0) return `Grouping by length cost ${seconds}.`;
  const part = share(savedMs / (busyMs + savedMs));
  return `Grouping by length saved ${seconds}, ${part} of what order of arrival would have taken.`;
}

/** @param {CostFrame} cost */
function costWords({ kind, words, grouped }) {
  const takes = `A batch takes ${words}.`;
  if (kind === "packed") return `${takes} Its time follows what is sent: padding costs nothing.`;
  return grouped ? takes : `${takes} Inputs are not grouped: lengths is off.`;
}
