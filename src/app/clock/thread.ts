/**
 * The thread of fine alarms (`fine-timer.ts`): sleeps until the next is due and notifies. Two shared `cells`:
 *
 *   DUE    when to ring, in microseconds of the monotonic clock, modulo 2³²; or NOTHING, or OVER. The thread sleeps on it:
 *          a notified change ends the sleep, an unnotified one is seen after it.
 *   RINGS  counts the rings; the other thread waits on it.
 *
 * `Atomics.wait` has the resolution of the system's timers, some tens of microseconds, and costs nothing while asleep.
 */
import { workerData } from "node:worker_threads";
import { DUE, micros, NOTHING, OVER, RINGS } from "./fine-cells.ts";

const cells = workerData as Int32Array;

for (;;) {
  const due = Atomics.load(cells, DUE);
  if (due === OVER) break;
  // Differences modulo 2³² are right within half an hour.
  const leftMs = due === NOTHING ? Infinity : ((due - micros()) | 0) / 1000;
  if (leftMs > 0) {
    Atomics.wait(cells, DUE, due, leftMs);
  } else if (Atomics.compareExchange(cells, DUE, due, NOTHING) === due) {
    Atomics.add(cells, RINGS, 1);
    Atomics.notify(cells, RINGS);
  }
}
