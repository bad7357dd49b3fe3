/** Ferry is killed, restarted, stopped: what it accepted survives, each task with its own answer. */
import assert from "node:assert/strict";
import { join } from "node:path";
import { describe, test } from "node:test";
import { assertError, Ferry, Folder, type Answer, type Body } from "./harness.ts";
import { RawClient, postText } from "./raw-client.ts";
import { echo, Gate, hang, stubModel, StubWorker } from "./stub-worker.ts";

// After a kill nothing is known of the worker but `workerMs`, and all that was accepted before is to be done in time.
const timeouts = { queueMs: 3_000_000, workerMs: 30_000, totalMs: 3_500_000 };
const engine = { kind: "memory", dataDir: "./data" };

const durable = (stub: StubWorker, more: Readonly<Record<string, unknown>> = {}) => ({
  engine,
  models: [stubModel([stub], { timeouts, health: { failures: 3, ejectMs: 50 }, ...more })],
});

/** Numbers from 0 to 1 that are the same in every run. */
function randomNumbers(seed: number): () => number {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return state / 2 ** 32;
  };
}

describe("kill -9", () => {
  test("at random moments, three times: every accepted task ends in SUCCESS with its own output", async () => {
    const random = randomNumbers(20260);
    await using folder = await Folder.make();
    await using stub = await StubWorker.listen(
      (call) => void setTimeout(() => call.echo(), 2 + random() * 20),
    );
    const accepted = new Map<string, string>();
    for (let round = 0; round < 3; round++) {
      await using ferry = await Ferry.start(durable(stub, { maxBatchSize: 8 }), folder);
      const enough = 20 + Math.floor(random() * 400);
      await acceptUntilKilled(ferry, round, accepted, enough);
    }
    stub.behave = echo;
    await using ferry = await Ferry.start(durable(stub), folder);
    const results = await Promise.all([...accepted.keys()].map((id) => ferry.result(id)));
    results.forEach((result, i) => assertOwn(result, [...accepted.values()][i]!));
    assert.ok(accepted.size > 100, `${accepted.size} accepted`);
    // Those whose 202 the kill took with it are tasks too, and may be the last to end.
    const health = await ferry.healthy(({ queue_depth, running }) => queue_depth + running === 0);
    assert.deepEqual([health.totals.lost, health.dead_letters], [0, 0]);
  });

  /** Twenty callers post without waiting; at the given number of 202s Ferry is killed under them. */
  async function acceptUntilKilled(
    ferry: Ferry,
    round: number,
    accepted: Map<string, string>,
    enough: number,
  ) {
    const before = accepted.size;
    let killed: Promise<void> | undefined;
    const caller = async (name: number): Promise<void> => {
      for (let i = 0; killed === undefined; i++) {
        const input = `${round}/${name}/${i}`;
        const answer = await ferry.post({ input }, { prefer: "respond-async" }).catch(() => undefined);
        if (answer === undefined) return; // Killed before it answered: nothing was promised.
        assert.equal(answer.status, 202, answer.text);
        accepted.set(answer.json.task_id!, input);
        if (accepted.size >= before + enough) killed ??= ferry.kill();
      }
    };
    await Promise.all(Array.from({ length: 20 }, (_, name) => caller(name)));
    await killed;
  }

  test("finished results, failures, dead letters and keys are there after the restart", async () => {
    await using folder = await Folder.make();
    await using stub = await StubWorker.listen();
    const config = durable(stub, { retry: { max: 0 } });
    const ids = { done: "", cancelled: "", dead: "", keyed: "" };
    const key = { "idempotency-key": "over the restart" };
    {
      await using ferry = await Ferry.start(config, folder);
      ids.done = (await ferry.post({ input: "done" })).json.task_id!;
      ids.keyed = (await ferry.post({ input: "keyed" }, key)).json.task_id!;
      stub.behave = (call) => call.reply(500, "{}");
      ids.dead = await ferry.accept({ input: "dead" });
      assert.equal((await ferry.result(ids.dead)).error, "INFERENCE_FAILED");
      const gate = new Gate();
      stub.behave = gate.hold;
      const blocker = ferry.post({ input: "blocker" });
      await stub.call(4);
      ids.cancelled = await ferry.accept({ input: "cancelled" });
      assert.equal((await ferry.delete(`/v1/result/${ids.cancelled}`)).status, 200);
      gate.open();
      await blocker;
      await ferry.kill();
    }
    stub.behave = echo;
    stub.calls.length = 0;
    await using ferry = await Ferry.start(config, folder);
    assertOwn(await ferry.result(ids.done), "done");
    assert.equal((await ferry.result(ids.cancelled)).error, "CANCELLED");
    assert.equal((await ferry.result(ids.dead)).error, "INFERENCE_FAILED");
    const letters = await ferry.admin("/internal/dead-letters");
    assert.ok(letters.text.includes(ids.dead), letters.text);
    assert.equal((await ferry.post({ input: "keyed" }, key)).json.task_id, ids.keyed);
    assertError(await ferry.post({ input: "other" }, key), 422, "IDEMPOTENCY_CONFLICT");
    const again = new Set(["done", "keyed", "dead", "cancelled"]);
    assert.ok(!stub.inputs.some((input) => again.has(String(input))), "nothing that had ended ran again");
    const replayed = await ferry.admin(`/internal/dead-letters/${ids.dead}/replay`, "POST");
    assert.ok(replayed.status < 300, replayed.text);
    assertOwn(await ferry.result(ids.dead), "dead");
  });

  test("a held caller is cut off; its retry with the same key joins the same task", async () => {
    await using folder = await Folder.make();
    await using stub = await StubWorker.listen(hang);
    const key = { "idempotency-key": "held" };
    let id = "";
    {
      await using ferry = await Ferry.start(durable(stub), folder);
      const held = assert.rejects(ferry.post({ input: "held" }, key));
      await stub.call(1);
      id = (await ferry.post({ input: "held" }, { ...key, prefer: "respond-async" })).json.task_id!;
      await ferry.kill();
      await held;
    }
    stub.behave = echo;
    await using ferry = await Ferry.start(durable(stub), folder);
    const retried = await ferry.post({ input: "held" }, key);
    assert.equal(retried.json.task_id, id);
    assert.deepEqual(retried.json.output, { of: "held" });
  });
});

