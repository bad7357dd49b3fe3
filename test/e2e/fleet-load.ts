/**
 * Callers that behave as good clients do, and the ledger of what they were promised and what they got.
 *
 * Every task has a marker of its own as input, and its answer must hold it. A caller sends with an
 * Idempotency-Key, and when it is refused (503) or its connection breaks, sends the same again, at the next
 * gateway; what it got a 202 for it polls, at any gateway, until it has ended.
 *
 *   lost      promised (202) and never answered, or answered 404
 *   crossed   answered with something that does not hold the marker
 *   failed    ended with an error code
 *   odd       an answer that no good client should meet: neither a result nor a refusal that may be retried
 */
import assert from "node:assert/strict";
import { setTimeout as pause } from "node:timers/promises";
import type { Part } from "./fleet.ts";
import { type Answer, type Body, SOON_MS } from "./harness.ts";

const RETRY_MS = 50;
/** Between an answer and the next request of a caller of `Load`: without it, waits of a test are played at full speed. */
const THINK_MS = 50;
const POLL_SECONDS = 5;

/** `held` waits for the answer on the connection, `polled` asks for it later. */
export type Kind = "held" | "polled";

/** One attempt that brought neither an answer nor a promise. */
export interface Refusal {
  /** When it was sent, and how long it took until the caller knew. */
  readonly at: number;
  readonly ms: number;
  /** The status; 0 for a connection that broke or could not be made. */
  readonly status: number;
  readonly text: string;
}

export interface Row {
  readonly marker: string;
  readonly sentAt: number;
  /** When the first 202 came. */
  acceptedAt?: number;
  readonly ids: Set<string>;
  endedAt?: number;
  /** How many of its tries were refused. */
  refused: number;
  /** What it ended with: "ok", "crossed", "gone" (404), or an error code. */
  end?: string;
}

export class Ledger {
  readonly rows = new Map<string, Row>();
  readonly refusals: Refusal[] = [];
  readonly odd: string[] = [];

  open(marker: string): Row {
    assert.ok(!this.rows.has(marker), `the marker ${marker} is used twice`);
    const row: Row = { marker, sentAt: performance.now(), ids: new Set(), refused: 0 };
    this.rows.set(marker, row);
    return row;
  }

  get answered(): number {
    return this.#count((row) => row.end !== undefined);
  }

  get accepted(): number {
    return this.#count((row) => row.ids.size > 0 || row.end !== undefined);
  }

  get lost(): Row[] {
    return [...this.rows.values()].filter(
      ({ ids, end }) => end === "gone" || (ids.size > 0 && end === undefined),
    );
  }

  get crossed(): Row[] {
    return [...this.rows.values()].filter(({ end }) => end === "crossed");
  }

  /** How many ended how, "ok" among them. */
  get ends(): Map<string, number> {
    const ends = new Map<string, number>();
    for (const { end } of this.rows.values()) if (end !== undefined) ends.set(end, (ends.get(end) ?? 0) + 1);
    return ends;
  }

  /** Everything that was sent was answered, each with its own output, and nothing odd was met. */
  assertWhole(): void {
    const ends = Object.fromEntries(this.ends);
    const shown = JSON.stringify({ sent: this.rows.size, ...ends, refusals: this.refusals.length });
    assert.deepEqual(
      this.lost.map(({ marker }) => marker),
      [],
      `lost; ${shown}`,
    );
    assert.deepEqual(
      this.crossed.map(({ marker }) => marker),
      [],
      `crossed; ${shown}`,
    );
    assert.deepEqual(this.odd.slice(0, 5), [], `${this.odd.length} odd answers; ${shown}`);
    assert.equal(this.ends.get("ok") ?? 0, this.rows.size, shown);
  }

  #count(fits: (row: Row) => boolean): number {
    let count = 0;
    for (const row of this.rows.values()) if (fits(row)) count++;
    return count;
  }
}

export interface CallerOptions {
  /** Left out: the only one. */
  readonly model?: string;
  /** How long one exchange may take; a paused gateway answers nothing at all. */
  readonly exchangeMs?: number;
  /** After that a caller gives up. */
  readonly patienceMs?: number;
  /** How long it waits after its n-th refusal; the first is 1. */
  readonly backoffMs?: (refused: number) => number;
}

export class Caller {
  readonly ledger: Ledger;
  readonly #doors: () => readonly Part[];
  readonly #exchangeMs: number;
  readonly #patienceMs: number;
  readonly #backoffMs: (refused: number) => number;
  readonly #closing = new AbortController();
  readonly #fields: { readonly model?: string };
  #next = 0;

  constructor(doors: () => readonly Part[], ledger = new Ledger(), options: CallerOptions = {}) {
    this.#doors = doors;
    this.ledger = ledger;
    this.#fields = options.model === undefined ? {} : { model: options.model };
    this.#exchangeMs = options.exchangeMs ?? 60_000;
    this.#patienceMs = options.patienceMs ?? 120_000;
    this.#backoffMs = options.backoffMs ?? (() => RETRY_MS);
  }

