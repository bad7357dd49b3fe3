/** Ferry between clients and servers that speak TEI: the answers are those of the server, the calls are fewer. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { type Called, vectorText } from "../gateway/protocol/servers/json-server.ts";
import { DEFAULTS, POISON, TeiServer } from "../gateway/protocol/servers/tei-server.ts";
import { eventually, Ferry, type Answer } from "./harness.ts";

class Stage implements AsyncDisposable {
  readonly server: TeiServer;
  readonly ferry: Ferry;

  private constructor(server: TeiServer, ferry: Ferry) {
    this.server = server;
    this.ferry = ferry;
  }

  static async open(server: TeiServer, more: object = {}): Promise<Stage> {
    await server.listen();
    const backend = { kind: "http", protocol: "tei", workers: [`${server.url}/embed`] };
    const health = { askMs: 100 };
    const model = { name: "m", backend, health, maxWaitMs: 5, collapse: false, ...more };
    try {
      return new Stage(server, await Ferry.start({ models: [model] }));
    } catch (error) {
      await server[Symbol.asyncDispose]();
      throw error;
    }
  }

  post(path: string, body: unknown): Promise<Answer> {
    return this.ferry.post(body, {}, path);
  }

  /** All of them while the worker is busy with another one, so that they meet in the queue. */
  async together(
    requests: readonly (readonly [path: string, body: unknown])[],
    tasks: number,
  ): Promise<Answer[]> {
    const { server, ferry } = this;
    const gate = Promise.withResolvers<void>();
    server.busy = gate.promise;
    const posts = (): number => server.calls.filter(({ method }) => method === "POST").length;
    const before = posts();
    const [path] = requests[0]!;
    const other = `busy ${before}`;
    const first = this.post(path, path === "/rerank" ? { query: "0", texts: [other] } : { inputs: other });
    try {
      await eventually(() => posts() > before);
      const answers = requests.map(([each, body]) => this.post(each, body));
      await ferry.healthy(({ queue_depth }) => queue_depth >= tasks);
      server.busy = undefined;
      gate.resolve();
      return await Promise.all(answers);
    } finally {
      gate.resolve();
      await first;
    }
  }

  /** The same body as from the server itself. */
  async same(answer: Answer, path: string, body: unknown): Promise<void> {
    const direct = await this.server.ask(path, body);
    assert.deepEqual([answer.status, answer.text], [direct.status, direct.text], JSON.stringify(body));
  }

  /** Embeds texts, one or many to a call, and checks every vector. */
  async embedsAll(inputs: readonly string[]): Promise<void> {
    const answer = await this.post("/embed", { inputs });
    assert.equal(answer.status, 200, answer.text);
    assert.equal(answer.text, `[${inputs.map((text) => vectorText(text, DEFAULTS)).join(",")}]`);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.ferry[Symbol.asyncDispose]();
    await this.server[Symbol.asyncDispose]();
  }
}

const bodiesOf = (calls: readonly Called[]) =>
  calls.map(({ text }) => JSON.parse(text) as { inputs: unknown[] });

