/**
 * The loop of one model: free slot → policy → claim → run → settle.
 *
 * Woken by an arrival, a free slot or its own alarm, it asks the policy about each queue while a worker
 * is free, and claims a batch only into that worker's slot. Until then tasks stay in the engine, where
 * they can be seen, cancelled and shed, and where the batch goes on filling.
 */
import type { Worker } from "../backend/backend.ts";
import type { Alarm } from "../clock.ts";
import { HandoverEstimate, RateEstimate } from "../core/estimate.ts";
import { Crowd } from "../core/crowd.ts";
import { decide, type Decision } from "../core/policy.ts";
import { RetryBudget, smallerBatch } from "../core/retry.ts";
import type { Horizon } from "../core/shed.ts";
import type { DispatchReason } from "../core/task.ts";
import type { ClaimedTask, Lease, QueueView } from "../engine/engine.ts";
import { BatchRun, LEASE_GRACE_MS, type RunRules } from "./batch-run.ts";
import type { DispatcherParts, ModelRules } from "./model-rules.ts";
import { Outlook } from "./outlook.ts";
import { inTurn, Overtaken } from "./overtaken.ts";
import { Prober } from "./prober.ts";
import { spared } from "./riders.ts";
import { Seats } from "./seats.ts";
import { told, whyItLeft } from "./words.ts";
import { type Slot, Workers } from "./workers.ts";

/** Queues with other parameters than the oldest ones are looked at only this far. */
const MAX_QUEUES_SEEN = 64;
const REQUEUE_BELOW_LOAD = 0.9;

/** A queue, and what is to be done with it. */
interface Choice<Kind extends Decision["kind"]> {
  readonly queue: QueueView;
  readonly decision: Decision & { readonly kind: Kind };
}

export class Dispatcher {
  rules: ModelRules;
  readonly workers: Workers;
  readonly #parts: DispatcherParts;
  readonly #arrivals = new RateEstimate();
  readonly #seats: Seats;
  readonly #handover = new HandoverEstimate();
  readonly #outlook: Outlook;
  readonly #budget: RetryBudget;
  readonly #prober: Prober;
  /** Batches that are chosen and not settled. */
  #open = 0;
  #whenNoneIsOpen: (() => void) | undefined;
  readonly #running = new Crowd<BatchRun>();
  readonly #unwatch: () => void;
  #runRules: RunRules;
  #lastStartAt = -Infinity;
  /** Queues that wait longer, of a lower tier, and were not the one. */
  readonly #overtaken = new Overtaken();
  /** Tasks that are on their way back to their queue unsent: they arrive there, and are no arrivals. */
  #returning = 0;
  #holdsOff = false;
  #alarm: Alarm | undefined;
  /** An arrival matters only from this depth on; Infinity while no worker is free. */
  #wakeDepth = 0;
  #paused = false;

