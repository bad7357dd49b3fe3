/**
 * Reads a YAML document by the table in `config.ts`.
 *
 * The result is a draft: valid and default settings are in it, invalid ones are absent and in the findings with their
 * place. So rules between settings still run, and all mistakes are reported at once.
 *
 * The walk follows the table, which bounds its depth and work for any file; aliases are followed one at a time and
 * never expanded.
 */
import { isAlias, isMap, isScalar, isSeq, type Document, type Node } from "yaml";
import type { LineCounter, Pair } from "yaml";
import { settingRows, settings, type Config, type Problem } from "./config.ts";
import type { SettingFields, Leaf, List, Named, OneOf, Setting, Source, Variants } from "./kinds.ts";
import { whyRemoved } from "./removed.ts";
import { didYouMean, nearest } from "./spelling.ts";
import { printable } from "../../cli/terminal/terminal.ts";

export type Draft<T> = T extends readonly (infer E)[]
  ? readonly Draft<E>[]
  : T extends object
    ? { readonly [K in keyof T]?: Draft<T[K]> | undefined }
    : T;

interface Place {
  readonly line: number;
  readonly column: number;
}

export class Findings {
  readonly problems: Problem[] = [];
  readonly warnings: Problem[] = [];
  readonly #file: string;
  /** By path, for each setting in the file. */
  readonly #places = new Map<string, Place>();

  constructor(file: string) {
    this.#file = file;
  }

  mark(path: string, place: Place): void {
    this.#places.set(path, place);
  }

  has(path: string): boolean {
    return this.#places.has(path);
  }

  problem(path: string, message: string, place = this.#nearestPlace(path)): void {
    this.problems.push({ file: this.#file, ...place, path, message });
  }

  warn(path: string, message: string): void {
    this.warnings.push({ file: this.#file, ...this.#nearestPlace(path), path, message });
  }

  /** A missing setting is reported at what would enclose it. */
  #nearestPlace(path: string): Place | undefined {
    for (let at = path; at !== ""; at = at.replace(/(?:^|\.)[^.[\]]*$|\[\d+\]$/, "")) {
      const place = this.#places.get(at);
      if (place !== undefined) return place;
    }
    return undefined;
  }
}

export interface ReadContext {
  readonly document: Document;
  readonly lines: LineCounter;
  readonly findings: Findings;
  readonly env: NodeJS.ProcessEnv;
  readonly folder: string;
}

export function readSettingsTree(context: ReadContext): Draft<Config> {
  const root = context.document.contents ?? undefined;
  return new Reader(context).read(settings, root, "") as Draft<Config>;
}

type Found = Node | null | undefined;

class Reader {
  readonly #context: ReadContext;

  constructor(context: ReadContext) {
    this.#context = context;
  }

  /** `found` undefined: not in the file, so defaults apply. */
  read(setting: Setting, found: Found, path: string): unknown {
    const node = this.#follow(found, path);
    if (node === "broken") return undefined;
    switch (setting.type) {
      case "leaf":
        return this.#leaf(setting, node, path);
      case "group":
        return setting.absent && (node === undefined || isNull(node))
          ? undefined
          : this.#group(setting.fields, node, path);
      case "list":
        return this.#list(setting, node, path);
      case "named":
        return this.#named(setting, node, path);
      case "one-of":
        return this.#oneOf(setting, node, path);
    }
  }

  #leaf(leaf: Leaf<unknown>, node: Node | undefined, path: string): unknown {
    if (node === undefined) {
      if (leaf.need === "required") this.#problem(path, `is missing; add one, for example ${leaf.example}`);
      return leaf.fallback;
    }
    const value = isScalar(node) ? node.value : undefined;
    if (value === null) {
      const advice = leaf.need === "required" ? "write one" : "write one, or remove the line";
      return this.#problem(path, `has no value; ${advice}`);
    }
    if (typeof value !== "string" && typeof value !== "number" && typeof value !== "boolean") {
      return this.#problem(path, `${kindOf(node)} stands where one value belongs (${leaf.kind})`);
    }
    const { folder, env } = this.#context;
    if (typeof value !== "string")
      return this.#reading(leaf, { value, expanded: false, folder }, value, path);
    const expansion = expand(value, env);
    for (const wrong of expansion.wrong) this.#problem(path, `${wrong}${wayOut(leaf, path, wrong)}`);
    if (expansion.wrong.length > 0) return undefined;
    const source = { value: expansion.text, expanded: expansion.expanded, folder };
    return this.#reading(leaf, source, unshield(value), path);
  }

  #reading(leaf: Leaf<unknown>, source: Source, written: unknown, path: string): unknown {
    const reading = leaf.read(source);
    if ("value" in reading) return reading.value;
    return this.#problem(path, `${shown(leaf, written)} ${reading.wrong}`);
  }

  #group(
    fields: SettingFields,
    node: Node | undefined,
    path: string,
    extra: readonly string[] = [],
    whyUnknown?: (name: string) => string | undefined,
  ): unknown {
    const pairs = this.#pairs(node, path, [...Object.keys(fields), ...extra], whyUnknown);
    if (pairs === undefined) return undefined;
    const draft: Record<string, unknown> = {};
    for (const [name, setting] of Object.entries(fields)) {
      const value = this.read(setting, pairs.get(name), join(path, name));
      if (value !== undefined) draft[name] = value;
    }
    return draft;
  }

