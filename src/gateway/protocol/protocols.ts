import { cohere } from "./cohere.ts";
import { ollama } from "./ollama.ts";
import { kserveV1 } from "./kserve-v1.ts";
import { oipV2 } from "./oip-v2.ts";
import { openaiCompletions, openaiEmbeddings } from "./openai.ts";
import type { Protocol, ProtocolName } from "./protocol.ts";
import { tei } from "./tei.ts";

/** A name without a protocol is not supported yet. */
export const protocols: Readonly<Partial<Record<ProtocolName, Protocol>>> = {
  "openai-completions": openaiCompletions,
  "openai-embeddings": openaiEmbeddings,
  tei,
  ollama,
  cohere,
  "kserve-v1": kserveV1,
  "oip-v2": oipV2,
};
