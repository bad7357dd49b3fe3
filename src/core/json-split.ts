/**
 * Cutting a JSON text that `JSON.parse` has accepted into the texts of its parts, without parsing a value (`json.ts`). On the way
 * numbers that read as Infinity (1e400) and a field that is there twice are refused.
 */
import { CLOSE_BRACE, CLOSE_BRACKET, OPEN_BRACE, OPEN_BRACKET, Scanner } from "./json.ts";

export { outputFlaw } from "./json.ts";

export type Split =
  /** The exact source text of each element, without the white space around it. */
  | { readonly elements: readonly string[]; readonly flaw?: never }
  /** What is wrong, to be put after "the reply". */
  | { readonly elements?: never; readonly flaw: string };

/** The elements of the array that `text` is; where it has more than `max`, the first `max` and one more. */
export function splitArray(text: string, max = Infinity): Split {
  return elementsOf(new Scanner(text), max);
}

function elementsOf(scanner: Scanner, max = Infinity): Split {
  if (!scanner.enter(OPEN_BRACKET)) return { flaw: "is not an array" };
  // A number out of range beside the array harms nobody.
  scanner.finite = true;
  const elements: string[] = [];
  while (elements.length <= max && scanner.more(CLOSE_BRACKET)) elements.push(scanner.value());
  return scanner.finite ? { elements } : { flaw: "holds a number beyond the range of a double" };
}

/** The elements of the array under `name` in the object that `text` is. */
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

/** By name, the text of each field's value in the object that `text` is; undefined where it is none, or has one twice. */
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
