/**
 * The boot check of one Redis server: is it set up so that an accepted task stays?
 *
 * Asked once per primary, before anything is accepted. `refuse` holds what would break the promise, and the
 * start ends there; `warn` holds what an operator should know. Each line says what is, why it matters, and
 * the exact command that changes it.
 *
 *   INFO            version, role, replicas, memory, persistence; Ferry cannot do without it
 *   CONFIG GET      what INFO leaves out: save points, min-replicas-to-write; managed services and strict
 *                   ACLs refuse it, and then INFO has to do
 *   CLUSTER INFO    only where the server says that it is part of a Cluster
 *
 * Decoupled from the client: `ask` sends one command and resolves with its reply in whatever shape the
 * client has; an error reply may be the value, or the reason of the rejection.
 */

export type Reply = string | number | null | Buffer | Error | readonly Reply[];
export type Ask = (command: readonly string[]) => Promise<Reply>;

export interface CheckOptions {
  /** `host:port`, for the messages. */
  readonly address: string;
  readonly durability: "auto" | "replica" | "local";
}

export interface CheckFacts {
  readonly product: "redis" | "valkey" | "unknown";
  /** As the product counts; "" when it does not say. */
  readonly version: string;
  readonly role: "primary" | "replica" | "unknown";
  readonly cluster: boolean;
  /** Connected, and past their first copy. */
  readonly replicas: number;
  /** 0: writes never depend on replicas; undefined: it could not be asked. */
  readonly minReplicasToWrite: number | undefined;
  readonly persistence: "aof" | "snapshots" | "none" | "unknown";
  /** 0: no bound. */
  readonly maxMemoryBytes: number;
  readonly usedMemoryBytes: number;
  /** "" when it could not be asked. */
  readonly maxMemoryPolicy: string;
  /** What "accepted" means here now: a replica has the task too, or this server alone. */
  readonly durability: "replica" | "local";
}

export interface ServerCheck {
  readonly refuse: readonly string[];
  readonly warn: readonly string[];
  readonly facts: CheckFacts;
}

/** Beyond this share of maxmemory a burst could fill the rest. */
const FULL_SHARE = 0.8;
/** A copy for AOF rewrite or replication may need as much again while writes go on. */
const SAFE_SHARE = 0.6;
const ASKED = ["maxmemory", "maxmemory-policy", "save", "appendonly", "min-replicas-to-write"];
const OLDEST = { redis: [7, 0], valkey: [7, 2] } as const;

export async function checkServer(ask: Ask, options: CheckOptions): Promise<ServerCheck> {
  const about = await tell(ask, ["INFO"]);
  if (about instanceof Error) return unanswered(about, ask, options);
  const info = fieldsOf(textOf(about));
  const settings = settingsOf(await tell(ask, ["CONFIG", "GET", ...ASKED]));
  const facts = factsOf(info, settings, options);
  const cluster = facts.cluster ? await tell(ask, ["CLUSTER", "INFO"]) : undefined;
  const seen: Seen = { facts, info, settings, options, refuse: [], warn: [] };
  checkVersion(seen);
  checkRole(seen);
  checkCluster(seen, cluster);
  checkEviction(seen);
  checkMemory(seen);
  checkPersistence(seen);
  checkReplicas(seen);
  const named = (lines: readonly string[]) => lines.map((line) => `redis ${options.address}: ${line}`);
  return { refuse: named(seen.refuse), warn: named(seen.warn), facts };
}

interface Seen {
  readonly facts: CheckFacts;
  readonly info: ReadonlyMap<string, string>;
  /** What CONFIG GET told; empty when it was refused. */
  readonly settings: ReadonlyMap<string, string>;
  readonly options: CheckOptions;
  readonly refuse: string[];
  readonly warn: string[];
}

function checkVersion({ facts: { product, version }, refuse }: Seen): void {
  const wanted = "Ferry needs Redis 7.0 or newer, or Valkey 7.2 or newer";
  if (product === "unknown") {
    refuse.push(`INFO does not say what it is (no redis_version); ${wanted}: connect to one of them`);
  } else if (isOlder(version, OLDEST[product])) {
    refuse.push(
      `it is ${product} ${version}, which lacks script flags or sharded channels; ${wanted}: ` +
        `upgrade it, or connect to another`,
    );
  }
}

