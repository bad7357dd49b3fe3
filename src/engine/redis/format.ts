/**
 * Version of the Redis schema: names, types and contents of the keys in `keys.ts`. A process with an unknown version
 * refuses to start: two that read the same keys differently would lose tasks. Raise it with every change that an older
 * version cannot read.
 */
import { RedisError } from "./client/nodes.ts";
import type { RedisKeys } from "./keys.ts";
import type { RedisStore } from "./parts.ts";

const FORMAT = "2";
const SHARD = 0;

/** Rejects with one line that says what to do. The first process writes the version. */
export async function checkFormat(nodes: RedisStore, keys: RedisKeys): Promise<void> {
  const key = `${keys.bases[SHARD]!}format`;
  const found = await nodes
    .command(SHARD, ["SET", key, FORMAT, "NX", "GET"], { resend: true })
    .catch((error: unknown) => {
      // A full server refuses writes, which must not prevent a start.
      if (error instanceof RedisError) return nodes.command(SHARD, ["GET", key], { resend: true });
      throw error;
    });
  if (found === null || String(found) === FORMAT) return;
  throw new Error(
    `redis holds data of format ${String(found)} under ${key}, and this version of Ferry reads format ${FORMAT}: ` +
      "start the version that wrote it, or set another engine.keyPrefix",
  );
}
