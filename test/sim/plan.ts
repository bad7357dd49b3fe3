/**
 * What one seed stands for: a fleet, a model, callers, and what goes wrong. Everything follows from the seed.
 *
 * A schedule is small on purpose, 20 to 150 requests in one to three seconds: most mistakes need two processes,
 * two tasks and one mishap at the right moment, and thousands of small schedules find more such moments than a
 * few large ones. One in seven is calm, with nothing wrong at all; those are held to stricter rules.
 */
import type { CostKind } from "../../src/core/cost.ts";
import type { PolicyName } from "../../src/core/policy.ts";
import { Random } from "../../src/core/random.ts";
import type { ModelRules } from "../../src/dispatch/model-rules.ts";
import type { MemberRole } from "../../src/workers/fleet/registry.ts";

export const MODEL = "m";
export const BEAT_MS = 500;
export const ALIVE_MS = 2000;
/** Of a batcher on what it has read. */
export const LEASE_MS = 2000;
export const COMMAND_TIMEOUT_MS = 1000;
export const TIERS = 3;
/** So long an aimed mishap waits for its moment; a lease must have run out before anything is taken over. */
export function aimMs(aim: string | undefined): number {
  return aim === "takeover" ? LEASE_MS + 1000 : 500;
}

/** What happens to a write of one process to Redis, or to the replies; each a share of all. */
export interface NetFaults {
  /** Its connection breaks before it has arrived, or in the middle of it. */
  readonly lost: number;
  readonly replyLost: number;
  /** Arrives long after its sender has given up. */
  readonly late: number;
  /** Of the messages to subscribers, which nobody confirms. */
  readonly noteLost: number;
  readonly noteTwice: number;
  readonly noteLate: number;
}

/** What a worker does to a batch; each a share of all. */
export interface GpuFaults {
  readonly error: number;
  readonly hang: number;
  readonly short: number;
  readonly long: number;
  readonly busy: number;
  readonly slow: number;
  readonly slowFactor: number;
}

/** A mishap that waits for this call of its process to Redis, and strikes before the reply. */
const AIMS = ["claim", "takeover", "settle", "put", "extend", "beat"] as const;
/** The same between a gateway process and its core. */
const CORE_AIMS = ["put", "settle"] as const;

/** Between gateway processes and their core. */
export interface LinkFaults {
  readonly latencyMs: number;
  /** Of all writes, how many arrive in several pieces. */
  readonly pieces: number;
  /** Of all pieces, how many take up to `slowMs` longer, and all that is behind them. */
  readonly slow: number;
  readonly slowMs: number;
}

export type ProcessRole = MemberRole | "core";

export type Mishap =
  | {
      readonly kind: "crash" | "deploy" | "pause";
      readonly at: number;
      readonly who: number;
      readonly forMs: number;
      /** Not at once, but with the next such call. */
      readonly aim?: (typeof AIMS)[number];
    }
  | { readonly kind: "kill"; readonly at: number; readonly who: number; readonly forMs: number }
  /** A gateway's connection to its core breaks when so many more bytes have left one of the two. */
  | {
      readonly kind: "cut";
      readonly at: number;
      readonly who: number;
      readonly forMs: 0;
      readonly afterBytes: number;
      readonly atCore: boolean;
    }
  | { readonly kind: "store-away"; readonly at: number; readonly who: 0; readonly forMs: number }
  /** Somebody sets the clock of the store (or of the one machine) by `forMs`, which may be less than zero. */
  | { readonly kind: "clock-step"; readonly at: number; readonly who: 0; readonly forMs: number };

/** Inputs of different length, and what they cost. */
export interface Shape {
  readonly kind: CostKind;
  readonly perTokenMs: number;
  /** The longest input, in tokens, about. */
  readonly longest: number;
  readonly tenants: number;
  /** A reload with another `lengths`. */
  readonly reload: { readonly at: number; readonly lengths: NonNullable<ModelRules["lengths"]> } | undefined;
}

export const TOPOLOGIES = ["one", "cores", "fleet"] as const;

