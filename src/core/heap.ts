/**
 * Binary heap by due time with O(log n) removal and move: each value carries its index. Equal times have no promised
 * order.
 */

export interface Due {
  /** Written by the heap. */
  dueAt: number;
  /** Index in the heap, -1 if in none. Written by the heap. */
  place: number;
}

export class Heap<Value extends Due> {
  readonly #values: Value[] = [];

  get size(): number {
    return this.#values.length;
  }

  get first(): Value | undefined {
    return this.#values[0];
  }

  /** Infinity when empty. */
  get firstAt(): number {
    return this.#values[0]?.dueAt ?? Infinity;
  }

  /** Soonest first; the first k cost O(k log k). The heap must not change meanwhile. */
  *inOrder(): Generator<Value, void> {
    const open = new Heap<{ dueAt: number; place: number; readonly at: number }>();
    const look = (at: number): void => {
      const value = this.#values[at];
      if (value !== undefined) open.set({ dueAt: 0, place: -1, at }, value.dueAt);
    };
    look(0);
    for (let next = open.first; next !== undefined; next = open.first) {
      yield this.#values[next.at]!;
      open.remove(next);
      look(2 * next.at + 1);
      look(2 * next.at + 2);
    }
  }

  /** Inserts or moves. */
  set(value: Value, dueAt: number): void {
    const sooner = value.place < 0 || dueAt < value.dueAt;
    value.dueAt = dueAt;
    if (sooner) this.#rise(value, value.place < 0 ? this.#values.length : value.place);
    else this.#sink(value, value.place);
  }

  remove(value: Value): void {
    const { place } = value;
    if (place < 0) return;
    value.place = -1;
    const last = this.#values.pop()!;
    if (last === value) return;
    if (last.dueAt < value.dueAt) this.#rise(last, place);
    else this.#sink(last, place);
  }

  #rise(value: Value, at: number): void {
    const values = this.#values;
    while (at > 0) {
      const parent = (at - 1) >> 1;
      const above = values[parent]!;
      if (above.dueAt <= value.dueAt) break;
      values[at] = above;
      above.place = at;
      at = parent;
    }
    values[at] = value;
    value.place = at;
  }

  #sink(value: Value, at: number): void {
    const values = this.#values;
    const size = values.length;
    for (;;) {
      let child = 2 * at + 1;
      if (child >= size) break;
      if (child + 1 < size && values[child + 1]!.dueAt < values[child]!.dueAt) child++;
      const below = values[child]!;
      if (below.dueAt >= value.dueAt) break;
      values[at] = below;
      below.place = at;
      at = child;
    }
    values[at] = value;
    value.place = at;
  }
}
