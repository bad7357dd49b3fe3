/** OpenAI's own SDK, unchanged, against a whole Ferry in front of a server that speaks OpenAI's API strictly. */
import assert from "node:assert/strict";
import { after, before, beforeEach, describe, test } from "node:test";
import OpenAI, {
  APIConnectionTimeoutError,
  APIUserAbortError,
  AuthenticationError,
  BadRequestError,
  InternalServerError,
  NotFoundError,
  RateLimitError,
} from "openai";
import { completionFor, embeddingFor, OpenAiServer, tokensOf } from "../gateway/protocol/servers/openai.ts";
import { type Config, eventually, Ferry, Folder, runFerry, writeConfig } from "./harness.ts";

const UPSTREAM = "the-model";
const timeouts = { queueMs: 20_000, workerMs: 10_000, totalMs: 30_000 };

/** `embed` and `text`, in front of one server each; nothing is answered from memory. */
function modelsOf(server: OpenAiServer, other: OpenAiServer, more: Config = {}): readonly Config[] {
  return [
    { name: "embed", protocol: "openai-embeddings", url: `${server.url}/v1/embeddings` },
    { name: "text", protocol: "openai-completions", url: `${other.url}/v1/completions` },
  ].map(({ name, protocol, url }) => ({
    name,
    backend: { kind: "http", protocol, workers: [url], model: UPSTREAM, authorization: "Bearer sk-upstream" },
    timeouts,
    cache: { scope: "off" },
    collapse: false,
    ...more,
  }));
}

function sdk(ferry: Ferry, options: { apiKey?: string; maxRetries?: number; timeout?: number } = {}): OpenAI {
  return new OpenAI({ baseURL: `${ferry.url}/v1`, apiKey: "sk-any", maxRetries: 0, ...options });
}

