/**
 * A TCP proxy in front of a server, for what a network does to a conversation.
 *
 *   await using proxy = await startProxy(server.port);
 *   proxy.latencyMs = 50;              every reply comes 50 ms later
 *   proxy.blackhole = true;            connections are accepted and stay open; nothing comes through
 *   proxy.cutAfter(10);                10 more bytes of replies, then the connection that they are on is cut
 *   proxy.cutRequests = 1;             the server carries out the next request; its reply is lost, with the
 *                                      connection
 *   proxy.reset();                     all connections end with ECONNRESET
 *
 * Bytes keep their order. What a black hole swallows is held back, not lost, as TCP does it: it arrives when
 * the black hole is gone, if the connection still is there. `cutAfter` and `cutRequests` disarm themselves.
 * A reply that is lost was given: the connection is cut when the server has carried out all that it got.
 */
import { once } from "node:events";
import { connect, createServer, type AddressInfo, type Server, type Socket } from "node:net";
import { scheduler } from "node:timers/promises";

const HOST = "127.0.0.1";

export class Proxy implements AsyncDisposable {
  readonly port: number;
  readonly url: string;
  /** Added to every reply; requests are not held up. */
  latencyMs = 0;
  /** So many more requests lose their replies; Infinity: all. */
  cutRequests = 0;
  /** Only requests that contain this text (the name of a script, a key) count for `cutRequests`. */
  cutOnly = "";
  /** How many connections `cutAfter` and `cutRequests` have cut. */
  cuts = 0;
  /** How many connections were accepted. */
  accepted = 0;
  readonly #listener: Server;
  readonly #connections = new Set<Connection>();
  #bytesLeft = Infinity;
  #gate: PromiseWithResolvers<void> | undefined;

  constructor(listener: Server, serverPort: number) {
    this.port = (listener.address() as AddressInfo).port;
    this.url = `redis://${HOST}:${this.port}`;
    this.#listener = listener;
    listener.on("connection", (client) => {
      this.accepted++;
      const connection = new Connection(
        this,
        client,
        connect({ host: HOST, port: serverPort, noDelay: true }),
      );
      this.#connections.add(connection);
      client.on("close", () => this.#connections.delete(connection));
    });
  }

  /** How many connections are open. */
  get open(): number {
    return this.#connections.size;
  }

  get blackhole(): boolean {
    return this.#gate !== undefined;
  }

  set blackhole(on: boolean) {
    if (on) {
      this.#gate ??= Promise.withResolvers();
    } else {
      this.#gate?.resolve();
      this.#gate = undefined;
    }
  }

  /** From now on, counted over all connections. */
  cutAfter(bytes: number): void {
    this.#bytesLeft = bytes;
  }

  reset(): void {
    for (const connection of this.#connections) connection.reset();
  }

  async close(): Promise<void> {
    if (!this.#listener.listening) return;
    this.#listener.close();
    this.reset();
    this.blackhole = false;
    await once(this.#listener, "close");
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /** Resolves when bytes may pass. */
  async passable(): Promise<void> {
    while (this.#gate !== undefined) await this.#gate.promise;
  }

  /** How much of a reply goes through, and whether the connection is cut after it. */
  spend(bytes: number): { allowed: number; cut: boolean } {
    const allowed = Math.min(bytes, this.#bytesLeft);
    this.#bytesLeft -= allowed;
    const cut = this.#bytesLeft === 0;
    if (cut) {
      this.#bytesLeft = Infinity;
      this.cuts++;
    }
    return { allowed, cut };
  }

  /** Whether the reply to this request is to be lost. */
  loses(request: Buffer): boolean {
    if (this.cutRequests <= 0 || !request.includes(this.cutOnly)) return false;
    this.cutRequests--;
    return true;
  }
}

/** One client and its connection to the server; each direction is a chain, so that bytes keep their order. */
class Connection {
  readonly #proxy: Proxy;
  readonly #client: Socket;
  readonly #server: Socket;
  #requests = Promise.resolve();
  #replies = Promise.resolve();
  #losing = false;
  #requestIsWhole = true;

  constructor(proxy: Proxy, client: Socket, server: Socket) {
    this.#proxy = proxy;
    this.#client = client;
    this.#server = server;
    client.on("data", (chunk: Buffer) => {
      this.#requests = this.#requests.then(() => this.#request(chunk));
    });
    server.on("data", (chunk: Buffer) => {
      const dueAt = performance.now() + proxy.latencyMs;
      this.#replies = this.#replies.then(() => this.#reply(chunk, dueAt));
    });
    // Every error is followed by "close", and what "close" does is right for it.
    client.on("error", () => {}).on("close", () => void this.#requests.then(() => this.#end(server)));
    server.on("error", () => {}).on("close", () => void this.#replies.then(() => this.#end(client)));
  }

  reset(): void {
    this.#client.resetAndDestroy();
    this.#server.destroy();
  }

  async #request(chunk: Buffer): Promise<void> {
    await this.#proxy.passable();
    if (!this.#server.writable) return;
    this.#losing ||= this.#proxy.loses(chunk);
    this.#requestIsWhole = chunk.at(-1) === 0x0a;
    this.#server.write(chunk);
  }

  async #reply(chunk: Buffer, dueAt: number): Promise<void> {
    // A timer may fire a millisecond early.
    for (let now = performance.now(); now < dueAt; now = performance.now()) await scheduler.wait(dueAt - now);
    await this.#proxy.passable();
    if (this.#losing) {
      // This reply may be an earlier one. Redis carries out all that it got before it sees the end, and
      // hangs up then: only after that is the client cut off.
      if (this.#requestIsWhole) this.#server.end();
      return;
    }
    if (!this.#client.writable) return;
    const { allowed, cut } = this.#proxy.spend(chunk.length);
    this.#client.write(chunk.subarray(0, allowed));
    if (cut) {
      this.#client.end();
      this.#server.destroy();
    }
  }

  async #end(other: Socket): Promise<void> {
    await this.#proxy.passable();
    if (this.#losing && other === this.#client && !other.destroyed) {
      this.#proxy.cuts++;
      other.resetAndDestroy();
    } else if (other === this.#client) {
      other.end();
    } else {
      other.destroy();
    }
  }
}

export async function startProxy(serverPort: number): Promise<Proxy> {
  const listener = createServer({ noDelay: true });
  await once(listener.listen(0, HOST), "listening");
  return new Proxy(listener, serverPort);
}
