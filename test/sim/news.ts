/**
 * What the real `RedisNews` needs: outcomes as it reads them, on the store's clock, and of the parts of the Redis
 * engine those that it looks into, over the wire to a store that is not Redis.
 */
import type { RecordView } from "../../src/engine/engine.ts";
import type { RedisParts } from "../../src/engine/redis-parts.ts";
import type { Events } from "../../src/telemetry/events.ts";
import type { Host } from "./host.ts";
import type { Store, Wire } from "./store.ts";
import {
  metaFrame,
  outcomeFrame,
  RedisClock,
  resultValue,
  wholeBatchFrame,
} from "../../src/engine/redis-frames.ts";

const atStore = new RedisClock();

function fields({ task, attempt, queuedAt, settledAt = 0, batch }: RecordView) {
  const batchBytes = batch === undefined ? Buffer.alloc(0) : wholeBatchFrame(batch, atStore);
  return { meta: metaFrame(task, {}, atStore), attempt, queuedAt, settledAt, batch: batchBytes };
}

export function frameOfRecord(record: RecordView): Buffer {
  return outcomeFrame(fields(record), record.outcome!, atStore);
}

/** As it is kept under its id. */
function kept(record: RecordView): Buffer {
  const head = { tenant: record.task.tenant, expiresAt: 0, reusableAt: 0 };
  return resultValue(head, fields(record), record.outcome!, atStore).value;
}

const SWEEP_MS = 1000;

/** `subscribe` is given who hears the notes to this process. */
export function newsParts(
  host: Host,
  store: Store,
  wire: Wire,
  shared: RedisClock,
  events: Events,
  subscribe: (heard: (payload: Buffer) => void) => void,
): RedisParts {
  const each = <Value>(ids: string[], look: (record: RecordView | undefined) => Value): Promise<Value[]> =>
    Promise.all(ids.map(async (id) => look(await store.engine.outcome(id))));
  const command = (_: number, [verb, name, ...rest]: string[]): Promise<unknown> => {
    if (verb === "HMGET") {
      const alive = (record: RecordView | undefined): string | null =>
        record !== undefined && record.outcome === undefined ? "alive" : null;
      return wire.call("alive", () => each(rest, alive));
    }
    if (verb === "MGET") {
      // Of the keys "r:<id>".
      const ids = [name!, ...rest].map((key) => key.slice(2));
      return wire.call("look up", () =>
        each(ids, (found) => (found?.outcome === undefined ? null : kept(found))),
      );
    }
    store.send(name!, rest[0] as unknown as Buffer);
    return Promise.resolve(null);
  };
  return {
    options: { sweepMs: SWEEP_MS },
    clock: host,
    name: host.name,
    shared,
    events,
    keys: { bases: [""], notes: (_: number, name: string) => name },
    nodes: {
      command,
      subscribe: (_: unknown, heard: (shard: number, payload: Buffer) => void) => {
        subscribe((payload) => heard(0, payload));
        return Promise.resolve(() => {});
      },
    },
    shardOf: () => 0,
    spread: (values: Iterable<string>, _: unknown, work: (ids: string[], shards: number[]) => unknown) => {
      const ids = [...values];
      return ids.length === 0 ? Promise.resolve() : work(ids, [0]);
    },
  } as unknown as RedisParts;
}
