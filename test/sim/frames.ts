/** Outcomes as `RedisNews` reads them, on the store's clock. */
import type { RecordView } from "../../src/engine/engine.ts";
import {
  metaFrame,
  outcomeFrame,
  RedisClock,
  resultValue,
  wholeBatchFrame,
} from "../../src/engine/redis-frames.ts";

const store = new RedisClock();

function fields({ task, attempt, queuedAt, settledAt = 0, batch }: RecordView) {
  const batchBytes = batch === undefined ? Buffer.alloc(0) : wholeBatchFrame(batch, store);
  return { meta: metaFrame(task, {}, store), attempt, queuedAt, settledAt, batch: batchBytes };
}

export function frameOfRecord(record: RecordView): Buffer {
  return outcomeFrame(fields(record), record.outcome!, store);
}

/** As it is kept under its id. */
export function kept(record: RecordView): Buffer {
  const head = { tenant: record.task.tenant, expiresAt: 0, reusableAt: 0 };
  return resultValue(head, fields(record), record.outcome!, store).value;
}
