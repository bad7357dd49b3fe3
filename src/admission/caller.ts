/** Whoever is behind a request, as far as the rest of the house needs to know. */
export interface Caller {
  /** The user of the credential. Results, keys and cached outcomes are the tenant's own. */
  readonly tenant: string;
  /** Position in the configured tiers. */
  readonly tier: number;
}
