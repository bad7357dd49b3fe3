/**
 * Workers that a name of DNS stands for: looked up every `everyMs`, one worker for each address.
 *
 *   an address is new         its worker joins
 *   it is missing             nothing, until it has been missing for `graceMs`; then its worker is drained and removed.
 *                             One that comes back meanwhile has never been away
 *   the lookup fails          nothing; it is told once, and again when it works
 *   there is none at all      no error: workers may come
 *
 * A worker that cannot join (the same one is listed elsewhere) is told once and tried again each time. So is one that is
 * there: somebody else may have taken it away meanwhile.
 */
import type { Alarm, Clock } from "../app/clock.ts";
import type { DnsName } from "../app/config/worker-addresses.ts";
import type { Resolve } from "./resolver.ts";
import type { Events } from "../observe/events.ts";

export interface DiscoveryRules {
  readonly everyMs: number;
  readonly graceMs: number;
  /** More are not looked at. */
  readonly maxAddresses: number;
  /** Who is asked; empty: as the system does. */
  readonly servers: readonly string[];
}

/** Where the workers go. Both may reject, with what to say to an operator. */
export interface Joining {
  /** Does nothing where it is there, and this name brought it. */
  join(url: string, host: string, from: string): Promise<unknown>;
  /** Resolves when it is gone. */
  leave(url: string): Promise<unknown>;
}

export interface DiscoveryParts {
  readonly clock: Clock;
  readonly events: Events;
  readonly resolve: Resolve;
}

interface Seen {
  at: number;
  state: "joined" | "refused" | "leaving";
}

export class Discovery {
  readonly #model: string;
  readonly #name: DnsName;
  readonly #joining: Joining;
  readonly #parts: DiscoveryParts;
  /** By the worker's URL. */
  readonly #seen = new Map<string, Seen>();
  #rules: DiscoveryRules;
  /** Of the next lookup; undefined during one. */
  #alarm: Alarm | undefined;
  #lookedAt = 0;
  #failing = false;
  #none = false;
  #tooMany = false;
  #stopped = false;

  constructor(model: string, name: DnsName, rules: DiscoveryRules, joining: Joining, parts: DiscoveryParts) {
    this.#model = model;
    this.#name = name;
    this.#rules = rules;
    this.#joining = joining;
    this.#parts = parts;
  }

  /** Resolves after the first lookup, or after `everyMs` when it takes longer. */
  async start(): Promise<void> {
    const { clock } = this.#parts;
    let patience: Alarm | undefined;
    const enough = new Promise<void>((resolve) => {
      patience = clock.at(clock.now() + this.#rules.everyMs, resolve);
    });
    await Promise.race([this.#round(), enough]);
    patience?.cancel();
  }

  /** As operators are shown it. */
  get shown(): string {
    return this.#name.shown;
  }

  /** From now on. */
  retune(rules: DiscoveryRules): void {
    this.#rules = rules;
    if (this.#alarm !== undefined) this.#next();
  }

  stop(): void {
    this.#stopped = true;
    this.#alarm?.cancel();
  }

  async #round(): Promise<void> {
    const { clock, resolve } = this.#parts;
    this.#alarm = undefined;
    try {
      const addresses = await resolve(this.#name.hostname, this.#rules.servers);
      if (!this.#stopped) await this.#heard(addresses);
    } catch (error) {
      this.#failed(error);
    }
    this.#lookedAt = clock.now();
    this.#next();
  }

  #next(): void {
    this.#alarm?.cancel();
    if (this.#stopped) return;
    this.#alarm = this.#parts.clock.at(this.#lookedAt + this.#rules.everyMs, () => void this.#round());
  }

  async #heard(addresses: readonly string[]): Promise<void> {
    const name = this.#name;
    if (this.#failing) this.#tell("info", `${name.shown} is found again`);
    this.#failing = false;
    const none = addresses.length === 0;
    if (none && !this.#none) this.#tell("info", `${name.shown} has no address now; workers may come`);
    this.#none = none;
    const now = this.#parts.clock.now();
    for (const url of this.#urls(addresses)) if (!this.#stopped) await this.#present(url, now);
    if (this.#stopped) return;
    for (const [url, seen] of this.#seen) {
      if (seen.at < now) this.#missing(url, seen, now);
    }
  }

  /** In the same order in every process, so that all choose the same where there are too many. */
  #urls(addresses: readonly string[]): string[] {
    const { maxAddresses } = this.#rules;
    const all = [...new Set(addresses)].sort();
    const tooMany = all.length > maxAddresses;
    if (tooMany && !this.#tooMany) {
      const what = `${this.#name.shown} has ${all.length} addresses, of which ${maxAddresses} are used`;
      this.#tell("warn", what);
    }
    this.#tooMany = tooMany;
    return all.slice(0, maxAddresses).map((each) => this.#name.at(each));
  }

  async #present(url: string, now: number): Promise<void> {
    const seen = this.#seen.get(url);
    if (seen !== undefined) seen.at = now;
    if (seen?.state === "leaving") return;
    const { host, shown } = this.#name;
    try {
      await this.#joining.join(url, host, shown);
      this.#seen.set(url, { at: now, state: "joined" });
    } catch (error) {
      if (seen === undefined) this.#tell("warn", `${shown}: ${wordsOf(error)}`);
      this.#seen.set(url, { at: now, state: "refused" });
    }
  }

  #missing(url: string, seen: Seen, now: number): void {
    if (seen.state === "refused") return void this.#seen.delete(url);
    if (seen.state === "leaving" || now - seen.at < this.#rules.graceMs) return;
    seen.state = "leaving";
    const over = (): void => void this.#seen.delete(url);
    this.#joining.leave(url).then(over, over);
  }

  #failed(error: unknown): void {
    if (this.#failing || this.#stopped) return;
    this.#failing = true;
    const what = `${this.#name.shown} cannot be looked up (${wordsOf(error)})`;
    const then = `the workers that are known stay, and it is tried every ${this.#rules.everyMs} ms`;
    this.#tell("warn", `${what}; ${then}`);
  }

  #tell(level: "info" | "warn", message: string): void {
    this.#parts.events.emit("notice", { level, message: `model ${this.#model}: ${message}` });
  }
}

function wordsOf(error: unknown): string {
  const { code, message } = error as NodeJS.ErrnoException;
  return typeof code === "string" && /^E[A-Z]+$/.test(code) ? code : (message ?? String(error));
}
