/**
 * One seed, from its first request to the last check: the fleet of the plan, its callers, its mishaps, and then peace,
 * in which everything must come to its end.
 */
import { Random } from "../../src/core/random.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import type { ModelRules } from "../../src/dispatch/model-rules.ts";
import { Callers } from "./callers.ts";
import { CoreSocket } from "./core-socket.ts";
import { Disk } from "./disk.ts";
import { Gpu } from "./gpu.ts";
import { Host } from "./host.ts";
import { Ledger } from "./ledger.ts";
import { aimMs, ALIVE_MS, Dice, draw, type Mishap, type Plan } from "./plan.ts";
import { Process, registryKey, type Surroundings } from "./process.ts";
import { Audit } from "./redis/audit.ts";
import { RedisServer } from "./redis/net.ts";

export interface Run {
  readonly seed: number;
  readonly tasks: number;
  readonly counts: ReadonlyMap<string, number>;
  /** Of tasks overtaken because of their length, as a share of the bound. */
  readonly longestOvertaking: number;
  readonly failure: Error | undefined;
}

const STEP_MS = 250;
const SETTLE_MS = { one: 1, cores: 100, fleet: 1200 } as const;
/** Virtual: callers poll at most half a minute, and settled is what they wait for. */
const PEACE_MS = 90_000;
/** What is on its way from a core to its gateways, and a task that was put for nobody, has ended by then. */
const FORGOTTEN_MS = 5000;
/** Counts are healed each ten seconds, when they were found wrong twice. */
const HEALED_MS = 45_000;

class World {
  readonly plan: Plan;
  readonly ledger: Ledger;
  readonly time = new VirtualClock();
  readonly #around: Surroundings;
  readonly #places: (Process | undefined)[];
  readonly #starts: number[];
  readonly #callers: Callers;
  readonly #audit: Audit | undefined;
  /** After this nothing new goes wrong. */
  #peaceAt = 0;

