/**
 * The memory engine: the contract, without a journal and on a real one, and what only this engine promises:
 * what a restart brings back, and what happens when finished records fill the memory that they may use.
 */
import assert from "node:assert/strict";
import * as fs from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, describe, test } from "node:test";
import "../fixtures/unhooked.ts";
import type { Clock } from "../../src/app/clock.ts";
import { Refusal } from "../../src/core/errors.ts";
import { MAX_GROUPS } from "../../src/engine/engine.ts";
import {
  type Journal,
  JournalTrouble,
  openJournal,
  type SavedRecord,
} from "../../src/engine/memory/journal.ts";
import { MemoryEngine } from "../../src/engine/memory/engine.ts";
import { RecordKeeper } from "../../src/engine/memory/saved.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { Events } from "../../src/observe/events.ts";
import { engineContract } from "../contract/engine.ts";
import { propertyContract } from "../contract/engine-property.ts";
import {
  dead,
  done,
  type EngineOptions,
  failed,
  holdsOn,
  idsOf,
  LETTER_TTL_MS,
  MODEL,
  OTHER_MODEL,
  type OpenEngine,
  type Opened,
  PLAIN,
  QUEUE_MS,
  RESULT_TTL_MS,
  retry,
  Stage,
  TOTAL_MS,
} from "../contract/engine-stage.ts";

const home = fs.mkdtempSync(join(tmpdir(), "ferry-memory-"));
after(() => fs.rmSync(home, { recursive: true, force: true }));
let dirs = 0;

const openBare: OpenEngine = async (options) => {
  const [clock, events] = [new VirtualClock(), new Events()];
  return { engine: new MemoryEngine(() => options, clock, events), clock, events };
};

const openOnDisk: OpenEngine = (options) => {
  const dir = join(home, String(dirs++));
  const start = () => openJournal(dir, (why) => assert.fail(why?.message));
  return openKept(start, options, new VirtualClock(), new Events());
};

/** A disk that is always well and costs nothing: what the engine says, it has. */
class PerfectJournal implements Journal {
  readonly kept = new Map<string, SavedRecord>();
  pendingBytes = 0;
  trouble: JournalTrouble | undefined;

  save(id: string, task: string, state: string): void {
    this.kept.delete(id);
    this.kept.set(id, { id, task, state });
  }
  update(id: string, state: string): void {
    const record = this.kept.get(id);
    if (record !== undefined) this.kept.set(id, { ...record, state });
  }
  forget(id: string): void {
    this.kept.delete(id);
  }
  noted: readonly string[] = [];
  running(ids: readonly string[]): void {
    this.noted = ids;
  }
  async flushed(): Promise<void> {
    if (this.trouble !== undefined) throw this.trouble;
  }
  async close(): Promise<void> {}
}

const openOnPerfectDisk: OpenEngine = (options) => {
  const journal = new PerfectJournal();
  const start = async () => ({ journal, records: [...journal.kept.values()] });
  return openKept(start, options, new VirtualClock(), new Events());
};

async function openKept(
  start: () => Promise<{ journal: Journal; records: SavedRecord[] }>,
  options: EngineOptions,
  clock: Clock & VirtualClock,
  events: Events,
): Promise<Opened> {
  const { journal, records } = await start();
  const engine = new MemoryEngine(() => options, clock, events, {
    keeper: new RecordKeeper(journal, records),
  });
  return {
    engine,
    clock,
    events,
    reopen: async (more) => {
      await engine.close();
      return openKept(start, { ...options, ...more }, clock, events);
    },
  };
}

engineContract("the memory engine", openBare);
engineContract("the memory engine on a journal", openOnDisk, { runs: 15 });
describe("the memory engine over many restarts:", () => propertyContract(openOnPerfectDisk, {}));

const holdsOnDisk = holdsOn(openOnDisk);

/** A restart on the same disk; `play` goes on with the engine that finds it. */
async function restarted(
  stage: Stage,
  play: (next: Stage) => Promise<void>,
  options?: Partial<EngineOptions>,
): Promise<void> {
  const next = await stage.reopen(options);
  assert(next !== undefined);
  try {
    await play(next);
  } finally {
    await next.engine.close();
  }
}

