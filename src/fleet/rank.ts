/**
 * Which shards a batcher reads first, and which zones nobody serves.
 *
 * Each shard has one preferred batcher: the one whose id and the shard's number hash highest together. When a
 * batcher comes or goes only the shards that it wins or leaves change hands. Preference keeps batchers out of
 * each other's way; it is no right: an idle batcher takes from every shard.
 */
import type { Fleet } from "./fleet.ts";
import type { Member } from "./registry.ts";

export class FleetRank {
  readonly #fleet: Fleet;
  #members: readonly Member[] = [];
  #own: boolean[] = [];
  #served = new Set<string>();

  constructor(fleet: Fleet) {
    this.#fleet = fleet;
  }

  prefers(shard: number): boolean {
    this.#refresh();
    return (this.#own[shard] ??= preferred(shard, batchersOf(this.#members)) === this.#fleet.self.id);
  }

  /** No live batcher of that zone has a healthy worker. */
  deserted(zone: string): boolean {
    this.#refresh();
    return !this.#served.has(zone);
  }

  #refresh(): void {
    const { members } = this.#fleet;
    if (members === this.#members) return;
    this.#members = members;
    this.#own = [];
    this.#served = new Set(batchersOf(members).map(({ zone }) => zone));
  }
}

/** Those that can run something now. */
function batchersOf(members: readonly Member[]): Member[] {
  return members.filter(
    ({ role, models }) => role !== "gateway" && models.some(({ healthy }) => healthy > 0),
  );
}

export function preferred(shard: number, batchers: readonly { readonly id: string }[]): string | undefined {
  let best: string | undefined;
  let highest = -1;
  for (const { id } of batchers) {
    const weight = weightOf(`${id} ${shard}`);
    if (weight > highest || (weight === highest && best !== undefined && id < best)) {
      best = id;
      highest = weight;
    }
  }
  return best;
}

/** FNV-1a, then mixed: neighbouring shards must not follow one another. */
function weightOf(text: string): number {
  let hash = 0x811c9dc5;
  for (let at = 0; at < text.length; at++) hash = Math.imul(hash ^ text.charCodeAt(at), 0x01000193);
  hash = Math.imul(hash ^ (hash >>> 16), 0x85ebca6b);
  hash = Math.imul(hash ^ (hash >>> 13), 0xc2b2ae35);
  return (hash ^ (hash >>> 16)) >>> 0;
}