  #list(list: List<unknown>, node: Node | undefined, path: string): unknown {
    if (node === undefined || isNull(node)) {
      if (list.min > 0) this.#problem(path, `is missing; ${this.#example(path)}`);
      return [];
    }
    if (list.single === true && isScalar(node)) return [this.read(list.each as Setting, node, `${path}[0]`)];
    if (!isSeq(node))
      return this.#problem(path, `${kindOf(node)} stands where a list belongs; write it in [ ]`);
    if (node.items.length < list.min) this.#problem(path, `is empty; ${this.#example(path)}`);
    if (node.items.length > list.max) {
      return this.#problem(path, `holds ${node.items.length}; ${list.max} is the most`);
    }
    return node.items.map((each, index) => {
      const at = `${path}[${index}]`;
      this.#mark(at, each as Found);
      return this.read(list.each as Setting, each as Found, at);
    });
  }

  #example(path: string): string {
    if (path === "models") return "add a model (the built-in demo runs with no file at all)";
    return "add at least one";
  }

  #named(setting: Named<SettingFields>, node: Node | undefined, path: string): unknown {
    if (node === undefined || isNull(node)) {
      return setting.fallback.map((name) => this.#namedOne(setting, name, undefined, path));
    }
    const pairs = this.#pairs(node, path, undefined);
    if (pairs === undefined) return undefined;
    if (pairs.size === 0) this.#problem(path, "is empty; add at least one, or remove the line");
    if (pairs.size > setting.max) this.#problem(path, `holds ${pairs.size}; ${setting.max} is the most`);
    const drafts: object[] = [];
    for (const [name, found] of pairs) {
      if (!/^[\w.-]{1,64}$/.test(name)) {
        this.#problem(join(path, name), "is no name; use 1 to 64 letters, digits, _ . or -");
        continue;
      }
      drafts.push(this.#namedOne(setting, name, this.#resolved(found), path));
    }
    return drafts;
  }

  #namedOne({ fields }: Named<SettingFields>, name: string, node: Node | undefined, path: string): object {
    return { name, ...(this.#group(fields, node, join(path, name)) as object) };
  }

  #oneOf(setting: OneOf<Variants>, node: Node | undefined, path: string): unknown {
    const kinds = Object.keys(setting.variants);
    const names = ["kind", ...kinds.flatMap((kind) => Object.keys(setting.variants[kind]!.fields))];
    const map = isMap(node) ? node : undefined;
    if (map === undefined && node !== undefined && !isNull(node)) {
      return this.#problem(path, `${kindOf(node)} stands where a map with a kind belongs`);
    }
    if (map === undefined && setting.fallback === undefined) {
      return this.#problem(
        path,
        "is missing; add one, for example { kind: http, workers: [http://gpu-1:9000/infer] }",
      );
    }
    const pair = map?.items.find((each) => keyOf(each) === "kind");
    const chosen = this.#resolved(pair?.value as Found);
    const written = isScalar(chosen) && typeof chosen.value === "string" ? chosen.value : undefined;
    const unnamed = pair === undefined ? (setting.fallback ?? "") : "";
    const kind = written === undefined ? unnamed : expand(written, this.#context.env).text;
    const variant = Object.hasOwn(setting.variants, kind) ? setting.variants[kind] : undefined;
    if (variant !== undefined) {
      const rest = this.#group(variant.fields, node, path, ["kind"], (name) =>
        elsewhere(setting.variants, kind, name),
      );
      return { kind, ...(rest as object) };
    }
    // Without a kind only names that no variant has can be reported.
    this.#pairs(node, path, names);
    const at = join(path, "kind");
    if (written === undefined) return this.#problem(at, `is missing; write one of ${kinds.join(", ")}`);
    const guess = didYouMean(kind, kinds);
    return this.#problem(at, `${quoted(unshield(written))} is not one of ${kinds.join(", ")}${guess}`);
  }

  /** Pairs by name; reports unknown and repeated names; undefined if it is not a map. */
  #pairs(
    node: Node | undefined,
    path: string,
    known: readonly string[] | undefined,
    whyUnknown?: (name: string) => string | undefined,
  ): Map<string, Found> | undefined {
    const pairs = new Map<string, Found>();
    if (node === undefined || isNull(node)) return pairs;
    if (!isMap(node)) {
      return this.#problem(path, `${kindOf(node)} stands where a map of settings belongs`);
    }
    for (const pair of node.items) {
      const name = keyOf(pair);
      const at = join(path, name);
      const place = this.#place(pair.key as Found);
      if (pairs.has(name)) {
        this.#context.findings.problem(at, "is written twice; keep one", place);
      } else if (known !== undefined && !known.includes(name)) {
        const why = whyRemoved(at) ?? whyUnknown?.(name) ?? this.#unknown(name, path, known);
        this.#context.findings.problem(at, why, place);
      } else {
        pairs.set(name, pair.value as Found);
        this.#mark(at, (pair.value ?? pair.key) as Found);
      }
    }
    return pairs;
  }

  #unknown(name: string, path: string, known: readonly string[]): string {
    if (name === "<<")
      return "merging maps is not supported; repeat the settings, or use an alias for all of them";
    const guess = nearest(name, known);
    if (guess !== undefined) return `unknown setting; did you mean ${guess}?`;
    const home = settingRows.find((row) => row.path.replace(/\[\]$/, "").endsWith(`.${name}`));
    if (home !== undefined) return `unknown setting here; ${home.path.replace(/\[\]$/, "")} exists`;
    return path === ""
      ? "unknown setting; docs/configuration.md lists them"
      : `unknown setting; known: ${known.join(", ")}`;
  }

  #follow(found: Found, path: string): Node | undefined | "broken" {
    if (!isAlias(found)) return found ?? undefined;
    const target = this.#resolved(found);
    if (target !== undefined) return target;
    this.#problem(
      path,
      `alias *${printable(found.source)} points to nothing; write &${printable(found.source)} before it`,
    );
    return "broken";
  }

  #resolved(found: Found): Node | undefined {
    return isAlias(found) ? found.resolve(this.#context.document) : (found ?? undefined);
  }

  #problem(path: string, message: string): undefined {
    this.#context.findings.problem(path, message);
  }

  #mark(path: string, found: Found): void {
    const place = this.#place(found);
    if (place !== undefined) this.#context.findings.mark(path, place);
  }

  #place(found: Found): Place | undefined {
    if (found?.range === undefined || found.range === null) return undefined;
    const { line, col } = this.#context.lines.linePos(found.range[0]);
    return { line, column: col };
  }
}

