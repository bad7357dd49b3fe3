/** gRPC from end to end: a client of grpc-js, Ferry, a server of grpc-js. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { credentials, type ServiceError, status as codes } from "@grpc/grpc-js";
import { Authority } from "../fixtures/certificates.ts";
import { OipClient, status } from "./protocol/oip-service.ts";
import { address, doubling, GrpcStage, rawRequest, rawValues } from "./grpc-stage.ts";

async function failure(call: Promise<unknown>): Promise<ServiceError> {
  try {
    await call;
  } catch (error) {
    return error as ServiceError;
  }
  throw new Error("it was answered");
}

/** Resolves when it was told so often. */
function counted(times: number, hear: (count: () => void) => void): Promise<void> {
  let told = 0;
  return new Promise((resolve) => hear(() => ++told === times && resolve()));
}

describe("ModelInfer", () => {
  test("raw contents come back raw, row by row, with the id and the model's name of here", async () => {
    await using stage = await GrpcStage.open(doubling, { backend: { model: "upstream", version: "7" } });
    const answer = await stage.client.infer(
      rawRequest(
        [
          [1, 2],
          [3, 4.5],
        ],
        { id: "mine" },
      ),
    );
    assert.deepEqual(rawValues(answer), [2, 4, 6, 9]);
    assert.deepEqual(answer.outputs[0]!.shape, ["2", "2"]);
    assert.equal(answer.id, "mine");
    assert.equal(answer.model_name, "m");
    assert.equal(answer.model_version, "7");
    assert.equal(stage.server.requests[0]!.model_name, "upstream");
  });

  test("typed contents reach the worker typed and come back so", async () => {
    await using stage = await GrpcStage.open(doubling);
    const contents = { fp32_contents: [1, 2, 3] };
    const inputs = [{ name: "x", datatype: "FP32", shape: [3, 1], contents }];
    const answer = await stage.client.infer({ model_name: "m", inputs });
    assert.deepEqual(answer.outputs[0]!.contents!.fp32_contents, [2, 4, 6]);
    assert.equal(answer.raw_output_contents, undefined);
    assert.equal(stage.server.requests[0]!.raw_input_contents, undefined);
  });

  test("many calls at once ride in a few batches, and each gets its own answer", async () => {
    const sizes: number[] = [];
    await using stage = await GrpcStage.open((request, call) => {
      sizes.push(Number(request.inputs[0]!.shape[0]));
      return doubling(request, call);
    });
    const calls = Array.from({ length: 300 }, async (_, at) => {
      const rows = Array.from({ length: 1 + (at % 3) }, (_, row) => [at, row]);
      const answer = await stage.client.infer(rawRequest(rows));
      assert.deepEqual(
        rawValues(answer),
        rows.flat().map((value) => 2 * value),
      );
    });
    await Promise.all(calls);
    assert.equal(
      sizes.reduce((sum, size) => sum + size, 0),
      600,
    );
    assert.ok(Math.max(...sizes) === 16, `largest batch ${Math.max(...sizes)}`);
    assert.ok(sizes.length < 150, `${sizes.length} calls`);
    assert.equal(stage.answered.length, 300);
    assert.ok(stage.answered.every(({ status }) => status === 200));
    assert.equal(stage.answered[0]!.route, "/inference.GRPCInferenceService/ModelInfer");
  });

  test("requests that differ in their parameters do not meet", async () => {
    await using stage = await GrpcStage.open(doubling);
    await Promise.all(
      Array.from({ length: 20 }, (_, at) =>
        stage.client.infer(rawRequest([[at]], { parameters: { k: { int64_param: at % 2 } } })),
      ),
    );
    for (const { parameters } of stage.server.requests) assert.deepEqual(Object.keys(parameters!), ["k"]);
  });

  test("outputs that cannot be cut go alone and come back as they are", async () => {
    const sizes: number[] = [];
    await using stage = await GrpcStage.open((request, call) => {
      const answer = doubling(request, call) as Awaited<ReturnType<typeof doubling>>;
      sizes.push(Number(request.inputs[0]!.shape[0]));
      const total = rawValues(answer!).reduce((sum, value) => sum + value, 0);
      const y = { name: "sum", datatype: "FP32", shape: [] };
      return {
        model_name: "m",
        outputs: [y],
        raw_output_contents: [Buffer.from(new Float32Array([total]).buffer)],
      };
    });
    const answers = await Promise.all([1, 2, 3, 4].map((value) => stage.client.infer(rawRequest([[value]]))));
    assert.deepEqual(
      answers.map((answer) => rawValues(answer)[0]),
      [2, 4, 6, 8],
    );
    const before = sizes.length;
    await Promise.all([5, 6, 7, 8].map((value) => stage.client.infer(rawRequest([[value]]))));
    assert.deepEqual(sizes.slice(before), [1, 1, 1, 1], "it is remembered");
    const two = await failure(stage.client.infer(rawRequest([[9], [10]])));
    assert.equal(two.code, codes.INTERNAL);
    assert.match(two.details, /"sum" that is not one for each row; send one row/);
  });

  test("a model without a dimension for batches gets requests as they are, over gRPC and HTTP", async () => {
    const shapes: unknown[] = [];
    await using stage = await GrpcStage.open(
      (request) => {
        shapes.push(request.inputs[0]!.shape);
        const count = rawValues({
          ...request,
          outputs: [],
          raw_output_contents: request.raw_input_contents!,
        }).length;
        const y = { name: "count", datatype: "FP32", shape: [] };
        const raw = Buffer.from(new Float32Array([count]).buffer);
        return { model_name: "m", outputs: [y], raw_output_contents: [raw] };
      },
      { model: { maxBatchSize: 1 } },
    );
    assert.deepEqual(
      rawValues(
        await stage.client.infer(
          rawRequest([
            [1, 2],
            [3, 4],
            [5, 6],
          ]),
        ),
      ),
      [6],
    );
    const response = await fetch(`${stage.ferry.apiUrl}/v2/models/m/infer`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: '{"inputs":[{"name":"x","shape":[2,2],"datatype":"FP32","data":[1,2,3,4]}]}',
    });
    const { outputs } = (await response.json()) as { outputs: unknown };
    assert.deepEqual(outputs, [{ name: "count", datatype: "FP32", shape: [], data: [4] }]);
    assert.deepEqual(shapes, [
      ["3", "2"],
      ["2", "2"],
    ]);
  });

  test("a message of several megabytes each way", async () => {
    await using stage = await GrpcStage.open(doubling, {
      settings: { grpc: { maxMessageBytes: 20_000_000 }, limits: { maxBodyBytes: 20_000_000 } },
    });
    using client = new OipClient(address(stage.ferry.grpcUrl), undefined, {
      "grpc.max_receive_message_length": -1,
    });
    const row = Array.from({ length: 1_000_000 }, (_, at) => at % 1000);
    const answer = await client.infer(rawRequest([row, row]));
    assert.deepEqual(
      rawValues(answer).slice(0, 1001),
      [...row.slice(0, 1000), 0].map((value) => 2 * value),
    );
    assert.deepEqual(answer.outputs[0]!.shape, ["2", "1000000"]);
  });
});

