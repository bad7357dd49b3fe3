/**
 * /internal/live: the event stream (`frames.ts`) for the page and `ferry top`. A viewer gets one `hello`, then changes
 * twice a second; a frame is encoded once for all, and only while there are viewers. A slow viewer is skipped until it
 * has caught up and then gets a new hello, so it costs at most one hello of memory; after `stuckMs` it is disconnected.
 * Frames are the heartbeat; the stream begins with a comment so that proxies flush the headers.
 */
import type { Alarm, Clock } from "../../app/clock.ts";
import { Refusal } from "../../core/errors.ts";
import { DISPATCH_REASONS } from "../../core/task.ts";
import type { Exchange, Outflow } from "../../gateway/exchange.ts";
import type { Routes } from "../../gateway/server.ts";
import { SHED_REASONS } from "../events.ts";
import type { Fold } from "./fold.ts";
import type { Hello } from "./frames.ts";

export const MAX_VIEWERS = 20;

export interface LiveRules {
  readonly maxViewers: number;
  /** How long a viewer may not read. */
  readonly stuckMs: number;
}

export type DashboardFacts = Omit<Hello, "frame" | "reasons" | "shedReasons" | "apiUrl">;

interface Viewer {
  readonly outflow: Outflow;
  /** Since when it has not been reading; 0 while it keeps up. */
  behindSince: number;
}

const EVERY_MS = 500;
const HEADERS = ["cache-control", "no-store", "x-accel-buffering", "no"];
const OPENING = ": ferry\nretry: 1000\n\n";

export class Live {
  readonly #rules: LiveRules;
  readonly #fold: Pick<Fold, "frame" | "hello">;
  readonly #about: DashboardFacts;
  readonly #apiUrl: () => string;
  readonly #clock: Clock;
  readonly #viewers = new Set<Viewer>();
  #alarm: Alarm | undefined;
  #closed = false;

  constructor(
    rules: LiveRules,
    fold: Pick<Fold, "frame" | "hello">,
    about: DashboardFacts,
    apiUrl: () => string,
    clock: Clock,
  ) {
    this.#rules = rules;
    this.#fold = fold;
    this.#about = about;
    this.#apiUrl = apiUrl;
    this.#clock = clock;
  }

  get viewers(): number {
    return this.#viewers.size;
  }

  routes(): Routes {
    return { "/internal/live": { GET: (exchange) => this.watch(exchange) } };
  }

  watch(exchange: Pick<Exchange, "stream" | "onGone" | "sendNothing" | "method">): void {
    // Only checks that the stream exists.
    if (exchange.method === "HEAD") return exchange.sendNothing(200);
    const { maxViewers } = this.#rules;
    if (this.#closed) throw new Refusal("SERVICE_OVERLOADED", "this process is being stopped");
    if (this.#viewers.size >= maxViewers) {
      const watch = maxViewers === 1 ? "1 viewer watches" : `${maxViewers} viewers watch`;
      const message = `${watch} already; close one`;
      throw new Refusal("SERVICE_OVERLOADED", message, { retryAfterMs: 5000 });
    }
    // `hello` advances the cursor, so existing viewers get their frame first.
    if (this.#viewers.size > 0) this.#sendFrame();
    const viewer = { outflow: exchange.stream("text/event-stream; charset=utf-8", HEADERS), behindSince: 0 };
    exchange.onGone(() => this.#leave(viewer));
    viewer.outflow.write(OPENING + this.#hello());
    this.#viewers.add(viewer);
    this.#alarm ??= this.#clock.at(this.#clock.now() + EVERY_MS, () => this.#tick());
  }

  close(): void {
    this.#closed = true;
    this.#alarm?.cancel();
    this.#alarm = undefined;
    for (const { outflow } of this.#viewers) outflow.end();
    this.#viewers.clear();
  }

  #tick(): void {
    this.#sendFrame();
    this.#alarm =
      this.#viewers.size === 0 ? undefined : this.#clock.at(this.#clock.now() + EVERY_MS, () => this.#tick());
  }

  #sendFrame(): void {
    const now = this.#clock.now();
    let frame: string | undefined;
    let hello: string | undefined;
    // Before any hello, which advances the cursor.
    const changes = this.#fold.frame();
    for (const viewer of this.#viewers) {
      const { outflow, behindSince } = viewer;
      if (outflow.behind) {
        if (behindSince === 0) viewer.behindSince = now;
        else if (now - behindSince > this.#rules.stuckMs) this.#cut(viewer);
      } else if (behindSince > 0) {
        viewer.behindSince = 0;
        outflow.write((hello ??= this.#hello()));
      } else {
        outflow.write((frame ??= event("frame", changes)));
      }
    }
  }

  #hello(): string {
    const hello: Hello = {
      ...this.#about,
      apiUrl: this.#apiUrl(),
      reasons: DISPATCH_REASONS,
      shedReasons: SHED_REASONS,
      frame: this.#fold.hello(),
    };
    return event("hello", hello);
  }

  #cut(viewer: Viewer): void {
    this.#leave(viewer);
    viewer.outflow.cut();
  }

  #leave(viewer: Viewer): void {
    this.#viewers.delete(viewer);
    if (this.#viewers.size > 0) return;
    this.#alarm?.cancel();
    this.#alarm = undefined;
  }
}

/** JSON contains no line ends, so it is one `data` line. */
function event(name: string, value: object): string {
  return `event: ${name}\ndata: ${JSON.stringify(value)}\n\n`;
}
