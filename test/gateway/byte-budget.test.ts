/** Bytes held for clients: bodies that are being read, and answers that are not taken. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { type ClientHttp2Session, connect as connectHttp2, type IncomingHttpHeaders } from "node:http2";
import { connect as connectTcp } from "node:net";
import { describe, test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import { SystemClock } from "../../src/app/clock.ts";
import { ByteBudget, ClientBytes } from "../../src/gateway/client-request.ts";
import { Listener } from "../../src/gateway/server.ts";
import { framed } from "../../src/gateway/protocol/grpc-wire.ts";
import { Events } from "../../src/observe/events.ts";
import { RawClient, postHead } from "../e2e/raw-client.ts";
import { requestBytes } from "./protocol/oip-service.ts";
import { LIMITS } from "./edge.ts";
import { GrpcStage, rawRequest } from "./grpc-stage.ts";

const MEBIBYTE = 2 ** 20;
const INFER = "/inference.GRPCInferenceService/ModelInfer";
/** As large as a body may be below, and more than half of one: both are announced before they are sent. */
const [WHOLE, HALF] = [95_000, 90_000];

/** Adds as long as it fits, in small steps; what the client holds then. */
function fill(budget: ByteBudget, client: string): number {
  let held = 0;
  for (; budget.fits(client, 10); held += 10) budget.add(client, 10);
  return held;
}

describe("ByteBudget", () => {
  test("one client gets half, the next half of the rest: nobody takes all, and the sum stays below the bound", () => {
    const budget = new ByteBudget(() => 6000);
    assert.equal(fill(budget, "a"), 3000);
    assert.equal(fill(budget, "b"), 1500);
    assert.equal(fill(budget, "c"), 750);
    assert.equal(fill(budget, "a"), 0);
    assert.equal(budget.total, 5250);
    budget.remove("a", 3000);
    assert.ok(fill(budget, "d") > 0);
    assert.ok(budget.total <= 6000);
  });

  test("whoever holds more than is free waits until that is over; others do not", () => {
    const budget = new ByteBudget(() => 1000);
    budget.add("a", 600);
    assert.deepEqual([budget.hasRoom("a"), budget.hasRoom("b")], [false, true]);
    let woken = 0;
    const gone = (): void => assert.fail("it left");
    budget.wait("a", () => woken++);
    budget.wait("a", gone);
    budget.wait("a", () => woken++);
    budget.leave("a", gone);
    budget.remove("a", 50);
    assert.equal(woken, 0);
    budget.remove("a", 100);
    assert.equal(woken, 2);
    budget.remove("a", 450);
    assert.equal(budget.total, 0);
    assert.equal(budget.hasRoom("a"), true);
    assert.equal(woken, 2, "each once");
  });

  test("a client that holds far more than the bound holds up nobody else", () => {
    const budget = new ByteBudget(() => 1000);
    // Answers to requests that were under way when it stopped reading.
    budget.add("a", 5000);
    assert.deepEqual([budget.hasRoom("a"), budget.hasRoom("b")], [false, true]);
    // It takes its answers, but has not taken the last one yet.
    budget.add("b", 10);
    assert.equal(budget.hasRoom("b"), true);
    let woken = false;
    budget.add("b", 500);
    assert.equal(budget.hasRoom("b"), false);
    budget.wait("b", () => (woken = true));
    budget.remove("b", 500);
    assert.equal(woken, true);
  });
});

