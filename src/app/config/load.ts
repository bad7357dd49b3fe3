/**
 * Loads a file into a `Config`, or a list of all its problems.
 *
 *   bytes → text (UTF-8, at most 1 MiB) → YAML tree → draft (read.ts) → rules (check.ts) → Config
 *
 * A problem is one line: place, setting, what is wrong, what to do; never a secret or an environment value. YAML's
 * error texts may quote the source, so they are replaced. With broken syntax only that is reported.
 */
import { closeSync, fstatSync, openSync, readSync } from "node:fs";
import { dirname, resolve } from "node:path";
import { isMap, isScalar, LineCounter, parseDocument, visit, type Document, type YAMLError } from "yaml";
import { checkSettings } from "./check.ts";
import type { Config, Problem } from "./config.ts";
import { Findings, readSettingsTree, shield } from "./read.ts";
import { printable } from "../../cli/terminal/terminal.ts";

export type Loaded =
  | { readonly config: Config; readonly problems?: undefined; readonly warnings: readonly Problem[] }
  | {
      readonly config?: undefined;
      readonly problems: readonly Problem[];
      readonly warnings: readonly Problem[];
    };

const maxFileBytes = 2 ** 20;
const maxAliases = 100;
/** Fits a screen; the first ones usually explain the rest. */
const maxProblems = 50;

export function loadConfig(path: string, env: NodeJS.ProcessEnv = process.env): Loaded {
  const read = readText(path);
  return "wrong" in read ? fails(path, read.wrong) : parseConfig(read.text, path, env);
}

export function parseConfig(text: string, fileName: string, env: NodeJS.ProcessEnv = process.env): Loaded {
  const lines = new LineCounter();
  let document: Document;
  try {
    document = parseDocument(shield(text), {
      lineCounter: lines,
      prettyErrors: false,
      uniqueKeys: false,
      resolveKnownTags: false,
    });
  } catch {
    return fails(fileName, "is not YAML that can be read");
  }
  const broken = syntaxProblems(document, lines, fileName) ?? shapeProblem(document, fileName);
  if (broken !== undefined) return { problems: broken, warnings: [] };

  const findings = new Findings(fileName);
  const folder = resolve(dirname(fileName));
  const draft = readSettingsTree({ document, lines, findings, env, folder });
  checkSettings(draft, findings);
  const warnings = inOrder(findings.warnings);
  if (findings.problems.length > 0) return { problems: inOrder(findings.problems), warnings };
  // No problems, so the draft is complete.
  return { config: withRates(draft as Config), warnings };
}

/** Default rates with authentication, if the file sets none. */
function withRates(config: Config): Config {
  if (config.auth.mode === "none") return config;
  return {
    ...config,
    tiers: config.tiers.map((tier) => ({ ...defaultRate(tier.name), ...tier })),
    limits: { perUserPerMinute: DEFAULT_PER_USER, ...config.limits },
  };
}

const DEFAULT_PER_USER = 1000;
const DEFAULT_RATES: ReadonlyMap<string, number> = new Map([
  ["enterprise", 60_000],
  ["paid", 6000],
  ["free", 1000],
]);

function defaultRate(tier: string): { ratePerMinute?: number } {
  const ratePerMinute = DEFAULT_RATES.get(tier);
  return ratePerMinute === undefined ? {} : { ratePerMinute };
}

/** Without a config file: a simulated GPU. */
export function demoConfig(logLevel: Config["telemetry"]["logLevel"] = "silent"): Config {
  const text = `
models:
  - name: demo
    backend: { kind: simulated, workers: 4, baseMs: 100 }
    maxBatchSize: 64
telemetry: { logLevel: ${logLevel} }
`;
  const loaded = parseConfig(text, "demo.yaml", {});
  if (loaded.config === undefined) throw new Error(`the demo is wrong: ${loaded.problems[0]?.message}`);
  return loaded.config;
}

function readText(path: string): { text: string } | { wrong: string } {
  let file: number | undefined;
  try {
    file = openSync(path, "r");
    const about = fstatSync(file);
    if (about.isDirectory()) return { wrong: "is a folder; name the file in it" };
    const bytes = readUpTo(file, maxFileBytes + 1);
    if (bytes.length > maxFileBytes) return { wrong: "is larger than 1 MiB; that cannot be a config file" };
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (text.includes("\0")) return { wrong: "holds NUL bytes; save it as UTF-8 text" };
    return { text };
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    if (code === "ENOENT" || code === "ENOTDIR") {
      return { wrong: "there is no such file; copy ferry.example.yaml, or name another with -c" };
    }
    if (code === "EACCES" || code === "EPERM") return { wrong: "may not be read; check its permissions" };
    if (code === "EISDIR") return { wrong: "is a folder; name the file in it" };
    if (code === "ERR_ENCODING_INVALID_ENCODED_DATA") return { wrong: "is not UTF-8 text; save it as UTF-8" };
    return { wrong: `cannot be read (${code ?? "unknown reason"})` };
  } finally {
    if (file !== undefined) closeSync(file);
  }
}

