/**
 * TLS in front of a listener: one node:https server, and beside it HTTP/2 for those who ask for it.
 *
 * The client chooses in the handshake (ALPN). A connection for HTTP/1.1 goes to the very function that
 * node:https gives it to; only those for `h2` take another way (`http2.ts`), so HTTP/1.1 pays one comparison
 * per connection.
 *
 * Before the handshake is over a client is nobody yet: connections beyond the limit are dropped without a
 * word (an answer would need the handshake), a handshake has `headersTimeoutMs`, and what is not TLS is
 * closed. None of that is logged, because anybody could fill the log with it.
 */
import { type Server, type ServerOptions, createServer } from "node:https";
import type { Socket } from "node:net";
import type { TLSSocket } from "node:tls";
import type { Certificates } from "./certificates.ts";
import type { Http2Door } from "./http2.ts";

/** What a listener needs to speak TLS; the certificates are started, and outlive it. */
export interface EdgeTls {
  readonly certificates: Certificates;
  readonly minVersion: "TLSv1.2" | "TLSv1.3";
  readonly http2: boolean;
  /** Requests at once on one HTTP/2 connection. */
  readonly maxStreams: number;
}

export interface FrontLimits {
  readonly maxConnections: number;
  readonly headersTimeoutMs: number;
}

export class TlsFront {
  readonly server: Server;
  /** All of them, also those that are still in their handshake, which the server does not know yet. */
  readonly #sockets = new Set<Socket>();
  readonly #door: Http2Door | undefined;

  constructor(options: ServerOptions, tls: EdgeTls, limits: FrontLimits, door: Http2Door | undefined) {
    const { certificates, minVersion } = tls;
    this.server = createServer({
      ...options,
      ...certificates.material,
      minVersion,
      handshakeTimeout: limits.headersTimeoutMs,
      // Whoever offers only what is not here is refused in the handshake; curl --http1.0 offers nothing else.
      ALPNProtocols: [...(door === undefined ? [] : ["h2"]), "http/1.1", "http/1.0"],
    });
    // The second where several processes share the port: else one without room would give the connection back,
    // and the parent would hand it on until there is room. Node's types do not know it yet.
    Object.assign(this.server, { maxConnections: limits.maxConnections, dropMaxConnection: true });
    this.server.on("connection", (socket: Socket) => this.#keep(socket));
    certificates.onChange((material) => this.server.setSecureContext({ ...material, minVersion }));
    this.#door = door;
    if (door !== undefined) this.#parts(door);
  }

  /** HTTP/2 is told to open no more requests; HTTP/1.1 is the server's own affair. */
  drain(): void {
    this.#door?.drain();
  }

  close(): void {
    this.#door?.close();
    for (const socket of this.#sockets) socket.destroy();
  }

  #keep(socket: Socket): void {
    this.#sockets.add(socket);
    socket.once("close", () => this.#sockets.delete(socket));
  }

  /** Puts the choice in front of what node:https does with a connection. */
  #parts(door: Http2Door): void {
    const http1 = this.server.listeners("secureConnection") as ((socket: TLSSocket) => void)[];
    this.server.removeAllListeners("secureConnection");
    this.server.on("secureConnection", (socket: TLSSocket) => {
      if (socket.alpnProtocol === "h2") door.enter(socket);
      else for (const each of http1) each.call(this.server, socket);
    });
  }
}

/** Trouble below HTTP: there is nobody who could read an answer. */
export function isTlsTrouble(code: string | undefined): boolean {
  return code !== undefined && /^(?:ERR_SSL_|ERR_TLS_|EPROTO$)/.test(code);
}
