import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { Blame, type Finding, Standing, type Suspect, TRUST } from "../../src/core/blame.ts";

const LIMITS = { failures: 3, ejectMs: 1000, barMs: 10_000 };
const WINDOW = TRUST * LIMITS.ejectMs;

/** One model with some workers, by number. */
class Court {
  limits = LIMITS;
  readonly blame = new Blame<number>(() => this.limits);
  readonly standings: Standing[];

  constructor(workers: number) {
    this.standings = Array.from({ length: workers }, () => new Standing());
  }

  answered(worker: number, suspects: readonly Suspect[], now: number): number[] {
    for (const { tenant } of suspects) this.standings[worker]!.answered(tenant, now);
    return this.blame.active(now) ? this.blame.answered(suspects, worker, now) : [];
  }

  failed(worker: number, suspects: readonly Suspect[], now: number, died = false): Finding {
    const standing = this.standings[worker]!;
    const failure = { suspects, worker, standing, fleet: this.standings, alone: suspects.length === 1, died };
    return this.blame.failed(failure, now);
  }

  suspected(tenant: string, now: number): boolean {
    return this.blame.active(now) && this.blame.suspected({ key: "", tenant }, this.standings, now);
  }
}

const of = (tenant: string, key: string | number): Suspect => ({ key: `${tenant} ${key}`, tenant });

describe("whose fault it is", () => {
  test("a worker that was never seen to answer: every failure counts", () => {
    const court = new Court(1);
    for (let at = 0; at < 10; at++)
      assert.deepEqual(court.failed(0, [of("a", at)], at), { over: false, counts: "yes", repeated: false });
  });

  test("the same inputs again at the same worker are no further failure, until it answers anybody", () => {
    const court = new Court(2);
    const both = [of("a", 1), of("a", 2)];
    assert.equal(court.failed(0, both, 0).repeated, false);
    assert.equal(court.failed(0, both, 1).repeated, true);
    assert.equal(court.failed(0, [of("a", 1)], 2).repeated, true);
    assert.equal(court.failed(0, [of("a", 1)], 3, true).repeated, true);
    // At another worker it is the first time; beside a new input it is not only the same.
    assert.equal(court.failed(1, both, 4).repeated, false);
    assert.equal(court.failed(0, [of("a", 1), of("a", 3)], 5).repeated, false);
    court.answered(0, [of("a", "x")], 6);
    assert.equal(court.failed(0, [of("a", 1)], 2000).repeated, false);
    // What is repeated is confirmed like what is in doubt, where another worker answers it.
    assert.deepEqual(court.failed(0, [of("a", 1)], 2001), { over: false, counts: "yes", repeated: true });
    assert.deepEqual(court.answered(1, [of("a", 1)], 2002), [0]);
  });

  test("so are the same inputs of a large batch", () => {
    const court = new Court(1);
    const many = Array.from({ length: 2048 }, (_, at) => of("a", at));
    assert.equal(court.failed(0, many, 0).repeated, false);
    assert.equal(court.failed(0, many, 1).repeated, true);
    assert.equal(court.failed(0, many.slice(0, 10), 2).repeated, true);
  });

  test("one that answered a moment ago is doubted for ejectMs, then every failure counts", () => {
    const court = new Court(1);
    court.answered(0, [of("a", "x")], 0);
    assert.equal(court.failed(0, [of("a", 1)], LIMITS.ejectMs).counts, "doubt");
    assert.equal(court.failed(0, [of("a", 2)], LIMITS.ejectMs + 1).counts, "yes");
  });

  test("one tenant alone is doubted while others are answered, and two are believed", () => {
    const court = new Court(1);
    court.answered(0, [of("b", "x")], 0);
    for (let at = 1; at < 20; at++) assert.equal(court.failed(0, [of("a", at)], 2000 + at).counts, "doubt");
    assert.equal(court.failed(0, [of("b", "y")], 3000).counts, "yes");
  });

  test("an input that fails alone again, with an answer in between, is held against nobody, but tried again", () => {
    const court = new Court(2);
    court.failed(0, [of("a", 1)], 0);
    court.answered(1, [of("a", "x")], 10);
    assert.deepEqual(court.failed(1, [of("a", 1)], 20), { over: false, counts: "no", repeated: false });
    // A worker that answers is not thought ill of for a while, whatever else fails there.
    assert.equal(court.failed(1, [of("a", 2)], 30).counts, "no");
    assert.equal(court.failed(0, [of("a", 4)], 40).counts, "doubt");
    assert.equal(court.failed(1, [of("a", 3)], 20 + WINDOW + 1).counts, "yes");
  });

  test("in company nobody is guilty", () => {
    const court = new Court(1);
    const both = [of("a", 1), of("b", 1)];
    court.failed(0, both, 0);
    court.answered(0, [of("c", 1)], 5);
    assert.deepEqual(court.failed(0, both, 10), { over: false, counts: "doubt", repeated: false });
  });

  test("a suspected tenant's next failure is its last; its first answer clears it", () => {
    const court = new Court(1);
    for (let at = 0; at < 3; at++) court.failed(0, [of("a", at)], at);
    assert.equal(court.suspected("a", 3), false);
    court.answered(0, [of("b", 1)], 4);
    assert.equal(court.suspected("a", 5), true);
    assert.equal(court.suspected("b", 5), false);
    assert.deepEqual(court.failed(0, [of("a", 4)], 5), { over: true, counts: "no", repeated: false });
    court.answered(0, [of("a", 5)], 6);
    assert.equal(court.suspected("a", 7), false);
    assert.equal(court.failed(0, [of("a", 6)], 8).over, false);
  });

  test("what failed here and is answered there counts here, once for each call", () => {
    const court = new Court(2);
    court.answered(0, [of("a", "x")], 0);
    const call = [of("a", 1), of("a", 2)];
    assert.equal(court.failed(0, call, 1).counts, "doubt");
    assert.deepEqual(court.answered(1, call, 2), [0]);
    assert.deepEqual(court.answered(1, call, 3), []);
    // Not where it counted before, nor where the worker has answered since.
    court.failed(0, [of("a", 3)], 2000);
    assert.deepEqual(court.answered(1, [of("a", 3)], 2001), []);
    court.answered(0, [of("a", 4)], 3000);
    court.failed(0, [of("a", 5)], 3001);
    court.answered(0, [of("a", 6)], 3002);
    assert.deepEqual(court.answered(1, [of("a", 5)], 3003), []);
  });

  test("what ended workers is barred for barMs; of a suspected tenant everything is", () => {
    const court = new Court(1);
    court.failed(0, [of("a", 1)], 0, true);
    court.blame.bar(of("a", 1), 0);
    assert.equal(court.blame.barred(of("a", 1), LIMITS.barMs - 1), true);
    assert.equal(court.blame.barred(of("a", 1), LIMITS.barMs), false);
    assert.equal(court.blame.barred(of("a", 2), 1), false);
    court.answered(0, [of("b", 1)], 1);
    for (let at = 2; at < 5; at++) court.failed(0, [of("a", at)], at, true);
    court.answered(0, [of("b", 2)], 5);
    assert.deepEqual(court.failed(0, [of("a", 5)], 6, true), {
      over: true,
      counts: "doubt",
      repeated: false,
    });
    assert.equal(court.blame.barred(of("a", 6), 7), true);
    assert.equal(court.blame.barred(of("b", 6), 7), false);
    court.limits = { ...LIMITS, barMs: 0 };
    court.blame.bar(of("b", 7), 8);
    assert.equal(court.blame.barred(of("b", 7), 8), false);
  });

  test("nothing is remembered when the window is over", () => {
    const court = new Court(1);
    assert.equal(court.blame.active(0), false);
    court.failed(0, [of("a", 1)], 0);
    assert.equal(court.blame.active(WINDOW), true);
    assert.equal(court.blame.active(WINDOW + 1), false);
    assert.deepEqual(court.answered(0, [of("a", 1)], WINDOW + 2), []);
  });
});

