/**
 * Charts over the chosen range: uPlot with everything but the drawing turned off.
 *
 * The x axis is seconds before now, so that its marks stand still while the lines move. Hue means a reason and
 * nothing else on this page: lines differ in weight and dash, and red is for what was refused or failed.
 */
/** @import uPlot from "uplot" */
import { byId, say } from "./dom.js";
import { colours } from "./theme.js";

/** From the script before this module. @type {typeof uPlot} */
const Plot = Reflect.get(globalThis, "uPlot");
const HEIGHT_PX = 148;

/**
 * @typedef {object} Line
 * @property {string} name
 * @property {"strong" | "middle" | "faint" | "area" | "bad"} colour
 * @property {number} [width]
 * @property {number[]} [dash]
 * @property {"soft" | "solid" | "hatch"} [fill]
 */

/**
 * @typedef {object} ChartOptions
 * @property {readonly Line[]} lines
 * @property {(value: number) => string} axis how a value is written beside the y axis
 * @property {(values: readonly (number | null)[], secondsAgo: number | undefined) => string} read what the values say in words; undefined: of late
 * @property {number} [top] where the y axis ends; left out: as the data says
 * @property {number} [bottom] where it begins; default 0
 */

export class Chart {
  #root;
  #readout;
  #options;
  /** @type {uPlot | undefined} */
  #plot;
  #rangeS = 0;
  /** @type {(number | null)[][]} */
  #data = [];
  /** What the header says while nothing is pointed at. @type {readonly (number | null)[]} */
  #lately = [];
  /** A dashed line across, with what it is. @type {{ at: number, name: string } | undefined} */
  limit;

