import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import type { Task } from "../../src/core/task.ts";
import type { Sharing } from "../../src/engine/engine.ts";
import { Holdings } from "../../src/engine/memory/records.ts";
import { Packed } from "../../src/engine/memory/packed.ts";
import { TaskRecord } from "../../src/engine/memory/record.ts";

const TTL_MS = 1000;

function task(changes: Partial<Task> = {}): Task {
  const own = { id: "t", tenant: "a", tier: 0, model: "m", input: "1", parameters: "", content: "" };
  return { ...own, createdAt: 1, deadlineAt: 2, ...changes };
}

function done(id: string, output: string, settledAt = 10, sharing: Sharing = {}): TaskRecord {
  const record = new TaskRecord(task({ id }), sharing, 5);
  record.state = "done";
  record.outcome = { ok: true, output };
  record.settledAt = settledAt;
  return record;
}

function store(maxBytes = Infinity) {
  const forgotten: string[] = [];
  const rescued: TaskRecord[] = [];
  const holdings = new Holdings(7);
  const packed = new Packed(holdings, () => TTL_MS, 7, {
    forgotten: (id) => forgotten.push(id),
    rescue: (record) => rescued.push(record),
  });
  const sweep = (now: number): number => {
    const holding = holdings.find("a");
    return holding === undefined ? Infinity : packed.sweep(holding, now);
  };
  const trim = (): void => {
    for (let each = holdings.toTrim(maxBytes); each !== undefined; each = holdings.toTrim(maxBytes)) {
      packed.dropOldest(each);
    }
  };
  return { packed, holdings, forgotten, rescued, sweep, trim };
}

/** Any text without halves of surrogate pairs, which no JSON that was let in holds. */
const text = fc.string({ unit: "binary", maxLength: 40 });

/** Names of batches and workers, and what is said about them, hold no zero. */
const words = text.filter((each) => !each.includes("\0"));

test("a record comes out as it went in", () => {
  const arbitrary = fc.record({
    // Ids are ours: ASCII.
    task: fc.record({
      id: fc.string({ unit: "grapheme-ascii", maxLength: 40 }),
      tenant: text,
      tier: fc.nat(9),
      model: text,
    }),
    outcome: fc.oneof(
      text.map((output) => ({ ok: true as const, output })),
      text.map((message) => ({ ok: false as const, code: "CANCELLED" as const, message })),
    ),
    attempt: fc.nat(9),
    cached: fc.boolean(),
    trace: fc.option(fc.constant("00-11-22-01"), { nil: undefined }),
    batch: fc.option(
      fc.record({ id: words, size: fc.nat(64), worker: words, startedAt: fc.nat(), why: words }),
      { nil: undefined },
    ),
  });
  fc.assert(
    fc.property(fc.array(arbitrary, { maxLength: 20 }), (all) => {
      const { packed } = store();
      const records = all.map((each, n) => {
        const id = `${n} ${each.task.id}`;
        const record = new TaskRecord(task({ ...each.task, id, input: "", trace: each.trace }), {}, 0);
        record.state = each.outcome.ok ? "done" : "failed";
        record.outcome = each.outcome;
        record.settledAt = 10.5;
        record.attempt = each.attempt;
        record.cached = each.cached;
        if (each.batch !== undefined) record.batch = { ...each.batch, reason: "full" };
        packed.add(record);
        return record;
      });
      for (const record of records) assert.deepEqual(packed.get(record.task.id), record);
    }),
  );
});

describe("until its time is over", () => {
  test("it is found, then it is not, and its owner hears of it once", () => {
    const { packed, holdings, forgotten, sweep } = store();
    for (let n = 0; n < 2000; n++) packed.add(done(`task ${n}`, `"${"x".repeat(n)}"`, n));
    assert.equal(packed.size, 2000);
    assert.equal(sweep(TTL_MS + 999), TTL_MS + 1000);
    assert.equal(packed.size, 1000);
    assert.equal(packed.get("task 999"), undefined);
    assert.equal(packed.get("task 1000")?.settledAt, 1000);
    assert.equal(sweep(TTL_MS + 5000), Infinity);
    assert.deepEqual([packed.size, holdings.bytes, holdings.awaitedBytes], [0, 0, 0]);
    assert.equal(new Set(forgotten).size, 2000);
    packed.add(done("again", "1", 9000));
    assert.equal(packed.get("again")?.settledAt, 9000);
  });

  test("content answers for others for as long as the model says, also when the result is forgotten", () => {
    const { packed, holdings, sweep } = store();
    packed.add(done("one", '"1"', 10, { cacheKey: "key", cacheTtlMs: 5000 }));
    packed.deliver("one", true);
    assert.equal(packed.get("one"), undefined);
    assert.equal(sweep(2000), 5010);
    assert.deepEqual(packed.cached("key", 2000)?.outcome, { ok: true, output: '"1"' });
    assert.equal(packed.cached("other", 2000), undefined);
    assert.equal(packed.cached("key", 5010), undefined);
    assert.equal(sweep(5010), Infinity);
    assert.equal(holdings.bytes, 0);
  });

  test("a newer success with the same content takes the older one's place", () => {
    const { packed, sweep } = store();
    packed.add(done("one", '"1"', 10, { cacheKey: "key", cacheTtlMs: 500 }));
    packed.add(done("two", '"2"', 20, { cacheKey: "key", cacheTtlMs: 500 }));
    sweep(10 + TTL_MS);
    assert.deepEqual(packed.cached("key", 100)?.outcome, { ok: true, output: '"2"' });
  });
});

