/**
 * The stream of frames: server-sent events, read with `fetch`, because EventSource cannot send a token.
 *
 * A connection that breaks, or is silent for ten seconds, is tried again: after 1 s, 2 s, 4 s, then every 8 s,
 * each up to a quarter earlier so that many viewers of one Ferry do not come back together.
 */
/** @import { Hello, Frame } from "../frames.ts" */

const SILENT_MS = 10_000;
const MOST_WAIT_S = 8;

/**
 * @typedef {object} Hearing
 * @property {(hello: Hello) => void} hello
 * @property {(frame: Frame) => void} frame
 * @property {(secondsLeft: number, why: string) => void} lost told once a second while there is no connection
 * @property {() => Promise<void>} denied resolves when there is another token to try
 * @property {() => Record<string, string>} headers
 */

/** Takes pieces of text as they come and gives whole events. */
export class Parser {
  #rest = "";
  #event = "";
  /** @type {string[]} */
  #data = [];
  #tell;

  /** @param {(event: string, data: string) => void} tell */
  constructor(tell) {
    this.#tell = tell;
  }

  /** @param {string} piece */
  push(piece) {
    const lines = (this.#rest + piece).split("\n");
    this.#rest = lines.pop() ?? "";
    for (const line of lines) this.#line(line.endsWith("\r") ? line.slice(0, -1) : line);
  }

  /** @param {string} line */
  #line(line) {
    if (line === "") {
      if (this.#data.length > 0) this.#tell(this.#event || "message", this.#data.join("\n"));
      this.#event = "";
      this.#data = [];
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return;
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
    if (field === "event") this.#event = value;
    else if (field === "data") this.#data.push(value);
  }
}

export class Stream {
  #hearing;
  #failures = 0;
  /** @type {(() => void) | undefined} */
  #hurry;

  /** @param {Hearing} hearing */
  constructor(hearing) {
    this.#hearing = hearing;
  }

  /** Never returns. */
  async run() {
    for (;;) {
      const why = await this.#once();
      if (why === "denied") {
        await this.#hearing.denied();
        this.#failures = 0;
        continue;
      }
      await this.#wait(why);
    }
  }

  /** The next try is now. */
  hurry() {
    this.#hurry?.();
  }

  /** One connection, to its end; why it ended. */
  async #once() {
    const stop = new AbortController();
    let silence = setTimeout(() => stop.abort(), SILENT_MS);
    try {
      const headers = { accept: "text/event-stream", ...this.#hearing.headers() };
      const answer = await fetch("/internal/live", { headers, signal: stop.signal, cache: "no-store" });
      if (answer.status === 401) return "denied";
      if (!answer.ok || answer.body === null) return await refusal(answer);
      const parser = new Parser((event, data) => this.#hear(event, data));
      const words = new TextDecoder();
      for await (const piece of answer.body) {
        clearTimeout(silence);
        silence = setTimeout(() => stop.abort(), SILENT_MS);
        parser.push(words.decode(piece, { stream: true }));
      }
      return "";
    } catch {
      return "";
    } finally {
      clearTimeout(silence);
      stop.abort();
    }
  }

  /** @param {string} event @param {string} data */
  #hear(event, data) {
    try {
      if (event === "hello") {
        this.#failures = 0;
        this.#hearing.hello(/** @type {Hello} */ (JSON.parse(data)));
      } else if (event === "frame") this.#hearing.frame(/** @type {Frame} */ (JSON.parse(data)));
    } catch (error) {
      // Our own mistake: to connect again would not mend it, and to be silent would hide it.
      reportError(error);
    }
  }

  /** @param {string} why */
  async #wait(why) {
    const seconds = Math.min(MOST_WAIT_S, 2 ** this.#failures++);
    const until = performance.now() + seconds * 1000 * (1 - Math.random() / 4);
    for (;;) {
      const left = until - performance.now();
      if (left <= 0) return;
      this.#hearing.lost(Math.ceil(left / 1000), why);
      const hurried = await new Promise((resolve) => {
        const timer = setTimeout(() => resolve(false), Math.min(1000, left));
        this.#hurry = () => {
          clearTimeout(timer);
          resolve(true);
        };
      });
      this.#hurry = undefined;
      if (hurried === true) return;
    }
  }
}

/** @param {Response} answer */
async function refusal(answer) {
  const said = await answer.json().catch(() => undefined);
  const message = /** @type {{ message?: string } | undefined} */ (said)?.message;
  return message ?? `the server answered ${answer.status}`;
}
