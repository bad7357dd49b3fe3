/**
 * Apportions a call's tokens to its inputs, in whole tokens by largest remainder: the parts sum to the total, and each
 * is within one token of its exact share. Ties go to the earlier input.
 */
import type { Json } from "../../core/task.ts";
import { cutFields } from "./fields.ts";

/** Equal parts if no weight is above 0; empty if the worker did not count. */
export function apportion(total: number | undefined, weights: readonly number[]): number[] {
  if (total === undefined || weights.length === 0) return [];
  const sum = weights.reduce((all, weight) => all + weight, 0);
  const exact = weights.map((weight) => (sum > 0 ? (total * weight) / sum : total / weights.length));
  const parts = exact.map(Math.floor);
  let left = total - parts.reduce((all, part) => all + part, 0);
  const order = exact
    .map((_, at) => at)
    .sort((a, b) => exact[b]! - parts[b]! - (exact[a]! - parts[a]!) || a - b);
  for (const at of order) if (left-- > 0) parts[at]!++;
  return parts;
}

/** A count in a `usage` object; undefined if missing, or too large to divide exactly. */
export function tokenCount(usage: Json | undefined, name: string): number | undefined {
  const text = cutFields(usage)?.get(name);
  return text !== undefined && /^\d{1,12}$/.test(text) ? Number(text) : undefined;
}

export function weightOf(input: Json): number {
  if (!input.startsWith("[")) return Math.max(1, input.length - 2);
  let commas = 1;
  for (let at = input.indexOf(","); at >= 0; at = input.indexOf(",", at + 1)) commas++;
  return commas;
}