describe("TEI, embeddings:", () => {
  test("the server's answers, in fewer calls, by every form and route", async () => {
    await using stage = await Stage.open(new TeiServer());
    const requests: [string, unknown][] = [];
    for (let n = 0; n < 24; n++) {
      requests.push(["/embed", { inputs: `text ${n}` }]);
      requests.push(["/embed", { inputs: [`one ${n}`, `two ${n}`], normalize: false }]);
    }
    requests.push(["/embed", { inputs: [1, 2, 3] }], ["/embed", { inputs: ["a", [4, 5]] }]);
    requests.push(["/embed_sparse", { inputs: ["a", "b c"] }], ["/embed_all", { inputs: ["a b", "c"] }]);
    const answers = await stage.together(requests, 24 + 48 + 1 + 2 + 4);
    for (const [at, answer] of answers.entries()) await stage.same(answer, ...requests[at]!);
    // 24, 48, 3, 2 and 2 inputs of five kinds, and 32 at most in a call.
    const direct = requests.length;
    const calls = stage.server.sizes.length - direct - 1;
    assert(calls <= 8, `${calls} calls`);
    assert.equal(stage.server.tooMany, 0);
    assert.match(answers[0]!.header("x-compute-tokens"), /^\d+$/);
    assert.match(answers[0]!.header("x-request-id"), /./);
  });

  test("the tokens that callers are told sum to what the server counted", async () => {
    await using stage = await Stage.open(new TeiServer());
    const answers = await stage.together(
      ["a", "b c d", "e f"].map((inputs) => ["/embed", { inputs }] as const),
      3,
    );
    const told = answers.map((answer) => Number(answer.header("x-compute-tokens")));
    assert.equal(told[0]! + told[1]! + told[2]!, 3 + 5 + 4);
  });

  test("the cap is learned, also when it changes; too many is nobody's fault", async () => {
    const server = new TeiServer();
    server.maxClientBatchSize = 8;
    await using stage = await Stage.open(server, { maxBatchSize: 64 });
    await eventually(() => server.callsOf("/info").length > 0);
    const inputs = Array.from({ length: 100 }, (_, at) => `text ${at}`);
    await stage.embedsAll(inputs);
    assert(Math.max(...server.sizes) <= 8);
    server.maxClientBatchSize = 3;
    await stage.embedsAll(inputs);
    await eventually(async () => {
      const before = server.tooMany;
      await stage.embedsAll(inputs);
      return server.tooMany === before;
    });
    // Until it was asked, batches were too large, and were cut.
    assert.equal((await stage.ferry.health()).dead_letters, 0);
  });

  test("a text that the server refuses fails alone, in TEI's shape", async () => {
    await using stage = await Stage.open(new TeiServer());
    const requests = ["a", POISON, "b", "c"].map((inputs) => ["/embed", { inputs }] as const);
    const answers = await stage.together(requests, 4);
    assert.deepEqual(
      answers.map(({ status }) => status),
      [200, 422, 200, 200],
    );
    for (const at of [0, 2, 3]) await stage.same(answers[at]!, ...requests[at]!);
    const { error, error_type: type } = JSON.parse(answers[1]!.text) as Record<string, string>;
    assert.equal(type, "Validation");
    assert.match(error!, /Tokenization error/);
    const wrong = await stage.post("/embed", { inputs: [] });
    assert.deepEqual(
      [wrong.status, (JSON.parse(wrong.text) as Record<string, string>)["error_type"]],
      [422, "Validation"],
    );
  });

  test("health and info, at the root and under the model's own base", async () => {
    await using stage = await Stage.open(new TeiServer());
    for (const base of ["", "/models/m"]) {
      await eventually(async () => (await stage.ferry.get(`${base}/health`)).status === 200);
      const info = await stage.ferry.get(`${base}/info`);
      assert.equal(info.status, 200);
      assert.equal(
        typeof (JSON.parse(info.text) as Record<string, unknown>)["max_client_batch_size"],
        "number",
      );
      await stage.same(await stage.post(`${base}/embed`, { inputs: "a" }), "/embed", { inputs: "a" });
    }
    stage.server.well = false;
    await eventually(async () => (await stage.ferry.get("/health")).status === 503);
    assert.equal((await stage.ferry.get("/health")).text, '{"error":"unhealthy","error_type":"Unhealthy"}');
  });
});

