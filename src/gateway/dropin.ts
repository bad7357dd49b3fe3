/**
 * Routes of the drop-in protocols.
 *
 * A client keeps its SDK and changes its base URL. The root has the routes of every protocol that a configured model
 * speaks; a request without a model means the only model that speaks its protocol. `/models/{name}` has each model by
 * itself, for protocols whose requests name none. Requests that cannot be batched, and with `passthrough` unknown
 * routes, are proxied to a worker unchanged.
 */
import type { Caller } from "./admission/credentials.ts";
import { Refusal } from "../core/errors.ts";
import { withFields } from "./protocol/fields.ts";
import type { Pad } from "./protocol/oip-pad.ts";
import type {
  ModelFacts,
  AboutRoute,
  ProtocolAnswer,
  Drafts,
  InferRoute,
  Known,
  Protocol,
  ProtocolName,
  RequestLimits,
} from "./protocol/protocol.ts";
import { checkUncompressed, type Exchange } from "./exchange.ts";
import {
  decoded,
  MODEL_FIELD,
  OLLAMA_FIELDS,
  type PassTarget,
  targetBody,
  targetPath,
  targetQuery,
} from "./passthrough.ts";
import { LARGE_CHARS, pieceLine } from "./reply.ts";
import type { Ended, RequestPath } from "./request-path.ts";
import { type Screening, unscreenable } from "./screening.ts";
import { bringsWork, type Elsewhere, type Methods, type Routes } from "./server.ts";

export interface DropInModel {
  readonly name: string;
  readonly protocols: readonly Protocol[];
  readonly passthrough: boolean;
  readonly maxBatchSize: number;
  readonly pad?: Pad | undefined;
  /** Whether its workers accept requests outside batches. */
  readonly reachable: boolean;
  readonly ready: () => boolean;
  /** Its name at the workers, if different. */
  readonly workerName?: string | undefined;
  readonly screen?: Screening | undefined;
}

export interface Passage {
  readonly model: string;
  /** Relative to the worker's base, without the query. */
  readonly path: string;
  readonly query: string;
  /** If it was read already. */
  readonly body?: Buffer | undefined;
  readonly caller?: Caller | undefined;
  /** Response headers: name, value, name, value… */
  readonly headers: readonly string[];
}

export interface Proxy {
  /** Streams the request to a worker and the response back; resolves when both ended. Throws a Refusal. */
  forward(exchange: Exchange, passage: Passage): Promise<void>;
}

export interface DropInParts {
  readonly path: RequestPath;
  readonly proxy: Proxy;
  readonly limits: RequestLimits;
  readonly ready: () => boolean;
  readonly version: string;
}

interface Compiled {
  readonly path: string;
  readonly pattern: RegExp | undefined;
  readonly protocol: Protocol;
  readonly infer?: InferRoute;
  readonly about?: AboutRoute;
}

/** Which base a request was found under, and the model if the base names one. */
interface Place {
  readonly pinned: DropInModel | undefined;
  readonly path: string;
  /** The route's path, with `{model}` in it; undefined: no route matches. */
  readonly route?: string;
  readonly names: Readonly<Record<string, string>>;
}

/** `/models/NAME/…`; without a slash behind the name it is that model's root. */
const PREFIX = /^\/models\/([^/]*)(\/.*)?$/s;
const ANY_METHOD = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];

export class DropIns {
  readonly #models: readonly DropInModel[];
  readonly #parts: DropInParts;
  readonly #routes: readonly Compiled[];
  readonly #speakers: ReadonlyMap<Protocol, readonly DropInModel[]>;

  constructor(models: readonly DropInModel[], parts: DropInParts) {
    this.#models = models;
    this.#parts = parts;
    const spoken = new Set(models.flatMap(({ protocols }) => protocols));
    const speakers = (protocol: Protocol): readonly DropInModel[] =>
      models.filter(({ protocols }) => protocols.includes(protocol));
    this.#speakers = new Map(Array.from(spoken, (protocol) => [protocol, speakers(protocol)]));
    this.#routes = [...spoken].flatMap(compile);
  }

