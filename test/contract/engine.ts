/**
 * What every engine promises, as tests: `engineContract(name, open)` runs them on one engine.
 *
 * One file per verb or two, each test named as the promise it holds the engine to, and a property test that
 * plays random callers, workers and time against a model (`engine-property.ts`). Only the verbs of
 * `src/engine/engine.ts` are used, so whatever passes here may stand behind the gateway.
 */
import { describe } from "node:test";
import { cancelContract } from "./engine-cancel.ts";
import { claimContract } from "./engine-claim.ts";
import { composeContract } from "./engine-compose.ts";
import { lettersContract } from "./engine-letters.ts";
import { onlyContract } from "./engine-only.ts";
import { type PropertyLimits, propertyContract } from "./engine-property.ts";
import { putContract } from "./engine-put.ts";
import { reapContract } from "./engine-reap.ts";
import { settleContract } from "./engine-settle.ts";
import { sharingContract } from "./engine-sharing.ts";
import { holdsOn, type OpenEngine } from "./engine-stage.ts";
import { turnsContract } from "./engine-turns.ts";
import { viewsContract } from "./engine-views.ts";

export function engineContract(name: string, open: OpenEngine, limits: PropertyLimits = {}): void {
  // Each promise has an engine and a clock of its own; an engine that waits for a disk is not waited for.
  describe(`${name} keeps the engine contract:`, { concurrency: 8 }, () => {
    const holds = holdsOn(open);
    putContract(holds);
    sharingContract(holds);
    onlyContract(holds);
    claimContract(holds);
    composeContract(holds);
    settleContract(holds);
    cancelContract(holds);
    reapContract(holds);
    viewsContract(holds);
    turnsContract(holds);
    lettersContract(holds);
    propertyContract(open, limits);
  });
}
