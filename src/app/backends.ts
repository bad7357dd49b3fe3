import type { Backend } from "../workers/backend/backend.ts";
import { GrpcBackend } from "../workers/backend/grpc.ts";
import { HttpBackend } from "../workers/backend/http.ts";
import { ModuleBackend } from "../workers/backend/module.ts";
import { PythonBackend } from "../workers/backend/python.ts";
import { SimulatedBackend } from "../workers/backend/simulated.ts";
import type { Clock } from "./clock.ts";
import type { Vault } from "../workers/backend/vault.ts";
import type { ModelConfig } from "./config/config.ts";
import { fixedWorkers } from "./config/worker-addresses.ts";
import { batch } from "../gateway/protocol/batch.ts";
import type { WorkerSide } from "../gateway/protocol/protocol.ts";
import { protocols } from "../gateway/protocol/protocols.ts";
import type { Events } from "../observe/events.ts";

/** `vault`: clients' credentials for the workers. `numbers`: child workers to start; default: as configured, from 1. */
export function makeBackend(
  { name, backend, health }: ModelConfig,
  clock: Clock,
  events: Events,
  vault?: Vault,
  numbers?: readonly number[],
): Backend {
  const around = { model: name, clock, events };
  switch (backend.kind) {
    case "http":
      return new HttpBackend(
        { ...backend, ...fixed(backend), protocol: workerSide(backend.protocol), health, vault },
        around,
      );
    case "grpc":
      return new GrpcBackend({ ...backend, ...fixed(backend), health }, around);
    case "python":
      return new PythonBackend({ ...backend, numbers }, around);
    case "module":
      return new ModuleBackend({ ...backend, numbers }, around);
    case "simulated":
      return new SimulatedBackend({ ...backend, numbers }, clock);
  }
}

/** DNS names are resolved later (`discovery.ts`). */
function fixed({ workers }: { readonly workers: readonly string[] }): { workers: string[] } {
  return { workers: fixedWorkers(workers) };
}

export function workerSide(name: "batch" | keyof typeof protocols): WorkerSide {
  return name === "batch" ? batch : protocols[name]!.worker;
}
