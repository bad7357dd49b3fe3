/** Clients' own credentials, one vault for each model whose workers get them. */
import { Vault } from "../workers/backend/vault.ts";
import type { Clock } from "./clock.ts";
import type { Config, ModelConfig } from "./config/config.ts";
import { forwards } from "./dropins.ts";

export class Vaults {
  readonly #clock: Clock;
  readonly #vaults = new Map<string, Vault>();

  constructor(clock: Clock) {
    this.#clock = clock;
  }

  /** Undefined where its workers get none. */
  of(model: ModelConfig, config: Config): Vault | undefined {
    if (!forwards(model)) return undefined;
    const { name } = model;
    const vault = this.#vaults.get(name) ?? new Vault(vaultRules(config, name), this.#clock);
    this.#vaults.set(name, vault);
    return vault;
  }

  retune(config: Config): void {
    for (const { name } of config.models) this.#vaults.get(name)?.retune(vaultRules(config, name));
  }

  delete(model: string): void {
    this.#vaults.delete(model);
  }
}

/** For as long as a task of that model lives, and for as many as can wait. */
function vaultRules({ models, limits }: Config, name: string): { ttlMs: number; max: number } {
  const { timeouts } = models.find((model) => model.name === name)!;
  return { ttlMs: timeouts.totalMs + timeouts.workerMs, max: limits.maxQueued };
}
