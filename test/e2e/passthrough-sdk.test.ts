/** OpenAI's own SDK streams through Ferry: the same route batches what can be batched. */
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { Ferry } from "./harness.ts";
import { openModel, OpenWorker } from "./open-worker.ts";

test("a stream of completions, token by token, with the model's name at the worker", async () => {
  const models: string[] = [];
  const released = Promise.withResolvers<void>();
  await using worker = await OpenWorker.listen(async ({ response, body }) => {
    const asked = JSON.parse(await body()) as { model: string; stream?: boolean };
    models.push(asked.model);
    const choice = (text: string) => ({ text, index: 0, logprobs: null, finish_reason: "stop" });
    const whole = { id: "c", object: "text_completion", created: 1, model: asked.model };
    if (asked.stream !== true) {
      response.setHeader("content-type", "application/json");
      return void response.end(JSON.stringify({ ...whole, choices: [choice("all")] }));
    }
    response.writeHead(200, { "content-type": "text/event-stream" });
    response.write(`data: ${JSON.stringify({ ...whole, choices: [choice("one")] })}\n\n`);
    await released.promise;
    response.end(`data: ${JSON.stringify({ ...whole, choices: [choice(" two")] })}\n\ndata: [DONE]\n\n`);
  });
  const backend = { protocol: "openai-completions", model: "theirs" };
  const model = openModel([`${worker.url}/v1/completions`], { passthrough: false, backend });
  await using ferry = await Ferry.start({ models: [model] });
  const client = new OpenAI({ baseURL: `${ferry.url}/v1`, apiKey: "none", maxRetries: 0 });
  const stream = await client.completions.create({ model: "open", prompt: "say", stream: true });
  const texts: string[] = [];
  for await (const part of stream) {
    texts.push(part.choices[0]!.text);
    // The first has come although the worker has not said the second.
    released.resolve();
  }
  assert.deepEqual(texts, ["one", " two"]);
  const batched = await client.completions.create({ model: "open", prompt: "say" });
  assert.equal(batched.choices[0]!.text, "all");
  assert.deepEqual(models, ["theirs", "theirs"]);
});
