/**
 * CPU time and memory of one sync native request inside the gateway, from the parsed HTTP head to the rendered answer, with the
 * promise-free wait of `RequestPath.run` and without it: `node bench/path.ts`, half a minute.
 *
 * Everything is as in production (credentials, admission, capacity gate, memory engine, waiters, rendering) but for the
 * socket: requests are objects that hold their body, 64 at a time, and a batch is one claim and one settle. So the figure is a
 * tenth of what a request costs with its socket, and steady enough to compare two ways of writing the path. `promises` is what
 * an async path would do: a promise for the outcome, awaited by the function that has parsed the body. Memory is what each
 * of 5,000 requests holds while it waits, its task in the engine included.
 */
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { SystemClock } from "../src/app/clock.ts";
import type { RecordView } from "../src/engine/engine.ts";
import { MemoryEngine } from "../src/engine/memory/engine.ts";
import { Admission } from "../src/gateway/admission/admission.ts";
import { Credentials } from "../src/gateway/admission/credentials.ts";
import { CapacityGate } from "../src/gateway/admission/capacity-gate.ts";
import { ProcessLoad } from "../src/gateway/admission/process-load.ts";
import type { Exchange } from "../src/gateway/exchange.ts";
import { NativeProtocol } from "../src/gateway/native.ts";
import { type Ended, RequestPath } from "../src/gateway/request-path.ts";
import { Waiters } from "../src/gateway/waiters.ts";
import { Events } from "../src/observe/events.ts";

const model = "bench";
const atOnce = 64;
const rounds = 4000;
const runs = 3;
const waiting = 5000;
const body = Buffer.from(JSON.stringify({ input: "x".repeat(2000) }));
setFlagsFromString("--expose-gc");
const gc = runInNewContext("gc") as () => void;

const clock = new SystemClock();
const events = new Events();
const tiers = [{ name: "first" }];
const rules = { tiers };
const timeouts = { queueMs: 60_000, totalMs: 60_000 };
const limits = {
  models: new Map([[model, timeouts]]),
  tiers: 1,
  maxQueued: 10_000,
  maxQueuedBytes: 2 ** 30,
  results: { ttlMs: 1000, evictAfterRead: true, maxBytes: 2 ** 26 },
  deadLetters: { max: 10, ttlMs: 1000 },
};
const engine = new MemoryEngine(() => limits, clock, events);
const waiters = new Waiters(engine, clock);
const load = new ProcessLoad(1, clock, queueMicrotask);
Object.assign(load, { turn: () => undefined });
const admission = new Admission(() => rules, engine, clock, events, load);
const idle = { horizon: () => ({}) as never, hasRoom: () => true, othersPerMs: () => 0 };
const gate = new CapacityGate(
  {
    mode: "predictive",
    model,
    tiers: 1,
    ...timeouts,
    targetUtilization: 0.7,
    lastTierDepth: 1,
    firstTierDepth: 1,
  },
  idle,
  engine,
);
const door = {
  name: model,
  totalMs: 60_000,
  cache: { ttlMs: 0, scope: "off" as const },
  collapse: false,
  open: true,
};
const credentials = new Credentials({ tiers, anonymousTier: "first" });
const shared = { admission, waiters, engine, clock };
const put = gate.put.bind(gate);
const path = new RequestPath({ ...shared, put, routes: [door], credentials, durable: false });
const native = new NativeProtocol(
  { defaultMode: "sync", maxPollMs: 1000 },
  { ...shared, path, authRequired: false },
);
const post = native.routes()["/v1/inference"]!["POST"]!;

let answered = 0;
class Asked {
  readonly startedAt = clock.now();
  readonly request = { method: "POST" };
  readonly trace = undefined;
  readonly room = undefined;
  answered = false;
  id = "";
  header(): undefined {}
  onGone(): void {}
  failed(error: unknown): void {
    throw error as Error;
  }
  withBody(use: (text: string) => Promise<void> | void): void {
    void use(body.toString());
  }
  sendPieces(): void {
    this.answered = true;
    answered++;
  }
  fail(refusal: Error): void {
    throw refusal;
  }
}

async function round(): Promise<void> {
  for (let at = 0; at < atOnce; at++) void post(new Asked() as unknown as Exchange, "");
  await new Promise(setImmediate);
  await settle();
}

async function settle(): Promise<void> {
  const batch = { id: "b", worker: "w", reason: "full", startedAt: clock.now(), why: "" } as const;
  const lease = await engine.claim({ model, parameters: "", max: atOnce, batch, leaseMs: 60_000 });
  await engine.settle(
    lease,
    lease.tasks.map(({ task }) => ({ id: task.id, kind: "done", output: "1" })),
  );
  await new Promise(setImmediate);
}

async function figure(): Promise<number> {
  answered = 0;
  const before = process.cpuUsage();
  for (let at = 0; at < rounds; at++) await round();
  const { user, system } = process.cpuUsage(before);
  if (answered !== rounds * atOnce) throw new Error(`${answered} answers`);
  return (user + system) / answered;
}

/** Bytes, heap and buffers, that each waiting request holds. */
async function held(): Promise<number> {
  gc();
  const before = process.memoryUsage();
  for (let at = 0; at < waiting; at++) {
    void post(new Asked() as unknown as Exchange, "");
    if (at % atOnce === 0) await new Promise(setImmediate);
  }
  await new Promise(setImmediate);
  gc();
  const after = process.memoryUsage();
  for (let at = 0; at < waiting / atOnce; at++) await settle();
  return (after.heapUsed + after.external - before.heapUsed - before.external) / waiting;
}

const run = path.run.bind(path);
const call = waiters.call.bind(waiters);
const modes = {
  calls: { run, call },
  promises: {
    run: (...[request, caller, inference, render]: Parameters<typeof run>) =>
      new Promise<void>((resolve, reject) => {
        const ended = new Promise<Ended>((end) => void run(request, caller, inference, end));
        ended.then(async (how) => render(how)).then(resolve, reject);
      }),
    call: (...[waiter, until, woken]: Parameters<typeof call>) =>
      void new Promise<RecordView | undefined>((wake) => call(waiter, until, wake)).then(woken),
  },
};
const figures = { calls: [] as number[], promises: [] as number[] };
for (let at = 0; at <= runs; at++) {
  for (const mode of ["calls", "promises"] as const) {
    path.run = modes[mode].run;
    waiters.call = modes[mode].call;
    const us = await figure();
    // The first warms up.
    if (at > 0) figures[mode].push(us);
  }
}
for (const [mode, all] of Object.entries(figures)) {
  Object.assign(path, { run: modes[mode as keyof typeof modes].run });
  Object.assign(waiters, { call: modes[mode as keyof typeof modes].call });
  const bytes = Math.round(await held());
  const [low, median, high] = all.toSorted((a, b) => a - b).map((us) => us.toFixed(2));
  process.stdout.write(
    `${mode.padEnd(10)} ${median} µs of CPU a request (${low} to ${high}), ${bytes} bytes while it waits\n`,
  );
}
process.exit(0);