describe("a restart brings back", () => {
  holdsOnDisk("queued tasks in their order, with nothing changed but their clocks", async (stage) => {
    const first = stage.task({ input: '{"é":[1.0,"漢"]}', parameters: '{"t":1}', tier: 2, tenant: "bob" });
    const second = stage.task({ parameters: '{"t":1}', tier: 2 });
    for (const task of [first, second]) await stage.engine.put(task);
    await stage.tick(10 * TOTAL_MS);
    await restarted(stage, async (next) => {
      const [createdAt, deadlineAt] = [next.now, next.now + TOTAL_MS];
      await next.hasCounts([2, 0, 0, 0]);
      await next.pass(QUEUE_MS - 1);
      const { tasks } = await next.claim(64, { parameters: '{"t":1}', leaseMs: 10 * TOTAL_MS });
      assert.deepEqual(
        tasks.map(({ task }) => task),
        [first, second].map((task) => ({ ...task, createdAt, deadlineAt })),
      );
      await next.pass(deadlineAt - next.now);
      assert.equal(await next.code(first.id), "DEADLINE_EXCEEDED");
    });
  });

  holdsOnDisk("running tasks and those that wait for a retry, to run again", async (stage) => {
    const waiting = await stage.run();
    await stage.settle(waiting.lease, retry(waiting.id, stage.now + 1000));
    const running = await stage.run();
    await restarted(stage, async (next) => {
      const lease = await next.claim(64, { batch: { ...running.lease.batch, id: "another" } });
      assert.deepEqual(idsOf(lease), [waiting.id, running.id]);
      assert.equal(await next.settle(running.lease, failed(running.id)), "late");
      assert.equal(await next.settle(running.lease, done(running.id)), "taken");
    });
  });

  holdsOnDisk("outcomes, for their owner, until the same instant as without it", async (stage) => {
    const [good, bad] = [await stage.ended(done), await stage.ended(failed)];
    const cancelled = await stage.queue();
    await stage.engine.cancel(cancelled, "ann");
    await stage.tick(RESULT_TTL_MS - 1);
    await restarted(stage, async (next) => {
      assert.deepEqual((await next.look(good, "ann"))?.outcome, { ok: true, output: '"out"' });
      assert.equal((await next.engine.outcome(good))?.batch?.worker, "gpu");
      assert.equal((await next.engine.outcome(good))?.task.input, "");
      assert.equal(await next.code(bad), "INPUT_REJECTED");
      assert.equal(await next.code(cancelled), "CANCELLED");
      assert.equal(await next.look(good, "bob"), undefined);
      await next.pass(1);
      await next.hasCounts([0, 0, 0, 0]);
    });
  });

  holdsOnDisk("nothing that was forgotten", async (stage) => {
    const ids = [await stage.ended(done), await stage.ended(dead), await stage.ended(dead)];
    await stage.engine.cancel(ids[0]!, "ann");
    await stage.engine.deadLetters.purge(ids[1]!);
    await stage.pass(RESULT_TTL_MS);
    await stage.engine.deadLetters.purge(ids[2]!);
    await restarted(stage, async (next) => {
      await next.hasCounts([0, 0, 0, 0]);
    });
  });

  holdsOnDisk("what is in flight and what is cached, to be shared", async (stage) => {
    const sharing = { joinKey: "same ann", cacheKey: "cache", cacheTtlMs: 1000 };
    const id = await stage.queue({}, { joinKey: "other ann" });
    await stage.ended(done, { parameters: "hot" }, sharing);
    await restarted(stage, async (next) => {
      assert.deepEqual(await next.put({}, { joinKey: "other ann" }), { kind: "joined", id });
      assert.equal((await next.put({}, sharing)).kind, "done");
      await next.tick(1000);
      assert.equal((await next.put({}, sharing)).kind, "queued");
    });
  });

  holdsOnDisk("Idempotency-Keys, also of those who joined", async (stage) => {
    const keyed = (key: string, fingerprint = "f") => ({ idempotency: { key, fingerprint } });
    const queued = await stage.queue({}, { joinKey: "same ann", ...keyed("first") });
    await stage.put({}, { joinKey: "same ann", ...keyed("joined") });
    const finished = await stage.ended(done, { parameters: "hot" }, keyed("done"));
    const healable = await stage.ended(dead, { parameters: "hot" }, keyed("failed"));
    await restarted(stage, async (next) => {
      for (const key of ["first", "joined"]) {
        assert.deepEqual(await next.put({}, keyed(key)), { kind: "joined", id: queued });
        assert.deepEqual(await next.put({}, keyed(key, "g")), { kind: "conflict", id: queued });
        assert.equal(await next.engine.cancel(queued, "ann", true), "kept");
      }
      const reply = await next.put({}, keyed("done"));
      assert.deepEqual([reply.kind, "id" in reply && reply.id], ["done", finished]);
      assert.equal((await next.put({}, keyed("failed"))).kind, "queued");
      assert.equal(await next.code(healable), "INFERENCE_FAILED");
    });
  });
});

