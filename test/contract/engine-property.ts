/**
 * Random callers, workers, operators and clocks against the model, step by step.
 *
 * After every step: each reply is what the contract says; every record that is not final is in exactly one
 * place; no end is announced twice; nobody sees what is not theirs. When time has run far enough everything
 * that was accepted has ended, and nothing is left behind.
 */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { Refusal } from "../../src/core/errors.ts";
import type { Task } from "../../src/core/task.ts";
import type { Lease, Sharing, Verdict } from "../../src/engine/engine.ts";
import { usually } from "../fixtures/long.ts";
import { EngineModel } from "./engine-model.ts";
import { type EngineOptions, MODEL, type OpenEngine, PLAIN, type Seen, Stage } from "./engine-stage.ts";

export interface PropertyLimits {
  /** How many random stories are played; unless told 250, and 2,000 by `npm run test:long`. */
  readonly runs?: number;
  /** How many tasks may wait; 6 unless told, so that the bound is met. */
  readonly maxQueued?: number;
}

/** The last one owns nothing. */
const TENANTS = ["ann", "bob", "cid"] as const;
const CACHE_TTL_MS = 3000;

export function propertyContract(
  open: OpenEngine,
  { runs = usually(250, 2000), maxQueued = 6 }: PropertyLimits,
): void {
  const options = { ...PLAIN, maxQueued };
  describe("random callers, workers and time", () => {
    test("no promise is broken", async () => {
      await fc.assert(
        fc.asyncProperty(fc.array(step, { maxLength: 60, size: "max" }), async (steps) => {
          const story = new Story(new Stage(await open(options)), options);
          try {
            for (const each of steps) await story.play(each);
            await story.finish();
          } finally {
            await story.close();
          }
        }),
        // Short stories break nothing, and a bias towards them would make most of them short.
        { numRuns: runs, unbiased: true },
      );
    });
  });
}

const pick = fc.nat({ max: 1000 });
// Repeated values are weights: most tasks share a queue, and most time steps are small.
const parameters = fc.constantFrom("", "", "", '{"t":1}');
const leaseMs = fc.constantFrom(50, 500, 1500, 6000);
const judgement = fc.record({
  kind: fc.constantFrom("none", "done", "done", "failed", "healable", "dead", "dead", "retry", "retry"),
  delayMs: fc.constantFrom(-10, 0, 0, 40, 900, 5000),
  spared: fc.boolean(),
  overdue: fc.boolean(),
  maxBatchSize: fc.constantFrom(undefined, undefined, 1, 3),
});
type Judged = typeof judgement extends fc.Arbitrary<infer Value> ? Value : never;

const step = fc.oneof(
  {
    weight: 6,
    arbitrary: fc.record({
      verb: fc.constant("put"),
      tenant: fc.constantFrom("ann", "ann", "bob"),
      tier: fc.nat({ max: 2 }),
      parameters,
      content: fc.constantFrom("", "", "a", "b"),
      key: fc.constantFrom("", "", "k1", "k2"),
      cache: fc.boolean(),
      only: fc.constantFrom(false, false, false, true),
      deadlineMs: fc.constantFrom(4000, 4000, 4000, 300),
    }),
  },
  { weight: 1, arbitrary: fc.record({ verb: fc.constant("putAgain"), pick }) },
  {
    weight: 4,
    arbitrary: fc.record({
      verb: fc.constant("claim"),
      parameters,
      max: fc.integer({ min: 1, max: 6 }),
      leaseMs,
    }),
  },
  {
    weight: 5,
    arbitrary: fc.record({
      verb: fc.constant("settle"),
      pick,
      judged: fc.array(judgement, { minLength: 1, maxLength: 6 }),
    }),
  },
  { weight: 1, arbitrary: fc.record({ verb: fc.constant("extend"), pick, leaseMs }) },
  {
    weight: 2,
    arbitrary: fc.record({
      verb: fc.constant("cancel"),
      pick,
      stranger: fc.constantFrom(false, false, true),
      abandoned: fc.boolean(),
    }),
  },
  { weight: 1, arbitrary: fc.record({ verb: fc.constant("delivered"), pick }) },
  { weight: 1, arbitrary: fc.record({ verb: fc.constantFrom("replay", "purge"), pick }) },
  {
    weight: 4,
    arbitrary: fc.record({
      verb: fc.constant("pass"),
      ms: fc.constantFrom(0, 1, 30, 30, 30, 200, 450, 450, 1000, 1000, 2500, 21_000),
    }),
  },
  {
    weight: 1,
    arbitrary: fc.record({ verb: fc.constant("stall"), ms: fc.constantFrom(10, 600, 2100, 5000) }),
  },
  { weight: 1, arbitrary: fc.record({ verb: fc.constant("restart") }) },
);
type Step = typeof step extends fc.Arbitrary<infer Value> ? Value : never;
type StepOf<Verb extends Step["verb"]> = Extract<Step, { verb: Verb }>;

