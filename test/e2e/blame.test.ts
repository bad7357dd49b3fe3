/**
 * One client sends nothing but poison, as fast as it is answered; another sends what any worker can answer. The first gets its
 * errors, the second every answer, and no worker is down on account of the first.
 */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { request } from "undici";
import { exactly, HEADER, OipServer, readMessage, writeMessage } from "../gateway/protocol/servers/oip.ts";
import { startServer } from "../engine/redis-client/servers.ts";
import { Fleet, fleetConfig } from "./fleet.ts";
import {
  type Answer,
  type Config,
  Ferry,
  Folder,
  type Headers,
  type LogLine,
  runFerry,
  writeConfig,
} from "./harness.ts";
import { type Behaviour, stubModel, StubWorker } from "./stub-worker.ts";

const POISON = 120;
const POISONERS = 8;
const GOOD_EVERY_MS = 20;

interface Door {
  post(body: unknown, headers?: Headers): Promise<Answer>;
}

const timeouts = { queueMs: 10_000, workerMs: 3000, totalMs: 15_000 };
const limits = { perUserPerMinute: 1_000_000 };

/** Two clients with a key each. */
async function keysFor(config: string): Promise<{ bad: Headers; good: Headers }> {
  const key = async (user: string): Promise<Headers> => {
    const { code, stdout, stderr } = await runFerry([
      "keys",
      "create",
      "--user",
      user,
      "--tier",
      "paid",
      "-c",
      config,
    ]);
    assert.equal(code, 0, stderr);
    return { authorization: `Bearer ${stdout.trim()}` };
  };
  return { bad: await key("bad"), good: await key("good") };
}

interface Trial {
  readonly door: Door;
  readonly bad?: Headers;
  readonly good?: Headers;
  readonly poison?: number;
  /** All that there are, where they are known. */
  readonly workers?: readonly StubWorker[];
  /** The n-th poison. */
  readonly input: (n: number) => unknown;
}

/** Both clients at once; the answers that each got. */
async function both({
  door,
  bad = {},
  good = {},
  poison = POISON,
  workers = [],
  input,
}: Trial): Promise<{ bad: Answer[]; good: Answer[] }> {
  const answers = { bad: [] as Answer[], good: [] as Answer[] };
  // Every worker is seen to answer first: of one that never was, nobody could say whether it can.
  for (let round = 0; round < 2 || workers.some(({ calls }) => calls.length === 0); round++) {
    assert.ok(round < 100, "a worker is never asked");
    const eight = Array.from({ length: 8 }, (_, at) => door.post({ input: `before ${round} ${at}` }, good));
    answers.good.push(...(await Promise.all(eight)));
  }
  let sent = 0;
  const over = new AbortController();
  const poisoner = async (): Promise<void> => {
    while (sent < poison) {
      const answer = await door.post({ input: input(sent++) }, bad);
      answers.bad.push(answer);
      if (answer.status !== 503) continue;
      // No worker was there to try it.
      sent--;
      await pause(GOOD_EVERY_MS);
    }
  };
  const innocent = async (): Promise<void> => {
    for (let at = 0; !over.signal.aborted; at++) {
      answers.good.push(await door.post({ input: `good ${at}` }, good));
      await pause(GOOD_EVERY_MS);
    }
  };
  const rest = innocent();
  await Promise.all(Array.from({ length: POISONERS }, poisoner));
  over.abort();
  await rest;
  return answers;
}

/** How often a worker was down on account of what it answered: a machine with much to do makes one silent, too. */
function downs(lines: readonly LogLine[]): string[] {
  const changed = lines.filter(({ msg, state }) => msg === "worker changed" && state === "down");
  return changed.map((line) => JSON.stringify(line)).filter((line) => !line.includes("no answer from"));
}

function assertServed({ bad, good }: { bad: Answer[]; good: Answer[] }, codes: RegExp): void {
  const failed = good.filter(({ status }) => status !== 200);
  assert.deepEqual(
    failed.map(({ text }) => text),
    [],
    `${failed.length} of ${good.length} good ones failed`,
  );
  for (const answer of bad) assert.match(answer.json.error ?? "answered", codes, answer.text);
}