  constructor(rules: ModelRules, workers: readonly Worker[], parts: DispatcherParts) {
    this.rules = rules;
    this.#parts = parts;
    this.workers = new Workers(rules.name, workers, rules.health, parts.events, parts.shared, parts.suffix);
    this.#seats = new Seats({ ...rules, maxBatchSize: rules.limits.maxBatchSize });
    const estimates = { seats: this.#seats, handover: this.#handover };
    this.#outlook = new Outlook(this.workers, estimates, rules.maxWorkerLoad ?? 1, rules.workerMs);
    this.#budget = new RetryBudget(rules.retry.budget);
    this.workers.onRecovered = () => this.wake();
    this.#prober = new Prober(parts.clock, (slot) => {
      this.workers.alive(slot);
      this.#pump();
    });
    this.#runRules = this.#runRulesOf(rules);
    this.#unwatch = parts.engine.watch({
      queued: (model, _, depth, count) => {
        if (model === rules.name) this.#arrived(depth, count);
      },
    });
    this.#pump();
  }

  /** Tasks per millisecond that arrive. */
  arrivalsPerMs(): number {
    return this.#arrivals.perMs(this.#parts.clock.now());
  }

  /** What admission has to know of the workers. */
  horizon(now: number): Horizon {
    return this.#outlook.at(now);
  }

  /** Whether a worker idles and takes one more beside those that wait. */
  hasRoom(waiting: number, now: number): boolean {
    const { slots } = this.workers;
    return (
      waiting < this.#seats.usual() &&
      slots.some((slot) => slot.free(now) && waiting < this.#seats.usual(slot))
    );
  }

  /** Other rules of the same model from now on. What runs ends by the old ones, and what was learned stays. */
  retune(rules: ModelRules): void {
    this.rules = rules;
    this.#seats.retune({ ...rules, maxBatchSize: rules.limits.maxBatchSize });
    this.workers.retune(rules.health);
    this.#budget.share = rules.retry.budget;
    this.#runRules = this.#runRulesOf(rules);
    this.#outlook.retune(rules.maxWorkerLoad ?? 1, rules.workerMs);
    this.#pump();
  }

  #runRulesOf({ name: model, workerMs, retry }: ModelRules): RunRules {
    return { model, workerMs, retry, mayRequeue: () => this.#mayRequeue() };
  }

  /** A slot was acquired: looks again whether something can start. */
  wake(): void {
    this.#outlook.changed();
    this.#pump();
  }

  /** One worker more; it gets a batch as soon as there is one, and `after`, the same worker's slot, has none. */
  join(worker: Worker, after?: Slot): Slot {
    const slot = this.workers.add(worker);
    slot.after = after;
    this.wake();
    return slot;
  }

  /** It gets no further batch; resolves when it runs nothing any more, and is none of ours then. */
  async retire(slot: Slot): Promise<void> {
    this.#outlook.changed();
    await this.workers.retire(slot, this.#parts.clock);
    this.#prober.forget(slot);
    this.#outlook.changed();
  }

  /** No further batch is started; resolves when the running ones are settled. */
  async drain(): Promise<void> {
    this.#paused = true;
    this.#prober.stop();
    this.#unwatch();
    this.#alarm?.cancel();
    if (this.#open > 0) await new Promise<void>((resolve) => (this.#whenNoneIsOpen = resolve));
  }

  /** Drains, but does not wait for workers: what they run is given up and stays in the engine. */
  async stop(): Promise<void> {
    for (const run of this.#running.all()) run.giveUp();
    await this.drain();
  }

  /** `count` 0: nothing came, but what is there may be taken now. */
  #arrived(depth: number, count: number): void {
    const back = Math.min(this.#returning, count);
    this.#returning -= back;
    if (count > back) this.#arrivals.count(this.#parts.clock.now(), count - back);
    const newQueue = (depth <= count || count === 0) && this.#wakeDepth !== Infinity;
    if (newQueue || depth >= this.#wakeDepth) this.#pump();
  }

  #pump(): void {
    if (this.#paused || this.#holdsOff) return;
    this.#alarm?.cancel();
    this.#wakeDepth = 1;
    for (;;) {
      const now = this.#parts.clock.now();
      const slot = this.workers.best(now);
      if (slot === undefined) return this.#wakeAt(this.workers.nextUsableAt(now), Infinity);
      const next = this.#choose(slot, now);
      if (next === undefined) return;
      if (next.decision.kind !== "send") return this.#wakeAt(next.decision.until, next.decision.unless);
      const { size, reason } = next.decision;
      this.#launch(slot, next.queue, size, reason, now);
    }
  }

  #wakeAt(at: number, depth: number): void {
    this.#wakeDepth = depth;
    if (at !== Infinity) this.#alarm = this.#parts.clock.at(at, () => this.#pump());
  }

  /** The queue to send from now, or the one to wait for. */
  #choose(slot: Slot, now: number): Choice<"send" | "wait"> | undefined {
    const sendable: Choice<"send">[] = [];
    let waiting: Choice<"wait"> | undefined;
    const wait = (queue: QueueView, decision: Choice<"wait">["decision"]): void => {
      if (waiting === undefined || decision.until < waiting.decision.until) waiting = { queue, decision };
    };
    let seen = 0;
    // Asked for only when something waits: most often this looks whether something does.
    let freeAt: number[] | undefined;
    let idle = 0;
    for (const queue of this.#parts.engine.queues(this.rules.name)) {
      if (++seen > MAX_QUEUES_SEEN && !this.#overtaken.due) break;
      if (freeAt === undefined) {
        freeAt = this.workers.freeAt(now);
        idle = this.workers.free(now);
      }
      const decision = this.#decide(queue, slot, freeAt, idle, now);
      if (decision.kind === "send") sendable.push({ queue, decision });
      else if (decision.kind === "wait") wait(queue, decision);
    }
    for (const choice of inTurn(sendable, this.#overtaken)) {
      if (!repeats(choice.queue) || this.#budget.extra(now)) return choice;
      wait(choice.queue, { kind: "wait", until: now + this.#budget.waitMs(), unless: 1 });
    }
    return waiting;
  }

  #decide(queue: QueueView, slot: Slot, freeAt: number[], idle: number, now: number): Decision {
    const maxBatchSize = Math.min(this.#seats.most(slot), queue.headMaxBatchSize);
    const limits = { ...this.rules.limits, maxBatchSize };
    const view = {
      queued: queue.depth,
      oldestAt: queue.oldestAt,
      earliestDeadlineAt: queue.earliestDeadlineAt,
      idle,
      freeAt,
      lastStartAt: this.#lastStartAt,
      arrivalsPerMs: this.#arrivals.perMs(now),
      service: this.workers.service,
    };
    const decision = decide(view, limits, now);
    if (decision.kind !== "send" || decision.reason !== "idle" || !this.workers.slow(slot, now))
      return decision;
    // A slow worker is worth a full batch, or one that has waited as long as it may.
    return decide(view, { ...limits, policy: "fixed" }, now);
  }

  #launch(slot: Slot, queue: QueueView, size: number, reason: DispatchReason, now: number): void {
    const { engine, newBatchId } = this.#parts;
    const { name, workerMs } = this.rules;
    const most = this.#seats.most(slot);
    const { probing } = slot.circuit;
    const max = probing ? Math.min(size, smallerBatch(most)) : size;
    const departure = {
      most: this.rules.limits.maxBatchSize,
      waitedMs: now - queue.oldestAt,
      reason,
      probing: probing && max < size,
      bound: reason === "full" ? this.#seats.boundOf(slot, max) : undefined,
    };
    const why = whyItLeft({ ...departure, size: max });
    const note = { id: newBatchId(), reason, worker: slot.name, startedAt: now, why };
    if (!repeats(queue)) this.#budget.first();
    const waiting = total(engine.waiting(name));
    this.workers.noteUsage(now);
    const expectedMs = this.workers.service.msFor(max) * slot.usualRatio + this.#handover.ms;
    const held = { ...note, size: max, expectedFreeAt: now + expectedMs };
    slot.batch = held;
    this.#lastStartAt = now;
    this.#outlook.changed();
    const claim = engine.claim({
      model: name,
      parameters: queue.parameters,
      max,
      leaseMs: workerMs + LEASE_GRACE_MS,
      batch: note,
    });
    const free = (): void => {
      if (slot.batch === held) this.#free(slot, held.startedAt);
    };
    this.#open++;
    void claim
      .then((claimed) => {
        const fitted = this.#seats.fit(claimed.tasks, slot);
        const { ride } = fitted;
        const lease = ride.length === max ? claimed : told(claimed, fitted, departure);
        // A batch that is small for the sake of a retry says nothing of those to come.
        if (!ride.some(({ attempt }) => attempt > 1)) this.#seats.learn(ride.length, waiting, most);
        this.#handover.learn(this.#parts.clock.now() - now);
        const run = this.#run(slot, lease, ride, departure.waitedMs, free);
        if (fitted.left.length > 0) void this.#giveBack(lease, fitted.left);
        return run;
      })
      .catch((error: unknown) => this.#broken(error))
      .finally(() => {
        this.#open--;
        free();
        if (this.#open === 0) this.#whenNoneIsOpen?.();
      });
  }

  /** What did not fit goes back to its place in the queue, for whichever worker is next. */
  async #giveBack(lease: Lease, left: readonly ClaimedTask[]): Promise<void> {
    this.#open++;
    this.#returning += left.length;
    // They come back one by one: the next batch is not made of the first of them.
    this.#holdsOff = true;
    const settled = this.#putBack(lease, left, "it did not fit into its batch", true);
    this.#holdsOff = false;
    this.#pump();
    await settled.catch((error: unknown) => this.#broken(error));
    // Those whose time was up did not come back.
    this.#returning = Math.max(0, this.#returning - left.length);
    if (--this.#open === 0) this.#whenNoneIsOpen?.();
  }

  #free(slot: Slot, startedAt: number): void {
    const now = this.#parts.clock.now();
    slot.busyMs += now - startedAt;
    slot.batch = undefined;
    this.#outlook.changed();
    this.workers.noteUsage(now);
    if (slot.leaving) slot.onIdle?.();
    slot.onRetired?.();
    this.#pump();
  }

  async #run(
    slot: Slot,
    lease: Lease,
    tasks: readonly ClaimedTask[],
    oldestWaitMs: number,
    free: () => void,
  ): Promise<void> {
    const size = tasks.length;
    if (size === 0) return;
    const { clock, events } = this.#parts;
    const { batch } = lease;
    const model = this.rules.name;
    const startedAt = clock.now();
    if (!slot.held(startedAt)) {
      // We slept, or the engine did, and the worker may be somebody else's by now.
      const message = `the lease of ${batch.worker} ran out before its batch could start`;
      return void (await this.#putBack(lease, tasks, message));
    }
    slot.batches++;
    slot.tasks += size;
    if (events.heard("batch.started")) {
      events.emit("batch.started", {
        model,
        batch,
        maxBatchSize: this.rules.limits.maxBatchSize,
        oldestWaitMs,
        tasks,
      });
    }
    const parts = { ...this.#parts, workers: this.workers, prober: this.#prober, budget: this.#budget };
    const run = new BatchRun(this.#runRules, parts, slot, lease, tasks);
    this.#running.add(run);
    let freeAt = 0;
    try {
      await run.run(() => {
        freeAt = clock.now();
        free();
      });
    } finally {
      // Also when the engine failed us: whoever heard that it started must hear that it is over.
      this.#running.remove(run);
      events.emit("batch.settled", {
        model,
        batchId: batch.id,
        worker: slot.name,
        size,
        reason: batch.reason,
        calls: run.calls,
        busyMs: (freeAt === 0 ? clock.now() : freeAt) - startedAt,
      });
    }
  }

  #putBack(lease: Lease, tasks: readonly ClaimedTask[], message: string, unsent = false): Promise<unknown> {
    const verdicts = spared(tasks, this.#parts.clock.now(), message, { unsent });
    return this.#parts.engine.settle(lease, verdicts);
  }

  /** The engine failed us. The lease will run out and its tasks will be tried again. */
  #broken(error: unknown): void {
    const message = `dispatch of ${this.rules.name}: ${error instanceof Error ? error.message : String(error)}`;
    this.#parts.events.emit("notice", { level: "error", message });
  }

  /** A second try costs nothing only while there is room: below 0.9 load, short queue, another worker. */
  #mayRequeue(): boolean {
    const now = this.#parts.clock.now();
    if (this.workers.healthy(now) < 2) return false;
    let seats = 0;
    for (const slot of this.workers.slots) if (slot.healthy(now)) seats += this.#seats.most(slot);
    const depth = total(this.#parts.engine.waiting(this.rules.name));
    const capacity = this.workers.capacityPerMs((slot) => this.#seats.most(slot), now);
    return this.#arrivals.perMs(now) / capacity < REQUEUE_BELOW_LOAD && depth < seats / 2;
  }
}

/** The next batch would hold only tasks that were tried before. */
function repeats({ depth, fresh, headMaxBatchSize }: QueueView): boolean {
  return fresh === 0 || headMaxBatchSize <= depth - fresh;
}

function total(depths: readonly number[]): number {
  let sum = 0;
  for (const depth of depths) sum += depth;
  return sum;
}
