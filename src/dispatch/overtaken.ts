/**
 * Whoever is overtaken for a good reason is not overtaken for ever: every tenth time it goes first.
 */
import type { QueueView } from "../engine/engine.ts";

const PATIENCE = 9;

export class Overtaken {
  #times = 0;

  /** It is the turn of whoever was overtaken. */
  get due(): boolean {
    return this.#times >= PATIENCE;
  }

  again(): void {
    this.#times++;
  }

  served(): void {
    this.#times = 0;
  }
}

/**
 * The better tier goes first. Tasks that cannot ride with it because their parameters are others would
 * never go: so every tenth time that the longest-waiting was passed over, it goes instead.
 */
export function inTurn<Choice extends { readonly queue: QueueView }>(
  sendable: readonly Choice[],
  overtaken: Overtaken,
): readonly Choice[] {
  if (sendable.length < 2) return sendable;
  const first = sendable[0]!;
  const oldest = sendable.reduce((one, other) => (other.queue.oldestAt < one.queue.oldestAt ? other : one));
  if (oldest.queue.tier === first.queue.tier) return sendable;
  if (!overtaken.due) {
    overtaken.again();
    return sendable;
  }
  overtaken.served();
  return [oldest, ...sendable.filter((choice) => choice !== oldest)];
}
