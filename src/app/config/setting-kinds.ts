/**
 * The kinds of setting, each with its own way to read one value.
 *
 * `settings.ts` builds its table from the constructors here. A leaf holds one value; a group, a list,
 * a named map and a one-of hold other settings. The types follow: `Value<typeof table>` is what a
 * valid file becomes, so `tsc` proves that the table fills `Config`.
 *
 * `read` never throws and never repeats the value it was given: `app/config/read.ts` decides whether the
 * value may be shown, because it may be a secret or come from the environment.
 */
import { statSync } from "node:fs";
import { resolve } from "node:path";
import { didYouMean } from "./spelling.ts";

export type Unit = "ms" | "days" | "bytes" | "tokens" | "per minute" | "share" | "times" | "";

/** One scalar of the file. */
export interface Source {
  readonly value: string | number | boolean;
  /** It was text with `${NAME}` in it, so "64" may stand for 64. */
  readonly expanded: boolean;
  /** What relative paths start from. */
  readonly folder: string;
}

/** `wrong` continues a sentence that began with the value: "is not a number". */
export type Reading<T> = { readonly value: T } | { readonly wrong: string };

export interface Leaf<T> {
  readonly type: "leaf";
  /** The kind in words: "integer", "host:port", … */
  readonly kind: string;
  readonly doc: string;
  readonly unit: Unit;
  /** "1 to 64", "a | b"; "" when anything goes. */
  readonly bounds: string;
  readonly need: "default" | "optional" | "required";
  readonly fallback: T | undefined;
  /** As one would write it in the file. */
  readonly defaultText: string;
  /** What the example file shows where there is no default. */
  readonly example: string;
  /** Never shown, wherever it is wrong. */
  readonly secret: boolean;
  read(source: Source): Reading<T>;
}

export interface Fields {
  readonly [name: string]: Setting;
}
export interface Group<F extends Fields> {
  readonly type: "group";
  readonly doc: string;
  readonly fields: F;
}
export interface List<S> {
  readonly type: "list";
  readonly doc: string;
  readonly each: S;
  readonly min: number;
  readonly max: number;
  /** A list of one may be written as that one. */
  readonly single?: boolean;
}
/** A map whose keys are names; its order counts. */
export interface Named<F extends Fields> {
  readonly type: "named";
  readonly doc: string;
  readonly fields: F;
  readonly max: number;
  /** What holds when the file has none. */
  readonly fallback: readonly { readonly name: string }[];
}
/** A map whose `kind` decides which other settings it has. */
export interface OneOf<V extends { readonly [kind: string]: Group<Fields> }> {
  readonly type: "one-of";
  readonly doc: string;
  readonly variants: V;
  /** Kinds that are named in the documents and not in this version yet. */
  readonly later: readonly string[];
  /** What holds when the file names no kind; left out: it must. */
  readonly fallback?: string;
}
export type Setting =
  | Leaf<unknown>
  | Group<Fields>
  | List<unknown>
  | Named<Fields>
  | OneOf<{ readonly [kind: string]: Group<Fields> }>;

export type Value<S> =
  S extends Leaf<infer T>
    ? T
    : S extends Group<infer F>
      ? Values<F>
      : S extends List<infer E>
        ? readonly Value<E>[]
        : S extends Named<infer F>
          ? readonly ({ readonly name: string } & Values<F>)[]
          : S extends OneOf<infer V>
            ? { [K in keyof V]: { readonly kind: K } & Value<V[K]> }[keyof V]
            : undefined;
type OptionalKeys<F> = { [K in keyof F]: undefined extends Value<F[K]> ? K : never }[keyof F];
export type Values<F> = { readonly [K in Exclude<keyof F, OptionalKeys<F>>]: Value<F[K]> } & {
  readonly [K in OptionalKeys<F>]?: Exclude<Value<F[K]>, undefined>;
};

