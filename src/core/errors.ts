/**
 * The error codes that a client can see. `retryable`: the same request may succeed later unchanged; such failures are
 * never stored under an Idempotency-Key. `test/repository/tidy.test.ts` compares this table with `docs/errors.md`.
 */
export const errors = {
  INVALID_REQUEST: { status: 400, retryable: false },
  UNAUTHENTICATED: { status: 401, retryable: false },
  FORBIDDEN: { status: 403, retryable: false },
  NOT_FOUND: { status: 404, retryable: false },
  METHOD_NOT_ALLOWED: { status: 405, retryable: false },
  NOT_ACCEPTABLE: { status: 406, retryable: false },
  REQUEST_TIMEOUT: { status: 408, retryable: true },
  NOT_CANCELLABLE: { status: 409, retryable: false },
  CANCELLED: { status: 409, retryable: false },
  PAYLOAD_TOO_LARGE: { status: 413, retryable: false },
  UNSUPPORTED_MEDIA_TYPE: { status: 415, retryable: false },
  IDEMPOTENCY_CONFLICT: { status: 422, retryable: false },
  INPUT_REJECTED: { status: 422, retryable: false },
  RATE_LIMITED: { status: 429, retryable: true },
  INTERNAL: { status: 500, retryable: true },
  INFERENCE_FAILED: { status: 502, retryable: true },
  SERVICE_OVERLOADED: { status: 503, retryable: true },
  DEADLINE_EXCEEDED: { status: 504, retryable: true },
} as const satisfies Record<string, { status: number; retryable: boolean }>;

export type ErrorCode = keyof typeof errors;

export interface Quota {
  readonly limit: number;
  readonly left: number;
  readonly resetMs: number;
}

/**
 * An expected failure for one client. Thrown inside the gateway only; elsewhere failures are values (`Outcome`,
 * `Reply`).
 */
export class Refusal extends Error {
  readonly code: ErrorCode;
  readonly status: number;
  readonly retryAfterMs: number | undefined;
  readonly retryAfterSeconds: number | undefined; // set where it is not `retryAfterMs` rounded up
  readonly quota: Quota | undefined; // the exhausted quota, if that is the reason

  constructor(
    code: ErrorCode,
    message: string,
    more: { status?: number; retryAfterMs?: number; retryAfterSeconds?: number; quota?: Quota } = {},
  ) {
    super(message);
    this.code = code;
    this.status = more.status ?? errors[code].status;
    this.retryAfterMs = more.retryAfterMs;
    this.retryAfterSeconds = more.retryAfterSeconds;
    this.quota = more.quota;
  }
}
