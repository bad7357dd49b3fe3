/**
 * A real model server behind Ferry: MLServer, from the Python package index. Not part of `npm test`.
 *
 *   npm run test:servers
 *
 * It makes a virtual environment in a temporary folder (`FERRY_TEST_VENV` names one to keep), installs MLServer there,
 * which takes a minute or two and 300 MB, serves a model that doubles its input, and asks it through Ferry.
 */
import assert from "node:assert/strict";
import { execFile, spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { describe, test } from "node:test";
import { promisify } from "node:util";
import { request } from "undici";
import { eventually, Ferry, Folder, freePort } from "../e2e/harness.ts";
import { HEADER, readMessage, writeMessage } from "../gateway/protocol/servers/oip.ts";

const MODEL = `
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse

class Doubling(MLModel):
    async def load(self):
        self.calls = []
        return True

    async def predict(self, payload):
        values = NumpyCodec.decode_input(payload.inputs[0])
        output = NumpyCodec.encode_output("y", values * 2)
        rows = NumpyCodec.encode_output("rows", values[:, :1] * 0 + len(values))
        return InferenceResponse(model_name=self.name, outputs=[output, rows])
`;
const VERSION = "1.7.1";
const INSTALL_MS = 15 * 60_000;

/** A virtual environment with MLServer in it; where its programs are. */
async function installed(folder: Folder): Promise<string> {
  const home = process.env["FERRY_TEST_VENV"] ?? join(folder.path, "venv");
  const bin = join(home, "bin");
  if (existsSync(join(bin, "mlserver"))) return bin;
  const run = promisify(execFile);
  await run("python3", ["-m", "venv", home], { timeout: INSTALL_MS });
  await run(join(bin, "pip"), ["install", "--quiet", `mlserver==${VERSION}`], { timeout: INSTALL_MS });
  return bin;
}

interface Server extends AsyncDisposable {
  readonly url: string;
}

async function serve(bin: string, folder: Folder): Promise<Server> {
  const [http, grpc, metrics] = [await freePort(), await freePort(), await freePort()];
  const settings = {
    host: "127.0.0.1",
    http_port: http,
    grpc_port: grpc,
    metrics_port: metrics,
    parallel_workers: 0,
  };
  await folder.write("settings.json", JSON.stringify(settings));
  await folder.write(
    "model-settings.json",
    JSON.stringify({ name: "doubling", implementation: "model.Doubling" }),
  );
  await folder.write("model.py", MODEL);
  const child = spawn(join(bin, "mlserver"), ["start", folder.path], {
    cwd: folder.path,
    stdio: ["ignore", "ignore", "pipe"],
    env: { ...process.env, PATH: `${bin}:${process.env["PATH"]}`, PYTHONPATH: folder.path },
  });
  let said = "";
  child.stderr.setEncoding("utf8").on("data", (text: string) => (said = (said + text).slice(-4000)));
  const url = `http://127.0.0.1:${http}`;
  const ready = async (): Promise<boolean> => {
    assert.equal(child.exitCode, null, said);
    const answer = await request(`${url}/v2/health/ready`).catch(() => undefined);
    await answer?.body.dump();
    return answer?.statusCode === 200;
  };
  await eventually(ready, 120_000);
  return {
    url,
    [Symbol.asyncDispose]: async () => {
      const ended = once(child, "exit");
      if (child.kill("SIGTERM")) await ended;
    },
  };
}

describe("MLServer", () => {
  test("a hundred clients, each gets its own rows, in batches", async (context) => {
    await using folder = await Folder.make();
    const bin = await installed(folder);
    await using server = await serve(bin, folder);
    const backend = { kind: "http", protocol: "oip-v2", workers: [`${server.url}/v2/models/doubling/infer`] };
    await using ferry = await Ferry.start({
      models: [{ name: "doubling", maxBatchSize: 16, maxWaitMs: 20, backend }],
    });
    let largest = 0;
    const ask = async (caller: number): Promise<void> => {
      const rows = 1 + (caller % 3);
      const data = Array.from({ length: 2 * rows }, (_, at) => caller + at / 4);
      const inputs = [{ name: "x", datatype: "FP32", shape: [rows, 2], data }];
      const answer = await ferry.post({ id: `c${caller}`, inputs }, {}, "/v2/models/doubling/infer");
      assert.equal(answer.status, 200, answer.text);
      const { id, outputs } = JSON.parse(answer.text) as {
        id: string;
        outputs: { name: string; shape: number[]; data: number[] }[];
      };
      assert.equal(id, `c${caller}`);
      const [y, seen] = ["y", "rows"].map((name) => outputs.find((output) => output.name === name)!);
      assert.deepEqual(y!.shape, [rows, 2]);
      assert.deepEqual(
        y!.data,
        data.map((each) => 2 * each),
      );
      largest = Math.max(largest, ...seen!.data);
    };
    await Promise.all(Array.from({ length: 100 }, (_, caller) => ask(caller)));
    assert.ok(largest > 3, `the largest batch had ${largest} rows`);
    context.diagnostic(`MLServer ${VERSION}: 100 clients, the largest batch had ${largest} rows`);

    const wrong = { inputs: [{ name: "x", datatype: "FP32", shape: [1, 2], data: ["a", "b"] }] };
    const refused = await ferry.post(wrong, {}, "/v2/models/doubling/infer");
    context.diagnostic(`text for FP32: ${refused.status} ${refused.text.slice(0, 200)}`);
    assert.equal(refused.status, 400);
    await ask(100);

    const raw = Buffer.from(Float32Array.of(1.5, 2.5).buffer);
    const { body, headers } = writeMessage(
      {},
      [{ name: "x", datatype: "FP32", shape: [1, 2], raw }],
      "inputs",
    );
    const answer = await request(`${ferry.url}/v2/models/doubling/infer`, { method: "POST", body, headers });
    const bytes = Buffer.from(await answer.body.arrayBuffer());
    context.diagnostic(`binary extension: ${answer.statusCode} ${bytes.toString("utf8").slice(0, 200)}`);
    assert.equal(answer.statusCode, 200);
    const { tensors } = readMessage(bytes, answer.headers[HEADER] as string | undefined, "outputs");
    assert.deepEqual(tensors[0]!.shape, [1, 2]);

    for (let n = 0; n < 5; n++) {
      const inputs = [{ name: "x", datatype: "FP32", shape: [1, 2], data: [n, n] }];
      const missing = await ferry.post({ inputs }, {}, "/v2/models/doubling/versions/7/infer");
      assert.equal(missing.status, 404, missing.text);
    }
    await ask(101);
    assert.equal((await ferry.health()).healthy_workers, 1);
  });
});
