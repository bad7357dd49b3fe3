/**
 * What happened in one run, and what must never happen.
 *
 * Whatever breaks a rule at the moment it happens is thrown there and then; what can only be seen at the end is
 * checked by `close`. Beside that it counts: faults, so that one sees that they happened, and rare turns of
 * events, so that one sees that they bit.
 */
import assert from "node:assert/strict";
import type { Batch } from "../../src/workers/backend/backend.ts";
import type { BatchNote, Outcome, Task } from "../../src/core/task.ts";
import type {
  CancelReply,
  Engine,
  EngineStats,
  Placed,
  PutReply,
  RecordView,
} from "../../src/engine/engine.ts";
import { WINDOW_MS } from "../../src/core/window.ts";
import type { SettleReply, Verdict } from "../../src/engine/engine.ts";
import type { MemoryEngine } from "../../src/engine/memory/engine.ts";
import type { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import type { Events } from "../../src/observe/events.ts";
import { answerTo } from "./gpu.ts";
import type { Disk } from "./disk.ts";
import type { Host } from "./host.ts";
import { Overtaking } from "./overtaking.ts";
import { ALIVE_MS, type Plan, TIERS } from "./plan.ts";
import type { Audit } from "./redis/audit.ts";

/** Rounding, and the time between a worker's answer and its next batch. */
const AT_ONCE_MS = 2;
/** Two sweeps, where every note was lost. */
const HEARD_WITHIN_MS = 2100;
/** In one process, the disk included. */
const HEARD_AT_ONCE_MS = 50;
/** Until a gateway process and its core have found each other again. */
const RECONNECTED_MS = 150;

const NOTHING_KEPT = { has: () => false, undecided: () => true };

export class Ledger {
  readonly #plan: Plan;
  readonly #time: VirtualClock;
  readonly #startedAt: number;
  readonly counts = new Map<string, number>();
  readonly #trace: string[] | undefined;
  /** Short names for ids, which are drawn by chance: t1, t2 … in the order in which they are met. */
  readonly #names = new Map<string, string>();
  /** What the engine took in. */
  readonly accepted = new Map<string, Pick<Task, "input" | "parameters">>();
  readonly #written = new Set<string>();
  readonly #ended = new Map<string, Outcome>();
  readonly #endedAt = new Map<string, number>();
  readonly #refused = new Set<string>();
  /** Answered while the disk was full. */
  readonly #unstored = new Set<string>();
  /** To a worker, by the process that did so last. */
  readonly #sent = new Map<string, string>();
  audit: Audit | undefined;
  /** Deleted by their owners. */
  readonly forgotten = new Set<string>();
  /** Whose owner was told that it was cancelled. */
  readonly #cancelled = new Set<string>();
  #idleSince: number | undefined;
  #mostRunning = 0;
  /** What each worker runs; the next may have begun before its own batch's answer is here. */
  readonly #busy = new Map<string, string>();
  #overdue = false;
  #failure: Error | undefined;

  constructor(plan: Plan, time: VirtualClock, trace?: string[]) {
    this.#plan = plan;
    this.#time = time;
    this.#startedAt = time.now();
    this.#trace = trace;
    this.#idleSince = time.now();
  }

  count(what: string, by = 1): void {
    this.counts.set(what, (this.counts.get(what) ?? 0) + by);
  }

  /** A line of the timeline. */
  say(who: string, what: string): void {
    if (this.#trace === undefined) return;
    const at = (this.#time.now() - this.#startedAt).toFixed(1).padStart(8);
    this.#trace.push(`${at}  ${who.padEnd(6)} ${what}`);
  }

  name(id: string): string {
    let name = this.#names.get(id);
    if (name === undefined) this.#names.set(id, (name = `t${this.#names.size + 1}`));
    return name;
  }

  /** Something is wrong, found where nobody can be thrown at. */
  fail(error: Error): void {
    this.#failure ??= error;
    this.say("", `✖ ${error.message}`);
  }

  get failure(): Error | undefined {
    return this.#failure;
  }

  check(holds: boolean, what: string): void {
    if (!holds) this.fail(new assert.AssertionError({ message: what }));
  }

  // ── the engine ──────────────────────────────────────────────────────────────────────────────────

  /** How many were accepted. */
  get tasks(): number {
    return this.#written.size;
  }

  /** It is in the engine, whether or not anybody was told. */
  written(id: string, input: string, parameters: string): void {
    this.#written.add(id);
    if (this.#lostAt.delete(id)) this.forgotten.delete(id);
    this.accepted.set(id, { input, parameters });
  }

  put(task: Task, reply: PutReply): void {
    this.count(`put: ${reply.kind}`);
    if (reply.kind === "queued") this.written(task.id, task.input, task.parameters);
    if (reply.kind === "done" && reply.unstored === true) this.#unstored.add(reply.id);
    // Of one that was sent again the first may be in.
    // Its first put was withdrawn.
    if (reply.kind === "full" && !this.accepted.has(task.id)) this.#ended.delete(task.id);
    if (reply.kind === "full" && !this.#again.has(task.id)) {
      this.#refused.add(task.id);
      this.check(!this.#sent.has(task.id), `${this.name(task.id)} was refused, and ran`);
    }
    const said = "id" in reply ? `${reply.kind} ${this.name(reply.id)}` : reply.kind;
    this.say("store", `put ${this.name(task.id)} ${task.input}: ${said}`);
  }

  settled({ task, outcome }: RecordView): void {
    const { id } = task;
    this.check(!this.#ended.has(id), `${this.name(id)} was settled twice`);
    this.#ended.set(id, outcome!);
    this.#endedAt.set(id, this.#time.now());
    const said = outcome!.ok ? "done" : outcome!.code;
    this.count(`task ended: ${said}`);
    this.say("store", `${this.name(id)} ${said}`);
    this.#neglected(id, outcome!);
  }

  /** Where nothing is wrong no task's time runs out while a worker idles. */
  #neglected(id: string, outcome: Outcome): void {
    const { calm, fleet, rules } = this.#plan;
    if (!calm || fleet || outcome.ok || outcome.code !== "DEADLINE_EXCEEDED") return;
    const idleMs = this.#time.now() - (this.#idleSince ?? Infinity);
    const tooLong = idleMs > rules.limits.maxWaitMs + AT_ONCE_MS;
    this.check(!tooLong, `${this.name(id)} ran out of time while a worker idled for ${idleMs.toFixed(0)} ms`);
  }

  /** A held caller was told that its time is over: then its task did not end long before. */
  gaveUp(id: string, gateway: Host): void {
    const { fleet, net, mishaps, evictAfterRead, topology } = this.#plan;
    if (topology === "cores") return this.#gaveUpOnCore(id, gateway);
    // Of one that was deleted nobody can look up the end.
    if (this.forgotten.has(id) || (fleet && evictAfterRead)) return;
    const noise = net.lost + net.replyLost + net.late > 0 || gateway.pausedMs > 0;
    if (noise || mishaps.some(({ kind }) => kind === "store-away" || kind === "clock-step")) return;
    const ago = this.#time.now() - (this.#endedAt.get(id) ?? Infinity);
    const within = fleet ? HEARD_WITHIN_MS : HEARD_AT_ONCE_MS;
    this.check(ago <= within, `${this.name(id)} ended ${ago.toFixed(0)} ms ago, and its caller got 504`);
  }

  #gaveUpOnCore(id: string, gateway: Host): void {
    const lostAt = this.#lostAt.get(id);
    // Deleted before a request that had joined it could ask for its end.
    if (this.deleting.has(id)) return;
    if ((this.forgotten.has(id) && lostAt === undefined) || gateway.pausedMs > 0) return;
    const endedAt = lostAt ?? this.#endedAt.get(id) ?? Infinity;
    const within = this.linkMs + this.troubleMs(endedAt, "away", "hangs");
    const ago = this.#time.now() - endedAt;
    const how = lostAt === undefined ? "ended" : "was lost";
    this.check(ago <= within, `${this.name(id)} ${how} ${ago.toFixed(0)} ms ago, and its caller got 504`);
  }

  // ── a core and its gateways ─────────────────────────────────────────────────────────────────────

  /** Whose owners have asked for their deletion; the answer may not come. */
  readonly deleting = new Set<string>();
  readonly #puts = new Set<string>();
  readonly #again = new Set<string>();
  /** When the core, or the way to it, was not well. */
  readonly #troubles: { readonly kind: "away" | "hangs"; readonly from: number; to: number }[] = [];
  /** Tasks that died with a core, with when. */
  readonly #lostAt = new Map<string, number>();
  readonly #putBy = new Map<string, string>();
  /** Requests that passed the rates, by tenant. */
  readonly #passed = new Map<string, Set<string>>();
  coreStarts = 0;

  /** Most that a message takes on a link that is well, the disk and a round trip included. */
  get linkMs(): number {
    const { slow, slowMs } = this.#plan.link;
    return HEARD_AT_ONCE_MS + (slow > 0 ? 6 * slowMs : 0);
  }

  /** Its gateway got no answer to the first. */
  #sentAgain(id: string): void {
    this.count("put sent again");
    this.#refused.delete(id);
    this.#again.add(id);
  }

  /** The core, or the way to it, is away, or the core hangs. Returns what ends it. */
  trouble(kind: "away" | "hangs"): () => void {
    const trouble = { kind, from: this.#time.now(), to: Infinity };
    this.#troubles.push(trouble);
    return () => void (trouble.to = this.#time.now() + RECONNECTED_MS + this.linkMs);
  }

  /** How long it was so since then. */
  troubleMs(since: number, ...kinds: readonly ("away" | "hangs")[]): number {
    const now = this.#time.now();
    let sum = 0;
    for (const { kind, from, to } of this.#troubles) {
      if (kinds.includes(kind)) sum += Math.max(0, Math.min(to, now) - Math.max(from, since));
    }
    return sum;
  }

  /** How often it was away since then. */
  losses(since: number): number {
    return this.#troubles.filter(({ kind, to }) => kind === "away" && to >= since).length;
  }

  /** A core without a journal died, with all that it knew. */
  coreDied(): void {
    for (const id of this.accepted.keys()) {
      if (this.#ended.has(id)) this.#checkEnd(id);
      else this.#lostAt.set(id, this.#time.now());
      this.forgotten.add(id);
      this.anew.add(id);
      this.#sent.delete(id);
    }
    this.count("tasks lost with their core", this.#lostAt.size);
    this.crashed(NOTHING_KEPT);
    this.accepted.clear();
    this.#refused.clear();
  }

  /** What a gateway process is told of the end of a task. */
  heard({ task: { id }, outcome }: RecordView, gateway: Host): void {
    this.say(gateway.name, `heard of ${this.name(id)}: ${outcome!.ok ? "done" : outcome!.code}`);
    if (outcome?.ok === false && outcome.message.includes("was lost when")) {
      this.count("gateway told that a task was lost");
      const gone = this.forgotten.has(id) || this.deleting.has(id) || this.#plan.evictAfterRead;
      this.check(gone, `${this.name(id)} is not lost`);
      return;
    }
    const ended = this.#ended.get(id);
    if (this.anew.has(id) || ended === undefined) return;
    const same = ended.ok === outcome!.ok && (!ended.ok || (outcome!.ok && ended.output === outcome!.output));
    this.check(same, `${this.name(id)} has another end at ${gateway.name}`);
  }

  /** What a gateway process is told of a put. */
  answeredPut({ id, tenant }: Task, placed: Placed, gateway: Host): void {
    this.#putBy.set(id, gateway.name);
    if (placed.kind === "full" || placed.kind === "refused" || placed.kind === "conflict") {
      if (this.accepted.has(id)) this.count("put refused that was in when it was sent again");
      return;
    }
    const by = this.#putBy.get(placed.id) ?? gateway.name;
    if (placed.kind === "joined" && by !== gateway.name) this.count("joined a task of another gateway");
    const passed = this.#passed.get(tenant) ?? new Set();
    this.#passed.set(tenant, passed.add(id));
  }

  /** Rates hold for all gateways together, and for as long as a core lives. */
  checkRates(): void {
    const { perUserPerMinute = Infinity } = this.#plan;
    const windows = this.coreStarts + Math.floor((this.#time.now() - this.#startedAt) / WINDOW_MS);
    for (const [tenant, { size }] of this.#passed) {
      const most = perUserPerMinute * windows;
      this.check(size <= most, `${size} requests of ${tenant} were let in, of ${most}`);
    }
  }

  verdicts(verdicts: readonly Verdict[], replies: readonly SettleReply[]): void {
    verdicts.forEach((verdict, at) => {
      if (replies[at] !== "taken") this.count(`verdict too late: ${verdict.kind}`);
    });
  }

  cancelled(id: string, reply: CancelReply, abandoned: boolean): void {
    this.count(`${abandoned ? "abandoned" : "cancel"}: ${reply}`);
    if (reply === "forgotten") this.forgotten.add(id);
    if (reply === "cancelled" && !abandoned) this.#cancelled.add(id);
    this.say("store", `${abandoned ? "abandon" : "cancel"} ${this.name(id)}: ${reply}`);
  }

  bounded({ queued, running }: EngineStats): void {
    // What runs may come back at any time; nothing else gets past a full queue.
    this.#mostRunning = Math.max(this.#mostRunning, running);
    const most = this.#plan.maxQueued + this.#mostRunning;
    this.check(queued + running <= most, `${queued} queued and ${running} running, of ${most}`);
  }

  /** Bad news counts only from the lease that holds the task. */
  fencing(engine: MemoryEngine): MemoryEngine {
    const verbs: Engine = engine;
    const claim = engine.claim.bind(engine);
    const settle = engine.settle.bind(engine);
    const holds = new Map<string, string>();
    verbs.claim = async (request) => {
      const lease = await claim(request);
      for (const { task } of lease.tasks) holds.set(task.id, lease.token);
      return lease;
    };
    verbs.settle = async (lease, verdicts) => {
      // Before: a task that goes back may be claimed again within the same act.
      const held = verdicts.map(({ id }) => holds.get(id) === lease.token);
      const replies = await settle(lease, verdicts);
      verdicts.forEach(({ id, kind }, at) => {
        if (kind === "done" || replies[at] !== "taken") return;
        this.check(held[at]!, `${this.name(id)}: ${kind} from a lease that had lost it`);
      });
      return replies;
    };
    return engine;
  }

  /** No task is overtaken for longer than its claims state. */
  overtaking(engine: MemoryEngine, host: Host, events: Events): void {
    if (this.#plan.shape === undefined) return;
    const seen = new Overtaking(TIERS);
    const verbs: Engine = engine;
    const claim = engine.claim.bind(engine);
    const put = engine.put.bind(engine);
    const cancel = engine.cancel.bind(engine);
    verbs.put = (task, sharing) => {
      seen.put(task);
      const placed = put(task, sharing);
      const note = (reply: PutReply): PutReply => {
        if (reply.kind === "queued") seen.queued(task.id);
        else seen.gone(task.id);
        if (reply.kind === "joined") seen.gone(reply.id);
        return reply;
      };
      return placed instanceof Promise ? placed.then(note) : note(placed);
    };
    verbs.cancel = async (id, tenant, abandoned) => {
      const reply = await cancel(id, tenant, abandoned);
      if (reply === "cancelled" || reply === "forgotten") seen.gone(id);
      return reply;
    };
    const settle = engine.settle.bind(engine);
    verbs.settle = (lease, verdicts) => {
      if (verdicts.some(({ kind }) => kind === "retry")) seen.returned();
      return settle(lease, verdicts);
    };
    engine.watch({ settled: ({ task }) => seen.gone(task.id) });
    events.on("task.retried", () => seen.returned());
    verbs.claim = async (request) => {
      const before = seen.count;
      const lease = await claim(request);
      if (lease.composed !== undefined) this.count("batch of similar lengths");
      for (const { id, forMs, boundMs } of seen.claimed(request, lease, host.now()))
        this.check(
          false,
          `${this.name(id)} was overtaken for ${forMs.toFixed(1)} ms, of ${boundMs.toFixed(1)}`,
        );
      if (seen.count > before) this.count("overtaken because of its length", seen.count - before);
      this.longestOvertaking = Math.max(this.longestOvertaking, seen.longest);
      return lease;
    };
  }

  /** As a share of its bound. */
  longestOvertaking = 0;

  /** The verbs of an embedded engine, noted as those of the store are. */
  watching<Watched extends Engine>(engine: Watched): Watched {
    const verbs: Engine = engine;
    const put = engine.put.bind(engine);
    const settle = engine.settle.bind(engine);
    const cancel = engine.cancel.bind(engine);
    verbs.put = (task, sharing) => {
      if (this.#puts.has(task.id)) this.#sentAgain(task.id);
      this.#puts.add(task.id);
      const placed = put(task, sharing);
      const note = (reply: PutReply): PutReply => {
        this.put(task, reply);
        return reply;
      };
      return placed instanceof Promise ? placed.then(note) : note(placed);
    };
    verbs.settle = async (lease, verdicts) => {
      const replies = await settle(lease, verdicts);
      this.verdicts(verdicts, replies);
      return replies;
    };
    verbs.cancel = async (id, tenant, abandoned = false) => {
      if (!abandoned) this.deleting.add(id);
      const reply = await cancel(id, tenant, abandoned);
      if (reply === "kept") this.deleting.delete(id);
      this.cancelled(id, reply, abandoned);
      return reply;
    };
    return engine;
  }

  /** The one process or the core crashed; what was decided and is not on disk will be decided anew. */
  crashed(disk: Pick<Disk, "has" | "undecided">): void {
    for (const id of this.#ended.keys()) {
      // Its caller has the outcome and no promise; or its gateway was told nothing, and sends it again.
      const unheard = this.#plan.topology === "cores" && !this.#putBy.has(id);
      if ((this.#unstored.has(id) || unheard) && !disk.has(id)) {
        this.#checkEnd(id);
        this.accepted.delete(id);
      } else if (!disk.undecided(id)) continue;
      this.#ended.delete(id);
      this.#endedAt.delete(id);
      this.anew.add(id);
      this.count("first end lost in a crash");
    }
  }

  /** Ids whose first end was lost in a crash. */
  readonly anew = new Set<string>();

  // ── dispatch ────────────────────────────────────────────────────────────────────────────────────

  sent(worker: string, process: string, { id, tasks }: Batch): void {
    this.count("batches");
    for (const task of tasks) {
      this.#sent.set(task.id, process);
      this.check(!this.#refused.has(task.id), `${this.name(task.id)} was refused, and runs`);
    }
    this.audit?.sent(
      process,
      tasks.map((task) => task.id),
    );
    const names = tasks.map((task) => this.name(task.id)).join(" ");
    this.say(process, `${id} to ${worker}: ${names}`);
  }

  /** The process that handed a task to a worker last. */
  lastSender(id: string): string | undefined {
    return this.#sent.get(id);
  }

  /** A batch started on a worker that another process may use now. */
  trespassed(what: string, byNobody: boolean): void {
    // A clock that is set on by less than half of aliveMs is not covered, as src/workers/fleet/registry.ts says; and while any
    // step shows, beats look old or ahead of their time, but nothing changes hands.
    const step = this.#plan.mishaps.find(({ kind }) => kind === "clock-step")?.forMs ?? 0;
    const shows = step !== 0 && (byNobody || (step > 0 && step < ALIVE_MS / 2));
    if (shows) this.count("batch started while a step of the clock shows");
    else this.check(false, what);
  }

  listen(events: Events, host?: Host): void {
    const who = host?.name ?? "store";
    events.on("task.retried", ({ id, message }) => {
      this.count(message.startsWith("its lease ran out") ? "lease ran out" : "task retried");
      if (message.startsWith("the lease of")) this.count("batch put back by a process that woke up late");
      this.say(who, `${this.name(id)} again: ${message}`);
    });
    events.on("task.dead", ({ id, message }) => {
      this.count("dead letter");
      this.say(who, `${this.name(id)} dead: ${message}`);
    });
    events.on("task.joined", () => this.count("joined"));
    events.on("task.cached", () => this.count("answered from the cache"));
    events.on("request.shed", ({ reason }) => this.count(`refused: ${reason}`));
    events.on("task.lost", ({ id, why }) => {
      const gone = this.#plan.evictAfterRead || this.forgotten.has(id);
      this.check(gone, `${this.name(id)}: ${why}`);
    });
    events.on("worker.changed", ({ worker, state, why }) => {
      if (state === "down") this.count("worker taken for down");
      this.say(who, `${worker} ${state}: ${why}`);
    });
    events.on("batch.overdue", ({ batchId }) => {
      this.#overdue = true;
      this.count("batch overdue, tried again elsewhere");
      this.say(who, `${batchId} overdue`);
    });
    events.on("batch.answered", ({ batchId, kind, call, worker }) => {
      if (call > 1) this.count("call of a bisection");
      this.say(who, `${batchId} ${kind}`);
      if (this.#busy.get(worker) !== batchId) return;
      this.#busy.delete(worker);
      this.#idleSince ??= this.#time.now();
    });
    events.on("batch.started", ({ batch, oldestWaitMs }) => this.#started(batch, oldestWaitMs));
    events.on("notice", ({ level, message }) => {
      if (level === "error") this.count("notice of an error");
      this.say(who, `${level}: ${message}`);
    });
  }

  /**
   * Where nothing is wrong nobody waits longer than it should while a worker idles. Not so with a pipeline: a batch that was
   * handed over behind another one stays with its worker.
   */
  #started({ id, worker }: BatchNote, oldestWaitMs: number): void {
    const { calm, fleet, workers, rules } = this.#plan;
    const now = this.#time.now();
    const unbound = rules.pipeline === 1;
    if (calm && !fleet && unbound && !this.#overdue && this.#idleSince !== undefined) {
      const tooLong = Math.min(now - this.#idleSince, oldestWaitMs - rules.limits.maxWaitMs);
      this.check(tooLong <= AT_ONCE_MS, `a task waited ${tooLong} ms too long while a worker was free`);
      this.count("waits checked");
    }
    this.#busy.set(worker, id);
    if (this.#busy.size >= workers) this.#idleSince = undefined;
  }

  // ── the end ─────────────────────────────────────────────────────────────────────────────────────

  close(stats: Pick<EngineStats, "queued" | "running">): void {
    for (const id of this.accepted.keys()) this.#checkEnd(id);
    this.check(stats.queued === 0 && stats.running === 0, `${stats.queued} queued, ${stats.running} running`);
  }
  #checkEnd(id: string): void {
    const { gpu, calm } = this.#plan;
    const { input, parameters } = this.accepted.get(id) ?? {};
    if (input === undefined || parameters === undefined) return;
    const outcome = this.#ended.get(id);
    if (outcome === undefined) this.check(false, `${this.name(id)} was lost`);
    else if (outcome.ok) {
      const own = answerTo(input, parameters);
      this.check(outcome.output === own, `${this.name(id)} got another's answer: ${outcome.output}`);
      this.check(!this.#cancelled.has(id), `${this.name(id)} was cancelled, and done`);
    } else if (outcome.code === "INPUT_REJECTED" && gpu.short + gpu.long === 0) {
      this.check(input.includes("poison"), `${this.name(id)} is innocent, and was rejected`);
    } else {
      this.check(!calm || outcome.code !== "INFERENCE_FAILED", `${this.name(id)} failed though all was well`);
    }
  }
}
