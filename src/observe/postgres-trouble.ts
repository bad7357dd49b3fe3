/**
 * A trouble with PostgreSQL, in words that may be logged; and what may be shown of its URL. Apart from
 * `postgres-link.ts`, so that whoever only hears of a trouble does not load PostgreSQL's client.
 */
export class PostgresTrouble extends Error {
  /** What PostgreSQL answered, as SQLSTATE; "" when it did not answer. */
  readonly state: string;

  constructor(message: string, state = "") {
    super(message);
    this.state = state;
  }

  /** The values themselves are at fault: they will not be taken later either. */
  get ofTheData(): boolean {
    return this.state.startsWith("22") || this.state.startsWith("23");
  }
}

/** HOST:PORT/DATABASE: what may be shown of a URL. */
export function placeOf(url: string): string {
  const { host, pathname } = new URL(url);
  return host + pathname;
}
