/** How the roster calls workers, reads what people write, and says no. */
import type { ModelConfig } from "../app/config/config.ts";
import { Refusal } from "../core/errors.ts";
import type { PoolWorker } from "./worker.ts";
import { fixedWorkers, isDns, hasAddresses } from "../app/config/worker-addresses.ts";
import type { FleetWorker } from "./fleet/fleet.ts";
import { shownAddress } from "./fleet/lease-names.ts";
import { workerKey } from "./fleet/orders.ts";
import type { WorkerName } from "../gateway/admin.ts";
import { grpcUrl, url } from "../app/config/kinds.ts";
import { hrefOf } from "./taken-out.ts";

/** A worker that was found by its name: here, or in what another process says. */
export interface Found extends WorkerName {
  readonly model: string;
  readonly slot?: PoolWorker;
}

export const EXAMPLES = { http: "http://gpu-1:9000/infer", grpc: "grpc://gpu-1:8001" } as const;
const URLS = {
  http: url(EXAMPLES.http, ["http", "https"], "One worker."),
  grpc: grpcUrl(EXAMPLES.grpc, "One worker."),
} as const;

/** As the config would read it. */
export function checked(written: string, kind: "http" | "grpc"): string {
  if (isDns(written)) throw wrong("names of DNS belong in the config, under backend.workers");
  const read = URLS[kind].read({ value: written, expanded: false, folder: "" });
  if ("wrong" in read) throw wrong(`url ${read.wrong}`);
  return read.value;
}

type Named = WorkerName & { readonly model: string };

export function nameOf(model: string, { name, worker: { address } }: PoolWorker): Named {
  return shownName({ model, name, address });
}

interface Worker {
  readonly model: string;
  readonly name: string;
  readonly address?: string | undefined;
}

/** Its address without what may be secret in it. */
export function shownName({ model, name, address }: Worker): Named {
  return { model, name, ...(address !== undefined && { address: shownAddress(address) }) };
}

/**
 * A worker that is drained in a model that is gone is so in a new one that lists it: only the model's name is another. The keys
 * there.
 */
export function drainedElsewhere(
  before: Iterable<string>,
  after: readonly ModelConfig[],
  isDrained: (key: string) => boolean,
): string[] {
  const known = new Set(before);
  const gone = [...known].filter((name) => after.every((model) => model.name !== name));
  return after
    .filter(({ name }) => !known.has(name))
    .flatMap(({ name, backend }) => {
      const listed = hasAddresses(backend) ? fixedWorkers(backend.workers).map(hrefOf).map(shownAddress) : [];
      const drained = listed.filter((shown) => gone.some((model) => isDrained(workerKey(model, "", shown))));
      return drained.map((shown) => workerKey(name, "", shown));
    });
}

export function beatName({ model, name, address }: FleetWorker): Found {
  return { model, name, ...(address !== undefined && { address }) };
}

export function same(one: Found): (other: Found) => boolean {
  return (other) => other.model === one.model && other.name === one.name;
}

export function wrong(message: string): Refusal {
  return new Refusal("INVALID_REQUEST", message);
}

export function conflict(message: string): Refusal {
  return new Refusal("INVALID_REQUEST", message, { status: 409 });
}
