/** Tenants in turn: the row of one tier in memory against a slow model. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { TaskRecord } from "../../src/engine/memory/record.ts";
import { TierQueue } from "../../src/engine/memory/queues.ts";

function record(tenant: string, arrival: number): TaskRecord {
  const task = { id: `${tenant}-${arrival}`, tenant, tier: 0, model: "m", input: "", parameters: "" };
  const made = new TaskRecord({ ...task, content: "", createdAt: 0, deadlineAt: 1 }, {}, 1);
  made.arrival = arrival;
  return made;
}

/** The rule of `core/fair.ts`, word for word. */
class Model {
  readonly ring: string[] = [];
  readonly rows = new Map<string, TaskRecord[]>();

  add(each: TaskRecord, back: boolean): void {
    const { tenant } = each.task;
    const row = this.rows.get(tenant) ?? [];
    if (row.length === 0) {
      this.rows.set(tenant, row);
      this.ring.push(tenant);
    }
    row.push(each);
    row.sort((one, other) => one.arrival - other.arrival);
    if (!back) return;
    // Among several tenants whoever comes back is next.
    this.ring.splice(this.ring.indexOf(tenant), 1);
    this.ring.unshift(tenant);
  }

  remove(each: TaskRecord): void {
    const row = this.rows.get(each.task.tenant)!;
    row.splice(row.indexOf(each), 1);
    if (row.length > 0) return;
    this.rows.delete(each.task.tenant);
    this.ring.splice(this.ring.indexOf(each.task.tenant), 1);
  }

  serve(): TaskRecord | undefined {
    const tenant = this.ring[0];
    if (tenant === undefined) return undefined;
    const first = this.rows.get(tenant)![0]!;
    this.ring.push(this.ring.shift()!);
    this.remove(first);
    return first;
  }

  get all(): TaskRecord[] {
    return [...this.rows.values()].flat().sort((one, other) => one.arrival - other.arrival);
  }
}

function serve(queue: TierQueue): TaskRecord | undefined {
  const { next } = queue;
  if (next === undefined) return undefined;
  queue.served(next);
  queue.remove(next);
  return next;
}

const step = fc.record({
  verb: fc.constantFrom("push", "push", "push", "serve", "serve", "back", "remove"),
  tenant: fc.constantFrom("a", "a", "a", "b", "c", "d"),
  pick: fc.nat(1000),
});

describe("the row of a tier", () => {
  test("does what the rule says, whatever comes, goes and comes back", () => {
    fc.assert(
      fc.property(fc.array(step, { maxLength: 80, size: "max" }), (steps) => {
        const queue = new TierQueue();
        const model = new Model();
        const out: TaskRecord[] = [];
        let arrivals = 0;
        for (const { verb, tenant, pick } of steps) {
          if (verb === "push") {
            const made = record(tenant, ++arrivals);
            queue.pushBack(made);
            model.add(made, false);
          } else if (verb === "serve") {
            const served = serve(queue);
            assert.equal(served, model.serve());
            if (served !== undefined) out.push(served);
          } else if (verb === "back" && out.length > 0) {
            const [back] = out.splice(pick % out.length, 1) as [TaskRecord];
            queue.insert(back);
            model.add(back, true);
          } else if (verb === "remove" && model.all.length > 0) {
            const gone = model.all[pick % model.all.length]!;
            queue.remove(gone);
            model.remove(gone);
          }
          assert.equal(queue.size, model.all.length);
          assert.equal(queue.first, model.all[0]);
          assert.equal(queue.tenants, model.rows.size);
          for (const each of "abcd") assert.equal(queue.queuedOf(each), model.rows.get(each)?.length ?? 0);
        }
        for (let left = queue.size; left > 0; left--) assert.equal(serve(queue), model.serve());
        assert.equal(queue.next, undefined);
      }),
      { numRuns: 500, unbiased: true },
    );
  });

  test("whoever has tasks is never behind more than one of each other tenant", () => {
    const counts = fc.array(fc.integer({ min: 1, max: 30 }), { minLength: 1, maxLength: 8 });
    fc.assert(
      fc.property(counts, (queued) => {
        const queue = new TierQueue();
        queued.forEach((count, tenant) => {
          for (let n = 0; n < count; n++) queue.pushBack(record(`t${tenant}`, n));
        });
        const served = queued.map(() => 0);
        for (let each = serve(queue); each !== undefined; each = serve(queue)) {
          served[Number(each.task.tenant.slice(1))]!++;
          const waiting = served.filter((count, tenant) => count < queued[tenant]!);
          const most = Math.max(...served);
          for (const count of waiting) assert.ok(most - count <= 1);
        }
        assert.deepEqual(served, queued);
      }),
    );
  });

  test("a queue of many thousands costs what a short one costs, also when one comes back", () => {
    const queue = new TierQueue();
    const flood = Array.from({ length: 20_000 }, (_, n) => record("flood", n));
    for (const each of flood) queue.pushBack(each);
    const back = record("other", 19_990.5);
    queue.insert(back);
    assert.equal(back.before, flood[19_990]);
    assert.equal(queue.next, back);
  });
});
