/** Items 31 to 36 and 38: workers that lie, redirect or flood, and what callers may learn of them. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { assertError, Ferry, Folder, runFerry, writeConfig } from "../e2e/harness.ts";
import { type Behaviour, stubModel, StubWorker } from "../e2e/stub-worker.ts";

const quick = { retry: { max: 0 }, cache: { scope: "off" }, collapse: false, health: { failures: 1000 } };

/** One Ferry in front of one worker, which behaves as each test wants it to. */
let stub: StubWorker;
let ferry: Ferry;
let asked = 0;
before(async () => {
  stub = await StubWorker.listen();
  const model = stubModel([stub], quick);
  ferry = await Ferry.start({
    models: [{ ...model, backend: { ...model.backend, maxReplyBytes: 1_000_000 } }],
  });
});
after(async () => {
  await ferry[Symbol.asyncDispose]();
  await stub[Symbol.asyncDispose]();
});

/** What one caller gets from a worker that behaves like this, and what Ferry logs until then. */
async function answerOf(behave: Behaviour) {
  stub.behave = behave;
  const logged = ferry.lines.length;
  const answer = await ferry.post({ input: `a${++asked}` });
  assert.equal((await ferry.get("/healthz")).status, 200, "Ferry lives");
  return { answer, log: JSON.stringify(ferry.lines.slice(logged)) };
}

describe("32 SSRF: a client cannot choose where Ferry calls, a worker cannot send it elsewhere", () => {
  test("32 a redirect is an error and is not followed", async () => {
    await using other = await StubWorker.listen();
    for (const status of [301, 302, 307, 308]) {
      const { answer } = await answerOf((call) => call.reply(status, "", { location: other.url }));
      assertError(answer, 502, "INFERENCE_FAILED");
      assert.ok(!answer.text.includes("127.0.0.1"), answer.text);
    }
    assert.equal(other.calls.length, 0);
  });
  test("32 file:, ftp:, gopher: and a URL without a scheme are mistakes in the config", async () => {
    await using folder = await Folder.make();
    for (const url of [
      "file:///etc/passwd",
      "ftp://gpu/x",
      "gopher://gpu/x",
      "gpu:9000",
      "http://gpu/a\r\nX: b",
    ]) {
      const backend = { kind: "http", protocol: "batch", workers: [url] };
      const file = await writeConfig(folder, { models: [{ name: "m", backend }] });
      const { code, stdout, stderr } = await runFerry(["check", "-c", file]);
      assert.equal(code, 1, url);
      assert.match(stdout + stderr, /models\[0\]\.backend\.workers\[0\]/, url);
    }
  });
  test("32 nothing of a request reaches the worker's URL or headers", async () => {
    const seen: string[] = [];
    await using stub = await StubWorker.listen((call) => {
      seen.push(call.body);
      call.echo();
    });
    await using ferry = await Ferry.start({ models: [stubModel([stub])] });
    const headers = { "x-forwarded-host": "evil", "x-target": "http://evil", referer: "http://evil" };
    assert.equal((await ferry.post({ input: "a" }, headers, "/v1/inference?url=http://evil")).status, 200);
    assert.deepEqual(seen, ['{"inputs":["a"]}']);
  });
  test("32 private ranges and DNS rebinding: does not apply, workers are listed by the operator and live there", () => {});
});

describe("34 hostile upstream → 502, bounded, extras dropped", () => {
  const wrong: Readonly<Record<string, Behaviour>> = {
    HTML: (call) => call.reply(200, "<html><body>ok</body></html>", { "content-type": "text/html" }),
    "no outputs": (call) => call.reply(200, '{"result":["a"]}'),
    "outputs that are no list": (call) => call.reply(200, '{"outputs":{"0":"a","length":1}}'),
    "outputs twice": (call) => call.reply(200, '{"outputs":["a"],"outputs":["b"]}'),
    "too many outputs": (call) => call.reply(200, '{"outputs":["a","b"]}'),
    NaN: (call) => call.reply(200, '{"outputs":[NaN]}'),
    "1e999": (call) => call.reply(200, '{"outputs":[1e999]}'),
    "an endless reply": (call) => call.flood(`"${"x".repeat(65_536)}",`),
    "a length beyond the cap": (call) => call.reply(200, "{}", { "content-length": "1073741824" }),
    "a reset": (call) => call.reset(),
  };
  for (const [name, behave] of Object.entries(wrong)) {
    test(`34 ${name} → 502`, async () => {
      const { answer } = await answerOf(behave);
      assertError(answer, 502, "INFERENCE_FAILED");
      assert.ok(!answer.text.includes("html") && !answer.text.includes("xxx"));
    });
  }
  test("34 extra fields and headers are dropped", async () => {
    const text = '{"outputs":["b"],"task_id":"x","metadata":{"tier":"enterprise"},"__proto__":{"x":1}}';
    const headers = { "set-cookie": "a=b", "x-ferry-batch-id": "forged", location: "http://evil" };
    const { answer } = await answerOf((call) => call.reply(200, text, headers));
    assert.equal(answer.json.output, "b");
    assert.notEqual(answer.json.task_id, "x");
    assert.equal(answer.headers["set-cookie"] ?? answer.headers["location"], undefined);
    assert.notEqual(answer.header("x-ferry-batch-id"), "forged");
    assert.ok(!answer.text.includes("enterprise"));
  });
});

