/** What differs between two configs of one model, for those who run its batches (`crews.ts`). */
import { isDeepStrictEqual } from "node:util";
import type { BackendConfig, ModelConfig } from "./config/config.ts";
import type { PoolWorker } from "../workers/worker.ts";
import { fixedWorkers, isDns, hasAddresses } from "./config/worker-addresses.ts";
import { hrefOf, numberOf, sameNumber } from "../workers/taken-out.ts";

/** How names are looked up is the roster's. */
const LOOKUPS = {
  dnsMs: undefined,
  dnsServers: undefined,
} as const;

/** All but the workers, which come and go by themselves; how they are asked is theirs too. */
export function sameBackend(one: ModelConfig, other: ModelConfig): boolean {
  const settings = ({ backend, health: { askMs } }: ModelConfig): object => ({
    ...backend,
    workers: undefined,
    ...(hasAddresses(backend) && { ...LOOKUPS, askMs }),
  });
  return isDeepStrictEqual(settings(one), settings(other));
}

/** Whether a worker is one process's own or everybody's is settled when its model begins. */
export function checkKind({ name, backend }: ModelConfig, next: ModelConfig): void {
  if (hasAddresses(backend) === hasAddresses(next.backend)) return;
  throw new Error(
    `models[${name}].backend: ${backend.kind} → ${next.backend.kind} needs a restart on Redis; ` +
      `or give the model another name`,
  );
}

/** `count`: another number of workers than before, of those that have no addresses. */
export function workerChange(
  before: BackendConfig,
  after: BackendConfig,
): { came: readonly string[]; went: readonly string[]; count?: number | undefined } {
  if (hasAddresses(before) && hasAddresses(after)) {
    // Those that a name of DNS stands for are the roster's.
    const [were, are] = [fixedWorkers(before.workers), fixedWorkers(after.workers)];
    const came = are.filter((each) => !were.includes(each));
    return { came, went: were.filter((each) => !are.includes(each)) };
  }
  const { workers } = after;
  const same = workers === before.workers || typeof workers !== "number";
  return { came: [], went: [], count: same ? undefined : workers };
}

/**
 * The next backend can take this worker over, and does not have it by itself: no config lists it, or it was added again
 * while the next one was prepared.
 */
export function isExtra(slot: PoolWorker, before: ModelConfig, next: ModelConfig): boolean {
  const { address } = slot.worker;
  if (before.backend.kind !== next.backend.kind) return false;
  if (address === undefined || !hasAddresses(next.backend)) return sameNumber(before, next);
  return !listed(before).includes(address) || listed(next).includes(address);
}

function listed({ backend }: ModelConfig): string[] {
  return hasAddresses(backend) ? fixedWorkers(backend.workers).map(hrefOf) : [];
}

/** The model with those of its workers that are not to stay out. */
export function without(model: ModelConfig, staysOut: (address: string) => boolean): ModelConfig {
  const { backend } = model;
  if (!hasAddresses(backend)) return model;
  const workers = backend.workers.filter((each) => isDns(each) || !staysOut(hrefOf(each)));
  return { ...model, backend: { ...backend, workers } };
}

/** The numbers of those that are there, where the next list is the same; undefined: as many as the config says. */
export function numbersOf(
  slots: readonly PoolWorker[],
  before: ModelConfig,
  next: ModelConfig,
): number[] | undefined {
  if (hasAddresses(next.backend) || !sameNumber(before, next)) return undefined;
  return slots.flatMap(({ worker }) => numberOf(worker.name) ?? []);
}

export function staying({
  workers,
}: {
  readonly workers: { readonly slots: readonly PoolWorker[] };
}): PoolWorker[] {
  return workers.slots.filter(({ retiring }) => !retiring);
}

/** One that was put aside is missed least, then one that is idle. */
export function worth({ drained, batch }: PoolWorker): number {
  return drained ? 0 : batch === undefined ? 1 : 2;
}
