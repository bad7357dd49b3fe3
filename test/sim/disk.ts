/**
 * The disk of an embedded Ferry: a journal in memory, of which a crash leaves what was flushed, and by chance some of
 * what was on its way. It may be full for a while: then nothing is written, and what was said is written afterwards. `engine/memory/journal.ts` is the real one; `test/e2e/crash.test.ts` kills that with kill -9.
 */
import { type Journal, JournalTrouble, type SavedRecord } from "../../src/engine/memory/journal.ts";
import type { Host } from "./host.ts";
import type { Dice } from "./plan.ts";

type Records = Map<string, SavedRecord>;
interface Change {
  readonly id: string;
  readonly apply: (records: Records) => void;
}
const FULL = new JournalTrouble("no space left", false);
/** Of all groups, where the disk may be full. */
const FULL_SHARE = 0.02;

export class Disk {
  readonly #dice: Dice;
  /** When it is full; left out: never. */
  readonly #full: Dice | undefined;
  readonly #records = new Map<string, SavedRecord>();

  constructor(dice: Dice, full?: Dice) {
    this.#dice = dice;
    this.#full = full;
  }

  get found(): SavedRecord[] {
    return [...this.#records.values()];
  }

  /** Whether this task is on it without its end. */
  undecided(id: string): boolean {
    const saved = this.#records.get(id);
    return saved !== undefined && !saved.state.includes('"outcome"');
  }

  has(id: string): boolean {
    return this.#records.has(id);
  }

  /** For one start of a process. Changes are written in groups: what is said meanwhile goes with the next. */
  open(host: Host): Journal {
    let open: Change[] = [];
    let writing: Change[] = [];
    /** Who waits for `open`, and for `writing`. */
    let waiting: PromiseWithResolvers<void>[] = [];
    let told: PromiseWithResolvers<void>[] = [];
    let busy = false;
    let trouble: JournalTrouble | undefined;
    const full = this.#full;
    const write = (): void => {
      busy = true;
      writing = open;
      open = [];
      told = waiting;
      waiting = [];
      host.deliver(0.2 + this.#dice.exponential(1), () => {
        if (full?.chance(FULL_SHARE) === true) {
          trouble = FULL;
          open = [...writing, ...open];
          writing = [];
          for (const { reject } of [...told, ...waiting]) reject(FULL);
          waiting = [];
          host.deliver(full.between(20, 1500), write);
          return;
        }
        trouble = undefined;
        for (const { apply } of writing) apply(this.#records);
        writing = [];
        for (const { resolve } of told) resolve();
        if (open.length > 0 || waiting.length > 0) write();
        else busy = false;
      });
    };
    const say = (id: string, apply: Change["apply"]): void => {
      open.push({ id, apply });
      if (!busy) write();
    };
    host.onDeath.add(() => {
      // A group is written whole or not at all.
      if (this.#dice.chance(0.5)) for (const { apply } of writing) apply(this.#records);
    });
    return {
      save: (id, task, state) =>
        say(id, (records) => {
          records.delete(id);
          records.set(id, { id, task, state });
        }),
      update: (id, state) =>
        say(id, (records) => {
          const saved = records.get(id);
          if (saved !== undefined) records.set(id, { ...saved, state });
        }),
      running: () => {},
      forget: (id) => {
        if (trouble !== undefined) open = open.filter((change) => change.id !== id);
        say(id, (records) => void records.delete(id));
      },
      flushed: () => {
        if (trouble !== undefined) return Promise.reject(trouble);
        const flushed = Promise.withResolvers<void>();
        if (open.length === 0 && busy) told.push(flushed);
        else waiting.push(flushed);
        if (!busy) write();
        return flushed.promise;
      },
      pendingBytes: 0,
      get trouble() {
        return trouble;
      },
      close: async () => {
        if (trouble === undefined) for (const { apply } of [...writing, ...open]) apply(this.#records);
        writing = open = [];
      },
    };
  }
}
