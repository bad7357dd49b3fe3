import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { Table } from "../../src/core/table.ts";

/** Few keys, so that they meet again, and some that differ only where they are not hashed. */
const keys = fc.oneof(
  fc.string({ maxLength: 3 }),
  fc.integer({ max: 40, min: 0 }).map((n) => `task-${n}`),
  fc.integer({ max: 40, min: 0 }).map((n) => `${n}-the-same-end`),
);
const steps = fc.array(fc.tuple(fc.constantFrom("set", "get", "delete"), keys, fc.integer()), {
  maxLength: 400,
});

test("a table answers as a Map does, whatever is set and deleted, whatever is hashed", () => {
  fc.assert(
    fc.property(steps, fc.integer(), fc.constantFrom(0, 4, Infinity), (all, seed, hashed) => {
      const table = new Table<number>(seed, hashed);
      const map = new Map<string, number>();
      for (const [step, key, value] of all) {
        if (step === "set") {
          table.set(key, value);
          map.set(key, value);
        } else if (step === "get") {
          assert.equal(table.get(key), map.get(key));
        } else {
          assert.equal(table.delete(key), map.delete(key));
        }
        assert.equal(table.size, map.size);
      }
      assert.deepEqual(table.values(), [...map.values()]);
      for (const [key, value] of map) assert.equal(table.get(key), value);
      table.clear();
      assert.equal(table.size, 0);
      for (const key of map.keys()) assert.equal(table.get(key), undefined);
    }),
  );
});

test("a table grows, and shares places out evenly among keys of one kind", () => {
  const table = new Table<number>(7);
  for (let i = 0; i < 10_000; i++) table.set(`key ${i}`, i);
  assert.equal(table.size, 10_000);
  for (let i = 0; i < 10_000; i += 2) table.delete(`key ${i}`);
  for (let i = 0; i < 10_000; i++) assert.equal(table.get(`key ${i}`), i % 2 === 0 ? undefined : i);
});