describe("refusals become statuses", () => {
  test("what is wrong with the request", async () => {
    await using stage = await GrpcStage.open(doubling, {
      settings: { grpc: { maxMessageBytes: 2000 }, limits: { maxInputs: 3 } },
    });
    const { client } = stage;
    const bad = await failure(client.infer(rawRequest([[1]], { raw_input_contents: [Buffer.alloc(3)] })));
    assert.equal(bad.code, codes.INVALID_ARGUMENT);
    assert.equal(bad.details, 'input "x" has 3 bytes, but FP32 of shape [1,1] needs 4');
    const unknown = await failure(client.infer(rawRequest([[1]], { model_name: "né" })));
    assert.equal(unknown.code, codes.NOT_FOUND);
    assert.equal(unknown.details, 'the model "né" is not here; those that speak tensors: m');
    const large = await failure(client.infer(rawRequest([Array(1000).fill(1)])));
    assert.equal(large.code, codes.RESOURCE_EXHAUSTED);
    assert.match(large.details, /larger than 2000 bytes/);
    assert.equal(
      (await failure(client.infer(rawRequest([[1], [2], [3], [4]])))).code,
      codes.INVALID_ARGUMENT,
    );
    assert.deepEqual(
      stage.answered.map(({ status, code }) => [status, code]),
      [
        [400, "INVALID_REQUEST"],
        [404, "NOT_FOUND"],
        [413, "PAYLOAD_TOO_LARGE"],
        [400, "INVALID_REQUEST"],
      ],
    );
    assert.equal(stage.server.requests.length, 0);
    assert.deepEqual(
      rawValues(await client.infer(rawRequest([[1]], { model_name: "" }))),
      [2],
      "the only model",
    );
  });

  test("an input that the worker refuses, and one that it fails on", async () => {
    await using stage = await GrpcStage.open(
      (request, call) => {
        const [value] = new Float32Array(new Uint8Array(request.raw_input_contents![0]!).buffer);
        if (value === 1) throw status(codes.INVALID_ARGUMENT, "no ones");
        if (value === 2) throw status(codes.INTERNAL, "secret trouble");
        return doubling(request, call);
      },
      { model: { retry: { max: 0 } } },
    );
    const refused = await failure(stage.client.infer(rawRequest([[1]])));
    assert.deepEqual(
      [refused.code, refused.details],
      [codes.INVALID_ARGUMENT, "worker answered INVALID_ARGUMENT: no ones"],
    );
    const failed = await failure(stage.client.infer(rawRequest([[2]])));
    assert.equal(failed.code, codes.INTERNAL);
    assert.doesNotMatch(failed.details, /secret/);
    assert.deepEqual(
      stage.answered.map(({ status }) => status),
      [422, 502],
    );
  });

  test("a version that the worker does not have is NOT_FOUND after one call, and the worker serves on", async () => {
    await using stage = await GrpcStage.open((request, call) => {
      if (request.model_version === "7") throw status(codes.NOT_FOUND, "version 7 is not found");
      return doubling(request, call);
    });
    const changes: string[] = [];
    stage.ferry.events.on("worker.changed", ({ state }) => changes.push(state));
    for (let n = 1; n <= 5; n++) {
      const wrong = await failure(stage.client.infer(rawRequest([[n], [n + 10]], { model_version: "7" })));
      assert.equal(wrong.code, codes.NOT_FOUND);
      assert.match(wrong.details, /^worker answered NOT_FOUND: version 7 is not found$/);
      assert.equal(stage.server.requests.length, n);
    }
    assert.deepEqual(rawValues(await stage.client.infer(rawRequest([[1]]))), [2]);
    assert.deepEqual(changes, []);
  });

  test("credentials come in the metadata", async () => {
    using authority = new Authority("Keys");
    const { folder } = authority;
    await using stage = await GrpcStage.open(doubling, {
      settings: { auth: { mode: "required", keysFile: `${folder}/keys.json`, secret: "x".repeat(32) } },
    });
    const nobody = await failure(stage.client.infer(rawRequest([[1]])));
    assert.equal(nobody.code, codes.UNAUTHENTICATED);
    const wrong = { metadata: { authorization: "Bearer nonsense" } };
    assert.equal((await failure(stage.client.infer(rawRequest([[1]]), wrong))).code, codes.UNAUTHENTICATED);
    assert.equal((await failure(stage.client.call("ModelReady", { name: "m" }))).code, codes.UNAUTHENTICATED);
    assert.deepEqual({ ...(await stage.client.call("ServerLive", {})) }, { live: true });
    assert.equal(stage.server.requests.length, 0);
  });

  test("more than may come: when to come back stands in the trailers", async () => {
    await using stage = await GrpcStage.open(doubling, { settings: { limits: { perUserPerMinute: 2 } } });
    await stage.client.infer(rawRequest([[1]]));
    await stage.client.infer(rawRequest([[2]]));
    const limited = await failure(stage.client.infer(rawRequest([[3]])));
    assert.equal(limited.code, codes.RESOURCE_EXHAUSTED);
    const wait = Number(limited.metadata.get("retry-after-ms")[0]);
    assert.ok(wait > 0 && wait <= 60_000, String(wait));
    assert.deepEqual(limited.metadata.get("grpc-retry-pushback-ms"), [String(wait)]);
    assert.equal(stage.answered.at(-1)!.status, 429);
  });
});

