/**
 * Cuts a JSON text that `JSON.parse` accepted into the texts of its parts without parsing values (`json.ts`). Rejects
 * numbers that read as Infinity (1e400) and duplicate fields.
 */
import { CLOSE_BRACE, CLOSE_BRACKET, OPEN_BRACE, OPEN_BRACKET, Scanner } from "./json.ts";

export { outputFlaw } from "./json.ts";

export type Split =
  /** Exact source text of each element, without surrounding white space. */
  | { readonly elements: readonly string[]; readonly flaw?: never }
  /** What is wrong, as a continuation of "the reply". */
  | { readonly elements?: never; readonly flaw: string };

/** Elements of a top-level array; with more than `max`, the first `max` + 1. */
export function splitArray(text: string, max = Infinity): Split {
  return elementsOf(new Scanner(text), max);
}

function elementsOf(scanner: Scanner, max = Infinity): Split {
  if (!scanner.enter(OPEN_BRACKET)) return { flaw: "is not an array" };
  // A number out of range outside the array is harmless.
  scanner.finite = true;
  const elements: string[] = [];
  while (elements.length <= max && scanner.more(CLOSE_BRACKET)) elements.push(scanner.value());
  return scanner.finite ? { elements } : { flaw: "holds a number beyond the range of a double" };
}

/** Elements of the array in field `name` of a top-level object. */
export function splitField(text: string, name: string): Split {
  const scanner = new Scanner(text);
  if (!scanner.enter(OPEN_BRACE)) return { flaw: "is not an object" };
  let found: Split | undefined;
  while (scanner.more(CLOSE_BRACE)) {
    if (scanner.key() !== name) {
      scanner.skip();
      continue;
    }
    if (found !== undefined) return { flaw: `has "${name}" twice` };
    found = elementsOf(scanner);
    if (found.flaw !== undefined) return { flaw: `has "${name}" that ${found.flaw}` };
  }
  return found ?? { flaw: `has no "${name}"` };
}

/** Source text of each field of a top-level object; undefined if it is not an object or has a duplicate key. */
export function splitFields(text: string): ReadonlyMap<string, string> | undefined {
  const scanner = new Scanner(text);
  if (!scanner.enter(OPEN_BRACE)) return undefined;
  const fields = new Map<string, string>();
  while (scanner.more(CLOSE_BRACE)) {
    const name = scanner.key();
    if (fields.has(name)) return undefined;
    fields.set(name, scanner.value());
  }
  return fields;
}
