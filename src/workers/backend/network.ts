/**
 * Workers reached over HTTP or gRPC: their list, health checks and info.
 *
 * Health: each worker is asked on a separate connection, `askMs` after its last answer: GET on its health path, or
 * ModelReady over gRPC. Anything but 2xx, or no answer within `askTimeoutMs`, is a failed check.
 *
 *   a check succeeds            well. A JSON object may report load: the largest of `load`, `queue` and `memory`
 *                               (shares, 0 to 1) counts, beside the header x-ferry-load
 *   `failures` failed in a row  not well: no new batch until a check succeeds
 *
 * Being well only means that it may get batches; whether it runs them is judged by the batches. Conversely, a worker
 * that answers a batch is not dead: silence on the health path then means that it cannot do two things at once, and is
 * not counted.
 *
 * Info: where the protocol has it (TEI's `/info`), a worker is asked how many inputs it takes per call:
 *
 *   it answered                 again after 60 `askMs`, whether or not it named a limit
 *   no answer, or 5xx           again after `askMs`; the last limit holds
 *   it was unreachable and is back, or refused a batch of several    again at once, but not twice within `askMs`
 */
import type { Client, Dispatcher } from "undici";
import type { Alarm, Clock } from "../../app/clock.ts";
import { PadMemory } from "../../gateway/protocol/oip-pad.ts";
import type { Events } from "../../observe/events.ts";
import type { Backend, Batch, Reply, Worker, WorkerHealth } from "./backend.ts";
import { quote } from "./replies.ts";
import { tlsTrouble, WorkerTls, type WorkerTlsOptions } from "./worker-tls.ts";

export const ASK_TIMEOUT_MS = 2000;

export interface HealthRules {
  readonly askMs: number;
  /** ASK_TIMEOUT_MS by default. */
  readonly askTimeoutMs?: number;
  readonly failures: number;
}

export interface NetworkAround {
  readonly model: string;
  readonly clock: Clock;
  readonly events: Events;
}

export interface WorkerPlace {
  readonly name: string;
  readonly url: URL;
  /** `name:port` for the Host header and certificate, where the URL holds a resolved address. */
  readonly host?: string | undefined;
}

interface Maker {
  /** Undefined unless it is a URL of such a worker. */
  parse(address: string | undefined): URL | undefined;
  /** What `parse` accepts, for messages. */
  readonly wanted: string;
  make(place: WorkerPlace, tls: WorkerTls): NetworkWorker;
}

export class NetworkWorkers implements Backend {
  readonly #maker: Maker;
  readonly #tls: WorkerTls;
  readonly #workers: NetworkWorker[];

  constructor(
    options: { readonly workers: readonly string[]; readonly tls: WorkerTlsOptions },
    { model, clock, events }: NetworkAround,
    maker: Maker,
  ) {
    const urls = options.workers.map((worker) => new URL(worker));
    const names = workerNames(urls);
    this.#maker = maker;
    this.#tls = new WorkerTls(`model ${model}: backend.tls`, options.tls, clock, events);
    this.#workers = urls.map((url, index) => maker.make({ name: names[index]!, url }, this.#tls));
  }

  get workers(): readonly NetworkWorker[] {
    return this.#workers;
  }