  routes(): Routes {
    const still = this.#routes.filter(({ pattern }) => pattern === undefined);
    return Object.fromEntries(
      still.map(({ path }) => [
        path,
        this.#methods(path, { pinned: undefined, path, route: path, names: {} }, this.#routes),
      ]),
    );
  }

  /** Routes with parameters, routes of one model, and passthrough. */
  find(path: string): Elsewhere | undefined {
    const [, name, rest = "/"] = PREFIX.exec(path) ?? [];
    if (name !== undefined) {
      const pinned = this.#models.find((model) => model.name === decoded(name));
      // A request for an unknown model must not reach another model's workers.
      if (pinned === undefined) return undefined;
      const routes = this.#routes.filter(({ protocol }) => pinned.protocols.includes(protocol));
      const found = this.#match(rest, pinned, routes);
      if (found !== undefined) return { ...found, path: `/models/{name}${found.path}` };
      return pinned.passthrough ? this.#passed(rest, pinned, pinned, "/models/{name}/*") : undefined;
    }
    const found = this.#match(path, undefined, this.#routes);
    if (found !== undefined) return found;
    const open = this.#models.filter(({ passthrough }) => passthrough);
    return open.length === 1 ? this.#passed(path, open[0]!, undefined, "/*") : undefined;
  }

