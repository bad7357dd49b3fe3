/**
 * Operators' changes to workers at run time (`/internal/workers`, `ferry workers`):
 *
 *   add      one more worker: at a URL, or one more of Ferry's own
 *   drain    no further batch, and no capacity; its running batch ends normally. It stays in the list
 *   resume   it gets batches again
 *   remove   drained, and gone when idle: a child is stopped, a network worker forgotten. It stays away until added
 *            again or no longer listed by the config
 *
 * Nothing is persisted: a restart begins with the config. On the Redis engine `add` and `remove` change this process's
 * list only: other processes that list a worker take it over. `drain` and `resume` apply to the whole fleet
 * (`fleet/orders.ts`).
 */
import type { Clock } from "../app/clock.ts";
import type { ModelConfig } from "../app/config/config.ts";
import { grpcUrl, url } from "../app/config/kinds.ts";
import { didYouMean } from "../app/config/spelling.ts";
import { hasAddresses, isDns } from "../app/config/worker-addresses.ts";
import { Refusal } from "../core/errors.ts";
import type { WorkerDesk, WorkerName } from "../gateway/admin.ts";
import type { Events } from "../observe/events.ts";
import { hrefOf } from "./desired.ts";
import type { Membership } from "./fleet/membership.ts";
import { type Orders, shownAddress, workerKey } from "./fleet/orders.ts";
import type { ModelPool, WorkerPool } from "./pool.ts";
import type { PoolWorker } from "./worker.ts";

export interface OperatorParts {
  readonly clock: Clock;
  readonly events: Events;
  /** As configured, whether or not this process runs them. */
  readonly models: () => readonly ModelConfig[];
  readonly pool: WorkerPool;
  readonly orders: Orders;
  /** Omitted: a single process. */
  readonly membership?: Pick<Membership, "changed" | "fleet"> | undefined;
}

/** A worker found by name: here, or in another process's heartbeat. */
interface FoundWorker {
  readonly shown: WorkerName;
  /** Omitted: in another process. */
  readonly here?: { readonly pool: ModelPool; readonly worker: PoolWorker };
}

const EXAMPLES = { http: "http://gpu-1:9000/infer", grpc: "grpc://gpu-1:8001" } as const;
const URLS = {
  http: url(EXAMPLES.http, ["http", "https"], "One worker."),
  grpc: grpcUrl(EXAMPLES.grpc, "One worker."),
} as const;

export class Operator implements WorkerDesk {
  readonly #parts: OperatorParts;

  constructor(parts: OperatorParts) {
    this.#parts = parts;
  }

  async add(given: string | undefined, written: string | undefined): Promise<WorkerName> {
    const { name, backend, scaling } = this.#model(given);
    const { kind } = backend;
    if (hasAddresses(backend)) {
      if (written === undefined) throw wrong(`say where the worker is: url, like ${EXAMPLES[backend.kind]}`);
      return this.#add(name, checked(written, backend.kind));
    }
    if (written !== undefined)
      throw wrong(`Ferry starts the workers of ${name} itself (${kind}); leave out url`);
    if (scaling.apply)
      throw conflict(`scaling.apply says how many workers ${name} has; raise scaling.min instead`);
    return this.#add(name);
  }

