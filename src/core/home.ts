/** Maps content-addressed data to one of 16 homes, for engines with more than one server. */

export const HOMES = 16;

/** Crockford's base 32, used for ids. */
export const ID_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";

/** FNV-1a, 32 bits: equal texts have equal homes, others spread evenly. */
export function homeOf(text: string): number {
  let hash = 0x811c9dc5;
  for (let at = 0; at < text.length; at++) hash = Math.imul(hash ^ text.charCodeAt(at), 0x01000193);
  // The low bits of FNV-1a are its weakest.
  return ((hash >>> 24) ^ (hash >>> 12)) & (HOMES - 1);
}