  /** Does not wait for workers: one that is down may come up later. */
  async start(): Promise<void> {
    await this.#tls.start();
    for (const worker of this.#workers) worker.start();
  }

  async grow(address?: string, host?: string): Promise<NetworkWorker> {
    const url = this.#maker.parse(address);
    if (url === undefined) throw new Error(`say where the worker is: ${this.#maker.wanted}`);
    if (this.#workers.some((worker) => worker.address === address))
      throw new Error("this worker is there already");
    const taken = new Set(this.#workers.map(({ name }) => name));
    const name = [url.host, url.host + url.pathname].find((each) => !taken.has(each)) ?? url.href;
    const worker = this.#maker.make({ name, url, host }, this.#tls);
    worker.start();
    this.#workers.push(worker);
    return worker;
  }

  async retire(worker: Worker): Promise<void> {
    const at = this.#workers.findIndex((each) => each === worker);
    if (at >= 0) await this.#workers.splice(at, 1)[0]!.stop();
  }

  async stop(): Promise<void> {
    this.#tls.stop();
    await Promise.all(this.#workers.map((worker) => worker.stop()));
  }
}

/** One for all workers of a model. */
export function padMemory({ model, events }: NetworkAround): PadMemory {
  return new PadMemory((message) =>
    events.emit("notice", { level: "warn", message: `model ${model}: ${message}` }),
  );
}

/** Host and port, with the path where that is not unique, then with a number. */
function workerNames(urls: readonly URL[]): string[] {
  const unique = (names: readonly string[]): boolean => new Set(names).size === names.length;
  const hosts = urls.map((url) => url.host);
  if (unique(hosts)) return hosts;
  const paths = urls.map((url) => url.host + url.pathname);
  return unique(paths) ? paths : paths.map((path, index) => `${path}#${index + 1}`);
}

/** A running batch and one behind it. */
export const MAX_WORKER_CALLS = 2;
/** How long a worker whose reply could not be split gets one task at a time. */
const INSEPARABLE_HOLDS_MS = 60_000;
/** Info interval, in `askMs`. */
const INFO_ROUNDS = 60;

interface HealthQuestion {
  /** What is asked, for messages: "its health path /health". */
  readonly what: string;
  /** Never throws. */
  ask(signal: AbortSignal): Promise<HealthVerdict>;
}

export interface HealthVerdict {
  /** "" when it is well. */
  readonly why: string;
  readonly silent: boolean;
  readonly share?: number | undefined;
}

export abstract class NetworkWorker implements Worker {
  readonly name: string;
  readonly address: string;
  readonly host: string | undefined;
  protected readonly clock: Clock;
  protected stopped = false;
  /** The last batch reached it. */
  protected reached = true;
  load: Worker["load"];
  health: WorkerHealth | undefined;
  onHealth: (() => void) | undefined;
  #polls: Poll[] = [];
  #question: HealthQuestion | undefined;
  #failures = Infinity;
  #failed = 0;
  #silent = false;
  #info: Poll | undefined;
  #aloneUntil = -Infinity;
  /** The protocol's limit per call, until the worker reports its own. */
  protected limit: number | undefined;

  constructor({ name, url, host }: WorkerPlace, clock: Clock) {
    this.name = name;
    this.address = url.href;
    this.host = host;
    this.clock = clock;
  }

  abstract run(batch: Batch, signal: AbortSignal): Promise<Reply>;

  start(): void {
    for (const poll of this.#polls) poll.start();
  }

  stop(): Promise<void> {
    this.stopped = true;
    for (const poll of this.#polls) poll.stop();
    return Promise.resolve();
  }

  /** Only after it was unreachable: answering probes does not prove that it runs batches. */
  get probe(): Worker["probe"] {
    const question = this.#question;
    return question === undefined || this.reached ? undefined : (signal) => this.#check(question, signal);
  }

  get maxBatchSize(): number | undefined {
    return this.clock.now() < this.#aloneUntil ? 1 : this.limit;
  }

  protected checkHealth(question: HealthQuestion, rules: HealthRules): void {
    this.#question = question;
    this.#failures = rules.failures;
    const ask = async (signal: AbortSignal): Promise<number> => {
      await this.#check(question, signal);
      return rules.askMs;
    };
    this.#polls.push(new Poll(rules, this.clock, ask));
  }

  protected askInfo(place: HttpPlace, read: (text: string) => number | undefined, rules: HealthRules): void {
    this.#info = new Poll(rules, this.clock, async (signal) => {
      const text = await askText(place, signal);
      if (text === undefined) return rules.askMs;
      this.limit = read(text) ?? this.limit;
      return INFO_ROUNDS * rules.askMs;
    });
    this.#polls.push(this.#info);
  }

  /** After each batch of `inputs`; `load` and `inseparable` as its reply said. */
  protected noteReply(reply: Reply, inputs: number, load: number | undefined, inseparable: boolean): void {
    const reached = reply.kind !== "failed" || reply.blame !== "nobody";
    // It may have been restarted with another limit, or the batch may have exceeded it.
    if ((reached && !this.reached) || (reply.kind === "rejected" && inputs > 1)) this.#info?.again();
    this.reached = reached;
    if (reply.kind !== "failed" && this.#silent) this.#failed = 0;
    if (inseparable) this.#aloneUntil = this.clock.now() + INSEPARABLE_HOLDS_MS;
    this.#noteLoad(load);
  }

  #noteLoad(share: number | undefined): void {
    if (share !== undefined) this.load = { share, at: this.clock.now() };
  }

  async #check(question: HealthQuestion, signal: AbortSignal): Promise<boolean> {
    if (this.stopped || signal.aborted) return false;
    const { why, silent, share } = await question.ask(signal);
    if (this.stopped) return why === "";
    this.#noteLoad(share);
    this.#silent = silent;
    this.#failed = why === "" ? 0 : this.#failed + 1;
    if (why === "") this.#setHealth(true, "");
    else if (this.#failed >= this.#failures) {
      const times = this.#failed === 1 ? "" : ` (${this.#failures} times in a row)`;
      this.#setHealth(false, `${question.what} ${why}${times}`);
    }
    return why === "";
  }

  #setHealth(well: boolean, why: string): void {
    const before = this.health?.well ?? true;
    if (this.health?.well === well) return;
    this.health = { well, why, since: this.clock.now() };
    if (before === well) return;
    if (well) this.#info?.again();
    this.onHealth?.();
  }
}

/** Asks a worker repeatedly, for at most `askTimeoutMs` each time. */
class Poll {
  readonly #rules: HealthRules;
  readonly #clock: Clock;
  readonly #ask: (signal: AbortSignal) => Promise<number>;
  /** Of the next question, or the timeout of this one. */
  #alarm: Alarm | undefined;
  #asking: AbortController | undefined;
  #askedAt = -Infinity;
  #stopped = false;

  /** `ask` returns the milliseconds until the next question, and never throws. */
  constructor(rules: HealthRules, clock: Clock, ask: (signal: AbortSignal) => Promise<number>) {
    this.#rules = rules;
    this.#clock = clock;
    this.#ask = ask;
  }

  start(): void {
    void this.#round();
  }

  stop(): void {
    this.#stopped = true;
    this.#alarm?.cancel();
    this.#asking?.abort();
  }

  /** Early, but not twice within `askMs`: a worker may refuse every batch. */
  again(): void {
    if (this.#stopped || this.#asking !== undefined || this.#askedAt === -Infinity) return;
    this.#alarm?.cancel();
    const due = this.#askedAt + this.#rules.askMs;
    if (due <= this.#clock.now()) this.start();
    else this.#alarm = this.#clock.at(due, () => this.start());
  }

  async #round(): Promise<void> {
    const asking = (this.#asking = new AbortController());
    this.#askedAt = this.#clock.now();
    const { askTimeoutMs = ASK_TIMEOUT_MS } = this.#rules;
    this.#alarm = this.#clock.at(this.#askedAt + askTimeoutMs, () => asking.abort());
    const waitMs = await this.#ask(asking.signal);
    this.#asking = undefined;
    this.#alarm.cancel();
    if (!this.#stopped) this.#alarm = this.#clock.at(this.#clock.now() + waitMs, () => this.start());
  }
}

export interface HttpPlace {
  readonly path: string;
  readonly headers: Record<string, string>;
  /** A connection for one question, with the current certificates: nothing is left over for the next. */
  client(): Client;
}

const MAX_HEALTH_BYTES = 64 * 1024;
/** TEI's info contains every label of a classifier. */
const MAX_INFO_BYTES = 4 * 1024 * 1024;
const SHARES = ["load", "queue", "memory"] as const;

interface Got {
  readonly status: number;
  readonly headers: Dispatcher.ResponseData["headers"];
  /** "" unless the status is 2xx, and when longer than `maxBytes`. */
  readonly text: string;
}

async function get(place: HttpPlace, maxBytes: number, signal: AbortSignal): Promise<Got> {
  const { path, headers } = place;
  const client = place.client();
  try {
    const answer = await client.request({ path, method: "GET", headers, signal });
    const got = { status: answer.statusCode, headers: answer.headers, text: "" };
    if (!isOk(got.status)) return got;
    const chunks: Buffer[] = [];
    let bytes = 0;
    for await (const chunk of answer.body as AsyncIterable<Buffer>) {
      bytes += chunk.length;
      if (bytes > maxBytes) return got;
      chunks.push(chunk);
    }
    return { ...got, text: Buffer.concat(chunks).toString("utf8") };
  } finally {
    void client.destroy();
  }
}

export function healthOverHttp(place: HttpPlace): HealthQuestion {
  const ask = async (signal: AbortSignal): Promise<HealthVerdict> => {
    try {
      const { status, headers, text } = await get(place, MAX_HEALTH_BYTES, signal);
      if (!isOk(status)) return { why: `answered ${status}`, silent: false };
      const shares = [headerLoad(headers), bodyLoad(text)].filter((share) => share !== undefined);
      return { why: "", silent: false, share: shares.length === 0 ? undefined : Math.max(...shares) };
    } catch (error) {
      return { why: signal.aborted ? "did not answer in time" : troubleOf(error as Error), silent: true };
    }
  };
  return { what: `its health path ${place.path}`, ask };
}

function troubleOf(error: Error & { code?: string }): string {
  const why = tlsTrouble(error)?.message ?? (quote(error.message, 120) || error.code || error.name);
  return `cannot be asked: ${why}`;
}

/** A JSON text, "" for a useless answer; undefined when the worker could not be asked. */
export async function askText(place: HttpPlace, signal: AbortSignal): Promise<string | undefined> {
  try {
    const { status, text } = await get(place, MAX_INFO_BYTES, signal);
    if (status >= 500 || status === 429) return undefined;
    return isJson(text) ? text : "";
  } catch {
    return undefined;
  }
}

function isOk(status: number): boolean {
  return status >= 200 && status < 300;
}

function isJson(text: string): boolean {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** The largest share in a JSON object; undefined for none. */
export function bodyLoad(text: string): number | undefined {
  if (!isJson(text)) return undefined;
  const value: unknown = JSON.parse(text);
  if (typeof value !== "object" || value === null) return undefined;
  const shares = SHARES.map((name) => (value as Record<string, unknown>)[name]).filter(
    (share): share is number => typeof share === "number" && share >= 0 && share <= 1,
  );
  return shares.length === 0 ? undefined : Math.max(...shares);
}

/** `x-ferry-load: 0.93`; undefined unless a number from 0 to 1. */
export function headerLoad(
  headers: Readonly<Record<string, string | string[] | undefined>>,
): number | undefined {
  const text = headers["x-ferry-load"];
  if (typeof text !== "string" || !/^\s*[01](?:\.\d{1,12})?\s*$/.test(text)) return undefined;
  const share = Number(text);
  return share <= 1 ? share : undefined;
}
