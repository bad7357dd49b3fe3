/**
 * One seed, from its first request to the last check: the fleet of the plan, its callers, its mishaps, and then peace,
 * in which everything must come to its end.
 */
import { Random } from "../../src/core/random.ts";
import { VirtualClock } from "../../src/plan/virtual-clock.ts";
import { Callers } from "./callers.ts";
import { Disk } from "./disk.ts";
import { Gpu } from "./gpu.ts";
import { Host } from "./host.ts";
import { Ledger } from "./ledger.ts";
import { AIM_MS, ALIVE_MS, Dice, draw, type Mishap, type Plan } from "./plan.ts";
import { limitsOf, Process, type Surroundings } from "./process.ts";
import { Store } from "./store.ts";

export interface Run {
  readonly seed: number;
  readonly tasks: number;
  readonly counts: ReadonlyMap<string, number>;
  readonly failure: Error | undefined;
}

const STEP_MS = 250;
/** Virtual: callers poll at most half a minute, and settled is what they wait for. */
const PEACE_MS = 90_000;

class World {
  readonly plan: Plan;
  readonly ledger: Ledger;
  readonly #time = new VirtualClock();
  readonly #around: Surroundings;
  readonly #places: (Process | undefined)[];
  readonly #starts: number[];
  readonly #callers: Callers;
  /** After this nothing new goes wrong. */
  #peaceAt = 0;

  constructor(plan: Plan, trace?: string[]) {
    this.plan = plan;
    const time = this.#time;
    const dice = new Dice(plan.seed * 104_729 + 5);
    const ledger = (this.ledger = new Ledger(plan, time, trace));
    const store = plan.fleet ? new Store(limitsOf(plan), time, dice, plan.net, ledger) : undefined;
    if (store !== undefined) ledger.listen(store.events);
    const holder = store && ((lease: string) => store.registry.holder(lease));
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
      ...(store && { store }),
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
    const time = this.#time;
    plan.roles.forEach((_, at) => this.#start(at));
    // A fleet needs a moment until everybody knows of everybody.
    await time.run(time.now() + (plan.fleet ? 1200 : 1));
    const startAt = time.now();
    const random = new Random(plan.seed);
    for (let at = 0; at < plan.requests; at++) {
      time.at(startAt + random.next() * plan.overMs, () => this.#callers.arrive(at));
    }
    this.#peaceAt = startAt + plan.overMs;
    for (const mishap of plan.mishaps) {
      this.#peaceAt = Math.max(this.#peaceAt, startAt + mishap.at + AIM_MS + Math.abs(mishap.forMs) + 1);
      time.at(startAt + mishap.at, () => this.#befall(mishap));
    }
    await time.run(this.#peaceAt);
    this.#heal();
    const until = time.now() + PEACE_MS;
    while (!this.#done() && time.now() < until && ledger.failure === undefined) {
      await time.run(time.now() + STEP_MS);
    }
    ledger.check(this.#callers.open === 0, `${this.#callers.open} callers still wait`);
    ledger.close(this.#stats());
    if (ledger.failure === undefined) await this.#askAll();
  }

  #start(at: number): void {
    const name = `${this.plan.roles[at]![0]}${at + 1}.${++this.#starts[at]!}`;
    const skewMs = this.plan.fleet ? this.#around.dice.between(-3000, 3000) : 0;
    const host = new Host(name, this.#time, skewMs);
    const process = (this.#places[at] = new Process(host, this.plan.roles[at]!, this.#around));
    process.start().catch((error: unknown) => this.ledger.fail(error as Error));
  }

  #befall(mishap: Mishap): void {
    const { ledger } = this;
    const { kind, who, forMs } = mishap;
    const { gpus, store } = this.#around;
    if (kind === "kill") {
      ledger.count("fault: worker killed");
      ledger.say(gpus[who]!.name, `killed for ${forMs} ms`);
      return gpus[who]!.kill(forMs);
    }
    if (kind === "store-away") {
      ledger.count("fault: store away");
      ledger.say("store", `away for ${forMs} ms`);
      store!.awayUntil = this.#time.now() + forMs;
      return;
    }
    if (kind === "clock-step") {
      ledger.count("fault: clock set");
      ledger.say("clock", `set by ${forMs} ms`);
      this.#time.setMs += forMs;
      if (store !== undefined) store.stepMs += forMs;
      return;
    }
    const process = this.#places[who];
    if (process === undefined || !process.host.alive || process.host.paused) return;
    if (mishap.aim === undefined) return this.#strike(process, mishap);
    process.host.setTrap(mishap.aim, AIM_MS, () => this.#strike(process, mishap));
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
      this.#time.at(this.#time.now() + forMs, () => {
        ledger.say(process.host.name, "goes on");
        process.host.resume();
      });
    } else if (kind === "crash") this.#crash(who, process, forMs);
    else void this.#deploy(who, process, forMs);
  }

  #crash(at: number, process: Process, forMs: number): void {
    process.host.crash();
    this.#places[at] = undefined;
    const { disk } = this.#around;
    if (disk !== undefined) this.ledger.crashed((id) => disk.undecided(id));
    this.#time.at(this.#time.now() + forMs, () => this.#start(at));
  }

  async #deploy(at: number, process: Process, forMs: number): Promise<void> {
    const over = (): void => {
      if (!process.host.alive) return;
      const { disk } = this.#around;
      if (disk !== undefined) this.ledger.crashed((id) => disk.undecided(id));
      process.host.crash();
      this.#places[at] = undefined;
      this.#start(at);
    };
    // Whoever stops too slowly is killed.
    this.#time.at(this.#time.now() + Math.max(forMs, ALIVE_MS), over);
    await process.stop();
    over();
  }

  #heal(): void {
    const { gpus, store } = this.#around;
    this.ledger.say("", "from here on nothing new goes wrong");
    store?.heal();
    for (const gpu of gpus) gpu.heal();
  }

  #stats(): { queued: number; running: number } {
    const { store } = this.#around;
    return store === undefined ? this.#places[0]!.engine.stats() : store.engine.stats();
  }

  #done(): boolean {
    if (this.#callers.open > 0 || this.#places.some((process) => process?.ready !== true)) return false;
    const { queued, running } = this.#stats();
    return queued === 0 && running === 0;
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
    await this.#time.run(this.#time.now() + 50);
  }
}

/** Plays one seed; `trace` is given the timeline. */
export async function play(seed: number, trace?: string[]): Promise<Run> {
  const plan = draw(seed);
  const world = new World(plan, trace);
  const failed = (error: unknown): void => world.ledger.fail(error as Error);
  // What a part of Ferry throws into the void is a failure of this seed.
  process.on("unhandledRejection", failed);
  await world.run().catch(failed);
  process.off("unhandledRejection", failed);
  const { counts, accepted, failure } = world.ledger;
  return { seed, tasks: accepted.size, counts, failure };
}
