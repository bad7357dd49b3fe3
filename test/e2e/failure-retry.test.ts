/** Workers that fail, hang, die and come back: retries, deadlines, ejection, dead letters. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { assertError, eventually, Ferry, freePort, runFerry, type Answer } from "./harness.ts";
import { echo, Gate, hang, stubModel, StubWorker, type Behaviour } from "./stub-worker.ts";

const LONG = { queueMs: 50_000, workerMs: 5000, totalMs: 55_000 };
const broken: Behaviour = (call) => call.reply(500, '{"error":"CUDA error"}');

/** The first `n` calls meet `first`, the others `then`. */
function firstCalls(n: number, first: Behaviour, then: Behaviour = echo): Behaviour {
  let calls = 0;
  return (call) => (++calls <= n ? first(call) : then(call));
}

describe("a worker that fails", () => {
  test("500 three times, then fine: the caller sees only the answer", async () => {
    await using stub = await StubWorker.listen(firstCalls(3, broken));
    await using ferry = await Ferry.start({ models: [stubModel([stub])] });
    assert.deepEqual(await ferry.infer("third time unlucky"), { of: "third time unlucky" });
    assert.equal(stub.calls.length, 4);
    const gaps = stub.calls.slice(1).map((call, i) => call.at - stub.calls[i]!.at);
    assert.ok(
      gaps.some((gap) => gap > 10),
      `it backs off: ${gaps.join()}`,
    );
    const { totals } = await ferry.health();
    assert.equal(totals.lost, 0);
    assert.ok(totals.retried > 0);
  });

  test("the other worker takes over at once", async () => {
    await using bad = await StubWorker.listen(broken);
    await using good = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [stubModel([bad, good])] });
    const start = performance.now();
    const answers = await Promise.all(
      Array.from({ length: 200 }, (_, i) => ferry.post({ input: `spread ${i}` })),
    );
    answers.forEach((answer, i) => assert.deepEqual(answer.json.output, { of: `spread ${i}` }));
    for (let i = 0; i < 50; i++) await ferry.infer(`one by one ${i}`);
    // Down for a second at first: on a machine that takes longer for this, it is tried more often.
    const most = 6 + (performance.now() - start) / 1000;
    assert.ok(bad.calls.length <= most, `${bad.calls.length} calls to a worker that always fails`);
  });

  test("a connection reset, or cut in the middle of the reply, is retried", async () => {
    await using stub = await StubWorker.listen(firstCalls(1, (call) => call.reset()));
    await using ferry = await Ferry.start({ models: [stubModel([stub])] });
    assert.deepEqual(await ferry.infer("reset"), { of: "reset" });
    const cut: Behaviour = (call) => call.reply(200, '{"outputs":', { "content-length": "100000" });
    stub.behave = firstCalls(1, cut);
    const answer = ferry.infer("cut");
    await stub.call(3);
    await stub.close(); // Ends the reply that announced more.
    await stub.open();
    assert.deepEqual(await answer, { of: "cut" });
  });

  test("killed in the middle of a batch and started again: nothing is lost", async () => {
    await using stub = await StubWorker.listen(firstCalls(1, hang));
    const health = { failures: 3, ejectMs: 50 };
    await using ferry = await Ferry.start({ models: [stubModel([stub], { timeouts: LONG, health })] });
    const answers = Array.from({ length: 20 }, (_, i) => ferry.post({ input: `survivor ${i}` }));
    await stub.call(1);
    await stub.close();
    await stub.open();
    (await Promise.all(answers)).forEach((answer, i) =>
      assert.deepEqual(answer.json.output, { of: `survivor ${i}` }, answer.text),
    );
    assert.equal((await ferry.health()).totals.lost, 0);
  });

  test("429 with Retry-After is honoured and counts as no attempt", async () => {
    const busy: Behaviour = (call) => call.reply(429, "{}", { "retry-after": "1" });
    await using stub = await StubWorker.listen(firstCalls(3, busy));
    const model = stubModel([stub], { timeouts: LONG, retry: { max: 1, baseMs: 1, maxMs: 2 } });
    await using ferry = await Ferry.start({ models: [model] });
    assert.deepEqual(await ferry.infer("patience"), { of: "patience" });
    assert.equal(stub.calls.length, 4);
    stub.calls.slice(1).forEach((call, i) => {
      const gap = call.at - stub.calls[i]!.at;
      assert.ok(gap >= 990, `asked again after ${gap} ms`);
    });
  });
});

