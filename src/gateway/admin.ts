/**
 * The admin listener: what operators see and do. Never on the public port.
 *
 * With a token every /internal route needs it. Without one the listener is on loopback (the config check sees to
 * that), and web pages are refused (`page-guard.ts`): they could otherwise also take the places of those who watch
 * /internal/live.
 */
import { hash, timingSafeEqual } from "node:crypto";
import { Refusal } from "../core/errors.ts";
import type { DeadLetter, Engine } from "../engine/engine.ts";
import type { Exchange } from "./exchange.ts";
import { PageGuard } from "./page-guard.ts";
import type { RouteHandler, Routes } from "./server.ts";
import { type History, iso, listRequests, loggedStory, story, type Tiers } from "./story.ts";

/** One worker, as /internal/workers shows it. */
export interface WorkerReport {
  readonly model: string;
  readonly name: string;
  /** Where it is; left out for a child of the process. */
  readonly address?: string;
  readonly state: string;
  /** Tasks of the batch it runs now. */
  readonly in_flight: number;
  readonly batches: number;
  readonly tasks: number;
  readonly calls: number;
  readonly failures: number;
  readonly busy_ms: number;
  /** Share of the time since the start. */
  readonly utilization: number;
  /** Its pace against the fleet's: 2 needs twice as long. */
  readonly ratio: number;
  /** Batches that it may have in its hands. */
  readonly pipeline: number;
  /** The batch that was handed over while it runs another. */
  readonly ahead: string | null;
  /** How full it last said it is, 0 to 1; left out where it never says. */
  readonly load?: number;
  readonly down?: { readonly why: string; readonly retry_in_ms: number };
}

/** What a batch of one size takes, and what a worker does with such batches. */
interface SizeReport {
  readonly size: number;
  readonly ms: number;
  readonly per_second: number;
}

/** What the workers of one model take for batches of each size, as /internal/workers shows it. */
export interface CurveReport {
  readonly name: string;
  readonly max_batch_size: number;
  readonly curve: readonly { readonly size: number; readonly ms: number; readonly batches: number }[];
  /** Null while it is not known, and where throughput grows with every size that was seen. */
  readonly knee: (SizeReport & { readonly full: SizeReport }) | null;
  readonly hint: string | null;
}

/** What the admin listener shows of the process around it. */
export interface Inside {
  health(): Readonly<Record<string, unknown>>;
  workers(): readonly WorkerReport[];
  /** Whether the config has this model. */
  serves(model: string): boolean;
  readonly desk: WorkerDesk;
  /** Of the models whose batches this process runs. */
  curves(): readonly CurveReport[];
  /** How many workers each model should have, and why. */
  scaling(): readonly object[];
  readonly draining: () => boolean;
  readonly writable: () => boolean;
}

/** Routes of those who look on, and what they remember; `guarded` ones ask for the token, where there is one. */
export interface MoreRoutes {
  readonly guarded: Routes;
  readonly open: Routes;
  readonly history: History;
}

