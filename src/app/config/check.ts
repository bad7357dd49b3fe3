/**
 * The rules between settings: each one sees a draft, so a setting that is wrong in itself is simply
 * not there, and no rule fires on it.
 *
 * A problem stops the start, because the file would do something that nobody can want; a warning
 * does not. The place reported is the setting that the reader most likely wants to change.
 */
import { accessSync, constants } from "node:fs";
import { PatternMistake } from "../../core/pattern.ts";
import { screenFor } from "../../core/screen.ts";
import type { Address, Config } from "./config.ts";
import type { Findings, Draft } from "./read.ts";

type Draftings = Draft<Config>;
type DraftModel = NonNullable<Draftings["models"]>[number];
type DraftRedis = Extract<NonNullable<Draftings["engine"]>, { readonly kind?: "redis" | undefined }>;

export function checkSettings(draft: Draftings, findings: Findings): void {
  checkListeners(draft, findings);
  checkEngine(draft, findings);
  checkModelNames(draft, findings);
  checkWorkerUrls(draft, findings);
  for (const [index, model] of (draft.models ?? []).entries()) {
    checkTimes(model, `models[${index}]`, findings);
    checkSizes(draft, model, `models[${index}]`, findings);
    checkProtocols(model, `models[${index}]`, findings);
    checkScaling(draft, model, `models[${index}]`, findings);
  }
  checkTiers(draft, findings);
  checkLimits(draft, findings);
  checkTls(draft, findings);
  checkWorkerTls(draft, findings);
  checkAuth(draft, findings);
  checkJwt(draft, findings);
  checkPatterns(draft, findings);
  checkPassing(draft, findings);
}

function checkListeners({ listen, admin, grpc }: Draftings, findings: Findings): void {
  const adminListen = admin?.listen;
  for (const [name, other] of [
    ["listen", listen],
    ["admin.listen", adminListen],
  ] as const) {
    if (!isAddress(grpc?.listen) || !isAddress(other) || !overlap(grpc.listen, other)) continue;
    findings.problem(
      "grpc.listen",
      `${name} and grpc.listen are both on port ${other.port}; give one of them another port`,
    );
  }
  if (isAddress(listen) && isAddress(adminListen) && overlap(listen, adminListen)) {
    const at = findings.has("admin.listen") ? "admin.listen" : "listen";
    findings.problem(
      at,
      `listen and admin.listen are both on port ${listen.port}; give one of them another port`,
    );
  }
  const tokenWritten = findings.has("admin.token");
  if (isAddress(adminListen) && !isLoopback(adminListen.host) && !tokenWritten) {
    findings.problem(
      "admin.listen",
      "anyone who reaches the port could read and replay tasks; set admin.token, or listen on 127.0.0.1",
    );
  }
}

function isAddress(value: Draft<Address> | undefined): value is Address {
  return value?.host !== undefined && value.port !== undefined;
}

export function isLoopback(host: string): boolean {
  return host === "localhost" || host === "::1" || /^(?:::ffff:)?127\.\d+\.\d+\.\d+$/.test(host);
}

export function isAnyHost(host: string): boolean {
  return host === "0.0.0.0" || /^[0:]+$/.test(host);
}

function overlap(a: Address, b: Address): boolean {
  if (a.port !== b.port || a.port === 0) return false;
  if (a.host === b.host || isAnyHost(a.host) || isAnyHost(b.host)) return true;
  return isLoopback(a.host) && isLoopback(b.host) && [a.host, b.host].includes("localhost");
}

function checkEngine({ engine }: Draftings, findings: Findings): void {
  if (engine?.kind !== "redis") return;
  checkRedisPlace(engine, findings);
  checkRedisTimes(engine, findings);
}

