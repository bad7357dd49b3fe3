/**
 * The last hundred things that happened which a person would want to read, as sentences.
 *
 * Never an input, an output or a worker's own words. At most `PER_SECOND` a second are written out; the
 * others are counted, and the count is a note of its own.
 */
import type { Events } from "../events.ts";
import type { Note } from "./frames.ts";

const MAX = 100;
const PER_SECOND = 10;
const MAX_LENGTH = 240;

export class Notes {
  readonly #now: () => number;
  #notes: Note[] = [];
  /** How many there ever were; the last of `#notes` is this one. */
  #count = 0;
  #thisSecond = 0;
  #more = 0;

  constructor(events: Pick<Events, "on">, now: () => number) {
    this.#now = now;
    events.on("notice", ({ level, message }) => this.#add(level, message));
    events.on("worker.changed", ({ model, worker, state, why }) => this.workerIs(model, worker, state, why));
    events.on("scaling.changed", ({ model, from, desired, reason }) =>
      this.#add("info", `${model} wants ${desired} workers instead of ${from}: ${reason}`),
    );
    events.on("task.dead", ({ id, model, code }) =>
      this.#add("warn", `dead letter ${id}${model === "" ? "" : ` of ${model}`}: ${code}`),
    );
    events.on("task.lost", ({ id, why }) => this.#add("error", `task ${id} is lost: ${why}`));
    events.on("batch.overdue", ({ model, worker, afterMs }) => {
      const late = `overdue after ${Math.round(afterMs)} ms; its tasks are tried elsewhere`;
      this.#add("warn", `a batch of ${model} on ${worker} is ${late}`);
    });
  }

  get count(): number {
    return this.#count;
  }

  workerIs(model: string, worker: string, state: string, why: string): void {
    const reason = why === "" ? "" : `: ${why}`;
    this.#add(state === "down" ? "warn" : "info", `${worker} of ${model} is ${state}${reason}`);
  }

  /** Those after the first `count` that are still here, oldest first. */
  since(count: number): Note[] {
    return this.#notes.slice(Math.max(0, this.#notes.length - (this.#count - count)));
  }

  /** A second has passed. */
  tick(): void {
    const more = this.#more;
    this.#thisSecond = 0;
    this.#more = 0;
    if (more > 0) this.#add("info", `and ${more} more in that second; the log has them all`);
  }

  #add(level: Note["level"], text: string): void {
    if (this.#thisSecond >= PER_SECOND) {
      this.#more++;
      return;
    }
    this.#thisSecond++;
    this.#count++;
    const short = text.length > MAX_LENGTH ? `${text.slice(0, MAX_LENGTH - 1)}…` : text;
    this.#notes.push({ at: Math.round(this.#now()), level, text: short });
    if (this.#notes.length > MAX) this.#notes.shift();
  }
}
