/**
 * A server that can go away, as a killed process does, and come back on the port it had: one that nobody else is given
 * meanwhile, neither to listen on nor for a connection (test/engine/redis-client/guard.ts).
 */
import { once } from "node:events";
import type { Server } from "node:http";
import { releasePort, takePort } from "../engine/redis-client/guard.ts";

export abstract class ReturningServer implements AsyncDisposable {
  #server: Server | undefined;
  #port = 0;

  /** A server that does not listen yet. */
  protected abstract make(): Server;

  get url(): string {
    return `http://127.0.0.1:${this.#port}`;
  }

  /** Listens, again on the port it had. */
  async open(): Promise<void> {
    if (this.#server?.listening === true) return;
    if (this.#port === 0) this.#port = await takePort();
    this.#server = this.make();
    this.#server.listen(this.#port, "127.0.0.1");
    await once(this.#server, "listening");
  }

  /** Dies as a killed process does: its connections are reset and its port refuses. */
  async close(): Promise<void> {
    if (this.#server?.listening !== true) return;
    const closed = once(this.#server, "close");
    this.#server.close();
    this.#server.closeAllConnections();
    await closed;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
    releasePort(this.#port);
  }
}
