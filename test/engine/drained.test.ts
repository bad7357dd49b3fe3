/**
 * The memory engine at rest: after random verbs, a disk that is full at times, crashes and other limits, everything that
 * was accepted has ended, and when its time is over nothing of it is left, neither in memory nor on the disk. Counters
 * cannot be read from outside: a fresh engine that accepts exactly as much shows that they are back where they began.
 */
import assert from "node:assert/strict";
import { test } from "node:test";
import { Refusal } from "../../src/core/errors.ts";
import { ID_DIGITS } from "../../src/core/home.ts";
import type { Engine, EngineLimits, Lease, Sharing, Verdict } from "../../src/engine/engine.ts";
import { type Journal, JournalTrouble, type SavedRecord } from "../../src/engine/memory/journal.ts";
import { MemoryEngine } from "../../src/engine/memory/engine.ts";
import { RecordKeeper } from "../../src/engine/memory/saved.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { Events } from "../../src/observe/events.ts";
import { Dice } from "../sim/plan.ts";

const SEEDS = 40;
const STEPS = 200;
const [PLAIN_MODEL, MODULE] = ["embed", "rank"] as const;
const REST_MS = 200_000;

type Disk = Map<string, SavedRecord>;

/** Writes when it is told to, or is full then. */
class SlowJournal implements Journal {
  readonly #disk: Disk;
  #said: { readonly id: string; readonly write: () => void }[] = [];
  #waiting: PromiseWithResolvers<void>[] = [];
  readonly pendingBytes = 0;
  trouble: JournalTrouble | undefined;
  noted: readonly string[] = [];

  constructor(disk: Disk) {
    this.#disk = disk;
  }

