/**
 * Under which name a worker is leased: the model and the worker's address, the same in every process.
 *
 * What a process calls its workers depends on what else it lists, so names for people do not do. Two
 * processes that write one worker's address differently (localhost and 127.0.0.1) lease it twice.
 * Credentials stay out, and a query, which may hold one, goes in as its hash: the name is seen on admin
 * pages.
 */
import { hash } from "node:crypto";

export function leaseNames(model: string, addresses: readonly string[]): string[] {
  const seen = new Map<string, number>();
  return addresses.map((address) => {
    const place = shownAddress(address);
    const times = (seen.get(place) ?? 0) + 1;
    seen.set(place, times);
    // Listed twice, it has room for two batches.
    return `${model} ${place}${times === 1 ? "" : ` #${times}`}`;
  });
}

/** An address as it may be shown. */
export function shownAddress(address: string): string {
  if (!URL.canParse(address)) return address;
  const { protocol, host, pathname, search } = new URL(address);
  return `${protocol}//${host}${pathname}${search === "" ? "" : `?${hash("sha256", search).slice(0, 8)}`}`;
}
