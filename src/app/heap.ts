/**
 * How V8 is told to treat a server's heap.
 *
 * V8 counts, for some places in the code, how many of a hundred new objects outlive a collection; where nearly all do
 * it makes such objects old from birth, for as long as the process lives. In a server the hundred are those of the
 * requests that were in flight just then: nearly all outlive the collection, and all are dead a moment later. Old from
 * birth they wait for the next major collection, and until then keep alive whatever young objects they point to. So one
 * unlucky sample doubles what every later collection has to copy (30 % instead of 14 % of what is allocated), and the
 * more is kept of a request, the more samples are unlucky.
 */
import { setFlagsFromString } from "node:v8";

/**
 * Once the server's code is loaded, and before it has much to do: what was decided stays decided, and V8 takes no code
 * from the compile cache that was written under other flags (40 ms of a start, when this came first).
 */
export function tuneHeap(): void {
  setFlagsFromString("--no-allocation-site-pretenuring");
}
