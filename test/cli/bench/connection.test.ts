import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type AddressInfo, type Server, type Socket } from "node:net";
import { test } from "node:test";
import {
  Connection,
  Markers,
  markerLength,
  readAnswer,
  template,
  type Owner,
} from "../../../src/cli/bench/connection.ts";

function answer(body: string, head = `content-length: ${Buffer.byteLength(body)}`): Buffer {
  return Buffer.from(`HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n${head}\r\n\r\n${body}`);
}

/** A server on a free port, ended with its connections at the end of the test. */
class Peer implements AsyncDisposable {
  readonly #server: Server;
  readonly #sockets = new Set<Socket>();

  constructor(onData: (socket: Socket, text: string) => void) {
    this.#server = createServer((socket) => {
      this.#sockets.add(socket);
      socket.on("error", () => {});
      socket.on("data", (chunk) => onData(socket, chunk.toString()));
    });
  }

  async target(): Promise<{ host: string; port: number; path: string }> {
    this.#server.listen(0, "127.0.0.1");
    await once(this.#server, "listening");
    return { host: "127.0.0.1", port: (this.#server.address() as AddressInfo).port, path: "/" };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const socket of this.#sockets) socket.destroy();
    this.#server.close();
    await once(this.#server, "close");
  }
}

/** Sends one request and tells what came of it. */
async function exchange(peer: Peer, verify: boolean): Promise<string> {
  const target = await peer.target();
  const heard = Promise.withResolvers<string>();
  const owner: Owner = {
    answered: (it) => heard.resolve(`${it.status}${it.crossed ? " crossed" : ""}`),
    closed: (_it, inFlight) => heard.resolve(inFlight ? "broken" : "closed"),
  };
  const connection = new Connection(target, owner);
  const { front, back } = template(target, 300, {});
  const marker = new Markers().take();
  connection.send(front + marker + back, verify ? marker : "", 0);
  const what = await heard.promise;
  connection.close();
  return what;
}

void test("an answer is whole at its last byte and never before", () => {
  for (const bytes of [answer(""), answer('{"output":"abc"}'), answer("y".repeat(3000))]) {
    for (let end = 0; end < bytes.length; end++) assert.ok(readAnswer(bytes, end).length > end, `at ${end}`);
    assert.equal(readAnswer(bytes, bytes.length).length, bytes.length);
    assert.equal(readAnswer(bytes, bytes.length).status, 200);
  }
});

void test("bytes after the answer show in its length", () => {
  const bytes = answer("{}");
  assert.equal(readAnswer(Buffer.concat([bytes, Buffer.from("H")]), bytes.length + 1).length, bytes.length);
});

void test("content-length is found in any spelling, and after a long head", () => {
  for (const name of ["Content-Length", "content-length", "CONTENT-LENGTH"]) {
    const bytes = answer("{}", `${name}: 2`);
    assert.equal(readAnswer(bytes, bytes.length).length, bytes.length);
  }
  const long = answer("{}", `x-filler: ${"z".repeat(2000)}\r\ncontent-length: 2`);
  assert.equal(readAnswer(long, long.length).length, long.length);
});

void test("an answer in chunks is whole at its last byte and never before", () => {
  for (const head of ["transfer-encoding: chunked", "Transfer-Encoding: chunked\r\nx: y"]) {
    const bytes = answer(`2\r\n{}\r\n7d0;x=y\r\n${"z".repeat(2000)}\r\n0\r\n\r\n`, head);
    for (let end = 0; end < bytes.length; end++) assert.ok(readAnswer(bytes, end).length > end, `at ${end}`);
    assert.equal(readAnswer(bytes, bytes.length).length, bytes.length);
  }
});

void test("an answer without a length, or of another protocol, is unknown", () => {
  const chunked = answer("no chunk\r\n", "transfer-encoding: chunked");
  assert.equal(readAnswer(chunked, chunked.length).length, -1);
  const none = answer("{}", "x-none: 1");
  assert.equal(readAnswer(none, none.length).length, -1);
  const other = Buffer.from("HTTP/2 200\r\ncontent-length: 0\r\n\r\n");
  assert.equal(readAnswer(other, other.length).length, -1);
  const inBody = answer("\r\ncontent-length: 2\r\n\r\n", "x-none: 1");
  assert.equal(readAnswer(inBody, inBody.length).length, -1);
});

void test("a request is valid JSON of the size asked for, with room for a marker", () => {
  const target = { host: "127.0.0.1", port: 1, path: "/v1/inference" };
  const { front, back } = template(target, 2048, { model: "fast" });
  const text = front + "m".repeat(markerLength) + back;
  const body = text.slice(text.indexOf("\r\n\r\n") + 4);
  assert.equal(body.length, 2048);
  const parsed = JSON.parse(body) as { input: string; model: string };
  assert.equal(parsed.model, "fast");
  assert.equal(parsed.input.slice(0, markerLength), "m".repeat(markerLength));
});

void test("further headers stand in the head, and the marker still finds its place", () => {
  const target = { host: "127.0.0.1", port: 1, path: "/" };
  const { front } = template(target, 300, {}, { authorization: "Bearer abc" });
  assert.match(front, /^POST \/ HTTP\/1\.1\r\nhost: 127\.0\.0\.1:1\r\nauthorization: Bearer abc\r\n/);
  assert.ok(front.endsWith('{"input":"'));
});

void test("markers are unique and of one width", () => {
  const markers = new Markers();
  const some = Array.from({ length: 10_000 }, () => markers.take());
  assert.equal(new Set(some).size, some.length);
  assert.ok(some.every((marker) => marker.length === markerLength));
});

const echo = (socket: Socket, text: string): void => {
  socket.write(
    answer(`{"output":${JSON.stringify(text.slice(text.indexOf('"input":"') + 9).slice(0, 40))}}`),
  );
};

void test("an answer with the request's own marker is accepted", async () => {
  await using peer = new Peer(echo);
  assert.equal(await exchange(peer, true), "200");
});

void test("an answer with another marker is crossed, unless nobody asked", async () => {
  const foreign = (socket: Socket): void => void socket.write(answer('{"output":"somebody else"}'));
  await using first = new Peer(foreign);
  assert.equal(await exchange(first, true), "200 crossed");
  await using second = new Peer(foreign);
  assert.equal(await exchange(second, false), "200");
});

void test("an answer in two pieces is put together", async () => {
  await using peer = new Peer((socket) => {
    const bytes = answer('{"output":"x"}');
    socket.write(bytes.subarray(0, 30), () => socket.write(bytes.subarray(30)));
  });
  assert.equal(await exchange(peer, false), "200");
});

void test("a connection that ends with a request in flight is broken", async () => {
  await using peer = new Peer((socket) => void socket.end(answer("{}").subarray(0, 20)));
  assert.equal(await exchange(peer, false), "broken");
});

void test("an answer that is not understood breaks the connection", async () => {
  await using peer = new Peer((socket) => void socket.write(answer("0\r\n\r\n", "transfer-encoding: gzip")));
  assert.equal(await exchange(peer, false), "broken");
});
