/**
 * The sentence above the charts: what is going on, and what would help. Pure. The first rule that matches wins:
 *
 *   1  the store does not answer, or the process drains
 *   2  no worker is healthy
 *   3  load above 95 %
 *   4  a worker takes twice its own usual time
 *   5  the slowest 5 % wait longer in the queue than their worker takes
 *   6  more than 1 % of the tasks were retried
 *   7  event-loop delay above 100 ms
 *   8  no request for ten seconds: quiet
 *   9  healthy
 *
 * A worker that is down while others work is mentioned first in any case. Parts of a time are means of the slowest 5 %,
 * since quantiles of parts do not add up.
 */
import type { RecentFigures, VerdictFrame, WorkerRow } from "./frames.ts";
import type { SlowWorker } from "./workers.ts";

/** The same for all models. */
export interface ProcessFacts {
  readonly reachable: boolean;
  readonly draining: boolean;
  /** Whether it ever got a request. */
  readonly used: boolean;
}

export interface VerdictFacts {
  readonly model: { readonly name: string; readonly policy: string; readonly maxBatchSize: number };
  /** `admission.targetUtilization`. */
  readonly target: number;
  readonly process: ProcessFacts;
  readonly recent: RecentFigures;
  readonly workers: readonly WorkerRow[];
  readonly healthy: number;
  readonly queued: number;
  readonly oldestWaitMs: number;
  /** Tasks that asked for a worker, including capacity refusals. */
  readonly arrivalsPerSecond: number;
  /** Requests of the running second, not in any sum yet. */
  readonly justNow: number;
  /** Tasks in batches reported here. */
  readonly tasksPerSecond: number;
  readonly slowWorker: SlowWorker | undefined;
  /** Share of tasks, last ten seconds. */
  readonly retriedShare: number;
  /** Share of batches that left full, last ten seconds. */
  readonly fullShare: number;
  /** Inputs of similar length share a batch. */
  readonly grouped: boolean;
  readonly loopLateMs: number;
  /** Undefined until 15 minutes have passed. */
  readonly quarterHour: { readonly idleShare: number; readonly peakLoad: number } | undefined;
}

const TOO_MUCH_LOAD = 0.95;
const MANY_RETRIES = 0.01;
const LATE_MS = 100;
const MOSTLY_IDLE = 0.5;
const HALF_EMPTY = 0.6;
/** A shorter queue wait is not reported, even if longer than the worker's time. */
const NOTICED_MS = 10;

export function sayVerdict(facts: VerdictFacts): VerdictFrame {
  const said = rules.map((rule) => rule(facts)).find((verdict) => verdict !== undefined) ?? healthy(facts);
  const down = facts.workers.filter(({ state }) => state === "down");
  if (down.length === 0 || facts.healthy === 0 || said.key === "store") return said;
  return {
    level: said.level === "ok" || said.level === "quiet" ? "busy" : said.level,
    sentence: `${downWords(down)} ${said.sentence}`,
    key: `down ${said.key}`,
    advice: said.advice,
  };
}

type Rule = (facts: VerdictFacts) => VerdictFrame | undefined;

const rules: readonly Rule[] = [
  unreachable,
  draining,
  noWorker,
  overloaded,
  slowWorker,
  queueDominates,
  retries,
  quiet,
  lateLoop,
];

function unreachable({ process }: VerdictFacts): VerdictFrame | undefined {
  if (process.reachable) return undefined;
  const sentence =
    "Cut off. The store does not answer or cannot be written; new requests are refused until then.";
  const advice =
    "See that Redis can be reached from here, or that the disk of engine.dataDir takes writes; accepted tasks go on.";
  return { level: "bad", key: "store", sentence, advice };
}

function draining({ process, queued }: VerdictFacts): VerdictFrame | undefined {
  if (!process.draining) return undefined;
  const sentence = `Draining. No new request is taken; ${tasks(queued)} still ${queued === 1 ? "waits" : "wait"}.`;
  return { level: "busy", key: "draining", sentence, advice: "" };
}

