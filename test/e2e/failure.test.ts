/** Workers that answer wrongly: the one concerned gets a clear error, the others get their own answers. */
import assert from "node:assert/strict";
import { after, before, beforeEach, describe, test } from "node:test";
import { assertError, Ferry, type Answer } from "./harness.ts";
import { echo, Gate, StubCall, stubModel, StubWorker, type Behaviour } from "./stub-worker.ts";

const POISON = "poison";
const MAX_REPLY = 65_536;
let stub: StubWorker;
let ferry: Ferry;
let round = 0;

before(async () => {
  stub = await StubWorker.listen();
  const retry = { max: 2, baseMs: 1, maxMs: 5 };
  // These tests are about replies, not about ejecting the worker that gives them.
  const model = { retry, health: { failures: 1000, ejectMs: 10 } };
  const backend = { kind: "http", protocol: "batch", workers: [stub.url], maxReplyBytes: MAX_REPLY };
  ferry = await Ferry.start({ models: [stubModel([stub], { ...model, backend })] });
});
after(async () => {
  await ferry?.[Symbol.asyncDispose]();
  await stub?.[Symbol.asyncDispose]();
});
beforeEach(() => {
  stub.behave = echo;
  stub.calls.length = 0;
  round++;
});

/** Sends these inputs so that they leave in one batch, which then meets `behave`. */
async function asOneBatch(inputs: readonly unknown[], behave: Behaviour): Promise<Answer[]> {
  const gate = new Gate();
  stub.behave = gate.hold;
  const blocker = ferry.post({ input: `blocker ${round}` });
  await stub.call(1);
  const answers = inputs.map((input) => ferry.post({ input }));
  await ferry.healthy((health) => health.queue_depth === inputs.length);
  stub.behave = behave;
  gate.open();
  await blocker;
  const all = await Promise.all(answers);
  assert.equal(stub.calls[1]!.inputs.length, inputs.length, "they left in one batch");
  return all;
}

const numbered = (n: number): string[] => Array.from({ length: n }, (_, i) => `${round}: ${i}`);
const isPoison = (input: unknown): boolean => String(input).startsWith(POISON);

/** Everyone has the answer to their own input, but for the guilty. */
function assertOwn(
  inputs: readonly unknown[],
  answers: readonly Answer[],
  guilty: Set<unknown> = new Set(),
): void {
  answers.forEach((answer, i) => {
    if (guilty.has(inputs[i])) return;
    assert.equal(answer.status, 200, `${JSON.stringify(inputs[i])}: ${answer.text}`);
    assert.deepEqual(answer.json.output, { of: inputs[i] });
  });
}

describe("one poison input in a batch of 64", () => {
  const rejectPoison = (status: number): Behaviour => {
    return (call) => (call.inputs.some(isPoison) ? call.reply(status, '{"error":"too long"}') : call.echo());
  };

  for (const [status, place] of [
    [400, 0],
    [422, 37],
    [413, 63],
  ] as const) {
    test(`at place ${place}, refused with ${status}: only it is 422, in at most 14 calls`, async () => {
      const inputs = numbered(64);
      inputs[place] = `${POISON} ${round}`;
      const answers = await asOneBatch(inputs, rejectPoison(status));
      assertError(answers[place]!, 422, "INPUT_REJECTED");
      assertOwn(inputs, answers, new Set([inputs[place]]));
      const calls = stub.calls.length - 1;
      assert.ok(calls <= 14, `${calls} calls`);
    });
  }

  test("poison alone is asked about once, and the worker stays in favour", async () => {
    stub.behave = rejectPoison(400);
    assertError(await ferry.post({ input: `${POISON} alone` }), 422, "INPUT_REJECTED");
    assert.equal(stub.calls.length, 1);
    assert.equal((await ferry.health()).healthy_workers, 1);
    assert.equal((await ferry.health()).dead_letters, 0, "a refused input is the caller's affair");
  });
});

describe("a wrong number of outputs is never zipped", () => {
  const wrong: Readonly<Record<string, (call: StubCall) => unknown[]>> = {
    "the first is missing": (call) => call.inputs.slice(1).map((of) => ({ of })),
    "the last is missing": (call) => call.inputs.slice(0, -1).map((of) => ({ of })),
    "one in the middle is missing": (call) => call.inputs.filter((_, i) => i !== 1).map((of) => ({ of })),
    "one too many in front": (call) => [{ of: "nobody" }, ...call.inputs.map((of) => ({ of }))],
    "none at all": () => [],
  };
  for (const [name, outputs] of Object.entries(wrong)) {
    test(`${name}: everyone still gets their own`, async () => {
      const inputs = numbered(6);
      const answers = await asOneBatch(inputs, (call) =>
        call.inputs.length > 1 ? call.outputs(outputs(call)) : call.echo(),
      );
      assertOwn(inputs, answers);
    });
  }

  test("one input that always loses its output is refused, the others are right", async () => {
    const inputs = numbered(16);
    inputs[3] = `${POISON} short ${round}`;
    const answers = await asOneBatch(inputs, (call) =>
      call.outputs(call.inputs.filter((of) => !isPoison(of)).map((of) => ({ of }))),
    );
    assertError(answers[3]!, 422, "INPUT_REJECTED");
    assertOwn(inputs, answers, new Set([inputs[3]]));
  });

  test("two outputs for one input are 502", async () => {
    stub.behave = (call) => call.outputs([1, 2]);
    assertError(await ferry.post({ input: `two ${round}` }), 502, "INFERENCE_FAILED");
  });
});