describe("a restart brings back dead letters", () => {
  holdsOnDisk("with their input, also when the record is long forgotten", async (stage) => {
    const id = await stage.ended(dead, { input: '"precious"', tenant: "bob" });
    const before = await stage.engine.deadLetters.get(id);
    await stage.pass(RESULT_TTL_MS);
    await restarted(stage, async (next) => {
      await next.reap();
      assert.deepEqual(await next.engine.deadLetters.list(), [before]);
      assert.equal(await next.engine.outcome(id), undefined);
      assert.equal(await next.engine.deadLetters.replay(id), true);
      await next.settle(await next.claim(), done(id));
      assert.equal((await next.look(id, "bob"))?.state, "done");
    });
  });

  holdsOnDisk("without their record, once its owner has forgotten it", async (stage) => {
    const id = await stage.ended(dead);
    await stage.engine.cancel(id, "ann");
    await restarted(stage, async (next) => {
      assert.equal(await next.engine.outcome(id), undefined);
      await next.hasCounts([0, 0, 0, 1]);
    });
  });

  holdsOnDisk("until their time to live has passed", async (stage) => {
    await stage.ended(dead);
    await stage.tick(LETTER_TTL_MS - 1);
    await restarted(stage, async (next) => {
      await next.reap();
      await next.hasCounts([0, 0, 0, 1]);
      await next.pass(1);
      await next.hasCounts([0, 0, 0, 0]);
      await restarted(next, async (last) => await last.hasCounts([0, 0, 0, 0]));
    });
  });

  holdsOnDisk("as queued tasks once they are replayed", async (stage) => {
    const id = await stage.ended(dead);
    await stage.engine.deadLetters.replay(id);
    await restarted(stage, async (next) => {
      await next.hasCounts([1, 0, 0, 0]);
      assert.deepEqual(idsOf(await next.claim()), [id]);
    });
  });

  holdsOnDisk("up to a smaller bound; the rest stay failed", async (stage) => {
    const ids = [await stage.ended(dead), await stage.ended(dead)];
    const fewer = (max: number) => ({ deadLetters: { max, ttlMs: LETTER_TTL_MS } });
    await restarted(stage, async (next) => await next.hasCounts([0, 0, 2, 1]), fewer(1));
    await restarted(stage, async (next) => await next.hasCounts([0, 0, 2, 0]), fewer(0));
    await restarted(stage, async (next) => {
      for (const id of ids) assert.equal(await next.code(id), "INFERENCE_FAILED");
      await next.hasCounts([0, 0, 2, 0]);
    });
  });
});

describe("a restart with another configuration", () => {
  const without = { models: new Map([[OTHER_MODEL, { queueMs: QUEUE_MS, totalMs: TOTAL_MS }]]) };

  holdsOnDisk("turns the tasks of a model that is gone into dead letters, for good", async (stage) => {
    const id = await stage.queue({ input: '"precious"' });
    await stage.queue({ model: OTHER_MODEL });
    await restarted(
      stage,
      async (next) => {
        await next.hasCounts([1, 0, 1, 1]);
        assert.equal(await next.code(id), "INFERENCE_FAILED");
        const letter = await next.engine.deadLetters.get(id);
        assert.deepEqual([letter?.task.input, letter?.diedAt], ['"precious"', next.now]);
        assert.match(letter!.message, new RegExp(MODEL));
        assert.equal(await next.engine.deadLetters.replay(id), false);
      },
      without,
    );
    await stage.tick(1000);
    await restarted(stage, async (next) => {
      assert.equal(await next.code(id), "INFERENCE_FAILED");
      assert.equal((await next.engine.deadLetters.get(id))?.diedAt, next.now - 1000);
      assert.equal(await next.engine.deadLetters.replay(id), true);
      assert.deepEqual(idsOf(await next.claim()), [id]);
    });
  });

  holdsOnDisk("serves tasks of a tier that is gone in the last one", async (stage) => {
    const letter = await stage.ended(dead, { tier: 2 });
    const id = await stage.queue({ tier: 2 });
    await restarted(
      stage,
      async (next) => {
        await next.engine.deadLetters.replay(letter);
        assert.deepEqual(next.engine.stats().depth.get(MODEL), [0, 2]);
        assert.deepEqual(new Set(idsOf(await next.claim())), new Set([id, letter]));
      },
      { tiers: 2 },
    );
  });
});

