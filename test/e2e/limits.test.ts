/** What the gateway refuses about a body and its fields, each in the one shape of errors: SPEC section 2. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { gzipSync } from "node:zlib";
import { assertError, Ferry } from "./harness.ts";
import { postHead, postText, RawClient } from "./raw-client.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

const LIMIT = 4096;
let stub: StubWorker;
let ferry: Ferry;

before(async () => {
  stub = await StubWorker.listen();
  ferry = await Ferry.start({ models: [stubModel([stub])], limits: { maxBodyBytes: LIMIT } });
});
after(async () => {
  await ferry?.[Symbol.asyncDispose]();
  await stub?.[Symbol.asyncDispose]();
});

const nested = (depth: number): string => "[".repeat(depth) + "]".repeat(depth);
const nestedObjects = (depth: number): string => '{"a":'.repeat(depth) + "1" + "}".repeat(depth);

describe("400 INVALID_REQUEST about the body", () => {
  const bodies: Readonly<Record<string, string>> = {
    "nothing at all": "",
    "only white space": "  \n",
    "not JSON": "input=hello",
    "half of it": '{"input":"a"',
    "something after it": '{"input":"a"} x',
    "two bodies": '{"input":"a"}{"input":"b"}',
    "a byte order mark": '\ufeff{"input":"a"}',
    "a trailing comma": '{"input":"a",}',
    "a comment": '{"input":"a"/* why */}',
    "single quotes": "{'input':'a'}",
    NaN: '{"input":NaN}',
    "leading zeros": '{"input":01}',
    "a hex number": '{"input":0x10}',
    "a raw control character in a string": '{"input":"a\u0001b"}',
    "a raw line break in a string": '{"input":"a\nb"}',
    "an array": '[{"input":"a"}]',
    "a string": '"input"',
    null: "null",
    "no input": '{"model":"stub"}',
    "an empty object": "{}",
    "model is a number": '{"input":"a","model":5}',
    "model is null": '{"input":"a","model":null}',
    "model with a control character": String.raw`{"input":"a","model":"stub\u0007"}`,
    "client_id is an object": '{"input":"a","client_id":{}}',
    "client_id with a control character": String.raw`{"input":"a","client_id":"a\u0000b"}`,
    "client_id with DEL": '{"input":"a","client_id":"a\u007fb"}',
    "parameters is a list": '{"input":"a","parameters":[1]}',
    "parameters is a string": '{"input":"a","parameters":"x"}',
    "an unknown field": '{"input":"a","inputs":["a"]}',
    "a tier of one's own": '{"input":"a","tier":"enterprise"}',
    "a priority of one's own": '{"input":"a","priority":1}',
    "__proto__ on top": '{"input":"a","__proto__":{"tier":"enterprise"}}',
    "__proto__ in the input": '{"input":{"a":[{"__proto__":1}]}}',
    "__proto__ in the parameters": '{"input":"a","parameters":{"b":{"__proto__":{}}}}',
    "__proto__ in escapes": String.raw`{"input":{"\u005f_proto__":1}}`,
    "a key twice on top": '{"input":"a","input":"b"}',
    "a key twice, escaped": String.raw`{"input":"a","\u0069nput":"b"}`,
    "a key twice in the input": '{"input":{"a":1,"a":2}}',
    "a key twice in the parameters": '{"input":"a","parameters":{"t":1,"t":2}}',
    "a number beyond doubles": '{"input":1e400}',
    "a negative one in the parameters": '{"input":"a","parameters":{"t":[-1e309]}}',
    "digits beyond doubles": `{"input":${"9".repeat(400)}}`,
    "a lone high surrogate": String.raw`{"input":"\ud800"}`,
    "a lone low surrogate": String.raw`{"input":"a\udc00b"}`,
    "surrogates the wrong way round": String.raw`{"input":"\ude00\ud83d"}`,
    "a lone surrogate in a key": String.raw`{"input":{"\ud83d":1}}`,
    "a lone surrogate in the parameters": String.raw`{"input":"a","parameters":{"x":"\ud800"}}`,
    "lists 65 deep": `{"input":${nested(64)}}`,
    "objects 65 deep": `{"input":${nestedObjects(64)}}`,
    "parameters 65 deep": `{"input":"a","parameters":${nestedObjects(64)}}`,
    "brackets without end": "[".repeat(LIMIT),
  };
  for (const [name, body] of Object.entries(bodies)) {
    test(name, async () => {
      assertError(await ferry.post(body), 400, "INVALID_REQUEST");
    });
  }

  test("bytes that are not UTF-8", async () => {
    const wrong = ["ff", "c3", "c0af", "eda080", "f4908080", "e28082e280"];
    for (const hex of wrong) {
      const body = Buffer.concat([Buffer.from('{"input":"'), Buffer.from(hex, "hex"), Buffer.from('"}')]);
      assertError(await ferry.post(body), 400, "INVALID_REQUEST");
    }
    assertError(await ferry.post(Buffer.from('{"input":"a"}', "utf16le")), 400, "INVALID_REQUEST");
  });

  test("64 deep is accepted: the body is the first level", async () => {
    assert.equal((await ferry.post(`{"input":${nested(63)}}`)).status, 200);
    assert.equal((await ferry.post(`{"input":${nestedObjects(63)}}`)).status, 200);
    assert.equal((await ferry.post(`{"input":"a","parameters":${nestedObjects(63)}}`)).status, 200);
  });

  test("brackets in strings are not depth, and a key that only looks like one is none", async () => {
    assert.equal((await ferry.post({ input: "[".repeat(500) + '\\"{'.repeat(100) })).status, 200);
    assert.equal((await ferry.post({ input: "__proto__" })).status, 200);
    assert.equal((await ferry.post({ input: { constructor: { prototype: 1 } } })).status, 200);
  });

  test("the messages of refused bodies say what to do, and nothing of the body's secrets", async () => {
    const body = assertError(await ferry.post('{"inptu":"my secret"}'), 400, "INVALID_REQUEST");
    assert.match(body.message!, /inptu/);
    assert.doesNotMatch(body.message!, /secret/);
  });

  test("refused bodies never reach a worker, and leave no trace on objects", async () => {
    assert.ok(!JSON.stringify(stub.inputs).includes("e400"));
    const health = await ferry.admin("/internal/health");
    assert.ok(!health.text.includes('"tier":'), health.text);
  });
});