function checkRole({ facts, info, refuse, options }: Seen): void {
  if (facts.role !== "replica") return;
  const primary = `${info.get("master_host") ?? "?"}:${info.get("master_port") ?? "?"}`;
  refuse.push(
    `it is a replica of ${primary}, and a replica takes no writes; name ${primary} in engine.url, ` +
      `or both in engine.nodes: [${primary}, ${options.address}]`,
  );
}

function checkCluster({ refuse, warn, options }: Seen, reply: Reply | undefined): void {
  if (reply === undefined) return;
  if (reply instanceof Error) {
    warn.push(
      `the state of the Cluster could not be asked (${reply.message}); allow it: ${allow("cluster|info")}`,
    );
    return;
  }
  const told = fieldsOf(textOf(reply));
  const state = told.get("cluster_state") ?? "unknown";
  if (state === "ok") return;
  const assigned = told.get("cluster_slots_assigned") ?? "?";
  refuse.push(
    `cluster_state is ${state} with ${assigned} of 16384 slots assigned, so it answers CLUSTERDOWN; ` +
      `redis-cli --cluster check ${options.address} says what is missing, --cluster fix repairs it`,
  );
}

function checkEviction({ facts, settings, info, refuse, warn }: Seen): void {
  const { maxMemoryPolicy: policy, maxMemoryBytes } = facts;
  if (policy === "" || !(settings.has("maxmemory") || info.has("maxmemory"))) {
    warn.push(
      "maxmemory-policy could not be asked (CONFIG GET is refused and INFO leaves it out): anything but " +
        'noeviction drops accepted tasks when memory is full; make sure of "maxmemory-policy noeviction"',
    );
  } else if (policy !== "noeviction") {
    const change = set("maxmemory-policy", "noeviction");
    if (maxMemoryBytes > 0) {
      refuse.push(`maxmemory-policy is ${policy}: when memory is full it drops accepted tasks; ${change}`);
    } else {
      warn.push(
        `maxmemory-policy is ${policy}: nothing is dropped while maxmemory is 0, but accepted tasks ` +
          `would be as soon as somebody sets it; ${change}`,
      );
    }
  }
}