/** Reads to the end or to `max` bytes: a device may have no end. */
function readUpTo(file: number, max: number): Buffer {
  const bytes = Buffer.alloc(max);
  let length = 0;
  while (length < max) {
    const got = readSync(file, bytes, length, max - length, null);
    if (got === 0) break;
    length += got;
  }
  return bytes.subarray(0, length);
}

/** At most one per line and five in all: one mistake causes follow-up errors. */
function syntaxProblems(document: Document, lines: LineCounter, file: string): Problem[] | undefined {
  const problems = new Map<number, Problem>();
  for (const error of [...document.errors, ...document.warnings]) {
    const { line, col } = lines.linePos(error.pos[0]);
    if (problems.has(line) || problems.size === 5) continue;
    problems.set(line, {
      file,
      line,
      column: col,
      path: "",
      message: syntaxMessages[error.code] ?? syntaxFallback,
    });
  }
  return problems.size === 0 ? undefined : inOrder([...problems.values()]);
}

function shapeProblem(document: Document, file: string): readonly Problem[] | undefined {
  let aliases = 0;
  visit(document, { Alias: () => void (aliases += 1) });
  if (aliases > maxAliases)
    return fails(file, `holds ${aliases} aliases; ${maxAliases} is the most`).problems;
  const root = document.contents;
  if (root === null || (isScalar(root) && root.value === null)) {
    return fails(file, "is empty; it needs at least one model (see ferry.example.yaml)").problems;
  }
  if (!isMap(root)) {
    return fails(file, "is not a map of settings; write lines like `listen: 127.0.0.1:8080`").problems;
  }
  return undefined;
}

/** Replaces YAML's messages, which may quote a secret. */
const syntaxMessages: { readonly [code in YAMLError["code"]]?: string } = {
  TAB_AS_INDENT: "a tab is used to indent; use blanks",
  BAD_INDENT: "the indentation does not fit the lines above, or a bracket is not closed",
  MISSING_CHAR: "a character is missing before this: a quote, a colon, a comma or a closing bracket",
  BLOCK_AS_IMPLICIT_KEY: "two `name: value` on one line, or a line indented too far; give each its own line",
  MULTILINE_IMPLICIT_KEY: "a name goes over two lines; is a colon or an indentation wrong above?",
  BAD_SCALAR_START: "a value cannot begin with this character; put it in quotes",
  BAD_DQ_ESCAPE: 'a \\ in "…" must begin a known escape; write \\\\, or use single quotes',
  MULTIPLE_DOCS: "a second document begins here; one file holds one (remove the ---)",
  TAG_RESOLVE_FAILED: "words that begin with ! are tags, which are not used here; put the value in quotes",
  RESOURCE_EXHAUSTION: "nested too deeply",
  BAD_ALIAS: "a value that begins with * or & needs quotes",
  ALIAS_PROPS: "a value that begins with * or & needs quotes",
};
const syntaxFallback = "YAML cannot read this; if it is a value, put it in quotes";

function fails(file: string, message: string): Extract<Loaded, { config?: undefined }> {
  return { problems: [{ file, path: "", message }], warnings: [] };
}

function inOrder(problems: readonly Problem[]): Problem[] {
  return problems.toSorted((a, b) => (a.line ?? 0) - (b.line ?? 0) || (a.column ?? 0) - (b.column ?? 0));
}

/** One line each, in columns. */
export function formatProblems(problems: readonly Problem[]): string {
  const some = problems.slice(0, maxProblems);
  const rows = some.map((each) => [placeOf(each), printable(each.path), printable(each.message)] as const);
  const widest = (column: 0 | 1) => Math.min(60, Math.max(0, ...rows.map((row) => row[column].length)));
  const [placeWidth, pathWidth] = [widest(0), widest(1)];
  const text = rows.map(([place, path, message]) => {
    const start = place.padEnd(placeWidth);
    return pathWidth === 0 ? `${start}  ${message}` : `${start}  ${path.padEnd(pathWidth)}  ${message}`;
  });
  if (problems.length > some.length) text.push(`… and ${problems.length - some.length} more`);
  return text.map((line) => `${line}\n`).join("");
}

function placeOf({ file, line, column }: Problem): string {
  return printable(line === undefined ? file : `${file}:${line}:${column ?? 1}`);
}
