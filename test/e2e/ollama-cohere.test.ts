/** Ferry between clients and servers that speak Ollama's and Cohere's embeddings. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CohereServer, embeddingText } from "../gateway/protocol/servers/cohere-server.ts";
import { vectorText } from "../gateway/protocol/servers/json-server.ts";
import { OllamaServer } from "../gateway/protocol/servers/ollama-server.ts";
import { Ferry, type Answer } from "./harness.ts";

const LONG = "word ".repeat(40);

interface OllamaAnswer {
  readonly model: string;
  readonly embeddings: readonly unknown[];
  readonly prompt_eval_count: number;
}

interface CohereAnswer {
  readonly id: string;
  readonly texts?: readonly string[];
  readonly meta: { readonly billed_units: { readonly input_tokens: number } };
}

describe("Ollama:", () => {
  test("each caller gets its own, whatever keep_alive and however many; who is refused is refused alone", async () => {
    await using server = await new OllamaServer("nomic-embed-text").listen();
    const backend = { kind: "http", protocol: "ollama", workers: [server.url], model: "nomic-embed-text" };
    await using ferry = await Ferry.start({ models: [{ name: "nomic", backend, maxWaitMs: 20 }] });
    const embed = (body: object): Promise<Answer> =>
      ferry.post({ model: "nomic", ...body }, {}, "/api/embed");
    const callers = Array.from({ length: 40 }, (_, n) => {
      const input = Array.from({ length: 1 + (n % 4) }, (_, at) => `text ${n} ${at}`);
      const keep = n % 3 === 0 ? { keep_alive: `${1 + n}m` } : {};
      return { input, ...keep, ...(n % 2 === 0 && { dimensions: 64 }) };
    });
    const answers = await Promise.all(callers.map(embed));
    for (const [n, answer] of answers.entries()) {
      assert.equal(answer.status, 200, answer.text);
      const vectors = callers[n]!.input.map((text) => vectorText(text, n % 2 === 0 ? "64" : ""));
      assert(answer.text.includes(`"embeddings":[${vectors.join(",")}]`), answer.text);
      assert.equal((JSON.parse(answer.text) as OllamaAnswer).model, "nomic");
    }
    const calls = server.callsOf("/api/embed").length;
    assert(calls < 20, `${calls} calls for 40 callers`);
    const told = answers.map((answer) => (JSON.parse(answer.text) as OllamaAnswer).prompt_eval_count);
    // "text 3 0" is 5 tokens.
    assert.equal(
      told.reduce((sum, count) => sum + count, 0),
      5 * callers.flatMap(({ input }) => input).length,
    );
    const strict = await Promise.all(
      ["short", LONG, "brief"].map((input) => embed({ input, truncate: false })),
    );
    assert.deepEqual(
      strict.map(({ status }) => status),
      [200, 400, 200],
    );
    assert.match((JSON.parse(strict[1]!.text) as { error: string }).error, /context length/);
    const unknown = await ferry.post({ model: "other", input: "a" }, {}, "/api/embed");
    assert.equal(unknown.status, 404);
    assert.match((JSON.parse(unknown.text) as { error: string }).error, /other/);
  });

  test("wrong counts, errors as answers: nobody gets another's vector", async () => {
    await using server = await new OllamaServer("m").listen();
    const backend = { kind: "http", protocol: "ollama", workers: [`${server.url}/api/embed`] };
    await using ferry = await Ferry.start({ models: [{ name: "m", backend, maxWaitMs: 20 }] });
    for (const wrong of ['{"embeddings":[[1],[2]]}', '{"error":"no"}', '{"embeddings":null}', "[]", "{}"]) {
      server.instead = () => {
        server.instead = undefined;
        return { status: 200, text: wrong };
      };
      const texts = Array.from({ length: 5 }, (_, n) => `${wrong} ${n}`);
      const answer = await ferry.post({ input: texts }, {}, "/api/embed");
      assert.equal(answer.status, 200, answer.text);
      assert(answer.text.includes(`"embeddings":[${texts.map((text) => vectorText(text)).join(",")}]`));
    }
  });
});

describe("Cohere:", () => {
  const base = { model: "embed", input_type: "search_document" };

  test("300 texts in calls of at most 96, every type in order, the bill summed up", async () => {
    await using server = await new CohereServer().listen();
    const backend = { kind: "http", protocol: "cohere", workers: [server.url], model: "embed-v4.0" };
    const model = { name: "embed", backend, maxBatchSize: 1000 };
    await using ferry = await Ferry.start({ models: [model] });
    const texts = Array.from({ length: 300 }, (_, n) => `text ${n}`);
    const body = { ...base, texts, embedding_types: ["base64", "float"], priority: 1 };
    const answer = await ferry.post(body, {}, "/v2/embed");
    assert.equal(answer.status, 200, answer.text);
    for (const type of ["float", "base64"]) {
      const list = texts.map((text) => embeddingText(text, type)).join(",");
      assert(answer.text.includes(`"${type}":[${list}]`));
    }
    const { texts: echoed, meta } = JSON.parse(answer.text) as CohereAnswer;
    assert.deepEqual(echoed, texts);
    assert.equal(meta.billed_units.input_tokens, 4 * 300);
    assert(Math.max(...server.sizes) <= 96 && server.sizes.length <= 5, server.sizes.join(", "));
    const inputs = [{ content: [{ type: "text", text: "a" }] }, { content: [] }];
    const mixed = await ferry.post({ ...base, inputs }, {}, "/v2/embed");
    const vectors = inputs.map((input) => embeddingText(JSON.stringify(input), "float"));
    assert(mixed.text.includes(`"float":[${vectors.join(",")}]`), mixed.text);
  });

  test("a text that is refused fails alone, errors have Cohere's shape, ids differ", async () => {
    await using server = await new CohereServer().listen();
    const backend = { kind: "http", protocol: "cohere", workers: [server.url], model: "embed-v4.0" };
    await using ferry = await Ferry.start({ models: [{ name: "embed", backend, maxWaitMs: 20 }] });
    const embed = (text: string): Promise<Answer> => ferry.post({ ...base, texts: [text] }, {}, "/v2/embed");
    const answers = await Promise.all(["a", "refuse me", "b"].map(embed));
    assert.deepEqual(
      answers.map(({ status }) => status),
      [200, 422, 200],
    );
    assert.match((JSON.parse(answers[1]!.text) as { message: string }).message, /cannot be embedded/);
    const ids = [answers[0]!, answers[2]!].map(({ text }) => (JSON.parse(text) as CohereAnswer).id);
    assert.notEqual(ids[0], ids[1]);
    assert(answers[2]!.text.includes(embeddingText("b", "float")));
    const wrong = await ferry.post(base, {}, "/v2/embed");
    assert.deepEqual([wrong.status, Object.keys(JSON.parse(wrong.text) as object)], [400, ["message"]]);
  });
});
