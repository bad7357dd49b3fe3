/**
 * One claimed batch, from the worker's door to its last verdict.
 *
 * Every task of the lease is given back to the engine exactly once by this run, or has been taken from
 * it meanwhile (its time was up, or another run was faster). What the worker says decides (`verdicts.ts`); but a batch
 * that is rejected, or whose reply is unusable, is cut in halves under the same lease until the guilty inputs stand
 * alone: nobody is blamed before it failed alone. At most 2 + 2·log2(n) calls; what is not cleared by then goes back to
 * the queue in smaller batches. One that was handed over behind it has begun by then and goes first.
 *
 * A batch that its worker answers with an error of its own is cut too where the worker answered others of late or is on trial,
 * but no further than into two halves unless one of them is answered, and while `retry.budget` allows it: when both fail it
 * is most likely the worker.
 *
 * What a client named and no worker has (`rejected` with a code) is every task's of the batch: all are answered at once.
 *
 * Inputs of whoever is suspected (`core/blame.ts`) are sent after the others, in calls of their own; those that are known to
 * end workers are not sent at all.
 *
 * What was claimed and does not ride (`seats.ts`) is none of its business, though it is of the same lease.
 *
 * Tasks of the same content are sent once; `gateway/intake.ts` says whose can be the same.
 */
