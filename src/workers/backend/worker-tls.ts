/**
 * TLS connections to workers, and what a failed connection means.
 *
 * The worker's certificate is verified on every connection, whatever NODE_TLS_REJECT_UNAUTHORIZED says: against
 * `caFile` or the system CAs, and against `serverName` or the URL's host. Sessions are not resumed, since a resumed one
 * is not verified again. No fallback to plain HTTP.
 *
 * No batch is sent to a worker that may still refuse our certificate. In TLS 1.3 the client finishes before the server
 * has checked it; a request sent at once would be lost in the refusal, and it would be unknown whether the worker had
 * seen it. The server's first session ticket, half a round trip later, shows that it accepts us. A server without
 * tickets gets `TICKET_MS` to refuse.
 */
import type { TLSSocket } from "node:tls";
import { buildConnector } from "undici";
import type { Clock } from "../../app/clock.ts";
import { CERTIFICATE_RELOAD_MS, Certificates } from "../../gateway/certificates.ts";
import type { Events } from "../../observe/events.ts";
import { quote } from "./replies.ts";

export interface WorkerTlsOptions {
  readonly caFile?: string;
  readonly certFile?: string;
  readonly keyFile?: string;
  readonly serverName?: string;
  /** How often the files are checked; default CERTIFICATE_RELOAD_MS. */
  readonly reloadMs?: number;
}

interface ConnectorOptions {
  readonly allowH2?: boolean;
  readonly host?: string | undefined;
}

export type Reach =
  | { readonly ok: true }
  | { readonly ok: false; readonly tls: boolean; readonly message: string };

/** Enough for one lost SYN; a worker on the same network answers in a millisecond or not at all. */
export const CONNECT_TIMEOUT_MS = 2_000;
/** Several round trips on one network; servers without tickets cost it once per connection. */
const TICKET_MS = 100;

export class WorkerTls {
  readonly #certificates: Certificates;
  readonly #options: WorkerTlsOptions;
  readonly #clock: Clock;
  /** Incremented when the files change: older connections should not be reused. */
  version = 0;

  constructor(setting: string, options: WorkerTlsOptions, clock: Clock, events: Events) {
    const { caFile, certFile, keyFile, reloadMs = CERTIFICATE_RELOAD_MS } = options;
    this.#certificates = new Certificates(setting, { caFile, certFile, keyFile }, reloadMs, clock, events);
    this.#certificates.onChange(() => this.version++);
    this.#options = options;
    this.#clock = clock;
  }

  /** Rejects with one line when a file cannot be used. */
  async start(): Promise<void> {
    const { caFile, certFile, keyFile } = this.#options;
    if ((caFile ?? certFile ?? keyFile) !== undefined) await this.#certificates.start();
  }

  stop(): void {
    this.#certificates.stop();
  }

  /**
   * For one undici client, with the current files; `allowH2` where each connection carries one call. `host` is the
   * certificate's name where the URL holds an address; `serverName` takes precedence.
   */
  connector(timeoutMs: number, { allowH2 = false, host }: ConnectorOptions = {}): buildConnector.connector {
    const serverName = this.#options.serverName ?? host?.replace(/:\d+$/, "");
    const named = serverName !== undefined && { servername: serverName };
    const connect = buildConnector({
      ...this.#certificates.material,
      ...named,
      rejectUnauthorized: true,
      minVersion: "TLSv1.2",
      // HTTP/2 would share one connection between an aborted exchange and the next.
      allowH2,
      preferH2: allowH2,
      maxCachedSessions: 0,
      timeout: timeoutMs,
    });
    return (options, callback) =>
      connect({ ...options, ...named }, (...[error, socket]) => {
        if (error !== null) callback(error, null);
        else this.#awaitConsent(socket as TLSSocket, callback);
      });
  }

  /** Connects to a worker and closes. */
  async reach(url: URL, host?: string): Promise<Reach> {
    try {
      const socket = await this.open(url, host);
      socket.destroy();
      return { ok: true };
    } catch (error) {
      const trouble = tlsTrouble(error as Error);
      const { message, name, code } = error as Error & { code?: string };
      return {
        ok: false,
        tls: trouble !== undefined,
        message: trouble?.message ?? (message || code || name),
      };
    }
  }

  /** Connects by the URL's scheme: http or https, grpc or grpcs. */
  open({ protocol, hostname, host, port }: URL, name?: string): Promise<TLSSocket> {
    const secure = protocol === "https:" || protocol === "grpcs:";
    const connect = secure
      ? this.connector(CONNECT_TIMEOUT_MS, { allowH2: protocol === "grpcs:", host: name })
      : buildConnector({ timeout: CONNECT_TIMEOUT_MS });
    // As undici does: brackets around an IPv6 address are for URLs only.
    const bare = hostname.replace(/^\[(.*)\]$/, "$1");
    const scheme = secure ? "https:" : "http:";
    return new Promise((resolve, reject) => {
      connect({ protocol: scheme, hostname: bare, host, port }, (...[error, socket]) => {
        if (error === null) resolve(socket as TLSSocket);
        else reject(error);
      });
    });
  }

