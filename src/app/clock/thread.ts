/**
 * The thread that fine alarms are kept with (`fine-timer.ts`): it sleeps until the next is due, and says so.
 *
 * `cells` are two numbers that both threads see:
 *
 *   DUE    when to ring, in microseconds of the monotonic clock, modulo 2³²; or NOTHING, or OVER. It is also what the
 *          thread sleeps on: a change that is told ends the sleep, one that is not told is seen at the end of it.
 *   RINGS  counts the rings, for whoever waits for the next one.
 *
 * A sleep of `Atomics.wait` has the grain of the system's timers, some tens of microseconds, and costs nothing while
 * it lasts.
 */
import { workerData } from "node:worker_threads";
import { DUE, micros, NOTHING, OVER, RINGS } from "./fine-cells.ts";

const cells = workerData as Int32Array;

for (;;) {
  const due = Atomics.load(cells, DUE);
  if (due === OVER) break;
  // Of two instants modulo 2³² the difference is right as long as they lie within half an hour.
  const leftMs = due === NOTHING ? Infinity : ((due - micros()) | 0) / 1000;
  if (leftMs > 0) {
    Atomics.wait(cells, DUE, due, leftMs);
  } else if (Atomics.compareExchange(cells, DUE, due, NOTHING) === due) {
    Atomics.add(cells, RINGS, 1);
    Atomics.notify(cells, RINGS);
  }
}
