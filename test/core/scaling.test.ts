/** The autoscaler's rules one by one; whole days of traffic are in test/sim/scaling.test.ts. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { Autoscaler, type Scaling, type ScalingRules, type Sighting } from "../../src/core/scaling.ts";

const RULES: ScalingRules = {
  min: 1,
  max: 40,
  up: [
    { depth: 500, forMs: 30_000, add: 3 },
    { depth: 100, forMs: 60_000, add: 1 },
    { load: 0.85, forMs: 300_000, add: 1 },
  ],
  down: { load: 0.4, forMs: 900_000, remove: 1 },
  coolDownMs: 300_000,
  maxRemoveShare: 0.2,
  target: 0.7,
  coldStartMs: 30_000,
  forecast: true,
};
/** 64 in 100 ms. */
const PACE = 0.64;

class Watch {
  readonly scaler: Autoscaler;
  at = 0;
  readonly changes: number[] = [];

  constructor(rules: Partial<ScalingRules> = {}, desired = 10) {
    this.scaler = new Autoscaler({ ...RULES, ...rules }, desired, 0);
  }

  get desired(): number {
    return this.scaler.scaling.desired;
  }

  /** Looks each second for so long; `load` is of ten workers. */
  look(forMs: number, { load = 0.5, depth = 0, healthy = 10, pace = PACE } = {}): Scaling {
    for (const until = this.at + forMs; this.at < until; this.at += 1000) {
      const before = this.desired;
      const arrivalsPerMs = load * PACE * 10;
      const sighting: Sighting = { at: this.at, healthy, depth, arrivalsPerMs, workerPerMs: pace };
      const { desired } = this.scaler.see(sighting);
      if (desired !== before) this.changes.push(desired);
    }
    return this.scaler.scaling;
  }
}

describe("more", () => {
  test("a long line for half a minute: three; a shorter one for a minute: one", () => {
    const watch = new Watch({ forecast: false });
    watch.look(30_000, { depth: 501 });
    assert.equal(watch.desired, 10);
    assert.match(watch.look(2000, { depth: 501 }).reason, /more than 500 tasks queued for 30 s: \+3/);
    assert.equal(watch.desired, 13);
    const other = new Watch({ forecast: false });
    other.look(61_000, { depth: 101 });
    assert.equal(other.desired, 11);
  });

  test("a line that was short in between starts anew", () => {
    const watch = new Watch({ forecast: false });
    for (let time = 0; time < 5; time++) {
      watch.look(29_000, { depth: 900 });
      watch.look(1000, { depth: 0 });
    }
    assert.deepEqual(watch.changes, []);
  });

  test("load above 85 % for five minutes: one", () => {
    const watch = new Watch({ forecast: false });
    assert.match(watch.look(302_000, { load: 0.9 }).reason, /load above 85 % for 5 min: \+1/);
  });

  test("not again while those that were asked for are on their way", () => {
    const watch = new Watch({ forecast: false, coldStartMs: 120_000 });
    watch.look(32_000, { depth: 900 });
    watch.look(100_000, { depth: 900 });
    assert.deepEqual(watch.changes, [13]);
    watch.look(60_000, { depth: 900 });
    assert.deepEqual(watch.changes, [13, 16]);
  });

  test("what is expected when they would be ready is asked for at once, in one step", () => {
    const watch = new Watch();
    watch.look(120_000, { load: 0.5 });
    assert.deepEqual(watch.changes, []);
    const { desired, reason } = watch.look(60_000, { load: 2.5 });
    assert(desired >= Math.ceil(25 / 0.7), String(desired));
    assert.match(reason, /requests\/s expected in 30 s need \d+ workers at 70 % load/);
  });

  test("a peak of five seconds is noise", () => {
    const watch = new Watch();
    watch.look(60_000, { load: 0.6 });
    watch.look(5000, { load: 1.2 });
    watch.look(60_000, { load: 0.6 });
    assert.deepEqual(watch.changes, []);
  });

  test("it begins with what there is, within its bounds, and says which bound it was", () => {
    const begin = (desired: number): unknown[] => {
      const { scaling } = new Watch({ min: 2, max: 12 }, desired).scaler;
      return [scaling.desired, scaling.reason];
    };
    assert.deepEqual(begin(5), [5, "as configured"]);
    assert.deepEqual(begin(1), [2, "scaling.min is 2"]);
    assert.deepEqual(begin(40), [12, "scaling.max is 12"]);
  });

  test("never beyond the maximum, which is not said again and again", () => {
    const watch = new Watch({ max: 12 });
    watch.look(600_000, { load: 9, depth: 5000 });
    assert.deepEqual(watch.changes, [12]);
  });

  test("nothing healthy is no reason by itself; nor is a pace that nobody knows", () => {
    const watch = new Watch();
    watch.look(600_000, { load: 0.5, healthy: 0, depth: 0 });
    assert(watch.desired <= 11, String(watch.desired));
    const unknown = new Watch();
    unknown.look(60_000, { load: 5, pace: 0 });
    assert.equal(unknown.desired, 10);
  });
});

