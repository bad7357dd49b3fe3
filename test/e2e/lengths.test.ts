/**
 * Inputs of different length through a whole Ferry, to workers that pad: batches are made of similar ones, every answer
 * is its caller's, and `lengths` decides. Nothing is said of times: a slow machine makes batches late, not unlike.
 */
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { describe, test } from "node:test";
import OpenAI from "openai";
import { embeddingFor, OpenAiServer } from "../gateway/protocol/servers/openai.ts";
import { engineConfig, KINDS } from "./gateways.ts";
import { type Config, eventually, Ferry, Folder, reloadConfig, SOON_MS } from "./harness.ts";

const CALLERS = 96;
const MAX_BATCH = 16;
const MS_PER_TOKEN = 0.02;

/** Computes every row at the length of the longest. */
const PYTHON = `
import os, time

def padded(inputs):
    time.sleep((2 + len(inputs) * max(len(text) for text in inputs) / 4 * ${MS_PER_TOKEN}) / 1000)
    about = {"pid": os.getpid(), "shortest": min(map(len, inputs)), "longest": max(map(len, inputs))}
    return [{"of": text, **about} for text in inputs]
`;

const CLIENT = `
import json, sys, threading, urllib.request

def ask(n):
    for round in range(10):
        text = f"python {n} {round} " + "p" * [20, 300, 1400][(n + round) % 3]
        body = json.dumps({"input": text}).encode()
        request = urllib.request.Request(sys.argv[1] + "/v1/inference", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            own.append(json.load(answer)["output"]["of"] == text)

own = []
threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(own), all(own))
`;

interface Output {
  readonly of: string;
  readonly pid: number;
  readonly shortest: number;
  readonly longest: number;
}

/** Half of some 10 tokens, four tenths of 75, a tenth of 350; no two are the same. */
function textOf(caller: number, n: number): string {
  const dice = (caller * 7 + n * 3) % 10;
  const tokens = dice < 5 ? 8 + (n % 5) : dice < 9 ? 65 + (n % 20) : 300 + (n % 100);
  return `${caller}/${n} `.padEnd(4 * tokens, "x");
}

/** Many callers who each send the next input when they have an answer. */
class Crowd {
  answered = 0;
  /** Texts of `x-ferry-explain`, and what workers said of their batches. */
  readonly whys: string[] = [];
  readonly outputs: Output[] = [];
  readonly #ferry: Ferry;
  readonly #callers: Promise<unknown>;
  #over = false;

  constructor(ferry: Ferry) {
    this.#ferry = ferry;
    this.#callers = Promise.all(Array.from({ length: CALLERS }, (_, caller) => this.#call(caller)));
    this.#callers.catch(() => {});
  }

  async #call(caller: number): Promise<void> {
    for (let n = 0; !this.#over; n++) {
      const input = textOf(caller, n);
      const answer = await this.#ferry.post({ input }, { "x-ferry-explain": "1" });
      assert.equal(answer.status, 200, answer.text);
      const output = answer.json.output as Output;
      assert.equal(output.of, input, "CROSSED");
      this.answered++;
      this.outputs.push(output);
      this.whys.push(String(answer.json.metadata!["why"]));
    }
  }

  /** Forgets what it was told of requests that are on their way by now. */
  async fresh(): Promise<void> {
    const before = this.answered;
    await this.until(() => this.answered >= before + 2 * CALLERS);
    this.whys.length = this.outputs.length = 0;
  }

  /** Polls, and fails as soon as a caller does. */
  async until(holds: () => Promise<boolean> | boolean): Promise<void> {
    const failed = this.#callers.then(() => assert.fail("the callers have gone"));
    failed.catch(() => {});
    await Promise.race([eventually(holds), failed]);
  }

  get similar(): number {
    return this.whys.filter((why) => why.includes("similar length")).length;
  }

  /** Answers from batches of inputs of similar length. */
  get alike(): number {
    return this.outputs.filter(({ shortest, longest }) => longest < 2 * shortest).length;
  }

  async leave(): Promise<void> {
    this.#over = true;
    await this.#callers;
  }
}

interface Cost {
  readonly kind: string;
  readonly grouped: boolean;
}

async function costOf(ferry: Ferry): Promise<Cost> {
  const { models } = JSON.parse((await ferry.admin("/internal/workers")).text) as {
    models: readonly { readonly cost: Cost }[];
  };
  return models[0]!.cost;
}

async function paddingRatio(ferry: Ferry): Promise<number> {
  const { text } = await ferry.admin("/metrics");
  return Number(/^ferry_padding_ratio\{model="\w+"\} (\S+)$/m.exec(text)?.[1]);
}

const limits = { perUserPerMinute: 1_000_000_000 };

