/**
 * Cohere's `/v2/embed`, as its API reference describes it.
 *
 * Strict where the real one is: `model` and `input_type` (400), at most 96 of `texts` or `inputs` and one of `images`,
 * one of the three (400), embedding types that there are. Beyond that it refuses fields that it does not know.
 */
import { type Called, JsonServer, type Served, tokensOf, vectorText } from "./json-server.ts";

const KNOWN: ReadonlySet<string> = new Set([
  "model",
  "input_type",
  "texts",
  "inputs",
  "images",
  "embedding_types",
  "truncate",
  "max_tokens",
  "output_dimension",
]);
const INPUT_TYPES: ReadonlySet<string> = new Set([
  "search_document",
  "search_query",
  "classification",
  "clustering",
  "image",
]);

export interface EmbedBody {
  readonly model?: string;
  readonly input_type?: string;
  readonly texts?: readonly string[];
  readonly inputs?: readonly unknown[];
  readonly images?: readonly string[];
  readonly embedding_types?: readonly string[];
}

export class CohereServer extends JsonServer {
  /** How many texts or inputs each call had that was answered. */
  readonly sizes: number[] = [];

  protected serve({ path, text }: Called): Served {
    if (path !== "/v2/embed") return { status: 404, text: "" };
    const body = JSON.parse(text) as EmbedBody;
    const flaw = flawOf(body);
    if (flaw !== undefined) return { status: 400, text: JSON.stringify({ id: "x", message: flaw }) };
    const inputs = body.texts ?? body.inputs ?? body.images!;
    this.sizes.push(inputs.length);
    const texts = inputs.map((input) => (typeof input === "string" ? input : JSON.stringify(input)));
    const lists = (body.embedding_types ?? ["float"]).map(
      (type) => `"${type}":[${texts.map((each) => embeddingText(each, type)).join(",")}]`,
    );
    const tokens = texts.reduce((sum, each) => sum + tokensOf(each), 0);
    const meta = `{"api_version":{"version":"2"},"billed_units":{"input_tokens":${tokens}},"warnings":["of ${texts.length}"]}`;
    const echoed = body.texts === undefined ? "" : `"texts":${JSON.stringify(texts)},`;
    return {
      status: 200,
      text:
        `{"id":"the call's","embeddings":{${lists.join(",")}},${echoed}"meta":${meta},` +
        `"response_type":"embeddings_by_type"}`,
    };
  }
}

export function embeddingText(text: string, type: string): string {
  if (type !== "base64") return vectorText(text, type);
  const floats = Float32Array.from(JSON.parse(vectorText(text, type)) as number[]);
  return JSON.stringify(Buffer.from(floats.buffer).toString("base64"));
}

function flawOf(body: EmbedBody): string | undefined {
  const unknown = Object.keys(body).find((name) => !KNOWN.has(name));
  if (unknown !== undefined) return `unknown field: parameter '${unknown}' is not a valid field`;
  if (body.model !== "embed-v4.0") return "invalid request: model is required";
  if (!INPUT_TYPES.has(body.input_type ?? "")) return "invalid request: valid input_type must be provided";
  const inputs = body.texts ?? body.inputs ?? body.images;
  if (body.images !== undefined && body.images.length > 1) return "invalid request: one image per call";
  if (inputs === undefined || inputs.length === 0) return "invalid request: one of texts, images, inputs";
  if (inputs.length > 96)
    return `invalid request: total number of texts must be at most 96, got ${inputs.length}`;
  if (body.texts?.some((text) => typeof text !== "string")) return "invalid request: texts must be strings";
  if (body.texts?.includes("refuse me")) return "invalid request: text cannot be embedded";
  return undefined;
}