export const group = <const F extends Fields>(doc: string, fields: F): Group<F> => ({
  type: "group",
  doc,
  fields,
});
export const list = <const S extends Setting>(
  doc: string,
  each: S,
  count: { min: number; max: number; single?: boolean },
): List<S> => ({ type: "list", doc, each, ...count });
export const named = <const F extends Fields>(
  doc: string,
  fields: F,
  more: { max: number; fallback: readonly ({ readonly name: string } & Values<F>)[] },
): Named<F> => ({ type: "named", doc, fields, ...more });
export const oneOf = <const V extends { readonly [kind: string]: Group<Fields> }>(
  doc: string,
  variants: V,
  more: { readonly later?: readonly string[]; readonly fallback?: keyof V & string },
): OneOf<V> => ({ type: "one-of", doc, variants, later: [], ...more });
/** May be left out, and then there is no value. */
export const optional = <T>(leaf: Leaf<T>): Leaf<T | undefined> => ({ ...leaf, need: "optional" });

export interface LeafFacts<T> {
  readonly kind: string;
  readonly doc: string;
  readonly unit?: Unit;
  readonly bounds?: string;
  readonly fallback?: T | undefined;
  readonly defaultText?: string;
  readonly example?: string | undefined;
  readonly secret?: boolean;
  read(source: Source): Reading<T>;
}
export function leaf<T>(facts: LeafFacts<T>): Leaf<T> {
  const { fallback, unit = "", bounds = "", example = "", secret = false } = facts;
  const defaultText = facts.defaultText ?? (fallback === undefined ? "" : String(fallback));
  const need = fallback === undefined ? "required" : "default";
  return { ...facts, type: "leaf", fallback, unit, bounds, example, secret, defaultText, need };
}

interface Range {
  readonly min: number;
  readonly max: number;
  readonly default?: number;
  readonly unit?: Unit;
  readonly example?: number;
}
export const integer = (doc: string, range: Range): Leaf<number> => quantity("integer", doc, range);
export const number = (doc: string, range: Range): Leaf<number> => quantity("number", doc, range);

function quantity(kind: "integer" | "number", doc: string, range: Range): Leaf<number> {
  const { min, max, unit = "" } = range;
  const bounds = `${grouped(min)} to ${grouped(max)}`;
  return leaf<number>({
    kind,
    doc,
    unit,
    bounds,
    fallback: range.default,
    example: range.example?.toString(),
    read({ value, expanded }) {
      const given = expanded && typeof value === "string" && value.trim() !== "" ? Number(value) : value;
      if (typeof given !== "number" || !Number.isFinite(given)) {
        return { wrong: `is not a number${inUnit(value, unit)}` };
      }
      if (kind === "integer" && !Number.isInteger(given)) return { wrong: "is not a whole number" };
      if (given < min) return { wrong: `is too small; write ${bounds}` };
      if (given > max) return { wrong: `is too large; write ${bounds}` };
      return { value: given };
    },
  });
}

export function boolean(doc: string, fallback: boolean): Leaf<boolean> {
  return leaf<boolean>({
    kind: "boolean",
    doc,
    bounds: "true | false",
    fallback,
    read({ value, expanded }) {
      if (typeof value === "boolean") return { value };
      if (expanded && (value === "true" || value === "false")) return { value: value === "true" };
      return { wrong: "is neither true nor false" };
    },
  });
}

interface TextRules {
  /** 1 when left out. */
  readonly minLength?: number;
  readonly maxLength: number;
  readonly default?: string;
  readonly example?: string;
  readonly secret?: boolean;
  /** Characters that it may not hold. */
  readonly without?: readonly string[];
  /** Blanks may stand between its words. */
  readonly words?: boolean;
}
/** Visible ASCII characters, no blanks unless said otherwise: what fits a header, a metric label and a terminal. */
export function text(doc: string, rules: TextRules): Leaf<string> {
  const { without = [], minLength = 1 } = rules;
  const except = without.length === 0 ? "" : ` except ${without.join(" ")}`;
  const blanks = rules.words === true ? ", blanks between them" : "";
  const bounds = `${minLength} to ${rules.maxLength} visible ASCII characters${except}${blanks}`;
  return leaf<string>({
    kind: rules.secret === true ? "secret" : "text",
    doc,
    bounds,
    fallback: rules.default,
    example: rules.example,
    secret: rules.secret ?? false,
    read({ value }) {
      if (typeof value !== "string") return { wrong: "is not text; put it in quotes" };
      if (value === "") return { wrong: `is empty; write ${bounds}` };
      if (value.length < minLength) return { wrong: `is too short; write ${bounds}` };
      if (value.length > rules.maxLength) return { wrong: `is too long; write ${bounds}` };
      const allowed = rules.words === true ? /^[!-~]+( [!-~]+)*$/ : /^[!-~]+$/;
      const fits = allowed.test(value) && !without.some((char) => value.includes(char));
      return fits ? { value } : { wrong: `may hold only ${bounds}` };
    },
  });
}