import type { Batch, Reply } from "../workers/backend/backend.ts";
import type { Alarm, Clock } from "../app/clock.ts";
import type { Blame } from "../core/blame.ts";
import type { Member } from "../core/crowd.ts";
import type { RetryBudget, RetryLimits } from "../core/retry.ts";
import type { BatchNote } from "../core/task.ts";
import { callSpan, traceparent } from "../core/trace.ts";
import type { ClaimedTask, Engine } from "../engine/engine.ts";
import type { Events } from "../observe/events.ts";
import type { Bound } from "./bound.ts";
import type { Hold } from "./hold.ts";
import { lateness } from "./late.ts";
import {
  allRiders,
  halves,
  mayBeCut,
  type Part,
  part,
  partsByTenant,
  ride,
  type Rider,
  type Sorted,
  spared,
  splitLast,
  suspectOf,
} from "./riders.ts";
import { Verdicts } from "./verdicts.ts";
import type { PoolWorker as Slot } from "../workers/worker.ts";
import type { Workers } from "../workers/workers.ts";

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
  readonly budget: RetryBudget;
  readonly blame: Blame<Slot>;
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
  readonly #verdicts: Verdicts;
  readonly #tasks: readonly ClaimedTask[];
  #timeout: AbortController | undefined;
  #calls = 0;
  #anyAnswered = false;
  /** Its tasks were put back because it is overdue. */
  #requeued = false;
  readonly #traced: boolean;

  constructor(rules: RunRules, parts: RunParts, { slot, hold, lease, tasks }: Bound) {
    this.#rules = rules;
    this.#parts = parts;
    this.#slot = slot;
    this.#hold = hold;
    this.#verdicts = new Verdicts(rules, parts, { slot, hold, lease });
    this.#tasks = tasks;
    this.#traced = tasks.some(({ task }) => task.trace !== undefined);
  }

  /** Calls to the worker so far. */
  get calls(): number {
    return this.#calls;
  }

  /** As it was claimed, and from its start on as it started. */
  get batch(): BatchNote {
    return this.#verdicts.lease.batch;
  }

  /** Its worker begins with it only now, though it was claimed before: its outcomes say so. */
  startedAt(at: number): void {
    const { lease } = this.#verdicts;
    this.#verdicts.lease = { ...lease, batch: { ...lease.batch, startedAt: at } };
  }

  /** Ferry stops: the call is aborted and nothing more is said, so that the engine keeps what was accepted. */
  giveUp(): void {
    this.#verdicts.silent = true;
    this.#timeout?.abort();
  }

  /**
   * Resolves when every task has its verdict. `free` is called as soon as the worker has answered: its next batch
   * leaves before these answers are written to anybody.
   */
  async run(free: () => void): Promise<void> {
    let riders = ride(this.#tasks);
    let apart: Rider[] = [];
    let barring: Promise<void> | undefined;
    if (!this.#parts.blame.idle) {
      const sorted = this.#sorted(riders);
      ({ first: riders, apart } = sorted);
      // Not waited for here: the engine may take longer than this process may use the worker.
      if (sorted.barred.length > 0) barring = this.#verdicts.bar(sorted.barred);
      if (riders.length === 0) return barring;
      barring?.catch(() => {});
    }
    this.#hold.onStalled = (afterMs) => void this.#requeue(afterMs);
    const reply = await this.#call(riders, true);
    if (reply.kind === "answered" && apart.length === 0) free();
    else {
      // Before anything new is bound to it, what this reply says of the worker has to be noted.
      this.#hold.alone = true;
      this.#slot.passTurn(this.#parts.clock.now());
    }
    const worthIt = reply.kind !== "failed" || this.#mayBeWell;
    const parts = reply.kind === "failed" ? partsByTenant : halves;
    if (riders.length > 1 && mayBeCut(reply) && worthIt) await this.#isolate(riders.length, parts(riders));
    else await this.#verdicts.conclude(riders, reply);
    if (apart.length > 0) await this.#isolate(apart.length, [part(apart)]);
    await barring;
  }

  #sorted(riders: Rider[]): Sorted {
    const { blame, clock } = this.#parts;
    const now = clock.now();
    const barred = riders.filter((rider) => blame.barred(suspectOf(rider), now));
    const sent = barred.length === 0 ? riders : riders.filter((rider) => !barred.includes(rider));
    const apart = sent.filter((rider) => this.#suspected(rider));
    const first = sent.filter((rider) => !apart.includes(rider));
    return { first: first.length === 0 ? apart.splice(0, 1) : first, apart, barred };
  }

  /**
   * Bisects: everybody in `suspects` was part of a batch of `size` that was refused; or they are inputs of suspected tenants,
   * and were not asked about yet. Those go one by one until one is answered.
   */
  async #isolate(size: number, suspects: Part[]): Promise<void> {
    const asked = suspects.length > 1 ? 1 : 0;
    const maxCalls = this.#calls - asked + 2 + 2 * Math.ceil(Math.log2(size));
    const unusable: Rider[] = [];
    let failed = 0;
    while (suspects.length > 0) {
      await this.#turn();
      if (this.#verdicts.silent) break;
      const suspect = suspects.pop()!;
      if (suspect.riders.length > this.#slot.takes) {
        // It takes fewer than when the batch left, which may be all that was wrong.
        suspects.push(...halves(suspect.riders));
        continue;
      }
      if (suspect.riders.length > 1 && this.#suspected(suspect.riders[0]!)) {
        suspects.push(part(suspect.riders.slice(1)), part(suspect.riders.slice(0, 1)));
        continue;
      }
      const group = await this.#stillOurs(suspect.riders);
      if (group.length === 0) continue;
      if (!this.#slot.held(this.#parts.clock.now())) {
        await this.#verdicts.yield([group, ...allRiders(suspects.splice(0))].flat(), size);
        break;
      }
      if (this.#calls >= maxCalls) {
        await this.#verdicts.putBack([group, ...allRiders(suspects.splice(0))].flat(), size);
        break;
      }
      const reply = await this.#call(group);
      if (reply.kind === "answered") {
        await this.#verdicts.conclude(group, reply);
        if (suspect.first) splitLast(suspects);
      } else if (reply.kind === "rejected" && reply.code !== undefined) {
        await this.#verdicts.conclude([group, ...allRiders(suspects.splice(0))].flat(), reply);
      } else if (!mayBeCut(reply)) {
        await this.#verdicts.conclude(group, reply);
        await this.#verdicts.putBack(allRiders(suspects.splice(0)).flat(), size);
      } else if (reply.kind === "failed" && !this.#extra()) {
        await this.#verdicts.conclude([group, ...allRiders(suspects.splice(0))].flat(), reply);
      } else if (reply.kind === "failed" && !this.#anyAnswered && !this.#suspected(group[0]!)) {
        // The other half, before this one is looked at more closely. If that fails too, it is the worker.
        suspects.unshift(part(group));
        if (++failed === 2) await this.#verdicts.conclude(allRiders(suspects.splice(0)).flat(), reply);
      } else if (group.length > 1) {
        suspects.push(...halves(group));
      } else if (reply.kind !== "unusable" || this.#suspected(group[0]!)) {
        await this.#verdicts.conclude(group, reply);
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
    if (!this.#anyAnswered) return this.#verdicts.conclude(guilty, { kind: "unusable", message });
    for (const rider of guilty) this.#verdicts.find([rider], false);
    await this.#verdicts.guilty(guilty);
  }

  /** A batch that was handed over behind this one has begun by now, and goes first. */
  async #turn(): Promise<void> {
    if (this.#slot.ahead !== this.#hold) return;
    const turn = new Promise<void>((resolve) => (this.#hold.onTurn = resolve));
    // The other one may take as long as a call may. What is lost all the same, `#stillOurs` finds out.
    await this.#extend().catch(() => {});
    await turn;
  }

  #extend(): Promise<readonly string[]> {
    return this.#parts.engine.extend(this.#verdicts.lease, this.#rules.workerMs + LEASE_GRACE_MS);
  }

  async #stillOurs(group: Rider[]): Promise<Rider[]> {
    const lost = await this.#extend();
    return lost.length === 0
      ? group
      : group.filter(({ tasks }) => tasks.some(({ task }) => !lost.includes(task.id)));
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
    if (this.#requeued || this.#verdicts.silent) return;
    this.#requeued = true;
    const { engine, events, clock } = this.#parts;
    const at = clock.now();
    const message = this.#silence(afterMs);
    events.emit("batch.overdue", {
      model: this.#rules.model,
      batchId: this.#verdicts.lease.batch.id,
      worker: this.#slot.name,
      afterMs,
    });
    const verdicts = spared(this.#tasks, at, message, { overdue: true });
    // A second try is a favour: if the engine is out of reach, the first one goes on alone.
    await engine.settle(this.#verdicts.lease, verdicts).catch(() => []);
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
    const { id } = this.#verdicts.lease.batch;
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
    reply = this.#believed(reply, now);
    if (reply.kind !== "failed" || reply.blame === "worker") workers.heard(this.#slot);
    if (reply.kind !== "failed" || reply.blame !== "nobody") hold.ran(now);
    if (reply.kind === "answered") {
      this.#anyAnswered = true;
      budget.answered(now);
      this.#answered(riders, now);
      if (paceFrom === undefined) workers.alive(this.#slot);
      else workers.answered(this.#slot, riders.length, serviceMs, now);
    } else if (reply.kind === "rejected" && reply.code === undefined) {
      // With a code it says nothing of the worker, for or against.
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

  /** What another worker, or this one, answered a moment ago is there: then that it is not found is the worker's failure. */
  #believed(reply: Reply, now: number): Reply {
    if (reply.kind !== "rejected" || reply.code !== "NOT_FOUND") return reply;
    if (!this.#parts.blame.wasFound(this.#parameters, now)) return reply;
    const { message, brief: words } = reply;
    return { kind: "failed", blame: "worker", message, ...(words !== undefined && { brief: words }) };
  }

  /** What this says of the worker, and of those at which the same inputs failed. */
  #answered(riders: readonly Rider[], now: number): void {
    const { blame, workers } = this.#parts;
    const { standing } = this.#slot.circuit;
    standing.answered(riders[0]!.tasks[0]!.task.tenant, now);
    if (riders.length > 1) standing.answered(riders.at(-1)!.tasks[0]!.task.tenant, now);
    blame.found(this.#parameters, now);
    if (!blame.active(now)) return;
    for (const slot of blame.answered(riders.map(suspectOf), this.#slot, now)) {
      const why = `what failed there was answered by ${this.#slot.name}`;
      workers.failed(slot, now, why, false);
    }
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

  /** Whether it had better not ride with others. */
  #suspected(rider: Rider): boolean {
    const { blame, clock, workers } = this.#parts;
    const now = clock.now();
    if (!blame.active(now)) return false;
    const fleet = workers.slots.map(({ circuit }) => circuit.standing);
    return blame.suspected(suspectOf(rider), fleet, now);
  }

  /** It answered others of late, or this is to tell whether it does. */
  get #mayBeWell(): boolean {
    const { blame, clock } = this.#parts;
    const { probing, standing } = this.#slot.circuit;
    return probing || clock.now() - standing.answeredAt <= blame.windowMs;
  }

  /** Whether a further call may be made though a worker failed. */
  #extra(): boolean {
    const { budget, clock } = this.#parts;
    return budget.extra(clock.now());
  }

  get #parameters(): string {
    return this.#tasks[0]!.task.parameters;
  }
}
