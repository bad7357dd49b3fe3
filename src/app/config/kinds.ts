/**
 * Kinds of setting: each constructor makes one entry of the table in `config.ts` and reads its value.
 *
 * A leaf holds one value; a group, a list, a named map and a one-of hold other settings. `Value<typeof entry>` is the
 * parsed type, from which `Config` is inferred. A leaf's first argument is its default; `optional` and `required` turn
 * it into an example.
 *
 * `read` never throws and never repeats its input: `read.ts` decides whether the value may be shown, as it may be a
 * secret or come from the environment.
 */
import { statSync } from "node:fs";
import { isIP, isIPv4, isIPv6 } from "node:net";
import { resolve } from "node:path";
import { compilePattern, MAX_PATTERN_LENGTH, PatternMistake } from "../../core/pattern.ts";
import { didYouMean } from "./spelling.ts";

export type Unit = "ms" | "days" | "bytes" | "tokens" | "per minute" | "share" | "";

export interface Source {
  readonly value: string | number | boolean;
  /** Was text with `${NAME}`, so "64" may mean 64. */
  readonly expanded: boolean;
  readonly folder: string;
}

/** `wrong` continues a sentence that began with the value: "is not a number". */
export type Reading<T> = { readonly value: T } | { readonly wrong: string };

export interface Leaf<T> {
  readonly type: "leaf";
  /** "integer", "host:port", … */
  readonly kind: string;
  readonly doc: string;
  readonly unit: Unit;
  /** "1 to 64", "a | b"; "" if unbounded. */
  readonly bounds: string;
  readonly need: "default" | "optional" | "required";
  readonly fallback: T | undefined;
  /** As written in a file; "" without a default. */
  readonly defaultText: string;
  /** Shown in the example file if there is no default. */
  readonly example: string;
  /** Never shown, also in errors. */
  readonly secret: boolean;
  read(source: Source): Reading<T>;
}

export interface SettingFields {
  readonly [name: string]: Setting;
}
export interface SettingGroup<F extends SettingFields, Absent extends boolean = boolean> {
  readonly type: "group";
  readonly doc: string;
  readonly fields: F;
  /** Whether it is undefined unless the file sets it. */
  readonly absent: Absent;
}
export interface List<S> {
  readonly type: "list";
  readonly doc: string;
  readonly each: S;
  readonly min: number;
  readonly max: number;
  /** A list of one may be written as its element. */
  readonly single?: boolean;
}
/** A map with names as keys; the order counts. */
export interface Named<F extends SettingFields> {
  readonly type: "named";
  readonly doc: string;
  readonly fields: F;
  readonly max: number;
  /** Names if the file has none. */
  readonly fallback: readonly string[];
}
/** A map whose `kind` selects its other settings. */
export interface OneOf<V extends Variants> {
  readonly type: "one-of";
  readonly doc: string;
  readonly variants: V;
  /** Default kind; undefined: required. */
  readonly fallback: string | undefined;
}
export interface Variants {
  readonly [kind: string]: SettingGroup<SettingFields>;
}
export type Setting =
  | Leaf<unknown>
  | SettingGroup<SettingFields>
  | List<unknown>
  | Named<SettingFields>
  | OneOf<Variants>;

export type SettingValue<S> =
  S extends Leaf<infer T>
    ? T
    : S extends SettingGroup<infer F, infer Absent>
      ? Values<F> | (Absent extends true ? undefined : never)
      : S extends List<infer E>
        ? readonly SettingValue<E>[]
        : S extends Named<infer F>
          ? readonly Flat<{ readonly name: string } & Values<F>>[]
          : S extends OneOf<infer V>
            ? { [K in keyof V]: Flat<{ readonly kind: K } & SettingValue<V[K]>> }[keyof V]
            : undefined;
type Flat<T> = { [K in keyof T]: T[K] };
type OptionalKeys<F> = { [K in keyof F]: undefined extends SettingValue<F[K]> ? K : never }[keyof F];
export type Values<F> = Flat<
  { readonly [K in Exclude<keyof F, OptionalKeys<F>>]: SettingValue<F[K]> } & {
    readonly [K in OptionalKeys<F>]?: Exclude<SettingValue<F[K]>, undefined>;
  }
>;

