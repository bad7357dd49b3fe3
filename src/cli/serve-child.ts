/**
 * One process of `ferry serve --processes`: `ferry serve` itself, with its parent in place of the person.
 *
 * It gets its config from the parent, and tells the parent what others are told in words: ready, done. The parent
 * decides when it ends. Ctrl-C reaches every process of a terminal, so SIGINT is not heard here; SIGTERM drains, as
 * the parent's word does, and both together count once: whoever stops this process alone gets a drained one, and the
 * parent starts the next. When the parent is gone it drains too, and if it was draining already it ends at once.
 */
import cluster from "node:cluster";
import type { Config, Role } from "../app/config/config.ts";
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

/** The other end of `Life`. */
export interface Parent {
  /** Resolves when it is on its way. */
  tell(word: Word): Promise<void>;
  onOrder(listener: (order: ProcessOrder) => void): void;
  /** SIGTERM, to this process alone or to all of a group. */
  onTerminate(listener: () => void): void;
  onLost(listener: () => void): void;
  /** Ends this process now. */
  end(): void;
}

export async function serveChild(
  console: Console,
  parts: Omit<ServeParts, "signals">,
  parent: Parent,
): Promise<number> {
  const begin = Promise.withResolvers<{ config: Config; role: Role }>();
  const signals = new ParentSignals(parent);
  let ferry: Served | undefined;
  const changes = new ChildChanges(parent, parts.clock);
  const asking: ((outcome: Reloaded) => void)[] = [];
  parent.onOrder((order) => {
    if (order.is === "begin") begin.resolve(order);
    else if (order.is === "drain") signals.drain();
    else if (order.is === "reloaded") asking.shift()?.(order.outcome);
    else if (order.is === "change") changes.begin(order.round, order.config, ferry!);
    else if (order.is === "commit" || order.is === "abandon") changes.decide(order.round, order.is);
    else void Promise.resolve(ferry!.tally()).then((tally) => parent.tell({ is: "tally", tally }));
  });
  const { config, role } = await begin.promise;
  const start: ServeParts["start"] = async (...words) => {
    ferry = await parts.start(...words);
    // The parent has the file, and tells all of us.
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
    const code = await runServe(config, [], console, { ...parts, start, signals }, wishes);
    await last;
    return code;
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    await parent.tell({ is: "failed", why: error.message });
    return 1;
  }
}

/** What the parent wants, as signals; before anybody listens to them they end the process, as signals do. */
class ParentSignals implements Signals {
  readonly #parent: Parent;
  #listener: (() => void) | undefined;
  #draining = false;

  constructor(parent: Parent) {
    this.#parent = parent;
    parent.onTerminate(() => this.drain());
    parent.onLost(() => {
      if (this.#draining) parent.end();
      else this.drain();
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

/** Undefined in a process that nobody forked. */
export function clusterParent(): Parent | undefined {
  const { worker } = cluster;
  if (worker === undefined || !cluster.isWorker) return undefined;
  // Heard and not followed: the parent got it too.
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
        // Else node:cluster ends the process here, with the requests in its hands.
        worker.exitedAfterDisconnect = true;
        listener();
      }),
    end: () => process.kill(process.pid, "SIGKILL"),
  };
}
