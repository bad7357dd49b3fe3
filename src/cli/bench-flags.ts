/**
 * Flags of `ferry bench`, checked and combined into one plan. Target: the URL on the command line; else the listener of
 * the config (-c, or ./ferry.yaml); else http://127.0.0.1:8080. A URL without a path means /v1/inference. Admin
 * listener: --admin or the config's; else 127.0.0.1:8081, unless the URL has another port: port 8081 may then belong to
 * another Ferry. -c is the config file and, as in other load generators, the number of callers: `--closed -c 16`.
 */
import { existsSync, readFileSync, statSync } from "node:fs";
import { urlOf } from "./terminal/banner.ts";
import type { CallerKind } from "./bench/arrivals.ts";
import type { LoadKind } from "./bench/driver.ts";
import { parseBodies, type Body } from "./bench/requests.ts";
import { parseDuration, parseSlo, SLO_NAMES, type Slo } from "./bench/slo.ts";
import { didYouMean } from "../app/config/spelling.ts";
import { printable } from "./terminal/terminal.ts";
import { type Call, type Command, type Console, Failure, UsageError } from "./command.ts";
import { chooseConfig, defaultFile } from "./config-file.ts";
import { parseAdminUrl } from "./dead.ts";

export interface BenchPlan {
  readonly url: URL;
  readonly certFile: string | undefined;
  readonly certName: string;
  readonly admins: readonly string[];
  readonly token: string | undefined;
  /** Why no admin listener is asked, when `admins` is empty. */
  readonly noAdmin: string;
  readonly load: LoadKind;
  readonly durationMs: number;
  readonly warmupMs: number;
  readonly timeoutMs: number;
  readonly connections: number;
  readonly outstanding: number;
  readonly kinds: readonly CallerKind[];
  readonly bodies: readonly Body[];
  readonly bytes: number;
  readonly repeat: boolean;
  readonly model: string | undefined;
  readonly slos: readonly Slo[];
  readonly seed: number | undefined;
}

export const benchFlags: Command["flags"] = {
  rate: { type: "string", value: "N", doc: "open loop: requests a second, whatever the server does" },
  duration: { type: "string", value: "TIME", doc: "how long to measure (500ms, 30s, 2m); default 30s" },
  slo: {
    type: "string",
    multiple: true,
    value: "GOAL",
    doc: "exit 1 when missed; may repeat: p99=150ms (p50 p90 p95 p99.9 max mean), errors=0, refused=5%, rate=1750",
  },
  arrivals: { type: "string", value: "KIND", doc: "open loop: poisson (default), or even" },
  closed: { type: "boolean", doc: "closed loop: callers that send again when answered, instead of a rate" },
  callers: { type: "string", value: "N", doc: "closed loop: how many (also -c N); default 16" },
  warmup: { type: "string", value: "TIME", doc: "load before it counts; default 2s" },
  timeout: {
    type: "string",
    value: "TIME",
    doc: "without an answer for so long a request is lost; default 10s",
  },
  model: { type: "string", value: "NAME", doc: "the model; may be left out when there is one" },
  input: {
    type: "string",
    value: "TEXT|@FILE",
    doc: "what is sent: a text, or a file with one JSON value (or body) a line; made unique",
  },
  bytes: { type: "string", value: "N", doc: "fill inputs up until the body has N bytes" },
  repeat: { type: "boolean", doc: "send inputs as they are, so that the cache may answer" },
  key: {
    type: "string",
    multiple: true,
    value: "[TIER=]KEY",
    doc: "credential, or that of one tier; may repeat (also FERRY_API_KEY)",
  },
  keys: { type: "string", value: "FILE", doc: "credentials of the tiers, one TIER=KEY a line" },
  tier: { type: "string", value: "TIER", doc: "send as this tier, with its key" },
  mix: { type: "string", value: "T=N,…", doc: "send as several tiers: enterprise=10,paid=30,free=60" },
  connections: { type: "string", value: "N", doc: "open connections at most; default 4096" },
  outstanding: {
    type: "string",
    value: "N",
    doc: "requests on their way or in line at most; default 100000",
  },
  config: {
    type: "string",
    short: "c",
    multiple: true,
    value: "FILE",
    doc: "config file of the running Ferry, for its addresses and token; default ./ferry.yaml",
  },
  admin: {
    type: "string",
    multiple: true,
    value: "URL",
    doc: "admin listener to ask for batches; may repeat (a fleet); default the config's, or http://127.0.0.1:8081",
  },
  token: {
    type: "string",
    value: "TOKEN",
    doc: "admin token (also FERRY_ADMIN_TOKEN); default the config's",
  },
  ca: {
    type: "string",
    value: "FILE",
    doc: "https: certificate to trust; default the config's tls.certFile",
  },
  seed: { type: "string", value: "N", doc: "open loop: the same arrivals again" },
  save: { type: "string", value: "FILE", doc: "write the whole result as JSON, histogram included" },
  compare: { type: "boolean", doc: "no load: two saved runs side by side, `--compare a.json b.json`" },
  markdown: { type: "boolean", doc: "the report as a Markdown table" },
  json: { type: "boolean", doc: "the result as one JSON object" },
};

