/** TEI: what a request becomes, what a worker is told, what comes of its reply, what is answered. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { Refusal } from "../../../src/core/errors.ts";
import { tei } from "../../../src/gateway/protocol/tei.ts";
import { tokensOf, vectorText } from "./servers/json-server.ts";
import { bodyOf, headersOf, Spoken } from "./spoken.ts";

const spoken = new Spoken(tei);

describe("TEI, /embed and its kin:", () => {
  test("a text, tokens, texts and tokens side by side", () => {
    const inputs = (value: unknown): readonly string[] => spoken.read("/embed", { inputs: value }).inputs;
    assert.deepEqual(inputs("one"), ['"one"']);
    assert.deepEqual(inputs(["one", "two"]), ['"one"', '"two"']);
    assert.deepEqual(inputs([1, 2, 3]), ["[1,2,3]"]);
    assert.deepEqual(inputs(["one", [1, 2]]), ['"one"', "[1,2]"]);
    assert.equal(spoken.read("/embed", { inputs: "a" }).model, undefined);
  });

  test("what says the same shares a batch, what could change an answer does not", () => {
    const of = (more: object, path = "/embed"): string =>
      spoken.read(path, { inputs: "a", ...more }).parameters;
    assert.equal(of({ normalize: true, truncation_direction: "Right", truncate: null }), of({}));
    assert.notEqual(of({ normalize: false }), of({}));
    // Left out it is what the server was started with.
    assert.notEqual(of({ truncate: false }), of({}));
    assert.notEqual(of({ prompt_name: "query" }), of({}));
    assert.notEqual(of({ dimensions: 256 }), of({}));
    assert.notEqual(of({}, "/embed_sparse"), of({}));
    assert.notEqual(of({}, "/embed_all"), of({}));
  });

  test("what is refused", () => {
    for (const path of ["/embed", "/embed_all", "/embed_sparse", "/"]) {
      spoken.refuses(path, {}, /missing/);
      spoken.refuses(path, { inputs: [] }, /cannot be empty/);
      spoken.refuses(path, { inputs: [[]] }, /strings or lists of tokens/);
      spoken.refuses(path, { inputs: [["a"]] }, /strings or lists of tokens/);
      spoken.refuses(path, { inputs: ["a", 1] }, /strings or lists of tokens/);
      spoken.refuses(path, { inputs: 1 }, /string or a list/);
      spoken.refuses(path, { inputs: "a", truncate: "yes" }, /"truncate" must be true or false/);
      spoken.refuses(path, { inputs: "a", $route: "rerank" }, /unknown field/);
      spoken.refuses(path, { inputs: Array.from({ length: 2049 }, () => "a") }, /more than 2048/);
      spoken.refuses(path, '{"inputs":"a","inputs":"b"}', /twice/);
    }
  });

  test("a call has the route's path, the inputs, and the fields that are TEI's", () => {
    const { parameters } = spoken.read("/embed_sparse", { inputs: "a", truncate: true });
    assert.deepEqual(spoken.call(['"a"', "[1,2]"], parameters), {
      path: "/embed_sparse",
      body: '{"inputs":["a",[1,2]],"truncate":true}',
    });
    assert.deepEqual(spoken.call(['"a"'], ""), { path: "/embed", body: '{"inputs":["a"]}' });
    // Tasks of Ferry's own API may say anything, and choose no path.
    assert.equal(spoken.call(['"a"'], '{"$route":"../admin"}').path, "/embed");
    assert.equal(spoken.call(['"a"'], '{"$route":"__proto__"}').path, "/embed");
    assert.equal(spoken.call(['"a"'], '{"x":{"$route":"predict"}}').path, "/embed");
  });

  test("the text of a number is not touched, in any of the three", () => {
    const replies = {
      "/embed": "[ [0.30000001192092896 , -0.0,1E-7], [9007199254740993]]",
      "/embed_all": "[[[0.1],[0.20]],[[9007199254740993]]]",
      "/embed_sparse": '[[{"index":1,"value":1.10}],[]]',
    };
    for (const [path, reply] of Object.entries(replies)) {
      const drafts = spoken.read(path, { inputs: ["a", "b"] });
      const { inputs, parameters } = drafts;
      const answer = bodyOf(drafts.render(spoken.outputs(reply, inputs, parameters), "m"));
      assert.equal(answer.replaceAll(" ", ""), reply.replaceAll(" ", ""));
    }
  });

  test("replies that cannot be used", () => {
    const { inputs, parameters } = spoken.read("/embed", { inputs: ["a", "b"] });
    assert.match(spoken.flaw([[1]], inputs, parameters), /1 values for 2 inputs/);
    assert.match(spoken.flaw([[1], [2], [3]], inputs, parameters), /3 values for 2/);
    assert.match(spoken.flaw([[1], null], inputs, parameters), /no embedding at 1/);
    assert.match(spoken.flaw([1, 2], inputs, parameters), /no embedding at 0/);
    assert.match(spoken.flaw([[1], [null]], inputs, parameters), /no embedding at 1/);
    assert.match(spoken.flaw("[[1e999],[2]]", inputs, parameters), /beyond the range/);
    assert.match(spoken.flaw({ embeddings: [] }, inputs, parameters), /not an array/);
    assert.match(spoken.flaw('"a"', inputs, parameters), /not an array/);
  });

  test("a function may return the vector alone, or base64; anything else is an error and no answer", () => {
    const drafts = spoken.read("/embed", { inputs: ["a", "b"] });
    const base64 = Buffer.from(Float32Array.of(0.5, -2).buffer).toString("base64");
    assert.equal(bodyOf(drafts.render(["[1,2.50]", `"${base64}"`], "m")), "[[1,2.50],[0.5,-2]]");
    assert.deepEqual(headersOf(drafts.render(["[1]", "[2]"], "m")), {});
    assert.throws(
      () => drafts.render(['{"wrong":1}', "[1]"], "m"),
      (error) => error instanceof Refusal && error.code === "INFERENCE_FAILED",
    );
    const odd = '{"embedding":[1],"note":"]}","more":[2]}';
    assert.equal(
      bodyOf(drafts.render([odd, '{"note":"\\"embedding\\":[","embedding":[3]}'], "m")),
      "[[1],[3]]",
    );
  });
});

describe("TEI, /predict:", () => {
  const inputs = (value: unknown): readonly string[] => spoken.read("/predict", { inputs: value }).inputs;

  test("two texts in a list are one pair, and only lists of lists are several", () => {
    assert.deepEqual(inputs("a"), ['["a"]']);
    assert.deepEqual(inputs(["a"]), ['["a"]']);
    assert.deepEqual(inputs(["a", "b"]), ['["a","b"]']);
    assert.deepEqual(inputs([["a"], ["b", "c"]]), ['["a"]', '["b","c"]']);
    for (const wrong of [
      ["a", "b", "c"],
      [[]],
      [["a", "b", "c"]],
      [["a"], "b"],
      ["a", ["b"]],
      [1],
      {},
      [[1]],
    ])
      spoken.refuses("/predict", { inputs: wrong }, /pair of strings/);
    spoken.refuses("/predict", { inputs: [] }, /cannot be empty/);
    spoken.refuses("/predict", {}, /missing/);
  });

  test("a single one is answered with its list, several with a list of lists", () => {
    const reply = '[[{"score":0.10,"label":"x"},{"score":0.05,"label":"y"}]]';
    for (const [value, answer] of [
      ["a", reply.slice(1, -1)],
      [["a", "b"], reply.slice(1, -1)],
      [[["a"]], reply],
    ] as const) {
      const drafts = spoken.read("/predict", { inputs: value });
      const outputs = spoken.outputs(reply, drafts.inputs, drafts.parameters);
      assert.equal(bodyOf(drafts.render(outputs, "m")), answer);
    }
  });

  test("a worker is told lists only, also for inputs that came by Ferry's own API", () => {
    const parameters = '{"$route":"predict"}';
    const { path, body } = spoken.call(['"a"', '"b"', '["c","d"]'], parameters);
    assert.deepEqual([path, body], ["/predict", '{"inputs":[["a"],["b"],["c","d"]]}']);
    // As many objects as inputs, but it is one answer: nobody gets a label of somebody else.
    const flat = [
      { score: 1, label: "x" },
      { score: 0, label: "y" },
    ];
    assert.match(spoken.flaw(flat, ['["a"]', '["b"]'], parameters), /no predictions at 0/);
  });
});

describe("TEI, /rerank:", () => {
  const body = { query: "q", texts: ["a", "b", "c"] };
  const predictions = (...scores: string[]): string =>
    `[${scores.map((score) => `[{"score":${score},"label":"LABEL_0"}]`).join(",")}]`;

  test("each text is a pair, and texts of all queries share calls of /predict", () => {
    const one = spoken.read("/rerank", { ...body, return_text: true });
    const other = spoken.read("/rerank", { query: "Q", texts: ["z"], raw_scores: false });
    assert.deepEqual(one.inputs, ['["q","a"]', '["q","b"]', '["q","c"]']);
    assert.equal(one.parameters, other.parameters);
    assert.notEqual(one.parameters, spoken.read("/rerank", { ...body, raw_scores: true }).parameters);
    const call = spoken.call([...one.inputs, ...other.inputs], one.parameters);
    assert.deepEqual(call, {
      path: "/predict",
      body: '{"inputs":[["q","a"],["q","b"],["q","c"],["Q","z"]]}',
    });
    assert.deepEqual(spoken.read("/", body).inputs, one.inputs);
  });

  test("ranks by score, of equal scores the last first, scores as they were written", () => {
    const drafts = spoken.read("/rerank", { ...body, return_text: true });
    const { inputs, parameters } = drafts;
    const outputs = spoken.outputs(predictions("0.50", "-1e-3", "0.5"), inputs, parameters);
    assert.equal(
      bodyOf(drafts.render(outputs, "m")),
      '[{"index":2,"text":"c","score":0.5},{"index":0,"text":"a","score":0.50},{"index":1,"text":"b","score":-1e-3}]',
    );
    const bare = spoken.read("/rerank", body).render(["0.1", '{"score":0.3}', '[{"score":0.2}]'], "m");
    assert.equal(bodyOf(bare), '[{"index":1,"score":0.3},{"index":2,"score":0.2},{"index":0,"score":0.1}]');
  });

  test("a classifier's answer is no rank", () => {
    const drafts = spoken.read("/rerank", { query: "q", texts: ["a"] });
    const { inputs, parameters } = drafts;
    const two = [
      [
        { score: 1, label: "x" },
        { score: 0, label: "y" },
      ],
    ];
    assert.match(spoken.flaw(two, inputs, parameters), /is it a re-ranker/);
    assert.throws(() => drafts.render([JSON.stringify(two[0])], "m"), Refusal);
    assert.throws(() => drafts.render(['"high"'], "m"), Refusal);
  });

  test("what is refused", () => {
    spoken.refuses("/rerank", { texts: ["a"] }, /`query` is missing/);
    spoken.refuses("/rerank", { query: 1, texts: ["a"] }, /"query" must be a string/);
    spoken.refuses("/rerank", { query: "q" }, /list of strings/);
    spoken.refuses("/rerank", { query: "q", texts: ["a", 1] }, /list of strings/);
    spoken.refuses("/rerank", { query: "q", texts: [] }, /cannot be empty/);
    spoken.refuses("/rerank", { query: "q", texts: ["a"], return_text: 1 }, /true or false/);
  });
});

describe("TEI, whatever the batch:", () => {
  const texts = fc.array(fc.string({ unit: "grapheme", minLength: 1, maxLength: 12 }), {
    minLength: 1,
    maxLength: 5,
  });

  test("what went in for an input comes out for it, and tokens sum to what the worker counted", () => {
    fc.assert(
      fc.property(fc.array(texts, { minLength: 1, maxLength: 6 }), fc.nat(7), (callers, turn) => {
        const drafts = callers.map((inputs) => spoken.read("/embed", { inputs }));
        const tasks = drafts.flatMap(({ inputs }, caller) =>
          inputs.map((input, at) => ({ caller, at, input })),
        );
        // In another order than they came, and in two batches.
        const mixed = [...tasks.slice(turn % tasks.length), ...tasks.slice(0, turn % tasks.length)];
        const outputs = callers.map((): string[] => []);
        let counted = 0;
        for (const batch of [mixed.slice(0, 3), mixed.slice(3)].filter(({ length }) => length > 0)) {
          const inputs = batch.map(({ input }) => input);
          const sent = (JSON.parse(spoken.call(inputs, drafts[0]!.parameters).body) as { inputs: string[] })
            .inputs;
          const tokens = sent.reduce((sum, text) => sum + tokensOf(text), 0);
          counted += tokens;
          const reply = `[${sent.map((text) => vectorText(text)).join(",")}]`;
          const headers = { "x-compute-tokens": String(tokens) };
          const got = spoken.outputs(reply, inputs, drafts[0]!.parameters, headers);
          batch.forEach(({ caller, at }, index) => (outputs[caller]![at] = got[index]!));
        }
        let told = 0;
        callers.forEach((inputs, caller) => {
          const answer = drafts[caller]!.render(outputs[caller]!, "m");
          assert.equal(bodyOf(answer), `[${inputs.map((text) => vectorText(text)).join(",")}]`);
          told += Number(headersOf(answer)["x-compute-tokens"]);
        });
        assert.equal(told, counted);
      }),
      { numRuns: 200 },
    );
  });
});

describe("TEI, about itself:", () => {
  const known = (ready: boolean) => ({ name: "m", protocols: ["tei"] as const, ready });
  const tell = (path: string) => tei.client.about.find((each) => each.path === path)!;
  const about = (ready: boolean) => ({
    models: [known(ready)],
    model: known(ready),
    ready: true,
    version: "1",
    maxInputs: 2048,
  });

  test("/health is open to probes: 200 and nothing, or 503 in TEI's words", () => {
    const route = tell("/health");
    assert.equal(route.open, true);
    const well = route.tell(about(true));
    assert(typeof well === "object" && well.status === undefined && bodyOf(well) === "");
    const ill = route.tell(about(false));
    assert(typeof ill === "object" && ill.status === 503);
    assert.equal(bodyOf(ill), '{"error":"unhealthy","error_type":"Unhealthy"}');
    const several = { models: [known(false), known(true)], model: undefined, version: "1", maxInputs: 2048 };
    assert.equal((route.tell({ ...several, ready: true }) as { status?: number }).status, undefined);
    assert.equal((route.tell({ ...several, ready: false }) as { status?: number }).status, 503);
  });

  test("/info is the worker's, or what we know", () => {
    const route = tell("/info");
    assert.equal(route.tell(about(true)), "worker");
    assert.equal(route.tell({ ...about(true), model: undefined }), undefined);
    assert.equal((JSON.parse(bodyOf(route.fallback!(about(true)))) as { model_id: string }).model_id, "m");
  });

  test("how many inputs a server takes", () => {
    const { info, maxBatchSize } = tei.worker;
    assert.equal(maxBatchSize, 32);
    assert.equal(info!.path, "/info");
    const of = (size: unknown) => info!.maxBatchSize(JSON.stringify({ max_client_batch_size: size }));
    assert.equal(of(128), 128);
    for (const wrong of [0, -1, 1.5, "8", null, 1e12, undefined]) assert.equal(of(wrong), undefined);
    for (const wrong of ["[]", "null", '"max_client_batch_size"', "3"])
      assert.equal(info!.maxBatchSize(wrong), undefined);
  });

  test("errors in its shape, with its statuses", () => {
    const of = (code: ConstructorParameters<typeof Refusal>[0]) => {
      const { status, body } = tei.client.fail(new Refusal(code, "why"));
      return [status, (JSON.parse(String(body)) as { error_type: string }).error_type];
    };
    assert.deepEqual(of("INVALID_REQUEST"), [422, "Validation"]);
    assert.deepEqual(of("INPUT_REJECTED"), [422, "Validation"]);
    assert.deepEqual(of("PAYLOAD_TOO_LARGE"), [413, "Validation"]);
    assert.deepEqual(of("SERVICE_OVERLOADED"), [429, "Overloaded"]);
    assert.deepEqual(of("INFERENCE_FAILED"), [424, "Backend"]);
    assert.deepEqual(of("DEADLINE_EXCEEDED"), [504, "Backend"]);
  });

  test("a worker's URL may end in any of its routes", () => {
    for (const path of ["/", "", "/embed", "/rerank", "/embed_sparse"])
      assert.equal(tei.worker.basePath(path), "");
    assert.equal(tei.worker.basePath("/tei/embed_all/"), "/tei");
  });
});
