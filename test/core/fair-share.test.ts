/** Places that tenants share: nobody takes all, and nobody who holds none is refused while one is free. */
import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { FairShare } from "../../src/core/fair-share.ts";

function takeAll(share: FairShare, tenant: string | undefined, capacity: number): number {
  let count = 0;
  while (share.take(tenant, capacity) === "taken") count++;
  return count;
}

test("one tenant gets half, rounded up; without tenants all places are taken", () => {
  for (const capacity of [1, 2, 3, 10, 256]) {
    assert.equal(takeAll(new FairShare(), "a", capacity), Math.ceil(capacity / 2));
    assert.equal(takeAll(new FairShare(), undefined, capacity), capacity);
  }
});

test("a tenant that comes later gets in, and greedy ones settle at equal parts", () => {
  const share = new FairShare();
  assert.equal(takeAll(share, "flood", 90), 45);
  assert.equal(share.take("late", 90), "taken");
  // Places come back one at a time, and both take whatever they may.
  for (let turn = 0; turn < 200; turn++) {
    share.giveBack(share.heldBy("flood") > 0 && turn % 2 === 0 ? "flood" : "late");
    takeAll(share, "late", 90);
    takeAll(share, "flood", 90);
  }
  for (const tenant of ["flood", "late"]) assert.ok(Math.abs(share.heldBy(tenant) - 30) <= 1, tenant);
});

test("a smaller capacity refuses until enough is given back", () => {
  const share = new FairShare();
  takeAll(share, undefined, 8);
  assert.equal(share.take("a", 4), "full");
  for (let n = 0; n < 5; n++) share.giveBack(undefined);
  assert.equal(share.take("a", 4), "taken");
  assert.equal(share.take("a", 4), "full");
});

test("whatever happens, no more than the capacity is taken, and a newcomer is refused only when it is full", () => {
  const step = fc.tuple(fc.constantFrom("a", "b", "c", "d"), fc.boolean());
  fc.assert(
    fc.property(fc.integer({ min: 1, max: 12 }), fc.array(step, { maxLength: 60 }), (capacity, steps) => {
      const share = new FairShare();
      const held = new Map<string, number>();
      for (const [tenant, takes] of steps) {
        const own = held.get(tenant) ?? 0;
        const total = [...held.values()].reduce((sum, each) => sum + each, 0);
        if (takes) {
          const took = share.take(tenant, capacity);
          assert.equal(took === "full", total === capacity);
          if (own === 0 && total < capacity) assert.equal(took, "taken");
          if (took === "taken") held.set(tenant, own + 1);
        } else if (own > 0) {
          share.giveBack(tenant);
          held.set(tenant, own - 1);
        }
        assert.equal(share.heldBy(tenant), held.get(tenant) ?? 0);
        assert.ok(share.heldBy(tenant) <= Math.ceil(capacity / 2));
      }
    }),
  );
});