const MAX_RATE = 1_000_000;
const MAX_BYTES = 64 * 2 ** 20;
const DAY_MS = 86_400_000;

/** Undefined when the config is invalid; the reason is on `err`. */
export function parsePlan(call: Call, console: Console): BenchPlan | undefined {
  const load = parseLoad(call);
  const slos = call.texts("slo").map(parseGoal);
  const kinds = parseKinds(call, console.env);
  const durationMs = duration(call, "duration", 30_000);
  const places = parsePlaces(call, console);
  if (places === undefined) return undefined;
  const model = call.text("model");
  const bodies = parseInput(call.text("input"), model);
  const seed = call.text("seed");
  return {
    ...places,
    load,
    durationMs,
    warmupMs: duration(call, "warmup", 2000, 0),
    timeoutMs: duration(call, "timeout", 10_000),
    connections: count(call, "connections", 4096, 1, 60_000),
    outstanding: count(call, "outstanding", 100_000, 1, 1_000_000),
    kinds,
    bodies,
    bytes: count(call, "bytes", 0, 0, MAX_BYTES),
    repeat: call.is("repeat"),
    model,
    slos,
    seed: seed === undefined ? undefined : count(call, "seed", 0, 0, Number.MAX_SAFE_INTEGER),
  };
}

function parseLoad(call: Call): LoadKind {
  const rate = call.text("rate");
  const callers = call.texts("config").find((text) => /^\d+$/.test(text));
  if (call.is("closed")) {
    if (rate !== undefined)
      throw new UsageError("--closed has no --rate: its callers wait for each other's answers");
    if (call.text("arrivals") !== undefined) throw new UsageError("--closed has no --arrivals");
    return {
      kind: "closed",
      callers: count(call, "callers", callers === undefined ? 16 : Number(callers), 1, 60_000),
    };
  }
  if (callers !== undefined || call.text("callers") !== undefined)
    throw new UsageError("callers are for the closed loop; add --closed, or use --rate N");
  if (rate === undefined) throw new UsageError("bench needs --rate N, requests a second (or --closed -c N)");
  const value = Number(rate.replaceAll(/[,_]/g, ""));
  if (!(value > 0 && value <= MAX_RATE))
    throw new UsageError(`--rate ${printable(rate)} is no rate; write requests a second, like 1800`);
  const arrivals = call.text("arrivals") ?? "poisson";
  if (arrivals !== "poisson" && arrivals !== "even") {
    const hint = didYouMean(arrivals, ["poisson", "even"]);
    throw new UsageError(`--arrivals ${printable(arrivals)} is not one of poisson, even${hint}`);
  }
  return { kind: "open", rate: value, arrivals };
}

