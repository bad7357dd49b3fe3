/** Names of workers that a backend starts itself: `gpu-1`, `gpu-2`, …; a number whose worker is gone is used again. */
export function freeNumber(kind: string, workers: readonly { readonly name: string }[]): number {
  const taken = new Set(workers.map(({ name }) => name));
  for (let number = 1; ; number++) if (!taken.has(`${kind}-${number}`)) return number;
}

/** 1, 2, … */
export function firstNumbers(count: number): number[] {
  return Array.from({ length: count }, (_, at) => at + 1);
}
