import assert from "node:assert/strict";
import { once } from "node:events";
import { connect } from "node:net";
import { test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { SystemClock } from "../../src/clock.ts";
import type { Exchange } from "../../src/gateway/exchange.ts";
import { Listener, type Routes } from "../../src/gateway/server.ts";
import { Events } from "../../src/telemetry/events.ts";
import { LIMITS } from "./edge.ts";

setFlagsFromString("--expose-gc");
const collect = runInNewContext("gc") as () => void;
/** Far more than it takes; without the end of it the test would hang when it fails. */
const MAX_TURNS = 100;

test("a connection that waits for its next request holds nothing of those before it", async () => {
  const seen: WeakRef<Exchange>[] = [];
  const answer = (exchange: Exchange): void => {
    seen.push(new WeakRef(exchange));
    exchange.ending = { queuedAt: 0, attempt: 1 };
    exchange.send(200, "{}");
  };
  const routes: Routes = { "/": { GET: answer } };
  const limits = { ...LIMITS, keepAliveTimeoutMs: 600_000 };
  const listener = new Listener(routes, limits, new SystemClock(), new Events());
  const { port } = new URL(await listener.listen("127.0.0.1", 0));
  const socket = connect(Number(port), "127.0.0.1");
  try {
    // All in one piece: each comes while the one before it is not over.
    socket.write("GET / HTTP/1.1\r\nhost: here\r\n\r\n".repeat(5));
    let told = "";
    while (told.split("{}").length <= 5) told += String((await once(socket, "data"))[0]);
    for (let turns = 0; seen.some((each) => each.deref() !== undefined) && turns < MAX_TURNS; turns++) {
      await turn();
      collect();
    }
    assert.deepEqual(
      seen.map((each) => each.deref() !== undefined),
      [false, false, false, false, false],
    );
  } finally {
    socket.destroy();
    listener.close();
  }
});