describe("36 an aborted call leaves nothing for the next user of its socket", () => {
  test("36 replies that come late, cut off or to nobody: each caller gets the own answer or none", async () => {
    let calls = 0;
    await using stub = await StubWorker.listen((call) => {
      // Some are never answered, some reset; Ferry gives them up and uses a fresh connection.
      if (++calls % 7 === 0) return;
      if (calls % 5 === 0) call.reset();
      else call.echo();
    });
    const timeouts = { queueMs: 20_000, workerMs: 100, totalMs: 30_000 };
    const model = {
      ...quick,
      retry: { max: 9, baseMs: 1, maxMs: 1 },
      timeouts,
      maxBatchSize: 4,
      maxWaitMs: 1,
    };
    await using ferry = await Ferry.start({ models: [stubModel([stub], model)] });
    let answered = 0;
    const caller = async (name: number): Promise<void> => {
      for (let at = 0; at < 25; at++) {
        const input = `${name}-${at}`;
        const signal = at % 4 === 3 ? AbortSignal.timeout(name % 30) : undefined;
        const answer = await ferry.post({ input }, {}, "/v1/inference", signal).catch(() => undefined);
        if (answer?.status !== 200) continue;
        assert.deepEqual(answer.json.output, { of: input });
        answered++;
      }
    };
    await Promise.all(Array.from({ length: 40 }, (_, name) => caller(name)));
    assert.ok(answered > 500, `${answered} of 1,000 answered`);
  });
  // The same on Redis connections: test/engine/redis-client/client-link.test.ts.
});

describe("38 error bodies: a code, a message, the request's id; no path, no stack, no worker's address", () => {
  const trace =
    'Traceback (most recent call last):\n  File "/srv/model.py", line 3, in run\nKeyError: secret';
  for (const status of [500, 502, 404, 401, 302, 418 + 100]) {
    test(`38 a worker's ${status} with a stack trace: its words stay inside`, async () => {
      const { answer, log } = await answerOf((call) => call.reply(status, trace));
      assertError(answer, 502, "INFERENCE_FAILED");
      assert.doesNotMatch(answer.text, /Traceback|model\.py|KeyError|127\.0\.0\.1/);
      assert.doesNotMatch(log, /Traceback|model\.py|KeyError/);
    });
  }
  test("38 the model's refusal of this one input (4xx) is told, in one printable line of 200 characters", async () => {
    const words = `too long:\r\n\u001b[31m ${"x".repeat(10_000)}`;
    const { answer, log } = await answerOf((call) => call.reply(422, words));
    const { message } = assertError(answer, 422, "INPUT_REJECTED");
    assert.match(message!, /^worker answered 422: too long: \[31m x+…$/);
    assert.ok(message!.length < 230 && !log.includes("too long"));
  });
  test("38 a worker that is away is not named", async () => {
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [stubModel([stub], { timeouts: { queueMs: 300 } })] });
    await stub.close();
    const answer = await ferry.post({ input: "a" });
    assert.ok(answer.status >= 503, answer.text);
    assert.ok(!answer.text.includes("127.0.0.1"), answer.text);
  });
  test("38 every refusal names its request, and unknown things are not echoed at length", async () => {
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [stubModel([stub])] });
    const long = "n".repeat(5000);
    const answers = [
      await ferry.get(`/${long}`),
      await ferry.get(`/v1/result/${long}`),
      await ferry.post({ input: 1, [long]: 1 }),
      await ferry.post({ input: 1, model: long.slice(0, 255) }),
      await ferry.post({ input: 1 }, { "content-type": `application/json; charset=${long}` }),
    ];
    for (const answer of answers) {
      assert.ok(answer.text.length < 700, answer.text);
      assert.match(answer.json.request_id!, /^[0-9A-Z]{36}$/);
    }
  });
});