  #awaitConsent(socket: TLSSocket, callback: buildConnector.Callback): void {
    if (socket.getProtocol() !== "TLSv1.3") return callback(null, socket);
    const settle = (error: Error | undefined): void => {
      timeout.cancel();
      socket.off("session", onSession).off("error", settle).off("close", onClose);
      if (error === undefined) callback(null, socket);
      else callback(error, null);
    };
    const onSession = (): void => settle(undefined);
    const onClose = (): void => settle(new TlsRefusal("the connection was closed after the handshake"));
    const timeout = this.#clock.at(this.#clock.now() + TICKET_MS, () => settle(undefined));
    socket.on("session", onSession).on("error", settle).on("close", onClose);
  }
}

class TlsRefusal extends Error {
  readonly code = "ERR_TLS_REFUSED";
}

const OURS = "check backend.tls.certFile and keyFile, and which authority the worker trusts";

/** Message for operators → the OpenSSL and Node codes it explains. */
const TROUBLES: Readonly<Record<string, string>> = {
  "the worker's certificate is not from an authority we trust; check backend.tls.caFile":
    "UNABLE_TO_VERIFY_LEAF_SIGNATURE UNABLE_TO_GET_ISSUER_CERT UNABLE_TO_GET_ISSUER_CERT_LOCALLY INVALID_CA " +
    "DEPTH_ZERO_SELF_SIGNED_CERT SELF_SIGNED_CERT_IN_CHAIN CERT_SIGNATURE_FAILURE CERT_UNTRUSTED",
  "the worker's certificate is not meant for a server; give it another": "INVALID_PURPOSE",
  "the worker's certificate, or its authority's, has expired; renew it": "CERT_HAS_EXPIRED",
  "the worker's certificate is not valid yet; check the clocks": "CERT_NOT_YET_VALID",
  "the worker's certificate was revoked": "CERT_REVOKED",
  "the worker's certificate is for another name; check the host in backend.workers, or backend.tls.serverName":
    "ERR_TLS_CERT_ALTNAME_INVALID",
  "the worker does not speak TLS at this port; check its URL":
    "ERR_SSL_WRONG_VERSION_NUMBER ERR_SSL_HTTP_REQUEST ERR_SSL_PACKET_LENGTH_TOO_LONG",
  "the worker speaks only TLS older than 1.2; update it":
    "ERR_SSL_UNSUPPORTED_PROTOCOL ERR_SSL_VERSION_TOO_LOW",
  "the worker and Ferry share no version of TLS; it must speak 1.2 or 1.3":
    "ERR_SSL_TLSV1_ALERT_PROTOCOL_VERSION",
  [`the worker wants a client certificate; ${OURS}`]: "ERR_SSL_TLSV13_ALERT_CERTIFICATE_REQUIRED",
  [`the worker closed the connection after the handshake; if it wants a certificate, ${OURS}`]:
    "ERR_TLS_REFUSED",
};
const WORDS: ReadonlyMap<string, string> = new Map(
  Object.entries(TROUBLES).flatMap(([words, codes]) => codes.split(" ").map((code) => [code, words])),
);

/** Alerts about our certificate: whenever they come, the worker has not processed what we sent. */
const ABOUT_OURS =
  /^ERR_SSL_.*ALERT_(?:CERTIFICATE_REQUIRED|BAD_CERTIFICATE|UNSUPPORTED_CERTIFICATE|CERTIFICATE_\w+|UNKNOWN_CA|ACCESS_DENIED|NO_CERTIFICATE|DECRYPT_ERROR|HANDSHAKE_FAILURE)$/;

/** Undefined when it is not about TLS. `final`: the worker cannot have processed the request, even if written. */
export function tlsTrouble(error: Error): { readonly message: string; readonly final: boolean } | undefined {
  const code = "code" in error ? String(error.code) : "";
  const words = WORDS.get(code);
  if (words !== undefined) return { message: `TLS: ${words}`, final: ABOUT_OURS.test(code) };
  if (ABOUT_OURS.test(code))
    return { message: `TLS: the worker refused our certificate (${code}); ${OURS}`, final: true };
  if (/^(?:ERR_SSL_|ERR_TLS_|EPROTO$|CERT_|ERROR_IN_CERT|CRL_|HOSTNAME_MISMATCH)/.test(code)) {
    return {
      message: `TLS: the handshake failed (${code}); check the worker's TLS, and backend.tls`,
      final: false,
    };
  }
  if (code === "ECONNRESET" && error.message.includes("before secure TLS connection")) {
    const why = "the worker closed the connection during the handshake; if it wants a certificate,";
    return { message: `TLS: ${why} ${OURS}`, final: false };
  }
  return undefined;
}

export function reason(error: Error): string {
  const code = "code" in error ? String(error.code) : "";
  switch (code) {
    case "ECONNREFUSED":
      return "connection refused";
    case "ECONNRESET":
    case "EPIPE":
      return "connection reset";
    case "ENOTFOUND":
    case "EAI_AGAIN":
      return "its name cannot be resolved";
    case "UND_ERR_CONNECT_TIMEOUT":
      return `no connection within ${CONNECT_TIMEOUT_MS} ms`;
    default:
      return quote(error.message) || code || error.name;
  }
}
