/**
 * What share of the time in which a model's workers were ours they spent on batches, over the last ten seconds. Snapshots of
 * two sums, taken when a batch starts or ends; between two of them both grow evenly.
 */
const WINDOW_MS = 10_000;
const STEP_MS = 500;

export class Usage {
  /** Oldest first, at most as many as the window has steps. */
  readonly #snapshots: { at: number; busyMs: number; heldMs: number }[] = [];
  #heldMs = 0;
  #heldSince: number | undefined;

  /** Since the last call `held` workers were ours. */
  count(held: number, now: number): void {
    this.#heldMs += held * (now - (this.#heldSince ?? now));
    this.#heldSince = now;
  }

  /** `busyMs`: all that was ever spent on batches; asked for only when it is time for a snapshot. */
  note(busyMs: (now: number) => number, now: number): void {
    const last = this.#snapshots.at(-1);
    if (last !== undefined && now - last.at < STEP_MS) return;
    this.#snapshots.push({ at: now, busyMs: busyMs(now), heldMs: this.#heldMs });
    if (this.#snapshots.length > WINDOW_MS / STEP_MS) this.#snapshots.shift();
  }

  /** Undefined while there is too little to tell. */
  share(busyMs: number, now: number): number | undefined {
    const since = this.#snapshots.find(({ at }) => at >= now - WINDOW_MS);
    if (since === undefined || this.#heldMs - since.heldMs < 1) return undefined;
    return Math.min(1, (busyMs - since.busyMs) / (this.#heldMs - since.heldMs));
  }
}
