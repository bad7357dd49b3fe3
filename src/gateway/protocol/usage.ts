/**
 * Tokens of a whole batch, shared out to its inputs.
 *
 * A worker counts tokens for its call as a whole. Each input gets its part by weight, in whole tokens, by largest
 * remainder: the parts sum exactly to the whole, and no part is more than one token from its exact share. Ties go to
 * whoever comes first.
 */
import type { Json } from "../../core/task.ts";
import { cutFields } from "./fields.ts";

/** Whole numbers that sum to `total`; equal parts when no weight is above 0. */
export function apportion(total: number, weights: readonly number[]): number[] {
  const sum = weights.reduce((all, weight) => all + weight, 0);
  if (!(sum > 0))
    return weights.length === 0
      ? []
      : apportion(
          total,
          weights.map(() => 1),
        );
  const exact = weights.map((weight) => (total * weight) / sum);
  const parts = exact.map(Math.floor);
  let left = total - parts.reduce((all, part) => all + part, 0);
  const order = exact
    .map((_, at) => at)
    .sort((a, b) => exact[b]! - parts[b]! - (exact[a]! - parts[a]!) || a - b);
  for (const at of order) {
    if (left <= 0) break;
    parts[at]!++;
    left--;
  }
  return parts;
}

/** Of a `usage` object; undefined where it does not say, or nothing that can be shared out exactly. */
export function tokenCount(usage: Json | undefined, name: string): number | undefined {
  const text = usage === undefined ? undefined : cutFields(usage)?.get(name);
  return text !== undefined && /^\d{1,12}$/.test(text) ? Number(text) : undefined;
}

/** How much of a batch's tokens an input is likely to have: a token array says it, a text by its length. */
export function weightOf(input: Json): number {
  if (!input.startsWith("[")) return Math.max(1, input.length - 2);
  let commas = 1;
  for (let at = input.indexOf(","); at >= 0; at = input.indexOf(",", at + 1)) commas++;
  return commas;
}
