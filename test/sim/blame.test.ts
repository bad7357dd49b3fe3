/**
 * One client's poison beside another's traffic, on virtual time: the real engine, admission and dispatcher, with simulated
 * workers that answer in 5 ms and fail with every input that is poison. Good requests must all be answered, and no worker that
 * answers them may be down; one that is broken must be, whoever else sends poison.
 *
 * Before there was `core/blame.ts`, the same traffic had 16 of 744 good requests answered (three workers, 100 poison and 50 good a
 * second), the others refused because every worker was down; and 5 of 293 with one worker and one client that sends 20 of each.
 */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import "../fixtures/unhooked.ts";
import type { Batch, Reply, Worker } from "../../src/workers/backend/backend.ts";
import { poisson } from "../../src/cli/plan/workload.ts";
import { endings, simulate } from "../dispatch/simulated.ts";

const SECONDS = 15;
const WARM_UP_MS = 500;

const REPLIES = {
  "an error": { kind: "failed", message: "worker answered 500", blame: "worker" },
  "no usable output": { kind: "unusable", message: "NaN" },
  "its death": { kind: "failed", message: "it died", blame: "batch" },
} as const satisfies Record<string, Reply>;

interface Traffic {
  readonly workers: number;
  readonly reply: keyof typeof REPLIES;
  readonly poisonPerS: number;
  readonly goodPerS: number;
  /** Both are sent by the same client. */
  readonly oneClient?: boolean;
  /** The name of one that fails with everything from a second after the start on. */
  readonly broken?: string;
  readonly seed?: number;
}

interface Played {
  /** How many of the good ones ended how: "ok", a code, or "refused". */
  readonly good: Record<string, number>;
  readonly poison: Record<string, number>;
  /** Who was down, how often. */
  readonly downs: Record<string, number>;
  readonly calls: number;
  /** When the broken one was first down. */
  readonly brokenDownMs: number;
}

async function play({
  workers,
  reply,
  poisonPerS,
  goodPerS,
  oneClient,
  broken,
  seed = 1,
}: Traffic): Promise<Played> {
  const downs: Record<string, number> = {};
  let [calls, brokenDownMs] = [0, Infinity];
  const elapsed = (): number => simulation.clock.now() - simulation.startedAt;
  const isPoison = ({ tasks }: Batch): boolean => tasks.some(({ input }) => input.includes("poison"));
  const wrap = (worker: Worker): Worker => ({
    name: worker.name,
    async run(batch, signal, begun) {
      calls++;
      const answered = await worker.run(batch, signal, begun);
      if (worker.name === broken && elapsed() > 1000) return REPLIES["an error"];
      return isPoison(batch) ? REPLIES[reply] : answered;
    },
  });
  const simulation = simulate({ seed, backend: { workers, baseMs: 5 }, wrap });
  const ended = endings(simulation);
  simulation.events.on("worker.changed", ({ worker, state }) => {
    if (state !== "down") return;
    downs[worker] = (downs[worker] ?? 0) + 1;
    if (worker === broken) brokenDownMs = Math.min(brokenDownMs, elapsed());
  });
  const sent = { good: [] as string[], poison: [] as string[] };
  const send = (what: keyof typeof sent, at: number): void => {
    const tenant = oneClient === true ? "one" : what;
    const now = simulation.clock.now();
    const asked = { tier: 0, tenant };
    const input = JSON.stringify(`${what} ${at}`);
    const refusal = simulation.gate.enter(asked, now);
    if (refusal === undefined) simulation.gate.queued(asked, now);
    const id =
      refusal === undefined ? simulation.put({ tenant, input, content: `${input} ${tenant}` }).id : "";
    sent[what].push(id);
  };
  let streams = 100 + seed;
  const arrivals = (perS: number, fromMs: number): number[] =>
    poisson(perS / 1000, SECONDS * 1000, ++streams).map((at) => fromMs + at);
  simulation.schedule([0, 100, 200, 300], (at) => send("good", -at));
  simulation.schedule(arrivals(goodPerS, WARM_UP_MS), (at) => send("good", at));
  simulation.schedule(arrivals(poisonPerS, WARM_UP_MS), (at) => send("poison", at));
  await simulation.run(SECONDS * 1000 + 6000);
  simulation.stop();
  const tally = (ids: readonly string[]): Record<string, number> => {
    const sums: Record<string, number> = {};
    for (const id of ids) {
      const outcome = ended.get(id)?.outcome;
      const word = id === "" ? "refused" : outcome === undefined ? "open" : outcome.ok ? "ok" : outcome.code;
      sums[word] = (sums[word] ?? 0) + 1;
    }
    return sums;
  };
  return { good: tally(sent.good), poison: tally(sent.poison), downs, calls, brokenDownMs };
}

