/** What becomes of a batch behind gRPC: each status, each way to lose a connection, and health. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer as createHttpServer } from "node:http";
import { createServer as createHttp2Server, type Http2Stream, type ServerHttp2Stream } from "node:http2";
import type { AddressInfo } from "node:net";
import { setImmediate as turn } from "node:timers/promises";
import { status as codes } from "@grpc/grpc-js";
import type { Reply } from "../../../src/workers/backend/backend.ts";
import { rawFromJson } from "../../../src/gateway/protocol/oip-tensors.ts";
import { batchOf, outputsOf } from "../../contract/backend.ts";
import { type InferResponse, OipServer, type Serve, status } from "../../gateway/protocol/oip-service.ts";
import { asRows, assertReply, backendFor, echo, never, replyTo, TextWorker } from "./grpc-stage.ts";
import { ManualClock } from "./manual-clock.ts";
import { describe, test } from "./suite.ts";
import { TcpProxy } from "./tcp-proxy.ts";

describe("grpc, what each status means:", () => {
  const fails =
    (code: codes, words = "oops", trailers = {}): Serve =>
    () => {
      throw status(code, words, trailers);
    };

  test("about the input: rejected, with the worker's words in one line", async () => {
    for (const code of [codes.INVALID_ARGUMENT, codes.OUT_OF_RANGE, codes.FAILED_PRECONDITION]) {
      const reply = await replyTo(fails(code, "input 2 is\n\u001b[31mtoo long: 100 % é\r\n"));
      assertReply(
        reply,
        "rejected",
        new RegExp(`^worker answered ${codes[code]}: input 2 is \\[31mtoo long: 100 % é$`),
      );
    }
  });

  test("busy, for as long as it says", async () => {
    const retryAfterMs = async (code: codes, trailers = {}): Promise<number> => {
      const reply = await replyTo(fails(code, "later", trailers));
      assert(reply.kind === "busy", reply.kind);
      assert.equal(reply.brief, `worker answered ${codes[code]}`);
      return reply.retryAfterMs;
    };
    assert.equal(await retryAfterMs(codes.UNAVAILABLE), 1000);
    assert.equal(await retryAfterMs(codes.RESOURCE_EXHAUSTED, { "grpc-retry-pushback-ms": "250" }), 250);
    assert.equal(await retryAfterMs(codes.UNAVAILABLE, { "grpc-retry-pushback-ms": "-1" }), 1000);
    assert.equal(await retryAfterMs(codes.UNAVAILABLE, { "grpc-retry-pushback-ms": "999999999" }), 30_000);
  });

  test("a message that is too large for the worker is refused, so that halves are tried", async () => {
    await using server = await OipServer.listen(echo, {
      options: { "grpc.max_receive_message_length": 1000 },
    });
    const backend = backendFor([server.url]);
    const worker = new TextWorker(backend.workers[0]!);
    assertReply(
      await worker.run(batchOf([`"${"x".repeat(2000)}"`]), never),
      "rejected",
      /RESOURCE_EXHAUSTED/,
    );
    const batch = batchOf(["1"]);
    assert.deepEqual(outputsOf(batch, await worker.run(batch, never)), ["1"]);
    await backend.stop();
  });

  test("a wrong name or credential blames the worker and says what to check", async () => {
    assertReply(
      await replyTo(fails(codes.NOT_FOUND)),
      "failed",
      /NOT_FOUND: oops \(check backend.model/,
      "worker",
    );
    assertReply(await replyTo(fails(codes.UNIMPLEMENTED)), "failed", /address/, "worker");
    assertReply(await replyTo(fails(codes.UNAUTHENTICATED)), "failed", /backend.authorization/, "worker");
    assertReply(await replyTo(fails(codes.PERMISSION_DENIED)), "failed", /backend.authorization/, "worker");
  });

  test("NOT_FOUND of a version that the client asked for, or of what its parameters name, is the client's", async () => {
    const run = async (serve: Serve, more: string, options = {}): Promise<Reply> => {
      await using server = await OipServer.listen(serve);
      const backend = backendFor([server.url], options);
      const batch = asRows(batchOf(["1"]));
      const parameters = batch.parameters.replace(/\}$/, `${more}}`);
      const reply = await backend.workers[0]!.run({ ...batch, parameters }, never);
      await backend.stop();
      return reply;
    };
    const version = await run(fails(codes.NOT_FOUND), ',"version":"7"');
    assertReply(version, "rejected", /^worker answered NOT_FOUND: oops$/);
    assert(version.kind === "rejected");
    assert.equal(version.code, "NOT_FOUND");
    const named = await run(fails(codes.NOT_FOUND, "no adapter 'l-7'"), ',"parameters":{"lora":"l-7"}');
    assert(named.kind === "rejected");
    assert.equal(named.code, "NOT_FOUND");
    const denied = await run(
      fails(codes.PERMISSION_DENIED, "not for you: l-7"),
      ',"parameters":{"lora":"l-7"}',
    );
    assert(denied.kind === "rejected");
    assert.equal(denied.code, "FORBIDDEN");
    const loading = await run(fails(codes.UNAVAILABLE), ',"version":"7"');
    assert(loading.kind === "busy");
    assert.equal(loading.named, true);
    // The version of the config is not the client's.
    assertReply(await run(fails(codes.NOT_FOUND), "", { version: "7" }), "failed", /check/, "worker");
  });

  test("a message that is too large, as other servers word it", async () => {
    for (const words of [
      "Received message exceeds the maximum configured message size.",
      "Error, message length too large: found 5000000 bytes, the limit is: 4194304 bytes",
    ]) {
      assertReply(await replyTo(fails(codes.RESOURCE_EXHAUSTED, words)), "rejected", /RESOURCE_EXHAUSTED/);
    }
  });

  test("any other blames the worker", async () => {
    for (const code of [
      codes.UNKNOWN,
      codes.INTERNAL,
      codes.DATA_LOSS,
      codes.ABORTED,
      codes.DEADLINE_EXCEEDED,
    ]) {
      const reply = await replyTo(fails(code));
      assertReply(reply, "failed", new RegExp(`^worker answered ${codes[code]}: oops$`), "worker");
      assert(reply.kind === "failed");
      assert.equal(reply.brief, `worker answered ${codes[code]}`);
    }
  });

  test("replies that cannot be used", async () => {
    const answering =
      (response: InferResponse): Serve =>
      () =>
        response;
    const y = { name: "y", datatype: "FP32", shape: [2] };
    const raw = rawFromJson("[1]", "FP32");
    const large = { ...y, datatype: "UINT8", shape: [2, 1_000_000] };
    const cases: [InferResponse, RegExp][] = [
      [
        { model_name: "m", outputs: [{ ...y, shape: [3] }], raw_output_contents: [raw] },
        /^worker returned 3 outputs for 2 inputs$/,
      ],
      [{ model_name: "m", outputs: [y], raw_output_contents: [raw] }, /"y" has 4 bytes/],
      [{ model_name: "m", outputs: [] }, /holds no outputs/],
      [
        { model_name: "m", outputs: [large], raw_output_contents: [Buffer.alloc(2_000_000)] },
        /larger than maxReplyBytes \(1000000\)/,
      ],
    ];
    for (const [response, words] of cases) assertReply(await replyTo(answering(response)), "unusable", words);
  });
});

describe("grpc, connections:", () => {
  test("nobody there, or a name that is none: nobody is to blame", async () => {
    const server = await OipServer.listen(echo);
    await server[Symbol.asyncDispose]();
    for (const [url, words] of [
      [server.url, /cannot connect to the worker: connection refused/],
      ["grpc://nowhere.invalid:1", /cannot be resolved/],
    ] as const) {
      const backend = backendFor([url]);
      assertReply(await backend.workers[0]!.run(asRows(batchOf(["1"])), never), "failed", words, "nobody");
      await backend.stop();
    }
  });

  test("a server of HTTP/1.1, and one of HTTP/2 that is no gRPC", async () => {
    const plain = createHttpServer((_, response) => response.end("hello")).listen(0, "127.0.0.1");
    await once(plain, "listening");
    const other = createHttp2Server((_, response) => response.end("hello")).listen(0, "127.0.0.1");
    await once(other, "listening");
    const missing = createHttp2Server((_, response) => response.writeHead(404).end()).listen(0, "127.0.0.1");
    await once(missing, "listening");
    for (const [server, words] of [
      [plain, /does not speak HTTP\/2/],
      [other, /UNKNOWN: HTTP status 200 .*instead of gRPC/],
      [missing, /UNIMPLEMENTED: HTTP status 404 .*check the worker's address/],
    ] as const) {
      const backend = backendFor([`grpc://127.0.0.1:${(server.address() as AddressInfo).port}`]);
      assertReply(await backend.workers[0]!.run(asRows(batchOf(["1"])), never), "failed", words, "worker");
      await backend.stop();
      server.close();
    }
  });

  test("a connection that is lost with the batch blames the batch; the next batch gets another", async () => {
    await using server = await OipServer.listen(() => undefined);
    await using proxy = await TcpProxy.to(server.port);
    const backend = backendFor([`grpc://127.0.0.1:${proxy.port}`]);
    const worker = new TextWorker(backend.workers[0]!);
    server.serve = () => {
      proxy.cut();
      return undefined;
    };
    assertReply(
      await worker.run(batchOf(["1"]), never),
      "failed",
      /closed the connection before it answered/,
      "batch",
    );
    server.serve = echo;
    const batch = batchOf(["2"]);
    assert.deepEqual(outputsOf(batch, await worker.run(batch, never)), ["2"]);
    assert.equal(proxy.connections, 2);
    await backend.stop();
  });

  test("a call that is broken off blames the worker", async () => {
    const server = createHttp2Server().listen(0, "127.0.0.1");
    await once(server, "listening");
    const quiet = (stream: Http2Stream): Http2Stream => stream.on("error", () => {});
    server.on("stream", (stream) =>
      quiet(stream)
        .on("data", () => {})
        .on("end", () => stream.close(2)),
    );
    const backend = backendFor([`grpc://127.0.0.1:${(server.address() as AddressInfo).port}`]);
    const run = (): Promise<Reply> => backend.workers[0]!.run(asRows(batchOf(["1"])), never);
    assertReply(await run(), "failed", /broke the call off before it answered \(HTTP\/2 error 2\)/, "worker");
    server.removeAllListeners("stream");
    server.on("stream", (stream) => quiet(stream).close(7));
    assertReply(await run(), "failed", /refused the call unseen/, "nobody");
    await backend.stop();
    server.close();
  });

  test("a worker that went silent is found out by a ping", async () => {
    await using server = await OipServer.listen(() => undefined);
    await using proxy = await TcpProxy.to(server.port);
    const clock = new ManualClock();
    const backend = backendFor([`grpc://127.0.0.1:${proxy.port}`], { keepAliveMs: 500 }, clock);
    const arrived = new Promise<void>((resolve) => {
      server.serve = () => {
        resolve();
        return undefined;
      };
    });
    const running = backend.workers[0]!.run(asRows(batchOf(["1"])), never);
    await arrived;
    // A first ping, and it is answered: the next one comes after twice the time.
    clock.advance(500);
    while (clock.nextMs !== 1000) await turn();
    proxy.swallow();
    clock.advance(1000);
    assert.equal(clock.nextMs, 500);
    clock.advance(500);
    assertReply(await running, "failed", /did not answer a ping within 500 ms/, "batch");
    await backend.stop();
  });
});

describe("grpc, health:", () => {
  test("ModelReady decides whether it is well", async () => {
    await using server = await OipServer.listen(echo);
    const health = { askMs: 5, askTimeoutMs: 2000, failures: 2 };
    const backend = backendFor([server.url], { askReady: true, health });
    const worker = backend.workers[0]!;
    const changed = (): Promise<void> => new Promise((resolve) => (worker.onHealth = resolve));
    server.ready = false;
    const ill = changed();
    await backend.start();
    await ill;
    assert.equal(worker.health!.well, false);
    assert.match(worker.health!.why, /its ModelReady says that it is not ready \(2 times in a row\)/);
    const well = changed();
    server.ready = true;
    await well;
    assert.equal(worker.health!.well, true);
    const gone = changed();
    server.die();
    await gone;
    assert.match(worker.health!.why, /cannot be asked: cannot connect to the worker: connection refused/);
    await backend.stop();
  });

  test("a server that does not know the question is well", async () => {
    const server = createHttp2Server().listen(0, "127.0.0.1");
    await once(server, "listening");
    server.on("stream", (stream: ServerHttp2Stream) => {
      stream.respond(
        { ":status": 200, "content-type": "application/grpc", "grpc-status": "12" },
        { endStream: true },
      );
    });
    const health = { askMs: 5, askTimeoutMs: 2000, failures: 1 };
    const backend = backendFor([`grpc://127.0.0.1:${(server.address() as AddressInfo).port}`], {
      askReady: true,
      health,
    });
    await backend.start();
    while (backend.workers[0]!.health === undefined) await turn();
    assert.equal(backend.workers[0]!.health.well, true);
    await backend.stop();
    server.close();
  });
});
