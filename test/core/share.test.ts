/** What tenants share: none takes all, and one that holds nothing is refused only while nothing is free. */
import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { Shares } from "../../src/core/share.ts";

function take(share: Shares, tenant: string, capacity: number): boolean {
  const fits = share.fits(tenant, 1, capacity);
  if (fits) share.add(tenant, 1);
  return fits;
}

function takeAll(share: Shares, tenant: string, capacity: number): number {
  let count = 0;
  while (take(share, tenant, capacity)) count++;
  return count;
}

test("one tenant gets half, rounded up", () => {
  for (const capacity of [1, 2, 3, 10, 256]) {
    assert.equal(takeAll(new Shares(), "a", capacity), Math.ceil(capacity / 2));
  }
});

test("a tenant that comes later gets in, and greedy ones settle at equal parts", () => {
  const share = new Shares();
  assert.equal(takeAll(share, "flood", 90), 45);
  assert.ok(take(share, "late", 90));
  // Places come back one at a time, and both take whatever they may.
  for (let turn = 0; turn < 200; turn++) {
    share.remove(share.heldBy("flood") > 0 && turn % 2 === 0 ? "flood" : "late", 1);
    takeAll(share, "late", 90);
    takeAll(share, "flood", 90);
  }
  for (const tenant of ["flood", "late"]) assert.ok(Math.abs(share.heldBy(tenant) - 30) <= 1, tenant);
});

test("a smaller capacity refuses until enough is given back", () => {
  const share = new Shares();
  share.add("b", 8);
  assert.equal(take(share, "a", 4), false);
  share.remove("b", 5);
  assert.equal(take(share, "a", 4), true);
  assert.equal(take(share, "a", 4), false);
});

test("whatever happens, no more than the capacity is taken, and a newcomer is refused only when it is full", () => {
  const step = fc.tuple(fc.constantFrom("a", "b", "c", "d"), fc.boolean());
  fc.assert(
    fc.property(fc.integer({ min: 1, max: 12 }), fc.array(step, { maxLength: 60 }), (capacity, steps) => {
      const share = new Shares();
      const held = new Map<string, number>();
      for (const [tenant, takes] of steps) {
        const own = held.get(tenant) ?? 0;
        const total = [...held.values()].reduce((sum, each) => sum + each, 0);
        if (takes) {
          const took = take(share, tenant, capacity);
          if (total === capacity) assert.equal(took, false);
          else if (own === 0) assert.equal(took, true);
          if (took) held.set(tenant, own + 1);
        } else if (own > 0) {
          share.remove(tenant, 1);
          held.set(tenant, own - 1);
        }
        assert.equal(share.heldBy(tenant), held.get(tenant) ?? 0);
        assert.ok(share.heldBy(tenant) <= Math.ceil(capacity / 2));
      }
    }),
  );
});
