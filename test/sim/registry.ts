/**
 * The registry of the fleet in memory, by the contract in src/fleet/registry.ts, for one model whose workers every
 * batcher lists. `lua/beat.lua` is the real one; `test/fleet` holds that to the same contract.
 */
import type { Beat, BeatReply, Member } from "../../src/fleet/registry.ts";

interface Known {
  number: number;
  at: number;
  member: Beat["member"];
  model: string;
  leases: readonly string[];
}

interface Taken {
  readonly by: string;
  readonly beat: number;
}

export class MemoryRegistry {
  readonly #aliveMs: number;
  readonly #now: () => number;
  readonly #members = new Map<string, Known>();
  readonly #leases = new Map<string, Taken>();
  #graceUntil = -Infinity;
  /** A beat lies so far ahead that the clock was set back. */
  #setBack = false;

  /** `now` is the store's clock, which somebody may set. */
  constructor(aliveMs: number, now: () => number) {
    this.#aliveMs = aliveMs;
    this.#now = now;
  }

  /** Who may start a batch there now; nobody while its holder has not been heard of for aliveMs. */
  holder(lease: string): string | undefined {
    const by = this.#leases.get(lease)?.by;
    const beat = by === undefined ? undefined : this.#members.get(by);
    return beat !== undefined && this.#now() - beat.at < this.#aliveMs ? by : undefined;
  }

  beat(number: number, { member, listed, held, releasing }: Beat): BeatReply {
    const now = this.#now();
    const me = member.id;
    if ((this.#members.get(me)?.number ?? 0) >= number) throw new Error("OVERTAKEN");
    const youngest = this.#bury(now);
    const forgotten = held.length > 0 && !this.#members.has(me);
    const silent = (youngest >= this.#aliveMs / 2 || this.#setBack) && this.#leases.size > 0;
    const left = this.#graceUntil - now;
    let grace = left > 0 && left <= this.#aliveMs;
    if (!grace && (silent || forgotten)) {
      grace = true;
      this.#graceUntil = now + this.#aliveMs;
    }
    const { model = "", leases = [] } = listed[0] ?? {};
    this.#members.set(me, { number, at: now, member, model, leases });
    for (const [lease, { by }] of this.#leases) {
      if (!grace && !this.#members.has(by)) this.#leases.delete(lease);
    }
    if (forgotten) {
      for (const lease of held)
        if (!this.#leases.has(lease)) this.#leases.set(lease, { by: me, beat: number });
    }
    const counts = this.#counts();
    const unheld = grace ? [] : this.#share(me, number, counts);
    const leaving = grace ? new Set<string>() : this.#excess(me, held, counts);
    for (const lease of releasing) {
      if (leaving.has(lease) && this.#leases.get(lease)?.by === me) this.#leases.delete(lease);
    }
    const mine = [...this.#leases].filter(([, { by }]) => by === me).map(([lease]) => lease);
    return {
      held: mine,
      giveBack: mine.filter((lease) => leaving.has(lease)),
      unheld,
      members: [...this.#members.values()].map((known): Member => ({
        ...known.member,
        ageMs: Math.max(0, Math.floor(now - known.at)),
      })),
    };
  }

  leave(id: string): void {
    this.#members.delete(id);
    for (const [lease, { by }] of this.#leases) if (by === id) this.#leases.delete(lease);
  }

  /** The dead go; returns the age of the youngest beat. */
  #bury(now: number): number {
    let youngest = this.#aliveMs;
    this.#setBack = false;
    for (const [id, { at }] of this.#members) {
      const age = now - at;
      if (age <= -this.#aliveMs) this.#setBack = true;
      if (Math.abs(age) >= this.#aliveMs) this.#members.delete(id);
      else youngest = Math.min(youngest, age);
    }
    return youngest;
  }

  #counts(): Map<string, number> {
    const counts = new Map<string, number>();
    for (const [id, { leases }] of this.#members) if (leases.length > 0) counts.set(id, 0);
    for (const { by } of this.#leases.values()) counts.set(by, (counts.get(by) ?? 0) + 1);
    return counts;
  }

  /** Free ones go to whoever has fewest, which takes them in its own next beat. */
  #share(me: string, number: number, counts: Map<string, number>): { model: string; lease: string }[] {
    const unheld: { model: string; lease: string }[] = [];
    const all = new Map<string, string>();
    for (const { model, leases } of this.#members.values()) for (const each of leases) all.set(each, model);
    for (const [lease, model] of all) {
      let taken = this.#leases.get(lease);
      if (taken === undefined) {
        const next = this.#least(counts);
        if (next === undefined) continue;
        counts.set(next, (counts.get(next) ?? 0) + 1);
        if (next === me) this.#leases.set(lease, (taken = { by: me, beat: number }));
      }
      const holder = taken && this.#members.get(taken.by);
      const silent = taken !== undefined && taken.by !== me && holder?.number === taken.beat;
      if (holder === undefined || silent) unheld.push({ model, lease });
    }
    return unheld;
  }

  #least(counts: ReadonlyMap<string, number>): string | undefined {
    let least: string | undefined;
    for (const [id, count] of [...counts].sort(([one], [other]) => (one < other ? -1 : 1))) {
      const lists = (this.#members.get(id)?.leases.length ?? 0) > 0;
      if (lists && (least === undefined || count < counts.get(least)!)) least = id;
    }
    return least;
  }

  /** What this member should give back, those it can best do without first. */
  #excess(me: string, held: readonly string[], counts: Map<string, number>): Set<string> {
    const leaving = new Set<string>();
    if (this.#members.get(me)!.leases.length === 0) {
      // It drains: all that it holds.
      for (const [lease, { by }] of this.#leases) if (by === me) leaving.add(lease);
      return leaving;
    }
    for (const lease of held) {
      const least = this.#least(counts);
      if (least === undefined || counts.get(me)! - counts.get(least)! < 2) break;
      if (this.#leases.get(lease)?.by !== me) continue;
      counts.set(me, counts.get(me)! - 1);
      counts.set(least, counts.get(least)! + 1);
      leaving.add(lease);
    }
    return leaving;
  }
}
