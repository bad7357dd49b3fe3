/**
 * What a batch of n takes: S(n) = baseMs + n · perTaskMs, written `200ms`, `0.2s` or `36+1n`; and what follows
 * from it for any policy. λ is arrivals per ms, k workers, B the largest batch.
 *
 *   capacity     k · B / S(B)
 *   load         λ / capacity
 *   least batch  m = max(1, λ·base / (k − λ·perTask)): with smaller ones on average the workers fall behind
 *   bound        the q-quantile of latency is at least base + perTask·m + q·(m − 1)/λ, whatever the policy does:
 *                whoever opens a batch of m waits for m − 1 others, and even spacing is the best there is. With
 *                constant S and dense arrivals that is S(1 + q/k).
 */
export interface ServiceTime {
  readonly baseMs: number;
  readonly perTaskMs: number;
}

const PATTERN = /^(?:(\d+(?:\.\d+)?)(ms|s)?)(?:\+(\d+(?:\.\d+)?)(?:ms)?\*?n)?$|^(\d+(?:\.\d+)?)(?:ms)?\*?n$/;

/** Undefined when it makes no sense. */
export function parseService(text: string): ServiceTime | undefined {
  const match = PATTERN.exec(text.replaceAll(" ", "").replaceAll("·", "*"));
  if (match === null) return undefined;
  const baseMs = Number(match[1] ?? 0) * (match[2] === "s" ? 1000 : 1);
  const perTaskMs = Number(match[3] ?? match[4] ?? 0);
  return baseMs + perTaskMs > 0 ? { baseMs, perTaskMs } : undefined;
}

export function formatService({ baseMs, perTaskMs }: ServiceTime): string {
  const digits = (value: number): string => String(Number(value.toPrecision(3)));
  return perTaskMs === 0 ? `${digits(baseMs)} ms` : `${digits(baseMs)} + ${digits(perTaskMs)}·n ms`;
}

export function serviceMs({ baseMs, perTaskMs }: ServiceTime, size: number): number {
  return baseMs + perTaskMs * size;
}

/** Tasks per ms that a worker does in full batches. */
export function capacityOf(service: ServiceTime, maxBatchSize: number): number {
  return maxBatchSize / serviceMs(service, maxBatchSize);
}

/** Infinity where the workers cannot keep up. */
export function latencyBound(
  service: ServiceTime,
  { perMs, workers, maxBatchSize }: { perMs: number; workers: number; maxBatchSize: number },
  share: number,
): number {
  const { baseMs, perTaskMs } = service;
  const spare = workers - perMs * perTaskMs;
  const least = spare <= 0 ? Infinity : Math.max(1, (perMs * baseMs) / spare);
  if (least > maxBatchSize) return Infinity;
  return serviceMs(service, least) + (share * (least - 1)) / perMs;
}
