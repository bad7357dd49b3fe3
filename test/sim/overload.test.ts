/**
 * Overload on virtual time: the goals that `predictive` is held to. S is what a batch takes (100 ms), C what
 * the workers can do; loads are in C.
 */
import { unmeasured } from "../../src/core/cost.ts";
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { poisson } from "../../src/cli/plan/workload.ts";
import { usually } from "../fixtures/long.ts";
import "../fixtures/unhooked.ts";
import { answered, BATCH_MS, Crowd, type CrowdOptions, goodput, late, percentile } from "./crowd.ts";

const MIX = [0.1, 0.3, 0.6] as const;
const WARM_MS = 3000;
const latencies = (visits: readonly { latencyMs: number }[]): number[] =>
  visits.map(({ latencyMs }) => latencyMs);

/** The figures of a run, as docs/tuning.md has them. */
function told(crowd: Crowd, to: number): string {
  const tiers = [0, 1, 2].map((tier) => {
    const visits = crowd.between(WARM_MS, to, tier);
    const p99 = percentile(latencies(visits), 0.99).toFixed(0);
    return `${(100 * answered(visits)).toFixed(1)} % in time, p99 ${p99} ms`;
  });
  const all = crowd.between(WARM_MS, to);
  return `${goodput(crowd, WARM_MS, to).toFixed(3)} C, ${(100 * late(all)).toFixed(2)} % late; ${tiers.join("; ")}`;
}

/** Each of these runs is played once, by whichever test asks first. */
const crowds = new Map<string, Promise<Crowd>>();

function overloaded(load: number, seconds: number, options: CrowdOptions): Promise<Crowd> {
  const name = JSON.stringify([load, seconds, options]);
  let crowd = crowds.get(name);
  if (crowd === undefined) crowds.set(name, (crowd = play(load, seconds, options)));
  return crowd;
}

async function play(load: number, seconds: number, options: CrowdOptions): Promise<Crowd> {
  const crowd = new Crowd(options);
  crowd.arrive(poisson(load * crowd.capacity, seconds * 1000, 5));
  await crowd.pass(seconds * 1000 + options.totalMs);
  crowd.simulation.stop();
  return crowd;
}

describe("1.2 to 4 times what the workers can do", () => {
  for (const load of usually([2], [1.2, 2, 4])) {
    test(`${load} C: all of the capacity is used, and what is let in is in time`, async (t) => {
      const crowd = await overloaded(load, 10, { workers: 8, totalMs: 500, mix: MIX });
      t.diagnostic(told(crowd, 10_000));
      assert.ok(goodput(crowd, WARM_MS, 10_000) >= 0.99, `goodput ${goodput(crowd, WARM_MS, 10_000)} C`);
      const settled = late(crowd.between(WARM_MS, 10_000));
      assert.ok(settled <= 0.001, `late ${settled}`);
      // From nothing to this in an instant, with nothing learned yet.
      assert.ok(late(crowd.between(0, WARM_MS)) <= 0.05, `late at first ${late(crowd.between(0, WARM_MS))}`);
    });

    test(`${load} C, one tier, 200 ms: the same`, async () => {
      const crowd = await overloaded(load, 10, { workers: 8, totalMs: 200 });
      assert.ok(goodput(crowd, WARM_MS, 10_000) >= 0.99);
      assert.ok(late(crowd.between(WARM_MS, 10_000)) <= 0.001);
    });

    test(`${load} C, service times that scatter by 15 %: nearly the same`, async () => {
      for (const workers of usually([4], [4, 8])) {
        const crowd = await overloaded(load, 10, { workers, totalMs: 500, mix: MIX, jitter: 0.15 });
        assert.ok(goodput(crowd, WARM_MS, 10_000) >= 0.97);
        assert.ok(late(crowd.visits) <= 0.01);
      }
    });
  }

  test("without admission nothing is in time", async (t) => {
    const crowd = await overloaded(2, 6, { workers: 8, totalMs: 500, mode: "off" });
    t.diagnostic(told(crowd, 6000));
    assert.ok(goodput(crowd, WARM_MS, 6000) < 0.1);
  });
});