class Story {
  #stage: Stage;
  readonly #options: EngineOptions;
  readonly #model: EngineModel;
  readonly #leases: Lease[] = [];
  /** Every task that was ever accepted, in order, and the ends that were announced. */
  readonly #tasks: Task[] = [];
  readonly #ends = new Map<string, number>();
  #batches = 0;

  constructor(stage: Stage, options: EngineOptions) {
    this.#options = options;
    this.#model = new EngineModel(options);
    this.#stage = this.#hear(stage);
  }

  async play(step: Step): Promise<void> {
    await this.#act(step);
    assert.deepEqual(this.#stage.settled, [], "an end that nothing explains");
    await this.#check();
  }

  /** Time runs until everything that was accepted has ended and is forgotten. */
  async finish(): Promise<void> {
    await this.#stage.pass(7000);
    const [queued, running] = this.#model.counts();
    assert.deepEqual([queued, running], [0, 0]);
    for (const [id, lives] of this.#model.lives) assert.equal(this.#ends.get(id), lives, `ends of ${id}`);
    await this.#stage.pass(2 * this.#options.results.ttlMs + this.#options.deadLetters.ttlMs);
    await this.#stage.hasCounts([0, 0, 0, 0]);
    assert.deepEqual(this.#stage.queues(), []);
  }

  close(): Promise<void> {
    return this.#stage.engine.close();
  }

  #hear(stage: Stage): Stage {
    stage.reaped = () => this.#model.reaped(this.#takeEnds(), stage.now);
    return stage;
  }

  /** The ends announced since the last look, each of a task that was owed one. */
  #takeEnds(): Seen[] {
    const ends = this.#stage.settled.splice(0);
    assert.equal(new Set(ends.map(({ id }) => id)).size, ends.length, "an end announced twice at once");
    for (const { id } of ends) {
      const count = (this.#ends.get(id) ?? 0) + 1;
      this.#ends.set(id, count);
      assert.ok(count <= (this.#model.lives.get(id) ?? 1), `${id} ended ${count} times`);
    }
    return ends;
  }

  #act(step: Step): Promise<void> {
    switch (step.verb) {
      case "put":
        return this.#put(step);
      case "putAgain":
        return this.#putAgain(step);
      case "claim":
        return this.#claim(step);
      case "settle":
        return this.#settle(step);
      case "extend":
        return this.#extend(step);
      case "cancel":
        return this.#cancel(step);
      case "delivered":
        return this.#delivered(step);
      case "replay":
      case "purge":
        return this.#letter(step);
      case "pass":
        return this.#stage.pass(step.ms);
      case "stall":
        return this.#stall(step);
      case "restart":
        return this.#restart();
    }
  }

  async #put(step: StepOf<"put">): Promise<void> {
    const { tenant, tier, parameters, content, deadlineMs } = step;
    const input = content === "" ? '"own"' : `"${content}"`;
    const deadlineAt = this.#stage.now + deadlineMs;
    const task = this.#stage.task({ tenant, tier, parameters, content, input, deadlineAt });
    await this.#putTask(task, sharingOf(step));
  }

  async #putAgain(step: StepOf<"putAgain">): Promise<void> {
    const record = this.#model.records.get(this.#id(step.pick));
    if (record !== undefined) await this.#putTask(record.task, record.sharing);
  }

  async #putTask(task: Task, sharing: Sharing): Promise<void> {
    const known = this.#model.records.has(task.id);
    const reply = await this.#stage.engine.put(task, sharing);
    this.#model.put(task, sharing, reply, this.#stage.now);
    if (!known && this.#model.records.has(task.id)) this.#tasks.push(task);
    const ends = this.#takeEnds().map(({ id }) => id);
    const answered = !known && reply.kind === "done" && reply.cached;
    assert.deepEqual(ends, answered ? [task.id] : []);
  }

  async #claim({ parameters, max, leaseMs }: StepOf<"claim">): Promise<void> {
    const { now } = this.#stage;
    // A batch id of its own for each claim, also over a restart.
    const batch = {
      id: `batch-${++this.#batches}`,
      reason: "idle",
      worker: "gpu",
      startedAt: now,
      why: "",
    } as const;
    const request = { model: MODEL, parameters, max, leaseMs, batch };
    const lease = await this.#stage.engine.claim(request);
    this.#model.claim(request, lease, this.#takeEnds(), now);
    if (lease.tasks.length > 0) this.#leases.push(lease);
  }

