import assert from "node:assert/strict";
import { describe, test } from "./suite.ts";
import { Random } from "../../../src/core/random.ts";

const many = (draw: () => number): number[] => Array.from({ length: 100_000 }, draw);
const mean = (all: readonly number[]): number => all.reduce((sum, one) => sum + one, 0) / all.length;
function deviation(all: readonly number[]): number {
  const middle = mean(all);
  return Math.sqrt(mean(all.map((one) => (one - middle) ** 2)));
}

describe("random:", () => {
  test("the same seed gives the same numbers, another seed gives others", () => {
    const draw = (seed: number): number[] => {
      const random = new Random(seed);
      return Array.from({ length: 10 }, () => random.next());
    };
    assert.deepEqual(draw(1), draw(1));
    for (const other of [0, 2, -1, 1.5, 2 ** 32 + 1, 2 ** 40]) assert.notDeepEqual(draw(1), draw(other));
  });

  test("`next` is uniform in [0, 1)", () => {
    const random = new Random(42);
    const all = many(() => random.next());
    assert(all.every((one) => one >= 0 && one < 1));
    const tenths = new Array<number>(10).fill(0);
    for (const one of all) tenths[Math.floor(one * 10)]!++;
    for (const count of tenths) assert(Math.abs(count - 10_000) < 500, tenths.join());
  });

  test("`gaussian` has mean 0 and deviation 1; `exponential` has the mean it was asked for", () => {
    const random = new Random(42);
    const normal = many(() => random.gaussian());
    assert(Math.abs(mean(normal)) < 0.02);
    assert(Math.abs(deviation(normal) - 1) < 0.02);
    const gaps = many(() => random.exponential(250));
    assert(Math.abs(mean(gaps) - 250) < 5);
    assert(gaps.every((gap) => gap >= 0 && Number.isFinite(gap)));
  });

  test("neighbouring seeds do not start alike", () => {
    const firsts = Array.from({ length: 1000 }, (_, seed) => new Random(seed).next());
    assert(Math.abs(mean(firsts) - 0.5) < 0.05);
    assert(new Set(firsts).size > 990);
  });
});
