/** Items 13 and 25 to 28: bodies that are legal HTTP and hostile JSON. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { type Answer, assertError, Ferry, Folder } from "../e2e/harness.ts";
import { stubModel, StubWorker } from "../e2e/stub-worker.ts";

const MEBIBYTE = 2 ** 20;
const MAX_BODY = 16 * MEBIBYTE;
let folder: Folder;
let stub: StubWorker;
let ferry: Ferry;

/** Says what an object without anything holds, here and in the thread: nothing, unless a prototype was changed. */
const LOOK = `export default (inputs) => inputs.map(() => Object.keys(Object.getPrototypeOf({})).concat(({}).x ?? []));`;

before(async () => {
  stub = await StubWorker.listen();
  folder = await Folder.make();
  const look = await folder.write("look.ts", LOOK);
  ferry = await Ferry.start({
    models: [stubModel([stub]), { name: "look", backend: { kind: "module", function: look } }],
    limits: { maxBodyBytes: MAX_BODY, maxQueuedBytes: 64 * MEBIBYTE },
  });
});
after(async () => {
  await ferry?.[Symbol.asyncDispose]();
  await stub?.[Symbol.asyncDispose]();
  await folder?.[Symbol.asyncDispose]();
});

const send = (input: string, more = "") => ferry.post(`{"model":"stub","input":${input}${more}}`);

describe("13 dedupe poisoning: only what is certain is shared", () => {
  test("13 a key twice, at any depth, also in escapes → 400", async () => {
    const twice = [
      '{"a":1,"a":2}',
      '[{"b":{"a":1,"\\u0061":1}}]',
      `${'{"a":'.repeat(60)}{"k":1,"k":1}${"}".repeat(60)}`,
    ];
    for (const input of twice) assertError(await send(input), 400, "INVALID_REQUEST");
    assertError(await send("1", ',"model":"stub"'), 400, "INVALID_REQUEST");
    assertError(await send("1", ',"parameters":{"p":{"a":1,"a":1}}'), 400, "INVALID_REQUEST");
  });
  test("13 1, 1.0 and 1e0 are different inputs; spaces, order and escapes make no difference", async () => {
    const inputs = ["[1]", "[1.0]", "[1e0]", '["1"]'];
    for (const input of inputs) assert.equal((await send(input)).json.metadata?.["cached"], false, input);
    assert.equal((await send('{"a":"x","b":2}')).json.metadata?.["cached"], false);
    assert.equal((await send(' { "b" : 2 , "\\u0061" : "\\u0078" } ')).json.metadata?.["cached"], true);
  });
  test("13 other parameters, another model: not shared", async () => {
    assert.equal((await send('"p"')).json.metadata?.["cached"], false);
    assert.equal((await send('"p"', ',"parameters":{"t":1}')).json.metadata?.["cached"], false);
    const other = await ferry.post({ model: "look", input: "p" });
    assert.equal(other.json.metadata?.["cached"], false);
  });
  test("13 failures, short replies and replies with NaN are never kept", async () => {
    const bad = ['{"outputs":[NaN]}', '{"outputs":[]}', '{"outputs":["a","b"]}', '{"outputs":[1e999]}', "{"];
    for (const [at, text] of bad.entries()) {
      let calls = 0;
      stub.behave = (call) => (calls++ === 0 ? call.reply(200, text) : call.echo());
      const first = await send(`"poison ${at}"`);
      stub.behave = (call) => call.echo();
      const second = await send(`"poison ${at}"`);
      assert.deepEqual(second.json.output, { of: `poison ${at}` }, `${text} then ${first.text}`);
    }
  });
});

