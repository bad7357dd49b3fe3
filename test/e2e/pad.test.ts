/** Tensors of different length through a real Ferry: to a Python process that needs rectangular input, and over gRPC. */
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { describe, test } from "node:test";
import { request } from "undici";
import {
  type InferRequest,
  type InferResponse,
  OipClient,
  OipServer,
} from "../gateway/protocol/oip-service.ts";
import { exactly, HEADER, readMessage, type Tensor, writeMessage } from "../gateway/protocol/servers/oip.ts";
import { startServer } from "../engine/redis-client/servers.ts";
import { Fleet, fleetConfig, patient } from "./fleet.ts";
import { type Config, Ferry, reloadConfig } from "./harness.ts";

const PAD_TOKEN = 1;
const WIDTH = 8;
const CALLERS = 60;
/** By size and time alone, and with time enough for a slow machine to fill them. */
const BATCHES = { maxBatchSize: 16, policy: "fixed", maxWaitMs: 200 };

/** Ferry, or a gateway of a fleet. */
type Door = Pick<Ferry, "url">;

interface Python extends AsyncDisposable {
  readonly url: string;
  /** The shapes of `input_ids` that its model was called with. */
  calls(): Promise<readonly (readonly [rows: number, length: number])[]>;
}

async function python(...more: readonly string[]): Promise<Python> {
  const file = join(import.meta.dirname, "pad-server.py");
  const child = spawn("python3", [file, String(PAD_TOKEN), ...more], {
    stdio: ["ignore", "pipe", "inherit"],
  });
  const [url] = (await once(createInterface({ input: child.stdout }), "line")) as [string];
  return {
    url,
    calls: async () => (await (await request(`${url}/calls`)).body.json()) as [number, number][],
    [Symbol.asyncDispose]: async () => {
      const ended = once(child, "exit");
      if (child.kill()) await ended;
    },
  };
}

function front(server: Python, model: object): Promise<Ferry> {
  const backend = { kind: "http", protocol: "oip-v2", workers: [`${server.url}/v2/models/encoder/infer`] };
  return Ferry.start({ models: [{ name: "mine", ...BATCHES, backend, ...model }] });
}

/** The ids of one row of a caller: none is the padding token. */
function idsOf(caller: number, row: number, length: number): number[] {
  return Array.from({ length }, (_, at) => 2 + ((caller * 31 + row * 7 + at * 3) % 500));
}

function hiddenOf(ids: readonly number[]): number[] {
  let total = 0;
  return ids.flatMap((id) => [id, (total += id)]);
}

const int64 = (values: readonly number[]): Buffer =>
  Buffer.from(BigInt64Array.from(values.map(BigInt)).buffer);
const floats = (raw: Buffer): number[] =>
  Array.from({ length: raw.length / 4 }, (_, at) => raw.readFloatLE(4 * at));

async function send(ferry: Door, caller: number, rows: number, length: number, binary: boolean) {
  const ids = Array.from({ length: rows }, (_, row) => idsOf(caller, row, length));
  const tensor = (name: string, values: readonly number[]): Tensor => ({
    name,
    datatype: "INT64",
    shape: [rows, length],
    ...(binary ? { raw: int64(values) } : { data: values.map((value) => exactly(String(value))) }),
  });
  const mask = Array<number>(rows * length).fill(1);
  const head = { id: `caller ${caller}`, ...(binary && { parameters: { binary_data_output: true } }) };
  const sent = writeMessage(
    head,
    [tensor("input_ids", ids.flat()), tensor("attention_mask", mask)],
    "inputs",
  );
  const answer = await request(`${ferry.url}/v2/models/mine/infer`, {
    method: "POST",
    body: sent.body,
    headers: { ...sent.headers },
  });
  const body = Buffer.from(await answer.body.arrayBuffer());
  return { ids, status: answer.statusCode, body, header: answer.headers[HEADER] as string | undefined };
}

/** What the model alone would have answered, in the caller's own shape. */
async function ask(
  ferry: Door,
  caller: number,
  rows: number,
  length: number,
  binary: boolean,
): Promise<void> {
  const { ids, status, body, header } = await send(ferry, caller, rows, length, binary);
  assert.equal(status, 200, body.toString());
  const got = readMessage(body, header, "outputs");
  assert.equal(got.id, `caller ${caller}`);
  const values = ({ raw, data }: Tensor): number[] =>
    raw === undefined ? (JSON.parse(JSON.stringify(data)) as number[]) : floats(raw);
  const [hidden, pooled] = got.tensors;
  assert.deepEqual(hidden!.shape, [rows, length, 2]);
  assert.deepEqual(values(hidden!), ids.flatMap(hiddenOf));
  assert.deepEqual(pooled!.shape, [rows, WIDTH]);
  const sums = ids.map((row) => row.reduce((sum, id) => sum + id, 0));
  assert.deepEqual(
    values(pooled!),
    sums.flatMap((sum) => Array<number>(WIDTH).fill(sum)),
  );
}

