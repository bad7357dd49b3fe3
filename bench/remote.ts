/**
 * What the way to the core process and back costs: CPU time per task at the gateway's and at the core's side, for 2 KB in
 * and out, with 1, 8 and 64 tasks put in one turn of the event loop. Between two processes, over a real Unix socket.
 *
 *   node bench/remote.ts          a table, in about three minutes
 *   node bench/remote.ts remote   one way only
 *
 *   remote     src/engine/remote: frames of our own
 *   lines      a line of JSON for what leaves in one turn, over the same kind of socket
 *   advanced   node:child_process with `serialization: "advanced"` (structured clone), one message per turn
 *
 * The core's engine is empty: it queues, and settles everything in the next turn as one batch. One bundle is in flight at
 * a time, so that bundles have the size they are said to have; both sides wait in between, and the wake-ups are counted.
 */
import { type ChildProcess, fork } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync } from "node:fs";
import { connect, createServer, type Socket } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { SystemClock } from "../src/app/clock.ts";
import { median } from "../src/core/median.ts";
import type { BatchNote, Task } from "../src/core/task.ts";
import type { Engine, EngineListener, PutReply, RecordView } from "../src/engine/engine.ts";
import { newId } from "../src/engine/ids.ts";
import { connectLink } from "../src/engine/remote/channel.ts";
import { RemoteEngine } from "../src/engine/remote/engine.ts";
import { RemoteServer } from "../src/engine/remote/server.ts";
import { Events } from "../src/observe/events.ts";

const kinds = ["remote", "lines", "advanced"] as const;
type Kind = (typeof kinds)[number];
const bundles = [1, 8, 64];
const tasks = 200_000;
const rounds = 3;
const output = JSON.stringify("o".repeat(2046));
const clock = new SystemClock();

/** What a way of transport must do for a gateway. */
interface Transport {
  put(task: Task): void;
  delivered(id: string): void;
  onSettled: (record: RecordView) => void;
}

class EmptyEngine {
  readonly #settled: (record: RecordView) => void;
  #queued: Task[] = [];

  constructor(settled: (record: RecordView) => void) {
    this.#settled = settled;
  }

  put(task: Task): PutReply {
    if (this.#queued.push(task) === 1) setImmediate(() => this.#settleAll());
    return { kind: "queued", id: task.id };
  }

  #settleAll(): void {
    const queued = this.#queued;
    this.#queued = [];
    const now = clock.now();
    const note = {
      reason: "full",
      worker: "gpu-0",
      startedAt: now,
      why: "64 wait, and a worker is free",
    } as const;
    const batch: BatchNote = { id: "batch", size: queued.length, ...note };
    for (const task of queued) {
      const done = { state: "done", attempt: 1, outcome: { ok: true, output }, cached: false } as const;
      this.#settled({ task, ...done, queuedAt: task.createdAt, settledAt: now, batch });
    }
  }
}

async function remoteCore(path: string): Promise<void> {
  const listeners = new Set<EngineListener>();
  const empty = new EmptyEngine((record) => listeners.forEach((each) => each.settled?.(record)));
  const engine = {
    watch: (listener: EngineListener) => {
      listeners.add(listener);
      return () => {};
    },
    delivered: () => {},
  } as Partial<Engine> as Engine;
  const server = new RemoteServer({
    engine,
    put: (task) => empty.put(task),
    status: () => "",
    told: () => {},
    clock,
    events: new Events(),
    version: "bench",
  });
  await server.listen(path);
}

async function remoteGateway(path: string): Promise<Transport> {
  const engine = new RemoteEngine({
    connect: () => connectLink(path),
    clock,
    events: new Events(),
    limits: () => {
      throw new Error("not asked");
    },
    copied: false,
    version: "bench",
  });
  await engine.open();
  const transport: Transport = {
    put: (task) => void engine.put(task),
    delivered: (id) => engine.delivered(id),
    onSettled: () => {},
  };
  engine.watch({ settled: (record) => transport.onSettled(record) });
  return transport;
}

interface ToCore {
  readonly puts: Task[];
  readonly delivered: string[];
}

