/**
 * Asks ejected workers whether they are well again, where their protocol has a way to ask, so that no
 * task has to find out. A worker that could not be reached is asked at once (it may only be restarting);
 * one that failed too often sits out its time first. Without a probe the next real batch is the probe.
 */
import type { Alarm, Clock } from "../app/clock.ts";
import type { Slot } from "./workers.ts";

const PROBE_TIMEOUT_MS = 2000;

export class Prober {
  readonly #clock: Clock;
  readonly #recovered: (slot: Slot) => void;
  /** At most one per slot: the alarm of the next question, or of the patience for the answer. */
  readonly #alarms = new Map<Slot, Alarm>();
  readonly #asking = new Map<Slot, AbortController>();
  #stopped = false;

  constructor(clock: Clock, recovered: (slot: Slot) => void) {
    this.#clock = clock;
    this.#recovered = recovered;
  }

  ejected(slot: Slot, unreachable: boolean): void {
    if (slot.worker.probe === undefined || this.#stopped || this.#asking.has(slot)) return;
    this.#set(slot, unreachable ? this.#clock.now() : slot.circuit.usableAt, () => void this.#ask(slot));
  }

  /** It will not be asked any more. */
  forget(slot: Slot): void {
    this.#alarms.get(slot)?.cancel();
    this.#alarms.delete(slot);
    this.#asking.get(slot)?.abort();
  }

  stop(): void {
    this.#stopped = true;
    for (const alarm of this.#alarms.values()) alarm.cancel();
    for (const asking of this.#asking.values()) asking.abort();
  }

  async #ask(slot: Slot): Promise<void> {
    // A batch that was tried meanwhile may have told more than an answer to this could.
    if (slot.worker.probe === undefined) return;
    const patience = new AbortController();
    this.#asking.set(slot, patience);
    this.#set(slot, this.#clock.now() + PROBE_TIMEOUT_MS, () => patience.abort());
    const well = await slot.worker.probe(patience.signal);
    this.#asking.delete(slot);
    this.#alarms.get(slot)?.cancel();
    if (this.#stopped || slot.retiring || !slot.circuit.probing) return;
    if (well) return this.#recovered(slot);
    slot.circuit.failed(this.#clock.now(), slot.circuit.why, true);
    this.#set(slot, slot.circuit.usableAt, () => void this.#ask(slot));
  }

  #set(slot: Slot, at: number, ring: () => void): void {
    this.#alarms.get(slot)?.cancel();
    this.#alarms.set(slot, this.#clock.at(at, ring));
  }
}
