/**
 * One command until it is through: what each refusal of a Redis server asks of its client.
 *
 *   NOSCRIPT                        load the script there, again at once
 *   MOVED                           the shard lives elsewhere now: remember it, again there
 *   ASK                             this once at the target, after ASKING
 *   TRYAGAIN CLUSTERDOWN LOADING    soon over: again in 20 to 50 ms, until the time is up
 *   MASTERDOWN UNBLOCKED BUSY
 *   READONLY                        a demoted primary: the same, and find out who is primary
 *   anything else                   the command's own failure: rejects with it at once
 *
 * A refusal means that nothing happened. A connection that broke after the write means that nobody knows:
 * only with `resend` is it sent again, because only the caller knows that doing it twice does no harm.
 */
import type { Clock } from "../../../app/clock.ts";
import { StoreAway } from "./group.ts";
import { LinkDown, RedisError } from "./link.ts";
import type { RedisReply } from "./link.ts";
import type { RedisNode, Script } from "./node.ts";
import { targetOf } from "./topology.ts";
import type { Address } from "./topology.ts";

export interface Patience {
  /** Send it again when the reply is lost. */
  readonly resend?: boolean | undefined;
  /** How long to try; 1000 unless said. An attempt that is under way then is still waited for. */
  readonly withinMs?: number | undefined;
}

/** What the loop needs to know of the servers, and tells them. */
export interface Routes {
  readonly clock: Clock;
  readonly closed: boolean;
  random(): number;
  owner(shard: number): RedisNode | undefined;
  /** The node at that address, now or soon connected. */
  at(address: Address): RedisNode;
  moved(shard: number, to: Address): void;
  /** Something does not fit: find out who serves what. */
  refresh(): void;
}

type Attempt<Reply> = (node: RedisNode, asking: boolean, until: number) => Promise<Reply>;

const WITHIN_MS = 1000;
const PAUSE_MS = 20;
const PAUSE_SPREAD_MS = 30;

/** What a server refuses only for now. */
const PASSING = new Set([
  "TRYAGAIN",
  "CLUSTERDOWN",
  "LOADING",
  "MASTERDOWN",
  "UNBLOCKED",
  "BUSY",
  "READONLY",
]);

/** Whether the same command may be taken later, or elsewhere. */
export function passes({ code }: RedisError): boolean {
  return code === "MOVED" || code === "ASK" || PASSING.has(code);
}

export async function persist<Reply = RedisReply>(
  routes: Routes,
  shard: number,
  attempt: Attempt<Reply>,
  patience: Patience = {},
  script?: Script,
): Promise<Reply> {
  const course = new Course(routes, shard, patience, script);
  for (;;) {
    const node = course.node;
    try {
      if (node === undefined) throw new RedisError(`CLUSTERDOWN no server serves shard ${shard}`);
      if (course.unloaded !== undefined) await course.load(node, course.unloaded);
      return await attempt(node, course.asking, course.until);
    } catch (error) {
      // Settles the next attempt, or throws.
      const pauses = course.failed(error, node);
      if (pauses) await course.pause();
    }
  }
}

/** Where a command stands between its attempts. */
class Course {
  unloaded: Script | undefined;
  readonly #routes: Routes;
  readonly #shard: number;
  readonly #script: Script | undefined;
  readonly #resend: boolean;
  readonly #withinMs: number;
  readonly #endsAt: number;
  /** May it wait for a connection that is down? Asked for, or it was sent on to another server. */
  #patient: boolean;
  #target: RedisNode | undefined;
  #moves = 0;
  #loaded = false;
  /** An attempt was lost after its write. */
  #unknown = false;

  constructor(routes: Routes, shard: number, { resend, withinMs }: Patience, script: Script | undefined) {
    this.#routes = routes;
    this.#shard = shard;
    this.#script = script;
    this.#resend = resend ?? false;
    this.#withinMs = withinMs ?? WITHIN_MS;
    this.#endsAt = routes.clock.now() + this.#withinMs;
    this.#patient = this.#resend || withinMs !== undefined;
  }

  get node(): RedisNode | undefined {
    return this.#target ?? this.#routes.owner(this.#shard);
  }

  get asking(): boolean {
    return this.#target !== undefined;
  }

  get until(): number {
    return this.#patient ? this.#endsAt : 0;
  }

  async load(node: RedisNode, script: Script): Promise<void> {
    try {
      await node.load(script);
      this.unloaded = undefined;
    } catch (error) {
      // Whatever became of the loading, the command itself was not sent.
      throw error instanceof LinkDown ? new LinkDown(error.message, false) : error;
    }
  }

  /** Says what to do next: true = after a pause. Throws when there is nothing left to do. */
  failed(error: unknown, node: RedisNode | undefined): boolean {
    if (error instanceof RedisError && error.code === "NOSCRIPT" && this.#script !== undefined) {
      // A server that has never seen the script is told once, however late it is.
      if (this.#loaded) this.#checkTime(error, node);
      this.#loaded = true;
      this.unloaded = this.#script;
      return false; // to the same server, also when it was the target of an ASK
    }
    this.#target = this.unloaded = undefined;
    if (error instanceof LinkDown) this.#lost(error);
    else if (!(error instanceof RedisError)) throw error;
    else if ((error.code === "MOVED" || error.code === "ASK") && node !== undefined) {
      this.#checkTime(error, node);
      return this.#redirected(error, node);
    } else if (!PASSING.has(error.code)) throw this.#refused(error);
    else {
      this.#checkTime(error, node);
      if (error.code === "READONLY") void node?.survey();
    }
    this.#routes.refresh();
    return true;
  }

  pause(): Promise<void> {
    const { clock } = this.#routes;
    const at = clock.now() + PAUSE_MS + PAUSE_SPREAD_MS * this.#routes.random();
    return new Promise((resolve) => clock.at(at, resolve));
  }

  #redirected(error: RedisError, node: RedisNode): boolean {
    this.#patient = true;
    const target = targetOf(error, node.host);
    if (error.code === "ASK") {
      this.#target = this.#routes.at(target);
      return false;
    }
    this.#routes.moved(this.#shard, target);
    // Two servers that send us to each other are about to agree; once is normal.
    return ++this.#moves > 1;
  }

  #lost(error: LinkDown): void {
    this.#unknown ||= error.written;
    const again = error.written ? this.#resend : this.#patient;
    if (!again || this.#late()) throw new StoreAway(error.message, this.#unknown);
  }

  /** A refusal says that nothing happened now; an earlier attempt may have. */
  #refused(error: RedisError): Error {
    return this.#unknown ? new StoreAway(`redis refused a second attempt: ${error.message}`, true) : error;
  }

  #checkTime(error: RedisError, node: RedisNode | undefined): void {
    if (!this.#late()) return;
    const who = node === undefined ? "redis" : `redis ${node.address}`;
    throw new StoreAway(`${who} answered for ${this.#withinMs} ms: ${error.message}`, this.#unknown);
  }

  #late(): boolean {
    return this.#routes.closed || this.#routes.clock.now() >= this.#endsAt;
  }
}
