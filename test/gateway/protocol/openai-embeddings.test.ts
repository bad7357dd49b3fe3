/** OpenAI's embeddings: what a request becomes, what a worker is told, what comes of its reply, what is answered. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { Refusal } from "../../../src/core/errors.ts";
import { openaiEmbeddings } from "../../../src/gateway/protocol/openai.ts";
import type { Drafts } from "../../../src/gateway/protocol/protocol.ts";
import { LIMITS } from "./spoken.ts";

const { client, worker } = openaiEmbeddings;

function read(body: unknown): Drafts {
  const text = typeof body === "string" ? body : JSON.stringify(body);
  const asked = { names: {}, body: Buffer.from(text), limits: LIMITS, header: () => undefined };
  const drafts = client.infer[0]!.read(asked);
  assert(!("unbatched" in drafts));
  return drafts;
}

function refuses(body: unknown, why: RegExp): void {
  assert.throws(
    () => read(body),
    (error) => error instanceof Refusal && error.status === 400 && why.test(error.message),
  );
}

const reply = (body: unknown) => ({
  header: () => undefined,
  body: Buffer.from(typeof body === "string" ? body : JSON.stringify(body)),
});

/** What an input means to the stub: a vector that nobody else's input has. */
const meaning = (input: unknown): number[] => [
  JSON.stringify(input).length,
  ...Buffer.from(JSON.stringify(input)).subarray(0, 3),
];
const base64 = (numbers: number[]): string =>
  Buffer.from(Float32Array.from(numbers).buffer).toString("base64");

describe("a request becomes drafts", () => {
  const cases: readonly [input: unknown, inputs: string[], parameters: string][] = [
    ["one", ['"one"'], ""],
    [["one", "two"], ['"one"', '"two"'], ""],
    [[1, 2, 3], ["[1,2,3]"], '{"$tokens":true}'],
    [[[1, 2], [3]], ["[1,2]", "[3]"], '{"$tokens":true}'],
    ["", ['""'], ""],
  ];
  for (const [input, inputs, parameters] of cases) {
    test(JSON.stringify(input), () => {
      const drafts = read({ model: "m", input });
      assert.deepEqual([drafts.model, drafts.inputs, drafts.parameters], ["m", inputs, parameters]);
    });
  }

  test("what could change an answer keeps requests apart, what cannot does not", () => {
    const of = (more: object): string => read({ input: "a", ...more }).parameters;
    assert.equal(of({ user: "u", encoding_format: "base64" }), of({}));
    assert.equal(of({ dimensions: null }), of({}));
    assert.notEqual(of({ dimensions: 256 }), of({}));
    assert.equal(of({ b: 1, a: 2 }), of({ a: 2, b: 1 }));
    assert.notEqual(of({ truncate_prompt_tokens: 1 }), of({ truncate_prompt_tokens: 2 }));
  });

  test("what is refused", () => {
    refuses({}, /"input" is missing/);
    refuses({ input: [] }, /empty array/);
    refuses({ input: ["a", 1] }, /not a mixture/);
    refuses({ input: [["a"]] }, /not a mixture/);
    refuses({ input: [[]] }, /not a mixture/);
    refuses({ input: [[1], "a"] }, /not a mixture/);
    refuses({ input: [-1] }, /not a mixture/);
    refuses({ input: null }, /must be a string or an array/);
    refuses({ input: { a: 1 } }, /must be a string or an array/);
    refuses({ input: "a", encoding_format: "int8" }, /float or base64/);
    refuses({ input: "a", model: 3 }, /"model" must be a string/);
    refuses({ input: "a", $tokens: true }, /unknown field "\$tokens"/);
    refuses({ input: Array.from({ length: 2049 }, () => "a") }, /more than 2048/);
    refuses("[]", /JSON object/);
    refuses('{"input":"a","input":"b"}', /twice|duplicate/);
    refuses('{"input":', /not valid JSON/);
    refuses('{"input":"\\ud800"}', /surrogate/);
  });

  test("as many tokens as one likes are one input", () => {
    assert.equal(read({ input: Array.from({ length: 5000 }, (_, at) => at) }).inputs.length, 1);
  });
});