describe("25 depth, keys and length: refused by a scan, before anything is built", () => {
  test("25 depth 10,000 and 1,000,000, of lists and of objects → 400", async () => {
    for (const depth of [65, 10_000, 1_000_000]) {
      assertError(await send("[".repeat(depth) + "]".repeat(depth)), 400, "INVALID_REQUEST");
      assertError(await send('{"a":'.repeat(depth) + "1" + "}".repeat(depth)), 400, "INVALID_REQUEST");
      assertError(await ferry.post("[".repeat(depth)), 400, "INVALID_REQUEST");
    }
  });
  test("25 an object of 1,000,000 keys → 400; 10,000 pass", async () => {
    const keys = (n: number): string =>
      `{${Array.from({ length: n }, (_, at) => `"${at.toString(36)}":1`).join()}}`;
    const answer = await send(keys(1_000_000));
    assert.match(assertError(answer, 400, "INVALID_REQUEST").message!, /more than 10000 keys/);
    assert.equal((await send(keys(10_000))).status, 200);
  });
  test("25 a string of 10 MB within maxBodyBytes passes and comes back whole", async () => {
    const input = "x".repeat(10 * MEBIBYTE);
    const answer = await send(`"${input}"`);
    assert.equal(answer.status, 200, answer.text.slice(0, 200));
    assert.equal((answer.json.output as { of: string }).of.length, input.length);
  });
  test("25 others are answered while such bodies are refused", async () => {
    const hostile = ["[".repeat(MEBIBYTE), `[${"[],".repeat(300_000)}1]`, `"${"\\\\".repeat(MEBIBYTE / 2)}`];
    const floods = Array.from({ length: 12 }, (_, at) => ferry.post(`{"input":${hostile[at % 3]!}`));
    const start = performance.now();
    assert.equal((await ferry.get("/healthz")).status, 200);
    assert.ok(performance.now() - start < 15_000, `${performance.now() - start} ms`);
    for (const answer of await Promise.all(floods)) assertError(answer, 400, "INVALID_REQUEST");
  });
});

describe("26 __proto__ → 400; constructor.prototype is data and pollutes nothing", () => {
  test("26 __proto__ as a key, anywhere, also in escapes → 400", async () => {
    const bad = ['{"__proto__":{"x":1}}', '[{"a":{"__proto__":1}}]', String.raw`{"__pr\u006fto__":1}`];
    for (const input of bad) assertError(await send(input), 400, "INVALID_REQUEST");
    assertError(await send("1", ',"__proto__":{"x":1}'), 400, "INVALID_REQUEST");
    assertError(await send("1", ',"parameters":{"__proto__":{"x":1}}'), 400, "INVALID_REQUEST");
  });
  test("26 constructor.prototype goes through (input is data), and ({}).x is clean after", async () => {
    const input = '{"constructor":{"prototype":{"x":1}},"hasOwnProperty":1,"toString":null}';
    const parameters = ',"parameters":{"constructor":{"prototype":{"x":1}}}';
    assert.deepEqual((await send(input, parameters)).json.output, { of: JSON.parse(input) as unknown });
    const body = `{"model":"look","input":${input}${parameters}}`;
    assert.deepEqual((await ferry.post(body)).json.output, []);
    for (const name of ["constructor", "hasOwnProperty", "toString"]) {
      assertError(await ferry.post(`{"input":1,"model":"${name}"}`), 400, "INVALID_REQUEST");
      assertError(await ferry.post(`{"input":1,"${name}":"stub"}`), 400, "INVALID_REQUEST");
    }
  });
});

