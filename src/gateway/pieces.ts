/**
 * Answers that take long to write: a large tensor as numbers, a thousand embeddings. They are made a piece at a time,
 * and between two pieces the process serves everybody else.
 *
 * All such answers of a process stand in one line: each turn of the event loop makes one piece, of one of them. So a
 * hundred of them hold it up no longer than one does, and take their time.
 */
import type { Json } from "../core/task.ts";

/** Of what the engine holds, a third more than its bytes; below that an answer takes some 5 ms and is made at once. */
export const LARGE_CHARS = 131_072;
/** Small pieces are gathered until they are worth a turn and a write. */
const TURN_CHARS = 65_536;

interface Waiting {
  readonly texts: Iterator<Json>;
  readonly parts: Buffer[];
  readonly unwanted: () => boolean;
  readonly done: (parts: readonly Buffer[] | undefined) => void;
  readonly failed: (error: unknown) => void;
}

export class PieceLine {
  readonly #line: Waiting[] = [];

  /** The bytes of all texts; undefined when nobody wants them any more. Fails with what a text throws. */
  gather(texts: Iterable<Json>, unwanted: () => boolean): Promise<readonly Buffer[] | undefined> {
    return new Promise((done, failed) => {
      this.#line.push({ texts: texts[Symbol.iterator](), parts: [], unwanted, done, failed });
      if (this.#line.length === 1) this.#later();
    });
  }

  #later(): void {
    setImmediate(() => {
      const first = this.#line.shift()!;
      if (goOn(first)) this.#line.push(first);
      if (this.#line.length > 0) this.#later();
    });
  }
}

/** One for the process, as the event loop is. */
export const pieceLine = new PieceLine();

/** Makes its next piece; false when that was the last. */
function goOn({ texts, parts, unwanted, done, failed }: Waiting): boolean {
  if (unwanted()) {
    done(undefined);
    return false;
  }
  try {
    let piece = "";
    while (piece.length < TURN_CHARS) {
      const next = texts.next();
      if (next.done === true) {
        if (piece !== "") parts.push(Buffer.from(piece));
        done(parts);
        return false;
      }
      piece += next.value;
    }
    parts.push(Buffer.from(piece));
    return true;
  } catch (error) {
    failed(error);
    return false;
  }
}