interface ToGateway {
  readonly placed: PutReply[];
  readonly settled: RecordView[];
}

/** Gathers what one turn sends. */
class Outgoing<Message extends object> {
  readonly #send: (message: Message) => void;
  readonly #fresh: () => Message;
  #message: Message | undefined;

  constructor(fresh: () => Message, send: (message: Message) => void) {
    this.#fresh = fresh;
    this.#send = send;
  }

  get next(): Message {
    if (this.#message === undefined) {
      this.#message = this.#fresh();
      setImmediate(() => {
        this.#send(this.#message!);
        this.#message = undefined;
      });
    }
    return this.#message;
  }
}

function plainCore(send: (message: ToGateway) => void): (message: ToCore) => void {
  const out = new Outgoing<ToGateway>(() => ({ placed: [], settled: [] }), send);
  // Without what the receiver has: input and parameters.
  const empty = new EmptyEngine(({ task, ...rest }) => {
    out.next.settled.push({ task: { ...task, input: "", parameters: "", content: "" }, ...rest });
  });
  return ({ puts }) => {
    for (const task of puts) out.next.placed.push(empty.put(task));
  };
}

function plainGateway(send: (message: ToCore) => void): [Transport, (message: ToGateway) => void] {
  const out = new Outgoing<ToCore>(() => ({ puts: [], delivered: [] }), send);
  const waiting = new Map<string, (reply: PutReply) => void>();
  const transport: Transport = {
    put: (task) => {
      void new Promise<PutReply>((resolve) => {
        waiting.set(task.id, resolve);
        out.next.puts.push(task);
      });
    },
    delivered: (id) => void out.next.delivered.push(id),
    onSettled: () => {},
  };
  const received = ({ placed, settled }: ToGateway): void => {
    for (const reply of placed) {
      if (reply.kind !== "queued") continue;
      waiting.get(reply.id)?.(reply);
      waiting.delete(reply.id);
    }
    for (const record of settled) transport.onSettled(record);
  };
  return [transport, received];
}

function lines(socket: Socket, received: (message: ToCore & ToGateway) => void): (message: object) => void {
  let rest = "";
  socket.on("error", () => {}); // its process was ended
  socket.setEncoding("utf8");
  socket.on("data", (text: string) => {
    const found = (rest + text).split("\n");
    rest = found.pop()!;
    for (const line of found) received(JSON.parse(line) as ToCore & ToGateway);
  });
  return (message) => void socket.write(`${JSON.stringify(message)}\n`);
}

/** The core process: answers "cpu" with what it has used. */
async function core(kind: Kind, path: string): Promise<void> {
  let plain: (message: ToCore) => void = () => {};
  process.on("disconnect", () => process.exit(0));
  process.on("message", (message: ToCore | "cpu") => {
    if (message === "cpu") process.send!(process.cpuUsage());
    else plain(message);
  });
  if (kind === "remote") await remoteCore(path);
  if (kind === "lines") {
    const server = createServer((socket) => {
      const send = lines(socket, (message) => plain(message));
      plain = plainCore(send);
    });
    server.listen(path);
    await once(server, "listening");
  }
  if (kind === "advanced") plain = plainCore((message) => process.send!(message));
  process.send!("ready");
}

async function transportTo(kind: Kind, path: string, child: ChildProcess): Promise<Transport> {
  if (kind === "remote") return remoteGateway(path);
  if (kind === "lines") {
    const socket = connect(path);
    const [transport, received] = plainGateway((message) => send(message));
    const send = lines(socket, received);
    return transport;
  }
  const [transport, received] = plainGateway((message) => child.send(message));
  child.on("message", (message: ToGateway | NodeJS.CpuUsage) => {
    if ("settled" in message) received(message);
  });
  return transport;
}

async function cpuOf(child: ChildProcess): Promise<NodeJS.CpuUsage> {
  child.send("cpu");
  for (;;) {
    const [message] = (await once(child, "message")) as [object];
    if ("user" in message) return message as NodeJS.CpuUsage;
  }
}

const microseconds = (from: NodeJS.CpuUsage, to: NodeJS.CpuUsage): number =>
  to.user - from.user + to.system - from.system;

