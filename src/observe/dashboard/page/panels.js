/** The panels that are made of rows, bars and words. */
/** @import { Column, Note } from "../frames.ts" */
/** @import { View } from "./app.js" */
import { spark } from "./charts.js";
import { byId, h, mark, Rows, say, show, table } from "./dom.js";
import { age, count, ms, plural, rate, share, span, time } from "./format.js";
import { total } from "./state.js";

const REASON_WORDS = ["the batch was full", "maxWaitMs had passed", "a worker was free", "a task was due"];

/** Why batches left: bars, which also choose what the lanes show. */
export class Reasons {
  #rows;
  #bars;
  /** @param {(reason: number) => void} toggle */
  constructor(toggle) {
    /** @type {Rows<{ name: string, at: number, share: number, times: number, on: boolean }, ReturnType<typeof makeReason>>} */
    this.#rows = new Rows(
      byId("reasons"),
      (item) => makeReason(item, toggle),
      (row, item) => {
        mark(row.node, "aria-pressed", String(item.on));
        say(row.percent, share(item.share));
        row.bar.style.width = item.share === 0 ? "0" : `max(2px, ${item.share * 100}%)`;
        mark(row.node, "title", `${plural(item.times, "batch")}: ${REASON_WORDS[item.at] ?? ""}`);
      },
    );
    this.#bars = Array.from({ length: 8 }, () => h("span", { class: "bar" }, h("i")));
    byId("fill").append(...this.#bars);
  }

  /** @param {View} view */
  update({ hello, history, rangeS, only, at, tables }) {
    const times = hello.reasons.map((name) => history.sum(name, rangeS));
    const all = times.reduce((sum, each) => sum + each, 0);
    this.#rows.set(
      hello.reasons.map((name, at) => ({
        name,
        at,
        share: all === 0 ? 0 : (times[at] ?? 0) / all,
        times: times[at] ?? 0,
        on: only.has(at),
      })),
      ({ name }) => name,
    );
    const max = hello.models[at]?.maxBatchSize ?? 1;
    const steps = history.fill.map((list) => total(list, rangeS));
    const most = Math.max(1, ...steps);
    const batches = steps.reduce((sum, each) => sum + each, 0);
    /** "" where batches are so small that no size falls into the step. */
    const label = (/** @type {number} */ step) => {
      const low = Math.floor((max * step) / 8) + 1;
      const high = Math.floor((max * (step + 1)) / 8);
      return low > high ? "" : low === high ? String(high) : `${low}–${high}`;
    };
    const first = this.#bars.findIndex((_, step) => label(step) !== "");
    this.#bars.forEach((bar, step) => {
      const each = steps[step] ?? 0;
      show(bar, label(step) !== "");
      /** @type {HTMLElement} */ (bar.firstElementChild).style.height =
        `${Math.max(each > 0 ? 4 : 0, (each / most) * 100)}%`;
      mark(
        bar,
        "title",
        `${label(step)} tasks: ${plural(each, "batch")}, ${share(batches === 0 ? 0 : each / batches)}`,
      );
      mark(bar, "data-label", step === first || step === 7 ? label(step) : "");
    });
    const mean = history.sum("tasks", rangeS) / Math.max(1, history.sum("batches", rangeS));
    mark(
      byId("fill"),
      "aria-label",
      batches === 0 ? "no batch yet" : `on average ${count(Math.round(mean * 10) / 10)} of ${max} tasks`,
    );
    mark(
      byId("fill"),
      "data-mean",
      batches === 0 ? "" : `mean ${count(Math.round(mean * 10) / 10)} of ${max}`,
    );
    if (!tables) return;
    const lines = steps.map((each, step) => [label(step), count(each)]).filter(([size]) => size !== "");
    byId("fill-twin").replaceChildren(table(["Tasks", "Batches"], lines, "Batches by how full they were"));
  }
}

/** @param {{ name: string, at: number }} item @param {(reason: number) => void} toggle */
function makeReason({ name, at }, toggle) {
  const percent = h("span", { class: "percent" });
  const bar = h("i", { class: `hatch ${name}` });
  const node = h(
    "button",
    { type: "button", class: "reason", onclick: () => toggle(at) },
    h("span", { class: `swatch ${name}`, "aria-hidden": "true" }, name[0]?.toUpperCase() ?? ""),
    h("span", { class: "what" }, h("b", {}, name), " ", h("small", {}, REASON_WORDS[at] ?? "")),
    percent,
    h("span", { class: "track" }, bar),
  );
  return { node, percent, bar };
}

