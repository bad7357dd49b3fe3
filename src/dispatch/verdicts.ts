/**
 * What the engine is told of a batch's tasks, from what the worker said of the batch.
 *
 *   answered           done
 *   rejected           failed: for one that stands alone; with a code, for all of them at once
 *   busy               back to the queue, no attempt counted; the worker is left alone for a while, or just these tasks are
 *   unusable, failed   retry with backoff, then dead letter. When one of the inputs may be the cause they come back in smaller
 *                      batches, so that the innocent part company with the guilty. Whose fault it is, and so whether it
 *                      is tried again and whether it counts against the worker, says `core/blame.ts`
 */
import type { Reply } from "../workers/backend/backend.ts";
import type { Finding } from "../core/blame.ts";
import { retryAt, smallerBatch, smallerBatchAfter } from "../core/retry.ts";
import type { Task } from "../core/task.ts";
import type { ClaimedTask, Lease, SettleReply, Verdict } from "../engine/engine.ts";
import type { RunParts, RunRules } from "./batch-run.ts";
import { attempts, brief, type Said } from "./brief.ts";
import type { Bound } from "./bound.ts";
import type { Hold } from "./hold.ts";
import { type Rider, suspectOf } from "./riders.ts";
import type { PoolWorker as Slot } from "../workers/worker.ts";

type WithoutId<V> = V extends Verdict ? Omit<V, "id"> : never;
export type Judge = (rider: Rider, claimed: ClaimedTask, at: number) => WithoutId<Verdict>;

/** Of `ejectMs`. */
const DOUBT_PAUSE = 0.5;

/** How something is tried again. */
interface Again {
  /** In batches of at most so many; left out: of any size. */
  readonly atMost?: (attempt: number) => number;
  /** Not before this is over, but for its first failure: whoever is innocent gets a second try at once. */
  readonly pauseMs?: number;
  /** Why it is not. */
  readonly over?: string;
  /** If it is given up, it is not to be tried soon, whoever sends it. */
  readonly bars?: boolean;
}

export class Verdicts {
  readonly #rules: RunRules;
  readonly #parts: RunParts;
  readonly #slot: Slot;
  readonly #hold: Hold;
  /** Under which the tasks are ours. */
  lease: Lease;
  /** Ferry stops: nothing more is said. */
  silent = false;

  constructor(
    rules: RunRules,
    parts: RunParts,
    { slot, hold, lease }: Pick<Bound, "slot" | "hold" | "lease">,
  ) {
    this.#rules = rules;
    this.#parts = parts;
    this.#slot = slot;
    this.#hold = hold;
    this.lease = lease;
  }

  async conclude(riders: Rider[], reply: Reply): Promise<void> {
    const now = this.#parts.clock.now();
    switch (reply.kind) {
      case "answered":
        // `riders` are those that were sent, in the order in which they were sent.
        return this.settle(riders, (_, __, at) => ({ kind: "done", output: reply.outputs[at]! }));
      case "rejected":
        return this.settle(riders, () => ({
          kind: "failed",
          code: reply.code ?? "INPUT_REJECTED",
          message: reply.message,
        }));
      case "busy":
        return this.#busy(riders, reply, now);
      case "unusable":
        return this.#unusable(riders, reply);
      case "failed":
        if (reply.blame === "nobody") {
          if (!this.#neverBegun()) this.#held(brief(reply), now, true);
          return this.settle(riders, () => ({
            kind: "retry",
            at: now,
            message: brief(reply),
            spared: true,
          }));
        }
        return this.#failed(riders, reply, reply.blame === "batch");
    }
  }

  /** Where only what the client named is not ready, only that client waits; the worker serves the others. */
  async #busy(riders: Rider[], reply: Reply & { kind: "busy" }, now: number): Promise<void> {
    const { blame, workers } = this.#parts;
    const until = now + reply.retryAfterMs;
    const named = reply.named === true && !blame.wasFound(riders[0]!.tasks[0]!.task.parameters, now);
    if (named) workers.retriesUntil = Math.max(workers.retriesUntil, until);
    else this.#slot.circuit.pause(until);
    const at = named ? until : now;
    return this.settle(riders, () => ({ kind: "retry", at, message: brief(reply), spared: true }));
  }

