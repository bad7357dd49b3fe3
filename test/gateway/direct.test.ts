/** Requests that bypass `node:http`'s streams and responses, and what makes them return to it. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { afterEach, beforeEach, describe, test } from "node:test";
import { SystemClock } from "../../src/app/clock.ts";
import { ClientBytes } from "../../src/gateway/client-request.ts";
import type { EarlyRefusals } from "../../src/gateway/early-refusal.ts";
import type { Exchange } from "../../src/gateway/exchange.ts";
import { bringsWork, Listener } from "../../src/gateway/server.ts";
import { type AnsweredRequest, Events } from "../../src/observe/events.ts";
import { RawClient } from "../e2e/raw-client.ts";
import { LIMITS } from "./edge.ts";

const MEBIBYTE = 2 ** 20;

describe("direct requests", () => {
  let listener: Listener;
  let client: RawClient;
  let url: string;
  let answered: AnsweredRequest[];
  let bytes: ClientBytes;
  /** Bodies as they were read, and their requests, which wait for the test. */
  let asked: { readonly exchange: Exchange; readonly text: string }[];
  let gone: Exchange[];
  let changed = Promise.withResolvers<void>();

  function change(): void {
    changed.resolve();
    changed = Promise.withResolvers();
  }

  async function until(holds: () => boolean): Promise<void> {
    while (!holds()) await changed.promise;
  }

  beforeEach(async () => {
    [answered, asked, gone] = [[], [], []];
    const events = new Events();
    events.on("request.answered", (request) => {
      answered.push({ ...request, status: request.status });
      change();
    });
    bytes = new ClientBytes(() => 64 * MEBIBYTE);
    const work = bringsWork(async (exchange) => {
      exchange.onGone(() => {
        gone.push(exchange);
        change();
      });
      const text = await exchange.body();
      asked.push({ exchange, text });
      change();
    });
    const proxied = bringsWork(async (exchange) => {
      const body = await exchange.objectBody();
      if (body !== undefined) return exchange.send(200, body.toString());
      const relay = exchange.relay(200, ["content-type", "text/plain"]);
      for await (const piece of exchange.inflow()) relay.write(piece as Buffer);
      relay.end();
    });
    const routes = {
      "/work": { POST: work },
      "/proxied": { POST: proxied },
      "/other": { GET: (exchange: Exchange) => exchange.send(200, '"other"') },
    };
    const limits = { ...LIMITS, maxBodyBytes: MEBIBYTE, keepAliveTimeoutMs: 100 };
    const early = { active: false } as EarlyRefusals;
    listener = new Listener(routes, limits, new SystemClock(), events, { early, bytes });
    url = await listener.listen("127.0.0.1", 0);
    client = await RawClient.connect(url);
  });
  afterEach(async () => {
    await client[Symbol.asyncDispose]();
    listener.close();
  });

  function post(body: string, path = "/work", ...fields: readonly string[]): string {
    const length = Buffer.byteLength(body, "latin1");
    const head = [`POST ${path} HTTP/1.1`, "Host: here", "Content-Type: application/json"];
    return [...head, `Content-Length: ${length}`, ...fields, "", body].join("\r\n");
  }

  test("the response is what Node writes, byte by byte", async () => {
    const type = "application/json; charset=utf-8";
    const headers = ["content-type", type, "content-length", "3", "x-some", "1"];
    const plain = createServer({ keepAliveTimeout: 100 }, (_, response) => {
      response.writeHead(200, headers);
      response.end('"a"', "latin1");
    });
    plain.listen(0, "127.0.0.1");
    await once(plain, "listening");
    await using other = await RawClient.connect(`http://127.0.0.1:${(plain.address() as AddressInfo).port}`);
    other.socket.removeAllListeners("data");
    client.socket.removeAllListeners("data");
    other.send(post('"a"'));
    const [nodes] = (await once(other.socket, "data")) as [string];
    client.send(post('"a"'));
    await until(() => asked.length === 1);
    asked[0]!.exchange.send(200, '"a"', ["x-some", "1"]);
    const [ours] = (await once(client.socket, "data")) as [string];
    const undated = (text: string): string => text.replace(/^Date: .*$/m, "Date");
    assert.equal(undated(ours), undated(nodes));
    assert.ok(Math.abs(Date.parse(/^Date: (.*)$/m.exec(ours)![1]!) - Date.now()) < 60_000);
    plain.close();
    plain.closeAllConnections();
  });

  test("one request after the other on one connection, each counted once", async () => {
    for (const text of ['"a"', '"ü"', '"c"']) {
      client.send(post(Buffer.from(text).toString("latin1")));
      await until(() => asked.length === 1);
      const [{ exchange, text: read }] = asked.splice(0) as [(typeof asked)[0]];
      exchange.send(200, read);
      assert.equal((await client.answer()).text, text);
    }
    await until(() => answered.length === 3);
    assert.deepEqual(
      answered.map(({ status }) => status),
      [200, 200, 200],
    );
    assert.equal(listener.open, 0);
    assert.deepEqual(gone, []);
  });

  test("a second request before the response: both are answered, in order", async () => {
    client.send(post('"a"') + post('"b"') + "GET /other HTTP/1.1\r\nHost: here\r\n\r\n");
    await until(() => asked.length === 2);
    asked[1]!.exchange.send(200, asked[1]!.text);
    asked[0]!.exchange.send(200, asked[0]!.text);
    const texts = [await client.answer(), await client.answer(), await client.answer()];
    assert.deepEqual(
      texts.map(({ text }) => text),
      ['"a"', '"b"', '"other"'],
    );
    client.send(post('"c"'));
    await until(() => asked.length === 3);
    asked[2]!.exchange.send(200, asked[2]!.text);
    assert.equal((await client.answer()).text, '"c"');
    await until(() => answered.length === 4);
    assert.equal(listener.open, 0);
  });

  test("a second request whose first body is not complete", async () => {
    const [first, second] = [post(`"${"a".repeat(1000)}"`), post('"b"')];
    client.send(first.slice(0, 300));
    client.send(first.slice(300) + second);
    await until(() => asked.length === 2);
    for (const { exchange, text } of asked) exchange.send(200, text);
    assert.equal((await client.answer()).text.length, 1002);
    assert.equal((await client.answer()).text, '"b"');
  });

  test("a body in pieces", async () => {
    const text = `"${"a".repeat(60_000)}"`;
    const request = post(text);
    for (let at = 0; at < request.length; at += 7001) {
      client.send(request.slice(at, at + 7001));
      await new Promise(setImmediate);
    }
    await until(() => asked.length === 1);
    assert.equal(asked[0]!.text, text);
    assert.equal(bytes.bodies.total, 0);
    asked[0]!.exchange.send(200, text);
    assert.equal((await client.answer()).text, text);
  });

  test("a client that leaves is noticed, while it sends and while it waits", async () => {
    client.send(post('"a"'));
    await until(() => asked.length === 1);
    client.socket.destroy();
    await until(() => answered.length === 1);
    assert.deepEqual(gone, [asked[0]!.exchange]);
    asked[0]!.exchange.send(200, '"late"');
    assert.deepEqual([answered[0]!.status, asked[0]!.exchange.answered, listener.open], [499, true, 0]);
  });

  test("a client that closes its side gets no response, as with Node", async () => {
    client.send(post('"a"'));
    await until(() => asked.length === 1);
    client.socket.end();
    await client.closed();
    await until(() => answered.length === 1);
    assert.equal(answered[0]!.status, 499);
  });

  test("a client that does not read holds its bytes until it does", async () => {
    const text = `"${"a".repeat(20 * MEBIBYTE)}"`;
    client.socket.pause();
    client.send(post('"a"'));
    await until(() => asked.length === 1);
    asked[0]!.exchange.send(200, text);
    assert.equal(bytes.answers.total, text.length);
    client.send(post('"b"'));
    await until(() => asked.length === 2);
    asked[1]!.exchange.send(200, '"b"');
    let received = "";
    client.socket.removeAllListeners("data").on("data", (piece: string) => {
      received = received.slice(-100) + piece;
      if (received.endsWith('"b"')) change();
    });
    client.socket.resume();
    await until(() => received.endsWith('"b"'));
    await until(() => answered.length === 2);
    assert.equal(bytes.answers.total, 0);
  });

  test("responses that the kernel takes in part stay as they were", async () => {
    const texts: string[] = [];
    client.socket.pause();
    // Until the kernel takes no more.
    for (let at = 0; bytes.answers.total === 0; at++) {
      client.send(post('"a"'));
      await until(() => asked.length === at + 1);
      const letters = String.fromCharCode(97 + (at % 26)).repeat(60_000);
      texts.push(letters);
      asked[at]!.exchange.sendPieces(200, ['"', letters, '"'], [], 60_002);
    }
    await using other = await RawClient.connect(url);
    other.send(post('"b"'));
    await until(() => asked.length === texts.length + 1);
    asked.at(-1)!.exchange.send(200, '"another response"');
    assert.equal((await other.answer()).text, '"another response"');
    client.socket.resume();
    for (const text of texts) assert.equal((await client.answer()).text, `"${text}"`);
    await until(() => answered.length === texts.length + 1);
    assert.equal(bytes.answers.total, 0);
  });

  test("a refusal before the body is complete closes the connection", async () => {
    client.send(post(`"${"a".repeat(1000)}"`, "/work", "Content-Encoding: gzip").slice(0, 300));
    const { status, headers } = await client.answer();
    assert.deepEqual([status, headers["connection"]], [415, "close"]);
  });

  test("an idle connection ends after its time, and not while a request waits for longer", async () => {
    client.send(post('"a"'));
    await until(() => asked.length === 1);
    asked[0]!.exchange.send(200, '"a"');
    assert.equal((await client.answer()).headers["keep-alive"], "timeout=0");
    client.send(post('"b"'));
    await until(() => asked.length === 2);
    const clock = new SystemClock();
    // Longer than the timer of the connection that was idle before.
    await new Promise<void>((rang) => clock.at(clock.now() + 1300, rang));
    asked[1]!.exchange.send(200, '"b"');
    assert.equal((await client.answer()).text, '"b"');
    await client.closed();
  });

  test("draining answers what is open", async () => {
    client.send(post('"a"'));
    await until(() => asked.length === 1);
    const drained = listener.drain();
    asked[0]!.exchange.send(200, '"a"');
    assert.equal((await client.answer()).text, '"a"');
    await drained;
  });

  test("a body that is proxied or streamed back", async () => {
    client.send(post('{"a":1}', "/proxied"));
    assert.equal((await client.answer()).text, '{"a":1}');
    client.send(post("plain text", "/proxied"));
    assert.equal((await client.answer()).text, "plain text");
    client.send(post('"a"'));
    await until(() => asked.length === 1);
    asked[0]!.exchange.sendBytes("application/octet-stream", Buffer.from("bytes"));
    assert.equal((await client.answer()).text, "bytes");
    await until(() => answered.length === 3);
  });

  test("a header that is not plain ASCII gets Node's checks", async () => {
    client.send(post('"a"'));
    await until(() => asked.length === 1);
    const { exchange } = asked[0]!;
    assert.throws(() => exchange.send(200, "{}", ["x-some", "a\r\nx-injected: b"]), {
      code: "ERR_INVALID_CHAR",
    });
    exchange.send(200, "{}", ["x-some", "\u00e9"]);
    assert.equal((await client.answer()).headers["x-some"], "\u00e9");
  });
});
