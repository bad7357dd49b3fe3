/** What the roster knows of each model. */
import type { Backend } from "./backend/backend.ts";
import type { BackendConfig, ModelConfig } from "../app/config/config.ts";
import type { Dispatcher } from "../dispatch/dispatcher.ts";

export interface RosterModel {
  readonly name: string;
  readonly kind: BackendConfig["kind"];
  /** Another sees to how many workers of its own there are. */
  readonly scaled: boolean;
  /** Left out, both: this process runs no batches. */
  readonly dispatcher?: Dispatcher | undefined;
  readonly backend?: Backend | undefined;
}

/** In the order of the models; empty in a gateway. */
export interface Running {
  readonly dispatchers: readonly Dispatcher[];
  readonly backends: readonly Backend[];
}

export function rosterModels(
  models: readonly ModelConfig[],
  { dispatchers, backends }: Running,
): RosterModel[] {
  return models.map(({ name, backend, scaling }, at) => ({
    name,
    kind: backend.kind,
    scaled: scaling.apply,
    dispatcher: dispatchers[at],
    backend: backends[at],
  }));
}
