/** The lifecycle of a worker under random events: two workers of the pool may stand for one machine, never at once. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { InFlightBatch } from "../../src/dispatch/in-flight.ts";
import { Events } from "../../src/observe/events.ts";
import type { Worker } from "../../src/workers/backend/backend.ts";
import { type Lifecycle, nextState, type PoolWorker, type WorkerEvent } from "../../src/workers/worker.ts";
import { Workers } from "../../src/workers/workers.ts";

const HEALTH = { failures: 3, ejectMs: 1000, maxEjectMs: 30_000 };
const MACHINES = ["a", "b"];

const lease = fc.record({ until: fc.constantFrom(-Infinity, Infinity), release: fc.boolean() });
const event: fc.Arbitrary<WorkerEvent> = fc.oneof(
  fc.record({ type: fc.constantFrom("machine-free", "retire", "idle", "silent", "heard") }),
  fc.record({ type: fc.constant("lease" as const), lease }),
  fc.record({ type: fc.constant("drain" as const), drained: fc.boolean() }),
);
const ORDER = ["starting", "active", "draining", "gone"];

test("the phase only goes forward, and nothing changes once it is gone", () => {
  const steps = fc.array(fc.tuple(event, fc.boolean()), { maxLength: 30 });
  fc.assert(
    fc.property(fc.constantFrom("starting", "active"), steps, (phase, said) => {
      let state: Lifecycle = {
        phase,
        lease: { until: Infinity, release: false },
        drained: false,
        silent: false,
      };
      for (const [each, busy] of said) {
        const next = nextState(state, each, busy);
        assert.ok(ORDER.indexOf(next.phase) >= ORDER.indexOf(state.phase));
        if (state.phase === "gone") assert.equal(next, state);
        if (next.phase === "gone" && state.phase !== "gone") assert.ok(!busy || each.type === "idle");
        state = next;
      }
    }),
  );
});

type Step =
  | { readonly do: "replace" | "finish" | "start" | "retire"; readonly at: number }
  | { readonly do: "say"; readonly at: number; readonly event: WorkerEvent };

/** One pool in which machines are replaced, batches start and end, leases and operators come and go. */
class Stage {
  readonly clock = new VirtualClock();
  readonly events = new Events();
  readonly workers = new Workers("m", [], { limits: () => HEALTH, clock: this.clock, events: this.events });
  readonly all: PoolWorker[] = [];
  readonly gone = new Map<PoolWorker, number>();
  #ids = 0;

  constructor() {
    for (const machine of MACHINES) this.join(machine);
  }

  join(address: string, predecessors: readonly PoolWorker[] = []): void {
    const worker = this.workers.join({ name: address, address } as Worker, { predecessors });
    this.all.push(worker);
    void worker.gone.then(() => this.gone.set(worker, (this.gone.get(worker) ?? 0) + 1));
  }

  do(step: Step): void {
    const worker = this.all[step.at % this.all.length]!;
    const now = this.clock.now();
    switch (step.do) {
      case "replace": {
        if (worker.retiring) return;
        this.join(worker.worker.address!, [worker]);
        return void this.workers.retire(worker);
      }
      case "retire":
        return void this.workers.retire(worker);
      case "start": {
        if (!worker.free(now)) return;
        assert.ok(!worker.retiring && !worker.drained && worker.held(now) && !worker.lease.release);
        const times = { oldestAt: now, freedAt: undefined, expectedMs: 1, handoverMs: 0 };
        const facts = {
          id: `${++this.#ids}`,
          slot: worker,
          size: 1,
          early: false,
          exclusive: false,
          ...times,
        };
        return worker.bind(new InFlightBatch(facts, { reached: () => {}, started: () => {} }, now));
      }
      case "finish":
        if (worker.batch !== undefined) worker.leave(worker.batch, now);
        return;
      case "say":
        worker.transition(step.event);
    }
  }

  check(): void {
    const now = this.clock.now();
    for (const machine of MACHINES) {
      const here = this.all.filter(({ worker }) => worker.address === machine);
      assert.ok(here.filter(({ batch }) => batch !== undefined).length <= 1, "two batches on one machine");
      assert.ok(here.filter(({ phase }) => phase === "active").length <= 1);
      const waits = here.filter(({ phase }) => phase === "starting").length > 0;
      const others = here.some(({ phase }) => phase === "active" || phase === "draining");
      assert.ok(!waits || others, "it waits for nobody");
    }
    const { slots } = this.workers;
    assert.deepEqual(
      slots,
      this.all.filter(({ phase }) => phase !== "gone"),
    );
    assert.equal(this.workers.held(now), slots.filter((each) => each.held(now)).length);
    assert.equal(this.workers.healthy(now), slots.filter((each) => each.healthy(now)).length);
    for (const each of slots) {
      assert.ok(!each.healthy(now) || each.phase === "starting" || each.phase === "active");
      assert.ok(each.phase !== "draining" || each.batch !== undefined, "it drains and runs nothing");
    }
  }
}

describe("a pool", () => {
  // What only the pool itself says is not said from outside.
  const said = event.filter(({ type }) => type !== "machine-free" && type !== "idle");
  const at = fc.nat(11);
  const step: fc.Arbitrary<Step> = fc.oneof(
    { weight: 3, arbitrary: fc.record({ do: fc.constantFrom("start", "finish"), at }) },
    { weight: 2, arbitrary: fc.record({ do: fc.constantFrom("replace", "retire"), at }) },
    { weight: 2, arbitrary: fc.record({ do: fc.constant("say" as const), at, event: said }) },
  );

  test("never runs two batches on one machine, starts none where it may not, and counts whom it has", () => {
    fc.assert(
      fc.property(fc.array(step, { maxLength: 80 }), (steps) => {
        const stage = new Stage();
        for (const each of steps) {
          stage.do(each);
          stage.check();
        }
      }),
      { numRuns: 500 },
    );
  });

  test("when all are retired and their batches are over each is gone, once, and who waited was told", async () => {
    const run = async (steps: readonly Step[]): Promise<void> => {
      const stage = new Stage();
      for (const each of steps) stage.do(each);
      stage.all.forEach((_, at) => stage.do({ do: "retire", at }));
      stage.all.forEach((_, at) => stage.do({ do: "finish", at }));
      stage.check();
      await Promise.all(stage.all.map(({ gone }) => gone));
      assert.deepEqual(stage.workers.slots, []);
      assert.deepEqual(
        [...stage.gone.values()],
        stage.all.map(() => 1),
      );
    };
    await fc.assert(fc.asyncProperty(fc.array(step, { maxLength: 60 }), run), { numRuns: 200 });
  });

  test("tells the fleet once that a worker to be given back has become idle", () => {
    const stage = new Stage();
    const released: string[] = [];
    stage.events.on("worker.released", ({ worker }) => released.push(worker));
    stage.do({ do: "start", at: 0 });
    stage.do({ do: "start", at: 1 });
    stage.do({ do: "say", at: 0, event: { type: "lease", lease: { until: Infinity, release: true } } });
    assert.deepEqual(released, []);
    stage.do({ do: "finish", at: 0 });
    stage.do({ do: "finish", at: 1 });
    assert.deepEqual(released, ["a"]);
  });
});
