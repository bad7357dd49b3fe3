/**
 * A reload every 100 ms, for a minute in `npm run test:long`, under 200 requests a second, each to another valid config at random, while people
 * drain, remove and add workers: every answer is right, and nothing is left behind.
 *
 * Ferry runs in this process, so that what it holds can be counted: alarms, listeners, sockets, threads, child processes. They
 * are counted by the same config after some reloads and after many; what leaks has grown then.
 */
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { type Alarm, type Clock, SystemClock } from "../../src/app/clock.ts";
import { parseConfig } from "../../src/app/config/load.ts";
import { Random } from "../../src/core/random.ts";
import { MemoryEngine } from "../../src/engine/memory/engine.ts";
import { type Ferry, startFerry } from "../../src/app/ferry.ts";
import { Reloader } from "../../src/app/reload.ts";
import { Events } from "../../src/observe/events.ts";
import { usually } from "../fixtures/long.ts";
import { eventually, Folder } from "./harness.ts";
import { Stream } from "./steady-load.ts";
import { StubWorker } from "./stub-worker.ts";

/** A new worker is taken to need `workerMs` until it has answered: nobody is refused for that, nor because a machine stalls. */
const timeouts = { queueMs: 300_000, workerMs: 20_000, totalMs: 350_000 };
const EVERY_MS = 100;
const SEED = 7;

/** Knows the alarms that are set. */
class CountingClock implements Clock {
  readonly #clock = new SystemClock();
  open = 0;

  now(): number {
    return this.#clock.now();
  }

  wall(): number {
    return this.#clock.wall();
  }

  at(time: number, ring: () => void, withinMs?: number): Alarm {
    let set = true;
    this.open++;
    const off = (): void => {
      if (set) this.open--;
      set = false;
    };
    const rung = (): void => {
      off();
      ring();
    };
    const alarm = withinMs === undefined ? this.#clock.at(time, rung) : this.#clock.at(time, rung, withinMs);
    const cancel = (): void => {
      off();
      alarm.cancel();
    };
    return { cancel };
  }

  rest(): Promise<void> {
    return this.#clock.rest();
  }
}

/** Counts those who listen to events and to the engine, from now on. */
function countListeners(): { readonly events: () => number; readonly engine: () => number } & Disposable {
  const counts = { events: 0, engine: 0 };
  const counted = (which: keyof typeof counts, off: () => void): (() => void) => {
    let on = true;
    counts[which]++;
    return () => {
      if (on) counts[which]--;
      on = false;
      off();
    };
  };
  const on = Reflect.get(Events.prototype, "on");
  const watch = Reflect.get(MemoryEngine.prototype, "watch");
  Events.prototype.on = function (name, listener) {
    return counted("events", on.call(this, name, listener as never));
  };
  MemoryEngine.prototype.watch = function (listener) {
    return counted("engine", watch.call(this, listener));
  };
  const restore = (): void => {
    Events.prototype.on = on;
    MemoryEngine.prototype.watch = watch;
  };
  return { events: () => counts.events, engine: () => counts.engine, [Symbol.dispose]: restore };
}

function childProcesses(): number {
  const threads = readdirSync("/proc/self/task");
  const all = threads.map((thread) => readFileSync(`/proc/self/task/${thread}/children`, "utf8"));
  return all.join(" ").split(" ").filter(Boolean).length;
}

/** Connections that are open at one of these ports of this machine. */
function connections(ports: readonly number[]): number {
  const rows = readFileSync("/proc/self/net/tcp", "utf8").split("\n").slice(1);
  const established = rows.map((row) => row.trim().split(/\s+/)).filter((fields) => fields[3] === "01");
  return established.filter((fields) => ports.includes(Number.parseInt(fields[1]!.split(":")[1]!, 16)))
    .length;
}

/** By kind; what comes and goes with each request is left out. */
function resources(): Record<string, number> {
  const counts: Record<string, number> = { children: childProcesses() };
  for (const kind of process.getActiveResourcesInfo()) {
    if (/^(?:Immediate|TickObject|Timeout|TCPSocketWrap|.*Req.*)/.test(kind)) continue;
    counts[kind] = (counts[kind] ?? 0) + 1;
  }
  return counts;
}

class Soak {
  readonly random = new Random(SEED);
  readonly stubs: readonly StubWorker[];
  readonly folder: string;
  text = "";

  constructor(stubs: readonly StubWorker[], folder: string) {
    this.stubs = stubs;
    this.folder = folder;
    this.text = this.base;
  }

  below(most: number): number {
    return Math.floor(this.random.next() * most);
  }

  one<T>(all: readonly T[]): T {
    return all[this.below(all.length)]!;
  }

  chance(share: number): boolean {
    return this.random.next() < share;
  }