describe("fewer", () => {
  test("load below 40 % for fifteen minutes: one, and the next not before the cool-down", () => {
    const watch = new Watch();
    watch.look(899_000, { load: 0.1 });
    assert.deepEqual(watch.changes, []);
    assert.match(watch.look(3000, { load: 0.1 }).reason, /load below 40 % for 15 min: −1/);
    watch.look(800_000, { load: 0.1 });
    assert.deepEqual(watch.changes, [9]);
  });

  test("at most a fifth of them at a time, but always one", () => {
    const watch = new Watch({ down: { load: 0.4, forMs: 60_000, remove: 100 } });
    watch.look(302_000, { load: 0.01 });
    assert.deepEqual(watch.changes, [8]);
    const few = new Watch({ down: { load: 0.4, forMs: 60_000, remove: 100 } }, 2);
    few.look(302_000, { load: 0.01, healthy: 2 });
    assert.deepEqual(few.changes, [1]);
  });

  test("never below the minimum, nor below what is needed", () => {
    const watch = new Watch({ min: 10, down: { load: 0.4, forMs: 60_000, remove: 5 } });
    watch.look(3_600_000, { load: 0 });
    assert.deepEqual(watch.changes, []);
    const needed = new Watch({ down: { load: 0.65, forMs: 60_000, remove: 5 } });
    needed.look(3_600_000, { load: 0.6 });
    assert.deepEqual(needed.changes, [9]);
  });

  test("a pause of the process is not taken for a quiet time", () => {
    const watch = new Watch();
    watch.look(10_000, { load: 0.1 });
    watch.at += 3_600_000;
    watch.look(10_000, { load: 0.1 });
    assert.deepEqual(watch.changes, []);
  });
});

test("whatever is seen, it stays within its bounds and never takes more than its share at a time", () => {
  const step = fc.record({
    forMs: fc.integer({ min: 1000, max: 1_000_000 }),
    load: fc.double({ min: 0, max: 6, noNaN: true }),
    depth: fc.integer({ min: 0, max: 2000 }),
    healthy: fc.integer({ min: 0, max: 40 }),
  });
  fc.assert(
    fc.property(fc.array(step, { maxLength: 12 }), (steps) => {
      const watch = new Watch({ min: 2, max: 20 });
      let before = watch.desired;
      let lastChange = -Infinity;
      for (const { forMs, ...seen } of steps) {
        for (const until = watch.at + forMs; watch.at < until;) {
          const { desired, changedAt } = watch.look(1000, seen);
          assert(desired >= 2 && desired <= 20);
          if (desired < before) {
            assert(before - desired <= Math.max(1, before * 0.2));
            assert(changedAt - lastChange >= RULES.coolDownMs);
          }
          if (desired !== before) lastChange = changedAt;
          before = desired;
        }
      }
    }),
    { numRuns: 30 },
  );
});