  #match(path: string, pinned: DropInModel | undefined, routes: readonly Compiled[]): Elsewhere | undefined {
    for (const route of routes) {
      const names =
        route.pattern === undefined ? (route.path === path ? {} : undefined) : named(route.pattern, path);
      if (names === undefined) continue;
      return {
        path: route.path,
        methods: this.#methods(route.path, { pinned, path, route: route.path, names }, routes),
      };
    }
    return undefined;
  }

  #methods(path: string, place: Place, routes: readonly Compiled[]): Methods {
    const here = routes.filter((route) => route.path === path);
    const infer = here.find((route) => route.infer !== undefined);
    const about = here.find((route) => route.about !== undefined);
    return {
      ...(infer && {
        POST: bringsWork(
          (exchange) => this.#infer(exchange, infer.protocol, infer.infer!, place),
          infer.protocol.client.fail,
        ),
      }),
      ...(about && { GET: (exchange) => this.#tell(exchange, about.protocol, about.about!, place) }),
    };
  }

  /** `pinned`: the model named by the path. */
  #passed(path: string, model: DropInModel, pinned: DropInModel | undefined, route: string): Elsewhere {
    const pass = async (exchange: Exchange): Promise<void> => {
      exchange.errorShape = model.protocols[0]?.client.fail;
      const caller = await this.#parts.path.admit(exchange);
      await this.#pass(exchange, model, { pinned, path, names: {} }, caller);
    };
    return { path: route, methods: Object.fromEntries(ANY_METHOD.map((method) => [method, pass])) };
  }

  async #infer(exchange: Exchange, protocol: Protocol, route: InferRoute, place: Place): Promise<void> {
    exchange.errorShape = protocol.client.fail;
    const { path, limits } = this.#parts;
    const caller = await path.admit(exchange);
    const body = await exchange.bytes(route.types);
    const { names } = place;
    const { maxBatchSize, pad } = meant(place, this.#speakers.get(protocol)!) ?? {};
    const rules = { alone: maxBatchSize === 1, pad };
    const drafts = route.read({ names, body, limits, ...rules, header: (name) => exchange.header(name) });
    const model = place.pinned ?? this.#modelFor(protocol, drafts.model);
    if ("unbatched" in drafts) return this.#pass(exchange, model, place, caller, body, drafts.why);
    const { inputs, parameters, drawn, render, pieces } = drafts;
    const inference = { model: model.name, inputs, parameters, drawn };
    // Not `drafts`: a waiting request must not hold its inputs.
    const answer = { render, pieces };
    await path.run(exchange, caller, inference, (ended) => this.#render(exchange, ended, answer, model.name));
  }

  #render(
    exchange: Exchange,
    ended: Ended,
    { render, pieces }: Pick<Drafts, "render" | "pieces">,
    model: string,
  ): Promise<void> | void {
    if (exchange.answered) return;
    const outputs = this.#parts.path.outputs(ended);
    const headers = ["x-request-id", exchange.id, ...ended.headers];
    const request = { id: exchange.id, at: exchange.startedAt };
    const large = isLarge(outputs) ? pieces?.(outputs, model, request) : undefined;
    if (large === undefined) return send(exchange, render(outputs, model, request), headers);
    const all = [...(large.headers ?? []), ...headers];
    return pieceLine.send(exchange, large.texts, all).then(() => undefined);
  }

  async #tell(exchange: Exchange, protocol: Protocol, route: AboutRoute, place: Place): Promise<void> {
    exchange.errorShape = protocol.client.fail;
    const caller = route.open === true ? undefined : await this.#parts.path.identify(exchange);
    const about = this.#about(route, place);
    const told = route.tell(about);
    if (told === "worker") {
      const model = this.#models.find(({ name }) => name === about.model?.name);
      if (model?.reachable === true) return this.#pass(exchange, model, place, caller);
      const known = route.fallback?.(about);
      if (known !== undefined) return send(exchange, known);
    } else if (told !== undefined) return send(exchange, told);
    throw new Refusal("NOT_FOUND", "there is no such model here");
  }

  #about({ path }: AboutRoute, place: Place): ModelFacts {
    const { ready, version, limits } = this.#parts;
    const { pinned } = place;
    // Several protocols may share a route.
    const speakers = this.#models.filter(({ protocols }) =>
      protocols.some(({ client }) => client.about.some((route) => route.path === path)),
    );
    const model = meant(place, speakers);
    const models = pinned === undefined ? this.#models : [pinned];
    return {
      models: models.map(known),
      model: model && known(model),
      ready: ready(),
      version,
      maxInputs: limits.maxInputs,
    };
  }

  #modelFor(protocol: Protocol, name: string | undefined): DropInModel {
    const speakers = this.#speakers.get(protocol)!;
    const model = name === undefined ? speakers[0] : speakers.find((each) => each.name === name);
    if (model !== undefined && (name !== undefined || speakers.length === 1)) return model;
    const names = speakers.map((each) => each.name).join(", ");
    if (name === undefined) {
      throw new Refusal(
        "INVALID_REQUEST",
        `name a model, or use the base URL /models/NAME; here are: ${names}`,
      );
    }
    const quoted = JSON.stringify(name.slice(0, 128));
    throw new Refusal("NOT_FOUND", `the model ${quoted} does not exist here; choose one of: ${names}`);
  }

  async #pass(
    exchange: Exchange,
    model: DropInModel,
    place: Place,
    caller: Caller | undefined,
    body?: Buffer,
    why = "leave out stream and seed",
  ): Promise<void> {
    exchange.model = model.name;
    if (!model.reachable) {
      throw new Refusal("INVALID_REQUEST", `this model answers in batches only; ${why}`);
    }
    const headers = await this.#parts.path.pass(caller, model.name);
    const { screen } = model;
    const read = body ?? (screen !== undefined && exchange.hasBody ? await screenable(exchange) : undefined);
    screen?.checkRequest(exchange, place.path, exchange.query, read);
    const sent =
      place.route === undefined
        ? await this.#unread(exchange, model, place, read)
        : { path: renamed(place, model), query: exchange.query, body: read && namedBody(read, model, place) };
    await this.#parts.proxy.forward(exchange, { ...sent, model: model.name, caller, headers });
  }

  async #unread(
    exchange: Exchange,
    model: DropInModel,
    { pinned, path }: Place,
    read: Buffer | undefined,
  ): Promise<Pick<Passage, "path" | "query" | "body">> {
    const anyName = pinned === undefined && this.#models.length === 1;
    const fields = model.protocols.some(({ name }) => name === "ollama") ? OLLAMA_FIELDS : MODEL_FIELD;
    const target: PassTarget = { name: model.name, workerName: workerNameOf(model), anyName, fields };
    const [to, query] = [targetPath(path, target), targetQuery(exchange.query, target)];
    if (!exchange.hasBody) return { path: to, query };
    if (!anyName) checkUncompressed(exchange);
    const body = read ?? (await exchange.objectBody());
    return { path: to, query, body: body && targetBody(body, target) };
  }
}

