/** examples/triton-model does what its README says. */
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { test } from "node:test";
import { request } from "undici";
import { parse } from "yaml";
import { HEADER, readMessage, writeMessage } from "../gateway/protocol/servers/oip.ts";
import { type Config, Ferry, ROOT } from "./harness.ts";

const EXAMPLE = join(ROOT, "examples/triton-model");

async function python(): Promise<AsyncDisposable & { readonly url: string }> {
  const child = spawn("python3", [join(EXAMPLE, "server.py"), "0"], { stdio: ["ignore", "pipe", "inherit"] });
  const [line] = (await once(createInterface({ input: child.stdout }), "line")) as [string];
  return {
    url: line.replace("ready on ", ""),
    [Symbol.asyncDispose]: async () => {
      const ended = once(child, "exit");
      if (child.kill()) await ended;
    },
  };
}

/** As the example has it, but on free ports. */
async function configFor(url: string): Promise<Config> {
  const text = await readFile(join(EXAMPLE, "ferry.yaml"), "utf8");
  return parse(text.replaceAll("http://127.0.0.1:8000", url)) as Config;
}

test("examples/triton-model: JSON as in the README, and bytes, in shared batches", async () => {
  await using server = await python();
  await using ferry = await Ferry.start(await configFor(server.url));
  const readme = await readFile(join(EXAMPLE, "README.md"), "utf8");
  const [, body] = /--json '(\{\s+"id": "42"[^']+)'/.exec(readme)!;
  const answer = await ferry.post(body, {}, "/v2/models/mean/infer");
  assert.equal(answer.status, 200, answer.text);
  const { id, outputs } = JSON.parse(answer.text) as {
    id: string;
    outputs: { name: string; data: unknown[] }[];
  };
  assert.equal(id, "42");
  assert.deepEqual(
    outputs.map(({ name, data }) => [name, typeof data[0]]),
    [
      ["mean", "number"],
      ["label", "string"],
    ],
  );

  const before = await ferry.health();
  const ask = async (caller: number): Promise<void> => {
    const raw = Buffer.from(Float32Array.from({ length: 16 }, () => caller / 64).buffer);
    const head = { parameters: { binary_data_output: true } };
    const sent = writeMessage(head, [{ name: "pixels", datatype: "FP32", shape: [1, 16], raw }], "inputs");
    const {
      statusCode,
      headers,
      body: stream,
    } = await request(`${ferry.url}/v2/models/mean/infer`, {
      method: "POST",
      body: sent.body,
      headers: sent.headers,
    });
    const bytes = Buffer.from(await stream.arrayBuffer());
    assert.equal(statusCode, 200, bytes.toString());
    const [mean, label] = readMessage(bytes, headers[HEADER] as string, "outputs").tensors;
    assert.equal(mean!.raw!.readFloatLE(), caller / 64);
    assert.equal(label!.raw!.subarray(4).toString(), caller > 32 ? "bright" : "dark");
  };
  await Promise.all(Array.from({ length: 64 }, (_, caller) => ask(caller)));
  const after = await ferry.health();
  const calls = after.totals.calls - before.totals.calls;
  assert.ok(calls < 32, `64 requests took ${calls} calls`);
});
