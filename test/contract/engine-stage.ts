/**
 * Where a promise of the engine contract is played: one engine, a clock that stands still until it is told
 * to move, and short words for what every promise needs.
 *
 * Nothing here knows which engine it is. Time passes in two ways: `pass` calls `reap` at every instant that
 * the engine names, as a process does; `tick` lets time go by unnoticed, as in a process that was stalled.
 */
import assert from "node:assert/strict";
import { test } from "node:test";
import type { ErrorCode } from "../../src/core/errors.ts";
import type { Outcome, Task, TaskState } from "../../src/core/task.ts";
import type {
  ClaimRequest,
  Engine,
  EngineLimits,
  Lease,
  PutReply,
  QueueView,
  RecordView,
  SettleReply,
  Sharing,
  Verdict,
} from "../../src/engine/engine.ts";
import { newId } from "../../src/engine/ids.ts";
import type { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import type { Events } from "../../src/observe/events.ts";

export type EngineOptions = EngineLimits;

export interface Opened {
  readonly engine: Engine;
  readonly clock: VirtualClock;
  readonly events: Events;
  /** Closes the engine and opens another on what it kept; left out where nothing is kept. */
  reopen?(options?: Partial<EngineOptions>): Promise<Opened>;
  /** Reads what the engine's own view may not know yet; left out where the view is the truth. */
  refresh?: () => Promise<void>;
  /** Ages are estimates, and finished records are not counted. */
  readonly approximate?: boolean;
  /** A task is in the views when its put is answered, not when it is called. */
  readonly takesInLater?: boolean;
}

export type OpenEngine = (options: EngineOptions) => Promise<Opened>;

export const MODEL = "embed";
export const OTHER_MODEL = "rank";
export const QUEUE_MS = 2000;
export const TOTAL_MS = 4000;
export const LEASE_MS = 1000;
export const RESULT_TTL_MS = 20_000;
export const LETTER_TTL_MS = 60_000;

export const PLAIN: EngineOptions = {
  models: new Map([
    [MODEL, { queueMs: QUEUE_MS, totalMs: TOTAL_MS }],
    [OTHER_MODEL, { queueMs: QUEUE_MS, totalMs: TOTAL_MS }],
  ]),
  tiers: 3,
  maxQueued: 1000,
  maxQueuedBytes: 1_000_000,
  results: { ttlMs: RESULT_TTL_MS, evictAfterRead: false, maxBytes: 10_000_000 },
  deadLetters: { max: 100, ttlMs: LETTER_TTL_MS },
};

/** A record as it was at one moment: an engine may hand out one that lives on. */
export interface Seen {
  readonly id: string;
  readonly state: TaskState;
  readonly attempt: number;
  readonly outcome: Outcome | undefined;
}

/** Verbs after which an engine that others share too reads what they changed. */
const VERBS = new Set<PropertyKey>(["put", "claim", "settle", "cancel", "reap", "replay"]);

/** The same engine, whose view is up to date when a verb is done. */
function seeing<Verbs extends object>(verbs: Verbs, refresh: () => Promise<void>): Verbs {
  return new Proxy(verbs, {
    get(target, key) {
      const found: unknown = Reflect.get(target, key, target);
      if (key === "deadLetters") return seeing(found as object, refresh);
      if (typeof found !== "function") return found;
      if (!VERBS.has(key)) return found.bind(target) as unknown;
      return async (...args: unknown[]) => {
        const result: unknown = await found.apply(target, args);
        await refresh().catch(() => {});
        return result;
      };
    },
  });
}

/** Ids are never used twice, so that an engine on a store that others use too cannot mix them up. */
let lastId = 0;

export class Stage {
  readonly engine: Engine;
  readonly clock: VirtualClock;
  readonly #opened: Opened;
  /** Every end that the engine announced. */
  readonly settled: Seen[] = [];
  /** Every arrival in a queue that the engine announced. */
  readonly arrivals: [model: string, parameters: string, depth: number][] = [];
  /** The soonest instant that the engine named, by `reap` or as a hint. */
  dueAt: number;
  /** Called after every `reap`. */
  reaped: (() => void) | undefined;

  constructor(opened: Opened) {
    this.#opened = opened;
    this.engine = opened.refresh === undefined ? opened.engine : seeing(opened.engine, opened.refresh);
    this.clock = opened.clock;
    this.dueAt = opened.clock.now();
    this.engine.watch({
      settled: (record) => void this.settled.push(seen(record)),
      queued: (model, parameters, depth) => void this.arrivals.push([model, parameters, depth]),
      due: (at) => {
        this.dueAt = Math.min(this.dueAt, at);
      },
    });
  }

  get now(): number {
    return this.clock.now();
  }

  get events(): Events {
    return this.#opened.events;
  }

  /** A stage after a restart, or undefined where the engine keeps nothing. */
  async reopen(options?: Partial<EngineOptions>): Promise<Stage | undefined> {
    const opened = await this.#opened.reopen?.(options);
    return opened && new Stage(opened);
  }

  task(fields: Partial<Task> = {}): Task {
    const createdAt = this.now;
    lastId++;
    const model = fields.model ?? MODEL;
    return {
      id: newId(createdAt + lastId, this.engine.bundle?.(model)),
      tenant: "ann",
      tier: 0,
      model: MODEL,
      input: '"in"',
      parameters: "",
      content: "",
      createdAt,
      deadlineAt: createdAt + TOTAL_MS,
      ...fields,
    };
  }

  async put(fields: Partial<Task> = {}, sharing: Sharing = {}): Promise<PutReply> {
    return this.engine.put(this.task(fields), sharing);
  }

  /** Puts a task that must be queued; resolves with its id. */
  async queue(fields: Partial<Task> = {}, sharing: Sharing = {}): Promise<string> {
    const reply = await this.put(fields, sharing);
    assert.equal(reply.kind, "queued");
    assert(reply.kind === "queued");
    return reply.id;
  }

  async queueMany(count: number, fields: Partial<Task> = {}): Promise<string[]> {
    const ids: string[] = [];
    for (let n = 0; n < count; n++) ids.push(await this.queue(fields));
    return ids;
  }

  claim(max = 64, more: Partial<ClaimRequest> = {}): Promise<Lease> {
    const batch = { id: "batch", reason: "full", worker: "gpu", startedAt: this.now, why: "why" } as const;
    return this.engine.claim({ model: MODEL, parameters: "", max, leaseMs: LEASE_MS, batch, ...more });
  }

  /** Queues one task and claims it. */
  async run(fields: Partial<Task> = {}, sharing: Sharing = {}): Promise<{ id: string; lease: Lease }> {
    const id = await this.queue(fields, sharing);
    const { model = MODEL, parameters = "" } = fields;
    const lease = await this.claim(64, { model, parameters });
    assert.ok(idsOf(lease).includes(id));
    return { id, lease };
  }

  /** A task that has come to its end with this verdict. */
  async ended(verdict: Judgement, fields: Partial<Task> = {}, sharing: Sharing = {}): Promise<string> {
    const { id, lease } = await this.run(fields, sharing);
    assert.equal(await this.settle(lease, verdict(id)), "taken");
    return id;
  }

  async settle(lease: Lease, verdict: Verdict): Promise<SettleReply> {
    const [reply] = await this.engine.settle(lease, [verdict]);
    return reply!;
  }

  async look(id: string, tenant?: string): Promise<Seen | undefined> {
    const record = await this.engine.outcome(id, tenant);
    return record && seen(record);
  }

  async state(id: string): Promise<TaskState | undefined> {
    return (await this.engine.outcome(id))?.state;
  }

  /** The failure's code, "" for a success, undefined while there is no end. */
  async code(id: string): Promise<ErrorCode | "" | undefined> {
    const outcome = (await this.engine.outcome(id))?.outcome;
    return outcome && (outcome.ok ? "" : outcome.code);
  }

  get approximate(): boolean {
    return this.#opened.approximate === true;
  }

  get takesInLater(): boolean {
    return this.#opened.takesInLater === true;
  }

  /** Queued, running, kept, dead letters. */
  async counts(): Promise<[number, number, number, number]> {
    await this.#opened.refresh?.();
    const { queued, running, kept, deadLetters } = this.engine.stats();
    return [queued, running, kept, deadLetters];
  }

  async hasCounts([queued, running, kept, letters]: [number, number, number, number]): Promise<void> {
    assert.deepEqual(await this.counts(), [queued, running, this.approximate ? 0 : kept, letters]);
  }

  queues(model = MODEL): Omit<QueueView, "headMaxBatchSize" | "tier">[] {
    return [...this.engine.queues(model)].map(
      ({ parameters, depth, oldestAt, earliestDeadlineAt, fresh }) => ({
        parameters,
        depth,
        oldestAt,
        earliestDeadlineAt,
        fresh,
      }),
    );
  }

  /** Time goes by and nobody looks. */
  async tick(ms: number): Promise<void> {
    await this.clock.run(this.now + ms);
  }

  async reap(): Promise<number> {
    const { now } = this;
    this.dueAt = Infinity;
    const next = await this.engine.reap(now);
    assert.ok(next > now, "what is due now was done now");
    this.dueAt = Math.min(this.dueAt, next);
    this.reaped?.();
    return next;
  }

  /** Time goes by, with a `reap` at every instant that the engine named and one at the end. */
  async pass(ms: number): Promise<void> {
    const until = this.now + ms;
    while (this.dueAt < until) {
      await this.clock.run(this.dueAt);
      await this.reap();
    }
    await this.clock.run(until);
    await this.reap();
  }
}

export type Judgement = (id: string) => Verdict;

export const done: Judgement = (id) => ({ id, kind: "done", output: '"out"' });
export const failed: Judgement = (id) => ({ id, kind: "failed", code: "INPUT_REJECTED", message: "no" });
export const dead: Judgement = (id) => ({
  id,
  kind: "dead",
  code: "INFERENCE_FAILED",
  message: "gave up",
  detail: "why",
});

type Retry = Verdict & { readonly kind: "retry" };

export function retry(id: string, at: number, more: Partial<Retry> = {}): Retry {
  return { id, kind: "retry", at, message: "again", ...more };
}

export function idsOf(lease: Lease): string[] {
  return lease.tasks.map(({ task }) => task.id);
}

export function seen({ task, state, attempt, outcome }: RecordView): Seen {
  return { id: task.id, state, attempt, outcome };
}

/** Plays one promise as a test on a fresh engine. */
export type Holds = (
  promise: string,
  play: (stage: Stage) => Promise<void>,
  options?: Partial<EngineOptions>,
) => void;

export function holdsOn(open: OpenEngine): Holds {
  return (promise, play, options = {}) => {
    test(promise, async () => {
      const stage = new Stage(await open({ ...PLAIN, ...options }));
      try {
        await play(stage);
      } finally {
        await stage.engine.close();
      }
    });
  };
}
