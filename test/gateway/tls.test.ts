/** TLS at the listener: the same answers and limits as without it, for HTTP/1.1 and for HTTP/2. */
import assert from "node:assert/strict";
import { once } from "node:events";
import type { TLSSocket } from "node:tls";
import { describe, test } from "node:test";
import { type Answered, type Asked, closed, Edge } from "./edge.ts";

const JSON_TYPE = { "content-type": "application/json" };

function errorOf({ text }: Answered): string {
  const { error, request_id } = JSON.parse(text) as { error: string; request_id: string };
  assert.ok(request_id.length > 0, text);
  return error;
}

/** All that comes until the end. */
async function readAll(socket: TLSSocket): Promise<string> {
  socket.setEncoding("latin1").on("error", () => {});
  let text = "";
  socket.on("data", (chunk: string) => (text += chunk));
  if (!socket.closed) await closed(socket);
  return text;
}

describe("HTTP/1.1 and HTTP/2 answer alike:", () => {
  const tooMany = Object.fromEntries(Array.from({ length: 30 }, (_, at) => [`x-${at}`, "a"]));
  const cases: [name: string, asked: Asked, status: number, code: string][] = [
    ["a GET", {}, 200, ""],
    ["a POST", { method: "POST", path: "/echo", headers: JSON_TYPE, body: '{"a":"é"}' }, 200, ""],
    ["no such path", { path: "/none" }, 404, "NOT_FOUND"],
    ["another method", { method: "DELETE" }, 405, "METHOD_NOT_ALLOWED"],
    ["no body wanted", { method: "DELETE", path: "/nothing" }, 204, ""],
    [
      "too large",
      { method: "POST", path: "/echo", headers: JSON_TYPE, body: "a".repeat(5000) },
      413,
      "PAYLOAD_TOO_LARGE",
    ],
    ["no JSON", { method: "POST", path: "/echo", body: "{}" }, 415, "UNSUPPORTED_MEDIA_TYPE"],
    ["too many headers", { headers: tooMany }, 431, "INVALID_REQUEST"],
    ["a bug", { path: "/bug" }, 500, "INTERNAL"],
    ["a path with a query", { path: "/?a=b" }, 200, ""],
  ];
  for (const [name, asked, status, code] of cases) {
    test(name, async () => {
      await using edge = await Edge.open();
      const answers = [await edge.http1(asked), await edge.http2(asked)] as const;
      for (const answer of answers) {
        assert.equal(answer.status, status, answer.text);
        if (code !== "") assert.equal(errorOf(answer), code);
      }
      if (code !== "") return;
      assert.equal(answers[0].text, answers[1].text);
      assert.equal(answers[0].headers["content-length"], answers[1].headers["content-length"]);
    });
  }

  test("the host is known, HEAD has no body, 405 says what is allowed", async () => {
    await using edge = await Edge.open();
    const host = `"127.0.0.1:${edge.port}"`;
    assert.equal((await edge.http1({ path: "/host" })).text, host);
    assert.equal((await edge.http2({ path: "/host" })).text, host);
    const head = await edge.http2({ method: "HEAD" });
    assert.deepEqual([head.status, head.text, head.headers["content-length"]], [200, "", "14"]);
    assert.equal((await edge.http2({ method: "POST", body: "{}" })).headers["allow"], "GET");
  });

  test("without http2 a client that offers both gets HTTP/1.1", async () => {
    await using edge = await Edge.open({}, { http2: false });
    const socket = await edge.open({ ALPNProtocols: ["h2", "http/1.1"] });
    assert.equal(socket.alpnProtocol, "http/1.1");
    socket.destroy();
    assert.equal((await edge.http1({})).status, 200);
  });

  test("a client that offers only HTTP/1.0 is served", async () => {
    await using edge = await Edge.open();
    const socket = await edge.open({ ALPNProtocols: ["http/1.0"] });
    socket.write("GET / HTTP/1.0\r\n\r\n");
    const text = String(Buffer.concat(await socket.toArray()));
    assert.match(text, /^HTTP\/1\.1 200 OK\r\n/);
  });

  test("a client that offers nothing gets HTTP/1.1", async () => {
    await using edge = await Edge.open();
    const socket = await edge.open();
    socket.write("GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    assert.match(await readAll(socket), /^HTTP\/1\.1 200 OK\r\n/);
  });
});

describe("what is not TLS, or not HTTP:", () => {
  test("plain HTTP and noise are closed, nothing is logged, and the next client is served", async () => {
    await using edge = await Edge.open();
    let notices = 0;
    edge.events.on("notice", () => notices++);
    for (const bytes of [
      "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
      "\0\0\0\0\0\0",
      "\u0016\u0003\u0001\u0000\u0005hello",
    ]) {
      const socket = edge.tcp();
      socket.on("error", () => {});
      socket.resume();
      socket.write(bytes, "latin1");
      if (!socket.closed) await closed(socket);
    }
    assert.equal((await edge.http1({})).status, 200);
    assert.equal(notices, 0);
  });

  test("malformed HTTP inside TLS is 400 in our shape", async () => {
    await using edge = await Edge.open();
    const socket = await edge.open();
    socket.write("GET / HTTQ/1.1\r\n\r\n");
    assert.match(await readAll(socket), /^HTTP\/1\.1 400 .*\r\n\r\n\{"error":"INVALID_REQUEST"/s);
  });

  test("headers that drip are 408, in time", async () => {
    // Long enough for the handshake, which it bounds too.
    await using edge = await Edge.open({ headersTimeoutMs: 1500 });
    const socket = await edge.open();
    socket.write("GET / HTTP/1.1\r\nHost: a");
    assert.match(await readAll(socket), /^HTTP\/1\.1 408 .*"REQUEST_TIMEOUT"/s);
  });

  test("a handshake that never ends is closed after headersTimeoutMs", async () => {
    await using edge = await Edge.open({ headersTimeoutMs: 100 });
    const start = performance.now();
    const socket = edge.tcp();
    socket.on("error", () => {}).resume();
    await closed(socket);
    const took = performance.now() - start;
    assert.ok(took >= 90 && took < 20_000, `${took} ms`);
  });

  test("connections are counted before their handshake", async () => {
    await using edge = await Edge.open({ maxConnections: 2 });
    const silent = [edge.tcp(), edge.tcp()];
    await Promise.all(silent.map((socket) => once(socket, "connect")));
    const third = edge.tls();
    third.on("error", () => {});
    await closed(third);
    silent[0]!.destroy();
    // The server hears of that a moment later.
    for (let tries = 0; ; tries++) {
      const answer = await edge.http1({}).catch(() => undefined);
      if (answer?.status === 200) break;
      assert.ok(tries < 200, "there is room again");
    }
    silent[1]!.destroy();
  });

  test("old versions of TLS are refused", async () => {
    const old = { minVersion: "TLSv1", maxVersion: "TLSv1.1", ciphers: "DEFAULT@SECLEVEL=0" } as const;
    await using edge = await Edge.open();
    await assert.rejects(edge.open(old));
    (await edge.open({ maxVersion: "TLSv1.2" })).destroy();
    await using strict = await Edge.open({}, { minVersion: "TLSv1.3" });
    await assert.rejects(strict.open({ maxVersion: "TLSv1.2" }));
    (await strict.open()).destroy();
  });
});

describe("another certificate", () => {
  test("is shown to the next client; who is connected stays", async () => {
    await using edge = await Edge.open();
    const old = await edge.open();
    const next = edge.authority.issue({ names: "DNS:localhost,DNS:renewed,IP:127.0.0.1" });
    const told = edge.events.next("notice", ({ level }) => level === "info");
    edge.authority.replace(edge.pair, next);
    await told;
    const fresh = await edge.open({ servername: "renewed" });
    assert.match(fresh.getPeerCertificate().subjectaltname!, /renewed/);
    fresh.destroy();
    assert.doesNotMatch(old.getPeerCertificate().subjectaltname!, /renewed/);
    old.write("GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    assert.match(await readAll(old), /^HTTP\/1\.1 200/);
  });
});