const isPoison = (input: unknown): boolean => String(input).startsWith("poison");

const ways: Record<string, Behaviour> = {
  "500": (call) => (call.inputs.some(isPoison) ? call.reply(500, '{"error":"CUDA error"}') : call.echo()),
  NaN: (call) => (call.inputs.some(isPoison) ? call.reply(200, '{"outputs":[NaN]}') : call.echo()),
};

async function stubs(stack: AsyncDisposableStack, count: number, behave: Behaviour): Promise<StubWorker[]> {
  const all: StubWorker[] = [];
  for (let at = 0; at < count; at++) all.push(stack.use(await StubWorker.listen(behave)));
  return all;
}

const distinct = (n: number): string => `poison ${n}`;

describe("workers behind HTTP that answer poison with", () => {
  for (const [way, behave] of Object.entries(ways)) {
    for (const count of [1, 3]) {
      test(`${way}, in one process, workers: ${count}`, async () => {
        await using stack = new AsyncDisposableStack();
        const folder = stack.use(await Folder.make());
        const workers = await stubs(stack, count, behave);
        const models = [stubModel(workers, { timeouts })];
        const config = { models, limits, auth: { mode: "required", keysFile: "./keys.json" } };
        const keys = await keysFor(await writeConfig(folder, config));
        const ferry = stack.use(await Ferry.start(config, folder));
        const answers = await both({ door: ferry, ...keys, workers, input: distinct });
        assertServed(answers, /^(INFERENCE_FAILED|INPUT_REJECTED)$/);
        assert.deepEqual(downs(ferry.lines), []);
        const { healthy_workers: healthy, totals } = await ferry.health();
        assert.equal(healthy, count);
        // Most of them cost one call.
        const calls = totals.calls - answers.good.length;
        assert.ok(calls < 2 * POISON, `${calls} calls for ${POISON} poison`);
      });
    }
  }

  for (const count of [1, 3]) {
    test(`500, on Redis, two batchers, workers: ${count}`, async () => {
      await using stack = new AsyncDisposableStack();
      const folder = stack.use(await Folder.make());
      const redis = stack.use(await startServer());
      const workers = await stubs(stack, count, ways["500"]!);
      const models = [stubModel(workers, { timeouts })];
      const config: Config = fleetConfig({ url: redis.url, durability: "local" }, models, {
        auth: { mode: "required" },
        limits,
      });
      const keys = await keysFor(await writeConfig(folder, config));
      const fleet = stack.use(await Fleet.start({ gateways: 1, batchers: 2 }, config));
      await fleet.spread(count === 1 ? [1] : [1, 2], 10_000);
      // Thin traffic is one batcher's, so the other's worker may never be asked.
      const answers = await both({ door: fleet.gateways[0]!, ...keys, input: distinct });
      assertServed(answers, /^INFERENCE_FAILED$/);
      for (const { lines } of fleet.batchers) assert.deepEqual(downs(lines), []);
    });
  }

  test("500, the same input again and again, and nobody has a key", async () => {
    await using stack = new AsyncDisposableStack();
    const ferry = stack.use(
      await Ferry.start({ models: [stubModel(await stubs(stack, 1, ways["500"]!), { timeouts })] }),
    );
    const answers = await both({ door: ferry, poison: 40, input: () => "poison" });
    assertServed(answers, /^INFERENCE_FAILED$/);
    assert.deepEqual(downs(ferry.lines), []);
  });
});

