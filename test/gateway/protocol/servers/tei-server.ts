/**
 * Text Embeddings Inference, as its OpenAPI document and its source describe it.
 *
 * Strict where the real one is: `inputs` in its forms and no others, at most `maxClientBatchSize` of them (422), texts
 * that are not empty, and routes that fit the kind of model (424). Beyond that it refuses fields that no TEI knows.
 */
import { type Called, JsonServer, type Served, tokensOf, vectorText } from "./json-server.ts";

type Sequence = readonly [string] | readonly [string, string];
type Kind = "embedding" | "reranker" | "classifier";

class Trouble extends Error {
  readonly type: string;
  readonly status: number;
  constructor(message: string, type: string, status: number) {
    super(message);
    this.type = type;
    this.status = status;
  }
}

const COMMON = ["inputs", "truncate", "truncation_direction"];
const KNOWN: Readonly<Record<string, readonly string[]>> = {
  "/embed": [...COMMON, "prompt_name", "normalize", "dimensions"],
  "/embed_all": [...COMMON, "prompt_name"],
  "/embed_sparse": [...COMMON, "prompt_name"],
  "/predict": [...COMMON, "raw_scores"],
  "/rerank": ["query", "texts", "truncate", "truncation_direction", "raw_scores", "return_text"],
};
/** Of the fields that could change a vector, and are left out. */
export const DEFAULTS = '[true,0,""]';
export const POISON = "refuse me";

export class TeiServer extends JsonServer {
  readonly kind: Kind;
  maxClientBatchSize = 32;
  well = true;

  constructor(kind: Kind = "embedding") {
    super();
    this.kind = kind;
  }

  /** Of calls that were answered: how many inputs each had. */
  readonly sizes: number[] = [];
  /** Of calls that had too many. */
  tooMany = 0;

  protected serve({ method, path, text }: Called): Served {
    try {
      if (method === "GET") return this.#tell(path);
      const body = JSON.parse(text) as Record<string, unknown>;
      const known = KNOWN[path];
      if (known === undefined) return { status: 404, text: "" };
      const unknown = Object.keys(body).find((name) => !known.includes(name));
      if (unknown !== undefined) throw new Trouble(`unknown field ${unknown}`, "Validation", 422);
      return this.#infer(path, body);
    } catch (error) {
      if (!(error instanceof Trouble)) return { status: 422, text: "Failed to deserialize the JSON body" };
      return {
        status: error.status,
        text: JSON.stringify({ error: error.message, error_type: error.type }),
      };
    }
  }

