/**
 * How the processes of `ferry serve --processes` change their config together: all of them, or none.
 *
 *   parent ── change ─► prepares, nothing changes yet ── prepared ─► parent ── commit ─► changes ── changed ─► parent
 *                                                          or why not     └── abandon ─► ends what it prepared
 *
 * The parent decides when all have said that they can. Each gets `change` and its verdict in this order, whenever it reads
 * them: a process that sleeps or hangs in between ends with the same config as the others as soon as it wakes up.
 *
 * A process that prepares says so each `SIGN_EVERY_MS`, since it may have to start workers, which takes minutes. One
 * that says nothing for SILENT_MS is given up: nothing is changed. Nothing more is sent to it before it
 * has answered what it was told before, so that nothing piles up in front of one that never wakes.
 */
import type { Alarm, Clock } from "../clock.ts";
import type { Config } from "../config/config.ts";
import type { Change } from "../reload.ts";
import type { Life, Word } from "./processes.ts";

/** Between two signs of life while a process prepares. */
export const SIGN_EVERY_MS = 200;

/** The parent's end, one for each process. */
/** A process that says nothing for so long during a reload hangs: nothing is changed. */
const SILENT_MS = 5000;

export class Follower {
  readonly #life: Life;
  /** As people know it: `process 2`. */
  readonly #name: string;
  readonly #clock: Clock;
  #round = 0;
  /** What it has to say next. */
  #owes: "prepared" | "changed" | undefined;
  #why: string | undefined;
  /** It was told to prepare, and not yet what becomes of it. */
  #undecided = false;
  #gone = false;
  #heardAt = 0;
  #look: (() => void) | undefined;

  constructor(number: number, life: Life, clock: Clock) {
    this.#name = `process ${number}`;
    this.#life = life;
    this.#clock = clock;
  }

  /** Whatever it says. */
  hear(word: Word): void {
    this.#heardAt = this.#clock.now();
    if ((word.is === "prepared" || word.is === "changed") && word.round === this.#round) {
      if (word.is === this.#owes) this.#owes = undefined;
      if (word.is === "prepared") this.#why = word.why;
    }
    this.#look?.();
  }

  /** It has ended: the next one begins with what is decided. */
  gone(): void {
    this.#gone = true;
    this.#owes = undefined;
    this.#look?.();
  }

  /** Why it cannot; undefined: it can, or is no more. */
  async prepare(config: Config): Promise<string | undefined> {
    if (!(await this.#answered())) return this.#silent();
    if (this.#gone) return undefined;
    this.#round++;
    this.#owes = "prepared";
    this.#why = undefined;
    this.#undecided = true;
    this.#life.send({ is: "change", round: this.#round, config });
    return (await this.#answered()) ? this.#why : this.#silent();
  }

  /** False: it has not said that it did; it will when it wakes up. */
  async commit(): Promise<boolean> {
    if (this.#gone) return true;
    this.#owes = "changed";
    this.#undecided = false;
    this.#life.send({ is: "commit", round: this.#round });
    return this.#answered();
  }

  /** Does nothing where it was not told to prepare, or could not. */
  abandon(): void {
    const holds = this.#undecided && !this.#gone && this.#why === undefined;
    this.#undecided = false;
    if (holds) this.#life.send({ is: "abandon", round: this.#round });
  }

  #silent(): string {
    const { pid } = this.#life;
    const then = `it goes on with the others when it wakes up; kill -9 ${pid} has it begin anew`;
    return `${this.#name} did not answer for ${SILENT_MS} ms: ${then}`;
  }

  /** Resolves when it owes no answer; false, when it was silent for so long. */
  async #answered(): Promise<boolean> {
    const clock = this.#clock;
    this.#heardAt = clock.now();
    while (this.#owes !== undefined) {
      const silentAt = this.#heardAt + SILENT_MS;
      if (clock.now() >= silentAt) return false;
      let alarm: Alarm | undefined;
      await new Promise<void>((resolve) => {
        this.#look = resolve;
        alarm = clock.at(silentAt, resolve);
      });
      this.#look = undefined;
      alarm?.cancel();
    }
    return true;
  }
}

type ChangeVerdict = "commit" | "abandon";

/** What a child prepares a change with. */
export interface Changeable {
  prepare?(next: Config): Promise<Change>;
}

/**
 * The child's end: prepares what the parent asks for and waits for the verdict, one round at a time in order. Each `change`
 * is answered with `prepared`, also one that the parent has given up, so that the parent knows that the child is awake.
 */
export class ChildChanges {
  readonly #parent: { tell(word: Word): Promise<void> };
  readonly #clock: Clock;
  /** Of the rounds that are not over. */
  readonly #verdicts = new Map<number, (verdict: ChangeVerdict) => void>();
  #last: Promise<void> = Promise.resolve();
  #open = 0;
  #sign: Alarm | undefined;

  constructor(parent: { tell(word: Word): Promise<void> }, clock: Clock) {
    this.#parent = parent;
    this.#clock = clock;
  }

  begin(round: number, config: Config, ferry: Changeable): void {
    const { promise, resolve } = Promise.withResolvers<ChangeVerdict>();
    this.#verdicts.set(round, resolve);
    if (this.#open++ === 0) this.#signs();
    this.#last = this.#last.then(() => this.#run(round, ferry.prepare!(config), promise));
  }

  decide(round: number, verdict: ChangeVerdict): void {
    this.#verdicts.get(round)?.(verdict);
  }

  async #run(round: number, preparing: Promise<Change>, verdict: Promise<ChangeVerdict>): Promise<void> {
    let prepared: Change | undefined;
    let why: string | undefined;
    try {
      prepared = await preparing;
    } catch (error) {
      why = error instanceof Error ? error.message : String(error);
    }
    if (--this.#open === 0) this.#sign?.cancel();
    void this.#parent.tell({ is: "prepared", round, ...(why !== undefined && { why }) });
    if (prepared !== undefined) await this.#end(round, prepared, await verdict);
    this.#verdicts.delete(round);
  }

  async #end(round: number, prepared: Change, verdict: ChangeVerdict): Promise<void> {
    if (verdict === "abandon") return prepared.abandon();
    // One that is being stopped changes no more; the next one in its place begins with the new config.
    await prepared.commit().catch(() => {});
    void this.#parent.tell({ is: "changed", round });
  }

  #signs(): void {
    this.#sign = this.#clock.at(this.#clock.now() + SIGN_EVERY_MS, () => {
      void this.#parent.tell({ is: "preparing" });
      this.#signs();
    });
  }
}
