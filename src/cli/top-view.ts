/**
 * What `ferry top` knows: the last hello, and what the frames since then changed. Comes from another process,
 * perhaps of another version, so its shape is looked at before it is believed.
 */
import type { BatchRow, Frame, Hello, ModelFrame, Note } from "../observe/dashboard/frames.ts";
import type { StreamEvent } from "./event-stream.ts";

/** As far back as a worker's line shows. */
export const SHOWN_MS = 6000;
const MAX_NOTES = 20;

export type Link = { readonly up: true } | { readonly up: false; readonly why: string };

export class TopView {
  hello: Hello | undefined;
  frame: Frame | undefined;
  notes: Note[] = [];
  link: Link = { up: true };
  /** Which model is shown: its place in `Hello.models`. */
  model = 0;
  /** The only reason to show: its place in `Hello.reasons`; -1 for all. */
  reason = -1;
  paused = false;
  /** Somebody can press keys. */
  interactive = false;
  /** By model: batches by id. */
  #batches: Map<string, BatchRow>[] = [];

  /** True when it was what it should be. */
  take({ name, data }: StreamEvent): boolean {
    const value = parse(data);
    if (name === "hello") {
      if (!isHello(value)) return false;
      this.hello = value;
      this.notes = [];
      this.#batches = value.models.map(() => new Map());
      this.model = Math.min(this.model, Math.max(0, value.models.length - 1));
      this.#apply(value.frame);
      return true;
    }
    // What a newer server adds is not ours to judge.
    if (name !== "frame") return true;
    if (!isFrame(value) || value.models.length !== this.#batches.length) return false;
    this.#apply(value);
    return true;
  }

  nextModel(): void {
    this.model = (this.model + 1) % Math.max(1, this.hello?.models.length ?? 1);
  }

  nextReason(): void {
    const reasons = this.hello?.reasons.length ?? 0;
    this.reason = this.reason + 1 >= reasons ? -1 : this.reason + 1;
  }

  get shown(): ModelFrame | undefined {
    return this.frame?.models[this.model];
  }

  batchesOf(worker: string): BatchRow[] {
    return [...(this.#batches[this.model]?.values() ?? [])].filter((row) => row[1] === worker);
  }

  /** For programs: names where a frame has places, and none of the history. */
  plain(): object {
    const { hello, frame } = this;
    if (hello === undefined || frame === undefined) return {};
    const { now, process } = frame;
    return {
      now,
      version: hello.version,
      process,
      models: frame.models.map(
        ({ verdict, recent, queues, oldestWaitMs, workers, curve, refusedTenants }, at) => ({
          name: hello.models[at]?.name,
          maxBatchSize: hello.models[at]?.maxBatchSize,
          verdict,
          recent,
          queues: queues.map((queue, tier) => ({ tier: hello.tiers[tier], ...queue })),
          oldestWaitMs,
          workers,
          curve,
          refusedTenants,
        }),
      ),
      notes: frame.notes,
    };
  }

  #apply(frame: Frame): void {
    this.frame = frame;
    this.notes = [...this.notes, ...frame.notes].slice(-MAX_NOTES);
    frame.models.forEach(({ batches }, at) => {
      const known = this.#batches[at]!;
      for (const row of batches) known.set(row[0], row);
      for (const [id, [, , , endedAt]] of known) {
        if (endedAt !== 0 && endedAt < frame.now - SHOWN_MS) known.delete(id);
      }
    });
  }
}

function parse(text: string): unknown {
  try {
    return JSON.parse(text) as unknown;
  } catch {
    return undefined;
  }
}

function isHello(value: unknown): value is Hello {
  if (!hasLists(value, "models", "tiers", "reasons")) return false;
  const { frame, models } = value as unknown as Hello;
  return isFrame(frame) && frame.models.length === models.length;
}

function isFrame(value: unknown): value is Frame {
  if (!hasLists(value, "models", "notes") || !isObject(value["process"])) return false;
  return (value as unknown as Frame).models.every(
    (model) =>
      hasLists(model, "queues", "workers", "batches") &&
      isObject(model["verdict"]) &&
      isObject(model["recent"]),
  );
}

function hasLists(value: unknown, ...names: string[]): value is Record<string, unknown> {
  return isObject(value) && names.every((name) => Array.isArray(value[name]));
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
