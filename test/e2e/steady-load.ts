/**
 * A load that does not slow down when its server does, through a tiny balancer, and the count of what failed.
 *
 *   Balancer   takes connections on one port and hands each to the next gateway in turn; where a gateway refuses the
 *              connection, to the one after it. It knows nothing of HTTP, as Kubernetes services and most edges.
 *   Stream     so many requests a second over connections that stay open, whatever became of those before. Failed is
 *              everything that is not 200 with the right output: a refusal, a broken connection, a late answer. A
 *              request is sent once: no retry hides anything. Only a machine that does not come along at all makes it
 *              wait (`MOST_OPEN`): a crowd that grows without end is another test.
 */
import assert from "node:assert/strict";
import { once } from "node:events";
import { Agent, request } from "node:http";
import { type AddressInfo, connect, createServer, type Server, type Socket } from "node:net";
import { setTimeout as pause } from "node:timers/promises";
import { Answer } from "./harness.ts";

const ANSWER_MS = 60_000;
/** Ten times what is usual at 300 a second. */
const MOST_OPEN = 100;

export class Balancer implements AsyncDisposable {
  readonly #server: Server;
  readonly #doors: () => readonly string[];
  readonly #sockets = new Set<Socket>();
  #next = 0;

  private constructor(doors: () => readonly string[]) {
    this.#doors = doors;
    this.#server = createServer({ allowHalfOpen: true, noDelay: true }, (client) => this.#enter(client));
  }

  /** `doors`: the URLs of those that may be tried now. */
  static async listen(doors: () => readonly string[]): Promise<Balancer> {
    const balancer = new Balancer(doors);
    balancer.#server.listen(0, "127.0.0.1");
    await once(balancer.#server, "listening");
    return balancer;
  }

  get port(): number {
    return (this.#server.address() as AddressInfo).port;
  }

  #enter(client: Socket): void {
    this.#keep(client);
    const doors = this.#doors();
    const first = this.#next++;
    const turn = doors.map((_, at) => new URL(doors[(first + at) % doors.length]!));
    this.#try(client, turn);
  }

  #try(client: Socket, [door, ...others]: URL[]): void {
    if (door === undefined) return void client.destroy();
    const { hostname: host, port } = door;
    const gateway = connect({ host, port: Number(port), allowHalfOpen: true, noDelay: true });
    const refused = (): void => this.#try(client, others);
    gateway.once("error", refused);
    gateway.once("connect", () => {
      gateway.off("error", refused);
      this.#keep(gateway);
      client.pipe(gateway);
      gateway.pipe(client);
      client.once("close", () => gateway.destroy());
      gateway.once("close", () => client.destroy());
    });
  }

  #keep(socket: Socket): void {
    this.#sockets.add(socket);
    socket.once("close", () => this.#sockets.delete(socket));
    // Whoever has this connection hears of it.
    socket.on("error", () => {});
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#server.close();
    for (const socket of this.#sockets) socket.destroy();
    await once(this.#server, "close");
  }
}

export interface StreamOptions {
  readonly port: number;
  readonly perSecond: number;
  /** Left out: the only one. */
  readonly model?: string;
  readonly headers?: Readonly<Record<string, string>>;
}

export class Stream implements AsyncDisposable {
  sent = 0;
  answered = 0;
  /** What each of those that failed got instead. */
  readonly failed: string[] = [];
  /** Refused because a process was slow: the machine's doing. */
  refusedFull = 0;
  readonly #options: StreamOptions;
  /** In turn, so that none rests: one that rests until its gateway closes it may be used just then. */
  readonly #agent = new Agent({ keepAlive: true, scheduling: "fifo" });
  readonly #open = new Set<Promise<void>>();
  readonly #running: Promise<void>;
  #stopped = false;

  constructor(options: StreamOptions) {
    this.#options = options;
    this.#running = this.#run();
  }

  /** Resolves when so many more were answered. */
  async more(count: number, withinMs = 60_000): Promise<void> {
    const [goal, deadline] = [this.answered + count, performance.now() + withinMs];
    while (this.answered < goal) {
      assert.ok(performance.now() < deadline, `${this.answered} of ${goal} answered in time; ${this.told()}`);
      await pause(20);
    }
  }

  /** Sends no more; resolves when all that were sent have ended. */
  async stop(): Promise<void> {
    this.#stopped = true;
    await this.#running;
    await Promise.all(this.#open);
  }

  told(): string {
    const kinds = new Map<string, number>();
    for (const what of this.failed) kinds.set(what, (kinds.get(what) ?? 0) + 1);
    return JSON.stringify({ sent: this.sent, answered: this.answered, failed: Object.fromEntries(kinds) });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop();
    this.#agent.destroy();
  }

  async #run(): Promise<void> {
    const { perSecond } = this.#options;
    const from = performance.now();
    while (!this.#stopped) {
      const due = Math.floor(((performance.now() - from) * perSecond) / 1000);
      while (this.sent < due && this.#open.size < MOST_OPEN) {
        const sent = this.#send(`s${this.sent++}`);
        this.#open.add(sent);
        void sent.finally(() => this.#open.delete(sent));
      }
      await pause(5);
    }
  }

  async #send(marker: string): Promise<void> {
    try {
      const { status, text } = await this.#ask(marker);
      if (status === 200 && text.includes(`"${marker}"`)) this.answered++;
      else if (new Answer(status, {}, text).isFull) this.refusedFull++;
      else this.failed.push(`${status} ${status === 200 ? "another's output" : shortOf(text)}`);
    } catch (error) {
      this.failed.push((error as NodeJS.ErrnoException).code ?? String(error));
    }
  }

  async #ask(marker: string): Promise<{ status: number; text: string }> {
    const { port, model, headers } = this.#options;
    const body = JSON.stringify({ input: marker, ...(model !== undefined && { model }) });
    const sending = request({
      host: "127.0.0.1",
      port,
      path: "/v1/inference",
      method: "POST",
      headers: { "content-type": "application/json", "content-length": Buffer.byteLength(body), ...headers },
      agent: this.#agent,
      signal: AbortSignal.timeout(ANSWER_MS),
    });
    sending.end(body);
    const [response] = (await once(sending, "response")) as [import("node:http").IncomingMessage];
    let text = "";
    for await (const chunk of response.setEncoding("utf8")) text += chunk as string;
    return { status: response.statusCode!, text };
  }
}

function shortOf(text: string): string {
  return text.replaceAll(/"request_id":"[^"]*",?/g, "").slice(0, 120);
}
