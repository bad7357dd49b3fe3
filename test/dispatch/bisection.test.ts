/** Isolating the inputs that make a worker refuse a batch. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import type { Reply } from "../../src/workers/backend/backend.ts";
import { smallerBatch } from "../../src/core/retry.ts";
import { cut, nextStep, type Replied, type Ruling, sendApart } from "../../src/dispatch/bisection.ts";
import { endings, simulate } from "./simulated.ts";

type Kind = "rejected" | "unusable" | "failed";

interface Scene {
  /** By input: whether a call that holds it is refused. */
  readonly bad: readonly boolean[];
  readonly kind: Kind;
  /** The most inputs that the worker takes in one call. */
  readonly takes?: number;
  /** Whether an input's time is up before the nth call. */
  readonly expires?: (input: number, call: number) => boolean;
}

function refusal(kind: Kind): Reply {
  return kind === "failed" ? { kind, message: "500", blame: "worker" } : { kind, message: "no" };
}

function callsFor(size: number): number {
  return 2 + 2 * Math.ceil(Math.log2(size));
}

/** Runs a batch as the dispatcher does, and what is put back in smaller batches until all is ruled. */
class Play {
  readonly rulings = new Map<number, Ruling<number>["as"]>();
  readonly gone = new Set<number>();
  calls = 0;
  readonly #scene: Scene;
  readonly #putBack: { readonly inputs: readonly number[]; readonly atMost: number }[] = [];

  constructor(scene: Scene) {
    this.#scene = scene;
    this.#putBack.push({ inputs: [...scene.bad.keys()], atMost: scene.bad.length });
    for (let next = this.#putBack.shift(); next !== undefined; next = this.#putBack.shift()) {
      const { inputs, atMost } = next;
      for (let at = 0; at < inputs.length; at += atMost) this.#batch(inputs.slice(at, at + atMost));
    }
  }

