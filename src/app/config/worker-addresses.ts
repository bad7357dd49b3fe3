/**
 * Where workers are: at addresses, written down one by one or behind a name, or in Ferry's own hands.
 *
 * Workers by a name of DNS: `dns://gpu.default.svc:9000/infer` stands for one worker at each address of that name.
 *
 * `dns://` is the plain scheme of its backend (http, grpc), `dns+https://` and `dns+grpcs://` are with TLS. The worker
 * at 10.0.0.7 has the URL `http://10.0.0.7:9000/infer`, the same in every process that looks the name up; what it is asked
 * for is the name (`Host`, and the name in its certificate).
 */
import { isIPv6 } from "node:net";
import type { GrpcBackendConfig, HttpBackendConfig, ModelConfig } from "./config.ts";

export type NetworkKind = "http" | "grpc";

/** A backend whose workers are somewhere on the network, and not children of each process. */
export type NetworkBackend = HttpBackendConfig | GrpcBackendConfig;

export function hasAddresses(backend: ModelConfig["backend"]): backend is NetworkBackend {
  return backend.kind === "http" || backend.kind === "grpc";
}

export function isDns(worker: string): boolean {
  return worker.startsWith("dns:") || worker.startsWith("dns+");
}

/** Those that are written down one by one. */
export function fixedWorkers(workers: readonly string[]): string[] {
  return workers.filter((worker) => !isDns(worker));
}

export interface DnsName {
  /** As the config has it, without its query, which may hold a secret. */
  readonly shown: string;
  readonly hostname: string;
  /** `name:port`, the port left out where the config does. */
  readonly host: string;
  /** The URL of the worker at this address. */
  at(address: string): string;
}

export function dnsName(written: string, kind: NetworkKind): DnsName {
  const { protocol, hostname, host, port, pathname, search } = new URL(written);
  const scheme = protocol === "dns:" ? kind : protocol.slice("dns+".length, -1);
  const end = `${port === "" ? "" : `:${port}`}${pathname}${search}`;
  return {
    shown: `${protocol}//${host}${pathname}`,
    hostname,
    host,
    at: (address) => {
      const url = new URL(`${scheme}://${isIPv6(address) ? `[${address}]` : address}${end}`);
      return kind === "grpc" ? `${url.protocol}//${url.host}` : url.href;
    },
  };
}

/** As one would write it without the lookup: the name where an address will be. */
export function plainUrl(worker: string, kind: NetworkKind): string {
  if (!isDns(worker)) return worker;
  const name = dnsName(worker, kind);
  return name.at(name.hostname);
}
