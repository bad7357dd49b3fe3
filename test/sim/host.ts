/**
 * One start of one process: its clock, and its death.
 *
 * Whatever a process does begins with an alarm of its clock or with something that is delivered to it. So a
 * process that stands still (SIGSTOP, a stalled event loop) is one whose alarms and deliveries wait until it goes on,
 * and a dead one is one where they never come: its promises stay as they are, and with them all that it knew.
 */
import type { Alarm, Clock } from "../../src/app/clock.ts";
import type { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";

class Held implements Alarm {
  ring: (() => void) | undefined;
  alarm: Alarm | undefined;
  readonly #set: Set<Alarm> | undefined;

  constructor(ring: () => void, set?: Set<Alarm>) {
    this.ring = ring;
    this.#set = set;
    set?.add(this);
  }

  cancel(): void {
    this.ring = undefined;
    this.#set?.delete(this);
    this.alarm?.cancel();
  }

  rings(): void {
    this.#set?.delete(this);
    this.ring?.();
  }
}

export class Host implements Clock {
  readonly name: string;
  readonly #time: VirtualClock;
  /** Machines do not agree what time it is. */
  readonly #skewMs: number;
  /** What came while it stood still, in order; undefined while it runs. */
  #backlog: Held[] | undefined;
  alive = true;
  /** In all. */
  pausedMs = 0;
  #pausedAt = 0;
  #trap: { readonly call: string; readonly until: number; readonly spring: () => void } | undefined;
  /** Set, and neither rung nor cancelled. */
  readonly alarms = new Set<Alarm>();
  /** Called once, when it dies. */
  readonly onDeath = new Set<() => void>();

  constructor(name: string, time: VirtualClock, skewMs: number) {
    this.name = name;
    this.#time = time;
    this.#skewMs = skewMs;
  }

  now(): number {
    return this.#time.now() + this.#skewMs;
  }

  wall(): number {
    return this.#time.wall() + this.#skewMs;
  }

  at(time: number, ring: () => void): Alarm {
    const held = new Held(ring, this.alarms);
    held.alarm = this.#time.at(time - this.#skewMs, () => this.#ring(held));
    return held;
  }

  /** Brings something to it from outside, so much later. */
  deliver(afterMs: number, take: () => void): void {
    const held = new Held(take);
    this.#time.at(this.#time.now() + afterMs, () => this.#ring(held));
  }

  /** Runs `spring` when it has made this call, if that is within `forMs`. */
  setTrap(call: string, forMs: number, spring: () => void): void {
    this.#trap = { call, until: this.#time.now() + forMs, spring };
  }

  /** It has made a call, and waits for the reply. */
  called(call: string): void {
    const trap = this.#trap;
    if (trap?.call !== call || this.#time.now() > trap.until) return;
    this.#trap = undefined;
    this.#time.at(this.#time.now(), trap.spring);
  }

  get paused(): boolean {
    return this.#backlog !== undefined;
  }

  pause(): void {
    if (this.#backlog !== undefined) return;
    this.#backlog = [];
    this.#pausedAt = this.#time.now();
  }

  resume(): void {
    const backlog = this.#backlog ?? [];
    if (this.#backlog !== undefined) this.pausedMs += this.#time.now() - this.#pausedAt;
    this.#backlog = undefined;
    // One by one: what the first sets off happens before the second.
    for (const held of backlog) this.#time.at(this.#time.now(), () => this.#ring(held));
  }

  crash(): void {
    this.alive = false;
    this.#backlog = undefined;
    for (const die of this.onDeath) die();
    this.onDeath.clear();
  }

  #ring(held: Held): void {
    if (!this.alive || held.ring === undefined) return;
    if (this.#backlog === undefined) held.rings();
    else this.#backlog.push(held);
  }
}
