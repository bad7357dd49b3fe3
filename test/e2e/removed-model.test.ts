/** What is left of a model that a reload removed: its results, its dead letters, and what was accepted and had not run. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { connect } from "node:net";
import { setTimeout as pause } from "node:timers/promises";
import { describe, test } from "node:test";
import { assertError, type Config, eventually, Ferry, runFerry, reloadConfig } from "./harness.ts";
import { Gate, stubModel, StubWorker } from "./stub-worker.ts";

const timeouts = { queueMs: 20_000, workerMs: 20_000, totalMs: 40_000 };
const other = { name: "other", backend: { kind: "simulated", workers: 1, baseMs: 5 } };
const limits = { drainMs: 10_000, lingerMs: 0 };

function model(stub: StubWorker, more: Readonly<Record<string, unknown>> = {}): object {
  return stubModel([stub], { timeouts, maxBatchSize: 1, cache: { scope: "off" }, ...more });
}

const reload = (ferry: Ferry, models: readonly object[], more: Config = {}): Promise<void> =>
  reloadConfig(ferry, { limits, ...more, models });

const accept = (ferry: Ferry, input: unknown): Promise<string> => ferry.accept({ input, model: "stub" });

describe("results", () => {
  test("of what had run are read as before; what runs and what waits is served, and polled", async () => {
    const gate = new Gate();
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [model(stub), other], limits });
    const before = await accept(ferry, "before");
    await ferry.result(before);
    stub.behave = gate.hold;
    const running = await accept(ferry, "running");
    await stub.call(2);
    const waiting = await accept(ferry, "waiting");
    const polled = ferry.get(`/v1/result/${waiting}?wait=20`);
    await reload(ferry, [other]);
    assert.deepEqual((await ferry.result(before)).output, { of: "before" });
    assert.equal((await ferry.get(`/v1/result/${running}`)).json.status, "PENDING");
    gate.open();
    assert.deepEqual((await polled).json.output, { of: "waiting" });
    assert.deepEqual((await ferry.result(running)).output, { of: "running" });
    // Long after the model is gone.
    await pause(300);
    assert.deepEqual((await ferry.result(waiting)).output, { of: "waiting" });
    assert.equal((await ferry.get("/v1/result/01M70000000000000000000000")).status, 404);
  });

  test("of what had no turn within drainMs say so, and one that was cancelled stays cancelled", async () => {
    const gate = new Gate();
    await using stub = await StubWorker.listen(gate.hold);
    const short = { limits: { drainMs: 300, lingerMs: 0 } };
    await using ferry = await Ferry.start({ models: [model(stub), other], ...short });
    const running = await accept(ferry, "running");
    await stub.call(1);
    const ids = await Promise.all([1, 2, 3].map((input) => accept(ferry, input)));
    await reload(ferry, [other], short);
    await ferry.delete(`/v1/result/${ids[2]!}`);
    for (const id of ids.slice(0, 2)) {
      const body = (await ferry.result(id)) as { status: string; error?: string; message?: string };
      assert.equal(body.status, "FAILED", JSON.stringify(body));
      assert.match(JSON.stringify(body), /NOT_FOUND.*was removed before this task had its turn/);
    }
    const last = await ferry.get(`/v1/result/${ids[2]!}`);
    assert.doesNotMatch(last.text, /was removed before/);
    gate.open();
    assert.deepEqual((await ferry.result(running)).output, { of: "running" });
  });

  test("of what sits out a retry: served when it is due, refused when that is too late", async () => {
    await using stub = await StubWorker.listen((call) => call.reply(500, "{}"));
    const retry = { max: 3, baseMs: 800, maxMs: 800 };
    await using ferry = await Ferry.start({ models: [model(stub, { retry }), other], limits });
    const soon = await accept(ferry, "soon");
    await stub.call(1);
    await eventually(async () => (await ferry.health()).running === 0);
    await reload(ferry, [other]);
    stub.behave = (call) => call.echo();
    assert.deepEqual((await ferry.result(soon)).output, { of: "soon" });

    const short = { limits: { drainMs: 100, lingerMs: 0 } };
    await reload(ferry, [model(stub, { retry: { ...retry, baseMs: 2000, maxMs: 2000 } }), other], short);
    stub.behave = (call) => call.reply(500, "{}");
    const calls = stub.calls.length;
    const late = await accept(ferry, "late");
    await stub.call(calls + 1);
    await eventually(async () => (await ferry.health()).running === 0);
    await reload(ferry, [other], short);
    const begun = performance.now();
    assert.match(JSON.stringify(await ferry.result(late)), /NOT_FOUND/);
    assert.ok(performance.now() - begun < 10_000, "not at its deadline");
  });
});

describe("a request that is on its way in", () => {
  test("when its model goes is told so, or served", async () => {
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [model(stub), other], limits });
    const body = JSON.stringify({ input: "slow", model: "stub" });
    const socket = connect(Number(new URL(ferry.url).port), "127.0.0.1");
    await once(socket, "connect");
    let text = "";
    socket.setEncoding("utf8").on("data", (chunk: string) => (text += chunk));
    const head = `POST /v1/inference HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n`;
    socket.write(`${head}content-length: ${body.length}\r\n\r\n${body.slice(0, 10)}`);
    await pause(100);
    await reload(ferry, [other]);
    await pause(300);
    socket.write(body.slice(10));
    await eventually(() => text.includes("\r\n\r\n"));
    assert.match(text, /^HTTP\/1\.1 400 /);
    assert.match(text, /is not served here; choose one of: other/);
    socket.destroy();
  });
});

describe("dead letters", () => {
  test("of a model that is gone are kept, shown and purged; replayed once it is back", async () => {
    await using stub = await StubWorker.listen((call) => call.reply(500, "{}"));
    const dying = model(stub, { retry: { max: 0 } });
    await using ferry = await Ferry.start({ models: [dying, other], limits });
    const ids = await Promise.all([1, 2].map((input) => accept(ferry, input)));
    for (const id of ids) assert.equal((await ferry.result(id)).status, "FAILED");
    await reload(ferry, [other]);
    await pause(300);
    const dead = (...words: string[]) =>
      runFerry(["dead", ...words, "-c", ferry.configFile, "--admin", ferry.adminUrl]);
    const listed = await dead("list");
    for (const id of ids) assert.match(listed.stdout, new RegExp(`${id} .*stub`));
    assert.match((await dead("show", ids[0]!)).stdout, /^input +1$/m);
    const refused = await ferry.admin(`/internal/dead-letters/${ids[0]}/replay`, "POST");
    const { message } = assertError(refused, 409, "INVALID_REQUEST");
    assert.equal(message, 'its model "stub" is not in the config; put it back, reload, and replay it then');
    const told = await dead("replay", ids[0]!);
    assert.equal(told.code, 1);
    assert.match(told.stderr, /its model "stub" is not in the config; put it back, reload/);
    assert.equal((await dead("purge", ids[1]!, "--yes")).code, 0);
    assert.equal((await ferry.result(ids[0]!)).status, "FAILED", "its outcome is still there");

    stub.behave = (call) => call.echo();
    await reload(ferry, [dying, other]);
    const again = await dead("replay", ids[0]!);
    assert.equal(again.code, 0, again.stderr);
    assert.deepEqual((await ferry.result(ids[0]!)).output, { of: 1 });
    assert.equal((await ferry.health()).dead_letters, 0);
  });
});
