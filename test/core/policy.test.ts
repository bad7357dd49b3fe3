import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { decide, type Limits, type PolicyName, type View } from "../../src/core/policy.ts";

const now = 10_000;
const constant = { baseMs: 100, perTaskMs: 0, msFor: () => 100 };
const affine = { baseMs: 36, perTaskMs: 1, msFor: (size: number) => 36 + size };

function view(changes: Partial<View> = {}): View {
  return {
    queued: 1,
    oldestAt: now,
    earliestDeadlineAt: now + 4000,
    idle: 1,
    freeAt: [],
    lastStartAt: now - 1000,
    arrivalsPerMs: 0,
    service: constant,
    ...changes,
  };
}

function limits(policy: PolicyName, changes: Partial<Limits> = {}): Limits {
  return { policy, maxBatchSize: 64, maxWaitMs: 50, ...changes };
}

const views = fc.record({
  queued: fc.nat(200),
  oldestAt: fc.double({ min: now - 200, max: now, noNaN: true }),
  earliestDeadlineAt: fc.double({ min: now - 100, max: now + 5000, noNaN: true }),
  idle: fc.nat(8),
  freeAt: fc
    .array(fc.double({ min: now - 100, max: now + 500, noNaN: true }), { maxLength: 8 })
    .map((times) => times.sort((a, b) => a - b)),
  lastStartAt: fc.double({ min: now - 1000, max: now, noNaN: true }),
  arrivalsPerMs: fc.double({ min: 0, max: 20, noNaN: true }),
  service: fc.constantFrom(constant, affine),
});
const policies = fc.constantFrom<PolicyName>("adaptive", "latency", "eco", "fixed");

describe("whatever the view", () => {
  test("a batch is never larger than it may be, nor than what waits", () => {
    fc.assert(
      fc.property(views, policies, fc.integer({ min: 1, max: 100 }), (view, policy, maxBatchSize) => {
        const decision = decide(view, limits(policy, { maxBatchSize }), now);
        if (decision.kind !== "send") return;
        assert.ok(decision.size >= 1 && decision.size <= Math.min(maxBatchSize, view.queued));
      }),
    );
  });

  test("nothing leaves without a task and a free worker; with both the answer is send or wait", () => {
    fc.assert(
      fc.property(views, policies, (view, policy) => {
        const { kind } = decide(view, limits(policy), now);
        assert.equal(kind === "idle", view.queued === 0 || view.idle === 0);
      }),
    );
  });

  test("no task waits past maxWaitMs while a worker is free", () => {
    fc.assert(
      fc.property(views, policies, (view, policy) => {
        const decision = decide(view, limits(policy), now);
        if (decision.kind === "wait") assert.ok(decision.until <= view.oldestAt + 50 && decision.until > now);
        if (view.queued > 0 && view.idle > 0 && now >= view.oldestAt + 50)
          assert.equal(decision.kind, "send");
      }),
    );
  });

  test("a full batch leaves at once", () => {
    fc.assert(
      fc.property(views, policies, (view, policy) => {
        const decision = decide({ ...view, queued: 64 + view.queued, idle: 1 }, limits(policy), now);
        assert.deepEqual(decision, { kind: "send", size: 64, reason: "full" });
      }),
    );
  });

  test("waiting until the time it names, it sends", () => {
    fc.assert(
      fc.property(views, policies, (view, policy) => {
        const decision = decide(view, limits(policy), now);
        if (decision.kind !== "wait" || policy === "fixed") return;
        // Time alone may move the stagger on, since overdue workers count as free now; it never passes the cap.
        const cap = Math.min(view.oldestAt + 50, view.earliestDeadlineAt);
        assert.equal(decide(view, limits(policy), Math.max(decision.until, cap)).kind, "send");
      }),
    );
  });
});

describe("adaptive", () => {
  test("an idle fleet never waits for company that is not expected", () => {
    assert.deepEqual(decide(view(), limits("adaptive"), now), { kind: "send", size: 1, reason: "idle" });
  });

  test("starts are spread evenly over the predicted free times", () => {
    // Four workers of 100 ms, one started now: the next may start a quarter of S later (over u = 0.8).
    const staggered = view({ idle: 3, freeAt: [now + 100], lastStartAt: now });
    assert.deepEqual(decide(staggered, limits("latency"), now), {
      kind: "wait",
      until: now + 25,
      unless: 64,
    });
    const decision = decide(staggered, limits("adaptive"), now);
    assert.ok(decision.kind === "wait" && Math.abs(decision.until - (now + 31.25)) < 0.01);
  });

  test("it waits for the economic batch when arrivals make that worth it", () => {
    const busy = view({ arrivalsPerMs: 1 });
    const decision = decide(busy, limits("adaptive"), now);
    const size = Math.sqrt(2 * 1 * 100);
    assert.ok(decision.kind === "wait" && Math.abs(decision.until - (now + size - 1)) < 0.01);
    assert.equal(decision.unless, Math.ceil(size));
    assert.equal(decide({ ...busy, queued: 15 }, limits("adaptive"), now).kind, "send");
    assert.equal(decide(busy, limits("latency"), now).kind, "send");
  });

  test("it comes sooner where batches scatter", () => {
    const at = (deviationMs: number): unknown => {
      const service = { ...constant, deviationMs };
      return decide(view({ service, earliestDeadlineAt: now + 140, arrivalsPerMs: 1 }), limits("eco"), now);
    };
    assert.deepEqual(at(0), at(1), "5 ms in any case");
    assert.notDeepEqual(at(0), at(11));
    assert.deepEqual(at(14), { kind: "send", size: 1, reason: "deadline" });
  });

  test("a deadline comes before economy", () => {
    const tight = view({ arrivalsPerMs: 1, earliestDeadlineAt: now + 104 });
    assert.deepEqual(decide(tight, limits("adaptive"), now), { kind: "send", size: 1, reason: "deadline" });
  });

  test("maxWaitMs is a ceiling, named as the reason", () => {
    const stuck = view({ idle: 1, freeAt: [now + 400], lastStartAt: now, oldestAt: now - 50 });
    assert.deepEqual(decide(stuck, limits("adaptive"), now), { kind: "send", size: 1, reason: "wait" });
  });
});

test("fixed: size or time, nothing else", () => {
  const hurried = view({ earliestDeadlineAt: now + 1, oldestAt: now - 10 });
  assert.deepEqual(decide(hurried, limits("fixed"), now), { kind: "wait", until: now + 40, unless: 64 });
  assert.deepEqual(decide(hurried, limits("fixed"), now + 40), { kind: "send", size: 1, reason: "wait" });
});

test("eco is more patient than adaptive, which is more patient than latency", () => {
  const busy = view({ arrivalsPerMs: 0.2 });
  const until = (policy: PolicyName): number => {
    const decision = decide(busy, limits(policy, { maxWaitMs: 1000 }), now);
    return decision.kind === "wait" ? decision.until : now;
  };
  assert.ok(until("latency") < until("adaptive") && until("adaptive") < until("eco"));
});
