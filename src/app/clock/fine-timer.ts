/**
 * Alarms accurate to 0.1 ms, with a thread that sleeps until the next one is due.
 *
 *   add ──► heap ──► DUE ──────► thread: Atomics.wait until then
 *   rings ◄── heap ◄── RINGS ◄── thread: Atomics.notify, heard here by Atomics.waitAsync
 *
 * `Atomics.waitAsync` wakes the event loop as a socket does, without keeping it alive. The thread is notified only if
 * it would sleep too long; it sees cancelled and postponed alarms when it wakes. It starts with the first alarm and
 * ends with `rest`.
 *
 * It aims slightly early to cover the wake-up latency; the event loop then spins until the instant. Each alarm also has
 * a plain timer (`clock.ts`), in case the thread is not up yet, or gone. Measured against alternatives by `node
 * bench/timers.ts`.
 */
import { once } from "node:events";
import { extname } from "node:path";
import { Worker } from "node:worker_threads";
import { type Due, Heap } from "../../core/heap.ts";
import { CELLS, DUE, micros, NOTHING, OVER, RINGS } from "./fine-cells.ts";

/** Minimum latency from the thread's wake-up to the event loop turn that sees it. */
const LEAD_MS = 0.05;
/** Later alarms wait for their plain timer: instants wrap after 71 minutes. */
const FAR_MS = 60_000;
/** Same extension as this file: .ts in a checkout, .js in dist/. */
const PROGRAM = new URL(`./thread${extname(import.meta.filename)}`, import.meta.url);

interface Rung {
  rings(): void;
}

class FineAlarm implements Due {
  readonly #timer: FineTimer;
  readonly rung: Rung;
  dueAt = Infinity;
  place = -1;

  constructor(timer: FineTimer, rung: Rung) {
    this.#timer = timer;
    this.rung = rung;
  }

  cancel(): void {
    this.#timer.remove(this);
  }
}

export class FineTimer {
  readonly #now: () => number;
  readonly #alarms = new Heap<FineAlarm>();
  #cells = newCells();
  #thread: Worker | undefined;
  /** The thread exited by itself; plain timers take over, and no second one is started. */
  #broken = false;
  /** When the thread rereads DUE, at the latest. */
  #looksAt = Infinity;
  /** The event loop spins until the first alarm is due. */
  #turning = false;

  constructor(now: () => number) {
    this.#now = now;
  }

  add(time: number, rung: Rung): { cancel(): void } {
    const alarm = new FineAlarm(this, rung);
    if (time - this.#now() > FAR_MS) return alarm;
    this.#alarms.set(alarm, time);
    if (this.#alarms.first === alarm) this.#aim();
    return alarm;
  }

  remove(alarm: FineAlarm): void {
    const wasFirst = this.#alarms.first === alarm;
    this.#alarms.remove(alarm);
    if (wasFirst) this.#aim();
  }

  async rest(): Promise<void> {
    // Plain timers take over; kept here, the first to fire would start a thread for the next.
    for (let { first } = this.#alarms; first !== undefined; first = this.#alarms.first)
      this.#alarms.remove(first);
    const thread = this.#thread;
    if (thread === undefined) return;
    const cells = this.#cells;
    // Later alarms are for the next thread.
    this.#thread = undefined;
    this.#cells = newCells();
    const ended = once(thread, "exit");
    Atomics.store(cells, DUE, OVER);
    Atomics.notify(cells, DUE);
    await ended;
  }

  #aim(): void {
    const first = this.#alarms.firstAt;
    if (first === Infinity) return void Atomics.store(this.#cells, DUE, NOTHING);
    const now = this.#now();
    const leftMs = first - now - LEAD_MS;
    if (leftMs <= 0) return this.#turn();
    if (this.#broken) return;
    if (this.#thread === undefined) this.#start();
    Atomics.store(this.#cells, DUE, micros(leftMs));
    if (now < this.#looksAt && this.#looksAt <= first - LEAD_MS) return;
    this.#looksAt = first - LEAD_MS;
    Atomics.notify(this.#cells, DUE);
  }

  #start(): void {
    const cells = (this.#cells = newCells());
    const thread = (this.#thread = new Worker(PROGRAM, { workerData: cells, name: "clock", execArgv: [] }));
    const gone = (): void => {
      if (this.#thread !== thread) return;
      this.#broken = true;
      this.#thread = undefined;
    };
    thread.on("error", gone);
    thread.on("exit", gone);
    this.#looksAt = Infinity;
    this.#listen(cells);
  }

  #listen(cells: Int32Array): void {
    const ring = Atomics.waitAsync(cells, RINGS, Atomics.load(cells, RINGS));
    void Promise.resolve(ring.value).then(() => {
      if (cells !== this.#cells) return;
      this.#listen(cells);
      this.#ring();
    });
  }

  #turn(): void {
    if (this.#turning) return;
    this.#turning = true;
    setImmediate(() => {
      this.#turning = false;
      this.#ring();
    });
  }

  #ring(): void {
    const { first } = this.#alarms;
    if (first === undefined) return;
    if (first.dueAt > this.#now()) return this.#aim();
    this.#alarms.remove(first);
    this.#aim();
    first.rung.rings();
  }
}

function newCells(): Int32Array {
  return new Int32Array(new SharedArrayBuffer(CELLS * Int32Array.BYTES_PER_ELEMENT));
}
