/**
 * What comes while a call is on its way goes together in the next one.
 *
 * The first of a tick sets out when the tick ends. What may travel together is a group: all on one server, each
 * shard alone on a Cluster. One call takes at most `MAX_TOGETHER`: Redis serves nobody else while a script runs.
 */
const MAX_TOGETHER = 128;

export class Gathering<Value> {
  readonly #send: (values: readonly Value[]) => Promise<void>;
  /** By group. */
  readonly #gathered = new Map<number, Value[]>();
  readonly #busy = new Set<number>();

  /** `send` never rejects. */
  constructor(send: (values: readonly Value[]) => Promise<void>) {
    this.#send = send;
  }

  add(group: number, value: Value): void {
    const gathered = this.#gathered.get(group);
    if (gathered !== undefined) {
      gathered.push(value);
      return;
    }
    this.#gathered.set(group, [value]);
    if (!this.#busy.has(group)) setImmediate(() => void this.#flush(group));
  }

  /** The one of a group that has been waiting longest. */
  first(group: number): Value | undefined {
    return this.#gathered.get(group)?.[0];
  }

  async #flush(group: number): Promise<void> {
    this.#busy.add(group);
    for (let gathered = this.#take(group); gathered.length > 0; gathered = this.#take(group)) {
      const sends: Promise<void>[] = [];
      for (let at = 0; at < gathered.length; at += MAX_TOGETHER) {
        sends.push(this.#send(gathered.slice(at, at + MAX_TOGETHER)));
      }
      await Promise.all(sends);
    }
    this.#busy.delete(group);
  }

  #take(group: number): Value[] {
    const gathered = this.#gathered.get(group) ?? [];
    this.#gathered.delete(group);
    return gathered;
  }
}
