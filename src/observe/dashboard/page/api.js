/**
 * What the page asks the admin listener beside the stream, with the token where there is one.
 *
 * The token lives in this tab's session storage. `#token=…` in the address, as `ferry serve` prints it, is taken
 * once and removed from the address bar; a fragment is never sent to a server.
 */

import { keep, recall } from "./dom.js";

const KEY = "ferry-admin-token";
let token = "";

if (!takeFromAddress()) token = recall("sessionStorage", KEY) ?? "";
// Pasted into a page that is open already: nothing would be loaded, and it would stay in the address bar.
addEventListener("hashchange", () => {
  if (takeFromAddress()) location.reload();
});

function takeFromAddress() {
  const given = /^#token=(.*)$/s.exec(location.hash)?.[1];
  if (given === undefined) return false;
  history.replaceState(null, "", location.pathname + location.search);
  try {
    setToken(decodeURIComponent(given));
  } catch {
    // A percent sign of its own.
    setToken(given);
  }
  return true;
}

/** @param {string} given */
export function setToken(given) {
  token = given;
  keep("sessionStorage", KEY, given);
}

export function hasToken() {
  return token !== "";
}

/** @returns {Record<string, string>} */
export function tokenHeaders() {
  // What no header can hold would never be sent, and so never be refused.
  const sendable = token.replaceAll(/[^!-~]/g, "?");
  return token === "" ? {} : { authorization: `Bearer ${sendable}` };
}

/** Why an answer is none, in the server's words. */
export class Refused extends Error {
  status;

  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * The answer's JSON, or undefined where it has none.
 * @param {string} path
 * @param {string} [method]
 * @returns {Promise<unknown>}
 */
export async function ask(path, method = "GET") {
  const signal = AbortSignal.timeout(10_000);
  let answer;
  try {
    answer = await fetch(path, { method, headers: tokenHeaders(), cache: "no-store", signal });
  } catch {
    throw new Refused(0, "no answer from Ferry; is it running?");
  }
  const text = await answer.text();
  /** @type {unknown} */
  let body;
  try {
    body = text === "" ? undefined : JSON.parse(text);
  } catch {
    body = undefined;
  }
  if (answer.ok) return body;
  const message = /** @type {{ message?: string } | undefined} */ (body)?.message;
  throw new Refused(answer.status, message ?? `Ferry answered ${answer.status}`);
}
