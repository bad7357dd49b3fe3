/** Callers that leave, come twice, or come back: who is dropped, who joins, what runs once. */
import assert from "node:assert/strict";
import { after, before, beforeEach, describe, test } from "node:test";
import { assertError, Ferry } from "./harness.ts";
import { echo, Gate, stubModel, StubWorker } from "./stub-worker.ts";

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

/** Occupies the only worker until the gate opens. */
async function occupy(name: string): Promise<{ gate: Gate; blocker: Promise<unknown> }> {
  const gate = new Gate();
  stub.behave = gate.hold;
  const blocker = ferry.infer(`blocker of ${name}`);
  await stub.call(1);
  return { gate, blocker };
}

/** A caller that can hang up. */
function caller(input: string, headers = {}): { hangUp: () => void; gone: Promise<void> } {
  const line = new AbortController();
  const asked = ferry.post({ input }, headers, "/v1/inference", line.signal);
  const gone = assert.rejects(asked, { name: "AbortError" });
  return { hangUp: () => line.abort(), gone };
}

const ranTimes = (input: string): number => stub.inputs.filter((seen) => seen === input).length;

describe("a caller that leaves while queued", () => {
  test("is dropped and counted; the worker never sees the input", async () => {
    const before = (await ferry.health()).totals.dropped;
    const { gate, blocker } = await occupy("dropped");
    const callers = ["d1", "d2", "d3"].map((input) => caller(input));
    await ferry.healthy((health) => health.queue_depth === 3);
    for (const { hangUp } of callers) hangUp();
    await Promise.all(callers.map(({ gone }) => gone));
    await ferry.healthy((health) => health.totals.dropped === before + 3);
    gate.open();
    await blocker;
    await ferry.infer("after the dropped");
    for (const input of ["d1", "d2", "d3"]) assert.equal(ranTimes(input), 0);
    assert.equal((await ferry.health()).totals.lost, 0);
  });

  test("keeps its task when it gave an Idempotency-Key: a retry joins it", async () => {
    const { gate, blocker } = await occupy("key");
    const headers = { "idempotency-key": "came-back" };
    const { hangUp, gone } = caller("keyed", headers);
    await ferry.healthy((health) => health.queue_depth === 1);
    hangUp();
    await gone;
    const retry = ferry.post({ input: "keyed" }, headers);
    gate.open();
    assert.deepEqual((await retry).json.output, { of: "keyed" });
    await blocker;
    assert.equal(ranTimes("keyed"), 1);
  });

  test("keeps its task when it gave a key, also when nobody comes back", async () => {
    const before = (await ferry.health()).totals.dropped;
    const { gate, blocker } = await occupy("key alone");
    const { hangUp, gone } = caller("keyed alone", { "idempotency-key": "never-back" });
    await ferry.healthy((health) => health.queue_depth === 1);
    hangUp();
    await gone;
    gate.open();
    await blocker;
    await stub.call(2);
    assert.equal(ranTimes("keyed alone"), 1);
    assert.equal((await ferry.health()).totals.dropped, before);
  });

  test("takes nothing from another caller of the same input", async () => {
    const { gate, blocker } = await occupy("shared");
    const first = caller("shared");
    await ferry.healthy((health) => health.queue_depth === 1);
    const second = ferry.post({ input: "shared" });
    const third = caller("shared");
    const poll = await ferry.post({ input: "shared" }, { prefer: "respond-async" });
    first.hangUp();
    third.hangUp();
    await Promise.all([first.gone, third.gone]);
    gate.open();
    assert.deepEqual((await second).json.output, { of: "shared" });
    assert.equal((await ferry.result(poll.json.task_id!)).status, "SUCCESS");
    await blocker;
    assert.equal(ranTimes("shared"), 1);
  });

  test("takes nothing from one who was promised a result with 202", async () => {
    const { gate, blocker } = await occupy("promised");
    const leaver = caller("promised");
    await ferry.healthy((health) => health.queue_depth === 1);
    const id = await ferry.accept({ input: "promised" });
    leaver.hangUp();
    await leaver.gone;
    gate.open();
    const result = await ferry.result(id);
    assert.deepEqual(result.output, { of: "promised" });
    await blocker;
  });

  test("who leaves while the batch runs changes nothing for its mates", async () => {
    const { gate, blocker } = await occupy("running");
    const second = new Gate();
    const leaver = caller("mate 1");
    const stays = ferry.post({ input: "mate 2" });
    await ferry.healthy((health) => health.queue_depth === 2);
    stub.behave = second.hold;
    gate.open();
    await blocker;
    await stub.call(2);
    leaver.hangUp();
    await leaver.gone;
    second.open();
    assert.deepEqual((await stays).json.output, { of: "mate 2" });
  });

  test("cancelling one of two callers does not fail the other", async () => {
    const { gate, blocker } = await occupy("cancel");
    const one = await ferry.accept({ input: "cancelled by one" });
    const other = ferry.post({ input: "cancelled by one" });
    await ferry.healthy((health) => health.queue_depth === 1);
    const answer = await ferry.delete(`/v1/result/${one}`);
    assert.ok([200, 409].includes(answer.status), answer.text);
    gate.open();
    assert.equal((await other).status, 200, (await other).text);
    await blocker;
  });
});

