/**
 * Alarms that are in time to a tenth of a millisecond, kept with a thread that sleeps until the next one is due.
 *
 *   add ──► heap ──► DUE ──────► thread: Atomics.wait until then
 *   rings ◄── heap ◄── RINGS ◄── thread: Atomics.notify, heard here by Atomics.waitAsync
 *
 * A promise of `Atomics.waitAsync` wakes the event loop as a socket does, and does not keep it alive. The thread is told
 * of a change only when it would sleep too long otherwise; one that is called off or put off is seen when it wakes
 * anyway. While nothing is due it sleeps for good. It starts with the first alarm and ends with `rest`.
 *
 * It aims a little before the instant, because the way here takes that long; whoever is here before the instant turns
 * with the event loop until it has come. Each alarm has a plain timer beside it (`clock.ts`): where the thread is not
 * up yet, or gone, that one rings. Measured beside the other ways by `node bench/timers.ts`.
 */
import { once } from "node:events";
import { extname } from "node:path";
import { Worker } from "node:worker_threads";
import { type Due, Heap } from "../../core/heap.ts";
import { CELLS, DUE, micros, NOTHING, OVER, RINGS } from "./fine-cells.ts";

/** What passes between the end of the thread's sleep and the turn of the event loop that hears of it, at the least. */
const LEAD_MS = 0.05;
/** What is later than this can wait for its plain timer: instants are told modulo 71 minutes. */
const FAR_MS = 60_000;
/** The same ending as this file's: .ts in a checkout, .js in dist/. */
const PROGRAM = new URL(`./thread${extname(import.meta.filename)}`, import.meta.url);

/** Whom to ring. */
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
  /** The thread ended by itself. The plain timers go on without it, and no second one is tried. */
  #broken = false;
  /** The thread looks at DUE again then, or before. */
  #looksAt = Infinity;
  /** The event loop turns until the first alarm is due. */
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
    // They have their plain timers; were they kept here, the first that rings would start a thread for the next.
    for (let { first } = this.#alarms; first !== undefined; first = this.#alarms.first)
      this.#alarms.remove(first);
    const thread = this.#thread;
    if (thread === undefined) return;
    const cells = this.#cells;
    // Whatever is told from here on is for the next one.
    this.#thread = undefined;
    this.#cells = newCells();
    const ended = once(thread, "exit");
    Atomics.store(cells, DUE, OVER);
    Atomics.notify(cells, DUE);
    await ended;
  }

  /** Has the thread wake us for the first alarm. */
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
      // Nobody has to wait for its end any more.
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
