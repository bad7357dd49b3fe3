import assert from "node:assert/strict";
import { test } from "node:test";
import { Arrivals, type CallerKind, type OpenLoad } from "../../../src/cli/bench/arrivals.ts";

const one: readonly CallerKind[] = [{ label: "all", share: 1 }];

/** All arrivals before `until`. */
function list(arrivals: Arrivals, until: number): { at: number; kind: number }[] {
  const found: { at: number; kind: number }[] = [];
  for (; arrivals.nextAt < until; arrivals.advance())
    found.push({ at: arrivals.nextAt, kind: arrivals.kind });
  return found;
}

function load(more: Partial<OpenLoad>): OpenLoad {
  return { kind: "open", rate: 1000, arrivals: "even", warmRate: 100, connections: 1, ...more };
}

void test("even arrivals come one in each gap, at the rate of the warm-up and then at the other", () => {
  const found = list(new Arrivals(load({}), one, 0, 1000, Math.random), 2000);
  assert.equal(found.filter(({ at }) => at < 1000).length, 100);
  assert.equal(found.filter(({ at }) => at >= 1000).length, 1000);
  for (const [i, { at }] of found.slice(0, 100).entries()) assert.equal(Math.floor(at / 10), i);
});

void test("each phase has its rate, and the last one goes on", () => {
  const phases = [
    { name: "low", ms: 1000, rate: 100 },
    { name: "high", ms: 1000, rate: 2000 },
    { name: "low again", ms: 1000, rate: 50 },
  ];
  const found = list(new Arrivals(load({ phases }), one, -1000, 0, Math.random), 4000);
  const inSecond = (second: number): number =>
    found.filter(({ at }) => Math.floor(at / 1000) === second).length;
  assert.deepEqual([-1, 0, 1, 2, 3].map(inSecond), [100, 100, 2000, 50, 50]);
});

void test("arrivals that are independent have the same rate on average", () => {
  const found = list(new Arrivals(load({ arrivals: "poisson" }), one, 0, 0, Math.random), 20_000);
  assert.ok(Math.abs(found.length - 20_000) < 1000, `${found.length}`);
});

void test("kinds are drawn by their share, and by the phase's where it has one", () => {
  const kinds = ["a", "b", "c"].map((label, i) => ({ label, share: [1, 3, 6][i]! }));
  const phases = [
    { name: "one", ms: 20_000, rate: 1000 },
    { name: "two", ms: 20_000, rate: 1000, shares: { a: 81 } },
  ];
  const found = list(new Arrivals(load({ phases }), kinds, 0, 0, Math.random), 40_000);
  const share = (kind: number, from: number): number =>
    found.filter(({ at, kind: its }) => its === kind && at >= from && at < from + 20_000).length / 20_000;
  const near = (measured: number, expected: number): void =>
    assert.ok(Math.abs(measured - expected) < 0.02, `${measured}, not ${expected}`);
  near(share(0, 0), 0.1);
  near(share(1, 0), 0.3);
  near(share(2, 0), 0.6);
  near(share(0, 20_000), 0.9);
});