export function adminRoutes(
  engine: Engine,
  inside: Inside,
  tiers: Tiers,
  token: string | undefined,
  more: MoreRoutes,
): Routes {
  const guarded =
    (answer: RouteHandler): RouteHandler =>
    (exchange, id) => {
      checkAccess(exchange, token);
      return answer(exchange, id);
    };
  const json = (exchange: Exchange, value: unknown): void => exchange.send(200, JSON.stringify(value));
  const letters = engine.deadLetters;
  const show = (letter: DeadLetter): object => letterView(letter, tiers);
  return {
    ...healthRoutes(inside.draining, inside.writable),
    ...more.open,
    ...guardAll(more.guarded, guarded),
    "/internal/health": { GET: guarded((exchange) => json(exchange, inside.health())) },
    ...guardAll(
      workerRoutes(
        () => ({ workers: inside.workers(), removed: inside.desk.removed(), models: inside.curves() }),
        inside.desk,
      ),
      guarded,
    ),
    "/internal/scaling": { GET: guarded((exchange) => json(exchange, { models: inside.scaling() })) },
    "/internal/requests/{id}": {
      GET: guarded(async (exchange, id) => json(exchange, await tell(id, engine, tiers, more.history))),
    },
    "/internal/requests": {
      GET: guarded((exchange) => json(exchange, listRequests(exchange.query, more.history))),
    },
    "/internal/dead-letters": {
      GET: guarded(async (exchange) => json(exchange, { dead_letters: (await letters.list()).map(show) })),
    },
    "/internal/dead-letters/{id}": {
      GET: guarded(async (exchange, id) => {
        const letter = found(await letters.get(id), NO_LETTER);
        const { input, parameters } = letter.task;
        const texts = `,"input":${input},"parameters":${parameters === "" ? "{}" : parameters}}`;
        exchange.send(200, JSON.stringify(show(letter)).slice(0, -1) + texts);
      }),
      DELETE: guarded(async (exchange, id) => {
        found((await letters.purge(id)) || undefined, NO_LETTER);
        exchange.sendNothing(204);
      }),
    },
    "/internal/dead-letters/{id}/replay": {
      POST: guarded(async (exchange, id) => {
        const { model } = found(await letters.get(id), NO_LETTER).task;
        // Of one that is on its way out it would be refused, and its input lost.
        if (!inside.serves(model)) throw new Refusal("INVALID_REQUEST", notServed(model), { status: 409 });
        found((await letters.replay(id)) || undefined, NO_LETTER);
        exchange.send(202, JSON.stringify({ task_id: id, status: "PENDING" }));
      }),
    },
  };
}

/** From the engine's record; else from the request log, in memory or in the database. */
async function tell(id: string, engine: Engine, tiers: Tiers, history: History): Promise<object> {
  const logged = history.requests(id);
  // A store that is away does not hide what is known without it.
  const record = await engine.outcome(id).catch((error: unknown) => {
    if (logged.length === 0) throw error;
    return undefined;
  });
  if (record !== undefined) return story(record, tiers, history);
  const requests = logged.length > 0 ? logged : await history.older(id);
  const [first, ...others] = requests ?? [];
  return loggedStory([found(first, "no such task, or its time to live has passed"), ...others], history);
}

function guardAll(routes: Routes, guarded: (answer: RouteHandler) => RouteHandler): Routes {
  const all = Object.entries(routes).map(([path, methods]) => [
    path,
    Object.fromEntries(Object.entries(methods).map(([method, answer]) => [method, guarded(answer)])),
  ]);
  return Object.fromEntries(all) as Routes;
}

const notServed = (model: string): string =>
  `its model ${JSON.stringify(model)} is not in the config; put it back, reload, and replay it then`;
const NO_LETTER = "no such dead letter: it was replayed, purged, or never there";

function found<Value>(value: Value | undefined, otherwise: string): Value {
  if (value === undefined) throw new Refusal("NOT_FOUND", otherwise);
  return value;
}

function letterView({ task, attempts, code, message, diedAt }: DeadLetter, tiers: Tiers): object {
  return {
    task_id: task.id,
    tenant: task.tenant,
    model: task.model,
    tier: tiers[task.tier]?.name,
    attempts,
    error: code,
    message,
    created_at: iso(task.createdAt),
    died_at: iso(diedAt),
  };
}

const pages = new PageGuard([], "reach this listener by its address, or set admin.token");

function checkAccess(exchange: Exchange, token: string | undefined): void {
  if (token !== undefined) {
    const given = /^Bearer (.+)$/i.exec(exchange.header("authorization") ?? "")?.[1] ?? "";
    if (!timingSafeEqual(hash("sha256", given, "buffer"), hash("sha256", token, "buffer"))) {
      throw new Refusal("UNAUTHENTICATED", "send Authorization: Bearer <admin.token>");
    }
    return;
  }
  const flaw = pages.flaw(exchange.request.headers);
  if (flaw !== undefined) throw flaw;
}

