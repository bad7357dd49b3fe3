/**
 * A server that speaks OpenAI's embeddings and completions, strictly: what their reference does not allow is refused
 * with their errors, lists are sent in an order that is not that of the inputs (`index` says it), and tokens are
 * counted for the whole call. What it answers is a function of the input alone, so that an answer that belongs to
 * another input cannot hide.
 *
 * `behave` may hold a call up, or answer it otherwise; `calls` remembers them.
 */
import assert from "node:assert/strict";
import { hash } from "node:crypto";
import {
  createServer,
  type IncomingHttpHeaders,
  type IncomingMessage,
  type Server,
  type ServerResponse,
} from "node:http";
import { ReturningServer } from "../../../e2e/returning-server.ts";

const FIELDS: Readonly<Record<string, ReadonlySet<string>>> = {
  "/v1/embeddings": new Set(["model", "input", "encoding_format", "dimensions", "user"]),
  "/v1/completions": new Set(
    (
      "model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop " +
      "stream stream_options suffix temperature top_p user"
    ).split(" "),
  ),
};
const MAX_INPUTS = 2048;
const DIMENSIONS = 8;

export type Input = string | readonly number[];
type Body = Readonly<Record<string, unknown>>;

/** Exact in float32, and nobody else's. */
export function embeddingFor(input: Input, dimensions = DIMENSIONS): number[] {
  const digest = hash("sha256", JSON.stringify(input), "buffer");
  return Array.from({ length: dimensions }, (_, at) => (digest[at % digest.length]! - 128) / 256 + at);
}

/** The k-th completion of a prompt. */
export function completionFor(prompt: Input, k = 0): string {
  return ` [${k}] after ${JSON.stringify(prompt)} é\n`;
}

/** A word is a token. */
export function tokensOf(input: Input): number {
  return typeof input === "string" ? input.split(/\s+/).filter(Boolean).length : input.length;
}

class Mistake extends Error {
  readonly status: number;
  readonly param: string | null;
  readonly code: string | null;

  constructor(message: string, param: string | null = null, status = 400, code: string | null = null) {
    super(message);
    this.status = status;
    this.param = param;
    this.code = code;
  }
}

export class OpenAiCall {
  readonly path: string;
  readonly headers: IncomingHttpHeaders;
  readonly body: Body;
  readonly #response: ServerResponse;

  constructor(path: string, headers: IncomingHttpHeaders, body: Body, response: ServerResponse) {
    this.path = path;
    this.headers = headers;
    this.body = body;
    this.#response = response;
  }

  get inputs(): readonly Input[] {
    const given = this.body["input"] ?? this.body["prompt"];
    return Array.isArray(given) && typeof given[0] !== "number" ? (given as Input[]) : [given as Input];
  }

  get answered(): boolean {
    return this.#response.writableEnded;
  }

  get abandoned(): boolean {
    return this.#response.destroyed && !this.#response.writableFinished;
  }

  reply(status: number, body: unknown, headers: Readonly<Record<string, string>> = {}): void {
    const text = typeof body === "string" ? body : JSON.stringify(body);
    this.#response.writeHead(status, { "content-type": "application/json", ...headers }).end(text);
  }

  error(status: number, message: string, headers: Readonly<Record<string, string>> = {}): void {
    this.reply(status, { error: { message, type: "server_error", param: null, code: null } }, headers);
  }

  reset(): void {
    this.#response.destroy();
  }
}

export type Behaviour = (call: OpenAiCall) => void | Promise<void>;

export class OpenAiServer extends ReturningServer {
  readonly calls: OpenAiCall[] = [];
  behave: Behaviour = () => {};
  readonly #model: string;
  readonly #key: string;
  #woken = Promise.withResolvers<void>();

  private constructor(model: string, key: string) {
    super();
    this.#model = model;
    this.#key = key;
  }

  static async listen(model: string, key = "sk-upstream"): Promise<OpenAiServer> {
    const server = new OpenAiServer(model, key);
    await server.open();
    return server;
  }

  /** Waits for the n-th call (the first is 1). */
  async call(n: number): Promise<OpenAiCall> {
    while (this.calls.length < n) await this.#woken.promise;
    return this.calls[n - 1]!;
  }