describe("workers that differ", () => {
  const fleets = {
    "one is three times as fast": [1, 3.3, 3.3, 3.3, 3.3, 3.3, 3.3, 3.3],
    "two generations": [1, 1, 1, 1, 2.5, 2.5, 2.5, 2.5],
    "three generations": [1, 1, 2.5, 2.5, 2.5, 2.5, 5, 5],
  };
  for (const [name, paces] of Object.entries(fleets).slice(usually(1, 0))) {
    test(`${name}: all of the capacity is used, and what is let in is in time`, async () => {
      for (const load of usually([3], [1.2, 3])) {
        const crowd = await overloaded(load, 15, {
          workers: 8,
          totalMs: 1500,
          mix: MIX,
          paces,
          jitter: 0.05,
        });
        const [used, missed] = [goodput(crowd, 5000, 15_000), late(crowd.between(5000, 15_000))];
        assert.ok(used >= 0.96, `${used} C`);
        assert.ok(missed <= 0.01, `${missed} late`);
      }
    });
  }
});

describe("batches of which some take many times as long", () => {
  const all = [
    { rate: 0.3, factor: 8 },
    { rate: 0.3, factor: 3 },
    { rate: 0.1, factor: 5 },
  ];
  for (const slow of usually(all.slice(0, 1), all)) {
    const mean = 1 + slow.rate * (slow.factor - 1);
    const { rate, factor } = slow;
    test(`${100 * rate} % take ${factor} times as long: nearly the same, and no flood of lines`, async () => {
      const crowd = new Crowd({ workers: 8, totalMs: 2000, mix: MIX, slow, jitter: 0.05 });
      let lines = 0;
      crowd.simulation.events.on("worker.changed", () => lines++);
      crowd.arrive(poisson((2 * crowd.capacity) / mean, 15_000, 5));
      await crowd.pass(18_000);
      crowd.simulation.stop();
      const [used, missed] = [goodput(crowd, 5000, 15_000) * mean, late(crowd.between(5000, 15_000))];
      assert.ok(used >= 0.92, `${used} C`);
      assert.ok(missed <= 0.05, `${missed} late`);
      assert.ok(lines <= 15 * 5, `${lines} lines in 15 s`);
    });
  }
});

test("callers who may queue for less than they may wait: in time as well", async () => {
  const options = { workers: 4, totalMs: 2000, queueMs: 1000, mix: MIX, jitter: 0.15 };
  const crowd = await overloaded(4, 15, options);
  assert.ok(goodput(crowd, 5000, 15_000) >= 0.97);
  assert.ok(late(crowd.between(5000, 15_000)) <= 0.005, `${late(crowd.between(5000, 15_000))}`);
});

test("4 C of enterprise, paid and free: the first does not notice, the last gets its floor", async () => {
  const crowd = await overloaded(4, 10, { workers: 8, totalMs: 500, mix: MIX });
  const enterprise = crowd.between(WARM_MS, 10_000, 0);
  assert.equal(answered(enterprise), 1);
  assert.ok(percentile(latencies(enterprise), 0.99) <= 1.8 * BATCH_MS);
  // 5 % of the seats; what is counted is 140 of them, give or take one.
  assert.ok(goodput(crowd, WARM_MS, 10_000, 2) >= 0.0495);
  assert.ok(goodput(crowd, WARM_MS, 10_000, 1) >= 0.5);
});

test("a surge of the first tier alone: lower tiers keep their floors", async () => {
  const crowd = await overloaded(2, 10, { workers: 8, totalMs: 500, mix: [0.6, 0.25, 0.15] });
  assert.ok(goodput(crowd, WARM_MS, 10_000, 0) >= 0.84);
  assert.ok(goodput(crowd, WARM_MS, 10_000, 1) >= 0.099);
  assert.ok(goodput(crowd, WARM_MS, 10_000, 2) >= 0.0495);
});