describe("the journal", () => {
  const journal = new PerfectJournal();
  const holds = holdsOn((options) =>
    openKept(async () => ({ journal, records: [] }), options, new VirtualClock(), new Events()),
  );

  holds(
    "is waited for before a task counts as accepted, and refuses what its disk cannot keep up with",
    async (stage) => {
      const written = Promise.withResolvers<void>();
      journal.flushed = () => written.promise;
      let reply: unknown;
      const put = stage.put().then((each) => (reply = each));
      await stage.tick(0);
      assert.equal(reply, undefined);
      written.resolve();
      assert.equal((await put).kind, "queued");
      journal.pendingBytes = Infinity; // a disk that cannot keep up is refused before it is asked
      assert.match(((await stage.put()) as { message?: string }).message ?? "", /behind its disk/);
      journal.pendingBytes = 0;
    },
  );

  holds(
    "keeps no outcome that was evicted after it was read",
    async (stage) => {
      const id = await stage.ended(done);
      assert.ok(journal.kept.has(id));
      stage.engine.delivered(id);
      assert.equal(await stage.state(id), undefined);
      assert.ok(!journal.kept.has(id));
    },
    { results: { ...PLAIN.results, evictAfterRead: true } },
  );

  /** The next write fails; from then on the journal says so itself. */
  const breaks = (lasting = false): void => {
    const trouble = new JournalTrouble("no space left to write /secret/ferry.db", lasting);
    journal.flushed = async () => {
      journal.trouble = trouble;
      throw trouble;
    };
  };
  const mends = (): void => {
    journal.trouble = undefined;
    journal.flushed = async () => {};
  };
  const keyed = { idempotency: { key: "k", fingerprint: "f" } };

  holds("a task that could not be written and was not claimed is refused, and never runs", async (stage) => {
    breaks();
    const refused = stage.task();
    const full = await stage.engine.put(refused, keyed);
    assert(full.kind === "full");
    assert.doesNotMatch(full.message, /secret|space/, "the cause is for operators");
    assert.deepEqual(idsOf(await stage.claim()), []);
    assert.equal(await stage.engine.outcome(refused.id), undefined);
    assert.ok(!journal.kept.has(refused.id));
    // Until it can be written again nothing is taken in, and then its key stands for nothing.
    assert.equal((await stage.put({}, keyed)).kind, "full");
    await stage.hasCounts([0, 0, 0, 0]);
    mends();
    assert.equal((await stage.put({}, keyed)).kind, "queued");
  });

  holds("one that runs already is answered with its outcome, not refused", async (stage) => {
    const written = Promise.withResolvers<void>();
    journal.flushed = () => written.promise;
    const task = stage.task();
    const put = Promise.resolve(stage.engine.put(task, { joinKey: "same" }));
    const joined = Promise.resolve(stage.put({}, { joinKey: "same" }));
    const lease = await stage.claim();
    assert.deepEqual(idsOf(lease), [task.id]);
    journal.trouble = new JournalTrouble("no space", false);
    written.reject(journal.trouble);
    await stage.tick(0);
    await stage.settle(lease, done(task.id));
    for (const reply of [await put, await joined]) {
      assert(reply.kind === "done", reply.kind);
      assert.deepEqual([reply.id, reply.record.outcome], [task.id, { ok: true, output: '"out"' }]);
    }
    mends();
  });

  holds("a task that is put again while the disk is full is answered with its outcome", async (stage) => {
    const task = stage.task();
    await stage.engine.put(task);
    breaks();
    assert.equal((await stage.put()).kind, "full");
    const again = Promise.resolve(stage.engine.put(task));
    await stage.settle(await stage.claim(), done(task.id));
    const reply = await again;
    assert(reply.kind === "done", reply.kind);
    assert.deepEqual([reply.id, reply.unstored], [task.id, true]);
    mends();
  });

  holds("an outcome from the cache that could not be written is answered now, not polled", async (stage) => {
    const sharing = { cacheKey: "same", cacheTtlMs: 1000 };
    const task = stage.task();
    await stage.engine.put(task, sharing);
    await stage.settle(await stage.claim(), done(task.id));
    breaks();
    const reply = await stage.put({}, sharing);
    assert(reply.kind === "done", reply.kind);
    assert.deepEqual([reply.cached, reply.unstored], [true, true]);
    mends();
  });

  holds(
    "after a failed fsync nobody is told that a task was refused: it may be on the disk",
    async (stage) => {
      breaks(true);
      await assert.rejects(
        Promise.resolve(stage.put()),
        (error) => error instanceof Refusal && error.status === 503 && /not known/.test(error.message),
      );
      assert.deepEqual(idsOf(await stage.claim()), []);
      mends();
    },
  );

  holds("a replay that cannot be written leaves its letter in the list", async (stage) => {
    mends();
    const id = await stage.ended(dead);
    breaks();
    await assert.rejects(stage.engine.deadLetters.replay(id), Refusal);
    await assert.rejects(stage.engine.deadLetters.replay(id), Refusal, "refused before it is tried");
    assert.equal((await stage.engine.deadLetters.get(id))?.task.id, id);
    await stage.hasCounts([0, 0, 1, 1]);
    mends();
    assert.equal(await stage.engine.deadLetters.replay(id), true);
    const queued = await stage.queue();
    breaks();
    await assert.rejects(stage.engine.cancel(queued, "ann"), Refusal);
    mends();
  });
});

