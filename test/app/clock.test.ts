/**
 * What every clock owes: alarms ring once, never early, in order of time, and not at all when they are called off.
 * How late a real one rings is the machine's affair: `node bench/timers.ts` measures it, and no test does.
 */
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { join } from "node:path";
import { describe, test } from "node:test";
import { type Clock, SystemClock } from "../../src/app/clock.ts";
import { Random } from "../../src/core/random.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";

interface Stage {
  readonly clock: Clock;
  /** Time passes until `done` is settled. */
  readonly pass: (done: Promise<unknown>) => Promise<void>;
}

const stages: Record<string, () => Stage> = {
  SystemClock: () => ({ clock: new SystemClock(), pass: async (done) => void (await done) }),
  VirtualClock: () => {
    const clock = new VirtualClock();
    return { clock, pass: async (done) => void (await Promise.all([clock.run(clock.now() + 60_000), done])) };
  },
};

for (const [name, open] of Object.entries(stages)) {
  for (const withinMs of [undefined, 0.1]) {
    describe(`${name}, within ${withinMs ?? "whatever it has"} ms`, () => {
      test("rings once and never early, however short the wait", async () => {
        const { clock, pass } = open();
        const early: number[] = [];
        let rung = 0;
        for (let at = 0; at < 50; at++) {
          const rings = Promise.withResolvers<void>();
          const time = clock.now() + at / 20;
          const ring = (): void => {
            rung++;
            if (clock.now() < time) early.push(time - clock.now());
            rings.resolve();
          };
          clock.at(time, ring, withinMs);
          await pass(rings.promise);
        }
        await clock.rest?.();
        assert.deepEqual(early, []);
        assert.equal(rung, 50);
      });

      test("rings in order of time, whatever the order in which alarms were set", async () => {
        const { clock, pass } = open();
        const random = new Random(7);
        // None is due before all are set, also when the machine stands still meanwhile.
        const start = clock.now() + 200;
        // Further apart than the grain of a plain timer.
        const times = Array.from({ length: 12 }, (_, at) => start + 2.5 * at);
        const rung: number[] = [];
        const all = times
          .toSorted(() => random.next() - 0.5)
          .map(
            (time) =>
              new Promise<void>((resolve) => {
                const ring = (): void => {
                  rung.push(time);
                  resolve();
                };
                clock.at(time, ring, withinMs);
              }),
          );
        await pass(Promise.all(all));
        await clock.rest?.();
        assert.deepEqual(rung, times);
      });

      test("one that is called off does not ring, and others do; twice and afterwards is as good", async () => {
        const { clock, pass } = open();
        const rung: string[] = [];
        const first = clock.at(clock.now() + 1, () => rung.push("first"), withinMs);
        const last = Promise.withResolvers<void>();
        const second = clock.at(
          clock.now() + 2,
          () => {
            rung.push("second");
            third.cancel();
          },
          withinMs,
        );
        const third = clock.at(clock.now() + 5, () => rung.push("third"), withinMs);
        clock.at(clock.now() + 9, last.resolve, withinMs);
        first.cancel();
        first.cancel();
        await pass(last.promise);
        second.cancel();
        await clock.rest?.();
        assert.deepEqual(rung, ["second"]);
      });

      test("an alarm may set the next one, and one in the past rings too", async () => {
        const { clock, pass } = open();
        const done = Promise.withResolvers<void>();
        let left = 20;
        const again = (): void => {
          if (--left === 0) done.resolve();
          else clock.at(clock.now() + (left % 3) - 1, again, withinMs);
        };
        again();
        await pass(done.promise);
        await clock.rest?.();
        assert.equal(left, 0);
      });
    });
  }
}

describe("the thread of fine alarms", () => {
  test("ends with rest, while alarms are set; those ring all the same, and the next starts another", async () => {
    const clock = new SystemClock();
    const rings = Array.from({ length: 5 }, (_, at) => {
      const { promise, resolve } = Promise.withResolvers<void>();
      clock.at(clock.now() + 3 + at, resolve, 0.1);
      return promise;
    });
    await clock.rest();
    await Promise.all(rings);
    await new Promise<void>((resolve) => clock.at(clock.now() + 1, resolve, 0.1));
    await clock.rest();
    await clock.rest();
  });

  test("is not started again for alarms that were set before its rest, and its end is not waited for twice", () => {
    const program = `
      import { Worker } from "node:worker_threads";
      import { SystemClock } from ${JSON.stringify(join(import.meta.dirname, "../../src/app/clock.ts"))};
      const started = new Set();
      const { on } = Worker.prototype;
      Worker.prototype.on = function (...args) {
        if (args[0] === "exit") started.add(this);
        return on.apply(this, args);
      };
      const clock = new SystemClock();
      let rung = 0;
      for (const afterMs of [30, 60, 90]) clock.at(clock.now() + afterMs, () => rung++, 0.1);
      await clock.rest();
      clock.at(clock.now() + 200, () => rung++, 0.1);
      await [...started][1].terminate();
      await clock.rest();
      process.on("exit", () => console.log(started.size, rung));`;
    const { stdout, status } = spawnSync(process.execPath, ["--input-type=module", "-e", program], {
      encoding: "utf8",
      timeout: 30_000,
    });
    assert.deepEqual([stdout, status], ["2 4\n", 0]);
  });

  test("does not hold up a process that ends without it", () => {
    const program = `
      import { SystemClock } from ${JSON.stringify(join(import.meta.dirname, "../../src/app/clock.ts"))};
      const clock = new SystemClock();
      for (let at = 0; at < 100; at++) await new Promise((resolve) => clock.at(clock.now() + 1, resolve, 0.1));
      process.exit(7);`;
    const { status } = spawnSync(process.execPath, ["--input-type=module", "-e", program], {
      timeout: 60_000,
    });
    assert.equal(status, 7);
  });
});
