/** Clients of KServe v1 and of the Open Inference Protocol through a real Ferry to strict servers. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { request } from "undici";
import {
  HEADER,
  exactly,
  OipServer,
  readMessage,
  type Sent,
  type Tensor,
  writeMessage,
} from "../gateway/protocol/servers/oip.ts";
import { PredictServer } from "../gateway/protocol/servers/kserve-v1.ts";
import { Ferry } from "./harness.ts";

const CALLERS = 24;

interface Reply {
  readonly status: number;
  readonly header: (name: string) => string | undefined;
  readonly body: Buffer;
}

async function post(
  url: string,
  body: Buffer | string,
  headers: Record<string, string> = {},
): Promise<Reply> {
  const answer = await request(url, { method: "POST", body, headers });
  const bytes = Buffer.from(await answer.body.arrayBuffer());
  return {
    status: answer.statusCode,
    header: (name) => answer.headers[name] as string | undefined,
    body: bytes,
  };
}

function front(server: OipServer, more: object = {}, backend: object = {}): Promise<Ferry> {
  const http = { kind: "http", protocol: "oip-v2", workers: [server.endpoint()], ...backend };
  return Ferry.start({ models: [{ name: "mine", maxBatchSize: 8, maxWaitMs: 20, backend: http, ...more }] });
}

function sentBy(caller: number, rows: number, binary: boolean): Sent {
  const values = Array.from({ length: 2 * rows }, (_, at) => caller * 1000 + at);
  const tensor: Tensor = binary
    ? { name: "x", datatype: "FP32", shape: [rows, 2], raw: Buffer.from(Float32Array.from(values).buffer) }
    : {
        name: "x",
        datatype: "INT64",
        shape: [rows, 2],
        data: values.map((each) => exactly(`900719925474${each}`)),
      };
  const head = { id: `caller ${caller}`, ...(binary && { parameters: { binary_data_output: true } }) };
  return writeMessage(head, [tensor], "inputs");
}

/** What went in for each caller came out for it, in its own shape and with its id. */
async function ask(ferry: Ferry, caller: number, rows: number, binary: boolean): Promise<void> {
  const { body, headers } = sentBy(caller, rows, binary);
  const answer = await post(`${ferry.url}/v2/models/mine/infer`, body, { ...headers });
  assert.equal(answer.status, 200, answer.body.toString());
  const got = readMessage(answer.body, answer.header(HEADER), "outputs");
  const { tensors } = readMessage(body, headers[HEADER], "inputs");
  assert.equal(got.id, `caller ${caller}`);
  assert.equal((got as { model_name?: string }).model_name, "mine");
  assert.deepEqual(got.tensors[0]!.shape, [rows, 2]);
  if (binary) assert.deepEqual(got.tensors[0]!.raw, tensors[0]!.raw);
  else assert.equal(JSON.stringify(got.tensors[0]!.data), JSON.stringify(tensors[0]!.data));
}

