/**
 * Rules between settings, applied to a draft: invalid settings are absent, and no rule fires on them. A problem stops
 * the start, a warning does not. Of several conflicting settings the one that the file sets is reported.
 */
import { accessSync, constants } from "node:fs";
import { PatternMistake } from "../../core/pattern.ts";
import { screenFor } from "../../core/screen.ts";
import type { Address, Config } from "./config.ts";
import type { Findings, Draft } from "./read.ts";

type DraftConfig = Draft<Config>;
type DraftModel = NonNullable<NonNullable<DraftConfig["models"]>[number]>;
type DraftRedis = Extract<NonNullable<DraftConfig["engine"]>, { readonly kind?: "redis" | undefined }>;

export function checkSettings(draft: DraftConfig, findings: Findings): void {
  const { engine, models = [] } = draft;
  checkListeners(draft, findings);
  if (engine?.kind === "redis") checkRedis(engine, findings);
  checkUnique(
    models.map((model) => model?.name),
    (at, first, name) =>
      findings.problem(`models[${at}].name`, `${name} is also the name of models[${first}]; choose another`),
  );
  checkWorkerUrls(models, findings);
  for (const [at, model] of models.entries()) if (model !== undefined) checkModel(draft, model, at, findings);
  checkLimits(draft, findings);
  checkAuth(draft, findings);
  checkJwt(draft, findings);
}

function above(one = Number.NaN, other = Number.NaN): boolean {
  return one > other;
}

/** The first of these under `path` that the file sets; else the first. */
function written(findings: Findings, path: string, ...names: readonly string[]): string {
  return `${path}.${names.find((name) => findings.has(`${path}.${name}`)) ?? names[0]}`;
}

function checkUnique<T extends string>(
  values: readonly (T | undefined)[],
  tell: (at: number, first: number, value: T) => void,
): void {
  const seen = new Map<T, number>();
  for (const [at, value] of values.entries()) {
    if (value === undefined) continue;
    const first = seen.get(value);
    if (first === undefined) seen.set(value, at);
    else tell(at, first, value);
  }
}

