/** A server that can go away, as a killed process does, and come back on the port it had. */
import { once } from "node:events";
import type { Server } from "node:http";
import type { AddressInfo } from "node:net";

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
    this.#server = this.make();
    this.#server.listen(this.#port, "127.0.0.1");
    await once(this.#server, "listening");
    this.#port = (this.#server.address() as AddressInfo).port;
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
  }
}