describe("one input that breaks its worker, every setting at its default", () => {
  const breaks: Readonly<Record<string, Behaviour>> = {
    "answers 500": broken,
    "resets the connection": (call) => call.reset(),
  };
  for (const [name, breakdown] of Object.entries(breaks)) {
    for (const size of [11, 64]) {
      test(`${name}, in a batch of ${size}: it is 502, all others are served`, async () => {
        const gate = new Gate();
        await using stub = await StubWorker.listen(gate.hold);
        await using ferry = await Ferry.start({ models: [stubModel([stub])] });
        const blocker = ferry.post({ input: "blocker" });
        await stub.call(1);
        const inputs = Array.from({ length: size }, (_, i) => (i === 5 ? "guilty" : `mate ${i}`));
        const answers = inputs.map((input) => ferry.post({ input }));
        await ferry.healthy((health) => health.queue_depth === size);
        stub.behave = (call) => (call.inputs.includes("guilty") ? breakdown(call) : call.echo());
        gate.open();
        await blocker;
        const done = await Promise.all(answers);
        const victims = done.filter((answer, i) => i !== 5 && answer.status !== 200);
        assert.equal(victims.length, 0, `${victims.length} innocent: ${victims[0]?.text}`);
        assertError(done[5]!, 502, "INFERENCE_FAILED");
        done.toSpliced(5, 1).forEach((answer, i) => {
          assert.deepEqual(answer.json.output, { of: inputs.toSpliced(5, 1)[i] });
        });
        assert.equal((await ferry.health()).dead_letters, 1);
      });
    }
  }
});

describe("deadlines hold while every worker hangs", () => {
  // Far apart: however late a busy machine is, each is told by its own deadline.
  const timeouts = { queueMs: 500, workerMs: 8000, totalMs: 8500 };

  /** The answer and how long it took. */
  async function timed(answer: Promise<Answer>): Promise<{ answer: Answer; ms: number }> {
    const start = performance.now();
    return { answer: await answer, ms: performance.now() - start };
  }

  test("running: 504 at the total timeout; queued: 504 at the queue age; polled: FAILED", async () => {
    await using one = await StubWorker.listen(hang);
    await using two = await StubWorker.listen(hang);
    const model = stubModel([one, two], { maxBatchSize: 1, maxWaitMs: 0, timeouts });
    // What is seen to be hopeless would be refused at the door.
    await using ferry = await Ferry.start({ models: [model], admission: { mode: "off" } });
    const running = [timed(ferry.post({ input: "r1" })), timed(ferry.post({ input: "r2" }))];
    await Promise.all([one.call(1), two.call(1)]);
    const queued = Array.from({ length: 5 }, (_, i) => timed(ferry.post({ input: `q${i}` })));
    const polled = await ferry.accept({ input: "polled" });
    for (const { answer, ms } of await Promise.all(queued)) {
      assertError(answer, 504, "DEADLINE_EXCEEDED");
      assert.ok(ms >= 450 && ms < 7500, `queued for ${ms} ms`);
    }
    const result = await ferry.result(polled);
    assert.deepEqual([result.status, result.error], ["FAILED", "DEADLINE_EXCEEDED"]);
    for (const { answer, ms } of await Promise.all(running)) {
      assertError(answer, 504, "DEADLINE_EXCEEDED");
      assert.ok(ms >= 7900 && ms < 30_000, `ran for ${ms} ms`);
    }
    const seen = [...one.inputs, ...two.inputs].map(String);
    assert.ok(!seen.some((input) => input.startsWith("q")), "no GPU time for what has expired");
    one.behave = two.behave = echo;
    await eventually(async () => (await ferry.post({ input: "well again" })).status === 200);
  });

  test("a hung call is hung up at workerMs and retried elsewhere in time", async () => {
    await using stub = await StubWorker.listen(firstCalls(1, hang));
    // Long enough for the second try, on whatever machine.
    const model = stubModel([stub], { timeouts: { queueMs: 40_000, workerMs: 3000, totalMs: 50_000 } });
    await using ferry = await Ferry.start({ models: [model] });
    assert.deepEqual(await ferry.infer("second try"), { of: "second try" });
    assert.ok(stub.calls[0]!.abandoned, "the first connection was closed");
    assert.equal(stub.mostAtOnce, 1, "never two batches at once on one worker");
  });
});