export const group = <const F extends SettingFields>(doc: string, fields: F): SettingGroup<F, false> => ({
  type: "group",
  doc,
  fields,
  absent: false,
});
export const optionalGroup = <const F extends SettingFields>(
  doc: string,
  fields: F,
): SettingGroup<F, true> => ({
  ...group(doc, fields),
  absent: true,
});
export const list = <const S extends Setting>(
  doc: string,
  each: S,
  count: { min: number; max: number; single?: boolean },
): List<S> => ({ type: "list", doc, each, ...count });
export const named = <const F extends SettingFields>(
  doc: string,
  fields: F,
  more: { max: number; fallback: readonly string[] },
): Named<F> => ({ type: "named", doc, fields, ...more });
export const oneOf = <const V extends Variants>(
  doc: string,
  variants: V,
  fallback?: keyof V & string,
): OneOf<V> => ({ type: "one-of", doc, variants, fallback });

const exampleOf = (leaf: Leaf<unknown>) => leaf.example || leaf.defaultText;
export const optional = <T>(leaf: Leaf<T>): Leaf<T | undefined> => ({ ...required(leaf), need: "optional" });
export const required = <T>(leaf: Leaf<T>): Leaf<T> => ({
  ...leaf,
  need: "required",
  fallback: undefined,
  defaultText: "",
  example: exampleOf(leaf),
});

type LeafFacts<T> = Pick<Leaf<T>, "kind" | "doc" | "read"> & { readonly fallback: T } & Partial<
    Pick<Leaf<T>, "unit" | "bounds" | "defaultText" | "secret">
  >;
function leaf<T>(facts: LeafFacts<T>): Leaf<T> {
  const defaults = { unit: "", bounds: "", example: "", secret: false, need: "default" } as const;
  return { type: "leaf", ...defaults, defaultText: String(facts.fallback), ...facts };
}

// ── Numbers, choices, text ──────────────────────────────────────────────────────────────────────

type Range = readonly [fallback: number, min: number, max: number];