describe("the openai SDK", () => {
  let server: OpenAiServer;
  let other: OpenAiServer;
  let ferry: Ferry;
  let client: OpenAI;

  before(async () => {
    server = await OpenAiServer.listen(UPSTREAM);
    other = await OpenAiServer.listen(UPSTREAM);
    const retry = { max: 0 };
    ferry = await Ferry.start({
      models: modelsOf(server, other, { retry, health: { failures: 1000 }, maxBatchSize: 512 }),
      limits: { perUserPerMinute: 1_000_000, maxBodyBytes: 10_000_000 },
    });
    client = sdk(ferry);
  });
  after(async () => {
    await ferry?.[Symbol.asyncDispose]();
    await server?.[Symbol.asyncDispose]();
    await other?.[Symbol.asyncDispose]();
  });
  beforeEach(() => {
    server.behave = other.behave = () => {};
    server.calls.length = other.calls.length = 0;
  });

  test("embeddings: base64 by default, which the SDK decodes, and numbers", async () => {
    const { data, model, object, usage } = await client.embeddings.create({
      model: "embed",
      input: "one two",
    });
    assert.deepEqual(data, [{ object: "embedding", index: 0, embedding: embeddingFor("one two") }]);
    assert.deepEqual([object, model, usage], ["list", "embed", { prompt_tokens: 2, total_tokens: 2 }]);
    const floats = await client.embeddings.create({ model: "embed", input: "one", encoding_format: "float" });
    // With the digits of a float32: as a double each may be another number.
    assert.deepEqual(floats.data[0]!.embedding.map(Math.fround), embeddingFor("one"));
    assert.equal(server.calls.at(-1)!.body["encoding_format"], "base64", "whatever the client wants");
  });

  test("embeddings: texts, tokens, dimensions, a user", async () => {
    const ask = async (more: Omit<OpenAI.EmbeddingCreateParams, "model">): Promise<unknown[]> => {
      const { data } = await client.embeddings.create({ model: "embed", ...more });
      assert.deepEqual(
        data.map(({ index }) => index),
        data.map((_, at) => at),
      );
      return data.map(({ embedding }) => embedding);
    };
    assert.deepEqual(
      await ask({ input: ["a", "b", "a"] }),
      ["a", "b", "a"].map((each) => embeddingFor(each)),
    );
    assert.deepEqual(await ask({ input: [1, 2, 3] }), [embeddingFor([1, 2, 3])]);
    assert.deepEqual(await ask({ input: [[1, 2], [3]] }), [embeddingFor([1, 2]), embeddingFor([3])]);
    assert.deepEqual(await ask({ input: "a", dimensions: 3 }), [embeddingFor("a", 3)]);
    assert.deepEqual(await ask({ input: "a", user: "u" }), [embeddingFor("a")]);
    assert.equal(server.calls.at(-1)!.body["user"], undefined);
  });

  test("embeddings: 1,000 inputs of one request, in order; their tokens sum up", async () => {
    const input = Array.from({ length: 1000 }, (_, at) => `text ${at}${" more".repeat(at % 7)}`);
    const { data, usage } = await client.embeddings.create({ model: "embed", input });
    assert.deepEqual(
      data.map(({ embedding }) => embedding),
      input.map((each) => embeddingFor(each)),
    );
    assert.equal(
      usage.prompt_tokens,
      input.map(tokensOf).reduce((sum, tokens) => sum + tokens),
    );
    assert.equal(server.calls.length, 2, "batches of 512");
  });

  test("many clients of one input each: batches upstream, and nobody gets another's answer", async () => {
    const texts = Array.from({ length: 400 }, (_, at) => `client ${at}`);
    // As clients do: a process that gets too little CPU refuses some of them for a moment.
    const patient = sdk(ferry, { maxRetries: 10 });
    const answers = await Promise.all(
      texts.map((input, at) =>
        patient.embeddings.create({
          model: "embed",
          input: at % 5 === 0 ? [at, at + 1] : input,
          ...(at % 3 === 0 && { dimensions: 4 }),
          ...(at % 2 === 0 && { encoding_format: "float" as const }),
        }),
      ),
    );
    for (const [at, { data }] of answers.entries()) {
      const input = at % 5 === 0 ? [at, at + 1] : texts[at]!;
      const wanted = embeddingFor(input, at % 3 === 0 ? 4 : undefined);
      assert.deepEqual(data[0]!.embedding.map(Math.fround), wanted, "CROSSED");
    }
    const sizes = server.calls.map(({ inputs }) => inputs.length);
    assert.equal(
      sizes.reduce((sum, size) => sum + size),
      texts.length,
    );
    assert.ok(Math.max(...sizes) > 1, `batches of ${sizes.join(", ")}`);
  });

  test("completions: a prompt, several with n, tokens, echo", async () => {
    const one = await client.completions.create({ model: "text", prompt: "hello", max_tokens: 1, user: "u" });
    assert.match(one.id, /^cmpl-[0-9A-Z]{26,40}$/);
    assert.deepEqual(one.choices, [
      { index: 0, text: completionFor("hello"), logprobs: null, finish_reason: "length" },
    ]);
    const { object, model, created, system_fingerprint } = one;
    assert.deepEqual(
      [object, model, created, system_fingerprint],
      ["text_completion", "text", 1_700_000_000, "fp_stub"],
    );
    const prompt = ["a", "b b"];
    const several = await client.completions.create({ model: "text", prompt, n: 2, best_of: 3 });
    const texts = prompt.flatMap((each) => [completionFor(each, 0), completionFor(each, 1)]);
    assert.deepEqual(
      several.choices.map(({ index, text }) => [index, text]),
      texts.map((text, index) => [index, text]),
    );
    const completion_tokens = texts.map(tokensOf).reduce((sum, tokens) => sum + tokens);
    assert.deepEqual(several.usage, {
      prompt_tokens: 3,
      completion_tokens,
      total_tokens: 3 + completion_tokens,
    });
    const tokens = await client.completions.create({ model: "text", prompt: [[1, 2], [3]], echo: true });
    assert.deepEqual(
      tokens.choices.map(({ text }) => text),
      [`[1,2]${completionFor([1, 2])}`, `[3]${completionFor([3])}`],
    );
  });

  test("completions: many clients share calls where all but the prompt is equal", async () => {
    const clients = Array.from({ length: 120 }, (_, at) => ({ prompt: `client ${at}`, n: 1 + (at % 2) }));
    const answers = await Promise.all(
      clients.map(({ prompt, n }) => client.completions.create({ model: "text", prompt, n })),
    );
    for (const [at, { choices, id }] of answers.entries()) {
      const { prompt, n } = clients[at]!;
      const expected = Array.from({ length: n }, (_, k) => completionFor(prompt, k));
      assert.deepEqual(
        choices.map(({ text }) => text),
        expected,
        "CROSSED",
      );
      assert.equal(answers.filter((each) => each.id === id).length, 1, "an id of its own");
    }
    assert.ok(other.calls.some(({ inputs }) => inputs.length > 1));
    for (const { body, inputs } of other.calls) {
      const kinds = new Set(inputs.map((each) => Number(/\d+/.exec(String(each))![0]) % 2));
      assert.deepEqual([...kinds], [(body["n"] as number) - 1]);
    }
  });

  test("models: all of them, and one", async () => {
    const names: string[] = [];
    for await (const { id, object } of client.models.list()) {
      assert.equal(object, "model");
      names.push(id);
    }
    assert.deepEqual(names.toSorted(), ["embed", "text"]);
    for (const name of names) assert.equal((await client.models.retrieve(name)).id, name);
    await assert.rejects(client.models.retrieve("none"), NotFoundError);
  });

  test("a mistake of the client is a BadRequestError, ours or the server's", async () => {
    const ask = (more: object): Promise<unknown> =>
      client.embeddings.create({ model: "embed", input: "a", ...more });
    await assert.rejects(ask({ input: [] }), (error) => {
      assert.ok(error instanceof BadRequestError);
      assert.match(error.message, /"input" is an empty array/);
      assert.deepEqual([error.type, error.code], ["invalid_request_error", "invalid_request"]);
      assert.match(error.requestID ?? "", /^[0-9A-Z]{26,40}$/);
      return true;
    });
    assert.equal(server.calls.length, 0);
    const [good, bad] = await Promise.allSettled([ask({}), ask({ input: "" })]);
    assert.equal(good.status, "fulfilled", "the mate of a bad input is answered");
    assert.ok(bad.status === "rejected" && bad.reason instanceof BadRequestError, JSON.stringify(bad));
    await assert.rejects(ask({ unknown_field: 1 }), BadRequestError);
    await assert.rejects(client.completions.create({ model: "text", prompt: "a", n: 0 }), BadRequestError);
  });

  test("a model that is not here, or speaks another protocol, is a NotFoundError", async () => {
    for (const model of ["none", "text"]) {
      await assert.rejects(client.embeddings.create({ model, input: "a" }), (error) => {
        assert.ok(error instanceof NotFoundError);
        assert.equal(error.code, "model_not_found");
        return true;
      });
    }
  });

  test("a server that fails is an InternalServerError; its words stay here", async () => {
    server.behave = (call) => call.error(500, "out of memory at node-17");
    await assert.rejects(client.embeddings.create({ model: "embed", input: "a" }), (error) => {
      assert.ok(error instanceof InternalServerError);
      assert.equal(error.status, 502);
      assert.doesNotMatch(error.message, /node-17/);
      return true;
    });
  });

  test("a worker that mixes up, loses or invents answers is believed by nobody", async () => {
    const one = { object: "embedding", index: 0, embedding: embeddingFor("stranger") };
    const faults = [
      { data: [one, one] },
      { data: [{ ...one, index: 1 }] },
      { data: [] },
      { data: [{ ...one, embedding: [null] }] },
      { data: [{ ...one, embedding: undefined }] },
      { error: { message: "sorry" } },
      '{"data":[{"index":0,"embedding":[NaN]}]}',
      "<html>",
      "",
    ];
    for (const fault of faults) {
      server.behave = (call) => call.reply(200, fault);
      await assert.rejects(
        client.embeddings.create({ model: "embed", input: "a" }),
        (error) => error instanceof InternalServerError || error instanceof BadRequestError,
        JSON.stringify(fault),
      );
    }
  });

  test("an abort and a timeout take the work out of the queue", async () => {
    const opened = Promise.withResolvers<void>();
    server.behave = () => opened.promise;
    const first = client.embeddings.create({ model: "embed", input: "holds the worker" });
    await server.call(1);
    const line = new AbortController();
    const aborted = client.embeddings.create({ model: "embed", input: ["x", "y"] }, { signal: line.signal });
    await ferry.healthy(({ queue_depth }) => queue_depth === 2);
    line.abort();
    await assert.rejects(aborted, APIUserAbortError);
    const late = client.embeddings.create({ model: "embed", input: "late" }, { timeout: 300 });
    await assert.rejects(late, APIConnectionTimeoutError);
    await ferry.healthy(({ queue_depth }) => queue_depth === 0);
    opened.resolve();
    assert.deepEqual((await first).data[0]!.embedding, embeddingFor("holds the worker"));
    await client.embeddings.create({ model: "embed", input: "after" });
    assert.deepEqual(
      server.calls.flatMap(({ inputs }) => inputs),
      ["holds the worker", "after"],
    );
  });
});

