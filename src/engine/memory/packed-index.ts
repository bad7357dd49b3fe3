/**
 * Where things stand, by the hash of their key: numbers only, so that the garbage collector has nothing to walk.
 *
 * Open addressing with linear probing, as in `core/table.ts`; what the keys are is known at the places themselves.
 */
const SMALLEST = 1024;
const NOWHERE = -1;

export class PackedIndex {
  readonly #isAt: (place: number, key: string) => boolean;
  #hashes = new Int32Array(SMALLEST);
  #places = new Float64Array(SMALLEST).fill(NOWHERE);
  #mask = SMALLEST - 1;
  size = 0;

  /** `isAt`: whether what stands at a place has that key. */
  constructor(isAt: (place: number, key: string) => boolean) {
    this.#isAt = isAt;
  }

  /** The place of a key; -1 when it has none. */
  find(hash: number, key: string): number {
    const mask = this.#mask;
    for (let at = hash & mask; this.#places[at] !== NOWHERE; at = (at + 1) & mask) {
      if (this.#hashes[at] === hash && this.#isAt(this.#places[at]!, key)) return this.#places[at]!;
    }
    return NOWHERE;
  }

  /** A further place; whoever had the same key before must be taken out first. */
  add(hash: number, place: number): void {
    this.#put(hash, place);
    this.size++;
    if (this.size * 2 > this.#mask) this.#grow();
  }

  remove(hash: number, place: number): boolean {
    const mask = this.#mask;
    const hashes = this.#hashes;
    const places = this.#places;
    let hole = hash & mask;
    while (places[hole] !== place) {
      if (places[hole] === NOWHERE) return false;
      hole = (hole + 1) & mask;
    }
    for (let at = (hole + 1) & mask; places[at] !== NOWHERE; at = (at + 1) & mask) {
      // It may move up to the hole unless it would then stand before the one that its hash names.
      if (((at - hashes[at]!) & mask) < ((at - hole) & mask)) continue;
      hashes[hole] = hashes[at]!;
      places[hole] = places[at]!;
      hole = at;
    }
    places[hole] = NOWHERE;
    this.size--;
    return true;
  }

  #put(hash: number, place: number): void {
    let at = hash & this.#mask;
    while (this.#places[at] !== NOWHERE) at = (at + 1) & this.#mask;
    this.#hashes[at] = hash;
    this.#places[at] = place;
  }

  #grow(): void {
    const hashes = this.#hashes;
    const places = this.#places;
    const size = places.length * 2;
    this.#hashes = new Int32Array(size);
    this.#places = new Float64Array(size).fill(NOWHERE);
    this.#mask = size - 1;
    for (let at = 0; at < places.length; at++) {
      if (places[at] !== NOWHERE) this.#put(hashes[at]!, places[at]!);
    }
  }
}
