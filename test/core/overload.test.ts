import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { Pace, PutWait, refusesPut, refusesTurn } from "../../src/core/overload.ts";

const TIERS = 3;
const [first, middle, last] = [0, 1, 2] as const;

const LONG_MS = 10_000;

/** Which tiers are refused while so many wait, of which each takes 1 ms. */
function refused(requests: number, busyMs: number, msEach = 1): number[] {
  const waiting = { requests, msEach, busyMs };
  return [first, middle, last].filter((tier) => refusesTurn(tier, TIERS, waiting));
}

describe("waiting for this process", () => {
  test("the last tier is refused first, the first tier last", () => {
    assert.deepEqual(refused(125, LONG_MS), []);
    assert.deepEqual(refused(126, LONG_MS), [last]);
    assert.deepEqual(refused(188, LONG_MS), [middle, last]);
    assert.deepEqual(refused(250, LONG_MS), [middle, last]);
    assert.deepEqual(refused(251, LONG_MS), [first, middle, last]);
  });

  test("a single tier has the bounds of the first", () => {
    const waiting = { requests: 250, msEach: 1, busyMs: LONG_MS };
    assert.equal(refusesTurn(0, 1, waiting), false);
    assert.equal(refusesTurn(0, 1, { ...waiting, requests: 251 }), true);
  });

  test("a burst is served, unless it takes far too long", () => {
    assert.deepEqual(refused(1000, 3000), []);
    assert.deepEqual(refused(1000, 3001), [first, middle, last]);
    assert.deepEqual(refused(2001, 1), [first, middle, last]);
  });

  test("nobody is refused before it is known what a request takes", () => {
    assert.deepEqual(refused(10_000, LONG_MS, new Pace().msEach), []);
  });
});

describe("the pace", () => {
  test("follows a process that becomes slower, and one pause counts little", () => {
    const pace = new Pace();
    for (let turn = 0; turn < 1000; turn++) pace.count(16, 1);
    assert.ok(Math.abs(pace.msEach - 1 / 16) < 1e-9);
    pace.count(16, 50);
    assert.ok(pace.msEach < 1.2 / 16, `${pace.msEach}`);
    for (let turn = 0; turn < 2000; turn++) pace.count(16, 2);
    assert.ok(Math.abs(pace.msEach - 2 / 16) < 0.01, `${pace.msEach}`);
  });
});

describe("waiting to be stored", () => {
  test("is the age of the oldest put where all are answered in order", () => {
    const puts = new PutWait();
    assert.equal(puts.ms(5000), 0);
    puts.began(1000);
    puts.began(1100);
    assert.equal(puts.ms(1500), 500);
    puts.ended(1000);
    assert.equal(puts.ms(1500), 500, "the newest that was answered began at 1000");
    puts.ended(1100);
    assert.equal(puts.ms(5000), 0);
  });

  test("begins anew after a pause", () => {
    const puts = new PutWait();
    puts.began(1000);
    puts.ended(1000);
    puts.began(9000);
    assert.equal(puts.ms(9100), 100);
  });

  test("one server that hangs does not count while others answer", () => {
    const puts = new PutWait();
    puts.began(1000);
    for (let at = 1010; at <= 5000; at += 10) {
      puts.began(at);
      puts.ended(at);
    }
    assert.equal(puts.ms(5005), 5);
    assert.equal(puts.ms(6000), 1000, "now none of them answers");
  });

  test("refuses in the order of tiers", () => {
    const refused = (ms: number): number[] =>
      [first, middle, last].filter((tier) => refusesPut(tier, TIERS, ms));
    assert.deepEqual(refused(500), []);
    assert.deepEqual(refused(501), [last]);
    assert.deepEqual(refused(751), [middle, last]);
    assert.deepEqual(refused(1001), [first, middle, last]);
  });
});