/** For a name of another variant: which, and what to do. */
function elsewhere(variants: Variants, kind: string, name: string): string | undefined {
  const owners = Object.keys(variants).filter((each) => Object.hasOwn(variants[each]!.fields, name));
  if (owners.length === 0) return undefined;
  const change = owners.length === 1 ? `write kind: ${owners[0]}` : "change the kind";
  return `kind ${kind} has no such setting, only ${owners.join(", ")}; ${change}, or remove it`;
}

function join(path: string, name: string): string {
  return path === "" ? name : `${path}.${name}`;
}

function keyOf(pair: Pair): string {
  const key = isScalar(pair.key) ? pair.key.value : undefined;
  if (typeof key === "string") return printable(unshield(key).slice(0, 128));
  return typeof key === "object" || key === undefined ? "(no name)" : JSON.stringify(key);
}

function isNull(node: Node): boolean {
  return isScalar(node) && node.value === null;
}

/** A misplaced value is not shown: `requestLog: postgres://…` may hold a password. */
function kindOf(node: Node): string {
  if (isMap(node)) return "a map";
  return isSeq(node) ? "a list" : "a single value";
}

function quoted(value: unknown): string {
  const whole = typeof value === "string" ? JSON.stringify(value) : String(value);
  return printable(whole.length > 60 ? `${whole.slice(0, 57)}…` : whole);
}