  constructor(plan: Plan, trace?: string[]) {
    this.plan = plan;
    const time = this.time;
    const dice = new Dice(plan.seed * 104_729 + 5);
    const ledger = (this.ledger = new Ledger(plan, time, trace));
    const redis = plan.fleet ? new RedisServer(time, dice, plan.net, plan.replicas, ledger) : undefined;
    if (redis !== undefined) this.#audit = ledger.audit = new Audit(redis.redis, ledger);
    const holder = redis && ((lease: string) => holderOf(redis, lease));
    const gpus = Array.from(
      { length: plan.workers },
      (_, at) => new Gpu(at, plan, time, new Dice(plan.seed * 31 + at), ledger, holder),
    );
    this.#around = {
      plan,
      time,
      dice,
      ledger,
      gpus,
      ...(redis && { redis }),
      ...(plan.topology === "cores" && {
        socket: new CoreSocket(time, new Dice(plan.seed * 6007 + 13), plan.link, ledger),
      }),
      ...(plan.journal && { disk: new Disk(dice, plan.calm ? undefined : new Dice(plan.seed * 3 + 1)) }),
    };
    this.#places = plan.roles.map(() => undefined);
    this.#starts = plan.roles.map(() => 0);
    this.#callers = new Callers(plan, time, new Dice(plan.seed * 65_537 + 3), ledger, () =>
      this.#places.filter((process) => process?.open === true).map((process) => process!),
    );
  }

  async run(): Promise<void> {
    const { plan, ledger } = this;
    const time = this.time;
    plan.roles.forEach((_, at) => this.#start(at));
    // Processes need a moment until everybody knows of everybody.
    await time.run(time.now() + SETTLE_MS[plan.topology]);
    const startAt = time.now();
    const random = new Random(plan.seed);
    let arrivesAt = 0;
    for (let at = 0; at < plan.requests; at++) {
      if (at % plan.burst === 0) arrivesAt = startAt + random.next() * plan.overMs;
      time.at(arrivesAt, () => this.#callers.arrive(at));
    }
    this.#peaceAt = startAt + plan.overMs;
    for (const mishap of plan.mishaps) {
      this.#peaceAt = Math.max(
        this.#peaceAt,
        startAt + mishap.at + aimMs(aimOf(mishap)) + Math.abs(mishap.forMs) + 1,
      );
      time.at(startAt + mishap.at, () => this.#befall(mishap));
    }
    const { reload } = plan.shape ?? {};
    if (reload !== undefined) time.at(startAt + reload.at, () => this.#reload(reload.lengths));
    await time.run(this.#peaceAt);
    this.#heal();
    const until = time.now() + PEACE_MS;
    while (!this.#done() && time.now() < until && ledger.failure === undefined) {
      await time.run(time.now() + STEP_MS);
    }
    ledger.check(this.#callers.open === 0, `${this.#callers.open} callers still wait`);
    ledger.close(this.#stats());
    if (this.#audit !== undefined) await this.#checkRedis(this.#audit);
    if (ledger.failure === undefined) await this.#askAll();
    if (plan.topology === "cores" && ledger.failure === undefined) await this.#checkCores();
  }

  #start(at: number): void {
    const name = `${this.plan.roles[at]![0]}${at + 1}.${++this.#starts[at]!}`;
    const skewMs = this.plan.fleet ? this.#around.dice.between(-3000, 3000) : 0;
    const host = new Host(name, this.time, skewMs);
    const process = (this.#places[at] = new Process(host, this.plan.roles[at]!, this.#around));
    if (process.role === "core") this.ledger.coreStarts++;
    process.start().catch((error: unknown) => {
      if (!this.plan.fleet) return this.ledger.fail(error as Error);
      // Redis could not be reached: it ends, and is started again.
      this.ledger.count("start failed");
      this.ledger.say(name, `cannot start: ${(error as Error).message}`);
      host.crash();
      this.time.at(this.time.now() + 200, () => this.#start(at));
    });
  }

  #befall(mishap: Mishap): void {
    const { ledger } = this;
    const { kind, who, forMs } = mishap;
    const { gpus, redis } = this.#around;
    if (kind === "kill") {
      ledger.count("fault: worker killed");
      ledger.say(gpus[who]!.name, `killed for ${forMs} ms`);
      return gpus[who]!.kill(forMs);
    }
    if (kind === "store-away") {
      ledger.count("fault: store away");
      ledger.say("store", `away for ${forMs} ms`);
      return redis!.goAway(forMs);
    }
    if (kind === "clock-step") {
      ledger.count("fault: clock set");
      ledger.say("clock", `set by ${forMs} ms`);
      this.time.setMs += forMs;
      if (redis !== undefined) redis.stepMs += forMs;
      return;
    }
    const process = this.#places[who];
    if (process === undefined || !process.host.alive || process.host.paused) return;
    if (kind === "cut") return this.#around.socket!.cut(process.host, mishap.afterBytes, mishap.atCore);
    if (mishap.aim === undefined) return this.#strike(process, mishap);
    process.host.setTrap(mishap.aim, aimMs(mishap.aim), () => this.#strike(process, mishap));
  }

  #strike(
    process: Process,
    { kind, who, forMs, aim }: Mishap & { kind: "pause" | "crash" | "deploy" },
  ): void {
    const { ledger } = this;
    if (!process.host.alive || process.host.paused || this.#places[who] !== process) return;
    if (aim !== undefined) ledger.count(`fault aimed at: ${aim}`);
    ledger.count(`fault: ${process.role === "all" ? "process" : process.role} ${kind}`);
    ledger.say(process.host.name, `${kind}, ${forMs} ms`);
    if (kind === "pause") {
      process.host.pause();
      const over = process.role === "core" ? ledger.trouble("hangs") : undefined;
      this.time.at(this.time.now() + forMs, () => {
        over?.();
        ledger.say(process.host.name, "goes on");
        process.host.resume();
      });
    } else if (kind === "crash") this.#crash(who, process, forMs);
    else void this.#deploy(who, process, forMs);
  }

  #crash(at: number, process: Process, forMs: number): void {
    this.#die(at, process);
    const over = process.role === "core" ? this.ledger.trouble("away") : undefined;
    this.time.at(this.time.now() + forMs, () => {
      this.#start(at);
      over?.();
    });
  }

  #die(at: number, process: Process): void {
    process.host.crash();
    this.#places[at] = undefined;
    const { disk } = this.#around;
    if (process.role === "gateway") return;
    if (disk !== undefined) this.ledger.crashed(disk);
    else if (process.role === "core") this.ledger.coreDied();
  }

  async #deploy(at: number, process: Process, forMs: number): Promise<void> {
    const healed = process.role === "core" ? this.ledger.trouble("away") : undefined;
    const over = (): void => {
      if (!process.host.alive) return;
      this.#die(at, process);
      this.#start(at);
      healed?.();
    };
    // Whoever stops too slowly is killed.
    this.time.at(this.time.now() + Math.max(forMs, ALIVE_MS), over);
    await process.stop();
    over();
  }

  #heal(): void {
    const { gpus, redis } = this.#around;
    this.ledger.say("", "from here on nothing new goes wrong");
    redis?.heal();
    this.#around.socket?.heal();
    for (const gpu of gpus) gpu.heal();
  }

  #reload(lengths: NonNullable<ModelRules["lengths"]>): void {
    this.ledger.count("lengths changed by a reload");
    this.#around.rules = { ...this.plan.rules, lengths };
    for (const process of this.#places) process?.reload();
  }

  #stats(): { queued: number; running: number } {
    if (this.#audit === undefined) return this.#places[0]!.engine.stats();
    return { queued: this.#audit.open.size, running: 0 };
  }

  #done(): boolean {
    if (this.#callers.open > 0 || this.#places.some((process) => process?.well !== true)) return false;
    const { queued, running } = this.#stats();
    return queued === 0 && running === 0;
  }

  /** Nothing is left in Redis for which there is nothing left to do; what a crash left in the counts is found in two rounds. */
  async #checkRedis(audit: Audit): Promise<void> {
    const until = this.time.now() + HEALED_MS;
    const left = (): string[] => [...audit.leftovers(), ...audit.counts()];
    while (left().length > 0 && this.time.now() < until && this.ledger.failure === undefined) {
      await this.time.run(this.time.now() + STEP_MS);
    }
    this.ledger.check(left().length === 0, `left in Redis: ${left().join(", ")}`);
    const { maxQueued, workers, rules, roles } = this.plan;
    // Each gateway knows the depth that Redis told it last; beside what waits, two batches may be with each worker.
    const most = maxQueued * roles.length + 2 * workers * rules.limits.maxBatchSize;
    this.ledger.check(audit.mostOpen <= most, `${audit.mostOpen} tasks were open, of ${most}`);
  }

  /** Nothing is kept of what has ended, and a process that stops leaves no alarm behind. */
  async #checkCores(): Promise<void> {
    const { ledger } = this;
    ledger.checkRates();
    const processes = this.#places.map((process) => process!).reverse();
    const until = this.time.now() + FORGOTTEN_MS;
    while (processes.some(({ pending }) => pending > 0) && this.time.now() < until) {
      await this.time.run(this.time.now() + STEP_MS);
    }
    for (const { host, pending } of processes) {
      ledger.check(pending === 0, `${host.name} keeps ${pending} tasks and requests that have ended`);
    }
    for (const process of processes) {
      void process.stop();
      await this.time.run(this.time.now() + STEP_MS);
      const { name, alarms } = process.host;
      ledger.check(alarms.size === 0, `${name} has stopped and ${alarms.size} alarms are set`);
    }
  }

  /** Whoever was told "accepted" can ask anybody, and gets the end that it was told. */
  async #askAll(): Promise<void> {
    const gateways = this.#places.filter((process) => process?.open === true);
    this.ledger.check(gateways.length > 0, "no gateway came back");
    let at = 0;
    for (const [id, wish] of this.#callers.ids) {
      const gateway = gateways[at++ % gateways.length]!;
      this.#callers.look(wish, id, gateway, (done) =>
        this.ledger.check(done, `${this.ledger.name(id)} has no end`),
      );
    }
    await this.time.run(this.time.now() + 50);
  }
}

