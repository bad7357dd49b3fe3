/**
 * The loop of one model: free worker → policy → claim → run → settle. Woken as `WakeReason` lists, it asks the policy
 * about each queue while a worker is free and claims a batch for that worker only. Until then tasks stay in the engine,
 * where they can be seen, cancelled and shed, and the batch keeps filling. With no free worker, a busy one may get its
 * next batch early (`pipeline.ts`).
 */
import type { Worker } from "../workers/backend/backend.ts";
import type { Alarm } from "../app/clock.ts";
import { Blame } from "../core/blame.ts";
import { RateEstimate } from "../core/estimate.ts";
import { RetryBudget, smallerBatch } from "../core/retry.ts";
import type { Horizon } from "../core/shed.ts";
import { ROUNDING_MS } from "../core/policy.ts";
import type { ClaimedTask, QueueView } from "../engine/engine.ts";
import { BatchRun, LEASE_GRACE_MS, type RunParts } from "./batch-run.ts";
import { BatchCapacity, type Departure, explained, whyItLeft } from "./capacity.ts";
import { type Choice, Chooser, repeats, suspected } from "./chooser.ts";
import { Forecaster } from "./forecaster.ts";
import { type BatchOwner, InFlightBatch } from "./in-flight.ts";
import { LengthGrouping } from "./lengths.ts";
import type { DispatcherParts, ModelRules } from "./model-rules.ts";
import { Pipeline } from "./pipeline.ts";
import type { PoolWorker } from "../workers/worker.ts";
import { spared } from "./verdicts.ts";
import { type JoinOptions, Workers } from "../workers/workers.ts";

const PLENTY = 4; // batches that wait: enough to compose one from
const MAX_CLAIM_PAUSE_MS = 1000; // longest pause between claims that find nothing though the engine shows tasks

/**
 * Why the dispatcher checks whether a batch can leave; all go through `wake`.
 *   capacity   a worker joined, recovered, was leased or readmitted, or the rules changed: `#listen`, external calls
 *   arrival    tasks entered a queue of the model: `#listen`
 *   alarm      the time set by the last check
 *   claimed    a batch is with its worker, so another may be bound behind it; or what did not fit is back in its queue
 *   freed      a worker finished a batch
 */
export type WakeReason = "capacity" | "arrival" | "alarm" | "claimed" | "freed";

type Send = Choice<"send">;

export class Dispatcher implements BatchOwner {
  readonly workers: Workers;
  readonly lengths: LengthGrouping;
  readonly #rules: () => ModelRules;
  readonly #parts: DispatcherParts;
  readonly #runParts: RunParts;
  readonly #arrivals = new RateEstimate();
  readonly #capacity: BatchCapacity;
  readonly #forecaster: Forecaster;
  readonly #budget: RetryBudget;
  readonly #chooser: Chooser;
  readonly #pipeline: Pipeline;
  readonly #unwatch: () => void;
  readonly #open = new Map<InFlightBatch, Promise<void>>(); // bound and not settled
  /** The worker that was just freed, while its next batch is chosen. */
  #freed: { readonly slot: PoolWorker; readonly at: number } | undefined;
  #returning = 0; // tasks returning to their queue unsent: not arrivals
  #holdsOff = false; // tasks are returning one by one: do not send a batch of the first of them
  #alarm: Alarm | undefined;
  #wakeDepth = 0; // arrivals below this depth are ignored; Infinity while no worker is free
  #emptyClaims = 0; // claims in a row that failed or were empty though the engine showed tasks
  #claimAt = -Infinity; // no claim before this, unless tasks arrive
  #paused = false;

