/**
 * The list in an OpenAI reply, in the order of the inputs.
 *
 * Each element says its `index`, and servers may send them in any order. Every place must be named exactly once: with
 * one element too few, or one place named twice, somebody would get another's answer. Where no element says an index,
 * the order of the list is theirs; where some do and some do not, nobody knows.
 */
import type { Json } from "../core/task.ts";
import { cutFields, type Fields } from "./fields.ts";

/** The fields of each element, by place; or what is wrong, to be put after "worker's reply". */
export function byIndex(
  elements: readonly Json[],
  count: number,
  list: string,
): { readonly placed: readonly Fields[]; readonly flaw?: never } | { readonly flaw: string } {
  if (elements.length !== count) return { flaw: `has ${elements.length} in "${list}", not ${count}` };
  const placed: Fields[] = [];
  const all = elements.map(cutFields);
  const told = all.filter((fields) => (fields?.get("index") ?? "null") !== "null").length;
  if (told !== 0 && told !== count) return { flaw: `has an index at some of "${list}" and not at others` };
  for (const [position, fields] of all.entries()) {
    if (fields === undefined) return { flaw: `has no object at ${position} of "${list}"` };
    const at = told === 0 ? position : Number(fields.get("index"));
    if (!Number.isInteger(at) || at < 0 || at >= count) {
      return { flaw: `has an index out of range in "${list}"` };
    }
    if (placed[at] !== undefined) return { flaw: `has the index ${at} twice in "${list}"` };
    placed[at] = fields;
  }
  return { placed };
}
