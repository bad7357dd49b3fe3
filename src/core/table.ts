/**
 * String-keyed hash table for entries that come and go with every request.
 *
 * A Map costs more than the rest of a request's bookkeeping: when a Map is full of deleted entries V8 gives it a new
 * table, and the old one keeps its entries and points to the new one for iterators. Once one such table is in the old
 * generation, every later one and all that they held is retained: nothing dies young, and the collector copies it all
 * (measured with 256 entries that change all the time: 1,400 MB promoted where an array promotes 1.3).
 *
 * Open addressing, linear probing, backward-shift deletion (no tombstones); arrays are replaced only when half full.
 * Keys are hashed with a secret seed, so a client that chooses them cannot force collisions.
 */
export class Table<Value> {
  readonly #seed: number;
  readonly #hashed: number;
  #hashes = new Int32Array(SMALLEST);
  #keys: (string | undefined)[] = new Array<undefined>(SMALLEST).fill(undefined);
  #values: (Value | undefined)[] = new Array<undefined>(SMALLEST).fill(undefined);
  #orders = new Float64Array(SMALLEST); // insertion number of each entry
  #entries = 0;
  #mask = SMALLEST - 1;
  #size = 0;
  #lastKey = "";
  #lastHash: number;

  /** `seed`: unpredictable. `hashed`: last characters to hash; fewer than all only where no client chooses the keys. */
  constructor(seed: number, hashed = Infinity) {
    this.#seed = seed | 0;
    this.#hashed = hashed;
    this.#lastHash = hashOf("", seed);
  }

  get size(): number {
    return this.#size;
  }

  get(key: string): Value | undefined {
    return this.#values[this.#find(key, this.#hash(key))];
  }

  set(key: string, value: Value): void {
    const hash = this.#hash(key);
    const at = this.#find(key, hash);
    this.#values[at] = value;
    if (this.#keys[at] !== undefined) return;
    this.#keys[at] = key;
    this.#hashes[at] = hash;
    this.#orders[at] = ++this.#entries;
    this.#size++;
    if (this.#size * 2 > this.#mask) this.#grow();
  }

  delete(key: string): boolean {
    let hole = this.#find(key, this.#hash(key));
    const keys = this.#keys;
    const hashes = this.#hashes;
    const values = this.#values;
    const orders = this.#orders;
    if (keys[hole] === undefined) return false;
    const mask = this.#mask;
    for (let at = (hole + 1) & mask; keys[at] !== undefined; at = (at + 1) & mask) {
      // It may move to the hole unless that is before its home position.
      if (((at - hashes[at]!) & mask) < ((at - hole) & mask)) continue;
      keys[hole] = keys[at];
      hashes[hole] = hashes[at]!;
      values[hole] = values[at];
      orders[hole] = orders[at]!;
      hole = at;
    }
    keys[hole] = undefined;
    values[hole] = undefined;
    this.#size--;
    return true;
  }

  clear(): void {
    this.#keys.fill(undefined);
    this.#values.fill(undefined);
    this.#size = 0;
  }

  /** In insertion order. A copy: the table may change during iteration. */
  values(): Value[] {
    const places = [...this.#keys.keys()].filter((at) => this.#keys[at] !== undefined);
    places.sort((one, other) => this.#orders[one]! - this.#orders[other]!);
    return places.map((at) => this.#values[at]!);
  }

  /** In no order, cheaper. */
  unordered(): Value[] {
    return this.#values.filter((value) => value !== undefined);
  }

  /** Caches the last key: most are looked up several times in a row, and some are kilobytes long. */
  #hash(key: string): number {
    if (key !== this.#lastKey) {
      this.#lastKey = key;
      this.#lastHash = hashOf(key, this.#seed, this.#hashed);
    }
    return this.#lastHash;
  }

  /** Index of `key`, or of the free place for it. */
  #find(key: string, hash: number): number {
    const keys = this.#keys;
    const hashes = this.#hashes;
    const mask = this.#mask;
    let at = hash & mask;
    while (keys[at] !== undefined && (hashes[at] !== hash || keys[at] !== key)) at = (at + 1) & mask;
    return at;
  }

  #grow(): void {
    const keys = this.#keys;
    const hashes = this.#hashes;
    const values = this.#values;
    const orders = this.#orders;
    const places = keys.length * 2;
    this.#hashes = new Int32Array(places);
    this.#orders = new Float64Array(places);
    this.#keys = new Array<undefined>(places).fill(undefined);
    this.#values = new Array<undefined>(places).fill(undefined);
    this.#mask = places - 1;
    for (let at = 0; at < keys.length; at++) {
      const key = keys[at];
      if (key === undefined) continue;
      const place = this.#find(key, hashes[at]!);
      this.#keys[place] = key;
      this.#hashes[place] = hashes[at]!;
      this.#values[place] = values[at];
      this.#orders[place] = orders[at]!;
    }
  }
}

const SMALLEST = 64;

/** FNV-1a of the last `last` characters; upper bits are folded into the lower ones, which select the place. */
export function hashOf(text: string, seed: number, last = Infinity): number {
  let hash = seed | 0;
  const { length } = text;
  for (let at = Math.max(0, length - last); at < length; at++) {
    hash = Math.imul(hash ^ text.charCodeAt(at), 0x01000193);
  }
  return hash ^ (hash >>> 15);
}
