/** Refusals that inform: whose turn it is, and when to come again. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { Admission } from "../../../src/gateway/admission/admission.ts";
import type { Engine } from "../../../src/engine/engine.ts";
import { VirtualClock } from "../../../src/cli/plan/virtual-clock.ts";
import { Events } from "../../../src/observe/events.ts";

const tiers = ["enterprise", "paid", "free", "trial", "rest"].map((name) => ({ name }));
const admission = new Admission(() => ({ tiers }), {} as Engine, new VirtualClock(), new Events());
const refused = { reason: "deadline", message: "more requests than the workers can serve in time" } as const;

function told(
  tier: number,
  waitMs: number,
  code: "RATE_LIMITED" | "SERVICE_OVERLOADED" = "RATE_LIMITED",
): string {
  return admission.shed({ tenant: "t", tier }, "m", { ...refused, code, waitMs }).message;
}

test("a tier that is refused learns who is served first, and when to come again", () => {
  const start = "more requests than the workers can serve in time";
  assert.equal(
    told(2, 1201),
    `${start}: tier free is refused now, enterprise and paid served first; try again in 1.3 s`,
  );
  assert.equal(
    told(1, 20),
    `${start}: tier paid is refused now, enterprise served first; try again in 0.1 s`,
  );
  assert.equal(
    told(4, 12_001),
    `${start}: tier rest is refused now, better tiers served first; try again in 13 s`,
  );
  assert.equal(told(0, 900, "SERVICE_OVERLOADED"), `${start}; try again in 0.9 s`);
});

test("a used-up limit and a full queue tell when; a process that ends says to send it again", () => {
  const caller = { tenant: "t", tier: 0 };
  const full = admission.refuse(caller, "m", "full", "the queue is full", 250);
  assert.equal(full.message, "the queue is full; try again in 0.3 s");
  assert.equal(full.retryAfterMs, 250);
  assert.match(
    admission.ending(caller, "m").message,
    /^this process is shutting down; send the request again$/,
  );
});
