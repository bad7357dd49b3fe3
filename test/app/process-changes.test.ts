/** Processes that change their config together: all or none, whichever of them sleeps, hangs or dies meanwhile. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import type { Change } from "../../src/app/reload.ts";
import type { Clock } from "../../src/app/clock.ts";
import type { Config } from "../../src/app/config/config.ts";
import { ChildChanges } from "../../src/app/processes/changes.ts";
import type { Served } from "../../src/cli/serve.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import {
  FIRST_WAIT_MS,
  Processes,
  type ProcessOrder,
  type Watcher,
  type Word,
} from "../../src/app/processes/processes.ts";
import { configOf, type Fake, ready, started } from "./process-stage.ts";

const SILENT_MS = 5000;
const wanted = (maxQueued: number): Config => configOf(`limits: { maxQueued: ${maxQueued} }`);

const orders = (fake: Fake): string[] =>
  fake.orders.map((order) =>
    order.is === "change" || order.is === "begin" ? `${order.is} ${order.config.limits.maxQueued}` : order.is,
  );

const turn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

function prepared({ watcher }: Fake, round = 1, why?: string): Promise<void> {
  watcher.word({ is: "prepared", round, ...(why !== undefined && { why }) });
  return turn();
}

function changed({ watcher }: Fake, round = 1): void {
  watcher.word({ is: "changed", round });
}

describe("another config", () => {
  test("is every process's, with its own ports, once all have said that they can", async () => {
    const { processes, forked } = await started(2);
    const change = processes.change(configOf("limits: { maxQueued: 7 }\nadmin: { listen: 127.0.0.1:9 }"));
    await turn();
    await prepared(forked[0]!);
    assert.deepEqual(forked.map(orders), [
      ["begin 10000", "change 7"],
      ["begin 10000", "change 7"],
    ]);
    await prepared(forked[1]!);
    assert.deepEqual(
      forked.map(({ orders: all }) => all.at(-1)!.is),
      ["commit", "change"],
      "the core first",
    );
    changed(forked[0]!);
    await turn();
    changed(forked[1]!);
    await change;
    assert.deepEqual(
      forked.map(({ orders: all }) => all.at(-1)!.is),
      ["commit", "commit"],
    );
    const [, order] = forked[1]!.orders;
    assert.ok(order?.is === "change" && order.config.admin.listen.port === 8081);
  });

  test("where one cannot, none does, and its reason is the error", async () => {
    const { processes, forked } = await started(2);
    const failed = assert.rejects(processes.change(wanted(7)), /^Error: no such worker$/);
    await turn();
    await prepared(forked[0]!);
    await prepared(forked[1]!, 1, "no such worker");
    await failed;
    assert.deepEqual(forked.map(orders), [
      ["begin 10000", "change 7", "abandon"],
      ["begin 10000", "change 7"],
    ]);
  });

  test("a process that dies meanwhile comes back with it", async () => {
    const { processes, forked, clock } = await started(2);
    const change = processes.change(wanted(7));
    await turn();
    await prepared(forked[0]!);
    forked[1]!.watcher.gone("was killed by SIGKILL");
    await turn();
    changed(forked[0]!);
    await change;
    await clock.run(clock.now() + FIRST_WAIT_MS + 1);
    assert.deepEqual(orders(forked[2]!), ["begin 7"]);
  });

  test("a process that is starting when it comes is told as soon as it is ready", async () => {
    const { processes, forked, clock } = await started(2);
    forked[1]!.watcher.gone("was killed by SIGKILL");
    await clock.run(clock.now() + FIRST_WAIT_MS + 1);
    assert.deepEqual(orders(forked[2]!), ["begin 10000"]);
    const change = processes.change(wanted(7));
    await turn();
    await prepared(forked[0]!);
    changed(forked[0]!);
    await change;
    forked[2]!.watcher.word(ready(8082));
    await turn();
    assert.deepEqual(orders(forked[2]!), ["begin 10000", "change 7"]);
    const next = processes.change(wanted(8));
    assert.equal(forked[2]!.orders.length, 2, "one after the other");
    await prepared(forked[2]!, 1, "no such worker");
    assert.equal(forked[2]!.killed, true, "it begins anew with the config that it could not take");
    await turn();
    await prepared(forked[0]!, 2);
    changed(forked[0]!, 2);
    await next;
    await clock.run(clock.now() + 2 * FIRST_WAIT_MS + 1);
    assert.deepEqual(orders(forked[3]!), ["begin 8"]);
  });

  test("one that became ready while the others prepared follows them", async () => {
    const { processes, forked, clock } = await started(2);
    forked[1]!.watcher.gone("was killed by SIGKILL");
    await clock.run(clock.now() + FIRST_WAIT_MS + 1);
    const change = processes.change(wanted(7));
    await turn();
    forked[2]!.watcher.word(ready(8082));
    await prepared(forked[0]!);
    changed(forked[0]!);
    await change;
    await turn();
    await prepared(forked[2]!);
    assert.deepEqual(orders(forked[2]!), ["begin 10000", "change 7", "commit"]);
  });

  test("one that says nothing is given up: none changes, and who it is and what to do is said", async () => {
    const { processes, forked, clock } = await started(3);
    const failed = assert.rejects(
      processes.change(wanted(7)),
      /^Error: process gateway-1 did not answer for 5000 ms: .*kill -9 102/,
    );
    await turn();
    await prepared(forked[0]!);
    await prepared(forked[2]!);
    await clock.run(clock.now() + SILENT_MS + 1);
    await failed;
    assert.deepEqual(
      forked.map(({ orders: all }) => all.at(-1)!.is),
      ["abandon", "abandon", "abandon"],
    );
    // While it owes an answer it is told nothing more, however often it is tried.
    for (let again = 0; again < 3; again++) {
      const once = assert.rejects(processes.change(wanted(8)), /process gateway-1 did not answer/);
      await turn();
      await prepared(forked[0]!, 2 + again);
      await prepared(forked[2]!, 2 + again);
      await clock.run(clock.now() + SILENT_MS + 1);
      await once;
    }
    assert.equal(forked[1]!.orders.length, 3, "begin, change, abandon");
    const change = processes.change(wanted(9));
    await turn();
    await prepared(forked[0]!, 5);
    await prepared(forked[2]!, 5);
    await prepared(forked[1]!, 1);
    await prepared(forked[1]!, 2);
    changed(forked[0]!, 5);
    await turn();
    changed(forked[1]!, 2);
    changed(forked[2]!, 5);
    await change;
    assert.deepEqual(orders(forked[1]!).slice(-2), ["change 9", "commit"]);
  });

  test("one that prepares for minutes and says so is waited for", async () => {
    const { processes, forked, clock } = await started(1);
    const change = processes.change(wanted(7));
    await turn();
    for (let second = 0; second < 300; second++) {
      await clock.run(clock.now() + 1000);
      forked[0]!.watcher.word({ is: "preparing" });
    }
    await prepared(forked[0]!);
    changed(forked[0]!);
    await change;
  });

  test("one that falls asleep before the verdict changes when it wakes: the others are not held up", async () => {
    const { processes, forked, clock, logged } = await started(2);
    const change = processes.change(wanted(7));
    await turn();
    for (const fake of forked) await prepared(fake);
    changed(forked[0]!);
    await turn();
    await clock.run(clock.now() + SILENT_MS + 1);
    await change;
    assert.match(logged().at(-1).msg, /^process has not said that it changed with the others/);
    assert.equal(forked[1]!.orders.at(-1)!.is, "commit");
  });

  test("one that is asked to reload has all of them do so, and is told what came of it", async () => {
    const { processes, forked } = await started(2);
    forked[1]!.watcher.word({ is: "reload" });
    await turn();
    assert.deepEqual(forked[1]!.orders.at(-1), {
      is: "reloaded",
      outcome: { problems: ["there is no config file to read again; start Ferry with -c FILE"] },
    });
    processes.onReload = async () => ({ changed: ["something"] });
    forked[1]!.watcher.word({ is: "reload" });
    await turn();
    assert.deepEqual(forked[1]!.orders.at(-1), { is: "reloaded", outcome: { changed: ["something"] } });
  });
});

/** A process with the real other end, which can be stopped: what it is sent waits for it then. */
class Sleeper {
  config: Config | undefined;
  asleep = false;
  readonly #watcher: Watcher;
  readonly #changes: ChildChanges;
  readonly #missed: ProcessOrder[] = [];
  readonly #unsaid: Word[] = [];
  /** Prepared and not decided on: what would be left behind. */
  open = 0;
  readonly #served: Served;

