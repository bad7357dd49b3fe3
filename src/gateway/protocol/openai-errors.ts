/** Errors as OpenAI's SDKs expect them: `{"error":{"message","type","param","code"}}`. */
import type { ErrorCode, Refusal } from "../../core/errors.ts";
import type { Answer } from "./protocol.ts";

/** The SDKs choose their exception by status; people read type and code. */
const KINDS: Partial<Record<ErrorCode, readonly [type: string, code: string]>> = {
  UNAUTHENTICATED: ["invalid_request_error", "invalid_api_key"],
  FORBIDDEN: ["invalid_request_error", "permission_denied"],
  NOT_FOUND: ["invalid_request_error", "model_not_found"],
  RATE_LIMITED: ["rate_limit_error", "rate_limit_exceeded"],
  INTERNAL: ["server_error", "internal_error"],
  INFERENCE_FAILED: ["server_error", "inference_failed"],
  SERVICE_OVERLOADED: ["server_error", "service_overloaded"],
  DEADLINE_EXCEEDED: ["server_error", "deadline_exceeded"],
};

export function openaiError({ code, message, status }: Refusal): Answer {
  const [type, named] = KINDS[code] ?? ["invalid_request_error", code.toLowerCase()];
  return {
    // Their word for an input that the model does not take.
    status: code === "INPUT_REJECTED" ? 400 : status,
    body: JSON.stringify({ error: { message, type, param: null, code: named } }),
  };
}