function parseGoal(text: string): Slo {
  const slo = parseSlo(text);
  if (typeof slo !== "string") return slo;
  const hint = didYouMean(text.split("=")[0]!, SLO_NAMES);
  throw new UsageError(`--slo ${printable(text)} is no goal: ${slo}${hint}`);
}

function duration(call: Call, flag: string, otherwise: number, least = 1): number {
  const text = call.text(flag);
  if (text === undefined) return otherwise;
  const ms = text === "0" ? 0 : parseDuration(text);
  if (ms === undefined || ms < least || ms > DAY_MS)
    throw new UsageError(`--${flag} ${printable(text)} is no time; write 500ms, 30s or 2m`);
  return ms;
}

function count(call: Call, flag: string, otherwise: number, least: number, most: number): number {
  const text = call.text(flag);
  if (text === undefined) return otherwise;
  const value = /^\d{1,16}$/.test(text) ? Number(text) : NaN;
  if (!(value >= least && value <= most))
    throw new UsageError(
      `--${flag} ${printable(text)} must be a whole number from ${least} to ${most.toLocaleString("en-US")}`,
    );
  return value;
}

type Places = Pick<BenchPlan, "url" | "certFile" | "certName" | "admins" | "token" | "noAdmin">;

function parsePlaces(call: Call, console: Console): Places | undefined {
  const [word, extra] = call.words;
  if (extra !== undefined) throw new UsageError(`unexpected ${printable(extra)}`);
  if (word !== undefined && /\.ya?ml$/.test(word))
    throw new UsageError(`unexpected ${printable(word)}; did you mean -c ${printable(word)}?`);
  const given = word === undefined ? undefined : parseTarget(word);
  const file = call.texts("config").find((text) => !/^\d+$/.test(text));
  const usesConfig = file !== undefined || (given === undefined && existsSync(defaultFile));
  const narrowed: Call = { ...call, text: (flag) => (flag === "config" ? file : call.text(flag)) };
  const chosen = usesConfig ? chooseConfig(narrowed, console, "nothing was sent") : undefined;
  if (usesConfig && chosen === undefined) return undefined;
  const config = chosen?.config;
  const url =
    given ??
    parseTarget(
      config === undefined ? "http://127.0.0.1:8080" : urlOf(config.listen, config.tls !== undefined),
    );
  const named = call.texts("admin").map(parseAdminUrl);
  const usual = config === undefined ? undefined : urlOf(config.admin.listen, config.admin.tls);
  const fallback = usual ?? (given === undefined || isDefault(given) ? "http://127.0.0.1:8081" : undefined);
  const ca = call.text("ca");
  return {
    url,
    certFile: ca ?? config?.tls?.certFile,
    certName: ca === undefined ? "tls.certFile" : "--ca",
    admins: named.length > 0 ? named : fallback === undefined ? [] : [fallback],
    token: call.text("token") ?? console.env["FERRY_ADMIN_TOKEN"] ?? config?.admin.token,
    noAdmin: "no admin listener was named (--admin URL)",
  };
}

function isDefault({ hostname, port }: URL): boolean {
  return port === "8080" && ["127.0.0.1", "localhost", "[::1]"].includes(hostname);
}

function parseTarget(text: string): URL {
  const url = URL.parse(/^https?:/.test(text) ? text : `http://${text}`);
  if (url === null || url.username !== "" || url.password !== "" || url.hostname === "" || url.hash !== "") {
    throw new UsageError(
      `${printable(text)} is no URL like http://127.0.0.1:8080, without credentials in it`,
    );
  }
  if (url.pathname === "/") url.pathname = "/v1/inference";
  return url;
}

