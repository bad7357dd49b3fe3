/**
 * What a batch of n takes: S(n) = baseMs + n · perTaskMs, written `200ms`, `0.2s` or `36+1n`; and what follows
 * from it for any policy. λ is arrivals per ms, k workers, B the largest batch.
 *
 *   capacity     k · B / S(B)
 *   load         λ / capacity
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