  /** Gives up what it waits for. */
  close(): void {
    this.#closing.abort();
  }

  /** Sends one task and sees it through. */
  async run(marker: string, kind: Kind): Promise<Row> {
    const row = this.ledger.open(marker);
    const deadline = row.sentAt + this.#patienceMs;
    const prefer = kind === "polled" ? { prefer: "respond-async" } : {};
    const headers = { "idempotency-key": `key of ${marker}`, ...prefer };
    while (this.#goesOn(row, deadline)) {
      const body = { ...this.#fields, input: marker };
      const answer = await this.#try(row, (door, late) => door.post(body, headers, late));
      if (answer === undefined) continue;
      if (answer.status === 202) {
        row.ids.add(answer.json.task_id!);
        row.acceptedAt ??= performance.now();
        await this.#poll(row, answer.json.task_id!, deadline);
        return row;
      }
      this.#end(row, answer);
    }
    return row;
  }

  async #poll(row: Row, id: string, deadline: number): Promise<void> {
    while (this.#goesOn(row, deadline)) {
      const path = `/v1/result/${id}?wait=${POLL_SECONDS}`;
      const answer = await this.#try(row, (door, late) => door.get(path, late));
      if (answer === undefined || (answer.status === 200 && answer.json.status === "PENDING")) continue;
      if (answer.status !== 404) this.#end(row, answer);
      else [row.end, row.endedAt] = ["gone", performance.now()];
    }
  }

  #goesOn(row: Row, deadline: number): boolean {
    return row.end === undefined && performance.now() < deadline && !this.#closing.signal.aborted;
  }

  /** One exchange at the next gateway; undefined, after a pause, when it has to be tried again. */
  async #try(
    row: Row,
    exchange: (door: Part, late: AbortSignal) => Promise<Answer>,
  ): Promise<Answer | undefined> {
    const doors = this.#doors();
    const at = performance.now();
    let [status, text] = [0, "no gateway runs"];
    if (doors.length > 0) {
      const late = AbortSignal.any([AbortSignal.timeout(this.#exchangeMs), this.#closing.signal]);
      try {
        const answer = await exchange(doors[this.#next++ % doors.length]!, late);
        if (answer.status !== 503) return answer;
        [status, text] = [503, answer.text];
      } catch (error) {
        text = String(error);
      }
    }
    this.ledger.refusals.push({ at, ms: performance.now() - at, status, text });
    await pause(this.#backoffMs(++row.refused));
    return undefined;
  }

  #end(row: Row, answer: Answer): void {
    row.endedAt = performance.now();
    const body: Body = answer.json;
    if (answer.status === 200 && body.status === "SUCCESS")
      row.end = JSON.stringify(body.output).includes(`"${row.marker}"`) ? "ok" : "crossed";
    else row.end = body.error ?? `status ${answer.status}`;
    if (answer.status !== 200 && ![502, 504].includes(answer.status))
      this.ledger.odd.push(`${answer.status} ${answer.text}`);
  }
}

/** Callers in a closed loop: each sends its next task when it has the answer to the last. */
export class Load implements AsyncDisposable {
  readonly ledger = new Ledger();
  readonly #callers: Caller[] = [];
  readonly #running: Promise<void>[];
  #stopped = false;

  constructor(
    doors: () => readonly Part[],
    { callers = 32, kinds = ["held", "polled"], name = "load", ...options }: LoadOptions = {},
  ) {
    this.#running = Array.from({ length: callers }, async (_, at) => {
      const caller = new Caller(doors, this.ledger, options);
      this.#callers.push(caller);
      for (let i = 0; !this.#stopped; i++) {
        await caller.run(`${name}/${at}/${i}`, kinds[(at + i) % kinds.length]!);
        await pause(THINK_MS);
      }
    });
  }

  /** Resolves when so many more were answered. */
  async more(count: number, withinMs = SOON_MS): Promise<void> {
    const [goal, deadline] = [this.ledger.answered + count, performance.now() + withinMs];
    while (this.ledger.answered < goal) {
      assert.ok(
        performance.now() < deadline,
        `only ${this.ledger.answered} of ${goal} were answered in time`,
      );
      await pause(10);
    }
  }

  /** No new tasks; resolves when all callers have their answers. */
  async stop(): Promise<Ledger> {
    this.#stopped = true;
    await Promise.all(this.#running);
    return this.ledger;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const caller of this.#callers) caller.close();
    await this.stop();
  }
}

export interface LoadOptions extends CallerOptions {
  readonly callers?: number;
  readonly kinds?: readonly Kind[];
  /** Every marker begins with it. */
  readonly name?: string;
}

/** Inputs that the workers saw more than once. */
export function runTwice(inputs: readonly unknown[]): unknown[] {
  const seen = new Set<unknown>();
  return inputs.filter((input) => seen.size === seen.add(input).size);
}
