/**
 * How many gateway processes fit a machine: half its cores, at most 6, beside the core process; the other cores are for
 * the workers, and six gateways have more than one core process can serve. Below 4 cores one process does it all: the
 * way between processes would cost what a second core gains (`node bench/cores.ts`).
 */
export function fittingProcesses(cores: number): number {
  return cores < 4 ? 1 : Math.min(6, Math.floor(cores / 2));
}
