/**
 * A task's weight in its batch: estimated tokens, and exact bytes (UTF-8 of the input's JSON text). The token estimate
 * needs no tokenizer: one pass, no parsing, no allocation; at least 1.
 *
 *   an array of integers    its elements: they are tokens already
 *   a row of tensors        its length, where it has one: the dimension along which it is padded (`tensor.ts`)
 *   a string                Σ over characters, rounded up: 1/4 below U+0370 (Latin) and for general punctuation, 1 for
 *                           any other (CJK, kana, hangul, emoji, Cyrillic …); an escape counts as its character
 *   anything else           the same sum over its JSON text, quotes and brackets included
 *
 * English prose has about four characters per token. Code, numbers and rare words are underestimated, scripts that a
 * tokenizer knows well (Cyrillic) overestimated: scale the budget by that factor.
 */
import type { Json } from "./task.ts";
import { tensorRowLength } from "./tensor.ts";

const [TAB, NEWLINE, RETURN, SPACE] = [0x09, 0x0a, 0x0d, 0x20];
const [QUOTE, COMMA, MINUS, BACKSLASH, OPEN, CLOSE] = [0x22, 0x2c, 0x2d, 0x5c, 0x5b, 0x5d];
const [ZERO, NINE, SMALL_U] = [0x30, 0x39, 0x75];
const PER_TOKEN = 4;
const NOT_LATIN = 0x370;
const [PUNCTUATION, PUNCTUATION_END] = [0x2000, 0x206f];
const [TRAIL, TRAIL_END] = [0xdc00, 0xdfff]; // low surrogate: its pair was counted already

export function estimateTokens(input: Json): number {
  const integers = countIntegers(input);
  if (integers >= 0) return Math.max(1, integers);
  const length = tensorRowLength(input);
  if (length >= 0) return Math.max(1, length);
  const text = input.charCodeAt(0) === QUOTE;
  const quarters = text ? quartersOf(input, 1, input.length - 1) : quartersOf(input, 0, input.length);
  return Math.max(1, Math.ceil(quarters / PER_TOKEN));
}

export function inputBytes(input: Json): number {
  return Buffer.byteLength(input);
}

/** -1 if it is something else. */
function countIntegers(input: Json): number {
  if (input.charCodeAt(0) !== OPEN) return -1;
  let commas = 0;
  let empty = true;
  for (let at = 1; at < input.length; at++) {
    const code = input.charCodeAt(at);
    if ((code >= ZERO && code <= NINE) || code === MINUS) empty = false;
    else if (code === COMMA) commas++;
    else if (code === CLOSE) return empty ? 0 : commas + 1;
    else if (code !== SPACE && code !== TAB && code !== NEWLINE && code !== RETURN) return -1;
  }
  return -1;
}

function quartersOf(input: Json, from: number, end: number): number {
  let quarters = 0;
  for (let at = from; at < end; at++) {
    let code = input.charCodeAt(at);
    if (code === BACKSLASH) {
      if (input.charCodeAt(++at) === SMALL_U) {
        code = Number.parseInt(input.slice(at + 1, at + 5), 16);
        at += 4;
      }
    }
    if (code < NOT_LATIN || (code >= PUNCTUATION && code <= PUNCTUATION_END)) quarters += 1;
    else if (code < TRAIL || code > TRAIL_END) quarters += PER_TOKEN;
  }
  return quarters;
}