function checkRedisPlace({ url, nodes, tls }: DraftRedis, findings: Findings): void {
  const has = (name: string) => findings.has(`engine.${name}`);
  const problem = (name: string, message: string) => findings.problem(`engine.${name}`, message);
  if (has("url") && has("nodes")) {
    problem("nodes", "url says where Redis is, and nodes says it again; keep one of them");
  } else if (!has("url") && !has("nodes")) {
    problem("url", "is missing; add url: redis://HOST:6379, or nodes: [HOST:6379, …] for several servers");
  } else if (!has("url") && nodes?.length === 0) {
    problem("nodes", "is empty; add at least one, for example redis-1:6379");
  }
  const seen = new Map<string, number>();
  for (const [index, node] of (nodes ?? []).entries()) {
    if (!isAddress(node)) continue;
    const name = `${node.host}:${node.port}`.toLowerCase();
    const first = seen.get(name);
    if (first === undefined) seen.set(name, index);
    else problem(`nodes[${index}]`, `the same server as engine.nodes[${first}]; keep one`);
  }
  if (has("url") && !has("nodes")) {
    const inUrl = "redis://USER:PASSWORD@HOST:PORT";
    if (has("username")) problem("username", `is for nodes; with a url write it there: ${inUrl}`);
    if (has("password")) problem("password", `is for nodes; with a url write it there: ${inUrl}`);
    if (has("tls") && url !== undefined && tls !== undefined && tls !== /^rediss:/i.test(url))
      problem("tls", `is ${tls}, and the url says otherwise: rediss:// is TLS, redis:// is not; remove tls`);
  } else if (has("username") && !has("password")) {
    problem("username", "needs engine.password beside it; add one, or remove username for the default user");
  }
}

function checkRedisTimes(engine: DraftRedis, findings: Findings): void {
  const { commandTimeoutMs, waitTimeoutMs, leaseMs } = engine;
  const at = (...names: string[]) => firstWritten(findings, "engine", names);
  if (waitTimeoutMs !== undefined && commandTimeoutMs !== undefined && waitTimeoutMs > commandTimeoutMs) {
    findings.problem(
      at("waitTimeoutMs", "commandTimeoutMs"),
      `waitTimeoutMs ${waitTimeoutMs} > commandTimeoutMs ${commandTimeoutMs}: the connection would be ` +
        `closed while a write waits for a replica; lower waitTimeoutMs or raise commandTimeoutMs`,
    );
  }
  // Renewed each third: one that times out has used 1/3 + 1/2 of the lease, and leaves a sixth for the next.
  if (leaseMs !== undefined && commandTimeoutMs !== undefined && leaseMs < 2 * commandTimeoutMs) {
    findings.problem(
      at("leaseMs", "commandTimeoutMs"),
      `leaseMs ${leaseMs} < 2 × commandTimeoutMs ${commandTimeoutMs}: one renewal that times out would ` +
        `lose the lease; set leaseMs ≥ ${2 * commandTimeoutMs} or lower commandTimeoutMs`,
    );
  }
}

function checkModelNames({ models = [] }: Draftings, findings: Findings): void {
  const seen = new Map<string, number>();
  for (const [index, { name } = {}] of models.entries()) {
    if (name === undefined) continue;
    const first = seen.get(name);
    if (first === undefined) seen.set(name, index);
    else
      findings.problem(
        `models[${index}].name`,
        `${name} is also the name of models[${first}]; choose another`,
      );
  }
}

/** Inputs and outputs of one protocol mean nothing to workers that speak another. */
function checkProtocols(model: DraftModel | undefined, path: string, findings: Findings): void {
  const { backend, protocols = [] } = model ?? {};
  const own = backend?.kind === "grpc" ? "oip-v2" : backend?.kind === "http" ? backend.protocol : undefined;
  if (own === undefined || own === "batch") return;
  for (const [index, protocol] of protocols.entries()) {
    if (protocol === undefined || protocol === own) continue;
    findings.problem(
      `${path}.protocols[${index}]`,
      `${protocol} cannot be spoken to clients while the workers speak ${own}; remove it`,
    );
  }
}

function checkScaling({ engine }: Draftings, model: DraftModel, path: string, findings: Findings): void {
  const { min, max, apply, command } = model?.scaling ?? {};
  const at = (name: string): string => `${path}.scaling.${name}`;
  if (command !== undefined && command.includes("/") && !mayRun(command)) {
    findings.warn(at("command"), `cannot be run: ${command} is not there, or not executable (chmod +x)`);
  }
  checkMost(model, at, findings);
  if (min !== undefined && max !== undefined && min > max) {
    findings.problem(
      at(findings.has(at("min")) ? "min" : "max"),
      `min ${min} > max ${max}; raise max or lower min`,
    );
  }
  if (apply !== true) return;
  const kind = model?.backend?.kind;
  if (kind === "http" || kind === "grpc") {
    const advice =
      "Ferry cannot start such workers; use webhook or command, or scale on ferry_desired_workers";
    findings.problem(at("apply"), advice);
  } else if (engine?.kind === "redis") {
    const advice = "every process would start workers for the whole fleet; use webhook or command";
    findings.problem(at("apply"), advice);
  }
}

