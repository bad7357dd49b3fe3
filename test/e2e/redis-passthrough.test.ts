/** A gateway that runs no batches passes requests through all the same: it knows the workers from its config. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { startServer } from "../engine/redis-client/servers.ts";
import { Fleet, fleetConfig, patient } from "./fleet.ts";
import { openModel, OpenWorker } from "./open-worker.ts";

test("--role gateway: batches go through Redis, what no batch is for straight to a worker", async () => {
  await using redis = await startServer();
  await using worker = await OpenWorker.listen(async ({ request, response, body }) => {
    const text = await body();
    if (request.url !== "/v1/embeddings")
      return void response.end(`${request.method} ${request.url} ${text}`);
    const { input } = JSON.parse(text) as { input: unknown[] };
    const data = input.map((_, index) => ({ object: "embedding", index, embedding: [index] }));
    response.setHeader("content-type", "application/json").end(JSON.stringify({ object: "list", data }));
  });
  const model = openModel([`${worker.url}/v1/embeddings`], { timeouts: patient });
  await using fleet = await Fleet.start(
    { gateways: 1, batchers: 1 },
    fleetConfig({ url: redis.url }, [model]),
  );
  const post = async (path: string, body: string): Promise<string> => {
    const headers = { "content-type": "application/json" };
    const answer = await fetch(fleet.gateways[0]!.url + path, { method: "POST", headers, body });
    assert.equal(answer.status, 200);
    return answer.text();
  };
  const passed = await post("/v1/chat/completions", '{"a":1}');
  assert.equal(passed, 'POST /v1/chat/completions {"a":1}');
  const batched = await post("/v1/embeddings", '{"input":["a","b"]}');
  assert.equal((JSON.parse(batched) as { data: unknown[] }).data.length, 2);
});