/** The value as written, unless it could reveal a secret; variables stay unexpanded. */
function shown(leaf: Leaf<unknown>, written: unknown): string {
  if (leaf.secret) return "the value";
  const text = String(written);
  if (leaf.kind === "URL" && /[@?]/.test(text)) return "the URL";
  return typeof written === "string" && text.includes("${")
    ? `what ${quoted(written)} stands for`
    : quoted(written);
}

function wayOut(leaf: Leaf<unknown>, path: string, wrong: string): string {
  if (!wrong.includes("is not set")) return "";
  if (path === "admin.token") return "; export it, or remove the line (loopback admin needs no token)";
  return leaf.need === "required" ? "; export it" : "; export it, or remove the line";
}

// ── ${NAME} ─────────────────────────────────────────────────────────────────────────────────────
// YAML would misread `${NAME}` and `${NAME:-default}`, inside `{ … }` even their braces. So `shield` first maps every
// character of `${…}` into the private use area, one for one, which keeps lines and columns true. `expand` maps scalars
// back; environment values are never parsed as YAML. As in a shell, `:-` also replaces an empty variable. `$${` is `${`.

const shieldBase = 0xe000;

export function shield(text: string): string {
  return text.replace(/\$?\$\{[^}\n]{0,1024}\}/g, (found) =>
    found.replace(/[\u0021-\u007e]/g, (char) =>
      char === "$" ? char : String.fromCharCode(shieldBase + char.charCodeAt(0)),
    ),
  );
}

function unshield(text: string): string {
  return text.replace(/[\ue021-\ue07e]/g, (char) => String.fromCharCode(char.charCodeAt(0) - shieldBase));
}

interface Expansion {
  readonly text: string;
  /** Contains environment values, so it may hold a secret. */
  readonly expanded: boolean;
  /** One phrase each; names variables, never their values. */
  readonly wrong: readonly string[];
}

function expand(shielded: string, env: NodeJS.ProcessEnv): Expansion {
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
      if (value === undefined) {
        const guess = nearest(name, Object.keys(env));
        wrong.push(`\${${name}} is not set${guess === undefined ? "" : ` (did you mean ${guess}?)`}`);
      }
      return value ?? "";
    },
  );
  return { text, expanded, wrong };
}