/** More workers than the autoscaler may want: whoever sees to its number takes the others away, all at once. */
function checkMost(model: DraftModel, at: (name: string) => string, findings: Findings): void {
  const { max, apply } = model?.scaling ?? {};
  const listed = model?.backend?.workers;
  const count = typeof listed === "number" ? listed : (listed?.length ?? 0);
  const applied = apply === true || findings.has(at("webhook")) || findings.has(at("command"));
  if (max === undefined || count <= max || !applied) return;
  findings.warn(
    at("max"),
    `max ${max} < the ${count} of backend.workers: ${count - max} of them would be taken away; raise max`,
  );
}

function mayRun(file: string): boolean {
  try {
    accessSync(file, constants.X_OK);
    return true;
  } catch {
    return false;
  }
}

/** Two slots on one worker would send it two batches at once, in one model or in two. */
function checkWorkerUrls({ models = [] }: Draftings, findings: Findings): void {
  const seen = new Map<string, string>();
  for (const [index, { backend } = {}] of models.entries()) {
    if (backend?.kind !== "http" && backend?.kind !== "grpc") continue;
    for (const [position, worker] of (backend.workers ?? []).entries()) {
      if (worker === undefined) continue;
      const at = `models[${index}].backend.workers[${position}]`;
      const first = seen.get(worker);
      if (first === undefined) seen.set(worker, at);
      else findings.problem(at, `the same worker as ${first}; it would get two batches at once, so keep one`);
      if (backend.kind === "http") checkEndpoint(backend.protocol, worker, at, findings);
    }
  }
}

/** What the URLs of workers end with where a batch goes to that very URL; clients' base URLs look much alike. */
const ENDPOINTS: Readonly<Record<string, readonly [fits: RegExp, example: string]>> = {
  "openai-embeddings": [/[^/](?<!\/v1)\/?$/, "/v1/embeddings"],
  "openai-completions": [/[^/](?<!\/v1)\/?$/, "/v1/completions"],
  "kserve-v1": [/:predict$/, "/v1/models/NAME:predict"],
  "oip-v2": [/\/infer$/, "/v2/models/NAME/infer"],
};

function checkEndpoint(protocol: string | undefined, worker: string, at: string, findings: Findings): void {
  const url = URL.parse(worker);
  const [fits, example] = ENDPOINTS[protocol ?? ""] ?? [];
  if (url === null || fits === undefined || fits.test(url.pathname)) return;
  const place = `${url.protocol}//${url.host}`;
  findings.warn(at, `batches go to this very URL; write all of it: ${place}${example}`);
}

function checkTimes(model: DraftModel | undefined, path: string, findings: Findings): void {
  const { maxWaitMs, timeouts: { queueMs, workerMs, totalMs } = {}, retry, backend } = model ?? {};
  const at = (...names: string[]) => firstWritten(findings, path, names);
  if (maxWaitMs !== undefined && workerMs !== undefined && totalMs !== undefined) {
    const least = workerMs + maxWaitMs;
    if (totalMs < least) {
      findings.problem(
        at("timeouts.totalMs", "timeouts.workerMs", "maxWaitMs"),
        `totalMs ${totalMs} < workerMs ${workerMs} + maxWaitMs ${maxWaitMs}: ` +
          `nothing could be answered in time; set totalMs ≥ ${least} or lower workerMs`,
      );
    }
  }
  if (maxWaitMs !== undefined && queueMs !== undefined && maxWaitMs >= queueMs) {
    findings.problem(
      at("maxWaitMs", "timeouts.queueMs"),
      `maxWaitMs ${maxWaitMs} ≥ timeouts.queueMs ${queueMs}: ` +
        `tasks could time out while they wait for others; lower maxWaitMs or raise queueMs`,
    );
  }
  if (retry?.baseMs !== undefined && retry.maxMs !== undefined && retry.maxMs < retry.baseMs) {
    const message = `maxMs ${retry.maxMs} < baseMs ${retry.baseMs}; set maxMs ≥ ${retry.baseMs}`;
    findings.problem(at("retry.maxMs", "retry.baseMs"), message);
  }
  if (backend?.kind === "simulated" && workerMs !== undefined) {
    const fullMs = (backend.baseMs ?? 0) + (backend.perItemMs ?? 0) * (model?.maxBatchSize ?? 1);
    if (fullMs >= workerMs) {
      findings.warn(
        at("backend.baseMs", "backend.perItemMs", "timeouts.workerMs"),
        `a full batch takes ${fullMs} ms, workerMs is ${workerMs}: every full batch would time out`,
      );
    }
  }
}

