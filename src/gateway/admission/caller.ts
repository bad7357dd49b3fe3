/** Whoever is behind a request, as far as the rest of the house needs to know. */
export interface Caller {
  /** The user of the credential. Results, keys and cached outcomes are the tenant's own. */
  readonly tenant: string;
  /** Position in the configured tiers. */
  readonly tier: number;
}

export const MAX_USER = 255;

/**
 * Whether a text can name a user: 1 to 255 characters, none of them a control character, all of them whole.
 * Half of a surrogate pair becomes U+FFFD in UTF-8, and with it two users would become one.
 */
export function isUser(text: unknown): text is string {
  if (typeof text !== "string" || text.length === 0 || text.length > MAX_USER) return false;
  return !/[\u0000-\u001f\u007f-\u009f\u2028\u2029]/.test(text) && text.isWellFormed();
}
