/**
 * Messages of `ferry serve`: ready, draining, farewell. Pure. On a terminal `ready` is a banner of at most nine lines;
 * elsewhere each is one JSON line. Capacity is shown only where it is known: w simulated workers serve w × maxBatchSize
 * / (baseMs + maxBatchSize × perItemMs). For real workers, and where time follows the inputs' length, it is learned from
 * traffic. A gateway shows no workers, a
 * batcher no client URL. Several processes share one banner.
 */
import type {
  Address,
  Config,
  ModelConfig,
  RedisEngineConfig,
  Role,
  SimulatedBackendConfig,
} from "../../app/config/config.ts";
import { isAnyHost } from "../../app/config/check.ts";
import { fixedWorkers, hasAddresses, isDns } from "../../app/config/worker-addresses.ts";
import { paint, printable } from "./terminal.ts";

/** Where an accepted task is stored: memory, disk, one Redis server, or also a replica. */
export type Durability = "none" | "disk" | "local" | "replica";

export interface ReadyFacts {
  readonly config: Config;
  readonly role: Role;
  readonly version: string;
  /** "" for a batcher, which takes no requests. */
  readonly apiUrl: string;
  /** Omitted or "": no client gRPC. */
  readonly grpcUrl?: string | undefined;
  readonly adminUrl: string;
  /** Gateway processes, where there are several. */
  readonly processes?: number | undefined;
  /** Current durability; omitted: from the config. */
  readonly durability?: Durability | undefined;
  /** Since process start. */
  readonly startMs: number;
  readonly keys?: boolean;
}

/** As counted by `Ferry.tally`. */
export interface ServeTotals {
  readonly requests: number;
  readonly batches: number;
  readonly tasks: number;
  /** Worker calls; more than batches after retries. */
  readonly calls: number;
  readonly lost: number;
  readonly queued: number;
  readonly running: number;
}

/** Further models share one line, so that the banner keeps to nine. */
const maxModelLines = 3;

export function readyBanner(facts: ReadyFacts, color: boolean): string {
  const { config, role, version, startMs } = facts;
  const apiUrl = reachable(facts.apiUrl);
  const { bold, dim, green, yellow, cyan } = paint(color);
  const demo = demoLabel(config);
  const arrow = green("➜");
  const hint = facts.keys === true ? dim(keysHint(facts)) : "";
  const several = facts.processes === undefined ? "" : `    ${plural(facts.processes, "gateway process")}`;
  const lines = [
    `  ${bold(green("FERRY"))} ${green(`v${version}`)}${role === "all" ? "" : ` ${role}`}  ` +
      `ready in ${bold(String(Math.round(startMs)))} ms${demo === "" ? "" : `    ${yellow(demo)}`}${dim(several)}`,
    ...(apiUrl === "" ? [] : [`  ${arrow}  API        ${cyan(`${apiUrl}/v1/inference`)}`]),
    ...(facts.grpcUrl ? [`  ${arrow}  gRPC       ${cyan(reachable(facts.grpcUrl))}`] : []),
    config.telemetry.dashboard
      ? `  ${arrow}  Dashboard  ${cyan(dashboardUrl(facts))}`
      : `  ${arrow}  Admin      ${cyan(`${reachable(facts.adminUrl)}/internal/health`)}`,
    ...modelLines(facts),
    `     Engine     ${engineLine(facts, dim)}`,
    ...(apiUrl === "" ? [] : [`     Try        ${tryLine(config, apiUrl)}`]),
  ];
  if (config.auth.mode === "none" && apiUrl !== "") {
    const open = `  ${yellow("!")}  auth: none, anyone who reaches the port is tenant "anonymous"`;
    lines.push(hint === "" ? open : `${open}    ${hint}`);
  } else if (hint !== "") lines.push(`     ${hint}`);
  return lines.map((line) => `${line}\n`).join("");
}

export function readyLine(facts: ReadyFacts, now: number): string {
  const { config, role, version, apiUrl, grpcUrl, adminUrl, processes, startMs } = facts;
  return jsonLine("info", now, "ready", {
    version,
    role,
    ...(apiUrl === "" ? {} : { listen: apiUrl }),
    ...(grpcUrl ? { grpc: grpcUrl } : {}),
    admin: adminUrl,
    ...(processes === undefined ? {} : { processes }),
    engine: config.engine.kind,
    durability: durabilityOf(facts),
    models: config.models.length,
    workers: role === "gateway" ? 0 : countWorkers(config),
    startMs: Math.round(startMs),
    ...(demoLabel(config) === "" ? {} : { demo: true }),
  });
}

export function drainBanner(tally: ServeTotals, config: Config, signal: string): string {
  const again = signal === "SIGINT" ? "Ctrl-C again" : `${signal} again`;
  const kept =
    config.engine.kind === "redis"
      ? "accepted tasks are in Redis and go on"
      : config.engine.dataDir === undefined
        ? "accepted tasks end with the process"
        : "accepted tasks are on disk and go on after a restart";
  const seconds = count(config.limits.drainMs / 1000);
  const left = `${plural(tally.queued, "request")}, ${plural(tally.running, "batch")}`;
  return `  draining: ${left}, at most ${seconds} s (${again} to stop now; ${kept})\n`;
}

