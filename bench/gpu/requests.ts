/**
 * Requests of token ids for bench/gpu, each its own, and what its answer must begin with.
 *
 * The first three numbers of an answer are sums over the tokens that the GPU had (models.py):
 *
 *   Σ idᵢ·wᵢ mod 2²⁴   with the weights  i + 1,  37·i mod 997 + 1,  i² mod 991 + 1
 *
 * as float32, which is 12 bytes or 16 characters of base64: the front of the output, and the marker by which the load
 * generator knows an answer for its own. All requests of a process share their tokens but the last two, which count,
 * so that a request costs two multiplications and no two are equal; processes differ in the first two.
 */
import type { Requests } from "../../src/cli/bench/requests.ts";

export type Shape = "native" | "openai";

/** Every id has five digits and is a word of both vocabularies. */
const FIRST_ID = 10_000;
const IDS = 20_000;
const MODULUS = 1 << 24;

const weights = (at: number): readonly number[] => [at + 1, ((at * 37) % 997) + 1, ((at * at) % 991) + 1];

export interface TokenOptions {
  readonly authority: string;
  readonly path: string;
  readonly model: string;
  readonly tokens: number;
  readonly shape: Shape;
  /** Of this process among those that send at once. */
  readonly process: number;
}

export class TokenRequests implements Pick<Requests, "marker" | "isUnique" | "next"> {
  marker = "";
  readonly isUnique = true;
  readonly #front: string;
  readonly #back: string;
  readonly #at: number;
  readonly #sums: readonly number[];
  readonly #row = new Float32Array(3);
  readonly #bytes = Buffer.from(this.#row.buffer);
  #count = 0;

  constructor({ authority, path, model, tokens, shape, process: own }: TokenOptions) {
    const ids = Array.from({ length: tokens - 2 }, (_, at) => FIRST_ID + ((at * 7919 + 13) % IDS));
    ids[0] = FIRST_ID + own;
    const sum = (which: number): number => ids.reduce((all, id, at) => all + id * weights(at)[which]!, 0);
    this.#at = tokens - 2;
    this.#sums = [sum(0), sum(1), sum(2)];
    const format = shape === "native" ? `"encoding":"base64"` : `"encoding_format":"base64"`;
    this.#back = `],"model":"${model}",${format}}`;
    const open = `{"input":[${ids.join(",")},`;
    const length = open.length + "10000,10000".length + this.#back.length;
    this.#front =
      `POST ${path} HTTP/1.1\r\nhost: ${authority}\r\ncontent-type: application/json\r\n` +
      `content-length: ${length}\r\n\r\n${open}`;
  }

  next(): string {
    const last = FIRST_ID + (this.#count % IDS);
    const before = FIRST_ID + (Math.floor(this.#count / IDS) % IDS);
    this.#count++;
    for (let which = 0; which < 3; which++) {
      const added = before * weights(this.#at)[which]! + last * weights(this.#at + 1)[which]!;
      this.#row[which] = (this.#sums[which]! + added) % MODULUS;
    }
    this.marker = this.#bytes.toString("base64");
    return `${this.#front}${before},${last}${this.#back}`;
  }
}