  async #add(model: string, address?: string): Promise<WorkerName> {
    const { pool: workers, membership } = this.#parts;
    const pool = workers.of(model);
    if (pool === undefined) throw conflict("this process runs no batches, it is a gateway; ask a batcher");
    try {
      return shownName(model, await workers.add(pool, address));
    } catch (error) {
      throw conflict(error instanceof Error ? error.message : String(error));
    } finally {
      membership?.changed();
    }
  }

  drain(name: string, model?: string): WorkerName {
    return this.#order(name, model, true);
  }

  resume(name: string, model?: string): WorkerName {
    return this.#order(name, model, false);
  }

  async remove(name: string, model?: string): Promise<WorkerName & { readonly gone: boolean }> {
    const { shown, here } = this.#find(name, model);
    if (here === undefined) {
      throw conflict(
        `another process lists ${name}; ask that one, or drain it, which holds for the whole fleet`,
      );
    }
    const { pool, worker } = here;
    const from = pool.foundBy(worker);
    if (from !== undefined) throw conflict(`${from} names ${name}; drain it, or take it out of DNS`);
    if (worker.retiring && !pool.ending.has(worker)) return { ...shown, gone: false };
    const idle = worker.batch === undefined;
    const ended = this.#parts.pool.remove(pool, worker);
    if (idle) await ended;
    return { ...shown, gone: idle };
  }

  /** Configured workers that were removed. */
  removed(): readonly WorkerName[] {
    const { pools, leaving } = this.#parts.pool;
    return [...pools, ...leaving].flatMap(({ model, inputs }) =>
      [...inputs.removed].map(([key, name]) => ({
        model: model.name,
        name,
        ...(hasAddresses(model.backend) && { address: shownAddress(key) }),
      })),
    );
  }

  #order(given: string, model: string | undefined, aside: boolean): WorkerName {
    const { orders, pool, membership, events, clock } = this.#parts;
    const { shown, here } = this.#find(given, model);
    if (here?.pool.ending.has(here.worker) === true)
      throw conflict(`${given} is being removed; add it again when it is gone`);
    orders.give(workerKey(shown.model, given, shown.address), aside);
    const changes = here !== undefined && here.worker.drained !== aside;
    for (const { dispatcher } of pool.pools) orders.apply(dispatcher);
    if (changes) {
      const [state, why] = [here.worker.state(clock.now()), aside ? "put aside" : "let back in"];
      events.emit("worker.changed", { model: shown.model, worker: given, state, why });
    }
    membership?.changed();
    return shown;
  }

  #find(name: string, model: string | undefined): FoundWorker {
    if (model !== undefined) this.#model(model);
    const own = this.#parts.pool.pools.flatMap((pool) =>
      pool.workers.map((worker) => ({ shown: shownName(pool.name, worker), here: { pool, worker } })),
    );
    const others = (this.#parts.membership?.fleet.workers() ?? []).map(({ model, name, address }) => ({
      shown: { model, name, ...(address !== undefined && { address }) },
    }));
    const fits = ({ shown }: FoundWorker): boolean =>
      shown.name === name && (model ?? shown.model) === shown.model;
    const here = own.filter(fits);
    const elsewhere = others.filter(
      (each) => fits(each) && here.every(({ shown }) => shown.model !== each.shown.model),
    );
    // A worker being replaced is listed twice: choose the one that stays.
    const staying = here.filter(({ here: { worker } }) => !worker.retiring);
    const found: FoundWorker[] = [...(staying.length > 0 ? staying : here.slice(0, 1)), ...elsewhere];
    if (found.length === 1) return found[0]!;
    if (found.length > 1) {
      const models = found.map(({ shown }) => shown.model).join(", ");
      throw conflict(`several models have a worker ${name}: ${models}; say which with model`);
    }
    const out = this.removed().find((each) => each.name === name && (model ?? each.model) === each.model);
    if (out !== undefined) {
      const where = out.address === undefined ? "" : ` ${out.address}`;
      throw new Refusal("NOT_FOUND", `${name} was removed by hand; ferry workers add${where} takes it back`);
    }
    const guess = didYouMean(
      name,
      [...own, ...others].map(({ shown }) => shown.name),
    );
    throw new Refusal("NOT_FOUND", `there is no worker ${name}${guess}; GET /internal/workers lists them`);
  }

  #model(given: string | undefined): ModelConfig {
    const models = this.#parts.models();
    const names = models.map(({ name }) => name).join(", ");
    if (given === undefined && models.length > 1) throw wrong(`say for which model: ${names}`);
    const model = given === undefined ? models[0] : models.find(({ name }) => name === given);
    if (model !== undefined) return model;
    throw new Refusal("NOT_FOUND", `there is no model ${given}; one of ${names}`);
  }
}

/** Parsed as in the config. */
function checked(written: string, kind: "http" | "grpc"): string {
  if (isDns(written)) throw wrong("names of DNS belong in the config, under backend.workers");
  const read = URLS[kind].read({ value: written, expanded: false, folder: "" });
  if ("wrong" in read) throw wrong(`url ${read.wrong}`);
  return hrefOf(read.value);
}

/** Its address without secrets. */
function shownName(model: string, { name, worker: { address } }: PoolWorker): WorkerName {
  return { model, name, ...(address !== undefined && { address: shownAddress(address) }) };
}

function wrong(message: string): Refusal {
  return new Refusal("INVALID_REQUEST", message);
}

function conflict(message: string): Refusal {
  return new Refusal("INVALID_REQUEST", message, { status: 409 });
}