describe("clients that do not wait", () => {
  test("the client's deadline ends the wait, and the task is cancelled", async () => {
    await using stage = await GrpcStage.open(() => undefined, { model: { maxBatchSize: 1 } });
    const first = failure(stage.client.infer(rawRequest([[1]]), { timeoutMs: 60_000 }));
    const dropped = stage.ferry.events.next("task.dropped");
    // The only worker is busy: this one waits in the queue.
    const late = await failure(stage.client.infer(rawRequest([[2]]), { timeoutMs: 150 }));
    assert.equal(late.code, codes.DEADLINE_EXCEEDED);
    await dropped;
    await stage.ferry.stop();
    assert.ok([codes.UNAVAILABLE, codes.INTERNAL].includes((await first).code));
  });

  test("a client that calls off leaves nothing behind", async () => {
    await using stage = await GrpcStage.open(() => undefined, { model: { maxBatchSize: 1 } });
    const { client, ferry } = stage;
    const started = ferry.events.next("batch.started");
    const busy = failure(client.infer(rawRequest([[1]])));
    await started;
    const queued = counted(50, (count) => ferry.events.on("task.queued", count));
    const calls = Array.from({ length: 50 }, (_, at) =>
      client.start("ModelInfer", rawRequest([[at + 2]]), {}, () => {}),
    );
    await queued;
    const dropped = counted(50, (count) => ferry.events.on("task.dropped", count));
    const left = counted(50, (count) => ferry.events.on("request.answered", count));
    for (const call of calls) call.cancel();
    await dropped;
    await left;
    assert.ok(stage.answered.every(({ status }) => status === 499));
    assert.equal(ferry.tally().queued, 1);
    await ferry.stop();
    assert.equal((await busy).code, codes.UNAVAILABLE);
  });
});

