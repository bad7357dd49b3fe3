/** Ollama: what a request becomes, what a worker is told, what comes of its reply, what is answered. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { Refusal } from "../../../src/core/errors.ts";
import { longest, ollama, secondsOf } from "../../../src/gateway/protocol/ollama.ts";
import { tokensOf, vectorText } from "./servers/json-server.ts";
import { bodyOf, Spoken } from "./spoken.ts";

const spoken = new Spoken(ollama);
const PATH = "/api/embed";
const read = (body: unknown) => spoken.read(PATH, body);

describe("Ollama, a request:", () => {
  test("a text or texts", () => {
    assert.deepEqual(read({ model: "m", input: "one" }).inputs, ['"one"']);
    assert.deepEqual(read({ model: "m", input: ["one", ""] }).inputs, ['"one"', '""']);
    assert.equal(read({ model: "m:latest", input: "a" }).model, "m:latest");
  });

  test("what could change an answer keeps requests apart; keep_alive does not", () => {
    const of = (more: object): string => read({ model: "m", input: "a", ...more }).parameters;
    assert.equal(of({ keep_alive: "10m" }), of({ keep_alive: 0 }));
    assert.equal(of({ keep_alive: -1 }), of({}));
    assert.notEqual(of({ truncate: false }), of({}));
    assert.notEqual(of({ dimensions: 64 }), of({}));
    assert.notEqual(of({ options: { num_ctx: 512 } }), of({ options: { num_ctx: 1024 } }));
    assert.equal(of({ options: { a: 1, b: 2 } }), of({ options: { b: 2, a: 1 } }));
  });

  test("without a text, and by the older API, it goes to a worker as it came", () => {
    for (const input of ["", [], null, undefined])
      assert.deepEqual(spoken.any(PATH, { model: "m", input, keep_alive: 0 }), {
        unbatched: true,
        model: "m",
      });
    assert.deepEqual(spoken.any("/api/embeddings", { model: "m", prompt: "a" }), {
      unbatched: true,
      model: "m",
    });
  });

  test("what is refused", () => {
    for (const input of [1, {}, ["a", 1], [["a"]], true])
      spoken.refuses(PATH, { model: "m", input }, /string or a list of strings/);
    for (const keepAlive of ["soon", "5 m", "", [], {}, true, "5mm", "m"])
      spoken.refuses(PATH, { model: "m", input: "a", keep_alive: keepAlive }, /duration/);
    for (const field of ["MODEL", "Input", "Keep_Alive"])
      spoken.refuses(PATH, { model: "m", input: "a", [field]: "b" }, /in lower case/);
    spoken.refuses(PATH, { model: 1, input: "a" }, /"model" must be a string/);
    spoken.refuses(PATH, { model: "m", input: Array.from({ length: 2049 }, () => "a") }, /more than 2048/);
  });
});

describe("Ollama, keep_alive:", () => {
  test("durations as Go writes them, and seconds", () => {
    const cases: readonly [text: string, seconds: number | undefined][] = [
      ['"5m"', 300],
      ['"1h30m"', 5400],
      ['"1.5h"', 5400],
      ['"250ms"', 0.25],
      ["10", 10],
      ['"10"', 10],
      ["0", 0],
      ["-1", Infinity],
      ['"-1"', Infinity],
      ['"-1m"', Infinity],
      ['"5 m"', undefined],
      ['"5mm"', undefined],
      ['"m"', undefined],
      ['""', undefined],
      ["true", undefined],
      ["{}", undefined],
      ["[1]", undefined],
      [`"${"1h".repeat(40)}"`, undefined],
    ];
    for (const [text, seconds] of cases) assert.equal(secondsOf(text), seconds, text);
  });

  test("the longest of a batch is sent, as it was written", () => {
    assert.equal(longest(['"5m"', "400", '"6m"']), "400");
    assert.equal(longest(["10", "-1", '"24h"']), "-1");
    assert.equal(longest(["0", "0"]), "0");
    // Whoever says nothing wants the server's default, which only the server knows for sure.
    assert.equal(longest([undefined, '"10s"', "0"]), undefined);
    assert.equal(longest([undefined, '"10m"']), '"10m"');
    assert.equal(longest([undefined]), undefined);
  });

  test("it stands beside the text of a task and once in the call", () => {
    const long = read({ model: "m", input: ["a", "b"], keep_alive: "1h" });
    const short = read({ model: "m", input: "c", keep_alive: 5 });
    const plain = read({ model: "m", input: "d" });
    const inputs = [...long.inputs, ...short.inputs, ...plain.inputs];
    assert.deepEqual(spoken.call(inputs, plain.parameters, "bge-m3"), {
      path: PATH,
      body: '{"model":"bge-m3","input":["a","b","c","d"],"keep_alive":"1h"}',
    });
    assert.equal(spoken.call(plain.inputs, "").body, '{"model":"m","input":["d"]}');
    const more = read({ model: "m", input: "a", truncate: false }).parameters;
    assert.equal(spoken.call(['"a"'], more).body, '{"model":"m","input":["a"],"truncate":false}');
    // By Ferry's own API; Go would take it for the model.
    assert.equal(spoken.call(['"a"'], '{"MODEL":"other"}').body, '{"model":"m","input":["a"]}');
  });
});

describe("Ollama, an answer:", () => {
  const inputs = ['"a"', '"b"'];

  test("numbers as they were written, figures that sum to the call's", () => {
    const reply =
      '{"model":"bge","embeddings":[[0.10, 9007199254740993],[-1E-7]],' +
      '"total_duration":14143917,"load_duration":1019501,"prompt_eval_count":9}';
    const outputs = spoken.outputs(reply, inputs, "");
    const one = bodyOf(read({ model: "m:latest", input: "a" }).render([outputs[0]!], "m"));
    assert.match(one, /^\{"model":"m:latest","embeddings":\[\[0\.10, 9007199254740993\]\],/);
    const two = bodyOf(read({ input: ["a", "b"] }).render(outputs, "m"));
    assert.equal(two, reply.replace('"bge"', '"m"'));
  });

  test("replies that cannot be used", () => {
    assert.match(spoken.flaw({ embeddings: [[1]] }, inputs, ""), /1 embeddings for 2 inputs/);
    assert.match(spoken.flaw({ embeddings: [[1], [2], [3]] }, inputs, ""), /3 embeddings for 2/);
    assert.match(spoken.flaw({ embeddings: [[1], null] }, inputs, ""), /no embedding at 1/);
    assert.match(spoken.flaw({ embedding: [1] }, inputs, ""), /no "embeddings"/);
    assert.match(spoken.flaw('{"embeddings":[],"embeddings":[]}', inputs, ""), /twice/);
    assert.match(spoken.flaw([], inputs, ""), /not an object/);
    assert.match(spoken.flaw({ error: "out of memory" }, inputs, ""), /no "embeddings"/);
    assert.match(spoken.flaw('{"embeddings":[[1e999],[1]]}', inputs, ""), /beyond the range/);
  });

  test("figures that are none are left out of the sums", () => {
    const outputs = spoken.outputs(
      '{"embeddings":[[1],[2]],"total_duration":-5,"prompt_eval_count":"3"}',
      inputs,
      "",
    );
    assert.equal(
      bodyOf(read({ input: ["a", "b"] }).render(outputs, "m")),
      '{"model":"m","embeddings":[[1],[2]],"total_duration":0,"load_duration":0,"prompt_eval_count":0}',
    );
  });

  test("a function may return the vector alone", () => {
    const body = JSON.parse(bodyOf(read({ input: "a" }).render(["[1,2]"], "m"))) as { embeddings: unknown };
    assert.deepEqual(body.embeddings, [[1, 2]]);
    for (const wrong of ["null", "3", '{"vector":[1]}'])
      assert.throws(() => read({ input: "a" }).render([wrong], "m"), Refusal);
  });

  test("errors in its shape", () => {
    const { status, body } = ollama.client.fail(new Refusal("INPUT_REJECTED", "why"));
    assert.deepEqual([status, body], [400, '{"error":"why"}']);
    assert.equal(ollama.client.fail(new Refusal("NOT_FOUND", "why")).status, 404);
  });
});

test("Ollama: whatever the batch, an input gets its own vector, and the counts sum up", () => {
  const texts = fc.array(fc.string({ minLength: 1, maxLength: 20 }), { minLength: 1, maxLength: 8 });
  const keeps = fc.constantFrom(undefined, "10m", 0, -1);
  fc.assert(
    fc.property(
      fc.array(fc.tuple(texts, keeps), { minLength: 1, maxLength: 5 }),
      fc.nat(1e12),
      (callers, total) => {
        const drafts = callers.map(([input, keep_alive]) => read({ model: "m", input, keep_alive }));
        const inputs = drafts.flatMap((each) => each.inputs);
        const call = JSON.parse(spoken.call(inputs, "").body) as { input: string[] };
        const tokens = call.input.reduce((sum, text) => sum + tokensOf(text), 0);
        const reply =
          `{"embeddings":[${call.input.map((text) => vectorText(text)).join(",")}],` +
          `"total_duration":${total},"prompt_eval_count":${tokens}}`;
        const outputs = [...spoken.outputs(reply, inputs, "")];
        const sums = [0, 0];
        callers.forEach(([input], caller) => {
          const answer = bodyOf(drafts[caller]!.render(outputs.splice(0, input.length), "m"));
          assert(answer.includes(`"embeddings":[${input.map((text) => vectorText(text)).join(",")}]`));
          const told = JSON.parse(answer) as { total_duration: number; prompt_eval_count: number };
          sums[0]! += told.total_duration;
          sums[1]! += told.prompt_eval_count;
        });
        assert.deepEqual(sums, [total, tokens]);
      },
    ),
    { numRuns: 200 },
  );
});