async function askAll(ferry: Door, from: number): Promise<void> {
  const asked = Array.from({ length: CALLERS }, (_, at) => {
    const caller = from + at;
    return ask(ferry, caller, 1 + (caller % 3 === 0 ? 2 : 0), 1 + ((caller * 13) % 40), caller % 2 === 0);
  });
  await Promise.all(asked);
}

const PAD = { axis: 1, value: PAD_TOKEN, lengthsInput: "input_lengths" };

describe("tensors of different length over HTTP", () => {
  for (const [how, outputs] of [
    ["as they are seen to follow", "auto"],
    ["as the config names them", ["hidden"]],
  ] as const) {
    test(`share batches and are cut ${how}`, async () => {
      await using server = await python();
      await using ferry = await front(server, { pad: { ...PAD, outputs } });
      // The first batches teach which outputs follow, where they have to.
      await ask(ferry, 1000, 2, WIDTH, true);
      await askAll(ferry, 0);
      const before = (await server.calls()).length;
      await askAll(ferry, CALLERS);
      const calls = (await server.calls()).slice(before);
      const rows = calls.reduce((sum, [each]) => sum + each, 0);
      assert.equal(rows, CALLERS + 2 * (CALLERS / 3));
      assert.ok(calls.length < CALLERS / 2, `${calls.length} calls`);
      assert.equal((await ferry.health()).status, "ok");
    });
  }

  test("are padded to the lengths that the config lists, also alone", async () => {
    await using server = await python();
    const pad = { ...PAD, outputs: ["hidden"] };
    await using ferry = await front(server, { pad, lengths: [8, 16, 32] });
    await ask(ferry, 1, 1, 3, false);
    await askAll(ferry, 2);
    const lengths = new Set((await server.calls()).map(([, length]) => length));
    for (const length of lengths) assert.ok([8, 16, 32].includes(length) || length > 32, `${length}`);
    assert.ok(lengths.has(8) && lengths.has(32));
  });

  test("two gateways and a batcher on Redis", async () => {
    await using server = await python();
    await using redis = await startServer();
    const workers = [`${server.url}/v2/models/encoder/infer`];
    const backend = { kind: "http", protocol: "oip-v2", workers };
    const model = { name: "mine", ...BATCHES, backend, pad: PAD, timeouts: patient };
    await using fleet = await Fleet.start(
      { gateways: 2, batchers: 1 },
      fleetConfig({ url: redis.url }, [model]),
    );
    await Promise.all(fleet.gateways.map((gateway, at) => askAll(gateway, at * CALLERS)));
    const before = (await server.calls()).length;
    await Promise.all(fleet.gateways.map((gateway, at) => askAll(gateway, (2 + at) * CALLERS)));
    const calls = (await server.calls()).slice(before);
    assert.ok(calls.length < CALLERS, `${calls.length} calls for ${2 * CALLERS} requests`);
  });

  test("a reload changes how rows are padded while requests wait: nothing is mixed up", async () => {
    await using server = await python();
    const backend = { kind: "http", protocol: "oip-v2", workers: [`${server.url}/v2/models/encoder/infer`] };
    const config = (pad: object): Config => ({
      models: [{ name: "mine", ...BATCHES, backend, pad: { ...PAD, ...pad } }],
    });
    await using ferry = await Ferry.start(config({}));
    const rounds: Promise<void>[] = [];
    for (const [round, pad] of [
      { outputs: ["hidden"] },
      {},
      { outputs: ["hidden"], inputs: ["input_ids"] },
    ].entries()) {
      rounds.push(askAll(ferry, round * CALLERS));
      await reloadConfig(ferry, config(pad));
    }
    await Promise.all(rounds);
    // Only the ids are padded now: masks of different length keep rows apart.
    await Promise.all([ask(ferry, 900, 1, 3, true), ask(ferry, 901, 1, 3, true)]);
  });

  test("a model whose output has the wrong length: an error for each, and nothing of another", async () => {
    await using server = await python("short");
    const more = { lengths: [16], retry: { max: 0 }, health: { failures: 1000 } };
    await using ferry = await front(server, { pad: { ...PAD, outputs: ["hidden"] }, ...more });
    const answers = await Promise.all(
      [3, 9, 12].map((length, caller) => send(ferry, caller, 1, length, true)),
    );
    for (const { status, body } of answers) {
      assert.ok([400, 502].includes(status), `${status} ${body.toString()}`);
      assert.match(body.toString(), /^\{"error":"/);
    }
    // Nothing is padded: passed on as it is.
    const { status, body, header } = await send(ferry, 7, 1, 16, true);
    assert.equal(status, 200);
    assert.deepEqual(readMessage(body, header, "outputs").tensors[0]!.shape, [1, 15, 2]);
  });

  test("inputs that disagree are refused before anything is sent", async () => {
    await using server = await python();
    await using ferry = await front(server, { pad: PAD });
    const tensors = [3, 4].map((length, at) => ({
      name: ["input_ids", "attention_mask"][at]!,
      datatype: "INT64",
      shape: [1, length],
      raw: int64(Array<number>(length).fill(1)),
    }));
    const { body, headers } = writeMessage({}, tensors, "inputs");
    const answer = await request(`${ferry.url}/v2/models/mine/infer`, {
      method: "POST",
      body,
      headers: { ...headers },
    });
    assert.equal(answer.statusCode, 400);
    assert.match(
      await answer.body.text(),
      /\\"input_ids\\" and \\"attention_mask\\" disagree in dimension 1.*: 3 and 4/,
    );
    assert.deepEqual(await server.calls(), []);
  });
});

describe("tensors of different length over gRPC", () => {
  /** Twice each value, for rectangular FP32 of shape [rows, 2, length] and its lengths. */
  function doubled({ inputs, raw_input_contents: raws = [] }: InferRequest): InferResponse {
    const [x, lengths] = inputs;
    const [rows, two, length] = x!.shape.map(Number) as [number, number, number];
    const told = Array.from({ length: rows }, (_, row) => Number(raws[1]!.readBigInt64LE(8 * row)));
    assert.deepEqual(
      [lengths!.name, lengths!.datatype, lengths!.shape.map(Number)],
      ["n", "INT64", [rows, 1]],
    );
    const values = floats(raws[0]!);
    values.forEach((value, at) =>
      assert.equal(value === -1, at % length >= told[Math.floor(at / (2 * length))]!),
    );
    return {
      model_name: "m",
      outputs: [{ name: "y", datatype: "FP32", shape: [rows, two, length] }],
      raw_output_contents: [Buffer.from(Float32Array.from(values, (value) => 2 * value).buffer)],
    };
  }

  test("along another dimension, in shared batches, each to its own", async () => {
    await using server = await OipServer.listen(async (asked) => {
      await new Promise((resolve) => setTimeout(resolve, 20));
      return doubled(asked);
    });
    const pad = { axis: 2, value: -1, lengthsInput: "n" };
    const backend = { kind: "grpc", workers: [server.url] };
    await using ferry = await Ferry.start({
      grpc: { listen: "127.0.0.1:0" },
      models: [{ name: "mine", ...BATCHES, backend, pad }],
    });
    const ready = await ferry.line(({ msg }) => msg === "ready");
    using client = new OipClient(String(ready["grpc"]).replace("grpc://", ""));
    const one = async (caller: number): Promise<void> => {
      const length = 1 + ((caller * 7) % 30);
      const values = Float32Array.from({ length: 2 * length }, (_, at) => caller * 100 + at);
      const { outputs, raw_output_contents: raws } = await client.infer({
        model_name: "mine",
        inputs: [{ name: "x", datatype: "FP32", shape: [1, 2, length] }],
        raw_input_contents: [Buffer.from(values.buffer)],
      });
      assert.deepEqual(outputs[0]!.shape.map(Number), [1, 2, length]);
      assert.deepEqual(
        floats(raws![0]!),
        Array.from(values, (value) => 2 * value),
      );
    };
    const all = (from: number): Promise<unknown> =>
      Promise.all(Array.from({ length: CALLERS }, (_, at) => one(from + at)));
    await all(0);
    const before = server.requests.length;
    await all(CALLERS);
    const calls = server.requests.slice(before);
    const rows = calls.reduce((sum, { inputs }) => sum + Number(inputs[0]!.shape[0]), 0);
    assert.equal(rows, CALLERS);
    assert.ok(calls.length < CALLERS / 2, `${calls.length} calls`);
  });
});