function checkSizes(draft: Draftings, model: DraftModel | undefined, path: string, findings: Findings): void {
  const maxQueued = draft.limits?.maxQueued;
  const maxBatchSize = model?.maxBatchSize;
  if (maxBatchSize === undefined) return;
  if (maxQueued !== undefined && maxQueued < maxBatchSize) {
    const at = findings.has("limits.maxQueued") ? "limits.maxQueued" : `${path}.maxBatchSize`;
    findings.warn(at, `maxQueued ${maxQueued} < maxBatchSize ${maxBatchSize}: no batch can ever be full`);
  }
  for (const name of ["maxBatchTokens", "maxBatchBytes"] as const) {
    const budget = model?.[name];
    if (budget === undefined || budget >= maxBatchSize) continue;
    findings.warn(
      `${path}.${name}`,
      `${name} ${budget} < maxBatchSize ${maxBatchSize}, and each task counts as 1 or more: ` +
        `no batch can ever hold ${maxBatchSize}; raise ${name}, or lower maxBatchSize`,
    );
  }
}

function checkTiers({ tiers, auth }: Draftings, findings: Findings): void {
  const wanted = auth?.anonymousTier;
  if (wanted === undefined || tiers === undefined) return;
  const names = tiers.map((tier) => tier.name);
  if (!names.includes(wanted)) {
    findings.problem("auth.anonymousTier", `${wanted} is not one of tiers: ${names.join(", ")}`);
  }
}

function checkLimits({ limits, models = [] }: Draftings, findings: Findings): void {
  const { drainMs, headersTimeoutMs, requestTimeoutMs } = limits ?? {};
  if (
    headersTimeoutMs !== undefined &&
    requestTimeoutMs !== undefined &&
    headersTimeoutMs > requestTimeoutMs
  ) {
    findings.problem(
      firstWritten(findings, "limits", ["headersTimeoutMs", "requestTimeoutMs"]),
      `headersTimeoutMs ${headersTimeoutMs} > requestTimeoutMs ${requestTimeoutMs}: ` +
        `the header is part of the request; lower headersTimeoutMs or raise requestTimeoutMs`,
    );
  }
  const { maxBodyBytes, maxQueuedBytes } = limits ?? {};
  if (maxBodyBytes !== undefined && maxQueuedBytes !== undefined && maxBodyBytes > maxQueuedBytes) {
    findings.problem(
      firstWritten(findings, "limits", ["maxBodyBytes", "maxQueuedBytes"]),
      `maxBodyBytes ${maxBodyBytes} > maxQueuedBytes ${maxQueuedBytes}: ` +
        `the largest request could never be queued; lower maxBodyBytes or raise maxQueuedBytes`,
    );
  }
  const totals = models.map((model) => model?.timeouts?.totalMs ?? 0);
  const longest = Math.max(0, ...totals);
  if (drainMs !== undefined && drainMs <= longest) {
    const at = findings.has("limits.drainMs")
      ? "limits.drainMs"
      : `models[${totals.indexOf(longest)}].timeouts.totalMs`;
    findings.warn(
      at,
      `drainMs ${drainMs} ≤ totalMs ${longest}: ` +
        `a stop could cut off requests in progress; set drainMs > ${longest}`,
    );
  }
}

/** Of several settings that disagree, the one the file sets; else the first. */
function firstWritten(findings: Findings, path: string, names: readonly string[]): string {
  const paths = names.map((name) => `${path}.${name}`);
  return paths.find((each) => findings.has(each)) ?? paths[0]!;
}

/** A certificate without its key, or a key without its certificate. */
function checkPair(path: string, findings: Findings): void {
  const [cert, key] = [`${path}.certFile`, `${path}.keyFile`];
  if (findings.has(cert) && !findings.has(key)) findings.problem(cert, `needs ${key} beside it`);
  if (findings.has(key) && !findings.has(cert)) findings.problem(key, `needs ${cert} beside it`);
}

function checkTls({ admin }: Draftings, findings: Findings): void {
  if (admin?.tls === true && !findings.has("tls.certFile")) {
    findings.problem("admin.tls", "needs the certificate of tls; add tls.certFile and tls.keyFile");
  }
}

function checkWorkerTls({ models = [] }: Draftings, findings: Findings): void {
  for (const [index, { backend } = {}] of models.entries()) {
    if (backend?.kind !== "http" && backend?.kind !== "grpc") continue;
    const scheme = backend.kind === "http" ? "https" : "grpcs";
    const path = `models[${index}].backend`;
    checkPair(`${path}.tls`, findings);
    const names = ["caFile", "certFile", "keyFile", "serverName"];
    if (!names.some((name) => findings.has(`${path}.tls.${name}`))) continue;
    for (const [at, worker] of (backend.workers ?? []).entries()) {
      if (worker === undefined || worker.startsWith(`${scheme}:`)) continue;
      if (worker.startsWith(`dns+${scheme}:`)) continue;
      const where = `${path}.workers[${at}]`;
      findings.problem(where, `is not ${scheme}://, and tls is set: inputs would go there unencrypted`);
    }
  }
}

