/** What is known of a request when it is over, for those who look on; written as it becomes known. */
import type { ErrorCode } from "../core/errors.ts";
import type { RequestTrace } from "../core/trace.ts";
import type { AnsweredRequest, TaskEnding } from "../observe/events.ts";

export abstract class KnownRequest implements AnsweredRequest {
  abstract readonly method: string;
  abstract readonly startedAt: number;
  id = "";
  route = "";
  model = "";
  tier = "";
  tenant = "";
  status = 0;
  code: ErrorCode | "" = "";
  latencyMs = 0;
  work: AnsweredRequest["work"] = "own";
  ending: TaskEnding | undefined = undefined;
  trace: RequestTrace | undefined = undefined;
  /** False: a question about our health, which is no request of a client. */
  counts = true;
}
