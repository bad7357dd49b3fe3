/** Passing through over HTTP/2 and TLS on both sides: streams, broken streams, a worker that asks for a certificate. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { connect, type ClientHttp2Stream } from "node:http2";
import { createServer, type Server } from "node:https";
import type { ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { after, test } from "node:test";
import { Authority } from "../fixtures/certificates.ts";
import { ask } from "../gateway/edge.ts";
import { Ferry } from "./harness.ts";
import { openModel, OpenWorker } from "./open-worker.ts";

const authority = new Authority();
after(() => authority[Symbol.dispose]());

async function tlsWorker(answer: (path: string, response: ServerResponse) => void): Promise<Server> {
  const { cert, key } = authority.issue();
  const ca = authority.own.cert;
  const server = createServer({ cert, key, ca, requestCert: true, rejectUnauthorized: true });
  server.on("request", (request, response) => {
    request.resume();
    request.on("end", () => answer(request.url!, response));
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  return server;
}

async function firstChunk(stream: ClientHttp2Stream): Promise<string> {
  const [chunk] = (await once(stream, "data")) as [Buffer];
  return chunk.toString("utf8");
}

test("HTTP/2 in, TLS with our certificate out; a broken stream is reset, not ended", async () => {
  const responses: ServerResponse[] = [];
  const worker = await tlsWorker((path, response) => {
    if (path === "/plain") return void response.end("plain");
    responses.push(response);
    response
      .writeHead(200, { "content-type": "text/event-stream", connection: "keep-alive" })
      .write("data: 1\n\n");
  });
  const [edge, own] = [authority.issue(), authority.issue()];
  const url = `https://127.0.0.1:${(worker.address() as AddressInfo).port}`;
  const tls = { caFile: authority.own.certFile, certFile: own.certFile, keyFile: own.keyFile };
  await using ferry = await Ferry.start({
    tls: { certFile: edge.certFile, keyFile: edge.keyFile },
    models: [openModel([url], { backend: { tls } })],
  });
  const session = connect(ferry.url, { ca: authority.own.cert });
  session.on("error", () => {});
  assert.equal((await ask(session, { path: "/plain" })).text, "plain");
  assert.equal((await ask(session, { path: "/plain", method: "POST", body: "abc" })).status, 200);

  const stream = session.request({ ":path": "/stream", ":method": "GET" });
  stream.on("error", () => {});
  assert.equal(await firstChunk(stream), "data: 1\n\n");
  responses[0]!.write("data: 2\n\n");
  assert.equal(await firstChunk(stream), "data: 2\n\n");
  const closed = new Promise<void>((resolve) => void stream.once("close", resolve));
  responses[0]!.destroy();
  await closed;
  assert.notEqual(stream.rstCode, 0);

  const left = session.request({ ":path": "/stream", ":method": "GET" });
  left.on("error", () => {});
  await firstChunk(left);
  const hungUp = once(responses[1]!, "close");
  left.close();
  await hungUp;
  session.destroy();
  worker.close();
  worker.closeAllConnections();
});

test("bodies that come over HTTP/2 arrive whole, read for a model's name or not", async () => {
  await using worker = await OpenWorker.listen();
  const { certFile, keyFile } = authority.issue();
  await using ferry = await Ferry.start({
    tls: { certFile, keyFile },
    models: [openModel([worker.url], { backend: { model: "theirs" } })],
  });
  const session = connect(ferry.url, { ca: authority.own.cert });
  session.on("error", () => {});
  const long = "x".repeat(300_000);
  for (const [body, sent] of [
    [long, long],
    [`{"model":"open","a":"${long}"}`, `{"model":"theirs","a":"${long}"}`],
    [" ".repeat(100_000), " ".repeat(100_000)],
  ] as const) {
    const { text } = await ask(session, { path: "/models/open/x", method: "POST", body });
    assert.equal((JSON.parse(text) as { body: string }).body, sent);
  }
  session.destroy();
});