test("retries: the SDK comes again after retry-after-ms, and is answered", async () => {
  await using server = await OpenAiServer.listen(UPSTREAM);
  await using ferry = await Ferry.start({
    models: modelsOf(server, server, { health: { failures: 1, ejectMs: 300 } }).slice(0, 1),
  });
  await server.close();
  const impatient = sdk(ferry);
  const refused = async (): Promise<boolean> => {
    const error: unknown = await impatient.embeddings
      .create({ model: "embed", input: "a" }, { timeout: 1000 })
      .catch((reason: unknown) => reason);
    if (!(error instanceof InternalServerError) || error.status !== 503) return false;
    const wait = Number(error.headers.get("retry-after-ms"));
    assert.ok(wait > 0 && wait <= 60_000, String(wait));
    return true;
  };
  await eventually(refused);
  const tries: { readonly from: number; readonly to: number; readonly waitMs: number }[] = [];
  const watched = async (...asked: Parameters<typeof fetch>): Promise<Response> => {
    const from = performance.now();
    const answer = await fetch(...asked);
    const waitMs = Number(answer.headers.get("retry-after-ms") ?? NaN);
    tries.push({ from, to: performance.now(), waitMs });
    return answer;
  };
  const patient = new OpenAI({ baseURL: `${ferry.url}/v1`, apiKey: "any", maxRetries: 20, fetch: watched });
  const answer = patient.embeddings.create({ model: "embed", input: "b" });
  // It may be let in as the one that tries the worker, and then waits for it.
  await eventually(() => tries.length > 0, 3000).catch(() => {});
  await server.open();
  assert.deepEqual((await answer).data[0]!.embedding, embeddingFor("b"));
  for (const [at, { to, waitMs }] of tries.slice(0, -1).entries()) {
    // Node's timers may be a millisecond early.
    assert.ok(tries[at + 1]!.from - to >= waitMs - 2, JSON.stringify(tries));
  }
});

