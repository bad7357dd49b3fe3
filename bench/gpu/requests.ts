/**
 * Requests of token ids for bench/gpu, each its own, and what its answer must begin with.
 *
 * The first three numbers of an answer are sums over the tokens that the GPU had (models.py):
 *
 *   Σ idᵢ·wᵢ mod 2²⁴   with the weights  i + 1,  37·i mod 997 + 1,  i² mod 991 + 1
 *
 * as float32, which is 12 bytes or 16 characters of base64: the front of the output, and the marker by which the load
 * generator knows an answer for its own. Requests are prepared but for their last two tokens, which count, so that one
 * costs two multiplications and no two are equal; processes differ in the first token.
 *
 * Inputs have one length, or those of a mix (src/cli/plan/lengths.ts), drawn once by the number of the process: each run
 * sends the same lengths, in the same order in a closed loop. There each caller takes what comes next. Were its
 * length its own, callers of short inputs would send more of them to a server that answers those first.
 */
import type { CallerKind } from "../../src/cli/bench/arrivals.ts";
import type { RequestSource } from "../../src/cli/bench/driver.ts";
import { type LengthMix, parseLengths, sampleLengths } from "../../src/cli/plan/lengths.ts";

export type Shape = "native" | "openai";

/** Every id has five digits and is a word of both vocabularies. */
const FIRST_ID = 10_000;
const IDS = 20_000;
const MODULUS = 1 << 24;

const weights = (at: number): readonly number[] => [at + 1, ((at * 37) % 997) + 1, ((at * at) % 991) + 1];

/** By their number of tokens. */
export const CLASSES = [
  { label: "short", from: 1, to: 16 },
  { label: "middle", from: 17, to: 199 },
  { label: "long", from: 200, to: Infinity },
] as const;

/** Of a process. Four of them make 256 full batches. */
const DRAWN = 4096;

/** The lengths that a process sends, in order. `tokens`: one length, or the name of a mix. */
export function lengthsOf(tokens: number | string, process: number): readonly number[] {
  if (typeof tokens === "number") return [tokens];
  return sampleLengths(mixOf(tokens), DRAWN, process + 1);
}

function mixOf(name: string): LengthMix {
  const mix = parseLengths(name);
  if (mix === undefined) throw new Error(`no mix of lengths is called ${name}`);
  return mix;
}

export interface TokenOptions {
  readonly authority: string;
  readonly path: string;
  readonly model: string;
  readonly tokens: number | string;
  readonly shape: Shape;
  /** Of this process among those that send at once. */
  readonly process: number;
  /** One kind of caller for each class of length, instead of one for all. */
  readonly byClass: boolean;
}

/** A request but for its last two tokens. */
interface Prepared {
  readonly front: string;
  /** All of them. */
  readonly tokens: number;
  /** Check sums over the tokens of the request. */
  readonly sums: readonly number[];
}

/** Requests in turn. */
interface Ring {
  readonly all: readonly Prepared[];
  next: number;
}

export class TokenRequests implements RequestSource {
  marker = "";
  readonly kinds: readonly CallerKind[];
  readonly #back: string;
  readonly #rings: readonly Ring[];
  readonly #row = new Float32Array(3);
  readonly #bytes = Buffer.from(this.#row.buffer);
  #count = 0;

  constructor({ authority, path, model, tokens, shape, process: own, byClass }: TokenOptions) {
    const format = shape === "native" ? `"encoding":"base64"` : `"encoding_format":"base64"`;
    this.#back = `],"model":"${model}",${format}}`;
    const head = `POST ${path} HTTP/1.1\r\nhost: ${authority}\r\ncontent-type: application/json\r\n`;
    const all = lengthsOf(tokens, own).map((length) => prepared(length, own, head, this.#back));
    const classes = byClass ? classesOf(all) : [{ label: "all", all }];
    this.kinds = classes.map((each) => ({ label: each.label, share: each.all.length / all.length }));
    this.#rings = classes.map((each) => ({ all: each.all, next: 0 }));
  }

  next(kind: number): string {
    const ring = this.#rings[kind]!;
    const { front, tokens, sums } = ring.all[ring.next]!;
    ring.next = (ring.next + 1) % ring.all.length;
    const last = FIRST_ID + (this.#count % IDS);
    const before = FIRST_ID + (Math.floor(this.#count / IDS) % IDS);
    this.#count++;
    const [first, second] = [weights(tokens - 2), weights(tokens - 1)];
    for (let which = 0; which < 3; which++) {
      this.#row[which] = (sums[which]! + before * first[which]! + last * second[which]!) % MODULUS;
    }
    this.marker = this.#bytes.toString("base64");
    return `${front}${before},${last}${this.#back}`;
  }
}

function classesOf(all: readonly Prepared[]): { label: string; all: readonly Prepared[] }[] {
  return CLASSES.map(({ label, from, to }) => ({
    label,
    all: all.filter(({ tokens }) => tokens >= from && tokens <= to),
  })).filter((each) => each.all.length > 0);
}

function prepared(tokens: number, process: number, head: string, back: string): Prepared {
  const ids = Array.from({ length: tokens - 2 }, (_, at) => FIRST_ID + ((at * 7919 + 13) % IDS));
  ids[0] = FIRST_ID + process;
  const sum = (which: number): number => ids.reduce((all, id, at) => all + id * weights(at)[which]!, 0);
  const open = `{"input":[${ids.join(",")},`;
  const length = open.length + "10000,10000".length + back.length;
  return {
    front: `${head}content-length: ${length}\r\n\r\n${open}`,
    tokens,
    sums: [sum(0), sum(1), sum(2)],
  };
}
