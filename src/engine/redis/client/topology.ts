/**
 * Parses what Redis servers report about themselves and their Cluster. A shard is a hash tag; its slot is CRC16(tag)
 * mod 16384 (CRC-16/XMODEM), and the server of that slot serves the shard. When Cluster views differ, the highest epoch
 * is the newest, and a server with `cluster_state:ok` is in the majority.
 */
import { addressOf, RedisError } from "./link.ts";
import type { Connect, RedisLink, RedisReply } from "./link.ts";

export interface RedisAddress {
  readonly host: string;
  readonly port: number;
}

/** See `nodes.ts`. */
export type WriteDurability = "auto" | "replica" | "local";

export interface NodesOptions {
  /** redis://user:password@host:port/db, rediss:// for TLS. */
  readonly url?: string | undefined;
  /** Seeds of a Cluster, or a primary and its replicas in any order. */
  readonly nodes?: readonly RedisAddress[] | undefined;
  readonly username?: string | undefined;
  readonly password?: string | undefined;
  readonly tls?: boolean | undefined;
  /** Every key of shard i contains {tags[i]}. */
  readonly tags: readonly string[];
  /** Default: commandTimeoutMs. */
  readonly connectTimeoutMs?: number;
  readonly commandTimeoutMs: number;
  /** For CLIENT LIST. */
  readonly name: string;
  readonly durability: WriteDurability;
  readonly waitTimeoutMs: number;
  /** For jitter, in [0, 1). Default: seeded by the time. */
  readonly random?: (() => number) | undefined;
  /** Default: a real connection. */
  readonly connect?: Connect | undefined;
}

export interface ServerFacts {
  readonly address: string;
  readonly version: string;
  readonly cluster: boolean;
  readonly primary: boolean;
  /** Connected and past their initial sync. */
  readonly replicas: number;
  /** Those heard of within `MAX_LAG_S`: each may be promoted without losing what it confirmed. */
  readonly inSync: number;
  readonly offset: number;
}

export interface ClusterView {
  readonly ok: boolean;
  readonly epoch: number;
  readonly ranges: readonly SlotRange[];
  /** Every named server, primaries and replicas. */
  readonly members: readonly RedisAddress[];
}

export interface SlotRange {
  readonly from: number;
  readonly to: number;
  readonly primary: RedisAddress;
}

export interface Endpoints {
  readonly seeds: readonly RedisAddress[];
  readonly tls: boolean;
  readonly username: string | undefined;
  readonly password: string | undefined;
  readonly db: number;
}

const SLOTS = 16_384;
const MAX_LAG_S = 2; // a replica reports to its primary each second

export function slotOf(tag: string): number {
  let crc = 0;
  for (const byte of Buffer.from(tag)) {
    crc ^= byte << 8;
    for (let bit = 0; bit < 8; bit++) crc = (crc & 0x8000 ? (crc << 1) ^ 0x1021 : crc << 1) & 0xffff;
  }
  return crc % SLOTS;
}

/** Endpoints from `url` or `nodes`. Throws one line that names the mistake, never the password. */
export function endpointsOf(
  options: Pick<NodesOptions, "url" | "nodes" | "username" | "password" | "tls">,
): Endpoints {
  const { url, nodes = [], username, password, tls = false } = options;
  if (url === undefined) {
    if (nodes.length === 0) throw new Error("no Redis server is named: set the url or the nodes");
    return { seeds: nodes, tls, username, password, db: 0 };
  }
  const parsed = URL.parse(url);
  if (parsed === null || !/^rediss?:$/.test(parsed.protocol) || parsed.hostname === "")
    throw new Error("the Redis url must look like redis://user:password@host:6379/0, rediss:// for TLS");
  const db = Number(parsed.pathname.slice(1) || 0);
  if (!Number.isInteger(db) || db < 0)
    throw new Error(`the Redis url ends with "${parsed.pathname}"; only a database number may stand there`);
  const seed = { host: parsed.hostname.replace(/^\[(.*)\]$/, "$1"), port: Number(parsed.port || 6379) };
  return {
    seeds: [seed, ...nodes],
    tls: tls || parsed.protocol === "rediss:",
    username: username ?? (decodeURIComponent(parsed.username) || undefined),
    password: password ?? (decodeURIComponent(parsed.password) || undefined),
    db,
  };
}

