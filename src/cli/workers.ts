/**
 * `ferry workers`: the workers of a running Ferry, through its admin listener. Changes survive reloads but not a
 * restart; permanent ones belong in the config. A removed worker that the config still lists is shown as `removed`.
 * Workers are drained first, so no running task is lost.
 */
import { hasAddresses } from "../app/config/worker-addresses.ts";
import { plural, urlOf } from "./terminal/banner.ts";
import type { Config } from "../app/config/config.ts";
import { didYouMean } from "../app/config/spelling.ts";
import { hrefOf } from "../workers/desired.ts";
import { printable } from "./terminal/terminal.ts";
import { AdminClient, type JsonObject } from "./admin-client.ts";
import { UsageError, type Call, type Command, type Console } from "./command.ts";
import { chooseConfig, configFlag } from "./config-file.ts";
import { formatTable, parseAdminUrl } from "./dead.ts";

const verbs = ["list", "add", "drain", "resume", "remove"] as const;
type Verb = (typeof verbs)[number];

const PATH = "/internal/workers";

export const workers: Command = {
  summary: "list, add, drain, resume and remove workers of a running Ferry",
  usage: "workers list | add [URL] | drain NAME | resume NAME | remove NAME  [-c FILE] [--model M] [--json]",
  examples: [
    { line: "ferry workers add http://gpu-3:9000/infer -c ferry.yaml", doc: "one more, at once" },
    { line: "ferry workers drain gpu-1:9000 -c ferry.yaml", doc: "no further batch, until resume" },
  ],
  flags: {
    config: { ...configFlag, doc: "the config file of the running Ferry; default ./ferry.yaml" },
    admin: { type: "string", value: "URL", doc: "another admin listener than the config's" },
    model: { type: "string", value: "MODEL", doc: "list: only its workers; else: whose worker is meant" },
    json: { type: "boolean", doc: "JSON on stdout, one object a line" },
  },

  async run(call: Call, console: Console): Promise<number> {
    const { verb, word } = parseWords(call);
    const chosen = chooseConfig(call, console, "nothing was done");
    if (chosen === undefined) return 1;
    const { admin, tls } = chosen.config;
    const other = call.text("admin");
    const base = other === undefined ? urlOf(admin.listen, admin.tls) : parseAdminUrl(other);
    const client = new AdminClient(base, admin.token, `workers ${verb}`, tls?.certFile);
    if (verb === "list") return list(client, call, console);
    if (verb === "add") return add(client, word, chosen.config, call, console);
    return change(client, verb, word, call, console);
  },
};

function parseWords({ words }: Call): { verb: Verb; word: string } {
  const [first = "", word = "", extra] = words;
  const verb = verbs.find((each) => each === first);
  if (verb === undefined) {
    const all = `; one of ${verbs.join(", ")}`;
    if (first === "") throw new UsageError(`workers needs a word${all}`);
    throw new UsageError(`workers ${printable(first)} is unknown${didYouMean(first, verbs) || all}`);
  }
  if (extra !== undefined || (verb === "list" && word !== "")) {
    throw new UsageError(`workers ${verb}: unexpected ${printable(extra ?? word)}`);
  }
  if (word === "" && verb !== "list" && verb !== "add") {
    throw new UsageError(`workers ${verb} needs the name of a worker; ferry workers list shows them`);
  }
  return { verb, word };
}

/** A worker that Ferry starts is added once its model is loaded. */
function longestStartMs({ models }: Config): number {
  const times = models.map(({ backend }) =>
    hasAddresses(backend) || backend.kind === "simulated" ? 0 : backend.startTimeoutMs,
  );
  return Math.max(0, ...times);
}

