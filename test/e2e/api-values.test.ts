/** What clients send reaches the model as they wrote it, and back; models, default mode, /openapi.json. */
import assert from "node:assert/strict";
import { after, before, beforeEach, describe, test } from "node:test";
import { assertError, Ferry } from "./harness.ts";
import { echo, stubModel, StubWorker } from "./stub-worker.ts";

let stub: StubWorker;
let ferry: Ferry;

before(async () => {
  stub = await StubWorker.listen();
  ferry = await Ferry.start({ models: [stubModel([stub])] });
});
after(async () => {
  await ferry?.[Symbol.asyncDispose]();
  await stub?.[Symbol.asyncDispose]();
});
beforeEach(() => {
  stub.behave = echo;
  stub.calls.length = 0;
});

describe("texts pass unchanged, both ways", () => {
  const texts = {
    "a 64-bit integer": "9007199254740993",
    "the largest 64-bit integers": "[9223372036854775807,-9223372036854775808,18446744073709551615]",
    "a float that is whole": "1.0",
    "a small exponent": "1e-7",
    "minus zero and odd exponents": "[-0,-0.0,1E+2,1.50,0.1e1]",
    "the edges of doubles": "[1.7976931348623157e308,5e-324,4.9e-324]",
    "escapes as written": String.raw`"\u0041\/\u00e9\ud83d\ude00"`,
    "control characters, escaped": String.raw`"\u0000\u0001\u001b[31m\b\f\n\r\t\u007f"`,
    "DEL and C1, raw": '"\u007f\u0085\u009f"',
    "line separators": '"\u2028\u2029\ufeff"',
    unicode: '"Zoë 日本語 🛳️ 👩‍👩‍👧 עברית \u0301 \u{10ffff}"',
    "null, true and empty things": '[null,true,false,"",[],{},{"":""}]',
    "key order and odd keys": '{"b":1,"a":2,"10":3,"2":4,"constructor":5,"toString":6,"hasOwnProperty":7}',
  };
  for (const [name, text] of Object.entries(texts)) {
    test(name, async () => {
      stub.behave = (call) => call.reply(200, `{"outputs":[${text}]}`);
      const answer = await ferry.post(`{"input":${text}}`);
      assert.equal(answer.status, 200, answer.text);
      assert.ok(stub.calls[0]!.body.includes(`[${text}]`), `the worker got ${stub.calls[0]!.body}`);
      assert.ok(answer.text.includes(`"output":${text},`), `the caller got ${answer.text}`);
      const polled = await ferry.get(`/v1/result/${answer.json.task_id}`);
      assert.ok(polled.text.includes(`"output":${text}`), `the poll got ${polled.text}`);
    });
  }

  test("numbers in parameters", async () => {
    await ferry.post('{"input":"p","parameters":{"seed":9007199254740993,"t":1.0,"e":1e-7}}');
    for (const text of ['"seed":9007199254740993', '"t":1.0', '"e":1e-7']) {
      assert.ok(stub.calls[0]!.body.includes(text), stub.calls[0]!.body);
    }
  });

  test("two integers that doubles cannot tell apart are two inputs", async () => {
    stub.behave = (call) => call.reply(200, call.body.replace('"inputs"', '"outputs"'));
    const [even, odd] = ["9007199254740992", "9007199254740993"];
    assert.ok((await ferry.post(`{"input":[${even}]}`)).text.includes(`[${even}]`));
    const answer = await ferry.post(`{"input":[${odd}]}`);
    assert.ok(answer.text.includes(`[${odd}]`), answer.text);
    assert.equal(answer.json.metadata!["cached"], false);
  });

  test("1 and 1.0 may share an answer or not, but each gets a right one", async () => {
    stub.behave = (call) => call.reply(200, call.body.replace('"inputs"', '"outputs"'));
    for (const text of ["77", "77.0", "7.7e1"]) {
      assert.equal((await ferry.post(`{"input":${text}}`)).json.output, 77);
    }
  });

  test("white space around and inside the body is no error", async () => {
    const answer = await ferry.post(' \r\n\t{ "input" :\t[ 1 ,\n 2 ] } \n');
    assert.deepEqual(answer.json.output, { of: [1, 2] });
  });

  test("a body of almost the limit passes", async () => {
    const input = "x".repeat(1_048_576 - '{"input":""}'.length);
    const answer = await ferry.post({ input });
    assert.equal(answer.status, 200, answer.text.slice(0, 200));
    assert.deepEqual(answer.json.output, { of: input });
  });

  test("a body in small chunks, cut inside a character, is the same body", async () => {
    const input = "Zoë 日本語 🛳️ slow";
    const bytes = Buffer.from(JSON.stringify({ input }));
    const chunks = async function* () {
      for (const byte of bytes) yield Buffer.of(byte);
    };
    const answer = await fetch(`${ferry.url}/v1/inference`, {
      method: "POST",
      body: ReadableStream.from(chunks()),
      duplex: "half",
      headers: { "content-type": "application/json" },
    });
    assert.deepEqual(((await answer.json()) as { output: unknown }).output, { of: input });
  });

  test("content types of JSON", async () => {
    for (const type of [
      "application/json;charset=utf-8",
      "Application/JSON",
      'application/json; charset="UTF-8"',
    ]) {
      assert.equal((await ferry.post({ input: type }, { "content-type": type })).status, 200, type);
    }
  });
});