  get base(): string {
    const stub = this.#stub(this.stubs, 0, {});
    return this.#config([stub, simulated("two", 2, 5), this.#module("mod", 1), this.#python(1)], {});
  }

  /** Every setting that can be changed has its chance, and every kind of workers comes and goes. */
  next(): string {
    const some = this.stubs.filter((_, at) => at === 0 || this.chance(0.6));
    const stub = this.#stub(some, this.chance(0.5) ? this.below(3) : 0, {
      maxBatchSize: this.one([8, 16, 64]),
      maxWaitMs: this.one([0, 2, 20]),
      policy: this.one(["adaptive", "fixed"]),
      pipeline: this.one(["auto", 1, 2]),
      collapse: this.chance(0.5),
      retry: { max: this.one([2, 5]) },
      health: { askMs: this.one([1000, 2000]) },
      deny: this.chance(0.3) ? ["never in any input"] : [],
      protocols: this.chance(0.3) ? ["openai-embeddings"] : [],
      passthrough: this.chance(0.3),
    });
    const others = [
      ...(this.chance(0.6) ? [simulated("two", 1 + this.below(4), this.one([2, 5]))] : []),
      ...(this.chance(0.25) ? [this.#module("mod", 1 + this.below(2))] : []),
      ...(this.chance(0.1) ? [this.#python(1)] : []),
    ];
    const models = this.chance(0.5) ? [stub, ...others] : [...others, stub];
    return this.#config(models, {
      telemetry: { logLevel: this.one(["silent", "error", "warn"]) },
      tiers: { a: { ratePerMinute: this.one([1_000_000, 2_000_000]) }, b: {} },
      results: { ttlMs: this.one([60_000, 120_000]) },
      deadLetters: { max: this.one([10, 1000]) },
      admission: { targetUtilization: this.one([0.7, 0.8]) },
    });
  }

  #stub(stubs: readonly StubWorker[], secret: number, more: object): object {
    const workers = stubs.map(({ url }) => url);
    const backend = { kind: "http", workers, authorization: `Bearer ${secret}` };
    return { name: "stub", backend, timeouts, cache: { scope: "off" }, ...more };
  }

  #module(name: string, workers: number): object {
    return { name, backend: { kind: "module", workers, function: join(this.folder, "echo.mjs") }, timeouts };
  }

  #python(workers: number): object {
    const backend = { kind: "python", workers, function: `${join(this.folder, "echo.py")}:batch` };
    return { name: "py", backend, timeouts };
  }

  #config(models: readonly object[], more: object): string {
    const ports = { listen: "127.0.0.1:0", admin: { listen: "127.0.0.1:0" } };
    const limits = { drainMs: 2000, lingerMs: 0, requestTimeoutMs: 1500, headersTimeoutMs: 1000 };
    const tiers = { a: {}, b: {} };
    return JSON.stringify({ ...ports, limits, telemetry: { logLevel: "silent" }, tiers, ...more, models });
  }
}

function simulated(name: string, workers: number, baseMs: number): object {
  return { name, backend: { kind: "simulated", workers, baseMs }, timeouts };
}

async function ask(url: string, method: string, body?: object): Promise<{ status: number; text: string }> {
  const headers = { "content-type": "application/json" };
  const sent = body === undefined ? {} : { body: JSON.stringify(body), headers };
  const answer = await fetch(url, { method, ...sent });
  return { status: answer.status, text: await answer.text() };
}

/** What somebody may do to a worker; the first is left alone, so that there is always one. */
async function byHand(soak: Soak, { adminUrl }: Ferry): Promise<void> {
  const { url } = soak.one(soak.stubs.slice(1));
  const name = `${adminUrl}/internal/workers/${encodeURIComponent(new URL(url).host)}`;
  const what = soak.below(4);
  const { status, text } =
    what === 0
      ? await ask(`${name}/drain?model=stub`, "POST")
      : what === 1
        ? await ask(`${name}/resume?model=stub`, "POST")
        : what === 2
          ? await ask(`${name}?model=stub`, "DELETE")
          : await ask(`${adminUrl}/internal/workers`, "POST", { model: "stub", url });
  assert.ok([200, 201, 202, 204, 404, 409].includes(status), `${status} ${text}`);
}

/** To a model that may or may not be there: its answer, or that it is not. */
async function askOther(soak: Soak, { apiUrl }: Ferry, input: string): Promise<void> {
  const model = soak.one(["two", "mod", "py"]);
  const { status, text } = await ask(`${apiUrl}/v1/inference`, "POST", { model, input });
  if (status === 200) assert.ok(text.includes(`"${input}"`), text);
  else assert.ok([400, 404].includes(status) && /served here|was removed/.test(text), `${status} ${text}`);
}

