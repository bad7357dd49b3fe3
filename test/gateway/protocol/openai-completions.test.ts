/** OpenAI's completions: what a request becomes, what a worker is told, what comes of its reply, what is answered. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { Refusal } from "../../../src/core/errors.ts";
import { openaiCompletions } from "../../../src/gateway/protocol/openai.ts";
import type { Drafts, Unbatched } from "../../../src/gateway/protocol/protocol.ts";
import { LIMITS } from "./spoken.ts";

const { client, worker } = openaiCompletions;

function ask(body: unknown): Drafts | Unbatched {
  const text = typeof body === "string" ? body : JSON.stringify(body);
  return client.infer[0]!.read({
    names: {},
    body: Buffer.from(text),
    limits: LIMITS,
    header: () => undefined,
  });
}

function read(body: unknown): Drafts {
  const drafts = ask(body);
  assert(!("unbatched" in drafts));
  return drafts;
}

function refuses(body: unknown, why: RegExp): void {
  assert.throws(
    () => ask(body),
    (error) => error instanceof Refusal && error.status === 400 && why.test(error.message),
  );
}

const reply = (body: unknown) => ({
  header: () => undefined,
  body: Buffer.from(typeof body === "string" ? body : JSON.stringify(body)),
});

interface Completion {
  readonly id: string;
  readonly object: string;
  readonly created: number;
  readonly model: string;
  readonly system_fingerprint?: string;
  readonly choices: readonly {
    readonly text: string;
    readonly index: number;
    readonly finish_reason: string;
  }[];
  readonly usage: {
    readonly prompt_tokens: number;
    readonly completion_tokens: number;
    readonly total_tokens: number;
  };
}

function rendered(drafts: Drafts, outputs: readonly string[]): Completion {
  const { body } = drafts.render(outputs, "m", { id: "01ABC", at: 1_700_000_000_999 });
  return JSON.parse(String(body)) as Completion;
}

describe("a request becomes drafts", () => {
  const cases: readonly [prompt: unknown, inputs: string[], parameters: string][] = [
    ["one", ['"one"'], ""],
    [["one", "two"], ['"one"', '"two"'], ""],
    [[1, 2, 3], ["[1,2,3]"], '{"$tokens":true}'],
    [[[1, 2], [3]], ["[1,2]", "[3]"], '{"$tokens":true}'],
  ];
  for (const [prompt, inputs, parameters] of cases) {
    test(JSON.stringify(prompt), () => {
      const drafts = read({ model: "m", prompt });
      assert.deepEqual([drafts.model, drafts.inputs, drafts.parameters], ["m", inputs, parameters]);
    });
  }

  test("every field but the prompt and the user keeps requests apart", () => {
    const of = (more: object): string => read({ prompt: "a", ...more }).parameters;
    assert.equal(of({ user: "u", stream: false, seed: null, model: "m" }), of({}));
    for (const more of [
      { n: 2 },
      { best_of: 2 },
      { echo: true },
      { logprobs: 1 },
      { stop: ["x"] },
      { max_tokens: 7 },
      { temperature: 0.5 },
      { suffix: "s" },
      { logit_bias: { "50256": -100 } },
      { of_another_make: 1 },
    ]) {
      assert.notEqual(of(more), of({}), JSON.stringify(more));
      assert.equal(of(more), JSON.stringify(more), "and goes on as it came");
    }
  });

  test("numbers keep their text", () => {
    assert.equal(
      read('{"prompt":"a","x":12345678901234567890,"y":1.0}').parameters,
      '{"x":12345678901234567890,"y":1.0}',
    );
  });

  test("a stream, a seed and embedded prompts go past the batches", () => {
    for (const more of [{ stream: true }, { seed: 0 }, { prompt_embeds: "AAAA" }]) {
      assert.deepEqual(ask({ model: "m", prompt: "a", ...more }), { unbatched: true, model: "m" });
    }
    // Even one that we could not have cut up.
    assert.ok("unbatched" in ask({ stream: true, prompt: [["a"], 1] }));
  });

  test("what is drawn by lot is not shared; at temperature 0 it may be", () => {
    assert.deepEqual(
      ['{"prompt":"a"}', '{"prompt":"a","temperature":0.7}', '{"prompt":"a","temperature":null}'].map(
        (body) => read(body).drawn,
      ),
      [true, true, true],
    );
    assert.equal(read('{"prompt":"a","temperature":0}').drawn, false);
    assert.equal(read('{"prompt":"a","temperature":0.0}').drawn, false);
  });

  test("what is refused", () => {
    refuses({}, /"prompt" is missing/);
    refuses({ prompt: [] }, /empty array/);
    refuses({ prompt: ["a", 1] }, /not a mixture/);
    refuses({ prompt: null }, /must be a string or an array/);
    refuses({ prompt: "a", n: 0 }, /"n" must be/);
    refuses({ prompt: "a", n: 1.5 }, /"n" must be/);
    refuses({ prompt: "a", n: "2" }, /"n" must be/);
    refuses({ prompt: "a", n: 99_999 }, /"n" must be/);
    refuses({ prompt: "a", stream: "yes" }, /"stream" must be true or false/);
    refuses({ prompt: "a", model: 3 }, /"model" must be a string/);
    refuses({ prompt: "a", $tokens: true }, /unknown field/);
    refuses('{"prompt":"a","prompt":"b"}', /twice/);
    refuses('{"prompt":', /not valid JSON/);
    refuses("[]", /JSON object/);
  });
});

describe("a batch becomes one call", () => {
  const told = (inputs: string[], parameters: string): unknown =>
    JSON.parse(String(worker.call(inputs, parameters, "up").body));

  test("several prompts as an array, one as it is", () => {
    assert.deepEqual(told(['"a"', '"b"'], '{"n":2}'), { model: "up", prompt: ["a", "b"], n: 2 });
    assert.deepEqual(told(['"a"'], ""), { model: "up", prompt: "a" });
    assert.deepEqual(told(["[1,2]"], '{"$tokens":true}'), { model: "up", prompt: [1, 2] });
    assert.deepEqual(told(["[1]", "[2]"], '{"$tokens":true}'), { model: "up", prompt: [[1], [2]] });
  });

  test("parameters of Ferry's own API cannot choose the worker's model, or a stream", () => {
    const parameters = '{"max_tokens":3,"model":"dear","prompt":"other","stream":true,"user":"u"}';
    assert.deepEqual(told(['"a"'], parameters), { model: "up", prompt: "a", max_tokens: 3 });
  });

  test("the base of a worker's URL", () => {
    assert.equal(worker.basePath("/v1/completions"), "");
    assert.equal(worker.basePath("/api/v1/completions/"), "/api");
  });
});

describe("a reply becomes outputs", () => {
  const inputs = ['"a"', '"b"'];
  const choice = (index: unknown, text: unknown = `t${String(index)}`) => ({
    index,
    text,
    finish_reason: "stop",
  });
  const flaw = (body: unknown, parameters = ""): string | undefined =>
    worker.outputs(reply(body), inputs, parameters).flaw;

  test("n of them for each prompt, in whichever order they came", () => {
    const choices = [3, 0, 2, 1].map((index) => choice(index));
    const { outputs } = worker.outputs(reply({ choices }), inputs, '{"n":2}');
    const texts = outputs!.map((output) =>
      (JSON.parse(output) as Completion).choices.map(({ text }) => text),
    );
    assert.deepEqual(texts, [
      ["t0", "t1"],
      ["t2", "t3"],
    ]);
  });

  test("by position where no index is said", () => {
    const { outputs } = worker.outputs(reply({ choices: [{ text: "x" }, { text: "y" }] }), inputs, "");
    assert.deepEqual(
      rendered(read({ prompt: ["a", "b"] }), outputs!).choices.map(({ text }) => text),
      ["x", "y"],
    );
  });

  test("a choice keeps every other field, as it was written", () => {
    const text =
      '{"choices":[{"index":0,"text":"x","logprobs":{"token_logprobs":[-0.10,-1e-7]},"token_ids":[12345678901234567890]}]}';
    const { outputs } = worker.outputs(reply(text), ['"a"'], "");
    assert.match(outputs![0]!, /"logprobs":\{"token_logprobs":\[-0\.10,-1e-7\]\}/);
    assert.match(outputs![0]!, /"token_ids":\[12345678901234567890\]/);
    assert.doesNotMatch(outputs![0]!, /"index"/);
  });

  test("what cannot be matched without doubt is of no use", () => {
    assert.match(flaw({ choices: [choice(0)] })!, /1 choices for 2 prompts/);
    assert.match(flaw({ choices: [choice(0), choice(1)] }, '{"n":2}')!, /2 choices for 2 prompts with n = 2/);
    assert.match(flaw({ choices: [choice(0), choice(1), choice(2)] })!, /3 choices/);
    assert.match(flaw({ choices: [choice(0), choice(0)] })!, /index 0 twice/);
    assert.match(flaw({ choices: [choice(0), choice(2)] })!, /out of range/);
    assert.match(flaw({ choices: [choice(0), choice("1")] })!, /out of range/);
    assert.match(flaw({ choices: [choice(0), { text: "no index" }] })!, /some of its choices only/);
    assert.match(flaw({ choices: [choice(0), { index: 1 }] })!, /no choice at 1/);
    assert.match(flaw({ choices: [choice(0), choice(1, null)] })!, /no choice at 1/);
    assert.match(flaw({ choices: [choice(0), "text"] })!, /no choice at 1/);
    assert.match(flaw({ choices: {} })!, /not an array/);
    assert.match(flaw({ error: { message: "sorry" } })!, /has no "choices"/);
    assert.match(flaw('{"choices":[],"choices":[]}')!, /twice/);
    assert.match(flaw('{"choices":[{"text":"a","text":"b"},{"text":"c"}]}')!, /no choice at 0/);
  });

  test("whatever stands in the parameters of Ferry's own API, nothing is thrown", () => {
    for (const parameters of ['{"n":0}', '{"n":"x"}', '{"n":[]}', '{"echo":1}']) {
      assert.equal(
        worker.outputs(reply({ choices: [choice(0), choice(1)] }), inputs, parameters).outputs?.length,
        2,
      );
    }
  });

  test("tokens are shared out by prompt and by what was generated", () => {
    const usage = { prompt_tokens: 6, completion_tokens: 30, total_tokens: 36 };
    const texts = ["x".repeat(10), "x".repeat(20)];
    const parts = (prompts: string[], choices: string[], parameters: string): unknown[] =>
      worker
        .outputs(
          reply({ choices: choices.map((text, index) => ({ text, index })), usage }),
          prompts,
          parameters,
        )
        .outputs!.map((output) => {
          const { prompt_tokens, completion_tokens } = JSON.parse(output) as Completion["usage"];
          return [prompt_tokens, completion_tokens];
        });
    assert.deepEqual(parts(['"aa"', '"bbbb"'], texts, ""), [
      [2, 10],
      [4, 20],
    ]);
    // What only echoes the prompt was not generated.
    const echoed = [`${"p".repeat(100)}${texts[0]}`, `qq${texts[1]}`];
    assert.deepEqual(parts([`"${"p".repeat(100)}"`, '"qq"'], echoed, '{"echo":true}'), [
      [6, 10],
      [0, 20],
    ]);
  });
});

describe("outputs become the answer", () => {
  test("the answer of one request from two batches", () => {
    const first =
      '{"choices":[{"text":"x","finish_reason":"length"}],"prompt_tokens":3,"completion_tokens":4,"created":1690000000,"system_fingerprint":"fp_1"}';
    const second =
      '{"choices":[{"text":"y","finish_reason":"stop"}],"prompt_tokens":1,"completion_tokens":2}';
    assert.deepEqual(rendered(read({ prompt: ["a", "b"] }), [first, second]), {
      id: "cmpl-01ABC",
      object: "text_completion",
      created: 1_690_000_000,
      model: "m",
      system_fingerprint: "fp_1",
      choices: [
        { index: 0, text: "x", logprobs: null, finish_reason: "length" },
        { index: 1, text: "y", logprobs: null, finish_reason: "stop" },
      ],
      usage: { prompt_tokens: 4, completion_tokens: 6, total_tokens: 10 },
    });
  });

  test("of a function, the text alone will do", () => {
    const { created, choices, usage } = rendered(read({ prompt: "a" }), ['"hello"']);
    assert.equal(created, 1_700_000_000);
    assert.deepEqual(choices, [{ index: 0, text: "hello", logprobs: null, finish_reason: "stop" }]);
    assert.deepEqual(usage, { prompt_tokens: 0, completion_tokens: 0, total_tokens: 0 });
  });

  test("of a function, an object, and an array for n of them", () => {
    const one = { text: "x", finish_reason: "length", prompt_tokens: 2, completion_tokens: 3 };
    const { choices, usage } = rendered(read({ prompt: "a", n: 2 }), [JSON.stringify([one, one])]);
    const choice = { text: "x", logprobs: null, finish_reason: "length" };
    assert.deepEqual(choices, [
      { index: 0, ...choice },
      { index: 1, ...choice },
    ]);
    assert.deepEqual(usage, { prompt_tokens: 2, completion_tokens: 6, total_tokens: 8 });
  });

  test("what a function must not return is an error of ours, not an answer", () => {
    const failing = (body: object, output: string, why: RegExp): void =>
      assert.throws(
        () => read(body).render([output], "m"),
        (error) => error instanceof Refusal && error.code === "INFERENCE_FAILED" && why.test(error.message),
      );
    for (const output of [
      "7",
      "null",
      "true",
      "{}",
      '{"text":7}',
      '[["x"]]',
      '{"choices":[7]}',
      '{"choices":7}',
    ]) {
      failing({ prompt: "a" }, output, /neither a text/);
    }
    failing({ prompt: "a", n: 2 }, '"only one"', /1 completions for a prompt, not n = 2/);
    failing({ prompt: "a" }, '["x","y"]', /2 completions/);
    failing({ prompt: "a" }, "[]", /0 completions/);
  });
});

test("whatever rides together, each prompt gets the completions that are its own, and all tokens are told", () => {
  const request = fc.array(fc.string(), { minLength: 1, maxLength: 6 });
  const totals = fc.tuple(fc.nat(1_000_000), fc.nat(1_000_000));
  fc.assert(
    fc.property(
      fc.array(request, { minLength: 1, maxLength: 5 }),
      fc.integer({ min: 1, max: 4 }),
      totals,
      fc.integer(),
      (requests, n, [promptTokens, completionTokens], seed) => {
        const all = requests.map((prompt) => read({ prompt, n }));
        const inputs = all.flatMap((drafts) => drafts.inputs);
        const { parameters } = all[0]!;
        const { prompt } = JSON.parse(String(worker.call(inputs, parameters, "up").body)) as {
          prompt: unknown;
        };
        const prompts = (inputs.length === 1 ? [prompt] : prompt) as string[];
        const choices = prompts.flatMap((of, p) =>
          Array.from({ length: n }, (_, k) => ({ index: p * n + k, text: `${k} of ${of}` })),
        );
        choices.sort((a, b) => ((a.index * 7919) ^ seed) - ((b.index * 7919) ^ seed));
        const usage = { prompt_tokens: promptTokens, completion_tokens: completionTokens };
        const { outputs } = worker.outputs(reply({ choices, usage }), inputs, parameters);
        let from = 0;
        const counted = { prompt: 0, completion: 0 };
        for (const [at, drafts] of all.entries()) {
          const answer = rendered(drafts, outputs!.slice(from, (from += drafts.inputs.length)));
          const expected = requests[at]!.flatMap((of) =>
            Array.from({ length: n }, (_, k) => `${k} of ${of}`),
          );
          assert.deepEqual(
            answer.choices.map(({ text }) => text),
            expected,
          );
          assert.deepEqual(
            answer.choices.map(({ index }) => index),
            expected.map((_, index) => index),
          );
          counted.prompt += answer.usage.prompt_tokens;
          counted.completion += answer.usage.completion_tokens;
        }
        assert.deepEqual(counted, { prompt: promptTokens, completion: completionTokens });
      },
    ),
  );
});