  /** `rules` returns the same object until a reload; call `wake` after the switch. */
  constructor(rules: () => ModelRules, workers: readonly Worker[], parts: DispatcherParts) {
    this.#rules = rules;
    this.#parts = parts;
    this.workers = new Workers(rules().name, workers, { ...parts, limits: () => rules().health });
    this.#capacity = new BatchCapacity(rules);
    this.lengths = new LengthGrouping(rules, this.workers.service);
    this.#forecaster = new Forecaster(rules, this.workers, this.#capacity, this.lengths);
    this.#budget = new RetryBudget(() => rules().retry.budget);
    this.#pipeline = new Pipeline(rules, this.workers);
    this.#runParts = {
      ...parts,
      workers: this.workers,
      capacity: this.#capacity,
      arrivals: this.#arrivals,
      budget: this.#budget,
      blame: new Blame<PoolWorker>(() => rules().health),
      mayRequeue: () => this.#mayRequeue(),
      free: (batch) => this.#free(batch),
    };
    this.#chooser = new Chooser(rules, this.#runParts);
    this.#unwatch = this.#listen();
    this.wake("capacity");
  }

  get rules(): ModelRules {
    return this.#rules();
  }

  arrivalsPerMs(): number {
    return this.#arrivals.perMs(this.#parts.clock.now());
  }

  /** For admission. */
  horizon(now: number): Horizon {
    return this.#forecaster.at(now);
  }

  hasRoom(waiting: number, now: number): boolean {
    return this.#forecaster.hasRoom(waiting, now);
  }

  pipelineOf(slot: PoolWorker): number {
    return this.#pipeline.depth(slot);
  }

  join(worker: Worker, options?: JoinOptions): PoolWorker {
    return this.workers.join(worker, options);
  }

  /** It gets no further batch; resolves when it is gone. */
  retire(slot: PoolWorker): Promise<void> {
    return this.workers.retire(slot);
  }

  /** Starts no further batch; resolves when the running ones are settled. */
  async drain(): Promise<void> {
    this.#paused = true;
    this.workers.stop();
    this.#unwatch();
    this.#alarm?.cancel();
    await Promise.all(this.#open.values());
  }

  /** Drains without waiting for workers: running batches are abandoned and stay in the engine. */
  async stop(): Promise<void> {
    for (const { run } of this.#open.keys()) run?.giveUp();
    await this.drain();
  }

  wake(reason: WakeReason = "capacity"): void {
    if (reason === "capacity" || reason === "freed") this.#forecaster.changed();
    if (this.#paused || this.#holdsOff) return;
    this.#alarm?.cancel();
    this.#wakeDepth = 1;
    while (this.#sendNext(this.#parts.clock.now()));
  }

  #listen(): () => void {
    const { name } = this.rules;
    this.workers.onChange = () => this.wake("capacity");
    return this.#parts.engine.watch({
      queued: (model, _, depth, count) => {
        if (model === name && this.#arrived(depth, count)) this.wake("arrival");
      },
    });
  }

  /** Whether to check. `count` 0: nothing arrived, but what is queued may be taken now. */
  #arrived(depth: number, count: number): boolean {
    const back = Math.min(this.#returning, count);
    this.#returning -= back;
    if (count > back) {
      this.#arrivals.count(this.#parts.clock.now(), count - back);
      // Also while no worker is free: empty claims may be under way.
      this.#emptyClaims = 0;
      this.#claimAt = -Infinity;
    }
    const newQueue = (depth <= count || count === 0) && this.#wakeDepth !== Infinity;
    if (!newQueue && depth < this.#wakeDepth) return false;
    this.#claimAt = -Infinity;
    return true;
  }

  /** Sends one batch if one can leave and returns true; otherwise sets when to check again. */
  #sendNext(now: number): boolean {
    const slot = this.workers.best(now);
    if (slot === undefined) return this.#sendEarly(now);
    const next = this.#chooser.choose({ slot, now, at: now, early: false, fullOnly: false });
    if (next === undefined) return false;
    if (!isSend(next)) return this.#wakeFor(next, Infinity);
    if (now < this.#claimAt) return this.#wakeAt(this.#claimAt, 1);
    this.#launch(slot, next, now, false);
    return true;
  }

  /** No worker is free: binds a batch behind a running one if it is time to. */
  #sendEarly(now: number): boolean {
    const usableAt = this.workers.nextUsableAt(now);
    const slot = this.#pipeline.next(now);
    if (slot === undefined) return this.#wakeAt(usableAt, Infinity);
    const bindAt = this.#pipeline.bindAt(slot);
    const due = now >= bindAt - ROUNDING_MS;
    // Until then more similar ones may come, unless there are plenty.
    const plenty = PLENTY * this.#capacity.most(slot);
    if (!due && this.lengths.active && this.#waiting() < plenty)
      return this.#wakeAt(Math.min(usableAt, bindAt), plenty);
    const at = Math.max(now, slot.batch!.expectedFreeAt);
    const next = this.#chooser.choose({ slot, now, at, early: true, fullOnly: !due });
    if (next !== undefined && isSend(next)) {
      if (now < this.#claimAt) return this.#wakeAt(Math.min(usableAt, this.#claimAt), 1);
      this.#launch(slot, next, now, true);
      return true;
    }
    if (!due) return this.#wakeAt(Math.min(usableAt, bindAt), this.#capacity.most(slot));
    if (next === undefined) return this.#wakeAt(usableAt, 1);
    return this.#wakeFor(next, usableAt);
  }

  #wakeFor({ decision: { until, unless } }: Choice<"wait">, atLatest: number): false {
    return this.#wakeAt(Math.min(atLatest, until), unless);
  }

  #wakeAt(at: number, depth: number): false {
    this.#wakeDepth = depth;
    if (at !== Infinity)
      this.#alarm = this.#parts.clock.at(at, () => this.wake("alarm"), this.#forecaster.mayBeLateMs);
    return false;
  }

  #launch(slot: PoolWorker, choice: Send, now: number, early: boolean): void {
    const { queue, decision } = choice;
    const { size, reason } = decision;
    const most = this.#capacity.most(slot);
    const max = slot.circuit.probing ? Math.min(size, smallerBatch(most)) : size;
    if (!repeats(queue)) this.#budget.first();
    this.workers.noteUsage(now);
    const facts = {
      id: this.#parts.newBatchId(),
      slot,
      size: max,
      early,
      exclusive: suspected(queue),
      oldestAt: queue.oldestAt,
      freedAt: this.#freed?.slot === slot ? this.#freed.at : undefined,
      expectedMs: this.workers.service.msFor(max) * slot.usualRatio,
      handoverMs: this.#forecaster.handoverMs,
    };
    const departure = {
      most: this.rules.limits.maxBatchSize,
      waitedMs: now - queue.oldestAt,
      reason,
      probing: max < size,
      early,
      bound: reason === "full" ? this.#capacity.boundOf(slot, max) : undefined,
    };
    const batch = new InFlightBatch(facts, this, now);
    const running = this.#claimAndRun(batch, queue, departure, most);
    this.#open.set(
      batch,
      running.finally(() => this.#open.delete(batch)),
    );
  }

  /** Never rejects: if the engine fails, the lease expires and its tasks are retried. */
  async #claimAndRun(
    batch: InFlightBatch,
    queue: QueueView,
    departure: Omit<Departure, "size">,
    most: number,
  ): Promise<void> {
    const { id, slot, size: max, startedAt, early } = batch;
    const { name: model, workerMs, inProcess = false } = this.rules;
    const { reason } = departure;
    const why = whyItLeft({ ...departure, size: max });
    const waiting = this.#waiting();
    const { parameters, depth } = queue;
    const composition =
      suspected(queue) || departure.probing
        ? undefined
        : this.lengths.composition(depth, most, this.horizon(startedAt).perMs);
    slot.bind(batch);
    if (!early) this.#chooser.lastStartAt = startedAt;
    this.#forecaster.changed();
    let returned: Promise<void> | undefined;
    try {
      const claimed = await this.#parts.engine.claim({
        model,
        parameters,
        max,
        // The batch before it may take as long.
        leaseMs: (early ? 2 * workerMs : workerMs) + LEASE_GRACE_MS,
        inProcess,
        composition,
        batch: { id, reason, worker: slot.name, startedAt, why },
      });
      if (claimed.tasks.length > 0) this.#emptyClaims = 0;
      else this.#backOff();
      const fitted = this.#capacity.fit(claimed.tasks, slot);
      batch.tasks = fitted.taken;
      batch.lease = batch.tasks.length === max ? claimed : explained(claimed, fitted, departure, composition);
      const shape = this.lengths.shapeOf(batch.tasks, claimed.composed);
      if (shape.total > 0) {
        batch.made(shape, this.workers.service.msOf(shape) * slot.usualRatio);
        this.#forecaster.changed();
      }
      // A batch kept small for a retry says nothing about later ones.
      if (!batch.tasks.some(({ attempt }) => attempt > 1))
        this.#capacity.learn(batch.tasks.length, waiting, most);
      const run = this.#run(batch);
      if (fitted.left.length > 0) returned = this.#giveBack(batch, fitted.left);
      else if (this.#pipeline.depth(slot) > 1) this.wake("claimed");
      await run;
    } catch (error) {
      this.#backOff();
      this.#broken(error);
    } finally {
      this.#free(batch);
    }
    await returned;
  }

  /**
   * A shared engine may show tasks that another process just took; its view is right after the first claim. While it
   * stays wrong, or claims fail, the next ones come after 0, 1, 2, 4 … ms.
   */
  #backOff(): void {
    const pauseMs = this.#emptyClaims === 0 ? 0 : 2 ** Math.min(this.#emptyClaims - 1, 10);
    this.#emptyClaims++;
    this.#claimAt = this.#parts.clock.now() + Math.min(MAX_CLAIM_PAUSE_MS, pauseMs);
  }

  async #run(batch: InFlightBatch): Promise<void> {
    const { slot, lease, tasks } = batch;
    const size = tasks.length;
    if (size === 0) return;
    const { clock, events } = this.#parts;
    const trouble = tooLate(batch, clock.now());
    if (trouble !== undefined) return this.#putBack(batch, tasks, trouble);
    slot.batches++;
    slot.tasks += size;
    const run = (batch.run = new BatchRun(this.rules, this.#runParts, batch));
    try {
      await run.run();
    } finally {
      // Also when the engine failed: observers that saw the start must see the end.
      if (batch.announcedAt !== undefined) {
        const { id: batchId, reason } = lease!.batch;
        const busyMs = (batch.overAt ?? clock.now()) - batch.announcedAt;
        const { name: model } = this.rules;
        const { calls } = run;
        const measured =
          batch.shape.total === 0
            ? {}
            : { shape: this.lengths.padded(batch.shape), savedMs: this.lengths.savedMs(batch.shape) };
        const fields = { model, batchId, worker: slot.name, size, reason, calls, busyMs };
        events.emit("batch.settled", { ...fields, ...measured });
      }
    }
  }

  /** Returns what did not fit to its place in the queue, for any worker. */
  async #giveBack(batch: InFlightBatch, left: readonly ClaimedTask[]): Promise<void> {
    this.#returning += left.length;
    this.#holdsOff = true;
    const settled = this.#putBack(batch, left, "it did not fit into its batch", { unsent: true });
    this.#holdsOff = false;
    this.wake("claimed");
    await settled.catch((error: unknown) => this.#broken(error));
    // Tasks that expired did not come back.
    this.#returning = Math.max(0, this.#returning - left.length);
  }

  async #putBack(
    batch: InFlightBatch,
    tasks: readonly ClaimedTask[],
    message: string,
    how = {},
  ): Promise<void> {
    const verdicts = spared(tasks, this.#parts.clock.now(), message, how);
    await this.#parts.engine.settle(batch.lease!, verdicts);
  }

  #free(batch: InFlightBatch): void {
    if (batch.state === "over") return;
    const now = this.#parts.clock.now();
    const { slot } = batch;
    const ran = slot.batch === batch;
    // The cause of its return may hit the next one too.
    if (!ran) slot.batch!.exclusive ||= !batch.started;
    slot.leave(batch, now);
    batch.transition("over", now);
    this.workers.noteUsage(now);
    this.#freed = ran ? { slot, at: now } : undefined;
    this.wake("freed");
    this.#freed = undefined;
  }

  reached({ slot, early, freedAt }: InFlightBatch, waitedMs: number, now: number): void {
    this.#forecaster.learnHandover(waitedMs);
    if (early || freedAt === undefined) return;
    this.#pipeline.learn(now - freedAt, this.workers.service.msFor(this.#capacity.usual(slot)));
  }

  started({ early, startedAt, lease, tasks, oldestAt }: InFlightBatch): void {
    const { events } = this.#parts;
    if (early) this.#chooser.lastStartAt = startedAt;
    if (!events.heard("batch.started")) return;
    events.emit("batch.started", {
      model: this.rules.name,
      batch: lease!.batch,
      maxBatchSize: this.rules.limits.maxBatchSize,
      oldestWaitMs: startedAt - oldestAt,
      tasks,
    });
  }

  #broken(error: unknown): void {
    const message = `dispatch of ${this.rules.name}: ${error instanceof Error ? error.message : String(error)}`;
    this.#parts.events.emit("notice", { level: "error", message });
  }

  #mayRequeue(): boolean {
    const now = this.#parts.clock.now();
    return this.#forecaster.hasSpare(this.#waiting(), this.#arrivals.perMs(now), now);
  }

  #waiting(): number {
    let sum = 0;
    for (const depth of this.#parts.engine.waiting(this.rules.name)) sum += depth;
    return sum;
  }
}

function isSend(choice: Send | Choice<"wait">): choice is Send {
  return choice.decision.kind === "send";
}

/** Why a claimed batch cannot go to its worker any more; undefined if it can. */
function tooLate({ slot, early }: InFlightBatch, now: number): string | undefined {
  // This process or the engine stalled, and another process may hold the worker by now.
  if (!slot.held(now)) return `the lease of ${slot.name} ran out before its batch could start`;
  const well = slot.well && !slot.silent && now >= slot.circuit.usableAt;
  return early && !well ? `${slot.name} broke down before its next batch was there` : undefined;
}
