/**
 * Which workers a model should have, and what to do about the current ones. Pure.
 *
 *   desired = config ∪ DNS ∪ added by operators − removed by operators
 *
 * A removed worker stays out until it is added again or the config no longer lists it. Network workers are identified
 * by address. Ferry's own workers are a count, `size`, set by the config, operators and the autoscaler; a removed one
 * is identified by its number (`python-2`), which also selects its GPU.
 */
import type { ModelConfig } from "../app/config/config.ts";
import { fixedWorkers, hasAddresses } from "../app/config/worker-addresses.ts";

export interface PoolInputs {
  readonly config: ModelConfig;
  readonly found: ReadonlyMap<string, FoundAddress>;
  /** Addresses added by operators and not in the config. */
  readonly added: ReadonlySet<string>;
  /** Configured workers removed by operators: address, or number of an own worker, → its name. */
  readonly removed: ReadonlyMap<string, string>;
  /** Ferry's own workers; unused for network workers. */
  readonly size: number;
}

export interface FoundAddress {
  /** `name:port` for requests to the worker. */
  readonly host: string;
  /** The DNS name shown to operators. */
  readonly from: string;
}

export interface DesiredWorker {
  readonly address: string;
  readonly host?: string;
  /** The DNS name it comes from; undefined where the config or an operator names it. */
  readonly from?: string;
}

/** By address; empty for Ferry's own workers. */
export function desiredAddresses({ config, found, added, removed }: PoolInputs): Map<string, DesiredWorker> {
  const desired = new Map<string, DesiredWorker>();
  if (!hasAddresses(config.backend)) return desired;
  for (const [address, { host, from }] of found) desired.set(address, { address, host, from });
  for (const address of listedAddresses(config)) desired.set(address, { address });
  for (const address of removed.keys()) desired.delete(address);
  for (const address of added) desired.set(address, { address });
  return desired;
}

export interface ActualWorker {
  readonly address: string | undefined;
  readonly number: string | undefined;
  readonly retiring: boolean;
  /** It retires because its backend was replaced: its successor may join before it is gone. */
  readonly replaced: boolean;
  readonly drained: boolean;
  readonly busy: boolean;
  /** Share of a healthy worker's pace; 0 while down. */
  readonly pace: number;
}

export interface WorkerPlan<W extends ActualWorker> {
  readonly retire: readonly W[];
  /** To be started, except on machines that still have a worker, perhaps retiring. */
  readonly start: readonly DesiredWorker[];
  readonly grow: number;
}

/** `actual`: in join order. `starting`: own workers being started. */
export function planOf<W extends ActualWorker>(
  inputs: PoolInputs,
  actual: readonly W[],
  starting = 0,
): WorkerPlan<W> {
  const { config, removed, size } = inputs;
  const live = actual.filter(({ retiring }) => !retiring);
  if (hasAddresses(config.backend)) {
    const desired = desiredAddresses(inputs);
    const present = new Set(actual.filter(({ replaced }) => !replaced).map(({ address }) => address));
    return {
      retire: live.filter(({ address }) => !desired.has(address ?? "")),
      start: [...desired.values()].filter(({ address }) => !present.has(address)),
      grow: 0,
    };
  }
  const out = live.filter(({ number }) => removed.has(number ?? ""));
  // The autoscaler replaces a worker that an operator drained.
  const counted = live.filter((each) => !out.includes(each) && !(config.scaling.apply && each.drained));
  const excess = Math.max(0, counted.length + starting - size);
  const expendable = counted
    .toReversed()
    .toSorted(
      (a, b) => Number(b.drained) - Number(a.drained) || a.pace - b.pace || Number(a.busy) - Number(b.busy),
    );
  return {
    retire: [...out, ...expendable.slice(0, excess)],
    start: [],
    grow: Math.max(0, size - counted.length - starting),
  };
}

/** Operators' changes that remain when the config becomes `next`. */
export function inputsAfter(
  { config, found, added, removed, size }: PoolInputs,
  next: ModelConfig,
): PoolInputs {
  const listed = new Set(listedAddresses(next));
  if (hasAddresses(next.backend)) {
    const sameKind = config.backend.kind === next.backend.kind;
    return {
      config: next,
      found: sameKind ? found : new Map(),
      added: new Set(sameKind ? [...added].filter((each) => !listed.has(each)) : []),
      removed: new Map([...removed].filter(([each]) => listed.has(each))),
      size: 0,
    };
  }
  const same = sameNumber(config, next);
  return {
    config: next,
    found: new Map(),
    added: new Set(),
    // Another number, or another kind, is a new list.
    removed: same && !next.scaling.apply ? removed : new Map(),
    // The autoscaler sets it itself.
    size: same || (next.scaling.apply && !hasAddresses(config.backend)) ? size : next.backend.workers,
  };
}

export function newInputs(config: ModelConfig): PoolInputs {
  const { backend } = config;
  const size = hasAddresses(backend) ? 0 : backend.workers;
  return { config, found: new Map(), added: new Set(), removed: new Map(), size };
}

/** Whether the config lists it, so that it would come back; `key` as in `removed`. */
export function isListed(config: ModelConfig, key: string): boolean {
  const { backend, scaling } = config;
  if (hasAddresses(backend)) return listedAddresses(config).includes(key);
  // The autoscaler replaces a removed worker.
  return !scaling.apply && Number(key) <= backend.workers;
}

export function listedAddresses({ backend }: ModelConfig): string[] {
  return hasAddresses(backend) ? fixedWorkers(backend.workers).map(hrefOf) : [];
}

export function sameNumber({ backend }: ModelConfig, next: ModelConfig): boolean {
  return backend.kind === next.backend.kind && backend.workers === next.backend.workers;
}

/** Of an own worker: `python-2`, or in a fleet `python-2@f1c3a`. */
export function numberOf(name: string): string | undefined {
  return /-(\d+)(?:@\w+)?$/.exec(name)?.[1];
}

export function hrefOf(address: string): string {
  return URL.parse(address)?.href ?? address;
}
