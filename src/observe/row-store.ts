/**
 * One connection to PostgreSQL for rows, as the thread of the requests sees it: the connection itself lives in the
 * thread of `sender.ts`. Like that one it lives until its first trouble and is never mended.
 */
import { PostgresTrouble } from "./postgres-trouble.ts";
import type { LoggedRequest, RequestRow } from "./request-log.ts";
import { packRows } from "./row-bundle.ts";
import { type Sender, SenderTrouble } from "./sender.ts";

/** All of these reject with a `PostgresTrouble`. */
export interface RowStore {
  /** It can no longer be used. */
  readonly dead: boolean;
  /** Before all others: brings the table to what this Ferry needs. */
  open(): Promise<void>;
  insert(rows: readonly RequestRow[]): Promise<void>;
  /** The ends of tasks whose rows are there. */
  update(rows: readonly RequestRow[]): Promise<void>;
  /** How many it were; `max` at most. */
  deleteOld(days: number, max: number): Promise<number>;
  /** Requests under an id, newest first. */
  find(id: string, max: number): Promise<readonly LoggedRequest[]>;
  destroy(): void;
}

export interface RowStoreRules {
  /** With its credentials: never shown. */
  readonly url: string;
  readonly timeoutMs: number;
  /** A UUID of this start. */
  readonly instance: string;
}

let stores = 0;

export class SentRowStore implements RowStore {
  readonly #sender: Pick<Sender, "ask">;
  readonly #rules: RowStoreRules;
  readonly #store = ++stores;
  #dead = false;

  constructor(sender: Pick<Sender, "ask">, rules: RowStoreRules) {
    this.#sender = sender;
    this.#rules = rules;
  }

  get dead(): boolean {
    return this.#dead;
  }

  async open(): Promise<void> {
    const { url, timeoutMs } = this.#rules;
    const store = this.#store;
    const opened = this.#told(this.#sender.ask("openRows", { store, url, timeoutMs }));
    const end = (): void => void (this.#dead = true);
    this.#sender.ask("rowsEnd", { store }).then(end, end);
    await opened;
  }

  insert(rows: readonly RequestRow[]): Promise<void> {
    return this.#write("insertRows", rows);
  }

  update(rows: readonly RequestRow[]): Promise<void> {
    return this.#write("updateRows", rows);
  }

  deleteOld(days: number, max: number): Promise<number> {
    return this.#told(this.#sender.ask("deleteOldRows", { store: this.#store, days, max }));
  }

  find(id: string, max: number): Promise<readonly LoggedRequest[]> {
    return this.#told(this.#sender.ask("findRows", { store: this.#store, id, max }));
  }

  destroy(): void {
    if (this.#dead) return;
    this.#dead = true;
    // Nobody waits for it: without the thread the connection is gone too.
    this.#sender.ask("closeRows", { store: this.#store }).catch(() => {});
  }

  #write(verb: "insertRows" | "updateRows", rows: readonly RequestRow[]): Promise<void> {
    const bundle = packRows(rows);
    const handOver = [bundle.numbers.buffer, bundle.changed.buffer];
    const given = { store: this.#store, instance: this.#rules.instance, rows: bundle };
    return this.#told(this.#sender.ask(verb, given, handOver));
  }

  async #told<Told>(asked: Promise<Told>): Promise<Told> {
    try {
      return await asked;
    } catch (error) {
      if (!(error instanceof SenderTrouble)) throw error;
      const trouble = new PostgresTrouble(error.message, error.state);
      if (!trouble.ofTheData) this.#dead = true;
      throw trouble;
    }
  }
}
