/** The desired set of a model's workers, and the plan that leads there, for any config, DNS and operator. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import type { ModelConfig } from "../../src/app/config/config.ts";
import {
  type ActualWorker,
  desiredAddresses,
  inputsAfter,
  isListed,
  listedAddresses,
  newInputs,
  planOf,
  type PoolInputs,
} from "../../src/workers/desired.ts";
import { httpModel, modelOf } from "./network-workers.ts";

const PLACES = ["http://a:1/", "http://b:1/", "http://c:1/", "http://d:1/"];
const some = fc.subarray(PLACES);

const network: fc.Arbitrary<PoolInputs> = fc
  .record({ listed: some, found: some, added: some, removed: some })
  .map(({ listed, found, added, removed }) => ({
    ...newInputs(httpModel(listed)),
    found: new Map(found.map((each) => [each, { host: "gpu:1", from: "dns://gpu:1/" }])),
    // As operators leave them: added are those that the config does not list, removed those that it does.
    added: new Set(added.filter((each) => !listed.includes(each))),
    removed: new Map(removed.filter((each) => listed.includes(each)).map((each) => [each, each])),
  }));

const worker: fc.Arbitrary<ActualWorker> = fc.record({
  address: fc.constant(undefined),
  number: fc.constant(undefined),
  retiring: fc.boolean(),
  replaced: fc.constant(false),
  drained: fc.boolean(),
  busy: fc.boolean(),
  pace: fc.constantFrom(0, 0.5, 1),
});
const networkWorkers = fc
  .tuple(some, fc.array(worker, { minLength: 4, maxLength: 4 }))
  .map(([places, workers]) => places.map((address, at) => ({ ...workers[at]!, address })));

const own = (workers: number, apply: boolean): ModelConfig =>
  modelOf({ name: "m", backend: { kind: "simulated", workers: 3 }, scaling: { apply } }, { workers });
const ownWorkers = fc
  .array(worker, { maxLength: 6 })
  .map((workers) => workers.map((each, at) => ({ ...each, number: `${at + 1}` })));

describe("network workers", () => {
  test("desired = config ∪ DNS ∪ added − removed", () => {
    fc.assert(
      fc.property(network, (inputs) => {
        const desired = desiredAddresses(inputs);
        for (const each of PLACES) {
          const named = listedAddresses(inputs.config).includes(each) || inputs.found.has(each);
          assert.equal(desired.has(each), inputs.added.has(each) || (named && !inputs.removed.has(each)));
        }
        // Only a worker that nothing but DNS names goes when DNS names it no more.
        for (const { address, from } of desired.values()) {
          const written = listedAddresses(inputs.config).includes(address) || inputs.added.has(address);
          assert.equal(from === undefined, written);
        }
      }),
    );
  });

  test("the plan retires what is not desired, starts what is missing where nobody is, and then rests", () => {
    fc.assert(
      fc.property(network, networkWorkers, (inputs, actual) => {
        const { retire, start, grow } = planOf(inputs, actual);
        const desired = desiredAddresses(inputs);
        assert.equal(grow, 0);
        assert.ok(retire.every(({ retiring, address }) => !retiring && !desired.has(address)));
        assert.ok(start.every(({ address }) => actual.every((each) => each.address !== address)));
        // Once those that retire are gone, one more plan is enough.
        const left = actual.filter((each) => !each.retiring && !retire.includes(each));
        const joined = start.map(({ address }) => ({ ...IDLE, address }));
        const second = planOf(inputs, [...left, ...joined]);
        assert.deepEqual(second.retire, []);
        const now = [...left, ...joined, ...second.start].map(({ address }) => address);
        assert.deepEqual(now.toSorted(), [...desired.keys()].toSorted());
      }),
    );
  });

  test("of a replaced backend one does not keep its successor from joining", () => {
    const inputs = newInputs(httpModel(PLACES));
    const old = PLACES.map((address) => ({ ...IDLE, address, retiring: true, replaced: true }));
    assert.equal(planOf(inputs, old).start.length, PLACES.length);
  });

  test("a reload keeps what operators did, as far as the config still lists it", () => {
    fc.assert(
      fc.property(network, some, (inputs, listed) => {
        const next = inputsAfter(inputs, httpModel(listed));
        const desired = desiredAddresses(next);
        for (const each of inputs.added) assert.ok(desired.has(each), "what was added stays");
        for (const each of inputs.removed.keys()) {
          assert.equal(
            next.removed.has(each),
            listed.includes(each),
            "what was removed stays out while listed",
          );
        }
        for (const each of next.added) assert.ok(!isListed(next.config, each));
        assert.deepEqual(inputsAfter(next, httpModel(listed)), next, "once more changes nothing");
      }),
    );
  });
});

const IDLE: ActualWorker = {
  address: undefined,
  number: undefined,
  retiring: false,
  replaced: false,
  drained: false,
  busy: false,
  pace: 1,
};

describe("workers that Ferry starts itself", () => {
  test("the plan leads to the number, whoever was removed by name, and then rests", () => {
    const inputs = fc
      .record({ size: fc.nat(6), apply: fc.boolean(), removed: fc.subarray(["1", "2", "3"]) })
      .map(({ size, apply, removed }) => ({
        ...newInputs(own(3, apply)),
        size,
        removed: new Map((apply ? [] : removed).map((each) => [each, `gpu-${each}`])),
      }));
    fc.assert(
      fc.property(inputs, ownWorkers, fc.nat(2), (wanted, actual, starting) => {
        const { retire, start, grow } = planOf(wanted, actual, starting);
        assert.deepEqual(start, []);
        assert.ok(retire.every(({ retiring }) => !retiring));
        const left = actual.filter((each) => !each.retiring && !retire.includes(each));
        assert.ok(left.every(({ number }) => !wanted.removed.has(number)));
        const counted = left.filter(({ drained }) => !(wanted.config.scaling.apply && drained)).length;
        assert.ok(counted + starting + grow >= wanted.size);
        assert.ok(grow === 0 || counted + starting + grow === wanted.size);
        const rest = planOf(wanted, left, starting + grow);
        assert.deepEqual([rest.retire.length, rest.grow], [0, 0]);
      }),
    );
  });

  test("of too many those go first that are missed least: drained, down, slow, idle, last come", () => {
    const workers = [
      { ...IDLE, number: "1", busy: true },
      { ...IDLE, number: "2" },
      { ...IDLE, number: "3" },
      { ...IDLE, number: "4", pace: 0.5 },
      { ...IDLE, number: "5", pace: 0 },
      { ...IDLE, number: "6", drained: true },
    ];
    const inputs = newInputs(own(3, false));
    const order = planOf({ ...inputs, size: 0 }, workers).retire.map(({ number }) => number);
    assert.deepEqual(order, ["6", "5", "4", "3", "2", "1"]);
  });

  test("another number in the config is a new list; the autoscaler's number stays", () => {
    const before = { ...newInputs(own(3, false)), size: 2, removed: new Map([["2", "gpu-2"]]) };
    assert.deepEqual(inputsAfter(before, own(3, false)).removed, before.removed);
    const fewer = inputsAfter(before, own(2, false));
    assert.deepEqual([fewer.size, fewer.removed.size], [2, 0]);
    const scaled = { ...newInputs(own(1, true)), size: 5 };
    assert.equal(inputsAfter(scaled, own(2, true)).size, 5);
    assert.equal(inputsAfter(newInputs(httpModel(PLACES)), own(2, true)).size, 2);
  });
});
