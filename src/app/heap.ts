/**
 * V8 heap of a server: its flags, and giving memory back at rest.
 *
 * V8 samples per allocation site how many of a hundred new objects survive a collection; if nearly all do, the site
 * allocates in the old generation from then on. In a server the hundred belong to requests in flight: nearly all
 * survive, and die a moment later. Allocated old, they wait for the next major collection and keep the young objects
 * they point to alive. So one unlucky sample doubles what every later collection copies (30 % instead of 14 % of what
 * is allocated).
 *
 * At rest V8 keeps what the last load needed, for as long as the process lives: its memory reducer goes by the rate of
 * allocation between collections, and without requests there are none. So the first ten seconds without a request end
 * with a collection that returns the rest of the heap to the system.
 */
import { getHeapStatistics, setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import type { Alarm, Clock } from "./clock.ts";

/** After loading the code: decisions are permanent, and other flags reject the compile cache (40 ms of a start). */
export function tuneHeap(): void {
  setFlagsFromString("--no-allocation-site-pretenuring");
}

const REST_MS = 10_000;
/** Growth since the last time that is worth a collection, which takes some tens of milliseconds. */
const WORTHWHILE_BYTES = 16 << 20;

interface Collectable {
  /** Taken from the system. */
  bytes(): number;
  collect(): void;
}

export class HeapRest {
  readonly #clock: Clock;
  readonly #work: () => number;
  readonly #heap: Collectable;
  #alarm: Alarm;
  #worked = -1;
  /** Size of the heap after the last collection at rest. */
  #restBytes = 0;

  /** `work`: a count that grows with every request or task. */
  constructor(clock: Clock, work: () => number, heap: Collectable = v8Heap) {
    this.#clock = clock;
    this.#work = work;
    this.#heap = heap;
    this.#alarm = this.#next();
  }

  stop(): void {
    this.#alarm.cancel();
  }

  #next(): Alarm {
    return this.#clock.at(this.#clock.now() + REST_MS, () => {
      this.#look();
      this.#alarm = this.#next();
    });
  }

  #look(): void {
    const work = this.#work();
    const rests = work === this.#worked;
    this.#worked = work;
    if (!rests || this.#heap.bytes() < this.#restBytes + WORTHWHILE_BYTES) return;
    this.#heap.collect();
    this.#restBytes = this.#heap.bytes();
  }
}

const v8Heap: Collectable = { bytes: () => getHeapStatistics().total_heap_size, collect: collectGarbage };

/** V8 has no other way to ask for it from JavaScript; the function exists only in contexts made after the flag. */
function collectGarbage(): void {
  setFlagsFromString("--expose-gc");
  const collect = runInNewContext("gc") as (options: object) => void;
  setFlagsFromString("--no-expose-gc");
  collect({ type: "major", flavor: "last-resort" });
}