function noWorker({ healthy, workers, model, queued, oldestWaitMs }: VerdictFacts): VerdictFrame | undefined {
  if (healthy > 0) return undefined;
  const advice = "Start a worker, or see why it does not answer; it is used again by itself when it does.";
  const waiting = queued === 0 ? "" : ` ${tasks(queued)} waiting, the oldest for ${time(oldestWaitMs)}.`;
  const named = workers.find(({ state }) => state === "down")?.down;
  const why = named === undefined || named.why === "" ? "" : ` (${named.why})`;
  const which =
    workers.length === 0
      ? `${model.name} has no worker`
      : workers.length === 1
        ? `${workers[0]!.name} is down${why}`
        : `All ${workers.length} workers of ${model.name} are down${why}`;
  return { level: "bad", key: "no worker", sentence: `No worker. ${which}.${waiting}`, advice };
}

function overloaded(facts: VerdictFacts): VerdictFrame | undefined {
  const { recent, arrivalsPerSecond, queued, oldestWaitMs } = facts;
  if (recent.load <= TOO_MUCH_LOAD) return undefined;
  const load = `${count(arrivalsPerSecond)} req/s ask for workers that can do ${count(recent.capacityPerSecond)}`;
  const waiting = queued === 0 ? "" : `${tasks(queued)} wait, the oldest for ${time(oldestWaitMs)}.`;
  return {
    level: "bad",
    key: "overloaded",
    sentence: join("Overloaded.", `${load}: load ${percent(recent.load)}.`, refused(recent), waiting),
    advice: moreWorkers(facts),
  };
}

function slowWorker(facts: VerdictFacts): VerdictFrame | undefined {
  const { slowWorker: slow } = facts;
  if (slow === undefined) return undefined;
  const { name, nowMs, usualMs } = slow;
  return {
    level: "busy",
    key: `slow worker ${name}`,
    sentence: `Slow worker. ${name} takes ${time(nowMs)} a batch, usually ${time(usualMs)}. ${rate(facts)}`,
    advice: `See what else runs on ${name}: heat, memory, another process.`,
  };
}

function queueDominates(facts: VerdictFacts): VerdictFrame | undefined {
  const { recent, healthy, model } = facts;
  const { slow } = recent;
  if (slow === null || slow.queueMs <= slow.workerMs || slow.queueMs < NOTICED_MS) return undefined;
  const advice =
    recent.desiredWorkers > healthy
      ? moreWorkers(facts)
      : model.policy === "latency"
        ? "The load comes in bursts; more workers, or a smaller maxBatchSize, shorten the wait."
        : `Policy latency, or a smaller maxWaitMs, lets batches leave earlier; this model runs ${model.policy}.`;
  const parts = `${time(slow.queueMs)} in the queue, ${time(slow.workerMs)} at the worker`;
  const sentence = join(`Waiting. The slowest 5 % spend ${parts}.`, rate(facts), refused(recent));
  return { level: "busy", key: "waiting", sentence, advice };
}

function retries(facts: VerdictFacts): VerdictFrame | undefined {
  const { retriedShare, recent } = facts;
  if (retriedShare <= MANY_RETRIES) return undefined;
  const again = `${percent(retriedShare)} of the tasks were tried again.`;
  const sentence = join("Retries.", again, rate(facts), tail(recent));
  const advice = "The recent events name the workers and what they answered; dead letters keep what failed.";
  return { level: "busy", key: "retries", sentence, advice };
}

function lateLoop(facts: VerdictFacts): VerdictFrame | undefined {
  const { loopLateMs, recent } = facts;
  if (loopLateMs <= LATE_MS) return undefined;
  const late = `This process kept everybody waiting for ${time(loopLateMs)}.`;
  const sentence = join("Late.", late, rate(facts), tail(recent));
  const advice = "Give the process a whole core, send smaller bodies, or run a second gateway.";
  return { level: "busy", key: "late", sentence, advice };
}

function quiet(facts: VerdictFacts): VerdictFrame | undefined {
  const { recent, process, queued, healthy, justNow } = facts;
  if (recent.requestsPerSecond > 0 || queued > 0 || recent.fill !== null) return undefined;
  const before = process.used ? "No request in the last ten seconds" : "No request yet";
  const when = justNow > 0 ? `${count(justNow)} ${justNow === 1 ? "request" : "requests"} just now` : before;
  const ready = `${workers(healthy)} ${healthy === 1 ? "is" : "are"} ready`;
  return { level: "quiet", key: "quiet", sentence: `Quiet. ${when}; ${ready}.`, advice: spare(facts) };
}

function healthy(facts: VerdictFacts): VerdictFrame {
  const { recent } = facts;
  const sentence = join("Healthy.", rate(facts), tail(recent), refused(recent));
  return { level: "ok", key: "healthy", sentence, advice: spare(facts) || emptySeats(facts) };
}

