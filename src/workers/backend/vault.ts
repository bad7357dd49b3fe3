/**
 * Clients' own credentials, kept as long as their tasks may reach a worker. A task carries a name for its credential,
 * never the credential: tasks are stored and shown to operators. The name is an HMAC under a key made at each start: it
 * reveals nothing, is useless after a restart, and is equal for equal credentials, which may share a batch.
 */
import { createHmac } from "node:crypto";
import type { Clock } from "../../app/clock.ts";

interface Held {
  readonly header: string;
  readonly until: number;
}

export interface VaultRules {
  /** Kept this long after its last use: a task's maximum lifetime. */
  readonly ttlMs: number;
  readonly max: number;
}

export class Vault {
  readonly #rules: () => VaultRules;
  readonly #clock: Clock;
  readonly #key: Buffer;
  /** By name, in order of expiry. */
  readonly #held = new Map<string, Held>();

  /** Processes that name credentials alike share the `key`. */
  constructor(rules: () => VaultRules, clock: Clock, key: Buffer) {
    this.#rules = rules;
    this.#clock = clock;
    this.#key = key;
  }

  /** Returns its name; undefined when full. */
  keep(header: string): string | undefined {
    const now = this.#clock.now();
    const { ttlMs, max } = this.#rules();
    const name = createHmac("sha256", this.#key).update(header).digest("base64url");
    for (const [each, { until }] of this.#held) {
      if (until > now) break;
      this.#held.delete(each);
    }
    if (!this.#held.delete(name) && this.#held.size >= max) return undefined;
    this.#held.set(name, { header, until: now + ttlMs });
    return name;
  }

  headers(): string[] {
    return [...this.#held.values()].map(({ header }) => header);
  }

  /** Undefined: expired, or from before a restart. */
  find(name: string): string | undefined {
    const held = this.#held.get(name);
    return held === undefined || held.until <= this.#clock.now() ? undefined : held.header;
  }
}