describe("SIGTERM", () => {
  test("drains: those held get their answers, then exit code 0 and a farewell", async () => {
    const gate = new Gate();
    await using stub = await StubWorker.listen(gate.hold);
    await using ferry = await Ferry.start({ models: [stubModel([stub])], limits: { drainMs: 60_000 } });
    const held = Array.from({ length: 100 }, (_, i) => ferry.post({ input: `held ${i}` }));
    await ferry.healthy((health) => health.queue_depth + health.running === 100);
    ferry.signal("SIGTERM");
    await ferry.line((line) => line.msg === "draining");
    gate.open();
    (await Promise.all(held)).forEach((answer, i) => assertAnswered(answer, `held ${i}`));
    assert.deepEqual(await ferry.exited, { code: 0, signal: null });
    const farewell = ferry.lines.at(-1)!;
    assert.equal(farewell.msg, "stopped");
    assert.equal(farewell["lost"], 0);
  });

  test("while it drains, a request on an open connection is 503 and closes it", async () => {
    const gate = new Gate();
    await using stub = await StubWorker.listen(gate.hold);
    await using ferry = await Ferry.start({ models: [stubModel([stub])], limits: { drainMs: 60_000 } });
    const held = ferry.post({ input: "held" });
    await stub.call(1);
    await using client = await RawClient.connect(ferry.url);
    client.send("GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert.equal((await client.answer()).status, 200);
    // Half a request is on its way when the signal comes: it must not be cut off without an answer.
    const late = postText('{"input":"late"}');
    client.send(late.slice(0, 30));
    ferry.signal("SIGTERM");
    await ferry.line((line) => line.msg === "draining");
    client.send(late.slice(30));
    const refused = await client.answer();
    assertError(refused, 503, "SERVICE_OVERLOADED");
    assert.equal(refused.headers["connection"]?.toLowerCase(), "close");
    gate.open();
    assertAnswered(await held, "held");
    assert.equal((await ferry.exited).code, 0);
  });

  test("it lingers: a request on an open connection is served, and the answer closes it", async () => {
    await using stub = await StubWorker.listen();
    const limits = { drainMs: 60_000, lingerMs: 50_000 };
    await using ferry = await Ferry.start({ models: [stubModel([stub])], limits });
    await using client = await RawClient.connect(ferry.url);
    client.send("GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert.equal((await client.answer()).status, 200);
    ferry.signal("SIGTERM");
    await ferry.line((line) => line.msg === "draining");
    await assert.rejects(RawClient.connect(ferry.url), "no new connection is taken");
    client.send(postText('{"input":"late"}'));
    const answer = await client.answer();
    assert.equal(answer.status, 200, answer.text);
    assert.equal(answer.headers["connection"]?.toLowerCase(), "close");
    // The last connection is gone: nothing is waited for.
    const start = performance.now();
    assert.equal((await ferry.exited).code, 0);
    assert.ok(performance.now() - start < 30_000, `${performance.now() - start} ms`);
  });

  test("whoever had connected when the signal came is served, also those that nobody had looked at yet", async () => {
    await using stub = await StubWorker.listen();
    const limits = { drainMs: 60_000, lingerMs: 8000 };
    await using ferry = await Ferry.start({ models: [stubModel([stub])], limits });
    // While it stands still the kernel takes connections for it, and keeps the signal.
    ferry.signal("SIGSTOP");
    const clients = await Promise.all(Array.from({ length: 50 }, () => RawClient.connect(ferry.url)));
    clients.forEach((client, at) => client.send(postText(JSON.stringify({ input: `early ${at}` }))));
    ferry.signal("SIGTERM");
    ferry.signal("SIGCONT");
    const answers = await Promise.all(clients.map((client) => client.answer()));
    for (const answer of answers) assert.equal(answer.status, 200, answer.text);
    assert.equal((await ferry.exited).code, 0);
  });

  test("an idle Ferry ends at once, with idle connections open", async () => {
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [stubModel([stub])], limits: { drainMs: 60_000 } });
    await ferry.infer("leaves a kept connection");
    await using client = await RawClient.connect(ferry.url);
    const start = performance.now();
    assert.deepEqual(await ferry.stop(), { code: 0, signal: null });
    assert.ok(performance.now() - start < 30_000, `${performance.now() - start} ms`);
    await client.closed();
  });

  test("after drainMs it ends all the same, and the next start finishes what was accepted", async () => {
    await using folder = await Folder.make();
    await using stub = await StubWorker.listen(hang);
    const config = { ...durable(stub), limits: { drainMs: 300 } };
    const accepted = new Map<string, string>();
    {
      await using ferry = await Ferry.start(config, folder);
      for (const input of ["u1", "u2", "u3"]) accepted.set(await ferry.accept({ input }), input);
      await stub.call(1);
      const start = performance.now();
      await ferry.stop();
      // Not when the worker's time is up.
      assert.ok(performance.now() - start < timeouts.workerMs - 5000);
    }
    stub.behave = echo;
    await using ferry = await Ferry.start(config, folder);
    for (const [id, input] of accepted) assertOwn(await ferry.result(id), input);
  });

  test("after drainMs a caller still held gets an answer, not a cut line", async () => {
    await using stub = await StubWorker.listen(hang);
    await using ferry = await Ferry.start({ models: [stubModel([stub])], limits: { drainMs: 300 } });
    const held = ferry.post({ input: "held at the end" }).then(
      (answer) => `${answer.status}`,
      (error: unknown) => String(error),
    );
    await stub.call(1);
    await ferry.stop();
    assert.match(await held, /^(202|503|504)$/);
  });

  for (const second of ["SIGTERM", "SIGINT"] as const) {
    test(`a second signal (${second}) ends it at once`, async () => {
      await using stub = await StubWorker.listen(hang);
      await using ferry = await Ferry.start({ models: [stubModel([stub])], limits: { drainMs: 60_000 } });
      const held = ferry.post({ input: "held" }).catch(() => undefined);
      await stub.call(1);
      ferry.signal("SIGTERM");
      await ferry.line((line) => line.msg === "draining");
      const start = performance.now();
      ferry.signal(second);
      await ferry.exited;
      assert.ok(performance.now() - start < 30_000, `${performance.now() - start} ms`);
      await held;
    });
  }
});

