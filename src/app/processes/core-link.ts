/**
 * What the core and the gateway processes of `ferry serve --processes` tell each other beside tasks:
 *
 *   core ── status ─► gateway      models with healthy workers, addresses for proxied requests, the vault's key
 *   gateway ── note ─► core        events, which the core's observers hear as its own; credentials for workers; its CPU,
 *                                  memory and event-loop delay
 */
import type { RemoteEngine } from "../../engine/remote/engine.ts";
import type { ProcessSample } from "../../observe/processes.ts";
import type { KnownWorker } from "../../workers/backend/passthrough.ts";
import { credentialName } from "../../workers/backend/vault.ts";

/** Which of the processes this is. */
export interface Part {
  readonly kind: "core" | "gateway";
  /** Of a gateway, from 1; the core's is 0. */
  readonly number: number;
  readonly gateways: number;
  /** Path of the core's Unix socket. */
  readonly socket: string;
}

export interface CoreStatus {
  readonly writable: boolean;
  /** Models with a healthy worker. */
  readonly healthy: readonly string[];
  /** By model; only of those that gateways call directly. */
  readonly workers: Readonly<Record<string, readonly KnownWorker[]>>;
  /** Base64. Names of credentials are HMACs under it (`workers/backend/vault.ts`). */
  readonly vaultKey: string;
}

/** How often the core looks whether its status changed; workers' changes are sent at once. */
export const STATUS_MS = 200;

export type GatewayNote =
  | { readonly is: "events"; readonly text: string }
  | { readonly is: "credential"; readonly model: string; readonly header: string }
  | { readonly is: "sample"; readonly sample: ProcessSample };

/** The name of a process in metrics. */
export function processName(part: Part | undefined): string {
  if (part === undefined) return "ferry";
  return part.kind === "core" ? "core" : `gateway-${part.number}`;
}

export function noteText(note: GatewayNote): string {
  if (note.is === "events") return `e${note.text}`;
  if (note.is === "sample") return `p${JSON.stringify(note.sample)}`;
  return `c${JSON.stringify([note.model, note.header])}`;
}

export function readNote(text: string): GatewayNote | undefined {
  const rest = text.slice(1);
  if (text.startsWith("e")) return { is: "events", text: rest };
  if (text.startsWith("p")) return { is: "sample", sample: JSON.parse(rest) as ProcessSample };
  if (!text.startsWith("c")) return undefined;
  const [model, header] = JSON.parse(rest) as [string, string];
  return { is: "credential", model, header };
}

const UNKNOWN: CoreStatus = { writable: false, healthy: [], workers: {}, vaultKey: "" };

/** A gateway's view of the core. */
export class CoreView {
  readonly #engine: RemoteEngine;
  #status = UNKNOWN;

  constructor(engine: RemoteEngine) {
    this.#engine = engine;
    engine.onStatus((text) => void (this.#status = JSON.parse(text) as CoreStatus));
  }

  get writable(): boolean {
    return this.#engine.connected && this.#status.writable;
  }

  healthy(model: string): boolean {
    return this.#status.healthy.includes(model);
  }

  workers(model: string): readonly KnownWorker[] | undefined {
    return this.#status.workers[model];
  }

  /** The core keeps the credential; it arrives there before the task that names it. */
  vault(model: string): { keep(header: string): string } {
    return {
      keep: (header) => {
        this.#engine.tell(noteText({ is: "credential", model, header }));
        return credentialName(Buffer.from(this.#status.vaultKey, "base64"), header);
      },
    };
  }
}