async function list(client: AdminClient, call: Call, console: Console): Promise<number> {
  const model = call.text("model");
  const { body } = await client.ask("GET", PATH);
  const out = rowsOf(body, "removed").map((row) => ({ ...row, state: "removed" }));
  const all: readonly JsonObject[] = [...rowsOf(body, "workers"), ...out];
  const rows = all.filter((row) => model === undefined || row["model"] === model);
  if (call.is("json")) {
    for (const row of rows) console.out(`${JSON.stringify(row)}\n`);
    return 0;
  }
  if (rows.length === 0) {
    console.out("no workers\n");
    return 0;
  }
  const fleet = rows.some((row) => row["batcher"] !== undefined);
  const head = ["NAME", "MODEL", "STATE", "IN FLIGHT", "TASKS", "FAILED", "BUSY", "PACE"];
  const cells = rows.map((row) => [
    textOf(row["name"]),
    textOf(row["model"]),
    textOf(row["state"]),
    textOf(row["in_flight"]),
    textOf(row["tasks"]),
    textOf(row["failures"]),
    row["state"] === "removed" ? "" : `${Math.round(100 * Number(row["utilization"] ?? 0))} %`,
    row["state"] === "removed" ? "" : `${textOf(row["ratio"])}×`,
    ...(fleet ? [textOf(row["batcher"]).slice(0, 8) || "nobody"] : []),
    whyOf(row),
  ]);
  console.out(formatTable([[...head, ...(fleet ? ["BATCHER"] : []), "WHY"], ...cells]));
  const hint = "ferry workers add URL · drain NAME · resume NAME · remove NAME";
  const away = rows.filter((row) => row["state"] === "removed").length;
  const removed = away === 0 ? "" : ` and ${away} removed`;
  console.err(`  ${plural(rows.length - away, "worker")}${removed}.  ${hint}\n`);
  return 0;
}

function lists({ workers }: { readonly workers: readonly string[] }, url: string): boolean {
  return workers.some((each) => hrefOf(each) === hrefOf(url));
}

function rowsOf(body: JsonObject, what: string): readonly JsonObject[] {
  const given: unknown = body[what];
  return (Array.isArray(given) ? given : []) as readonly JsonObject[];
}

function whyOf(row: JsonObject): string {
  if (row["state"] !== "removed") return textOf((row["down"] as JsonObject | undefined)?.["why"]);
  const where = textOf(row["address"]);
  return `by hand, though the config lists it; ferry workers add${where === "" ? "" : ` ${where}`}`;
}

async function add(
  client: AdminClient,
  url: string,
  config: Config,
  call: Call,
  console: Console,
): Promise<number> {
  const model = call.text("model");
  const wish = { ...(model !== undefined && { model }), ...(url !== "" && { url }) };
  const { body } = await client.ask("POST", PATH, {
    body: wish,
    moreMs: url === "" ? longestStartMs(config) : 0,
  });
  say(call, console, { ...body }, `added ${textOf(body["name"])} to ${textOf(body["model"])}`);
  const listed = config.models.some(({ backend }) => hasAddresses(backend) && lists(backend, url));
  if (!listed) console.err("  Until the next restart; to keep it, write it into the config.\n");
  return 0;
}

async function change(
  client: AdminClient,
  verb: "drain" | "resume" | "remove",
  name: string,
  call: Call,
  console: Console,
): Promise<number> {
  const model = call.text("model");
  const query = model === undefined ? "" : `?model=${encodeURIComponent(model)}`;
  const path = `${PATH}/${encodeURIComponent(name)}`;
  if (verb !== "remove") {
    const { body } = await client.ask("POST", `${path}/${verb}${query}`);
    say(call, console, { ...body }, `${verb === "drain" ? "draining" : "resumed"} ${name}`);
    if (verb === "drain")
      console.err("  It ends what it runs and gets nothing more; resume takes it back.\n");
    return 0;
  }
  const { status, body } = await client.ask("DELETE", path + query);
  const gone = status === 204;
  const line = gone ? `removed ${name}` : `${name} drains, and is gone when its batch is over`;
  say(call, console, gone ? { name, state: "gone" } : { ...body }, line);
  return 0;
}

function say(call: Call, console: Console, answer: object, line: string): void {
  console.out(call.is("json") ? `${JSON.stringify(answer)}\n` : `${printable(line)}\n`);
}

function textOf(value: unknown): string {
  return typeof value === "string" || typeof value === "number" ? String(value) : "";
}