export class Queues {
  #rows;
  constructor() {
    /** @type {Rows<{ name: string, depth: number, admitted: number, most: number, past: number[] }, ReturnType<typeof makeQueue>>} */
    this.#rows = new Rows(byId("queues"), makeQueue, (row, { depth, admitted, past, most }) => {
      say(row.depth, count(depth));
      say(row.rate, `${rate(admitted)}/s`);
      spark(row.canvas, past, { top: most });
    });
  }

  /** @param {View} view */
  update({ hello, model, history, rangeS }) {
    const past = hello.tiers.map((_, at) => (history.depth[at] ?? []).slice(-rangeS));
    const most = Math.max(8, ...past.flat());
    this.#rows.set(
      hello.tiers.map((name, at) => ({
        name,
        depth: model.queues[at]?.depth ?? 0,
        admitted: model.queues[at]?.admittedPerSecond ?? 0,
        most,
        past: past[at] ?? [],
      })),
      ({ name }) => name,
    );
    const waits = model.queues.some(({ depth }) => depth > 0);
    say(byId("queues-hint"), waits ? `oldest waits ${ms(model.oldestWaitMs)}` : "nobody waits");
  }
}

/** @param {{ name: string, depth: number, admitted: number, most: number, past: number[] }} item */
function makeQueue({ name }) {
  const depth = h("span", { class: "depth" });
  const rate = h("span", { class: "rate" });
  const canvas = h("canvas", { class: "spark", "aria-hidden": "true" });
  const label = h("span", { class: "tier", title: name }, name);
  const waiting = h("span", { class: "with" }, depth, h("small", {}, " waiting"));
  const admitted = h("span", { class: "with" }, rate, h("small", {}, " admitted"));
  const node = h("div", { class: "queue" }, label, canvas, waiting, admitted);
  return { node, depth, rate, canvas };
}

/** Refusals: how many by tier and reason, and who. */
export class Refused {
  #shown = "";

  /** @param {View} view */
  update({ hello, model, history, rangeS }) {
    /** @type {Map<string, number>} */
    const times = new Map();
    for (const [key, list] of history.shed) times.set(key, total(list, rangeS));
    const all = history.sum("refused", rangeS);
    const away = all - [...times.values()].reduce((sum, each) => sum + each, 0);
    const reasons = hello.shedReasons.filter((reason) =>
      hello.tiers.some((tier) => times.get(`${tier} ${reason}`)),
    );
    const lines = hello.tiers.map((tier) => [
      tier,
      ...reasons.map((reason) => {
        const each = times.get(`${tier} ${reason}`) ?? 0;
        return each === 0 ? "·" : count(each);
      }),
    ]);
    const tenants = model.refusedTenants.map(([tenant, each, retryMs]) => [tenant, count(each), ms(retryMs)]);
    const shown = JSON.stringify([lines, tenants, rangeS, away]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    if (all === 0) {
      byId("refused").replaceChildren(
        h("p", { class: "calm" }, `Nobody was refused in the last ${span(rangeS)}.`),
      );
    } else {
      const heads = ["Tier", ...reasons.map((reason) => reason.replace("_", " "))];
      byId("refused").replaceChildren(
        ...(reasons.length > 0 ? [table(heads, lines, "Refused requests by tier and reason")] : []),
        ...(away > 0 ? [h("p", { class: "bad" }, `${count(away)} while the store did not answer`)] : []),
      );
    }
    const box = byId("tenants");
    show(box, tenants.length > 0);
    const heads = ["Most refused, last minute", "times", "told to wait"];
    if (tenants.length > 0)
      box.replaceChildren(table(heads, tenants, "Tenants that were refused most in the last minute"));
  }
}

/** What caching, joining and batching spared the GPUs. */
export class Saved {
  #parts = { batches: h("b"), cached: h("b"), joined: h("b"), calls: h("b") };
  #notes = { batches: h("span"), cached: h("span"), joined: h("span"), calls: h("span") };

