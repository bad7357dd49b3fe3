/** Where is my request? The story of one task, with the time between each step and the next. */
import { ask } from "./api.js";
import { copy, h, the } from "./dom.js";
import { ms, quoted } from "./format.js";

/**
 * @typedef {object} Story
 * @property {string} task_id
 * @property {string} tenant
 * @property {string} model
 * @property {string} tier
 * @property {string} state
 * @property {number} attempts
 * @property {string} created_at
 * @property {string} queued_at
 * @property {string} deadline_at
 * @property {{ id: string, size: number, reason: string, why: string, worker: string, started_at: string }} [batch]
 * @property {string} [settled_at]
 * @property {{ ok: boolean, code?: string, message?: string, output_bytes?: number }} [outcome]
 */

/** @typedef {{ at: number, what: string, more: string }} Step */

/** The steps that are known, in their order. @param {Story} story @returns {Step[]} */
export function stepsOf(story) {
  const at = (/** @type {string} */ instant) => Date.parse(instant);
  const { batch, outcome } = story;
  /** @type {Step[]} */
  const steps = [
    { at: at(story.created_at), what: "Arrived", more: `${story.tier}, tenant ${story.tenant}` },
  ];
  const again = story.attempts > 1 ? `for attempt ${story.attempts}` : "";
  steps.push({ at: at(story.queued_at), what: "Queued", more: again });
  if (batch !== undefined) {
    const more = `${batch.worker}, batch of ${batch.size}: ${batch.why || batch.reason}`;
    steps.push({ at: at(batch.started_at), what: "Sent to a worker", more });
  }
  if (story.settled_at !== undefined) {
    const failed = `${outcome?.code ?? ""} ${outcome?.message ?? ""}`.trim();
    const more = outcome?.ok === true ? `${outcome.output_bytes ?? 0} bytes` : failed;
    steps.push({ at: at(story.settled_at), what: outcome?.ok === true ? "Done" : "Failed", more });
  }
  return steps.sort((a, b) => a.at - b.at);
}

const dialog = () => the("story", HTMLDialogElement);

/** @param {string} given */
export async function showStory(given) {
  const id = given.trim();
  if (id === "") return;
  const box = dialog();
  box.replaceChildren(...frame(id, h("p", { class: "calm" }, "Looking …")));
  if (!box.open) box.showModal();
  try {
    const story = /** @type {Story} */ (await ask(`/internal/requests/${encodeURIComponent(id)}`));
    box.replaceChildren(...frame(id, ...tell(story)));
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    box.replaceChildren(...frame(id, h("p", { class: "bad" }, `Not found: ${why}`)));
  }
}

/** @param {string} id @param {...HTMLElement} inside */
function frame(id, ...inside) {
  const curl = `curl -s ${quoted(`${location.origin}/internal/requests/${encodeURIComponent(id)}`)}`;
  const button = h("button", { type: "button" }, "Copy as curl");
  button.addEventListener("click", () => void copy(button, curl));
  return [
    h(
      "div",
      { class: "dialog-head" },
      h("h2", { id: "story-title" }, "Task ", h("code", {}, id)),
      h("span", { class: "grow" }),
      button,
      h(
        "button",
        { type: "button", onclick: () => dialog().close(), "aria-label": "Close", autofocus: true },
        "✕",
      ),
    ),
    ...inside,
  ];
}

/** @param {Story} story */
function tell(story) {
  const steps = stepsOf(story);
  const first = steps[0]?.at ?? 0;
  const rows = steps.map(({ at, what, more }, i) => {
    const gap = i === 0 ? "" : `+ ${ms(at - (steps[i - 1]?.at ?? at))}`;
    const words = h("span", {}, h("b", {}, what), more === "" ? "" : h("small", {}, more));
    return h(
      "li",
      {},
      h("span", { class: "gap" }, gap),
      words,
      h("time", {}, new Date(at).toISOString().slice(11, 23)),
    );
  });
  const last = steps.at(-1)?.at ?? first;
  const ended = story.settled_at !== undefined;
  const words = ended
    ? `took ${ms(last - first)}`
    : `is ${story.state}; its deadline is ${story.deadline_at.slice(11, 23)}`;
  return [
    h("p", {}, `A task for ${story.model}; it ${words}. Times are UTC.`),
    h("ol", { class: "steps" }, ...rows),
    story.batch === undefined
      ? h("p", { class: "calm" }, "No batch yet.")
      : h("p", { class: "calm" }, "Batch ", h("code", {}, story.batch.id)),
  ];
}
