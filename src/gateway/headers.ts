/**
 * Rejects headers that Node accepts and a proxy may read differently (request smuggling): two `Host` headers (Node
 * keeps the first), headers past its count (dropped), other repeated single-value headers, and any `Transfer-Encoding`
 * that ends in `chunked`, in HTTP/1.0 too. Over HTTP/2 the host may be in `:authority`.
 */
import type { IncomingMessage } from "node:http";
import { Refusal } from "../core/errors.ts";

export function headerFlaw(request: IncomingMessage, maxHeaders: number): Refusal | undefined {
  const { rawHeaders: raw, headers, httpVersion, httpVersionMajor } = request;
  let fields = 0;
  let hosts = 0;
  let authority: string | undefined;
  for (let at = 0; at < raw.length; at += 2) {
    const name = raw[at]!;
    if (name === ":authority") authority = raw[at + 1]!;
    if (name.startsWith(":")) continue;
    fields++;
    if (name.length === 4 && name.toLowerCase() === "host") hosts++;
  }
  if (fields > maxHeaders) return invalid(`more than ${maxHeaders} headers`, 431);
  if (hosts > 1) return invalid("more than one Host header");
  if (authority !== undefined && hosts === 1 && authority !== headers.host) {
    return invalid("more than one host, in :authority or in Host headers");
  }
  const twice = repeatedHeader(raw);
  if (twice !== undefined) return invalid(`the header ${twice} stands twice`);
  const encoding = headers["transfer-encoding"];
  if (encoding !== undefined && (encoding.toLowerCase() !== "chunked" || httpVersion !== "1.1")) {
    return invalid("the only Transfer-Encoding is chunked, and only in HTTP/1.1");
  }
  if (hosts === 1 || authority !== undefined || (httpVersionMajor === 1 && httpVersion === "1.0")) {
    return undefined;
  }
  return invalid("the Host header is missing");
}

function invalid(message: string, status = 400): Refusal {
  return new Refusal("INVALID_REQUEST", message, { status });
}

/** With a bit each. */
const SINGLE: ReadonlyMap<string, number> = new Map(
  ["authorization", "content-encoding", "content-type", "expect", "idempotency-key", "x-api-key"].map(
    (name, at) => [name, 1 << at],
  ),
);
/** Bit n is set if a name has n letters: skips the lookup for most headers. */
const LENGTHS = [...SINGLE.keys()].reduce((bits, name) => bits | (1 << name.length), 0);

function repeatedHeader(raw: readonly string[]): string | undefined {
  let seen = 0;
  for (let at = 0; at < raw.length; at += 2) {
    const { length } = raw[at]!;
    if (length > 16 || ((LENGTHS >> length) & 1) === 0) continue;
    const name = raw[at]!.toLowerCase();
    const bit = SINGLE.get(name) ?? 0;
    if ((seen & bit) !== 0) return name;
    seen |= bit;
  }
  return undefined;
}
