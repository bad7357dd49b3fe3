/**
 * Deny patterns (`models[].deny`; the patterns are in `core/screen.ts`), applied to all tasks and proxied requests.
 *
 * Texts are matched as the worker will read them: JSON unescaped, BYTES tensors decoded, and TensorFlow Serving's
 * `{"b64":…}` decoded. What cannot be read is refused: token ids where the protocol has them, and bodies that are
 * compressed or not JSON.
 */
import { Refusal } from "../core/errors.ts";
import { canonical } from "../core/json.ts";
import { listsNumbers, type Screen, screenFor } from "../core/screen.ts";
import type { Json } from "../core/task.ts";
import { readTensorRow } from "../core/tensor.ts";
import { checkedJson } from "./protocol/fields.ts";
import { HEADER_LENGTH } from "./protocol/oip-v2.ts";
import { bytesTexts } from "./protocol/oip-task.ts";
import type { ProtocolName } from "./protocol/protocol.ts";
import { decoded } from "./passthrough.ts";

export interface ScreenedModel {
  readonly deny: readonly string[];
  readonly protocols: readonly ProtocolName[];
  /** Its workers take tensors, so base64 in a tensor task is never text. */
  readonly tensorWorkers: boolean;
}

/** Protocols in which a list of numbers may be token ids; Ollama's `context` is one. */
const TOKEN_PROTOCOLS: ReadonlySet<ProtocolName> = new Set([
  "openai-embeddings",
  "openai-completions",
  "tei",
  "ollama",
] as const);

const WHY = "this model has deny patterns, so only what can be screened reaches it";

/** Undefined without patterns, so that such a model pays nothing. */
export function screeningFor(model: ScreenedModel): Screening | undefined {
  const screen = screenFor(model.deny);
  return screen && new Screening(screen, model);
}

export class Screening {
  readonly #screen: Screen;
  readonly #tokens: boolean;
  readonly #base64: boolean;
  readonly #tensors: boolean;
  readonly #tensorWorkers: boolean;
  /** The last parameters that passed: the inputs of a request share them. */
  #clean: Json = "";

  constructor(screen: Screen, { protocols, tensorWorkers }: Omit<ScreenedModel, "deny">) {
    this.#screen = screen;
    this.#tokens = protocols.some((name) => TOKEN_PROTOCOLS.has(name));
    this.#base64 = protocols.includes("kserve-v1");
    this.#tensors = protocols.includes("oip-v2");
    this.#tensorWorkers = tensorWorkers;
  }

  checkTask(input: Json, parameters: Json): void {
    if (parameters !== this.#clean) {
      this.#check(parameters);
      this.#clean = parameters;
    }
    const texts = this.#tensors ? bytesTexts(input, parameters) : undefined;
    if (texts !== undefined && this.#screen.refusesTexts(texts)) throw denied();
    // Numbers in base64 could match by chance.
    if (texts !== undefined && this.#tensorWorkers) return;
    // Ferry's own words around a row are no text of the client.
    this.#check(this.#tensorWorkers ? (readTensorRow(input) ?? input) : input);
  }

  checkRequest(
    request: { header(name: string): string | undefined },
    path: string,
    query: string,
    body: Buffer | undefined,
  ): void {
    const words = [...path.split("/").map(decoded), ...[...new URLSearchParams(query)].flat()];
    if (this.#screen.refusesTexts(words)) throw denied();
    if (body === undefined || body.length === 0) return;
    if (request.header(HEADER_LENGTH) !== undefined) {
      throw new Refusal(
        "UNSUPPORTED_MEDIA_TYPE",
        `${WHY}; send tensors as JSON, or such that they can be batched`,
      );
    }
    const { text, fields } = checkedJson(body);
    this.#check(text);
    // Canonical: an escape may hide the name.
    if (this.#tensors && canonical(text).includes('"shared_memory_region"'))
      throw unreadable("shared memory");
    const [start, end] = (this.#tokens && fields?.get("prompt_embeds")) || [0, 0];
    if (end > start && text.slice(start, end) !== "null") throw unreadable("prompt_embeds");
  }

  #check(json: Json): void {
    if (this.#screen.refuses(json)) throw denied();
    if (this.#tokens && listsNumbers(json)) throw unreadable("a list of numbers, which may be token ids,");
    if (this.#base64 && this.#screen.refusesTexts(base64Texts(json))) throw denied();
  }
}

export function unscreenable({ code, message }: Refusal): Refusal {
  return new Refusal(code, `${WHY}; ${message}`);
}

function* base64Texts(json: Json): Generator<string, void> {
  // An escape may hide the name.
  if (!json.includes("b64") && !json.includes("\\u")) return;
  const open: unknown[] = [JSON.parse(json)];
  for (let value = open.pop(); value !== undefined; value = open.pop()) {
    if (typeof value !== "object" || value === null) continue;
    const { b64 } = value as { b64?: unknown };
    if (typeof b64 === "string") yield Buffer.from(b64, "base64").toString("utf8");
    for (const each of Object.values(value)) open.push(each);
  }
}

/** Names no pattern, so that probing reveals none. */
function denied(): Refusal {
  return new Refusal("INPUT_REJECTED", "this model does not take such an input; change its text");
}

function unreadable(what: string): Refusal {
  return new Refusal("INPUT_REJECTED", `${WHY}; ${what} cannot be: send text`);
}
