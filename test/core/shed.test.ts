import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import {
  forecast,
  type Horizon,
  type Line,
  lost,
  refuseByForecast,
  refuseByThresholds,
  RetrySlots,
  runMsOf,
} from "../../src/core/shed.ts";

const now = 10_000;

/** Four workers of 100 ms and 50 seats, all busy, free 25 ms apart: 2 tasks per ms. */
function horizon(changes: Partial<Horizon> = {}): Horizon {
  return {
    healthy: 4,
    idle: 0,
    overdue: 0,
    perMs: 2,
    nominalPerMs: 2,
    batchSize: 50,
    batchMs: 100,
    runMs: 100,
    deviationMs: 0,
    freeAt: [now + 25, now + 50, now + 75, now + 100],
    nextUsableAt: Infinity,
    ...changes,
  };
}

function line(changes: Partial<Line> = {}): Line {
  return { waiting: 0, above: 0, abovePerMs: 0, own: 0, floor: 0, belowFloor: 0, ...changes };
}

const inHalfASecond = { startBy: now + 500, finishBy: now + 500 };

describe("the forecast", () => {
  test("an empty queue: the first worker that is free, and a batch", () => {
    const expected = { startAt: now + 25, latestStartAt: now + 26, finishAt: now + 127 };
    assert.deepEqual(forecast(line(), horizon(), now), expected);
  });

  test("each full batch ahead is one worker further, and after the last it begins anew", () => {
    const starts = [0, 49, 50, 149, 150, 200, 400].map(
      (own) => forecast(line({ own }), horizon(), now).startAt - now,
    );
    assert.deepEqual(starts, [25, 25, 50, 75, 100, 125, 225]);
  });

  test("the batches ahead start in order, whoever is free when", () => {
    const times = fc.array(fc.nat(2000), { minLength: 1, maxLength: 6 });
    fc.assert(
      fc.property(times, fc.nat(60), fc.integer({ min: 5, max: 300 }), (later, batches, batchMs) => {
        const freeAt = later.map((ms) => now + ms).sort((one, other) => one - other);
        const wide = horizon({ freeAt, batchMs, batchSize: 50 });
        const { startAt } = forecast(line({ own: 50 * batches }), wide, now);
        const next = [...freeAt];
        for (let done = 0; done < batches; done++) {
          const first = next.indexOf(Math.min(...next));
          next[first]! += batchMs;
        }
        const exact = Math.min(...next);
        assert.ok(startAt >= exact - 1e-6 && startAt <= exact + 1, `${startAt - exact} ms off`);
      }),
    );
  });

  test("batches of one: nobody is put a batch further to the front by a rounding error", () => {
    const uneven = horizon({
      batchSize: 1,
      batchMs: 20,
      perMs: 0.09999999819216163,
      freeAt: [now, now + 10],
    });
    assert.equal(forecast(line({ own: 6 }), uneven, now).startAt, now + 60);
  });

  test("who must leave the queue in time gets a margin for that, too", () => {
    const scattered = horizon({ deviationMs: 15 });
    const { startAt, latestStartAt } = forecast(line({ own: 800 }), scattered, now);
    assert.ok(latestStartAt > startAt + 3 * 15);
    const terms = { startBy: (startAt + latestStartAt) / 2, finishBy: now + 9000 };
    assert.equal(refuseByForecast(line({ waiting: 800, own: 800 }), scattered, terms, now), "deadline");
  });

  test("most batches run on workers that are slower than the average of batches", () => {
    const seven = Array.from({ length: 7 }, () => ({ ms: 100, perMs: 0.01 }));
    assert.equal(runMsOf([...seven, { ms: 40, perMs: 0.025 }]), 100);
    assert.equal(runMsOf([...seven, { ms: 1000, perMs: 0.001 }]), 100, "one that runs few does not matter");
    assert.equal(runMsOf([]), 0);
    const mixed = horizon({ batchMs: 84, runMs: 100 });
    assert.equal(forecast(line(), mixed, now).finishAt, now + 25 + 100 + 2);
    const terms = { startBy: now + 120, finishBy: now + 120 };
    assert.equal(
      refuseByForecast(line({ waiting: 60 }), mixed, terms, now),
      undefined,
      "too slow for anybody",
    );
  });

  test("a worker that should have been free long ago is free now", () => {
    const { startAt } = forecast(line(), horizon({ freeAt: [now - 500] }), now);
    assert.equal(startAt, now);
  });

  test("better tiers that take half of the capacity make the own queue twice as long, and a bit", () => {
    const alone = forecast(line({ own: 100 }), horizon(), now).startAt;
    const behind = forecast(line({ own: 100, abovePerMs: 1 }), horizon(), now).startAt;
    const inOrder = forecast(line({ own: 200 }), horizon(), now).startAt;
    assert.ok(alone < behind && inOrder <= behind && behind < inOrder + 100);
  });

  test("better tiers that take everything leave the floor", () => {
    const starved = line({ own: 9, above: 10_000, abovePerMs: 3 });
    assert.equal(forecast(starved, horizon(), now).startAt, Infinity);
    const kept = forecast({ ...starved, floor: 0.05 }, horizon(), now).startAt;
    assert.equal(kept, forecast(line({ own: 200 }), horizon(), now).startAt);
  });

  test("nobody to do it: never", () => {
    assert.equal(forecast(line(), horizon({ freeAt: [] }), now).finishAt, Infinity);
  });

  test("whatever the line, more of anything ahead is never sooner", () => {
    const counts = fc.nat(2000);
    const rates = fc.double({ min: 0, max: 3, noNaN: true });
    fc.assert(
      fc.property(counts, counts, rates, fc.constantFrom(0, 0.05, 0.1), fc.nat(100), (...drawn) => {
        const [above, own, abovePerMs, floor, more] = drawn;
        const base = line({ above, own, abovePerMs, floor });
        const { startAt } = forecast(base, horizon(), now);
        assert.ok(startAt >= now);
        for (const worse of [{ above: above + more }, { own: own + more }]) {
          assert.ok(forecast({ ...base, ...worse }, horizon(), now).startAt >= startAt);
        }
      }),
    );
  });
});

