/**
 * The disk of an embedded Ferry: a journal in memory, of which a crash leaves what was flushed, and by chance some of
 * what was on its way. `engine/journal.ts` is the real one; `test/e2e/crash.test.ts` kills that with kill -9.
 */
import type { Journal, SavedRecord } from "../../src/engine/journal.ts";
import type { Host } from "./host.ts";
import type { Dice } from "./plan.ts";

type Change = (records: Map<string, SavedRecord>) => void;

export class Disk {
  readonly #dice: Dice;
  readonly #records = new Map<string, SavedRecord>();

  constructor(dice: Dice) {
    this.#dice = dice;
  }

  get found(): SavedRecord[] {
    return [...this.#records.values()];
  }

  /** Whether this task is on it without its end. */
  undecided(id: string): boolean {
    const saved = this.#records.get(id);
    return saved !== undefined && !saved.state.includes('"outcome"');
  }

  /** For one start of a process. Changes are written in groups: what is said meanwhile goes with the next. */
  open(host: Host): Journal {
    let open: Change[] = [];
    let writing: Change[] = [];
    let waiting: (() => void)[] = [];
    let busy = false;
    const write = (): void => {
      busy = true;
      writing = open;
      open = [];
      const told = waiting;
      waiting = [];
      host.deliver(0.2 + this.#dice.exponential(1), () => {
        for (const change of writing) change(this.#records);
        writing = [];
        for (const tell of told) tell();
        if (open.length > 0 || waiting.length > 0) write();
        else busy = false;
      });
    };
    const say = (change: Change): void => {
      open.push(change);
      if (!busy) write();
    };
    host.onDeath.add(() => {
      // A group is written whole or not at all.
      if (this.#dice.chance(0.5)) for (const change of writing) change(this.#records);
    });
    return {
      save: (id, task, state) =>
        say((records) => {
          records.delete(id);
          records.set(id, { id, task, state });
        }),
      update: (id, state) =>
        say((records) => {
          const saved = records.get(id);
          if (saved !== undefined) records.set(id, { ...saved, state });
        }),
      running: () => {},
      forget: (id) => say((records) => void records.delete(id)),
      flushed: () =>
        new Promise((resolve) => {
          waiting.push(resolve);
          if (!busy) write();
        }),
      pendingBytes: 0,
      trouble: undefined,
      close: async () => {
        for (const change of [...writing, ...open]) change(this.#records);
        writing = open = [];
      },
    };
  }
}
