/**
 * `ferry serve --processes N` as its tests see it: one Ferry (`Part`) whose children are known by name and pid, and a
 * `Door` to each gateway process, so that a test decides which of them gets a request.
 *
 *   await using several = await Several.start(config, 2);
 *   const [a, b] = await several.doors();
 *   const id = await a!.accept({ input: "x" });
 *   await b!.result(id);
 *
 * The parent hands connections out in turn. Which gateway has one is read from /proc: the inode of its server end in
 * /proc/net/tcp, and the process that has that inode open.
 */
import assert from "node:assert/strict";
import { readdirSync, readFileSync, readlinkSync } from "node:fs";
import { once } from "node:events";
import { Agent, type IncomingMessage, request } from "node:http";
import { connect, type Socket } from "node:net";
import { setTimeout as pause } from "node:timers/promises";
import { startServer } from "../engine/redis-client/servers.ts";
import { brisk, fleetConfig, Part } from "./fleet.ts";
import { Answer, type Body, type Config, eventually, type Folder, type Headers, SOON_MS } from "./harness.ts";

export type Kind = "memory" | "redis";
export const KINDS: readonly Kind[] = ["memory", "redis"];

/** A config on this engine: memory with a data folder, or a Redis that goes with `stack`. */
export async function engineConfig(
  kind: Kind,
  stack: AsyncDisposableStack,
  folder: Folder,
  models: readonly object[],
  more: Config = {},
): Promise<Config> {
  if (kind === "memory") return { engine: { kind, dataDir: `${folder.path}/data` }, models, ...more };
  const redis = stack.use(await startServer());
  return fleetConfig({ url: redis.url, ...brisk }, models, more);
}

export function childrenOf(pid: number): number[] {
  try {
    const text = readFileSync(`/proc/${pid}/task/${pid}/children`, "utf8");
    return text.split(" ").filter(Boolean).map(Number);
  } catch {
    return [];
  }
}

/** A zombie is gone too: it waits for somebody to ask how it ended. */
export function isGone(pid: number): boolean {
  try {
    return / [ZX] /.test(readFileSync(`/proc/${pid}/stat`, "utf8").replace(/^.*\)/, ""));
  } catch {
    return true;
  }
}

/** The process among these that has the server end of a client's connection. */
function holderOf(socket: Socket, pids: readonly number[]): number | undefined {
  if (socket.remotePort === undefined || socket.localPort === undefined) return undefined;
  const port = (number: number): string => number.toString(16).toUpperCase().padStart(4, "0");
  const ends = `:${port(socket.remotePort)} \\w+:${port(socket.localPort)} `;
  const row = new RegExp(`^.*${ends}.*$`, "m").exec(readFileSync("/proc/net/tcp", "utf8"));
  const inode = row?.[0].trim().split(/\s+/)[9];
  const holds = (pid: number): boolean => {
    const folder = `/proc/${pid}/fd`;
    return readdirSync(folder).some((name) => {
      try {
        return readlinkSync(`${folder}/${name}`) === `socket:[${inode}]`;
      } catch {
        return false;
      }
    });
  };
  return inode === undefined ? undefined : pids.find((pid) => !isGone(pid) && holds(pid));
}

export class Several implements AsyncDisposable {
  readonly part: Part;
  readonly count: number;
  /** Requests that doors sent again because a gateway was slow. */
  repeated = 0;
  /** Opened, and not in use. */
  readonly #free = new Map<number, Agent[]>();
  /** Not closed by either end. */
  readonly #open = new Set<Agent>();
  #opening: Promise<void> = Promise.resolve();

  private constructor(part: Part, count: number) {
    this.part = part;
    this.count = count;
  }

  /** Resolves when it is ready and has a healthy worker. */
  static async start(config: Config, count = 2, more: readonly string[] = []): Promise<Several> {
    const part = await Part.start("all", config, ["--processes", String(count), ...more]);
    const several = new Several(part, count);
    try {
      const ready = await part.line(({ msg }) => msg === "ready");
      assert.equal(ready["processes"], count);
      assert.equal(childrenOf(part.pid).length, count + 1);
      await eventually(async () => (await part.health()).healthy_workers > 0);
      return several;
    } catch (error) {
      await several[Symbol.asyncDispose]();
      throw error;
    }
  }