describe("a batch becomes one call", () => {
  test("base64 is asked for; marks between the sides are not sent", () => {
    const { body, path, type } = worker.call(["[1]", "[2]"], '{"$tokens":true,"dimensions":3}', "up");
    const told = { model: "up", input: [[1], [2]], encoding_format: "base64", dimensions: 3 };
    assert.deepEqual(JSON.parse(String(body)), told);
    assert.deepEqual([path, type], [undefined, undefined]);
  });

  test("the base of a worker's URL", () => {
    assert.equal(worker.basePath("/v1/embeddings"), "");
    assert.equal(worker.basePath("/openai/v1/embeddings/"), "/openai");
    assert.equal(worker.basePath("/other"), "/other");
  });
});

describe("a reply becomes outputs", () => {
  const inputs = ['"a"', '"bb"', '"cccc"'];
  const element = (index: unknown, embedding: unknown = [0.5]) => ({ object: "embedding", index, embedding });
  const flaw = (body: unknown): string | undefined => worker.outputs(reply(body), inputs, "").flaw;

  test("by index, whatever the order; tokens sum to what the worker said", () => {
    const data = [element(2, [3]), element(0, [1]), element(1, "AACAPw==")];
    const { outputs } = worker.outputs(
      reply({ data, usage: { prompt_tokens: 10, total_tokens: 10 } }),
      inputs,
      "",
    );
    assert.deepEqual(outputs, [
      '{"embedding":[1],"prompt_tokens":1}',
      '{"embedding":"AACAPw==","prompt_tokens":3}',
      '{"embedding":[3],"prompt_tokens":6}',
    ]);
  });

  test("by position where no index is said; without usage there is none", () => {
    const data = [{ embedding: [1] }, { embedding: [2] }, { embedding: [3] }];
    const { outputs } = worker.outputs(reply({ data }), inputs, "");
    assert.deepEqual(outputs, ['{"embedding":[1]}', '{"embedding":[2]}', '{"embedding":[3]}']);
  });

  test("what cannot be matched without doubt is of no use", () => {
    assert.match(flaw({ data: [element(0), element(1)] })!, /2 embeddings for 3 inputs/);
    assert.match(flaw({ data: [element(0), element(0), element(1)] })!, /index 0 twice/);
    assert.match(flaw({ data: [element(0), element(1), element(3)] })!, /out of range/);
    assert.match(flaw({ data: [element(0), element(1), element("2")] })!, /out of range/);
    assert.match(flaw({ data: [element(0), element(1), element(-1)] })!, /out of range/);
    assert.match(flaw({ data: [element(0), element(1), { index: 2 }] })!, /no embedding at 2/);
    assert.match(flaw({ data: [element(0), element(1), element(2, null)] })!, /no embedding at 2/);
    assert.match(flaw({ data: [element(0), element(1), 7] })!, /no embedding at 2/);
    assert.match(
      flaw({ data: [element(0), element(1), { embedding: [1] }] })!,
      /some of its embeddings only/,
    );
    for (const embedding of [[null], ["a"], [[1]], "AAAA", "no base64!"]) {
      assert.match(flaw({ data: [element(0), element(1), element(2, embedding)] })!, /no embedding at 2/);
    }
    assert.match(flaw({ data: {} })!, /not an array/);
    assert.match(flaw({ embeddings: [] })!, /has no "data"/);
    assert.match(flaw('{"data":[],"data":[]}')!, /twice/);
    assert.match(
      flaw('{"data":[{"embedding":[1e999],"index":0},{"embedding":[1]},{"embedding":[1]}]}')!,
      /range/,
    );
  });
});

