/**
 * A worker that speaks the `batch` protocol and behaves as its test wants: `behave` decides each call, and
 * `calls` remembers them. By default an output embeds its input: `{"of": input}`. It can go away and come
 * back on the same port.
 */
import assert from "node:assert/strict";
import {
  createServer,
  type IncomingHttpHeaders,
  type IncomingMessage,
  type Server,
  type ServerResponse,
} from "node:http";
import { SOON_MS } from "./harness.ts";
import { ReturningServer } from "./returning-server.ts";

export class StubCall {
  readonly at = performance.now();
  readonly body: string;
  readonly inputs: readonly unknown[];
  readonly parameters: unknown;
  readonly headers: IncomingHttpHeaders;
  readonly #response: ServerResponse;

  constructor(body: string, headers: IncomingHttpHeaders, response: ServerResponse) {
    const { inputs, parameters } = JSON.parse(body) as { inputs: unknown[]; parameters?: unknown };
    this.body = body;
    this.headers = headers;
    this.inputs = inputs;
    this.parameters = parameters;
    this.#response = response;
  }

  /** One output per input, each embedding its own. */
  echo(): void {
    this.outputs(this.inputs.map((of) => ({ of })));
  }

  outputs(outputs: readonly unknown[]): void {
    this.reply(200, JSON.stringify({ outputs }));
  }

  reply(status: number, text: string, headers: Readonly<Record<string, string>> = {}): void {
    this.#response.writeHead(status, { "content-type": "application/json", ...headers }).end(text);
  }

  /** Starts an answer that goes on for ever, as fast as it is read. */
  flood(chunk: string): void {
    this.#response.writeHead(200, { "content-type": "application/json" });
    const pour = (): void => {
      while (!this.#response.destroyed && this.#response.write(chunk));
    };
    this.#response.on("drain", pour);
    pour();
  }

  reset(): void {
    this.#response.socket?.resetAndDestroy();
  }

  get abandoned(): boolean {
    return this.#response.destroyed && !this.#response.writableFinished;
  }
}

export type Behaviour = (call: StubCall) => void | Promise<void>;

export const echo: Behaviour = (call) => call.echo();
export const hang: Behaviour = () => {};

export class StubWorker extends ReturningServer {
  behave: Behaviour;
  readonly calls: StubCall[] = [];
  mostAtOnce = 0;
  #open = 0;
  #woken = Promise.withResolvers<void>();

  private constructor(behave: Behaviour) {
    super();
    this.behave = behave;
  }

  static async listen(behave: Behaviour = echo): Promise<StubWorker> {
    const stub = new StubWorker(behave);
    await stub.open();
    return stub;
  }

  override get url(): string {
    return `${super.url}/infer`;
  }

  /** Every input it has seen so far, in order. */
  get inputs(): unknown[] {
    return this.calls.flatMap((call) => call.inputs);
  }

  /** Waits for the n-th call (the first is 1). */
  async call(n: number, withinMs = SOON_MS): Promise<StubCall> {
    const late = AbortSignal.timeout(withinMs);
    const expired = Promise.withResolvers<void>();
    late.addEventListener("abort", () => expired.resolve(), { once: true });
    while (this.calls.length < n) {
      assert.ok(!late.aborted, `${this.calls.length} calls after ${withinMs} ms, not ${n}`);
      await Promise.race([this.#woken.promise, expired.promise]);
    }
    return this.calls[n - 1]!;
  }

  protected override make(): Server {
    const server = createServer({ keepAliveTimeout: 60_000 });
    server.on("request", (request, response) => void this.#answer(request, response));
    return server;
  }

  async #answer(request: IncomingMessage, response: ServerResponse): Promise<void> {
    this.mostAtOnce = Math.max(this.mostAtOnce, ++this.#open);
    response.on("close", () => this.#open--);
    response.on("error", () => {}); // Ferry may hang up while we answer.
    const chunks: Buffer[] = [];
    try {
      for await (const chunk of request) chunks.push(chunk as Buffer);
    } catch {
      return; // Ferry hung up while it was sending.
    }
    const call = new StubCall(Buffer.concat(chunks).toString("utf8"), request.headers, response);
    this.calls.push(call);
    const woken = this.#woken;
    this.#woken = Promise.withResolvers();
    woken.resolve();
    await this.behave(call);
  }
}

/** A gate that calls wait at until it is opened. */
export class Gate {
  readonly #opened = Promise.withResolvers<void>();

  /** A worker that answers only once the gate is open. */
  readonly hold: Behaviour = async (call) => {
    await this.#opened.promise;
    if (!call.abandoned) call.echo();
  };

  open(): void {
    this.#opened.resolve();
  }
}

/** A config's model in front of these stubs. */
export function stubModel(stubs: readonly StubWorker[], more: Readonly<Record<string, unknown>> = {}) {
  const workers = stubs.map((stub) => stub.url);
  return { name: "stub", backend: { kind: "http", protocol: "batch", workers }, ...more };
}
