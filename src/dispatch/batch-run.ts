/**
 * One claimed batch, from the worker's door to its last verdict.
 *
 * Every task of the lease is given back to the engine exactly once by this run, or has been taken from
 * it meanwhile (its time was up, or another run was faster). What the worker says decides:
 *
 *   answered           done
 *   rejected, unusable the batch is cut in halves under the same lease until the guilty inputs stand
 *                      alone; nobody is blamed before it failed alone. At most 2 + 2·log2(n) calls; what
 *                      is not cleared by then goes back to the queue in smaller batches.
 *   busy               back to the queue, no attempt counted; the worker is left alone for a while
 *   failed             retry with backoff, then dead letter. When one of the inputs may be the cause they
 *                      come back in smaller batches, so that the innocent part company with the guilty
 *
 * What was claimed and does not ride (`seats.ts`) is none of its business, though it is of the same lease.
 *
 * Tasks of the same content are sent once; `gateway/intake.ts` says whose can be the same.
 */
import type { Batch, Reply } from "../backend/backend.ts";
import type { Alarm, Clock } from "../clock.ts";
import type { Member } from "../core/crowd.ts";
import {
  type RetryBudget,
  type RetryLimits,
  retryAt,
  smallerBatch,
  smallerBatchAfter,
} from "../core/retry.ts";
import type { BatchNote, Task } from "../core/task.ts";
import { callSpan, traceparent } from "../core/trace.ts";
import type { ClaimedTask, Engine, Lease, SettleReply, Verdict } from "../engine/engine.ts";
import type { Events } from "../telemetry/events.ts";
import { attempts, brief, type Said } from "./brief.ts";
import type { Hold } from "./hold.ts";
import { lateness } from "./late.ts";
import type { Prober } from "./prober.ts";
import { allRiders, halves, ride, type Rider, spared, splitLast } from "./riders.ts";
import type { Slot, Workers } from "./workers.ts";

export interface RunRules {
  readonly model: string;
  readonly workerMs: number;
  readonly retry: RetryLimits;
  /** Overdue batches go back to the queue's front while this says so. */
  mayRequeue(): boolean;
}

export interface RunParts {
  readonly engine: Engine;
  readonly clock: Clock;
  readonly events: Events;
  readonly workers: Workers;
  readonly prober: Prober;
  readonly budget: RetryBudget;
  readonly random: () => number;
}

/** Beyond the worker's time: for the engine to hear the verdicts. */
export const LEASE_GRACE_MS = 2000;

export class BatchRun implements Member {
  place = -1;
  readonly #rules: RunRules;
  readonly #parts: RunParts;
  readonly #slot: Slot;
  readonly #hold: Hold;
  #lease: Lease;
  readonly #tasks: readonly ClaimedTask[];
  #timeout: AbortController | undefined;
  #givenUp = false;
  #calls = 0;
  #anyAnswered = false;
  /** Its tasks were put back because it is overdue. */
  #requeued = false;
  readonly #traced: boolean;

  /** `tasks`: those of the lease that ride; `hold`: what the slot knows of it. */
  constructor(
    rules: RunRules,
    parts: RunParts,
    { slot, hold }: { readonly slot: Slot; readonly hold: Hold },
    lease: Lease,
    tasks: readonly ClaimedTask[],
  ) {
    this.#rules = rules;
    this.#parts = parts;
    this.#slot = slot;
    this.#hold = hold;
    this.#lease = lease;
    this.#tasks = tasks;
    this.#traced = tasks.some(({ task }) => task.trace !== undefined);
  }

  /** Calls to the worker so far. */
  get calls(): number {
    return this.#calls;
  }

  /** As it was claimed, and from its start on as it started. */
  get batch(): BatchNote {
    return this.#lease.batch;
  }

  /** Its worker begins with it only now, though it was claimed before: its outcomes say so. */
  startedAt(at: number): void {
    this.#lease = { ...this.#lease, batch: { ...this.#lease.batch, startedAt: at } };
  }

  /** Ferry stops: the call is aborted and nothing more is said, so that the engine keeps what was accepted. */
  giveUp(): void {
    this.#givenUp = true;
    this.#timeout?.abort();
  }

