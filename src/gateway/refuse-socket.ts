/** Refusals on a connection from which no request could be read. */
import { STATUS_CODES } from "node:http";
import type { Duplex } from "node:stream";
import { errors, type ErrorCode } from "../core/errors.ts";

/** An answer without a request that could be parsed: straight to the socket, then the end. */
export function refuseSocket(
  socket: Duplex,
  status: number,
  code: ErrorCode,
  message: string,
  id: string,
): void {
  const wait = errors[code].status === 503 ? { retry_after_ms: 1000 } : {};
  const body = JSON.stringify({ error: code, message, request_id: id, ...wait });
  const retry = errors[code].status === 503 ? "Retry-After: 1\r\n" : "";
  socket.end(
    `HTTP/1.1 ${status} ${STATUS_CODES[status]}\r\nContent-Type: application/json; charset=utf-8\r\n` +
      `Content-Length: ${Buffer.byteLength(body)}\r\n${retry}Connection: close\r\n\r\n${body}`,
  );
}