  constructor() {
    const { batches, cached, joined, calls } = this.#parts;
    const row = (
      /** @type {HTMLElement} */ number,
      /** @type {string} */ words,
      /** @type {HTMLElement} */ note,
    ) => h("div", { class: "saving" }, number, h("span", { class: "what" }, h("span", {}, words), note));
    byId("saved").append(
      row(batches, "GPU batches saved by cache and joining", this.#notes.batches),
      row(cached, "answers from the cache", this.#notes.cached),
      row(joined, "joined a task in flight", this.#notes.joined),
      row(calls, "calls saved by batching", this.#notes.calls),
    );
    batches.className = "big";
  }

  /** @param {View} view */
  update({ history, rangeS }) {
    const sum = (/** @type {Column} */ name) => history.sum(name, rangeS);
    const [tasks, batches, cached, joined] = [sum("tasks"), sum("batches"), sum("cached"), sum("joined")];
    const mean = batches > 0 ? tasks / batches : 0;
    const asked = sum("arrivals") + cached + joined;
    say(this.#parts.batches, mean === 0 ? "0" : count(Math.round((cached + joined) / mean)));
    say(this.#notes.batches, mean === 0 ? "" : `at ${count(Math.round(mean * 10) / 10)} tasks a batch`);
    say(this.#parts.cached, count(cached));
    say(this.#notes.cached, asked === 0 ? "" : `${share(cached / asked)} of what was asked`);
    say(this.#parts.joined, count(joined));
    say(this.#notes.joined, asked === 0 ? "" : `${share(joined / asked)} of what was asked`);
    say(this.#parts.calls, count(Math.max(0, tasks - batches)));
    say(this.#notes.calls, `${plural(tasks, "task")} in ${plural(batches, "batch")}`);
  }
}

/** A bar cut into parts, with their names and sizes under it. */
export class Split {
  #root;
  #parts;
  #words;
  #names;
  /** @param {string} id @param {readonly (readonly [name: string, kind: string])[]} parts */
  constructor(id, parts) {
    this.#root = byId(id);
    this.#parts = parts.map(([, kind]) => h("i", { class: kind }));
    this.#words = parts.map(() => h("b"));
    this.#names = parts.map(([name]) => h("span", {}, name));
    const legend = parts.map(([, kind], at) =>
      h("li", {}, h("i", { class: kind, "aria-hidden": "true" }), this.#names[at], " ", this.#words[at]),
    );
    this.#root.append(
      h("div", { class: "cut", "aria-hidden": "true" }, ...this.#parts),
      h("ul", {}, ...legend),
    );
  }

  /** @param {readonly string[]} names */
  rename(names) {
    this.#names.forEach((node, at) => say(node, names[at] ?? ""));
  }

  /** @param {readonly number[] | null} values @param {(value: number) => string} write */
  update(values, write) {
    const sum = values?.reduce((all, each) => all + each, 0) ?? 0;
    mark(this.#root, "data-none", sum === 0);
    this.#parts.forEach((part, at) => {
      part.style.width = `${sum === 0 ? 0 : ((values?.[at] ?? 0) / sum) * 100}%`;
      const word = this.#words[at];
      if (word !== undefined) say(word, sum === 0 ? "–" : write(values?.[at] ?? 0));
    });
  }
}

export class Notes {
  #rows;
  constructor() {
    /** @type {Rows<Note, { node: HTMLElement }>} */
    this.#rows = new Rows(byId("notes"), makeNote, () => {});
  }

  /** @param {View} view */
  update({ state }) {
    this.#rows.set(state.notes, ({ at, text }) => `${at} ${text}`);
    mark(byId("notes"), "data-none", state.notes.length === 0);
  }
}

/** @param {Note} note */
function makeNote({ at, level, text }) {
  const icon = { info: "·", warn: "▲", error: "✕" }[level];
  const words = h("span", { class: "text", title: text }, text);
  const kind = h(
    "span",
    { class: "kind" },
    h("span", { "aria-hidden": "true" }, icon),
    h("span", { class: "sr" }, level),
  );
  const clock = h("time", { datetime: new Date(at).toISOString() }, time(at));
  return { node: h("li", { "data-level": level }, clock, kind, words) };
}

export class Process {
  #rows;
  constructor() {
    /** @type {Rows<[string, string], { node: HTMLElement, value: HTMLElement }>} */
    this.#rows = new Rows(
      byId("process"),
      ([name]) => {
        const value = h("dd");
        return { node: h("div", {}, h("dt", {}, name), value), value };
      },
      ({ value }, [, text]) => {
        say(value, text);
        mark(value, "title", text);
      },
    );
  }

  /** @param {View} view */
  update({ hello, frame, history, rangeS, at }) {
    const { process } = frame;
    const about = hello.models[at];
    const late = history.last("loopLateMs", rangeS).reduce((most, each) => Math.max(most ?? 0, each ?? 0), 0);
    const retried = history.sum("retried", rangeS);
    const store = process.reachable ? `durability ${process.durability}` : "not reachable";
    /** @type {[string, string][]} */
    const facts = [
      ["Engine", `${hello.engine}, ${store}`],
      ["Running now", `${plural(process.running, "task")}, ${count(process.queued)} queued`],
      [
        "Batches",
        about === undefined
          ? "–"
          : `up to ${about.maxBatchSize}, at most ${about.maxWaitMs} ms, ${about.policy}`,
      ],
      ["Retries", `${count(retried)} in ${span(rangeS)}`],
      ["Longest stall", `${ms(late)} in ${span(rangeS)}`],
      ["Served", served(process.totals)],
      ["Up", `${age(frame.now - hello.startedAt)}, as ${hello.role}${process.draining ? ", draining" : ""}`],
    ];
    this.#rows.set(facts, ([name]) => name);
    say(byId("process-hint"), `Ferry ${hello.version}`);
  }
}

/** A gateway calls no worker, a batcher is asked by nobody. @param {{ requests: number, tasks: number, calls: number }} totals */
function served({ requests, tasks, calls }) {
  const asked = requests === 0 && calls > 0 ? plural(tasks, "task") : plural(requests, "request");
  return calls === 0 ? asked : `${asked} with ${plural(calls, "call")}`;
}

/** What a batch takes by its size, in steps that double every second time; those beyond the knee are pale. */
export class Curve {
  /** @type {Rows<{ size: number, took: number, most: number, knee: number }, { node: HTMLElement }>} */
  #rows = new Rows(
    byId("curve"),
    () => ({ node: h("span", { class: "bar" }, h("i")) }),
    ({ node }, { size, took, most, knee }) => {
      const bar = /** @type {HTMLElement} */ (node.firstElementChild);
      bar.style.height = `${(took / most) * 100}%`;
      mark(bar, "data-ms", count(took > 9 ? Math.round(took) : took));
      mark(node, "data-label", count(size));
      mark(node, "data-knee", size === knee);
      mark(node, "data-beyond", size > knee);
    },
  );

  /** @param {View} view */
  update({ model: { curve, cost }, tables }) {
    const points = curve?.points ?? [];
    const [largest = 0] = points.at(-1) ?? [];
    const knee = curve?.knee;
    const most = Math.max(...points.map(([, took]) => took));
    // It lies on a step; what was seen of that step may be a little larger.
    const at = points.find(([size]) => knee && size >= knee.size)?.[0] ?? Infinity;
    this.#rows.set(
      points.map(([size, took]) => ({ size, took, most, knee: at })),
      ({ size }) => String(size),
    );
    const words = knee
      ? `knee at ${count(knee.size)}: ${ms(knee.ms)}, ${count(knee.perSecond)}/s a worker`
      : `no knee up to ${count(largest)}`;
    const box = byId("curve");
    show(box, largest > 0);
    mark(box, "aria-label", cost === null ? words : `up to ${plural(largest, "task")}`);
    say(byId("curve-read"), largest > 0 && cost === null ? words : "");
    const said =
      cost === null ? curve?.hint : "It follows their lengths more than their number: see Padding.";
    say(byId("curve-hint"), largest ? `ms by tasks in a batch. ${said}` : "Not known yet.");
    if (!tables) return;
    const lines = points.map(([size, took, each]) => [count(size), count(each), ms(took)]);
    byId("curve-twin").replaceChildren(table(["Tasks", "Batches", "Time"], lines, "Batch time by size"));
  }
}
