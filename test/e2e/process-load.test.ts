/** A process with more requests than it can handle, whatever its workers could do. */
import assert from "node:assert/strict";
import { chmod } from "node:fs/promises";
import { join } from "node:path";
import { describe, test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { type Answer, eventually, Ferry, Folder, ROOT, runFerry, writeConfig } from "./harness.ts";
import { postText, RawClient } from "./raw-client.ts";

/** What each request takes of the process's time. */
const REQUEST_MS = 5;
/** Together they would wait three seconds. */
const CALLERS = 600;
/** A refused caller comes again, but not at once. */
const COME_AGAIN_MS = 50;

const config = {
  models: [
    { name: "m", backend: { kind: "simulated", workers: 64, baseMs: 1 }, maxBatchSize: 64, maxWaitMs: 5 },
  ],
  tiers: { gold: {}, tin: {} },
  auth: { mode: "required", keysFile: "./keys.json" },
  limits: { perUserPerMinute: 1_000_000 },
  // On a busy machine batches of 1 ms are overdue, and the workers would seem too few.
  admission: { mode: "off" },
};

async function createKey(folder: Folder, tier: string): Promise<Record<string, string>> {
  const file = join(folder.path, "ferry.yaml");
  const made = await runFerry(["keys", "create", "--user", `user-${tier}`, "--tier", tier, "-c", file]);
  assert.equal(made.code, 0, made.stderr);
  return { authorization: `Bearer ${made.stdout.trim()}` };
}

/** Ferry, in a process in which each request takes `REQUEST_MS`. */
async function startSlow(folder: Folder): Promise<Ferry> {
  const options = `--import=${join(ROOT, "test/fixtures/slow-requests.mjs")}`;
  const lines = [
    "#!/bin/sh",
    `export SLOW_REQUEST_MS=${REQUEST_MS} NODE_OPTIONS="${options}"`,
    `exec "${join(ROOT, "bin/ferry")}" "$@"`,
  ];
  const program = await folder.write("slow-ferry", `${lines.join("\n")}\n`);
  await chmod(program, 0o755);
  const ferry = await Ferry.start(config, folder, program);
  ferry.comesAgain = false;
  return ferry;
}

/** Callers that each send their next request with the last answer, until they are told to stop. */
class Crowd {
  readonly answers: { readonly answer: Answer; readonly ms: number }[] = [];
  readonly #stop = new AbortController();
  readonly #callers: readonly Promise<void>[];

  constructor(ferry: Ferry, headers: Record<string, string>) {
    this.#callers = Array.from({ length: CALLERS }, (_, caller) => this.#call(ferry, headers, caller));
  }

  get refused(): readonly { readonly answer: Answer; readonly ms: number }[] {
    return this.answers.filter(({ answer }) => answer.status === 503);
  }

  async stop(): Promise<void> {
    this.#stop.abort();
    await Promise.all(this.#callers);
  }

  async #call(ferry: Ferry, headers: Record<string, string>, caller: number): Promise<void> {
    for (let at = 0; !this.#stop.signal.aborted; at++) {
      const sentAt = performance.now();
      const answer = await ferry.post({ input: `${caller} ${at}` }, headers).catch(closedMeanwhile);
      if (answer === undefined) continue;
      this.answers.push({ answer, ms: performance.now() - sentAt });
      if (answer.status !== 200) await pause(COME_AGAIN_MS);
    }
  }
}

/** A connection that rested until the process closed it, just when it was used again: the request was never read. */
function closedMeanwhile(error: unknown): undefined {
  assert.match((error as NodeJS.ErrnoException).code ?? "", /^(?:ECONNRESET|UND_ERR_SOCKET)$/, String(error));
}

function median(values: readonly number[]): number {
  return values.toSorted((a, b) => a - b)[values.length >> 1]!;
}

async function sum(ferry: Ferry, pattern: RegExp): Promise<number> {
  const { text } = await ferry.admin("/metrics");
  const lines = text.split("\n").filter((line) => pattern.test(line));
  return lines.reduce((total, line) => total + Number(line.slice(line.lastIndexOf(" "))), 0);
}

describe("a process that is full", () => {
  test("refuses the last tier quickly, serves the first, answers everybody, and recovers", async () => {
    await using folder = await Folder.make();
    await writeConfig(folder, config);
    const [gold, tin] = [await createKey(folder, "gold"), await createKey(folder, "tin")];
    await using ferry = await startSlow(folder);
    const crowd = new Crowd(ferry, tin);
    // Until connections are no longer new, which is a second, refusals hit the first tier too.
    await eventually(() => crowd.refused.length > 2 * CALLERS);
    await pause(1500);
    const before = { refused: crowd.refused.length, all: crowd.answers.length };
    const served: Answer[] = [];
    for (let at = 0; at < 8; at++) served.push(await ferry.post({ input: `gold ${at}` }, gold));
    const refusedShare = (crowd.refused.length - before.refused) / (crowd.answers.length - before.all);
    const goldRefused = served.filter(({ status }) => status !== 200).length / served.length;
    assert.ok(refusedShare > 0.3, `${refusedShare} of the last tier is refused`);
    assert.ok(
      goldRefused < refusedShare / 2,
      `${goldRefused} of the first tier, ${refusedShare} of the last`,
    );
    assert.equal((await ferry.get("/healthz")).status, 200);
    assert.equal((await ferry.admin("/internal/health")).status, 200);
    await crowd.stop();
    const ok = crowd.answers.filter(({ answer }) => answer.status === 200);
    const { refused } = crowd;
    const statuses = new Set(crowd.answers.map(({ answer }) => answer.status));
    assert.deepEqual(statuses, new Set([200, 503]), [...statuses].join());
    const [okMs, refusedMs] = [ok, refused].map((some) => median(some.map(({ ms }) => ms)));
    assert.ok(refusedMs! < okMs! / 2, `a refusal takes ${refusedMs} ms, an answer ${okMs} ms`);
    for (const { answer } of refused.slice(-100)) {
      const { error, message, request_id: id, retry_after_ms: ms = NaN } = answer.json;
      assert.equal(error, "SERVICE_OVERLOADED");
      assert.match(
        message!,
        /^this gateway process has more requests than it can handle: tier tin is refused/,
      );
      assert.match(id!, /^[0-9A-Z]{36}$/);
      assert.ok(ms >= 1000 && ms < 2000, answer.text);
      assert.equal(answer.header("retry-after-ms"), String(ms));
      assert.ok(Number(answer.header("retry-after")) * 1000 >= ms);
    }
    const ids = new Set(refused.map(({ answer }) => answer.json.request_id));
    assert.equal(ids.size, refused.length);
    const goldRefusals = served.filter(({ status }) => status === 503).length;
    const counted = await sum(ferry, /^ferry_shed_total\{.*reason="full"/);
    assert.equal(counted, refused.length + goldRefusals);
    const answered = await sum(ferry, /^ferry_requests_total\{.*code="503"/);
    assert.equal(answered, refused.length + goldRefusals);
    assert.equal((await ferry.post({ input: "after" }, tin)).status, 200);
  });

  test("a connection that was refused goes on, whatever it sends next", async () => {
    await using folder = await Folder.make();
    await writeConfig(folder, config);
    const tin = await createKey(folder, "tin");
    await using ferry = await startSlow(folder);
    await using client = await RawClient.connect(ferry.url);
    const crowd = new Crowd(ferry, tin);
    const key = `Authorization: ${tin["authorization"]}`;
    let status = 0;
    for (let at = 0; status !== 503; at++) {
      client.send(postText(JSON.stringify({ input: `one ${at}` }), key));
      ({ status } = await client.answer());
    }
    // In one piece: the answers come in the order of the requests.
    const health = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
    client.send(postText(JSON.stringify({ input: "two" }), key) + health);
    const answers = [await client.answer(), await client.answer()];
    assert.ok([200, 503].includes(answers[0]!.status), answers[0]!.text);
    assert.deepEqual([answers[1]!.status, answers[1]!.text], [200, '{"status":"ok"}']);
    // In two: its body belongs to the request that was refused.
    const body = JSON.stringify({ input: "three" });
    const text = postText(body, key);
    client.send(text.slice(0, -body.length));
    await pause(50);
    client.send(body + health);
    assert.ok([200, 503].includes((await client.answer()).status));
    assert.equal((await client.answer()).text, '{"status":"ok"}');
    await crowd.stop();
    client.send(postText(JSON.stringify({ input: "four" }), key));
    assert.equal((await client.answer()).status, 200);
  });
});
