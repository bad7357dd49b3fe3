/**
 * `ferry check`: validates a config file and the certificates it names. Connects to nothing unless `--probe` is given:
 * then it asks Redis what `ferry serve` would ask at startup, resolves DNS names, and tries a connection to each http
 * worker.
 */
import { SystemClock } from "../app/clock.ts";
import type { Config, Problem } from "../app/config/config.ts";
import { formatProblems, loadConfig } from "../app/config/load.ts";
import { type NetworkKind, dnsName, hasAddresses, isDns } from "../app/config/worker-addresses.ts";
import type { Probe } from "../engine/redis/client/probe.ts";
import { CERTIFICATE_RELOAD_MS, Certificates } from "../gateway/certificates.ts";
import { Events } from "../observe/events.ts";
import type { Reach } from "../workers/backend/worker-tls.ts";
import { systemResolve } from "../workers/discovery.ts";
import { type Call, type Command, type Console, expectNoWords } from "./command.ts";
import { defaultFile } from "./config-file.ts";
import { capacityPerSecond, count, countWorkers, plural } from "./terminal/banner.ts";
import { printable } from "./terminal/terminal.ts";

export const check: Command = {
  summary: "check a config file without starting anything",
  usage: "check [-c FILE] [--probe] [--json]",
  examples: [
    { line: "ferry check -c ferry.yaml", doc: "every mistake at once, with its line" },
    {
      line: "ferry check -c ferry.yaml --probe --json",
      doc: "also how Redis is set up and whether workers are there; one object, for scripts",
    },
  ],
  flags: {
    config: { type: "string", short: "c", value: "FILE", doc: "the config file; default ./ferry.yaml" },
    probe: { type: "boolean", doc: "connect to Redis and to http workers, and check how they are set up" },
    json: { type: "boolean", doc: "one JSON object on stdout" },
  },

  async run(call: Call, console: Console): Promise<number> {
    expectNoWords(call);
    const file = call.text("config") ?? defaultFile;
    const loaded = loadConfig(file, console.env);
    const probe = call.is("probe") ? await probeEngine(loaded.config) : undefined;
    const { config } = loaded;
    const keys = await checkKeys(file, config);
    const tls = await checkTls(file, config, call.is("probe"));
    const problems = [
      ...(loaded.problems ?? []),
      ...keys.problems,
      ...found(file, config, probe?.refuse),
      ...tls.problems,
    ];
    const warnings = [
      ...loaded.warnings,
      ...keys.warnings,
      ...found(file, config, probe?.warn),
      ...tls.warnings,
    ];
    const valid = problems.length === 0;
    if (call.is("json")) {
      const facts = config === undefined ? {} : factsOf(config);
      const redis = probe === undefined ? {} : { redis: probe.servers };
      const dns = tls.lookups.length === 0 ? {} : { dns: tls.lookups };
      console.out(`${JSON.stringify({ file, valid, ...facts, ...redis, ...dns, problems, warnings })}\n`);
      return valid ? 0 : 1;
    }
    if (config !== undefined)
      console.err(formatProblems(warnings.map((each) => ({ ...each, message: `warning: ${each.message}` }))));
    if (config === undefined || !valid) {
      console.out(formatProblems(problems));
      console.out(`${plural(problems.length, "problem")}, nothing was started.\n`);
      return 1;
    }
    console.out(`${printable(file)} is valid: ${summary(config)}\n`);
    for (const line of serverLines(probe)) console.out(`${line}\n`);
    for (const { worker, addresses } of tls.lookups)
      console.out(
        `${printable(worker)}: ${addresses.length === 0 ? "no address now" : addresses.join(", ")}\n`,
      );
    if (tls.asked > 0) console.out(`workers: ${tls.reached} of ${tls.asked} take connections\n`);
    if (call.is("probe") && probe === undefined && tls.asked === 0 && tls.lookups.length === 0)
      console.err("nothing to probe: engine.kind is memory, which needs no other server\n");
    return 0;
  },
};

