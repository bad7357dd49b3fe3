/**
 * The lanes: one per worker, time from left to right, "now" at the right edge.
 *
 * A block is a batch: its width is the time on the worker, its height the share of `maxBatchSize` that was taken,
 * its colour, letter and hatch the reason why it left. The pale part above is empty seats that ran all the same.
 * Where there is room it says how many tasks it has, and up to how many tokens they are.
 *
 * Frames come twice a second, so the right edge lies `LAG_MS` in the past: what began or ended there is known,
 * and blocks move evenly. Drawn at most 30 times a second and not at all in a hidden tab; once a second for those
 * who asked their system for less motion.
 */
/** @import { Batch, Batches } from "./state.js" */
import { colours } from "./theme.js";

export const LAG_MS = 800;
const FRAME_MS = 1000 / 30;
const AXIS_PX = 18;
const LETTERS = "FWID";
/** Pixels that a usual batch should be wide, and the lengths of time to choose from. */
const WIDTH_PX = 26;
const SPANS_S = [2, 3, 5, 10, 20, 30, 60];

const calm = matchMedia("(prefers-reduced-motion: reduce)");

/**
 * The length of time that lets a usual batch be wide enough to read. It stays what it was until another fits clearly
 * better: batches that take a little longer, then a little less, must not make the lanes jump.
 * @param {number} batchMs
 * @param {number} width
 * @param {number} [before]
 */
export function spanFor(batchMs, width, before = 0) {
  if (batchMs <= 0) return before || 5;
  const wanted = (width / WIDTH_PX) * (batchMs / 1000);
  const best = SPANS_S.findLast((span) => span <= wanted) ?? SPANS_S[0] ?? 2;
  if (before === 0) return best;
  return (best > before ? wanted < 1.15 * best : wanted > 0.85 * before) ? before : best;
}

export class Lanes {
  #canvas;
  #pen;
  #width = 0;
  #ratio = 1;
  #drawnAt = 0;
  /** @type {(CanvasPattern | null)[]} */
  #hatches = [];
  /** @type {readonly { name: string, down: boolean }[]} */
  #rows = [];
  #rowPx = 36;
  /** @type {Batches | undefined} */
  #batches;
  #maxBatchSize = 1;
  /** 0: not chosen yet. */
  #spanS = 0;
  /** Positions of reasons that stand out; empty: all do. @type {Set<number>} */
  only = new Set();
  /** @type {Batch | undefined} */
  chosen;
  /** On the server's clock, at the right edge. */
  now = 0;

  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.#canvas = canvas;
    const pen = canvas.getContext("2d");
    if (pen === null) throw new Error("this browser has no canvas");
    this.#pen = pen;
    new ResizeObserver(() => this.#fit()).observe(canvas);
  }

