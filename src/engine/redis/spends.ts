/**
 * Rate limits on Redis: units of one tick, and units that arrive while a call is in flight, are spent in one call of
 * the `spend` script per server (per shard on a Cluster), one argument per window. A window is one key, so limits are
 * exact for any number of processes. While Redis is away each process counts from the last known value: a limit is
 * never open, and an exhausted one stays so until its minute is over.
 */
import { homeOf } from "../../core/home.ts";
import { type Spent, Windows, WINDOW_MS } from "../../core/window.ts";
import { Gathering } from "./gather.ts";
import { digest } from "./keys.ts";
import type { RedisParts } from "./parts.ts";
import { scripts } from "./scripts.ts";

const MAX_SPENDERS = 10_000;

/** Units of one window that are spent together. */
interface Spending {
  readonly key: string;
  readonly name: string;
  readonly shard: number;
  readonly limit: number;
  readonly answers: ((spent: Spent) => void)[];
}

export class RedisSpends {
  readonly #parts: RedisParts;
  readonly #windows = new Windows(MAX_SPENDERS); // for when Redis is away
  readonly #gathering: Gathering<Spending>;
  readonly #open = new Map<string, Spending>(); // not yet sent, by limit and window

  readonly #cluster: boolean;

  constructor(parts: RedisParts, cluster: boolean) {
    this.#parts = parts;
    this.#cluster = cluster;
    this.#gathering = new Gathering((gathered) => this.#send(gathered), parts.clock, 0);
  }

  spend(key: string, limit: number): Promise<Spent> {
    const { shards } = this.#parts.keys;
    const { promise, resolve } = Promise.withResolvers<Spent>();
    const name = digest(key);
    const shard = homeOf(name) % shards;
    const open = this.#open.get(`${limit} ${name}`);
    if (open !== undefined) {
      open.answers.push(resolve);
      return promise;
    }
    const spending = { key, name, shard, limit, answers: [resolve] };
    this.#open.set(`${limit} ${name}`, spending);
    // On a Cluster a script is limited to one shard.
    this.#gathering.add(this.#cluster ? shard : 0, spending);
    return promise;
  }

  async #send(spendings: readonly Spending[]): Promise<void> {
    const { nodes, clock, shared } = this.#parts;
    const [{ shard }] = spendings as [Spending];
    const args: (string | number)[] = [shared.shared(clock.now()), WINDOW_MS];
    const names: string[] = [];
    for (const { name, shard: home, limit, answers } of spendings) {
      this.#open.delete(`${limit} ${name}`);
      names.push(this.#parts.key(home, `l:${name}`));
      args.push(limit, answers.length);
    }
    try {
      const reply = await nodes.run(shard, { script: scripts.spend, keys: names, args });
      spendings.forEach((each, at) => this.#answer(each, (reply as (number | Buffer)[]).slice(3 * at)));
    } catch {
      for (const { key, limit, answers } of spendings) {
        for (const answer of answers) answer(this.#windows.spend(key, limit, this.#parts.clock.now()));
      }
    }
  }

  /** In order of arrival; `left` counts down from one to the next. */
  #answer({ key, limit, answers }: Spending, [granted, left, closes]: readonly (number | Buffer)[]): void {
    const resetMs = Number(closes) / 1000;
    this.#windows.heard(key, limit - Number(left), this.#parts.clock.now() + resetMs);
    answers.forEach((answer, at) => {
      const allowed = at < Number(granted);
      answer({ allowed, left: Number(left) + Math.max(0, Number(granted) - at - 1), resetMs });
    });
  }
}