/** Problems in the files of `auth`; loaded only when there are any. */
async function checkKeys(
  file: string,
  config: Config | undefined,
): Promise<Record<"problems" | "warnings", Problem[]>> {
  if (config?.auth.mode !== "required") {
    return { problems: [], warnings: [] };
  }
  const { checkAuthFiles } = await import("../app/credentials.ts");
  const { problems, warnings } = await checkAuthFiles(config);
  const at = ({ path, message }: { path: string; message: string }): Problem => ({ file, path, message });
  return { problems: problems.map(at), warnings: warnings.map(at) };
}

/** Loaded lazily: a check without --probe needs no client. */
async function probeEngine(config: Config | undefined): Promise<Probe | undefined> {
  if (config?.engine.kind !== "redis") return undefined;
  const { probeRedis } = await import("../engine/redis/client/probe.ts");
  return probeRedis(config.engine, new SystemClock());
}

/** Redis's answers, as problems of the setting that names it. */
function found(file: string, config: Config | undefined, lines: readonly string[] = []): Problem[] {
  const engine = config?.engine;
  const path = engine?.kind === "redis" && engine.url === undefined ? "engine.nodes" : "engine.url";
  return lines.map((message) => ({ file, path, message }));
}

/** `redis 127.0.0.1:6379: redis 7.0.15, 1 replica, durability replica` */
function serverLines(probe: Probe | undefined): string[] {
  return (probe?.servers ?? []).map(({ address, facts }) => {
    const { product, version, replicas, durability } = facts;
    const what = `${product} ${printable(version)}, ${plural(replicas, "replica")}, durability ${durability}`;
    return `redis ${printable(address)}: ${what}`;
  });
}

/** `1 model, 4 workers, up to 2,560 req/s, tiers enterprise > paid > free` */
function summary(config: Config): string {
  const { models, workers, capacityPerSecond: capacity, tiers } = factsOf(config);
  const lookedUp = config.models.some(({ backend }) => hasAddresses(backend) && backend.workers.some(isDns));
  const fixed = workers > 0 || !lookedUp ? plural(workers, "worker") : "";
  const all = [fixed, lookedUp ? "workers by DNS" : ""].filter((each) => each !== "").join(" and ");
  const rate =
    capacity === null ? "capacity is learned from traffic" : `up to ${count(Math.floor(capacity))} req/s`;
  return `${plural(models, "model")}, ${all}, ${rate}, tiers ${tiers.join(" > ")}`;
}

function factsOf(config: Config) {
  // One unknown makes the sum unknown: a partial capacity would mislead.
  let capacity: number | null = 0;
  for (const model of config.models) {
    const each = capacityPerSecond(model);
    capacity = each === undefined || capacity === null ? null : capacity + each;
  }
  return {
    models: config.models.length,
    workers: countWorkers(config),
    capacityPerSecond: capacity,
    tiers: config.tiers.map((tier) => tier.name),
  };
}

/**
 * Certificates and workers: files that `ferry serve` would refuse, certificates that expire soon, and with --probe
 * workers whose TLS handshake fails. A probe connects and closes; it sends nothing. An unreachable worker is a warning,
 * since it may only be down; a TLS mismatch is a problem, since waiting does not fix it.
 */

interface TlsReport {
  readonly problems: readonly Problem[];
  readonly warnings: readonly Problem[];
  readonly asked: number;
  readonly reached: number;
  readonly lookups: readonly Lookup[];
}

interface Lookup {
  readonly worker: string;
  readonly addresses: readonly string[];
}

interface Finding {
  /** The setting, `models[0].backend.tls.caFile`. */
  readonly path: string;
  readonly message: string;
  /** Would prevent startup, or fail every batch. */
  readonly problem: boolean;
}

interface Findings {
  readonly findings: readonly Finding[];
  readonly asked: number;
  readonly reached: number;
  readonly lookups: readonly Lookup[];
}

async function checkTls(file: string, config: Config | undefined, probe: boolean): Promise<TlsReport> {
  if (config === undefined) return { problems: [], warnings: [], asked: 0, reached: 0, lookups: [] };
  const { asked, reached, lookups, findings } = probe ? await probeWorkers(config) : none;
  const all = [...(await checkAllFiles(config)), ...findings];
  const about = (wanted: boolean): Problem[] =>
    all.filter((each) => each.problem === wanted).map(({ path, message }) => ({ file, path, message }));
  return { problems: about(true), warnings: about(false), asked, reached, lookups };
}

