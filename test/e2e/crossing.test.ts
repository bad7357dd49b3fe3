/**
 * No caller ever receives another caller's answer: thousands of requests from 200 callers through workers that are
 * slow, refuse, lose outputs and reset connections at random, while callers hang up at random. Every output
 * embeds its input and its parameters, so a crossed answer cannot hide.
 */
import assert from "node:assert/strict";
import { test } from "node:test";
import { usually } from "../fixtures/long.ts";
import { Ferry, type Answer } from "./harness.ts";
import { stubModel, StubWorker, type Behaviour } from "./stub-worker.ts";

const REQUESTS = usually(6000, 20_000);
const CALLERS = 200;
/** Nothing hangs; on one busy core it takes half a minute. */
const LIMIT_MS = 240_000;

interface Marker {
  readonly caller: number;
  readonly n: number;
  /** A batch with such an input is refused. */
  readonly bad: boolean;
}

interface Tally {
  own: number;
  refused: number;
  failed: number;
  hungUp: number;
}

const roll = (share: number): boolean => Math.random() < share;

/** Answers after a random while; sometimes late, wrong, or not at all. */
const chaos: Behaviour = (call) => {
  const act = (): void => {
    if (call.abandoned) return;
    const inputs = call.inputs as Marker[];
    const outputs = inputs.map((of) => ({ of, with: call.parameters ?? null }));
    const fate = Math.random();
    if (fate < 0.01) call.reset();
    else if (inputs.some((input) => input.bad)) call.reply(400, '{"error":"bad"}');
    else if (fate < 0.02) call.outputs(outputs.toSpliced(Math.floor(Math.random() * outputs.length), 1));
    else if (fate < 0.025) call.outputs([outputs[0], ...outputs]);
    else if (fate < 0.03) call.reply(503, "{}", { "retry-after": "0" });
    else call.outputs(outputs);
  };
  setTimeout(act, Math.random() * 12);
};

/** One caller: posts, waits or polls, hangs up now and then; tells what it got. */
async function call(ferry: Ferry, caller: number, count: number, tally: Tally): Promise<void> {
  for (let n = 0; n < count; n++) {
    const input: Marker = { caller, n: roll(0.05) && n > 0 ? n - 1 : n, bad: false };
    const marker = roll(0.004) ? { ...input, bad: true } : input;
    const parameters = roll(0.2) ? { lane: caller % 2 } : undefined;
    const line = new AbortController();
    const hangUp = roll(0.03) ? setTimeout(() => line.abort(), Math.random() * 20) : undefined;
    const headers: Record<string, string> = roll(0.1) ? { prefer: "respond-async" } : {};
    try {
      const first = await ferry.post({ input: marker, parameters }, headers, "/v1/inference", line.signal);
      const answer = first.status === 202 ? await ferry.get(`${first.header("location")}?wait=20`) : first;
      judge(answer, marker, parameters ?? null, tally);
    } catch (error) {
      if (!line.signal.aborted || error instanceof assert.AssertionError) throw error;
      tally.hungUp++;
    } finally {
      clearTimeout(hangUp);
    }
  }
}

/** Counts the answer; fails the test when it belongs to somebody else. */
function judge(answer: Answer, marker: Marker, parameters: unknown, tally: Tally): void {
  const { status, output, error } = answer.json;
  if (status === "SUCCESS") {
    assert.deepEqual(output, { of: marker, with: parameters }, "CROSSED");
    assert.ok(!marker.bad);
    tally.own++;
  } else if (error === "INPUT_REJECTED" && marker.bad) {
    tally.refused++;
  } else {
    assert.ok(answer.status >= 500 || status === "FAILED", answer.text);
    tally.failed++;
  }
}

test(`${REQUESTS} requests, ${CALLERS} callers, every fault at once: 0 crossed, nothing hangs`, async (t) => {
  await using one = await StubWorker.listen(chaos);
  await using two = await StubWorker.listen(chaos);
  await using three = await StubWorker.listen(chaos);
  const stubs = [one, two, three];
  const model = stubModel(stubs, {
    health: { failures: 5, ejectMs: 20 },
    retry: { baseMs: 5 },
  });
  await using ferry = await Ferry.start({ models: [model], limits: { perUserPerMinute: 1_000_000_000 } });
  const tally: Tally = { own: 0, refused: 0, failed: 0, hungUp: 0 };
  const start = performance.now();
  await Promise.all(Array.from({ length: CALLERS }, (_, i) => call(ferry, i, REQUESTS / CALLERS, tally)));
  const took = performance.now() - start;
  const calls = stubs.reduce((sum, stub) => sum + stub.calls.length, 0);
  t.diagnostic(`${JSON.stringify(tally)} in ${Math.round(took)} ms, ${calls} calls`);
  assert.equal(tally.own + tally.refused + tally.failed + tally.hungUp, REQUESTS, "every request ended");
  assert.ok(took < LIMIT_MS, `${took} ms`);
  assert.ok(tally.failed <= REQUESTS * 0.02, `${tally.failed} failed`);
  assert.ok(tally.refused > 0 && tally.hungUp > 0, "the faults took place");
  for (const stub of stubs) assert.ok(Math.max(...stub.calls.map(({ inputs }) => inputs.length)) <= 64);
  const health = await ferry.healthy(({ queue_depth, running }) => queue_depth === 0 && running === 0);
  assert.equal(health.totals.lost, 0);
  assert.equal((await ferry.stop()).code, 0);
});
