/**
 * Real Redis servers for tests: one, a pair, or a cluster of three primaries with a replica each.
 *
 *   await using server = await startServer({ maxmemory: "10mb" });
 *   await server.cli("SET", "a", "1");
 *   await server.kill();       // kill -9
 *   await server.restart();    // same port, same data
 *
 * Every server has its own folder and ports (guard.ts), writes an append-only file that it syncs once a
 * second, and knows DEBUG. `settings` are lines of redis.conf and win over ours. With `requirepass`, the
 * password is also what replicas, `cli` and `url` use. Servers end with the process that started them, at
 * the latest.
 *
 * Some things Redis does only at its own next turn (gossip, failover, a replica's next try: up to a second
 * each). All that is here waits for what Redis reports, never for a length of time.
 */
import { HOST, startServer, until, type Server, type Settings } from "./server.ts";

export { Server, startServer, until, type Settings } from "./server.ts";

const SLOTS = 16_384;
const PRIMARIES = 3;
/** Keys per MIGRATE: few, so that a moving slot is in two halves for a while. */
const KEYS_PER_STEP = 10;
/** Flags of a node that another one does not know, or does not hear. */
const TROUBLE: ReadonlySet<string> = new Set(["handshake", "noaddr", "fail?", "fail"]);

export interface Pair extends AsyncDisposable {
  readonly primary: Server;
  readonly replica: Server;
  /** Makes the replica a primary, also after a restart. The old primary is left as it is: dead, or not. */
  promote(): Promise<void>;
}

/** Resolves when the replica has its first copy: 120 ms. */
export async function startPair(settings: Settings = {}): Promise<Pair> {
  await using started = new AsyncDisposableStack();
  const [primary, replica] = await startAll(started, 2, settings);
  await replica!.cli("REPLICAOF", HOST, String(primary!.port));
  await replica!.cli("CONFIG", "REWRITE");
  await until(() => isOnline(primary!, replica!), "the replica is online");
  const promote = async (): Promise<void> => {
    await replica!.cli("REPLICAOF", "NO", "ONE");
    await replica!.cli("CONFIG", "REWRITE");
  };
  const servers = started.move();
  return {
    primary: primary!,
    replica: replica!,
    promote,
    [Symbol.asyncDispose]: () => servers.disposeAsync(),
  };
}

/** Starts `count` servers at once; they go with `stack`, also when one of them does not start. */
async function startAll(stack: AsyncDisposableStack, count: number, settings: Settings): Promise<Server[]> {
  const starts = await Promise.allSettled(Array.from({ length: count }, () => startServer(settings)));
  const servers = starts.filter((start) => start.status === "fulfilled").map(({ value }) => stack.use(value));
  const failure = starts.find((start) => start.status === "rejected");
  if (failure !== undefined) throw failure.reason;
  return servers;
}

/**
 * Both ends of the replication say that it runs, and the replica's own file has the copy too. Before that, a
 * replica that is killed comes back empty.
 */
async function isOnline(primary: Server, replica: Server): Promise<boolean> {
  const sent = await primary.cli("INFO", "replication");
  const got = await replica.cli("INFO", "replication");
  const file = await replica.cli("INFO", "persistence");
  return (
    sent.split("\r\n").some((line) => line.includes(`port=${replica.port},state=online`)) &&
    got.includes("master_link_status:up") &&
    got.includes("master_sync_in_progress:0") &&
    file.includes("aof_rewrite_in_progress:0") &&
    file.includes("aof_rewrite_scheduled:0")
  );
}

/** The slot of a key, or of the hash tag alone: CRC16 (XMODEM) modulo 16384. */
export function slotOf(tag: string): number {
  const hashed = /^[^{]*\{([^}]+)\}/.exec(tag)?.[1] ?? tag;
  let crc = 0;
  for (const byte of Buffer.from(hashed)) {
    crc ^= byte << 8;
    for (let bit = 0; bit < 8; bit++) crc = ((crc & 0x8000) === 0 ? crc << 1 : (crc << 1) ^ 0x1021) & 0xffff;
  }
  return crc % SLOTS;
}

/** What one node says about one node: a line of CLUSTER NODES. */
interface Line {
  readonly id: string;
  readonly port: number;
  readonly flags: readonly string[];
  readonly primaryId: string;
  readonly epoch: number;
  readonly linked: boolean;
  /** First and last of each range; slots on the move are with the node that still has them. */
  readonly ranges: readonly (readonly [number, number])[];
}

