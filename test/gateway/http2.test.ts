/** HTTP/2: what one connection may do, and how it ends. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { constants } from "node:http2";
import { describe, test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import { PageGuard } from "../../src/gateway/page-guard.ts";
import { ask, closed, Edge } from "./edge.ts";

const POST = { ":method": "POST", ":path": "/echo", "content-type": "application/json" };

describe("bounds:", () => {
  test("streams beyond maxStreams are not opened", async () => {
    await using edge = await Edge.open();
    const session = await edge.session();
    assert.equal(session.remoteSettings.maxConcurrentStreams, 10);
    assert.equal(session.remoteSettings.maxHeaderListSize, 16_384);
    const waits = Array.from({ length: 30 }, () => ask(session, { path: "/slow" }));
    await edge.waited.promise;
    assert.ok(edge.listener.open <= 10, `${edge.listener.open}`);
    edge.released.resolve();
    for (const answer of await Promise.all(waits)) assert.equal(answer.status, 200);
    session.destroy();
  });

  test("a body that drips is 408, and the connection lives on", async () => {
    await using edge = await Edge.open({ headersTimeoutMs: 1500, requestTimeoutMs: 1500 });
    const session = await edge.session();
    const stream = session.request(POST, { endStream: false });
    stream.on("error", () => {});
    stream.write('{"a":');
    const [reply] = (await once(stream, "response")) as [{ ":status": number }];
    assert.equal(reply[":status"], 408);
    stream.resume();
    await closed(stream);
    assert.equal((await ask(session, {})).status, 200);
    session.destroy();
  });

  test("a body is held until the client says that it is over, whatever length it announced", async () => {
    await using edge = await Edge.open();
    const session = await edge.session();
    const stream = session.request({ ...POST, "content-length": "5" }, { endStream: false });
    stream.on("error", () => {}).resume();
    stream.write("[1,2]");
    while (edge.bytes.bodies.total !== 5) await turn();
    const response = once(stream, "response");
    stream.end();
    assert.equal(((await response) as [{ ":status": number }])[0][":status"], 200);
    assert.equal(edge.bytes.bodies.total, 0);
    await closed(stream);
    while (edge.bytes.answers.total > 0) await turn();
    session.destroy();
  });

  test("a client that leaves in the middle of its body has left: what came of it is no request", async () => {
    await using edge = await Edge.open();
    const session = await edge.session();
    const ended = edge.events.next("request.answered");
    const stream = session.request(POST, { endStream: false });
    stream.on("error", () => {});
    stream.write("[1]");
    while (edge.listener.open === 0) await turn();
    // Not stream.close(), which tells the server first that this was all.
    session.destroy();
    assert.equal((await ended).status, 499);
    for (let turns = 0; turns < 20; turns++) await turn();
    assert.deepEqual(edge.bodies, []);
  });

  test("a body beyond the limit is 413 and is not read to its end; the connection lives on", async () => {
    await using edge = await Edge.open();
    const session = await edge.session();
    const stream = session.request(POST, { endStream: false });
    stream.on("error", () => {}).resume();
    stream.write("a".repeat(600_000));
    const [reply] = (await once(stream, "response")) as [{ ":status": number }];
    assert.equal(reply[":status"], 413);
    await closed(stream);
    assert.equal((await ask(session, {})).status, 200);
    session.destroy();
  });

  test("a client that takes no answer is cut", async () => {
    await using edge = await Edge.open({ headersTimeoutMs: 1500, requestTimeoutMs: 1500 });
    const session = await edge.session({ initialWindowSize: 1000 });
    const ended = edge.events.next("request.answered");
    session.request({ ":path": "/large" }).on("error", () => {});
    await ended;
    assert.equal(edge.listener.open, 0);
    session.destroy();
  });

  test("headers without end are refused", async () => {
    await using edge = await Edge.open();
    const session = await edge.session();
    await assert.rejects(ask(session, { headers: { "x-a": "a".repeat(40_000) } }));
    session.destroy();
  });

  test("two hosts are refused", async () => {
    await using edge = await Edge.open();
    const answer = await edge.http2({ headers: { ":authority": "a", host: "b" } });
    assert.equal(answer.status, 400, answer.text);
    const same = await edge.http2({ path: "/host", headers: { ":authority": "a", host: "a" } });
    assert.deepEqual([same.status, same.text], [200, '"a"']);
  });

  test("web pages are told by :authority, Origin and Sec-Fetch-Site, as over HTTP/1.1", async () => {
    await using edge = await Edge.open({}, {}, new PageGuard([], "advice"));
    const status = async (headers: Record<string, string>) => (await edge.http2({ headers })).status;
    assert.equal(await status({}), 200);
    assert.equal(await status({ ":authority": "localhost:1" }), 200);
    assert.equal(await status({ ":authority": "evil.example" }), 403);
    assert.equal(await status({ host: "evil.example", ":authority": "evil.example" }), 403);
    assert.equal(await status({ origin: "https://evil.example" }), 403);
    assert.equal(await status({ "sec-fetch-site": "cross-site" }), 403);
  });

  test("a header that means something only once is refused twice, as over HTTP/1.1", async () => {
    await using edge = await Edge.open();
    const twice = { headers: { "idempotency-key": ["a", "b"] as unknown as string } };
    const answer = await edge.http2(twice);
    assert.equal(answer.status, 400, answer.text);
    assert.match(answer.text, /idempotency-key stands twice/);
  });

  test("CONNECT is answered 405, and holds neither its stream nor the connection open", async () => {
    await using edge = await Edge.open({ keepAliveTimeoutMs: 50 });
    const session = await edge.session();
    const ended = closed(session);
    // Never ended from this side.
    const stream = session.request({ ":method": "CONNECT", ":authority": "a:1" });
    let text = "";
    stream.setEncoding("utf8").on("data", (chunk: string) => (text += chunk));
    const [headers] = (await once(stream, "response")) as [Record<string, unknown>];
    assert.equal(headers[":status"], 405);
    await closed(stream);
    assert.match(text, /"error":"METHOD_NOT_ALLOWED"/);
    await ended;
  });

  test("requests that are reset as soon as they are sent end the connection, and the log says so", async () => {
    await using edge = await Edge.open();
    const session = await edge.session();
    const told = edge.events.next("notice");
    const ended = closed(session);
    for (let sent = 0; sent < 500 && !session.destroyed && !session.closed; sent++) {
      const stream = session.request({ ":path": "/slow" });
      stream.on("error", () => {});
      await turn();
      stream.close(constants.NGHTTP2_CANCEL);
      await turn();
    }
    await ended;
    assert.match((await told).message, /^a client's HTTP\/2 connection was ended/);
    assert.equal((await edge.http2({})).status, 200, "others are served");
  });
});

test("what is refused before it has a route is a request too, over HTTP/2 as over HTTP/1.1", async () => {
  await using edge = await Edge.open();
  const next = (): Promise<{ status: number }> => edge.events.next("request.answered");
  const first = next();
  const answer = await edge.http2({
    method: "POST",
    path: "/echo",
    headers: { expect: "200-ok" },
    body: "1",
  });
  assert.deepEqual([answer.status, (await first).status], [417, 417]);
  const second = next();
  const socket = await edge.open({ ALPNProtocols: ["http/1.1"] });
  socket.on("error", () => {}).resume();
  socket.write("POST /echo HTTP/1.1\r\nHost: a\r\nExpect: 200-ok\r\nContent-Length: 0\r\n\r\n");
  assert.equal((await second).status, 417);
  assert.equal(edge.listener.open, 0);
  socket.destroy();
});

describe("ends:", () => {
  test("a connection that asks nothing has headersTimeoutMs", async () => {
    // Long enough for the handshake, which it bounds too.
    await using edge = await Edge.open({ headersTimeoutMs: 1500 });
    const session = await edge.session();
    await closed(session);
  });

  test("a connection that asked has keepAliveTimeoutMs, whatever else it sends", async () => {
    await using edge = await Edge.open({ keepAliveTimeoutMs: 150 });
    const session = await edge.session();
    assert.equal((await ask(session, {})).status, 200);
    const ended = closed(session);
    const pings = (): void => void (session.destroyed || session.ping(() => setImmediate(pings)));
    pings();
    await ended;
  });

  test("draining says goodbye, lets the open request end, and takes no other", async () => {
    await using edge = await Edge.open();
    const session = await edge.session();
    const goaway = once(session, "goaway");
    const waiting = ask(session, { path: "/slow" });
    await edge.waited.promise;
    const drained = edge.listener.drain();
    await goaway;
    await turn();
    await assert.rejects(ask(session, {}), { code: "ERR_HTTP2_GOAWAY_SESSION" });
    edge.released.resolve();
    assert.equal((await waiting).text, '"late"');
    await drained;
    if (!session.closed) await closed(session);
  });

  test("closing ends everybody, also who is in the middle of a handshake", async () => {
    await using edge = await Edge.open();
    const session = await edge.session();
    const half = edge.tcp();
    half.on("error", () => {}).resume();
    await once(half, "connect");
    assert.equal((await edge.http1({})).status, 200);
    const ends = [closed(session), closed(half)];
    edge.listener.close();
    await Promise.all(ends);
  });
});
