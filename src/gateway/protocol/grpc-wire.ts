/**
 * gRPC framing over HTTP/2 for unary calls: prefixes, statuses, deadlines.
 *
 *   request   POST /package.Service/Method, content-type: application/grpc, te: trailers, grpc-timeout: 250m
 *   body      0x00, length in four bytes (big-endian), message; the first byte is 1 for a compressed message
 *   response  :status 200, content-type: application/grpc, the same body, then the trailers grpc-status (a number)
 *             and grpc-message (percent-encoded UTF-8); without a message the trailers are the header
 *
 * Compressed messages are refused: float tensors hardly shrink, and a small message could expand to gigabytes.
 */

const GRPC_CODES = [
  "OK",
  "CANCELLED",
  "UNKNOWN",
  "INVALID_ARGUMENT",
  "DEADLINE_EXCEEDED",
  "NOT_FOUND",
  "ALREADY_EXISTS",
  "PERMISSION_DENIED",
  "RESOURCE_EXHAUSTED",
  "FAILED_PRECONDITION",
  "ABORTED",
  "OUT_OF_RANGE",
  "UNIMPLEMENTED",
  "INTERNAL",
  "UNAVAILABLE",
  "DATA_LOSS",
  "UNAUTHENTICATED",
] as const;
export type GrpcCode = (typeof GRPC_CODES)[number];

export const GRPC_TYPE = "application/grpc";
const PREFIX_BYTES = 5;

export function codeNumber(code: GrpcCode): number {
  return GRPC_CODES.indexOf(code);
}

export function codeOf(status: string): GrpcCode {
  return (/^\d{1,2}$/.test(status) ? GRPC_CODES[Number(status)] : undefined) ?? "UNKNOWN";
}

/** The code of an HTTP status without `grpc-status`: a proxy answered, or not a gRPC server. */
export function codeOfHttp(status: number): GrpcCode {
  if (status === 401) return "UNAUTHENTICATED";
  if (status === 403) return "PERMISSION_DENIED";
  if (status === 404) return "UNIMPLEMENTED";
  if (status === 429 || (status >= 502 && status <= 504)) return "UNAVAILABLE";
  return status === 400 ? "INTERNAL" : "UNKNOWN";
}

/** `application/grpc`, `application/grpc+proto` and the like; not grpc-web. */
export function isGrpcType(type: string | undefined): boolean {
  return type !== undefined && /^application\/grpc(?:\+proto)?\s*(?:;|$)/i.test(type);
}

export function framed(parts: readonly Buffer[]): Buffer {
  const all = Buffer.concat([Buffer.alloc(PREFIX_BYTES), ...parts]);
  all.writeUInt32BE(all.length - PREFIX_BYTES, 1);
  return all;
}

type Unframed =
  | { readonly message: Buffer; readonly flaw?: never }
  | {
      readonly message?: never;
      readonly flaw: "empty" | "cut off" | "compressed" | "too large" | "more than one";
    };

/** Reassembles the one message of a body; holds `maxBytes` at most. */
export class Unframer {
  readonly #maxBytes: number;
  readonly #chunks: Buffer[] = [];
  #bytes = 0;
  /** Message length; undefined until the prefix has arrived. */
  #wanted: number | undefined;
  #flaw: (Unframed & { flaw: string })["flaw"] | undefined;

  constructor(maxBytes: number) {
    this.#maxBytes = maxBytes;
  }

  take(chunk: Buffer): boolean {
    if (this.#flaw !== undefined) return false;
    this.#chunks.push(chunk);
    this.#bytes += chunk.length;
    if (this.#wanted === undefined && this.#bytes >= PREFIX_BYTES) this.#readPrefix();
    if (this.#wanted !== undefined && this.#bytes > PREFIX_BYTES + this.#wanted)
      this.#flaw ??= "more than one";
    if (this.#flaw !== undefined) this.#chunks.length = 0;
    return this.#flaw === undefined;
  }

  end(): Unframed {
    if (this.#flaw !== undefined) return { flaw: this.#flaw };
    if (this.#bytes === 0) return { flaw: "empty" };
    if (this.#wanted === undefined || this.#bytes < PREFIX_BYTES + this.#wanted) return { flaw: "cut off" };
    const body = this.#chunks.length === 1 ? this.#chunks[0]! : Buffer.concat(this.#chunks);
    return { message: body.subarray(PREFIX_BYTES) };
  }

  #readPrefix(): void {
    const [first] = this.#chunks;
    const start = first!.length >= PREFIX_BYTES ? first! : Buffer.concat(this.#chunks);
    if (start[0] !== 0) this.#flaw = "compressed";
    this.#wanted = start.readUInt32BE(1);
    if (this.#wanted > this.#maxBytes) this.#flaw ??= "too large";
  }
}

const MAX_STATUS_CHARS = 1024;

/** `grpc-message`: printable ASCII except %, the rest as %XX of its UTF-8. */
export function percentEncoded(text: string): string {
  const short = text.slice(0, MAX_STATUS_CHARS);
  // Each UTF-8 byte becomes one latin1 character.
  return Buffer.from(short, "utf8")
    .toString("latin1")
    .replace(/[^ -$&-~]/g, (char) => `%${Buffer.from(char, "latin1").toString("hex").toUpperCase()}`);
}

/** An invalid %XX stays as it is, so that no error is lost to bad encoding. */
export function percentDecoded(text: string): string {
  if (!text.includes("%")) return text;
  const parts = text.slice(0, 3 * MAX_STATUS_CHARS).match(/%[\da-f]{2}|[^%]+|%/gi)!;
  return Buffer.concat(
    parts.map((part) => (/^%../.test(part) ? Buffer.from(part.slice(1), "hex") : Buffer.from(part))),
  ).toString("utf8");
}

/** `grpc-timeout`: at most eight digits and a unit. */
export function timeoutText(ms: number): string {
  const whole = Math.max(1, Math.ceil(ms));
  return whole < 100_000_000 ? `${whole}m` : `${Math.min(99_999_999, Math.ceil(ms / 1000))}S`;
}

const UNIT_MS: Readonly<Record<string, number>> = {
  H: 3_600_000,
  M: 60_000,
  S: 1000,
  m: 1,
  u: 1e-3,
  n: 1e-6,
};

export function timeoutMs(text: string): number | undefined {
  const [, digits, unit] = /^(\d{1,8})([HMSmun])$/.exec(text) ?? [];
  return digits === undefined ? undefined : Number(digits) * UNIT_MS[unit!]!;
}
