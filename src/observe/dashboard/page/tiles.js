/** The five numbers at the top, each with its line over the chosen range. */
/** @import { View } from "./app.js" */
import { spark } from "./charts.js";
import { byId, h, mark, say } from "./dom.js";
import { count, ms, plural, rate, share } from "./format.js";

const ELSEWHERE = "the gateways know";

/** @param {string} label @param {string} unit */
function makeTile(label, unit) {
  const number = h("span", { class: "number" }, "–");
  const small = h("span", { class: "unit" }, unit);
  const note = h("p", { class: "note" });
  const canvas = h("canvas", { class: "spark", "aria-hidden": "true" });
  const value = h("p", { class: "value" }, number, small);
  const name = h("p", { class: "label" }, label);
  const node = h("div", { class: "tile" }, name, value, note, canvas);
  return { node, name, number, unit: small, note, canvas };
}

export class Tiles {
  #rate = makeTile("Requests", "/s");
  #load = makeTile("Load", "");
  #p99 = makeTile("p99 latency", "");
  #refused = makeTile("Refused", "");
  #lost = makeTile("Lost", "");

  constructor() {
    byId("tiles").append(
      ...[this.#rate, this.#load, this.#p99, this.#refused, this.#lost].map(({ node }) => node),
    );
  }

  /** @param {View} view */
  update({ hello, model, frame, history, rangeS }) {
    const { recent, workers } = model;
    // Requests come to gateways: a batcher has their tasks.
    const batcher = hello.role === "batcher";
    const asked = batcher ? history.sum("tasks", 10) / 10 : recent.requestsPerSecond;
    say(this.#rate.name, batcher ? "Tasks" : "Requests");
    const well = workers.filter(({ state }) => state !== "down" && state !== "draining").length;
    say(this.#rate.number, rate(asked));
    const capacity = recent.capacityPerSecond;
    say(this.#rate.note, capacity > 0 ? `capacity ${rate(capacity)}/s` : "capacity is being learned");
    say(this.#load.number, capacity > 0 ? share(recent.load) : "–");
    const wanted = recent.desiredWorkers > 0 ? `, ${count(recent.desiredWorkers)} wanted` : "";
    say(this.#load.note, `${count(well)}/${plural(workers.length, "worker")}${wanted}`);
    const [p99, unit] = ms(recent.p99).split(" ");
    say(this.#p99.number, p99 ?? "–");
    say(this.#p99.unit, unit ?? "");
    say(
      this.#p99.note,
      batcher ? ELSEWHERE : `p50 ${ms(recent.p50).replace(" ms", "")} · p95 ${ms(recent.p95)}`,
    );
    say(this.#refused.number, batcher ? "–" : share(recent.refusedShare));
    mark(this.#refused.node, "data-bad", recent.refusedShare > 0);
    say(
      this.#refused.note,
      batcher ? ELSEWHERE : `${rate(asked * recent.refusedShare)}/s of ${rate(asked)}/s`,
    );
    const { lost } = frame.process.totals;
    say(this.#lost.number, count(lost));
    mark(this.#lost.node, "data-bad", lost > 0);
    const { deadLetters } = frame.process;
    say(this.#lost.note, deadLetters > 0 ? plural(deadLetters, "dead letter") : "no dead letters");
    spark(
      this.#rate.canvas,
      history.last(batcher ? "tasks" : "requests", rangeS),
      capacity > 0 && recent.load > 0.3 ? { tick: capacity } : {},
    );
    spark(this.#load.canvas, history.last("load", rangeS), { tick: 1 });
    spark(this.#p99.canvas, history.last("p99", rangeS));
    spark(this.#refused.canvas, history.last("refused", rangeS), { bad: true });
    spark(this.#lost.canvas, history.last("lost", rangeS), { bad: true });
  }
}