  /**
   * Resolves when every task has its verdict. `free` is called as soon as the worker has answered: its next batch
   * leaves before these answers are written to anybody.
   */
  async run(free: () => void): Promise<void> {
    const riders = ride(this.#tasks);
    this.#hold.onStalled = (afterMs) => void this.#requeue(afterMs);
    const reply = await this.#call(riders, true);
    if (reply.kind === "answered") free();
    // Before anything new is bound to it, what this reply says of the worker has to be noted.
    else this.#slot.passTurn(this.#parts.clock.now());
    const refused = reply.kind === "rejected" || reply.kind === "unusable";
    if (refused && riders.length > 1) await this.#isolate(riders);
    else await this.#conclude(riders, reply);
  }

  /** Bisects: everybody in `suspects` was part of a batch that was refused. */
  async #isolate(riders: Rider[]): Promise<void> {
    const maxCalls = 2 + 2 * Math.ceil(Math.log2(riders.length));
    const suspects = halves(riders);
    const unusable: Rider[] = [];
    this.#hold.alone = true;
    while (suspects.length > 0) {
      await this.#turn();
      if (this.#givenUp) break;
      const suspect = suspects.pop()!;
      if (suspect.riders.length > this.#slot.takes) {
        // It takes fewer than when the batch left, which may be all that was wrong.
        suspects.push(...halves(suspect.riders));
        continue;
      }
      const group = await this.#stillOurs(suspect.riders);
      if (group.length === 0) continue;
      if (!this.#slot.held(this.#parts.clock.now())) {
        await this.#yield([group, ...allRiders(suspects.splice(0))].flat(), riders.length);
        break;
      }
      if (this.#calls >= maxCalls) {
        await this.#putBack([group, ...allRiders(suspects.splice(0))].flat(), riders.length);
        break;
      }
      const reply = await this.#call(group);
      if (reply.kind === "answered") {
        await this.#conclude(group, reply);
        if (suspect.first) splitLast(suspects);
      } else if (reply.kind !== "rejected" && reply.kind !== "unusable") {
        await this.#conclude(group, reply);
        await this.#putBack(allRiders(suspects.splice(0)).flat(), riders.length);
      } else if (group.length > 1) {
        suspects.push(...halves(group));
      } else if (reply.kind === "rejected") {
        await this.#conclude(group, reply);
      } else if (suspect.again) {
        unusable.push(...group);
      } else {
        suspects.push({ riders: group, first: false, again: true });
      }
    }
    if (unusable.length > 0) await this.#blame(unusable);
  }

  /** Alone, twice, and no usable output: its own fault if the worker could answer others just now. */
  async #blame(guilty: Rider[]): Promise<void> {
    const message = "the worker returned no usable output for this input";
    if (this.#anyAnswered)
      await this.#settle(guilty, () => ({ kind: "failed", code: "INPUT_REJECTED", message }));
    else await this.#conclude(guilty, { kind: "unusable", message });
  }

  /** A batch that was handed over behind this one has begun by now, and goes first. */
  async #turn(): Promise<void> {
    if (this.#slot.ahead !== this.#hold) return;
    await new Promise<void>((resolve) => (this.#hold.onTurn = resolve));
  }

  async #stillOurs(group: Rider[]): Promise<Rider[]> {
    const lost = await this.#parts.engine.extend(this.#lease, this.#rules.workerMs + LEASE_GRACE_MS);
    return lost.length === 0
      ? group
      : group.filter(({ tasks }) => tasks.some(({ task }) => !lost.includes(task.id)));
  }

  async #conclude(riders: Rider[], reply: Reply): Promise<void> {
    const now = this.#parts.clock.now();
    switch (reply.kind) {
      case "answered":
        // `riders` are those that were sent, in the order in which they were sent.
        return this.#settle(riders, (_, __, at) => ({ kind: "done", output: reply.outputs[at]! }));
      case "rejected":
        return this.#settle(riders, () => ({
          kind: "failed",
          code: "INPUT_REJECTED",
          message: reply.message,
        }));
      case "busy":
        this.#slot.circuit.pause(now + reply.retryAfterMs);
        return this.#settle(riders, () => ({ kind: "retry", at: now, message: brief(reply), spared: true }));
      case "unusable":
        this.#failed(brief(reply), now, false);
        return this.#retry(riders, reply, () => Infinity);
      case "failed":
        if (!this.#neverBegun(reply)) this.#failed(brief(reply), now, reply.blame === "nobody");
        if (reply.blame === "nobody") {
          return this.#settle(riders, () => ({
            kind: "retry",
            at: now,
            message: brief(reply),
            spared: true,
          }));
        }
        return this.#retry(riders, reply, (attempt) =>
          smallerBatchAfter(attempt, riders.length, this.#rules.retry.max),
        );
    }
  }

  /** It came back because of the one before it, which tells what there is to tell of the worker. */
  #neverBegun({ blame }: Reply & { kind: "failed" }): boolean {
    const { early, begun } = this.#hold;
    return blame === "nobody" && early && !begun && this.#slot.worker.queues === true;
  }

  #failed(why: string, now: number, unreachable: boolean): void {
    const { workers, prober } = this.#parts;
    if (workers.failed(this.#slot, now, why, unreachable)) prober.ejected(this.#slot, unreachable);
  }

  /** Tries again later in batches of at most `atMost(attempt)`, or gives up. */
  async #retry(riders: Rider[], why: Said, atMost: (attempt: number) => number): Promise<void> {
    const message = brief(why);
    const now = this.#parts.clock.now();
    // One roll for the batch: its tasks come back together and fill one batch again.
    const random = this.#parts.random();
    const code = "INFERENCE_FAILED";
    /** In the order of the verdicts; undefined where it is tried again. */
    const dead: (Task | undefined)[] = [];
    const replies = await this.#tell(riders, (_, { attempt, task }) => {
      const at = retryAt(attempt, this.#rules.retry, now, random);
      dead.push(at === undefined ? task : undefined);
      if (at !== undefined) return { kind: "retry", at, message, maxBatchSize: atMost(attempt) };
      // The worker's own words may tell more of the inside than a caller should see.
      return {
        kind: "dead",
        code,
        message: `${attempts(attempt)} failed; it is kept as a dead letter`,
        detail: why.message,
      };
    });
    // Only now: one that had its end already, or was another's, is no dead letter.
    dead.forEach((task, at) => {
      if (task === undefined || replies[at] !== "taken") return;
      const { id, model, trace } = task;
      this.#parts.events.emit("task.dead", { id, model, code, message, trace });
    });
  }

  /**
   * Not cleared in time: back to the queue, where the attempt counts, and never again in so large a batch. Whoever has
   * no attempt left is spared this one: nobody dies of another's refusal. It ends, because batches only get smaller.
   */
  async #putBack(riders: Rider[], batchSize: number): Promise<void> {
    if (riders.length === 0) return;
    const now = this.#parts.clock.now();
    const random = this.#parts.random();
    const message = "a batch-mate was refused";
    const maxBatchSize = smallerBatch(batchSize);
    await this.#settle(riders, (_, { attempt }) => {
      const at = retryAt(attempt, this.#rules.retry, now, random);
      if (at !== undefined) return { kind: "retry", at, message, maxBatchSize };
      return { kind: "retry", at: now, message, maxBatchSize, spared: true };
    });
  }

  /** The worker may be another process's by now, and takes no further call of ours: nobody's fault. */
  async #yield(riders: Rider[], batchSize: number): Promise<void> {
    const at = this.#parts.clock.now();
    const message = `the lease of ${this.#slot.name} ran out`;
    const maxBatchSize = smallerBatch(batchSize);
    await this.#settle(riders, () => ({ kind: "retry", at, message, spared: true, maxBatchSize }));
  }

  async #settle(riders: readonly Rider[], judge: Judge): Promise<void> {
    await this.#tell(riders, judge);
  }

  /** What the engine says to each verdict, in the order in which they were asked for. */
  async #tell(riders: readonly Rider[], judge: Judge): Promise<readonly SettleReply[]> {
    if (this.#givenUp) return [];
    const verdicts: Verdict[] = [];
    riders.forEach((rider, at) => {
      for (const claimed of rider.tasks) verdicts.push({ id: claimed.task.id, ...judge(rider, claimed, at) });
    });
    return this.#parts.engine.settle(this.#lease, verdicts);
  }

  #watch(size: number): Alarm[] {
    const { clock, workers } = this.#parts;
    const late = lateness(workers, this.#slot, size);
    if (late === undefined) return [];
    const { overdueMs, suspectMs } = late;
    const now = clock.now();
    return [
      clock.at(now + overdueMs, () => {
        if (this.#rules.mayRequeue()) this.#overdue(overdueMs);
      }),
      clock.at(now + suspectMs, () => this.#suspect(suspectMs)),
    ];
  }

  /** Whoever waits behind it is as late. */
  #overdue(afterMs: number): void {
    this.#slot.ahead?.onStalled?.(afterMs);
    void this.#requeue(afterMs);
  }

  /** It is taken for dead until it answers; what it holds is somebody else's, if there is somebody. */
  #suspect(afterMs: number): void {
    const { workers, clock } = this.#parts;
    workers.suspect(this.#slot, this.#silence(afterMs));
    if (workers.healthy(clock.now()) > 0) this.#overdue(afterMs);
  }

  #silence(afterMs: number): string {
    return `no answer from ${this.#slot.name} after ${Math.round(afterMs)} ms`;
  }

  /** First answer wins: the tasks go to the queue's front while this worker still tries. */
  async #requeue(afterMs: number): Promise<void> {
    if (this.#requeued || this.#givenUp) return;
    this.#requeued = true;
    const { engine, events, clock } = this.#parts;
    const at = clock.now();
    const message = this.#silence(afterMs);
    events.emit("batch.overdue", {
      model: this.#rules.model,
      batchId: this.#lease.batch.id,
      worker: this.#slot.name,
      afterMs,
    });
    const verdicts = spared(this.#tasks, at, message, { overdue: true });
    // A second try is a favour: if the engine is out of reach, the first one goes on alone.
    await engine.settle(this.#lease, verdicts).catch(() => []);
  }

  /** `first`: of the whole batch, which may have been handed over early. */
  async #call(riders: Rider[], first = false): Promise<Reply> {
    const { clock, events, workers, budget } = this.#parts;
    const { workerMs, model } = this.#rules;
    const hold = this.#hold;
    const sentAt = clock.now();
    const timeout = (this.#timeout = new AbortController());
    const alarms: Alarm[] = [];
    const arm = (): void => {
      if (first) alarms.push(...this.#watch(riders.length));
      alarms.push(clock.at(clock.now() + workerMs, () => timeout.abort()));
    };
    const waits = this.#slot.ahead === hold;
    if (waits) hold.onTurn = arm;
    else arm();
    const call = ++this.#calls;
    this.#slot.calls++;
    const { id } = this.#lease.batch;
    const batch = {
      id,
      tasks: riders.map(({ sent }) => sent),
      parameters: this.#parameters,
      // The one before it may take as long.
      timeoutMs: waits ? 2 * workerMs : workerMs,
      traceparent: this.#traced ? traceparent(callSpan(id, call)) : undefined,
    };
    if (first) hold.send(sentAt);
    const begun = first ? (): void => hold.begin(clock.now()) : undefined;
    let reply = await this.#run(batch, timeout.signal, begun);
    hold.onTurn = undefined;
    for (const alarm of alarms) alarm.cancel();
    const now = clock.now();
    const paceFrom = first ? hold.paceFrom(now) : sentAt;
    const startedAt = paceFrom ?? sentAt;
    const serviceMs = now - startedAt;
    if (timeout.signal.aborted && reply.kind === "failed") {
      reply = { kind: "failed", message: `no answer within ${workerMs} ms`, blame: "batch" };
    }
    if (reply.kind !== "failed" || reply.blame === "worker") workers.heard(this.#slot);
    if (reply.kind !== "failed" || reply.blame !== "nobody") hold.ran(now);
    if (reply.kind === "answered") {
      this.#anyAnswered = true;
      budget.answered();
      if (paceFrom === undefined) workers.alive(this.#slot);
      else workers.answered(this.#slot, riders.length, serviceMs, now);
    } else if (reply.kind === "rejected") {
      workers.alive(this.#slot);
    }
    events.emit("batch.answered", {
      model,
      batchId: batch.id,
      worker: this.#slot.name,
      size: riders.length,
      kind: reply.kind,
      call,
      startedAt,
      serviceMs,
    });
    return reply;
  }

  /** A backend never throws; were it to, the batch fails as on a worker that breaks down, and nothing waits for ever. */
  async #run(batch: Batch, signal: AbortSignal, begun?: () => void): Promise<Reply> {
    try {
      return await this.#slot.worker.run(batch, signal, begun);
    } catch (error) {
      const what = error instanceof Error ? (error.stack ?? error.message) : String(error);
      this.#parts.events.emit("notice", { level: "error", message: `this is a bug in Ferry: ${what}` });
      return { kind: "failed", message: "an internal error; it is logged", blame: "batch" };
    }
  }

  get #parameters(): string {
    return this.#tasks[0]!.task.parameters;
  }
}

type WithoutId<V> = V extends Verdict ? Omit<V, "id"> : never;
type Judge = (rider: Rider, claimed: ClaimedTask, at: number) => WithoutId<Verdict>;
