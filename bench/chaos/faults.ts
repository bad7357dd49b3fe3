/**
 * What happens to a fleet in a chaos run: every 2 to 10 s one component, drawn by the seed, is killed
 * (kill -9) or hangs (SIGSTOP) for 1 to 4 s. Whatever was killed is started again after 0.5 to 3 s.
 *
 *   gateway, batcher      killed or hung; one of each kind is always left alone
 *   primary               killed, hung, or killed while its replica lags: the replica hangs for 600 ms
 *                         before, so that it has not what the primary wrote last
 *   replica               killed or hung
 *
 * The promise is about the loss of any one process or Redis node. So Redis is left alone until it is well
 * again (store.ts): a gateway or a batcher is taken instead. Gateways and batchers may die meanwhile.
 *
 * A part that does not come up because Redis is away is started again, as any supervisor would.
 */
import { setTimeout as pause } from "node:timers/promises";
import type { Random } from "../../src/core/random.ts";
import type { Fleet, Part, Role } from "../../test/e2e/fleet.ts";
import type { Server } from "../../test/engine/redis-client/servers.ts";
import { untilWell, type Shard, type Store } from "./store.ts";
import type { Workers } from "./workers.ts";

const LAG_MS = 600;
const START_AGAIN_MS = 500;
const WELL_LIMIT_MS = 60_000;
const KILL_SHARE = 0.7;

type Component = Role | "primary" | "replica";

export interface Fault {
  /** "gateway killed", "primary killed, replica lagging", … */
  readonly kind: string;
  /** When it was dead, or hung; performance.now(). */
  readonly at: number;
  readonly ofRedis: boolean;
  /** Redis was well when it began. */
  readonly redisWell: boolean;
  /** Of a killed batcher: the markers of the calls that it left. */
  readonly cut: readonly string[];
}

export class Faults {
  readonly list: Fault[] = [];
  /** Parts that nobody killed, and that are gone: what they said last. */
  readonly deaths: string[] = [];
  readonly #fleet: Fleet;
  readonly #store: Store;
  readonly #workers: Workers;
  readonly #random: Random;
  readonly #tell: (text: string) => void;
  readonly #hit = new Set<Part>();
  readonly #repairs: Promise<void>[] = [];
  #redisRepair = false;

  constructor(fleet: Fleet, store: Store, workers: Workers, random: Random, tell: (text: string) => void) {
    this.#fleet = fleet;
    this.#store = store;
    this.#workers = workers;
    this.#random = random;
    this.#tell = tell;
  }