  save(id: string, task: string, state: string): void {
    this.#said.push({
      id,
      write: () => void (this.#disk.delete(id), this.#disk.set(id, { id, task, state })),
    });
  }
  update(id: string, state: string): void {
    const write = (): void => {
      const saved = this.#disk.get(id);
      if (saved !== undefined) this.#disk.set(id, { ...saved, state });
    };
    this.#said.push({ id, write });
  }
  forget(id: string): void {
    if (this.trouble !== undefined) this.#said = this.#said.filter((each) => each.id !== id);
    this.#said.push({ id, write: () => void this.#disk.delete(id) });
  }
  running(ids: readonly string[]): void {
    this.noted = ids;
  }
  flushed(): Promise<void> {
    if (this.trouble !== undefined) return Promise.reject(this.trouble);
    if (this.#said.length === 0) return Promise.resolve();
    const flushed = Promise.withResolvers<void>();
    this.#waiting.push(flushed);
    return flushed.promise;
  }
  async close(): Promise<void> {
    this.write();
  }

  write(): void {
    for (const { write } of this.#said.splice(0)) write();
    this.trouble = undefined;
    for (const { resolve } of this.#waiting.splice(0)) resolve();
  }
  fill(): void {
    this.trouble = new JournalTrouble("no space left", false);
    for (const { reject } of this.#waiting.splice(0)) reject(this.trouble);
  }
}

function limits(dice: Dice): EngineLimits {
  const times = { queueMs: 2000, totalMs: 4000 };
  const module = { queueMs: 500, totalMs: 3000 };
  return {
    models: new Map([[PLAIN_MODEL, times], ...(dice.chance(0.8) ? [[MODULE, module] as const] : [])]),
    tiers: 3,
    maxQueued: 20,
    maxQueuedBytes: 3000,
    results: {
      ttlMs: dice.pick([5000, 20_000]),
      evictAfterRead: dice.chance(0.3),
      maxBytes: dice.pick([5000, 50_000, 10_000_000]),
    },
    deadLetters: { max: dice.pick([1, 4, 100]), ttlMs: 30_000 },
  };
}

class Story {
  readonly #dice: Dice;
  readonly #clock = new VirtualClock();
  readonly #events = new Events();
  readonly #disk: Disk = new Map();
  #journal: SlowJournal | undefined;
  #limits: EngineLimits;
  #engine: Engine;
  #leases: Lease[] = [];
  readonly #tasks: { readonly id: string; readonly tenant: string }[] = [];
  readonly #accepted = new Set<string>();
  readonly #refused = new Set<string>();
  readonly #claimed = new Set<string>();
  readonly #ends = new Map<string, number>();
  readonly #replays = new Map<string, number>();
  #crashes = 0;
  #made = 0;

  constructor(seed: number, journaled: boolean) {
    this.#dice = new Dice(seed);
    this.#limits = limits(this.#dice);
    this.#journal = journaled ? new SlowJournal(this.#disk) : undefined;
    this.#engine = this.#start([]);
  }

  #start(running: readonly string[]): Engine {
    const found = [...this.#disk.values()];
    const keeper = this.#journal && new RecordKeeper(this.#journal, found, running);
    const engine = new MemoryEngine(() => this.#limits, this.#clock, this.#events, { keeper });
    engine.watch({
      settled: ({ task }) => void this.#ends.set(task.id, (this.#ends.get(task.id) ?? 0) + 1),
    });
    return engine;
  }

  async play(): Promise<void> {
    for (let step = 0; step < STEPS; step++) {
      await this.#act();
      if (this.#dice.chance(0.5)) this.#journal?.write();
      await settle();
    }
  }

  #act(): Promise<unknown> | void {
    const turn = this.#dice.share();
    const task = this.#tasks.at(-1 - this.#dice.upTo(30));
    if (turn < 0.3) return this.#engine.together(() => this.#putSome());
    if (turn < 0.45) return this.#claim();
    if (turn < 0.6) return this.#settle();
    if (turn < 0.72) {
      // It waits for the disk, which is written later.
      if (task !== undefined)
        void this.#engine.cancel(task.id, task.tenant, this.#dice.chance(0.7)).catch(refused);
    } else if (turn < 0.76) {
      if (task !== undefined) this.#engine.delivered(task.id);
    } else if (turn < 0.79) {
      if (task !== undefined) return this.#engine.outcome(task.id, task.tenant);
    } else if (turn < 0.84) return this.#letter();
    else if (turn < 0.86) {
      const lease = this.#dice.pick(this.#leases);
      if (lease !== undefined) return this.#engine.extend(lease, 500);
    } else if (turn < 0.88) this.#limits = limits(this.#dice);
    else if (turn < 0.97) return this.#pass(this.#dice.pick([0, 5, 100, 100, 500, 1000, 6000]));
    else if (this.#dice.chance(0.5)) this.#journal?.fill();
    else return this.#crash();
  }

  #putSome(): void {
    for (let left = this.#dice.pick([1, 1, 3]); left > 0; left--) this.#put();
  }

  #put(): void {
    const dice = this.#dice;
    const number = ++this.#made;
    const id = `task-${number}-${ID_DIGITS[0]!}`;
    const tenant = dice.pick(["ann", "bob", "cid", "dan"]);
    const model = dice.pick([...this.#limits.models.keys()]);
    const parameters = dice.pick(["", "", '{"t":1}', `{"t":"${"x".repeat(100)}"}`, `{"n":${number}}`]);
    const content = dice.pick(["", "", "a", "b"]);
    const key = dice.pick(["", "", "", "k1", "k2"]);
    const own = `${content} ${model} ${parameters} ${tenant}`;
    const sharing: Sharing = {
      ...(content !== "" && { joinKey: own }),
      ...(content !== "" && dice.chance(0.6) && { cacheKey: own, cacheTtlMs: 3000 }),
      ...(key !== "" && { idempotency: { key: `${key} ${tenant}`, fingerprint: content } }),
    };
    const createdAt = this.#clock.now();
    const deadlineAt = createdAt + this.#limits.models.get(model)!.totalMs;
    const input = `"${"i".repeat(dice.upTo(60))}"`;
    const task = { id, tenant, tier: dice.upTo(3), model, input, parameters, content, createdAt, deadlineAt };
    this.#tasks.push(task);
    void Promise.resolve(this.#engine.put(task, sharing)).then(({ kind }) => {
      if (kind === "queued") this.#accepted.add(id);
      if (kind === "full") this.#refused.add(id);
    });
  }

  async #claim(): Promise<void> {
    const model = this.#dice.pick([PLAIN_MODEL, MODULE]);
    const queue = this.#dice.pick([...this.#engine.queues(model, this.#dice.pick([2, 64]))]);
    if (queue === undefined) return;
    const startedAt = this.#clock.now();
    const batch = { id: `b${++this.#made}`, reason: "full", worker: "w", startedAt, why: "" } as const;
    const request = {
      model,
      parameters: queue.parameters,
      max: this.#dice.between(1, 5),
      leaseMs: this.#dice.pick([50, 500, 6000]),
      inProcess: model === MODULE,
      batch,
    };
    // After a crash it waits for the disk.
    void this.#engine.claim(request).then((lease) => {
      for (const { task } of lease.tasks) this.#claimed.add(task.id);
      if (lease.tasks.length > 0) this.#leases.push(lease);
    });
  }

  async #settle(): Promise<void> {
    const lease = this.#dice.pick(this.#leases);
    if (lease === undefined) return;
    const some = lease.tasks.filter(() => this.#dice.chance(0.8));
    await this.#engine.settle(
      lease,
      some.map(({ task }) => this.#verdict(task.id)),
    );
    if (this.#dice.chance(0.6)) this.#leases = this.#leases.filter((each) => each !== lease);
  }

  #verdict(id: string): Verdict {
    const dice = this.#dice;
    const kind = dice.pick(["done", "done", "failed", "dead", "dead", "retry", "retry"] as const);
    if (kind === "done") return { id, kind, output: `"${"o".repeat(dice.upTo(300))}"` };
    if (kind === "retry") {
      const at = this.#clock.now() + dice.pick([0, 50, 900]);
      return { id, kind, at, message: "again", spared: dice.chance(0.5), overdue: dice.chance(0.3) };
    }
    return { id, kind, code: "INFERENCE_FAILED", message: "gave up", detail: "why" };
  }

  async #letter(): Promise<void> {
    const letter = this.#dice.pick(await this.#engine.deadLetters.list());
    if (letter === undefined) return;
    const { id, input } = letter.task;
    assert.notEqual(input, "", "a letter without its input");
    if (this.#dice.chance(0.2)) return void (await this.#engine.deadLetters.purge(id));
    // One that cannot be written returns to the list, which is an end, too.
    this.#replays.set(id, (this.#replays.get(id) ?? 0) + 1);
    void this.#engine.deadLetters.replay(id).catch(refused);
  }

  async #pass(ms: number): Promise<void> {
    await this.#clock.run(this.#clock.now() + ms);
    if (this.#dice.chance(0.8)) await this.#engine.reap(this.#clock.now());
  }

  /** The process dies with what it had not written, and another one starts. */
  async #crash(): Promise<void> {
    const journal = this.#journal;
    if (journal === undefined) return;
    if (journal.trouble === undefined && this.#dice.chance(0.5)) journal.write();
    await settle();
    this.#crashes++;
    this.#leases = [];
    const lost = [...this.#accepted].filter((id) => !this.#ends.has(id) && !this.#disk.has(id));
    assert.deepEqual(lost, [], "accepted, not ended, and not on the disk");
    this.#journal = new SlowJournal(this.#disk);
    this.#engine = this.#start(journal.noted);
  }

  async rest(): Promise<void> {
    this.#journal?.write();
    await settle();
    this.#limits = { ...limits(new Dice(1)), ...ROOMY };
    for (let ms = 0; ms < REST_MS; ms += 1000) {
      await this.#clock.run(this.#clock.now() + 1000);
      await this.#engine.reap(this.#clock.now());
      this.#journal?.write();
      await settle();
    }
    const { queued, running, kept, deadLetters } = this.#engine.stats();
    assert.deepEqual([queued, running, kept, deadLetters, this.#disk.size], [0, 0, 0, 0, 0]);
    if (this.#crashes > 0) return;
    // A process that dies takes the news of ends along; without that each has as many as it had lives.
    for (const id of this.#accepted) {
      const ends = this.#ends.get(id) ?? 0;
      assert.ok(ends >= 1 && ends <= 1 + (this.#replays.get(id) ?? 0), `${id} ended ${ends} times`);
    }
    for (const id of this.#refused) assert.ok(!this.#claimed.has(id), `${id} was refused, and ran`);
  }

  /** What an engine accepts until it is full, of each of the bounds that tenants share. */
  async capacity(engine = this.#engine): Promise<number[]> {
    const clock = this.#clock;
    const accepts = async (fields: { input?: string; parameters?: string }): Promise<string | undefined> => {
      const now = clock.now();
      const id = `task-${++this.#made}-${ID_DIGITS[0]!}`;
      const times = { createdAt: now, deadlineAt: now + 4000 };
      const task = { id, tenant: "ann", tier: 0, model: PLAIN_MODEL, content: "", ...times };
      const reply = engine.put({ ...task, input: "1", parameters: "", ...fields }, {});
      this.#journal?.write();
      return (await reply).kind === "queued" ? id : undefined;
    };
    const end = async (parameters: string, output: string): Promise<void> => {
      const batch = { id: "b", reason: "full", worker: "w", startedAt: clock.now(), why: "" } as const;
      const lease = await engine.claim({ model: PLAIN_MODEL, parameters, max: 1, leaseMs: 1000, batch });
      await engine.settle(lease, [{ id: lease.tasks[0]!.task.id, kind: "done", output }]);
    };
    let groups = 0;
    while ((await accepts({ parameters: `{"n":${groups}}` })) !== undefined) groups++;
    for (let n = 0; n < groups; n++) await end(`{"n":${n}}`, "1");
    await engine.reap(clock.now() + 1_000_000);
    const whole = await accepts({ input: "1".repeat(ROOMY.maxQueuedBytes) });
    assert.notEqual(whole, undefined, "bytes are still counted in an empty queue");
    await end("", "1");
    let results = 0;
    while ((await accepts({})) !== undefined) {
      await end("", `"${"o".repeat(300)}"`);
      results++;
    }
    return [groups, results];
  }

  fresh(): Engine {
    return new MemoryEngine(() => this.#limits, this.#clock, this.#events);
  }
}

const ROOMY = {
  maxQueued: 10_000,
  maxQueuedBytes: 100_000,
  results: { ttlMs: 20_000, evictAfterRead: false, maxBytes: 100_000 },
};

/** All promises that can go on have. */
const settle = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

function refused(error: unknown): void {
  assert.ok(error instanceof Refusal, String(error));
}

for (const journaled of [false, true]) {
  test(`nothing is left when all has ended${journaled ? ", on a journal" : ""}`, async () => {
    for (let seed = 1; seed <= SEEDS; seed++) {
      const story = new Story(seed, journaled);
      try {
        await story.play();
        await story.rest();
        if (seed % 4 === 0) assert.deepEqual(await story.capacity(), await story.capacity(story.fresh()));
      } catch (error) {
        throw new Error(`seed ${seed}: ${error instanceof Error ? error.message : String(error)}`, {
          cause: error,
        });
      }
    }
  });
}
