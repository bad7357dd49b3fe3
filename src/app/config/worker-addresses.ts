/**
 * Worker addresses: listed URLs, DNS names, or children of this process.
 *
 * `dns://gpu.default.svc:9000/infer` means one worker per address of that name; `dns://` is the backend's plain scheme
 * (http, grpc), `dns+https://` and `dns+grpcs://` use TLS. The worker at 10.0.0.7 has the URL
 * `http://10.0.0.7:9000/infer` in every process; `Host` and the certificate's name are the DNS name.
 */
import { isIPv6 } from "node:net";
import type { GrpcBackendConfig, HttpBackendConfig, ModelConfig } from "./config.ts";

export type NetworkKind = "http" | "grpc";

/** Workers on the network, not children of each process. */
export type NetworkBackend = HttpBackendConfig | GrpcBackendConfig;

export function hasAddresses(backend: ModelConfig["backend"]): backend is NetworkBackend {
  return backend.kind === "http" || backend.kind === "grpc";
}

export function isDns(worker: string): boolean {
  return worker.startsWith("dns:") || worker.startsWith("dns+");
}

export function fixedWorkers(workers: readonly string[]): string[] {
  return workers.filter((worker) => !isDns(worker));
}

export interface DnsName {
  /** As configured, without the query, which may hold a secret. */
  readonly shown: string;
  readonly hostname: string;
  /** `name:port`; the port only if configured. */
  readonly host: string;
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

export function plainUrl(worker: string, kind: NetworkKind): string {
  if (!isDns(worker)) return worker;
  const name = dnsName(worker, kind);
  return name.at(name.hostname);
}
