/**
 * Messages between processes, each on its receiver's channel: outcomes for a waiting gateway, requests to the batcher
 * that holds a task, and its answers. Redis drops messages while a connection is down, so each is a hint: outcome
 * messages are numbered by sender and shard, and after a gap or reconnect the receiver looks up what it waits for
 * (`outcomes.ts`); a request without an answer is reported to its caller as unknown.
 */
import { frame, parts as partsOf } from "./frames.ts";
import type { RedisParts } from "./parts.ts";

export type MessageKind = "outcomes" | "request" | "answer" | "join";

const MAX_SENDERS = 10_000;
const ANSWER_WITHIN_MS = 1000;

type Handler = (fields: Buffer[], sender: string) => void;

export class Messages {
  readonly #parts: RedisParts;
  readonly #handlers = new Map<string, Handler>();
  /** Number of the last outcome message heard, by sender and shard, and sent, by receiver and shard. */
  readonly #heard = new Map<string, number>();
  readonly #sent = new Map<string, number>();
  readonly #asked = new Map<number, (answer: string | undefined) => void>(); // unanswered requests
  #requests = 0;
  #unsubscribe: () => void = () => {};
  onGap: () => void = () => {}; // messages may have been missed

  constructor(parts: RedisParts) {
    this.#parts = parts;
    this.on("answer", ([number, answer]) => this.#asked.get(Number(number))?.(answer!.toString()));
  }

  async open(): Promise<void> {
    const { nodes, keys, name } = this.#parts;
    this.#unsubscribe = await nodes.subscribe(
      (shard) => keys.channel(shard, name),
      (shard, payload) => this.#received(shard, payload),
      () => {
        this.#heard.clear();
        this.onGap();
      },
    );
  }

  close(): void {
    this.#unsubscribe();
  }

  on(kind: MessageKind, handler: Handler): void {
    this.#handlers.set(kind, handler);
  }

  /** The command that sends a message. Its result does not matter: the receiver polls too. */
  command(shard: number, to: string, kind: MessageKind, fields: readonly (string | Buffer)[]) {
    const { keys, name } = this.#parts;
    const number = kind === "outcomes" ? next(this.#sent, `${to} ${shard}`) : 0;
    return ["SPUBLISH", keys.channel(shard, to), frame([kind, name, String(number), ...fields])];
  }

  send(shard: number, to: string, kind: MessageKind, fields: readonly (string | Buffer)[]): void {
    this.#parts.nodes.command(shard, this.command(shard, to, kind, fields)).catch(() => {});
  }

  /** Asks the batcher that holds a task; undefined if it does not answer. */
  async ask(shard: number, to: string, fields: readonly (string | Buffer)[]): Promise<string | undefined> {
    const { clock } = this.#parts;
    const number = ++this.#requests;
    const { promise, resolve } = Promise.withResolvers<string | undefined>();
    this.#asked.set(number, resolve);
    const alarm = clock.at(clock.now() + ANSWER_WITHIN_MS, () => resolve(undefined));
    this.send(shard, to, "request", [String(number), ...fields]);
    const answer = await promise;
    alarm.cancel();
    this.#asked.delete(number);
    return answer;
  }

  #received(shard: number, payload: Buffer): void {
    const [kind, sender, number, ...fields] = partsOf(payload);
    const from = sender!.toString("latin1");
    this.#handlers.get(kind!.toString("latin1"))?.(fields, from);
    if (kind!.toString("latin1") !== "outcomes") return;
    const key = `${from} ${shard}`;
    const last = this.#heard.get(key);
    if (this.#heard.size > MAX_SENDERS) this.#heard.clear();
    this.#heard.set(key, Number(number));
    if (last !== undefined && Number(number) !== last + 1) this.onGap();
  }
}

/** The next number under a key; bounded by the number of processes. */
function next(numbers: Map<string, number>, key: string): number {
  if (numbers.size > MAX_SENDERS) numbers.clear();
  const number = (numbers.get(key) ?? 0) + 1;
  numbers.set(key, number);
  return number;
}
