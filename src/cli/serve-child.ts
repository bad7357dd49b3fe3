/**
 * A child of `ferry serve --processes`: `ferry serve` controlled by its parent.
 *
 * The parent sends the config, gets ready and totals, and decides when the child exits. Ctrl-C reaches every process of
 * a terminal, so SIGINT is ignored here. SIGTERM and the parent's order both drain, and together count once: stopping
 * one child drains it, and the parent starts the next. If the parent is gone the child drains too, or exits at once if
 * it was draining.
 */
import cluster from "node:cluster";
import { rmdirSync, rmSync } from "node:fs";
import { dirname } from "node:path";
import type { Clock } from "../app/clock.ts";
import type { ProcessOrder, Word } from "../app/processes/processes.ts";
import type { Reloaded } from "../app/reload.ts";
import { ChildChanges } from "../app/processes/changes.ts";
import { Failure, type Console } from "./command.ts";
import {
  runServe,
  type Served,
  type ServeParts,
  type Signals,
  type StopSignal,
  type Voice,
} from "./serve.ts";

export interface Parent {
  tell(word: Word): Promise<void>;
  onOrder(listener: (order: ProcessOrder) => void): void;
  /** SIGTERM, to this process or to its group. */
  onTerminate(listener: () => void): void;
  onLost(listener: () => void): void;
  end(): void;
}

export async function serveChild(
  console: Console,
  parts: Omit<ServeParts, "signals" | "clock"> & { clockOf(epoch: number): Clock },
  parent: Parent,
): Promise<number> {
  const begin = Promise.withResolvers<Extract<ProcessOrder, { is: "begin" }>>();
  const signals = new ParentSignals(parent);
  let ferry: Served | undefined;
  const asking: ((outcome: Reloaded) => void)[] = [];
  parent.onOrder((order) => {
    if (order.is === "begin") begin.resolve(order);
    else if (order.is === "drain") signals.drain();
    else if (order.is === "reloaded") asking.shift()?.(order.outcome);
    else if (order.is === "change") changes.begin(order.round, order.config, ferry!);
    else if (order.is === "commit" || order.is === "abandon") changes.decide(order.round, order.is);
    else void Promise.resolve(ferry!.tally()).then((tally) => parent.tell({ is: "tally", tally }));
  });
  const { config, role, part, epoch } = await begin.promise;
  // A core that is killed leaves its socket, and no other process would remove it.
  signals.onKilled = () => removeSocket(part.socket);
  const clock = parts.clockOf(epoch);
  const changes = new ChildChanges(parent, clock);
  const start: ServeParts["start"] = async (...[given, time, as, log]) => {
    ferry = await parts.start(given, time, as, log, part);
    // The parent has the file, and reloads all processes.
    ferry.onReload = () =>
      new Promise((resolve) => {
        asking.push(resolve);
        void parent.tell({ is: "reload" });
      });
    return ferry;
  };
  let last: Promise<void> | undefined;
  const voice: Voice = {
    ready: ({ apiUrl, grpcUrl, adminUrl, durability }) =>
      void parent.tell({ is: "ready", apiUrl, grpcUrl, adminUrl, durability }),
    draining: () => {},
    farewell: (tally) => void (last = parent.tell({ is: "ended", tally })),
  };
  try {
    const wishes = { role, noColor: true, voice };
    const code = await runServe(config, [], console, { ...parts, clock, start, signals }, wishes);
    await last;
    return code;
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    await parent.tell({ is: "failed", why: error.message });
    return 1;
  }
}

function removeSocket(path: string): void {
  try {
    rmSync(path, { force: true });
    rmdirSync(dirname(path));
  } catch {
    // Another child was first.
  }
}

/** The parent's orders as signals; without a listener they end the process, as signals do. */
class ParentSignals implements Signals {
  readonly #parent: Parent;
  onKilled: (() => void) | undefined;
  #listener: (() => void) | undefined;
  #draining = false;

  constructor(parent: Parent) {
    this.#parent = parent;
    parent.onTerminate(() => this.drain());
    parent.onLost(() => {
      if (!this.#draining) return this.drain();
      this.onKilled?.();
      parent.end();
    });
  }

  drain(): void {
    if (this.#draining) return;
    this.#draining = true;
    if (this.#listener === undefined) this.#parent.end();
    else this.#listener();
  }

  on(signal: StopSignal, listener: () => void): void {
    if (signal === "SIGTERM") this.#listener = listener;
  }

  off(): void {}

  raise(): void {
    this.#parent.end();
  }
}

export function clusterParent(): Parent | undefined {
  const { worker } = cluster;
  if (worker === undefined || !cluster.isWorker) return undefined;
  // Ignored: the parent got it too.
  process.on("SIGINT", () => {});
  process.on("SIGHUP", () => {});
  return {
    tell: (word) =>
      new Promise((resolve) => {
        if (worker.isConnected()) worker.send(word, undefined, () => resolve());
        else resolve();
      }),
    onOrder: (listener) => void worker.on("message", listener),
    onTerminate: (listener) => void process.on("SIGTERM", listener),
    onLost: (listener) =>
      void worker.on("disconnect", () => {
        // Otherwise node:cluster exits here, losing the requests in progress.
        worker.exitedAfterDisconnect = true;
        listener();
      }),
    end: () => process.kill(process.pid, "SIGKILL"),
  };
}
