/**
 * The boot check: is every primary behind `engine.url` or `engine.nodes` configured so that an accepted task stays?
 *
 *   every seed is visited ──► a Cluster: every primary in its newest view
 *                        └──► no Cluster: the seed that is a primary (of two, the one with more replicas)
 *
 * Only primaries are judged; a seed that does not answer is a warning while others do. `refuse`: what would break the
 * promise, and the start ends there; `warn`: what an operator should know. Each line says what is, why it matters, and
 * the command that changes it. INFO gives version, role, replicas, memory and persistence; CONFIG GET the rest (save
 * points, min-replicas-to-write), which managed services and strict ACLs refuse: then INFO has to do. Nothing is
 * written. A visit takes at most `connectTimeoutMs` and a few times `commandTimeoutMs`.
 */
import type { Clock } from "../../../app/clock.ts";
import { addressOf, RedisError, RedisLink } from "./link.ts";
import { askCluster, better, endpointsOf, readInfo } from "./topology.ts";
import type { RedisAddress, ClusterView, Endpoints, NodesOptions } from "./topology.ts";

export type ProbeOptions = Pick<
  NodesOptions,
  "url" | "nodes" | "username" | "password" | "tls" | "durability" | "connectTimeoutMs" | "commandTimeoutMs"
>;

export interface CheckFacts {
  readonly product: "redis" | "valkey" | "unknown";
  /** "" if unknown. */
  readonly version: string;
  readonly role: "primary" | "replica" | "unknown";
  readonly cluster: boolean;
  /** Connected, and past their initial sync. */
  readonly replicas: number;
  /** 0: writes never depend on replicas; undefined: unknown. */
  readonly minReplicasToWrite: number | undefined;
  readonly persistence: "aof" | "snapshots" | "none" | "unknown";
  /** 0: no bound. */
  readonly maxMemoryBytes: number;
  readonly usedMemoryBytes: number;
  /** "" if unknown. */
  readonly maxMemoryPolicy: string;
  /** What "accepted" means now: a replica has the task too, or this server alone. */
  readonly durability: "replica" | "local";
}

export interface Probe {
  /** Reasons not to start, one line each. */
  readonly refuse: readonly string[];
  readonly warn: readonly string[];
  readonly servers: readonly { readonly address: string; readonly facts: CheckFacts }[];
}

type Visit = { readonly address: string } & (
  | { readonly check: ServerCheck; readonly view: ClusterView | undefined }
  | { readonly check?: undefined; readonly why: string }
);
type Answered = Extract<Visit, { readonly check: ServerCheck }>;

export async function probeRedis(options: ProbeOptions, clock: Clock): Promise<Probe> {
  const endpoints = endpointsOf(options);
  const visitAll = (addresses: readonly RedisAddress[]): Promise<Visit[]> =>
    Promise.all(addresses.map((each) => visit(each, endpoints, options, clock)));
  const visits = await visitAll(endpoints.seeds);
  const answered = visits.filter(isAnswered);
  const silent = reasons(visits);
  if (answered.length === 0) return { refuse: silent.map(toDo), warn: [], servers: [] };

  let view: ClusterView | undefined;
  for (const each of answered) if (each.view !== undefined && better(each.view, view)) view = each.view;
  if (view === undefined) return alone(answered, silent);
  const named = new Map(view.ranges.map(({ primary }) => [addressOf(primary.host, primary.port), primary]));
  // No node knows an owner of any slot: its own message says what is wrong.
  if (named.size === 0) return report(answered.slice(0, 1), silent);
  const known = new Set(visits.map(({ address }) => address));
  const more = await visitAll([...named].flatMap(([address, each]) => (known.has(address) ? [] : [each])));
  const primaries = [...visits, ...more].filter(({ address }) => named.has(address));
  const lost = reasons(primaries);
  const told = report(
    primaries.filter(isAnswered),
    silent.filter((why) => !lost.includes(why)),
  );
  return { ...told, refuse: [...lost.map(toDo), ...told.refuse] };
}

/** Outside a Cluster one of the servers must be the primary. */
function alone(answered: readonly Answered[], silent: readonly string[]): Probe {
  const [first, second] = answered
    .filter(({ check }) => check.facts.role !== "replica")
    .sort((a, b) => b.check.facts.replicas - a.check.facts.replicas);
  // A replica's refusal names the primary to configure.
  if (first === undefined) return report(answered.slice(0, 1), silent);
  const told = report([first], silent);
  if (second === undefined) return told;
  const twice =
    `redis ${first.address} and ${second.address} both call themselves primary, and share nothing; ` +
    `make one the other's replica: REPLICAOF HOST PORT, at the one whose data may go`;
  return { ...told, warn: [...told.warn, twice] };
}

