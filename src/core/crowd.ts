/**
 * Those who are here, in no order. As a Set, but nothing of who has left stays behind (`table.ts` says why that
 * matters): each member knows its place, and the last one moves into a place that becomes free.
 */

export interface Member {
  /** Where it stands; -1 when it is in no crowd. Written by the crowd. */
  place: number;
}

export class Crowd<Value extends Member> {
  readonly #values: Value[] = [];

  get size(): number {
    return this.#values.length;
  }

  add(value: Value): void {
    if (value.place >= 0) return;
    value.place = this.#values.length;
    this.#values.push(value);
  }

  remove(value: Value): void {
    const { place } = value;
    if (place < 0) return;
    value.place = -1;
    const last = this.#values.pop()!;
    if (last === value) return;
    last.place = place;
    this.#values[place] = last;
  }

  /** A copy: members may leave while it is walked. */
  all(): Value[] {
    return [...this.#values];
  }
}
