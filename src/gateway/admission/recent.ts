/**
 * A memory of texts that is bounded in number and in characters: the oldest go first.
 *
 * Entries have an end, after which they are not found any more.
 */

interface Entry<Value> {
  readonly value: Value;
  readonly until: number;
}

export class Recent<Value> {
  readonly #entries = new Map<string, Entry<Value>>();
  readonly #maxEntries: number;
  readonly #maxChars: number;
  #chars = 0;

  constructor(maxEntries: number, maxChars: number) {
    this.#maxEntries = maxEntries;
    this.#maxChars = maxChars;
  }

  get size(): number {
    return this.#entries.size;
  }

  get(text: string, now: number): Value | undefined {
    const entry = this.#entries.get(text);
    if (entry === undefined) return undefined;
    if (entry.until > now) return entry.value;
    this.#forget(text);
    return undefined;
  }

  set(text: string, value: Value, until: number): void {
    this.#forget(text);
    this.#entries.set(text, { value, until });
    this.#chars += text.length;
    for (const oldest of this.#entries.keys()) {
      if (this.#entries.size <= this.#maxEntries && this.#chars <= this.#maxChars) break;
      this.#forget(oldest);
    }
  }

  #forget(text: string): void {
    if (this.#entries.delete(text)) this.#chars -= text.length;
  }
}
