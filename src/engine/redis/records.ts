/** Reads a task's record from its bundle's hash, in any process of the fleet. */
import type { Task } from "../../core/task.ts";
import type { Arg } from "./client/nodes.ts";
import type { RecordView } from "../engine.ts";
import { type FinalRecord, metaFrame, outcomeFrame, OutcomeReader, readBundle } from "./frames.ts";
import { fieldOf, GRACE_MS } from "./keys.ts";
import type { RedisParts } from "./parts.ts";
import { scripts } from "./scripts.ts";

/** What a gateway adds to the record as it reads it. */
export interface Joining {
  /** This process wants to hear of the end. */
  readonly waits?: boolean;
  /** An Idempotency-Key stands for the task. */
  readonly keyed?: boolean;
  /** Terms of the joining caller. */
  readonly caller?: Pick<Task, "deadlineAt" | "tier">;
}

export interface FoundRecord {
  /** Undefined while it is in flight. */
  readonly final: FinalRecord | undefined;
  readonly deleted: boolean;
  /** Without input and parameters. */
  readonly task: Task;
  /** The batcher that holds it; "": not read yet. */
  readonly owner: string;
  readonly attempt: number;
  /** Gateways whose callers joined it, besides the one that put it. */
  readonly waiting: readonly string[];
  readonly keyed: boolean;
  readonly joined: boolean;
}

/** Its attempts and their result, as recorded by a batcher. */
export interface TriedState {
  readonly attempt: number;
  readonly lost: number;
  readonly maxBatchSize: number;
  readonly overdue: boolean;
  /** When it may be retried, on the shared clock; "": at once. */
  readonly retryAt: string;
}

export const UNTRIED: TriedState = {
  attempt: 0,
  lost: 0,
  maxBatchSize: Infinity,
  overdue: false,
  retryAt: "",
};

export function stateText({ attempt, lost, maxBatchSize, overdue, retryAt }: TriedState): string {
  return [attempt, lost, maxBatchSize === Infinity ? 0 : maxBatchSize, overdue ? 1 : 0, retryAt].join(" ");
}

export function readState(text: Buffer | null | undefined): TriedState {
  if (text === null || text === undefined) return UNTRIED;
  const [attempt, lost, most, overdue, retryAt] = text.toString("latin1").split(" ");
  return {
    attempt: Number(attempt),
    lost: Number(lost),
    maxBatchSize: most === "0" ? Infinity : Number(most),
    overdue: overdue === "1",
    retryAt: retryAt ?? "",
  };
}

const POLLS = "~"; // name prefix of a gateway whose callers only poll for the outcome

function waitingIn(text: Buffer | null | undefined): string[] {
  return text?.toString("latin1").split(",").filter(Boolean) ?? [];
}

/** Gateways that want to hear of the end, each once. */
export function hearersIn(text: Buffer): Set<string> {
  return new Set(waitingIn(text).map((gateway) => gateway.replace(POLLS, "")));
}

export class RedisRecords {
  readonly #parts: RedisParts;
  readonly #reader: OutcomeReader;

  constructor(parts: RedisParts) {
    this.#parts = parts;
    this.#reader = new OutcomeReader(parts.shared);
  }

  /** Undefined: there is none, or it has expired and its success may not be reused either. */
  async look(
    id: string,
    { waits = false, keyed = false, caller }: Joining = {},
  ): Promise<FoundRecord | undefined> {
    const { keys, shared, clock, name, options, nodes } = this.#parts;
    const [shard, bundle, field] = [keys.shardOf(id), keys.bundle(id), fieldOf(id)];
    const brings = caller === undefined ? ["", ""] : [shared.shared(caller.deadlineAt), String(caller.tier)];
    const keepMs =
      caller === undefined
        ? 0
        : Math.ceil(caller.deadlineAt - clock.now()) + this.#parts.limits.results.ttlMs + GRACE_MS;
    const args = [field, waits ? name : "", keyed ? "1" : "", ...brings, keepMs];
    const call = this.#parts.call(shard, scripts.join, [bundle], args);
    // A join is "accepted" too, so make it as safe as a put: the put may have lacked a replica's confirmation.
    const asked =
      caller === undefined
        ? nodes.run(shard, call, { resend: true })
        : nodes.runDurably(shard, call, options.putWithinMs);
    const found = (await asked) as (Buffer | null)[];
    const [outcome, deleted, meta, owner, state, waiting, key, place] = found;
    const final = outcome && this.read(id, outcome);
    const task = final ? final.task : meta && readBundle(meta, field, id, shared);
    if (!task) return undefined;
    return {
      final: final ?? undefined,
      deleted: !!deleted,
      task,
      owner: owner?.toString("latin1") ?? "",
      attempt: readState(state).attempt,
      waiting: waitingIn(waiting).filter((gateway) => !gateway.startsWith(POLLS)),
      keyed: !!key,
      joined: !!place,
    };
  }

  read(id: string, outcome: Buffer): FinalRecord {
    return this.#reader.read(id, outcome);
  }

  /** Hides it from its owner; its output goes too, unless it may answer others. */
  deletion(final: FinalRecord): Arg[] {
    const { keys, shared, clock } = this.#parts;
    const { task, attempt, queuedAt, settledAt, reusableUntil } = final;
    const field = fieldOf(task.id);
    const deleted = ["HSET", keys.bundle(task.id), `g${field}`, "1"];
    if (clock.now() < reusableUntil) return deleted;
    const fields = { meta: metaFrame(task, {}, shared), attempt, queuedAt, settledAt };
    return [...deleted, field, outcomeFrame(fields, { ok: true, output: "" }, shared)];
  }

  lives({ settledAt }: FinalRecord): boolean {
    return this.#parts.clock.now() < settledAt + this.#parts.limits.results.ttlMs;
  }
}

export function pendingView({ task, attempt }: FoundRecord): RecordView {
  return { task, state: "queued", attempt, queuedAt: task.createdAt };
}
