/**
 * Ferry on Redis, under load: a Redis server of our own, one batcher and some gateways, each a process.
 *
 * Redis runs as docs/operations.md says: append-only file, synced every second, no snapshots, and not
 * rewritten before it has 4 GB: what a queue writes is soon gone again, and rewriting costs as much CPU as
 * serving. It has no replica, so "accepted" means that this one
 * server has the task. Its files lie in the benchmark's folder and go with it.
 *
 * The batcher is up before the gateways: their first request finds its workers.
 */
import { once } from "node:events";
import { mkdtempSync, writeFileSync } from "node:fs";
import { connect } from "node:net";
import { join } from "node:path";
import { setTimeout as pause } from "node:timers/promises";
import { Child } from "./process.ts";
import { FerryServer, freePorts, host, type FerrySetup } from "./server.ts";

const readyTimeoutMs = 10_000;
const replyTimeoutMs = 5000;
const clusterSlots = 16_384;

export class RedisServer implements AsyncDisposable {
  readonly pid: number;
  readonly url: string;
  readonly port: number;
  readonly #child: Child;

  private constructor(child: Child, port: number) {
    this.#child = child;
    this.port = port;
    this.pid = child.pid;
    this.url = `redis://${host}:${port}`;
  }

  /** `extra`: further lines of redis.conf; they win over ours. */
  static async start(dir: string, extra: readonly string[] = []): Promise<RedisServer> {
    const [port] = await freePorts(1);
    const folder = mkdtempSync(join(dir, "redis-"));
    const file = join(folder, "redis.conf");
    const settings = [
      `bind ${host}`,
      `port ${port}`,
      `dir "${folder}"`,
      `appendonly ${process.env["BENCH_REDIS_AOF"] ?? "yes"}`,
      "appendfsync everysec",
      'save ""',
      "auto-aof-rewrite-min-size 4gb",
      ...extra,
    ];
    writeFileSync(file, `${settings.join("\n")}\n`);
    const child = new Child(file, [], { program: "redis-server" });
    try {
      await child.line((line) => line.includes("Ready to accept connections"), readyTimeoutMs);
    } catch (error) {
      await child[Symbol.asyncDispose]();
      throw error;
    }
    return new RedisServer(child, port!);
  }

  info(section = "default"): Promise<string> {
    return this.ask(`INFO ${section}`);
  }

  /** Sends one inline command. Each has its own connection: after QUIT its end is the end of the reply. */
  async ask(command: string): Promise<string> {
    const socket = connect(this.port, host);
    const signal = AbortSignal.timeout(replyTimeoutMs);
    try {
      socket.write(`${command}\r\nQUIT\r\n`);
      let text = "";
      socket.setEncoding("utf8").on("data", (chunk: string) => (text += chunk));
      await once(socket, "end", { signal });
      if (text.startsWith("-")) throw new Error(`${command}: ${text.slice(1).split("\r\n", 1)[0]}`);
      return text;
    } finally {
      socket.destroy();
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#child[Symbol.asyncDispose]();
  }
}

/** A Cluster of primaries without replicas, each with an equal part of the slots. About two seconds to start. */
export class RedisCluster implements AsyncDisposable {
  readonly servers: readonly RedisServer[];
  readonly #started: AsyncDisposableStack;

  private constructor(servers: readonly RedisServer[], started: AsyncDisposableStack) {
    this.servers = servers;
    this.#started = started;
  }

  static async start(dir: string, count: number, extra: readonly string[] = []): Promise<RedisCluster> {
    await using started = new AsyncDisposableStack();
    const servers: RedisServer[] = [];
    const busPorts = await freePorts(count);
    for (const busPort of busPorts) {
      const settings = ["cluster-enabled yes", `cluster-port ${busPort}`, ...extra];
      servers.push(started.use(await RedisServer.start(dir, settings)));
    }
    for (const [at, server] of servers.entries()) {
      const first = Math.round((at * clusterSlots) / count);
      const last = Math.round(((at + 1) * clusterSlots) / count) - 1;
      await server.ask(`CLUSTER SET-CONFIG-EPOCH ${at + 1}`);
      await server.ask(`CLUSTER ADDSLOTSRANGE ${first} ${last}`);
      if (at > 0) await server.ask(`CLUSTER MEET ${host} ${servers[0]!.port} ${busPorts[0]}`);
    }
    const until = performance.now() + readyTimeoutMs;
    while (!(await isUp(servers))) {
      if (performance.now() > until) throw new Error(`the Cluster was not up after ${readyTimeoutMs} ms`);
      await pause(50);
    }
    return new RedisCluster(servers, started.move());
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#started.disposeAsync();
  }
}

/** Every server knows every other one and has all slots covered. */
async function isUp(servers: readonly RedisServer[]): Promise<boolean> {
  const states = await Promise.all(servers.map((server) => server.ask("CLUSTER INFO")));
  return states.every(
    (text) => text.includes("cluster_state:ok") && text.includes(`cluster_known_nodes:${servers.length}\r\n`),
  );
}

export class Fleet implements AsyncDisposable {
  readonly redis: RedisServer;
  readonly batcher: FerryServer;
  readonly gateways: readonly FerryServer[];
  readonly #started: AsyncDisposableStack;

  private constructor(
    redis: RedisServer,
    batcher: FerryServer,
    gateways: readonly FerryServer[],
    started: AsyncDisposableStack,
  ) {
    this.redis = redis;
    this.batcher = batcher;
    this.gateways = gateways;
    this.#started = started;
  }

  /** Every process gets `setup`; nothing is pinned unless it says so. */
  static async start(setup: Omit<FerrySetup, "role" | "processes">, gateways = 1): Promise<Fleet> {
    await using started = new AsyncDisposableStack();
    const redis = started.use(await RedisServer.start(setup.dir));
    const settings = { ...setup.settings, engine: { kind: "redis", url: redis.url } };
    const batcher = started.use(await FerryServer.start({ ...setup, settings, role: "batcher" }));
    const all: FerryServer[] = [];
    for (let at = 0; at < gateways; at++) {
      all.push(started.use(await FerryServer.start({ ...setup, settings, role: "gateway" })));
    }
    return new Fleet(redis, batcher, all, started.move());
  }

  get gateway(): FerryServer {
    return this.gateways[0]!;
  }

  /** Who works behind a gateway, for `LoadOptions`. */
  get behind(): { readonly redis: number; readonly batcher: number } {
    return { redis: this.redis.pid, batcher: this.batcher.pid };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#started.disposeAsync();
  }
}