function checkMemory({ facts, info, settings, warn }: Seen): void {
  const { maxMemoryBytes, usedMemoryBytes } = facts;
  if (maxMemoryBytes === 0 && (settings.has("maxmemory") || info.has("maxmemory"))) {
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

function checkReplicas(seen: Seen): void {
  const { facts, info, options, refuse, warn } = seen;
  if (facts.role === "replica") return;
  const { replicas, minReplicasToWrite } = facts;
  const more = moreReplicas(seen);
  if (replicas === 0 && numberOf(info.get("connected_slaves")) > 0 && options.durability !== "local") {
    const until =
      options.durability === "replica" ? "no task is accepted" : "one server alone keeps the tasks";
    warn.push(
      `a replica is connected but still loads its first copy, and until it has it ${until}; ` +
        "wait for state=online in INFO replication",
    );
  } else if (replicas === 0 && options.durability === "replica") {
    refuse.push(
      "no replica is connected, and with engine.durability replica no task could be accepted; " +
        `${more}, or set engine.durability: auto`,
    );
  } else if (replicas === 0 && options.durability === "auto") {
    warn.push(
      "no replica is connected: accepted tasks are kept by one server only; " +
        `${more}, or set engine.durability: local if that is meant`,
    );
  }
  // Redis counts only those that answered within min-replicas-max-lag.
  const good = numberOf(info.get("min_slaves_good_slaves") ?? String(replicas));
  if (minReplicasToWrite === 0 && options.durability === "replica") {
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

function moreReplicas({ facts, options: { address } }: Seen): string {
  if (facts.cluster) return `add one with redis-cli --cluster add-node HOST:PORT ${address} --cluster-slave`;
  const colon = address.lastIndexOf(":");
  const host = address.slice(0, colon).replace(/^\[|\]$/g, "");
  return `start one with "replicaof ${host} ${address.slice(colon + 1)}" in its redis.conf`;
}

/** INFO itself was refused: nothing is known, and Ferry needs it for as long as it runs. */
async function unanswered(why: Error, ask: Ask, options: CheckOptions): Promise<ServerCheck> {
  const refuse = (line: string): ServerCheck => ({
    refuse: [`redis ${options.address}: ${line}`],
    warn: [],
    facts: factsOf(new Map(), new Map(), options),
  });
  if (why.message.startsWith("NOAUTH")) {
    return refuse("it wants a password; write one in engine.url (redis://:PASSWORD@HOST) or engine.password");
  }
  if (!why.message.startsWith("NOPERM")) return refuse(`INFO was not answered: ${why.message}`);
  const user = await tell(ask, ["ACL", "WHOAMI"]);
  const name = user instanceof Error ? "USER" : textOf(user);
  return refuse(
    `its user ${name} may not run INFO, which tells Ferry whether accepted tasks are safe; ` +
      allow("info", name),
  );
}

function factsOf(
  info: ReadonlyMap<string, string>,
  settings: ReadonlyMap<string, string>,
  options: CheckOptions,
): CheckFacts {
  const valkey = info.get("server_name") === "valkey" || info.has("valkey_version");
  const version = (valkey ? info.get("valkey_version") : undefined) ?? info.get("redis_version") ?? "";
  const role = info.get("role");
  const replicas = [...info].filter(
    ([name, value]) => /^slave\d+$/.test(name) && /\bstate=online\b/.test(value),
  );
  const least = settings.get("min-replicas-to-write");
  const maxMemory = settings.get("maxmemory") ?? info.get("maxmemory");
  return {
    product: version === "" ? "unknown" : valkey ? "valkey" : "redis",
    version,
    role: role === "master" ? "primary" : role === "slave" ? "replica" : "unknown",
    cluster: info.get("cluster_enabled") === "1",
    replicas: replicas.length,
    minReplicasToWrite: least === undefined ? undefined : numberOf(least),
    persistence: persistenceOf(info, settings),
    maxMemoryBytes: numberOf(maxMemory),
    usedMemoryBytes: numberOf(info.get("used_memory")),
    maxMemoryPolicy: settings.get("maxmemory-policy") ?? info.get("maxmemory_policy") ?? "",
    durability: options.durability !== "local" && replicas.length > 0 ? "replica" : "local",
  };
}

function persistenceOf(
  info: ReadonlyMap<string, string>,
  settings: ReadonlyMap<string, string>,
): CheckFacts["persistence"] {
  if (settings.get("appendonly") === "yes" || info.get("aof_enabled") === "1") return "aof";
  const save = settings.get("save");
  if (save === undefined) return "unknown";
  return save === "" ? "none" : "snapshots";
}

/** A refusal is a value here: what one command may not tell, another may. */
async function tell(ask: Ask, command: readonly string[]): Promise<Reply> {
  try {
    return await ask(command);
  } catch (error) {
    return error instanceof Error ? error : new Error(String(error));
  }
}

function textOf(reply: Reply): string {
  if (Array.isArray(reply)) return "";
  return reply === null ? "" : String(reply);
}

/** `name:value` lines, as INFO and CLUSTER INFO write them. */
function fieldsOf(text: string): Map<string, string> {
  const fields = new Map<string, string>();
  for (const line of text.split(/\r?\n/)) {
    const colon = line.indexOf(":");
    if (colon > 0 && !line.startsWith("#")) fields.set(line.slice(0, colon), line.slice(colon + 1));
  }
  return fields;
}

/** CONFIG GET's reply: names and values in turn. */
function settingsOf(reply: Reply): Map<string, string> {
  const settings = new Map<string, string>();
  if (!Array.isArray(reply)) return settings;
  const flat = (reply as readonly Reply[]).map(textOf);
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

function allow(command: string, user = "USER"): string {
  return `run ACL SETUSER ${user} +${command}`;
}