test("one larger than a slab is kept like the others", () => {
  const { packed, holdings, sweep } = store();
  const large = `"${"é".repeat(1_500_000)}"`;
  packed.add(done("small", "1"));
  packed.add(done("large", large));
  packed.add(done("after", "2"));
  for (const [id, output] of [
    ["small", "1"],
    ["large", large],
    ["after", "2"],
  ] as const)
    assert.deepEqual(packed.get(id)?.outcome, { ok: true, output });
  sweep(10 + TTL_MS);
  assert.equal(holdings.bytes, 0);
});

test("too many bytes: what was delivered goes, what is awaited is handed back", () => {
  const { packed, forgotten, rescued, trim } = store(3000);
  for (const id of ["delivered", "awaited", "later"]) packed.add(done(id, `"${"x".repeat(1000)}"`));
  packed.deliver("delivered", false);
  trim();
  assert.deepEqual(forgotten, ["delivered"]);
  assert.equal(packed.get("delivered"), undefined);
  packed.add(done("latest", `"${"x".repeat(1000)}"`));
  trim();
  // Nothing can go: all are awaited, and stay where they cost least.
  assert.deepEqual([rescued.length, packed.size], [0, 3]);
  packed.deliver("later", false);
  trim();
  assert.deepEqual(
    rescued.map(({ task: { id } }) => id),
    ["awaited"],
  );
  assert.deepEqual(forgotten, ["delivered"]);
  assert.equal(packed.size, 2);
});

describe("several tenants", () => {
  const tenants = ["flood", "b", "c"];
  const add = (packed: Packed, tenant: string, id: string, characters: number): void => {
    const record = done(id, `"${"x".repeat(characters)}"`);
    record.task = { ...record.task, tenant };
    record.delivered = true;
    packed.add(record);
  };

  test("the one that holds the most loses its oldest; whoever is within its share loses nothing", () => {
    const { packed, holdings, trim } = store(30_000);
    for (const tenant of ["b", "c"]) for (let n = 0; n < 4; n++) add(packed, tenant, `${tenant} ${n}`, 1000);
    for (let n = 0; n < 1000; n++) {
      add(packed, "flood", `flood ${n}`, 1000);
      trim();
    }
    assert.ok(holdings.bytes <= 30_000);
    for (const tenant of ["b", "c"]) {
      for (let n = 0; n < 4; n++) assert.notEqual(packed.get(`${tenant} ${n}`), undefined);
    }
    assert.notEqual(packed.get("flood 999"), undefined);
    assert.equal(packed.get("flood 0"), undefined);
  });

  test("however they come and go, every result is found until its time, and every byte is counted", () => {
    fc.assert(
      fc.property(
        fc.array(fc.tuple(fc.nat(2), fc.nat(3000), fc.constantFrom("add", "deliver", "forget", "trim")), {
          maxLength: 200,
        }),
        (steps) => {
          const { packed, holdings, rescued, trim } = store(40_000);
          let next = 0;
          for (const [which, size, what] of steps) {
            if (what === "add") add(packed, tenants[which]!, `t ${next++}`, size);
            else if (what === "trim") trim();
            else if (what === "deliver") packed.deliver(`t ${size % (next + 1)}`, false);
            else packed.forget(`t ${size % (next + 1)}`);
            const all = holdings.all();
            assert.equal(
              all.reduce((sum, { bytes }) => sum + bytes, 0),
              holdings.bytes,
            );
          }
          for (const holding of holdings.all()) packed.sweep(holding, 10 + TTL_MS);
          assert.deepEqual([holdings.bytes, holdings.awaitedBytes, holdings.size, packed.size], [0, 0, 0, 0]);
          assert.equal(rescued.length, 0);
        },
      ),
    );
  });
});