describe("half of the workers die silently at 0.85 C", () => {
  const [DEATH_MS, END_MS] = [6000, 21_000];
  async function halved(jitter: number): Promise<{ crowd: Crowd; correctedMs: number }> {
    const crowd = new Crowd({ workers: 8, totalMs: 500, mix: MIX, jitter });
    const { simulation } = crowd;
    let firstLostAt = Infinity;
    let correctedAt = Infinity;
    simulation.events.on("batch.started", ({ batch }) => {
      const dead = simulation.backend.workers.slice(0, 4).some(({ name }) => name === batch.worker);
      if (dead && crowd.now >= DEATH_MS) firstLostAt = Math.min(firstLostAt, batch.startedAt);
    });
    simulation.events.on("worker.changed", () => {
      const { perMs, nominalPerMs } = simulation.dispatcher.horizon(simulation.clock.now() + 10);
      if (perMs <= 0.51 * nominalPerMs) correctedAt = Math.min(correctedAt, simulation.clock.now());
    });
    crowd.arrive(poisson(0.85 * crowd.capacity, END_MS, 5));
    await crowd.pass(DEATH_MS);
    crowd.kill(4);
    await crowd.pass(END_MS - DEATH_MS + 1000);
    simulation.stop();
    // Counted from when the first of them was due: each has lost a batch of its own, started a little later.
    return { crowd, correctedMs: correctedAt - (firstLostAt + BATCH_MS) };
  }

  test("no enterprise request fails, the rest of the capacity is used, the gate knows at once", async (t) => {
    const { crowd, correctedMs } = await halved(0);
    const lateShare = 100 * late(crowd.between(DEATH_MS, END_MS));
    t.diagnostic(
      `corrected after ${correctedMs.toFixed(0)} ms; ${lateShare.toFixed(2)} % late in the 15 s after`,
    );
    assert.equal(answered(crowd.between(WARM_MS, END_MS, 0)), 1);
    assert.ok(correctedMs <= 2.5 * BATCH_MS, `corrected after ${correctedMs} ms`);
    const remaining = 0.5;
    const used = goodput(crowd, DEATH_MS + 1000, END_MS) / remaining;
    assert.ok(used >= 0.98, `${used} of what is left`);
    assert.ok(late(crowd.between(DEATH_MS, END_MS)) < 0.01, `${late(crowd.between(DEATH_MS, END_MS))} late`);
  });

  test("the same with service times that scatter by 15 %", async () => {
    const { crowd } = await halved(0.15);
    assert.equal(answered(crowd.between(WARM_MS, END_MS, 0)), 1);
    assert.ok(goodput(crowd, DEATH_MS + 1000, END_MS) >= 0.97 * 0.5);
    assert.ok(late(crowd.between(DEATH_MS, END_MS)) < 0.01);
  });

  test("and when they come back, everything is let in again", async () => {
    const crowd = new Crowd({ workers: 8, totalMs: 500, mix: MIX });
    crowd.arrive(poisson(0.85 * crowd.capacity, 40_000, 5));
    await crowd.pass(5000);
    crowd.kill(4);
    await crowd.pass(4000);
    crowd.revive();
    await crowd.pass(32_000);
    crowd.simulation.stop();
    // Tried again after 1, 2, 4, 8 … s: by 15 s after the revival every worker has been.
    assert.ok(answered(crowd.between(28_000, 40_000)) >= 0.999);
  });
});

test("a flash crowd that comes again when it is told to is served, one by one", async (t) => {
  const crowd = new Crowd({ workers: 8, totalMs: 500, mix: [0, 0, 1], retries: 5 });
  const { capacity } = crowd;
  const [from, to, end] = [10_000, 13_000, 60_000];
  const calm = poisson(0.4 * capacity, end, 5);
  const flash = poisson(2.6 * capacity, to - from, 6).map((at) => at + from);
  crowd.arrive([...calm, ...flash].sort((a, b) => a - b));
  await crowd.pass(end + 10_000);
  crowd.simulation.stop();
  const attempts = crowd.visits.reduce((sum, visit) => sum + visit.attempts, 0) / crowd.visits.length;
  const again = crowd.visits.filter((visit) => visit.attempts > 1 && visit.fate === "answered");
  const waits = again.map(({ doneAt, firstAt }) => doneAt - crowd.simulation.startedAt - firstAt);
  // What came too much, at the rate that is free after it: nobody can be faster.
  const drainMs = (2 * (to - from)) / 0.6;
  t.diagnostic(
    `${(100 * answered(crowd.visits)).toFixed(2)} % answered, ${attempts.toFixed(2)} attempts, p95 ${percentile(waits, 0.95).toFixed(0)} of ${drainMs} ms`,
  );
  assert.ok(answered(crowd.visits) >= 0.995, `${answered(crowd.visits)} answered`);
  assert.ok(attempts <= 1.4, `${attempts} attempts`);
  assert.ok(percentile(waits, 0.95) <= 1.05 * drainMs, `p95 ${percentile(waits, 0.95)} of ${drainMs} ms`);
});

test("an estimate that is far too high does not lock everybody out for ever", async () => {
  const crowd = new Crowd({ workers: 2, totalMs: 500 });
  for (let sample = 0; sample < 20; sample++) {
    for (const slot of crowd.simulation.dispatcher.workers.slots) {
      crowd.simulation.dispatcher.workers.answered(
        slot,
        unmeasured(64),
        60_000,
        crowd.simulation.clock.now(),
      );
    }
  }
  crowd.arrive(poisson(0.7 * crowd.capacity, 30_000, 5));
  await crowd.pass(31_000);
  crowd.simulation.stop();
  assert.ok(answered(crowd.between(20_000, 30_000)) >= 0.99);
});