function checkListeners({ listen, admin, grpc }: DraftConfig, findings: Findings): void {
  const listeners = { listen, "admin.listen": admin?.listen, "grpc.listen": grpc?.listen };
  for (const [one, other] of [
    ["listen", "grpc.listen"],
    ["admin.listen", "grpc.listen"],
    ["listen", "admin.listen"],
  ] as const) {
    const [a, b] = [listeners[one], listeners[other]];
    if (!isAddress(a) || !isAddress(b) || !overlap(a, b)) continue;
    const message = `${one} and ${other} are both on port ${a.port}; give one of them another port`;
    findings.problem(findings.has(other) ? other : one, message);
  }
  if (isAddress(admin?.listen) && !isLoopback(admin.listen.host) && !findings.has("admin.token")) {
    findings.problem(
      "admin.listen",
      "anyone who reaches the port could read and replay tasks; set admin.token, or listen on 127.0.0.1",
    );
  }
  if (admin?.tls === true && !findings.has("tls.certFile")) {
    findings.problem("admin.tls", "needs the certificate of tls; add tls.certFile and tls.keyFile");
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

function checkRedis(engine: DraftRedis, findings: Findings): void {
  const { url, nodes = [], tls, commandTimeoutMs, waitTimeoutMs, leaseMs } = engine;
  const has = (name: string): boolean => findings.has(`engine.${name}`);
  const problem = (name: string, message: string): void => findings.problem(`engine.${name}`, message);
  if (has("url") && has("nodes")) {
    problem("nodes", "url says where Redis is, and nodes says it again; keep one of them");
  } else if (!has("url") && !has("nodes")) {
    problem("url", "is missing; add url: redis://HOST:6379, or nodes: [HOST:6379, …] for several servers");
  } else if (!has("url") && engine.nodes?.length === 0) {
    problem("nodes", "is empty; add at least one, for example redis-1:6379");
  }
  const names = nodes.map((node) =>
    isAddress(node) ? `${node.host}:${node.port}`.toLowerCase() : undefined,
  );
  checkUnique(names, (at, first) =>
    problem(`nodes[${at}]`, `the same server as engine.nodes[${first}]; keep one`),
  );
  if (has("url") && !has("nodes")) {
    for (const name of ["username", "password"].filter(has))
      problem(name, "is for nodes; with a url write it there: redis://USER:PASSWORD@HOST:PORT");
    if (has("tls") && url !== undefined && tls !== undefined && tls !== /^rediss:/i.test(url))
      problem("tls", `is ${tls}, and the url says otherwise: rediss:// is TLS, redis:// is not; remove tls`);
  } else if (has("username") && !has("password")) {
    problem("username", "needs engine.password beside it; add one, or remove username for the default user");
  }
  if (above(waitTimeoutMs, commandTimeoutMs)) {
    findings.problem(
      written(findings, "engine", "waitTimeoutMs", "commandTimeoutMs"),
      `waitTimeoutMs ${waitTimeoutMs} > commandTimeoutMs ${commandTimeoutMs}: the connection would be ` +
        `closed while a write waits for a replica; lower waitTimeoutMs or raise commandTimeoutMs`,
    );
  }
  // Renewed every third: a timed-out renewal has used 1/3 + 1/2 of the lease, which leaves a sixth for the next.
  if (commandTimeoutMs !== undefined && above(2 * commandTimeoutMs, leaseMs)) {
    findings.problem(
      written(findings, "engine", "leaseMs", "commandTimeoutMs"),
      `leaseMs ${leaseMs} < 2 × commandTimeoutMs ${commandTimeoutMs}: one renewal that times out would ` +
        `lose the lease; set leaseMs ≥ ${2 * commandTimeoutMs} or lower commandTimeoutMs`,
    );
  }
}

/** A worker listed twice, in one model or in two, would get two batches at once. */
function checkWorkerUrls(models: NonNullable<DraftConfig["models"]>, findings: Findings): void {
  const all = models.flatMap((model, index) => {
    const { backend } = model ?? {};
    if (backend?.kind !== "http" && backend?.kind !== "grpc") return [];
    const protocol = backend.kind === "http" ? backend.protocol : undefined;
    return (backend.workers ?? []).map((url, position) => ({
      url,
      protocol,
      at: `models[${index}].backend.workers[${position}]`,
    }));
  });
  checkUnique(
    all.map(({ url }) => url),
    (at, first) =>
      findings.problem(
        all[at]!.at,
        `the same worker as ${all[first]!.at}; it would get two batches at once, so keep one`,
      ),
  );
  for (const { url = "", protocol = "", at } of all) {
    const [fits, example] = ENDPOINTS[protocol] ?? [];
    const parsed = URL.parse(url);
    if (parsed === null || fits === undefined || fits.test(parsed.pathname)) continue;
    const place = `${parsed.protocol}//${parsed.host}`;
    findings.warn(at, `batches go to this very URL; write all of it: ${place}${example}`);
  }
}

/** Endings of worker URLs; clients' base URLs look similar. */
const ENDPOINTS: Readonly<Record<string, readonly [fits: RegExp, example: string]>> = {
  "openai-embeddings": [/[^/](?<!\/v1)\/?$/, "/v1/embeddings"],
  "openai-completions": [/[^/](?<!\/v1)\/?$/, "/v1/completions"],
  "kserve-v1": [/:predict$/, "/v1/models/NAME:predict"],
  "oip-v2": [/\/infer$/, "/v2/models/NAME/infer"],
};

function checkModel(draft: DraftConfig, model: DraftModel, index: number, findings: Findings): void {
  const path = `models[${index}]`;
  checkTimes(model, path, findings);
  checkLengths(model, path, findings);
  checkPad(model, `${path}.pad`, findings);
  checkSizes(draft, model, path, findings);
  checkScaling(draft, model, `${path}.scaling`, findings);
  checkTraffic(draft, model, path, findings);
  checkWorkerTls(model, `${path}.backend`, findings);
  try {
    // Each pattern is valid or absent; together they may still be too many.
    screenFor((model.deny ?? []).filter((pattern) => pattern !== undefined));
  } catch (error) {
    if (!(error instanceof PatternMistake)) throw error;
    findings.problem(`${path}.deny`, `the patterns ${error.message}`);
  }
}

function checkTimes(model: DraftModel, path: string, findings: Findings): void {
  const { maxWaitMs, timeouts: { queueMs, workerMs, totalMs } = {}, retry, backend } = model;
  const at = (...names: readonly string[]): string => written(findings, path, ...names);
  const least = (workerMs ?? Number.NaN) + (maxWaitMs ?? Number.NaN);
  if (above(least, totalMs)) {
    findings.problem(
      at("timeouts.totalMs", "timeouts.workerMs", "maxWaitMs"),
      `totalMs ${totalMs} < workerMs ${workerMs} + maxWaitMs ${maxWaitMs}: ` +
        `nothing could be answered in time; set totalMs ≥ ${least} or lower workerMs`,
    );
  }
  if (maxWaitMs !== undefined && (maxWaitMs === queueMs || above(maxWaitMs, queueMs))) {
    findings.problem(
      at("maxWaitMs", "timeouts.queueMs"),
      `maxWaitMs ${maxWaitMs} ≥ timeouts.queueMs ${queueMs}: ` +
        `tasks could time out while they wait for others; lower maxWaitMs or raise queueMs`,
    );
  }
  if (above(retry?.baseMs, retry?.maxMs)) {
    const message = `maxMs ${retry?.maxMs} < baseMs ${retry?.baseMs}; set maxMs ≥ ${retry?.baseMs}`;
    findings.problem(at("retry.maxMs", "retry.baseMs"), message);
  }
  if (backend?.kind !== "simulated" || workerMs === undefined) return;
  // At one token each: how long inputs are is not known here.
  const { baseMs = 0, perItemMs = 0, perTokenMs = 0 } = backend;
  const fullMs = baseMs + (perItemMs + perTokenMs) * (model.maxBatchSize ?? 1);
  if (fullMs < workerMs) return;
  findings.warn(
    at("backend.baseMs", "backend.perItemMs", "backend.perTokenMs", "timeouts.workerMs"),
    `a full batch takes ${perTokenMs > 0 ? "at least " : ""}${fullMs} ms, workerMs is ${workerMs}: every full batch would time out`,
  );
}

function checkSizes({ limits }: DraftConfig, model: DraftModel, path: string, findings: Findings): void {
  const { maxBatchSize } = model;
  if (above(maxBatchSize, limits?.maxQueued)) {
    const at = findings.has("limits.maxQueued") ? "limits.maxQueued" : `${path}.maxBatchSize`;
    findings.warn(
      at,
      `maxQueued ${limits?.maxQueued} < maxBatchSize ${maxBatchSize}: no batch can ever be full`,
    );
  }
  for (const name of ["maxBatchTokens", "maxBatchBytes"] as const) {
    if (!above(maxBatchSize, model[name])) continue;
    findings.warn(
      `${path}.${name}`,
      `${name} ${model[name]} < maxBatchSize ${maxBatchSize}, and each task counts as 1 or more: ` +
        `no batch can ever hold ${maxBatchSize}; raise ${name}, or lower maxBatchSize`,
    );
  }
}

function checkLengths({ lengths = [] }: DraftModel, path: string, findings: Findings): void {
  const classes = lengths.filter((each) => typeof each === "number");
  if (lengths.length > 1 && classes.length < lengths.length) {
    findings.problem(
      `${path}.lengths`,
      "auto and off stand alone; write lengths: auto, or a list of lengths",
    );
  } else if (classes.some((each, at) => at > 0 && each <= classes[at - 1]!)) {
    findings.problem(`${path}.lengths`, `${classes.join(", ")} are not in ascending order`);
  }
}

function checkPad(
  { pad, backend, maxBatchSize, lengths = [] }: DraftModel,
  path: string,
  findings: Findings,
): void {
  if (pad === undefined) return;
  if (
    backend?.kind !== undefined &&
    backend.kind !== "grpc" &&
    !(backend.kind === "http" && backend.protocol === "oip-v2")
  ) {
    findings.problem(
      path,
      "only tensors can be padded: the backend must be grpc, or http with protocol oip-v2; remove pad",
    );
  }
  if (maxBatchSize === 1)
    findings.problem(path, "maxBatchSize is 1, so that rows are never padded; remove pad");
  const outputs = pad.outputs ?? [];
  if (outputs.length > 1 && outputs.some((each) => each === "auto" || each === "none")) {
    findings.problem(`${path}.outputs`, "auto and none stand alone; write one of them, or a list of outputs");
  }
  // Rows are padded to a class also when they are alone, so that nothing could be learned from them.
  if (typeof lengths[0] === "number" && (outputs[0] ?? "auto") === "auto") {
    findings.problem(
      `${path}.outputs`,
      "with a list of lengths Ferry cannot see which outputs follow them; name those to cut, or write none",
    );
  }
}

function checkScaling({ engine }: DraftConfig, model: DraftModel, path: string, findings: Findings): void {
  const { backend, scaling: { min, max, apply, command } = {} } = model;
  if (command !== undefined && command.includes("/") && !mayRun(command)) {
    findings.warn(`${path}.command`, `cannot be run: ${command} is not there, or not executable (chmod +x)`);
  }
  if (above(min, max)) {
    findings.problem(
      written(findings, path, "min", "max"),
      `min ${min} > max ${max}; raise max or lower min`,
    );
  }
  const count = typeof backend?.workers === "number" ? backend.workers : (backend?.workers?.length ?? 0);
  const follows = apply === true || ["webhook", "command"].some((name) => findings.has(`${path}.${name}`));
  if (follows && max !== undefined && count > max) {
    findings.warn(
      `${path}.max`,
      `max ${max} < the ${count} of backend.workers: ${count - max} of them would be taken away; raise max`,
    );
  }
  if (apply !== true) return;
  if (backend?.kind === "http" || backend?.kind === "grpc") {
    findings.problem(
      `${path}.apply`,
      "Ferry cannot start such workers; use webhook or command, or scale on ferry_desired_workers",
    );
  } else if (engine?.kind === "redis") {
    findings.problem(
      `${path}.apply`,
      "every process would start workers for the whole fleet; use webhook or command",
    );
  }
}

function mayRun(file: string): boolean {
  try {
    accessSync(file, constants.X_OK);
    return true;
  } catch {
    return false;
  }
}

/** What clients may send, and what is proxied to workers unchanged. */
function checkTraffic(
  { auth, engine }: DraftConfig,
  model: DraftModel,
  path: string,
  findings: Findings,
): void {
  const { backend, protocols = [], passthrough } = model;
  if (backend?.kind === undefined) return;
  // Tasks of one protocol mean nothing to workers of another.
  const own = backend.kind === "grpc" ? "oip-v2" : backend.kind === "http" ? backend.protocol : undefined;
  for (const [index, protocol] of protocols.entries()) {
    if (own === undefined || own === "batch" || protocol === undefined || protocol === own) continue;
    const message = `${protocol} cannot be spoken to clients while the workers speak ${own}; remove it`;
    findings.problem(`${path}.protocols[${index}]`, message);
  }
  if (passthrough === true && backend.kind !== "http") {
    const message = `needs workers that are reached by HTTP; backend.kind is ${backend.kind}, so remove it`;
    findings.problem(`${path}.passthrough`, message);
  }
  if (backend.kind !== "http" || backend.forwardAuthorization !== true) return;
  const refuse = (message: string): void => findings.problem(`${path}.backend.forwardAuthorization`, message);
  if (auth?.mode === "required")
    refuse(
      "clients have one Authorization, and auth.mode: required takes it for Ferry; " +
        "set auth.mode: none, or give the workers backend.authorization",
    );
  if (engine?.kind === "redis")
    refuse(
      "clients' credentials are kept in this process alone, and never in Redis; " +
        "use engine.kind memory, or give the workers backend.authorization",
    );
  if (findings.has(`${path}.backend.authorization`))
    refuse("workers get one Authorization, and backend.authorization is set; keep one of them");
}

function checkWorkerTls({ backend }: DraftModel, path: string, findings: Findings): void {
  if (backend?.kind !== "http" && backend?.kind !== "grpc") return;
  const scheme = backend.kind === "http" ? "https" : "grpcs";
  const has = (name: string): boolean => findings.has(`${path}.tls.${name}`);
  for (const [one, other] of [
    ["certFile", "keyFile"],
    ["keyFile", "certFile"],
  ] as const) {
    if (has(one) && !has(other))
      findings.problem(`${path}.tls.${one}`, `needs ${path}.tls.${other} beside it`);
  }
  if (!["caFile", "certFile", "keyFile", "serverName"].some(has)) return;
  for (const [at, worker] of (backend.workers ?? []).entries()) {
    if (worker === undefined || worker.startsWith(`${scheme}:`) || worker.startsWith(`dns+${scheme}:`))
      continue;
    const message = `is not ${scheme}://, and tls is set: inputs would go there unencrypted`;
    findings.problem(`${path}.workers[${at}]`, message);
  }
}

function checkLimits({ limits = {}, models = [] }: DraftConfig, findings: Findings): void {
  const { drainMs, headersTimeoutMs, requestTimeoutMs, maxBodyBytes, maxQueuedBytes } = limits;
  if (above(headersTimeoutMs, requestTimeoutMs)) {
    findings.problem(
      written(findings, "limits", "headersTimeoutMs", "requestTimeoutMs"),
      `headersTimeoutMs ${headersTimeoutMs} > requestTimeoutMs ${requestTimeoutMs}: ` +
        `the header is part of the request; lower headersTimeoutMs or raise requestTimeoutMs`,
    );
  }
  if (above(maxBodyBytes, maxQueuedBytes)) {
    findings.problem(
      written(findings, "limits", "maxBodyBytes", "maxQueuedBytes"),
      `maxBodyBytes ${maxBodyBytes} > maxQueuedBytes ${maxQueuedBytes}: ` +
        `the largest request could never be queued; lower maxBodyBytes or raise maxQueuedBytes`,
    );
  }
  const totals = models.map((model) => model?.timeouts?.totalMs ?? 0);
  const longest = Math.max(0, ...totals);
  if (drainMs === undefined || drainMs > longest) return;
  const slowest = `models[${totals.indexOf(longest)}].timeouts.totalMs`;
  findings.warn(
    findings.has("limits.drainMs") ? "limits.drainMs" : slowest,
    `drainMs ${drainMs} ≤ totalMs ${longest}: ` +
      `a stop could cut off requests in progress; set drainMs > ${longest}`,
  );
}

function checkAuth({ auth, engine, tiers }: DraftConfig, findings: Findings): void {
  const names = tiers?.map(({ name }) => name) ?? [];
  const asked = { "auth.anonymousTier": auth?.anonymousTier, "auth.jwt.defaultTier": auth?.jwt?.defaultTier };
  for (const [path, tier] of Object.entries(asked)) {
    if (tier === undefined || names.length === 0 || names.includes(tier)) continue;
    findings.problem(path, `${tier} is not one of tiers: ${names.join(", ")}`);
  }
  const keys = findings.has("auth.keysFile");
  const jwt = findings.has("auth.jwt.jwksUrl") || findings.has("auth.jwt.publicKeyFile");
  if (auth?.mode !== "required") {
    const message = "is none: keys and tokens are not asked for; set auth.mode: required";
    if (keys || jwt) findings.warn("auth.mode", message);
  } else if (engine?.kind === "redis") {
    if (keys) findings.warn("auth.keysFile", "has no effect: with the redis engine keys are in Redis");
    const message =
      "a dump of Redis would hold the keys' digests and what they are keyed with; set auth.secret";
    if (!findings.has("auth.secret")) findings.warn("auth.mode", message);
  } else if (!keys && !jwt) {
    findings.problem(
      "auth.mode",
      "nobody could enter; add auth.keysFile: ./keys.json (ferry keys create makes keys), or auth.jwt",
    );
  }
}

function checkJwt({ auth }: DraftConfig, findings: Findings): void {
  const has = (name: string): boolean => findings.has(`auth.jwt.${name}`);
  if (has("jwksUrl") && has("publicKeyFile")) {
    findings.problem("auth.jwt.publicKeyFile", "jwksUrl says where the keys are; keep one of them");
  }
  if (findings.has("auth.jwt") && !has("jwksUrl") && !has("publicKeyFile")) {
    findings.problem("auth.jwt", "has no key to check with; add jwksUrl or publicKeyFile");
  }
  const url = URL.parse(auth?.jwt?.jwksUrl ?? "");
  if (url?.protocol === "http:" && !isLoopback(url.hostname.replaceAll(/[[\]]/g, ""))) {
    findings.warn("auth.jwt.jwksUrl", "is not https://: an attacker on the network could replace the keys");
  }
}
