/**
 * Workers behind a DNS name, resolved every `everyMs`: one worker per address (A and AAAA).
 *
 *   new address               reported
 *   missing address           kept until absent for three times `everyMs`: DNS servers disagree for a while
 *   failed lookup             ignored; logged once, and again when it works
 *   no address at all         no error: workers may come
 */
import { lookup, Resolver } from "node:dns/promises";
import type { Alarm, Clock } from "../app/clock.ts";
import type { DnsName } from "../app/config/worker-addresses.ts";
import type { Events } from "../observe/events.ts";

export interface DiscoveryRules {
  readonly everyMs: number;
  /** DNS servers to ask; empty: the system's. */
  readonly servers: readonly string[];
}

export interface DiscoveryParts {
  readonly clock: Clock;
  readonly events: Events;
  readonly resolve: Resolve;
}

/** Lookups in which an address must be missing before its worker is removed. */
const MISSING_LOOKUPS = 3;
/** Per name: as many as a config may list. */
const MAX_ADDRESSES = 1024;

export class Discovery {
  readonly name: DnsName;
  readonly #model: string;
  readonly #rules: () => DiscoveryRules;
  readonly #changed: () => Promise<void>;
  readonly #parts: DiscoveryParts;
  /** The worker's URL → when an answer last had it. */
  readonly #seen = new Map<string, number>();
  /** Next lookup; undefined during one. */
  #alarm: Alarm | undefined;
  #lookedAt = 0;
  #failing = false;
  #none = false;
  #tooMany = false;
  #stopped = false;

  /** `changed` is called after each answer; the next lookup waits for it. */
  constructor(
    model: string,
    name: DnsName,
    rules: () => DiscoveryRules,
    changed: () => Promise<void>,
    parts: DiscoveryParts,
  ) {
    this.#model = model;
    this.name = name;
    this.#rules = rules;
    this.#changed = changed;
    this.#parts = parts;
  }

  get urls(): Iterable<string> {
    return this.#seen.keys();
  }

  /** Resolves after the first lookup, or after `everyMs` when it takes longer. */
  async start(): Promise<void> {
    const { clock } = this.#parts;
    let patience: Alarm | undefined;
    const enough = new Promise<void>((resolve) => {
      patience = clock.at(clock.now() + this.#rules().everyMs, resolve);
    });
    await Promise.race([this.#round(), enough]);
    patience?.cancel();
  }

  /** The rules changed: the next lookup may be due sooner. */
  wake(): void {
    if (this.#alarm !== undefined) this.#next();
  }

  /** The last addresses stay. */
  stop(): void {
    this.#stopped = true;
    this.#alarm?.cancel();
  }

  async #round(): Promise<void> {
    const { clock, resolve } = this.#parts;
    this.#alarm = undefined;
    try {
      const addresses = await resolve(this.name.hostname, this.#rules().servers);
      if (!this.#stopped) {
        this.#heard(addresses);
        await this.#changed();
      }
    } catch (error) {
      this.#failed(error);
    }
    this.#lookedAt = clock.now();
    this.#next();
  }

  #next(): void {
    this.#alarm?.cancel();
    if (this.#stopped) return;
    this.#alarm = this.#parts.clock.at(this.#lookedAt + this.#rules().everyMs, () => void this.#round());
  }

  #heard(addresses: readonly string[]): void {
    const { shown } = this.name;
    if (this.#failing) this.#log("info", `${shown} is found again`);
    this.#failing = false;
    const none = addresses.length === 0;
    if (none && !this.#none) this.#log("info", `${shown} has no address now; workers may come`);
    this.#none = none;
    const now = this.#parts.clock.now();
    for (const url of this.#urlsOf(addresses)) this.#seen.set(url, now);
    const since = now - MISSING_LOOKUPS * this.#rules().everyMs;
    for (const [url, at] of this.#seen) if (at < now && at <= since) this.#seen.delete(url);
  }

  /** Sorted, so that all processes choose the same where there are too many. */
  #urlsOf(addresses: readonly string[]): string[] {
    const all = [...new Set(addresses)].sort();
    const tooMany = all.length > MAX_ADDRESSES;
    if (tooMany && !this.#tooMany) {
      const what = `${this.name.shown} has ${all.length} addresses, of which ${MAX_ADDRESSES} are used`;
      this.#log("warn", what);
    }
    this.#tooMany = tooMany;
    return all.slice(0, MAX_ADDRESSES).map((each) => this.name.at(each));
  }

  #failed(error: unknown): void {
    if (this.#failing || this.#stopped) return;
    this.#failing = true;
    const { code, message } = error as NodeJS.ErrnoException;
    const why = typeof code === "string" && /^E[A-Z]+$/.test(code) ? code : (message ?? String(error));
    const then = `the workers that are known stay, and it is tried every ${this.#rules().everyMs} ms`;
    this.#log("warn", `${this.name.shown} cannot be looked up (${why}); ${then}`);
  }

  #log(level: "info" | "warn", message: string): void {
    this.#parts.events.emit("notice", { level, message: `model ${this.#model}: ${message}` });
  }
}

/** Rejects with a `code` when nothing is known. `servers`: the only ones to ask; empty: the system's. */
export type Resolve = (hostname: string, servers?: readonly string[]) => Promise<readonly string[]>;

const TIMEOUT_MS = 2000;
const TRIES = 2;

/**
 * Asks DNS servers first, without libc and its threads; an empty answer means that the name has no address now. Where
 * they do not know the name (/etc/hosts, a search domain as in Kubernetes, no server at all), asks the system resolver.
 * Rejects when neither knows: that may be a DNS fault, which must not remove workers.
 */
export const systemResolve: Resolve = async (hostname, servers = []) => {
  const resolver = new Resolver({ timeout: TIMEOUT_MS, tries: TRIES });
  if (servers.length > 0) resolver.setServers(servers);
  const onError = servers.length > 0 ? emptyOrThrow : emptyWhereKnown;
  const [v4, v6] = await Promise.all([
    resolver.resolve4(hostname).catch(onError),
    resolver.resolve6(hostname).catch(onError),
  ]);
  // Half an answer would look as if the other half had gone.
  if (v4 !== undefined && v6 !== undefined) return [...v4, ...v6];
  const found = await lookup(hostname, { all: true });
  return found.map(({ address }) => address);
};

/** Empty: the name exists without an address of this kind; undefined: unknown. */
function emptyWhereKnown(error: unknown): readonly string[] | undefined {
  return (error as NodeJS.ErrnoException).code === "ENODATA" ? [] : undefined;
}

function emptyOrThrow(error: unknown): readonly string[] {
  const empty = emptyWhereKnown(error);
  if (empty === undefined) throw error;
  return empty;
}