describe("TEI, classifiers and re-rankers:", () => {
  test("/predict in every form", async () => {
    await using stage = await Stage.open(new TeiServer("classifier"));
    const forms = ["a", ["a"], ["a", "b"], [["a"]], [["a"], ["b", "c"]], [["x"], ["y"], ["z"]]];
    const requests = forms.map((inputs) => ["/predict", { inputs }] as const);
    const answers = await stage.together(requests, 9);
    for (const [at, answer] of answers.entries()) await stage.same(answer, ...requests[at]!);
    const merged = bodiesOf(stage.server.callsOf("/predict")).map(({ inputs }) => inputs.length);
    assert(merged.includes(9), `calls of ${merged.join(", ")}`);
  });

  test("/rerank: callers with different queries share calls, and get the server's own ranks", async () => {
    await using stage = await Stage.open(new TeiServer("reranker"));
    const texts = Array.from({ length: 5 }, (_, at) => `text ${at}`);
    const requests = Array.from({ length: 6 }, (_, n) => {
      const body = { query: `query ${n}`, texts: texts.slice(n % 3), return_text: n % 2 === 0 };
      return ["/rerank", body] as const;
    });
    const answers = await stage.together(requests, 2 * (5 + 4 + 3));
    assert.equal(stage.server.callsOf("/rerank").length, 0);
    assert(stage.server.callsOf("/predict").length <= 3);
    for (const [at, answer] of answers.entries()) await stage.same(answer, ...requests[at]!);
    const raw = { query: "q", texts, raw_scores: true };
    await stage.same(await stage.post("/rerank", raw), "/rerank", raw);
    await stage.same(await stage.post("/", raw), "/rerank", raw);
  });

  test("/rerank: a query that would be copied into too many tasks is too large for good", async () => {
    await using stage = await Stage.open(new TeiServer("reranker"));
    const texts = Array.from({ length: 500 }, () => "t");
    const answer = await stage.post("/rerank", { query: "q".repeat(800_000), texts });
    assert.equal(answer.status, 413, answer.text);
    const { error, error_type: type } = JSON.parse(answer.text) as Record<string, string>;
    assert.equal(type, "Validation");
    assert.match(error!, /800002 characters with 500 texts makes inputs of 400002500 bytes; at most 8388608/);
    assert.equal(answer.headers["retry-after"], undefined);
    assert.equal(stage.server.callsOf("/predict").length, 0);
  });

  test("/rerank in front of a classifier fails as the server's own would", async () => {
    await using stage = await Stage.open(new TeiServer("classifier"), { retry: { max: 0 } });
    const answer = await stage.post("/rerank", { query: "q", texts: ["a", "b"] });
    assert.equal(answer.status, 424, answer.text);
    assert.equal((JSON.parse(answer.text) as Record<string, string>)["error_type"], "Backend");
  });
});

describe("TEI, servers that misbehave:", () => {
  const wrongs: readonly [name: string, (values: unknown[]) => string][] = [
    ["one too few", (values) => JSON.stringify(values.slice(1))],
    ["one too many", (values) => JSON.stringify([...values, values[0]])],
    ["nothing", () => "[]"],
    ["flat", (values) => JSON.stringify(values.flat())],
    ["nulls", (values) => JSON.stringify(values.map(() => null))],
    ["NaN", (values) => `[${values.map(() => "[NaN]").join(",")}]`],
    ["an object", (values) => JSON.stringify({ outputs: values })],
    ["a page", () => "<html>busy</html>"],
  ];

  test("nobody gets another's answer, whatever comes back, and all are answered once it behaves", async () => {
    await using stage = await Stage.open(new TeiServer());
    const { server } = stage;
    for (const [name, wrong] of wrongs) {
      server.instead = ({ text, method }) => {
        const inputs = method === "POST" ? (JSON.parse(text) as { inputs: string[] }).inputs : [];
        // Only the first one: then it is well again.
        if (inputs.length < 2) return undefined;
        server.instead = undefined;
        return { status: 200, text: wrong(inputs.map((input) => [input.length, 7])) };
      };
      const requests = Array.from({ length: 6 }, (_, n) => ["/embed", { inputs: `${name} ${n}` }] as const);
      const answers = await stage.together(requests, 6);
      for (const [at, answer] of answers.entries()) await stage.same(answer, ...requests[at]!);
    }
  });
});
