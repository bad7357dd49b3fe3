/**
 * The part of `ferry check` about certificates and workers: files that `ferry serve` would refuse, those that
 * end soon, and, with --probe, workers with which no TLS can be agreed on. A probe connects and hangs up:
 * nothing is sent to a worker.
 *
 * A worker that does not answer is a warning, since it may only be down; one whose TLS does not fit is a
 * problem, since it will not get better by waiting.
 */
import type { Reach } from "../workers/backend/worker-tls.ts";
import { CERTIFICATE_RELOAD_MS, Certificates } from "../gateway/certificates.ts";
import { SystemClock } from "../app/clock.ts";
import type { Config, Problem } from "../app/config/config.ts";
import { dnsName, isDns, type NetworkKind } from "../app/config/worker-addresses.ts";
import { systemResolve } from "../workers/discovery.ts";
import { Events } from "../observe/events.ts";

export interface TlsReport {
  readonly problems: readonly Problem[];
  readonly warnings: readonly Problem[];
  /** With how many workers a connection was tried, and with how many it worked. */
  readonly asked: number;
  readonly reached: number;
  readonly lookups: readonly Lookup[];
}

/** A name of DNS among the workers, and what it stands for now. */
export interface Lookup {
  readonly worker: string;
  readonly addresses: readonly string[];
}

interface Finding {
  /** The setting, `models[0].backend.tls.caFile`. */
  readonly path: string;
  readonly message: string;
  /** It would stop a start, or every batch. */
  readonly problem: boolean;
}

interface Findings {
  readonly findings: readonly Finding[];
  readonly asked: number;
  readonly reached: number;
  readonly lookups: readonly Lookup[];
}

export async function checkTls(file: string, config: Config | undefined, probe: boolean): Promise<TlsReport> {
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

/** Messages begin with the setting that they are about. */
function finding(message: string, setting: string, problem: boolean): Finding {
  const colon = message.startsWith(setting) ? message.indexOf(": ") : -1;
  if (colon < 0) return { path: setting, message, problem };
  return { path: message.slice(0, colon), message: message.slice(colon + 2), problem };
}

/** Tries a connection to every worker that has an address. */
async function probeWorkers(config: Config): Promise<Findings> {
  // Loaded only now: a check without --probe needs no client.
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
      // The files cannot be used, and `checkAllFiles` says why.
    } finally {
      tls.stop();
    }
  }
  return { findings, asked, reached, lookups };
}

/** One worker to try. `address`: where it is, when the setting does not say that. */
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
