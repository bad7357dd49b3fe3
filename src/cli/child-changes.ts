/**
 * The other end of `app/processes/changes.ts`: a process prepares what its parent tells it to, and waits for the verdict.
 *
 * One round at a time, in the order in which they came; each `change` is answered with `prepared`, also one that the
 * parent has given up meanwhile, so that the parent knows that it is awake.
 */
import type { Change } from "../app/reload.ts";
import type { Alarm, Clock } from "../app/clock.ts";
import type { Config } from "../app/config/config.ts";
import { SIGN_EVERY_MS } from "../app/processes/changes.ts";
import type { Word } from "../app/processes/processes.ts";
import type { Served } from "./serve.ts";

type Verdict = "commit" | "abandon";

export class ChildChanges {
  readonly #parent: { tell(word: Word): Promise<void> };
  readonly #clock: Clock;
  /** Of the rounds that are not over. */
  readonly #verdicts = new Map<number, (verdict: Verdict) => void>();
  #last: Promise<void> = Promise.resolve();
  #open = 0;
  #sign: Alarm | undefined;

  constructor(parent: { tell(word: Word): Promise<void> }, clock: Clock) {
    this.#parent = parent;
    this.#clock = clock;
  }

  begin(round: number, config: Config, ferry: Served): void {
    const { promise, resolve } = Promise.withResolvers<Verdict>();
    this.#verdicts.set(round, resolve);
    if (this.#open++ === 0) this.#signs();
    this.#last = this.#last.then(() => this.#run(round, ferry.prepare!(config), promise));
  }

  decide(round: number, verdict: Verdict): void {
    this.#verdicts.get(round)?.(verdict);
  }

  async #run(round: number, preparing: Promise<Change>, verdict: Promise<Verdict>): Promise<void> {
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

  async #end(round: number, prepared: Change, verdict: Verdict): Promise<void> {
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