export interface WorkerName {
  readonly model: string;
  readonly name: string;
  /** Left out for a child of the process. */
  readonly address?: string;
}

/** Throws a Refusal that says what to do. */
export interface WorkerDesk {
  /** Resolves when it can be given batches. */
  add(model: string | undefined, url: string | undefined): Promise<WorkerName>;
  drain(name: string, model?: string): WorkerName;
  resume(name: string, model?: string): WorkerName;
  /** `gone`: it is no more; otherwise it is as soon as its batch is over. */
  remove(name: string, model?: string): Promise<WorkerName & { readonly gone: boolean }>;
  /** Workers of the config that were removed, and stay away until they are added again. */
  removed(): readonly WorkerName[];
}

export function workerRoutes(list: () => object, desk: WorkerDesk): Routes {
  return {
    "/internal/workers": {
      GET: (exchange) => exchange.send(200, JSON.stringify(list())),
      POST: async (exchange) => {
        const { model, url } = wishOf(await exchange.body());
        exchange.send(201, JSON.stringify(await desk.add(model, url)));
      },
    },
    "/internal/workers/{id}/drain": {
      POST: (exchange, id) => {
        const drained = desk.drain(decoded(id), modelOf(exchange));
        exchange.send(200, JSON.stringify({ ...drained, state: "draining" }));
      },
    },
    "/internal/workers/{id}/resume": {
      POST: (exchange, id) => exchange.send(200, JSON.stringify(desk.resume(decoded(id), modelOf(exchange)))),
    },
    "/internal/workers/{id}": {
      DELETE: async (exchange, id) => {
        const { gone, ...removed } = await desk.remove(decoded(id), modelOf(exchange));
        if (gone) exchange.sendNothing(204);
        else exchange.send(202, JSON.stringify({ ...removed, state: "draining" }));
      },
    },
  };
}

const FIELDS = ["model", "url"] as const;

function wishOf(text: string): { model?: string; url?: string } {
  let wish: unknown;
  try {
    wish = text === "" ? {} : JSON.parse(text);
  } catch {
    throw new Refusal("INVALID_REQUEST", "the body is not JSON");
  }
  if (typeof wish !== "object" || wish === null || Array.isArray(wish)) {
    throw new Refusal("INVALID_REQUEST", 'send an object: {"model": "…", "url": "…"}, both where needed');
  }
  for (const [name, value] of Object.entries(wish)) {
    if (!FIELDS.some((field) => field === name))
      throw new Refusal("INVALID_REQUEST", `there is no ${JSON.stringify(name)} here, only model and url`);
    if (typeof value !== "string") throw new Refusal("INVALID_REQUEST", `${name} must be a string`);
  }
  return wish;
}

function modelOf({ query }: Exchange): string | undefined {
  return new URLSearchParams(query).get("model") ?? undefined;
}

function decoded(id: string): string {
  try {
    return decodeURIComponent(id);
  } catch {
    throw new Refusal("INVALID_REQUEST", "the worker's name in the path is not URL-encoded");
  }
}

export function healthRoutes(draining: () => boolean, writable: () => boolean): Routes {
  const ready = (exchange: Exchange): void => {
    exchange.counts = false;
    if (draining()) exchange.send(503, '{"status":"draining"}', ["retry-after", "1"]);
    else if (!writable()) exchange.send(503, '{"status":"unwritable"}', ["retry-after", "1"]);
    else exchange.send(200, '{"status":"ready"}');
  };
  const alive = (exchange: Exchange): void => {
    exchange.counts = false;
    exchange.send(200, '{"status":"ok"}');
  };
  return {
    "/healthz": { GET: alive },
    "/readyz": { GET: ready },
  };
}
