/**
 * Group commit: many writes, one wait for a replica.
 *
 *   run run run ──► [script, script, script, WAIT n ms] ──► all replies ──► everybody's promise
 *                    while it is in flight the next group gathers
 *
 * WAIT looks only at what its own connection wrote, and on a fresh connection it is satisfied at once. So
 * the commands and their WAIT always travel together, and each group must write, also when it is sent again.
 */
import { LinkDown, RedisError } from "./link.ts";
import type { Arg, RedisReply } from "./link.ts";
import type { KeptLink } from "./kept.ts";

/** The store cannot say yes now. `unknown`: what was asked may have happened all the same. */
export class StoreAway extends Error {
  readonly unknown: boolean;

  constructor(message: string, unknown: boolean) {
    super(message);
    this.name = "StoreAway";
    this.unknown = unknown;
  }
}

/** More in one pipeline gain nothing, and the first would wait for the last. */
const GROUP_CALLS = 512;

/** A member's commands, each after ASKING where its slot is on its way to another server. */
export function asked(commands: readonly (readonly Arg[])[], asking: boolean): readonly (readonly Arg[])[] {
  return asking ? commands.flatMap((each) => [["ASKING"], each]) : commands;
}

/** The replies to `asked` without those to ASKING. */
export function answers(
  replies: readonly (RedisReply | RedisError)[],
  asking: boolean,
): (RedisReply | RedisError)[] {
  return asking ? replies.filter((_, at) => at % 2 === 1) : [...replies];
}

interface Member {
  readonly commands: readonly (readonly Arg[])[];
  readonly resolve: (replies: (RedisReply | RedisError)[]) => void;
  readonly reject: (why: Error) => void;
}

export class GroupCommit {
  readonly #kept: KeptLink;
  /** How many replicas must confirm a write now; 0: no WAIT. */
  readonly #wanted: () => number;
  readonly #waitTimeoutMs: number;
  #gathering: Member[] = [];
  #busy = false;

  constructor(kept: KeptLink, wanted: () => number, waitTimeoutMs: number) {
    this.#kept = kept;
    this.#wanted = wanted;
    this.#waitTimeoutMs = waitTimeoutMs;
  }

  /** Resolves with the reply to each command; rejects with LinkDown, or StoreAway when no replica confirmed. */
  run(commands: readonly (readonly Arg[])[]): Promise<(RedisReply | RedisError)[]> {
    // Nothing waits for a replica, so there is no wait to share.
    if (this.#gathering.length === 0 && this.#wanted() === 0) return this.#alone(commands);
    return new Promise((resolve, reject) => {
      const first = this.#gathering.push({ commands, resolve, reject }) === 1;
      if (first && !this.#busy) setImmediate(() => void this.#commit());
    });
  }

  async #alone(commands: readonly (readonly Arg[])[]): Promise<(RedisReply | RedisError)[]> {
    const { link, why } = this.#kept;
    if (link === undefined) throw new LinkDown(why.message, false);
    return link.callAll(commands);
  }

  async #commit(): Promise<void> {
    while (this.#gathering.length > 0 && !this.#busy) {
      const group = this.#gathering.splice(0, GROUP_CALLS);
      const { link, why } = this.#kept;
      const commands = group.flatMap((member) => member.commands);
      const wanted = this.#wanted();
      if (wanted > 0) commands.push(["WAIT", wanted, this.#waitTimeoutMs]);
      this.#busy = true;
      try {
        if (link === undefined) throw new LinkDown(why.message, false);
        this.#settle(group, await link.callAll(commands), wanted);
      } catch (error) {
        for (const { reject } of group) reject(error as Error);
      }
      this.#busy = false;
    }
  }

  #settle(group: readonly Member[], replies: readonly (RedisReply | RedisError)[], wanted: number): void {
    const doubt = wanted > 0 ? this.#doubt(replies.at(-1), wanted) : undefined;
    let at = 0;
    for (const { commands, resolve, reject } of group) {
      const own = replies.slice(at, (at += commands.length));
      // A refusal is an answer; whether what was written is safe is the question only where something was.
      const refused = own.some((reply) => reply instanceof RedisError);
      if (doubt === undefined || refused) resolve(own);
      else reject(doubt);
    }
  }

  /** Why the group's writes are not safe, judging by WAIT's reply. */
  #doubt(confirmed: RedisReply | RedisError | undefined, wanted: number): Error | undefined {
    if (typeof confirmed === "number" && confirmed >= wanted) return undefined;
    if (!(confirmed instanceof RedisError)) {
      const who = wanted === 1 ? "no replica" : `only ${String(confirmed)} of ${wanted} replicas`;
      return new StoreAway(`${who} confirmed the write within ${this.#waitTimeoutMs} ms`, true);
    }
    if (confirmed.code === "NOPERM") return confirmed;
    // Demoted in the middle of it (UNBLOCKED): as good as a lost connection.
    return new LinkDown(
      `redis ${this.#kept.link?.address ?? ""} answered WAIT with: ${confirmed.message}`,
      true,
    );
  }
}
