/**
 * Verdicts on a batch's tasks, by the worker's reply.
 *
 *   answered           done
 *   rejected           failed: for an input sent alone; with a code, for all at once
 *   busy               back to the queue, no attempt counted; pauses the worker, or only these tasks
 *   unusable, failed   retry with backoff, then dead letter; in smaller batches if an input may be the cause.
 *                      `core/blame.ts` decides whether to retry and whether it counts against the worker
 */
import type { Reply } from "../workers/backend/backend.ts";
import type { Finding } from "../core/blame.ts";
import type { ErrorCode } from "../core/errors.ts";
import { retryAt, smallerBatch, smallerBatchAfter } from "../core/retry.ts";
import type { Task } from "../core/task.ts";
import type { ClaimedTask, SettleReply, Verdict } from "../engine/engine.ts";
import type { RunParts } from "./batch-run.ts";
import { type BatchMember, suspectOf } from "./bisection.ts";
import type { InFlightBatch } from "./in-flight.ts";
import type { ModelRules } from "./model-rules.ts";

type WithoutId<V> = V extends Verdict ? Omit<V, "id"> : never;
type Judge = (claimed: ClaimedTask, at: number) => WithoutId<Verdict>;
type Members = readonly BatchMember[];
/** `message` may quote the worker and so an input: for dead letter and caller. `brief` may be logged. */
type Failure = Pick<Reply & { kind: "failed" }, "message" | "brief">;

export const UNUSABLE = "the worker returned no usable output for this input";
const DOUBT_PAUSE = 0.5; // in units of `ejectMs`

interface Again {
  readonly finding: Finding;
  readonly atMost?: (attempt: number) => number; // bound on the batch size of the retry
  readonly bars?: boolean; // if given up, reject the same input for a while
}

export class Verdicts {
  readonly #rules: ModelRules;
  readonly #parts: RunParts;
  readonly #batch: InFlightBatch;
  silent = false; // Ferry stops: nothing more is settled, and the engine keeps what was accepted

  constructor(rules: ModelRules, parts: RunParts, batch: InFlightBatch) {
    this.#rules = rules;
    this.#parts = parts;
    this.#batch = batch;
  }

  /** `members`: in the order in which they were sent. */
  conclude(members: Members, reply: Reply): Promise<unknown> {
    const now = this.#parts.clock.now();
    switch (reply.kind) {
      case "answered":
        return this.#settle(members, (_, at) => ({ kind: "done", output: reply.outputs[at]! }));
      case "rejected":
        return this.#fail(members, reply.code ?? "INPUT_REJECTED", reply.message);
      case "busy":
        return this.#busy(members, reply, now);
      case "unusable": {
        const finding = this.#blame(members, reply, false);
        if (finding.over) return this.#fail(members, "INPUT_REJECTED", UNUSABLE);
        return this.#retry(members, reply, { finding, atMost: () => (isCertain(finding) ? Infinity : 1) });
      }
      case "failed":
        if (reply.blame !== "nobody") return this.#failed(members, reply, reply.blame === "batch");
        // A batch the worker never began came back because of the one before it, which carries the blame.
        if (!this.#batch.neverBegun) this.#hold(briefly(reply), true);
        return this.spare(members, now, briefly(reply));
    }
  }

  /** If only what the client named is not ready, only its tasks wait. */
  #busy(members: Members, reply: Reply & { kind: "busy" }, now: number): Promise<unknown> {
    const { blame, workers } = this.#parts;
    const until = now + reply.retryAfterMs;
    const named = reply.named === true && !blame.wasFound(members[0]!.tasks[0]!.task.parameters, now);
    if (named) workers.retriesUntil = Math.max(workers.retriesUntil, until);
    else this.#batch.slot.circuit.pause(until);
    return this.spare(members, named ? until : now, briefly(reply));
  }

