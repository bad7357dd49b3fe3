/**
 * What a short wait really takes, in each of the ways in which Node could wait for it.
 *
 *   node bench/timers.ts [ALARMS]
 *
 * Each way waits 0.3, 1.2 and 3.7 ms (20 % more or less, by a fixed seed) some hundred times, one wait after the other
 * in an otherwise idle process. Told are the lateness (p50, p99; a minus is early), the CPU time of the whole process
 * for one alarm, with the turn of the event loop that belongs to it, and the share of a core that this is while it
 * waits. The last line has the CPU time of a second in which a thread is there and nothing is due.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { Worker } from "node:worker_threads";
import { SystemClock } from "../src/app/clock.ts";

type Wait = (time: number, ring: () => void) => void;

const alarms = Number(process.argv[2] ?? 500);
const clock = new SystemClock();
const cell = new Int32Array(new SharedArrayBuffer(4));

/** A plain timer for whole milliseconds, then `rest` for what is left. */
function timerThen(rest: Wait): Wait {
  return (time, ring) => {
    const ms = Math.floor(time - clock.now());
    if (ms > 0) setTimeout(() => rest(time, ring), ms);
    else setImmediate(() => rest(time, ring));
  };
}

function turns(time: number, ring: () => void): void {
  if (clock.now() >= time) ring();
  else setImmediate(() => turns(time, ring));
}

function blocks(time: number, ring: () => void): void {
  Atomics.wait(cell, 0, 0, Math.max(0, time - clock.now()));
  ring();
}

/** A thread that sleeps for as long as it is told, and posts; it is told by a post as well. */
function posting(): { wait: Wait; end(): void } {
  const program = `
    const { parentPort } = require("node:worker_threads");
    const cell = new Int32Array(new SharedArrayBuffer(4));
    parentPort.on("message", (ms) => { Atomics.wait(cell, 0, 0, ms); parentPort.postMessage(0); });`;
  const thread = new Worker(program, { eval: true });
  return {
    wait: (time, ring) => {
      thread.once("message", ring);
      thread.postMessage(Math.max(0, time - clock.now()));
    },
    end: () => void thread.terminate(),
  };
}

/** V8's own: the event loop waits for a cell that nobody changes. */
function waitAsync(time: number, ring: () => void): void {
  const { value } = Atomics.waitAsync(cell, 0, 0, Math.max(0.001, time - clock.now()));
  void Promise.resolve(value).then(ring);
}

async function measure(name: string, wait: Wait): Promise<string[][]> {
  const rows: string[][] = [];
  for (const meanMs of [0.3, 1.2, 3.7]) {
    await waits(200, meanMs, wait);
    const startedAt = clock.now();
    const before = process.cpuUsage();
    const late = await waits(alarms, meanMs, wait);
    const { user, system } = process.cpuUsage(before);
    const share = (user + system) / 10 / (clock.now() - startedAt);
    const figures = [ms(late, 0.5), ms(late, 0.99), `${Math.round((user + system) / alarms)} µs`];
    rows.push([name, `${meanMs} ms`, ...figures, `${share.toFixed(0)} %`]);
  }
  return rows;
}

async function waits(count: number, meanMs: number, wait: Wait): Promise<number[]> {
  const late: number[] = [];
  let seed = 1;
  for (let at = 0; at < count; at++) {
    seed = (seed * 48_271) % 2_147_483_647;
    const time = clock.now() + meanMs * (0.8 + (0.4 * seed) / 2_147_483_647);
    await new Promise<void>((resolve) =>
      wait(time, () => (late.push(clock.now() - time), setImmediate(resolve))),
    );
  }
  return late.sort((a, b) => a - b);
}

function ms(sorted: readonly number[], share: number): string {
  return `${sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))]!.toFixed(2)} ms`;
}

// `Atomics.waitAsync` alone does not keep the process alive.
const alive = setInterval(() => {}, 1000);
const poster = posting();
const ways: [name: string, wait: Wait][] = [
  ["timer, rounded up (Clock.at)", (time, ring) => clock.at(time, ring)],
  ["timer, rounded down, then setImmediate", timerThen(turns)],
  ["timer, rounded down, then Atomics.wait", timerThen(blocks)],
  ["Atomics.waitAsync with a timeout", waitAsync],
  ["thread, told and telling by a port", poster.wait],
  ["thread, told and telling by cells (Clock.at, within 0.1 ms)", (time, ring) => clock.at(time, ring, 0.1)],
];
const head = ["way", "wait", "late, p50", "p99", "CPU of an alarm", "of a core"];
const rows = [head, head.map(() => "---")];
for (const [name, wait] of ways) rows.push(...(await measure(name, wait)));
poster.end();
const before = process.cpuUsage();
await sleep(1000);
const idle = process.cpuUsage(before);
clearInterval(alive);
await clock.rest();
process.stdout.write(rows.map((row) => `| ${row.join(" | ")} |\n`).join(""));
process.stdout.write(
  `\na second with nothing due: ${((idle.user + idle.system) / 1000).toFixed(1)} ms of CPU time\n`,
);