describe("models", () => {
  test("with one model the name may be left out; an unknown one is 400 and named", async () => {
    assert.equal((await ferry.post({ input: "a" })).status, 200);
    assert.equal((await ferry.post({ input: "a", model: "stub" })).status, 200);
    const body = assertError(await ferry.post({ input: "a", model: "stbu" }), 400, "INVALID_REQUEST");
    assert.match(body.message!, /stbu/);
    for (const model of ["__proto__", "constructor", ""]) {
      assertError(await ferry.post({ input: "a", model }), 400, "INVALID_REQUEST");
    }
  });

  test("with two models the name must be there, and answers never cross", async () => {
    await using second = await StubWorker.listen((call) => call.outputs(call.inputs.map(() => "second")));
    const models = [stubModel([stub], { name: "one" }), stubModel([second], { name: "two" })];
    await using both = await Ferry.start({ models });
    const body = assertError(await both.post({ input: "a" }), 400, "INVALID_REQUEST");
    assert.match(body.message!, /model/);
    assert.deepEqual(await both.infer("same", { model: "one" }), { of: "same" });
    assert.deepEqual(await both.infer("same", { model: "two" }), "second");
  });
});

test("api.defaultMode async answers 202 unless the client asks to wait", async () => {
  await using lazy = await Ferry.start({ models: [stubModel([stub])], api: { defaultMode: "async" } });
  const answer = await lazy.post({ input: "lazy" });
  assert.equal(answer.status, 202, answer.text);
  assert.equal((await lazy.result(answer.json.task_id!)).status, "SUCCESS");
  const waiting = await lazy.post({ input: "lazy, but waiting" }, { prefer: "wait=5" });
  assert.equal(waiting.status, 200, waiting.text);
});

describe("/openapi.json", () => {
  type Parameters = readonly { readonly name: string; readonly in: string }[];
  type Operation = { readonly responses: object; readonly parameters?: Parameters };
  type Path = { readonly parameters?: Parameters } & { readonly [method: string]: Operation | Parameters };
  type Document = {
    readonly openapi: string;
    readonly info: { readonly title: string; readonly version: string };
    readonly paths: Readonly<Record<string, Path>>;
  };

  test("is a whole OpenAPI 3.1 document of the public routes", async () => {
    const answer = await ferry.get("/openapi.json");
    assert.equal(answer.status, 200);
    assert.match(answer.header("content-type"), /^application\/json\b/);
    const document = JSON.parse(answer.text) as Document;
    assert.match(document.openapi, /^3\.1\./);
    assert.ok(document.info.title.length > 0 && document.info.version.length > 0);
    const wanted = ["/v1/inference", "/v1/result/{task_id}", "/api/inference", "/healthz", "/readyz"];
    for (const path of wanted) assert.ok(document.paths[path], `${path} is missing`);
    for (const [path, { parameters: shared = [], ...operations }] of Object.entries(document.paths)) {
      for (const [method, operation] of Object.entries(operations) as [string, Operation][]) {
        assert.match(method, /^(get|post|delete)$/);
        assert.ok(Object.keys(operation.responses).length > 0, `${method} ${path} has no responses`);
        const declared = [...shared, ...(operation.parameters ?? [])].filter(
          ({ in: place }) => place === "path",
        );
        const names = declared.map(({ name }) => `{${name}}`);
        assert.deepEqual(names, path.match(/\{\w+\}/g) ?? [], `${method} ${path}`);
      }
    }
    const result = document.paths["/v1/result/{task_id}"]!;
    assert.ok(result["get"] && result["delete"]);
  });

  test("every reference leads somewhere", async () => {
    const document = JSON.parse((await ferry.get("/openapi.json")).text) as unknown;
    for (const [, reference = ""] of JSON.stringify(document).matchAll(/"\$ref":"([^"]+)"/g)) {
      assert.match(reference, /^#\//);
      let at: unknown = document;
      for (const step of reference.slice(2).split("/")) at = (at as Record<string, unknown>)[step];
      assert.equal(typeof at, "object", reference);
    }
  });

  test("every route it lists is there", async () => {
    const { paths } = JSON.parse((await ferry.get("/openapi.json")).text) as Document;
    for (const path of Object.keys(paths).filter((path) => paths[path]!["get"])) {
      const answer = await ferry.get(path.replace("{task_id}", "unknown"));
      assert.ok(
        path.includes("{") ? answer.status === 404 : answer.status === 200,
        `${path}: ${answer.status}`,
      );
    }
  });
});
