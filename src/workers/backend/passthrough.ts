/**
 * Sends single requests that bypass batching to a worker of one model. Order: healthy workers first, then fewest such
 * requests in flight, then round-robin. A worker that cannot be connected to has seen nothing, so the next is tried,
 * each once, whatever the method. From the first byte on, the request belongs to that worker. Connections are separate
 * from those of batches, kept alive briefly, one request at a time; an incomplete exchange destroys its connection. No
 * timeout here: the caller decides.
 */
import { type Dispatcher, errors, Pool } from "undici";
import type { Clock } from "../../app/clock.ts";
import type { PassedRequest, PassReceiver, PassUnderway } from "../../gateway/protocol/protocol.ts";
import type { Events } from "../../observe/events.ts";
import { authorizationOf, connectionOptions } from "./http.ts";
import { quote } from "./replies.ts";
import { reason, tlsTrouble, WorkerTls, type WorkerTlsOptions } from "./worker-tls.ts";

interface PassOptions {
  readonly model: string;
  readonly workers: () => readonly KnownWorker[];
  /** The path of a worker's URL without the protocol's part. */
  readonly basePath: (path: string) => string;
  readonly authorization?: string | undefined;
  readonly tls: WorkerTlsOptions;
  /** How long an unreachable worker comes last. */
  readonly ejectMs: number;
}

export interface KnownWorker {
  readonly address: string;
  /** `name:port` for the Host header and certificate, where its address came from DNS. */
  readonly host?: string | undefined;
  readonly well: boolean;
}

export class PassThroughWorkers {
  readonly #options: PassOptions;
  readonly #clock: Clock;
  readonly #tls: WorkerTls;
  /** By address; removed workers are dropped when a new one is added. */
  readonly #targets = new Map<string, Target>();
  #turn = 0;

  constructor(options: PassOptions, clock: Clock, events: Events) {
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
    const pools = [...this.#targets.values()].flatMap(({ pool }) => pool ?? []);
    await Promise.all(pools.map((pool) => pool.destroy()));
  }

  /** Accepts nothing new; requests in flight go on. */
  leave(): void {
    this.#tls.stop();
    for (const { pool } of this.#targets.values()) void pool?.close();
  }

  send(request: PassedRequest, receiver: PassReceiver): PassUnderway {
    const targets = this.#inOrder();
    let call: PassedCall | undefined;
    let recalled = false;
    const next = (): void => {
      const target = targets.shift();
      if (target === undefined) return receiver.failed("no worker is there", "unseen");
      call = new PassedCall(receiver, (message) => {
        target.downUntil = this.#clock.now() + this.#options.ejectMs;
        if (recalled) return;
        if (targets.length > 0) next();
        else receiver.failed(message, "unseen");
      });
      target.send(request, call);
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

  #inOrder(): Target[] {
    const now = this.#clock.now();
    const workers = this.#options.workers();
    const first = this.#turn++ % Math.max(1, workers.length);
    const ranked = workers.map((worker, at) => {
      const target = this.#target(worker, workers);
      const bad = now < target.downUntil || !worker.well ? 1 : 0;
      return { target, bad, turn: (at - first + workers.length) % workers.length };
    });
    ranked.sort((a, b) => a.bad - b.bad || a.target.underway - b.target.underway || a.turn - b.turn);
    return ranked.map(({ target }) => target);
  }

  #target({ address, host }: KnownWorker, workers: readonly KnownWorker[]): Target {
    const known = this.#targets.get(address);
    if (known !== undefined && known.host === host) return known;
    void known?.pool?.close();
    for (const [each, { pool }] of this.#targets) {
      if (workers.some((worker) => worker.address === each)) continue;
      this.#targets.delete(each);
      void pool?.close();
    }
    const target = new Target(new URL(address), host, this.#options, this.#tls);
    this.#targets.set(address, target);
    return target;
  }
}

class Target {
  readonly host: string | undefined;
  readonly #url: URL;
  readonly #basePath: string;
  readonly #authorization: string | undefined;
  readonly #tls: WorkerTls;
  pool: Pool | undefined;
  /** Version of the certificates the pool was made with. */
  #version = 0;
  underway = 0;
  downUntil = -Infinity;

  constructor(url: URL, host: string | undefined, options: PassOptions, tls: WorkerTls) {
    this.host = host;
    this.#url = url;
    this.#basePath = options.basePath(url.pathname);
    this.#authorization = authorizationOf(url, options.authorization).authorization;
    this.#tls = tls;
  }

  send(request: PassedRequest, call: PassedCall): void {
    this.underway++;
    call.onOver = () => this.underway--;
    const { method, authorization = this.#authorization } = request;
    const headers = [...request.headers];
    if (this.host !== undefined) headers.push("host", this.host);
    if (authorization !== undefined && authorization !== null) headers.push("authorization", authorization);
    const path = this.#basePath + request.path;
    try {
      this.#connections().dispatch({ path, method, headers, body: request.body() }, call);
    } catch (error) {
      call.unfit(error as Error);
    }
  }

  #connections(): Pool {
    if (this.pool !== undefined && this.#version === this.#tls.version) return this.pool;
    // Requests in flight finish on their connections, new ones use others.
    void this.pool?.close();
    this.#version = this.#tls.version;
    return (this.pool = new Pool(this.#url.origin, connectionOptions(this.#url, this.host, this.#tls)));
  }
}

class PassedCall implements Dispatcher.DispatchHandler {
  readonly #receiver: PassReceiver;
  readonly #unseen: (message: string) => void;
  #controller: Dispatcher.DispatchController | undefined;
  #answering = false;
  #recalled = false;
  #over = false;
  onOver: () => void = () => {};

  /** `unseen`: this worker could not be reached. */
  constructor(receiver: PassReceiver, unseen: (message: string) => void) {
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

  /** Nothing was sent: the client's header or path is invalid. */
  unfit(error: Error): void {
    if (this.#ends()) this.#receiver.failed(`it cannot be passed on: ${quote(error.message)}`, "unfit");
  }

  /** Connected; the request is about to be written. */
  onRequestStart(controller: Dispatcher.DispatchController): void {
    this.#controller = controller;
    if (this.#recalled) controller.abort(new errors.RequestAbortedError());
  }

  onResponseStart(controller: Dispatcher.DispatchController, status: number): void {
    // Skips 1xx, such as "103 Early Hints".
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
    if (this.#controller === undefined) {
      this.#unseen(tlsTrouble(error)?.message ?? `cannot connect to the worker: ${reason(error)}`);
    } else if (error instanceof errors.HTTPParserError) {
      this.#receiver.failed("the worker's answer is not HTTP/1.1", "broken");
    } else {
      const when = this.#answering ? "in the middle of its answer" : "before it answered";
      this.#receiver.failed(`the worker closed the connection ${when} (${reason(error)})`, "broken");
    }
  }

  /** False when it already ended or was recalled. */
  #ends(): boolean {
    if (this.#over) return false;
    this.#over = true;
    this.onOver();
    return !this.#recalled;
  }
}
