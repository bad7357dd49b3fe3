/**
 * Carries the events that end a request from a gateway process to the core process, whose observers then see one Ferry.
 * Batches and tasks are the core's own events. A gateway that dies takes at most `FLUSH_MS` of events along.
 *
 * A message is JSON, `[texts, numbers]`. Each event is a run of numbers: its kind, then its fields in a fixed order. A
 * text is the number of its place in `texts`, an absent field `ABSENT`. A batch is a number too; its first mention in a
 * message is followed by its fields, so that the core need not look it up. Texts that recur are sent once per message,
 * and an array of plain numbers is what `JSON.parse` reads fastest: a third of the time of an array for each event. A
 * request costs its gateway 1.4 µs and the core 0.45 µs, its listeners included (`node bench/listeners.ts`).
 */
import type { Alarm, Clock } from "../app/clock.ts";
import type { BatchNote, DispatchReason } from "../core/task.ts";
import type { RequestTrace } from "../core/trace.ts";
import {
  type AnsweredRequest,
  type EventFields,
  type Events,
  listening,
  type ShedReason,
  type TaskEnding,
} from "./events.ts";

/** The longest that an event waits for others. */
const FLUSH_MS = 20;
/** A message leaves at once when it has as many. */
const FULL = 512;
/** Events kept while the core is away; more are dropped and counted. */
const MAX_KEPT = 4096;

const ANSWERED = 0;
const SHED = 1;
const OTHER = 2;
const ABSENT = -1;

/** Rare, or of a gateway that puts its tasks into Redis itself: sent as JSON. */
const OTHERS = ["notice", "task.queued", "task.joined", "task.cached", "task.dropped", "task.lost"] as const;

type Message = readonly [texts: readonly string[], numbers: readonly number[]];

/** The gateway's side. */
export class EventRelay {
  readonly #events: Events;
  readonly #clock: Clock;
  readonly #send: (text: string) => boolean;
  readonly #end: () => void;
  #message = new MessageWriter();
  /** Messages that the core has not taken, oldest first, with their events. */
  #unsent: { readonly text: string; readonly count: number }[] = [];
  #kept = 0;
  #dropped = 0;
  #alarm: Alarm | undefined;

  /** `send` returns false while the core is away; the same text is then offered again. */
  constructor(bus: Events, clock: Clock, send: (text: string) => boolean) {
    this.#events = bus;
    this.#clock = clock;
    this.#send = send;
    const { events, end } = listening(bus);
    this.#end = end;
    events.on("request.answered", (request) => this.#take() && this.#message.answered(request));
    events.on("request.shed", (refused) => this.#take() && this.#message.shed(refused));
    OTHERS.forEach((name, at) =>
      events.on(name, (fields) => this.#take() && this.#message.other(at, fields)),
    );
  }

  /** Sends what is collected now. */
  flush(): void {
    this.#alarm?.cancel();
    this.#alarm = undefined;
    if (this.#message.count > 0) {
      this.#unsent.push({ text: this.#message.text(), count: this.#message.count });
      this.#message = new MessageWriter();
    }
    while (this.#unsent.length > 0 && this.#send(this.#unsent[0]!.text)) {
      this.#kept -= this.#unsent.shift()!.count;
    }
    if (this.#unsent.length > 0) this.#wait();
    else if (this.#dropped > 0) {
      const message = `${this.#dropped} events of requests were dropped while the core process was away`;
      this.#dropped = 0;
      this.#events.emit("notice", { level: "warn", message });
    }
  }

  /** Sends the rest and stops listening. */
  close(): void {
    this.#end();
    this.flush();
    this.#alarm?.cancel();
  }

  /** Whether there is room for one more event. */
  #take(): boolean {
    if (this.#kept >= MAX_KEPT) {
      this.#dropped++;
      return false;
    }
    this.#kept++;
    if (this.#message.count >= FULL && this.#unsent.length === 0) this.flush();
    this.#wait();
    return true;
  }

  #wait(): void {
    this.#alarm ??= this.#clock.at(this.#clock.now() + FLUSH_MS, () => {
      this.#alarm = undefined;
      this.flush();
    });
  }
}

class MessageWriter {
  readonly #texts: string[] = [];
  readonly #numbers: number[] = [];
  readonly #placeOf = new Map<string, number>();
  readonly #batchAt = new Map<string, number>();
  count = 0;

  answered(request: AnsweredRequest): void {
    const { ending, trace, path } = request;
    this.count++;
    // Most ids occur once: not worth a look into the map.
    const id = this.#texts.push(request.id) - 1;
    this.#numbers.push(
      ANSWERED,
      id,
      this.#place(request.method),
      this.#place(request.route),
      path === undefined ? ABSENT : this.#place(path),
      this.#place(request.model),
      this.#place(request.tier),
      this.#place(request.tenant),
      request.status,
      this.#place(request.code),
      request.startedAt,
      request.latencyMs,
      this.#place(request.work),
    );
    if (ending === undefined) this.#numbers.push(ABSENT);
    else this.#ending(ending);
    if (trace === undefined) this.#numbers.push(ABSENT);
    else this.#trace(trace);
  }