describe("a process that dies with its own workers", () => {
  /** Opens an engine on what the last one left; the last one is just not used any more, as after a crash. */
  class Crashing {
    readonly journal = new PerfectJournal();
    readonly #clock = new VirtualClock();
    readonly dead: string[] = [];

    async start(): Promise<Stage> {
      const keeper = new RecordKeeper(this.journal, [...this.journal.kept.values()], this.journal.noted);
      const events = new Events();
      events.on("task.dead", ({ id }) => this.dead.push(id));
      const engine = new MemoryEngine(() => PLAIN, this.#clock, events, { keeper });
      return new Stage({ engine, clock: this.#clock, events });
    }
  }
  const inside = { inProcess: true };

  void test("runs what ran then one at a time, alone, and buries what it died with four times", async () => {
    const life = new Crashing();
    let stage = await life.start();
    const ids = await stage.queueMany(4);
    const poison = ids[1]!;
    assert.deepEqual(idsOf(await stage.claim(3, inside)), ids.slice(0, 3));
    assert.deepEqual(life.journal.noted, ids.slice(0, 3));
    const served: string[] = [];
    for (let death = 1; death < 4; death++) {
      stage = await life.start();
      const fresh = await stage.queue();
      for (let lease = await stage.claim(64, inside); ; lease = await stage.claim(64, inside)) {
        const [first] = idsOf(lease);
        assert.ok(first !== undefined, "the poison is still there");
        if (ids.slice(0, 3).includes(first)) {
          assert.equal(lease.tasks.length, 1, "a suspect runs alone");
          const beside = await stage.claim(64, inside);
          assert.ok(!idsOf(beside).some((id) => ids.slice(0, 3).includes(id)), "one suspect at a time");
          for (const id of idsOf(beside)) await stage.settle(beside, done(id));
          served.push(...idsOf(beside));
        }
        if (first === poison) break;
        for (const id of idsOf(lease)) await stage.settle(lease, done(id));
        served.push(...idsOf(lease));
      }
      assert.ok(served.includes(fresh));
    }
    for (const id of ids) assert.equal(served.includes(id), id !== poison);
    stage = await life.start();
    assert.deepEqual(life.dead, [poison]);
    const letter = await stage.engine.deadLetters.get(poison);
    assert.deepEqual([letter?.attempts, letter?.task.input], [4, '"in"']);
    assert.match(letter!.message, /the process died 4 times while it ran/);
    assert.equal(await stage.code(poison), "INFERENCE_FAILED");
    assert.deepEqual(idsOf(await stage.claim(64, inside)), []);
    stage = await life.start();
    await stage.hasCounts([0, 0, stage.engine.stats().kept, 1]);
  });

  void test("a task that runs beside a suspect is not charged with the death", async () => {
    const life = new Crashing();
    let stage = await life.start();
    const poison = await stage.queue();
    await stage.claim(1, inside);
    stage = await life.start();
    const other = await stage.queue({ parameters: "other" });
    await stage.claim(1, inside);
    await stage.claim(1, { ...inside, parameters: "other" });
    assert.deepEqual(new Set(life.journal.noted), new Set([poison, other]));
    stage = await life.start();
    assert.equal((await stage.claim(1, inside)).tasks[0]?.attempt, 3);
    assert.equal((await stage.claim(1, { ...inside, parameters: "other" })).tasks[0]?.attempt, 1);
  });

  void test("what came back, ended, or runs elsewhere is not charged", async () => {
    const life = new Crashing();
    let stage = await life.start();
    const [ended, retried] = await stage.queueMany(2);
    const lease = await stage.claim(64, inside);
    await stage.settle(lease, done(ended!));
    await stage.settle(lease, retry(retried!, stage.now));
    const elsewhere = await stage.queue({ parameters: "other" });
    await stage.claim(64, { parameters: "other" });
    assert.deepEqual(life.journal.noted, []);
    stage = await life.start();
    assert.deepEqual(idsOf(await stage.claim()), [retried]);
    assert.deepEqual(idsOf(await stage.claim(64, { parameters: "other" })), [elsewhere]);
  });

  void test("no task that could be the next one runs before the last death is on disk", async () => {
    const life = new Crashing();
    let stage = await life.start();
    await stage.queueMany(2);
    await stage.claim(1, inside);
    const written = Promise.withResolvers<void>();
    life.journal.flushed = () => written.promise;
    stage = await life.start();
    let claimed: unknown;
    const claim = stage.claim(64, inside).then((lease) => (claimed = lease));
    await stage.tick(0);
    assert.equal(claimed, undefined);
    written.resolve();
    assert.equal((await claim).tasks.length, 1);
  });
});

describe("finished records have a bounded shelf", () => {
  const holds = holdsOn(openBare);
  const shelf = { results: { ttlMs: RESULT_TTL_MS, evictAfterRead: false, maxBytes: 100_000 } };
  const large = (id: string) => ({ id, kind: "done", output: `"${"x".repeat(30_000)}"` }) as const;

  holds(
    "what was delivered goes first, the oldest of it before the rest",
    async (stage) => {
      const ids = [await stage.ended(large)];
      for (let n = 0; n < 2; n++) {
        ids.push(await stage.ended(large));
        stage.engine.delivered(ids.at(-1)!);
      }
      ids.push(await stage.ended(large));
      const there = await Promise.all(ids.map((id) => stage.state(id)));
      assert.deepEqual(there, ["done", undefined, "done", "done"]);
    },
    shelf,
  );

  holds(
    "a replay is not refused for results that its tenant has not fetched",
    async (stage) => {
      const letter = await stage.ended(dead);
      while ((await stage.put()).kind === "queued") {
        const lease = await stage.claim(1);
        await stage.settle(lease, large(idsOf(lease)[0]!));
      }
      assert.equal(await stage.engine.deadLetters.replay(letter), true);
    },
    shelf,
  );

  holds(
    "what was not delivered never goes before its time: put answers full instead",
    async (stage) => {
      const ids: string[] = [];
      for (let n = 0; n < 2; n++) ids.push(await stage.ended(large));
      const full = await stage.put();
      assert(full.kind === "full");
      assert.match(full.message, /results\.maxBytes/);
      for (const id of ids) assert.equal(await stage.state(id), "done");
      stage.engine.delivered(ids[1]!);
      await stage.queue();
      await stage.pass(RESULT_TTL_MS - 1);
      assert.equal(await stage.state(ids[0]!), "done");
    },
    shelf,
  );

  holds(
    "a tenant that fetches nothing is told when the first will be gone, and nobody else is refused",
    async (stage) => {
      const first = await stage.ended(large);
      await stage.pass(1000);
      await stage.ended(large);
      await stage.pass(500);
      const full = await stage.put();
      assert(full.kind === "full");
      assert.deepEqual([full.own, full.retryInMs], [true, RESULT_TTL_MS - 1500]);
      for (let n = 0; n < 40; n++) stage.engine.delivered(await stage.ended(large, { tenant: `bob ${n}` }));
      await stage.pass(RESULT_TTL_MS - 1500);
      assert.equal(await stage.state(first), undefined);
      await stage.queue();
    },
    shelf,
  );

  holds(
    "forty tenants that fetch nothing refuse nobody who does",
    async (stage) => {
      for (let n = 0; n < 40; n++) {
        while ((await stage.put({ tenant: `hoards ${n}` })).kind === "queued") {
          const lease = await stage.claim();
          await stage.settle(lease, large(idsOf(lease)[0]!));
        }
        stage.engine.delivered(await stage.ended(large, { tenant: "bob" }));
      }
    },
    shelf,
  );

  holds(
    "outputs that come in beyond the bound are kept, and take nobody else's place",
    async (stage) => {
      const others = await stage.ended(done, { tenant: "bob" });
      stage.engine.delivered(others);
      const ids = await stage.queueMany(8);
      const lease = await stage.claim();
      for (const id of ids) await stage.settle(lease, large(id));
      for (const id of [others, ...ids]) assert.equal(await stage.state(id), "done");
      stage.engine.delivered(await stage.ended(large, { tenant: "cid" }));
      assert.equal((await stage.put()).kind, "full");
    },
    shelf,
  );

  holds(
    "callers who hang up, at whichever moment, are promised nothing and refuse nobody",
    async (stage) => {
      const hangUp = (id: string) => stage.engine.cancel(id, "ann", true);
      for (let n = 0; n < 20; n++) {
        const queued = await stage.queue();
        await hangUp(queued);
        const { id, lease } = await stage.run();
        await hangUp(id);
        await stage.settle(lease, large(id));
        await hangUp(await stage.ended(large));
        const retried = await stage.run();
        await hangUp(retried.id);
        await stage.settle(retried.lease, retry(retried.id, stage.now));
        const again = await stage.claim();
        await stage.settle(again, large(retried.id));
      }
    },
    shelf,
  );

  holds(
    "whoever joins a task that its caller has left is promised its outcome",
    async (stage) => {
      const { id, lease } = await stage.run({}, { joinKey: "same ann" });
      await stage.engine.cancel(id, "ann", true);
      assert.deepEqual(await stage.put({}, { joinKey: "same ann" }), { kind: "joined", id });
      await stage.settle(lease, large(id));
      await stage.ended(large);
      assert.equal((await stage.put()).kind, "full");
      // And when that one leaves too, it is promised to nobody.
      await stage.engine.cancel(id, "ann", true);
      await stage.queue();
    },
    shelf,
  );

  holds(
    "one tenant's results never make another's go that is within its share",
    async (stage) => {
      const ids: string[] = [];
      for (let n = 0; n < 10; n++) ids.push(await stage.ended(done, { tenant: "bob" }));
      for (const id of ids) stage.engine.delivered(id);
      for (let n = 0; n < 100; n++) stage.engine.delivered(await stage.ended(large));
      for (const id of ids) assert.equal(await stage.state(id), "done");
    },
    shelf,
  );

  test("what a restart finds is kept, and refuses nobody: who has fetched it is not known", async () => {
    const before = new Stage(await openOnPerfectDisk({ ...PLAIN, ...shelf }));
    const small = (id: string) => ({ id, kind: "done", output: `"${"x".repeat(3000)}"` }) as const;
    const ids: string[] = [];
    for (let n = 0; n < 28; n++) {
      ids.push(await before.ended(small));
      before.engine.delivered(ids[n]!);
    }
    const restarted = (await before.reopen())!;
    for (const id of ids) assert.equal(await restarted.state(id), "done");
    await restarted.queue();
    await restarted.queue({ tenant: "bob" });
  });

  holds(
    "the cache is bounded too, and its oldest goes first",
    async (stage) => {
      const sharing = (n: number) => ({ cacheKey: `cache ${n}`, cacheTtlMs: RESULT_TTL_MS });
      for (let n = 0; n < 4; n++) stage.engine.delivered(await stage.ended(large, {}, sharing(n)));
      assert.equal((await stage.put({}, sharing(3))).kind, "done");
      assert.equal((await stage.put({}, sharing(0))).kind, "queued");
    },
    shelf,
  );
});

describe("parameters", () => {
  const shared = `{"a":"${"x".repeat(1_000_000)}"}`;
  const bounded = { maxQueuedBytes: 2_500_000 };

  holdsOn(openBare)(
    "count once for all tasks that share them, also while those wait for a retry",
    async (stage) => {
      const ids = await stage.queueMany(300, { parameters: shared });
      await stage.queue({ parameters: `{"b":"${"x".repeat(1_000_000)}"}` });
      assert.equal((await stage.put({ parameters: `{"c":"${"x".repeat(1_000_000)}"}` })).kind, "full");
      const lease = await stage.claim(300, { parameters: shared });
      await stage.engine.settle(
        lease,
        ids.map((id) => retry(id, stage.now + 100)),
      );
      assert.equal((await stage.put({ parameters: `{"c":"${"x".repeat(1_000_000)}"}` })).kind, "full");
      for (const id of ids) await stage.engine.cancel(id, "ann");
      await stage.queue({ parameters: `{"c":"${"x".repeat(1_000_000)}"}` });
    },
    bounded,
  );

  holdsOn(openOnPerfectDisk)(
    "count with each task where each is written down with them",
    async (stage) => {
      await stage.queueMany(2, { parameters: shared });
      assert.equal((await stage.put({ parameters: shared })).kind, "full");
    },
    bounded,
  );

  holdsOn(openOnPerfectDisk)(
    "of many inputs that would be written down too often are refused as a whole",
    async ({ engine }) => {
      assert.equal(engine.neverFits(60, 600, 1_000_000), undefined);
      assert.match(engine.neverFits(70, 700, 1_000_000)!, /70 inputs share .* 70000000 bytes/);
      assert.match(engine.neverFits(300, 3000, 1_000_000)!, /limits\.maxQueuedBytes 268435456/);
      assert.match(engine.neverFits(1001, 1001, 0)!, /limits\.maxQueued 1000/);
    },
    { maxQueuedBytes: 268_435_456 },
  );

  holdsOn(openBare)("of many inputs are held once, and do not hinder them", async ({ engine }) => {
    assert.equal(engine.neverFits(1000, 0, 1_000_000), undefined);
  });

  holdsOn(openBare)(
    "of a finished task are not kept",
    async (stage) => {
      for (const verdict of [done, dead]) {
        const id = await stage.ended(verdict, { parameters: shared });
        assert.equal((await stage.engine.outcome(id))?.task.parameters, "");
      }
      const [letter] = await stage.engine.deadLetters.list();
      assert.equal(letter?.task.parameters, shared);
    },
    bounded,
  );
});

describe("groups", () => {
  const holds = holdsOn(openBare);
  const many = { maxQueued: 10_000 };
  const parameters = (n: number): string => `{"n":${n}}`;

  /** Opens groups until the tenant is refused, and returns how many. */
  async function flood(stage: Stage, tenant: string, from: number): Promise<number> {
    for (let n = 0; ; n++) {
      const reply = await stage.put({ tenant, parameters: parameters(from + n) });
      if (reply.kind === "queued") continue;
      assert(reply.kind === "full" && reply.own === true);
      assert.match(reply.message, /different parameters/);
      return n;
    }
  }

  holds(
    "are bounded: a tenant alone may have half of them, and there is always room for the next",
    async (stage) => {
      assert.equal(await flood(stage, "ann", 0), MAX_GROUPS / 2);
      await stage.queue({ tenant: "ann", parameters: parameters(0) });
      assert.ok((await flood(stage, "bob", 10_000)) >= MAX_GROUPS / 4);
      for (let n = 0; n < 40; n++) assert.ok((await flood(stage, `t${n}`, 20_000 + n * 1000)) > 0);
      const waiting = [...stage.engine.queues(MODEL)].length;
      assert.ok(waiting <= 1.5 * MAX_GROUPS, `${waiting} groups`);
    },
    many,
  );

  holds(
    "have room again when they are empty; those that wait for a retry are not",
    async (stage) => {
      const opened = await flood(stage, "ann", 0);
      const lease = await stage.claim(1, { parameters: parameters(0) });
      await stage.settle(lease, retry(idsOf(lease)[0]!, stage.now + 100));
      assert.equal(await flood(stage, "ann", opened), 0);
      const other = await stage.claim(1, { parameters: parameters(1) });
      await stage.settle(other, done(idsOf(other)[0]!));
      assert.equal(await flood(stage, "ann", opened), 1);
    },
    many,
  );

  holds(
    "a replay opens one also where its tenant may open none",
    async (stage) => {
      const id = await stage.ended(dead, { parameters: parameters(-1) });
      await flood(stage, "ann", 0);
      assert.equal(await stage.engine.deadLetters.replay(id), true);
      assert.deepEqual(idsOf(await stage.claim(1, { parameters: parameters(-1) })), [id]);
    },
    many,
  );

  holds(
    "are served in turn: whoever has one waits for one of the tenant that has a thousand",
    async (stage) => {
      await flood(stage, "ann", 0);
      await stage.tick(10);
      const next = async (): Promise<string> => {
        const [queue] = stage.engine.queues(MODEL, 64);
        const lease = await stage.claim(64, { parameters: queue!.parameters });
        return lease.tasks[0]!.task.tenant;
      };
      assert.equal(await next(), "ann");
      await stage.tick(10);
      await stage.queue({ tenant: "bob", parameters: parameters(10_000) });
      await stage.queue({ tenant: "cid", parameters: parameters(10_001) });
      await stage.tick(10);
      assert.equal(await next(), "ann");
      await stage.tick(10);
      assert.equal(await next(), "bob");
      await stage.tick(10);
      assert.equal(await next(), "cid");
      await stage.tick(10);
      assert.equal(await next(), "ann");
      // Behind the flood in a group of the flood's, it is served on its own turn.
      await stage.tick(10);
      const last = [...stage.engine.queues(MODEL)].at(-1)!.parameters;
      await stage.queue({ tenant: "dan", parameters: last });
      await stage.tick(10);
      const [queue] = stage.engine.queues(MODEL);
      assert.equal(queue!.parameters, last);
      // So admission expects it to be: a turn of each, not all that wait.
      assert.ok(stage.engine.turn(MODEL, 0, "eve") <= 3);
    },
    many,
  );

  holds(
    "a view of the first of each tier is the start of the whole view",
    async (stage) => {
      for (let n = 0; n < 300; n++) {
        await stage.queue({ tenant: `t${n % 7}`, tier: n % 3, parameters: parameters(n % 50) });
        if (n % 4 === 0) {
          const [queue] = stage.engine.queues(MODEL);
          await stage.claim(3, { parameters: queue!.parameters });
        }
        await stage.tick(1);
        const all = [...stage.engine.queues(MODEL)];
        const first = [...stage.engine.queues(MODEL, 2)];
        const wanted = [0, 1, 2].flatMap((tier) => all.filter((queue) => queue.tier === tier).slice(0, 2));
        assert.deepEqual(first, wanted);
        const depth = all.reduce((sum, queue) => sum + queue.depth, 0);
        assert.equal(depth, stage.engine.stats().queued);
      }
    },
    many,
  );
});

describe("order", () => {
  holdsOn(openBare)("tasks that come back stand in the order in which they came", async (stage) => {
    const ids = await stage.queueMany(6);
    const [first, second] = [await stage.claim(2), await stage.claim(2)];
    const backwards = (lease: typeof first) =>
      idsOf(lease)
        .reverse()
        .map((id) => retry(id, stage.now));
    await stage.engine.settle(second, backwards(second));
    await stage.engine.settle(first, backwards(first));
    assert.deepEqual(idsOf(await stage.claim(6)), ids);
  });
});