describe("an outage of the only worker", () => {
  const health = { failures: 3, ejectMs: 200 };

  test("503 with Retry-After while no worker is healthy; then well again by itself", async () => {
    await using stub = await StubWorker.listen(broken);
    await using ferry = await Ferry.start({ models: [stubModel([stub], { health })] });
    const first = await ferry.post({ input: "first" });
    assert.ok([502, 503, 504].includes(first.status), first.text);
    // It is down for so short a time that a request may come when it is tried again.
    let refused = first;
    // Another input each time: attempts of the same one are not counted against a worker.
    let sent = 0;
    await eventually(
      async () => (refused = await ferry.post({ input: `while down ${sent++}` })).status === 503,
    );
    const body = assertError(refused, 503, "SERVICE_OVERLOADED");
    assert.match(refused.header("retry-after"), /^[1-9]\d*$/);
    assert.ok(body.retry_after_ms! > 0);
    stub.behave = echo;
    await ferry.healthy((health) => health.healthy_workers === 1);
    assert.deepEqual(await ferry.infer("while down"), { of: "while down" });
  });

  /** Sends a request every 10 ms for 2 s: their answers, the calls it cost, and how many would be too many. */
  async function ask(ferry: Ferry): Promise<{ answers: Promise<Answer>[]; calls: number; most: number }> {
    const before = (await ferry.health()).totals.calls;
    const answers: Promise<Answer>[] = [];
    const start = performance.now();
    for (let i = 0; performance.now() - start < 2000; i++) {
      answers.push(ferry.post({ input: `during ${i}` }));
      await pause(10);
    }
    const calls = (await ferry.health()).totals.calls - before;
    // A machine that stands still before it counts has given the worker more chances.
    const most = 0.1 * answers.length + 10 + (performance.now() - start - 2000) / health.ejectMs;
    return { answers, calls, most };
  }

  test("of 2 s in which nothing listens: few calls, and what was let in is served after it", async () => {
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [stubModel([stub], { timeouts: LONG, health })] });
    await ferry.infer("before");
    await stub.close();
    const { answers, calls, most } = await ask(ferry);
    await stub.open();
    const done = await Promise.all(answers);
    assert.ok(calls <= most, `${calls} calls for ${done.length} requests in the outage`);
    const refused = done.filter((answer) => answer.status === 503);
    for (const answer of refused) assertError(answer, 503, "SERVICE_OVERLOADED");
    assert.ok(refused.length < done.length, "those that came first were let in");
    done.forEach((answer, i) => {
      if (answer.status !== 503) assert.deepEqual(answer.json.output, { of: `during ${i}` }, answer.text);
    });
    assert.deepEqual(await ferry.infer("after"), { of: "after" });
    assert.equal((await ferry.health()).totals.lost, 0);
  });

  test("of 2 s that answers 500: few calls, few victims, and well again after it", async () => {
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [stubModel([stub], { timeouts: LONG, health })] });
    await ferry.infer("before");
    stub.behave = broken;
    const { answers, calls, most } = await ask(ferry);
    stub.behave = echo;
    const done = await Promise.all(answers);
    assert.ok(calls <= most, `${calls} calls for ${done.length} requests in the outage`);
    done.forEach((answer, i) => {
      if (answer.status === 503) assertError(answer, 503, "SERVICE_OVERLOADED");
      else if (answer.status === 502) assertError(answer, 502, "INFERENCE_FAILED");
      else assert.deepEqual(answer.json.output, { of: `during ${i}` }, answer.text);
    });
    await ferry.healthy((health) => health.healthy_workers === 1);
    assert.deepEqual(await ferry.infer("after"), { of: "after" });
  });
});

