/** Everything by keyboard. Keys do nothing while one types, or holds Ctrl, Alt or Meta. */
import { h, the } from "./dom.js";

/** @typedef {{ keys: string, what: string, hit: (key: string) => void, names: readonly string[] }} Shortcut */

/** @param {readonly Shortcut[]} shortcuts */
export function startKeys(shortcuts) {
  const acts = new Map(shortcuts.flatMap(({ names, hit }) => names.map((name) => [name, hit])));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || typing(event.target)) return;
    // A dialog keeps its keys: Escape closes it, and the rest of the page is out of reach.
    if (document.querySelector("dialog[open]") !== null) return;
    const button =
      event.target instanceof HTMLElement && event.target.closest("button, summary, select") !== null;
    if (button && event.key === " ") return;
    const act = acts.get(event.key);
    if (act === undefined) return;
    event.preventDefault();
    act(event.key);
  });
}

/** @param {EventTarget | null} target */
function typing(target) {
  return target instanceof HTMLElement && target.closest("input, textarea, select") !== null;
}

/** @param {readonly Shortcut[]} shortcuts */
export function showKeys(shortcuts) {
  const dialog = the("help", HTMLDialogElement);
  const rows = shortcuts.map(({ keys, what }) =>
    h("div", {}, h("dt", {}, ...keys.split(" ").map((key) => h("kbd", {}, key))), h("dd", {}, what)),
  );
  dialog.replaceChildren(
    h(
      "div",
      { class: "dialog-head" },
      h("h2", { id: "help-title" }, "Keys"),
      h("span", { class: "grow" }),
      h(
        "button",
        { type: "button", onclick: () => dialog.close(), "aria-label": "Close", autofocus: true },
        "✕",
      ),
    ),
    h("dl", { class: "keys" }, ...rows),
  );
  if (!dialog.open) dialog.showModal();
}