function checkAuth({ auth, engine }: Draftings, findings: Findings): void {
  if (auth?.mode !== "required") {
    const ways = ["auth.keysFile", "auth.jwt.jwksUrl", "auth.jwt.publicKeyFile"];
    if (ways.some((way) => findings.has(way))) {
      findings.warn("auth.mode", "is none: keys and tokens are not asked for; set auth.mode: required");
    }
    return;
  }
  const redis = engine?.kind === "redis";
  if (redis && findings.has("auth.keysFile")) {
    findings.warn("auth.keysFile", "has no effect: with the redis engine keys are in Redis");
  }
  if (redis && !findings.has("auth.secret")) {
    findings.warn(
      "auth.mode",
      "a dump of Redis would hold the keys' digests and what they are keyed with; set auth.secret",
    );
  }
  const jwt = findings.has("auth.jwt.jwksUrl") || findings.has("auth.jwt.publicKeyFile");
  if (!redis && !findings.has("auth.keysFile") && !jwt) {
    findings.problem(
      "auth.mode",
      "nobody could enter; add auth.keysFile: ./keys.json (ferry keys create makes keys), or auth.jwt",
    );
  }
}

function checkJwt({ auth, tiers }: Draftings, findings: Findings): void {
  const has = (name: string) => findings.has(`auth.jwt.${name}`);
  if (has("jwksUrl") && has("publicKeyFile")) {
    findings.problem("auth.jwt.publicKeyFile", "jwksUrl says where the keys are; keep one of them");
  }
  if (findings.has("auth.jwt") && !has("jwksUrl") && !has("publicKeyFile")) {
    findings.problem("auth.jwt", "has no key to check with; add jwksUrl or publicKeyFile");
  }
  const url = auth?.jwt?.jwksUrl === undefined ? null : URL.parse(auth.jwt.jwksUrl);
  if (url?.protocol === "http:" && !/^(localhost|127\.\d+\.\d+\.\d+|\[::1\])$/.test(url.hostname)) {
    findings.warn("auth.jwt.jwksUrl", "is not https://: an attacker on the network could replace the keys");
  }
  const tier = auth?.jwt?.defaultTier;
  const names = tiers?.map(({ name }) => name) ?? [];
  if (tier !== undefined && names.length > 0 && !names.includes(tier)) {
    findings.problem("auth.jwt.defaultTier", `${tier} is not one of tiers: ${names.join(", ")}`);
  }
}

/** Each pattern is well-formed, or not in the draft; together they may still be too many. */
function checkPatterns({ models = [] }: Draftings, findings: Findings): void {
  for (const [index, { deny = [] } = {}] of models.entries()) {
    try {
      screenFor(deny.filter((pattern) => pattern !== undefined));
    } catch (error) {
      if (!(error instanceof PatternMistake)) throw error;
      findings.problem(`models[${index}].deny`, `the patterns ${error.message}`);
    }
  }
}

/** What goes to workers as it came: requests, and clients' credentials. */
function checkPassing({ models = [], auth, engine }: Draftings, findings: Findings): void {
  for (const [index, { backend, passthrough } = {}] of models.entries()) {
    if (backend?.kind === undefined) continue;
    if (passthrough === true && backend.kind !== "http") {
      const message = `needs workers that are reached by HTTP; backend.kind is ${backend.kind}, so remove it`;
      findings.problem(`models[${index}].passthrough`, message);
    }
    if (backend.kind !== "http" || backend.forwardAuthorization !== true) continue;
    const path = `models[${index}].backend.forwardAuthorization`;
    if (auth?.mode === "required") {
      findings.problem(
        path,
        "clients have one Authorization, and auth.mode: required takes it for Ferry; " +
          "set auth.mode: none, or give the workers backend.authorization",
      );
    }
    if (engine?.kind === "redis") {
      findings.problem(
        path,
        "clients' credentials are kept in this process alone, and never in Redis; " +
          "use engine.kind memory, or give the workers backend.authorization",
      );
    }
    if (findings.has(`models[${index}].backend.authorization`)) {
      findings.problem(
        path,
        "workers get one Authorization, and backend.authorization is set; keep one of them",
      );
    }
  }
}
