/**
 * What time demands of the Redis engine: reaping, and the background rounds of a live process.
 *
 *   reap     what is known to be due, when it is, in the shards where it is; every shard once a second,
 *            because other processes' tasks fall due too
 *   look     how deep the queues are, once a second, in case a note on the bell was lost; where there are very many queues, some
 *            shards a second in turn
 *   tend     each half minute: what only a script that broke off in the middle could have left behind
 *   clock    each ten seconds: how far the server's clock is from ours
 */
import type { Alarm } from "../clock.ts";
import { ALONE_FROM_LOST, DEAD_FROM_ATTEMPT } from "../core/retry.ts";
import type { ScriptCall } from "../redis/nodes.ts";
import { readEnded, type RedisParts } from "./redis-parts.ts";
import { scripts } from "./redis-scripts.ts";

/** Records that one `reap` looks at in one shard; it comes back at once for more. */
const REAP_TOGETHER = 200;
const LOOK_EVERY_MS = 1000;
/** Streams that one look reads, going by how many there were; a shard at least. Redis does nothing else meanwhile: 2 ms. */
const LOOK_STREAMS = 200;
const TEND_EVERY_MS = 30_000;
const TEND_TOGETHER = 100;
const CLOCK_EVERY_MS = 10_000;

type ReapReply = [Buffer, Buffer[], Buffer, number, (Buffer | number)[], Buffer[], number];

export class RedisTime {
  readonly #parts: RedisParts;
  readonly #all: readonly number[];
  readonly #alarms = new Map<string, Alarm>();
  /** What the last look said of each shard, as `look.lua` returns it. */
  readonly #looked: number[][] = [];
  /** The shard that the next look of the background round begins with. */
  #nextLook = 0;
  #spill: Alarm | undefined;
  #unsubscribe: () => void = () => {};
  #closed = false;

  constructor(parts: RedisParts) {
    this.#parts = parts;
    this.#all = Array.from({ length: parts.shards }, (_, shard) => shard);
  }

