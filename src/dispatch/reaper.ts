/** Calls `engine.reap` whenever something falls due, and never later. */
import { type Alarm, type Clock, nextBeat } from "../app/clock.ts";
import type { Engine } from "../engine/engine.ts";

/** Also with nothing known to be due: a shared engine learns of other processes' work this way. */
const AT_LEAST_EVERY_MS = 1000;

export class Reaper {
  readonly #engine: Engine;
  readonly #clock: Clock;
  readonly #unwatch: () => void;
  #alarm: Alarm | undefined;
  #alarmAt = Infinity;
  #stopped = false;

  constructor(engine: Engine, clock: Clock) {
    this.#engine = engine;
    this.#clock = clock;
    this.#unwatch = engine.watch({ due: (at) => this.#arm(at) });
    this.#arm(clock.now());
  }

  stop(): void {
    this.#stopped = true;
    this.#unwatch();
    this.#alarm?.cancel();
  }

  #arm(at: number): void {
    if (this.#stopped || at >= this.#alarmAt) return;
    this.#alarm?.cancel();
    this.#alarmAt = at;
    this.#alarm = this.#clock.at(at, () => void this.#ring());
  }

  async #ring(): Promise<void> {
    this.#alarmAt = Infinity;
    const now = this.#clock.now();
    // An unreachable engine reports that itself; ask again later.
    const next = await this.#engine.reap(now).catch(() => Infinity);
    this.#arm(Math.min(next, nextBeat(now, AT_LEAST_EVERY_MS)));
  }
}