describe("predictive", () => {
  test("lets in what is in time, refuses what is not", () => {
    assert.equal(refuseByForecast(line({ waiting: 60, own: 60 }), horizon(), inHalfASecond, now), undefined);
    assert.equal(
      refuseByForecast(line({ waiting: 999, own: 999 }), horizon(), inHalfASecond, now),
      "deadline",
    );
  });

  test("what could finish but would leave its queue too late is refused too", () => {
    const terms = { startBy: now + 100, finishBy: now + 5000 };
    assert.equal(refuseByForecast(line({ waiting: 250, own: 250 }), horizon(), terms, now), "deadline");
  });

  test("with capacity lost the reason is another", () => {
    const half = horizon({ perMs: 1, nominalPerMs: 2, freeAt: [now + 50, now + 100], healthy: 2 });
    assert.ok(lost(half));
    assert.equal(refuseByForecast(line({ waiting: 999, own: 999 }), half, inHalfASecond, now), "capacity");
  });

  test("never while a worker idles and less than a batch waits, whatever the estimates say", () => {
    const estimates = fc.record({
      batchMs: fc.double({ min: 0.1, max: 1e7, noNaN: true }),
      deviationMs: fc.double({ min: 0, max: 1e7, noNaN: true }),
      perMs: fc.double({ min: 0, max: 100, noNaN: true }),
      idle: fc.integer({ min: 1, max: 4 }),
      freeAt: fc.constantFrom<number[]>([], [now + 1e9]),
    });
    fc.assert(
      fc.property(
        estimates,
        fc.nat(49),
        fc.double({ min: 0, max: 9, noNaN: true }),
        (wild, waiting, rate) => {
          const queue = line({ waiting, own: waiting, abovePerMs: rate });
          assert.equal(refuseByForecast(queue, horizon(wild), inHalfASecond, now), undefined);
        },
      ),
    );
  });

  test("no worker is no worker; for one that is overdue may wait who would start in time if it answered soon", () => {
    const none = horizon({ healthy: 0, freeAt: [], perMs: 0, batchMs: 100 });
    assert.equal(refuseByForecast(line(), none, inHalfASecond, now), "no_worker");
    const refused = (waiting: number, silentMs: number, terms = inHalfASecond): string | undefined =>
      refuseByForecast(line({ waiting }), { ...none, overdue: 1, silentMs }, terms, now);
    assert.equal(refused(199, 100), undefined, "three batches and fifty milliseconds");
    assert.equal(refused(200, 100), "no_worker", "a batch more would end too late");
    assert.equal(refused(199, 300), "no_worker", "what has lasted long lasts longer");
    const soon = { startBy: now + 10, finishBy: now + 500 };
    assert.equal(refused(49, 100, soon), undefined, "a batch in any case");
    assert.equal(refused(50, 100, soon), "no_worker");
  });

  test("workers that say they are full are used while they idle, and a batch's worth may wait for them", () => {
    const full = horizon({ freeAt: [], perMs: 0, idle: 1 });
    assert.equal(refuseByForecast(line(), full, inHalfASecond, now), undefined);
    const busy = { ...full, idle: 0 };
    assert.equal(refuseByForecast(line({ waiting: 49 }), busy, inHalfASecond, now), undefined);
    assert.equal(refuseByForecast(line({ waiting: 50 }), busy, inHalfASecond, now), "capacity");
  });
});