  #tell(path: string): Served {
    if (path === "/health") {
      if (this.well) return { status: 200, text: "" };
      throw new Trouble("unhealthy", "Unhealthy", 503);
    }
    if (path !== "/info") return { status: 404, text: "" };
    const limits = { max_batch_tokens: 16_384, max_client_batch_size: this.maxClientBatchSize };
    return { status: 200, text: JSON.stringify({ model_id: "stub/model", ...limits, version: "1.8.0" }) };
  }

  #infer(path: string, body: Record<string, unknown>): Served {
    if (path === "/rerank") return this.#rerank(body);
    if (path === "/predict") return this.#predict(body);
    if (this.kind !== "embedding") throw new Trouble("Model is not an embedding model", "Backend", 424);
    const inputs = embedInputs(body["inputs"]);
    const texts = inputs.map((input) => (typeof input === "string" ? input : input.join(" ")));
    const more = JSON.stringify([
      body["normalize"] ?? true,
      body["dimensions"] ?? 0,
      body["prompt_name"] ?? "",
    ]);
    this.#check(texts);
    const values = texts.map((each) => {
      if (path === "/embed") return vectorText(each, more);
      if (path === "/embed_all")
        return `[${each
          .split(" ")
          .map((word) => vectorText(word))
          .join(",")}]`;
      return `[{"index":${each.length},"value":1.10}, {"index":9007199254740993,"value":0.5}]`;
    });
    return this.#answered(`[${values.join(",")}]`, texts);
  }

  #predict(body: Record<string, unknown>): Served {
    if (this.kind === "embedding") throw new Trouble("Model is not a classifier model", "Backend", 424);
    const { sequences, single } = predictInputs(body["inputs"]);
    const texts = sequences.map((sequence) => sequence.join(" "));
    this.#check(texts);
    const lists = sequences.map((sequence) => this.#predictions(sequence, body["raw_scores"] === true));
    return this.#answered(single ? lists[0]! : `[${lists.join(",")}]`, texts);
  }

  #predictions(sequence: Sequence, raw: boolean): string {
    const score = scoreText(sequence, raw);
    if (this.kind === "reranker") return `[{"score":${score},"label":"LABEL_0"}]`;
    return `[{"score":${score},"label":"good"},{"score":0.01,"label":"bad"}]`;
  }

  #rerank(body: Record<string, unknown>): Served {
    const { query, texts } = body as { query: string; texts: string[] };
    if (texts.length === 0) throw new Trouble("`texts` cannot be empty", "Empty", 400);
    if (this.kind !== "reranker") throw new Trouble("model is not a re-ranker model", "Backend", 424);
    const pairs = texts.map((text) => `${query} ${text}`);
    this.#check(pairs);
    const ranks = texts.map((text, index) => {
      const score = scoreText([query, text], body["raw_scores"] === true);
      const shown = body["return_text"] === true ? `"text":${JSON.stringify(text)},` : "";
      return { value: Number(score), text: `{"index":${index},${shown}"score":${score}}` };
    });
    ranks.sort((a, b) => a.value - b.value).reverse();
    return this.#answered(`[${ranks.map((rank) => rank.text).join(",")}]`, pairs);
  }

  #check(texts: readonly string[]): void {
    const most = this.maxClientBatchSize;
    if (texts.length > most) {
      this.tooMany++;
      throw new Trouble(`batch size ${texts.length} > maximum allowed batch size ${most}`, "Validation", 422);
    }
    if (texts.some((text) => text === "")) throw new Trouble("`inputs` cannot be empty", "Validation", 422);
    if (texts.some((text) => text.includes(POISON)))
      throw new Trouble("Tokenization error", "Tokenizer", 422);
  }

  #answered(text: string, texts: readonly string[]): Served {
    this.sizes.push(texts.length);
    const tokens = texts.reduce((sum, each) => sum + tokensOf(each), 0);
    return { status: 200, text, headers: { "x-compute-tokens": String(tokens) } };
  }
}

function embedInputs(inputs: unknown): readonly (string | readonly number[])[] {
  if (typeof inputs === "string") return [inputs];
  if (!Array.isArray(inputs)) throw new Error("inputs");
  if (inputs.length === 0) throw new Trouble("`inputs` cannot be empty", "Empty", 400);
  if (inputs.every((each) => typeof each === "number")) return [inputs];
  const ids = (each: unknown): boolean => Array.isArray(each) && each.every((id) => Number.isInteger(id));
  if (!inputs.every((each) => typeof each === "string" || ids(each))) throw new Error("inputs");
  return inputs as (string | number[])[];
}

function predictInputs(inputs: unknown): { sequences: readonly Sequence[]; single: boolean } {
  if (typeof inputs === "string") return { sequences: [[inputs]], single: true };
  if (!Array.isArray(inputs) || inputs.length === 0) throw new Error("inputs");
  if (typeof inputs[0] === "string") return { sequences: [sequence(inputs)], single: true };
  return { sequences: inputs.map(sequence), single: false };
}

function sequence(value: unknown): Sequence {
  const texts = value as string[];
  if (!Array.isArray(value) || texts.length < 1 || texts.length > 2) throw new Error("inputs");
  if (!texts.every((text) => typeof text === "string")) throw new Error("inputs");
  return texts as unknown as Sequence;
}

/** Different for most pairs, equal for some, and written with more digits than a double needs. */
function scoreText(sequence: Sequence, raw: boolean): string {
  const [sum] = JSON.parse(vectorText(sequence.join("\u0001"))) as number[];
  const share = (sum! % 20) + 1;
  return raw ? `-${share}.50` : `0.${String(share).padStart(2, "0")}000000000000000001`;
}