describe("poison from one client, good requests from another", () => {
  for (const reply of ["an error", "no usable output"] as const) {
    for (const workers of [1, 3]) {
      for (const goodPerS of [1, 50]) {
        test(`${reply}, workers: ${workers}, 100 poison and ${goodPerS} good a second`, async () => {
          const poisonPerS = 100;
          const { good, poison, downs, calls } = await play({ workers, reply, poisonPerS, goodPerS });
          assert.deepEqual(Object.keys(good), ["ok"], JSON.stringify(good));
          assert.deepEqual(downs, {});
          // Each has its own error, and most cost one call.
          for (const code of Object.keys(poison)) assert.match(code, /^(INFERENCE_FAILED|INPUT_REJECTED)$/);
          const [all, bad] = [good, poison].map((each) => Object.values(each).reduce((sum, n) => sum + n));
          assert.ok(calls < all! + 1.3 * bad!, `${calls} calls for ${all} good and ${bad} poison`);
        });
      }
    }
  }

  test("an input that ends workers is tried for a moment and then refused", async () => {
    for (const workers of [1, 3]) {
      const { good, calls, poison } = await play({
        workers,
        reply: "its death",
        poisonPerS: 100,
        goodPerS: 5,
      });
      assert.deepEqual(Object.keys(good), ["ok"], JSON.stringify(good));
      const deaths = calls - good["ok"]!;
      assert.ok(deaths < 150, `${deaths} deaths of ${JSON.stringify(poison)}`);
    }
  });
});

describe("poison and good requests from the same client", () => {
  test("all good ones are answered, and no worker is down", async () => {
    for (const [workers, poisonPerS, goodPerS] of [
      [1, 20, 20],
      [3, 20, 20],
      [1, 5, 100],
      [3, 50, 100],
    ] as const) {
      const traffic = { workers, poisonPerS, goodPerS, oneClient: true, reply: "an error" } as const;
      const { good, downs } = await play(traffic);
      assert.deepEqual(Object.keys(good), ["ok"], JSON.stringify({ ...traffic, good }));
      assert.deepEqual(downs, {}, JSON.stringify(traffic));
    }
  });
});

describe("a broken worker among three", () => {
  for (const poisonPerS of [0.001, 20, 100]) {
    for (const oneClient of [false, true]) {
      test(`beside ${poisonPerS} poison a second, ${oneClient ? "the same client's" : "another's"}`, async () => {
        const traffic = { workers: 3, reply: "an error", goodPerS: 50, poisonPerS, oneClient } as const;
        const { good, downs, brokenDownMs } = await play({ ...traffic, broken: "gpu-2" });
        // Where two of three inputs of one client fail, a good one may meet them, or the broken worker, at each attempt.
        const mayFail = oneClient && poisonPerS === 100 ? 0.01 : 0;
        const all = Object.values(good).reduce((sum, count) => sum + count);
        assert.ok(good["ok"]! >= (1 - mayFail) * all, JSON.stringify(good));
        assert.deepEqual(Object.keys(downs), ["gpu-2"]);
        assert.ok(brokenDownMs < 3000, `down after ${brokenDownMs - 1000} ms`);
      });
    }
  }
});

test("the only worker breaks down: it is down within two seconds, and back when it works again", async () => {
  const simulation = simulate({
    backend: { workers: 1, baseMs: 5 },
    wrap: (worker) => ({
      name: worker.name,
      async run(batch, signal, begun) {
        const answered = await worker.run(batch, signal, begun);
        const at = simulation.clock.now() - simulation.startedAt;
        return at > 1000 && at < 5000 ? REPLIES["an error"] : answered;
      },
    }),
  });
  const changes: [number, string][] = [];
  simulation.events.on("worker.changed", ({ state }) => {
    changes.push([simulation.clock.now() - simulation.startedAt, state]);
  });
  const ended = endings(simulation);
  const every = Array.from({ length: 1000 }, (_, at) => at * 10);
  simulation.schedule(every, (at) =>
    simulation.put({ input: String(at), content: String(at), tenant: `t${at % 3}` }),
  );
  await simulation.run(14_000);
  simulation.stop();
  const [first, last] = [changes[0]!, changes.at(-1)!];
  assert.equal(first[1], "down");
  assert.ok(first[0] < 3000, `down after ${first[0] - 1000} ms`);
  assert.equal(last[1], "idle");
  const late = [...ended.values()].filter(({ task }) => task.createdAt - simulation.startedAt > 9000);
  assert.ok(late.length > 90 && late.every(({ outcome }) => outcome?.ok === true));
});
