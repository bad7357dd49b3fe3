/** A registry on a real server, and members that are played by the test. */
import { SystemClock } from "../../../src/app/clock.ts";
import { RedisNodes } from "../../../src/engine/redis/client/nodes.ts";
import { RedisRegistry } from "../../../src/workers/fleet/registry.ts";
import type { Beat, BeatReply, Registry } from "../../../src/workers/fleet/registry.ts";
import { Events } from "../../../src/observe/events.ts";

export const TAG = "f0h";
export const MODEL = "m";

/** With a shared prefix, registries are the same one. */
export function key(prefix: string): (name: string) => string {
  return (name) => `${prefix}:{${TAG}}:${name}`;
}

export function openNodes(url: string, commandTimeoutMs = 20_000): Promise<RedisNodes> {
  return RedisNodes.open(
    {
      url,
      tags: [TAG],
      connectTimeoutMs: 20_000,
      commandTimeoutMs,
      name: "ferry-test",
      durability: "local",
      waitTimeoutMs: 200,
    },
    new SystemClock(),
    new Events(),
  );
}

export function registryOf(
  nodes: RedisNodes,
  prefix: string,
  aliveMs: number,
  now?: () => number,
): RedisRegistry {
  return new RedisRegistry(nodes, { aliveMs, key: key(prefix), ...(now && { now }) });
}

interface Holding {
  until: number;
  leaving: boolean;
  running: boolean;
}

/** A batcher that keeps the rules of membership.ts, on a clock that the test moves. */
export class Actor {
  readonly id: string;
  readonly holdings = new Map<string, Holding>();
  listed: Beat["listed"];
  last: BeatReply | undefined;
  lastBeatAt = -Infinity;
  readonly #registry: Registry;
  readonly #aliveMs: number;
  readonly #now: () => number;

  constructor(
    id: string,
    leases: readonly string[],
    registry: Registry,
    aliveMs: number,
    now: () => number,
    model = MODEL,
  ) {
    this.id = id;
    this.listed = [{ model, leases }];
    this.#registry = registry;
    this.#aliveMs = aliveMs;
    this.#now = now;
  }

  /** What it may use or give back by its own clock. */
  held(): string[] {
    return [...this.holdings].filter(([, { until }]) => this.#now() < until).map(([lease]) => lease);
  }

  usable(): string[] {
    return this.held().filter((lease) => !this.holdings.get(lease)!.leaving);
  }

  async beat(): Promise<BeatReply> {
    const sentAt = (this.lastBeatAt = this.#now());
    const held = this.held();
    const worth = (lease: string): number => {
      const { leaving, running } = this.holdings.get(lease)!;
      return leaving ? 0 : running ? 2 : 1;
    };
    const reply = await this.#registry.beat({
      member: { id: this.id, zone: "", role: "batcher", version: "", models: [], workers: [], doors: [] },
      listed: this.listed,
      held: held.toSorted((a, b) => worth(a) - worth(b)),
      releasing: held.filter((lease) => {
        const { leaving, running } = this.holdings.get(lease)!;
        return leaving && !running;
      }),
    });
    const heldUntil = sentAt + 0.9 * this.#aliveMs;
    for (const [lease, holding] of this.holdings) {
      if (!reply.held.includes(lease)) holding.until = -Infinity;
      if (!reply.held.includes(lease) && !holding.running) this.holdings.delete(lease);
    }
    for (const lease of reply.held) {
      const running = this.holdings.get(lease)?.running ?? false;
      this.holdings.set(lease, { until: heldUntil, leaving: reply.giveBack.includes(lease), running });
    }
    this.last = reply;
    return reply;
  }
}