async function viewOf(server: Server): Promise<Line[]> {
  const text = await server.cli("CLUSTER", "NODES");
  return text
    .trim()
    .split("\n")
    .map((line) => {
      const [id, address, flags, primaryId, , , epoch, link, ...slots] = line.split(" ");
      const owned = slots.filter((slot) => !slot.startsWith("["));
      return {
        id: id!,
        port: Number(/:(\d+)@/.exec(address!)![1]),
        flags: flags!.split(","),
        primaryId: primaryId!,
        epoch: Number(epoch),
        linked: link === "connected",
        ranges: owned.map((slot) => [Number(slot.split("-")[0]), Number(slot.split("-").at(-1))] as const),
      };
    });
}

function owns(line: Line, slot: number): boolean {
  return line.ranges.some(([first, last]) => first <= slot && slot <= last);
}

/**
 * Who is who is read from every node that answers, and where they differ, the line with the higher epoch is
 * right: Redis's own rule. So a primary that is dead or paused stays one until it is replaced, and is none
 * any more from then on, whatever it believes itself.
 */
export class Cluster implements AsyncDisposable {
  readonly servers: readonly Server[];
  readonly nodes: readonly { readonly host: string; readonly port: number }[];

  constructor(servers: readonly Server[]) {
    this.servers = servers;
    this.nodes = servers.map(({ port }) => ({ host: HOST, port }));
  }

  /** Those that own slots, in the order of `servers`. */
  async primaries(): Promise<Server[]> {
    const lines = await this.#lines();
    const owners = new Set<number>();
    for (let slot = 0; slot < SLOTS; slot++) {
      const owner = lines.find((line) => owns(line, slot));
      if (owner !== undefined) owners.add(owner.port);
    }
    return this.servers.filter(({ port }) => owners.has(port));
  }

