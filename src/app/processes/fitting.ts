/**
 * How many processes fit: the machine (`--processes auto`), a rate (`ferry plan`).
 *
 * CPU in µs of a request of 2 KB, answered, on the memory engine without TLS. For planning, so the upper end of a range;
 * `node bench/scaleout.ts --only CASE` measures it. A larger body costs more, most of it in the gateway.
 */
export const CPU_US = {
  /** One process that does it all; scenario `10k` of bench/run.ts. */
  single: 70,
  /** A gateway process; case `cores-50k`. */
  gateway: 77,
  /** The core process; case `cores-50k`. A closed loop, where nothing waits for long, costs half of it. */
  core: 25,
} as const;

/** Share of a core that is planned with: the rest is for bursts, and for the gateways left while one restarts. */
export const TARGET_SHARE = 0.7;

/** Beyond it `auto` adds no gateways: six have more than one core process can serve. */
const MAX_AUTO = 6;
export const MAX_PROCESSES = 64;

/**
 * Of a machine: half its cores, beside the core process; the other cores are for the workers. Below 4 cores one process
 * does it all: the way between processes would cost what a second core gains (`node bench/scaleout.ts`, cases
 * `two-memory` and `two-cores`).
 */
export function fittingProcesses(cores: number): number {
  return cores < 4 ? 1 : Math.min(MAX_AUTO, Math.floor(cores / 2));
}

/** Of a rate. Shares are of a core, in each process of the kind. */
export interface NeededProcesses {
  /** More than one where the rate is more than one core process can serve. */
  readonly machines: number;
  /** On each machine; 1: one process that does it all. */
  readonly processes: number;
  /** On each machine: the gateways and the core process. */
  readonly cores: number;
  /** Of the one process, or of each gateway. */
  readonly share: number;
  /** Of the core process; undefined: there is none. */
  readonly coreShare: number | undefined;
}

export function neededProcesses(perSecond: number): NeededProcesses {
  const single = share(perSecond, CPU_US.single);
  if (single <= TARGET_SHARE) {
    return { machines: 1, processes: 1, cores: 1, share: single, coreShare: undefined };
  }
  const machines = Math.ceil(share(perSecond, CPU_US.core) / TARGET_SHARE);
  const each = perSecond / machines;
  // One gateway beside a core process would be slower than one process.
  const processes = Math.max(2, Math.ceil(share(each, CPU_US.gateway) / TARGET_SHARE));
  return {
    machines,
    processes,
    cores: processes + 1,
    share: share(each, CPU_US.gateway) / processes,
    coreShare: share(each, CPU_US.core),
  };
}

function share(perSecond: number, us: number): number {
  return (perSecond * us) / 1e6;
}
