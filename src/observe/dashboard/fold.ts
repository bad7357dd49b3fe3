/**
 * Aggregates events per second for the dashboard: viewers get sums, never single requests. Listens to events and reads
 * the process's `Sight` once a second. `frame` returns what changed since a `Cursor`, `hello` everything kept. Without
 * viewers only the counting runs. Measured (`node bench/listeners.ts`, `later.ts`): an answered request 40 ns (50 in a
 * fleet), a queued task 40 ns, a batch of 64 from start to end 2 µs.
 */
import type { Alarm, Clock } from "../../app/clock.ts";
import { type AnsweredRequest, CLIENT_LEFT, type Events } from "../events.ts";
import type { LoopDelay } from "../processes.ts";
import type { ModelSight, Sight } from "../sight.ts";
import type { Tally } from "../tally.ts";
import {
  type BatchRow,
  type Frame,
  HISTORY_SECONDS,
  type ModelFrame,
  type Note,
  type ProcessFrame,
} from "./frames.ts";
import type { Shown } from "./batches.ts";
import { type EndedTask, ModelFold, type ShownModel } from "./model-fold.ts";
import { COLUMN } from "./slots.ts";

export interface FoldRules {
  readonly models: readonly ShownModel[];
  readonly tiers: readonly string[];
  readonly role: string;
  readonly targetUtilization: number;
  /** Other processes run batches too: `ended` tells of them. */
  readonly fleet: boolean;
}

export interface FoldParts {
  readonly clock: Clock;
  readonly events: Pick<Events, "on">;
  readonly sight: Sight;
  readonly tally: Tally;
  readonly delay: Pick<LoopDelay, "watch" | "take" | "stop">;
}

/** What viewers have been sent. */
interface Cursor {
  second: number;
  notes: number;
}

const SECOND_MS = 1000;
/** Batches kept, shared by the models; each model keeps at least as many as may run at once. */
const MAX_BATCHES = 4096;
const LEAST_BATCHES = 256;
/** Keeps a hello below 300 KB. */
const HELLO_ROWS = 1000;
/** Room for the batches' sentences in a hello. */
const HELLO_WHY_BYTES = 32_768;
/**
 * Models sent with full history; with more models each gets less, down to a minute. A hello blocks the event loop for
 * about 1 ms and 0.1 MB per model with 15 minutes.
 */
const WHOLE_HISTORIES = 16;
const LEAST_SECONDS = 60;
/** Place of the sentence in a `BatchRow`. */
const WHY = 11;
/** A frame stays below this, unless the workers alone need more. */
const FRAME_BYTES = 12_288;
const LEAST_ROWS = 8;
/** Framing around the batches: "event: frame", commas. */
const AROUND_BYTES = 64;

export class Fold {
  readonly #rules: FoldRules;
  readonly #parts: FoldParts;
  readonly #models: readonly ModelFold[];
  readonly #byName = new Map<string, ModelFold>();
  readonly #notes: Notes;
  readonly #cursor: Cursor;
  #second: number;
  #alarm: Alarm;