  /** One of the latest, held or not. */
  #lease(pick: number): Lease | undefined {
    return this.#leases.at(-1 - (pick % Math.min(4, this.#leases.length)));
  }

  async #settle({ pick, judged }: StepOf<"settle">): Promise<void> {
    const lease = this.#lease(pick);
    if (lease === undefined) return;
    const { now } = this.#stage;
    const verdicts = lease.tasks.flatMap(({ task }, at) => {
      const verdict = verdictOf(judged[at % judged.length]!, task, now);
      return verdict === undefined ? [] : [verdict];
    });
    const replies = await this.#stage.engine.settle(lease, verdicts);
    this.#model.settle(lease, verdicts, replies, now);
    const expected = verdicts.filter(({ kind }, at) => kind !== "retry" && replies[at] === "taken");
    assert.deepEqual(new Set(this.#takeEnds().map(({ id }) => id)), new Set(expected.map(({ id }) => id)));
  }

  async #extend({ pick, leaseMs }: StepOf<"extend">): Promise<void> {
    const lease = this.#lease(pick);
    if (lease === undefined) return;
    const lost = await this.#stage.engine.extend(lease, leaseMs);
    this.#model.extend(lease, leaseMs, lost, this.#stage.now);
  }

  async #cancel({ pick, stranger, abandoned }: StepOf<"cancel">): Promise<void> {
    const id = this.#id(pick);
    const owner = this.#tasks[pick % this.#tasks.length]?.tenant ?? "ann";
    const tenant = stranger ? TENANTS.find((each) => each !== owner)! : owner;
    const reply = await this.#stage.engine.cancel(id, tenant, abandoned);
    this.#model.cancel(id, tenant, abandoned, reply, this.#stage.now);
    assert.equal(this.#takeEnds().length, reply === "cancelled" ? 1 : 0);
  }

  async #delivered({ pick }: StepOf<"delivered">): Promise<void> {
    this.#stage.engine.delivered(this.#id(pick));
  }

  async #letter({ verb, pick }: StepOf<"replay" | "purge">): Promise<void> {
    const letters = [...this.#model.letters.keys()];
    const id = letters[pick % letters.length] ?? this.#id(pick);
    if (verb === "purge") this.#model.purge(id, await this.#stage.engine.deadLetters.purge(id));
    else {
      const reply = await this.#stage.engine.deadLetters.replay(id).catch((error: unknown) => {
        assert.ok(error instanceof Refusal, String(error));
        return "full" as const;
      });
      this.#model.replay(id, reply, this.#stage.now);
    }
  }

  async #restart(): Promise<void> {
    const next = await this.#stage.reopen();
    if (next === undefined) return;
    this.#stage = this.#hear(next);
    this.#model.restarted(next.now);
  }

  /** Nobody reaps for a while; but whether what is past its time to live is still there is left open. */
  async #stall({ ms }: StepOf<"stall">): Promise<void> {
    await this.#stage.tick(ms);
    if (this.#model.outlived(this.#stage.now)) await this.#stage.reap();
  }

  #id(pick: number): string {
    return this.#tasks[pick % this.#tasks.length]?.id ?? "nobody";
  }

  /** What everybody sees is what the model says. */
  async #check(): Promise<void> {
    const stage = this.#stage;
    const [queued, running, kept, letters] = this.#model.counts();
    await stage.counts();
    const stats = stage.engine.stats();
    assert.deepEqual([stats.queued, stats.running, stats.deadLetters], [queued, running, letters]);
    assert.ok(stage.approximate || stats.kept >= kept, "a record was forgotten before its time");
    for (const { id } of this.#tasks) await this.#checkRecord(id);
    const views = stage.queues();
    assert.deepEqual(new Set(views.map((view) => view.parameters)).size, views.length);
    const depth = [0, 0, 0];
    for (const { parameters, ...view } of views) {
      const there = this.#model.queue(parameters);
      for (const { tier } of there) depth[tier]!++;
      assert.equal(view.depth, there.length);
      if (stage.approximate) continue;
      assert.equal(view.fresh, there.filter(({ attempt }) => attempt === 0).length);
      assert.equal(view.oldestAt, Math.min(...there.map(({ queuedAt }) => queuedAt)));
    }
    assert.deepEqual(stats.depth.get(MODEL), depth);
    if (stage.approximate) return;
    // Several tenants take turns between queues; one alone is served in the order of its tasks.
    const queues = views.flatMap(({ parameters }) => this.#model.queue(parameters));
    const alone = new Set(queues.map(({ task }) => task.tenant)).size < 2;
    const order = [...stage.engine.queues(MODEL)].map(({ tier, oldestAt }) => [tier, oldestAt] as const);
    assert.deepEqual(
      order,
      order.toSorted((one, other) => one[0] - other[0] || (alone ? one[1] - other[1] : 0)),
    );
  }

  async #checkRecord(id: string): Promise<void> {
    const record = this.#model.records.get(id);
    for (const tenant of TENANTS) {
      const seen = await this.#stage.look(id, tenant);
      if (record?.task.tenant !== tenant) assert.equal(seen, undefined, `${tenant} sees ${id}`);
      else {
        assert.deepEqual([seen?.state, seen?.attempt], [record.state, record.attempt]);
        const code = seen?.outcome?.ok === false ? seen.outcome.code : "";
        assert.equal(code, record.code);
        if (seen?.outcome?.ok === true) assert.equal(seen.outcome.output, outputOf(record.task));
      }
    }
  }
}