describe("Idempotency-Key", () => {
  test("50 parallel posts run once and give one task_id", async () => {
    const headers = { "idempotency-key": "fifty" };
    const { gate, blocker } = await occupy("fifty");
    const posts = Array.from({ length: 50 }, () => ferry.post({ input: "fifty" }, headers));
    await ferry.healthy((health) => health.queue_depth === 1);
    gate.open();
    const answers = await Promise.all(posts);
    await blocker;
    for (const answer of answers) assert.deepEqual(answer.json.output, { of: "fifty" });
    assert.equal(new Set(answers.map((answer) => answer.json.task_id)).size, 1);
    assert.equal(ranTimes("fifty"), 1);
  });

  test("the same key later gives the same task, also asked without waiting", async () => {
    const headers = { "idempotency-key": "later" };
    const first = await ferry.post({ input: "later" }, headers);
    const second = await ferry.post({ input: "later" }, headers);
    assert.equal(second.json.task_id, first.json.task_id);
    assert.deepEqual(second.json.output, first.json.output);
    const third = await ferry.post({ input: "later" }, { ...headers, prefer: "respond-async" });
    assert.ok([200, 202].includes(third.status));
    assert.equal(third.json.task_id, first.json.task_id);
    assert.equal(ranTimes("later"), 1);
  });

  test("the same key with another input, model or parameters is 422 IDEMPOTENCY_CONFLICT", async () => {
    const headers = { "idempotency-key": "conflict" };
    assert.equal((await ferry.post({ input: "mine" }, headers)).status, 200);
    assertError(await ferry.post({ input: "other" }, headers), 422, "IDEMPOTENCY_CONFLICT");
    const parameters = { t: 1 };
    assertError(await ferry.post({ input: "mine", parameters }, headers), 422, "IDEMPOTENCY_CONFLICT");
    assert.equal(ranTimes("other"), 0);
    assert.equal((await ferry.post({ input: "mine" }, headers)).status, 200);
  });

  test("a conflict is seen also while the first is in flight", async () => {
    const { gate, blocker } = await occupy("in flight");
    const headers = { "idempotency-key": "in-flight" };
    const first = ferry.post({ input: "first" }, headers);
    await ferry.healthy((health) => health.queue_depth === 1);
    assertError(await ferry.post({ input: "second" }, headers), 422, "IDEMPOTENCY_CONFLICT");
    gate.open();
    assert.equal((await first).status, 200);
    await blocker;
  });

  test("two keys with one input are two tasks with two ids", async () => {
    const one = await ferry.post({ input: "two keys" }, { "idempotency-key": "k1" });
    const two = await ferry.post({ input: "two keys" }, { "idempotency-key": "k2" });
    assert.notEqual(one.json.task_id, two.json.task_id);
    assert.deepEqual(one.json.output, two.json.output);
  });

  test("a key that looks like a task id or a property is only a key", async () => {
    for (const key of ["__proto__", "constructor", (await ferry.post({ input: "id" })).json.task_id!]) {
      assert.deepEqual((await ferry.post({ input: key }, { "idempotency-key": key })).json.output, {
        of: key,
      });
    }
  });
});