describe("a client's mistake", () => {
  const x = { name: "x", datatype: "FP32", shape: [1, 1], data: [exactly("1.5")] };
  const { body: json } = writeMessage({}, [x], "inputs");
  /** As tritonclient asks unless it is told otherwise. */
  const binary = writeMessage(
    { parameters: { binary_data_output: true } },
    [
      {
        name: "x",
        datatype: "INT64",
        shape: [1, 1],
        raw: Buffer.from(BigInt64Array.of(2n ** 53n + 1n).buffer),
      },
      { name: "y", datatype: "FP32", shape: [1, 1], raw: Buffer.from(Float32Array.of(0.1).buffer) },
    ],
    "inputs",
  );

  async function front(stack: AsyncDisposableStack, server: OipServer): Promise<Ferry> {
    const backend = { kind: "http", protocol: "oip-v2", workers: [server.endpoint()] };
    const model = { name: "mine", maxBatchSize: 8, backend, timeouts, cache: { scope: "off" } };
    return stack.use(await Ferry.start({ models: [model] }));
  }

  async function ask(ferry: Ferry, path: string, sent: { body: Buffer; headers?: Headers }) {
    const headers = sent.headers ?? { "content-type": "application/json" };
    const answer = await request(`${ferry.url}/v2/models/mine${path}/infer`, {
      method: "POST",
      body: sent.body,
      headers: headers as Record<string, string>,
    });
    return { ...answer, bytes: Buffer.from(await answer.body.arrayBuffer()) };
  }

  test("a version that a server does not have: 404 after one call each, and the worker serves on", async () => {
    await using stack = new AsyncDisposableStack();
    const server = stack.use(await OipServer.listen({ versions: ["1"] }));
    const ferry = await front(stack, server);
    for (let n = 1; n <= 5; n++) {
      const wrong = await ask(ferry, "/versions/7", { body: json });
      assert.equal(wrong.statusCode, 404, wrong.bytes.toString());
      assert.match(wrong.bytes.toString(), /^\{"error":"worker answered 404: .*version 7 is not found/);
      assert.equal(server.refused, n);
    }
    assert.equal((await ask(ferry, "/versions/1", { body: json })).statusCode, 200);
    assert.deepEqual(downs(ferry.lines), []);
    assert.equal((await ferry.health()).healthy_workers, 1);
  });

  test("a wrong URL still is the worker's", async () => {
    await using stack = new AsyncDisposableStack();
    const server = stack.use(await OipServer.listen());
    const backend = { kind: "http", protocol: "oip-v2", workers: [server.endpoint("another")] };
    const model = { name: "mine", backend, timeouts, retry: { max: 0 } };
    const ferry = stack.use(await Ferry.start({ models: [model] }));
    for (let n = 0; n < 3; n++) {
      const { body } = writeMessage({}, [{ ...x, data: [exactly(String(n))] }], "inputs");
      assert.equal((await ask(ferry, "", { body })).statusCode, 502);
    }
    assert.equal((await ferry.health()).healthy_workers, 0);
  });

  for (const jsonOnly of [400, 422, 500]) {
    test(`tensors as bytes for a server without that extension, which answers ${jsonOnly}: served, as bytes`, async () => {
      await using stack = new AsyncDisposableStack();
      const server = stack.use(await OipServer.listen({ jsonOnly }));
      const ferry = await front(stack, server);
      for (let n = 0; n < 6; n++) {
        const { statusCode, headers, bytes } = await ask(ferry, "", binary);
        assert.equal(statusCode, 200, bytes.toString());
        const { tensors } = readMessage(bytes, headers[HEADER] as string | undefined, "outputs");
        assert.deepEqual(
          tensors.map(({ name, raw }) => [name, raw!.toString("hex")]),
          [
            ["x_out", "0100000000002000"],
            ["y_out", "cdcccc3d"],
          ],
        );
      }
      assert.deepEqual([server.refused, server.calls.length], [1, 6]);
      assert.deepEqual(downs(ferry.lines), []);
      const { totals } = await ferry.health();
      assert.equal(totals.retried, 0);
    });
  }

  test("one input that a server answers with 500, alone, sent again and again, ejects nobody", async () => {
    await using stack = new AsyncDisposableStack();
    const workers = await stubs(stack, 1, ways["500"]!);
    const model = stubModel(workers, { timeouts, collapse: false, cache: { scope: "off" } });
    const ferry = stack.use(await Ferry.start({ models: [model] }));
    for (let n = 0; n < 3; n++) assert.equal((await ferry.post({ input: "poison" })).status, 502);
    assert.deepEqual(downs(ferry.lines), []);
    assert.equal((await ferry.post({ input: "good" })).status, 200);
  });

  test("a credential of the client's that its worker refuses is the client's 401, and a used up quota its 429", async () => {
    await using stack = new AsyncDisposableStack();
    const [worker] = await stubs(stack, 1, (call) => {
      const { authorization = "" } = call.headers;
      if (authorization === "Bearer good") return call.echo();
      call.reply(authorization === "Bearer poor" ? 429 : 401, "{}", { "retry-after": "30" });
    });
    const backend = { kind: "http", workers: [worker!.url], forwardAuthorization: true };
    const ferry = stack.use(await Ferry.start({ models: [{ name: "stub", backend, timeouts }] }));
    const post = async (input: number, authorization?: string): Promise<string> => {
      const answer = await ferry.post({ input }, authorization === undefined ? {} : { authorization });
      return `${answer.status} ${answer.json.error ?? "ok"}`;
    };
    for (let n = 0; n < 4; n++) {
      assert.equal(await post(n, "Bearer bad"), "401 UNAUTHENTICATED");
      assert.equal(await post(n), "401 UNAUTHENTICATED");
      assert.equal(await post(n, "Bearer poor"), "429 RATE_LIMITED");
      assert.equal(await post(n, "Bearer good"), "200 ok");
    }
    assert.deepEqual(downs(ferry.lines), []);
    assert.equal(worker!.calls.length, 16);
  });
});

const FUNCTIONS = {
  python: {
    file: "model.py",
    name: "model.py:run",
    text: `
import os

def run(inputs):
    if any(str(text).startswith("crash") for text in inputs):
        os._exit(1)
    return [float("nan") if str(text).startswith("poison") else {"of": text} for text in inputs]
`,
  },
  module: {
    file: "model.ts",
    name: "model.ts",
    text: `
export default function run(inputs: readonly unknown[]): unknown[] {
  if (inputs.some((text) => String(text).startsWith("crash"))) process.exit(1);
  return inputs.map((of) => (String(of).startsWith("poison") ? Number.NaN : { of }));
}
`,
  },
};

for (const kind of ["python", "module"] as const) {
  describe(`a function, kind: ${kind}`, () => {
    const { file, name, text } = FUNCTIONS[kind];
    /** Serves it behind credentials. */
    async function serve(stack: AsyncDisposableStack, workers: number): Promise<Trial> {
      const folder = stack.use(await Folder.make());
      await folder.write(file, text);
      const models = [
        { name: "m", backend: { kind, function: name, workers }, timeouts, cache: { scope: "off" } },
      ];
      const config = { models, limits, auth: { mode: "required", keysFile: "./keys.json" } };
      const keys = await keysFor(await writeConfig(folder, config));
      return { door: stack.use(await Ferry.start(config, folder)), ...keys, input: distinct };
    }

    test("returns NaN for poison; workers: 1", async () => {
      await using stack = new AsyncDisposableStack();
      const trial = await serve(stack, 1);
      assertServed(await both(trial), /^(INFERENCE_FAILED|INPUT_REJECTED)$/);
      assert.deepEqual(downs((trial.door as Ferry).lines), []);
    });

    test("ends with one input; workers: 3: it is tried a few times, then refused for a while", async () => {
      await using stack = new AsyncDisposableStack();
      const trial = await serve(stack, 3);
      const answers = await both({ ...trial, poison: 60, input: () => "crash" });
      assertServed(answers, /^(INFERENCE_FAILED|SERVICE_OVERLOADED)$/);
      const ferry = trial.door as Ferry;
      const deaths = ferry.lines.filter(({ msg }) => /restarting in/.test(String(msg))).length;
      assert.ok(deaths > 0 && deaths <= 8, `${deaths} deaths`);
      const refused = answers.bad.filter(({ json }) => /ended workers/.test(json.message ?? "")).length;
      assert.ok(refused > 0, "none was refused untried");
    });
  });
}
