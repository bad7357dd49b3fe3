/**
 * What falls due, soonest first, where nearly all come in the order in which they fall due: most requests are given
 * the same time.
 *
 * Those stand in a line, linked through themselves: to join it at its end, and to leave it from anywhere, touches
 * two neighbours. A heap of some hundred moves eight of its values for that, none of which is in a cache. Whoever
 * falls due before the last in line goes to a heap beside it. Equal instants come out in no promised order.
 */
import { type Due, Heap } from "./heap.ts";

export interface InLine<Self> extends Due {
  /** Its neighbours in the line. Written by the line it stands in. */
  sooner: Self | undefined;
  later: Self | undefined;
}

/** The `place` of whoever stands in the line; no heap has so many. */
const LINED_UP = 1 << 30;

export class DueLine<Value extends InLine<Value>> {
  readonly #others = new Heap<Value>();
  #first: Value | undefined;
  #last: Value | undefined;

  get first(): Value | undefined {
    const other = this.#others.first;
    if (this.#first === undefined || other === undefined) return this.#first ?? other;
    return other.dueAt < this.#first.dueAt ? other : this.#first;
  }

  /** When the first falls due; Infinity when there is none. */
  get firstAt(): number {
    return this.first?.dueAt ?? Infinity;
  }

  /** Puts `value` in, or moves it. */
  set(value: Value, dueAt: number): void {
    if (value.place === LINED_UP) this.#leave(value);
    const last = this.#last;
    if (value.place >= 0 || (last !== undefined && dueAt < last.dueAt)) {
      return this.#others.set(value, dueAt);
    }
    value.dueAt = dueAt;
    value.place = LINED_UP;
    value.sooner = last;
    if (last === undefined) this.#first = value;
    else last.later = value;
    this.#last = value;
  }

  /** Takes `value` out, if it is in. */
  remove(value: Value): void {
    if (value.place === LINED_UP) this.#leave(value);
    else this.#others.remove(value);
  }

  #leave(value: Value): void {
    const { sooner, later } = value;
    if (sooner === undefined) this.#first = later;
    else sooner.later = later;
    if (later === undefined) this.#last = sooner;
    else later.sooner = sooner;
    value.sooner = value.later = undefined;
    value.place = -1;
  }
}
