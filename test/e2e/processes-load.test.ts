/**
 * `ferry serve --processes` under more than it can do: bounds and turns hold for all gateways together, and no caller gets
 * another's answer, whatever workers, callers and texts do.
 */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { claims, pem, rsaPair, token } from "../gateway/admission/stage.ts";
import { patient } from "./fleet.ts";
import { counter, engineConfig, KINDS, Several } from "./gateways.ts";
import { type Answer, assertError, eventually, Folder, type Headers } from "./harness.ts";
import { Gate, stubModel, StubWorker, type Behaviour } from "./stub-worker.ts";

const ISSUER = rsaPair();
const as = (sub: string): Headers => ({
  authorization: `Bearer ${token(ISSUER, claims(Date.now(), { sub, tier: "paid" }))}`,
});

for (const kind of KINDS) {
  test(`limits.maxQueued holds for all gateways together, ${kind}`, async () => {
    const gate = new Gate();
    await using stack = new AsyncDisposableStack();
    const folder = stack.use(await Folder.make());
    const stub = stack.use(await StubWorker.listen(gate.hold));
    const model = stubModel([stub], { timeouts: patient, maxBatchSize: 4 });
    const limits = { maxQueued: 12 };
    const more = { limits, admission: { mode: "off" } };
    const ferry = stack.use(await Several.start(await engineConfig(kind, stack, folder, [model], more), 2));
    const [a, b] = ferry.doors();
    const first = a!.post({ input: "holds the worker" });
    await stub.call(1);
    const accepted: string[] = [];
    const refused: Answer[] = [];
    for (let n = 0; n < 20; n++) {
      const answer = await (n % 2 === 0 ? a! : b!).post(
        { input: `queued ${n}` },
        { prefer: "respond-async" },
      );
      if (answer.status === 202) accepted.push(answer.json.task_id!);
      else refused.push(answer);
    }
    // A batcher on Redis holds what it has read for its next batches.
    if (kind === "memory") assert.equal(accepted.length, 12);
    assert.ok(accepted.length <= 12 + 1, `${accepted.length} were accepted`);
    assert.ok(refused.length >= 7);
    for (const answer of refused) {
      assertError(answer, 503, "SERVICE_OVERLOADED");
      assert.ok(Number(answer.header("retry-after")) >= 1);
    }
    const shed = (): Promise<number> => counter(ferry.part, "ferry_shed_total", 'reason="full"');
    await eventually(async () => (await shed()) === refused.length);
    gate.open();
    assert.equal((await first).status, 200);
    for (const id of accepted) assert.equal((await b!.result(id)).status, "SUCCESS");
  });
}

describe("tenants take turns, whichever gateway they are at", () => {
  for (const count of [1, 4]) {
    test(`forty tenants that flood one gateway do not starve a quiet one, ${count} gateways`, async () => {
      await using folder = await Folder.make();
      const publicKeyFile = await folder.write("jwt.pem", pem(ISSUER));
      const jwt = { issuer: "https://id.example", audience: "ferry", publicKeyFile };
      const gate = new Gate();
      await using stub = await StubWorker.listen(gate.hold);
      const model = stubModel([stub], {
        timeouts: patient,
        maxBatchSize: 41,
        maxWaitMs: 1,
        cache: { scope: "off" },
      });
      const config = {
        models: [model],
        auth: { mode: "required", jwt },
        limits: { perUserPerMinute: 100_000 },
        admission: { mode: "off" },
      };
      await using ferry = await starts(config, count);
      const { post } = ferry;
      const first = post(0, { input: "holds the worker" }, as("first"));
      await stub.call(1);
      // Forty tenants with eight tasks each at one gateway, and one task of a quiet tenant at the last.
      for (let n = 0; n < 320; n += 8) {
        const some = Array.from({ length: 8 }, (_, at) =>
          post(0, { input: `flood ${n + at}` }, { ...as(`t${(n + at) % 40}`), prefer: "respond-async" }),
        );
        for (const { status, text } of await Promise.all(some)) assert.equal(status, 202, text);
      }
      const quiet = post(count - 1, { input: "quiet" }, { ...as("quiet"), prefer: "respond-async" });
      assert.equal((await quiet).status, 202);
      gate.open();
      stub.behave = (call) => call.echo();
      assert.equal((await first).status, 200);
      await eventually(() => stub.inputs.length === 322);
      // The first batch after the one that held the worker has one task of each.
      assert.ok(stub.calls[1]!.inputs.includes("quiet"), "the quiet tenant is in the first batch");
      const tenants = stub.calls[1]!.inputs.map(
        (input) => Number(/flood (\d+)/.exec(String(input))?.[1]) % 40,
      );
      assert.equal(new Set(tenants).size, 41);
    });
  }
});