  shed({ model, tier, tenant, reason, retryAfterMs }: EventFields["request.shed"]): void {
    this.count++;
    this.#numbers.push(
      SHED,
      this.#place(model),
      this.#place(tier),
      this.#place(tenant),
      this.#place(reason),
      retryAfterMs,
    );
  }

  other(name: number, fields: object): void {
    this.count++;
    this.#numbers.push(OTHER, name, this.#texts.push(JSON.stringify(fields)) - 1);
  }

  text(): string {
    return JSON.stringify([this.#texts, this.#numbers] satisfies Message);
  }

  #ending({ attempt, queuedAt, settledAt, batch }: TaskEnding): void {
    this.#numbers.push(attempt, queuedAt, settledAt ?? ABSENT);
    if (batch === undefined) {
      this.#numbers.push(ABSENT);
      return;
    }
    const known = this.#batchAt.get(batch.id);
    if (known !== undefined) {
      this.#numbers.push(known);
      return;
    }
    const at = this.#batchAt.size;
    this.#batchAt.set(batch.id, at);
    this.#numbers.push(
      at,
      this.#place(batch.id),
      batch.size,
      this.#place(batch.reason),
      this.#place(batch.worker),
      batch.startedAt,
      this.#place(batch.why),
    );
  }

  #trace({ traceId, spanId, parentId, state }: RequestTrace): void {
    this.#numbers.push(this.#place(traceId), this.#place(spanId), this.#place(parentId), this.#place(state));
  }

  #place(text: string): number {
    const known = this.#placeOf.get(text);
    if (known !== undefined) return known;
    const place = this.#texts.push(text) - 1;
    this.#placeOf.set(text, place);
    return place;
  }
}

/** The core's side: emits the events of a message again, in their order. */
export function replayEvents(text: string, events: Events): void {
  const reader = new MessageReader(text);
  while (!reader.ended) {
    const kind = reader.number();
    if (kind === ANSWERED) events.emit("request.answered", reader.answered());
    else if (kind === SHED) events.emit("request.shed", reader.shed());
    else if (kind === OTHER) emitOther(OTHERS[reader.number()]!, reader.fields(), events);
    else throw new Error(`a gateway sent an event of unknown kind ${kind}`);
  }
}

function emitOther(name: (typeof OTHERS)[number], fields: object, events: Events): void {
  // The gateway has logged it.
  events.emit(
    name,
    (name === "notice" ? { ...fields, logged: true } : fields) as EventFields[typeof name] & object,
  );
}

/** Fields are read in the order in which `MessageWriter` wrote them. */
class MessageReader {
  readonly #texts: readonly string[];
  readonly #numbers: readonly number[];
  readonly #batches: BatchNote[] = [];
  #at = 0;

  constructor(text: string) {
    [this.#texts, this.#numbers] = JSON.parse(text) as Message;
  }

  get ended(): boolean {
    return this.#at >= this.#numbers.length;
  }

  number(): number {
    return this.#numbers[this.#at++]!;
  }

  answered(): AnsweredRequest {
    return {
      id: this.#text(),
      method: this.#text(),
      route: this.#text(),
      path: this.#optionalText(),
      model: this.#text(),
      tier: this.#text(),
      tenant: this.#text(),
      status: this.number(),
      code: this.#text() as AnsweredRequest["code"],
      startedAt: this.number(),
      latencyMs: this.number(),
      work: this.#text() as AnsweredRequest["work"],
      ending: this.#ending(),
      trace: this.#trace(),
    };
  }

  shed(): EventFields["request.shed"] {
    return {
      model: this.#text(),
      tier: this.#text(),
      tenant: this.#text(),
      reason: this.#text() as ShedReason,
      retryAfterMs: this.number(),
    };
  }

  /** Of an event that was sent as JSON. */
  fields(): object {
    return JSON.parse(this.#text()) as object;
  }

  #ending(): TaskEnding | undefined {
    const attempt = this.number();
    if (attempt === ABSENT) return undefined;
    const queuedAt = this.number();
    const settledAt = this.number();
    return {
      queuedAt,
      attempt,
      settledAt: settledAt === ABSENT ? undefined : settledAt,
      batch: this.#batch(),
    };
  }

  #batch(): BatchNote | undefined {
    const at = this.number();
    if (at === ABSENT) return undefined;
    return (this.#batches[at] ??= {
      id: this.#text(),
      size: this.number(),
      reason: this.#text() as DispatchReason,
      worker: this.#text(),
      startedAt: this.number(),
      why: this.#text(),
    });
  }

  #trace(): RequestTrace | undefined {
    const traceId = this.#optionalText();
    if (traceId === undefined) return undefined;
    return { traceId, spanId: this.#text(), parentId: this.#text(), state: this.#text() };
  }

  #text(): string {
    return this.#texts[this.number()]!;
  }

  #optionalText(): string | undefined {
    const place = this.number();
    return place === ABSENT ? undefined : this.#texts[place];
  }
}
