/** The gate of a model on virtual time: which answer a refusal gets, and what the fleet knows. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { CapacityGate, type CapacityRules } from "../../../src/gateway/admission/capacity-gate.ts";
import type { Horizon } from "../../../src/core/shed.ts";
import type { Engine } from "../../../src/engine/engine.ts";

const rules: CapacityRules = {
  mode: "predictive",
  model: "m",
  tiers: 3,
  queueMs: 500,
  totalMs: 500,
  targetUtilization: 0.7,
  lastTierDepth: 100,
  firstTierDepth: 500,
};
const now = 1000;
const well: Horizon = {
  healthy: 2,
  idle: 0,
  overdue: 0,
  perMs: 1,
  nominalPerMs: 1,
  batchSize: 50,
  batchMs: 100,
  runMs: 100,
  deviationMs: 0,
  freeAt: [now + 50, now + 100],
  nextUsableAt: Infinity,
};

function gate(depths: number[], changes: Partial<CapacityRules> = {}, horizon: Partial<Horizon> = {}) {
  const engine: Pick<Engine, "waiting" | "turn"> = {
    waiting: () => depths,
    turn: (_model, tier) => depths[tier]!,
  };
  const prospects = { horizon: () => ({ ...well, ...horizon }), hasRoom: () => false, othersPerMs: () => 0 };
  return new CapacityGate({ ...rules, ...changes }, prospects, engine as Engine);
}

const enter = (gate: CapacityGate, tier: number) => gate.enter({ tenant: "t", tier }, now);

describe("which answer", () => {
  test("a lower tier that is shed for better ones: 429", () => {
    const refusal = enter(gate([0, 0, 900]), 2)!;
    assert.deepEqual([refusal.code, refusal.reason], ["RATE_LIMITED", "deadline"]);
    assert.ok(refusal.waitMs >= 50);
  });

  test("the first tier, when it alone is too much: 503", () => {
    const refusal = enter(gate([900, 0, 0]), 0)!;
    assert.deepEqual([refusal.code, refusal.reason], ["SERVICE_OVERLOADED", "deadline"]);
  });

  test("capacity that is lost: 503 for everybody", () => {
    const halved = { perMs: 0.5, freeAt: [now + 100], healthy: 1 };
    const refusal = enter(gate([0, 0, 900], {}, halved), 2)!;
    assert.deepEqual([refusal.code, refusal.reason], ["SERVICE_OVERLOADED", "capacity"]);
  });

  test("no worker: 503, in every mode", () => {
    const dead = { healthy: 0, perMs: 0, freeAt: [], nextUsableAt: now + 800 };
    for (const mode of ["predictive", "thresholds", "off"] as const) {
      const refusal = enter(gate([0, 0, 0], { mode }, dead), 0)!;
      assert.deepEqual([refusal.code, refusal.reason], ["SERVICE_OVERLOADED", "no_worker"]);
      assert.equal(refusal.waitMs, 800);
    }
  });

  test("thresholds: 429 for the lower tiers, never the first", () => {
    const thresholds = gate([0, 400, 101], { mode: "thresholds" });
    assert.equal(enter(thresholds, 0), undefined);
    assert.equal(enter(thresholds, 1)?.code, "RATE_LIMITED");
    assert.equal(enter(thresholds, 2)?.code, "RATE_LIMITED");
  });

  test("off: whatever waits", () => {
    assert.equal(enter(gate([9000, 9000, 9000], { mode: "off" }), 2), undefined);
  });
});

test("thresholds by load: what is let in over the capacity, others' gateways included", () => {
  const horizon = (): Horizon => well;
  const engine = { waiting: () => [0, 0, 0], turn: () => 0 } as unknown as Engine;
  const alone = new CapacityGate(
    { ...rules, mode: "thresholds" },
    { horizon, hasRoom: () => false, othersPerMs: () => 0 },
    engine,
  );
  assert.equal(enter(alone, 2), undefined);
  const many = { horizon, hasRoom: () => false, othersPerMs: (tier: number) => (tier === 0 ? 0.75 : 0) };
  const among = new CapacityGate({ ...rules, mode: "thresholds" }, many, engine);
  assert.equal(enter(among, 2)?.reason, "capacity");
  assert.equal(enter(among, 1), undefined);
});

test("what is queued is counted by tier; an answer from the cache takes nothing from lower tiers", () => {
  const counted = gate([0, 0, 30], {}, { idle: 0 });
  for (let each = 0; each < 500; each++) assert.equal(enter(counted, 0), undefined);
  assert.deepEqual(counted.admittedPerMs(now), [0, 0, 0]);
  assert.equal(enter(counted, 2), undefined, "nothing of all that was queued");
  for (let each = 0; each < 500; each++) counted.queued({ tenant: "t", tier: 0 }, now);
  assert.equal(enter(counted, 2)?.reason, "deadline");
  const [enterprise, paid, free] = counted.admittedPerMs(now);
  assert.ok(enterprise! > 0);
  assert.deepEqual([paid, free], [0, 0]);
});

test("what better tiers bring at other gateways makes a lower tier wait longer", () => {
  const engine = { waiting: () => [0, 0, 120], turn: () => 120 } as unknown as Engine;
  const at = (perMs: number): CapacityGate =>
    new CapacityGate(
      rules,
      { horizon: () => well, hasRoom: () => false, othersPerMs: (tier) => (tier === 0 ? perMs : 0) },
      engine,
    );
  assert.equal(enter(at(0), 2), undefined);
  assert.equal(enter(at(0.8), 2)?.reason, "deadline");
});