test("thresholds: the last tier above the load or the first depth, all but the first above the second", () => {
  const rules = { targetUtilization: 0.7, lastTierDepth: 100, firstTierDepth: 500 };
  const refused = (waiting: number, load: number): (string | undefined)[] =>
    [0, 1, 2].map((tier) => refuseByThresholds(tier, 3, waiting, load, horizon(), rules));
  const none = undefined;
  assert.deepEqual(refused(0, 0.7), [none, none, none]);
  assert.deepEqual(refused(0, 0.71), [none, none, "capacity"]);
  assert.deepEqual(refused(100, 0), [none, none, none]);
  assert.deepEqual(refused(101, 0), [none, none, "capacity"]);
  assert.deepEqual(refused(500, 0), [none, none, "capacity"]);
  assert.deepEqual(refused(501, 0), [none, "capacity", "capacity"]);
  assert.deepEqual(refused(1e6, 99), [none, "capacity", "capacity"]);
  assert.equal(refuseByThresholds(0, 1, 1e6, 99, horizon(), rules), undefined, "the only tier is the first");
  const dead = horizon({ healthy: 0 });
  assert.equal(refuseByThresholds(0, 3, 0, 0, dead, rules), "no_worker");
});

describe("when to come again", () => {
  test("each gets a slot of its own, at the rate that is left, after what waits", () => {
    const slots = new RetrySlots(3);
    const busy = line({ own: 400 });
    const given = Array.from({ length: 4 }, () => slots.reserve(0, busy, horizon(), now));
    assert.ok(given[0]! >= 200);
    for (let at = 1; at < 4; at++) assert.ok(Math.abs(given[at]! - given[at - 1]! - 1 / 1.8) < 1e-6);
  });

  test("tiers have slots of their own; the floor is the least that is left", () => {
    const slots = new RetrySlots(3);
    const starved = line({ abovePerMs: 2, floor: 0.05 });
    const first = slots.reserve(2, starved, horizon(), now);
    assert.ok(Math.abs(slots.reserve(2, starved, horizon(), now) - first - 10) < 1e-6);
    assert.ok(slots.reserve(0, line(), horizon(), now) < 60);
  });

  test("never sooner than 50 ms, never later than 30 s, and time passes", () => {
    const slots = new RetrySlots(1);
    for (let at = 0; at < 200_000; at++) slots.reserve(0, line(), horizon(), now);
    assert.equal(slots.reserve(0, line(), horizon(), now), 30_000);
    const later = slots.reserve(0, line(), horizon(), now + 40_000);
    assert.ok(later >= 50 && later < 60);
  });

  test("with no capacity: when a worker is tried again", () => {
    const slots = new RetrySlots(1);
    const dead = horizon({ healthy: 0, perMs: 0, freeAt: [], nextUsableAt: now + 700 });
    assert.equal(slots.reserve(0, line(), dead, now), 700);
    assert.equal(slots.reserve(0, line(), { ...dead, nextUsableAt: Infinity }, now), 1000, "nobody knows");
  });
});
