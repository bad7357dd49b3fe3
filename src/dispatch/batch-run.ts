/**
 * One claimed batch, from its first call to its last verdict.
 *
 * Every task is settled exactly once by this run, or was taken from it meanwhile (its time was up, or another run was
 * faster). A batch that is rejected, or whose reply is unusable, is bisected under the same lease (`bisection.ts`); so
 * is one that fails at a worker that answered others recently or is on trial. A batch bound behind it has begun by then
 * and goes first. Inputs of a suspected tenant (`core/blame.ts`) are sent last, in separate calls; barred inputs are
 * not sent.
 *
 * A batch is late, from its turn on, with U its worker's usual time for it and D the scatter of batches:
 *
 *   overdue   max( 1.5 U, U + 4 D, U + 20 ms )   another worker may run its tasks a second time
 *   suspect   max( 2 U, U + 8 D, U + 50 ms )     its worker counts as dead until it answers
 *
 * The constants cover batches shorter than pauses of the machine. With 10 ms instead of 20 at 5 ms a batch, p99 of 8
 * workers of which one sometimes pauses for 20 to 40 ms rose from 7.7 to 8.7 ms (by hand).
 */
import type { Batch, Reply } from "../workers/backend/backend.ts";
import type { Alarm } from "../app/clock.ts";
import { type BatchShape, unmeasured } from "../core/cost.ts";
import type { Blame } from "../core/blame.ts";
import type { RateEstimate } from "../core/estimate.ts";
import { type RetryBudget, smallerBatch } from "../core/retry.ts";
import { callSpan, traceparent } from "../core/trace.ts";
import {
  type BatchMember,
  type Bisection,
  cut,
  end,
  mayBeCut,
  membersOf,
  nextStep,
  type Replied,
  type Ruling,
  sendApart,
  suspectOf,
  tenantOf,
} from "./bisection.ts";
import type { BatchCapacity } from "./capacity.ts";
import type { InFlightBatch } from "./in-flight.ts";
import type { DispatcherParts, ModelRules } from "./model-rules.ts";
import { spared, UNUSABLE, Verdicts } from "./verdicts.ts";
import type { PoolWorker } from "../workers/worker.ts";
import type { Workers } from "../workers/workers.ts";

export interface RunParts extends DispatcherParts {
  readonly workers: Workers;
  readonly capacity: BatchCapacity;
  readonly arrivals: RateEstimate;
  readonly budget: RetryBudget;
  readonly blame: Blame<PoolWorker>;
  /** Whether there is capacity to run an overdue batch a second time. */
  readonly mayRequeue: () => boolean;
  /** The worker has answered and is free for its next batch before these answers are settled. */
  readonly free: (batch: InFlightBatch) => void;
}

/** Added to the worker's time, so that the engine hears the verdicts before the lease expires. */
export const LEASE_GRACE_MS = 2000;

const OVERDUE = { factor: 1.5, deviations: 4, floorMs: 20 };
const SUSPECT = { factor: 2, deviations: 8, floorMs: 50 };

export class BatchRun {
  readonly #rules: ModelRules; // the rules at its start: a reload does not change a batch in flight
  readonly #parts: RunParts;
  readonly #batch: InFlightBatch;
  readonly #slot: PoolWorker;
  readonly #verdicts: Verdicts;
  readonly #parameters: string;
  readonly #traced: boolean;
  #timeout: AbortController | undefined;
  calls = 0; // worker calls so far
  #requeued = false; // its tasks were put back because it is overdue
  #onTurn: (() => void) | undefined;

  constructor(rules: ModelRules, parts: RunParts, batch: InFlightBatch) {
    this.#rules = rules;
    this.#parts = parts;
    this.#batch = batch;
    this.#slot = batch.slot;
    this.#verdicts = new Verdicts(rules, parts, batch);
    this.#parameters = batch.tasks[0]!.task.parameters;
    this.#traced = batch.tasks.some(({ task }) => task.trace !== undefined);
  }