  constructor(rules: FoldRules, parts: FoldParts) {
    this.#rules = rules;
    this.#parts = parts;
    const { clock, events } = parts;
    this.#second = Math.floor(clock.now() / SECOND_MS);
    const { models, tiers, targetUtilization, fleet } = rules;
    const maxBatches = Math.max(LEAST_BATCHES, Math.floor(MAX_BATCHES / models.length));
    this.#models = models.map(
      (model) => new ModelFold(model, tiers, targetUtilization, maxBatches, this.#second, fleet),
    );
    for (const model of this.#models) this.#byName.set(model.rules.name, model);
    this.#notes = new Notes(events, () => clock.now());
    this.#cursor = { second: this.#second, notes: 0 };
    this.#listen(events);
    this.#alarm = this.#setAlarm();
  }

  /** Changes since the frame before; the same for every viewer. */
  frame(): Frame {
    const frame = this.#snapshot(this.#cursor.second, this.#cursor.notes);
    const shown = this.#models.map(({ batches }) => batches.takeChanged());
    const left = FRAME_BYTES - AROUND_BYTES - JSON.stringify(frame).length;
    this.#tell();
    const fitted = fitAll(frame.models, shown, left);
    return { ...frame, models: frame.models.map((model, at) => withBatches(model, fitted[at]!)) };
  }

  /** Everything kept. Advances the cursor: send existing viewers a `frame` first. */
  hello(): Frame {
    const now = this.#parts.clock.now();
    const share = Math.floor((HISTORY_SECONDS * WHOLE_HISTORIES) / this.#models.length);
    const frame = this.#snapshot(this.#second - Math.max(LEAST_SECONDS, share), 0);
    for (const { batches } of this.#models) batches.forgetChanged();
    this.#tell();
    const rows = Math.floor(HELLO_ROWS / this.#models.length);
    const shown = this.#models.map(({ batches }) => batches.lately(now, rows));
    const fitted = cutWhys(shown, HELLO_WHY_BYTES);
    return { ...frame, models: frame.models.map((model, at) => withBatches(model, fitted[at]!)) };
  }

  /** In a fleet: a task that came through this process has ended. Other processes' batches are known from these. */
  ended(record: EndedTask): void {
    this.#byName.get(record.task.model)?.ended(record);
  }

  stop(): void {
    this.#alarm.cancel();
    this.#parts.delay.stop();
  }

  #listen(events: Pick<Events, "on">): void {
    const add = (name: string, column: number): void => {
      const model = this.#byName.get(name) ?? this.#only();
      if (model !== undefined) model.slots.now[column]! += 1;
    };
    events.on("request.answered", (request) => this.#answered(request));
    events.on("request.shed", ({ model, tier, tenant, reason, retryAfterMs }) =>
      this.#byName.get(model)?.shed(tier, tenant, reason, retryAfterMs),
    );
    events.on("task.queued", ({ model, tier }) => this.#byName.get(model)?.queued(tier));
    events.on("task.joined", ({ model }) => add(model, COLUMN.joined));
    events.on("task.cached", ({ model }) => add(model, COLUMN.cached));
    events.on("task.retried", ({ model }) => add(model, COLUMN.retried));
    events.on("task.dead", ({ model }) => add(model, COLUMN.dead));
    events.on("task.lost", ({ model }) => add(model, COLUMN.lost));
    events.on("batch.started", ({ model, batch, oldestWaitMs, tasks }) => {
      this.#parts.delay.watch();
      this.#byName.get(model)?.batches.began(batch, oldestWaitMs, tasks, this.#parts.clock.now());
    });
    events.on("batch.settled", (batch) => this.#byName.get(batch.model)?.batches.ended(batch));
    events.on("worker.changed", ({ model, worker, state }) => {
      if (state === "down") this.#byName.get(model)?.workers.wentDown(worker, this.#parts.clock.now());
    });
  }

  #answered(request: AnsweredRequest): void {
    this.#parts.delay.watch();
    if (request.model === "" || request.status === CLIENT_LEFT) return;
    this.#byName.get(request.model)?.answered(request);
  }

  /** The model when the event does not name one. */
  #only(): ModelFold | undefined {
    return this.#models.length === 1 ? this.#models[0] : undefined;
  }

  #setAlarm(): Alarm {
    return this.#parts.clock.at((this.#second + 1) * SECOND_MS, () => this.#turn());
  }

  #turn(): void {
    const { clock, sight, delay } = this.#parts;
    const now = clock.now();
    const second = Math.floor(now / SECOND_MS);
    if (second - this.#second > HISTORY_SECONDS) {
      for (const model of this.#models) model.skipTo(second);
      this.#second = second;
    }
    const late = delay.take((this.#second + 1) * SECOND_MS);
    const sights = this.#second < second ? sight.models() : [];
    for (; this.#second < second; this.#second++) {
      for (const model of this.#models) {
        const seen = sights.find(({ name }) => name === model.rules.name);
        // Our own workers publish events; other processes' state changes show only here.
        for (const { name, own, state, down } of model.close(seen, this.#heardWorkers(seen), late, now)) {
          if (!own) this.#notes.workerIs(model.rules.name, name, state, down?.why ?? "");
        }
      }
    }
    this.#notes.tick();
    this.#alarm = this.#setAlarm();
  }

  /** Workers whose batches are reported here: a batcher only knows its own. */
  #heardWorkers(sight: ModelSight | undefined): number {
    if (sight === undefined) return 0;
    if (this.#rules.role !== "batcher") return sight.workers.length;
    return sight.workers.filter(({ own }) => own).length;
  }

  #tell(): void {
    this.#cursor.second = this.#second;
    this.#cursor.notes = this.#notes.count;
  }

  #snapshot(second: number, notes: number): Omit<Frame, "models"> & { models: Bare[] } {
    const { clock, sight } = this.#parts;
    const now = clock.now();
    const process = this.#process();
    const { reachable, draining, totals } = process;
    const facts = { reachable, draining, used: totals.requests + totals.tasks > 0 };
    const sights = sight.models();
    const models = this.#models.map((model) => {
      const seen = sights.find(({ name }) => name === model.rules.name) ?? nothing(model.rules);
      return model.frame(seen, facts, model.slots.since(second), now);
    });
    return { now: Math.round(now), process, models, notes: this.#notes.since(notes) };
  }

  #process(): ProcessFrame {
    const { sight, tally } = this.#parts;
    const { id, role, members, durability, reachable, draining, queued, running, deadLetters } =
      sight.process();
    const { requests, tasks, calls, cached, joined, retried, dead, lost, shed } = tally;
    const scope =
      id === ""
        ? "this process"
        : `${role === "all" ? "process" : role} ${id.slice(0, 5)}, ${members === 1 ? "the only one" : `one of ${members} processes`}`;
    return {
      scope,
      members,
      durability,
      reachable,
      draining,
      queued,
      running,
      deadLetters,
      totals: { requests, tasks, calls, cached, joined, retried, dead, lost, shed },
    };
  }
}

type Bare = Omit<ModelFrame, "batches">;

function withBatches(model: Bare, { rows, leftOut }: Shown): ModelFrame {
  return { ...model, batches: rows, batchesLeftOut: leftOut };
}

/**
 * An even share of bytes per model; the unused rest goes to models with more batches, then to their sentences: a batch
 * without one still shows its reason and its lengths.
 */
function fitAll(models: readonly Bare[], shown: readonly Shown[], bytes: number): Shown[] {
  const fitted: Shown[] = [];
  let left = bytes;
  const fewestFirst = [...shown.keys()].sort((a, b) => shown[a]!.rows.length - shown[b]!.rows.length);
  for (const [done, at] of fewestFirst.entries()) {
    const { used, ...each } = fit(models[at]!, shown[at]!, left / (models.length - done));
    fitted[at] = each;
    left -= used;
  }
  return cutWhys(fitted, left);
}

/** As many batches as fit. Drops whole workers rather than some batches of each: a lane with holes would look idle. */
function fit(model: Bare, { rows, leftOut }: Shown, bytes: number): Shown & { used: number } {
  const places = new Map(model.workers.map(({ name }, at) => [name, at]));
  const placeOf = (worker: string): number => places.get(worker) ?? places.size;
  const sorted = rows.toSorted((a, b) => placeOf(a[1]) - placeOf(b[1]) || a[2] - b[2]);
  let [kept, used] = [0, 0];
  for (const row of sorted) {
    const more = JSON.stringify(row).length + 1 - whyBytes(row);
    if (used + more > bytes && kept >= LEAST_ROWS) break;
    used += more;
    kept++;
  }
  return { rows: sorted.slice(0, kept), leftOut: leftOut + rows.length - kept, used };
}

/** Drops sentences, the first ones first, so that those of all models stay within `bytes`. */
function cutWhys(shown: readonly Shown[], bytes: number): Shown[] {
  return shown.map(({ rows, leftOut }) => {
    let left = bytes / shown.length;
    const fitted = rows.toReversed().map((row) => {
      left -= whyBytes(row);
      return left >= 0 ? row : (row.with(WHY, "") as unknown as BatchRow);
    });
    return { rows: fitted.reverse(), leftOut };
  });
}

/** Without its quotes, which stay. */
function whyBytes(row: BatchRow): number {
  return JSON.stringify(row[WHY]).length - 2;
}

/** For a model whose workers are not known yet. */
function nothing({ name, maxBatchSize }: ShownModel): ModelSight {
  return {
    name,
    maxBatchSize,
    queuedByTier: [],
    oldestWaitMs: 0,
    workers: [],
    healthy: 0,
    utilization: 0,
    capacityPerSecond: 0,
    arrivalsPerSecond: 0,
    load: 0,
    desiredWorkers: 0,
  };
}

const MAX_NOTES = 100;
const NOTES_PER_SECOND = 10;
const MAX_NOTE_LENGTH = 240;

/** Recent events as sentences, never quoting inputs, outputs or workers. Beyond `NOTES_PER_SECOND`: a count. */
class Notes {
  readonly #now: () => number;
  #notes: Note[] = [];
  /** Total ever; the last of `#notes` has this number. */
  #count = 0;
  #thisSecond = 0;
  #more = 0;

  constructor(events: Pick<Events, "on">, now: () => number) {
    this.#now = now;
    events.on("notice", ({ level, message }) => this.#add(level, message));
    events.on("worker.changed", ({ model, worker, state, why }) => this.workerIs(model, worker, state, why));
    events.on("scaling.changed", ({ model, from, desired, reason }) =>
      this.#add("info", `${model} wants ${desired} workers instead of ${from}: ${reason}`),
    );
    events.on("task.dead", ({ id, model, code }) =>
      this.#add("warn", `dead letter ${id}${model === "" ? "" : ` of ${model}`}: ${code}`),
    );
    events.on("task.lost", ({ id, why }) => this.#add("error", `task ${id} is lost: ${why}`));
    events.on("batch.overdue", ({ model, worker, afterMs }) => {
      const late = `overdue after ${Math.round(afterMs)} ms; its tasks are tried elsewhere`;
      this.#add("warn", `a batch of ${model} on ${worker} is ${late}`);
    });
  }

  get count(): number {
    return this.#count;
  }

  workerIs(model: string, worker: string, state: string, why: string): void {
    const reason = why === "" ? "" : `: ${why}`;
    this.#add(state === "down" ? "warn" : "info", `${worker} of ${model} is ${state}${reason}`);
  }

  /** Notes after the first `count` that are still kept, oldest first. */
  since(count: number): Note[] {
    return this.#notes.slice(Math.max(0, this.#notes.length - (this.#count - count)));
  }

  tick(): void {
    const more = this.#more;
    this.#thisSecond = 0;
    this.#more = 0;
    if (more > 0) this.#add("info", `and ${more} more in that second; the log has them all`);
  }

  #add(level: Note["level"], text: string): void {
    if (this.#thisSecond >= NOTES_PER_SECOND) {
      this.#more++;
      return;
    }
    this.#thisSecond++;
    this.#count++;
    const short = text.length > MAX_NOTE_LENGTH ? `${text.slice(0, MAX_NOTE_LENGTH - 1)}…` : text;
    this.#notes.push({ at: Math.round(this.#now()), level, text: short });
    if (this.#notes.length > MAX_NOTES) this.#notes.shift();
  }
}