const quantity =
  (kind: "integer" | "number", unit: Unit) =>
  ([fallback, min, max]: Range, doc: string): Leaf<number> => {
    const bounds = `${grouped(min)} to ${grouped(max)}`;
    return leaf<number>({
      kind,
      doc,
      unit,
      bounds,
      fallback,
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
  };
export const integer = quantity("integer", "");
export const number = quantity("number", "");
export const share = quantity("number", "share");
export const ms = quantity("integer", "ms");
export const fractionalMs = quantity("number", "ms");
export const bytes = quantity("integer", "bytes");
export const tokens = quantity("integer", "tokens");
export const days = quantity("integer", "days");
export const perMinute = quantity("integer", "per minute");

/** 1048576 → "1,048,576". */
function grouped(value: number): string {
  return value.toLocaleString("en-US", { maximumFractionDigits: 6 });
}

const MIB = 2 ** 20;
const perUnit: { readonly [unit: string]: { readonly [suffix: string]: number } } = {
  ms: { ms: 1, s: 1000, m: 60_000, min: 60_000, h: 3_600_000, d: 86_400_000 },
  bytes: { b: 1, k: 1024, kb: 1024, kib: 1024, m: MIB, mb: MIB, mib: MIB, g: 1024 * MIB, gb: 1024 * MIB },
};

/** For "2s" where milliseconds are expected: "; write 2000 (ms)". */
function inUnit(value: unknown, unit: Unit): string {
  const match = /^(\d+(?:\.\d+)?)\s*([a-z]+)$/i.exec(String(value));
  const factor = match === null ? undefined : perUnit[unit]?.[match[2]!.toLowerCase()];
  if (match === null || factor === undefined) return unit === "" ? "" : ` (${unit})`;
  return `; write ${Math.round(Number(match[1]) * factor)} (${unit})`;
}

export function boolean(fallback: boolean, doc: string): Leaf<boolean> {
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

export function choice<const T extends readonly (string | number)[]>(
  choices: T,
  doc: string,
  fallback: T[number] = choices[0]!,
): Leaf<T[number]> {
  return leaf<T[number]>({
    kind: "choice",
    doc,
    bounds: choices.join(" | "),
    fallback,
    read({ value, expanded }) {
      const chosen = choices.find((each) => each === value || (expanded && String(each) === value));
      if (chosen !== undefined) return { value: chosen };
      const guess = didYouMean(String(value), choices.map(String));
      return { wrong: `is not one of ${choices.join(", ")}${guess}` };
    },
  });
}

/** `auto`, `off`, or one length, in tokens. */
export function lengthClass(doc: string): Leaf<"auto" | "off" | number> {
  const [bounds, most] = ["auto | off | 1 to 1,000,000,000", 1_000_000_000];
  return leaf<"auto" | "off" | number>({
    kind: "lengths",
    doc,
    bounds,
    fallback: "auto",
    read({ value, expanded }) {
      if (value === "auto" || value === "off") return { value };
      const given = expanded ? Number(value) : value;
      if (typeof given === "number" && Number.isInteger(given) && given >= 1 && given <= most) {
        return { value: given };
      }
      return { wrong: "is neither auto, off nor a list of lengths in tokens such as [16, 64, 256]" };
    },
  });
}

interface TextRules {
  /** Minimum length; default 1. */
  readonly min?: number;
  readonly secret?: boolean;
  /** Forbidden characters. */
  readonly without?: readonly string[];
  /** Allows blanks. */
  readonly words?: boolean;
}
/** Visible ASCII, by default without blanks: fits a header, a metric label and a terminal. */
export function text(fallback: string, max: number, doc: string, rules: TextRules = {}): Leaf<string> {
  const { without = [], min = 1, words = false, secret = false } = rules;
  const except = without.length === 0 ? "" : ` except ${without.join(" ")}`;
  const bounds = `${min} to ${max} visible ASCII characters${except}${words ? ", blanks between them" : ""}`;
  return leaf<string>({
    kind: secret ? "secret" : "text",
    doc,
    bounds,
    fallback,
    secret,
    read({ value }) {
      if (typeof value !== "string") return { wrong: "is not text; put it in quotes" };
      if (value === "") return { wrong: `is empty; write ${bounds}` };
      if (value.length < min) return { wrong: `is too short; write ${bounds}` };
      if (value.length > max) return { wrong: `is too long; write ${bounds}` };
      const allowed = words ? /^[!-~]+( [!-~]+)*$/ : /^[!-~]+$/;
      const fits = allowed.test(value) && !without.some((char) => value.includes(char));
      return fits ? { value } : { wrong: `may hold only ${bounds}` };
    },
  });
}

export function pattern(fallback: string, doc: string): Leaf<string> {
  return leaf<string>({
    kind: "pattern",
    doc,
    bounds: `1 to ${MAX_PATTERN_LENGTH} characters`,
    fallback,
    read({ value }) {
      if (typeof value !== "string") return { wrong: "is not text; put it in single quotes" };
      try {
        compilePattern(value);
        return { value };
      } catch (error) {
        if (error instanceof PatternMistake) return { wrong: error.message };
        throw error;
      }
    },
  });
}

// ── Files ───────────────────────────────────────────────────────────────────────────────────────

/** Made absolute; a program without a slash is looked up on PATH and unchanged. */
const pathOf =
  (kind: "path" | "program") =>
  (fallback: string, doc: string): Leaf<string> =>
    leaf<string>({
      kind,
      doc,
      fallback,
      read({ value, folder }) {
        if (typeof value !== "string" || value.trim() === "" || value.includes("\0")) {
          return { wrong: "is not a path" };
        }
        return { value: kind === "program" && !value.includes("/") ? value : resolve(folder, value) };
      },
    });
export const path = pathOf("path");
export const program = pathOf("program");

/** `file:name`, relative to the config file; the file must exist. */
export function functionIn(
  example: string,
  doc: string,
  rules: { endings: readonly string[]; nameRequired: boolean },
): Leaf<string> {
  const { endings, nameRequired } = rules;
  return required(
    leaf<string>({
      kind: nameRequired ? "file:function" : "file[:function]",
      doc,
      bounds: endings.join(" | "),
      fallback: example,
      read({ value, folder }) {
        const match = /^([^\0]+?)(?::([\p{L}_$][\p{L}\p{N}_$]*))?$/u.exec(String(value));
        const [, written = "", name] = match ?? [];
        if (!endings.some((ending) => written.endsWith(ending)) || (nameRequired && name === undefined)) {
          return { wrong: `is not ${nameRequired ? "file:function" : "a file"}; write one like ${example}` };
        }
        const file = resolve(folder, written);
        const found = whatIs(file);
        if (found === "missing") return { wrong: `names a file that is not there: ${file}` };
        if (found === "other") return { wrong: `does not name a file: ${file} is something else` };
        return { value: name === undefined ? file : `${file}:${name}` };
      },
    }),
  );
}

function whatIs(file: string): "file" | "missing" | "other" {
  try {
    const found = statSync(file, { throwIfNoEntry: false });
    if (found === undefined) return "missing";
    return found.isFile() ? "file" : "other";
  } catch {
    // Symlink loop, name too long, no permission.
    return "missing";
  }
}

// ── Places on the network ───────────────────────────────────────────────────────────────────────

export interface Address {
  readonly host: string;
  readonly port: number;
}

const hostName =
  /^(?=.{1,253}$)[a-z\d_](?:[a-z\d_-]{0,62}[a-z\d_])?(?:\.[a-z\d_](?:[a-z\d_-]{0,62}[a-z\d_])?)*$/i;

function parseAddress(written: string): Address | undefined {
  const match = /^(?:\[([^\]]+)\]|([^:[\]]+)):(\d{1,5})$/.exec(written);
  if (match === null) return undefined;
  const [, bracketed, plain = "", portText = ""] = match;
  const port = Number(portText);
  if (port > 65_535) return undefined;
  if (bracketed !== undefined) return isIPv6(bracketed) ? { host: bracketed, port } : undefined;
  const numeric = /^[\d.]+$/.test(plain);
  return (numeric ? isIPv4(plain) : hostName.test(plain)) ? { host: plain, port } : undefined;
}

export function address(fallback: string, doc: string): Leaf<Address> {
  return leaf<Address>({
    kind: "host:port",
    doc,
    bounds: "port 0 to 65,535; 0 picks a free one",
    fallback: parseAddress(fallback)!,
    defaultText: fallback,
    read({ value }) {
      const parsed = parseAddress(String(value));
      if (parsed !== undefined) return { value: parsed };
      return { wrong: "is not host:port; write one like 127.0.0.1:8080, [::1]:8080 or 0.0.0.0:8080" };
    },
  });
}

/** Another server's listener; the port is required. */
export function server(example: string, doc: string): Leaf<Address> {
  return {
    ...address(example, doc),
    bounds: "port 1 to 65,535",
    read({ value }) {
      const parsed = parseAddress(String(value));
      if (parsed !== undefined && parsed.port > 0) return { value: parsed };
      return { wrong: `is not host:port; write one like ${example} or [::1]:6379` };
    },
  };
}

/** An IP address, as `node:dns` requires. */
export function dnsServer(example: string, doc: string): Leaf<string> {
  return leaf<string>({
    kind: "address:port",
    doc,
    bounds: "port 1 to 65,535; 53 without one",
    fallback: example,
    read({ value }) {
      const written = String(value);
      if (isIP(written) !== 0) return { value: written };
      const { host, port } = parseAddress(written) ?? { host: "", port: 0 };
      if (isIP(host) !== 0 && port > 0)
        return { value: isIP(host) === 6 ? `[${host}]:${port}` : `${host}:${port}` };
      return { wrong: `is not an address; write one like ${example}, 10.0.0.2 or [::1]:53` };
    },
  });
}

/** A full URL. Credentials in it are refused: worker URLs are logged and shown. */
export function url(example: string, schemes: readonly string[], doc: string): Leaf<string> {
  return leaf<string>({
    kind: "URL",
    doc,
    bounds: schemes.join(" | "),
    fallback: example,
    read({ value }) {
      const parsed = URL.parse(String(value));
      // The URL parser silently drops line breaks and tabs.
      const odd = /[\u0000- \u007f]/.test(String(value));
      if (parsed === null || parsed.hostname === "" || typeof value !== "string" || odd) {
        return { wrong: `is not a full URL; write one like ${example}` };
      }
      if (!schemes.includes(parsed.protocol.slice(0, -1))) {
        return { wrong: `must begin with ${schemes.map((scheme) => `${scheme}://`).join(" or ")}` };
      }
      if (parsed.username !== "" || parsed.password !== "") {
        return { wrong: "holds credentials, which would be logged with it; remove the part before the @" };
      }
      return { value: parsed.href };
    },
  });
}

/** `grpc://HOST:PORT`, `grpcs` for TLS; no path, since the service's is fixed. */
export function grpcUrl(example: string, doc: string): Leaf<string> {
  const full = url(example, ["grpc", "grpcs"], doc);
  return { ...full, read: (source) => originOnly(full.read(source), example) };
}

function originOnly(read: Reading<string>, example: string): Reading<string> {
  if ("wrong" in read) return read;
  const { port, pathname, search, hash, protocol, host } = new URL(read.value);
  if (port === "") return { wrong: `names no port; write one like ${example}` };
  if (!/^\/?$/.test(pathname) || search !== "" || hash !== "") {
    return { wrong: `has something behind its port; write one like ${example}` };
  }
  return { value: `${protocol}//${host}` };
}

/** A worker's URL, or a DNS name for several: `dns://NAME:PORT/…`, `dns+SCHEME://` for TLS. */
export function workerUrl(full: Leaf<string>, secure: "https" | "grpcs"): Leaf<string> {
  const schemes = ["dns", `dns+${secure}`];
  const example = "dns://gpu.default.svc:9000";
  const name = url(example, schemes, full.doc);
  return {
    ...full,
    bounds: `${full.bounds} | ${schemes.join(" | ")}`,
    read(source) {
      if (!/^dns(?:\+[a-z]+)?:/i.test(String(source.value))) return full.read(source);
      const read = name.read(source);
      if ("wrong" in read) return read;
      const { protocol, hostname, port, pathname, search, hash } = new URL(read.value);
      if (!hostName.test(hostname) || /^[\d.]+$/.test(hostname)) {
        return { wrong: `does not name a host; write one like ${example}` };
      }
      if (hash !== "") return { wrong: "has a # in it, which no worker would see; remove it" };
      // The URL parser keeps the host's case under unknown schemes.
      const place = `${protocol}//${hostname.toLowerCase()}${port === "" ? "" : `:${port}`}`;
      if (secure === "grpcs") return originOnly({ value: `${place}${pathname}${search}` }, example);
      return { value: `${place}${pathname || "/"}${search}` };
    },
  };
}

/** A URL that may hold percent-encoded credentials, and is never shown. */
function secretUrl(
  example: string,
  doc: string,
  schemes: readonly [first: string, other: string],
  form: string,
  check: (parsed: URL) => string | undefined = () => undefined,
): Leaf<string> {
  const begins = schemes.map((scheme) => `${scheme}://`);
  return leaf<string>({
    kind: "secret",
    doc,
    bounds: schemes.join(" | "),
    fallback: example,
    secret: true,
    read({ value }) {
      if (typeof value !== "string" || !/^[!-~]{1,2048}$/.test(value)) {
        return { wrong: `is not a URL of at most 2048 visible ASCII characters; write ${form}` };
      }
      if (!begins.some((each) => value.toLowerCase().startsWith(each))) {
        return { wrong: `must begin with ${begins.join(" or ")}; write ${form}` };
      }
      const parsed = URL.parse(value);
      if (parsed === null || parsed.hostname === "" || parsed.port === "0") {
        return { wrong: `names no server; write ${form}, with %XX for special characters in the password` };
      }
      const wrong = check(parsed);
      if (wrong !== undefined) return { wrong };
      return decodes(parsed.username) && decodes(parsed.password)
        ? { value }
        : { wrong: "holds a % in its user or password that begins no %XX; write %25 for a plain %" };
    },
  });
}

function decodes(encoded: string): boolean {
  try {
    decodeURIComponent(encoded);
    return true;
  } catch {
    return false;
  }
}

/** `redis://USER:PASSWORD@HOST:PORT/DB`, all but the host optional; `rediss` for TLS. */
export function redisUrl(example: string, doc: string): Leaf<string> {
  const form = "redis://USER:PASSWORD@HOST:PORT, or rediss:// for TLS";
  return secretUrl(
    example,
    doc,
    ["redis", "rediss"],
    form,
    ({ search, hash, pathname, username, password }) => {
      if (search !== "" || hash !== "")
        return "has options after ? or #, which are not read; use the settings beside it";
      if (!/^\/?\d{0,5}$/.test(pathname))
        return "has a path that is no database number; write /0, or nothing, after the port";
      return username !== "" && password === ""
        ? "names a user without a password; write USER:PASSWORD@, or remove the user"
        : undefined;
    },
  );
}

/** `postgres://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=…`; the client reads the query. */
export function postgresUrl(example: string, doc: string): Leaf<string> {
  const form = "postgres://USER:PASSWORD@HOST:PORT/DATABASE";
  return secretUrl(example, doc, ["postgres", "postgresql"], form);
}

/** A path with an optional query. */
export function urlPath(example: string, doc: string): Leaf<string> {
  return leaf<string>({
    kind: "URL path",
    doc,
    bounds: "begins with /",
    fallback: example,
    read({ value }) {
      const fits = typeof value === "string" && /^\/[!-~]{0,511}$/.test(value) && !value.includes("#");
      return fits ? { value } : { wrong: `is not a path on the worker; write one like ${example}` };
    },
  });
}
