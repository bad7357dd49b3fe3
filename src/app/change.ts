/**
 * From one config to the next in two steps: everything that can fail, and then, when whoever asked for it says so, all of it
 * at once; or nothing, and what was started for it is ended.
 */
import type { Prepared } from "./crews.ts";

export interface Change {
  /** Rejects, and changes nothing, when Ferry is being stopped meanwhile. */
  commit(): Promise<void>;
  /** Instead of it. Does nothing where it was committed, or abandoned before. */
  abandon(): Promise<void>;
}

/** `commit` is told what was prepared; nothing in it fails. Rejects with one line, and then nothing was changed. */
export async function prepareChange(
  steps: readonly (() => Promise<Prepared>)[],
  stopping: () => boolean,
  commit: (prepared: readonly Prepared[]) => void,
): Promise<Change> {
  const prepared: Prepared[] = [];
  let decided = false;
  const abandon = async (): Promise<void> => {
    if (decided) return;
    decided = true;
    await Promise.all(prepared.map((each) => each.abandon()));
  };
  const checkRuns = (): void => {
    if (stopping()) throw new Error("Ferry is being stopped");
  };
  const orAbandon = async (act: () => Promise<void>): Promise<void> => {
    try {
      await act();
      checkRuns();
    } catch (error) {
      await abandon();
      throw error;
    }
  };
  await orAbandon(async () => {
    for (const step of steps) prepared.push(await step());
  });
  return {
    abandon,
    commit: async () => {
      await orAbandon(async () => checkRuns());
      if (decided) return;
      decided = true;
      commit(prepared);
    },
  };
}
