/**
 * `${NAME}` and `${NAME:-default}` in the text of a config file.
 *
 * YAML knows nothing of them, and inside `{ … }` it would even take their braces for its own. So
 * before YAML sees the text, `shield` moves every character of `${…}` into the private use area, one
 * for one: the text keeps its length, so line and column stay true. After it, `expand` reads them
 * back, scalar by scalar; a value from the environment is never parsed as YAML.
 *
 * As in a shell, `:-` also replaces an empty variable. `$${` stands for the two characters `${`.
 */
import { nearest } from "./spelling.ts";

const shieldBase = 0xe000;

export function shield(text: string): string {
  return text.replace(/\$?\$\{[^}\n]{0,1024}\}/g, (found) =>
    found.replace(/[\u0021-\u007e]/g, (char) =>
      char === "$" ? char : String.fromCharCode(shieldBase + char.charCodeAt(0)),
    ),
  );
}

/** Undoes `shield`. */
export function unshield(text: string): string {
  return text.replace(/[\ue021-\ue07e]/g, (char) => String.fromCharCode(char.charCodeAt(0) - shieldBase));
}

export interface Expansion {
  readonly text: string;
  /** Something was put in from the environment, so the text may hold a secret. */
  readonly expanded: boolean;
  /** What is wrong, one phrase each; naming variables, never their values. */
  readonly wrong: readonly string[];
}

export function expand(shielded: string, env: NodeJS.ProcessEnv): Expansion {
  const written = unshield(shielded);
  const wrong: string[] = [];
  let expanded = false;
  const text = written.replace(
    /(\$?)\$\{([^}\n]*)(\}?)/g,
    (found, escape: string, inside: string, end: string) => {
      if (escape === "$") return found.slice(1);
      expanded = true;
      const match = /^([A-Za-z_]\w*)(?::-(.*))?$/.exec(inside);
      if (match === null || end === "") {
        wrong.push(
          "${ must be followed by a name and }: write ${NAME} or ${NAME:-default}, or $${ for a plain ${",
        );
        return "";
      }
      const [, name = "", fallback] = match;
      const value = env[name];
      if (fallback !== undefined) return value === undefined || value === "" ? fallback : value;
      if (value === undefined) wrong.push(unset(name, env));
      return value ?? "";
    },
  );
  return { text, expanded, wrong };
}

function unset(name: string, env: NodeJS.ProcessEnv): string {
  const guess = nearest(name, Object.keys(env));
  return `\${${name}} is not set${guess === undefined ? "" : ` (did you mean ${guess}?)`}`;
}
