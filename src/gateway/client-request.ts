/**
 * What HTTP requests and gRPC calls have in common: the fields of the request log, written as they become known, and the
 * bytes that this process holds for the client.
 *
 * Those bytes are bounded and shared among clients: a client may hold at most as many as are left free (`core/share.ts`).
 * There are two budgets, for all listeners together. Request bodies count as they arrive, until the last byte is there;
 * answers from when they are written until the client's connection has taken them.
 */
import type { IncomingMessage } from "node:http";
import { type ErrorCode, Refusal } from "../core/errors.ts";
import { hasShare, Shares } from "../core/share.ts";
import type { RequestTrace } from "../core/trace.ts";
import { type AnsweredRequest, CLIENT_LEFT, type TaskEnding } from "../observe/events.ts";
import { ANONYMOUS } from "./admission/credentials.ts";

export abstract class ClientRequest implements AnsweredRequest {
  readonly request: IncomingMessage;
  readonly startedAt: number;
  id = "";
  route = "";
  model = "";
  tier = "";
  tenant = "";
  status = 0;
  code: ErrorCode | "" = "";
  latencyMs = 0;
  work: AnsweredRequest["work"] = "own";
  ending: TaskEnding | undefined = undefined;
  trace: RequestTrace | undefined = undefined;
  /** False: a health check, which is no request of a client. */
  counts = true;
  readonly #bytes: ClientBytes;
  #gone: (() => void) | undefined;
  /** The client was gone before it was answered, or its own deadline passed. */
  protected left = false;
  /** Fixed with its first use: what is added to a client's bytes must be taken from the same client's. */
  #client: string | undefined;
  #bodyHeld = 0;
  #answerHeld = 0;
  #over = false;
  /** Of a request that waits for room. */
  #resume: (() => void) | undefined;

  constructor(request: IncomingMessage, now: number, bytes: ClientBytes) {
    this.request = request;
    this.startedAt = now;
    this.#bytes = bytes;
  }

  get method(): string {
    return this.request.method!;
  }

  header(name: string): string | undefined {
    const value = this.request.headers[name];
    return typeof value === "string" ? value : value?.[0];
  }

  /** Calls `gone` when the client leaves before it is answered; at once when it did already. */
  onGone(gone: () => void): void {
    this.#gone = gone;
    if (this.left) gone();
  }

  protected leave(): void {
    this.left = true;
    this.#gone?.();
  }

  /** It is over, and its fields stay as they are. */
  over(now: number): void {
    this.latencyMs = now - this.startedAt;
    if (this.status === 0) this.status = CLIENT_LEFT;
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

export class ByteBudget {
  readonly #max: () => number;
  readonly #shares = new Shares();
  /** By client: the requests that wait for room. */
  readonly #waiting = new Map<string, Set<() => void>>();

  /** `max` may change while bytes are held. */
  constructor(max: () => number) {
    this.#max = max;
  }

  get total(): number {
    return this.#shares.total;
  }

  /** Whether the client may hold so many more; twice, because with them, too, it holds no more than is left free. */
  fits(client: string, bytes: number): boolean {
    return this.#shares.fits(client, 2 * bytes, this.#max());
  }

  add(client: string, bytes: number): void {
    this.#shares.add(client, bytes);
  }

  remove(client: string, bytes: number): void {
    this.#shares.remove(client, bytes);
    if (this.#waiting.size > 0) this.#wake();
  }

  /**
   * Whether the client holds less than is left free, or than its least share: answers to requests under way can take the
   * total far beyond the bound, and then those who take theirs must not wait for the one who does not.
   */
  hasRoom(client: string): boolean {
    const { total, holders } = this.#shares;
    return total === 0 || hasShare(this.#shares.heldBy(client), total, this.#max(), holders);
  }

  /** Calls `resume` once, when the client has room. */
  wait(client: string, resume: () => void): void {
    const waiting = this.#waiting.get(client);
    if (waiting === undefined) this.#waiting.set(client, new Set([resume]));
    else waiting.add(resume);
  }

  /** It is no longer waited for. */
  leave(client: string, resume: () => void): void {
    const waiting = this.#waiting.get(client);
    if (waiting?.delete(resume) === true && waiting.size === 0) this.#waiting.delete(client);
  }

  #wake(): void {
    for (const [client, waiting] of this.#waiting) {
      if (!this.hasRoom(client)) continue;
      this.#waiting.delete(client);
      for (const resume of waiting) resume();
    }
  }
}

/** The budgets of one process. */
export class ClientBytes {
  readonly bodies: ByteBudget;
  readonly answers: ByteBudget;

  /** `max`: of each of the two. A single client gets half of it. */
  constructor(max: () => number) {
    this.bodies = new ByteBudget(max);
    this.answers = new ByteBudget(max);
  }
}