  /** Starts the rounds, and listens to the bell. */
  async open(): Promise<void> {
    const { nodes, keys } = this.#parts;
    nodes.onShards = (shards, up) => {
      if (!up) this.#parts.mirror.forget(shards);
      else void this.look(shards).catch(() => {});
    };
    this.#unsubscribe = await nodes.subscribe(
      (shard) => keys.bell(shard),
      (_, payload) => this.#rung(payload),
      (shards) => void this.look(shards).catch(() => {}),
    );
    this.#every("look", LOOK_EVERY_MS, () => this.#lookOn());
    this.#every("tend", TEND_EVERY_MS, () => this.tend());
    this.#every("clock", CLOCK_EVERY_MS, () => this.setClock());
  }

  close(): void {
    this.#closed = true;
    this.#unsubscribe();
    this.#spill?.cancel();
    for (const alarm of this.#alarms.values()) alarm.cancel();
  }

  async setClock(): Promise<void> {
    this.#parts.shared.offsetMs = await this.#parts.nodes.clockOffset();
  }

  /** What others did; our own doings are in the replies. */
  #rung(payload: Buffer): void {
    const text = payload.toString();
    const end = text.indexOf("\n");
    if (text.slice(0, end) === this.#parts.name) return;
    this.#parts.mirror.told(text.slice(end + 1));
    this.#armSpill();
  }

  /** Tasks of another zone become ours after a while. */
  #armSpill(): void {
    const { clock, mirror } = this.#parts;
    const at = mirror.nextSpillAt();
    if (at === Infinity || this.#spill !== undefined) return;
    this.#spill = clock.at(at, () => {
      this.#spill = undefined;
      mirror.spilled();
      this.#armSpill();
    });
  }

  async reap(now: number): Promise<number> {
    const { clock, shared } = this.#parts;
    this.#parts.nextReap = Infinity;
    const nexts = await this.#parts.spread(
      this.#all,
      (shard) => shard,
      (shards) => this.#reapGroup(shards, now),
    );
    const next = Math.min(...nexts.map((each) => (each === "" ? Infinity : shared.own(each))));
    // What fell due meanwhile was told to `fallsDue`.
    this.#parts.nextReap = Math.min(this.#parts.nextReap, Math.max(next, clock.now()));
    return this.#parts.nextReap;
  }

  /** Looks at these tasks alone: a claim met them, and their time is over. */
  async expire(ids: readonly string[]): Promise<void> {
    const now = this.#parts.clock.now();
    await this.#parts.spread(
      ids,
      (id) => this.#parts.shardOf(id),
      (some, shards) => this.#reapGroup(shards, now, some),
    );
  }

  /** Resolves with the next instant, on the shared clock; "" for none. */
  async #reapGroup(shards: readonly number[], now: number, only: readonly string[] = []): Promise<string> {
    for (;;) {
      const reply = await this.#parts.nodes.run(shards[0]!, this.#reapCall(shards, now, only), {
        resend: true,
      });
      const [report, ended, next, more, retried, dead, dropped] = reply as ReapReply;
      this.#parts.mirror.told(report.toString());
      this.#parts.announce(shards[0]!, readEnded(ended));
      this.#emit(retried, dead, now);
      this.#parts.lettersDropped(dropped);
      if (more === 0) return next.toString();
    }
  }

  #reapCall(shards: readonly number[], now: number, only: readonly string[]): ScriptCall {
    const { shared, options } = this.#parts;
    const { results, deadLetters, models } = options;
    const most = Math.ceil(deadLetters.max / this.#parts.shards);
    const limits = [results.ttlMs, most, deadLetters.ttlMs, REAP_TOGETHER] as const;
    const call = this.#parts
      .call(scripts.reap, ...limits, ALONE_FROM_LOST, DEAD_FROM_ATTEMPT, models.size)
      .at(shared.shared(now));
    for (const shard of shards) call.place(shard);
    for (const [model, { queueMs }] of models) call.add(model, queueMs);
    for (const id of only) call.add(call.place(this.#parts.shardOf(id)), id);
    return call.build();
  }

  #emit(retried: readonly (Buffer | number)[], dead: readonly Buffer[], now: number): void {
    const { events } = this.#parts;
    const unknown = { batchId: "", worker: "" };
    for (let at = 0; at < retried.length; at += 3) {
      const [id, model, attempt] = retried.slice(at, at + 3);
      const fields = { id: String(id), model: String(model), attempt: Number(attempt) };
      events.emit("task.retried", { ...fields, ...unknown, at: now, message: "its lease ran out" });
    }
    for (let at = 0; at < dead.length; at += 3) {
      const [id, model, message] = dead.slice(at, at + 3).map(String);
      events.emit("task.dead", { id: id!, model: model!, code: "INFERENCE_FAILED", message: message! });
    }
  }

  get counts(): { queued: number; running: number; deadLetters: number } {
    const sum = (which: number): number => this.#looked.reduce((total, counts) => total + counts[which]!, 0);
    return { queued: sum(2), running: sum(1), deadLetters: sum(3) };
  }

  /** Reads how deep the queues of these shards are. */
  async look(shards: readonly number[] = this.#all): Promise<void> {
    for (let from = 0; from < shards.length;) {
      const some = this.#together(shards.slice(from));
      await this.#lookAt(some);
      from += some.length;
    }
    this.#armSpill();
  }

  /** As many shards as one look may read, from where the last one ended. */
  async #lookOn(): Promise<void> {
    const some = this.#together([...this.#all.slice(this.#nextLook), ...this.#all.slice(0, this.#nextLook)]);
    this.#nextLook = (some.at(-1)! + 1) % this.#all.length;
    await this.#lookAt(some);
    this.#armSpill();
  }

  /** The first of these shards, as long as they hold no more streams than one look may read. */
  #together(shards: readonly number[]): number[] {
    let streams = 0;
    const streamsOf = (shard: number): number => this.#looked[shard]?.[5] ?? 0;
    return shards.filter((shard, place) => (streams += streamsOf(shard)) <= LOOK_STREAMS || place === 0);
  }

  async #lookAt(shards: readonly number[]): Promise<void> {
    const { nodes, mirror } = this.#parts;
    await this.#parts.spread(
      shards,
      (shard) => shard,
      async (some) => {
        const call = this.#parts.call(scripts.look);
        for (const shard of some) call.place(shard);
        const known = new Map(some.map((shard) => [shard, mirror.version(shard)]));
        const [counts, lines] = (await nodes.run(call.shard, call.build(), { resend: true })) as [
          number[][],
          Buffer,
        ];
        // A version that went back: the data was flushed, or a failover lost its last moments. What was known is of no use.
        const reset = counts.filter(([shard, , , , version]) => version! < known.get(shard!)!);
        mirror.forget(reset.map(([shard]) => shard!));
        mirror.told(lines.toString(), true);
        for (const row of counts) this.#looked[row[0]!] = row;
      },
    );
  }

  async tend(): Promise<void> {
    const { nodes, mirror, events } = this.#parts;
    mirror.tidy();
    await this.#parts.spread(
      this.#all,
      (shard) => shard,
      async (some) => {
        const call = this.#parts.call(scripts.tend, TEND_TOGETHER);
        for (const shard of some) call.place(shard);
        const reply = await nodes.run(call.shard, call.build(), { resend: true });
        const [report, mended, dropped] = reply as [Buffer, number, number];
        mirror.told(report.toString());
        if (mended + dropped === 0) return;
        const message = `tended: ${mended} tasks put back, ${dropped} stale copies dropped`;
        events.emit("notice", { level: "warn", message });
      },
    );
  }

  #every(name: string, ms: number, work: () => Promise<unknown>): void {
    const { clock } = this.#parts;
    const again = (): void => {
      if (this.#closed) return;
      // A round that fails is made again at its next time; the connection speaks for itself.
      this.#alarms.set(
        name,
        clock.at(clock.now() + ms, () => void work().then(again, again)),
      );
    };
    again();
  }
}