export function drainLine(tally: ServeTotals, config: Config, signal: string, now: number): string {
  const { queued: requests, running: batches } = tally;
  return jsonLine("info", now, "draining", { signal, requests, batches, atMostMs: config.limits.drainMs });
}

/** `served 18,402 requests in 331 batches (55.6 of 64 full), 18,071 GPU calls saved, 0 lost` */
export function farewellBanner(tally: ServeTotals, config: Config, role: Role = "all"): string {
  const { requests, batches, tasks, lost } = tally;
  const mean = batches === 0 ? "" : ` (${meanSize(tally)}${commonBatchSize(config)})`;
  const inBatches = `in ${plural(batches, "batch")}${mean}, ${count(callsSaved(tally))} GPU calls saved`;
  const served = `served ${plural(requests, "request")}`;
  const done = {
    all: `${served} ${inBatches}`,
    gateway: served,
    batcher: `ran ${plural(tasks, "task")} ${inBatches}`,
  };
  const unfinished = tally.queued === 0 ? "" : `, ${plural(tally.queued, "request")} not answered`;
  return `  ${done[role]}${unfinished}, ${count(lost)} lost\n`;
}

export function farewellLine(tally: ServeTotals, now: number): string {
  const { requests, batches, tasks, queued: unanswered, lost } = tally;
  const facts = { requests, batches, tasks, gpuCallsSaved: callsSaved(tally), unanswered, lost };
  return jsonLine(lost > 0 ? "error" : "info", now, "stopped", facts);
}

/** Requests per second with full batches; undefined when only traffic can tell. */
export function capacityPerSecond(model: ModelConfig): number | undefined {
  if (model.backend.kind !== "simulated" || model.backend.perTokenMs > 0) return undefined;
  const fullMs = fullBatchMs(model.backend, model.maxBatchSize);
  return fullMs === 0 ? undefined : (model.backend.workers * model.maxBatchSize * 1000) / fullMs;
}

/** Capacity × `admission.targetUtilization`; undefined when only traffic can tell. */
export function plannedPerSecond(model: ModelConfig, config: Config): number | undefined {
  const capacity = capacityPerSecond(model);
  return capacity === undefined ? undefined : threeDigits(capacity * config.admission.targetUtilization);
}

export function countWorkers({ models }: Config): number {
  return models.reduce((total, { backend }) => total + workersOf(backend), 0);
}

/** In Ferry's log format: level, time, msg, then the facts. */
export function jsonLine(level: string, now: number, msg: string, facts: object): string {
  return `${JSON.stringify({ level, time: new Date(now).toISOString(), msg, ...facts })}\n`;
}

/** URL of a listener for a client on this machine. */
export function urlOf({ host, port }: Address, tls = false): string {
  const reachable = isAnyHost(host) ? (host.includes(":") ? "::1" : "127.0.0.1") : host;
  return `${tls ? "https" : "http"}://${reachable.includes(":") ? `[${reachable}]` : reachable}:${port}`;
}

/**
 * With the token, so one click is enough: for a terminal only, never for a log. Browsers do not send the part after #.
 */
export function dashboardUrl({ config, adminUrl }: { config: Config; adminUrl: string }): string {
  const { token } = config.admin;
  return `${reachable(adminUrl)}/${token === undefined ? "" : `#token=${encodeURIComponent(token)}`}`;
}

/** Replaces 0.0.0.0, which cannot be opened. */
export function reachable(url: string): string {
  return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:");
}

/** 1234.5 → "1,234.5" */
export function count(value: number): string {
  return value.toLocaleString("en-US", { maximumFractionDigits: 1 });
}

export function plural(value: number, noun: string): string {
  const ending = /(?:ch|s)$/.test(noun) ? "es" : "s";
  return `${count(value)} ${value === 1 ? noun : `${noun}${ending}`}`;
}

function demoLabel(config: Config): string {
  const simulated = config.models.find((model) => model.backend.kind === "simulated");
  if (simulated?.backend.kind !== "simulated") return "";
  const fullMs = fullBatchMs(simulated.backend, simulated.maxBatchSize);
  if (simulated.backend.perTokenMs > 0) return "DEMO: simulated GPU, time follows the inputs' length";
  return `DEMO: simulated GPU, ${count(fullMs)} ms a ${simulated.backend.perItemMs > 0 ? "full " : ""}batch`;
}

function keysHint({ config, role, processes }: ReadyFacts): string {
  const alone = role === "all" && processes === undefined;
  return demoLabel(config) === "" || !alone ? "press h for keys" : "press l for load, h for keys";
}