  /** Ferry stops: aborts the call and reports nothing, so that the engine keeps what was accepted. */
  giveUp(): void {
    this.#verdicts.silent = true;
    this.#timeout?.abort();
  }

  turned(): void {
    const onTurn = this.#onTurn;
    this.#onTurn = undefined;
    onTurn?.();
  }

  stalled(afterMs: number): void {
    void this.#requeue(afterMs);
  }

  /** Resolves when every task has its verdict. */
  async run(): Promise<unknown> {
    const { clock, blame, free } = this.#parts;
    let members = membersOf(this.#batch.tasks);
    let apart: BatchMember[] = [];
    let barring: Promise<unknown> | undefined;
    if (!blame.idle) {
      const now = clock.now();
      const barred = members.filter((member) => blame.barred(suspectOf(member), now));
      members = members.filter((member) => !barred.includes(member));
      // Not awaited here: the engine may take longer than this process may use the worker.
      if (barred.length > 0) barring = this.#verdicts.bar(barred);
      if (members.length === 0) return barring;
      barring?.catch(() => {});
      apart = members.filter((member) => this.#suspected(member));
      members = members.filter((member) => !apart.includes(member));
      if (members.length === 0) members = apart.splice(0, 1);
    }
    const reply = await this.#call(members, true);
    if (reply.kind === "answered" && apart.length === 0) free(this.#batch);
    else {
      // Record what this reply says about the worker before a new batch is bound to it.
      this.#batch.transition("settling", clock.now());
      this.#slot.passTurn(clock.now());
    }
    let answered = reply.kind === "answered";
    if (members.length > 1 && mayBeCut(reply) && (reply.kind !== "failed" || this.#mayBeWell))
      answered = await this.#bisect(cut(members, reply, tenantOf));
    else await this.#verdicts.conclude(members, reply);
    if (apart.length > 0) await this.#bisect(sendApart(apart, answered));
    return barring;
  }

  /** Returns whether the worker answered any call of this batch. */
  async #bisect(state: Bisection<BatchMember>): Promise<boolean> {
    const { clock, budget } = this.#parts;
    await this.#turn();
    let replied: Replied<BatchMember> | undefined;
    for (;;) {
      const step = nextStep(state, replied, {
        takes: this.#slot.takes,
        suspected: (member) => this.#suspected(member),
        mayCallAgain:
          replied?.reply.kind !== "failed" || !mayBeCut(replied.reply) || budget.extra(clock.now()),
      });
      ({ state } = step);
      for (const ruling of step.rulings) await this.#settle(ruling, state.size, replied?.reply);
      if (step.call === undefined || this.#verdicts.silent) return state.answered;
      const lost = await this.#extend();
      const members = step.call.filter(({ tasks }) => tasks.some(({ task }) => !lost.includes(task.id)));
      // Another process may hold the worker by now: no further calls.
      if (!this.#slot.held(clock.now())) {
        for (const ruling of end(state, "yield").rulings) await this.#settle(ruling, state.size);
        return state.answered;
      }
      replied = members.length === 0 ? undefined : { members, reply: await this.#call(members, false) };
    }
  }

  #settle({ members, as }: Ruling<BatchMember>, size: number, reply?: Reply): Promise<unknown> {
    const verdicts = this.#verdicts;
    switch (as) {
      case "reply":
        return verdicts.conclude(members, reply!);
      case "putBack":
        return verdicts.putBack(members, size);
      case "yield": {
        const message = `the lease of ${this.#slot.name} ran out`;
        return verdicts.spare(members, this.#parts.clock.now(), message, smallerBatch(size));
      }
      case "unusable":
        return verdicts.conclude(members, { kind: "unusable", message: UNUSABLE });
      case "guilty":
        return verdicts.guilty(members);
    }
  }

  /** A batch bound behind this one has begun by now, and goes first. */
  async #turn(): Promise<void> {
    if (this.#slot.ahead !== this.#batch) return;
    const turn = new Promise<void>((resolve) => (this.#onTurn = resolve));
    // The other batch may take as long as a call may. A lost lease is detected before each call.
    await this.#extend().catch(() => {});
    await turn;
  }

  #extend(): Promise<readonly string[]> {
    return this.#parts.engine.extend(this.#batch.lease!, this.#rules.workerMs + LEASE_GRACE_MS);
  }

  #lateMs(shape: BatchShape, { factor, deviations, floorMs }: typeof OVERDUE): number {
    const { service, surprise } = this.#parts.workers;
    const fleetMs = service.msOf(shape);
    // `usualRatio`: a recent outlier must not delay the next second try.
    const usualMs = fleetMs * this.#slot.usualRatio;
    const deviationMs = Math.max(service.deviationMs, surprise.share * fleetMs * this.#slot.ratio);
    return Math.max(factor * usualMs, usualMs + deviations * deviationMs, usualMs + floorMs);
  }

  /** Measured only where the whole batch is sent in one call. */
  #shapeOf(members: readonly BatchMember[]): BatchShape {
    const { shape } = this.#batch;
    return members.length === shape.rows ? shape : unmeasured(members.length);
  }

  /** None until enough batches were seen to know when one is late. */
  #watch(shape: BatchShape): Alarm[] {
    const { clock, workers, mayRequeue } = this.#parts;
    if (!workers.service.settled) return [];
    const overdueMs = this.#lateMs(shape, OVERDUE);
    const suspectMs = this.#lateMs(shape, SUSPECT);
    const now = clock.now();
    return [
      clock.at(now + overdueMs, () => {
        if (mayRequeue()) this.#overdue(overdueMs);
      }),
      // Run a suspect's tasks elsewhere if there is another worker.
      clock.at(now + suspectMs, () => {
        workers.suspect(this.#slot, this.#silence(suspectMs));
        if (workers.healthy(clock.now()) > 0) this.#overdue(suspectMs);
      }),
    ];
  }

  /** The batch behind it is equally late. */
  #overdue(afterMs: number): void {
    this.#slot.ahead?.run?.stalled(afterMs);
    void this.#requeue(afterMs);
  }

  #silence(afterMs: number): string {
    return `no answer from ${this.#slot.name} after ${Math.round(afterMs)} ms`;
  }

  /** First answer wins: the tasks return to the front of the queue while this worker still tries. */
  async #requeue(afterMs: number): Promise<void> {
    if (this.#requeued || this.#verdicts.silent) return;
    this.#requeued = true;
    const { engine, events, clock } = this.#parts;
    const { id: batchId, lease, tasks } = this.#batch;
    events.emit("batch.overdue", { model: this.#rules.name, batchId, worker: this.#slot.name, afterMs });
    const verdicts = spared(tasks, clock.now(), this.#silence(afterMs), { overdue: true });
    // A second try is optional: if the engine is unreachable, the first goes on alone.
    await engine.settle(lease!, verdicts).catch(() => []);
  }

  /** `first`: the first call, with the whole batch, which may have been bound early. */
  async #call(members: readonly BatchMember[], first: boolean): Promise<Reply> {
    const { clock, events } = this.#parts;
    const { workerMs, name: model } = this.#rules;
    const [inFlight, slot] = [this.#batch, this.#slot];
    const sentAt = clock.now();
    const timeout = (this.#timeout = new AbortController());
    const alarms: Alarm[] = [];
    const arm = (): void => {
      if (first) alarms.push(...this.#watch(this.#shapeOf(members)));
      alarms.push(clock.at(clock.now() + workerMs, () => timeout.abort()));
    };
    const waits = slot.ahead === inFlight;
    if (waits) this.#onTurn = arm;
    else arm();
    const call = ++this.calls;
    slot.calls++;
    const { id } = inFlight;
    const batch = {
      id,
      tasks: members.map(({ sent }) => sent),
      parameters: this.#parameters,
      // The batch before it may take as long.
      timeoutMs: waits ? 2 * workerMs : workerMs,
      traceparent: this.#traced ? traceparent(callSpan(id, call)) : undefined,
    };
    if (first) inFlight.transition("sent", sentAt);
    const begun = first ? (agoMs = 0): void => inFlight.transition("begun", clock.now() - agoMs) : undefined;
    let reply = await this.#ask(batch, timeout.signal, begun);
    this.#onTurn = undefined;
    for (const alarm of alarms) alarm.cancel();
    const now = clock.now();
    const serviceFrom = first ? inFlight.serviceFrom(now) : sentAt;
    const startedAt = serviceFrom ?? sentAt;
    const serviceMs = now - startedAt;
    if (timeout.signal.aborted && reply.kind === "failed")
      reply = { kind: "failed", message: `no answer within ${workerMs} ms`, blame: "batch" };
    reply = this.#believed(reply, now);
    this.#learn(members, reply, serviceFrom === undefined ? undefined : serviceMs, now);
    const [size, kind] = [members.length, reply.kind];
    events.emit("batch.answered", {
      model,
      batchId: id,
      worker: slot.name,
      size,
      kind,
      call,
      startedAt,
      serviceMs,
    });
    return reply;
  }

  /** Backends must not throw; if one does, the batch fails as at a crashed worker. */
  async #ask(batch: Batch, signal: AbortSignal, begun?: (agoMs?: number) => void): Promise<Reply> {
    try {
      return await this.#slot.worker.run(batch, signal, begun);
    } catch (error) {
      const what = error instanceof Error ? (error.stack ?? error.message) : String(error);
      this.#parts.events.emit("notice", { level: "error", message: `this is a bug in Ferry: ${what}` });
      return { kind: "failed", message: "an internal error; it is logged", blame: "batch" };
    }
  }

  /** "Not found" is a worker failure if the same parameters were answered recently. */
  #believed(reply: Reply, now: number): Reply {
    if (reply.kind !== "rejected" || reply.code !== "NOT_FOUND") return reply;
    if (!this.#parts.blame.wasFound(this.#parameters, now)) return reply;
    const { message, brief } = reply;
    return { kind: "failed", blame: "worker", message, ...(brief !== undefined && { brief }) };
  }

  /** Updates the worker's state. `serviceMs`: undefined where the working time is unknown. */
  #learn(members: readonly BatchMember[], reply: Reply, serviceMs: number | undefined, now: number): void {
    const { workers, budget } = this.#parts;
    const slot = this.#slot;
    if (reply.kind !== "failed" || reply.blame === "worker") workers.heard(slot);
    if (reply.kind !== "failed" || reply.blame !== "nobody") this.#batch.transition("ran", now);
    // A rejection with a code says nothing about the worker's health.
    if (reply.kind === "rejected" && reply.code === undefined) workers.alive(slot);
    if (reply.kind !== "answered") return;
    budget.answered(now);
    this.#vouch(members, now);
    if (serviceMs === undefined) workers.alive(slot);
    else workers.answered(slot, this.#shapeOf(members), serviceMs, now);
  }

  /** An answer vouches for its worker, and is evidence against workers at which the same inputs failed. */
  #vouch(members: readonly BatchMember[], now: number): void {
    const { blame, workers } = this.#parts;
    const { standing } = this.#slot.circuit;
    standing.answered(tenantOf(members[0]!), now);
    if (members.length > 1) standing.answered(tenantOf(members.at(-1)!), now);
    blame.found(this.#parameters, now);
    if (!blame.active(now)) return;
    for (const slot of blame.answered(members.map(suspectOf), this.#slot, now)) {
      const why = `what failed there was answered by ${this.#slot.name}`;
      workers.failed(slot, now, why, false);
    }
  }

  #suspected(member: BatchMember): boolean {
    const { blame, clock, workers } = this.#parts;
    const now = clock.now();
    if (!blame.active(now)) return false;
    const fleet = workers.slots.map(({ circuit }) => circuit.standing);
    return blame.suspected(suspectOf(member), fleet, now);
  }

  /** The worker answered others recently, or this batch is its trial. */
  get #mayBeWell(): boolean {
    const { blame, clock } = this.#parts;
    const { probing, standing } = this.#slot.circuit;
    return probing || clock.now() - standing.answeredAt <= blame.windowMs;
  }
}