export interface Plan {
  readonly seed: number;
  /** One process with all in it; one core with gateway processes before it; several processes that share a store. */
  readonly topology: (typeof TOPOLOGIES)[number];
  readonly fleet: boolean;
  /** Of the one process or the core: accepted tasks are on disk. Without it the one process does not crash. */
  readonly journal: boolean;
  readonly calm: boolean;
  /** The core is the first. */
  readonly roles: readonly ProcessRole[];
  readonly link: LinkFaults;
  /** Of the keys in Redis, all on one server. */
  readonly shards: number;
  /** How long a gateway gathers tasks for a bundle. */
  readonly tickMs: number;
  /** Replicas that confirm what is accepted. */
  readonly replicas: number;
  readonly workers: number;
  readonly probes: boolean;
  readonly baseMs: number;
  readonly perTaskMs: number;
  readonly jitter: number;
  /** Undefined: inputs are some ten bytes long, and cost the same. */
  readonly shape: Shape | undefined;
  readonly rules: ModelRules;
  /** The most tasks that each worker takes at once; Infinity where it does not say. */
  readonly takes: readonly number[];
  /** Workers run what they are given one after the other and say when they begin; otherwise they only do the former. */
  readonly queues: boolean;
  readonly queueMs: number;
  readonly totalMs: number;
  readonly maxQueued: number;
  readonly evictAfterRead: boolean;
  readonly deadLetters: number;
  readonly admission: "predictive" | "thresholds" | "off";
  readonly perUserPerMinute: number | undefined;
  readonly cache: "tenant" | "shared" | "off";
  readonly collapse: boolean;
  readonly requests: number;
  /** So many come at the same instant to one gateway: they share a bundle. */
  readonly burst: number;
  readonly overMs: number;
  readonly poison: number;
  readonly killer: number;
  readonly net: NetFaults;
  readonly gpu: GpuFaults;
  readonly mishaps: readonly Mishap[];
}

const POLICIES: readonly PolicyName[] = ["adaptive", "latency", "eco", "fixed"];
const PIPELINES = [1, "auto", "auto", 2, 2] as const;
const LENGTHS = ["auto", "auto", "auto", [32, 128, 512, 2048], [16, 64], "off"] as const;
const NO_NET: NetFaults = { lost: 0, replyLost: 0, late: 0, noteLost: 0, noteTwice: 0, noteLate: 0 };
const NO_GPU: GpuFaults = { error: 0, hang: 0, short: 0, long: 0, busy: 0, slow: 0, slowFactor: 1 };

/** Random numbers as schedules want them. */
export class Dice {
  readonly #random: Random;

  constructor(seed: number) {
    this.#random = new Random(seed);
  }

  share(): number {
    return this.#random.next();
  }

