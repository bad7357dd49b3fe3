/**
 * Dead letters: tasks that will not be tried again until somebody says so. The panel tells how many; the dialog
 * lists them, shows one with its input, sends one back (replay) or throws one away (purge, asked twice).
 *
 * The list is fetched when it is looked at; the stream only tells how many there are.
 */
/** @import { View } from "./app.js" */
import { ask } from "./api.js";
import { byId, h, say, the } from "./dom.js";
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

export class DeadLetters {
  #dialog = the("letters", HTMLDialogElement);
  #number = h("b", { class: "big" }, "0");
  #words = h("span", { class: "what" });
  #open = h("button", { type: "button" }, "Look at them");
  #list = h("div", { class: "letters" });
  #status = h("p", { class: "status", role: "status" });
  #all = h("button", { type: "button" }, "Replay all");
  /** @type {Letter[]} */
  #letters = [];
  #seen = -1;

  constructor() {
    byId("dead").append(h("div", { class: "saving" }, this.#number, this.#words), this.#open);
    this.#open.addEventListener("click", () => this.show());
    this.#all.addEventListener("click", () => void this.#replayAll());
    this.#dialog.append(
      h(
        "div",
        { class: "dialog-head" },
        h("h2", { id: "letters-title" }, "Dead letters"),
        this.#status,
        h("span", { class: "grow" }),
        this.#all,
        h(
          "button",
          { type: "button", onclick: () => this.#dialog.close(), "aria-label": "Close", autofocus: true },
          "✕",
        ),
      ),
      this.#list,
    );
  }

  show() {
    if (!this.#dialog.open) this.#dialog.showModal();
    void this.#load();
  }

  /** @param {View} view */
  update({ frame, history, rangeS }) {
    const { deadLetters, totals } = frame.process;
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
    if (deadLetters !== this.#seen && this.#dialog.open) void this.#load();
    this.#seen = deadLetters;
  }

  async #load() {
    try {
      const found = /** @type {{ dead_letters: Letter[] }} */ (await ask("/internal/dead-letters"));
      this.#letters = found.dead_letters.toReversed();
      this.#draw();
    } catch (error) {
      this.#list.replaceChildren(
        h(
          "p",
          { class: "bad" },
          `The list cannot be shown: ${String(error instanceof Error ? error.message : error)}`,
        ),
      );
    }
  }

  #draw() {
    const letters = this.#letters;
    this.#all.hidden = letters.length < 2;
    if (letters.length === 0) {
      this.#list.replaceChildren(h("p", { class: "calm" }, "There is none."));
      return;
    }
    const shown = letters.slice(0, MOST_SHOWN).map((letter) => this.#row(letter));
    const rest = letters.length - shown.length;
    this.#list.replaceChildren(
      ...shown,
      ...(rest > 0 ? [h("p", { class: "calm" }, `and ${count(rest)} older ones: ferry dead list`)] : []),
    );
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
          `${age(Date.now() - Date.parse(diedAt))} ago, ${plural(attempts, "attempt")}`,
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
      box.replaceChildren(h("p", { class: "bad" }, error instanceof Error ? error.message : String(error)));
    }
  }

  /** @param {"POST" | "DELETE"} method @param {string} id @param {string} done */
  async #do(method, id, done) {
    const path = `/internal/dead-letters/${encodeURIComponent(id)}${method === "POST" ? "/replay" : ""}`;
    try {
      await ask(path, method);
      say(this.#status, `${id} ${done}.`);
    } catch (error) {
      say(this.#status, `${id}: ${error instanceof Error ? error.message : String(error)}`);
    }
    await this.#load();
  }

  async #replayAll() {
    if (this.#all.textContent === "Replay all") {
      this.#all.textContent = `Replay all ${count(this.#letters.length)}?`;
      this.#all.addEventListener("blur", () => (this.#all.textContent = "Replay all"), { once: true });
      return;
    }
    this.#all.textContent = "Replay all";
    let replayed = 0;
    for (const { task_id: id } of this.#letters) {
      await ask(`/internal/dead-letters/${encodeURIComponent(id)}/replay`, "POST").then(
        () => replayed++,
        () => undefined,
      );
    }
    say(this.#status, `${plural(replayed, "task")} queued again.`);
    await this.#load();
  }
}
