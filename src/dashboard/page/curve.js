/**
 * What a batch takes by its size, as far as batches have shown it, and the knee: where larger ones stop to pay.
 *
 * Sizes stand on a logarithmic axis, as they are learned: a step twice as far to the right is a batch twice as large. It
 * is drawn as SVG, so that the style sheet colours it, and only when something changed.
 */
/** @import { CurveFrame } from "../frames.ts" */
/** @import { View } from "./app.js" */
import { byId, say, show, table } from "./dom.js";
import { count, ms, plural } from "./format.js";

const HEIGHT_PX = 148;
const LEFT_PX = 60;
const RIGHT_PX = 18;
const TOP_PX = 20;
const BOTTOM_PX = 22;
const NAMESPACE = "http://www.w3.org/2000/svg";

export class Curve {
  #root = byId("curve");
  #shown = "";
  /** @type {{ curve: CurveFrame, max: number } | undefined} */
  #last;

  constructor() {
    new ResizeObserver(() => this.#draw()).observe(this.#root);
  }

  /** @param {View} view */
  update({ model, hello, at, tables }) {
    const { curve } = model;
    const max = hello.models[at]?.maxBatchSize ?? 1;
    const known = curve !== null && curve.points.length > 0;
    this.#last = known ? { curve, max } : undefined;
    say(byId("curve-read"), known ? inWords(curve) : "");
    const none = curve === null ? "The process that runs the batches shows it." : "No size is known yet.";
    say(byId("curve-hint"), known ? curve.hint : none);
    show(byId("curve-hint"), !known || curve.hint !== "");
    show(this.#root, known);
    this.#draw();
    if (tables) byId("curve-twin").replaceChildren(...(known ? [twin(curve)] : []));
  }

  #draw() {
    const width = Math.floor(this.#root.clientWidth);
    if (this.#last === undefined || width === 0) return;
    const { curve, max } = this.#last;
    const state = JSON.stringify([width, max, curve]);
    if (state === this.#shown) return;
    this.#shown = state;
    this.#root.setAttribute("aria-label", `Time of a batch by its size: ${inWords(curve)}`);
    this.#root.replaceChildren(picture(curve, max, width));
  }
}

/** @param {CurveFrame} curve */
function inWords({ points, knee }) {
  const [size, took] = points.at(-1) ?? [0, 0];
  if (knee !== null)
    return `knee at ${count(knee.size)}: ${ms(knee.ms)}, ${count(knee.perSecond)}/s a worker`;
  return `no knee up to ${count(size)}: ${ms(took)}`;
}

/** @param {CurveFrame} curve */
function twin({ points }) {
  const lines = points.map(([size, took, batches]) => [
    plural(size, "task"),
    ms(took),
    count(Math.round((1000 * size) / took)),
    count(batches),
  ]);
  return table(["Size", "Time", "Tasks/s", "Batches"], lines, "What a batch takes by its size");
}

/** @param {CurveFrame} curve @param {number} max @param {number} width */
function picture({ points, knee }, max, width) {
  const largest = Math.max(2, max, ...points.map(([size]) => size));
  const [tick, ticks] = scale(Math.max(...points.map(([, took]) => took)));
  const x = (/** @type {number} */ size) =>
    LEFT_PX + (Math.log2(size) / Math.log2(largest)) * (width - LEFT_PX - RIGHT_PX);
  const ground = HEIGHT_PX - BOTTOM_PX;
  const y = (/** @type {number} */ took) => ground - (took / (tick * ticks)) * (ground - TOP_PX);
  const parts = [];
  for (let at = 0; at <= ticks; at++) {
    const height = Math.round(y(tick * at)) + 0.5;
    parts.push(draw("line", { class: "grid", x1: LEFT_PX, x2: width - RIGHT_PX, y1: height, y2: height }));
    parts.push(text(ms(tick * at), LEFT_PX - 6, height + 4, "end"));
  }
  for (const size of marks(largest, x)) parts.push(text(count(size), x(size), HEIGHT_PX - 5, "middle"));
  if (knee !== null) parts.push(...upright(x(knee.size), `knee ${count(knee.size)}`, "knee", width));
  // Beside the knee's its word would not be read.
  const near = knee !== null && Math.abs(x(max) - x(knee.size)) < 110;
  parts.push(...upright(x(max), near ? "" : `maxBatchSize ${count(max)}`, "most", width));
  parts.push(draw("polyline", { points: points.map(([size, took]) => `${x(size)},${y(took)}`).join(" ") }));
  for (const [size, took] of points) parts.push(draw("circle", { cx: x(size), cy: y(took), r: 3 }));
  const svg = draw("svg", { width, height: HEIGHT_PX, "aria-hidden": "true" });
  svg.append(...parts);
  return svg;
}

/** A line from the ground to the top, with a word beside its upper end. @param {number} x @param {string} word @param {string} kind @param {number} width */
function upright(x, word, kind, width) {
  const at = Math.round(x) + 0.5;
  const line = draw("line", { class: kind, x1: at, x2: at, y1: 4, y2: HEIGHT_PX - BOTTOM_PX });
  const left = at > width / 2;
  return word === "" ? [line] : [line, text(word, left ? at - 5 : at + 5, 12, left ? "end" : "start", kind)];
}

/** Two to four steps of 1, 2, 2.5 or 5 times a power of ten. @param {number} most @returns {[step: number, steps: number]} */
function scale(most) {
  const power = 10 ** Math.floor(Math.log10(most / 2));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each * 3 >= most) ?? most;
  return [step, Math.ceil(most / step)];
}

/** Powers of two, as many as have room. @param {number} largest @param {(size: number) => number} x */
function marks(largest, x) {
  const apart = x(2) - x(1);
  const every = Math.max(1, Math.ceil(30 / apart));
  const sizes = [];
  for (let power = 0; 2 ** power <= largest; power += every) sizes.push(2 ** power);
  return sizes;
}

/** @param {string} name @param {Readonly<Record<string, string | number>>} attributes */
function draw(name, attributes) {
  const node = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
  return node;
}

/** @param {string} words @param {number} x @param {number} y @param {string} anchor */
function text(words, x, y, anchor, kind = "") {
  const node = draw("text", { x, y, "text-anchor": anchor, class: kind });
  node.textContent = words;
  return node;
}
