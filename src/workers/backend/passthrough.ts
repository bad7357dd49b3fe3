/**
 * The way to the workers of one model for single requests that no batch is for.
 *
 * A request goes to one worker: among those that are well, to the one with the fewest of them under way, in turn
 * where several have as few. A worker that cannot be connected to has seen nothing of the request, so the next one is
 * tried, whatever the method; each once. From the first byte on the request is that worker's, for better or worse.
 *
 * Connections are kept apart from those of batches. They are kept alive for a moment, one request at a time; whatever
 * does not end with a whole answer destroys its connection. There is no clock in here: who waits decides how long.
 */
import type { Readable } from "node:stream";
import { type Dispatcher, errors, Pool } from "undici";
import type { Clock } from "../../app/clock.ts";
import type { Events } from "../../observe/events.ts";
import { authorizationOf, CONNECTION } from "./http.ts";
import { reason } from "./http-exchange.ts";
import { quote } from "./match.ts";
import { CONNECT_TIMEOUT_MS, tlsTrouble, WorkerTls, type WorkerTlsOptions } from "./worker-tls.ts";

export interface PassageOptions {
  readonly model: string;
  /** Those that are there now. */
  readonly workers: () => readonly KnownWorker[];
  /** The path of such a URL without what is the protocol's own. */
  readonly basePath: (path: string) => string;
  readonly authorization?: string | undefined;
  readonly tls: WorkerTlsOptions;
  /** How long a worker that could not be reached comes last. */
  readonly ejectMs: number;
}

export interface KnownWorker {
  /** Its full endpoint URL. */
  readonly address: string;
  /** `name:port` that it is asked by, where its address was looked up. */
  readonly host?: string | undefined;
  /** Nothing speaks against it. */
  readonly well: boolean;
}

/** One request. */
export interface Parcel {
  readonly method: string;
  /** Behind the worker's base, with its query. */
  readonly path: string;
  /** Name, value, name, value… */
  readonly headers: readonly string[];
  /** The client's own `Authorization`; null: send none; undefined: send the configured one. */
  readonly authorization?: string | null | undefined;
  /** Asked once for each worker that is tried; the one before was not touched. */
  body(): Readable | Buffer | null;
}

/** Who takes the answer. Exactly one of `ended` and `failed` comes last, unless the parcel was recalled. */
export interface Receiver {
  /** `headers`: name, value, name, value… */
  started(status: number, headers: readonly string[]): void;
  /** False: no more until `resume`. */
  data(chunk: Buffer): boolean;
  ended(): void;
  failed(message: string, how: Failure): void;
}

/** `unseen`: no worker could be reached; `unfit`: it cannot be written as a request; `broken`: a worker had it. */
export type Failure = "unseen" | "unfit" | "broken";

export interface Underway {
  resume(): void;
  /** Nobody wants it any more. */
  recall(): void;
}

export class Passage {
  readonly #options: PassageOptions;
  readonly #clock: Clock;
  readonly #tls: WorkerTls;
  /** By address; those that are gone are forgotten when the next one comes. */
  readonly #stops = new Map<string, Stop>();
  #turn = 0;

  constructor(options: PassageOptions, clock: Clock, events: Events) {
    this.#options = options;
    this.#clock = clock;
    this.#tls = new WorkerTls(`model ${options.model}: backend.tls`, options.tls, clock, events);
  }

  /** Rejects with one line when a certificate cannot be used. */
  async start(): Promise<void> {
    await this.#tls.start();
  }

