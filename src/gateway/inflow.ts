/**
 * A request's body on its way to somebody else: as it comes, and no faster than it is taken.
 *
 * Nothing is read before the first byte is wanted, so that a body which nobody took can be offered again. Whoever
 * is done with it early leaves the request as it is: destroying this never ends the client's connection.
 */
import type { IncomingMessage } from "node:http";
import { Readable } from "node:stream";

export interface InflowRules {
  readonly maxBytes: number;
  /** Called once, before the first byte is read. */
  readonly begin: () => void;
  /** What a body that turns out to be larger fails with. */
  readonly tooLarge: () => Error;
}

export class Inflow extends Readable {
  readonly #request: IncomingMessage;
  readonly #rules: InflowRules;
  readonly #head: Buffer;
  #bytes = 0;
  #begun = false;

  /** `head`: bytes that were read of it before; the request is paused behind them. */
  constructor(request: IncomingMessage, rules: InflowRules, head: Buffer) {
    super();
    this.#request = request;
    this.#rules = rules;
    this.#head = head;
  }

  override _read(): void {
    const request = this.#request;
    if (this.#begun) return void request.resume();
    this.#begun = true;
    this.#rules.begin();
    request.on("data", this.#onData);
    request.once("end", this.#onEnd);
    request.once("close", this.#onClose);
    if (this.#head.length === 0) return;
    this.#bytes = this.#head.length;
    if (this.push(this.#head)) request.resume();
  }

  override _destroy(error: Error | null, done: (error?: Error | null) => void): void {
    const request = this.#request;
    request.off("data", this.#onData);
    request.off("end", this.#onEnd);
    request.off("close", this.#onClose);
    if (this.#begun && !request.readableEnded) request.pause();
    done(error);
  }

  readonly #onData = (chunk: Buffer): void => {
    this.#bytes += chunk.length;
    if (this.#bytes > this.#rules.maxBytes) return void this.destroy(this.#rules.tooLarge());
    if (!this.push(chunk)) this.#request.pause();
  };

  readonly #onEnd = (): void => {
    // Of HTTP/2, where a stream that is broken off ends like any other.
    if (this.#request.aborted) this.#onClose();
    else this.push(null);
  };

  readonly #onClose = (): void => {
    if (!this.#request.readableEnded || this.#request.aborted)
      this.destroy(new Error("the client left while it was sending"));
  };
}
