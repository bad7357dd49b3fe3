/** Workers that come, rest and go while requests are served, and those that a name of DNS stands for. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { eventually, Ferry, runFerry, Folder, writeConfig } from "./harness.ts";
import { StubWorker } from "./stub-worker.ts";
import { setTimeout as pause } from "node:timers/promises";

const SERVICE_MS = 20;

function slowEcho(): Promise<StubWorker> {
  return StubWorker.listen(async (call) => {
    await pause(SERVICE_MS);
    call.echo();
  });
}

function modelOf(workers: unknown, more: object = {}): Record<string, unknown> {
  const timeouts = { queueMs: 20_000, workerMs: 10_000, totalMs: 30_000 };
  const backend = { kind: "http", workers, ...more };
  return { name: "embed", backend, maxBatchSize: 8, maxWaitMs: 5, cache: { scope: "off" }, timeouts };
}

interface Row {
  readonly name: string;
  readonly state: string;
  readonly in_flight: number;
  readonly address?: string;
}

async function rowsOf(ferry: Ferry): Promise<readonly Row[]> {
  return (JSON.parse((await ferry.admin("/internal/workers")).text) as { workers: Row[] }).workers;
}

/** Callers who each ask for the next thing when they have an answer, until they are told to stop. */
class Callers {
  answered = 0;
  readonly failures: string[] = [];
  readonly #all: readonly Promise<void>[];
  #stopped = false;

  constructor(ferry: Ferry, count: number) {
    this.#all = Array.from({ length: count }, (_, caller) => this.#ask(ferry, caller));
  }

  async #ask(ferry: Ferry, caller: number): Promise<void> {
    for (let turn = 0; !this.#stopped; turn++) {
      const answer = await ferry.post({ input: `${caller}-${turn}` });
      if (answer.status === 200) this.answered++;
      else this.failures.push(`${answer.status} ${answer.text}`);
    }
  }

  async more(count: number): Promise<void> {
    const goal = this.answered + count;
    await eventually(() => Promise.resolve(this.answered >= goal || this.failures.length > 0));
  }

  async stop(): Promise<void> {
    this.#stopped = true;
    await Promise.all(this.#all);
  }
}

describe("while requests are served", () => {
  let first: StubWorker;
  let second: StubWorker;
  let ferry: Ferry;
  before(async () => {
    [first, second] = await Promise.all([slowEcho(), slowEcho()]);
    ferry = await Ferry.start({ models: [modelOf([first.url])] });
  });
  after(async () => {
    await ferry[Symbol.asyncDispose]();
    await Promise.all([first.close(), second.close()]);
  });
  const workers = (...args: string[]) =>
    runFerry(["workers", ...args, "-c", ferry.configFile, "--admin", ferry.adminUrl]);
  const post = (path: string): ReturnType<Ferry["admin"]> => ferry.admin(path, "POST");

  test("one is added, drained, resumed and removed, and no request fails", async () => {
    const callers = new Callers(ferry, 12);
    const [one, two] = [first, second].map(({ url }) => new URL(url).host) as [string, string];
    await callers.more(20);

    const added = await workers("add", second.url, "--json");
    assert.equal(added.code, 0, added.stderr);
    assert.deepEqual(JSON.parse(added.stdout), { model: "embed", name: two, address: second.url });
    await second.call(3);

    const drained = await post(`/internal/workers/${encodeURIComponent(one)}/drain`);
    assert.deepEqual([drained.status, drained.json.status], [200, undefined]);
    assert.match(drained.text, /"state":"draining"/);
    await eventually(async () =>
      (await rowsOf(ferry)).some((row) => row.name === one && row.in_flight === 0),
    );
    const before = first.calls.length;
    await callers.more(60);
    assert.equal(first.calls.length, before, "a drained worker gets nothing");
    assert.equal((await rowsOf(ferry)).find(({ name }) => name === one)?.state, "draining");
    assert.equal((await ferry.health()).healthy_workers, 1);

    assert.equal((await workers("resume", one)).code, 0);
    await first.call(before + 3);

    const removed = await ferry.admin(`/internal/workers/${encodeURIComponent(two)}`, "DELETE");
    assert.ok(removed.status === 202 || removed.status === 204, removed.text);
    await eventually(async () => (await rowsOf(ferry)).every(({ name }) => name !== two));
    const last = second.calls.length;
    await callers.more(40);
    assert.equal(second.calls.length, last);
    await callers.stop();
    assert.deepEqual(callers.failures, []);
    assert.equal(Math.max(first.mostAtOnce, second.mostAtOnce), 1);
  });

  test("what cannot be done is refused in one shape", async () => {
    const [name] = (await rowsOf(ferry)).map((row) => encodeURIComponent(row.name));
    const add = (body: string): Promise<Response> =>
      fetch(`${ferry.adminUrl}/internal/workers`, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body,
      });
    const cases: readonly [
      Promise<{ status: number; text: string | (() => Promise<string>) }>,
      number,
      RegExp,
    ][] = [
      [add(JSON.stringify({ url: first.url })), 409, /is a worker of model embed/],
      [add(JSON.stringify({ url: "http://u:p@gpu/" })), 400, /url holds credentials/],
      [add(JSON.stringify({ model: "x", url: first.url })), 404, /there is no model x; one of embed/],
      [add(JSON.stringify({ uri: "x" })), 400, /there is no \\"uri\\" here, only model and url/],
      [add("{}"), 400, /say where the worker is/],
      [add("["), 400, /not JSON/],
      [post("/internal/workers/nobody/drain"), 404, /there is no worker nobody/],
      [post("/internal/workers/%zz/drain"), 400, /not URL-encoded/],
      [post(`/internal/workers/${name}/drain?model=x`), 404, /there is no model x/],
      [ferry.admin(`/internal/workers/${name}`, "PUT"), 405, /use DELETE here/],
    ];
    for (const [asked, status, message] of cases) {
      const answer = await asked;
      const text = typeof answer.text === "string" ? answer.text : await answer.text();
      assert.equal(answer.status, status, text);
      assert.match(text, message);
      assert.deepEqual(Object.keys(JSON.parse(text) as object).slice(0, 3), [
        "error",
        "message",
        "request_id",
      ]);
    }
  });
});

test("a name of DNS: a worker at its address, asked for by the name, and ferry check shows it", async () => {
  await using stub = await slowEcho();
  const { port } = new URL(stub.url);
  const workers = `dns://localhost:${port}/infer`;
  const models = [modelOf(workers, { dnsMs: 200 })];
  await using folder = await Folder.make();
  const checked = await runFerry(["check", "--probe", "-c", await writeConfig(folder, { models })]);
  assert.equal(checked.code, 0, checked.stderr);
  assert.match(checked.stdout, /1 model, workers by DNS, capacity is learned/);
  assert.match(checked.stdout, new RegExp(`^dns://localhost:${port}/infer: 127\\.0\\.0\\.1\\b`, "m"));
  await using ferry = await Ferry.start({ models });
  assert.deepEqual(await ferry.infer("x"), { of: "x" });
  assert.equal(stub.calls[0]!.headers.host, `localhost:${port}`);
  const row = (await rowsOf(ferry)).find(({ name }) => name === `127.0.0.1:${port}`);
  assert.equal(row?.address, `http://127.0.0.1:${port}/infer`);
  const removed = await ferry.admin(`/internal/workers/127.0.0.1%3A${port}`, "DELETE");
  assert.equal(removed.status, 409);
  assert.match(removed.text, /names 127\.0\.0\.1:\d+; drain it, or take it out of DNS/);
});
