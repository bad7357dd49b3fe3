/**
 * The two ends of the way between the gateway processes of `ferry serve --processes` and the core process. Beside tasks
 * (`engine/remote`) they tell each other:
 *
 *   core ── status ─► gateway      models with healthy workers, addresses for proxied requests
 *   gateway ── notes ─► core       events, which the core's observers hear as its own; credentials for workers; what the
 *                                  process uses
 */
import { rm } from "node:fs/promises";
import { dirname } from "node:path";
import { connectLink } from "../../engine/remote/channel.ts";
import { RemoteEngine, type RemoteEngineParts } from "../../engine/remote/engine.ts";
import { RemoteServer, type RemoteServerParts } from "../../engine/remote/server.ts";
import { type ProcessSample, ProcessSampler, type ProcessSamples } from "../../observe/processes.ts";
import { EventRelay, replayEvents } from "../../observe/relay.ts";
import type { KnownWorker } from "../../workers/backend/passthrough.ts";
import type { Vault } from "../../workers/backend/vault.ts";
import type { Alarm } from "../clock.ts";
import { version } from "../version.ts";

/** Which of the processes this is. */
export interface Part {
  readonly kind: "core" | "gateway";
  /** Of a gateway, from 1; the core's is 0. */
  readonly number: number;
  readonly gateways: number;
  /** Path of the core's Unix socket. */
  readonly socket: string;
  /** Base64. All name clients' credentials by it, also after a restart (`workers/backend/vault.ts`). */
  readonly vaultKey: string;
}

/** The name of a process in metrics. */
export function processName(part: Part | undefined): string {
  if (part === undefined) return "ferry";
  return part.kind === "core" ? "core" : `gateway-${part.number}`;
}

export interface CoreStatus {
  readonly writable: boolean;
  /** Models with a healthy worker. */
  readonly healthy: readonly string[];
  /** By model; only of models that gateways call directly. */
  readonly workers: Readonly<Record<string, readonly KnownWorker[]>>;
}

/** First character of a note. */
const EVENTS = "e";
const CREDENTIAL = "c";
const SAMPLE = "p";
const LEAVING = "l";
/** A core that is stopped drains alone if no gateway says within this time that it is leaving, too. */
const LEAVE_WITHIN_MS = 3000;
/** How often the core looks whether its status changed; changes of workers are sent at once. */
const STATUS_MS = 200;

/** A gateway's way to the core. */
export class CoreLink {
  readonly engine: RemoteEngine;
  readonly #relay: EventRelay;
  readonly #sampler: ProcessSampler;
  readonly #vaults = new Map<string, Vault>();
  #status: CoreStatus = { writable: false, healthy: [], workers: {} };

  constructor(part: Part, parts: Omit<RemoteEngineParts, "connect" | "connected" | "version">) {
    const engine = new RemoteEngine({
      ...parts,
      connect: () => connectLink(part.socket),
      connected: () => this.#tellCredentials(),
      version: version(),
    });
    this.engine = engine;
    engine.onStatus((text) => void (this.#status = JSON.parse(text) as CoreStatus));
    this.#relay = new EventRelay(parts.events, parts.clock, (text) => {
      if (engine.connected) engine.tell(EVENTS + text);
      return engine.connected;
    });
    this.#sampler = new ProcessSampler(processName(part), parts.events, parts.clock, (sample) => {
      if (engine.connected) engine.tell(SAMPLE + JSON.stringify(sample));
    });
  }

  get writable(): boolean {
    return this.engine.connected && this.#status.writable;
  }

  healthy(model: string): boolean {
    return this.#status.healthy.includes(model);
  }

  workers(model: string): readonly KnownWorker[] | undefined {
    return this.#status.workers[model];
  }

  /** The core keeps a credential too: it arrives there before the task that names it. */
  vault(model: string, vault: Vault): Pick<Vault, "keep"> {
    this.#vaults.set(model, vault);
    return {
      keep: (header) => {
        this.#tellCredential(model, header);
        return vault.keep(header);
      },
    };
  }

  /** To a core that has been started again, before the tasks that name them are sent again. */
  #tellCredentials(): void {
    for (const [model, vault] of this.#vaults) {
      for (const header of vault.headers()) this.#tellCredential(model, header);
    }
  }

  #tellCredential(model: string, header: string): void {
    this.engine.tell(CREDENTIAL + JSON.stringify([model, header]));
  }

  /** This gateway drains, and disconnects when its callers are answered. */
  leaving(): void {
    this.engine.tell(LEAVING);
  }

  async close(): Promise<void> {
    this.#sampler.stop();
    this.#relay.close();
    await this.engine.close();
  }
}

export interface GatewaysParts extends Omit<RemoteServerParts, "status" | "told" | "version"> {
  status(): CoreStatus;
  readonly processes: ProcessSamples;
  /** Keeps a client's credential for the model's workers. */
  keep(model: string, header: string): void;
}

/** The core's way to its gateways. */
export class Gateways {
  readonly #parts: GatewaysParts;
  readonly #server: RemoteServer;
  readonly #unhear: (() => void)[];
  #alarm: Alarm | undefined;
  #folder = "";
  /** A gateway is leaving. */
  #leaving = false;

  constructor(parts: GatewaysParts) {
    this.#parts = parts;
    const server = (this.#server = new RemoteServer({
      ...parts,
      put: (task, sharing, ofMany) => parts.put(task, sharing, ofMany),
      version: version(),
      status: () => JSON.stringify(parts.status()),
      told: (_, note) => this.#told(note),
    }));
    const heard = ["worker.changed", "reloaded"] as const;
    this.#unhear = heard.map((event) => parts.events.on(event, () => server.publish()));
  }

  async listen({ socket }: Part): Promise<void> {
    this.#folder = dirname(socket);
    this.#publish();
    await this.#server.listen(socket);
  }

  /**
   * Resolves when all gateways have left, as they do when Ferry stops; if none is leaving, after a moment: then the core
   * is stopped alone, and its successor serves them.
   */
  async left(): Promise<void> {
    const { clock } = this.#parts;
    const late = Promise.withResolvers<void>();
    const alarm = clock.at(clock.now() + LEAVE_WITHIN_MS, late.resolve);
    await Promise.race([this.#server.whenEmpty(), late.promise]);
    alarm.cancel();
    if (this.#leaving) await this.#server.whenEmpty();
  }

  async close(): Promise<void> {
    for (const unhear of this.#unhear) unhear();
    this.#alarm?.cancel();
    await this.#server.close();
    await rm(this.#folder, { recursive: true, force: true });
  }

  #publish(): void {
    const { clock } = this.#parts;
    this.#server.publish();
    this.#alarm = clock.at(clock.now() + STATUS_MS, () => this.#publish());
  }

  #told(note: string): void {
    const text = note.slice(1);
    if (note.startsWith(EVENTS)) return replayEvents(text, this.#parts.events);
    if (note === LEAVING) return void (this.#leaving = true);
    if (note.startsWith(SAMPLE)) return this.#parts.processes.put(JSON.parse(text) as ProcessSample);
    const [model, header] = JSON.parse(text) as [string, string];
    this.#parts.keep(model, header);
  }
}
