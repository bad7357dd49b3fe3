/**
 * The boot check of everything that `engine.url` or `engine.nodes` leads to, on connections of its own.
 *
 *   every seed is visited ──► a Cluster: every primary that its newest view names
 *                        └──► no Cluster: the seed that is a primary (of two, the one with more replicas)
 *
 * Only primaries are judged: a replica among the seeds is there for the day it is promoted, and a seed that
 * does not answer is worth a warning while others do. Nothing is written, and each visit takes at most
 * `connectTimeoutMs` and a few times `commandTimeoutMs`.
 */
import type { Clock } from "../../../app/clock.ts";
import { checkServer, type CheckFacts, type CheckOptions, type ServerCheck } from "./check.ts";
import { addressOf, RedisError, RedisLink } from "./link.ts";
import { askCluster, better, endpointsOf } from "./topology.ts";
import type { Address, ClusterView, Endpoints } from "./topology.ts";

export interface ProbeOptions {
  readonly url?: string | undefined;
  readonly nodes?: readonly Address[] | undefined;
  readonly username?: string | undefined;
  readonly password?: string | undefined;
  readonly tls?: boolean | undefined;
  readonly durability: CheckOptions["durability"];
  /** commandTimeoutMs by default. */
  readonly connectTimeoutMs?: number;
  readonly commandTimeoutMs: number;
}

export interface Probe {
  /** Why not to start, a line each; empty: all is well. */
  readonly refuse: readonly string[];
  readonly warn: readonly string[];
  /** The primaries that answered. */
  readonly servers: readonly { readonly address: string; readonly facts: CheckFacts }[];
}

/** One server's answers, or why there are none. */
type Visit = { readonly address: string } & (
  | { readonly check: ServerCheck; readonly view: ClusterView | undefined }
  | { readonly check?: undefined; readonly why: string }
);
type Answered = Extract<Visit, { readonly check: ServerCheck }>;

export async function probeRedis(options: ProbeOptions, clock: Clock): Promise<Probe> {
  const endpoints = endpointsOf(options);
  const visits = await visitAll(endpoints.seeds, endpoints, options, clock);
  const answered = visits.filter(isAnswered);
  const silent = visits.flatMap((visit) => (isAnswered(visit) ? [] : [visit.why]));
  if (answered.length === 0) return { refuse: silent.map(toDo), warn: [], servers: [] };

  const view = bestView(answered);
  if (view === undefined) return alone(answered, silent);
  const named = new Map(view.ranges.map(({ primary }) => [addressOf(primary.host, primary.port), primary]));
  // No node knows an owner of any slot: its own words say what is wrong.
  if (named.size === 0) return report(answered.slice(0, 1), silent);
  const known = new Set(visits.map(({ address }) => address));
  const others = [...named].filter(([address]) => !known.has(address)).map(([, each]) => each);
  const more = await visitAll(others, endpoints, options, clock);
  const primaries = [...visits, ...more].filter(({ address }) => named.has(address));
  const lost = primaries.flatMap((visit) => (isAnswered(visit) ? [] : [visit.why]));
  const told = report(
    primaries.filter(isAnswered),
    silent.filter((why) => !lost.includes(why)),
  );
  return { ...told, refuse: [...lost.map(toDo), ...told.refuse] };
}

function bestView(answered: readonly Answered[]): ClusterView | undefined {
  let best: ClusterView | undefined;
  for (const { view } of answered) if (view !== undefined && better(view, best)) best = view;
  return best;
}

/** Servers outside a Cluster: one of them has to be the primary. */
function alone(answered: readonly Answered[], silent: readonly string[]): Probe {
  const primaries = answered
    .filter(({ check }) => check.facts.role !== "replica")
    .sort((a, b) => b.check.facts.replicas - a.check.facts.replicas);
  const [first, second] = primaries;
  // A replica's own refusal names the primary to write down.
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

function visitAll(
  addresses: readonly Address[],
  endpoints: Endpoints,
  options: ProbeOptions,
  clock: Clock,
): Promise<Visit[]> {
  return Promise.all(addresses.map((each) => visit(each, endpoints, options, clock)));
}

async function visit(
  { host, port }: Address,
  { tls, username, password, db }: Endpoints,
  { durability, commandTimeoutMs, connectTimeoutMs = commandTimeoutMs }: ProbeOptions,
  clock: Clock,
): Promise<Visit> {
  const address = addressOf(host, port);
  const login = { host, port, tls, username, password, db };
  let link: RedisLink | undefined;
  try {
    link = await RedisLink.connect(
      { ...login, connectTimeoutMs, commandTimeoutMs, name: "ferry-check" },
      clock,
    );
    const asked = link;
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

function toDo(why: string): string {
  return `${why}; check that it runs and that engine.url or engine.nodes is right`;
}