  #failed(members: Members, reply: Failure, died: boolean): Promise<unknown> {
    const finding = this.#blame(members, reply, died);
    const size = members.length;
    // Alone, at a worker that answers others: retry it alone, too.
    const stays = size === 1 && !isCertain(finding);
    return this.#retry(members, reply, {
      finding,
      atMost: (attempt) => (stays ? 1 : smallerBatchAfter(attempt, size, this.#rules.retry.max)),
      bars: !finding.over && died && this.#alone(members),
    });
  }

  /** Whether nothing but this input can be the cause. */
  #alone(members: Members): boolean {
    return members.length === 1 && !this.#batch.overlapped;
  }

  /** In doubt it is retried when more is known: four tries outlast an ejected worker's pause. */
  #pauseMs(finding: Finding): number {
    if (finding.counts === "no" || isCertain(finding)) return 0;
    return Math.min(DOUBT_PAUSE * this.#rules.health.ejectMs, this.#rules.retry.maxMs);
  }

  /** Alone, twice, without usable output though the worker answered others: the input's fault. */
  guilty(members: Members): Promise<unknown> {
    for (const member of members) this.#find([member], false);
    return this.#fail(members, "INPUT_REJECTED", UNUSABLE);
  }

  /** Rejects inputs that just killed workers; the one that was tried is kept as a dead letter. */
  bar(members: Members): Promise<unknown> {
    const message = "it ended workers a moment ago; it is not tried again so soon";
    return this.#fail(members, "INFERENCE_FAILED", message);
  }

  #find(members: Members, died: boolean): Finding {
    const { blame, clock, workers } = this.#parts;
    const { slot } = this.#batch;
    const { standing } = slot.circuit;
    const fleet = workers.slots.map(({ circuit }) => circuit.standing);
    // If a worker dies with two batches, either may be the cause.
    const alone = died ? this.#alone(members) : members.length === 1;
    const failure = { suspects: members.map(suspectOf), worker: slot, standing, fleet, alone, died };
    return blame.failed(failure, clock.now());
  }

  /** As `#find`, and counts it against the worker if it may be the worker's fault. */
  #blame(members: Members, why: Failure, died: boolean): Finding {
    const finding = this.#find(members, died);
    this.#hold(briefly(why), false, finding);
    return finding;
  }

  #hold(why: string, unreachable: boolean, finding?: Finding): void {
    const { workers, clock } = this.#parts;
    const { slot } = this.#batch;
    if (finding?.counts === "no") {
      slot.failures++;
      return workers.heard(slot);
    }
    const held = finding && { doubt: finding.counts === "doubt", repeated: finding.repeated };
    workers.failed(slot, clock.now(), why, unreachable, held);
  }

  async #retry(members: Members, why: Failure, { finding, atMost, bars }: Again): Promise<void> {
    const over = finding.over ? "workers fail with this input, and answer others" : undefined;
    const message = over === undefined ? briefly(why) : `${briefly(why)}: ${over}`;
    const now = this.#parts.clock.now();
    const pauseMs = this.#pauseMs(finding);
    // One random number per batch: its tasks come back together and fill one batch again.
    const random = this.#parts.random();
    const code = "INFERENCE_FAILED";
    const dead: (Task | undefined)[] = []; // in the order of the verdicts; undefined where it is retried
    const replies = await this.#settle(members, ({ attempt, task }) => {
      const at = over === undefined ? this.#retryAt(attempt, now, random) : undefined;
      dead.push(at === undefined ? task : undefined);
      if (at !== undefined) {
        // An input that may be innocent gets a second try at once.
        const soonest = attempt === 1 ? now : now + pauseMs;
        const maxBatchSize = atMost?.(attempt) ?? Infinity;
        return { kind: "retry", at: Math.max(at, soonest), message, maxBatchSize };
      }
      if (bars === true) this.#parts.blame.bar(suspectOf(members[0]!), now);
      const made = attempt === 1 ? "the only attempt failed" : `all ${attempt} attempts failed`;
      const reason = `${over ?? made}; it is kept as a dead letter`;
      // The worker's message may reveal internals that a caller should not see.
      return { kind: "dead", code, message: reason, detail: why.message };
    });
    // Only what the engine took: a task that ended already, or is held by another lease, is no dead letter.
    dead.forEach((task, at) => {
      if (task === undefined || replies[at] !== "taken") return;
      const { id, model, trace } = task;
      this.#parts.events.emit("task.dead", { id, model, code, message, trace });
    });
  }

  /**
   * Not cleared in time: back to the queue with the attempt counted, and never again in so large a batch. A task
   * without an attempt left is spared this one: none dies of another's refusal. It terminates because batches only get
   * smaller.
   */
  putBack(members: Members, batchSize: number): Promise<unknown> {
    const now = this.#parts.clock.now();
    const random = this.#parts.random();
    const message = "a batch-mate was refused";
    const maxBatchSize = smallerBatch(batchSize);
    return this.#settle(members, ({ attempt }) => {
      const at = this.#retryAt(attempt, now, random);
      return {
        kind: "retry",
        at: at ?? now,
        message,
        maxBatchSize,
        ...(at === undefined && { spared: true }),
      };
    });
  }

  #retryAt(attempt: number, now: number, random: number): number | undefined {
    const { workers } = this.#parts;
    const at = retryAt(attempt, this.#rules.retry, now, random);
    workers.retriesUntil = Math.max(workers.retriesUntil, at ?? 0);
    return at;
  }

  spare(members: Members, at: number, message: string, maxBatchSize = Infinity): Promise<unknown> {
    return this.#settle(members, () => ({ kind: "retry", at, message, spared: true, maxBatchSize }));
  }

  #fail(members: Members, code: ErrorCode, message: string): Promise<unknown> {
    return this.#settle(members, () => ({ kind: "failed", code, message }));
  }

  /** The engine's replies, in verdict order. */
  async #settle(members: Members, judge: Judge): Promise<readonly SettleReply[]> {
    if (this.silent) return [];
    const verdicts: Verdict[] = [];
    members.forEach(({ tasks }, at) => {
      for (const claimed of tasks) verdicts.push({ id: claimed.task.id, ...judge(claimed, at) });
    });
    return this.#parts.engine.settle(this.#batch.lease!, verdicts);
  }
}

export function spared(
  tasks: readonly ClaimedTask[],
  at: number,
  message: string,
  how: { readonly unsent?: boolean; readonly overdue?: boolean },
): Verdict[] {
  return tasks.map(({ task }) => ({ id: task.id, kind: "retry", at, message, spared: true, ...how }));
}

function briefly({ brief, message }: Failure): string {
  return brief ?? message;
}

/** Most likely the worker's failure, and not just another of the same inputs. */
function isCertain({ counts, repeated }: Finding): boolean {
  return counts === "yes" && !repeated;
}