describe("Idempotency-Key", () => {
  const ask = (key: string) => ferry.post({ input: "keyed" }, { "idempotency-key": key });

  test("255 characters are fine, 256 are 400, none are 400", async () => {
    assert.equal((await ask("k".repeat(255))).status, 200);
    assertError(await ask("k".repeat(256)), 400, "INVALID_REQUEST");
    assertError(await ask(""), 400, "INVALID_REQUEST");
  });

  test("control characters are 400", async () => {
    for (const character of ["\t", "\u0001", "\u007f", "\u0000"]) {
      await using client = await RawClient.connect(ferry.url);
      client.send(postText('{"input":"a"}', `Idempotency-Key: a${character}b`));
      assertError(await client.answer(), 400, "INVALID_REQUEST");
    }
  });
});

describe("415 and 413", () => {
  test("a form is 415 and the message shows how", async () => {
    const types = ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"];
    for (const type of [...types, "application/jsonp", "application/json, text/plain"]) {
      const answer = await ferry.post('{"input":"a"}', { "content-type": type });
      const body = assertError(answer, 415, "UNSUPPORTED_MEDIA_TYPE");
      assert.match(body.message!, /--json/, "curl users read this");
    }
  });

  test("no content type is 415", async () => {
    await using client = await RawClient.connect(ferry.url);
    client.send('POST /v1/inference HTTP/1.1\r\nHost: localhost\r\nContent-Length: 13\r\n\r\n{"input":"a"}');
    assertError(await client.answer(), 415, "UNSUPPORTED_MEDIA_TYPE");
  });

  test("a compressed body is 415, not unpacked", async () => {
    const bomb = gzipSync(Buffer.alloc(1_000_000, " "));
    const answer = await ferry.post(bomb.subarray(0, LIMIT), { "content-encoding": "gzip" });
    assertError(answer, 415, "UNSUPPORTED_MEDIA_TYPE");
    assert.equal((await ferry.post({ input: "a" }, { "content-encoding": "identity" })).status, 200);
  });

  test("exactly the limit passes, one byte more is 413", async () => {
    const input = "x".repeat(LIMIT - '{"input":""}'.length);
    assert.equal((await ferry.post({ input })).status, 200);
    assertError(await ferry.post({ input: `${input}x` }), 413, "PAYLOAD_TOO_LARGE");
  });

  test("an announced length is refused before a byte of the body is sent", async () => {
    for (const length of [LIMIT + 1, 10 ** 15]) {
      await using client = await RawClient.connect(ferry.url);
      client.send(postHead(length));
      assertError(await client.answer(), 413, "PAYLOAD_TOO_LARGE");
      await client.closed();
    }
  });

  test("Expect: 100-continue gets 413 and no 100 when too large, 100 when not", async () => {
    await using large = await RawClient.connect(ferry.url);
    large.send(postHead(LIMIT + 1, "Expect: 100-continue"));
    assertError(await large.answer(), 413, "PAYLOAD_TOO_LARGE");
    assert.deepEqual(large.interims, []);

    await using small = await RawClient.connect(ferry.url);
    const body = '{"input":"patient"}';
    small.send(postHead(body.length, "Expect: 100-continue"));
    small.send(body);
    assert.equal((await small.answer()).status, 200);
    assert.deepEqual(small.interims, [100]);
  });

  test("a chunked body is cut at the limit while it is still being sent", async () => {
    await using client = await RawClient.connect(ferry.url);
    client.send(postHead(undefined, "Transfer-Encoding: chunked"));
    const chunk = `400\r\n${" ".repeat(1024)}\r\n`;
    client.send(chunk.repeat(5)); // One chunk more than the limit, and no last one.
    assertError(await client.answer(), 413, "PAYLOAD_TOO_LARGE");
    await client.closed();
  });
});
