/** Tokens shared out by weight: whole, exact in sum, fair to within one. */
import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { apportion, weightOf } from "../../../src/gateway/protocol/usage.ts";

test("parts sum to the whole, are whole, and within one of their share", () => {
  const weights = fc.array(fc.integer({ min: 0, max: 10_000 }), { minLength: 1, maxLength: 64 });
  fc.assert(
    fc.property(fc.integer({ min: 0, max: 2_000_000 }), weights, (total, each) => {
      const parts = apportion(total, each);
      assert.equal(
        parts.reduce((sum, part) => sum + part, 0),
        total,
      );
      const sum = each.reduce((all, weight) => all + weight, 0);
      for (const [at, part] of parts.entries()) {
        const share = sum > 0 ? (total * each[at]!) / sum : total / each.length;
        assert(Number.isInteger(part) && part >= 0 && Math.abs(part - share) < 1 + 1e-6);
      }
    }),
  );
});

test("examples", () => {
  assert.deepEqual(apportion(10, [1, 2, 4]), [1, 3, 6]);
  assert.deepEqual(apportion(5, [0, 0]), [3, 2]);
  assert.deepEqual(apportion(0, [3, 4]), [0, 0]);
  assert.deepEqual(apportion(7, []), []);
});

test("a token array weighs its tokens, a text its characters", () => {
  assert.deepEqual(["[1,2,3]", "[7]", '"abc"', '""'].map(weightOf), [3, 1, 3, 1]);
});
