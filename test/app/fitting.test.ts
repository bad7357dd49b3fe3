/** How many processes a machine has room for, and how many a rate needs. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { CPU_US, fittingProcesses, neededProcesses, TARGET_SHARE } from "../../src/app/processes/fitting.ts";

test("--processes auto: half the cores, six at most, one below four", () => {
  const cores = [1, 2, 3, 4, 6, 8, 12, 16, 200];
  assert.deepEqual(cores.map(fittingProcesses), [1, 1, 1, 2, 3, 4, 6, 6, 6]);
});

test("a rate needs no process that is more than 70 % busy, and no more processes than that takes", () => {
  let last = { machines: 1, processes: 1 };
  for (let rate = 500; rate < 300_000; rate += 500) {
    const needed = neededProcesses(rate);
    const { machines, processes, cores, share, coreShare } = needed;
    assert.ok(share <= TARGET_SHARE && (coreShare ?? 0) <= TARGET_SHARE, `${rate}/s`);
    assert.ok(
      machines > last.machines || (machines === last.machines && processes >= last.processes),
      `${rate}/s`,
    );
    assert.equal(processes === 1, rate * CPU_US.single <= TARGET_SHARE * 1e6, `${rate}/s`);
    assert.equal(cores, processes === 1 ? 1 : processes + 1);
    const fewer = processes - 1;
    if (fewer > 1) assert.ok((share * processes) / fewer > TARGET_SHARE, `${rate}/s: ${fewer} would do`);
    last = needed;
  }
  assert.ok(last.machines > 1);
});
