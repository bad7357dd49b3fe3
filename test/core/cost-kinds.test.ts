/** What a batch's time follows, found from noisy samples of each kind of model, and what must not mislead it. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { type BatchShape, CostEstimate, type CostKind } from "../../src/core/cost.ts";
import { Random } from "../../src/core/random.ts";

const KINDS = ["rows", "padded", "packed"] as const;
const SEEDS = 20;

function msOf(kind: CostKind, { rows, longest, total }: BatchShape): number {
  return 1 + 0.02 * rows + (kind === "rows" ? 0 : 0.0004 * (kind === "padded" ? rows * longest : total));
}

/** `alike`: inputs of about the same length, else half short, some long; in order of arrival. */
function shapeOf(random: Random, rows: number, alike = false): BatchShape {
  const one = 8 + Math.floor(400 * random.next() ** 2);
  const lengths = Array.from({ length: rows }, () => {
    if (alike) return Math.ceil(one * (0.7 + 0.3 * random.next()));
    return random.next() < 0.5
      ? 6 + Math.floor(10 * random.next())
      : 6 + Math.floor(500 * random.next() ** 2);
  });
  const longest = Math.max(...lengths);
  return { rows, longest, total: lengths.reduce((sum, each) => sum + each, 0), inOrder: longest };
}

/** Batches of any size; every other one of similar lengths. */
function learn(cost: CostEstimate, kind: CostKind, batches: number, random: Random, times = 1): void {
  for (let count = 0; count < batches; count++) {
    const shape = shapeOf(random, 1 + Math.floor(64 * random.next()), count % 2 === 0);
    cost.learn(shape, times * msOf(kind, shape) * (1 + 0.1 * random.gaussian()));
  }
}

/** Over batches as they come: how far off the estimate is, in the mean. */
function errorOf(cost: CostEstimate, kind: CostKind, random: Random, times = 1): number {
  let sum = 0;
  for (let count = 0; count < 50; count++) {
    const shape = shapeOf(random, 1 + Math.floor(64 * random.next()), count % 2 === 0);
    sum += Math.abs(cost.msOf(shape) / (times * msOf(kind, shape)) - 1) / 50;
  }
  return sum;
}

function isSane(cost: CostEstimate): void {
  const shapes = [1, 64].flatMap((rows) =>
    [1, 500, 1e9].map((longest) => ({ rows, longest, total: rows * longest, inOrder: longest })),
  );
  const figures = [
    cost.msFor(1),
    cost.msFor(64),
    cost.baseMs,
    cost.perTaskMs,
    cost.perRowMs,
    cost.perTokenMs,
  ];
  for (const figure of [
    ...figures,
    cost.deviationMs,
    cost.spreadMs,
    ...shapes.map((shape) => cost.msOf(shape)),
  ])
    assert.ok(figure >= -1e-9 && figure < Infinity, String(figure));
}

describe("the kinds of cost", () => {
  for (const kind of KINDS) {
    test(`${kind}: is found, with its times`, () => {
      for (let seed = 1; seed <= SEEDS; seed++) {
        const [cost, random] = [new CostEstimate(), new Random(seed)];
        learn(cost, kind, 150, random);
        assert.equal(cost.kind, kind, `seed ${seed}`);
        const error = errorOf(cost, kind, random);
        assert.ok(error < 0.1, `seed ${seed}: ${error} off`);
      }
    });
  }

  test("from a cold start under backlog, with one batch in four of one length", () => {
    for (const kind of KINDS) {
      for (let seed = 1; seed <= SEEDS; seed++) {
        const [cost, random] = [new CostEstimate(), new Random(seed)];
        let explored = 0;
        for (let count = 0; count < 400 && cost.undecided; count++) {
          const alike = count % 4 === 3;
          if (alike) explored++;
          const shape = shapeOf(random, 64, alike);
          cost.learn(shape, msOf(kind, shape) * (1 + 0.05 * random.gaussian()));
        }
        assert.equal(cost.undecided, false, `${kind}, seed ${seed}`);
        assert.equal(cost.kind, kind, `seed ${seed}, ${explored} explored`);
      }
    }
  });

  test("equal lengths are not called padded", () => {
    for (let seed = 1; seed <= SEEDS; seed++) {
      const [cost, random] = [new CostEstimate(), new Random(seed)];
      for (let count = 0; count < 300; count++) {
        const rows = 1 + Math.floor(64 * random.next());
        const shape = { rows, longest: 128, total: 128 * rows, inOrder: 128 };
        cost.learn(shape, msOf("padded", shape) * (1 + 0.1 * random.gaussian()));
        assert.equal(cost.kind, "rows");
      }
    }
  });

  test("a batch of 30 s among many", () => {
    for (const kind of KINDS) {
      for (let seed = 1; seed <= SEEDS; seed++) {
        const [cost, random] = [new CostEstimate(), new Random(seed)];
        learn(cost, kind, 150, random);
        cost.learn(shapeOf(random, 8), 30_000);
        assert.equal(cost.kind, kind, `seed ${seed}`);
        learn(cost, kind, 50, random);
        const error = errorOf(cost, kind, random);
        assert.ok(error < 0.2, `${kind}, seed ${seed}: ${error} off`);
      }
    }
  });

  test("a server that becomes three times as slow, or as fast", () => {
    for (const kind of KINDS) {
      for (const times of [3, 1 / 3]) {
        const [cost, random] = [new CostEstimate(), new Random(7)];
        learn(cost, kind, 150, random);
        learn(cost, kind, 400, random, times);
        assert.equal(cost.kind, kind);
        const error = errorOf(cost, kind, random, times);
        assert.ok(error < 0.2, `${kind}, ${times} times: ${error} off`);
      }
    }
  });

  test("a model that turns from padded to packed", () => {
    for (let seed = 1; seed <= SEEDS; seed++) {
      const [cost, random] = [new CostEstimate(), new Random(seed)];
      learn(cost, "padded", 200, random);
      assert.equal(cost.kind, "padded");
      learn(cost, "packed", 500, random);
      assert.equal(cost.kind, "packed", `seed ${seed}`);
    }
  });

  test("times of 0, NaN and Infinity, and lengths from 1 to 10^9, never give a time below 0 or none at all", () => {
    for (let seed = 1; seed <= 5; seed++) {
      const [cost, random] = [new CostEstimate(), new Random(seed)];
      for (let count = 0; count < 300; count++) {
        const rows = 1 + Math.floor(64 * random.next());
        const longest = Math.ceil(10 ** (9 * random.next()));
        const odd = [0, 0, NaN, Infinity][Math.floor(20 * random.next())];
        const ms = odd ?? 10 ** (5 * random.next() - 1);
        cost.learn({ rows, longest, total: rows * longest, inOrder: longest }, ms);
        isSane(cost);
      }
    }
  });
});