describe("bodies that are being read", () => {
  test("are counted until they are whole or their client is gone; one client cannot take all of it", async () => {
    const bytes = new ClientBytes(() => MEBIBYTE);
    const limits = { ...LIMITS, maxBodyBytes: 100_000 };
    const routes = {
      "/v1/inference": {
        POST: async (exchange: { body(): Promise<string>; send(s: number, b: string): void }) =>
          exchange.send(200, String((await exchange.body()).length)),
      },
    };
    const listener = new Listener(routes, limits, new SystemClock(), new Events(), { bytes });
    const url = await listener.listen("127.0.0.1", 0);
    try {
      // Announced and not sent: nothing is held.
      const idle = await RawClient.connect(url);
      idle.send(postHead(WHOLE));
      const slow = await Promise.all(Array.from({ length: 5 }, () => RawClient.connect(url)));
      for (const client of slow) client.send(postHead(WHOLE) + " ".repeat(HALF));
      while (bytes.bodies.total < 5 * HALF) await turn();
      await using sixth = await RawClient.connect(url);
      sixth.send(postHead(WHOLE, "Expect: 100-continue"));
      const refused = await sixth.answer();
      assert.equal(refused.status, 503, refused.text);
      assert.equal(refused.headers["retry-after"], "1");
      assert.match(refused.text, /"error":"SERVICE_OVERLOADED".*no room for this body/);
      assert.deepEqual(sixth.interims, [], "it is told before it sends");
      // Without a length it is refused where it goes too far.
      await using chunked = await RawClient.connect(url);
      const part = 30_000;
      const chunk = `${part.toString(16)}\r\n${" ".repeat(part)}\r\n`;
      chunked.send(postHead(undefined, "Transfer-Encoding: chunked") + chunk.repeat(3));
      assert.equal((await chunked.answer()).status, 503);
      await chunked.closed();
      // From another address there is room.
      const other = connectTcp({
        port: Number(new URL(url).port),
        host: "127.0.0.1",
        localAddress: "127.0.0.2",
      });
      other.write(postHead(WHOLE) + " ".repeat(WHOLE));
      assert.match(String((await once(other, "data"))[0]), /^HTTP\/1\.1 200 /);
      other.destroy();
      // And a small one that comes whole is answered in any case.
      await using small = await RawClient.connect(url);
      small.send(`${postHead(2)}{}`);
      assert.equal((await small.answer()).status, 200);
      assert.equal(bytes.bodies.total, 5 * HALF);
      slow[0]!.send(" ".repeat(WHOLE - HALF));
      assert.equal((await slow[0]!.answer()).text, String(WHOLE));
      assert.equal(bytes.bodies.total, 4 * HALF);
      for (const client of [...slow, idle]) await client[Symbol.asyncDispose]();
      while (bytes.bodies.total > 0) await turn();
    } finally {
      listener.close();
    }
  });

  test("are one sum over the listeners: messages of gRPC leave no room for a body over HTTP", async () => {
    const limits = { maxBodyBytes: 100_000, maxQueuedBytes: MEBIBYTE };
    const settings = { limits, grpc: { maxMessageBytes: 100_000 } };
    await using stage = await GrpcStage.open(sized, { settings });
    const session = connectHttp2(stage.ferry.grpcUrl.replace("grpc:", "http:"));
    session.on("error", () => {});
    const prefix = Buffer.alloc(5);
    prefix.writeUInt32BE(WHOLE, 1);
    const refusals: IncomingHttpHeaders[] = [];
    for (let count = 0; count < 12; count++) {
      const stream = session.request(call);
      stream.on("error", () => {}).on("response", (headers) => refusals.push(headers));
      // The message is whole, but the client does not say that this is all.
      stream.write(Buffer.concat([prefix, Buffer.alloc(WHOLE)]));
    }
    // Five of them fit.
    while (refusals.length < 7) await turn();
    for (const headers of refusals) {
      assert.equal(headers["grpc-status"], "14");
      assert.equal(headers["grpc-retry-pushback-ms"], "1000");
    }
    const body = JSON.stringify({ input: "a".repeat(WHOLE - 12) });
    const headers = { "content-type": "application/json" };
    const post = (): Promise<Response> =>
      fetch(`${stage.ferry.apiUrl}/v1/inference`, { method: "POST", headers, body });
    assert.equal((await post()).status, 503);
    session.destroy();
    while ((await post()).status === 503) await turn();
  });
});

const call = { ":method": "POST", ":path": INFER, "content-type": "application/grpc" };
const ANSWER_BYTES = 60_000;

/** Answers 60 KB for each row. */
function sized({ inputs: [x], model_name }: Parameters<Parameters<typeof GrpcStage.open>[0]>[0]) {
  const rows = Number(x!.shape[0]);
  const outputs = [{ name: "y", datatype: "FP32", shape: [rows, ANSWER_BYTES / 4] }];
  return { model_name, outputs, raw_output_contents: [Buffer.alloc(rows * ANSWER_BYTES)] };
}

describe("answers that are not taken", () => {
  test("hold up their client's next requests, and nobody else's", async () => {
    const limits = { maxBodyBytes: 100_000, maxQueuedBytes: MEBIBYTE };
    const settings = { limits, grpc: { maxMessageBytes: 100_000 } };
    const model = { cache: { scope: "off" }, collapse: false };
    await using stage = await GrpcStage.open(sized, { settings, model });
    const { hostname, port } = new URL(stage.ferry.grpcUrl.replace("grpc:", "http:"));
    const slow = await session(hostname, Number(port), "127.0.0.1", 1000);
    const message = framed([requestBytes(rawRequest([[1]]))]);
    const ask = (from: ClientHttp2Session) => {
      const stream = from.request(call);
      stream.on("error", () => {}).end(message);
      return stream;
    };
    // Half of the bound, and the one that goes beyond it: the header of its answer is there, the rest is not taken.
    const answered = Math.floor(MEBIBYTE / 2 / ANSWER_BYTES) + 1;
    for (let count = 0; count < answered; count++) await once(ask(slow), "response");
    assert.equal(stage.server.requests.length, answered);
    const held = ask(slow);
    const response = once(held, "response");
    const other = await session(hostname, Number(port), "127.0.0.2", 65_535);
    const served = ask(other);
    served.resume();
    await once(served, "end");
    assert.equal(stage.server.requests.length, answered + 1, "the slow client's next call waits");
    other.destroy();
    // It takes what it has: then it is served.
    slow.settings({ initialWindowSize: 2 * ANSWER_BYTES });
    slow.setLocalWindowSize(4 * MEBIBYTE);
    await response;
    assert.equal(stage.server.requests.length, answered + 2);
    slow.destroy();
  });
});

async function session(
  host: string,
  port: number,
  localAddress: string,
  initialWindowSize: number,
): Promise<ClientHttp2Session> {
  const createConnection = () => connectTcp({ host, port, localAddress });
  const made = connectHttp2(`http://${host}:${port}`, { createConnection, settings: { initialWindowSize } });
  made.on("error", () => {});
  await once(made, "remoteSettings");
  return made;
}