/** Keys as the intake makes them: each holds its tenant, but a cache may be shared. */
function sharingOf({ content, key, cache, tenant, only }: StepOf<"put">): Sharing {
  if (content === "") return { only };
  return {
    only,
    joinKey: `${content} ${tenant}`,
    ...(cache && { cacheKey: content, cacheTtlMs: CACHE_TTL_MS }),
    ...(key !== "" && { idempotency: { key: `${key} ${tenant}`, fingerprint: content } }),
  };
}

/** What the right answer to a task is: its own, or that of its content. */
function outputOf({ content, id }: Task): string {
  return JSON.stringify(content === "" ? `answer for ${id}` : `answer for ${content}`);
}

function verdictOf(judged: Judged, task: Task, now: number): Verdict | undefined {
  const { id } = task;
  const { kind, delayMs, spared, overdue, maxBatchSize } = judged;
  if (kind === "none") return undefined;
  if (kind === "done") return { id, kind, output: outputOf(task) };
  if (kind === "retry") {
    const limit = maxBatchSize === undefined ? {} : { maxBatchSize };
    return { id, kind, at: now + delayMs, message: "again", spared, overdue, ...limit };
  }
  if (kind === "failed") return { id, kind, code: "INPUT_REJECTED", message: "no" };
  // What a replay may share is told one by one in engine-letters.ts; here only plain tasks die.
  const dies = kind === "dead" && task.content === "";
  const end = { id, code: "INFERENCE_FAILED", message: "gave up" } as const;
  return dies ? { ...end, kind: "dead", detail: "why" } : { ...end, kind: "failed" };
}