  async #unusable(riders: Rider[], reply: Said): Promise<void> {
    const finding = this.#blame(riders, reply, false);
    if (finding.over) return this.guilty(riders);
    return this.#retry(riders, reply, {
      atMost: () => (isCertain(finding) ? Infinity : 1),
      pauseMs: this.#pauseMs(finding),
    });
  }

  async #failed(riders: Rider[], reply: Said, died: boolean): Promise<void> {
    const finding = this.#blame(riders, reply, died);
    if (finding.over)
      return this.#retry(riders, reply, { over: "workers fail with this input, and answer others" });
    return this.#retry(riders, reply, {
      atMost: (attempt) => {
        // Alone, at a worker that others think well of: nobody shall be with it the next time.
        if (riders.length === 1 && !isCertain(finding)) return 1;
        return smallerBatchAfter(attempt, riders.length, this.#rules.retry.max);
      },
      pauseMs: this.#pauseMs(finding),
      bars: died && this.#alone(riders),
    });
  }

  /** Whether nothing but this one can have been the cause. */
  #alone(riders: readonly Rider[]): boolean {
    return riders.length === 1 && !this.#hold.company;
  }

  /** In doubt it is tried again when more is known: four tries outlast what an ejected worker would have rested. */
  #pauseMs(finding: Finding): number {
    if (finding.counts === "no" || isCertain(finding)) return 0;
    return Math.min(DOUBT_PAUSE * this.#slot.circuit.limits.ejectMs, this.#rules.retry.maxMs);
  }

  /** Its own fault, and nothing that a person could do but send another. */
  async guilty(riders: Rider[]): Promise<void> {
    const message = "the worker returned no usable output for this input";
    return this.settle(riders, () => ({ kind: "failed", code: "INPUT_REJECTED", message }));
  }

  /** What was refused untried: it is known to end workers. */
  async bar(riders: Rider[]): Promise<void> {
    // Whoever wants to look at it finds the dead letter of the one that was tried.
    const message = "it ended workers a moment ago; it is not tried again so soon";
    return this.settle(riders, () => ({ kind: "failed", code: "INFERENCE_FAILED", message }));
  }

  /** It came back because of the one before it, which tells what there is to tell of the worker. */
  #neverBegun(): boolean {
    const { early, begun } = this.#hold;
    return early && !begun && this.#slot.worker.queues === true;
  }

  /** Finds out whose fault it is that these failed. */
  find(riders: readonly Rider[], died: boolean): Finding {
    const { blame, clock, workers } = this.#parts;
    const { standing } = this.#slot.circuit;
    const fleet = workers.slots.map(({ circuit }) => circuit.standing);
    // What died with another batch in the same hands may have died of that one.
    const alone = died ? this.#alone(riders) : riders.length === 1;
    const failure = { suspects: riders.map(suspectOf), worker: this.#slot, standing, fleet, alone, died };
    return blame.failed(failure, clock.now());
  }

  /** The same, and holds it against the worker if it may be the worker's. */
  #blame(riders: readonly Rider[], why: Said, died: boolean): Finding {
    const finding = this.find(riders, died);
    this.#held(brief(why), this.#parts.clock.now(), false, finding);
    return finding;
  }

  #held(why: string, now: number, unreachable: boolean, finding?: Finding): void {
    const { workers } = this.#parts;
    if (finding?.counts === "no") {
      this.#slot.failures++;
      return workers.heard(this.#slot);
    }
    const held = finding && { doubt: finding.counts === "doubt", repeated: finding.repeated };
    workers.failed(this.#slot, now, why, unreachable, held);
  }

  /** Tries again later, or gives up. */
  async #retry(riders: Rider[], why: Said, { atMost, pauseMs = 0, over, bars }: Again): Promise<void> {
    const message = over === undefined ? brief(why) : `${brief(why)}: ${over}`;
    const now = this.#parts.clock.now();
    // One roll for the batch: its tasks come back together and fill one batch again.
    const random = this.#parts.random();
    const code = "INFERENCE_FAILED";
    /** In the order of the verdicts; undefined where it is tried again. */
    const dead: (Task | undefined)[] = [];
    const replies = await this.#tell(riders, (_, { attempt, task }) => {
      const at = over === undefined ? this.#retryAt(attempt, now, random) : undefined;
      dead.push(at === undefined ? task : undefined);
      if (at !== undefined) {
        const maxBatchSize = atMost?.(attempt) ?? Infinity;
        const soonest = attempt === 1 ? now : now + pauseMs;
        return { kind: "retry", at: Math.max(at, soonest), message, maxBatchSize };
      }
      if (bars === true) this.#parts.blame.bar(suspectOf(riders[0]!), now);
      // The worker's own words may tell more of the inside than a caller should see.
      return {
        kind: "dead",
        code,
        message: `${over ?? `${attempts(attempt)} failed`}; it is kept as a dead letter`,
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
  async putBack(riders: Rider[], batchSize: number): Promise<void> {
    if (riders.length === 0) return;
    const now = this.#parts.clock.now();
    const random = this.#parts.random();
    const message = "a batch-mate was refused";
    const maxBatchSize = smallerBatch(batchSize);
    await this.settle(riders, (_, { attempt }) => {
      const at = this.#retryAt(attempt, now, random);
      if (at !== undefined) return { kind: "retry", at, message, maxBatchSize };
      return { kind: "retry", at: now, message, maxBatchSize, spared: true };
    });
  }

  #retryAt(attempt: number, now: number, random: number): number | undefined {
    const { workers } = this.#parts;
    const at = retryAt(attempt, this.#rules.retry, now, random);
    workers.retriesUntil = Math.max(workers.retriesUntil, at ?? 0);
    return at;
  }

  /** The worker may be another process's by now, and takes no further call of ours: nobody's fault. */
  async yield(riders: Rider[], batchSize: number): Promise<void> {
    const at = this.#parts.clock.now();
    const message = `the lease of ${this.#slot.name} ran out`;
    const maxBatchSize = smallerBatch(batchSize);
    await this.settle(riders, () => ({ kind: "retry", at, message, spared: true, maxBatchSize }));
  }

  async settle(riders: readonly Rider[], judge: Judge): Promise<void> {
    await this.#tell(riders, judge);
  }

  /** What the engine says to each verdict, in the order in which they were asked for. */
  async #tell(riders: readonly Rider[], judge: Judge): Promise<readonly SettleReply[]> {
    if (this.silent) return [];
    const verdicts: Verdict[] = [];
    riders.forEach((rider, at) => {
      for (const claimed of rider.tasks) verdicts.push({ id: claimed.task.id, ...judge(rider, claimed, at) });
    });
    return this.#parts.engine.settle(this.lease, verdicts);
  }
}

/** It is the worker's failure, as far as can be told, and not just a further one of the same inputs. */
function isCertain({ counts, repeated }: Finding): boolean {
  return counts === "yes" && !repeated;
}