async function reload(soak: Soak, { adminUrl }: Ferry, text: string): Promise<void> {
  soak.text = text;
  const answer = await ask(`${adminUrl}/internal/reload`, "POST");
  assert.equal(answer.status, 200, `${answer.text}\n${text}`);
}

/** Back to where all began: every worker of the config is there, and gets batches. */
async function settle(soak: Soak, ferry: Ferry): Promise<void> {
  await reload(soak, ferry, soak.base);
  const state = async (): Promise<boolean> => {
    const { text } = await ask(`${ferry.adminUrl}/internal/workers`, "GET");
    const { workers, removed } = JSON.parse(text) as Record<
      string,
      { name: string; address?: string; state: string }[]
    >;
    for (const { address } of removed!) {
      await ask(`${ferry.adminUrl}/internal/workers`, "POST", { model: "stub", url: address });
    }
    for (const { name, state } of workers!) {
      const path = `${ferry.adminUrl}/internal/workers/${encodeURIComponent(name)}`;
      if (state === "draining") await ask(`${path}/resume?model=stub`, "POST");
    }
    return (
      removed!.length === 0 && workers!.length === 8 && workers!.every(({ state }) => state !== "draining")
    );
  };
  await eventually(state, 20_000);
}

test("a reload every 100 ms under 200 requests/s: all answers right, nothing left behind", async () => {
  await using stack = new AsyncDisposableStack();
  const folder = stack.use(await Folder.make());
  await folder.write("echo.mjs", "export default (inputs) => inputs;\n");
  await folder.write("echo.py", "def batch(inputs):\n    return inputs\n");
  const stubs: StubWorker[] = [];
  for (let at = 0; at < 4; at++) {
    stubs.push(stack.use(await StubWorker.listen((call) => void setTimeout(() => call.echo(), 3))));
  }
  const soak = new Soak(stubs, folder.path);
  using listeners = countListeners();
  const clock = new CountingClock();
  const load = (): ReturnType<typeof parseConfig> => parseConfig(soak.text, "ferry.yaml", {});
  const { config, problems } = load();
  assert.ok(problems === undefined);
  const ferry = await startFerry(config, clock, "all", () => {});
  stack.defer(() => ferry.stop());
  const apply = (next: Parameters<Ferry["change"]>[0]): Promise<void> => ferry.change(next);
  const reloader = new Reloader(config, { load, apply, tell: () => {} });
  ferry.onReload = () => reloader.reload();

  const stream = new Stream({ port: Number(new URL(ferry.apiUrl).port), perSecond: 200, model: "stub" });
  const run = async (reloads: number): Promise<void> => {
    const from = performance.now();
    for (let at = 1; at <= reloads; at++) {
      const aside = [
        ...(soak.chance(0.5) ? [byHand(soak, ferry)] : []),
        ...[1, 2].map((each) => askOther(soak, ferry, `${at} ${each}`)),
      ];
      await reload(soak, ferry, soak.next());
      await Promise.all(aside);
      await pause(Math.max(0, from + at * EVERY_MS - performance.now()));
    }
  };
  const count = (): Record<string, number> => ({
    alarms: clock.open,
    events: listeners.events(),
    engine: listeners.engine(),
    toWorkers: connections(stubs.map(({ url }) => Number(new URL(url).port))),
    ...resources(),
  });
  await run(15);
  await settle(soak, ferry);
  await stream.more(100);
  // What a generation still has open it may have for `requestTimeoutMs`.
  await pause(2000);
  const before = count();
  await run(usually(20, 600));
  await settle(soak, ferry);
  await stream.more(100);
  await pause(2000);
  const grown = (): [string, number, number][] => {
    const after = count();
    const kinds = new Set([...Object.keys(before), ...Object.keys(after)]);
    const all = [...kinds].map((kind): [string, number, number] => [
      kind,
      before[kind] ?? 0,
      after[kind] ?? 0,
    ]);
    // Some requests may be under way, with an alarm or two each.
    const slack = (kind: string): number => (kind === "alarms" ? 16 : 0);
    return all.filter(([kind, was, is]) => is > was + slack(kind));
  };
  await eventually(() => grown().length === 0, 15_000).catch(() => assert.deepEqual(grown(), []));
  await stream.stop();
  assert.deepEqual(stream.failed, [], stream.told());
  await stream[Symbol.asyncDispose]();
  assert.ok(
    stubs.every(({ mostAtOnce }) => mostAtOnce <= 2),
    "never more than `pipeline` says",
  );

  await ferry.stop();
  assert.equal(childProcesses(), 0);
  assert.equal(clock.open, 0, "no alarm is set");
  assert.equal(listeners.engine(), 0);
});
