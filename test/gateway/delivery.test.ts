/** Answers that reach their clients, however many are under way, and those that do not: what is counted of them. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { type ClientHttp2Session, connect as connectHttp2, constants } from "node:http2";
import { describe, test } from "node:test";
import { framed } from "../../src/gateway/protocol/grpc-wire.ts";
import { requestBytes } from "./protocol/oip-service.ts";
import { ask, Edge } from "./edge.ts";
import { GrpcStage, rawRequest } from "./grpc-stage.ts";

const [REQUESTS, AT_ONCE, ANSWER_BYTES] = [800, 512, 60_000];

/** A refusal of a process that is slow: on a machine that stands still for seconds any of a burst may get it. */
const PROCESS_IS_FULL = /this gateway process/;

/** `one` for each of them, so many at once; what failed. */
async function many(one: (at: number) => Promise<void>): Promise<string[]> {
  let next = 0;
  const failed: string[] = [];
  const client = async (): Promise<void> => {
    while (next < REQUESTS) {
      const at = next++;
      for (;;) {
        const error = await one(at).catch((thrown: unknown) => String(thrown));
        if (error === undefined) break;
        if (PROCESS_IS_FULL.test(error)) continue;
        failed.push(error);
        break;
      }
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, client));
  return failed;
}

describe(`${REQUESTS} answers of 60 KB on one connection, ${AT_ONCE} at once:`, () => {
  test("gRPC: a client of grpc-js gets every one", async () => {
    const timeouts = { queueMs: 300_000, workerMs: 300_000, totalMs: 301_000 };
    const model = { maxBatchSize: 64, cache: { scope: "off" }, collapse: false, timeouts };
    await using stage = await GrpcStage.open(
      ({ inputs: [x], model_name }) => {
        const rows = Number(x!.shape[0]);
        const outputs = [{ name: "y", datatype: "FP32", shape: [rows, ANSWER_BYTES / 4] }];
        return { model_name, outputs, raw_output_contents: [Buffer.alloc(rows * ANSWER_BYTES)] };
      },
      { model },
    );
    const failed = await many(async (at) => {
      const { raw_output_contents: raw } = await stage.client.infer(rawRequest([[at]]));
      assert.equal(raw![0]!.length, ANSWER_BYTES);
    });
    assert.deepEqual(failed, []);
    const answered = (): number => stage.answered.filter(({ status }) => status === 200).length;
    while (answered() < REQUESTS) await stage.ferry.events.next("request.answered");
    assert.equal(answered(), REQUESTS);
  });

  test("HTTP/2 over TLS: a client of node:http2 gets every one", async () => {
    await using edge = await Edge.open({}, { maxStreams: AT_ONCE });
    const statuses: number[] = [];
    edge.events.on("request.answered", ({ status }) => statuses.push(status));
    const client = connectHttp2(edge.url, { ca: edge.authority.own.cert, maxSessionMemory: 1000 });
    await once(client, "remoteSettings");
    const failed = await many(async () => {
      const { status, text } = await ask(client, { path: `/sized/${ANSWER_BYTES}` });
      assert.deepEqual([status, text.length], [200, ANSWER_BYTES + 2]);
    });
    assert.deepEqual(failed, []);
    while (statuses.length < REQUESTS) await edge.events.next("request.answered");
    assert.deepEqual(
      statuses.filter((status) => status !== 200),
      [],
    );
    client.destroy();
  });
});

test("requests beyond maxStreams, opened before the client could know, cost nobody an answer", async () => {
  await using edge = await Edge.open({}, { maxStreams: 100 });
  const client = connectHttp2(edge.url, { ca: edge.authority.own.cert, peerMaxConcurrentStreams: 10_000 });
  const one = (): Promise<number> =>
    new Promise((resolve) => {
      const stream = client.request({ ":path": "/sized/10" });
      stream.on("error", () => {}).resume();
      stream.on("close", () => resolve(stream.rstCode));
    });
  const codes = await Promise.all(Array.from({ length: 600 }, one));
  // The client may send those again: the server has not looked at them.
  const refused = codes.filter((code) => code === constants.NGHTTP2_REFUSED_STREAM).length;
  const answered = codes.filter((code) => code === constants.NGHTTP2_NO_ERROR).length;
  assert.ok(answered >= 100, `${answered} were answered`);
  assert.equal(refused + answered, 600);
  assert.equal((await ask(client, {})).status, 200);
  client.destroy();
});

describe("an answer that was written and not taken is no 200:", () => {
  const stalled = { settings: { initialWindowSize: 1000 } };

  const endings: Readonly<
    Record<string, (client: ClientHttp2Session, stream: { close(code: number): void }) => void>
  > = {
    "its stream is reset": (_, stream) => stream.close(constants.NGHTTP2_CANCEL),
    "its connection ends": (client) => client.destroy(),
  };
  for (const [how, end] of Object.entries(endings)) {
    test(`HTTP/2, ${how}`, async () => {
      await using edge = await Edge.open();
      const client = await edge.session(stalled.settings);
      const ended = edge.events.next("request.answered");
      const stream = client.request({ ":path": `/sized/${ANSWER_BYTES}` });
      stream.on("error", () => {});
      await once(stream, "response");
      end(client, stream);
      assert.equal((await ended).status, 499);
      client.destroy();
    });

    test(`HTTP/2, ${how} in the middle of an answer that is passed on`, async () => {
      await using edge = await Edge.open();
      const client = await edge.session();
      const ended = edge.events.next("request.answered");
      const stream = client.request({ ":path": "/endless" });
      stream.on("error", () => {});
      await once(stream, "data");
      end(client, stream);
      assert.equal((await ended).status, 499);
      client.destroy();
    });

    test(`gRPC, ${how}`, async () => {
      await using stage = await GrpcStage.open(({ model_name }) => {
        const outputs = [{ name: "y", datatype: "FP32", shape: [1, ANSWER_BYTES / 4] }];
        return { model_name, outputs, raw_output_contents: [Buffer.alloc(ANSWER_BYTES)] };
      });
      const client = connectHttp2(stage.ferry.grpcUrl.replace("grpc:", "http:"), stalled);
      client.on("error", () => {});
      const ended = stage.ferry.events.next("request.answered");
      const stream = client.request({
        ":method": "POST",
        ":path": "/inference.GRPCInferenceService/ModelInfer",
        "content-type": "application/grpc",
      });
      stream.on("error", () => {}).end(framed([requestBytes(rawRequest([[1]]))]));
      await once(stream, "response");
      end(client, stream);
      assert.equal((await ended).status, 499);
      client.destroy();
    });
  }

  test("HTTP/1.1, its connection ends", async () => {
    await using edge = await Edge.open();
    const ended = edge.events.next("request.answered");
    const socket = await edge.open({ ALPNProtocols: ["http/1.1"] });
    socket.on("error", () => {});
    // More than the buffers of both kernels hold.
    socket.write("GET /sized/40000000 HTTP/1.1\r\nHost: a\r\n\r\n");
    await once(socket, "readable");
    socket.destroy();
    assert.equal((await ended).status, 499);
  });

  test("an answer that came before the request's end was taken, whatever the client does then", async () => {
    await using edge = await Edge.open();
    const client = await edge.session();
    const ended = edge.events.next("request.answered");
    const stream = client.request({ ":method": "PUT", ":path": "/echo" }, { endStream: false });
    stream.on("error", () => {}).resume();
    await once(stream, "end");
    stream.close(constants.NGHTTP2_CANCEL);
    assert.equal((await ended).status, 405);
    client.destroy();
  });
});
