/**
 * Text Embeddings Inference (TEI): `/embed`, `/embed_all`, `/embed_sparse`, and what stands beside them.
 *
 *   {"inputs": "text" | [1,2,3] | ["text" | [1,2],…],"truncate"?,"normalize"?,"prompt_name"?,"dimensions"?,…}
 *   one value per input, in a list also when there is one only
 *
 * A list of numbers is one input of tokens; texts and tokens may stand side by side. A request has no model: it means
 * the only one that speaks TEI here, or the one whose base URL it was sent to. `POST /` is what Hugging Face's clients
 * use: with a `query` it is `/rerank`, else `/embed`. `/predict` and `/rerank` are in `tei-predict.ts`, the workers in
 * `tei-worker.ts`, the form of a task between the two in `tei-form.ts`.
 */
import type { Json } from "../../core/task.ts";
import { asNumbers } from "./embedding.ts";
import { type Fields, invalid, isTokens, readFields } from "./fields.ts";
import { inPieces, listed } from "./pieces.ts";
import type { About, Answer, Asked, Drafts, Pieces, Protocol, RequestLimits } from "./protocol.ts";
import { errorText, teiError } from "./tei-errors.ts";
import { computeHeaders, listOf, readOutput, sharedBy, type TeiOutput, type TeiRoute } from "./tei-form.ts";
import { draftRerank, readPredict, readRerank } from "./tei-predict.ts";
import { teiWorker } from "./tei-worker.ts";

export const tei: Protocol = {
  name: "tei",
  client: {
    infer: [
      { path: "/embed", read: (asked) => draftEmbed(readFields(asked.body), "embed", asked.limits) },
      { path: "/embed_all", read: (asked) => draftEmbed(readFields(asked.body), "embed_all", asked.limits) },
      {
        path: "/embed_sparse",
        read: (asked) => draftEmbed(readFields(asked.body), "embed_sparse", asked.limits),
      },
      { path: "/predict", read: readPredict },
      { path: "/rerank", read: readRerank },
      { path: "/", read: readPlain },
    ],
    about: [
      { path: "/info", tell: ({ model }) => (model === undefined ? undefined : "worker"), fallback: ownInfo },
      { path: "/health", open: true, tell: health },
    ],
    fail: teiError,
  },
  worker: teiWorker,
};

function readPlain({ body, limits }: Asked): Drafts {
  const fields = readFields(body);
  return fields.has("query") ? draftRerank(fields, limits) : draftEmbed(fields, "embed", limits);
}

function draftEmbed(fields: Fields, route: TeiRoute, limits: RequestLimits): Drafts {
  return {
    inputs: inputsOf(fields.get("inputs"), limits),
    parameters: sharedBy(fields, route, ["inputs"]),
    ...inPieces((outputs) => pieces(outputs, route)),
  };
}

function inputsOf(text: Json | undefined, limits: RequestLimits): readonly Json[] {
  if (text === undefined) throw invalid("`inputs` is missing");
  if (text.startsWith('"')) return [text];
  if (isTokens(text)) return [text];
  const elements = listOf(text, "inputs", limits);
  if (elements === undefined) throw invalid("`inputs` must be a string or a list");
  if (elements.every((each) => each.startsWith('"') || isTokens(each))) return elements;
  throw invalid("`inputs` must hold strings or lists of tokens");
}

function pieces(outputs: readonly Json[], route: TeiRoute): Pieces {
  const read = outputs.map((output) => readOutput(output, route));
  return { headers: computeHeaders(read), texts: texts(read, route) };
}

function* texts(read: readonly TeiOutput[], route: TeiRoute): Generator<Json, void> {
  yield "[";
  yield* listed(read, ({ value }) => (route === "embed" ? asNumbers(value) : value));
  yield "]";
}

/** Where no worker can be asked. */
function ownInfo({ model, version, maxInputs }: About): Answer {
  const info = { model_id: model!.name, max_client_batch_size: maxInputs, version: `ferry ${version}` };
  return { body: JSON.stringify(info) };
}

function health({ models, model, ready }: About): Answer {
  const asked = model === undefined ? models.filter(({ protocols }) => protocols.includes("tei")) : [model];
  if (ready && asked.some((each) => each.ready)) return { type: "text/plain", body: Buffer.alloc(0) };
  return { status: 503, body: errorText("unhealthy", "Unhealthy") };
}
