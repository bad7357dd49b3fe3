/**
 * Why something failed, twice: `message` may quote the worker, which may quote an input, and is for the dead
 * letter and the caller; `brief`, where the two differ, is ours alone and is for the log and for everybody's eyes.
 */
export interface Said {
  readonly message: string;
  readonly brief?: string;
}

/** What may be logged of it. */
export function brief(said: Said): string {
  return said.brief ?? said.message;
}

/** How many were made, of a task that is given up. */
export function attempts(made: number): string {
  return made === 1 ? "the only attempt" : `all ${made} attempts`;
}