function moreWorkers({ recent, healthy, target }: VerdictFacts): string {
  const { desiredWorkers } = recent;
  if (desiredWorkers <= healthy) return "";
  const more = desiredWorkers - healthy;
  const holds = `would hold this load at ${percent(target)} of capacity`;
  return `${more} more ${more === 1 ? "worker" : "workers"} (${desiredWorkers} in all) ${holds}.`;
}

/** Idle long enough not to be a lull. */
function spare({ quarterHour, healthy, target }: VerdictFacts): string {
  if (quarterHour === undefined || quarterHour.idleShare <= MOSTLY_IDLE) return "";
  const enough = Math.max(1, Math.ceil((quarterHour.peakLoad * healthy) / target));
  if (enough >= healthy) return "";
  const idle = `The workers were idle ${percent(quarterHour.idleShare)} of the last 15 minutes`;
  return `${idle}; ${workers(enough)} would do, even at its busiest second.`;
}

function emptySeats({ recent, model, fullShare, grouped }: VerdictFacts): string {
  const { fill } = recent;
  // Others wait for inputs of their length: more time would not fill them.
  if (grouped) return "";
  // Half empty by count, but full by weight or by their workers' limits: no policy fills them.
  if (fullShare > 0.5) return "";
  if (fill === null || fill >= HALF_EMPTY || model.policy === "eco" || model.maxBatchSize === 1) return "";
  const seats = `Batches leave ${count(fill * model.maxBatchSize)} of ${model.maxBatchSize} full`;
  return `${seats}: empty seats are the price of low latency. Policy eco fills them and answers later.`;
}

/** Tasks in a batcher, which takes no requests. */
function rate({ recent, tasksPerSecond }: VerdictFacts): string {
  const { requestsPerSecond, load } = recent;
  const asked = requestsPerSecond > 0 || tasksPerSecond === 0;
  const share = load > 0 && asked ? ` is ${percent(load)} of capacity` : "";
  return `${asked ? `${count(requestsPerSecond)} req/s` : `${count(tasksPerSecond)} tasks/s run here`}${share}.`;
}

/** "" in a batcher, which has no clients. */
function tail({ p99, slow, requestsPerSecond }: RecentFigures): string {
  if (p99 === null || slow === null) return requestsPerSecond > 0 ? "Nobody waited for an answer." : "";
  const parts = [`${time(slow.workerMs)} worker`, `${time(slow.queueMs)} queue`];
  if (slow.gatewayMs >= 1) parts.push(`${time(slow.gatewayMs)} gateway`);
  return `p99 ${time(p99)}; the slowest 5 %: ${parts.join(" + ")}.`;
}

function refused({ refusedShare, requestsPerSecond }: RecentFigures): string {
  if (refusedShare > 0) return `${percent(refusedShare)} refused.`;
  return requestsPerSecond > 0 ? "Nobody refused." : "";
}

function join(...sentences: readonly string[]): string {
  return sentences.filter((each) => each !== "").join(" ");
}

function downWords(down: readonly WorkerRow[]): string {
  const first = down[0]!;
  const why = first.down === undefined || first.down.why === "" ? "" : ` (${first.down.why})`;
  if (down.length > 1) return `${down.length} workers are down, ${first.name}${why} among them.`;
  const since =
    first.down === undefined || first.down.sinceMs < 1000 ? "" : ` for ${time(first.down.sinceMs)}`;
  return `${first.name} is down${since}${why}.`;
}

function tasks(value: number): string {
  return `${count(value)} ${value === 1 ? "task" : "tasks"}`;
}

function workers(value: number): string {
  return `${count(value)} ${value === 1 ? "worker" : "workers"}`;
}

/** At most three digits, with thousands separators: "1,804", "43.7", "0.3". */
function count(value: number): string {
  // As toLocaleString, at a fiftieth of its time: done for every model in every frame.
  const text = String(Number(value.toFixed(value >= 100 ? 0 : 1)));
  return text.replace(/\B(?=(\d{3})+$)/g, ",");
}

function percent(share: number): string {
  return `${share >= 0.1 ? Math.round(100 * share) : count(100 * share)} %`;
}

/** Milliseconds below ten seconds, as everywhere. */
function time(ms: number): string {
  return ms < 10_000 ? `${count(ms)} ms` : `${count(ms / 1000)} s`;
}