  constructor(watcher: Watcher, clock: Clock, prepareMs: () => number) {
    this.#watcher = watcher;
    this.#changes = new ChildChanges({ tell: async (word) => this.#tell(word) }, clock);
    const prepare = async (next: Config): Promise<Change> => {
      await new Promise<void>((resolve) => clock.at(clock.now() + prepareMs(), resolve));
      if (next.limits.maxQueued % 10 === 0) throw new Error("a round number");
      this.open++;
      return {
        commit: async () => {
          this.config = next;
          this.open--;
        },
        abandon: async () => void this.open--,
      };
    };
    this.#served = { prepare } as Partial<Served> as Served;
  }

  order(order: ProcessOrder): void {
    if (this.asleep) return void this.#missed.push(order);
    if (order.is === "begin") {
      this.config = order.config;
      queueMicrotask(() => this.#tell(ready(8081)));
    } else if (order.is === "change") this.#changes.begin(order.round, order.config, this.#served);
    else if (order.is === "commit" || order.is === "abandon") this.#changes.decide(order.round, order.is);
  }

  #tell(word: Word): void {
    if (this.asleep) this.#unsaid.push(word);
    else this.#watcher.word(word);
  }

  wake(): void {
    this.asleep = false;
    for (const word of this.#unsaid.splice(0)) this.#tell(word);
    for (const order of this.#missed.splice(0)) this.order(order);
  }
}

test("whoever sleeps whenever: all end with the same config, and none with what was refused", async () => {
  const act = fc.oneof(
    { weight: 3, arbitrary: fc.record({ reload: fc.integer({ min: 1, max: 99 }) }) },
    { weight: 2, arbitrary: fc.record({ sleep: fc.nat(2) }) },
    { weight: 3, arbitrary: fc.record({ wake: fc.nat(2) }) },
    { weight: 3, arbitrary: fc.record({ passMs: fc.integer({ min: 0, max: 7000 }) }) },
  );
  const run = async (acts: readonly object[], seed: number): Promise<void> => {
    const clock = new VirtualClock();
    const all: Sleeper[] = [];
    let slow = seed;
    const prepareMs = (): number => (slow = (slow * 7919 + 13) % 900);
    const config = configOf();
    const processes = new Processes(2, config, "all", {
      clock,
      epoch: 0,
      socket: "/run/core",
      log: () => {},
      backlogTaken: async () => {},
      removeSocket: async () => {},
      fork: (watcher) => {
        const sleeper = new Sleeper(watcher, clock, prepareMs);
        all.push(sleeper);
        return { pid: all.length, send: (order) => sleeper.order(order), kill: () => assert.fail("killed") };
      },
    });
    await processes.start();
    let inForce = 10_000;
    let last: Promise<unknown> = Promise.resolve();
    const reload = (maxQueued: number): void => {
      last = last.then(async () => {
        await processes.change(wanted(maxQueued)).then(
          () => (inForce = maxQueued),
          () => {},
        );
      });
    };
    for (const each of acts as readonly Record<string, number>[]) {
      if (each["reload"] !== undefined) reload(each["reload"]);
      else if (each["sleep"] !== undefined) all[each["sleep"]]!.asleep = true;
      else if (each["wake"] !== undefined) all[each["wake"]]!.wake();
      else await clock.run(clock.now() + each["passMs"]!);
      await turn();
    }
    for (const sleeper of all) sleeper.wake();
    await turn();
    for (let step = 0; step < 2 * acts.length + 2; step++) await clock.run(clock.now() + 20_000);
    await last;
    await clock.run(clock.now() + 20_000);
    assert.deepEqual(
      all.map((sleeper) => [sleeper.config!.limits.maxQueued, sleeper.open]),
      [1, 2, 3].map(() => [inForce, 0]),
    );
    // Nothing ticks on.
    assert.equal(await clock.run(clock.now() + 60_000), 0);
  };
  const acts = fc.array(act, { minLength: 1, maxLength: 20 });
  await fc.assert(fc.asyncProperty(acts, fc.integer({ min: 1, max: 1000 }), run), { numRuns: 200 });
});
