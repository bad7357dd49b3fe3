/** The driver of `ferry bench` against a peer of a few lines, on the real clock: every end that a request can have. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { test } from "node:test";
import { callersOf, Driver, type DriverOptions } from "../../../src/cli/bench/driver.ts";
import { Requests } from "../../../src/cli/bench/requests.ts";
import { SystemClock } from "../../../src/app/clock.ts";
import { Random } from "../../../src/core/random.ts";

class Peer implements AsyncDisposable {
  readonly server: Server;
  readonly seen: string[] = [];

  constructor(answer: (body: string, response: ServerResponse, request: IncomingMessage) => void) {
    this.server = createServer((request, response) => {
      let body = "";
      request.setEncoding("utf8").on("data", (text: string) => (body += text));
      request.on("end", () => {
        this.seen.push(body);
        answer(body, response, request);
      });
    });
  }

  async port(): Promise<number> {
    this.server.listen(0, "127.0.0.1");
    await once(this.server, "listening");
    return (this.server.address() as AddressInfo).port;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.server.closeAllConnections();
    this.server.close();
    await once(this.server, "close");
  }
}

const echo = (body: string, response: ServerResponse): void => {
  const headers = { "x-ferry-batch-size": "4", "x-ferry-queue-ms": "2.5" };
  const { input } = JSON.parse(body) as { input: string };
  const text = `{"output":${JSON.stringify(input)},"metadata":{"latency_ms":7.5,"cached":false}}`;
  response.writeHead(200, { ...headers, "content-length": Buffer.byteLength(text) }).end(text);
};

function requests(port: number, path = "/"): Requests {
  const bodies = [{ input: "hello", fields: {} }];
  return new Requests({
    authority: `127.0.0.1:${port}`,
    path,
    bodies,
    bytes: 0,
    repeat: false,
    headers: [{}],
  });
}

function driver(port: number, more: Partial<DriverOptions> = {}): Driver {
  const random = new Random(7);
  return new Driver({
    target: { host: "127.0.0.1", port, path: "/" },
    load: { kind: "open", rate: 200, arrivals: "even" },
    kinds: [{ label: "all", share: 1 }],
    requests: requests(port),
    warmMs: 100,
    measureMs: 500,
    timeoutMs: 10_000,
    connections: 64,
    outstanding: 1000,
    clock: new SystemClock(),
    draw: () => random.next(),
    cpuMs: () => 0,
    ...more,
  });
}

async function run(one: Driver): Promise<Driver> {
  one.start();
  await one.ended;
  return one;
}

function assertAddsUp({ account }: Driver): void {
  const { offered, served, refused, failed, lost, unsent, pending } = account;
  assert.equal(pending, 0);
  assert.equal(offered, served + refused + failed + lost + unsent);
}

/** The instant at which counting begins may fall on either side of an arrival's. */
function assertNear(count: number, expected: number): void {
  assert.ok(Math.abs(count - expected) <= 1, `${count}, not ${expected}`);
}

void test("an open load offers what was asked for, and nothing of the warm-up", async () => {
  await using peer = new Peer(echo);
  const { account } = await run(driver(await peer.port()));
  assertNear(account.offered, 100);
  assert.equal(account.served, account.offered);
  assertNear(peer.seen.length, 120);
  assert.equal(new Set(peer.seen).size, peer.seen.length, "every input is another");
  assert.equal(account.crossed, 0);
  assert.ok(account.echoes);
  assert.equal(account.meanFill, 4);
  assert.equal(account.queueSumMs / account.batched, 2.5);
  assert.equal(account.serverSumMs / account.timed, 7.5);
});

void test("a closed load has one request of each caller on its way", async () => {
  let [now, most] = [0, 0];
  await using peer = new Peer((body, response) => {
    most = Math.max(most, ++now);
    setImmediate(() => {
      now--;
      echo(body, response);
    });
  });
  const it = await run(driver(await peer.port(), { load: { kind: "closed", callers: 5 } }));
  assert.ok(it.account.served > 0);
  assert.ok(most <= 5, `${most} at once`);
  assertAddsUp(it);
});

void test("statuses are told apart, and somebody else's output is noticed", async () => {
  let count = 0;
  await using peer = new Peer((body, response) => {
    const kind = count++ % 4;
    if (kind === 0) return echo(body, response);
    if (kind === 1) return echo('{"input":"not yours"}', response);
    response.writeHead(kind === 2 ? 503 : 500, { "content-length": 0 }).end();
  });
  const it = await run(driver(await peer.port(), { warmMs: 0 }));
  assertAddsUp(it);
  assertNear(it.account.served, 50);
  assertNear(it.account.refused, 25);
  assertNear(it.account.failed, 25);
  assertNear(it.account.crossed, 25);
  assert.deepEqual([...it.account.codes.keys()].sort(), ["200", "500", "503"]);
});

void test("no answer in time is lost, and the run ends", async () => {
  await using peer = new Peer(() => {});
  const it = await run(driver(await peer.port(), { timeoutMs: 200 }));
  assertAddsUp(it);
  assert.equal(it.account.served, 0);
  assertNear(it.account.lost + it.account.unsent, 100);
  assert.ok(it.account.lost > 0);
});

void test("connections that break are lost, those that cannot be made have failed", async () => {
  let port = 0;
  {
    await using peer = new Peer((_body, response) => response.destroy());
    port = await peer.port();
    const it = await run(driver(port));
    assertAddsUp(it);
    assertNear(it.account.lost, 100);
  }
  const it = await run(driver(port));
  assertAddsUp(it);
  assertNear(it.account.failed, 100);
  assert.equal(it.account.codes.get("ECONNREFUSED"), it.account.failed);
});

void test("what finds no connection waits in line, and beyond the bound is not sent", async () => {
  await using peer = new Peer(() => {});
  const it = await run(
    driver(await peer.port(), { connections: 2, outstanding: 10, timeoutMs: 1000, warmMs: 0 }),
  );
  assertAddsUp(it);
  assert.equal(it.client().connections, 2);
  assert.ok(it.account.unsent >= 80, `${it.account.unsent}`);
});

void test("a server that closes after each answer is no error", async () => {
  await using peer = new Peer((body, response) => {
    response.shouldKeepAlive = false;
    echo(body, response);
  });
  const it = await run(driver(await peer.port()));
  assertAddsUp(it);
  assert.equal(it.account.served, it.account.offered);
});

void test("an interrupted run ends at once, with what is still on its way", async () => {
  await using peer = new Peer(() => {});
  const it = driver(await peer.port(), { warmMs: 0, measureMs: 60_000 });
  it.start();
  while (peer.seen.length < 5) await new Promise((resolve) => setImmediate(resolve));
  it.interrupt();
  await it.ended;
  assert.ok(it.account.pending >= 5);
  assert.ok(it.elapsedMs < 60_000);
});

void test("callers of a closed loop are divided by the shares of their kinds", () => {
  const kinds = [10, 30, 60].map((share, at) => ({ label: String(at), share }));
  const count = (callers: number): number[] => {
    const all = callersOf(callers, kinds);
    return kinds.map((_, kind) => all.filter((its) => its === kind).length);
  };
  assert.deepEqual(count(10), [1, 3, 6]);
  assert.deepEqual(count(100), [10, 30, 60]);
});
