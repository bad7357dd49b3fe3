/** A request whose bytes are counted: those of its body while it arrives, those of its answer until it is taken. */
import type { IncomingMessage } from "node:http";
import { ANONYMOUS } from "./admission/credentials.ts";
import { Refusal } from "../core/errors.ts";
import type { ClientBytes } from "./byte-budget.ts";
import { KnownRequest } from "./known.ts";

export abstract class CountedRequest extends KnownRequest {
  readonly request: IncomingMessage;
  readonly #bytes: ClientBytes;
  /** Fixed with its first use: what is added to a client's bytes must be taken from the same client's. */
  #client: string | undefined;
  #bodyHeld = 0;
  #answerHeld = 0;
  #over = false;
  /** Of a request that waits for room. */
  #resume: (() => void) | undefined;

  constructor(request: IncomingMessage, bytes: ClientBytes) {
    super();
    this.request = request;
    this.#bytes = bytes;
  }

  /**
   * Undefined: the client takes its answers. Else resolves when it has taken enough of them to get another one; never
   * when it leaves before that.
   */
  get room(): Promise<void> | undefined {
    const { answers } = this.#bytes;
    if (answers.total === 0 || this.#over || answers.hasRoom(this.#holder())) return undefined;
    return new Promise((resume) => {
      this.#resume = resume;
      answers.wait(this.#holder(), resume);
    });
  }

  /** What a body is refused with while there is no room for so many bytes of it. */
  protected noRoomFor(bytes: number): Refusal | undefined {
    if (this.#bytes.bodies.fits(this.#holder(), bytes)) return undefined;
    const message =
      "no room for this body: too many bytes of unfinished requests are being read; try again in 1 s";
    return new Refusal("SERVICE_OVERLOADED", message, { retryAfterMs: 1000 });
  }

  /** Counts a part of the body that has arrived, or says why it cannot be held. */
  protected holdBody(bytes: number): Refusal | undefined {
    const refusal = this.noRoomFor(bytes);
    if (refusal !== undefined) return refusal;
    this.#bytes.bodies.add(this.#holder(), bytes);
    this.#bodyHeld += bytes;
    return undefined;
  }

  protected releaseBody(): void {
    if (this.#bodyHeld > 0) this.#bytes.bodies.remove(this.#holder(), this.#bodyHeld);
    this.#bodyHeld = 0;
  }

  protected holdAnswer(bytes: number): void {
    this.#bytes.answers.add(this.#holder(), bytes);
    this.#answerHeld += bytes;
  }

  /** It is over: nothing of it is held any more. */
  protected releaseAll(): void {
    this.#over = true;
    this.releaseBody();
    if (this.#resume !== undefined) this.#bytes.answers.leave(this.#holder(), this.#resume);
    if (this.#answerHeld > 0) this.#bytes.answers.remove(this.#holder(), this.#answerHeld);
    this.#answerHeld = 0;
  }

  /** Without authentication everybody is one tenant: there each address is a client. */
  #holder(): string {
    if (this.#client !== undefined) return this.#client;
    const known = this.tenant !== "" && this.tenant !== ANONYMOUS;
    return (this.#client = known ? this.tenant : `address ${this.request.socket.remoteAddress ?? ""}`);
  }
}
