/**
 * The loop of one model: free slot → policy → claim → run → settle.
 *
 * Woken by an arrival, a free slot or its own alarm, it asks the policy about each queue while a worker
 * is free, and claims a batch only into that worker's slot. Until then tasks stay in the engine, where they can be seen,
 * cancelled and shed, and the batch goes on filling. When no worker is free, one that runs a batch may be given its next one
 * already (`pipeline.ts`).
 */
import type { Worker } from "../workers/backend/backend.ts";
import type { Alarm } from "../app/clock.ts";
import { Blame } from "../core/blame.ts";
import { HandoverEstimate, RateEstimate } from "../core/estimate.ts";
import { Crowd } from "../core/crowd.ts";
import { RetryBudget, smallerBatch } from "../core/retry.ts";
import type { Horizon } from "../core/shed.ts";
import { ROUNDING_MS } from "../core/policy.ts";
import type { BatchNote } from "../core/task.ts";
import type { ClaimedTask, Lease } from "../engine/engine.ts";
import { type Bound, type Order, tooLate } from "./bound.ts";
import { BatchRun, LEASE_GRACE_MS, type RunParts, type RunRules } from "./batch-run.ts";
import { Chooser, repeats, suspected } from "./chooser.ts";
import { Hold } from "./hold.ts";
import type { DispatcherParts, ModelRules } from "./model-rules.ts";
import { Outlook } from "./outlook.ts";
import { Pipeline } from "./pipeline.ts";
import { spared } from "./riders.ts";
import { Seats } from "./seats.ts";
import { told, whyItLeft } from "./words.ts";
import type { PoolWorker as Slot } from "../workers/worker.ts";
import { type JoinOptions, Workers } from "../workers/workers.ts";

/** The longest pause between claims that find nothing though the engine shows tasks. */
const MAX_CLAIM_PAUSE_MS = 1000;

export class Dispatcher {
  rules: ModelRules;
  readonly workers: Workers;
  readonly #parts: DispatcherParts;
  readonly #arrivals = new RateEstimate();
  readonly #seats: Seats;
  readonly #handover = new HandoverEstimate();
  readonly #outlook: Outlook;
  readonly #budget: RetryBudget;
  /** Batches that are chosen and not settled. */
  #open = 0;
  #whenNoneIsOpen: (() => void) | undefined;
  readonly #running = new Crowd<BatchRun>();
  readonly #unwatch: () => void;
  #runRules: RunRules;
  readonly #runParts: RunParts;
  readonly #chooser: Chooser;
  readonly #pipeline: Pipeline;
  /** The worker that has just become free, while it is looked what is next. */
  #freed: { readonly slot: Slot; readonly at: number } | undefined;
  /** Tasks that are on their way back to their queue unsent: they arrive there, and are no arrivals. */
  #returning = 0;
  #holdsOff = false;
  #alarm: Alarm | undefined;
  /** An arrival matters only from this depth on; Infinity while no worker is free. */
  #wakeDepth = 0;
  /** Claims in a row that failed or came back empty though the engine showed tasks. */
  #emptyClaims = 0;
  /** No claim before this, unless tasks arrive. */
  #claimAt = -Infinity;
  #paused = false;

