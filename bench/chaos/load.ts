/**
 * The callers of a chaos run: an open loop, independent of how Ferry does, at a rate per second with
 * exponential gaps. Each sends one task, with an Idempotency-Key, and behaves as a good client
 * (test/e2e/fleet-load.ts): refused with 503 or cut off, it sends the same again after a while that doubles
 * from 100 ms to 1 s, with jitter.
 */
import { setTimeout as pause } from "node:timers/promises";
import type { Random } from "../../src/core/random.ts";
import { Caller, Ledger, type Kind } from "../../test/e2e/fleet-load.ts";
import type { Part } from "../../test/e2e/fleet.ts";

const TICK_MS = 5;
/** Longer than a gateway hangs, so that hanging alone does not cut anybody off. */
const EXCHANGE_MS = 10_000;
const BACKOFF_MS = { first: 100, most: 1000 };

export class OpenLoop {
  readonly ledger = new Ledger();
  readonly #caller: Caller;
  readonly #kinds: readonly Kind[];
  readonly #random: Random;
  readonly #open = new Set<Promise<unknown>>();
  #sent = 0;

  constructor(doors: () => readonly Part[], kinds: readonly Kind[], random: Random, patienceMs: number) {
    this.#kinds = kinds;
    this.#random = random;
    const { first, most } = BACKOFF_MS;
    const backoffMs = (refused: number): number =>
      Math.min(most, first * 2 ** (refused - 1)) * (0.5 + random.next() / 2);
    this.#caller = new Caller(doors, this.ledger, { exchangeMs: EXCHANGE_MS, patienceMs, backoffMs });
  }

  get open(): number {
    return this.#open.size;
  }

  /** Sends until then; what is under way goes on. */
  async run(perSecond: number, endsAt: number): Promise<void> {
    const meanMs = 1000 / perSecond;
    let nextAt = performance.now();
    while (nextAt < endsAt) {
      while (nextAt <= performance.now()) {
        const task = this.#caller.run(`chaos/${this.#sent}`, this.#kinds[this.#sent++ % this.#kinds.length]!);
        this.#open.add(task);
        void task.finally(() => this.#open.delete(task));
        nextAt += this.#random.exponential(meanMs);
      }
      await pause(TICK_MS);
    }
  }

  /** Waits for all answers; callers give up when their patience is over. */
  async drain(): Promise<void> {
    await Promise.all(this.#open);
  }
}
