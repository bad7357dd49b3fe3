/**
 * CPU time of one sync native request inside the gateway, from the parsed HTTP head to the rendered answer: `node bench/path.ts`.
 *
 * Everything is as in production (credentials, admission, gate, memory engine, waiters, rendering) but for the socket:
 * requests are plain objects that hold their body, 64 at a time, and the "worker" settles a batch with a claim and a settle.
 * So the figure is small (some 10 µs of a request's 50) and steady enough to compare two ways of writing the path.
 */
import { SystemClock } from "../src/app/clock.ts";
import { MemoryEngine } from "../src/engine/memory/engine.ts";
import { Admission } from "../src/gateway/admission/admission.ts";
import { Credentials } from "../src/gateway/admission/credentials.ts";
import { CapacityGate } from "../src/gateway/admission/capacity-gate.ts";
import { ProcessLoad } from "../src/gateway/admission/process-load.ts";
import type { Exchange } from "../src/gateway/exchange.ts";
import { NativeProtocol } from "../src/gateway/native.ts";
import { RequestPath } from "../src/gateway/request-path.ts";
import { Waiters } from "../src/gateway/waiters.ts";
import { Events } from "../src/observe/events.ts";

const model = "bench";
const atOnce = 64;
const rounds = 4000;
const runs = 3;
const text = JSON.stringify({ input: "x".repeat(2000) });

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
  cache: { ttlMs: 0, scope: "off" },
  collapse: false,
  gate,
  looksForFree: true,
} as const;
const credentials = new Credentials({ tiers, anonymousTier: "first" });
const shared = { admission, waiters, engine, clock };
const path = new RequestPath({ ...shared, routes: [door], credentials, durable: false });
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
  body(): Promise<string> {
    return new Promise((resolve) => resolve(text));
  }
  read(use: (text: string) => unknown): void {
    void use(text);
  }
  send(): void {
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
  const batch = { id: "b", worker: "w", reason: "full", startedAt: clock.now(), why: "" } as const;
  const lease = await engine.claim({ model, parameters: "", max: atOnce, batch, leaseMs: 60_000 });
  await engine.settle(
    lease,
    lease.tasks.map(({ task }) => ({ id: task.id, kind: "done", output: "1" })),
  );
  await new Promise(setImmediate);
}

const figures: number[] = [];
for (let at = 0; at < rounds; at++) await round();
for (let run = 0; run < runs; run++) {
  answered = 0;
  const before = process.cpuUsage();
  for (let at = 0; at < rounds; at++) await round();
  const { user, system } = process.cpuUsage(before);
  if (answered !== rounds * atOnce) throw new Error(`${answered} answers`);
  figures.push((user + system) / answered);
}
const sorted = figures.toSorted((a, b) => a - b);
process.stdout.write(
  `${sorted[1]!.toFixed(2)} µs of CPU a request (${sorted[0]!.toFixed(2)} to ${sorted[2]!.toFixed(2)})\n`,
);
process.exit(0);