/** Without `section`: everything in `ServerFacts`; "replication" leaves the version empty. */
export async function askFacts(link: RedisLink, section?: "replication"): Promise<ServerFacts> {
  const reply = await link
    .call(section === undefined ? ["INFO"] : ["INFO", section])
    .catch((error: Error) => {
      const denied = error instanceof RedisError && error.code === "NOPERM";
      throw denied ? new Error(`redis ${link.address}: our user may not run INFO; grant it +info`) : error;
    });
  const info = readInfo(String(reply));
  let replicas = 0;
  let inSync = 0;
  for (const [name, value] of info) {
    if (!/^slave\d+$/.test(name) || !value.includes("state=online")) continue;
    replicas++;
    if (Number(/\blag=(\d+)/.exec(value)?.[1] ?? 0) <= MAX_LAG_S) inSync++;
  }
  return {
    address: link.address,
    version: info.get("redis_version") ?? "",
    cluster: info.get("cluster_enabled") === "1",
    primary: info.get("role") === "master",
    replicas,
    inSync,
    offset: Number(info.get("master_repl_offset") ?? 0),
  };
}

export async function askCluster(link: RedisLink, host: string): Promise<ClusterView> {
  const [info, slots] = await link.callAll([
    ["CLUSTER", "INFO"],
    ["CLUSTER", "SLOTS"],
  ]);
  if (info instanceof RedisError) throw info;
  if (slots instanceof RedisError) throw slots;
  const facts = readInfo(String(info));
  return {
    ok: facts.get("cluster_state") === "ok",
    epoch: Number(facts.get("cluster_current_epoch") ?? 0),
    ...readSlots(slots as RedisReply, host),
  };
}

/** CLUSTER SLOTS: [from, to, [host, port, id …], replica …] each. An empty host is the one asked. */
export function readSlots(reply: RedisReply, askedHost: string): Pick<ClusterView, "ranges" | "members"> {
  const ranges: SlotRange[] = [];
  const members = new Map<string, RedisAddress>();
  for (const row of reply as RedisReply[][]) {
    const [from, to, ...servers] = row;
    const addresses = (servers as RedisReply[][]).map(([host, port]) => {
      const said = host === null ? "" : String(host);
      return { host: said === "" || said === "?" ? askedHost : said, port: Number(port) };
    });
    for (const address of addresses) members.set(addressOf(address.host, address.port), address);
    if (addresses[0] !== undefined)
      ranges.push({ from: Number(from), to: Number(to), primary: addresses[0] });
  }
  return { ranges, members: [...members.values()] };
}

export function primaryOf(view: ClusterView, slot: number): RedisAddress | undefined {
  return view.ranges.find(({ from, to }) => from <= slot && slot <= to)?.primary;
}

/** From the majority first, then newer. */
export function better(view: ClusterView, other: ClusterView | undefined): boolean {
  if (other === undefined) return true;
  return view.ok === other.ok ? view.epoch > other.epoch : view.ok;
}

/** "MOVED 3999 host:port" or "ASK 3999 host:port"; an empty host is the one asked. */
export function targetOf(redirect: RedisError, askedHost: string): RedisAddress {
  const where = redirect.message.split(" ")[2] ?? "";
  const colon = where.lastIndexOf(":");
  return { host: where.slice(0, colon) || askedHost, port: Number(where.slice(colon + 1)) };
}

/**
 * Chooses the primary outside a Cluster. After a promotion a restarted old one may also claim the role; then the one in
 * use stays, or else the one with replicas, or with the longer history.
 */
export function choosePrimary(
  servers: readonly ServerFacts[],
  inUse: string | undefined,
): ServerFacts | undefined {
  const primaries = servers.filter(({ primary }) => primary);
  return (
    primaries.find(({ address }) => address === inUse) ??
    primaries.sort((a, b) => b.replicas - a.replicas || b.offset - a.offset).at(0)
  );
}

export function readInfo(text: string): Map<string, string> {
  const facts = new Map<string, string>();
  for (const line of text.split(/\r?\n/)) {
    const colon = line.indexOf(":");
    if (colon > 0) facts.set(line.slice(0, colon), line.slice(colon + 1));
  }
  return facts;
}