  /** Of its run now: `core`, `gateway-1`. */
  pid(name: string): number {
    const again = this.part.lines.findLast(
      (line) => line.msg === "process ready" && line["process"] === name,
    );
    if (again !== undefined) return Number(again["pid"]);
    const at = name === "core" ? 0 : Number(name.split("-")[1]);
    const first = (this.#firstChildren ??= childrenOf(this.part.pid));
    return first[at]!;
  }
  #firstChildren: number[] | undefined;

  get core(): number {
    return this.pid("core");
  }

  get gateways(): number[] {
    return Array.from({ length: this.count }, (_, at) => this.pid(`gateway-${at + 1}`));
  }

  /** Ends a child and waits for its successor. */
  async restart(name: string, signal: NodeJS.Signals = "SIGKILL"): Promise<void> {
    const old = this.pid(name);
    process.kill(old, signal);
    await eventually(() => this.pid(name) !== old);
  }

  /** One for each gateway as it is now. */
  doors(): Door[] {
    return this.gateways.map((pid) => new Door(this, pid));
  }

  async take(pid: number): Promise<Agent> {
    for (;;) {
      const line = this.#free.get(pid)?.pop();
      if (line !== undefined) {
        if (this.#open.has(line)) return line;
        continue;
      }
      assert.ok(!isGone(pid), "this gateway process has ended");
      // One at a time, so that they are handed out in turn.
      this.#opening = this.#opening.then(() => this.#connect());
      await this.#opening;
    }
  }

  give(pid: number, line: Agent): void {
    const free = this.#free.get(pid);
    if (free === undefined) this.#free.set(pid, [line]);
    else free.push(line);
  }

  async #connect(): Promise<void> {
    const { hostname, port } = new URL(this.part.url);
    const socket = connect(Number(port), hostname);
    socket.on("error", () => {});
    await once(socket, "connect");
    let holder: number | undefined;
    // In a moment it passes from the parent to a gateway, which may die meanwhile.
    await eventually(() => socket.destroyed || (holder = holderOf(socket, this.gateways)) !== undefined);
    if (socket.destroyed) return;
    const line = new Agent({ keepAlive: true, maxSockets: 1 });
    line.createConnection = () => {
      if (socket.destroyed) throw new Error("the connection was closed by the other end");
      return socket;
    };
    this.#open.add(line);
    socket.on("close", () => this.#open.delete(line));
    this.give(holder!, line);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const line of this.#open) line.destroy();
    for (const pid of childrenOf(this.part.pid)) if (!isGone(pid)) process.kill(pid, "SIGCONT");
    await this.part[Symbol.asyncDispose]();
  }
}

/** Connections to one gateway process, each for one request at a time. */
export class Door {
  readonly pid: number;
  readonly #several: Several;

  constructor(several: Several, pid: number) {
    this.#several = several;
    this.pid = pid;
  }

  post(body: unknown, headers: Headers = {}, path = "/v1/inference", signal?: AbortSignal): Promise<Answer> {
    const text = typeof body === "string" || Buffer.isBuffer(body) ? body : JSON.stringify(body);
    return this.ask("POST", path, { "content-type": "application/json", ...headers }, text, signal);
  }

  get(path: string, headers: Headers = {}): Promise<Answer> {
    return this.ask("GET", path, headers);
  }

  delete(path: string, headers: Headers = {}): Promise<Answer> {
    return this.ask("DELETE", path, headers);
  }

  /** Sends a task that nobody waits for; its id. */
  async accept(body: unknown, headers: Headers = {}): Promise<string> {
    const answer = await this.post(body, { prefer: "respond-async", ...headers });
    assert.equal(answer.status, 202, answer.text);
    return answer.json.task_id!;
  }

  /** Long-polls once. */
  async result(id: string, headers: Headers = {}): Promise<Body> {
    const answer = await this.get(`/v1/result/${id}?wait=30`, headers);
    assert.equal(answer.status, 200, answer.text);
    return answer.json;
  }

  async ask(
    method: string,
    path: string,
    headers: Headers,
    body: string | Buffer = "",
    signal?: AbortSignal,
  ): Promise<Answer> {
    for (;;) {
      const agent = await this.#several.take(this.pid);
      const length = body === "" ? {} : { "content-length": String(Buffer.byteLength(body)) };
      const options = { method, headers: { ...headers, ...length }, agent, ...(signal && { signal }) };
      const sending = request(this.#several.part.url + path, options);
      sending.setTimeout(SOON_MS, () => sending.destroy(new Error(`no answer within ${SOON_MS} ms`)));
      sending.end(body);
      const [response] = (await once(sending, "response")) as [IncomingMessage];
      const chunks: Buffer[] = [];
      for await (const chunk of response) chunks.push(chunk as Buffer);
      if (response.headers.connection !== "close") this.#several.give(this.pid, agent);
      const answer = new Answer(
        response.statusCode!,
        response.headers,
        Buffer.concat(chunks).toString("utf8"),
      );
      if (!answer.isFull) return answer;
      this.#several.repeated++;
      await pause(answer.json.retry_after_ms);
    }
  }
}

/** The sum of a counter over the rows with all of these labels. */
export async function counter(part: Part, name: string, ...labels: readonly string[]): Promise<number> {
  const { text } = await part.admin("/metrics");
  const rows = [...text.matchAll(new RegExp(`^${name}(?:\\{([^}]*)\\})? (\\S+)$`, "gm"))];
  return rows
    .filter(([, has = ""]) => labels.every((label) => has.includes(label)))
    .reduce((sum, [, , count]) => sum + Number(count), 0);
}
