/** The way to a collector through the OpenTelemetry library. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { test } from "node:test";
import { openOtlp } from "../../src/observe/otlp.ts";
import { KIND } from "../../src/observe/span-buffer.ts";

test("a bundle that follows another at once is taken too", async () => {
  let posts = 0;
  const server = createServer((request, answer) => {
    posts++;
    request.resume().on("end", () => answer.end());
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}/v1/traces`;
  const collector = openOtlp({ url, timeoutMs: 5000 }, { "service.name": "ferry" }, "1");
  const place = { traceId: "0af7651916cd43dd8448eb211c80319c", spanId: "b7ad6b7169203331" };
  const facts = { name: "a", kind: KIND.internal, place, startedAt: 1, endedAt: 2, attributes: {} };
  for (let bundle = 0; bundle < 20; bundle++) {
    const { kind, why } = await collector.deliver([facts]);
    assert.equal(kind, "taken", why);
  }
  assert.equal(posts, 20);
  await collector.close();
  server.closeAllConnections();
  server.close();
});
