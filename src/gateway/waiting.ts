/**
 * Lets in whoever has connected already. A connection that was not taken from the kernel when the port closes is reset, and
 * its caller cannot know that nobody looked: a process that stood still for a moment before it is told to stop would fail
 * them all. A turn of the event loop takes one; two turns without any: that was all.
 */
import type { Server } from "node:net";
import { setImmediate as turn } from "node:timers/promises";

export async function takeWaiting(server: Server, most: number): Promise<void> {
  let taken = 0;
  const count = (): void => void taken++;
  server.on("connection", count);
  for (let left = most; left > 0; left--) {
    const before = taken;
    await turn();
    await turn();
    if (taken === before) break;
  }
  server.off("connection", count);
}
