/**
 * Ollama's embeddings, as its API document and its source describe them.
 *
 * Strict where the real one is: a model that it has (404), texts and nothing else (400), and with `truncate: false`
 * no text longer than its context (400, for the call as a whole). Beyond that it refuses fields that it does not know.
 */
import { type Called, JsonServer, type Served, tokensOf, vectorText } from "./json-server.ts";

const KNOWN: ReadonlySet<string> = new Set([
  "model",
  "input",
  "truncate",
  "dimensions",
  "options",
  "keep_alive",
]);
const CONTEXT_TOKENS = 16;

export class OllamaServer extends JsonServer {
  readonly model: string;

  constructor(model: string) {
    super();
    this.model = model;
  }

  protected serve({ path, text }: Called): Served {
    if (path === "/api/embed") return this.#embed(JSON.parse(text) as Record<string, unknown>);
    if (path === "/api/embeddings") return { status: 200, text: '{"embedding":[4,5]}' };
    return { status: 404, text: "404 page not found" };
  }

  #embed(body: Record<string, unknown>): Served {
    const { model, input, truncate, dimensions } = body;
    if (model !== this.model) return wrong(404, `model '${String(model)}' not found`);
    if (Object.keys(body).some((name) => !KNOWN.has(name))) return wrong(400, "unknown field");
    const texts = typeof input === "string" ? [input] : ((input ?? []) as string[]);
    if (!Array.isArray(texts) || texts.some((text) => typeof text !== "string"))
      return wrong(400, "invalid input type");
    if (truncate === false && texts.some((text) => tokensOf(text) > CONTEXT_TOKENS))
      return wrong(400, "the input length exceeds the context length");
    const embeddings = texts.map((text) =>
      vectorText(text, dimensions === undefined ? "" : JSON.stringify(dimensions)),
    );
    const tokens = texts.reduce((sum, text) => sum + tokensOf(text), 0);
    return {
      status: 200,
      text:
        `{"model":${JSON.stringify(model)},"embeddings":[${embeddings.join(",")}],` +
        `"total_duration":14143917,"load_duration":1019500,"prompt_eval_count":${tokens}}`,
    };
  }
}

function wrong(status: number, error: string): Served {
  return { status, text: JSON.stringify({ error }) };
}