function modelLines({ config, role }: ReadyFacts): string[] {
  const { models } = config;
  const fits = models.length <= maxModelLines ? models.length : maxModelLines - 1;
  const width = Math.max(...models.slice(0, fits).map((model) => model.name.length));
  const lines = models
    .slice(0, fits)
    .map(
      (model) =>
        `     Model      ${printable(model.name).padEnd(width)}   ${modelFacts(model, config, role)}`,
    );
  if (fits < models.length) lines.push(`                and ${models.length - fits} more models`);
  return lines;
}

function modelFacts(model: ModelConfig, config: Config, role: Role): string {
  const { backend, maxBatchSize } = model;
  if (role === "gateway") return `batches of up to ${maxBatchSize}, run by batchers`;
  const workers = workersText(backend);
  const capacity = capacityPerSecond(model);
  if (capacity === undefined || backend.kind !== "simulated") {
    return `${workers} × ${maxBatchSize} (${backend.kind}), capacity is learned from traffic`;
  }
  const fullMs = count(fullBatchMs(backend, maxBatchSize));
  const plan = count(plannedPerSecond(model, config)!);
  const most = count(Math.floor(capacity));
  return `${workers} × ${maxBatchSize} / ${fullMs} ms = up to ${most} req/s, plan with ${plan}`;
}

function engineLine(facts: ReadyFacts, dim: (text: string) => string): string {
  const { engine } = facts.config;
  if (engine.kind === "redis") {
    const durability = durabilityOf(facts);
    const alone = durability === "local" ? `    ${dim("one server keeps the accepted tasks")}` : "";
    return `redis ${redisPlace(engine)}, durability ${durability}${alone}`;
  }
  if (engine.dataDir !== undefined) return `memory, kept on disk in ${printable(engine.dataDir)}`;
  return `memory, nothing kept on disk    ${dim("set engine.dataDir to survive a restart")}`;
}

function durabilityOf({ config: { engine }, durability }: ReadyFacts): string {
  if (durability !== undefined) return durability;
  if (engine.kind === "redis") return engine.durability;
  return engine.dataDir === undefined ? "none" : "disk";
}

/** Host and port without credentials: `redis-1:6379 and 2 more`. */
export function redisPlace({ url, nodes }: RedisEngineConfig): string {
  if (url !== undefined) {
    const parsed = URL.parse(url);
    return printable(`${parsed?.hostname ?? "?"}:${parsed?.port || "6379"}`);
  }
  const [first, ...others] = nodes.map(
    ({ host, port }) => `${host.includes(":") ? `[${host}]` : host}:${port}`,
  );
  return `${first}${others.length === 0 ? "" : ` and ${others.length} more`}`;
}

function tryLine(config: Config, apiUrl: string): string {
  const name = config.models.length > 1 ? config.models[0]?.name : undefined;
  const body = JSON.stringify({ ...(name === undefined ? {} : { model: name }), input: "hello" });
  // Inside single quotes a shell takes everything literally except the quote.
  const who = config.auth.mode === "required" ? '-H "Authorization: Bearer $FERRY_KEY" ' : "";
  return `curl -s ${who}--json '${body.replaceAll("'", String.raw`'\''`)}' ${apiUrl}/v1/inference`;
}

/** `2 workers`, and the DNS name where one is resolved. */
export function workersText(backend: ModelConfig["backend"]): string {
  const names = hasAddresses(backend) ? backend.workers.filter(isDns) : [];
  const [first, ...others] = names.map((name) => printable(new URL(name).hostname));
  const fixed = workersOf(backend);
  if (first === undefined) return plural(fixed, "worker");
  const found = `workers of ${first}${others.length > 0 ? ` and ${plural(others.length, "name")} more` : ""}`;
  return fixed === 0 ? found : `${plural(fixed, "worker")} and ${found}`;
}

function workersOf(backend: ModelConfig["backend"]): number {
  return typeof backend.workers === "number" ? backend.workers : fixedWorkers(backend.workers).length;
}

function fullBatchMs({ baseMs, perItemMs }: SimulatedBackendConfig, maxBatchSize: number): number {
  return baseMs + perItemMs * maxBatchSize;
}

/** Rounded down: never overstate capacity. */
function threeDigits(value: number): number {
  const unit = 10 ** Math.max(0, Math.floor(Math.log10(Math.max(1, value))) - 2);
  return Math.floor(value / unit) * unit;
}

/** Without Ferry each task would be one call. */
function callsSaved({ tasks, calls }: ServeTotals): number {
  return Math.max(0, tasks - calls);
}

function meanSize({ tasks, batches }: ServeTotals): string {
  return (tasks / batches).toFixed(1);
}

/** " of 64 full" where all models share the largest batch; otherwise "full" is meaningless. */
function commonBatchSize(config: Config): string {
  const sizes = new Set(config.models.map((model) => model.maxBatchSize));
  return sizes.size === 1 ? ` of ${[...sizes][0]} full` : " on average";
}