describe("outputs become the answer", () => {
  const answer = (format: string | undefined, outputs: readonly string[]) => {
    const { body } = read({ input: outputs.map(String), encoding_format: format }).render(outputs, "m");
    return JSON.parse(String(body)) as {
      data: { embedding: unknown; index: number }[];
      model: string;
      usage: object;
    };
  };

  test("in the format that was asked for, whichever came", () => {
    const numbers = [0.5, -1, 0.100000001];
    const both = [
      '{"embedding":[0.5,-1,0.100000001],"prompt_tokens":3}',
      `{"embedding":"${base64(numbers)}","prompt_tokens":4}`,
    ];
    const floats = answer("float", both);
    assert.deepEqual(floats.data[0]!.embedding, numbers);
    // The shortest that reads as the same float32.
    assert.deepEqual(floats.data[1]!.embedding, [0.5, -1, 0.1]);
    assert.deepEqual(floats.usage, { prompt_tokens: 7, total_tokens: 7 });
    assert.deepEqual(
      answer("base64", both).data.map(({ embedding }) => embedding),
      [base64(numbers), base64(numbers)],
    );
    assert.deepEqual(
      answer(undefined, both).data.map(({ index }) => index),
      [0, 1],
    );
  });

  test("of a function, the embedding alone will do", () => {
    const { data, usage } = answer("float", ["[1,2]", `"${base64([3])}"`]);
    assert.deepEqual(
      data.map(({ embedding }) => embedding),
      [[1, 2], [3]],
    );
    assert.deepEqual(usage, { prompt_tokens: 0, total_tokens: 0 });
  });

  test("what a function must not return is an error of ours, not an answer", () => {
    for (const output of [
      "null",
      "7",
      "{}",
      '"no base64!"',
      '"AAAA"',
      '"x"',
      '"AAAAAA="',
      "[null]",
      '["a"]',
      "[[1]]",
    ]) {
      assert.throws(
        () => read({ input: "a" }).render([output], "m"),
        (error) => error instanceof Refusal && error.code === "INFERENCE_FAILED",
        output,
      );
    }
    assert.deepEqual(answer("float", ['"AACAPw=="', '"\\/wAAAA=="', "[]", "[ 1, -2.5e-3 ]"]).data.length, 4);
  });

  test("number texts of a worker that sends numbers are not touched", () => {
    const { body } = read({ input: "a" }).render(['{"embedding":[1.0,2e-7,12345678901234567890]}'], "m");
    assert.match(String(body), /"embedding":\[1\.0,2e-7,12345678901234567890\]/);
  });

  test("errors are in OpenAI's shape", () => {
    const { status, body } = client.fail(new Refusal("NOT_FOUND", "no such model"));
    assert.deepEqual(
      [status, JSON.parse(String(body))],
      [
        404,
        {
          error: {
            message: "no such model",
            type: "invalid_request_error",
            param: null,
            code: "model_not_found",
          },
        },
      ],
    );
  });
});

test("whatever rides together, each input gets the answer that is its own", () => {
  const request = fc.array(fc.string(), { minLength: 1, maxLength: 6 });
  fc.assert(
    fc.property(
      fc.array(request, { minLength: 1, maxLength: 5 }),
      fc.boolean(),
      fc.integer(),
      (requests, base, seed) => {
        const all = requests.map((input) => read({ input, encoding_format: base ? "base64" : "float" }));
        const inputs = all.flatMap((drafts) => drafts.inputs);
        const { body } = worker.call(inputs, "", "up");
        const { input } = JSON.parse(String(body)) as { input: string[] };
        const data = input.map((each, index) => ({ index, embedding: base64(meaning(each)) }));
        data.sort((a, b) => ((a.index * 7919) ^ seed) - ((b.index * 7919) ^ seed));
        const tokens = Math.abs(seed) % 1000;
        const { outputs } = worker.outputs(reply({ data, usage: { prompt_tokens: tokens } }), inputs, "");
        let from = 0;
        let counted = 0;
        for (const [at, drafts] of all.entries()) {
          const rendered = drafts.render(outputs!.slice(from, (from += drafts.inputs.length)), "m");
          const answer = JSON.parse(String(rendered.body)) as {
            data: { embedding: unknown }[];
            usage: { prompt_tokens: number };
          };
          const expected = requests[at]!.map((each) => (base ? base64(meaning(each)) : meaning(each)));
          assert.deepEqual(
            answer.data.map(({ embedding }) => embedding),
            expected,
          );
          counted += answer.usage.prompt_tokens;
        }
        assert.equal(counted, tokens);
      },
    ),
  );
});