function assertOwn(result: Body, input: string): void {
  assert.equal(result.status, "SUCCESS", JSON.stringify(result));
  assert.deepEqual(result.output, { of: input });
}

function assertAnswered(answer: Answer, input: string): void {
  assert.equal(answer.status, 200, answer.text);
  assertOwn(answer.json, input);
}

describe("an input that takes the process down", () => {
  // As a crash in native code does: nothing of the process is left to say why. Not before `go` is there: a poison that
  // kills the process before it is on disk was never accepted, and is not there after the restart.
  const source = (go: string): string => `import { existsSync } from "node:fs";
  const pause = () => new Promise((resolve) => setTimeout(resolve, 20));
  export default async function (inputs) {
    await pause();
    while (inputs.includes("poison")) {
      if (existsSync(${JSON.stringify(go)})) process.kill(process.pid, "SIGKILL");
      await pause();
    }
    return inputs.map((input) => ({ of: input }));
  }`;

  test("is tried alone after each restart, then a dead letter; all others are served", async () => {
    await using folder = await Folder.make();
    const file = await folder.write("model.mjs", source(join(folder.path, "go")));
    const backend = { kind: "module", function: file, workers: 2 };
    const config = {
      engine,
      models: [{ name: "mine", backend, maxBatchSize: 8, collapse: false, timeouts }],
    };
    const accepted = new Map<string, string>();
    const accept = async (ferry: Ferry, input: string): Promise<void> =>
      void accepted.set(await ferry.accept({ input }), input);

    let deaths = 0;
    {
      await using ferry = await Ferry.start(config, folder);
      const inputs = Array.from({ length: 16 }, (_, i) => (i === 3 ? "poison" : `good ${i}`));
      await Promise.all(inputs.map((input) => accept(ferry, input)));
      await folder.write("go", "");
      assert.equal((await ferry.exited).signal, "SIGKILL");
      deaths++;
    }
    for (let start = 1; ; start++) {
      assert.ok(start <= 8, `still dying after ${deaths} deaths`);
      // It may die before it says that it is ready.
      const starting = await Ferry.start(config, folder).catch(() => undefined);
      if (starting === undefined) {
        deaths++;
        continue;
      }
      await using ferry = starting;
      await accept(ferry, `fresh ${start}`).catch(() => {});
      const dead = ferry.healthy(({ dead_letters }) => dead_letters === 1).catch(() => undefined);
      const up = await Promise.race([ferry.exited.then(() => false), dead.then(() => true)]);
      if (!up || (await dead) === undefined) {
        deaths++;
        continue;
      }
      await ferry.healthy(({ queue_depth, running }) => queue_depth + running === 0);
      for (const [id, input] of accepted) {
        const result = await ferry.result(id);
        if (input === "poison") assert.equal(result.error, "INFERENCE_FAILED");
        else assertOwn(result, input);
      }
      assert.deepEqual(await ferry.infer("after"), { of: "after" });
      const listed = JSON.parse((await ferry.admin("/internal/dead-letters")).text) as {
        readonly dead_letters: readonly { readonly message: string; readonly attempts: number }[];
      };
      assert.match(listed.dead_letters[0]!.message, /the process died 4 times while it ran/);
      break;
    }
    assert.equal(deaths, 4);
    assert.ok([...accepted.values()].some((input) => input.startsWith("fresh")));
  });
});
