/**
 * Who is refused most: the space-saving sketch, with counts that fade.
 *
 * At most `MAX` tenants are counted. A tenant that is not among them takes the place of the one with the
 * smallest count, and goes on from that count: whoever has more than 1/MAX of all refusals is therefore among
 * them, and no count is too small. Each second every count loses 1/60 of itself, so a count reads as
 * "refusals in the last minute"; what has faded below a half is forgotten.
 */

const MAX = 64;
const KEPT_PER_SECOND = Math.exp(-1 / 60);
const FORGOTTEN = 0.5;

interface Counter {
  tenant: string;
  times: number;
  retryAfterMs: number;
}

export class RefusedTenants {
  readonly #counters: Counter[] = [];
  readonly #places = new Map<string, Counter>();

  count(tenant: string, retryAfterMs: number): void {
    let counter = this.#places.get(tenant);
    if (counter === undefined) {
      counter = this.#counters.length < MAX ? this.#add(tenant) : this.#replaceSmallest(tenant);
      this.#places.set(tenant, counter);
    }
    counter.times++;
    counter.retryAfterMs = retryAfterMs;
  }

  /** A second has passed. */
  fade(): void {
    const counters = this.#counters;
    let kept = 0;
    for (const counter of counters) {
      counter.times *= KEPT_PER_SECOND;
      if (counter.times < FORGOTTEN) this.#places.delete(counter.tenant);
      else counters[kept++] = counter;
    }
    counters.length = kept;
  }

  /** The most refused first. */
  top(most: number): (readonly [tenant: string, times: number, retryAfterMs: number])[] {
    const sorted = this.#counters.toSorted((a, b) => b.times - a.times);
    return sorted
      .slice(0, most)
      .map(({ tenant, times, retryAfterMs }) => [tenant, Math.round(times), Math.round(retryAfterMs)]);
  }

  #add(tenant: string): Counter {
    const counter = { tenant, times: 0, retryAfterMs: 0 };
    this.#counters.push(counter);
    return counter;
  }

  #replaceSmallest(tenant: string): Counter {
    let smallest = this.#counters[0]!;
    for (const counter of this.#counters) if (counter.times < smallest.times) smallest = counter;
    this.#places.delete(smallest.tenant);
    smallest.tenant = tenant;
    return smallest;
  }
}
