/**
 * What comes while calls are on their way goes together in the next one: the busier the server, the larger the bundles.
 *
 * The first of a tick sets out when the tick ends; a full load sets out at once, so that Redis works on it while
 * this process still reads the rest of the tick. Nothing sets out while two calls are on their way: the server has one to
 * do while the reply to the other is read. A group is what may travel together.
 */
const MAX_TOGETHER = 128;
const ON_THEIR_WAY = 2;

export class Gathering<Value> {
  readonly #send: (values: readonly Value[]) => Promise<void>;
  /** By group; none that is empty. */
  readonly #gathered = new Map<number, Value[]>();
  /** Calls on their way, by group; none that is 0. */
  readonly #calls = new Map<number, number>();

  /** `send` never rejects. */
  constructor(send: (values: readonly Value[]) => Promise<void>) {
    this.#send = send;
  }

  add(group: number, value: Value): void {
    const gathered = this.#gathered.get(group);
    if (gathered === undefined) {
      this.#gathered.set(group, [value]);
      if (!this.#calls.has(group)) setImmediate(() => this.#flush(group));
    } else if (gathered.push(value) >= MAX_TOGETHER) this.#flush(group);
  }

  /** The one of a group that has been waiting longest. */
  first(group: number): Value | undefined {
    return this.#gathered.get(group)?.[0];
  }

  /** Sends all that gathered, unless the server has enough to do. */
  #flush(group: number): void {
    const gathered = this.#gathered.get(group);
    if (gathered === undefined || this.#onTheirWay(group) >= ON_THEIR_WAY) return;
    this.#gathered.delete(group);
    for (let at = 0; at < gathered.length; at += MAX_TOGETHER) {
      this.#calls.set(group, this.#onTheirWay(group) + 1);
      void this.#send(gathered.slice(at, at + MAX_TOGETHER)).then(() => this.#arrived(group));
    }
  }

  #arrived(group: number): void {
    const left = this.#onTheirWay(group) - 1;
    if (left === 0) this.#calls.delete(group);
    else this.#calls.set(group, left);
    this.#flush(group);
  }

  #onTheirWay(group: number): number {
    return this.#calls.get(group) ?? 0;
  }
}
