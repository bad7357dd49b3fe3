/** Errors as TEI words them, `{"error","error_type"}`, with the statuses that its clients know. */
import type { ErrorCode, Refusal } from "../../core/errors.ts";
import type { Answer } from "./protocol.ts";

type ErrorType = "Unhealthy" | "Backend" | "Overloaded" | "Validation";

/** Without a status: ours. */
const KINDS: Partial<Record<ErrorCode, readonly [type: ErrorType, status?: number]>> = {
  INVALID_REQUEST: ["Validation", 422],
  RATE_LIMITED: ["Overloaded"],
  SERVICE_OVERLOADED: ["Overloaded", 429],
  INFERENCE_FAILED: ["Backend", 424],
  INTERNAL: ["Backend"],
  DEADLINE_EXCEEDED: ["Backend"],
};

export function teiError({ code, message, status }: Refusal): Answer {
  const [type, theirs] = KINDS[code] ?? ["Validation"];
  return { status: theirs ?? status, body: errorText(message, type) };
}

export function errorText(error: string, type: ErrorType): string {
  return JSON.stringify({ error, error_type: type });
}