interface Figures {
  readonly gateway: number;
  readonly core: number;
  /** From a put to its outcome. */
  readonly wallMs: number;
}

/** A gateway process with its core: figures for one bundle size. */
async function gateway(kind: Kind, bundle: number): Promise<Figures> {
  const home = mkdtempSync(join(tmpdir(), "ferry-bench-"));
  const path = join(home, "core");
  const execArgv = process.env["CORE_ARGV"]?.split(" ") ?? [];
  const child = fork(import.meta.filename, ["core", kind, path], { serialization: "advanced", execArgv });
  await once(child, "message");
  const transport = await transportTo(kind, path, child);
  const inputs = Array.from({ length: 64 }, (_, n) => JSON.stringify(String(n).padStart(2046, "i")));
  const run = async (count: number): Promise<void> => {
    let left = count;
    const { promise, resolve } = Promise.withResolvers<void>();
    let inFlight = 0;
    const putBundle = (): void => {
      for (inFlight = 0; inFlight < bundle; inFlight++) {
        const now = clock.now();
        const rest = { tenant: "ann", tier: 0, model: "embed", parameters: "", content: "" };
        const input = inputs[inFlight & 63]!;
        transport.put({ id: newId(now), ...rest, input, createdAt: now, deadlineAt: now + 30_000 });
      }
    };
    transport.onSettled = (record) => {
      if (record.outcome?.ok !== true || record.outcome.output.length !== output.length)
        throw new Error("wrong");
      transport.delivered(record.task.id);
      left--;
      if (--inFlight > 0) return;
      if (left > 0) putBundle();
      else resolve();
    };
    putBundle();
    await promise;
  };
  await run(20_000 - (20_000 % bundle));
  const count = bundle === 1 ? tasks / 4 : tasks - (tasks % bundle);
  const [coreFrom, own, startedAt] = [await cpuOf(child), process.cpuUsage(), performance.now()];
  await run(count);
  const wallMs = ((performance.now() - startedAt) / count) * bundle;
  const figures = { gateway: microseconds(own, process.cpuUsage()) / count, wallMs };
  const coreCpu = microseconds(coreFrom, await cpuOf(child)) / count;
  child.disconnect();
  await once(child, "exit");
  rmSync(home, { recursive: true });
  return { ...figures, core: coreCpu };
}

async function measured(kind: Kind, bundle: number): Promise<Figures> {
  const child = fork(import.meta.filename, ["gateway", kind, String(bundle)]);
  const [figures] = (await once(child, "message")) as [Figures];
  if (child.exitCode === null) await once(child, "exit");
  return figures;
}

function shown(values: readonly number[]): string {
  const digits = (value: number): string => value.toFixed(value < 10 ? 2 : 1);
  return `${digits(median(values))} (${digits(Math.min(...values))}–${digits(Math.max(...values))})`;
}

const [role, ...args] = process.argv.slice(2);
if (role === "core") {
  await core(args[0] as Kind, args[1]!);
} else if (role === "gateway") {
  const figures = await gateway(args[0] as Kind, Number(args[1]));
  if (process.send === undefined) console.log(figures);
  else process.send(figures);
  process.exit(0);
} else {
  const chosen = role === undefined ? kinds : kinds.filter((kind) => kind === role);
  console.log("tasks a turn  transport   µs at the core         µs at the gateway      ms put to outcome");
  for (const bundle of bundles) {
    const all = new Map(chosen.map((kind) => [kind, [] as Figures[]]));
    for (let round = 0; round < rounds; round++) {
      for (const kind of chosen) all.get(kind)!.push(await measured(kind, bundle));
    }
    for (const [kind, figures] of all) {
      const [coreUs, gatewayUs] = [figures.map((each) => each.core), figures.map((each) => each.gateway)];
      const wall = figures.map(({ wallMs }) => wallMs);
      console.log(
        `${String(bundle).padStart(12)}  ${kind.padEnd(10)}  ${shown(coreUs).padEnd(21)}  ` +
          `${shown(gatewayUs).padEnd(21)}  ${shown(wall)}`,
      );
    }
  }
}
