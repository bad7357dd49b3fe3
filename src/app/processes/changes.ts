/**
 * Two-phase config change of `ferry serve --processes`: all processes, or none.
 *
 *   parent ── change ─► prepares, nothing changes yet ── prepared ─► parent ── commit ─► changes ── changed ─► parent
 *                                                          or why not     └── abandon ─► ends what it prepared
 *
 * The parent decides once all have answered. Each gets `change` and its verdict in order, whenever it reads them, so a
 * suspended process ends up with the same config once it resumes.
 *
 * A preparing process reports every `SIGN_EVERY_MS`, since starting workers may take minutes; after SILENT_MS without a
 * report the change is abandoned. A process gets nothing more before it has answered, so that nothing piles up for one
 * that hangs.
 */
import type { Alarm, Clock } from "../clock.ts";
import type { Config } from "../config/config.ts";
import type { Change } from "../reload.ts";
import type { Life, Word } from "./processes.ts";

/** Interval of progress reports while a process prepares. */
export const SIGN_EVERY_MS = 200;

/** A process silent for so long during a reload hangs: the change is abandoned. */
const SILENT_MS = 5000;

/** The parent's end, one per process. */
export class Follower {
  readonly #life: Life;
  readonly #name: string;
  readonly #clock: Clock;
  #round = 0;
  #owes: "prepared" | "changed" | undefined;
  #why: string | undefined;
  /** Told to prepare, without a verdict yet. */
  #undecided = false;
  #gone = false;
  #heardAt = 0;
  #look: (() => void) | undefined;

  constructor(name: string, life: Life, clock: Clock) {
    this.#name = `process ${name}`;
    this.#life = life;
    this.#clock = clock;
  }

  hear(word: Word): void {
    this.#heardAt = this.#clock.now();
    if ((word.is === "prepared" || word.is === "changed") && word.round === this.#round) {
      if (word.is === this.#owes) this.#owes = undefined;
      if (word.is === "prepared") this.#why = word.why;
    }
    this.#look?.();
  }

  /** It has exited; its successor starts with the decided config. */
  gone(): void {
    this.#gone = true;
    this.#owes = undefined;
    this.#look?.();
  }

  /** Why it cannot; undefined: it can, or has exited. */
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

  /** False: not confirmed; it will be when the process resumes. */
  async commit(): Promise<boolean> {
    if (this.#gone) return true;
    this.#owes = "changed";
    this.#undecided = false;
    this.#life.send({ is: "commit", round: this.#round });
    return this.#answered();
  }

  /** No effect unless it was told to prepare and could. */
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

  /** Resolves when it owes no answer; false after SILENT_MS. */
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

export interface Changeable {
  prepare?(next: Config): Promise<Change>;
}

/**
 * The child's end: prepares and waits for the verdict, one round at a time in order. Every `change` is answered with
 * `prepared`, also an abandoned one, so that the parent knows the child is responsive.
 */
export class ChildChanges {
  readonly #parent: { tell(word: Word): Promise<void> };
  readonly #clock: Clock;
  /** Of unfinished rounds. */
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
    // A stopping process changes no more; its successor starts with the new config.
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
