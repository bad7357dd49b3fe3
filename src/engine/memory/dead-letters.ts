/**
 * Tasks that will not be retried, kept with their input for operators to inspect and replay. Bounded by number and age;
 * when full, the oldest is dropped and an event says so.
 */
import { Refusal } from "../../core/errors.ts";
import type { Task } from "../../core/task.ts";
import type { Events } from "../../observe/events.ts";
import type { DeadLetter, EngineLimits } from "../engine.ts";

interface Owner {
  /** Requeues it; false if its model is gone. Throws a `Refusal` while the queue is full. */
  replay(task: Task): boolean;
  /** Resolves when the replay is as safe as `put` makes a task. */
  replaySafe(id: string): Promise<void>;
  /** Dropped, purged or too old. */
  forgotten(id: string): void;
}

const RETRY_AFTER_MS = 1000;

/** A dead letter stays while the queue has no room for it. */
export function noRoomToReplay(bound: string): Refusal {
  return new Refusal("SERVICE_OVERLOADED", `${bound}; the dead letter is still there`, {
    retryAfterMs: RETRY_AFTER_MS,
  });
}

export class DeadLetters {
  readonly #limits: () => EngineLimits;
  readonly #events: Events;
  readonly #owner: Owner;
  readonly #letters = new Map<string, DeadLetter>(); // oldest first

  constructor(limits: () => EngineLimits, events: Events, owner: Owner) {
    this.#limits = limits;
    this.#events = events;
    this.#owner = owner;
  }

  get size(): number {
    return this.#letters.size;
  }

  add(letter: DeadLetter): void {
    const { max } = this.#limits().deadLetters;
    this.#letters.set(letter.task.id, letter);
    for (const oldest of this.#letters.keys()) {
      if (this.#letters.size <= max) return;
      this.#letters.delete(oldest);
      this.#owner.forgotten(oldest);
      const message = `dead letter ${oldest} was dropped to make room (deadLetters.max ${max})`;
      this.#events.emit("notice", { level: "warn", message });
    }
  }

  async list(): Promise<readonly DeadLetter[]> {
    return [...this.#letters.values()];
  }

  async get(id: string): Promise<DeadLetter | undefined> {
    return this.#letters.get(id);
  }

  async replay(id: string): Promise<boolean> {
    const letter = this.#letters.get(id);
    if (letter === undefined || !this.#owner.replay(letter.task)) return false;
    this.#letters.delete(id);
    await this.#owner.replaySafe(id);
    return true;
  }

  async purge(id: string): Promise<boolean> {
    if (!this.#letters.delete(id)) return false;
    this.#owner.forgotten(id);
    return true;
  }

  /** Drops what is too old; returns when the next one will be. */
  sweep(now: number): number {
    const { ttlMs } = this.#limits().deadLetters;
    for (const [id, letter] of this.#letters) {
      if (letter.diedAt + ttlMs > now) return letter.diedAt + ttlMs;
      this.#letters.delete(id);
      this.#owner.forgotten(id);
    }
    return Infinity;
  }
}