test("a limit that is used up is a RateLimitError that says when to come again", async () => {
  await using server = await OpenAiServer.listen(UPSTREAM);
  const models = modelsOf(server, server).slice(0, 1);
  await using ferry = await Ferry.start({ models, limits: { perUserPerMinute: 2 } });
  const ask = (input: string[]) => sdk(ferry).embeddings.create({ model: "embed", input });
  await ask(["a", "b", "c"]);
  await ask(["a"]);
  await assert.rejects(ask(["a"]), (error) => {
    assert.ok(error instanceof RateLimitError);
    assert.deepEqual([error.type, error.code], ["rate_limit_error", "rate_limit_exceeded"]);
    assert.ok(Number(error.headers.get("retry-after-ms")) > 0);
    return true;
  });
});

test("with auth required, a key of Ferry's opens the door, and no other is an AuthenticationError", async () => {
  await using server = await OpenAiServer.listen(UPSTREAM);
  await using folder = await Folder.make();
  const config = {
    models: modelsOf(server, server).slice(0, 1),
    auth: { mode: "required", keysFile: "./keys.json" },
    admin: { listen: "127.0.0.1:0", token: "the-token-of-the-admin-listener" },
  };
  const file = await writeConfig(folder, config);
  const made = await runFerry(["keys", "create", "--user", "a", "--tier", "paid", "-c", file]);
  assert.equal(made.code, 0, made.stderr);
  await using ferry = await Ferry.start(config, folder);
  for (const apiKey of ["sk-any", "sk-upstream"]) {
    const stranger = sdk(ferry, { apiKey });
    await assert.rejects(stranger.embeddings.create({ model: "embed", input: "a" }), AuthenticationError);
    await assert.rejects(stranger.models.list(), AuthenticationError);
  }
  assert.equal(server.calls.length, 0);
  const client = sdk(ferry, { apiKey: made.stdout.trim() });
  await client.embeddings.create({ model: "embed", input: "a" });
  assert.equal(server.calls[0]!.headers.authorization, "Bearer sk-upstream", "ours stays here");
});

test("equal prompts at temperature 1 are drawn apart, at 0 they share one answer", async () => {
  await using server = await OpenAiServer.listen(UPSTREAM);
  const models = modelsOf(server, server, { cache: { scope: "tenant" }, collapse: true }).slice(1);
  await using ferry = await Ferry.start({ models });
  const client = sdk(ferry);
  const prompt = ["same", "same"];
  for (let turn = 0; turn < 2; turn++)
    await client.completions.create({ model: "text", prompt, temperature: 1 });
  assert.equal(server.calls.flatMap(({ inputs }) => inputs).length, 4);
  server.calls.length = 0;
  for (let turn = 0; turn < 2; turn++)
    await client.completions.create({ model: "text", prompt, temperature: 0 });
  assert.equal(server.calls.flatMap(({ inputs }) => inputs).length, 1);
});
