/**
 * The admin listener, never on the public port. With a token every /internal route needs it. Without one the config
 * check forces loopback, and requests of web pages are refused (`page-guard.ts`).
 */
import { hash, timingSafeEqual } from "node:crypto";
import { Refusal } from "../core/errors.ts";
import type { DeadLetter, Engine } from "../engine/engine.ts";
import type { Exchange } from "./exchange.ts";
import { PageGuard } from "./page-guard.ts";
import type { RouteHandler, Routes } from "./server.ts";
import { type History, iso, listRequests, loggedStory, story, type Tiers } from "./story.ts";

export interface WorkerReport {
  readonly model: string;
  readonly name: string;
  /** Undefined for a child process. */
  readonly address?: string;
  readonly state: string;
  readonly in_flight: number;
  readonly batches: number;
  readonly tasks: number;
  readonly calls: number;
  readonly failures: number;
  readonly busy_ms: number;
  /** Busy share of the time since the start, 0 to 1. */
  readonly utilization: number;
  /** Batch time relative to the fleet's: 2 takes twice as long. */
  readonly ratio: number;
  /** Batches it may hold at once. */
  readonly pipeline: number;
  /** Id of the prefetched batch. */
  readonly ahead: string | null;
  /** The load it last reported, 0 to 1; undefined if it never reports one. */
  readonly load?: number;
  readonly down?: { readonly why: string; readonly retry_in_ms: number };
}

interface SizeReport {
  readonly size: number;
  readonly ms: number;
  readonly per_second: number;
}

export interface CurveReport {
  readonly name: string;
  readonly max_batch_size: number;
  readonly curve: readonly { readonly size: number; readonly ms: number; readonly batches: number }[];
  /** Null while unknown, and while throughput still grows with every size seen. */
  readonly knee: (SizeReport & { readonly full: SizeReport }) | null;
  readonly hint: string | null;
  readonly cost: CostReport;
}

/** What the time of a batch follows, as learned: its rows, rows × longest input (`padded`), or the sum (`packed`). */
interface CostReport {
  readonly kind: string;
  readonly base_ms: number;
  readonly per_row_ms: number;
  readonly per_token_ms: number;
  /** Computed over useful cells of the last minute or so; null without a measured batch. */
  readonly padding_ratio: number | null;
  /** Inputs of similar length share a batch. */
  readonly grouped: boolean;
}

export interface Inside {
  health(): Readonly<Record<string, unknown>>;
  workers(): readonly WorkerReport[];
  serves(model: string): boolean;
  readonly desk: WorkerDesk;
  curves(): readonly CurveReport[];
  /** Wanted workers per model, and why. */
  scaling(): readonly object[];
  readonly draining: () => boolean;
  readonly writable: () => boolean;
}

/** Routes of the observers; `guarded` ones need the admin token, if one is set. */
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
        // Retrying for a model that is being removed would be refused, and the input lost.
        if (!inside.serves(model)) throw new Refusal("INVALID_REQUEST", notServed(model), { status: 409 });
        found((await letters.replay(id)) || undefined, NO_LETTER);
        exchange.send(202, JSON.stringify({ task_id: id, status: "PENDING" }));
      }),
    },
  };
}

/** From the engine's record, else from the request log (memory or database). */
async function tell(id: string, engine: Engine, tiers: Tiers, history: History): Promise<object> {
  const logged = history.requests(id);
  // A store that is down must not hide what is known without it.
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
  readonly address?: string;
}

/** Methods throw a Refusal that says what to do. */
export interface WorkerDesk {
  add(model: string | undefined, url: string | undefined): Promise<WorkerName>;
  drain(name: string, model?: string): WorkerName;
  resume(name: string, model?: string): WorkerName;
  /** `gone`: it has stopped; otherwise it stops after its current batch. */
  remove(name: string, model?: string): Promise<WorkerName & { readonly gone: boolean }>;
  /** Configured workers that were removed, and stay removed until they are added again. */
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