  #batch(inputs: readonly number[]): void {
    const before = this.calls;
    const reply = this.#call(inputs);
    if (reply.kind === "answered" || inputs.length === 1) {
      for (const input of inputs) this.#rule(input, "reply", reply);
      return;
    }
    let state = cut(inputs, reply, (input) => `tenant-${input % 3}`);
    let replied: Replied<number> | undefined;
    const ruled: number[] = [];
    for (;;) {
      const view = { takes: this.#scene.takes ?? Infinity, suspected: () => false, mayCallAgain: true };
      const step = nextStep(state, replied, view);
      ({ state } = step);
      for (const { members, as } of step.rulings) {
        ruled.push(...members);
        if (as === "putBack") this.#putBack.push({ inputs: members, atMost: smallerBatch(inputs.length) });
        else for (const input of members) this.#rule(input, as, replied?.reply);
      }
      if (step.call === undefined) break;
      for (const input of step.call)
        if (this.#scene.expires?.(input, this.calls) === true) this.gone.add(input);
      const members = step.call.filter((input) => !this.gone.has(input));
      replied = members.length === 0 ? undefined : { members, reply: this.#call(members) };
    }
    assert.equal(new Set(ruled).size, ruled.length, "one ruling each");
    for (const input of inputs)
      assert.ok(ruled.includes(input) || this.gone.has(input), `no ruling for ${input}`);
    assert.ok(this.calls - before <= callsFor(inputs.length), `${this.calls - before} calls for one batch`);
  }

  #call(inputs: readonly number[]): Reply {
    this.calls++;
    const { bad, kind, takes = Infinity } = this.#scene;
    for (const input of inputs) {
      assert.ok(!this.rulings.has(input), "what is ruled is not sent again");
      assert.ok(!this.gone.has(input), "what has expired is not sent again");
    }
    assert.ok(this.calls === 1 || inputs.length <= Math.max(takes, smallerBatch(bad.length)));
    return inputs.some((input) => bad[input]) ? refusal(kind) : { kind: "answered", outputs: [] };
  }

  #rule(input: number, as: Ruling<number>["as"], reply: Reply | undefined): void {
    assert.ok(!this.rulings.has(input), "one verdict each");
    this.rulings.set(input, as);
    if (as === "reply") assert.equal(reply!.kind, this.#scene.bad[input] ? this.#scene.kind : "answered");
    else assert.ok(this.#scene.bad[input], "nobody else is blamed");
  }
}

const batches = fc.array(fc.boolean(), { minLength: 2, maxLength: 64 }).filter((bad) => bad.includes(true));
/** One to three failing inputs among many. */
const few = fc
  .tuple(fc.integer({ min: 2, max: 512 }), fc.array(fc.nat(511), { minLength: 1, maxLength: 3 }))
  .map(([size, at]) => Array.from({ length: size }, (_, input) => at.some((each) => each % size === input)));

describe("bisection", () => {
  test("every input gets exactly one verdict, the right one, whichever inputs fail", () => {
    fc.assert(
      fc.property(
        batches,
        fc.constantFrom("rejected", "unusable"),
        fc.integer({ min: 1, max: 64 }),
        (bad, kind, takes) => {
          const { rulings } = new Play({ bad, kind, takes });
          assert.equal(rulings.size, bad.length);
        },
      ),
    );
  });

  test("the failing inputs are isolated in O(f log n) calls", () => {
    fc.assert(
      fc.property(few, fc.constantFrom("rejected", "unusable"), (bad, kind) => {
        const { calls } = new Play({ bad, kind });
        const failing = bad.filter(Boolean).length;
        assert.ok(
          calls <= (2 * failing - 1) * callsFor(bad.length),
          `${calls} calls for ${failing} of ${bad.length}`,
        );
      }),
    );
  });

  test("what expires meanwhile is not sent again, and the others get their verdicts", () => {
    fc.assert(
      fc.property(batches, fc.constantFrom("rejected", "unusable"), fc.nat(20), (bad, kind, after) => {
        const expires = (input: number, call: number): boolean => input % 3 === 0 && call > after;
        const { rulings, gone } = new Play({ bad, kind, expires });
        for (const input of bad.keys()) assert.ok(rulings.has(input) || gone.has(input), `input ${input}`);
      }),
    );
  });

  test("when both parts fail it is the worker: everybody is ruled by that reply, after two calls", () => {
    fc.assert(
      fc.property(fc.integer({ min: 2, max: 64 }), fc.boolean(), (size, oneTenant) => {
        const inputs = Array.from({ length: size }, (_, at) => at);
        const reply = refusal("failed");
        const view = { takes: Infinity, suspected: () => false, mayCallAgain: true };
        let step = nextStep(
          cut(inputs, reply, (at) => (oneTenant ? "" : `${at % 2}`)),
          undefined,
          view,
        );
        for (let call = 0; call < 2; call++)
          step = nextStep(step.state, { members: step.call!, reply }, view);
        assert.equal(step.call, undefined);
        assert.deepEqual(
          step.rulings.map(({ as }) => as),
          ["reply"],
        );
        assert.deepEqual(
          step.rulings[0]!.members.toSorted((a, b) => a - b),
          inputs,
        );
      }),
    );
  });

  test("suspected inputs go one by one until one of them is answered", () => {
    let suspects = true;
    const view = { takes: Infinity, suspected: () => suspects, mayCallAgain: true };
    const answered: Reply = { kind: "answered", outputs: [] };
    let step = nextStep(sendApart([1, 2, 3, 4], false), undefined, view);
    const sent = [step.call];
    step = nextStep(step.state, { members: step.call!, reply: refusal("failed") }, view);
    sent.push(step.call);
    suspects = false;
    step = nextStep(step.state, { members: step.call!, reply: answered }, view);
    sent.push(step.call);
    assert.deepEqual(sent, [[1], [2], [3, 4]]);
  });
});

test("no input is sent after its deadline, nor more often than its attempts allow", async () => {
  for (let seed = 1; seed <= 20; seed++) {
    const retries = seed % 3;
    const sends = new Map<string, number>();
    const deadlines = new Map<string, number>();
    const refused = new Set<string>();
    const simulation = simulate({
      seed,
      retries,
      backend: { workers: 2, baseMs: 20 + 5 * (seed % 7), jitter: 0.2 },
      limits: { maxBatchSize: 16 },
      queueMs: 60_000,
      totalMs: 60_000,
      wrap: (worker) => ({
        name: worker.name,
        async run(batch, signal): Promise<Reply> {
          for (const { id } of batch.tasks) {
            sends.set(id, (sends.get(id) ?? 0) + 1);
            assert.ok(simulation.clock.now() <= deadlines.get(id)!, `seed ${seed}: ${id} is sent too late`);
          }
          const reply = await worker.run(batch, signal);
          return batch.tasks.some(({ input }) => input === "13")
            ? { kind: "rejected", message: "no" }
            : reply;
        },
      }),
    });
    const ended = endings(simulation);
    const count = 80;
    for (let at = 0; at < count; at++) {
      const deadlineAt = simulation.clock.now() + (at % 4 === 0 ? 100 + 10 * at : 60_000);
      // Distinct contents, so that nothing is joined; a few of them are refused.
      const input = at % (5 + seed) === 0 ? "13" : `"${at}"`;
      const { id } = simulation.put({ input, deadlineAt });
      deadlines.set(id, deadlineAt);
      if (input === "13") refused.add(id);
    }
    await simulation.run(60_000);
    assert.equal(ended.size, count, `seed ${seed}`);
    for (const [id, times] of sends)
      assert.ok(times <= (retries + 1) * callsFor(16), `${id}: ${times} times`);
    for (const [id, { outcome }] of ended)
      if (outcome?.ok === false && outcome.code === "INPUT_REJECTED") assert.ok(refused.has(id));
  }
});
