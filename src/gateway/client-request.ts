/**
 * Common to HTTP requests and gRPC calls: the request log's fields, written as they become known, and the bytes held
 * for the client.
 *
 * Two byte budgets for all listeners together: request bodies, from arrival until complete, and responses, from the
 * write until the connection has taken them. A client may hold at most as many bytes as are left free
 * (`core/share.ts`).
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
  /** False for health checks. */
  counts = true;
  readonly #bytes: ClientBytes;
  #gone: (() => void) | undefined;
  /** The client disconnected before its response, or its deadline passed. */
  protected left = false;
  /** Fixed on first use: bytes must be released from the client they were added to. */
  #client: string | undefined;
  #bodyHeld = 0;
  #answerHeld = 0;
  #over = false;
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

  /** Calls `gone` when the client disconnects before its response; at once if it already has. */
  onGone(gone: () => void): void {
    this.#gone = gone;
    if (this.left) gone();
  }

  protected leave(): void {
    this.left = true;
    this.#gone?.();
  }

  /** Ends the request and freezes its fields. */
  over(now: number): void {
    this.latencyMs = now - this.startedAt;
    if (this.status === 0) this.status = CLIENT_LEFT;
  }

  /** Undefined: the client reads its responses. Else resolves when it has room; never if it leaves first. */
  get room(): Promise<void> | undefined {
    const { answers } = this.#bytes;
    if (answers.total === 0 || this.#over || answers.hasRoom(this.#holder())) return undefined;
    return new Promise((resume) => {
      this.#resume = resume;
      answers.wait(this.#holder(), resume);
    });
  }

  protected noRoomFor(bytes: number): Refusal | undefined {
    if (this.#bytes.bodies.fits(this.#holder(), bytes)) return undefined;
    const message =
      "no room for this body: too many bytes of unfinished requests are being read; try again in 1 s";
    return new Refusal("SERVICE_OVERLOADED", message, { retryAfterMs: 1000 });
  }

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

  protected releaseAll(): void {
    this.#over = true;
    this.releaseBody();
    if (this.#resume !== undefined) this.#bytes.answers.leave(this.#holder(), this.#resume);
    if (this.#answerHeld > 0) this.#bytes.answers.remove(this.#holder(), this.#answerHeld);
    this.#answerHeld = 0;
  }

  /** Without authentication all callers are one tenant, so each address is a client. */
  #holder(): string {
    if (this.#client !== undefined) return this.#client;
    const known = this.tenant !== "" && this.tenant !== ANONYMOUS;
    return (this.#client = known ? this.tenant : `address ${this.request.socket.remoteAddress ?? ""}`);
  }
}

export class ByteBudget {
  readonly #max: () => number;
  readonly #shares = new Shares();
  readonly #waiting = new Map<string, Set<() => void>>();

  constructor(max: () => number) {
    this.#max = max;
  }

  get total(): number {
    return this.#shares.total;
  }

  /** Counted twice, so that with these bytes the client still holds no more than is left free. */
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
   * Whether the client holds less than is left free, or than its minimum share: responses in progress can far exceed
   * the bound, and clients that read must not wait for one that does not.
   */
  hasRoom(client: string): boolean {
    const { total, holders } = this.#shares;
    return total === 0 || hasShare(this.#shares.heldBy(client), total, this.#max(), holders);
  }

  wait(client: string, resume: () => void): void {
    const waiting = this.#waiting.get(client);
    if (waiting === undefined) this.#waiting.set(client, new Set([resume]));
    else waiting.add(resume);
  }

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

export class ClientBytes {
  readonly bodies: ByteBudget;
  readonly answers: ByteBudget;

  /** `max` applies to each budget. A single client gets half of it. */
  constructor(max: () => number) {
    this.bodies = new ByteBudget(max);
    this.answers = new ByteBudget(max);
  }
}