  async primaryOf(slot: number): Promise<Server> {
    const owner = (await this.#lines()).find((line) => owns(line, slot));
    if (owner === undefined) throw new Error(`slot ${slot} has no primary`);
    return this.#at(owner);
  }

  /** Rejects while it has none, as after a failover, until the old primary is back. */
  async replicaOf(primary: Server): Promise<Server> {
    const id = await this.#idOf(primary);
    for (const server of this.#answering()) {
      const self = (await viewOf(server)).find(({ flags }) => flags.includes("myself"))!;
      if (self.primaryId === id) return server;
    }
    throw new Error(`the primary on port ${primary.port} has no replica that runs`);
  }

  /**
   * Moves a slot while clients use it. A client meets ASK and TRYAGAIN on the way, and MOVED at the end.
   * `eachStep` runs after every few keys, with the slot in two halves. Resolves when all nodes know.
   */
  async moveSlot(slot: number, to: Server, eachStep?: () => void | Promise<void>): Promise<void> {
    const from = await this.primaryOf(slot);
    if (from === to) return;
    const [fromId, toId] = [await this.#idOf(from), await this.#idOf(to)];
    const name = String(slot);
    // Right after a failover, one of the two may not know yet that the other is a primary.
    const set = async (node: Server, ...words: string[]): Promise<boolean> =>
      (await node.cli("CLUSTER", "SETSLOT", name, ...words)) === "OK";
    await until(() => set(to, "IMPORTING", fromId), `slot ${slot} can be imported`);
    await until(() => set(from, "MIGRATING", toId), `slot ${slot} can be migrated`);
    const login = to.password === "" ? [] : ["AUTH", to.password];
    const target = [HOST, String(to.port), "", "0", "5000"];
    for (;;) {
      const keys = (await from.ask("CLUSTER", "GETKEYSINSLOT", name, String(KEYS_PER_STEP))) as string[];
      if (keys.length === 0) break;
      await from.cli("MIGRATE", ...target, ...login, "KEYS", ...keys);
      await eachStep?.();
    }
    // The new owner first: were the old one told first, nobody would own the slot for a moment.
    const others = (await this.primaries()).filter((server) => server !== to && server !== from);
    for (const server of [to, from, ...others]) await set(server, "NODE", toId);
    await this.until(() => this.#allSay(slot, toId), `every node knows who owns slot ${slot}`);
  }

  /**
   * All nodes run and hear each other, say that the cluster is ok and agree on who is whose replica, and
   * every replica has its copy.
   */
  async isWell(): Promise<boolean> {
    if (!this.servers.every(({ answers }) => answers)) return false;
    const views = await Promise.all(this.servers.map(viewOf));
    if (!views.every(isComplete)) return false;
    const roles = (view: readonly Line[]): string =>
      view
        .map(({ id, primaryId, ranges }) => `${id} ${primaryId} ${ranges.join(" ")}`)
        .sort()
        .join();
    if (new Set(views.map(roles)).size > 1) return false;
    const states = await Promise.all(this.servers.map((server) => server.cli("CLUSTER", "INFO")));
    if (!states.every((state) => state.includes("cluster_state:ok"))) return false;
    const replicas = views[0]!.filter(({ primaryId }) => primaryId !== "-");
    const online = replicas.map((line) => {
      const primary = views[0]!.find(({ id }) => id === line.primaryId)!;
      return isOnline(this.#at(primary), this.#at(line));
    });
    return replicas.length === PRIMARIES && (await Promise.all(online)).every(Boolean);
  }

  until(check: () => boolean | Promise<boolean>, what?: string, limitMs?: number): Promise<void> {
    return until(check, what, limitMs);
  }

  async stop(): Promise<void> {
    await Promise.all(this.servers.map((server) => server[Symbol.asyncDispose]()));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop();
  }

  /** All lines of all views, the highest epoch first. */
  async #lines(): Promise<Line[]> {
    const views = await Promise.allSettled(this.#answering().map(viewOf));
    return views
      .flatMap((view) => (view.status === "fulfilled" ? view.value : []))
      .sort((a, b) => b.epoch - a.epoch);
  }

  #answering(): Server[] {
    return this.servers.filter(({ answers }) => answers);
  }

  #at(line: Line): Server {
    return this.servers.find(({ port }) => port === line.port)!;
  }

  async #idOf(server: Server): Promise<string> {
    const line = (await this.#lines()).find(({ port }) => port === server.port);
    if (line === undefined) throw new Error(`no node knows the server on port ${server.port}`);
    return line.id;
  }

  async #allSay(slot: number, id: string): Promise<boolean> {
    const views = await Promise.all(this.#answering().map(viewOf));
    return views.every((view) => view.find((line) => owns(line, slot))?.id === id);
  }
}

/** Resolves when the cluster `isWell`: 2.1 s, of which Redis waits 2 s before a new cluster is ok. */
export async function startCluster(settings: Settings = {}): Promise<Cluster> {
  await using started = new AsyncDisposableStack();
  const servers = await startAll(started, 2 * PRIMARIES, {
    "cluster-enabled": "yes",
    "cluster-node-timeout": "3000",
    "cluster-require-full-coverage": "no",
    ...settings,
  });
  const primaries = servers.slice(0, PRIMARIES);
  // With the same epoch, two primaries would first have to find out that they collide.
  await Promise.all(servers.map((node, at) => node.cli("CLUSTER", "SET-CONFIG-EPOCH", String(at + 1))));
  const share = (at: number): number => Math.ceil((at * SLOTS) / PRIMARIES);
  await Promise.all(
    primaries.map((node, at) =>
      node.cli("CLUSTER", "ADDSLOTSRANGE", String(share(at)), String(share(at + 1) - 1)),
    ),
  );
  // Everybody meets everybody: 0.24 s. With gossip from the first one alone: 1.1 s.
  for (const [at, node] of servers.entries()) {
    for (const { port, busPort } of servers.slice(at + 1))
      await node.cli("CLUSTER", "MEET", HOST, String(port), String(busPort));
  }
  await until(async () => (await Promise.all(servers.map(viewOf))).every(isComplete), "the nodes have met");
  const ids = await Promise.all(primaries.map((node) => node.cli("CLUSTER", "MYID")));
  const replicas = servers.slice(PRIMARIES);
  await Promise.all(replicas.map((node, at) => node.cli("CLUSTER", "REPLICATE", ids[at]!)));
  const cluster = new Cluster(servers);
  await until(() => cluster.isWell(), "the cluster is well");
  started.move();
  return cluster;
}

/** This node has met all others, and hears them. */
function isComplete(view: readonly Line[]): boolean {
  const heard = view.filter(({ flags, linked }) => linked && !flags.some((flag) => TROUBLE.has(flag)));
  return heard.length === view.length && heard.length === 2 * PRIMARIES;
}