interface Started extends AsyncDisposable {
  readonly post: (gateway: number, body: unknown, headers: Headers) => Promise<Answer>;
}

/** One process is the measure of several. */
async function starts(config: Readonly<Record<string, unknown>>, count: number): Promise<Started> {
  if (count === 1) {
    const { Ferry } = await import("./harness.ts");
    const ferry = await Ferry.start(config);
    return {
      post: (_, body, headers) => ferry.post(body, headers),
      [Symbol.asyncDispose]: () => ferry[Symbol.asyncDispose](),
    };
  }
  const several = await Several.start(config, count);
  const doors = several.doors();
  return {
    post: (at, body, headers) => doors[at]!.post(body, headers),
    [Symbol.asyncDispose]: () => several[Symbol.asyncDispose](),
  };
}

const CALLERS = 60;
const EACH = 20;
/** Of one and of two bytes, beyond the first plane, and those that JSON may write as escapes. */
const ALPHABETS = ["plain", "für Zoë ÿ", "漢字", "😀🏴", "\u2028\u2029", 'quote " \\ / \b', "ñ漢😀"];

const roll = (share: number): boolean => Math.random() < share;

/** Answers after a random while; sometimes with an error, or not at all. */
const chaos: Behaviour = (call) => {
  const act = (): void => {
    if (call.abandoned) return;
    const fate = Math.random();
    const outputs = call.inputs.map((of) => ({ of, with: call.parameters ?? null }));
    if (fate < 0.01) call.reset();
    else if (fate < 0.02) call.outputs(outputs.slice(1));
    else if (fate < 0.03) call.reply(503, "{}", { "retry-after": "0" });
    else call.outputs(outputs);
  };
  setTimeout(act, Math.random() * 12);
};

test(`${CALLERS * EACH} requests at three gateways, of any characters, while callers hang up: 0 crossed`, async (t) => {
  await using stubs = new AsyncDisposableStack();
  const workers = [stubs.use(await StubWorker.listen(chaos)), stubs.use(await StubWorker.listen(chaos))];
  const model = stubModel(workers, {
    health: { failures: 5, ejectMs: 20 },
    retry: { baseMs: 5 },
    timeouts: patient,
  });
  await using folder = await Folder.make();
  const engine = { kind: "memory", dataDir: `${folder.path}/data` };
  await using ferry = await Several.start({ engine, models: [model], admission: { mode: "off" } }, 3);
  const doors = ferry.doors();
  const tally = { own: 0, failed: 0, hungUp: 0 };
  const caller = async (name: number): Promise<void> => {
    for (let n = 0; n < EACH; n++) {
      const door = doors[(name + n) % 3]!;
      const text = `${ALPHABETS[(name * 7 + n) % ALPHABETS.length]} ${name}/${n} `.repeat(1 + (n % 5) * 40);
      const input = { name, n, text };
      const parameters = roll(0.3) ? { lane: ALPHABETS[name % 3] } : undefined;
      const line = new AbortController();
      const hangUp = roll(0.05) ? setTimeout(() => line.abort(), Math.random() * 30) : undefined;
      const headers: Headers = roll(0.2) ? { prefer: "respond-async" } : {};
      try {
        const first = await door.post({ input, parameters }, headers, "/v1/inference", line.signal);
        const { status, text, json } =
          first.status === 202 ? await doors[n % 3]!.get(`${first.header("location")}?wait=20`) : first;
        if (json.status === "SUCCESS") {
          assert.deepEqual(json.output, { of: input, with: parameters ?? null }, "CROSSED");
          tally.own++;
        } else {
          assert.ok(status >= 500 || json.status === "FAILED", text);
          tally.failed++;
        }
      } catch (error) {
        if (!line.signal.aborted || error instanceof assert.AssertionError) throw error;
        tally.hungUp++;
      } finally {
        clearTimeout(hangUp);
      }
    }
  };
  await Promise.all(Array.from({ length: CALLERS }, (_, name) => caller(name)));
  t.diagnostic(JSON.stringify(tally));
  assert.equal(tally.own + tally.failed + tally.hungUp, CALLERS * EACH);
  assert.ok(tally.failed <= CALLERS * EACH * 0.02, `${tally.failed} failed`);
  assert.ok(tally.hungUp > 0);
  await eventually(async () => {
    const { queue_depth, running } = await ferry.part.health();
    return queue_depth === 0 && running === 0;
  });
  assert.equal(await counter(ferry.part, "ferry_lost_total"), 0);
});
