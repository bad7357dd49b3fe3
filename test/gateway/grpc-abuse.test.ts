/** What strangers may send to the gRPC listener: raw HTTP/2, and nothing is left behind. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { type ClientHttp2Session, connect, constants, type IncomingHttpHeaders } from "node:http2";
import { connect as connectTcp } from "node:net";
import { describe, test } from "node:test";
import { framed } from "../../src/gateway/protocol/grpc-wire.ts";
import { requestBytes } from "./protocol/oip-service.ts";
import { doubling, GrpcStage, rawRequest, rawValues } from "./grpc-stage.ts";

const INFER = "/inference.GRPCInferenceService/ModelInfer";
const good = framed([requestBytes(rawRequest([[1, 2]]))]);

interface Told {
  readonly http: number;
  readonly status: string | undefined;
  readonly words: string;
  readonly headers: IncomingHttpHeaders;
}

async function ask(
  session: ClientHttp2Session,
  headers: Record<string, string>,
  body: Buffer,
): Promise<Told> {
  const all = {
    ":method": "POST",
    ":path": INFER,
    "content-type": "application/grpc",
    te: "trailers",
    ...headers,
  };
  const stream = session.request(all);
  let trailers: IncomingHttpHeaders = {};
  stream.on("trailers", (found) => (trailers = found));
  stream.on("error", () => {});
  stream.resume();
  stream.end(body);
  const [response] = (await once(stream, "response")) as [IncomingHttpHeaders & { ":status": number }];
  if (!stream.closed) await once(stream, "close");
  const said = { ...response, ...trailers };
  const status = said["grpc-status"];
  return {
    http: response[":status"],
    status: typeof status === "string" ? status : undefined,
    words: String(said["grpc-message"] ?? ""),
    headers: said,
  };
}

async function withSession(
  check: (session: ClientHttp2Session, stage: GrpcStage) => Promise<void>,
  grpc: object = {},
  limits: object = {},
): Promise<void> {
  await using stage = await GrpcStage.open(doubling, { settings: { grpc, limits } });
  const session = connect(stage.ferry.grpcUrl.replace("grpc:", "http:"));
  session.on("error", () => {});
  try {
    await check(session, stage);
    // Whatever was sent, others are served.
    assert.deepEqual(rawValues(await stage.client.infer(rawRequest([[3]]))), [6]);
  } finally {
    session.destroy();
  }
}

describe("the gRPC listener", () => {
  test("a call by hand is answered", () =>
    withSession(async (session) => {
      const told = await ask(session, {}, good);
      assert.deepEqual([told.http, told.status], [200, "0"]);
      assert.match(String(told.headers["x-request-id"]), /^[\w-]{20,}$/);
      assert.equal(told.headers["x-ferry-batch-size"], "1");
    }));

  test("what is no gRPC is told so in HTTP's words", () =>
    withSession(async (session) => {
      assert.equal((await ask(session, { ":method": "PUT" }, good)).http, 405);
      assert.equal((await ask(session, { "content-type": "application/json" }, good)).http, 415);
      assert.equal((await ask(session, { "content-type": "application/grpc-web" }, good)).http, 415);
    }));

  test("another path, compression, a malformed deadline, two messages, half a one, none", () =>
    withSession(async (session, stage) => {
      const path = await ask(session, { ":path": "/inference.GRPCInferenceService/ModelStreamInfer" }, good);
      assert.deepEqual([path.http, path.status], [200, "12"]);
      assert.match(path.words, /no such method/);
      const gzip = await ask(session, { "grpc-encoding": "gzip" }, good);
      assert.deepEqual([gzip.status, gzip.headers["grpc-accept-encoding"]], ["12", "identity"]);
      const flagged = Buffer.from(good);
      flagged[0] = 1;
      assert.equal((await ask(session, {}, flagged)).status, "12");
      assert.equal((await ask(session, { "grpc-timeout": "soon" }, good)).status, "3");
      assert.equal((await ask(session, {}, Buffer.concat([good, good]))).status, "3");
      assert.equal((await ask(session, {}, good.subarray(0, -1))).status, "3");
      assert.equal((await ask(session, {}, good.subarray(0, 3))).status, "3");
      assert.equal((await ask(session, {}, Buffer.alloc(0))).status, "3");
      assert.equal((await ask(session, {}, framed([Buffer.from([0xff])]))).status, "3");
      assert.equal((await ask(session, { "grpc-timeout": "0m" }, good)).status, "4");
      assert.equal(stage.server.requests.length, 0);
      assert.equal(stage.answered[0]!.route, "", "a stranger's path is no route");
    }));

  test("a message that announces too much is refused at its prefix, whatever follows", () =>
    withSession(
      async (session) => {
        const prefix = Buffer.from([0, 0xff, 0xff, 0xff, 0xff]);
        const stream = session.request({
          ":method": "POST",
          ":path": INFER,
          "content-type": "application/grpc",
        });
        stream.on("error", () => {});
        stream.write(prefix);
        const [headers] = (await once(stream, "response")) as [IncomingHttpHeaders];
        assert.equal(headers["grpc-status"], "8");
        stream.close(constants.NGHTTP2_CANCEL);
      },
      { maxMessageBytes: 2000 },
    ));

  test("tensors of no bytes with many rows, and more rows than the queue has places", () =>
    withSession(
      async (session, stage) => {
        const tensors = (count: number, rows: number): Buffer => {
          const inputs = Array.from({ length: count }, (_, at) => {
            return { name: `t${at}`, datatype: "FP32", shape: [rows, 0] };
          });
          return framed([requestBytes({ model_name: "m", inputs })]);
        };
        for (const [count, rows, words] of [
          [150, 65_536, /65536 rows; send at most 100/],
          [1000, 100, /100 rows of 1000 tensors/],
          [1, 101, /101 rows; send at most 100/],
        ] as const) {
          const told = await ask(session, {}, tensors(count, rows));
          assert.equal(told.status, "3");
          assert.match(decodeURIComponent(told.words), words);
        }
        assert.equal(stage.server.requests.length, 0);
      },
      {},
      { maxQueued: 100 },
    ));

  test("only ModelInfer reads a large message: the others refuse it at its prefix, before it is sent", () =>
    withSession(async (session) => {
      const methods = ["ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata"];
      for (const method of methods) {
        const stream = session.request({
          ":method": "POST",
          ":path": INFER.replace("ModelInfer", method),
          "content-type": "application/grpc",
        });
        stream.on("error", () => {});
        // 600 bytes are announced, none is sent.
        stream.write(Buffer.from([0, 0, 0, 0x02, 0x58]));
        const [headers] = (await once(stream, "response")) as [IncomingHttpHeaders];
        assert.equal(headers["grpc-status"], "8", method);
        stream.close(constants.NGHTTP2_CANCEL);
      }
      // The longest name that a model can have: 128 characters.
      const named = framed([Buffer.from([0x0a, 0x80, 0x01]), Buffer.from("m".repeat(128))]);
      const told = await ask(session, { ":path": INFER.replace("ModelInfer", "ModelReady") }, named);
      assert.equal(told.status, "5", told.words);
      const live = await ask(session, { ":path": INFER.replace("ModelInfer", "ServerLive") }, framed([]));
      assert.equal(live.status, "0");
    }));

  test("on loopback without authentication no call comes by a stranger's name or from a page", () =>
    withSession(async (session, stage) => {
      for (const headers of [
        { ":authority": "evil.example" },
        { origin: "https://evil.example" },
        { "sec-fetch-site": "cross-site" },
      ]) {
        const told = await ask(session, headers, good);
        assert.equal(told.status, "7", told.words);
        assert.match(told.words, /auth\.allowedHosts/);
      }
      assert.equal(stage.server.requests.length, 0);
      assert.equal((await ask(session, { ":authority": "[::1]:8082" }, good)).status, "0");
    }));

  test("too many headers, and one that must stand once", () =>
    withSession(async (session) => {
      const many = Object.fromEntries(Array.from({ length: 120 }, (_, at) => [`x-${at}`, "1"]));
      assert.equal((await ask(session, many, good)).status, "3");
    }));

  test("calls that are broken off at every stage leave nothing open", () =>
    withSession(async (session, stage) => {
      const over: Promise<unknown>[] = [];
      for (let at = 0; at < 100; at++) {
        const stream = session.request({
          ":method": "POST",
          ":path": INFER,
          "content-type": "application/grpc",
        });
        stream.on("error", () => {});
        over.push(once(stream, "close"));
        stream.write(good.subarray(0, at % good.length));
        if (at % 3 === 0) stream.end(good.subarray(at % good.length));
        stream.close(constants.NGHTTP2_CANCEL);
      }
      await Promise.all(over);
      while (stage.ferry.tally().queued > 0) await stage.ferry.events.next("request.answered");
      assert.equal(stage.ferry.tally().queued, 0);
    }));

  test("HTTP/1.1 and noise end the connection", () =>
    withSession(async (_, stage) => {
      const { port } = new URL(stage.ferry.grpcUrl);
      for (const text of ["GET / HTTP/1.1\r\nHost: x\r\n\r\n", "\0".repeat(100)]) {
        const socket = connectTcp(Number(port), "127.0.0.1");
        socket.on("error", () => {});
        socket.resume();
        socket.write(text);
        await once(socket, "close");
      }
    }));

  test("a connection that asks nothing is ended", () =>
    withSession(
      async (session) => {
        await once(session, "close");
      },
      {},
      { headersTimeoutMs: 1500, keepAliveTimeoutMs: 1500 },
    ));
});
