/** From the config to the drop-in routes: which model speaks what, and who answers what no batch is for. */
import { type Config, type ModelConfig } from "./config.ts";
import { Refusal } from "./core/errors.ts";
import type { Crossing } from "./gateway/crossing.ts";
import { DropIns, type DropInModel } from "./gateway/dropin.ts";
import type { Protocol, ProtocolName } from "./protocol/protocol.ts";
import { protocols } from "./protocol/protocols.ts";
import { version } from "./version.ts";

export interface DropInNeeds {
  readonly crossing: Crossing;
  /** At least one worker of this model is healthy. */
  readonly healthy: (model: string) => boolean;
  readonly draining: () => boolean;
}

export function openDropIns({ models }: Config, { crossing, healthy, draining }: DropInNeeds): DropIns {
  const proxy = {
    forward: () => Promise.reject(new Refusal("INVALID_REQUEST", "this model answers in batches only")),
  };
  const known = models.map((model): DropInModel => ({
    name: model.name,
    protocols: spokenBy(model),
    passthrough: model.passthrough,
    maxBatchSize: model.maxBatchSize,
    reachable: false,
    ready: () => healthy(model.name),
  }));
  return new DropIns(known, { crossing, proxy, ready: () => !draining(), version: version() });
}

/** Whether a model may be asked for tensors: its workers speak them, or the config says so. */
export function speaksTensors({ backend, protocols: listed }: ModelConfig): boolean {
  if (backend.kind === "grpc" || listed.includes("oip-v2")) return true;
  return backend.kind === "http" && backend.protocol === "oip-v2";
}

/** What the clients of a model may speak: what its workers do, and what the config says beside it. */
export function spokenBy({ backend, protocols: listed }: ModelConfig): Protocol[] {
  const own: ProtocolName[] =
    backend.kind === "http" && backend.protocol !== "batch"
      ? [backend.protocol]
      : backend.kind === "grpc"
        ? ["oip-v2"]
        : [];
  return [...new Set([...own, ...listed])]
    .map((name) => protocols[name])
    .filter((each) => each !== undefined);
}