describe("dead letters", () => {
  interface Letter {
    readonly task_id: string;
    readonly [field: string]: unknown;
  }

  /** A Ferry whose only worker fails until healed. Its config names the admin port: `ferry dead` reads it. */
  async function failing(stub: StubWorker, more: object = {}): Promise<Ferry> {
    const admin = { listen: `127.0.0.1:${await freePort()}` };
    const model = {
      retry: { max: 1, baseMs: 1, maxMs: 2 },
      health: { failures: 50, ejectMs: 10 },
    };
    return Ferry.start({ ...more, admin, models: [stubModel([stub], model)] });
  }

  async function dead(ferry: Ferry, ...args: readonly string[]): Promise<string> {
    const { code, stdout, stderr } = await runFerry(["dead", ...args, "-c", ferry.configFile]);
    assert.equal(code, 0, stderr);
    return stdout;
  }

  const letters = async (ferry: Ferry): Promise<Letter[]> =>
    (await dead(ferry, "list", "--json"))
      .split("\n")
      .filter(Boolean)
      .map((line) => JSON.parse(line) as Letter);

  test("500 for ever is 502, listed, shown, and SUCCESS under the same id once replayed", async () => {
    await using stub = await StubWorker.listen(broken);
    await using ferry = await failing(stub);
    assertError(await ferry.post({ input: { doomed: 1 } }), 502, "INFERENCE_FAILED");
    const [letter, ...more] = await letters(ferry);
    assert.deepEqual(more, []);
    const id = letter!.task_id;
    const shown = JSON.parse(await dead(ferry, "show", id, "--json")) as Letter;
    assert.equal(shown.task_id, id);
    assert.match(JSON.stringify(shown), /INFERENCE_FAILED/);
    assert.match(JSON.stringify(shown), /doomed/, "the input can be seen");
    const failed = await ferry.result(id);
    assert.deepEqual([failed.status, failed.error], ["FAILED", "INFERENCE_FAILED"]);

    await dead(ferry, "replay", id, "--json");
    await ferry.healthy((health) => health.totals.dead === 2); // Still broken: it returns to the list.
    assert.equal((await letters(ferry))[0]!.task_id, id);

    stub.behave = echo;
    await dead(ferry, "replay", id, "--json");
    const result = await ferry.result(id);
    assert.equal(result.status, "SUCCESS");
    assert.deepEqual(result.output, { of: { doomed: 1 } });
    assert.deepEqual(await letters(ferry), []);
  });

  test("replaying twice runs once; replay and show of an unknown id say so with exit code 1", async () => {
    await using stub = await StubWorker.listen(broken);
    await using ferry = await failing(stub);
    await ferry.post({ input: "twice" });
    const { task_id: id } = (await letters(ferry))[0]!;
    stub.behave = echo;
    stub.calls.length = 0;
    const path = `/internal/dead-letters/${id}/replay`;
    await Promise.all([ferry.admin(path, "POST"), ferry.admin(path, "POST")]);
    assert.equal((await ferry.result(id)).status, "SUCCESS");
    assert.equal(stub.inputs.length, 1);
    for (const verb of ["replay", "show"]) {
      const { code, stderr } = await runFerry(["dead", verb, "unknown", "-c", ferry.configFile]);
      assert.equal(code, 1);
      assert.match(stderr, /^[^\n]*unknown[^\n]*\n$/, "one line that names it");
    }
  });

  test("a replay that finds the queue full is 503 with Retry-After; all of them are paced and reported", async () => {
    await using stub = await StubWorker.listen(broken);
    await using ferry = await failing(stub, { limits: { maxQueued: 1 } });
    for (const input of ["r1", "r2", "r3"]) assertError(await ferry.post({ input }), 502, "INFERENCE_FAILED");
    const gate = new Gate();
    stub.behave = gate.hold;
    stub.calls.length = 0;
    await ferry.accept({ input: "runs" });
    await stub.call(1);
    await ferry.accept({ input: "waits" });
    const [first] = await letters(ferry);
    const refused = await ferry.admin(`/internal/dead-letters/${first!.task_id}/replay`, "POST");
    assertError(refused, 503, "SERVICE_OVERLOADED");
    assert.ok(Number(refused.header("retry-after")) >= 1);
    assert.equal((await ferry.health()).dead_letters, 3);
    const all = dead(ferry, "replay", "--yes");
    gate.open();
    assert.equal((await all).match(/^replayed /gm)?.length, 3);
    await ferry.healthy((health) => health.dead_letters === 0 && health.queue_depth + health.running === 0);
  });

  test("purge forgets one, or with --yes all", async () => {
    await using stub = await StubWorker.listen(broken);
    await using ferry = await failing(stub);
    for (const input of ["p1", "p2", "p3"]) assertError(await ferry.post({ input }), 502, "INFERENCE_FAILED");
    const all = await letters(ferry);
    assert.equal(all.length, 3);
    await dead(ferry, "purge", all[0]!.task_id, "--yes");
    assert.equal((await letters(ferry)).length, 2);
    await dead(ferry, "purge", "--yes");
    assert.deepEqual(await letters(ferry), []);
    assert.equal((await ferry.health()).dead_letters, 0);
    assert.match(await dead(ferry, "list"), /./, "an empty list still says something to a person");
  });
});
