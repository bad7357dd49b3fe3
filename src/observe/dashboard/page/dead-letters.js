/**
 * Dead letters: tasks that will not be tried again until somebody says so. The panel tells how many; the dialog
 * lists them, shows one with its input, sends one back (replay) or throws one away (purge, asked twice).
 *
 * The list is fetched when it is looked at, and then stands still: a row that moved away under the pointer would
 * have the wrong letter replayed. When there are more, or fewer, a button says so and fetches it again.
 */
/** @import { View } from "./app.js" */
import { ask } from "./api.js";
import { byId, h, say, show, the } from "./dom.js";
import { age, count, plural } from "./format.js";

/**
 * @typedef {object} Letter
 * @property {string} task_id
 * @property {string} tenant
 * @property {string} model
 * @property {string} tier
 * @property {number} attempts
 * @property {string} error
 * @property {string} message
 * @property {string} died_at
 * @property {unknown} [input]
 * @property {unknown} [parameters]
 */

const MOST_SHOWN = 200;
const AT_ONCE = 6;
/** The stream's number lags behind what one has just done. */
const SETTLES_MS = 1500;

export class DeadLetters {
  #dialog = the("letters", HTMLDialogElement);
  #number = h("b", { class: "big" }, "0");
  #words = h("span", { class: "what" });
  #open = h("button", { type: "button" }, "Look at them");
  #title = h("h2", { id: "letters-title" }, "Dead letters");
  #again = h("button", { type: "button", hidden: true });
  #close = h("button", { type: "button", "aria-label": "Close", autofocus: true }, "✕");
  #list = h("div", { class: "letters" });
  #status = h("p", { class: "status", role: "status" });
  #all = h("button", { type: "button" }, "Replay all");
  /** @type {Letter[]} */
  #letters = [];
  /** @type {Map<string, HTMLElement>} */
  #rows = new Map();
  #changedAt = 0;
  #replaying = false;
  /** On the server's clock: this machine's may be off by hours. */
  #now = () => Date.now();

