/** The notice of a process that is full, on virtual time. */
import assert from "node:assert/strict";
import { test } from "node:test";
import {
  adviceWhenFull,
  AGAIN_MS,
  FULL_SHARE,
  FullNotice,
  LOOK_MS,
  type ProcessPlace,
} from "../../src/app/processes/full-notice.ts";
import { fittingProcesses, MAX_PROCESSES } from "../../src/app/processes/fitting.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { Events } from "../../src/observe/events.ts";

const ALONE: ProcessPlace = { role: "all", part: undefined, redis: false };
const core = (role: ProcessPlace["role"], redis: boolean): ProcessPlace => ({
  role,
  part: { kind: "core", number: 0, gateways: 3 },
  redis,
});
const gateway = (number: number, gateways: number): ProcessPlace => ({
  role: "gateway",
  part: { kind: "gateway", number, gateways },
  redis: false,
});

function stage(place: ProcessPlace, cores: number) {
  const [clock, events] = [new VirtualClock(), new Events()];
  const said: string[] = [];
  events.on("notice", ({ level, message }) => said.push(`${level} ${message}`));
  let [threadMs, idleMs, idleReads] = [100, 5000, 0];
  const machine = {
    cores,
    threadMs: () => threadMs,
    idleMs: () => {
      idleReads++;
      return idleMs;
    },
  };
  const notice = new FullNotice(place, clock, events, machine);
  /** The process uses that share of a core, and so many cores are idle. */
  const pass = async (ms: number, share: number, idle: number): Promise<void> => {
    const until = clock.now() + ms;
    for (let at = clock.now() + LOOK_MS; at <= until; at += LOOK_MS) {
      threadMs += LOOK_MS * share;
      idleMs += LOOK_MS * idle;
      await clock.run(at + 1e-3);
    }
  };
  return { clock, notice, said, pass, idleReads: () => idleReads };
}

test("10 s above 85 % of a core is said once, with what was measured and what helps", async () => {
  const { notice, said, pass, idleReads } = stage(ALONE, 16);
  await pass(60_000, FULL_SHARE - 0.01, 15);
  assert.equal(idleReads(), 0, "an idle process does not read the cores");
  await pass(LOOK_MS, 0.99, 13.1);
  assert.deepEqual(said, []);
  await pass(LOOK_MS, 0.95, 13.1);
  assert.deepEqual(said, [
    "warn this process used 97 % of a core for 10 s; 13 other cores were idle: ferry serve --processes 6 uses them",
  ]);
  await pass(AGAIN_MS - LOOK_MS, 1, 13);
  assert.equal(said.length, 1);
  await pass(4 * LOOK_MS, 1, 13);
  assert.equal(said.length, 2, "and again after ten minutes");
  notice.stop();
});

test("a peak, or a machine without idle cores, is not said", async () => {
  const peaks = stage(ALONE, 16);
  for (let n = 0; n < 10; n++) {
    await peaks.pass(LOOK_MS, 1, 13);
    await peaks.pass(LOOK_MS, 0.1, 13);
  }
  assert.deepEqual(peaks.said, []);
  const busy = stage(ALONE, 16);
  await busy.pass(60_000, 1, 1.9);
  assert.deepEqual(busy.said, []);
  await busy.pass(LOOK_MS, 1, 2.1);
  assert.match(busy.said.join(), /--processes 2 uses them$/);
});

test("nothing is looked at after the stop", async () => {
  const { clock, notice } = stage(ALONE, 16);
  notice.stop();
  assert.equal(await clock.run(clock.now() + AGAIN_MS), 0);
});

test("what helps depends on which process is full", () => {
  for (const cores of [1, 2, 3]) assert.equal(adviceWhenFull(ALONE, cores, cores - 1), undefined);
  assert.match(adviceWhenFull(ALONE, 8, 7)!, new RegExp(`--processes ${fittingProcesses(8)} `));
  assert.match(adviceWhenFull(gateway(1, 3), 16, 12)!, /--processes 6 /);
  assert.match(adviceWhenFull(gateway(1, 6), 16, 2)!, /--processes 8 /);
  assert.equal(adviceWhenFull(gateway(2, 3), 16, 12), undefined, "the first gateway speaks for all");
  assert.equal(adviceWhenFull(gateway(1, 3), 16, 0), undefined);
  assert.equal(adviceWhenFull(gateway(1, MAX_PROCESSES), 200, 100), undefined);
  // More machines help, whether or not this one has idle cores.
  assert.match(adviceWhenFull(core("all", false), 16, 0)!, /do not help: .* several machines/);
  assert.match(adviceWhenFull(core("all", true), 16, 0)!, /another ferry serve --role batcher/);
  assert.match(adviceWhenFull(core("gateway", true), 16, 0)!, /another ferry serve --role gateway/);
  const batcher: ProcessPlace = { role: "batcher", part: undefined, redis: true };
  assert.match(adviceWhenFull(batcher, 2, 0)!, /another ferry serve --role batcher/);
});