for (const kind of KINDS) {
  test(`workers that pad get similar inputs, until a reload says otherwise; one is killed meanwhile, ${kind}`, async () => {
    await using stack = new AsyncDisposableStack();
    const folder = stack.use(await Folder.make());
    const file = await folder.write("model.py", PYTHON);
    const config = (lengths: unknown): Promise<Config> =>
      engineConfig(kind, stack, folder, [
        {
          name: "m",
          backend: { kind: "python", function: `${file}:padded`, workers: 2 },
          maxBatchSize: MAX_BATCH,
          cache: { scope: "off" },
          lengths,
        },
      ]);
    const first = { ...(await config("auto")), limits, admission: { mode: "off" } };
    const again = (lengths: unknown): Config => ({
      ...first,
      models: [{ ...(first as { models?: object[] }).models![0], lengths }],
    });
    const ferry = stack.use(await Ferry.start(first, folder));
    const crowd = new Crowd(ferry);

    // It is learned from batches of different lengths.
    await crowd.until(async () => (await costOf(ferry)).grouped);
    assert.equal((await costOf(ferry)).kind, "padded");
    const before = await paddingRatio(ferry);
    assert.ok(before > 2, `${before} cells were computed for a useful one`);
    await crowd.until(() => crowd.similar > 0);
    await crowd.until(async () => (await paddingRatio(ferry)) < 0.8 * before);

    const client = spawn("python3", ["-c", CLIENT, ferry.url], { stdio: ["ignore", "pipe", "inherit"] });
    let said = "";
    client.stdout.setEncoding("utf8").on("data", (text: string) => (said += text));
    const ended = once(client, "exit", { signal: AbortSignal.timeout(SOON_MS) });
    const { pid } = crowd.outputs.at(-1)!;
    process.kill(pid, "SIGKILL");
    const pids = new Set<number>();
    await crowd.until(() => {
      for (const output of crowd.outputs) if (output.pid !== pid) pids.add(output.pid);
      return pids.size >= 2;
    });
    assert.deepEqual(await ended, [0, null]);
    assert.equal(said, "80 True\n");
    await crowd.fresh();
    await crowd.until(() => crowd.similar > 0);

    await reloadConfig(ferry, again("off"));
    assert.equal((await costOf(ferry)).grouped, false);
    await crowd.fresh();
    await crowd.fresh();
    await crowd.until(() => crowd.outputs.length > 10 * MAX_BATCH);
    assert.equal(crowd.similar, 0);
    const alikeOff = crowd.alike / crowd.outputs.length;

    await reloadConfig(ferry, again([16, 128, 512]));
    assert.equal((await costOf(ferry)).grouped, true, "what was learned is kept");
    await crowd.fresh();
    await crowd.until(() => crowd.outputs.length > 20 * MAX_BATCH && crowd.similar > 0);
    assert.ok(
      crowd.alike / crowd.outputs.length > alikeOff,
      `${alikeOff} of them were in such batches before`,
    );

    await crowd.leave();
    const { totals } = await ferry.healthy(({ queue_depth, running }) => queue_depth + running === 0);
    assert.equal(totals.lost, 0);
    assert.equal(totals.dead, 0);
  });
}

describe("the openai SDK, with several inputs of different length in a request", () => {
  for (const lengths of ["auto", [16, 128, 512]]) {
    test(`lengths: ${JSON.stringify(lengths)}: embeddings are in the order of the inputs`, async () => {
      await using server = await OpenAiServer.listen("the-model");
      server.behave = ({ body }) => {
        const texts = body["input"] as string[];
        const longest = Math.max(...texts.map((text) => text.length));
        return new Promise((resolve) => setTimeout(resolve, 2 + (texts.length * longest * MS_PER_TOKEN) / 4));
      };
      const model = {
        name: "embed",
        backend: {
          kind: "http",
          protocol: "openai-embeddings",
          workers: [`${server.url}/v1/embeddings`],
          model: "the-model",
          authorization: "Bearer sk-upstream",
        },
        maxBatchSize: MAX_BATCH,
        cache: { scope: "off" },
        lengths,
      };
      await using ferry = await Ferry.start({ models: [model], limits, admission: { mode: "off" } });
      const client = new OpenAI({ baseURL: `${ferry.url}/v1`, apiKey: "any", maxRetries: 5 });
      const seen = { grouped: false };
      const asks = async (caller: number): Promise<void> => {
        for (let n = 0; !seen.grouped || n < 8; n++) {
          const input = Array.from({ length: 7 }, (_, at) => textOf(caller, 7 * n + at));
          const { data } = await client.embeddings.create({ model: "embed", input });
          assert.deepEqual(
            data.map(({ embedding }) => embedding),
            input.map((text) => embeddingFor(text)),
          );
        }
      };
      const callers = Promise.all(Array.from({ length: 20 }, (_, caller) => asks(caller)));
      callers.catch(() => {});
      await Promise.race([callers, eventually(async () => (seen.grouped = (await costOf(ferry)).grouped))]);
      await callers;
      const short = ({ body }: (typeof server.calls)[number]): boolean =>
        (body["input"] as string[]).length > 4 &&
        (body["input"] as string[]).every((text) => text.length < 80);
      assert.ok(server.calls.some(short), "short ones went without long ones");
    });
  }
});
