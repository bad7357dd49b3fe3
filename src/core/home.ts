/**
 * Where data that is found by its content lives when there is more than one place: its home, a number from 0 to 15.
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
