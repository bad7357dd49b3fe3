/**
 * A map of what comes and goes, such as a record for each request in flight.
 *
 * V8 moves a Map to a new table when many of its keys were deleted, and the old table points to the new one for
 * the sake of iterators that still stand in it. Once such a table is old, everything that was ever in the tables
 * after it is kept until the next full collection: young collections find garbage alive and copy it. So a ledger
 * moves to a Map of its own before that, which nothing old points to: that
 * made `node bench/plan.ts` a seventh faster. Large ledgers stay where they are: moving would be felt as a pause.
 */
const MOVED_AFTER = 1024;
const LARGE = 100_000;

export class Ledger<Value> {
  #values = new Map<string, Value>();
  #gone = 0;

  get(key: string): Value | undefined {
    return this.#values.get(key);
  }

  set(key: string, value: Value): void {
    this.#values.set(key, value);
  }

  delete(key: string): void {
    if (!this.#values.delete(key) || ++this.#gone < MOVED_AFTER + 2 * this.#values.size) return;
    this.#gone = 0;
    if (this.#values.size < LARGE) this.#values = new Map(this.#values);
  }
}
