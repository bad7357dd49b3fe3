/**
 * The list in an OpenAI reply, in the order of the inputs.
 *
 * Each element says its `index`, and servers may send them in any order. Every place must be named exactly once: with
 * one element too few, or one place named twice, somebody would get another's answer. Where no element says an index,
 * the order of the list is theirs; where some do and some do not, nobody knows.
 */
import type { Json } from "../../core/task.ts";
import { cutFields, type Fields } from "./fields.ts";

export type Placed<Part> =
  | { readonly parts: readonly Part[]; readonly flaw?: never }
  /** What is wrong, to be put after "worker's reply". */
  | { readonly parts?: never; readonly flaw: string };

/** What `take` finds in each element, by place, as many as there are; it finds nothing in what is no `noun`. */
export function byIndex<Part>(
  elements: readonly Json[],
  noun: string,
  take: (fields: Fields) => Part | undefined,
): Placed<Part> {
  const found: { readonly part: Part; readonly index: Json | undefined }[] = [];
  for (const [position, element] of elements.entries()) {
    const fields = cutFields(element);
    const part = fields && take(fields);
    if (part === undefined) return { flaw: `has no ${noun} at ${position} of its list` };
    const index = fields!.get("index");
    found.push({ part, index: index === "null" ? undefined : index });
  }
  const told = found.filter(({ index }) => index !== undefined).length;
  if (told !== 0 && told !== found.length) return { flaw: `has an index at some of its ${noun}s only` };
  const parts = new Map<number, Part>();
  for (const [position, { part, index = String(position) }] of found.entries()) {
    const at = Number(index);
    if (!Number.isInteger(at) || at < 0 || at >= found.length) {
      return { flaw: `has an index out of range at one of its ${noun}s` };
    }
    if (parts.has(at)) return { flaw: `has the index ${at} twice` };
    parts.set(at, part);
  }
  return { parts: found.map((_, at) => parts.get(at)!) };
}
