import assert from "node:assert/strict";
import { test } from "node:test";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { Events } from "../../src/observe/events.ts";
import { type ProcessSample, ProcessSampler, ProcessSamples } from "../../src/observe/processes.ts";
import { answered } from "./stage.ts";

function sample(process: string, more: Partial<ProcessSample> = {}): ProcessSample {
  return { process, pid: 1, cpuSeconds: 0, residentBytes: 0, loopDelayMs: 0, ...more };
}

test("a process reads itself once a second, until it is stopped", async () => {
  const clock = new VirtualClock();
  const events = new Events();
  const told: ProcessSample[] = [];
  const sampler = new ProcessSampler("gateway-2", events, clock, (each) => told.push(each));
  await clock.run(clock.now() + 2500);
  assert.equal(told.length, 3);
  const [first, , last] = told;
  assert.deepEqual([last!.process, last!.pid], ["gateway-2", process.pid]);
  assert.ok(first!.cpuSeconds > 0 && last!.cpuSeconds >= first!.cpuSeconds);
  assert.ok(last!.residentBytes > 1e6);
  assert.ok(last!.loopDelayMs < 1);
  events.emit("request.answered", answered());
  sampler.stop();
  assert.equal(events.heard("request.answered"), false);
  assert.equal(await clock.run(clock.now() + 5000), 0, "an alarm is left");
});

test("the delay is the worst since the last look, the others are the latest", () => {
  const samples = new ProcessSamples(new VirtualClock());
  samples.put(sample("gateway-10", { loopDelayMs: 5 }));
  samples.put(sample("gateway-2", { loopDelayMs: 70, residentBytes: 9, cpuSeconds: 1 }));
  samples.put(sample("gateway-2", { loopDelayMs: 20, residentBytes: 8, cpuSeconds: 2 }));
  assert.deepEqual(samples.take(), [
    sample("gateway-2", { loopDelayMs: 70, residentBytes: 8, cpuSeconds: 2 }),
    sample("gateway-10", { loopDelayMs: 5 }),
  ]);
  samples.put(sample("gateway-2", { loopDelayMs: 1 }));
  assert.deepEqual(
    samples.take().map(({ loopDelayMs }) => loopDelayMs),
    [1, 0],
  );
});

test("the CPU of a process that was replaced counts on, whatever its successor has used already", () => {
  const samples = new ProcessSamples(new VirtualClock());
  const cpu = (): number => samples.take()[0]!.cpuSeconds;
  samples.put(sample("gateway-1", { pid: 1, cpuSeconds: 10 }));
  samples.put(sample("gateway-1", { pid: 2, cpuSeconds: 1 }));
  assert.equal(cpu(), 11);
  samples.put(sample("gateway-1", { pid: 3, cpuSeconds: 2 }));
  samples.put(sample("gateway-1", { pid: 3, cpuSeconds: 3 }));
  assert.equal(cpu(), 14);
});

test("a process that is silent for ten seconds is left out, and counts on when it is back", async () => {
  const clock = new VirtualClock();
  const samples = new ProcessSamples(clock);
  samples.put(sample("gateway-1", { pid: 1, cpuSeconds: 4 }));
  await clock.run(clock.now() + 10_001);
  samples.put(sample("core"));
  assert.deepEqual(
    samples.take().map(({ process }) => process),
    ["core"],
  );
  samples.put(sample("gateway-1", { pid: 2, cpuSeconds: 1 }));
  assert.deepEqual(samples.take()[1], sample("gateway-1", { pid: 2, cpuSeconds: 5 }));
});
