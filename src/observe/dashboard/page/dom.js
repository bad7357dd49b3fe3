/**
 * The few things that the page does with elements. Everything from outside becomes text, never markup: nothing
 * on this page is parsed as HTML. What did not change is not touched, so that nothing flickers and selections stay.
 */

/** @typedef {Node | string | false | null | undefined} Child */

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Readonly<Record<string, string | boolean | undefined | EventListener>>} [attributes] `class`, `onclick` and the like; false leaves one out
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === undefined) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => typeof child === "string" || child instanceof Node));
  return node;
}

/** @param {string} id */
export function byId(id) {
  const node = document.getElementById(id);
  if (node === null) throw new Error(`the page has no #${id}`);
  return node;
}

/** @template {HTMLElement} Kind @param {string} id @param {new () => Kind} kind */
export function the(id, kind) {
  const node = byId(id);
  if (!(node instanceof kind)) throw new Error(`#${id} is no ${kind.name}`);
  return node;
}

/** @param {Element} node @param {string} value */
export function say(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

/** @param {Element} node @param {string} name @param {string | boolean} value */
export function mark(node, name, value) {
  const text = value === true ? "" : value;
  if (text === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

/** @param {HTMLElement} node @param {boolean} shown */
export function show(node, shown) {
  if (node.hidden === shown) node.hidden = !shown;
}

/**
 * A list whose rows stay the same elements while their item stays.
 * @template Item
 * @template {{ node: HTMLElement }} Row
 */
export class Rows {
  /** @type {Map<string, Row>} */
  #rows = new Map();
  #parent;
  #make;
  #update;

  /**
   * @param {HTMLElement} parent
   * @param {(item: Item) => Row} make
   * @param {(row: Row, item: Item, at: number) => void} update
   */
  constructor(parent, make, update) {
    this.#parent = parent;
    this.#make = make;
    this.#update = update;
  }

  /** @param {readonly Item[]} items @param {(item: Item) => string} keyOf */
  set(items, keyOf) {
    const before = this.#rows;
    /** @type {Map<string, Row>} */
    const after = new Map();
    items.forEach((item, at) => {
      const key = keyOf(item);
      if (after.has(key)) return;
      const row = before.get(key) ?? this.#make(item);
      after.set(key, row);
      this.#update(row, item, at);
    });
    for (const [key, { node }] of before) if (!after.has(key)) node.remove();
    let next = this.#parent.firstElementChild;
    for (const { node } of after.values()) {
      if (node === next) next = next.nextElementSibling;
      else this.#parent.insertBefore(node, next);
    }
    this.#rows = after;
  }
}

/** @param {readonly string[]} heads @param {readonly (readonly string[])[]} lines @param {string} caption */
export function table(heads, lines, caption) {
  return h(
    "table",
    {},
    h("caption", {}, caption),
    h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col" }, head)))),
    h(
      "tbody",
      {},
      ...lines.map(([first = "", ...rest]) =>
        h("tr", {}, h("th", { scope: "row" }, first), ...rest.map((cell) => h("td", {}, cell))),
      ),
    ),
  );
}

/** Into the clipboard, where the browser lets us; the button says how it went. @param {HTMLElement} button @param {string} text */
export async function copy(button, text) {
  const before = (button.dataset["says"] ??= button.textContent ?? "Copy");
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // Only pages from localhost or over TLS may write to it.
    button.textContent = "Select and copy it";
  }
  setTimeout(() => (button.textContent = before), 1600);
}

/** What the browser kept for us; null where it keeps nothing. @param {"localStorage" | "sessionStorage"} where @param {string} key */
export function recall(where, key) {
  try {
    return globalThis[where].getItem(key);
  } catch {
    return null;
  }
}

/** As long as the browser lets us, else as long as the page. @param {"localStorage" | "sessionStorage"} where @param {string} key @param {string} value */
export function keep(where, key, value) {
  try {
    globalThis[where].setItem(key, value);
  } catch {
    // It is chosen or asked for again after a reload.
  }
}
