/**
 * The rules between settings of who may enter: credentials, certificates, admission.
 *
 * As in `app/config/check.ts`: a problem stops the start, a warning does not.
 */
import type { Draftings } from "./check.ts";
import { PatternMistake } from "../../core/pattern.ts";
import { screenFor } from "../../core/screen.ts";
import type { Findings } from "./read.ts";

export function checkEntry(draft: Draftings, findings: Findings): void {
  checkTls(draft, findings);
  checkWorkerTls(draft, findings);
  checkAuth(draft, findings);
  checkJwt(draft, findings);
  checkDepths(draft, findings);
  checkPatterns(draft, findings);
  checkPassing(draft, findings);
}

/** A certificate without its key, or a key without its certificate. */
function checkPair(path: string, findings: Findings): void {
  const [cert, key] = [`${path}.certFile`, `${path}.keyFile`];
  if (findings.has(cert) && !findings.has(key)) findings.problem(cert, `needs ${key} beside it`);
  if (findings.has(key) && !findings.has(cert)) findings.problem(key, `needs ${cert} beside it`);
}

function checkTls({ admin }: Draftings, findings: Findings): void {
  checkPair("tls", findings);
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
  if (!has("jwksUrl") && !has("publicKeyFile")) {
    if (has("issuer") || has("audience")) {
      findings.problem("auth.jwt", "has no key to check with; add jwksUrl or publicKeyFile");
    }
    return;
  }
  for (const name of ["issuer", "audience"]) {
    if (has(name)) continue;
    findings.problem(
      `auth.jwt.${name}`,
      "is missing; a token that was made for another service would be taken here",
    );
  }
  const url = auth?.jwt?.jwksUrl === undefined ? null : URL.parse(auth.jwt.jwksUrl);
  if (url?.protocol === "http:" && !/^(localhost|127\.\d+\.\d+\.\d+|\[::1\])$/.test(url.hostname)) {
    findings.warn(
      "auth.jwt.jwksUrl",
      "is not https://: whoever is on the way could put in keys of their own",
    );
  }
  const tier = auth?.jwt?.defaultTier;
  const names = tiers?.map(({ name }) => name) ?? [];
  if (tier !== undefined && names.length > 0 && !names.includes(tier)) {
    findings.problem("auth.jwt.defaultTier", `${tier} is not one of tiers: ${names.join(", ")}`);
  }
}

function checkDepths({ admission, limits }: Draftings, findings: Findings): void {
  const { mode, lastTierDepth, firstTierDepth } = admission ?? {};
  if (mode !== "thresholds" || lastTierDepth === undefined || firstTierDepth === undefined) return;
  if (lastTierDepth > firstTierDepth) {
    findings.problem(
      "admission.lastTierDepth",
      `lastTierDepth ${lastTierDepth} > firstTierDepth ${firstTierDepth}: the last tier is refused first; lower it`,
    );
  }
  if (limits?.maxQueued !== undefined && firstTierDepth >= limits.maxQueued) {
    findings.warn(
      "admission.firstTierDepth",
      `firstTierDepth ${firstTierDepth} ≥ limits.maxQueued ${limits.maxQueued}: the queue is full before that`,
    );
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
