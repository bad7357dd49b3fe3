/**
 * One port, several listening sockets of this process.
 *
 * libuv takes one connection from each listening socket in a turn of the event loop. While a process is busy a turn takes
 * milliseconds, so with one socket a few hundred connections a second get in; the others wait in the kernel until its
 * queue overflows, and then for a second or more until TCP tries again. With SO_REUSEPORT the kernel spreads connections
 * over the sockets, and each turn takes one from each.
 *
 * Only where SO_REUSEPORT does that (Linux), and not below the parent of `--processes`, which takes the connections
 * itself. It would also let a second process listen at the same port, so the port is tried without it first.
 */
import cluster from "node:cluster";
import { once } from "node:events";
import { createServer, type ListenOptions, Server, type Socket } from "node:net";

const SOCKETS = 8;

export class WideListener {
  readonly #server: Server;
  readonly #others: Server[] = [];

  readonly #sockets: number;

  /**
   * `server` gets every connection, as if it had taken it itself; but it counts only those of its own socket, so one that
   * bounds its connections by itself must not be `wide`.
   */
  constructor(server: Server, wide: boolean) {
    this.#server = server;
    const spreads = process.platform === "linux" && !cluster.isWorker;
    this.#sockets = wide && spreads ? SOCKETS : 1;
  }

  /** Rejects when the port is in use. */
  async listen(options: ListenOptions): Promise<void> {
    if (this.#sockets === 1) return open(this.#server, options);
    if (options.port !== 0) await close(await opened(createServer(), options));
    await open(this.#server, { ...options, reusePort: true });
    const { port } = this.#server.address() as { port: number };
    const { allowHalfOpen } = this.#server as Server & { allowHalfOpen: boolean };
    for (let at = 1; at < this.#sockets; at++) {
      const other = createServer({ allowHalfOpen, noDelay: true }, (socket: Socket) =>
        this.#server.emit("connection", socket),
      );
      await open(other, { ...options, port, reusePort: true });
      this.#others.push(other);
    }
  }

  /** Takes no new connection; resolves when all that were taken are closed. */
  async close(): Promise<void> {
    // That of node:http would close those that are idle.
    const closed = [this.#server, ...this.#others].map(
      (each) => new Promise<void>((resolve) => Server.prototype.close.call(each, () => resolve())),
    );
    await Promise.all(closed);
  }
}

async function open(server: Server, options: ListenOptions): Promise<void> {
  await opened(server, options);
}

async function opened(server: Server, options: ListenOptions): Promise<Server> {
  server.listen(options);
  await once(server, "listening");
  return server;
}

async function close(server: Server): Promise<void> {
  server.close();
  await once(server, "close");
}