describe("27 numbers and text at the edge", () => {
  test("27 1e400, -1e309 and 400 digits → 400", async () => {
    for (const number of ["1e400", "-1e309", "9".repeat(400), "[1E999]", `{"a":-${"8".repeat(310)}}`]) {
      assertError(await send(number), 400, "INVALID_REQUEST");
    }
  });
  test("27 integers beyond 2^53 are data (SPEC: unchanged): the worker gets every digit", async () => {
    const texts = [
      "9007199254740993",
      "[18446744073709551615,-9223372036854775809]",
      "0.1000000000000000055511151",
    ];
    for (const text of texts) {
      const calls = stub.calls.length;
      assert.equal((await send(text)).status, 200);
      assert.equal(stub.calls[calls]?.body, `{"inputs":[${text}]}`);
    }
  });
  test("27 halves of surrogate pairs → 400, in values, keys and names", async () => {
    const bad = [
      String.raw`"\ud800"`,
      String.raw`"\udc00\ud800"`,
      String.raw`{"\udfff":1}`,
      String.raw`["a\uD83Db"]`,
    ];
    for (const input of bad) assertError(await send(input), 400, "INVALID_REQUEST");
    for (const more of [String.raw`,"client_id":"\ud800"`, String.raw`,"parameters":{"\ud800":1}`]) {
      assertError(await send("1", more), 400, "INVALID_REQUEST");
    }
    const raw = Buffer.from('{"input":"\u00ed\u00a0\u0080"}', "latin1");
    assertError(await ferry.post(raw), 400, "INVALID_REQUEST");
  });
  test("27 NUL and control characters: data in the input, 400 in names", async () => {
    const input = String.raw`"a\u0000b\u001b\u007f\u2028"`;
    assert.deepEqual((await send(input)).json.output, { of: JSON.parse(input) as string });
    for (const name of [String.raw`a\u0000`, String.raw`a\r\nb`, String.raw`\u0085`]) {
      assertError(await send("1", `,"client_id":"${name}"`), 400, "INVALID_REQUEST");
    }
  });
  test("27 a byte order mark, UTF-16, overlong UTF-8 → 400", async () => {
    const bodies = [
      Buffer.from('\ufeff{"input":1}'),
      Buffer.from('{"input":1}', "utf16le"),
      Buffer.from('{"input":"\u00c0\u00af"}', "latin1"),
    ];
    for (const body of bodies) assertError(await ferry.post(body), 400, "INVALID_REQUEST");
  });
});

describe("28 ReDoS corpus, 100 KB a field: no expression runs on it that could go back", () => {
  const corpus = [
    "a".repeat(100_000),
    " ".repeat(100_000),
    `${'"'.repeat(10)}${"\\".repeat(100_000)}`,
    "=,;".repeat(30_000),
  ];
  /** The quickest of a few counts: the machine may stand still once, and an expression that goes back is slow each time. */
  async function atOnce(ask: () => Promise<Answer>, name: string): Promise<Answer> {
    for (let tries = 1; ; tries++) {
      const start = performance.now();
      const answer = await ask();
      const ms = performance.now() - start;
      if (ms < 500) return answer;
      assert.ok(tries < 8, `${name}: ${ms} ms`);
    }
  }

  test("28 in every field of the body: answered or refused at once", async () => {
    for (const text of corpus) {
      for (const field of ["input", "model", "client_id"]) {
        const answer = await atOnce(() => ferry.post({ input: 1, model: "stub", [field]: text }), field);
        assert.ok([200, 400].includes(answer.status), answer.text.slice(0, 200));
        assert.ok(answer.status === 200 || answer.text.length < 1000, "the text is not echoed");
      }
    }
  });
  test("28 in headers and queries, as long as they may be", async () => {
    const long = 10_000;
    const headers = [
      { prefer: `${"respond-async,".repeat(long / 20)};wait=${" ".repeat(long / 4)}1` },
      { prefer: `wait="${'"'.repeat(long)}` },
      { "content-type": `application/json${" ".repeat(long)}x` },
      { "content-type": `application/json;${"charset=".repeat(long / 10)}` },
      { authorization: `Bearer ${" ".repeat(long)}` },
      { "x-ferry-explain": "1".repeat(long) },
    ];
    for (const each of headers) {
      const name = JSON.stringify(each).slice(0, 60);
      const { status } = await atOnce(() => ferry.post({ input: "h", model: "stub" }, each), name);
      assert.ok([200, 202, 400, 415].includes(status), `${status}`);
    }
    const { status } = await ferry.get(`/v1/result/x?${"wait=1&".repeat(long / 8)}wait=${"9".repeat(1000)}`);
    assert.ok([400, 404].includes(status), `${status}`);
  });
});
