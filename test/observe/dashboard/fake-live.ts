/**
 * A dashboard with a made-up Ferry behind it: the real files of the page, and frames that a test, or a person,
 * chooses. For states that a real Ferry shows rarely, and for more load than this machine could make.
 *
 *   node test/observe/dashboard/fake-live.ts [healthy|overload|down|empty|crowd|nasty] [port]
 */
import { once } from "node:events";
import { SystemClock } from "../../../src/app/clock.ts";
import { assetRoutes } from "../../../src/observe/dashboard/assets.ts";
import type { Frame, Hello, Note } from "../../../src/observe/dashboard/frames.ts";
import type { Exchange, Outflow } from "../../../src/gateway/exchange.ts";
import { Listener } from "../../../src/gateway/server.ts";
import { Refusal } from "../../../src/core/errors.ts";
import { modelFrame, notesOf, type Scene, SHAPES, storyOf, TIERS } from "./fake-frames.ts";
import { DISPATCH_REASONS } from "../../../src/core/task.ts";
import { Events, SHED_REASONS } from "../../../src/observe/events.ts";

const LIMITS = {
  maxBodyBytes: 65_536,
  maxHeaders: 100,
  maxConnections: 100,
  headersTimeoutMs: 10_000,
  requestTimeoutMs: 30_000,
  keepAliveTimeoutMs: 5000,
};

export class FakeLive implements AsyncDisposable {
  scene: Scene;
  url = "";
  /** Answers 401 to everybody who does not send it. */
  token = "";
  letters = 2;
  version = "0.1.0-dev";
  role = "all";
  /** What the next frames say instead. */
  alter: (frame: Frame) => Frame = (frame) => frame;
  replayed: string[] = [];
  readonly #clock = new SystemClock();
  readonly #viewers = new Set<Outflow>();
  readonly #listener: Listener;
  #lastSecond = 0;
  #lastNow = 0;
  #stopped = false;

  constructor(scene: Scene) {
    this.scene = scene;
    const guarded =
      (answer: (exchange: Exchange, id: string) => void) => (exchange: Exchange, id: string) => {
        if (this.token !== "" && exchange.header("authorization") !== `Bearer ${this.token}`) {
          throw new Refusal("UNAUTHENTICATED", "send Authorization: Bearer <admin.token>");
        }
        answer(exchange, id);
      };
    const routes = {
      ...assetRoutes(),
      "/internal/live": { GET: guarded((exchange) => this.#watch(exchange)) },
      "/internal/dead-letters": { GET: guarded((exchange) => this.#list(exchange)) },
      "/internal/dead-letters/{id}": {
        GET: guarded((exchange, id) =>
          exchange.send(200, JSON.stringify({ ...this.#letter(id), input: "text", parameters: {} })),
        ),
        DELETE: guarded((exchange) => this.#gone(exchange)),
      },
      "/internal/dead-letters/{id}/replay": {
        POST: guarded((exchange, id) => {
          this.replayed.push(id);
          this.#gone(exchange);
        }),
      },
      "/internal/requests/{id}": {
        GET: guarded((exchange, id) => exchange.send(200, JSON.stringify(storyOf(id)))),
      },
    };
    this.#listener = new Listener(routes, LIMITS, this.#clock, new Events(), { uncounted: true });
  }

  async start(port = 0): Promise<void> {
    this.url = await this.#listener.listen("127.0.0.1", port);
    this.#lastNow = this.#clock.now();
    this.#lastSecond = Math.floor(this.#lastNow / 1000);
    this.#tick();
  }

  [Symbol.asyncDispose](): Promise<void> {
    this.#stopped = true;
    this.#listener.close();
    return Promise.resolve();
  }

  /** Breaks every connection; the next one is served as before. */
  cut(): void {
    for (const viewer of this.#viewers) viewer.cut();
  }

  #tick(): void {
    this.#clock.at(this.#clock.now() + 500, () => {
      if (this.#stopped) return;
      this.#send();
      this.#tick();
    });
  }

  #send(): void {
    const now = this.#clock.now();
    const frame = JSON.stringify(this.alter(this.#frame(now, this.#lastSecond, this.#lastNow - 400, [])));
    this.#lastSecond = Math.floor(now / 1000);
    this.#lastNow = now;
    for (const viewer of this.#viewers) viewer.write(`event: frame\ndata: ${frame}\n\n`);
  }

  #frame(now: number, fromSecond: number, batchesFrom: number, notes: readonly Note[]): Frame {
    const { perSecond } = SHAPES[this.scene];
    return {
      now,
      process: {
        scope: this.scene === "crowd" ? "gateway f12ab, one of 3 processes" : "this process",
        members: this.scene === "crowd" ? 3 : 1,
        durability: "none",
        reachable: true,
        draining: false,
        queued: perSecond === 0 ? 0 : 37,
        running: perSecond === 0 ? 0 : 4,
        deadLetters: this.scene === "empty" ? 0 : this.letters,
        totals: {
          requests: perSecond * 900,
          tasks: perSecond * 800,
          calls: perSecond * 15,
          cached: 0,
          joined: 0,
          retried: 4,
          dead: 2,
          lost: 0,
          shed: 0,
        },
      },
      models: [
        modelFrame(this.scene, now, fromSecond, batchesFrom),
        modelFrame("healthy", now, fromSecond, batchesFrom),
      ],
      notes,
    };
  }

  #watch(exchange: Exchange): void {
    const now = this.#lastNow;
    const history = this.scene === "empty" ? 0 : 900;
    const hello: Hello = {
      version: this.version,
      startedAt: now - 7_300_000,
      role: this.role,
      engine: "memory",
      demo: true,
      apiUrl: "http://127.0.0.1:8080",
      tiers: TIERS,
      reasons: DISPATCH_REASONS,
      shedReasons: SHED_REASONS,
      models: ["embed", "rerank"].map((name) => ({
        name,
        maxBatchSize: 64,
        maxWaitMs: 50,
        policy: "adaptive",
      })),
      frame: this.alter(this.#frame(now, this.#lastSecond - history, now - 30_000, notesOf(this.scene, now))),
    };
    const viewer = exchange.stream("text/event-stream", ["cache-control", "no-store"]);
    viewer.write(`event: hello\ndata: ${JSON.stringify(hello)}\n\n`);
    this.#viewers.add(viewer);
    exchange.onGone(() => this.#viewers.delete(viewer));
  }

  #letter(id: string): object {
    const at = new Date(this.#clock.now() - 240_000).toISOString();
    return {
      task_id: id,
      tenant: "acme-research",
      model: "embed",
      tier: "paid",
      attempts: 4,
      error: "INFERENCE_FAILED",
      message:
        "gpu-2 answered 500: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.69 GiB total capacity)",
      created_at: at,
      died_at: at,
    };
  }

  #list(exchange: Exchange): void {
    const letters = Array.from({ length: this.letters }, (_, at) =>
      this.#letter(`01M7Q${at}V3K8Y2XW4T6R9P1N5H7D`),
    );
    exchange.send(200, JSON.stringify({ dead_letters: letters }));
  }

  #gone(exchange: Exchange): void {
    this.letters--;
    exchange.send(202, "{}");
  }
}

if (import.meta.main) {
  const fake = new FakeLive((process.argv[2] ?? "healthy") as Scene);
  await fake.start(Number(process.argv[3] ?? 0));
  process.stdout.write(`${fake.url}\n`);
  await once(process, "SIGINT");
}