  /** @param {string} id @param {ChartOptions} options */
  constructor(id, options) {
    this.#root = byId(id);
    this.#readout = byId(`${id}-read`);
    this.#options = options;
    new ResizeObserver(() => this.#fit()).observe(this.#root);
  }

  /**
   * @param {readonly (readonly (number | null)[])[]} series one list per line, newest last
   * @param {number} rangeS
   * @param {readonly (number | null)[]} lately one number per line
   */
  update(series, rangeS, lately) {
    this.#lately = lately;
    const x = Array.from({ length: rangeS }, (_, at) => at - rangeS + 1);
    const pad = (/** @type {readonly (number | null)[]} */ list) => [
      ...Array.from({ length: Math.max(0, rangeS - list.length) }, () => null),
      ...list,
    ];
    this.#data = [x, ...series.map(pad)];
    if (this.#rangeS !== rangeS) this.repaint(rangeS);
    else this.#plot?.setData(/** @type {uPlot.AlignedData} */ (this.#data));
    this.#read();
  }

  /** New colours, or another range. */
  repaint(rangeS = this.#rangeS) {
    this.#rangeS = rangeS;
    this.#plot?.destroy();
    this.#plot = undefined;
    this.#fit();
  }

  #fit() {
    const width = Math.floor(this.#root.clientWidth);
    if (width === 0 || this.#rangeS === 0) return;
    if (this.#plot === undefined)
      this.#plot = new Plot(this.#settings(width), /** @type {uPlot.AlignedData} */ (this.#data), this.#root);
    else if (this.#plot.width !== width) this.#plot.setSize({ width, height: HEIGHT_PX });
  }

  #read() {
    const { read } = this.#options;
    const at = this.#plot?.cursor.idx;
    if (at === null || at === undefined) return say(this.#readout, read(this.#lately, undefined));
    const values = this.#data.slice(1).map((list) => list[at] ?? null);
    say(this.#readout, read(values, this.#rangeS - 1 - at));
  }

  /** @param {number} width @returns {uPlot.Options} */
  #settings(width) {
    const { soft, line } = colours();
    const { axis, top, bottom = 0, lines } = this.#options;
    const font = "11px system-ui, sans-serif";
    const rangeS = this.#rangeS;
    const apart = { 60: 20, 300: 60, 900: 300 }[rangeS] ?? rangeS;
    const all = Array.from({ length: rangeS / apart + 1 }, (_, at) => at * apart - rangeS);
    // On a narrow screen their words would run into each other.
    const ticks = width < 64 * all.length ? [-rangeS, 0] : all;
    const when = (/** @type {number} */ at) =>
      at === 0 ? "now" : rangeS === 60 ? `−${-at} s` : `−${-at / 60} min`;
    return {
      width,
      height: HEIGHT_PX,
      padding: [8, 18, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: {
        x: { time: false, range: () => [-rangeS, 0] },
        y: {
          range: (_, __, most) => [
            bottom,
            top ?? roof(Math.max(most ?? 0, bottom, this.#limitWithin(most ?? 0))),
          ],
        },
      },
      axes: [
        {
          stroke: soft,
          font,
          size: 28,
          gap: 8,
          grid: { show: false },
          ticks: { show: false },
          splits: () => ticks,
          values: (_, splits) => splits.map(when),
        },
        {
          stroke: soft,
          font,
          size: 60,
          gap: 6,
          grid: { stroke: line, width: 1 },
          ticks: { show: false },
          space: 34,
          values: (_, splits) => splits.map(axis),
        },
      ],
      series: [{}, ...lines.map((each) => this.#series(each))],
      hooks: { setCursor: [() => this.#read()], draw: [(plot) => this.#drawLimit(plot)] },
    };
  }

  /** @param {Line} line @returns {uPlot.Series} */
  #series({ name, colour, width = 1.5, dash, fill }) {
    const stroke = colours()[colour];
    const fills = {
      soft: () => `${stroke}24`,
      solid: () => stroke,
      hatch: (/** @type {uPlot} */ plot) => hatched(plot.ctx, stroke, colours().card),
    };
    return {
      label: name,
      stroke,
      width,
      points: { show: false },
      ...(dash && { dash }),
      ...(fill && { fill: fills[fill] }),
    };
  }

  /** The limit counts for the scale only where the data comes near it. @param {number} most */
  #limitWithin(most) {
    return this.limit !== undefined && this.limit.at > 0 && most > this.limit.at / 3
      ? this.limit.at * 1.05
      : 0;
  }

  /** @param {uPlot} plot */
  #drawLimit(plot) {
    let most = 0;
    for (const value of this.#data[1] ?? []) most = Math.max(most, value ?? 0);
    if (this.limit === undefined || this.#limitWithin(most) === 0) return;
    const { ctx, bbox } = plot;
    const y = Math.round(plot.valToPos(this.limit.at, "y", true));
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colours().soft;
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "bottom";
    ctx.fillText(this.limit.name, bbox.left + 6 * devicePixelRatio, y - 3 * devicePixelRatio);
    ctx.restore();
  }
}

/** The next round number, with some room; an axis that does not change with every second. @param {number} most */
export function roof(most) {
  if (!(most > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(most * 1.08));
  return ([1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * unit >= most * 1.08) ?? 10) * unit;
}

/** @param {CanvasRenderingContext2D} pen @param {string} ink @param {string} ground */
function hatched(pen, ink, ground) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const brush = tile.getContext("2d");
  if (brush === null) return ink;
  brush.fillStyle = ground;
  brush.fillRect(0, 0, 6, 6);
  brush.strokeStyle = ink;
  brush.lineWidth = 1.4;
  brush.beginPath();
  for (const x of [-6, 0, 6]) {
    brush.moveTo(x - 1, 7);
    brush.lineTo(x + 7, -1);
  }
  brush.stroke();
  return pen.createPattern(tile, "repeat") ?? ink;
}

/** A small line without axes; at most 60 points, the newest at the right. @param {HTMLCanvasElement} canvas @param {readonly (number | null)[]} values @param {{ top?: number, tick?: number, bad?: boolean }} [options] */
export function spark(canvas, values, { top, tick, bad = false } = {}) {
  const ratio = Math.min(2, devicePixelRatio || 1);
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  if (pen === null || width === 0) return;
  const points = thin(values, 60);
  const most = top ?? roof(Math.max(0, tick ?? 0, ...points.map((point) => point ?? 0)));
  const { strong, soft, bad: red, line } = colours();
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const x = (/** @type {number} */ at) => width - 1 - ((points.length - 1 - at) / 59) * (width - 2);
  const y = (/** @type {number} */ value) => height - 1.5 - (Math.min(value, most) / most) * (height - 4);
  pen.fillStyle = line;
  pen.fillRect(0, height - 1, width, 1);
  if (tick !== undefined) {
    pen.fillStyle = soft;
    pen.fillRect(width - 8, Math.round(y(tick)), 8, 1);
  }
  pen.strokeStyle = bad && points.some((point) => point !== null && point > 0) ? red : strong;
  pen.lineWidth = 1.5;
  pen.lineJoin = "round";
  pen.beginPath();
  let drawing = false;
  points.forEach((value, at) => {
    if (value !== null) {
      if (drawing) pen.lineTo(x(at), y(value));
      else pen.moveTo(x(at), y(value));
    }
    drawing = value !== null;
  });
  pen.stroke();
}

/** Means of neighbours, so that at most `most` are left. @param {readonly (number | null)[]} values @param {number} most */
export function thin(values, most) {
  const each = Math.ceil(values.length / most);
  if (each <= 1) return values;
  /** @type {(number | null)[]} */
  const thinned = [];
  // From the newest back: the groups must not change their members with each second's arrival at the front.
  for (let end = values.length; end > 0; end -= each) {
    const known = values.slice(Math.max(0, end - each), end).filter((value) => value !== null);
    thinned.unshift(known.length === 0 ? null : known.reduce((sum, value) => sum + value, 0) / known.length);
  }
  return thinned;
}