describe("Open Inference Protocol over HTTP", () => {
  test("JSON and bytes in full batches, each to its own; requests larger than a batch ride in several", async () => {
    await using server = await OipServer.listen({ maxBatchSize: 8 });
    await using ferry = await front(server);
    const all = Array.from({ length: CALLERS }, (_, caller) =>
      ask(ferry, caller, 1 + (caller % 3), caller % 2 === 0),
    );
    await Promise.all([...all, ask(ferry, 99, 21, true)]);
    const rows = server.calls.reduce((sum, call) => sum + call.rows, 0);
    assert.equal(rows, 21 + 2 * CALLERS);
    assert.ok(server.calls.length < CALLERS, `${server.calls.length} calls`);
    assert.ok(server.calls.every((call) => call.rows >= 1 && call.rows <= 8));
    assert.ok(server.calls.some((call) => call.binary) && server.calls.some((call) => !call.binary));
  });

  test("a version, no media type, curl's own, and a page in a browser", async () => {
    await using server = await OipServer.listen();
    await using ferry = await front(server);
    const { body } = sentBy(1, 1, false);
    const at = (path: string, headers = {}): Promise<Reply> => post(`${ferry.url}${path}`, body, headers);
    assert.equal((await at("/v2/models/mine/versions/3/infer")).status, 200);
    assert.equal(server.calls[0]!.path, "/v2/models/toy/versions/3/infer");
    const form = { "content-type": "application/x-www-form-urlencoded" };
    assert.equal((await at("/models/mine/v2/models/mine/infer", form)).status, 200);
    assert.equal((await at("/v2/models/mine/infer", { ...form, origin: ferry.url })).status, 415);
    assert.equal((await at("/v2/models/mine/infer", { origin: ferry.url })).status, 415);
    const unknown = await at("/v2/models/nobody/infer");
    assert.equal(unknown.status, 404);
    assert.match(unknown.body.toString(), /^\{"error":"the model \\"nobody\\" does not exist here/);
  });

  test("a worker's refusal and its nonsense are nobody else's", async () => {
    await using server = await OipServer.listen({ maxBatchSize: 8 });
    await using ferry = await front(server, { retry: { max: 1, baseMs: 10 } });
    // What caller 5 sends is refused; with it in the batch, everybody's is.
    server.twist = ({ body }) =>
      body.includes("9007199254745")
        ? { status: 400, headers: {}, body: Buffer.from('{"error":"no fives"}') }
        : undefined;
    const { body, headers } = sentBy(5, 1, false);
    const bad = post(`${ferry.url}/v2/models/mine/infer`, body, { ...headers });
    const others = [1, 2, 3, 4, 6, 7].map((caller) => ask(ferry, caller, 2, false));
    await Promise.all(others);
    assert.equal((await bad).status, 400);
    assert.match((await bad).body.toString(), /^\{"error":".*no fives/);
    let calls = 0;
    server.twist = () =>
      calls++ === 0 ? { status: 200, headers: {}, body: Buffer.from('{"outputs":[{}]}') } : undefined;
    await Promise.all([10, 11, 12, 13].map((caller) => ask(ferry, caller, 1, true)));
  });

  test("a reply that cannot be cut is asked for again, one task at a time, and it ends", async (context) => {
    await using server = await OipServer.listen({ pooled: true });
    await using ferry = await front(server, { maxBatchSize: 32 });
    const all = (): Promise<void[]> =>
      Promise.all(
        Array.from({ length: 32 }, async (_, caller) => {
          const { body, headers } = sentBy(caller + server.calls.length, 1, false);
          const answer = await post(`${ferry.url}/v2/models/mine/infer`, body, { ...headers });
          assert.equal(answer.status, 200, answer.body.toString());
          const [tensor] = readMessage(answer.body, undefined, "outputs").tensors;
          assert.deepEqual([tensor!.shape, JSON.stringify(tensor!.data)], [[], "[1]"]);
        }),
      );
    await all();
    const first = server.calls.length;
    assert.ok(first <= 96, `${first} calls for 32 tasks`);
    context.diagnostic(`32 tasks took ${first} calls: ${server.calls.map(({ rows }) => rows).join(" ")}`);
    await all();
    assert.equal(server.calls.length, first + 32, "it is remembered");
    const { body, headers } = sentBy(1, 2, false);
    const two = await post(`${ferry.url}/v2/models/mine/infer`, body, { ...headers });
    assert.equal(two.status, 502);
    assert.match(two.body.toString(), /one row in each request/);
  });

  test("a model without a dimension for batches gets requests as they are", async () => {
    await using server = await OipServer.listen({ pooled: true });
    await using ferry = await front(server, { maxBatchSize: 1 });
    const { body, headers } = sentBy(1, 3, false);
    const answer = await post(`${ferry.url}/v2/models/mine/infer`, body, { ...headers });
    assert.equal(answer.status, 200);
    assert.equal(JSON.stringify(readMessage(answer.body, undefined, "outputs").tensors[0]!.data), "[3]");
  });

  test("health and metadata", async () => {
    await using server = await OipServer.listen();
    await using ferry = await front(server);
    const get = async (path: string): Promise<[number, unknown]> => {
      const { status, text } = await ferry.get(path);
      return [status, JSON.parse(text)];
    };
    assert.deepEqual(await get("/v2/health/live"), [200, { live: true }]);
    assert.deepEqual(await get("/v2/health/ready"), [200, { ready: true }]);
    assert.deepEqual(await get("/v2/models/mine/ready"), [200, { ready: true }]);
    assert.deepEqual(await get("/v2/models/mine/versions/1/ready"), [200, { ready: true }]);
    assert.equal((await get("/v2/models/other/ready"))[0], 404);
    const [, about] = await get("/v2");
    assert.deepEqual((about as { extensions: string[] }).extensions, ["binary_tensor_data"]);
  });

  test("Ferry's own API cannot push what is no tensor between others' rows", async () => {
    await using server = await OipServer.listen();
    await using ferry = await front(server);
    const answer = await ferry.post({ model: "mine", input: "text" });
    assert.equal(answer.status, 422, answer.text);
    assert.match(answer.text, /speak the Open Inference Protocol/);
    assert.equal(server.calls.length, 0);
  });
});

describe("KServe v1", () => {
  test("instances in full batches, in order and to the digit", async () => {
    await using server = await PredictServer.listen();
    const backend = { kind: "http", protocol: "kserve-v1", workers: [server.endpoint()] };
    await using ferry = await Ferry.start({
      models: [{ name: "half", maxBatchSize: 8, maxWaitMs: 20, backend }],
    });
    const asked = Array.from({ length: CALLERS }, async (_, caller) => {
      const instances = Array.from({ length: 1 + (caller % 10) }, (_, at) => `9007199254740${caller}${at}`);
      // As TensorFlow Serving's own examples: without a media type.
      const answer = await post(
        `${ferry.url}/v1/models/half:predict`,
        `{"instances":[${instances.join(", ")}]}`,
      );
      assert.equal(answer.status, 200, answer.body.toString());
      assert.equal(
        answer.body.toString(),
        `{"predictions":[${instances.map((each) => `{"of":${each}}`).join(",")}]}`,
      );
    });
    await Promise.all(asked);
    assert.ok(server.calls.length < CALLERS);
    assert.ok(server.calls.every(({ instances }) => instances.length <= 8));
    const versioned = await ferry.post(
      { instances: [1.5], signature_name: "s" },
      {},
      "/v1/models/half/versions/4:predict",
    );
    assert.equal(versioned.status, 200, versioned.text);
    const last = server.calls.at(-1)!;
    assert.deepEqual([last.path, last.signature], ["/v1/models/toy/versions/4:predict", "s"]);
    const bad = await ferry.post({ instances: ["bad"] }, {}, "/v1/models/half:predict");
    assert.equal(bad.status, 400);
    assert.match(bad.text, /^\{"error":".*bad instance/);
    const shown = JSON.parse((await ferry.get("/v1/models/half")).text) as { name: string; ready: boolean };
    assert.deepEqual([shown.name, shown.ready], ["half", true]);
    assert.deepEqual((JSON.parse((await ferry.get("/v1/models")).text) as { models: string[] }).models, [
      "half",
    ]);
  });
});
