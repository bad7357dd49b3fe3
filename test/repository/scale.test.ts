/** The arithmetic of docs/scale.md: the page has what the script makes, and the rules hold that it is built on. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CHOSEN, FIGURES, page, scale } from "../../scripts/scale.ts";

describe("docs/scale.md", () => {
  test("has the tables of scripts/scale.ts", () => {
    const { text, wanted } = page();
    assert.equal(text, wanted, "run node scripts/scale.ts");
  });

  test("plans no core beyond its share, and no cell beyond its rate", () => {
    for (let rate = 100; rate < 5e6; rate *= 1.7) {
      const { cells, cellRate, gateways, batchers, redisLoad } = scale(rate, FIGURES);
      assert.ok(cellRate <= CHOSEN.cell.value);
      assert.ok(Math.abs(cells * cellRate - rate) < 1e-6 * rate);
      assert.ok(redisLoad <= CHOSEN.share.value);
      assert.ok((cellRate / gateways) * FIGURES.gatewayUs * 1e-6 <= CHOSEN.share.value + 1e-9);
      assert.ok((cellRate / batchers) * FIGURES.batcherUs * 1e-6 <= CHOSEN.share.value + 1e-9);
      assert.ok(gateways >= 2 && batchers >= 2, "one may die");
    }
  });

  test("refuses a cell that sixteen primaries cannot serve", () => {
    assert.throws(() => scale(1e6, { ...FIGURES, cell: 1e6 }), /16 primaries are too few/);
  });
});