  constructor() {
    byId("dead").append(h("div", { class: "saving" }, this.#number, this.#words), this.#open);
    this.#open.addEventListener("click", () => this.show());
    this.#all.addEventListener("click", () => void this.#replayAll());
    this.#all.addEventListener("blur", () => this.#showAll(false));
    this.#again.addEventListener("click", () => void this.#load().then(() => this.#close.focus()));
    this.#close.addEventListener("click", () => this.#dialog.close());
    const head = [
      this.#title,
      this.#status,
      h("span", { class: "grow" }),
      this.#again,
      this.#all,
      this.#close,
    ];
    this.#dialog.append(h("div", { class: "dialog-head" }, ...head), this.#list);
  }

  show() {
    if (!this.#dialog.open) this.#dialog.showModal();
    if (this.#replaying) return;
    say(this.#status, "");
    void this.#load();
  }

  /** @param {View} view */
  update({ state, frame, history, rangeS }) {
    const { deadLetters, totals } = frame.process;
    this.#now = () => state.clock.at(performance.now());
    say(this.#number, count(deadLetters));
    const recent = history.sum("dead", rangeS);
    const born =
      recent > 0
        ? `${count(recent)} of this model in the chosen range`
        : `${count(totals.dead)} died since the start`;
    say(
      this.#words,
      deadLetters === 0 ? "No task was given up on." : `${born}; each is kept with its input.`,
    );
    this.#open.hidden = deadLetters === 0;
    const settled = !this.#replaying && performance.now() - this.#changedAt > SETTLES_MS;
    show(this.#again, settled && deadLetters !== this.#letters.length);
    say(this.#again, `Now ${count(deadLetters)}: show`);
  }

  async #load() {
    try {
      const found = /** @type {{ dead_letters: Letter[] }} */ (await ask("/internal/dead-letters"));
      this.#letters = found.dead_letters.toReversed();
      this.#draw();
    } catch (error) {
      this.#list.replaceChildren(h("p", { class: "bad" }, `The list cannot be shown: ${wordsOf(error)}`));
    }
    this.#changedAt = performance.now();
    show(this.#again, false);
  }

  #draw() {
    const letters = this.#letters;
    this.#count();
    this.#rows = new Map(letters.slice(0, MOST_SHOWN).map((letter) => [letter.task_id, this.#row(letter)]));
    const rest = letters.length - this.#rows.size;
    const more = `and ${count(rest)} older ones, which Replay all replays too; ferry dead list shows them`;
    this.#list.replaceChildren(
      ...this.#rows.values(),
      ...(rest > 0 ? [h("p", { class: "calm" }, more)] : []),
      ...(letters.length === 0 ? [h("p", { class: "calm" }, "There is none.")] : []),
    );
  }

  #count() {
    const letters = this.#letters.length;
    say(this.#title, letters === 0 ? "Dead letters" : plural(letters, "dead letter"));
    show(this.#all, letters > 1 || this.#replaying);
  }

  /** It is no dead letter any more. What had the focus is gone with it: its neighbour takes it. @param {string} id */
  #drop(id) {
    const row = this.#rows.get(id);
    const focused = row?.contains(document.activeElement) === true;
    const beside = row?.nextElementSibling ?? row?.previousElementSibling;
    this.#letters = this.#letters.filter((letter) => letter.task_id !== id);
    this.#changedAt = performance.now();
    this.#rows.delete(id);
    row?.remove();
    this.#count();
    if (this.#rows.size === 0) this.#draw();
    if (focused) (beside?.querySelector("button") ?? this.#close).focus();
  }

  /** @param {Letter} letter */
  #row(letter) {
    const { task_id: id, model, tier, tenant, attempts, error, message, died_at: diedAt } = letter;
    const details = h("div", { class: "details", hidden: true });
    const act = (/** @type {string} */ name, /** @type {() => Promise<void> | void} */ run) =>
      h("button", { type: "button", onclick: () => void run(), "aria-label": `${name} ${id}` }, name);
    const purge = h("button", { type: "button", class: "danger", "aria-label": `Purge ${id}` }, "Purge");
    purge.addEventListener("click", () => {
      if (purge.textContent === "Really purge?") void this.#do("DELETE", id, "purged");
      else purge.textContent = "Really purge?";
    });
    purge.addEventListener("blur", () => (purge.textContent = "Purge"));
    return h(
      "article",
      { class: "letter" },
      h(
        "div",
        { class: "letter-head" },
        h("code", {}, id),
        h("span", {}, `${model} · ${tier} · ${tenant}`),
        h(
          "span",
          { class: "soft" },
          `${age(this.#now() - Date.parse(diedAt))} ago, ${plural(attempts, "attempt")}`,
        ),
      ),
      h("p", { class: "letter-why" }, h("b", {}, error), " ", message),
      h(
        "div",
        { class: "acts" },
        act("Replay", () => this.#do("POST", id, "is queued again")),
        act("Details", () => this.#details(id, details)),
        purge,
      ),
      details,
    );
  }

  /** @param {string} id @param {HTMLElement} box */
  async #details(id, box) {
    box.hidden = !box.hidden;
    if (box.hidden) return;
    try {
      const letter = await ask(`/internal/dead-letters/${encodeURIComponent(id)}`);
      box.replaceChildren(
        h("pre", { tabindex: "0", "aria-label": "The letter" }, JSON.stringify(letter, null, 2)),
      );
    } catch (error) {
      box.replaceChildren(h("p", { class: "bad" }, wordsOf(error)));
    }
  }

  /** @param {"POST" | "DELETE"} method @param {string} id @param {string} done */
  async #do(method, id, done) {
    const path = `/internal/dead-letters/${encodeURIComponent(id)}${method === "POST" ? "/replay" : ""}`;
    try {
      await ask(path, method);
      say(this.#status, `${id} ${done}.`);
      this.#drop(id);
    } catch (error) {
      say(this.#status, `${id}: ${wordsOf(error)}`);
    }
  }

  /** @param {boolean} asking */
  #showAll(asking) {
    const words = asking ? `Replay all ${count(this.#letters.length)}?` : "Replay all";
    say(this.#all, this.#replaying ? "Stop" : words);
  }

  async #replayAll() {
    if (this.#replaying) {
      this.#replaying = false;
      return;
    }
    if (this.#all.textContent === "Replay all") return this.#showAll(true);
    this.#replaying = true;
    this.#showAll(false);
    const waiting = this.#letters.map(({ task_id: id }) => id);
    let [replayed, refused, why, saidAt] = [0, 0, "", 0];
    const work = async () => {
      for (let id = waiting.shift(); id !== undefined && this.#replaying; id = waiting.shift()) {
        await ask(`/internal/dead-letters/${encodeURIComponent(id)}/replay`, "POST").then(
          () => replayed++,
          (/** @type {unknown} */ error) => {
            refused++;
            why = wordsOf(error);
          },
        );
        // A screen reader speaks each of them.
        if (performance.now() - saidAt < 2000) continue;
        saidAt = performance.now();
        say(this.#status, `${count(replayed)} queued again, ${count(waiting.length)} to go`);
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, work));
    this.#replaying = false;
    this.#showAll(false);
    const but = refused === 0 ? "" : ` ${count(refused)} were not: ${why}`;
    say(this.#status, `${plural(replayed, "task")} queued again.${but}`);
    await this.#load();
    if (document.activeElement === document.body) this.#close.focus();
  }
}

/** @param {unknown} error */
function wordsOf(error) {
  return error instanceof Error ? error.message : String(error);
}