  protected override make(): Server {
    const server = createServer({ keepAliveTimeout: 60_000 });
    server.on("request", (request, response) => void this.#answer(request, response));
    return server;
  }

  async #answer(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const chunks: Buffer[] = [];
    response.on("error", () => {});
    try {
      for await (const chunk of request) chunks.push(chunk as Buffer);
    } catch {
      return; // Ferry hung up while it was sending.
    }
    const text = Buffer.concat(chunks).toString("utf8");
    const call = new OpenAiCall(request.url!, request.headers, JSON.parse(text) as Body, response);
    this.calls.push(call);
    const woken = this.#woken;
    this.#woken = Promise.withResolvers();
    woken.resolve();
    await this.behave(call);
    if (call.answered || call.abandoned) return;
    try {
      assert.equal(request.method, "POST");
      call.reply(200, this.#result(call));
    } catch (error) {
      if (!(error instanceof Mistake)) throw error;
      const { message, param, code, status } = error;
      call.reply(status, { error: { message, type: "invalid_request_error", param, code } });
    }
  }

  #result({ path, headers, body }: OpenAiCall): object {
    const known = FIELDS[path];
    if (known === undefined) throw new Mistake(`Invalid URL (POST ${path})`, null, 404);
    if (headers.authorization !== `Bearer ${this.#key}`) {
      throw new Mistake("Incorrect API key provided", null, 401, "invalid_api_key");
    }
    if (headers["content-type"] !== "application/json") throw new Mistake("send JSON", null, 415);
    for (const name of Object.keys(body)) {
      if (!known.has(name)) throw new Mistake(`Unrecognized request argument supplied: ${name}`);
    }
    if (body["model"] !== this.#model) {
      const message = `The model \`${String(body["model"])}\` does not exist`;
      throw new Mistake(message, null, 404, "model_not_found");
    }
    return path === "/v1/embeddings" ? this.#embeddings(body) : this.#completions(body);
  }

  #embeddings(body: Body): object {
    const inputs = inputsIn(body, "input");
    for (const input of inputs)
      if (input === "") throw new Mistake("input cannot be an empty string", "input");
    const { dimensions = DIMENSIONS, encoding_format: format = "float" } = body;
    if (!Number.isInteger(dimensions) || (dimensions as number) < 1) throw new Mistake("bad dimensions");
    if (format !== "float" && format !== "base64") throw new Mistake("bad encoding_format");
    const data = inputs.map((input, index) => {
      const numbers = embeddingFor(input, dimensions as number);
      const bytes = Buffer.from(Float32Array.from(numbers).buffer);
      return {
        object: "embedding",
        index,
        embedding: format === "base64" ? bytes.toString("base64") : numbers,
      };
    });
    const tokens = inputs.reduce((sum, input) => sum + tokensOf(input), 0);
    const usage = { prompt_tokens: tokens, total_tokens: tokens };
    return { object: "list", data: data.reverse(), model: this.#model, usage };
  }

  #completions(body: Body): object {
    const prompts = inputsIn(body, "prompt");
    const { n = 1, best_of = n, echo = false, stream = false } = body;
    if (!Number.isInteger(n) || (n as number) < 1)
      throw new Mistake(`${String(n)} is less than 1 - 'n'`, "n");
    if ((best_of as number) < (n as number)) throw new Mistake("best_of must be at least n", "best_of");
    if (stream === true) throw new Mistake("this stub does not stream", "stream");
    const choices = prompts.flatMap((prompt, p) =>
      Array.from({ length: n as number }, (_, k) => ({
        text: (echo === true ? JSON.stringify(prompt) : "") + completionFor(prompt, k),
        index: p * (n as number) + k,
        logprobs: null,
        finish_reason: body["max_tokens"] === 1 ? "length" : "stop",
      })),
    );
    const prompt_tokens = prompts.reduce((sum, prompt) => sum + tokensOf(prompt), 0);
    const completion_tokens = choices.reduce((sum, { text }) => sum + tokensOf(text), 0);
    return {
      id: "cmpl-upstream",
      object: "text_completion",
      created: 1_700_000_000,
      model: this.#model,
      system_fingerprint: "fp_stub",
      choices: choices.reverse(),
      usage: { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens },
    };
  }
}

/** A text, texts, tokens, or several arrays of tokens; never of two kinds. */
function inputsIn(body: Body, name: string): readonly Input[] {
  const given = body[name];
  const mistake = new Mistake(`'${name}' is invalid. Please check the API reference`, name);
  if (typeof given === "string") return [given];
  if (!Array.isArray(given) || given.length === 0) throw mistake;
  if (given.every(Number.isInteger)) return [given as number[]];
  if (given.length > MAX_INPUTS) throw new Mistake(`'${name}' may have at most ${MAX_INPUTS} entries`, name);
  if (given.every((each) => typeof each === "string")) return given;
  const tokens = given.every(
    (each) => Array.isArray(each) && each.length > 0 && each.every(Number.isInteger),
  );
  if (!tokens) throw mistake;
  return given as number[][];
}
