/**
 * Workers of the config that somebody removed by hand (`ferry workers remove`). They stay out until somebody adds them
 * again, or the config lists them no more; a change of anything else does not bring them back.
 *
 *   with an address       known by it. A model that is new and lists the worker of one that is gone is that model under
 *                         another name: the worker stays out of it too
 *   a child of Ferry's    known by its name, `python-2`, which is also the GPU that it is given. The config lists as many as
 *                         it says; another number, or another kind, is a new list
 *
 * Bounded by what the config lists. Nothing is written down: a restart begins with the config.
 */
import type { ModelConfig } from "../app/config/config.ts";
import { fixedWorkers, hasAddresses } from "../app/config/worker-addresses.ts";

interface Out {
  readonly model: string;
  /** As people see it. */
  readonly name: string;
  readonly address?: string | undefined;
}

export class TakenOut {
  #models: readonly ModelConfig[] = [];
  #out: readonly Out[] = [];

  /** In the order in which they went. */
  get all(): readonly Out[] {
    return this.#out;
  }

  /** Does nothing where the config does not list it: then nothing would bring it back. */
  take(model: string, name: string, address: string | undefined): void {
    const config = this.#models.find((each) => each.name === model);
    const out = { model, name, address };
    if (config !== undefined && lists(config, out)) this.#out = [...this.#out.filter(other(out)), out];
  }

  /** It was added again. */
  giveBack(model: string, name: string, address: string | undefined): void {
    this.#out = this.#out.filter(other({ model, name, address }));
  }

  /** Whether a worker of this model is not to be used, once the models are these. */
  keeps(model: string, address: string, next: readonly ModelConfig[] = this.#models): boolean {
    return this.#out.some((out) => out.address === address && this.#heir(out, next)?.name === model);
  }

  /** `leaving`: models that are gone from the config, and may come back as they were. */
  retune(next: readonly ModelConfig[], leaving: readonly ModelConfig[] = []): void {
    const before = this.#models;
    const all = [...next, ...leaving.filter(({ name }) => next.every((model) => model.name !== name))];
    this.#out = this.#out.flatMap((out) => {
      const heir = this.#heir(out, next) ?? all.find(({ name }) => name === out.model);
      if (heir === undefined || !lists(heir, out)) return [];
      const was = before.find(({ name }) => name === out.model);
      if (out.address === undefined && !sameNumber(was, heir)) return [];
      return [{ ...out, model: heir.name }];
    });
    this.#models = all;
  }

  /** The model that it stays out of: its own, or that which has taken its place. */
  #heir(out: Out, next: readonly ModelConfig[]): ModelConfig | undefined {
    const own = next.find(({ name }) => name === out.model);
    if (own !== undefined || out.address === undefined) return own;
    const known = new Set(this.#models.map(({ name }) => name));
    return next.find((model) => !known.has(model.name) && lists(model, out));
  }
}

function other(one: Out): (each: Out) => boolean {
  return ({ model, name, address }) =>
    model !== one.model || (address === undefined ? name !== one.name : address !== one.address);
}

function lists({ backend, scaling }: ModelConfig, { name, address }: Out): boolean {
  if (hasAddresses(backend)) {
    return address !== undefined && fixedWorkers(backend.workers).some((each) => hrefOf(each) === address);
  }
  // Where the autoscaler sees to the number, one that was removed is replaced.
  return address === undefined && !scaling.apply && (numberOf(name) ?? Infinity) <= backend.workers;
}

/** The same list of children. */
export function sameNumber(one: ModelConfig | undefined, other: ModelConfig): boolean {
  return one?.backend.kind === other.backend.kind && one.backend.workers === other.backend.workers;
}

/** Of a child: `python-2`, or in a fleet `python-2@f1c3a`. */
export function numberOf(name: string): number | undefined {
  const digits = /-(\d+)(?:@\w+)?$/.exec(name)?.[1];
  return digits === undefined ? undefined : Number(digits);
}

export function hrefOf(address: string): string {
  return URL.parse(address)?.href ?? address;
}
