/**
 * /internal/workers: who they are, and what operators do to them. A worker is named in the path as it is called,
 * URL-encoded; `?model=` says which one is meant where two models have a worker of that name.
 */
import { Refusal } from "../core/errors.ts";
import type { Exchange } from "./exchange.ts";
import type { Routes } from "./server.ts";

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