describe("unusable replies", () => {
  const good = (call: StubCall): string[] => call.inputs.map((of) => JSON.stringify({ of }));
  const withValue = (value: string): Behaviour => {
    return (call) => {
      const outputs = good(call).map((text, i) => (isPoison(call.inputs[i]) ? value : text));
      call.reply(200, `{"outputs":[${outputs.join(",")}]}`);
    };
  };
  const whole = (text: string): Behaviour => {
    return (call) => (call.inputs.some(isPoison) ? call.reply(200, text) : call.echo());
  };
  const replies: Readonly<Record<string, Behaviour>> = {
    "a bare NaN": withValue("NaN"),
    "Infinity in a vector": withValue("[1,-Infinity]"),
    "a number beyond doubles": withValue("1e999"),
    "an undefined": withValue("undefined"),
    "HTML with status 200": whole("<!doctype html><title>Sign in</title>"),
    "an empty reply": whole(""),
    "half a reply": whole('{"outputs":["a"'),
    "another object": whole('{"results":["a"]}'),
    "outputs that are no list": whole('{"outputs":{"0":"a","length":1}}'),
    "a list": whole('["a"]'),
    "a reply that is larger than maxReplyBytes": whole(JSON.stringify({ outputs: ["x".repeat(MAX_REPLY)] })),
    "a reply without end": (call) =>
      call.inputs.some(isPoison) ? call.flood(" ".repeat(16_384)) : call.echo(),
  };
  for (const [name, behave] of Object.entries(replies)) {
    test(`${name}: 422 for its input only, when the worker answers for the others`, async () => {
      const inputs = numbered(8);
      inputs[2] = `${POISON} ${round}`;
      const answers = await asOneBatch(inputs, behave);
      assertError(answers[2]!, 422, "INPUT_REJECTED");
      assertOwn(inputs, answers, new Set([inputs[2]]));
    });
  }

  test("null is an output like any other", async () => {
    stub.behave = (call) => call.outputs(call.inputs.map(() => null));
    assert.equal(await ferry.infer(`null ${round}`), null);
  });

  test("fields beside outputs are dropped", async () => {
    stub.behave = (call) => call.reply(200, '{"usage":{"secret":1},"outputs":["a"],"id":"x"}');
    const answer = await ferry.post({ input: `extra ${round}` });
    assert.equal(answer.json.output, "a");
    assert.ok(!answer.text.includes("secret"));
  });

  test("the worker's own words and address do not reach the caller of a 502", async () => {
    stub.behave = (call) => call.reply(500, "Traceback: /srv/model/secret.py line 3", { "x-secret": "1" });
    const answer = await ferry.post({ input: `words ${round}` });
    assertError(answer, 502, "INFERENCE_FAILED");
    assert.doesNotMatch(answer.text, /secret|127\.0\.0\.1|Traceback/);
  });

  test("a redirect is an error and is not followed", async () => {
    await using elsewhere = await StubWorker.listen();
    for (const status of [301, 302, 307, 308]) {
      stub.behave = (call) => call.reply(status, "", { location: elsewhere.url });
      assertError(await ferry.post({ input: `redirect ${status}` }), 502, "INFERENCE_FAILED");
    }
    assert.equal(elsewhere.calls.length, 0);
  });

  test("failures are never cached: the same input is asked again once the worker is well", async () => {
    const refused = `${POISON} refused then fine`;
    stub.behave = (call) => call.reply(422, "{}");
    assertError(await ferry.post({ input: refused }), 422, "INPUT_REJECTED");
    stub.behave = (call) => call.reply(200, '{"outputs":[NaN]}');
    assertError(await ferry.post({ input: "broken then fine" }), 502, "INFERENCE_FAILED");
    stub.behave = echo;
    for (const input of [refused, "broken then fine"]) {
      const answer = await ferry.post({ input });
      assert.deepEqual(answer.json.output, { of: input });
      assert.equal(answer.json.metadata!["cached"], false);
    }
  });

  test("no batch was ever lost, and no worker saw two at once", async () => {
    assert.equal((await ferry.health()).totals.lost, 0);
    assert.equal(stub.mostAtOnce, 1);
  });
});
