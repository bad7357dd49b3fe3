/** From the config, and what runs of it, to the roster. */
import type { Backend } from "../backend/backend.ts";
import type { ModelConfig } from "../config/config.ts";
import type { Dispatcher } from "../dispatch/dispatcher.ts";
import { Roster, type RosterModel, type RosterParts } from "./roster.ts";

/** In the order of the models; empty in a gateway. */
interface Running {
  readonly dispatchers: readonly Dispatcher[];
  readonly backends: readonly Backend[];
}

/** Resolves when every name of DNS in the config was looked up once. */
export async function openRoster(
  models: readonly ModelConfig[],
  running: Running,
  parts: RosterParts,
): Promise<Roster> {
  const roster = new Roster(rosterModels(models, running), parts);
  await roster.followAll(models);
  return roster;
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
