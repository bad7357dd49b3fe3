/**
 * What an arrival costs while tasks with many different parameters wait: `node bench/groups.ts [groups] [tenants]`.
 *
 * Puts tasks, each with parameters of its own, into a memory engine that nobody empties, and after each looks at the
 * first 64 queues, as the dispatcher does when a worker is free. Prints how many groups there are in the end, and what
 * the last arrivals cost.
 */
import { MemoryEngine } from "../src/engine/memory/engine.ts";
import { VirtualClock } from "../src/cli/plan/virtual-clock.ts";
import { Events } from "../src/observe/events.ts";

const MODEL = "m";
const SEEN = 64;
const [groups = 5000, tenants = 40] = process.argv.slice(2).map(Number);

const clock = new VirtualClock();
const engine = new MemoryEngine(
  () => ({
    models: new Map([[MODEL, { queueMs: 1e9, totalMs: 1e9 }]]),
    tiers: 3,
    maxQueued: 1e6,
    maxQueuedBytes: 1e9,
    results: { ttlMs: 1000, evictAfterRead: false, maxBytes: 1e9 },
    deadLetters: { max: 10, ttlMs: 1000 },
  }),
  clock,
  new Events(),
);

let refused = 0;
let sum = 0;
const took: number[] = [];
for (let n = 0; n < groups; n++) {
  const start = performance.now();
  const reply = await engine.put({
    id: `task ${n}`,
    tenant: `t${n % tenants}`,
    tier: n % 3,
    model: MODEL,
    input: "1",
    parameters: `{"n":${n}}`,
    content: "",
    createdAt: n,
    deadlineAt: 1e9,
  });
  if (reply.kind === "full") refused++;
  let seen = 0;
  for (const { depth } of engine.queues(MODEL, SEEN)) {
    sum += depth;
    if (++seen >= SEEN) break;
  }
  took.push(performance.now() - start);
  await clock.run(n + 1);
  // A batch leaves now and then, so that the order changes at its head.
  const [first] = engine.queues(MODEL, 1);
  if (n % 10 === 0 && first !== undefined) {
    const batch = { id: "b", reason: "full", worker: "w", startedAt: n, why: "" } as const;
    await engine.claim({ model: MODEL, parameters: first.parameters, max: SEEN, leaseMs: 1e9, batch });
  }
}
const last = took.slice(-500).sort((one, other) => one - other);
const us = (at: number): string => `${Math.round(1000 * last[Math.floor(at * (last.length - 1))]!)} µs`;
const there = [...engine.queues(MODEL)].length;
console.log(
  `${there} groups, ${refused} refused: an arrival takes ${us(0.5)} (p99 ${us(0.99)}) ${sum > 0 ? "" : "?"}`,
);