function aimOf(mishap: Mishap): string | undefined {
  return "aim" in mishap ? mishap.aim : undefined;
}

/** Which process may start a batch on a worker now; none while its holder has not been heard of for aliveMs. */
function holderOf(server: RedisServer, lease: string): string | undefined {
  const { redis } = server;
  const taken = redis.peek(["HGET", registryKey("leases"), lease]);
  const holder = taken === null ? undefined : /^\d+ (.*)$/.exec(String(taken))?.[1];
  if (holder === undefined) return undefined;
  const beat = redis.peek(["ZSCORE", registryKey("beats"), holder]);
  return beat !== null && server.now() - Number(String(beat)) < ALIVE_MS ? holder : undefined;
}

/** What a process does after its turn, on virtual time. */
function virtualImmediates(time: VirtualClock): () => void {
  const real = globalThis.setImmediate;
  const virtual = (work: () => void): unknown => time.at(time.now(), work);
  globalThis.setImmediate = virtual as typeof setImmediate;
  return () => void (globalThis.setImmediate = real);
}

/** Plays one seed; `trace` is given the timeline. */
export async function play(seed: number, trace?: string[]): Promise<Run> {
  const plan = draw(seed);
  const world = new World(plan, trace);
  const failed = (error: unknown): void => world.ledger.fail(error as Error);
  // What a part of Ferry throws into the void is a failure of this seed.
  process.on("unhandledRejection", failed);
  const restore = virtualImmediates(world.time);
  await world.run().catch(failed);
  restore();
  process.off("unhandledRejection", failed);
  const { counts, tasks, longestOvertaking, failure } = world.ledger;
  return { seed, tasks, counts, longestOvertaking, failure };
}
