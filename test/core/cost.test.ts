/** What a batch's time follows is learned from times that are as noisy as replies are late. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { type BatchShape, CostEstimate } from "../../src/core/cost.ts";
import { Random } from "../../src/core/random.ts";

/** Milliseconds of a model that pads. */
const padded = ({ rows, longest }: BatchShape): number => 0.6 + 0.002 * rows + 0.0004 * rows * longest;

/** A quarter long, the others short: as a grouped queue leaves. */
function batch(random: Random): BatchShape {
  const [rows, longest] = random.next() < 0.25 ? [24, 400] : [64, 8 + Math.floor(random.next() * 9)];
  return { rows, longest, total: Math.round(rows * longest * (0.3 + 0.7 * random.next())), inOrder: 500 };
}

/** Each reply is read up to `lateMs` after it came, so that a batch takes from the next. */
function learn(cost: CostEstimate, batches: number, lateMs: number, random: Random): number {
  let [late, nothing] = [0, 0];
  for (let count = 0; count < batches; count++) {
    const shape = batch(random);
    const ms = padded(shape);
    // Replies come in order.
    const next = Math.max(random.next() < 0.2 ? lateMs * random.next() : 0, late - ms);
    const measured = ms + next - late;
    if (measured < 0.01) nothing++;
    cost.learn(shape, measured);
    late = next;
  }
  return nothing;
}

describe("the cost of a batch", () => {
  test("replies that are read together, so that some took no time, do not hide that it pads", () => {
    for (let seed = 1; seed <= 20; seed++) {
      const cost = new CostEstimate();
      const random = new Random(seed);
      learn(cost, 60, 0, random);
      assert.equal(cost.kind, "padded");
      let nothing = 0;
      for (let round = 0; round < 20; round++) {
        nothing += learn(cost, 50, 6, random);
        assert.equal(cost.kind, "padded", `seed ${seed}, round ${round}`);
        for (const longest of [10, 400]) {
          const shape = { rows: 64, longest, total: 64 * longest, inOrder: 500 };
          const ratio = cost.msOf(shape) / padded(shape);
          assert.ok(ratio > 0.6 && ratio < 1.6, `seed ${seed}, ${longest} tokens: ${ratio}`);
        }
      }
      assert.ok(nothing > 20);
    }
  });

  test("single inputs of any length leave it undecided what full batches follow", () => {
    const cost = new CostEstimate();
    const single = (longest: number): BatchShape => ({ rows: 1, longest, total: longest, inOrder: longest });
    for (let count = 0; count < 40; count++) cost.learn(single(count % 2 === 0 ? 10 : 400), 10);
    assert.equal(cost.undecided, false);
    cost.learn({ rows: 64, longest: 400, total: 4000, inOrder: 400 }, 20);
    assert.equal(cost.undecided, true);
  });

  test("a first batch of one input that took far less or more does not decide what small ones cost", () => {
    for (const first of [0, 0.1, 5]) {
      for (let seed = 1; seed <= 10; seed++) {
        const cost = new CostEstimate();
        const random = new Random(seed);
        cost.learn({ rows: 1, longest: 10, total: 10, inOrder: 10 }, first);
        for (let count = 0; count < 12; count++) {
          const shape = {
            rows: 64,
            longest: 450 + Math.floor(60 * random.next()),
            total: 4000,
            inOrder: 500,
          };
          cost.learn(shape, padded(shape));
        }
        learn(cost, 60, 0, random);
        assert.equal(cost.kind, "padded");
        const shape = { rows: 64, longest: 10, total: 640, inOrder: 500 };
        const ratio = cost.msOf(shape) / padded(shape);
        assert.ok(ratio > 0.9 && ratio < 1.1, `first ${first} ms, seed ${seed}: ${ratio}`);
        const alone = { rows: 1, longest: 10, total: 10, inOrder: 10 };
        assert.ok(cost.msOf(alone) / padded(alone) > 0.5, `first ${first} ms, seed ${seed}: alone`);
      }
    }
  });

  test("when lengths no longer explain it, it finds out again", () => {
    const cost = new CostEstimate();
    const random = new Random(1);
    learn(cost, 100, 0, random);
    assert.equal(cost.undecided, false);
    while (cost.kind !== "rows") cost.learn(batch(random), 5 + random.next());
    assert.equal(cost.undecided, true);
    learn(cost, 400, 0, random);
    assert.equal(cost.kind, "padded");
  });
});