  async stop(): Promise<void> {
    this.#tls.stop();
    await Promise.all([...this.#stops.values()].map((stop) => stop.end()));
  }

  /** Takes nothing new; what is under way goes on. */
  leave(): void {
    this.#tls.stop();
    for (const stop of this.#stops.values()) stop.leave();
  }

  send(parcel: Parcel, receiver: Receiver): Underway {
    const stops = this.#inOrder();
    let call: Call | undefined;
    let recalled = false;
    const next = (): void => {
      const stop = stops.shift();
      if (stop === undefined) return receiver.failed("no worker is there", "unseen");
      call = new Call(receiver, (message) => {
        stop.downUntil = this.#clock.now() + this.#options.ejectMs;
        if (recalled) return;
        if (stops.length > 0) next();
        else receiver.failed(message, "unseen");
      });
      stop.send(parcel, call);
    };
    next();
    return {
      resume: () => call?.resume(),
      recall: () => {
        recalled = true;
        call?.recall();
      },
    };
  }

  /** The best first. */
  #inOrder(): Stop[] {
    const now = this.#clock.now();
    const workers = this.#options.workers();
    const first = this.#turn++ % Math.max(1, workers.length);
    const places = workers.map(({ address, host, well }, at) => {
      const stop = this.#stop(address, host, workers);
      const bad = now < stop.downUntil || !well ? 1 : 0;
      return { stop, bad, turn: (at - first + workers.length) % workers.length };
    });
    places.sort(
      (one, other) => one.bad - other.bad || one.stop.underway - other.stop.underway || one.turn - other.turn,
    );
    return places.map(({ stop }) => stop);
  }

  #stop(address: string, host: string | undefined, workers: readonly KnownWorker[]): Stop {
    const known = this.#stops.get(address);
    if (known !== undefined && known.host === host) return known;
    known?.leave();
    for (const [each, stop] of this.#stops) {
      if (workers.some((worker) => worker.address === each)) continue;
      this.#stops.delete(each);
      stop.leave();
    }
    const stop = new Stop(new URL(address), host, this.#options, this.#tls);
    this.#stops.set(address, stop);
    return stop;
  }
}

/** One worker, as seen from here. */
class Stop {
  readonly host: string | undefined;
  readonly #secure: boolean;
  readonly #origin: string;
  readonly #basePath: string;
  readonly #authorization: string | undefined;
  readonly #tls: WorkerTls;
  #pool: Pool | undefined;
  /** Of the certificates with which it was made. */
  #version = 0;
  underway = 0;
  downUntil = -Infinity;

  constructor(
    url: URL,
    host: string | undefined,
    { basePath, authorization }: PassageOptions,
    tls: WorkerTls,
  ) {
    this.host = host;
    this.#secure = url.protocol === "https:";
    this.#origin = url.origin;
    this.#basePath = basePath(url.pathname);
    this.#authorization = authorizationOf(url, authorization).authorization;
    this.#tls = tls;
  }

  send(parcel: Parcel, call: Call): void {
    this.underway++;
    call.onOver = () => this.underway--;
    const { authorization = this.#authorization } = parcel;
    const headers = [...parcel.headers];
    if (this.host !== undefined) headers.push("host", this.host);
    if (authorization !== undefined && authorization !== null) headers.push("authorization", authorization);
    const path = this.#basePath + parcel.path;
    const { method } = parcel;
    try {
      this.#connections().dispatch({ path, method, headers, body: parcel.body() }, call);
    } catch (error) {
      call.unfit(error as Error);
    }
  }

  /** What is under way goes on. */
  leave(): void {
    void this.#pool?.close();
  }

  async end(): Promise<void> {
    await this.#pool?.destroy();
  }

  #connections(): Pool {
    if (this.#pool !== undefined && this.#version === this.#tls.version) return this.#pool;
    // Those under way end on their connections, new ones start on others.
    void this.#pool?.close();
    this.#version = this.#tls.version;
    const connect = this.#secure && { connect: this.#tls.connector(CONNECT_TIMEOUT_MS, { host: this.host }) };
    this.#pool = new Pool(this.#origin, { ...CONNECTION, ...connect });
    return this.#pool;
  }
}

/** One try at one worker. */
class Call implements Dispatcher.DispatchHandler {
  readonly #receiver: Receiver;
  readonly #unseen: (message: string) => void;
  #controller: Dispatcher.DispatchController | undefined;
  #answering = false;
  #recalled = false;
  #over = false;
  onOver: () => void = () => {};

  /** `unseen`: this worker could not be reached. */
  constructor(receiver: Receiver, unseen: (message: string) => void) {
    this.#receiver = receiver;
    this.#unseen = unseen;
  }

  resume(): void {
    this.#controller?.resume();
  }

  recall(): void {
    this.#recalled = true;
    this.#controller?.abort(new errors.RequestAbortedError());
  }

  /** Nothing was done: what the client wrote is no header, or no path, that may be sent. */
  unfit(error: Error): void {
    if (this.#ends()) this.#receiver.failed(`it cannot be passed on: ${quote(error.message)}`, "unfit");
  }

  /** The connection stands, and the request is about to be written. */
  onRequestStart(controller: Dispatcher.DispatchController): void {
    this.#controller = controller;
    if (this.#recalled) controller.abort(new errors.RequestAbortedError());
  }

  onResponseStart(controller: Dispatcher.DispatchController, status: number): void {
    // "103 Early Hints" and the like come before the answer.
    if (status < 200 || this.#recalled) return;
    this.#answering = true;
    const raw = (controller.rawHeaders ?? []) as readonly (Buffer | string)[];
    this.#receiver.started(
      status,
      raw.map((text) => (typeof text === "string" ? text : text.toString("latin1"))),
    );
  }

  onResponseData(controller: Dispatcher.DispatchController, chunk: Buffer): void {
    if (!this.#recalled && !this.#receiver.data(chunk)) controller.pause();
  }

  onResponseEnd(): void {
    if (this.#ends()) this.#receiver.ended();
  }

  onResponseError(_controller: unknown, error: Error): void {
    if (!this.#ends()) return;
    const tls = tlsTrouble(error);
    if (this.#controller === undefined) {
      this.#unseen(tls?.message ?? `cannot connect to the worker: ${reason(error)}`);
    } else if (error instanceof errors.HTTPParserError) {
      this.#receiver.failed("the worker's answer is not HTTP/1.1", "broken");
    } else {
      const when = this.#answering ? "in the middle of its answer" : "before it answered";
      this.#receiver.failed(`the worker closed the connection ${when} (${reason(error)})`, "broken");
    }
  }

  /** False when it is over already, or nobody wants to know. */
  #ends(): boolean {
    if (this.#over) return false;
    this.#over = true;
    this.onOver();
    return !this.#recalled;
  }
}
