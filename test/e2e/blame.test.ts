/**
 * One client sends nothing but poison, as fast as it is answered; another sends what any worker can answer. The first gets its
 * errors, the second every answer, and no worker is down on account of the first.
 */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { startServer } from "../redis/servers.ts";
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

const POISON = 300;
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
      const answers = await both({ door: fleet.gateways[0]!, ...keys, workers, input: distinct });
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
