/** Drop-in routes from the config: which model speaks what, and who answers requests outside batches. */
import type { Admission } from "../gateway/admission/admission.ts";
import { type KnownWorker, PassThroughWorkers } from "../workers/backend/passthrough.ts";
import { workerSide } from "./backends.ts";
import type { Clock } from "./clock.ts";
import type { Config, HttpBackendConfig, ModelConfig } from "./config/config.ts";
import type { Shares } from "../core/share.ts";
import type { Dispatcher } from "../dispatch/dispatcher.ts";
import { DropIns, type DropInModel } from "../gateway/dropin.ts";
import { type PassedModel, Passthrough } from "../gateway/passthrough.ts";
import type { RequestPath } from "../gateway/request-path.ts";
import type { Screening } from "../gateway/screening.ts";
import type { Pad } from "../gateway/protocol/oip-pad.ts";
import type { Protocol, ProtocolName, RequestLimits } from "../gateway/protocol/protocol.ts";
import { protocols } from "../gateway/protocol/protocols.ts";
import { plainUrl } from "./config/worker-addresses.ts";
import type { Events } from "../observe/events.ts";
import { version } from "./version.ts";

export interface DropInNeeds {
  readonly path: RequestPath;
  readonly admission: Admission;
  readonly clock: Clock;
  readonly events: Events;
  readonly healthy: (model: string) => boolean;
  /** The n-th model's current workers; undefined where this process runs no batches. */
  readonly workers: (model: number) => readonly KnownWorker[] | undefined;
  readonly screening: (model: number) => Screening | undefined;
  readonly ready: () => boolean;
  /** Requests being proxied, under any generation of the config. */
  readonly underway: Shares;
}

export interface OpenDropIns {
  readonly dropIns: DropIns;
  /** Accepts nothing new; requests in progress continue. `close` ends those. */
  readonly leave: () => void;
  readonly close: () => Promise<void>;
}

/** Rejects with one line if a certificate for workers is unusable. */
export async function openDropIns(config: Config, needs: DropInNeeds): Promise<OpenDropIns> {
  const { models, limits } = config;
  const { path, healthy, ready, admission, clock } = needs;
  const passages: PassThroughWorkers[] = [];
  const passed = new Map<string, PassedModel>();
  for (const [at, model] of models.entries()) {
    if (!isReachable(model)) continue;
    const { totalMs } = model.timeouts;
    const { forwardAuthorization } = model.backend;
    const road = passageTo(model, at, needs);
    passages.push(road);
    passed.set(model.name, { road, totalMs, forwardAuthorization });
  }
  try {
    await Promise.all(passages.map((passage) => passage.start()));
  } catch (error) {
    await Promise.all(passages.map((passage) => passage.stop()));
    throw error;
  }
  const passLimits = {
    maxOpen: limits.maxPassthrough,
    perTenant: config.auth.mode === "required",
    idleMs: limits.passthroughIdleMs,
  };
  const proxy = new Passthrough(passed, passLimits, admission, clock, needs.underway);
  const known = models.map((model, at): DropInModel => ({
    name: model.name,
    protocols: spokenBy(model),
    passthrough: model.passthrough,
    maxBatchSize: model.maxBatchSize,
    pad: padOf(model),
    reachable: passed.has(model.name),
    ready: () => healthy(model.name),
    workerName: workerNameOf(model),
    screen: needs.screening(at),
  }));
  const parts = { path, proxy, limits: requestLimits(limits), ready, version: version() };
  const dropIns = new DropIns(known, parts);
  return {
    dropIns,
    leave: () => passages.forEach((passage) => passage.leave()),
    close: async () => void (await Promise.all(passages.map((passage) => passage.stop()))),
  };
}

/** Expanded inputs per request, × the largest body (`/rerank` repeats its query): 4 KB of query × 2,048 texts. */
const MAX_EXPANSION = 8;

/** At most what an empty queue can hold. */
function requestLimits({
  maxInputs,
  maxQueued,
  maxBodyBytes,
  maxQueuedBytes,
}: Config["limits"]): RequestLimits {
  return {
    maxInputs: Math.min(maxInputs, maxQueued),
    maxBytes: Math.min(MAX_EXPANSION * maxBodyBytes, maxQueuedBytes),
  };
}

/** The workers' name for the model, from the config or their URLs; undefined: the same. */
function workerNameOf({ backend }: ModelConfig): string | undefined {
  if (backend.kind !== "http") return undefined;
  return backend.model ?? workerSide(backend.protocol).modelOf?.(new URL(backend.workers[0]!).pathname);
}

/** Its workers are reachable by HTTP from here, and speak the clients' protocol. */
export function isReachable(
  model: ModelConfig,
): model is ModelConfig & { readonly backend: HttpBackendConfig } {
  const { backend, passthrough } = model;
  return backend.kind === "http" && (passthrough || backend.protocol !== "batch");
}

function passageTo(
  { name, backend, health }: ModelConfig & { readonly backend: HttpBackendConfig },
  at: number,
  needs: DropInNeeds,
): PassThroughWorkers {
  const { authorization, tls, protocol } = backend;
  // A process without batches resolves no names itself: the system does, per connection.
  const listed = backend.workers.map((worker) => ({ address: plainUrl(worker, "http"), well: true }));
  const workers = (): readonly KnownWorker[] => needs.workers(at) ?? listed;
  const side = workerSide(protocol);
  const basePath = (path: string): string => side.basePath(path);
  const { ejectMs } = health;
  return new PassThroughWorkers(
    { model: name, workers, basePath, authorization, tls, ejectMs },
    needs.clock,
    needs.events,
  );
}

export function speaksTensors(model: ModelConfig): boolean {
  return hasTensorWorkers(model) || model.protocols.includes("oip-v2");
}

export function hasTensorWorkers({ backend }: ModelConfig): boolean {
  return backend.kind === "grpc" || (backend.kind === "http" && backend.protocol === "oip-v2");
}

/** How rows of different length are padded; undefined: only rows of one length share a batch. */
export function padOf({ pad, lengths }: ModelConfig): Pad | undefined {
  if (pad === undefined) return undefined;
  const classes = lengths.filter((length) => typeof length === "number");
  const [first = "auto"] = pad.outputs;
  return {
    axis: pad.axis,
    value: pad.value,
    inputs: pad.inputs.length === 0 ? undefined : pad.inputs,
    outputs: first === "auto" ? undefined : first === "none" ? [] : pad.outputs,
    lengthsInput: pad.lengthsInput,
    classes: classes.length === 0 ? undefined : classes,
  };
}

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

export function knownWorkers({ workers }: Dispatcher, now: number): KnownWorker[] {
  return workers.slots.flatMap((slot) => {
    const { address, host } = slot.worker;
    return address === undefined
      ? []
      : [{ address, host, well: !slot.drained && slot.state(now) !== "down" }];
  });
}

export function forwards({ backend }: ModelConfig): boolean {
  return backend.kind === "http" && backend.forwardAuthorization;
}