function parseInput(text: string | undefined, model: string | undefined): Body[] {
  const named = model === undefined ? {} : { model };
  if (text === undefined || !text.startsWith("@")) return [{ input: text ?? "ferry bench", fields: named }];
  const file = text.slice(1);
  try {
    if (statSync(file).size > MAX_BYTES) throw new Error(`it is larger than ${MAX_BYTES / 2 ** 20} MiB`);
    return parseBodies(readFileSync(file, "utf8")).map(({ input, fields }) => ({
      input,
      fields: { ...named, ...fields },
    }));
  } catch (error) {
    const why = (error as NodeJS.ErrnoException).code ?? (error as Error).message;
    throw new Failure(`bench: --input ${printable(text)} cannot be used (${printable(why)})`);
  }
}

/** One kind of caller, or one per tier of the mix. */
function parseKinds(call: Call, env: NodeJS.ProcessEnv): CallerKind[] {
  const keys = readKeys(call, env);
  const [mix, tier] = [call.text("mix"), call.text("tier")];
  if (mix !== undefined && tier !== undefined)
    throw new UsageError("--mix names the tiers; leave out --tier");
  if (mix === undefined) {
    const key = tier === undefined ? keys.get("") : (keys.get(tier) ?? keys.get(""));
    if (tier !== undefined && key === undefined) throw noKey("--tier", tier);
    return [{ label: tier ?? "all", share: 1, headers: credential(key) }];
  }
  return mix.split(",").map((part) => {
    const [, name, share] = /^\s*([\w.-]{1,64})\s*=\s*(\d{1,9}(?:\.\d{1,6})?)\s*$/.exec(part) ?? [];
    if (name === undefined || Number(share) <= 0)
      throw new UsageError(`--mix ${printable(mix)} is no mix; write enterprise=10,paid=30,free=60`);
    const key = keys.get(name);
    if (key === undefined) throw noKey("--mix", name);
    return { label: name, share: Number(share), headers: credential(key) };
  });
}

function noKey(flag: string, tier: string): UsageError {
  return new UsageError(
    `${flag} ${printable(tier)} needs the tier's key: a line ${printable(tier)}=KEY in --keys FILE, or --key ${printable(tier)}=KEY`,
  );
}

function credential(key: string | undefined): Record<string, string> {
  return key === undefined ? {} : { authorization: `Bearer ${key}` };
}

/** By tier; "" for the default key. */
function readKeys(call: Call, env: NodeJS.ProcessEnv): Map<string, string> {
  const keys = new Map<string, string>();
  const add = (text: string, where: string): void => {
    const [, tier = "", key = ""] = /^(?:([\w.-]{1,64})=)?([\x21-\x7e]{1,8192})$/.exec(text) ?? [];
    if (key === "") throw new UsageError(`${where} has something that is no key; write KEY or TIER=KEY`);
    keys.set(tier, key);
  };
  const usual = env["FERRY_API_KEY"] ?? "";
  if (usual !== "") add(usual, "FERRY_API_KEY");
  const file = call.text("keys");
  if (file !== undefined) {
    for (const line of readText(file).split("\n")) {
      if (/^\s*(#|$)/.test(line)) continue;
      add(line.trim(), `--keys ${printable(file)}`);
    }
  }
  for (const text of call.texts("key")) add(text, "--key");
  return keys;
}

function readText(file: string): string {
  try {
    return readFileSync(file, "utf8");
  } catch (error) {
    throw new Failure(
      `bench: --keys ${printable(file)} cannot be read (${(error as NodeJS.ErrnoException).code})`,
    );
  }
}

/** The command line without secrets. */
export function commandLine(call: Call): string {
  const words = Object.entries(benchFlags).flatMap(([name, { type }]) => {
    if (type === "boolean") return call.is(name) ? [`--${name}`] : [];
    const hidden = name === "key" || name === "token";
    return call.texts(name).map((value) => `--${name} ${hidden ? "***" : value}`);
  });
  return ["ferry bench", ...call.words, ...words].join(" ");
}
