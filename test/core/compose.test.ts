/** Which lengths share a batch: the choice against every range there is. */
import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { compose, type LengthRange, type PaddedCost } from "../../src/core/policy.ts";

/** Classes are steps of up to 1/8: the choice is as good as the best one to that. */
const ROUNDING = 0.8;

const length = fc.oneof(
  fc.integer({ min: 1, max: 40 }),
  fc.integer({ min: 1, max: 600 }),
  fc.constantFrom(1, 2, 1_000_000, 1_000_000_000),
);
const cost = fc.record({
  baseMs: fc.double({ min: 0.01, max: 50, noNaN: true }),
  perRowMs: fc.double({ min: 0, max: 2, noNaN: true }),
  perTokenMs: fc.double({ min: 0, max: 0.1, noNaN: true }),
});
const scene = fc.record({
  lengths: fc.array(length, { minLength: 1, maxLength: 24 }),
  max: fc.integer({ min: 1, max: 16 }),
  cost,
});

/** Work per millisecond of this many of these tasks, drawn evenly, as `compose` defines it. */
function valueOf(
  tasks: readonly number[],
  max: number,
  { baseMs, perRowMs, perTokenMs }: PaddedCost,
): number {
  const rows = Math.min(tasks.length, max);
  const work = tasks.reduce((sum, each) => sum + perRowMs + each * perTokenMs + baseMs / max, 0);
  const ms = baseMs + rows * (perRowMs + Math.max(...tasks) * perTokenMs);
  return ((rows / tasks.length) * work) / ms;
}

const within = (lengths: readonly number[], { least, most }: LengthRange): number[] =>
  lengths.filter((each) => each >= least && each <= most);

test("the leader is in the range, and no range does clearly more work per millisecond", () => {
  fc.assert(
    fc.property(scene, ({ lengths, max, cost }) => {
      const range = compose(lengths, max, cost);
      const [lead] = lengths;
      assert.ok(range.least <= lead! && lead! <= range.most, JSON.stringify(range));
      const chosen = within(lengths, range);
      // Everything at once may take less time than two batches, and the best range is then not what counts.
      if (chosen.length === lengths.length && lengths.length <= max) return;
      let best = 0;
      for (const least of lengths) {
        for (const most of lengths) {
          if (least > lead! || most < lead!) continue;
          best = Math.max(best, valueOf(within(lengths, { least, most }), max, cost));
        }
      }
      const value = valueOf(chosen, max, cost);
      assert.ok(value >= ROUNDING * best, `${value} of ${best}`);
    }),
    { numRuns: 2000 },
  );
});

test("all at once only where that takes less time than two batches", () => {
  fc.assert(
    fc.property(scene, ({ lengths, max, cost }) => {
      if (lengths.length > max) return;
      const { baseMs, perRowMs, perTokenMs } = cost;
      const msOf = (tasks: readonly number[]): number =>
        baseMs + tasks.length * (perRowMs + Math.max(...tasks) * perTokenMs);
      const range = compose(lengths, max, cost);
      const chosen = within(lengths, range);
      if (chosen.length === lengths.length) return;
      const rest = lengths.filter((each) => each < range.least || each > range.most);
      // Never worse than order of arrival, which sends them all: 0.9 of the time of two would still do.
      assert.ok(msOf(lengths) >= 0.9 * (msOf(chosen) + msOf(rest)) - 1e-9);
    }),
    { numRuns: 2000 },
  );
});

test("equal lengths, a single task and the longest there are", () => {
  const usual = { baseMs: 1, perRowMs: 0.01, perTokenMs: 0.001 };
  for (const each of [1, 2, 3, 16, 17, 1000, 1_000_000_000]) {
    for (const count of [1, 2, 64, 512]) {
      const lengths = Array.from({ length: count }, () => each);
      assert.equal(within(lengths, compose(lengths, 64, usual)).length, count);
    }
  }
  const free = { baseMs: 1, perRowMs: 0, perTokenMs: 0 };
  assert.deepEqual(within([1, 1_000_000_000, 30], compose([1, 1_000_000_000, 30], 8, free)).length, 3);
});
