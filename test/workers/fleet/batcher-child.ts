/** A batcher in a process of its own, to be killed: `batcher-child.ts <redis url> <prefix> <address>…`. */
import { SystemClock } from "../../../src/app/clock.ts";
import { Batcher, Gpu } from "./batcher.ts";
import { openNodes, registryOf } from "./stage.ts";

const [url, prefix, ...addresses] = process.argv.slice(2);
const clock = new SystemClock();
const fleet = addresses.map((address) => new Gpu(address, 5));
const nodes = await openNodes(url!);
const batcher = new Batcher(fleet, registryOf(nodes, prefix!, 2000), clock, { id: `child-${process.pid}` });
await batcher.membership.start();
process.send!({ worker: "", at: clock.now() });
batcher.events.on("batch.started", ({ batch }) => process.send!({ worker: batch.worker, at: clock.now() }));
batcher.keepBusy(20);
// Its parent went without a word.
process.on("disconnect", () => process.exit());
