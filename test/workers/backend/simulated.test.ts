import assert from "node:assert/strict";
import { describe, test } from "./suite.ts";
import { SimulatedBackend, type SimulatedOptions } from "../../../src/workers/backend/simulated.ts";
import { SystemClock } from "../../../src/app/clock.ts";
import { CRASH, REJECT, backendContract, batchOf, outputsOf } from "../../contract/backend.ts";
import { ManualClock } from "./manual-clock.ts";

const calm: SimulatedOptions = {
  workers: 1,
  baseMs: 100,
  perItemMs: 2,
  jitter: 0,
  errorRate: 0,
  hangRate: 0,
  shortRate: 0,
  slowRate: 0,
  slowFactor: 10,
  seed: 1,
};
const never = new AbortController().signal;

backendContract("simulated", (mood, workers) => {
  const backend = new SimulatedBackend(
    {
      ...calm,
      workers,
      baseMs: 0.5,
      perItemMs: 0,
      hangRate: mood === "hang" ? 1 : 0,
      shortRate: mood === "short" ? 1 : 0,
      reject: (input) => input === REJECT,
      crash: (input) => input === CRASH,
    },
    new SystemClock(),
  );
  return Promise.resolve(Object.assign(backend, { [Symbol.asyncDispose]: () => Promise.resolve() }));
});

/** Runs one batch of `size` and says how long it took on the clock. */
async function timed(clock: ManualClock, backend: SimulatedBackend, size: number): Promise<number> {
  const startedAt = clock.now();
  const running = backend.workers[0]!.run(batchOf(Array.from({ length: size }, () => "1")), never);
  clock.advance(clock.nextMs);
  await running;
  return clock.now() - startedAt;
}

describe("simulated:", () => {
  test("a batch takes baseMs + n * perItemMs of the clock it was given", async () => {
    const clock = new ManualClock();
    const backend = new SimulatedBackend(calm, clock);
    assert.equal(await timed(clock, backend, 1), 102);
    assert.equal(await timed(clock, backend, 64), 228);
  });

  test("with perTokenMs every input counts as long as the longest", async () => {
    const clock = new ManualClock();
    const backend = new SimulatedBackend({ ...calm, perTokenMs: 0.5 }, clock);
    const running = backend.workers[0]!.run(batchOf(["[1,2,3,4,5,6,7,8]", '"four"', "[1]"]), never);
    assert.equal(clock.nextMs, 100 + 3 * 2 + 3 * 8 * 0.5);
    clock.advance(clock.nextMs);
    await running;
  });

  test("jitter spreads the time, never below 0.3 of it; slow batches take slowFactor longer", async () => {
    const clock = new ManualClock();
    const backend = new SimulatedBackend({ ...calm, perItemMs: 0, jitter: 2, slowRate: 0.1 }, clock);
    const times: number[] = [];
    for (let round = 0; round < 2000; round++) times.push(await timed(clock, backend, 1));
    assert(Math.min(...times) >= 29.999, `${Math.min(...times)}`);
    assert(Math.max(...times) > 2000, "a straggler");
    const slow = times.filter((ms) => ms > 100 * (1 + 2 * 4)).length;
    assert(slow > 50 && slow < 200, `${slow} of 2000 were slow`);
  });

  test("faults come at their rates and the same seed gives the same fates", async () => {
    const fates = async (seed: number): Promise<string[]> => {
      const clock = new ManualClock();
      const rates = { errorRate: 0.2, hangRate: 0.1, shortRate: 0.3 };
      const [worker] = new SimulatedBackend({ ...calm, ...rates, seed }, clock).workers;
      const kinds: string[] = [];
      for (let round = 0; round < 1000; round++) {
        const abort = new AbortController();
        const running = worker!.run(batchOf(["1", "2"]), abort.signal);
        clock.advance(200);
        abort.abort();
        const reply = await running;
        kinds.push("message" in reply ? `${reply.kind} ${reply.message}` : reply.kind);
      }
      return kinds;
    };
    const kinds = await fates(7);
    const share = (text: string): number => kinds.filter((kind) => kind.includes(text)).length / 1000;
    assert(Math.abs(share("simulated failure") - 0.2) < 0.04);
    assert(Math.abs(share("aborted") - 0.1) < 0.03);
    assert(Math.abs(share("unusable") - 0.3) < 0.05);
    assert(Math.abs(share("answered") - 0.4) < 0.05);
    assert.deepEqual(await fates(7), kinds);
    assert.notDeepEqual(await fates(8), kinds);
  });

  test("a killed worker loses its batch and fails the next ones until it is revived", async () => {
    const clock = new ManualClock();
    const backend = new SimulatedBackend({ ...calm, workers: 2 }, clock);
    const [first, second] = backend.workers;
    const running = first!.run(batchOf(["1"]), never);
    backend.kill("gpu-1");
    assert.deepEqual(await running, { kind: "failed", message: "worker was killed", blame: "batch" });
    assert.equal(await first!.probe(), false);
    assert.equal(await second!.probe(), true);
    const refused = first!.run(batchOf(["1"]), never);
    clock.advance(1);
    assert.deepEqual(await refused, { kind: "failed", message: "worker was killed", blame: "nobody" });
    backend.revive("gpu-1");
    const batch = batchOf(["12345678901234567890", "1.50"]);
    const well = first!.run(batch, never);
    clock.advance(200);
    assert.deepEqual(outputsOf(batch, await well), ["12345678901234567890", "1.50"]);
    assert.throws(() => backend.kill("gpu-9"), /gpu-9/);
  });

  test("a worker killed for some time is back by itself, and leaves no alarm behind", async () => {
    const clock = new ManualClock();
    const backend = new SimulatedBackend(calm, clock);
    const [worker] = backend.workers;
    backend.kill("gpu-1", 5000);
    assert.equal(worker!.downFor, 5000);
    assert.equal(clock.nextMs, Infinity);
    clock.advance(4999);
    assert.equal(await worker!.probe(), false);
    clock.advance(1);
    assert.equal(worker!.downFor, 0);
    const batch = batchOf(["1"]);
    const well = worker!.run(batch, never);
    clock.advance(200);
    assert.deepEqual(outputsOf(batch, await well), ["1"]);
  });

  test("an aborted batch leaves no alarm behind", async () => {
    const clock = new ManualClock();
    const [worker] = new SimulatedBackend(calm, clock).workers;
    const abort = new AbortController();
    const running = worker!.run(batchOf(["1"]), abort.signal);
    abort.abort();
    await running;
    assert.equal(clock.nextMs, Infinity);
  });
});
