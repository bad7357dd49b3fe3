/** DueLine against a plain list: whatever is set, moved and removed, the soonest comes first. */
import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { DueLine, type InLine } from "../../src/core/due-line.ts";

class Thing implements InLine<Thing> {
  dueAt = Infinity;
  place = -1;
  sooner: Thing | undefined;
  later: Thing | undefined;
}

const things = 12;
const act = fc.record({
  which: fc.nat(things - 1),
  /** Undefined: it is taken out. Mostly in order, as in a server. */
  at: fc.option(fc.oneof(fc.nat(20), fc.constantFrom(100, 101, 102, 103)), { nil: undefined }),
});

test("a line of due things says the same as a list that is searched", () => {
  fc.assert(
    fc.property(fc.array(act, { maxLength: 60 }), (acts) => {
      const line = new DueLine<Thing>();
      const all = Array.from({ length: things }, () => new Thing());
      const due = new Map<Thing, number>();
      for (const { which, at } of acts) {
        const thing = all[which]!;
        if (at === undefined) {
          line.remove(thing);
          due.delete(thing);
          assert.equal(thing.place, -1);
        } else {
          line.set(thing, at);
          due.set(thing, at);
        }
        const soonest = Math.min(Infinity, ...due.values());
        assert.equal(line.firstAt, soonest);
        assert.equal(line.first === undefined ? Infinity : due.get(line.first), soonest);
      }
      const out: number[] = [];
      for (let first = line.first; first !== undefined; first = line.first) {
        out.push(first.dueAt);
        line.remove(first);
      }
      assert.deepEqual(
        out,
        [...due.values()].sort((one, other) => one - other),
      );
    }),
  );
});