const none: Findings = { findings: [], asked: 0, reached: 0, lookups: [] };

async function checkAllFiles(config: Config): Promise<Finding[]> {
  const findings: Finding[] = [];
  if (config.tls !== undefined) findings.push(...(await checkFiles("tls", config.tls)));
  for (const [index, { backend }] of config.models.entries()) {
    if (backend.kind !== "http" && backend.kind !== "grpc") continue;
    findings.push(...(await checkFiles(`models[${index}].backend.tls`, backend.tls)));
  }
  return findings;
}

async function checkFiles(setting: string, files: Files): Promise<Finding[]> {
  const events = new Events();
  const told: string[] = [];
  events.on("notice", ({ message }) => told.push(message));
  const certificates = new Certificates(setting, files, CERTIFICATE_RELOAD_MS, new SystemClock(), events);
  try {
    await certificates.start();
    return told.map((message) => finding(message, setting, false));
  } catch (error) {
    return [finding((error as Error).message, setting, true)];
  } finally {
    certificates.stop();
  }
}

type Files = ConstructorParameters<typeof Certificates>[1];

/** Messages begin with the setting. */
function finding(message: string, setting: string, problem: boolean): Finding {
  const colon = message.startsWith(setting) ? message.indexOf(": ") : -1;
  if (colon < 0) return { path: setting, message, problem };
  return { path: message.slice(0, colon), message: message.slice(colon + 2), problem };
}

async function probeWorkers(config: Config): Promise<Findings> {
  // Loaded lazily: a check without --probe needs no client.
  const { WorkerTls } = await import("../workers/backend/worker-tls.ts");
  const findings: Finding[] = [];
  const lookups: Lookup[] = [];
  let [asked, reached] = [0, 0];
  for (const [index, { name, backend }] of config.models.entries()) {
    if (backend.kind !== "http" && backend.kind !== "grpc") continue;
    const tls = new WorkerTls(`model ${name}: backend.tls`, backend.tls, new SystemClock(), new Events());
    const places: Place[] = [];
    try {
      await tls.start();
      for (const [at, worker] of backend.workers.entries()) {
        const path = `models[${index}].backend.workers[${at}]`;
        if (isDns(worker)) {
          const { hostname, shown } = dnsName(worker, backend.kind);
          const { addresses, failure } = await lookUp(hostname, backend.dnsServers);
          if (failure === undefined) lookups.push({ worker: shown, addresses });
          else findings.push({ path, message: `cannot be looked up now: ${failure}`, problem: false });
          places.push(...addresses.map((address) => ({ path, ...placeAt(worker, backend.kind, address) })));
        } else places.push({ path, url: worker });
      }
      const tries = await Promise.all(places.map(({ url, host }) => tls.reach(new URL(url), host)));
      asked += tries.length;
      tries.forEach((reach, at) => {
        if (reach.ok) reached++;
        else findings.push(workerFinding(places[at]!, reach));
      });
    } catch {
      // The files are unusable; `checkAllFiles` says why.
    } finally {
      tls.stop();
    }
  }
  return { findings, asked, reached, lookups };
}

/** `address`: where the worker is, when the setting does not say. */
interface Place {
  readonly path: string;
  readonly url: string;
  readonly host?: string;
  readonly address?: string;
}

function placeAt(worker: string, kind: NetworkKind, address: string): Omit<Place, "path"> {
  const name = dnsName(worker, kind);
  return { url: name.at(address), host: name.host, address };
}

async function lookUp(
  hostname: string,
  servers: readonly string[],
): Promise<{ addresses: readonly string[]; failure?: string }> {
  try {
    return { addresses: (await systemResolve(hostname, servers)).toSorted() };
  } catch (error) {
    const { code, message } = error as NodeJS.ErrnoException;
    return { addresses: [], failure: code ?? message };
  }
}

function workerFinding({ path, address }: Place, { message, tls }: Reach & { ok: false }): Finding {
  const at = address === undefined ? "" : `${address}: `;
  return { path, message: at + (tls ? message : `cannot be reached now: ${message}`), problem: tls };
}
