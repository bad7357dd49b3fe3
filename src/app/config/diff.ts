/**
 * Differences between two configs, one line each: `models[embed].maxBatchSize 64 → 32`.
 *
 * Models and tiers are matched by name, workers by address. Each difference applies live or needs a restart; the table
 * is in `docs/operations.md`. Secrets, and settings that often hold one, show only that they changed.
 */
import { isDeepStrictEqual } from "node:util";
import type { Config, ModelConfig } from "./config.ts";

export interface ConfigDiff {
  readonly changed: readonly string[];
  readonly needRestart: readonly string[];
}

/** Opened or built once: sockets, the store, observers. `limits`: passed to a socket when it opens. */
const NEEDS_RESTART: readonly RegExp[] = [
  /^(?:listen|tls|grpc|admin|engine|zone|requestLog|tiers)\b/,
  /^telemetry\.(?!logLevel$)/,
  /^limits\.(?:maxConnections|headersTimeoutMs|requestTimeoutMs|keepAliveTimeoutMs)$/,
];
/** The only live tier setting: names, number and order are in every task and credential. */
const TIER_RULES = /^tiers(?:\[[^\]]*\]|\.NAME)\.ratePerMinute$/;
const SECRET = /(?:^|\.)(?:authorization|token|secret|password|url|webhook|command|otlpUrl)$/;
const MAX_TEXT = 80;

export function diffConfigs(before: Config, after: Config): ConfigDiff {
  const lines = { changed: [] as string[], needRestart: [] as string[] };
  const note: Note = (path, how) => {
    lines[needsRestart(path) ? "needRestart" : "changed"].push(`${path} ${how}`);
  };
  const { models, tiers, ...rest } = before;
  const { models: nextModels, tiers: nextTiers, ...nextRest } = after;
  compare("", rest, nextRest, note);
  compareTiers(tiers, nextTiers, note);
  compareModels(models, nextModels, note);
  return lines;
}

export function needsRestart(path: string): boolean {
  return NEEDS_RESTART.some((each) => each.test(path)) && !TIER_RULES.test(path);
}

type Note = (path: string, how: string) => void;

function compareTiers(before: Config["tiers"], after: Config["tiers"], note: Note): void {
  const names = (tiers: Config["tiers"]): string => tiers.map(({ name }) => name).join(", ");
  if (names(before) !== names(after)) return note("tiers", `${names(before)} → ${names(after)}`);
  before.forEach((tier, at) => compare(`tiers[${tier.name}]`, tier, after[at]!, note));
}

function compareModels(before: readonly ModelConfig[], after: readonly ModelConfig[], note: Note): void {
  for (const model of before) {
    const next = after.find(({ name }) => name === model.name);
    if (next === undefined) note(`models[${model.name}]`, "removed");
    else compare(`models[${model.name}]`, model, next, note);
  }
  for (const { name, backend } of after) {
    if (before.some((model) => model.name === name)) continue;
    const { kind, workers } = backend;
    const count = typeof workers === "number" ? workers : workers.length;
    note(`models[${name}]`, `added (${kind}, ${count} ${count === 1 ? "worker" : "workers"})`);
  }
}

function compare(path: string, before: unknown, after: unknown, note: Note): void {
  if (isDeepStrictEqual(before, after)) return;
  if (SECRET.test(path)) return note(path, "changed");
  if (isMap(before) && isMap(after)) {
    // Different kinds of backend have no comparable settings.
    if (before["kind"] !== after["kind"]) return note(path, `${kindOf(before)} → ${kindOf(after)}`);
    const inner = path === "" ? "" : `${path}.`;
    for (const key of new Set([...Object.keys(before), ...Object.keys(after)])) {
      compare(inner + key, before[key], after[key], note);
    }
    return;
  }
  if (Array.isArray(before) && Array.isArray(after)) return note(path, listChange(before, after));
  note(path, `${textOf(before)} → ${textOf(after)}`);
}

/** `+new −gone`, or that the order changed. */
function listChange(before: readonly unknown[], after: readonly unknown[]): string {
  const [old, next] = [before.map(textOf), after.map(textOf)];
  const came = next.filter((each) => !old.includes(each)).map((each) => `+${each}`);
  const went = old.filter((each) => !next.includes(each)).map((each) => `−${each}`);
  return [...came, ...went].join(" ") || "changed";
}

function kindOf(map: Readonly<Record<string, unknown>>): string {
  return typeof map["kind"] === "string" ? map["kind"] : "set";
}

function isMap(value: unknown): value is Readonly<Record<string, unknown>> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function textOf(value: unknown): string {
  if (value === undefined) return "none";
  if (isMap(value)) return "host" in value ? `${String(value["host"])}:${String(value["port"])}` : "set";
  if (typeof value !== "string") return short(JSON.stringify(value));
  const url = /^\w+:\/\//.test(value) ? URL.parse(value) : null;
  // Strips credentials before the host and tokens behind the path.
  return short(url === null ? value : `${url.protocol}//${url.host}${url.pathname}`);
}

function short(text: string): string {
  return text.length > MAX_TEXT ? `${text.slice(0, MAX_TEXT)}…` : text;
}
