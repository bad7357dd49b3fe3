/**
 * A connection that is kept: when it goes down, the next one is made in the background, for ever.
 *
 *   connecting ──► preparing ──► up ──► down ──► wait ──► connecting …      close() leads out from everywhere
 *
 * `prepare` does what makes a fresh connection useful (looks whether this server is a primary, subscribes);
 * only when it is through is the link shown. The wait before attempt n after a loss is
 * min(1000, 50·2^n) ms · (1 + random/2), n from 0; a link that came up starts it anew.
 *
 * Whoever has time waits in `ready`; each waits no longer than it says.
 */
import type { Alarm, Clock } from "../../../app/clock.ts";
import { addressOf, LinkDown, RedisLink } from "./link.ts";
import type { LinkOptions } from "./link.ts";

const FIRST_WAIT_MS = 50;
const MAX_WAIT_MS = 1000;

export interface Keeping {
  readonly clock: Clock;
  readonly random: () => number;
  /** Runs on each fresh link before it is shown; a rejection drops the link. */
  readonly prepare: (link: RedisLink) => Promise<void>;
  /** A link is up (`why` undefined), or the one that was up is not, or an attempt failed. */
  readonly changed: (why: Error | undefined) => void;
}

interface Waiter {
  readonly resolve: (link: RedisLink) => void;
  readonly reject: (why: Error) => void;
  readonly alarm: Alarm;
}

export class KeptLink {
  readonly #options: LinkOptions;
  readonly #address: string;
  readonly #keeping: Keeping;
  readonly #waiters = new Set<Waiter>();
  #link: RedisLink | undefined;
  /** Connected, but not prepared. */
  #fresh: RedisLink | undefined;
  #why: Error;
  #attempt = 0;
  #alarm: Alarm | undefined;
  readonly #closing = new AbortController();

  constructor(options: LinkOptions, keeping: Keeping) {
    this.#options = options;
    this.#keeping = keeping;
    this.#address = addressOf(options.host, options.port);
    this.#why = new Error(`redis ${this.#address} is not connected yet`);
    void this.#connect();
  }

  /** Undefined while there is none. */
  get link(): RedisLink | undefined {
    return this.#link;
  }

  /** Why there is no link. */
  get why(): Error {
    return this.#why;
  }

  /** The link, now or when it is up; rejects with LinkDown (nothing written) at `until`. */
  ready(until: number): Promise<RedisLink> {
    if (this.#link !== undefined) return Promise.resolve(this.#link);
    if (this.#closed) return Promise.reject(new LinkDown(this.#why.message, false));
    return new Promise((resolve, reject) => {
      const alarm = this.#keeping.clock.at(until, () => {
        this.#waiters.delete(waiter);
        reject(new LinkDown(this.#why.message, false));
      });
      const waiter = { resolve, reject, alarm };
      this.#waiters.add(waiter);
    });
  }

  /** Drops the link for a new one: this one leads to a server that is no longer the right one. */
  renew(): void {
    this.#link?.close();
  }

  /** Sends away those who wait in `ready`: what they want may be elsewhere now. */
  release(): void {
    for (const { reject, alarm } of this.#waiters) {
      alarm.cancel();
      reject(new LinkDown(this.#why.message, false));
    }
    this.#waiters.clear();
  }

  close(): void {
    if (this.#closed) return;
    this.#closing.abort();
    this.#why = new Error(`the connection to redis ${this.#address} was closed here`);
    this.#alarm?.cancel();
    this.#fresh?.close();
    this.#link?.close();
    this.release();
  }

  get #closed(): boolean {
    return this.#closing.signal.aborted;
  }

  async #connect(): Promise<void> {
    try {
      const link = await RedisLink.connect(this.#options, this.#keeping.clock, this.#closing.signal);
      if (this.#closed) return link.close();
      this.#fresh = link;
      await this.#keeping.prepare(link);
      this.#fresh = undefined;
      if (this.#closed) return link.close();
      if (!link.up) throw new Error(`redis ${link.address} closed the connection`);
      this.#show(link);
    } catch (error) {
      this.#fresh?.close();
      this.#fresh = undefined;
      this.#lost(error as Error);
    }
  }

  #show(link: RedisLink): void {
    this.#attempt = 0;
    this.#link = link;
    link.onDown = (why) => {
      this.#link = undefined;
      this.#lost(why);
    };
    this.#keeping.changed(undefined);
    for (const { resolve, alarm } of this.#waiters) {
      alarm.cancel();
      resolve(link);
    }
    this.#waiters.clear();
  }

  #lost(why: Error): void {
    if (this.#closed) return;
    this.#why = why;
    const { clock, random } = this.#keeping;
    const waitMs = Math.min(MAX_WAIT_MS, FIRST_WAIT_MS * 2 ** Math.min(this.#attempt++, 10));
    this.#alarm = clock.at(clock.now() + waitMs * (1 + random() / 2), () => void this.#connect());
    this.#keeping.changed(why);
  }
}
