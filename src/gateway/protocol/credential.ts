/** The name of a client's credential among a task's parameters (`workers/backend/vault.ts`): those of a batch share it. */
import { canonical } from "../../core/json.ts";
import type { Json } from "../../core/task.ts";
import { between, cutFields, invalid } from "./fields.ts";

const NAME = "$auth";

/** Throws a Refusal where the client wrote such a field itself. */
export function checkUncredited(parameters: Json): void {
  if (between(parameters, NAME) !== undefined) throw invalid(`unknown parameter "${NAME}"`);
}

export function credited(parameters: Json, name: string): Json {
  const more = parameters === "" || parameters === "{}" ? "" : `,${parameters.slice(1, -1)}`;
  return canonical(`{"${NAME}":${JSON.stringify(name)}${more}}`);
}

/** Both apart again. */
export function uncredited(parameters: Json): { parameters: Json; name: string | undefined } {
  const name = between(parameters, NAME);
  if (name === undefined) return { parameters, name };
  const parts: string[] = [];
  for (const [field, text] of cutFields(parameters)!)
    if (field !== NAME) parts.push(`${JSON.stringify(field)}:${text}`);
  const bare = parts.length === 0 ? "" : `{${parts.join(",")}}`;
  return { parameters: bare, name: JSON.parse(name) as string };
}
