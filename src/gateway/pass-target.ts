/**
 * Which model a request names that goes past the batches, so that it reaches the model whose rules it was let in by.
 *
 * A worker may serve several models, and reads the name from the path (`…/models/NAME…`), the query (`?model=`) or a
 * field of a JSON body. What was sent to `/models/NAME`, and wherever the config has several models, may name that
 * model only: by its name here, which is replaced by that at its workers, or by that one. Another is 404. Where the
 * config has one model, other names at the root go on as they are: there is no rule that they could walk around.
 *
 * Field names are compared without regard to case, as Go's JSON reader does: to Ollama `MODEL` is `model`.
 */
import { Refusal } from "../core/errors.ts";
import { withFields } from "./protocol/fields.ts";

export interface PassTarget {
  /** Here. */
  readonly name: string;
  readonly workerName: string;
  /** Whether other names go on as they are. */
  readonly anyName: boolean;
  /** Fields of a body that name models, in lower case. */
  readonly fields: ReadonlySet<string>;
}

export const MODEL_FIELD: ReadonlySet<string> = new Set(["model"]);
/** `/api/show`, `/api/delete`, `/api/copy`, `/api/create` and others name what they work on like this. */
export const OLLAMA_FIELDS: ReadonlySet<string> = new Set(["model", "name", "source", "destination", "from"]);

/** The path with the name at the workers. Throws a Refusal. */
export function targetPath(path: string, target: PassTarget): string {
  const segments = path.split("/");
  for (let at = 0; at < segments.length; at++) {
    const segment = decoded(segments[at]!).toLowerCase();
    // A worker that decodes the slash would find a name that is not looked at here.
    if (!target.anyName && /[/\\]models$|(?:^|[/\\])models[/\\]/.test(segment)) {
      throw new Refusal("INVALID_REQUEST", "write the path plainly: models and its slashes without escapes");
    }
    if (segment !== "models") continue;
    const next = segments.findIndex((each, index) => index > at && each !== "");
    if (next < 0) continue;
    // A name with slashes in it that were not escaped.
    const long = [target.name, target.workerName].find((own) => {
      const parts = own.split("/");
      return parts.length > 1 && decoded(segments.slice(next, next + parts.length).join("/")) === own;
    });
    if (long === undefined) segments[next] = targetSegment(segments[next]!, target);
    else
      segments.splice(next, long.split("/").length, ...target.workerName.split("/").map(encodeURIComponent));
  }
  return segments.join("/");
}

/** `NAME`, or `NAME:predict`. */
function targetSegment(segment: string, target: PassTarget): string {
  const whole = decoded(segment);
  const colon = segment.lastIndexOf(":");
  const end = colon < 0 || isOwn(whole, target) ? segment.length : colon;
  const said = decoded(segment.slice(0, end));
  const name = nameFor(said, target);
  return name === said ? segment : encodeURIComponent(name) + segment.slice(end);
}

/** The query with the name at the workers. Throws a Refusal. */
export function targetQuery(query: string, target: PassTarget): string {
  if (!/model|%/i.test(query)) return query;
  const parts = query.split("&").map((part) => {
    const [[key, said] = ["", ""]] = new URLSearchParams(part);
    if (key.toLowerCase() !== "model") return part;
    const name = nameFor(said, target);
    return name === said ? part : `model=${encodeURIComponent(name)}`;
  });
  return parts.join("&");
}

/** A body of JSON with the name at the workers; where any name may stand in it, it need not be JSON. Throws a Refusal. */
export function targetBody(body: Buffer, target: PassTarget): Buffer {
  if (!body.includes("{")) return body;
  try {
    return withFields(body, (field, text) => {
      if (!target.fields.has(field.toLowerCase()) || text === "null") return undefined;
      if (!text.startsWith('"')) throw new Refusal("INVALID_REQUEST", `"${field}" must be a string`);
      return JSON.stringify(nameFor(JSON.parse(text) as string, target));
    });
  } catch (error) {
    if (target.anyName && error instanceof Refusal) return body;
    throw error;
  }
}

function isOwn(said: string, target: PassTarget): boolean {
  return [said, bare(said)].some((each) => each === target.name || each === target.workerName);
}

/** Ollama adds `:latest` to a name without a tag. */
function bare(name: string): string {
  return name.endsWith(":latest") ? name.slice(0, -":latest".length) : name;
}

function nameFor(said: string, target: PassTarget): string {
  const { name, workerName, anyName } = target;
  if (said === workerName || bare(said) === workerName) return said;
  if (said === name || bare(said) === name) return workerName;
  if (anyName) return said;
  const quoted = JSON.stringify(said.slice(0, 128));
  throw new Refusal("NOT_FOUND", `the model ${quoted} is not at this address, which is that of ${name}`);
}

/** As it stands where it is no valid escape. */
export function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
