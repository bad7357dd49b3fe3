/**
 * The client-facing listeners.
 *
 * Everything derived from the config is one generation: credentials, rules, capacity gates, protocols, passthrough. A
 * reload prepares the next generation (which may fail) and switches one reference. A request finishes in the generation
 * that admitted it; engine, waiters and connections are shared by all.
 */
import { randomInt } from "node:crypto";
import { Admission, type AdmissionRules } from "../gateway/admission/admission.ts";
import type { KnownWorker } from "../workers/backend/passthrough.ts";
import type { Clock } from "./clock.ts";
import type { Config, ModelConfig, Role } from "./config/config.ts";
import { isLoopback } from "./config/check.ts";
import { Shares } from "../core/share.ts";
import { Sampler } from "../core/trace.ts";
import { type OpenCredentials, openCredentials } from "./credentials.ts";
import type { Prepared } from "../workers/pool.ts";
import {
  hasTensorWorkers,
  openDropIns,
  type OpenDropIns,
  padOf,
  speaksTensors,
  spokenBy,
} from "./dropins.ts";
import type { OpenedStore } from "./engines.ts";
import { ClientBytes } from "../gateway/client-request.ts";
import { EarlyRefusals } from "../gateway/early-refusal.ts";
import { GrpcListener, type GrpcModel, MAX_CALLS } from "../gateway/grpc.ts";
import { type EdgeTls, MAX_HEADERS } from "../gateway/http2.ts";
import { healthRoutes } from "../gateway/admin.ts";
import { MAX_POLL_MS, NativeProtocol } from "../gateway/native.ts";
import { openapiRoutes } from "../gateway/openapi.ts";
import { PageGuard } from "../gateway/page-guard.ts";
import { screeningFor } from "../gateway/screening.ts";
import { type ModelRoute, RequestPath, type RequestPathParts } from "../gateway/request-path.ts";
import { Listener, type Routes } from "../gateway/server.ts";
import { Waiters } from "../gateway/waiters.ts";
import { Events } from "../observe/events.ts";
import type { Tracing } from "../observe/tracing.ts";
import { version } from "./version.ts";
import { admissionRules } from "./rules.ts";

export interface PublicApiParts {
  readonly role: Role;
  readonly clock: Clock;
  readonly events: Events;
  readonly opened: OpenedStore;
  readonly tls: EdgeTls | undefined;
  readonly tracing: Tracing | undefined;
  readonly put: RequestPathParts["put"];
  readonly healthy: (model: string) => boolean;
  /** Current workers; undefined where they are not known. */
  readonly workers: (model: string) => readonly KnownWorker[] | undefined;
  readonly vault: (model: ModelConfig) => ModelRoute["vault"];
  readonly draining: () => boolean;
  readonly random: () => number;
}

interface Generation {
  readonly config: Config;
  readonly admission: AdmissionRules;
  readonly models: readonly ModelRoute[];
  readonly credentials: OpenCredentials;
  readonly path: RequestPath;
  readonly passing: OpenDropIns;
  readonly routes: Routes;
  readonly tensors: readonly GrpcModel[];
  readonly grpcPages: PageGuard | undefined;
}

export class PublicApi {
  readonly #parts: PublicApiParts;
  readonly #waiters: Waiters;
  readonly #admission: Admission;
  readonly #underway = new Shares();
  readonly #bytes: ClientBytes;
  #now: Generation | undefined;
  #last: (() => void) | undefined;
  #listener: Listener | undefined;
  #grpc: GrpcListener | undefined;
  apiUrl = "";
  grpcUrl = "";

  constructor(config: Config, parts: PublicApiParts) {
    const { clock, events, opened } = parts;
    const first = admissionRules(config);
    this.#parts = parts;
    this.#bytes = new ClientBytes(() => clientBytes(this.#now!.config));
    this.#waiters = new Waiters(opened.engine, clock, randomInt(2 ** 32));
    this.#admission = new Admission(() => this.#now?.admission ?? first, opened.engine, clock, events);
  }