  /** Until the time is over; then waits until everything runs again. A repair that fails ends the run. */
  async run(endsAt: number): Promise<void> {
    const failure = Promise.withResolvers<never>();
    failure.promise.catch(() => {});
    for (;;) {
      const waitMs = this.#between(2000, 10_000);
      if (performance.now() + waitMs > endsAt) break;
      await Promise.race([pause(waitMs), failure.promise]);
      this.#lookAfter();
      const repair = await this.#strike();
      this.#repairs.push(repair().catch((error: unknown) => failure.reject(error)));
    }
    await Promise.race([Promise.all(this.#repairs), failure.promise]);
    this.#lookAfter();
  }

  /** Takes note of parts that ended by themselves. */
  #lookAfter(): void {
    for (const part of [...this.#fleet.gateways, ...this.#fleet.batchers]) {
      if (part.runs || this.#hit.has(part)) continue;
      this.#hit.add(part);
      this.deaths.push(`a ${part.role} ended by itself:\n${part.stderr().slice(-2000)}`);
      this.#tell(this.deaths.at(-1)!);
      this.#repairs.push(this.#startAgain(part.role, 0));
    }
  }

  /** Does it, and returns what makes it good again. */
  async #strike(): Promise<() => Promise<void>> {
    const well = !this.#redisRepair && (await this.#store.isWell().catch(() => false));
    const component = this.#draw(well);
    if (component === "primary" || component === "replica") {
      this.#redisRepair = true;
      const shard = await this.#store.pick(this.#random);
      const repair = await (component === "primary" ? this.#hitPrimary(shard) : this.#hitReplica(shard));
      return async () => {
        await repair();
        await untilWell(this.#store, WELL_LIMIT_MS);
        this.#redisRepair = false;
      };
    }
    const parts = this.#whole(component);
    return this.#hitPart(parts[Math.floor(this.#random.next() * parts.length)]!, well);
  }

  #draw(redisWell: boolean): Component {
    const redis: Component[] = this.#store.hasReplicas ? ["primary", "replica"] : ["primary"];
    const parts: Component[] = (["gateway", "batcher"] as const).filter(
      (role) => this.#whole(role).length > 1,
    );
    const able = [...parts, ...(redisWell || parts.length === 0 ? redis : [])];
    return able[Math.floor(this.#random.next() * able.length)]!;
  }

  /** Those that run and are not hung. */
  #whole(role: Role): Part[] {
    const parts = role === "gateway" ? this.#fleet.gateways : this.#fleet.batchers;
    return parts.filter((part) => part.runs && !this.#hit.has(part));
  }

  async #hitPart(part: Part, redisWell: boolean): Promise<() => Promise<void>> {
    this.#hit.add(part);
    if (this.#random.next() < KILL_SHARE) {
      const restMs = this.#between(500, 3000);
      const at = performance.now();
      const cut = await this.#workers.cutBy(() => part.kill());
      this.#note(`${part.role} killed`, { at, redisWell, cut: part.role === "batcher" ? cut : [] });
      return () => this.#startAgain(part.role, restMs);
    }
    const hangMs = this.#between(1000, 4000);
    part.pause();
    this.#note(`${part.role} hung`, { redisWell });
    return async () => {
      await pause(hangMs);
      part.resume();
      this.#hit.delete(part);
    };
  }

  async #hitPrimary(shard: Shard): Promise<() => Promise<void>> {
    const { primary, replica } = shard;
    const drawn = this.#random.next();
    if (drawn < 0.3) return this.#hang(primary, "primary");
    const restMs = this.#between(500, 3000);
    const lags = replica !== undefined && drawn < 0.65;
    if (lags) {
      replica.pause();
      await pause(LAG_MS);
    }
    const at = performance.now();
    await primary.kill();
    if (lags) replica.resume();
    this.#note(lags ? "primary killed, replica lagging" : "primary killed", { at, ofRedis: true });
    return async () => {
      await Promise.all([this.#store.replace(shard), pause(restMs)]);
      await this.#store.revive(primary);
    };
  }

  async #hitReplica({ replica }: Shard): Promise<() => Promise<void>> {
    if (this.#random.next() >= KILL_SHARE) return this.#hang(replica!, "replica");
    const restMs = this.#between(500, 3000);
    await replica!.kill();
    this.#note("replica killed", { ofRedis: true });
    return async () => {
      await pause(restMs);
      await this.#store.revive(replica!);
    };
  }

  #hang(server: Server, name: Component): () => Promise<void> {
    const hangMs = this.#between(1000, 4000);
    server.pause();
    this.#note(`${name} hung`, { ofRedis: true });
    return async () => {
      await pause(hangMs);
      server.resume();
    };
  }

  async #startAgain(role: Role, restMs: number): Promise<void> {
    await pause(restMs);
    for (;;) {
      try {
        await this.#fleet.add(role);
        return;
      } catch {
        await pause(START_AGAIN_MS);
      }
    }
  }

  #note(kind: string, facts: Partial<Fault> = {}): void {
    const fault = { at: performance.now(), ofRedis: false, redisWell: true, cut: [], ...facts, kind };
    this.list.push(fault);
    this.#tell(kind);
  }

  #between(low: number, high: number): number {
    return low + this.#random.next() * (high - low);
  }
}