/** A body declared as JSON. Rejects with a Refusal that says why nothing else is accepted. */
async function screenable(exchange: Exchange): Promise<Buffer> {
  try {
    return await exchange.bytes();
  } catch (error) {
    throw error instanceof Refusal ? unscreenable(error) : error;
  }
}

function workerNameOf({ name, workerName = name }: DropInModel): string {
  return workerName;
}

/** Replaces the model name by the worker's: the path or the protocol has already determined the model. */
function namedBody(body: Buffer, model: DropInModel, { route }: Place): Buffer {
  // If the path names the model, leave the body alone: it may be JSON followed by binary data.
  if (route?.includes("{model}") === true) return body;
  const name = JSON.stringify(workerNameOf(model));
  const named = withFields(body, (field) => (MODEL_FIELD.has(field.toLowerCase()) ? name : undefined));
  if (named !== body) return named;
  // Without a name the worker would choose: its first model, or the last one used.
  const text = body.toString("utf8").trimStart();
  if (!text.startsWith("{")) return body;
  return Buffer.from(`{"model":${name}${/^\{\s*\}/.test(text) ? "" : ","}${text.slice(1)}`);
}

function meant({ pinned, names }: Place, speakers: readonly DropInModel[]): DropInModel | undefined {
  if (pinned !== undefined) return pinned;
  if (names["model"] !== undefined) return speakers.find(({ name }) => name === names["model"]);
  return speakers.length === 1 ? speakers[0] : undefined;
}

function renamed({ path, route, names }: Place, model: DropInModel): string {
  if (route === undefined || !route.includes("{model}")) return path;
  return route.replace(/\{(\w+)\}/g, (_, name: string) =>
    encodeURIComponent(name === "model" ? workerNameOf(model) : names[name]!),
  );
}

function known({ name, protocols, ready }: DropInModel): Known {
  return { name, protocols: protocols.map((each): ProtocolName => each.name), ready: ready() };
}

function send(
  exchange: Exchange,
  { status = 200, type, headers = [], body }: ProtocolAnswer,
  more: readonly string[] = [],
): void {
  const all = headers.length === 0 ? more : [...headers, ...more];
  if (type === undefined && typeof body === "string") exchange.send(status, body, all);
  else exchange.sendBytes(type ?? "application/json", Buffer.from(body as string), all, status);
}

function isLarge(outputs: readonly string[]): boolean {
  let chars = 0;
  for (const { length } of outputs) chars += length;
  return chars >= LARGE_CHARS;
}

function compile(protocol: Protocol): Compiled[] {
  const { infer, about } = protocol.client;
  return [
    ...infer.map((route) => ({ path: route.path, pattern: patternOf(route.path), protocol, infer: route })),
    ...about.map((route) => ({ path: route.path, pattern: patternOf(route.path), protocol, about: route })),
  ];
}

function patternOf(path: string): RegExp | undefined {
  if (!path.includes("{")) return undefined;
  const source = path.replace(/[.*+?^$()|[\]\\]/g, "\\$&").replace(/\{(\w+)\}/g, "(?<$1>[^/:]+)");
  return new RegExp(`^${source}$`);
}

/** Values of the path parameters; undefined: no match. */
function named(pattern: RegExp, path: string): Record<string, string> | undefined {
  const groups = pattern.exec(path)?.groups;
  if (groups === undefined) return undefined;
  return Object.fromEntries(Object.entries(groups).map(([name, text]) => [name, decoded(text)]));
}