describe("what else can be asked", () => {
  test("live, ready, metadata", async () => {
    await using stage = await GrpcStage.open(doubling);
    const { client } = stage;
    assert.deepEqual({ ...(await client.call("ServerLive", {})) }, { live: true });
    assert.deepEqual({ ...(await client.call("ServerReady", {})) }, { ready: true });
    assert.deepEqual({ ...(await client.call("ModelReady", { name: "m" })) }, { ready: true });
    assert.equal((await failure(client.call("ModelReady", { name: "x" }))).code, codes.NOT_FOUND);
    const server = (await client.call("ServerMetadata", {})) as { name: string; version: string };
    assert.equal(server.name, "ferry");
    const model = (await client.call("ModelMetadata", { name: "m" })) as { name: string; platform: string };
    assert.equal(model.name, "m");
    assert.ok(stage.answered.every(({ route }) => !/Server(Live|Ready)/.test(route)));
  });

  test("over TLS, with the certificate of the HTTP listener", async () => {
    using authority = new Authority();
    const { certFile, keyFile } = authority.issue();
    const trusting = credentials.createSsl(Buffer.from(authority.own.cert));
    await using stage = await GrpcStage.open(doubling, {
      settings: { tls: { certFile, keyFile } },
      credentials: trusting,
    });
    assert.match(stage.ferry.grpcUrl, /^grpcs:/);
    assert.deepEqual(rawValues(await stage.client.infer(rawRequest([[1, 2]]))), [2, 4]);
    using plain = new OipClient(address(stage.ferry.grpcUrl));
    assert.equal((await failure(plain.infer(rawRequest([[1]])))).code, codes.UNAVAILABLE);
  });

  test("a drain answers what is open and takes nothing more", async () => {
    const release = Promise.withResolvers<void>();
    await using stage = await GrpcStage.open(async (request, call) => {
      await release.promise;
      return doubling(request, call);
    });
    const started = stage.ferry.events.next("batch.started");
    const open = stage.client.infer(rawRequest([[1]]));
    await started;
    const drained = stage.ferry.drain();
    assert.equal((await failure(stage.client.infer(rawRequest([[2]])))).code, codes.UNAVAILABLE);
    release.resolve();
    assert.deepEqual(rawValues(await open), [2]);
    await drained;
  });
});