function report(checked: readonly Answered[], silent: readonly string[]): Probe {
  return {
    refuse: checked.flatMap(({ check }) => check.refuse),
    warn: [...silent, ...checked.flatMap(({ check }) => check.warn)],
    servers: checked.map(({ address, check }) => ({ address, facts: check.facts })),
  };
}

async function visit(
  { host, port }: RedisAddress,
  { tls, username, password, db }: Endpoints,
  { durability, commandTimeoutMs, connectTimeoutMs = commandTimeoutMs }: ProbeOptions,
  clock: Clock,
): Promise<Visit> {
  const address = addressOf(host, port);
  let link: RedisLink | undefined;
  try {
    const login = { tls, username, password, db };
    const options = { ...login, host, port, connectTimeoutMs, commandTimeoutMs, name: "ferry-check" };
    const asked = (link = await RedisLink.connect(options, clock));
    const check = await checkServer((command) => asked.call(command), { address, durability });
    const view = check.facts.cluster ? await askCluster(link, host) : undefined;
    return { address, check, view };
  } catch (error) {
    const { message } = error as Error;
    return { address, why: error instanceof RedisError ? `redis ${address}: ${message}` : message };
  } finally {
    link?.close();
  }
}

function isAnswered(visit: Visit): visit is Answered {
  return visit.check !== undefined;
}

function reasons(visits: readonly Visit[]): string[] {
  return visits.flatMap((visit) => (isAnswered(visit) ? [] : [visit.why]));
}

function toDo(why: string): string {
  return `${why}; check that it runs and that engine.url or engine.nodes is right`;
}

// ── One server ───────────────────────────────────────────────────────────────────────────────────────

export type ProbeReply = string | number | null | Buffer | Error | readonly ProbeReply[];
/** An error reply may be the value, or the reason of the rejection. */
export type ProbeCommand = (command: readonly string[]) => Promise<ProbeReply>;

export interface CheckOptions {
  /** `host:port`, for the messages. */
  readonly address: string;
  readonly durability: "auto" | "replica" | "local";
}

export interface ServerCheck {
  readonly refuse: readonly string[];
  readonly warn: readonly string[];
  readonly facts: CheckFacts;
}

const FULL_SHARE = 0.8; // above this share of maxmemory a burst could fill the rest
const SAFE_SHARE = 0.6; // a copy for AOF rewrite or replication may need as much again while writes go on
const ASKED = ["maxmemory", "maxmemory-policy", "save", "appendonly", "min-replicas-to-write"];
const OLDEST = { redis: [7, 0], valkey: [7, 2] } as const;

type Fields = ReadonlyMap<string, string>;

interface Seen {
  readonly facts: CheckFacts;
  readonly info: Fields;
  readonly boundKnown: boolean; // whether maxmemory is known, by CONFIG GET or INFO
  readonly options: CheckOptions;
  readonly refuse: string[];
  readonly warn: string[];
}

export async function checkServer(ask: ProbeCommand, options: CheckOptions): Promise<ServerCheck> {
  const told = await tell(ask, ["INFO"]);
  const info = told instanceof Error ? new Map<string, string>() : readInfo(textOf(told));
  const settings = told instanceof Error ? info : settingsOf(await tell(ask, ["CONFIG", "GET", ...ASKED]));
  const facts = factsOf(info, settings, options);
  const boundKnown = settings.has("maxmemory") || info.has("maxmemory");
  const seen: Seen = { facts, info, boundKnown, options, refuse: [], warn: [] };
  if (told instanceof Error) seen.refuse.push(await unanswered(told, ask));
  else {
    checkIdentity(seen);
    if (facts.cluster) checkCluster(seen, await tell(ask, ["CLUSTER", "INFO"]));
    checkMemory(seen);
    checkPersistence(seen);
    if (facts.role !== "replica") checkReplicas(seen);
  }
  const named = (lines: readonly string[]) => lines.map((line) => `redis ${options.address}: ${line}`);
  return { refuse: named(seen.refuse), warn: named(seen.warn), facts };
}

/** INFO was refused: nothing is known, and Ferry needs it as long as it runs. */
async function unanswered(why: Error, ask: ProbeCommand): Promise<string> {
  if (why.message.startsWith("NOAUTH"))
    return "it wants a password; write one in engine.url (redis://:PASSWORD@HOST) or engine.password";
  if (!why.message.startsWith("NOPERM")) return `INFO was not answered: ${why.message}`;
  const user = await tell(ask, ["ACL", "WHOAMI"]);
  const name = user instanceof Error ? "USER" : textOf(user);
  return (
    `its user ${name} may not run INFO, which tells Ferry whether accepted tasks are safe; ` +
    `run ACL SETUSER ${name} +info`
  );
}

