/**
 * Builds whole requests as ASCII text from parts prepared before the clock starts. Text inputs get the request's marker
 * appended ("hello 4f0k2k1000000000"), so neither the cache nor a request in flight answers for them, and an echoing
 * model shows whose reply it is. Other inputs (a number, an array) and everything with `repeat` are sent unchanged.
 * `bytes` pads a text with x to that body length. Non-ASCII characters are written as \u escapes, so length in
 * characters is length in bytes.
 */
import { Markers, markerLength } from "./connection.ts";

export interface Body {
  readonly input: unknown;
  readonly fields: Readonly<Record<string, unknown>>;
}

export interface RequestOptions {
  readonly authority: string;
  readonly path: string;
  /** Used in rotation. */
  readonly bodies: readonly Body[];
  /** Body length; 0: unpadded. */
  readonly bytes: number;
  readonly repeat: boolean;
  readonly headers: readonly Readonly<Record<string, string>>[];
}

interface Part {
  readonly front: string;
  readonly back: string;
  readonly isMarked: boolean;
}

export class Requests {
  /** Marker of the last request; "" where it has none. */
  marker = "";
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
  // A text's closing quote comes after the padding and the marker.
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

/** One value a line, or one body a line: an object with `input`. Errors are thrown with their line. */
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