  upTo(max: number): number {
    return Math.floor(this.#random.next() * max);
  }

  between(low: number, high: number): number {
    return low + this.upTo(high - low + 1);
  }

  chance(share: number): boolean {
    return this.#random.next() < share;
  }

  /** With a chance of `share` something up to `max`, otherwise nothing. */
  some(share: number, max: number): number {
    return this.chance(share) ? this.#random.next() * max : 0;
  }

  pick<Value>(values: readonly Value[]): Value {
    return values[this.upTo(values.length)]!;
  }

  exponential(mean: number): number {
    return this.#random.exponential(mean);
  }

  gaussian(): number {
    return this.#random.gaussian();
  }
}

export function draw(seed: number): Plan {
  const dice = new Dice(seed * 7919 + 17);
  const split = new Dice(seed * 49_979_687 + 11);
  const shared = dice.chance(0.65) ? "fleet" : "one";
  const topology = split.chance(0.25) ? "cores" : shared;
  const [fleet, cores] = [topology === "fleet", topology === "cores"];
  const calm = dice.chance(0.15);
  const journal = !fleet && dice.chance(0.5);
  const roles = cores ? drawGateways(split) : fleet ? drawRoles(dice) : (["all"] as const);
  const workers = dice.between(1, fleet ? 4 : 6);
  // From dice of their own, so that the other draws of a seed stay what they are.
  const bounds = new Dice(seed * 104_729 + 5);
  const ahead = new Dice(seed * 15_485_863 + 3);
  const place = new Dice(seed * 32_452_843 + 7);
  const pipeline = ahead.pick(PIPELINES);
  const rules = { ...drawRules(dice), ...drawBudgets(bounds), pipeline };
  const lengths = new Dice(seed * 86_028_121 + 19);
  const plainMs = dice.between(3, rules.workerMs / 4);
  const overMs = dice.between(800, 2500);
  const totalMs = rules.workerMs + dice.between(300, 2500);
  const capacity = (workers * rules.limits.maxBatchSize) / plainMs;
  const requests = Math.min(150, Math.max(20, Math.floor(capacity * overMs * 1.5 * dice.share())));
  const wrong = !calm;
  const shape = !fleet && lengths.chance(0.5) ? drawShape(lengths, { rules, overMs }) : undefined;
  const timing = { probes: dice.chance(0.5), perTaskMs: dice.some(0.5, 2), jitter: dice.some(0.5, 0.3) };
  const queueMs = dice.between(300, totalMs);
  return {
    seed,
    topology,
    fleet,
    journal,
    calm,
    roles,
    link: drawLink(split, wrong),
    shards: place.pick([1, 2, 16]),
    tickMs: place.chance(0.5) ? 0 : place.between(1, 5),
    replicas: place.chance(0.3) ? 1 : 0,
    workers,
    ...timing,
    // Many short batches: what they cost is learned within some dozen.
    baseMs: shape === undefined ? plainMs : lengths.between(1, 10),
    shape,
    rules: shape === undefined ? rules : { ...scaled(rules, shape), lengths: lengths.pick(LENGTHS), queueMs },
    takes: Array.from({ length: workers }, () => (bounds.chance(0.15) ? bounds.between(1, 8) : Infinity)),
    queues: ahead.chance(0.6),
    queueMs,
    totalMs,
    maxQueued: dice.chance(0.2) ? dice.between(5, 40) : 10_000,
    evictAfterRead: dice.chance(0.2),
    deadLetters: dice.chance(0.1) ? 2 : 1000,
    admission: dice.pick(["predictive", "predictive", "thresholds", "off"]),
    perUserPerMinute: dice.chance(0.15) ? dice.between(10, 60) : undefined,
    cache: dice.pick(["tenant", "shared", "off"]),
    collapse: dice.chance(0.7),
    requests: shape === undefined ? requests : lengths.between(150, 500),
    burst: topology !== "one" && place.chance(0.6) ? place.between(2, 16) : 1,
    overMs,
    poison: wrong ? dice.some(0.4, 0.08) : 0,
    killer: wrong ? dice.some(0.2, 0.03) : 0,
    net: wrong && fleet ? drawNet(dice) : NO_NET,
    gpu: wrong ? drawGpu(dice) : NO_GPU,
    mishaps: !wrong
      ? []
      : cores
        ? drawCoreMishaps(split, { roles, workers, overMs })
        : drawMishaps(dice, { fleet, journal, roles, workers, overMs }),
  };
}

/** A batch of the longest takes up to half of what its worker may take. */
function drawShape(
  dice: Dice,
  { rules, overMs }: { readonly rules: ModelRules; readonly overMs: number },
): Shape {
  const longest = dice.pick([40, 400, 2000]);
  const { maxBatchSize } = rules.limits;
  return {
    kind: dice.pick(["padded", "padded", "padded", "packed", "rows"]),
    perTokenMs: (dice.share() * rules.workerMs) / 4 / maxBatchSize / longest,
    longest,
    tenants: dice.pick([1, 3, 40]),
    reload: dice.chance(0.3) ? { at: dice.share() * overMs, lengths: dice.pick(LENGTHS) } : undefined,
  };
}

/** At least one of each half, in any order of birth. */
function drawRoles(dice: Dice): MemberRole[] {
  const roles: MemberRole[] = [dice.pick(["gateway", "all"])];
  roles.push(roles[0] === "all" ? dice.pick(["gateway", "batcher", "all"]) : dice.pick(["batcher", "all"]));
  for (let more = dice.upTo(3); more > 0; more--) roles.push(dice.pick(["gateway", "batcher", "all"]));
  return roles;
}

function drawGateways(dice: Dice): ProcessRole[] {
  return ["core", ...Array.from({ length: dice.between(1, 4) }, () => "gateway" as const)];
}

function drawLink(dice: Dice, wrong: boolean): LinkFaults {
  return {
    latencyMs: dice.share() * 0.5,
    pieces: dice.share(),
    slow: wrong ? dice.some(0.4, 0.1) : 0,
    slowMs: dice.between(5, 300),
  };
}

function drawRules(dice: Dice): ModelRules {
  const workerMs = dice.between(60, 1500);
  return {
    name: MODEL,
    limits: {
      policy: dice.pick(POLICIES),
      maxBatchSize: dice.between(1, 16),
      maxWaitMs: dice.upTo(100),
    },
    workerMs,
    retry: {
      max: dice.upTo(4),
      baseMs: dice.between(10, 100),
      maxMs: 1000,
      budget: dice.pick([0.1, 0.5, 1]),
    },
    health: { failures: dice.between(1, 4), ejectMs: dice.between(100, 1000), maxEjectMs: 3000 },
  };
}

/** Budgets for inputs as long as these. */
function scaled(rules: ModelRules, { longest }: Shape): ModelRules {
  const { maxBatchTokens: tokens, maxBatchBytes: bytes } = rules;
  return {
    ...rules,
    maxBatchTokens: tokens && tokens * longest,
    maxBatchBytes: bytes && bytes * longest,
  };
}

/** Inputs are some ten bytes long, and so two or three tokens. */
function drawBudgets(dice: Dice): Pick<ModelRules, "maxBatchTokens" | "maxBatchBytes"> {
  return {
    maxBatchTokens: dice.chance(0.15) ? dice.between(1, 30) : undefined,
    maxBatchBytes: dice.chance(0.15) ? dice.between(5, 120) : undefined,
  };
}

function drawNet(dice: Dice): NetFaults {
  return {
    lost: dice.some(0.3, 0.05),
    replyLost: dice.some(0.3, 0.05),
    late: dice.some(0.3, 0.03),
    noteLost: dice.some(0.4, 0.5),
    noteTwice: dice.some(0.3, 0.3),
    noteLate: dice.some(0.3, 0.3),
  };
}

function drawGpu(dice: Dice): GpuFaults {
  return {
    error: dice.some(0.3, 0.3),
    hang: dice.some(0.25, 0.12),
    short: dice.some(0.25, 0.2),
    long: dice.some(0.15, 0.2),
    busy: dice.some(0.2, 0.2),
    slow: dice.some(0.3, 0.15),
    slowFactor: dice.between(2, 10),
  };
}

function drawMishaps(
  dice: Dice,
  {
    fleet,
    journal,
    roles,
    workers,
    overMs,
  }: Pick<Plan, "fleet" | "journal" | "roles" | "workers" | "overMs">,
): Mishap[] {
  const mishaps: Mishap[] = [];
  const when = (): number => dice.share() * overMs;
  const process = (): number => dice.upTo(roles.length);
  const aim = (): { aim?: (typeof AIMS)[number] } =>
    fleet && dice.chance(0.5) ? { aim: dice.pick(AIMS) } : {};
  const often = (share: number, most: number): number => (dice.chance(share) ? dice.between(1, most) : 0);
  if (fleet || journal) {
    for (let left = often(0.4, 3); left > 0; left--) {
      const kind = dice.chance(0.7) ? "crash" : "deploy";
      mishaps.push({ kind, at: when(), who: process(), forMs: dice.between(1, 3000), ...aim() });
    }
  }
  for (let left = often(0.35, 3); left > 0; left--) {
    // Around the time after which a process is taken for dead: that is where it hurts.
    const forMs = dice.between(50, 2 * ALIVE_MS);
    mishaps.push({ kind: "pause", at: when(), who: process(), forMs, ...aim() });
  }
  for (let left = often(0.35, 4); left > 0; left--) {
    mishaps.push({ kind: "kill", at: when(), who: dice.upTo(workers), forMs: dice.between(1, 1500) });
  }
  if (fleet && dice.chance(0.15)) {
    mishaps.push({ kind: "store-away", at: when(), who: 0, forMs: dice.between(50, 3000) });
  }
  if (dice.chance(0.2)) {
    mishaps.push({ kind: "clock-step", at: when(), who: 0, forMs: dice.between(-4000, 4000) });
  }
  return mishaps.sort((one, other) => one.at - other.at);
}

/** The core's hangs are about as long as its gateways wait for an answer. */
function drawCoreMishaps(
  dice: Dice,
  { roles, workers, overMs }: Pick<Plan, "roles" | "workers" | "overMs">,
): Mishap[] {
  const mishaps: Mishap[] = [];
  const when = (): number => dice.share() * overMs;
  const gateway = (): number => dice.between(1, roles.length - 1);
  const aim = (who: number): { aim?: (typeof AIMS)[number] } =>
    dice.chance(0.5) ? { aim: who === 0 ? dice.pick(CORE_AIMS) : "put" } : {};
  const often = (share: number, most: number): number => (dice.chance(share) ? dice.between(1, most) : 0);
  const end = (who: number): void => {
    const kind = dice.chance(0.8) ? "crash" : "deploy";
    mishaps.push({ kind, at: when(), who, forMs: dice.between(50, 5000), ...aim(who) });
  };
  const hang = (who: number): void => {
    mishaps.push({ kind: "pause", at: when(), who, forMs: dice.between(20, 7000), ...aim(who) });
  };
  for (let left = often(0.4, 3); left > 0; left--) end(0);
  for (let left = often(0.3, 2); left > 0; left--) end(gateway());
  for (let left = often(0.25, 2); left > 0; left--) hang(0);
  for (let left = often(0.2, 2); left > 0; left--) hang(gateway());
  for (let left = often(0.4, 4); left > 0; left--) {
    const afterBytes = dice.chance(0.3) ? 0 : dice.upTo(2000);
    const atCore = dice.chance(0.5);
    mishaps.push({ kind: "cut", at: when(), who: gateway(), forMs: 0, afterBytes, atCore });
  }
  for (let left = often(0.2, 2); left > 0; left--) {
    mishaps.push({ kind: "kill", at: when(), who: dice.upTo(workers), forMs: dice.between(1, 1500) });
  }
  if (dice.chance(0.1)) {
    mishaps.push({ kind: "clock-step", at: when(), who: 0, forMs: dice.between(-4000, 4000) });
  }
  return mishaps.sort((one, other) => one.at - other.at);
}