/** At each step a tenant's next input is answered or not, at some worker. */
const steps = fc.array(
  fc.record({
    ms: fc.integer({ min: 1, max: 400 }),
    worker: fc.nat(2),
    good: fc.boolean(),
    again: fc.boolean(),
  }),
  { minLength: 20, maxLength: 200 },
);

describe("properties", () => {
  test("one tenant, of which nothing is ever answered, takes down no worker that answers others", () => {
    fc.assert(
      fc.property(steps, (list) => {
        const court = new Court(3);
        for (const worker of [0, 1, 2]) court.answered(worker, [of("good", "first")], 0);
        let [now, goodAt, bad] = [0, 0, 0];
        for (const { ms, worker, good, again } of list) {
          now += ms;
          if (good || now - goodAt > WINDOW - 400) {
            court.answered(worker, [of("good", now)], (goodAt = now));
          } else {
            const { counts } = court.failed(worker, [of("bad", again ? bad : ++bad)], now);
            assert.notEqual(counts, "yes");
          }
        }
      }),
    );
  });

  test("a worker that fails with everything is believed to be broken when two tenants met it, or the window is over", () => {
    fc.assert(
      fc.property(steps, (list) => {
        const court = new Court(1);
        court.answered(0, [of("a", "first"), of("b", "first")], 0);
        let now = LIMITS.ejectMs + 1;
        const met = new Set<string>();
        for (const [at, { ms, good }] of list.entries()) {
          now += ms;
          const tenant = good ? "a" : "b";
          const { counts, over } = court.failed(0, [of(tenant, at)], now);
          const second = met.size === 1 && !met.has(tenant);
          met.add(tenant);
          if (second || now > WINDOW) assert.equal(counts, "yes");
          assert.notEqual(counts, "no");
          assert.equal(over, false);
        }
      }),
    );
  });

  test("whoever is answered in between is never given up early, however often a worker fails", () => {
    fc.assert(
      fc.property(steps, (list) => {
        const court = new Court(3);
        let now = 0;
        for (const [at, { ms, worker, good }] of list.entries()) {
          now += ms;
          if (good) court.answered(worker, [of("a", at), of("b", at)], now);
          else {
            for (const tenant of ["a", "b"]) {
              assert.equal(court.failed(worker, [of(tenant, at)], now).over, false);
              court.answered((worker + 1) % 3, [of(tenant, "x")], now);
            }
          }
        }
      }),
    );
  });
});
