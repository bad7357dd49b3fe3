/** The parent of `ferry serve --processes` on virtual time, around processes made of plain functions. */
import assert from "node:assert/strict";
import { parseConfig } from "../../src/app/config/load.ts";
import type { Config } from "../../src/app/config/config.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { Processes, type ProcessOrder, type Watcher, type Word } from "../../src/app/processes/processes.ts";

export function configOf(more = ""): Config {
  const { config, problems } = parseConfig(
    `engine: { kind: redis, url: redis://127.0.0.1:6379 }\n` +
      `models: [{ name: m, backend: { kind: simulated, workers: 1 } }]\n${more}`,
    "ferry.yaml",
    {},
  );
  assert.deepEqual(problems, undefined);
  return config;
}

/** A process that does what the test says; `watcher` is how it speaks. */
export interface Fake {
  readonly watcher: Watcher;
  readonly orders: ProcessOrder[];
  killed: boolean;
}

/** The core and `count - 1` gateways, which are forked once it is ready. */
export function stage(count: number, more = "") {
  const clock = new VirtualClock();
  const lines: string[] = [];
  const forked: Fake[] = [];
  const config = configOf(more);
  const processes = new Processes(count - 1, config, "all", {
    clock,
    epoch: 0,
    socket: "/run/core",
    log: (line) => void lines.push(line),
    backlogTaken: async () => {},
    removeSocket: async () => {},
    fork: (watcher) => {
      const fake: Fake = { watcher, orders: [], killed: false };
      forked.push(fake);
      return {
        pid: 100 + forked.length,
        send: (order) => void fake.orders.push(order),
        kill: () => {
          fake.killed = true;
          queueMicrotask(() => watcher.gone("was killed by SIGKILL"));
        },
      };
    },
  });
  return { clock, lines, forked, processes, logged: () => lines.map((line) => JSON.parse(line)) };
}

export function ready(port: number): Word {
  return {
    is: "ready",
    apiUrl: "http://127.0.0.1:8080",
    adminUrl: `http://127.0.0.1:${port}`,
    durability: "local",
  };
}

export async function started(count: number, more = "") {
  const all = stage(count, more);
  const start = all.processes.start();
  for (let at = 0; at < count; at++) all.forked[at]!.watcher.word(ready(8081));
  await start;
  return all;
}