  async open(config: Config): Promise<void> {
    const { clock, events, tls, tracing, random } = this.#parts;
    const { limits, listen } = config;
    const first = (this.#now = await this.#generation(config));
    const { routes, passing } = first;
    this.#listener = new Listener(routes, { ...limits, maxHeaders: MAX_HEADERS }, clock, events, {
      elsewhere: (path) => passing.dropIns.find(path),
      pages: guardOf(config, listen),
      tls,
      sampler: tracing && new Sampler(tracing.share, random, tracing.followsCaller),
      bytes: this.#bytes,
      early: new EarlyRefusals({
        admission: this.#admission,
        clock,
        events,
        credentials: () => this.#now!.credentials.credentials,
      }),
    });
    this.apiUrl = await this.#listener.listen(listen.host, listen.port);
    await this.#openGrpc(config);
  }

  /** Rejects with one line if a file or a certificate is unusable. */
  async prepare(config: Config): Promise<Prepared> {
    const next = await this.#generation(config);
    return { commit: () => this.#swap(next), abandon: () => end(next) };
  }

  get waiting(): number {
    return (this.#listener?.open ?? 0) + (this.#grpc?.open ?? 0);
  }

  refuse(): void {
    this.#admission.draining = true;
  }

  async takeWaiting(): Promise<void> {
    await this.#listener?.takeWaiting();
  }

  async linger(ms: number): Promise<void> {
    await this.#listener?.linger(ms);
  }

  async drain(): Promise<void> {
    await Promise.all([this.#listener?.drain(), this.#grpc?.drain()]);
  }

  /** Tells waiting callers where to poll, and gives that time to reach the socket. */
  async settle(ms: number): Promise<void> {
    this.#waiters.releaseAll();
    await Promise.all([this.#listener?.settle(ms), this.#grpc?.settle(ms)]);
  }

  async close(): Promise<void> {
    this.#grpc?.close();
    this.#listener?.close();
    this.#last?.();
    if (this.#now !== undefined) await end(this.#now);
    this.#waiters.close();
  }

  #swap(next: Generation): void {
    const last = this.#now!;
    this.#now = next;
    for (const route of last.models) route.open = next.models.some(({ name }) => name === route.name);
    const { routes, passing, config } = next;
    const elsewhere = (path: string) => passing.dropIns.find(path);
    const pages = guardOf(config, config.listen);
    this.#listener!.serve(routes, { elsewhere, pages }, config.limits.maxBodyBytes);
    last.passing.leave();
    // A request from before the switch may still authenticate with them.
    const { clock } = this.#parts;
    this.#last?.();
    const alarm = clock.at(clock.now() + config.limits.requestTimeoutMs, () => this.#last?.());
    this.#last = () => {
      alarm.cancel();
      last.credentials.close();
      this.#last = undefined;
    };
  }

  async #generation(config: Config): Promise<Generation> {
    const { clock, events, opened, draining, put, healthy } = this.#parts;
    const { engine, durable } = opened;
    const admission = this.#admission;
    const models = config.models.map((model) => this.#route(model));
    const opening = await openCredentials(config, opened.shared, clock, events);
    const { credentials } = opening;
    const shared = { admission, waiters: this.#waiters, engine, clock };
    const path = new RequestPath({ ...shared, put, routes: models, credentials, durable });
    const native = new NativeProtocol(
      { ...config.api, maxPollMs: MAX_POLL_MS },
      { ...shared, path, authRequired: credentials.required },
    );
    let passing: OpenDropIns;
    try {
      passing = await this.#openDropIns(config, path, models);
    } catch (error) {
      opening.close();
      throw error;
    }
    const described = { ...healthRoutes(draining, opened.writable), ...openapiRoutes(credentials.required) };
    const routes = { ...passing.dropIns.routes(), ...native.routes(), ...described };
    const tensors = config.models.filter(speaksTensors).map((model) => ({
      name: model.name,
      alone: model.maxBatchSize === 1,
      pad: padOf(model),
      ready: () => healthy(model.name),
    }));
    const grpcPages = guardOf(config, config.grpc.listen);
    return {
      config,
      admission: admissionRules(config),
      models,
      credentials: opening,
      path,
      passing,
      routes,
      tensors,
      grpcPages,
    };
  }

  #openDropIns(config: Config, path: RequestPath, models: readonly ModelRoute[]): Promise<OpenDropIns> {
    const { role, clock, events, healthy, workers } = this.#parts;
    return openDropIns(config, {
      path,
      admission: this.#admission,
      clock,
      // A process that runs batches already reports its workers' certificates.
      events: role === "gateway" ? events : new Events(),
      workers: (at) => workers(config.models[at]!.name),
      healthy,
      screening: (at) => models[at]!.screen,
      ready: () => this.#ready(),
      underway: this.#underway,
    });
  }

  async #openGrpc({ grpc, limits }: Config): Promise<void> {
    if (grpc.listen === undefined) return;
    const { clock, events, tls, tracing, random } = this.#parts;
    const now = (): Generation => this.#now!;
    const listener = (this.#grpc = new GrpcListener(
      {
        ...limits,
        ...grpc,
        maxHeaders: MAX_HEADERS,
        maxStreams: MAX_CALLS,
        // As of the latest reload. More rows than maxQueued can never be queued at once.
        get maxRows() {
          const { maxInputs, maxQueued } = now().config.limits;
          return Math.min(maxInputs, maxQueued);
        },
      },
      {
        get path() {
          return now().path;
        },
        get models() {
          return now().tensors;
        },
        get pages() {
          return now().grpcPages;
        },
        ready: () => this.#ready(),
        version: version(),
        bytes: this.#bytes,
        clock,
        events,
        tls,
        sampler: tracing && new Sampler(tracing.share, random, tracing.followsCaller),
      },
    ));
    this.grpcUrl = await listener.listen(grpc.listen.host, grpc.listen.port);
  }

  #ready(): boolean {
    return !this.#parts.draining() && this.#parts.opened.writable();
  }

  #route(model: ModelConfig): ModelRoute {
    const { name, timeouts, cache, collapse } = model;
    const screen = screeningFor({
      deny: model.deny,
      protocols: spokenBy(model).map((protocol) => protocol.name),
      tensorWorkers: hasTensorWorkers(model),
    });
    const vault = this.#parts.vault(model);
    return { name, totalMs: timeouts.totalMs, cache, collapse, open: true, screen, vault };
  }
}

/** For loopback listeners without authentication, which any web page could call. */
function guardOf({ auth }: Config, listen: Config["grpc"]["listen"]): PageGuard | undefined {
  if (auth.mode === "required" || listen === undefined || !isLoopback(listen.host)) return undefined;
  const advice =
    "use its address or localhost, list the name in auth.allowedHosts, or set auth.mode: required";
  return new PageGuard(auth.allowedHosts, advice);
}

/** Bodies become queued tasks, so the bound is the same; one client may always send two of the largest. */
function clientBytes({ limits, grpc }: Config): number {
  return Math.max(limits.maxQueuedBytes, 4 * Math.max(limits.maxBodyBytes, grpc.maxMessageBytes));
}

async function end({ credentials, passing }: Generation): Promise<void> {
  credentials.close();
  await passing.close();
}