  get #pad() {
    return this.#rowPx < 28 ? 1 : 3;
  }

  get spanS() {
    return this.#spanS;
  }

  /**
   * @param {readonly { name: string, down: boolean, batchMs: number }[]} rows
   * @param {Batches} batches
   * @param {number} maxBatchSize
   * @param {number} rowPx
   */
  show(rows, batches, maxBatchSize, rowPx) {
    const usual = rows.map(({ batchMs }) => batchMs).filter((ms) => ms > 0);
    usual.sort((a, b) => a - b);
    this.#spanS = spanFor(usual[usual.length >> 1] ?? 0, this.#width, this.#spanS);
    this.#rows = rows;
    this.#batches = batches;
    this.#maxBatchSize = maxBatchSize;
    const height = `${rows.length * rowPx + AXIS_PX}px`;
    this.#rowPx = rowPx;
    if (this.#canvas.style.height !== height) this.#canvas.style.height = height;
  }

  /** New colours. */
  repaint() {
    this.#hatches = [];
    this.#drawnAt = 0;
  }

  #fit() {
    const { clientWidth, clientHeight } = this.#canvas;
    this.#ratio = Math.min(2, devicePixelRatio || 1);
    this.#width = clientWidth;
    this.#canvas.width = Math.round(clientWidth * this.#ratio);
    this.#canvas.height = Math.round(clientHeight * this.#ratio);
    this.#drawnAt = 0;
    this.draw(performance.now(), this.now);
  }

  /** @param {number} hereNow @param {number} serverNow */
  draw(hereNow, serverNow) {
    const step = calm.matches ? 1000 : FRAME_MS - 2;
    if (this.#batches === undefined || hereNow - this.#drawnAt < step) return;
    this.#drawnAt = hereNow;
    this.now = serverNow;
    const pen = this.#pen;
    const palette = colours();
    if (this.#hatches.length === 0) this.#hatches = palette.inks.map((ink, at) => hatch(pen, at, ink));
    pen.setTransform(this.#ratio, 0, 0, this.#ratio, 0, 0);
    pen.clearRect(0, 0, this.#width, this.#canvas.height);
    this.#drawAxis();
    const from = serverNow - this.#spanS * 1000;
    this.#rows.forEach(({ name }, at) => {
      for (const batch of this.#batches?.of(name) ?? []) {
        if ((batch.end === 0 || batch.end >= from) && batch.start < serverNow)
          this.#drawBatch(batch, at, from);
      }
    });
    pen.setTransform(this.#ratio, 0, 0, this.#ratio, 0, 0);
    pen.globalAlpha = 1;
  }

  #drawAxis() {
    const pen = this.#pen;
    const { line, soft, faint } = colours();
    const bottom = this.#rows.length * this.#rowPx;
    pen.globalAlpha = 1;
    this.#rows.forEach(({ down }, at) => {
      pen.fillStyle = down ? line : faint;
      pen.globalAlpha = down ? 0.6 : 0.2;
      pen.fillRect(0, at * this.#rowPx + this.#pad, this.#width, this.#rowPx - 2 * this.#pad);
    });
    pen.globalAlpha = 1;
    pen.strokeStyle = line;
    pen.fillStyle = soft;
    pen.font = "11px system-ui, sans-serif";
    pen.lineWidth = 1;
    const steps =
      this.#width < 420 ? 2 : this.#spanS === 2 || this.#spanS === 20 ? 4 : this.#spanS === 3 ? 3 : 5;
    for (let i = 0; i <= steps; i++) {
      const x = Math.round((this.#width * i) / steps) + (i === steps ? -0.5 : 0.5);
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, bottom + 3);
      pen.stroke();
      pen.textAlign = i === 0 ? "left" : i === steps ? "right" : "center";
      const back = this.#spanS * (1 - i / steps);
      pen.fillText(i === steps ? "now" : `−${Math.round(back * 10) / 10} s`, x, bottom + 15);
    }
  }

  /** @param {Batch} batch @param {number} row @param {number} from */
  #drawBatch(batch, row, from) {
    const pen = this.#pen;
    const { reasons, inks, card, text } = colours();
    const perMs = this.#width / (this.#spanS * 1000);
    const left = Math.round((batch.start - from) * perMs);
    const right =
      batch.end === 0 ? this.#width : Math.min(this.#width, Math.round((batch.end - from) * perMs));
    const width = Math.max(2, right - left - 1);
    const top = row * this.#rowPx + this.#pad;
    const height = this.#rowPx - 2 * this.#pad;
    const level = Math.max(2, Math.round(height * Math.min(1, batch.size / this.#maxBatchSize)));
    const colour = reasons[batch.reason] ?? text;
    const dim = this.only.size > 0 && !this.only.has(batch.reason) ? 0.15 : 1;
    // Moved with the block, or its hatch would stand still while it passes.
    pen.setTransform(this.#ratio, 0, 0, this.#ratio, left * this.#ratio, top * this.#ratio);
    pen.globalAlpha = 0.2 * dim;
    pen.fillStyle = colour;
    pen.fillRect(0, 0, width, height - level);
    pen.globalAlpha = dim;
    pen.fillRect(0, height - level, width, level);
    const pattern = this.#hatches[batch.reason];
    if (pattern) {
      pen.fillStyle = pattern;
      pen.fillRect(0, height - level, width, level);
    }
    if (batch.reason === 3) notch(pen, width, height - level, card);
    this.#label(batch, width, height, level, { colour, ink: inks[batch.reason] ?? card, text });
    if (this.chosen?.id !== batch.id) return;
    pen.globalAlpha = 1;
    pen.strokeStyle = text;
    pen.lineWidth = 2;
    pen.strokeRect(0, -1, width, height + 2);
  }

  /** @param {Batch} batch @param {number} width @param {number} height @param {number} level @param {{ colour: string, ink: string, text: string }} colours */
  #label(batch, width, height, level, { colour, ink, text }) {
    if (width < 11 || height < 13) return;
    const pen = this.#pen;
    const letter = LETTERS[batch.reason] ?? "?";
    const room = width - (batch.attempt > 1 ? 12 : 0);
    const longest = batch.lengths && room >= 64 ? ` ≤${batch.lengths.longest}` : "";
    const words = room >= 30 ? `${letter}${batch.size}${longest}` : letter;
    const full = batch.attempt > 1 && width >= 24 ? `${words}↻` : words;
    pen.font = "600 11px system-ui, sans-serif";
    pen.textAlign = "left";
    const inside = level >= 14;
    const base = inside ? height - 4 : height - level - 3;
    // In a low row the hatch has to do: a letter would reach into the lane above.
    if (base < 10) return;
    if (inside && this.#hatches[batch.reason]) {
      pen.fillStyle = colour;
      pen.fillRect(2, base - 10, pen.measureText(full).width + 2, 12);
    }
    pen.fillStyle = inside ? ink : text;
    pen.fillText(full, 3, base);
  }

  /** What lies under a point of the canvas, or before it: a gap is hard to aim at. @param {number} x @param {number} y */
  at(x, y) {
    const name = this.#rows[Math.floor(y / this.#rowPx)]?.name;
    if (name === undefined || this.#width === 0) return undefined;
    const when = this.now - this.#spanS * 1000 * (1 - x / this.#width);
    return this.#batches?.of(name).findLast(({ start }) => start <= when);
  }

  /** The batch beside the chosen one; the newest one to begin with. @param {number} along @param {number} across */
  step(along, across) {
    const names = this.#rows.map(({ name }) => name);
    const seen = (/** @type {string} */ name) =>
      (this.#batches?.of(name) ?? []).filter(({ start }) => start < this.now);
    const old = this.chosen;
    const row = old === undefined ? 0 : names.indexOf(old.worker) + across;
    const list = seen(names[Math.max(0, Math.min(names.length - 1, row))] ?? "");
    if (old === undefined) this.chosen = list.at(-1);
    else if (across !== 0) this.chosen = list.findLast(({ start }) => start <= old.start) ?? list[0] ?? old;
    else this.chosen = list[list.findIndex(({ id }) => id === old.id) + along] ?? old;
    return this.chosen;
  }
}

/** Solid, diagonal, dots, solid with a notched edge. @param {CanvasRenderingContext2D} pen @param {number} reason @param {string} ink */
function hatch(pen, reason, ink) {
  if (reason !== 1 && reason !== 2) return null;
  const tile = document.createElement("canvas");
  tile.width = tile.height = reason === 1 ? 6 : 5;
  const brush = tile.getContext("2d");
  if (brush === null) return null;
  brush.globalAlpha = 0.38;
  brush.strokeStyle = brush.fillStyle = ink;
  if (reason === 1) {
    brush.lineWidth = 1.3;
    brush.beginPath();
    for (const x of [-6, 0, 6]) {
      brush.moveTo(x - 1, 7);
      brush.lineTo(x + 7, -1);
    }
    brush.stroke();
  } else {
    brush.beginPath();
    brush.arc(2.5, 2.5, 1, 0, 7);
    brush.fill();
  }
  return pen.createPattern(tile, "repeat");
}

/** @param {CanvasRenderingContext2D} pen @param {number} width @param {number} top @param {string} card */
function notch(pen, width, top, card) {
  pen.fillStyle = card;
  pen.beginPath();
  for (let x = 0; x + 6 <= width; x += 6) {
    pen.moveTo(x, top - 0.5);
    pen.lineTo(x + 3, top + 4);
    pen.lineTo(x + 6, top - 0.5);
  }
  pen.fill();
}
