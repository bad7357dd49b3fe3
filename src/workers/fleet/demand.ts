/** How many tasks this batcher should read, from its own dispatchers now and the other members' last heartbeats. */
import type { Clock } from "../../app/clock.ts";
import type { Dispatcher } from "../../dispatch/dispatcher.ts";
import type { Demand } from "../../engine/redis/reader.ts";
import type { Fleet } from "./fleet.ts";
import type { Member } from "./registry.ts";

export class FleetDemand implements Demand {
  readonly #fleet: Fleet;
  readonly #clock: Clock;
  /** Computed once per heartbeat. */
  #members: readonly Member[] = [];
  #leads = new Map<string, boolean>();
  #othersIdle = new Map<string, boolean>();
  #zones: { zone: string; deserted: boolean }[] = [];
  /** Zones of gateways, including departed ones: the tasks they accepted remain. */
  readonly #seen = new Set<string>();

  constructor(fleet: Fleet, clock: Clock) {
    this.#fleet = fleet;
    this.#clock = clock;
  }

  models(): readonly string[] {
    const now = this.#clock.now();
    return this.#fleet.self.dispatchers
      .filter(({ workers }) => workers.healthy(now) > 0 || workers.free(now) > 0)
      .map(({ rules }) => rules.name);
  }

  room(model: string): number {
    const dispatcher = this.#dispatcher(model);
    if (dispatcher === undefined) return 0;
    return dispatcher.workers.free(this.#clock.now()) * dispatcher.rules.limits.maxBatchSize;
  }

  pacePerMs(model: string): number {
    return this.#dispatcher(model)?.horizon(this.#clock.now()).perMs ?? 0;
  }

  batchSize(model: string): number {
    return this.#dispatcher(model)?.rules.limits.maxBatchSize ?? 0;
  }

  /** As in `core/policy.ts`: `fixed` waits its maximum, `adaptive` at most a quarter of a batch's time. */
  patienceMs(model: string): number {
    const dispatcher = this.#dispatcher(model);
    if (dispatcher === undefined) return 0;
    const { policy, maxWaitMs } = dispatcher.rules.limits;
    return policy === "fixed"
      ? maxWaitMs
      : Math.min(maxWaitMs, dispatcher.horizon(this.#clock.now()).batchMs / 4);
  }

  share(model: string): number {
    const own = this.pacePerMs(model);
    let others = 0;
    for (const { capacity } of this.#fleet.others(model)) others += capacity.perMs;
    return others === 0 ? 1 : own / (own + others);
  }

  othersIdle(model: string): boolean {
    this.#refresh();
    return remembered(this.#othersIdle, model, () =>
      [...this.#fleet.others(model)].some(({ workers, capacity }) => workers > 0 && capacity.idle > 0),
    );
  }

  leads(model: string): boolean {
    this.#refresh();
    const { id, zone } = this.#fleet.self;
    return remembered(this.#leads, model, () =>
      batchersOf(this.#members).every(
        (member) => member.id >= id || member.zone !== zone || !serves(member, model),
      ),
    );
  }

  zones(): readonly { readonly zone: string; readonly deserted: boolean }[] {
    this.#refresh();
    return this.#zones;
  }

  #dispatcher(model: string): Dispatcher | undefined {
    return this.#fleet.self.dispatchers.find(({ rules }) => rules.name === model);
  }

  #refresh(): void {
    const { members, self } = this.#fleet;
    if (members === this.#members) return;
    this.#members = members;
    this.#leads = new Map();
    this.#othersIdle = new Map();
    const served = new Set(batchersOf(members).map(({ zone }) => zone));
    for (const { role, zone } of members) if (role !== "batcher" && zone !== self.zone) this.#seen.add(zone);
    this.#zones = Array.from(this.#seen, (zone) => ({ zone, deserted: !served.has(zone) }));
  }
}

function batchersOf(members: readonly Member[]): Member[] {
  return members.filter(
    ({ role, models }) => role !== "gateway" && models.some(({ healthy }) => healthy > 0),
  );
}

function serves({ models }: Member, name: string): boolean {
  return models.some((model) => model.name === name && model.healthy > 0);
}

function remembered(values: Map<string, boolean>, key: string, find: () => boolean): boolean {
  let value = values.get(key);
  if (value === undefined) values.set(key, (value = find()));
  return value;
}