function checkIdentity({ facts: { product, version, role }, info, options, refuse }: Seen): void {
  const wanted = "Ferry needs Redis 7.0 or newer, or Valkey 7.2 or newer";
  if (product === "unknown") {
    refuse.push(`INFO does not say what it is (no redis_version); ${wanted}: connect to one of them`);
  } else if (isOlder(version, OLDEST[product])) {
    refuse.push(
      `it is ${product} ${version}, which lacks script flags or sharded channels; ${wanted}: ` +
        `upgrade it, or connect to another`,
    );
  }
  if (role !== "replica") return;
  const primary = `${info.get("master_host") ?? "?"}:${info.get("master_port") ?? "?"}`;
  refuse.push(
    `it is a replica of ${primary}, and a replica takes no writes; name ${primary} in engine.url, ` +
      `or both in engine.nodes: [${primary}, ${options.address}]`,
  );
}

function checkCluster({ refuse, warn, options }: Seen, reply: ProbeReply): void {
  if (reply instanceof Error) {
    const allow = "run ACL SETUSER USER +cluster|info";
    warn.push(`the state of the Cluster could not be asked (${reply.message}); allow it: ${allow}`);
    return;
  }
  const told = readInfo(textOf(reply));
  const state = told.get("cluster_state") ?? "unknown";
  if (state === "ok") return;
  const assigned = told.get("cluster_slots_assigned") ?? "?";
  refuse.push(
    `cluster_state is ${state} with ${assigned} of 16384 slots assigned, so it answers CLUSTERDOWN; ` +
      `redis-cli --cluster check ${options.address} says what is missing, --cluster fix repairs it`,
  );
}

function checkMemory({ facts, info, boundKnown, refuse, warn }: Seen): void {
  const { maxMemoryPolicy: policy, maxMemoryBytes, usedMemoryBytes } = facts;
  const change = set("maxmemory-policy", "noeviction");
  if (policy === "" || !boundKnown) {
    warn.push(
      "maxmemory-policy could not be asked (CONFIG GET is refused and INFO leaves it out): anything but " +
        'noeviction drops accepted tasks when memory is full; make sure of "maxmemory-policy noeviction"',
    );
  } else if (policy !== "noeviction" && maxMemoryBytes > 0) {
    refuse.push(`maxmemory-policy is ${policy}: when memory is full it drops accepted tasks; ${change}`);
  } else if (policy !== "noeviction") {
    warn.push(
      `maxmemory-policy is ${policy}: nothing is dropped while maxmemory is 0, but accepted tasks ` +
        `would be as soon as it is set; ${change}`,
    );
  }
  if (maxMemoryBytes === 0 && boundKnown) {
    const machine = numberOf(info.get("total_system_memory"));
    const most = machine === 0 ? "4gb" : `${Math.floor((machine * SAFE_SHARE) / 2 ** 20)}mb`;
    warn.push(
      "maxmemory is 0: it grows until the machine is full and the kernel kills it; " +
        `${set("maxmemory", most)} (at most 60 % of what its machine or container has)`,
    );
  }
  if (maxMemoryBytes > 0 && usedMemoryBytes > FULL_SHARE * maxMemoryBytes) {
    const share = Math.floor((100 * usedMemoryBytes) / maxMemoryBytes);
    const more = `${Math.ceil((2 * maxMemoryBytes) / 2 ** 20)}mb`;
    warn.push(
      `${share} % of maxmemory is in use, and new tasks are refused when it is full; raise it ` +
        `(CONFIG SET maxmemory ${more}, if the machine has it), or move what else lives there`,
    );
  }
}

function checkPersistence({ facts: { persistence }, info, warn }: Seen): void {
  const change = set("appendonly", "yes");
  if (persistence === "none") {
    warn.push(
      `appendonly is no and there are no save points: a restart of Redis forgets every task; ${change}`,
    );
  } else if (persistence === "snapshots") {
    warn.push(`appendonly is no: a restart of Redis forgets every task since the last snapshot; ${change}`);
  } else if (persistence === "unknown") {
    const known = info.has("aof_enabled")
      ? "appendonly is no, and whether there are snapshots"
      : "whether anything is kept on disk";
    warn.push(
      `${known} could not be asked (CONFIG GET is refused): without either, a restart of Redis ` +
        `forgets every task; set "appendonly yes" where this server is configured`,
    );
  }
  if (info.get("aof_enabled") === "1" && info.get("aof_last_write_status") === "err") {
    warn.push(
      "the last write to the append-only file failed (aof_last_write_status:err), and until one succeeds " +
        "Redis refuses every write with MISCONF; free disk space where CONFIG GET dir points",
    );
  }
  if (info.get("rdb_last_bgsave_status") === "err") {
    warn.push(
      "the last snapshot failed (rdb_last_bgsave_status:err), and Redis may refuse writes with MISCONF; " +
        "free disk space and memory, then run BGSAVE (its log says why it failed)",
    );
  }
}

