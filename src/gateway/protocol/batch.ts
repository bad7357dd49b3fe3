/**
 * `batch`, the simplest fixed API; for workers only.
 *
 *   POST <worker's URL>  {"inputs":[…]}  or  {"inputs":[…],"parameters":{…}}
 *   200                  {"outputs":[…]}     one output per input, in order; other fields are ignored
 */
import { splitField } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { detached, sent, withoutEnding } from "./fields.ts";
import type { Outputs, WorkerReply, WorkerSide } from "./protocol.ts";

export const batch: WorkerSide = {
  basePath: (path) => withoutEnding(path),
  call: (inputs, parameters) => ({ body: batchText(inputs, parameters) }),
  outputs,
};

export function batchText(inputs: readonly Json[], parameters: Json): Json {
  const told = sent(parameters);
  return told === ""
    ? `{"inputs":[${inputs.join(",")}]}`
    : `{"inputs":[${inputs.join(",")}],"parameters":{${told}}}`;
}

function outputs({ body }: WorkerReply): Outputs {
  const { elements, flaw } = splitField(body.toString("utf8"), "outputs");
  return flaw === undefined ? { outputs: elements.map(detached) } : { flaw };
}
