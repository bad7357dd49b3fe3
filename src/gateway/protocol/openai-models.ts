/** `GET /v1/models`: the models that are here, in OpenAI's shape, and in KServe's beside it where one speaks that. */
import type { About, AboutRoute, Answer, Known } from "./protocol.ts";

/** When a model was made is nobody's business here, and a client may require a number. */
const CREATED = 0;

export const listModels: AboutRoute = { path: "/v1/models", tell: modelList };

export const showModel: AboutRoute = {
  path: "/v1/models/{model}",
  tell: ({ model }) => (model === undefined ? undefined : { body: JSON.stringify(described(model)) }),
};

function modelList({ models }: About): Answer {
  const kserve = models.some(({ protocols }) => protocols.includes("kserve-v1"));
  const names = models.map(({ name }) => name);
  return {
    body: JSON.stringify({ object: "list", data: models.map(described), ...(kserve && { models: names }) }),
  };
}

/** `name` and `ready` are KServe's words. */
function described({ name, ready, protocols }: Known): object {
  const kserve = protocols.includes("kserve-v1") ? { name, ready } : {};
  return { id: name, object: "model", created: CREATED, owned_by: "ferry", ...kserve };
}
