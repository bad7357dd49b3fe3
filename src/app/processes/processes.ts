/**
 * `ferry serve --processes N`: one core process, N gateway processes behind one public port, one supervising parent.
 *
 *   parent ── begin ─► starting ── ready ─► serving ── drain ─► ended         tally: its totals, on request
 *                          ▲                   │ dies
 *                          └────── wait ◄──────┘                              restarted
 *
 * Gateways take requests: sockets, TLS, HTTP, JSON, credentials, responses. The core owns the rest: tasks, journal,
 * admission by capacity, dispatchers, workers, the admin listener and all that is observed. They talk over a Unix
 * socket (`engine/remote`, `core-link.ts`). On Redis the tasks are there, so that gateways put them themselves.
 *
 * The parent runs neither: it distributes connections (`life.ts`), prints the children's lines with their name, and
 * restarts a child that died after 100 ms (the core at once), doubling up to 30 s; 30 s of serving reset that. Until all
 * were ready once nothing is restarted: the first exit fails the start with its reason. Identical lines during the
 * start are printed once.
 *
 * A gateway that dies takes its connections along, nothing else. While the core is away gateways hold what they have
 * and refuse with 503 what is new after a second; what was accepted is on disk with `engine.dataDir`, or in Redis.
 */
import { randomBytes } from "node:crypto";
import { rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { jsonLine, type Durability, type ServeTotals } from "../../cli/terminal/banner.ts";
import type { Alarm, Clock } from "../clock.ts";
import type { Config, Role } from "../config/config.ts";
import { Follower } from "./changes.ts";
import type { Part } from "./core-link.ts";
import { choosePorts, withPortsOf } from "./ports.ts";
import { NO_FILE, type Reloaded } from "../reload.ts";

export type ProcessOrder =
  /** `epoch`: of the parent's clock, which all share (`SystemClock.epoch`). */
  | {
      readonly is: "begin";
      readonly config: Config;
      readonly role: Role;
      readonly part: Part;
      readonly epoch: number;
    }
  | { readonly is: "tally" }
  /** A config with live changes only; takes effect with this round's verdict. */
  | { readonly is: "change"; readonly round: number; readonly config: Config }
  | { readonly is: "commit"; readonly round: number }
  | { readonly is: "abandon"; readonly round: number }
  | { readonly is: "reloaded"; readonly outcome: Reloaded }
  | { readonly is: "drain" };

export type Word =
  | ({ readonly is: "ready" } & ReadyWord)
  | { readonly is: "failed"; readonly why: string }
  | { readonly is: "tally"; readonly tally: ServeTotals }
  | { readonly is: "preparing" }
  /** `why` it cannot change; undefined: it can, and waits for the verdict. */
  | { readonly is: "prepared"; readonly round: number; readonly why?: string }
  | { readonly is: "changed"; readonly round: number }
  | { readonly is: "reload" }
  /** The last message before it exits. */
  | { readonly is: "ended"; readonly tally: ServeTotals };

interface ReadyWord {
  readonly apiUrl: string;
  readonly grpcUrl?: string | undefined;
  readonly adminUrl: string;
  readonly durability: Durability | undefined;
}

/** One run of a child process. */
export interface Life {
  readonly pid: number;
  /** No effect once it has exited. */
  send(order: ProcessOrder): void;
  kill(): void;
}

/** Nothing follows `gone`. */
export interface Watcher {
  word(word: Word): void;
  /** A line of its stderr, without the line break. */
  line(text: string): void;
  /** How it ended: `was killed by SIGKILL`. */
  gone(how: string): void;
}

export interface ProcessesParts {
  readonly clock: Clock;
  readonly epoch: number;
  /** Path of the Unix socket between them. */
  readonly socket: string;
  /** With its folder. */
  removeSocket(): Promise<void>;
  fork(watcher: Watcher): Life;
  /** Resolves when no connection waits to be handed out. */
  backlogTaken(): Promise<void>;
  log(line: string): void;
}

export const FIRST_WAIT_MS = 100;
export const MAX_WAIT_MS = 30_000;
/** Added to `limits.drainMs`, for the work after a drain; then the process is killed. */
export const DRAIN_GRACE_MS = 10_000;
/** A process that does not answer in time is missing from the totals. */
export const TALLY_MS = 1000;
/** Lines remembered during the start, to print each once. */
const MAX_HEARD = 1000;

const NOTHING: ServeTotals = { requests: 0, batches: 0, tasks: 0, calls: 0, lost: 0, queued: 0, running: 0 };

/** One child across restarts. */
interface Seat {
  readonly name: string;
  readonly part: Part;
  config: Config;
  begun: Config | undefined;
  /** Set while it gets changes made during its start. */
  catchingUp: Promise<void> | undefined;
  life: Life | undefined;
  follower: Follower | undefined;
  ready: ReadyWord | undefined;
  /** When this run became ready; undefined before. */
  readyAt: number | undefined;
  waitMs: number;
  again: Alarm | undefined;
  failed: string | undefined;
  ended: ServeTotals | undefined;
  answered: ((tally: ServeTotals) => void) | undefined;
}

export class Processes {
  readonly graceMs = DRAIN_GRACE_MS;
  /** Gateways. */
  readonly processes: number;
  onReload: (() => Promise<Reloaded>) | undefined;
  /** The core is the first. */
  readonly #seats: readonly Seat[];
  readonly #role: Role;
  readonly #parts: ProcessesParts;
  readonly #quiet: boolean;
  readonly #started = Promise.withResolvers<void>();
  readonly #over = Promise.withResolvers<void>();
  /** Lines printed during the start; undefined afterwards. */
  #heard: Set<string> | undefined = new Set();
  /** Totals of processes that exited in order. */
  #past = NOTHING;
  #stopping = false;

  constructor(count: number, config: Config, role: Role, parts: ProcessesParts) {
    const { socket } = parts;
    const vaultKey = randomBytes(32).toString("base64");
    this.processes = count;
    this.#role = role;
    this.#parts = parts;
    this.#quiet = config.telemetry.logLevel === "silent";
    this.#seats = Array.from({ length: count + 1 }, (_, number) => ({
      name: number === 0 ? "core" : `gateway-${number}`,
      part: { kind: number === 0 ? "core" : "gateway", number, gateways: count, socket, vaultKey },
      config,
      begun: undefined,
      catchingUp: undefined,
      life: undefined,
      follower: undefined,
      ready: undefined,
      readyAt: undefined,
      waitMs: firstWaitMs(number),
      again: undefined,
      failed: undefined,
      ended: undefined,
      answered: undefined,
    }));
  }

  /** Resolves when all are ready; if one exits before, stops all and rejects. */
  async start(): Promise<void> {
    this.#begin(this.#seats[0]!);
    try {
      await this.#started.promise;
    } catch (error) {
      await this.stop();
      throw error;
    }
    this.#heard = undefined;
  }

  get grpcUrl(): string | undefined {
    return this.#seats[1]!.ready!.grpcUrl;
  }

  get apiUrl(): string {
    return this.#seats[1]!.ready!.apiUrl;
  }

  get adminUrl(): string {
    return this.#seats[0]!.ready!.adminUrl;
  }

  get durability(): Durability | undefined {
    return this.#seats[0]!.ready!.durability;
  }

  /** The sum; without processes that were killed or do not answer. */
  async tally(): Promise<ServeTotals> {
    const tallies = await Promise.all(this.#seats.map((seat) => this.#ask(seat)));
    return tallies.reduce(add, this.#past);
  }

  /** All or none. Rejects with the reason of a process that cannot change, or is silent. */
  async change(next: Config): Promise<void> {
    await Promise.all(this.#seats.flatMap(({ catchingUp }) => catchingUp ?? []));
    // A process that is down starts with it, and one that is starting gets it when ready.
    const asked = this.#seats.filter(({ readyAt, life }) => readyAt !== undefined && life !== undefined);
    const followers = asked.map(({ follower }) => follower!);
    const whys = await Promise.all(
      asked.map((seat, at) => followers[at]!.prepare(withPortsOf(seat.config, next))),
    );
    const why = whys.find((each) => each !== undefined);
    if (why !== undefined) {
      for (const follower of followers) follower.abandon();
      throw new Error(why);
    }
    for (const seat of this.#seats) {
      seat.config = withPortsOf(seat.config, next);
      // Became ready while the others prepared.
      const late = seat.readyAt !== undefined && !followers.includes(seat.follower!);
      if (late && seat.life !== undefined) seat.catchingUp = this.#catchUp(seat, seat.life);
    }
    // The core first: a gateway sends it tasks of a new model at once.
    const commits = asked.map((seat, at) => () => this.#commit(seat, followers[at]!));
    if (asked[0]?.part.kind === "core") await commits.shift()!();
    await Promise.all(commits.map((commit) => commit()));
  }

  async #commit({ name }: Seat, follower: Follower): Promise<void> {
    if (await follower.commit()) return;
    const then = "it changes when it wakes up";
    this.#log("warn", `process has not said that it changed with the others; ${then}`, { process: name });
  }

  /** The config changed during its start; if it cannot follow, it is restarted. */
  async #catchUp(seat: Seat, life: Life): Promise<void> {
    const { follower, config } = seat;
    const why = await follower!.prepare(config);
    const done = why === undefined && (await follower!.commit());
    seat.catchingUp = undefined;
    if (done || seat.life !== life) return;
    this.#log("warn", "process cannot follow a reload, and begins anew", {
      process: seat.name,
      why: why ?? "it does not answer",
    });
    life.kill();
  }

  async #reload({ life }: Seat): Promise<void> {
    const nothing: Reloaded = { problems: [NO_FILE] };
    life?.send({ is: "reloaded", outcome: (await this.onReload?.()) ?? nothing });
  }

  takeWaiting = (): Promise<void> => this.#parts.backlogTaken();

  /** Accepts nothing new; resolves when all have exited. The core waits for the gateways. */
  async drain(): Promise<void> {
    this.#stop((life) => life.send({ is: "drain" }));
    await this.#over.promise;
  }

  async stop(): Promise<void> {
    this.#stop((life) => life.kill());
    await this.#over.promise;
    // A core that was killed could not.
    await this.#parts.removeSocket();
  }

  #stop(end: (life: Life) => void): void {
    this.#stopping = true;
    for (const { life, again } of this.#seats) {
      again?.cancel();
      if (life !== undefined) end(life);
    }
    this.#whenOver();
  }

  #begin(seat: Seat): void {
    seat.again = seat.readyAt = seat.failed = seat.ended = undefined;
    seat.life = this.#parts.fork({
      word: (word) => this.#hear(seat, word),
      line: (text) => this.#print(seat, text),
      gone: (how) => this.#gone(seat, how),
    });
    const { clock, epoch } = this.#parts;
    seat.follower = new Follower(seat.name, seat.life, clock);
    seat.begun = seat.config;
    seat.life.send({ is: "begin", config: seat.config, role: this.#role, part: seat.part, epoch });
  }

  #hear(seat: Seat, word: Word): void {
    seat.follower?.hear(word);
    if (word.is === "ready") this.#ready(seat, word);
    else if (word.is === "failed") seat.failed = word.why;
    else if (word.is === "tally") seat.answered?.(word.tally);
    else if (word.is === "reload") void this.#reload(seat);
    else if (word.is === "ended") seat.ended = word.tally;
  }

  #ready(seat: Seat, word: ReadyWord): void {
    const restarted = seat.ready !== undefined;
    seat.ready = word;
    seat.readyAt = this.#parts.clock.now();
    if (seat.begun !== seat.config) seat.catchingUp = this.#catchUp(seat, seat.life!);
    if (restarted) this.#log("info", "process ready", { process: seat.name, pid: seat.life!.pid });
    else if (seat.part.kind === "core") for (const each of this.#seats.slice(1)) this.#begin(each);
    if (this.#seats.every(({ ready }) => ready !== undefined)) this.#started.resolve();
  }

  #gone(seat: Seat, how: string): void {
    const { pid } = seat.life!;
    seat.life = undefined;
    this.#past = add(this.#past, seat.ended ?? NOTHING);
    seat.answered?.(NOTHING);
    seat.follower?.gone();
    if (this.#stopping) this.#whenOver();
    else if (this.#heard !== undefined) {
      const why = seat.failed ?? `process ${seat.name} ${how} before all were ready`;
      this.#started.reject(new Error(why));
    } else this.#comeAgain(seat, pid, seat.failed ?? how);
  }

  #comeAgain(seat: Seat, pid: number, why: string): void {
    const { clock } = this.#parts;
    const now = clock.now();
    if (seat.readyAt !== undefined && now - seat.readyAt >= MAX_WAIT_MS)
      seat.waitMs = firstWaitMs(seat.part.number);
    const restartMs = seat.waitMs;
    seat.waitMs = Math.min(MAX_WAIT_MS, Math.max(FIRST_WAIT_MS, 2 * restartMs));
    seat.again = clock.at(now + restartMs, () => this.#begin(seat));
    this.#log("warn", "process ended", { process: seat.name, pid, why, restartMs });
  }

  #whenOver(): void {
    if (this.#seats.every(({ life }) => life === undefined)) this.#over.resolve();
  }

  async #ask(seat: Seat): Promise<ServeTotals> {
    // Already in the sum of processes that exited in order.
    if (seat.life === undefined || seat.readyAt === undefined) return NOTHING;
    if (seat.ended !== undefined) return seat.ended;
    const { clock } = this.#parts;
    const { promise, resolve } = Promise.withResolvers<ServeTotals>();
    const alarm = clock.at(clock.now() + TALLY_MS, () => resolve(NOTHING));
    seat.answered = resolve;
    seat.life.send({ is: "tally" });
    try {
      return await promise;
    } finally {
      alarm.cancel();
      seat.answered = undefined;
    }
  }

  /** Text that is not a log line (a stack, a Node message) is printed unchanged. */
  #print({ name }: Seat, text: string): void {
    const ours = text.startsWith('{"') && text.endsWith("}");
    if (ours && this.#saidBefore(text)) return;
    this.#parts.log(ours ? `${text.slice(0, -1)},"process":"${name}"}\n` : `${text}\n`);
  }

  #saidBefore(text: string): boolean {
    if (this.#heard === undefined || this.#heard.size >= MAX_HEARD) return false;
    const timeless = text.replace(/"time":"[^"]*"/, "");
    if (this.#heard.has(timeless)) return true;
    this.#heard.add(timeless);
    return false;
  }

  #log(level: "info" | "warn", msg: string, facts: object): void {
    if (!this.#quiet) this.#parts.log(jsonLine(level, this.#parts.clock.now(), msg, facts));
  }
}

/** A restart of the core is worth a second of every caller's patience. */
function firstWaitMs(number: number): number {
  return number === 0 ? 0 : FIRST_WAIT_MS;
}

export async function startProcesses(
  count: number,
  config: Config,
  role: Role,
  parts: Omit<ProcessesParts, "socket" | "removeSocket">,
): Promise<Processes> {
  const chosen = await choosePorts(config);
  const folder = join(tmpdir(), `ferry-${randomBytes(9).toString("base64url")}`);
  const socket = join(folder, "core");
  const removeSocket = (): Promise<void> => rm(folder, { recursive: true, force: true });
  const processes = new Processes(count, chosen, role, { ...parts, socket, removeSocket });
  await processes.start();
  return processes;
}

function add(a: ServeTotals, b: ServeTotals): ServeTotals {
  return {
    requests: a.requests + b.requests,
    batches: a.batches + b.batches,
    tasks: a.tasks + b.tasks,
    calls: a.calls + b.calls,
    lost: a.lost + b.lost,
    queued: a.queued + b.queued,
    running: a.running + b.running,
  };
}
