/**
 * What is sent: whole requests as ASCII text, put together from parts that were made before the clock ran.
 *
 * Inputs are unique, so that neither the cache nor another request in flight answers for them: a text gets the
 * request's marker behind it ("hello 4f0k2k1000000000"). An input that is no text (a number, an array) cannot
 * be told apart that way; it goes as it is, and so does everything with `repeat`. `bytes` fills a text up with
 * x until the body has that length.
 *
 * With a marker in it the answer of a model that echoes shows whose it is. Characters beyond ASCII are written
 * as \u escapes, so a length in characters is one in bytes.
 */
import { Markers, markerLength } from "./connection.ts";

/** One body: an input, and the fields beside it. */
export interface Body {
  readonly input: unknown;
  readonly fields: Readonly<Record<string, unknown>>;
}

export interface RequestOptions {
  /** What the `host` header says. */
  readonly authority: string;
  readonly path: string;
  /** Used in turn. */
  readonly bodies: readonly Body[];
  /** Of a body; 0: as long as it is. */
  readonly bytes: number;
  readonly repeat: boolean;
  /** For each kind of caller its headers. */
  readonly headers: readonly Readonly<Record<string, string>>[];
}

interface Part {
  /** With the end of the head before it. */
  readonly front: string;
  readonly back: string;
  readonly isMarked: boolean;
}

export class Requests {
  /** Of the last one that was made; "" where it has none. */
  marker = "";
  /** Whether every input is sent once. */
  readonly isUnique: boolean;
  readonly #heads: readonly string[];
  readonly #parts: readonly Part[];
  readonly #markers = new Markers();
  #next = 0;

  constructor(options: RequestOptions) {
    const { authority, path, bodies, bytes, repeat, headers } = options;
    this.#heads = headers.map((more) => {
      const lines = Object.entries(more).map(([name, value]) => `${name}: ${value}\r\n`);
      return (
        `POST ${path} HTTP/1.1\r\nhost: ${authority}\r\n${lines.join("")}` +
        "content-type: application/json\r\ncontent-length: "
      );
    });
    this.#parts = bodies.map((body) => partOf(body, bytes, repeat));
    this.isUnique = this.#parts.every(({ isMarked }) => isMarked);
  }

  /** The next request of a kind of caller. */
  next(kind: number): string {
    const part = this.#parts[this.#next]!;
    this.#next = (this.#next + 1) % this.#parts.length;
    this.marker = part.isMarked ? this.#markers.take() : "";
    return this.#heads[kind]! + part.front + this.marker + part.back;
  }
}

function partOf({ input, fields }: Body, bytes: number, repeat: boolean): Part {
  const rest = Object.entries(fields).map(([name, value]) => `,${ascii(name)}:${ascii(value)}`);
  const end = `${rest.join("")}}`;
  const text = ascii(input);
  const isMarked = typeof input === "string" && !repeat;
  const frame = `{"input":${text}${end}`.length;
  if (typeof input !== "string")
    return { front: `${frame}\r\n\r\n{"input":${text}${end}`, back: "", isMarked };
  // A text's own closing quote comes after the fill and the marker.
  const space = isMarked && input !== "" ? " " : "";
  const added = space.length + (isMarked ? markerLength : 0);
  const fill = "x".repeat(Math.max(0, bytes - frame - added));
  const length = frame + added + fill.length;
  return {
    front: `${length}\r\n\r\n{"input":${text.slice(0, -1)}${fill}${space}`,
    back: `"${end}`,
    isMarked,
  };
}

function ascii(value: unknown): string {
  return JSON.stringify(value).replace(
    /[\u0080-\uffff]/g,
    (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

/** One value a line, or one body a line: an object with `input`. What is wrong, with its line, is thrown. */
export function parseBodies(text: string): Body[] {
  const bodies: Body[] = [];
  text.split("\n").forEach((line, at) => {
    if (line.trim() === "") return;
    let value: unknown;
    try {
      value = JSON.parse(line);
    } catch (error) {
      throw new Error(`line ${at + 1} is no JSON (${(error as Error).message})`, { cause: error });
    }
    bodies.push(bodyOf(value));
  });
  if (bodies.length === 0) throw new Error("it is empty");
  return bodies;
}

function bodyOf(value: unknown): Body {
  if (typeof value !== "object" || value === null || !("input" in value)) return { input: value, fields: {} };
  const { input, ...fields } = value;
  return { input, fields };
}