/** A path or a program, made absolute unless it is a bare program name to be found on PATH. */
export function path(
  doc: string,
  rules: { default?: string; example?: string; program?: boolean },
): Leaf<string> {
  return leaf<string>({
    kind: rules.program === true ? "program" : "path",
    doc,
    fallback: rules.default,
    example: rules.example,
    read({ value, folder }) {
      if (typeof value !== "string" || value.trim() === "" || value.includes("\0")) {
        return { wrong: "is not a path" };
      }
      const bare = rules.program === true && !value.includes("/");
      return { value: bare ? value : resolve(folder, value) };
    },
  });
}

export function choice<const T extends readonly (string | number)[]>(
  doc: string,
  choices: T,
  fallback: T[number],
  later: { readonly [choice: string]: string } = {},
): Leaf<T[number]> {
  return leaf<T[number]>({
    kind: "choice",
    doc,
    bounds: choices.join(" | "),
    fallback,
    read({ value, expanded }) {
      const chosen = choices.find((each) => each === value || (expanded && String(each) === value));
      if (chosen !== undefined) return { value: chosen };
      if (typeof value === "string" && Object.hasOwn(later, value)) return { wrong: later[value]! };
      const guess = didYouMean(String(value), choices.map(String));
      return { wrong: `is not one of ${choices.join(", ")}${guess}` };
    },
  });
}

/** `file:name`, the file relative to the config file; it must exist. */
export function functionIn(
  doc: string,
  rules: { endings: readonly string[]; nameRequired: boolean; example: string },
): Leaf<string> {
  const ending = new RegExp(`(?:${rules.endings.map((each) => each.replace(".", "\\.")).join("|")})$`);
  return leaf<string>({
    kind: rules.nameRequired ? "file:function" : "file[:function]",
    doc,
    bounds: rules.endings.join(" | "),
    example: rules.example,
    read({ value, folder }) {
      const form = {
        wrong: `is not ${rules.nameRequired ? "file:function" : "a file"}; write one like ${rules.example}`,
      };
      const match = /^([^\0]+?)(?::([\p{L}_$][\p{L}\p{N}_$]*))?$/u.exec(String(value));
      if (match === null || !ending.test(match[1]!)) return form;
      if (rules.nameRequired && match[2] === undefined) return form;
      const file = resolve(folder, match[1]!);
      const found = whatIs(file);
      if (found === "missing") return { wrong: `names a file that is not there: ${file}` };
      if (found === "other") return { wrong: `does not name a file: ${file} is something else` };
      return { value: match[2] === undefined ? file : `${file}:${match[2]}` };
    },
  });
}

function whatIs(file: string): "file" | "missing" | "other" {
  try {
    const found = statSync(file, { throwIfNoEntry: false });
    if (found === undefined) return "missing";
    return found.isFile() ? "file" : "other";
  } catch {
    // A loop of links, a name too long, a folder that may not be entered: not there for us.
    return "missing";
  }
}

/** 1048576 → "1,048,576". */
export function grouped(value: number): string {
  return value.toLocaleString("en-US", { maximumFractionDigits: 6 });
}

const perUnit: { readonly [unit: string]: { readonly [suffix: string]: number } } = {
  ms: { ms: 1, s: 1000, m: 60_000, min: 60_000, h: 3_600_000, d: 86_400_000 },
  bytes: {
    b: 1,
    k: 1024,
    kb: 1024,
    kib: 1024,
    m: 2 ** 20,
    mb: 2 ** 20,
    mib: 2 ** 20,
    g: 2 ** 30,
    gb: 2 ** 30,
  },
};

/** For "2s" where milliseconds are wanted: "; write 2000 (ms)". */
function inUnit(value: unknown, unit: Unit): string {
  const match = /^(\d+(?:\.\d+)?)\s*([a-z]+)$/i.exec(String(value));
  const factor = match === null ? undefined : perUnit[unit]?.[match[2]!.toLowerCase()];
  if (match === null || factor === undefined) return unit === "" ? "" : ` (${unit})`;
  return `; write ${Math.round(Number(match[1]) * factor)} (${unit})`;
}