function checkReplicas({ facts, info, options: { durability, address }, refuse, warn }: Seen): void {
  const { replicas, minReplicasToWrite, cluster } = facts;
  const more = cluster
    ? `add one with redis-cli --cluster add-node HOST:PORT ${address} --cluster-slave`
    : `start one with "replicaof ${address.replace(/^\[?(.*?)\]?:(\d+)$/, "$1 $2")}" in its redis.conf`;
  if (replicas === 0 && numberOf(info.get("connected_slaves")) > 0 && durability !== "local") {
    const until = durability === "replica" ? "no task is accepted" : "one server alone keeps the tasks";
    warn.push(
      `a replica is connected but still loads its first copy, and until it has it ${until}; ` +
        "wait for state=online in INFO replication",
    );
  } else if (replicas === 0 && durability === "replica") {
    refuse.push(
      "no replica is connected, and with engine.durability replica no task could be accepted; " +
        `${more}, or set engine.durability: auto`,
    );
  } else if (replicas === 0 && durability === "auto") {
    warn.push(
      "no replica is connected: accepted tasks are kept by one server only; " +
        `${more}, or set engine.durability: local if that is meant`,
    );
  }
  // Redis counts only replicas that answered within min-replicas-max-lag.
  const good = numberOf(info.get("min_slaves_good_slaves") ?? String(replicas));
  if (minReplicasToWrite === 0 && durability === "replica") {
    warn.push(
      "min-replicas-to-write is 0: a primary cut off from its replicas goes on taking writes that a " +
        `failover undoes, so their tasks run again; ${set("min-replicas-to-write", "1")}, ` +
        "with min-replicas-max-lag 2",
    );
  } else if (minReplicasToWrite !== undefined && minReplicasToWrite > good) {
    warn.push(
      `min-replicas-to-write is ${minReplicasToWrite} and ${good} can confirm now: until more do, Redis ` +
        `refuses every write with NOREPLICAS; ${more}, or run CONFIG SET min-replicas-to-write ${good}`,
    );
  }
}

function factsOf(info: Fields, settings: Fields, { durability }: CheckOptions): CheckFacts {
  const valkey = info.get("server_name") === "valkey" || info.has("valkey_version");
  const version = (valkey ? info.get("valkey_version") : undefined) ?? info.get("redis_version") ?? "";
  const role = info.get("role");
  const replicas = [...info].filter(
    ([name, value]) => /^slave\d+$/.test(name) && /\bstate=online\b/.test(value),
  ).length;
  const least = settings.get("min-replicas-to-write");
  const save = settings.get("save");
  const aof = settings.get("appendonly") === "yes" || info.get("aof_enabled") === "1";
  return {
    product: version === "" ? "unknown" : valkey ? "valkey" : "redis",
    version,
    role: role === "master" ? "primary" : role === "slave" ? "replica" : "unknown",
    cluster: info.get("cluster_enabled") === "1",
    replicas,
    minReplicasToWrite: least === undefined ? undefined : numberOf(least),
    persistence: aof ? "aof" : save === undefined ? "unknown" : save === "" ? "none" : "snapshots",
    maxMemoryBytes: numberOf(settings.get("maxmemory") ?? info.get("maxmemory")),
    usedMemoryBytes: numberOf(info.get("used_memory")),
    maxMemoryPolicy: settings.get("maxmemory-policy") ?? info.get("maxmemory_policy") ?? "",
    durability: durability !== "local" && replicas > 0 ? "replica" : "local",
  };
}

/** Error replies are values: what one command may not tell, another may. */
async function tell(ask: ProbeCommand, command: readonly string[]): Promise<ProbeReply> {
  try {
    return await ask(command);
  } catch (error) {
    return error instanceof Error ? error : new Error(String(error));
  }
}

function textOf(reply: ProbeReply): string {
  return reply === null || Array.isArray(reply) ? "" : String(reply);
}

/** CONFIG GET's alternating names and values; empty if refused. */
function settingsOf(reply: ProbeReply): Fields {
  const flat = Array.isArray(reply) ? (reply as readonly ProbeReply[]).map(textOf) : [];
  const settings = new Map<string, string>();
  for (let at = 0; at + 1 < flat.length; at += 2) settings.set(flat[at]!, flat[at + 1]!);
  return settings;
}

function isOlder(version: string, [major, minor]: readonly [number, number]): boolean {
  const [ownMajor = 0, ownMinor = 0] = version.split(".").map((part) => Number.parseInt(part, 10) || 0);
  return ownMajor < major || (ownMajor === major && ownMinor < minor);
}

function numberOf(text: string | undefined): number {
  const value = Number(text ?? 0);
  return Number.isFinite(value) ? value : 0;
}

/** Now, and after the next restart. */
function set(name: string, value: string): string {
  return `run CONFIG SET ${name} ${value}, and write "${name} ${value}" in redis.conf`;
}
