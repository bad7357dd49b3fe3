/** Where is my request? The story of one task, with the time between each step and the next. */
/** @import { Story } from "./steps.js" */
import { ask } from "./api.js";
import { copy, h, the } from "./dom.js";
import { ms, plural, quoted } from "./format.js";
import { stepsOf } from "./steps.js";

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
  const due = story.deadline_at === undefined ? "" : `; its deadline is ${story.deadline_at.slice(11, 23)}`;
  const words = story.settled_at === undefined ? `is ${story.state}${due}` : `took ${ms(last - first)}`;
  const others = (story.requests ?? []).length - 1;
  const shared = others > 0 ? ` It answered ${plural(others, "more request")}.` : "";
  const where = story.source === undefined ? "" : ` Told by the ${story.source}.`;
  const model = story.model === "" ? "" : ` for ${story.model}`;
  return [
    h("p", {}, `A task${model}; it ${words}.${shared}${where} Times are UTC.`),
    h("ol", { class: "steps" }, ...rows),
    h(
      "p",
      { class: "calm" },
      story.batch === undefined ? "No batch." : "Batch ",
      h("code", {}, story.batch?.id ?? ""),
    ),
  ];
}
