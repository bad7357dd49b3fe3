/**
 * Where a task lives when there is more than one place: its home, a number from 0 to 15.
 *
 * The home stands in the task's id (its last digit), so that whoever holds an id knows where to ask. Tasks
 * whose work may be shared get their home from their content: identical tasks meet at the same place, and
 * joining them there is one atomic act. Everything else is spread by chance.
 */

export const HOMES = 16;

/** Crockford's base 32, in which ids are written. */
export const ID_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";

/** The same for equal texts, and evenly spread over different ones (FNV-1a, 32 bits). */
export function homeOf(text: string): number {
  let hash = 0x811c9dc5;
  for (let at = 0; at < text.length; at++) hash = Math.imul(hash ^ text.charCodeAt(at), 0x01000193);
  // The low bits of FNV-1a are its weakest.
  return ((hash >>> 24) ^ (hash >>> 12)) & (HOMES - 1);
}

/** The home that an id names. */
export function homeIn(id: string): number {
  const digit = ID_DIGITS.indexOf(id.at(-1) ?? "0");
  return (digit < 0 ? id.charCodeAt(id.length - 1) : digit) & (HOMES - 1);
}