  constructor(rules: ModelRules, workers: readonly Worker[], parts: DispatcherParts) {
    this.rules = rules;
    this.#parts = parts;
    this.workers = new Workers(rules.name, workers, { ...parts, limits: () => this.rules.health });
    this.#seats = new Seats({ ...rules, maxBatchSize: rules.limits.maxBatchSize });
    const estimates = { seats: this.#seats, handover: this.#handover };
    this.#outlook = new Outlook(this.workers, estimates, rules.maxWorkerLoad ?? 1, rules.workerMs);
    this.#budget = new RetryBudget(rules.retry.budget);
    this.#pipeline = new Pipeline(() => this.rules.pipeline ?? "auto", this.workers);
    this.#chooser = new Chooser(() => this.rules, {
      engine: parts.engine,
      workers: this.workers,
      seats: this.#seats,
      arrivals: this.#arrivals,
      budget: this.#budget,
    });
    this.workers.onChange = () => this.wake();
    const [budget, blame] = [this.#budget, new Blame<Slot>(rules.health)];
    this.#runParts = { ...parts, workers: this.workers, budget, blame };
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

  hasRoom(waiting: number, now: number): boolean {
    return this.#outlook.hasRoom(waiting, now);
  }

  /** How many batches it may have in its hands now. */
  pipelineOf(slot: Slot): number {
    return this.#pipeline.depth(slot);
  }

  /** Other rules of the same model from now on. What runs ends by the old ones, and what was learned stays. */
  retune(rules: ModelRules): void {
    this.rules = rules;
    this.#seats.retune({ ...rules, maxBatchSize: rules.limits.maxBatchSize });
    this.#budget.share = rules.retry.budget;
    this.#runParts.blame.limits = rules.health;
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

  /** One worker more. */
  join(worker: Worker, options?: JoinOptions): Slot {
    return this.workers.join(worker, options);
  }

  /** It gets no further batch; resolves when it is gone. */
  retire(slot: Slot): Promise<void> {
    return this.workers.retire(slot);
  }

  /** No further batch is started; resolves when the running ones are settled. */
  async drain(): Promise<void> {
    this.#paused = true;
    this.workers.stop();
    this.#unwatch();
    this.#alarm?.cancel();
    if (this.#open > 0) await new Promise<void>((resolve) => (this.#whenNoneIsOpen = resolve));
  }

  /** Drains without waiting for workers: what they run is given up and stays in the engine. */
  async stop(): Promise<void> {
    for (const run of this.#running.all()) run.giveUp();
    await this.drain();
  }

  /** `count` 0: nothing came, but what is there may be taken now. */
  #arrived(depth: number, count: number): void {
    const back = Math.min(this.#returning, count);
    this.#returning -= back;
    if (count > back) {
      this.#arrivals.count(this.#parts.clock.now(), count - back);
      // Also while no worker is free: claims that find nothing may be under way.
      this.#emptyClaims = 0;
      this.#claimAt = -Infinity;
    }
    const newQueue = (depth <= count || count === 0) && this.#wakeDepth !== Infinity;
    if (!newQueue && depth < this.#wakeDepth) return;
    this.#claimAt = -Infinity;
    this.#pump();
  }

  #pump(): void {
    if (this.#paused || this.#holdsOff) return;
    this.#alarm?.cancel();
    this.#wakeDepth = 1;
    for (;;) {
      const now = this.#parts.clock.now();
      const slot = this.workers.best(now);
      if (slot === undefined) {
        if (this.#handOver(now)) continue;
        return;
      }
      const next = this.#chooser.choose(slot, now);
      if (next === undefined) return;
      if (next.decision.kind !== "send") return this.#wakeAt(next.decision.until, next.decision.unless);
      if (now < this.#claimAt) return this.#wakeAt(this.#claimAt, 1);
      const { size, reason } = next.decision;
      this.#launch({ slot, queue: next.queue, size, reason, now, early: false });
    }
  }

  /** No worker is free: binds a batch behind one that runs if it is time to, or sees to it that it will be looked again. */
  #handOver(now: number): boolean {
    const usableAt = this.workers.nextUsableAt(now);
    const slot = this.#pipeline.next(now);
    if (slot === undefined) {
      this.#wakeAt(usableAt, Infinity);
      return false;
    }
    const bindAt = this.#pipeline.bindAt(slot);
    const due = now >= bindAt - ROUNDING_MS;
    const freeAt = Math.max(now, slot.batch!.expectedFreeAt);
    const next = this.#chooser.chooseAhead(slot, now, freeAt, !due);
    if (next?.decision.kind === "send" && now < this.#claimAt) {
      this.#wakeAt(Math.min(usableAt, this.#claimAt), 1);
      return false;
    }
    if (next?.decision.kind === "send") {
      const { size, reason } = next.decision;
      this.#launch({ slot, queue: next.queue, size, reason, now, early: true });
      return true;
    }
    if (!due) this.#wakeAt(Math.min(usableAt, bindAt), this.#seats.most(slot));
    else if (next === undefined) this.#wakeAt(usableAt, 1);
    else this.#wakeAt(Math.min(usableAt, next.decision.until), next.decision.unless);
    return false;
  }

  #wakeAt(at: number, depth: number): void {
    this.#wakeDepth = depth;
    if (at !== Infinity)
      this.#alarm = this.#parts.clock.at(at, () => this.#pump(), this.#outlook.mayBeLateMs);
  }

  #launch(order: Order): void {
    const { slot, queue, size, reason, now, early } = order;
    // A queue may change under our eyes: after the claim it is what the batch has left of it.
    const { oldestAt } = queue;
    const { engine, newBatchId } = this.#parts;
    const { name, workerMs, inProcess = false } = this.rules;
    const most = this.#seats.most(slot);
    const { probing } = slot.circuit;
    const max = probing ? Math.min(size, smallerBatch(most)) : size;
    const departure = {
      most: this.rules.limits.maxBatchSize,
      waitedMs: now - oldestAt,
      reason,
      probing: probing && max < size,
      early,
      bound: reason === "full" ? this.#seats.boundOf(slot, max) : undefined,
    };
    const why = whyItLeft({ ...departure, size: max });
    const note = { id: newBatchId(), reason, worker: slot.name, startedAt: now, why };
    if (!repeats(queue)) this.#budget.first();
    const waiting = this.#waiting();
    this.workers.noteUsage(now);
    const hold = this.#bind(order, note, max);
    const claim = engine.claim({
      model: name,
      parameters: queue.parameters,
      max,
      // The one before it may take as long.
      leaseMs: (early ? 2 * workerMs : workerMs) + LEASE_GRACE_MS,
      inProcess,
      batch: note,
    });
    const free = (): void => {
      if (slot.has(hold)) this.#free(slot, hold);
    };
    this.#open++;
    void claim
      .then((claimed) => {
        if (claimed.tasks.length > 0) this.#emptyClaims = 0;
        else this.#backOff();
        const fitted = this.#seats.fit(claimed.tasks, slot);
        const { ride } = fitted;
        const lease = ride.length === max ? claimed : told(claimed, fitted, departure);
        // A batch that is small for the sake of a retry says nothing of those to come.
        if (!ride.some(({ attempt }) => attempt > 1)) this.#seats.learn(ride.length, waiting, most);
        const run = this.#run({ slot, hold, lease, tasks: ride, oldestAt }, free);
        if (fitted.left.length > 0) void this.#giveBack(lease, fitted.left);
        // Now that it is in its worker's hands, the next one may be.
        else if (this.#pipeline.depth(slot) > 1) this.#pump();
        return run;
      })
      .catch((error: unknown) => {
        this.#backOff();
        this.#broken(error);
      })
      .finally(() => {
        this.#open--;
        free();
        if (this.#open === 0) this.#whenNoneIsOpen?.();
      });
  }

  /**
   * An engine that several processes share may show tasks that another one has just taken: then its view is right after the
   * first claim. While it stays wrong, or claims fail, the next ones come after 0, 1, 2, 4 … ms.
   */
  #backOff(): void {
    const pauseMs = this.#emptyClaims === 0 ? 0 : 2 ** Math.min(this.#emptyClaims - 1, 10);
    this.#emptyClaims++;
    this.#claimAt = this.#parts.clock.now() + Math.min(MAX_CLAIM_PAUSE_MS, pauseMs);
  }

  #bind({ slot, queue, now, early }: Order, note: Omit<BatchNote, "size">, size: number): Hold {
    const expectedMs = this.workers.service.msFor(size) * slot.usualRatio;
    const how = { early, says: slot.worker.queues === true, alone: suspected(queue) };
    const hold = new Hold({ ...note, ...how, size, expectedMs }, now, this.#handover.ms);
    const freedAt = this.#freed?.slot === slot ? this.#freed.at : undefined;
    hold.onArrival = (wayMs) => {
      this.#handover.learn(wayMs);
      if (early || freedAt === undefined) return;
      this.#pipeline.learn(now - freedAt + wayMs, this.workers.service.msFor(this.#seats.usual(slot)));
    };
    slot.bind(hold);
    if (!early) this.#chooser.lastStartAt = now;
    this.#outlook.changed();
    return hold;
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

  #free(slot: Slot, hold: Hold): void {
    const now = this.#parts.clock.now();
    const ran = slot.batch === hold;
    // Whatever made it come back may meet the next one too.
    if (!ran) slot.batch!.alone ||= !hold.started;
    slot.leave(hold, now);
    this.#outlook.changed();
    this.workers.noteUsage(now);
    this.#freed = ran ? { slot, at: now } : undefined;
    this.#pump();
    this.#freed = undefined;
  }

  async #run(bound: Bound, free: () => void): Promise<void> {
    const { slot, hold, lease, tasks } = bound;
    const size = tasks.length;
    if (size === 0) return;
    const { clock, events } = this.#parts;
    const trouble = tooLate(bound, clock.now());
    if (trouble !== undefined) return void (await this.#putBack(lease, tasks, trouble));
    slot.batches++;
    slot.tasks += size;
    const run = new BatchRun(this.#runRules, this.#runParts, bound);
    let startedAt: number | undefined;
    hold.onStart = () => {
      startedAt = clock.now();
      this.#started(run, bound);
    };
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
      const { id: batchId, reason } = lease.batch;
      if (startedAt !== undefined) {
        events.emit("batch.settled", {
          model: this.rules.name,
          batchId,
          worker: slot.name,
          size,
          reason,
          calls: run.calls,
          busyMs: (freeAt === 0 ? clock.now() : freeAt) - startedAt,
        });
      }
    }
  }

  #started(run: BatchRun, { hold, tasks, oldestAt }: Bound): void {
    const { events } = this.#parts;
    if (hold.early) run.startedAt((this.#chooser.lastStartAt = hold.startedAt));
    if (!events.heard("batch.started")) return;
    events.emit("batch.started", {
      model: this.rules.name,
      batch: run.batch,
      maxBatchSize: this.rules.limits.maxBatchSize,
      oldestWaitMs: hold.startedAt - oldestAt,
      tasks,
    });
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

  #mayRequeue(): boolean {
    const now = this.#parts.clock.now();
    return this.#outlook.hasSpare(this.#waiting(), this.#arrivals.perMs(now), now);
  }

  #waiting(): number {
    let sum = 0;
    for (const depth of this.#parts.engine.waiting(this.rules.name)) sum += depth;
    return sum;
  }
}
