/**
 * Bytes that this process holds for its clients: bounded, and shared among the clients.
 *
 * A client may hold at most as many bytes as are left free (`core/share.ts`).
 *
 * Two of them, for all listeners together. Request bodies: counted as they arrive, until the last byte is there.
 * Answers: counted from when they are written until the client's connection has taken them.
 */
import { hasShare, Shares } from "../core/share.ts";

export class ByteBudget {
  readonly #max: () => number;
  readonly #shares = new Shares();
  /** By client: the requests that wait for room. */
  readonly #waiting = new Map<string, Set<() => void>>();

  /** `max` may change while bytes are held. */
  constructor(max: () => number) {
    this.#max = max;
  }

  get total(): number {
    return this.#shares.total;
  }

  /** Whether the client may hold so many more; twice, because with them, too, it holds no more than is left free. */
  fits(client: string, bytes: number): boolean {
    return this.#shares.fits(client, 2 * bytes, this.#max());
  }

  add(client: string, bytes: number): void {
    this.#shares.add(client, bytes);
  }

  remove(client: string, bytes: number): void {
    this.#shares.remove(client, bytes);
    if (this.#waiting.size > 0) this.#wake();
  }

  /**
   * Whether the client holds less than is left free, or than its least share: answers to requests under way can take the
   * total far beyond the bound, and then those who take theirs must not wait for the one who does not.
   */
  hasRoom(client: string): boolean {
    const { total, holders } = this.#shares;
    return total === 0 || hasShare(this.#shares.heldBy(client), total, this.#max(), holders);
  }

  /** Calls `resume` once, when the client has room. */
  wait(client: string, resume: () => void): void {
    const waiting = this.#waiting.get(client);
    if (waiting === undefined) this.#waiting.set(client, new Set([resume]));
    else waiting.add(resume);
  }

  /** It is no longer waited for. */
  leave(client: string, resume: () => void): void {
    const waiting = this.#waiting.get(client);
    if (waiting?.delete(resume) === true && waiting.size === 0) this.#waiting.delete(client);
  }

  #wake(): void {
    for (const [client, waiting] of this.#waiting) {
      if (!this.hasRoom(client)) continue;
      this.#waiting.delete(client);
      for (const resume of waiting) resume();
    }
  }
}

/** The budgets of one process. */
export class ClientBytes {
  readonly bodies: ByteBudget;
  readonly answers: ByteBudget;

  /** `max`: of each of the two. A single client gets half of it. */
  constructor(max: () => number) {
    this.bodies = new ByteBudget(max);
    this.answers = new ByteBudget(max);
  }
}
