/**
 * `ferry dead`: dead letters, through the admin listener of a running Ferry. Address and token come from the config
 * file or `--admin URL`. Purging cannot be undone: it asks on a terminal and needs --yes elsewhere.
 */
import { setTimeout as pause } from "node:timers/promises";
import { plural, urlOf } from "./terminal/banner.ts";
import { SystemClock } from "../app/clock.ts";
import { didYouMean } from "../app/config/spelling.ts";
import { printable } from "./terminal/terminal.ts";
import { AdminClient, type DeadLetterRow } from "./admin-client.ts";
import { Failure, UsageError, type Call, type Command, type Console } from "./command.ts";
import { chooseConfig, configFlag } from "./config-file.ts";

const verbs = ["list", "show", "replay", "purge"] as const;
type Verb = (typeof verbs)[number];

export const dead: Command = {
  summary: "list, show, replay and purge dead letters",
  usage: "dead list | show ID | replay [ID] | purge [ID]  [-c FILE] [--json]",
  examples: [
    { line: "ferry dead list -c ferry.yaml", doc: "what failed for good, and why" },
    { line: "ferry dead purge --older-than 7d --yes", doc: "forget the old ones" },
  ],
  flags: {
    config: { ...configFlag, doc: "the config file of the running Ferry; default ./ferry.yaml" },
    admin: { type: "string", value: "URL", doc: "another admin listener than the config's" },
    json: { type: "boolean", doc: "JSON on stdout, one object a line" },
    yes: { type: "boolean", doc: "purge, or replay all, without asking" },
    "older-than": {
      type: "string",
      value: "AGE",
      doc: "list, replay, purge: only letters older than this (90s, 15m, 12h, 7d)",
    },
    code: { type: "string", value: "CODE", doc: "list, replay, purge: only those with this error code" },
  },

  async run(call: Call, console: Console): Promise<number> {
    const { verb, id } = parseWords(call);
    const filter = parseFilter(call);
    if (filter !== everything && (id !== "" || verb === "show")) {
      throw new UsageError("--older-than and --code choose among all dead letters; leave out the task id");
    }
    const chosen = chooseConfig(call, console, "nothing was done");
    if (chosen === undefined) return 1;
    const { admin, tls } = chosen.config;
    const other = call.text("admin");
    const base = other === undefined ? urlOf(admin.listen, admin.tls) : parseAdminUrl(other);
    const client = new AdminClient(base, admin.token, `dead ${verb}`, tls?.certFile);
    const now = new SystemClock().now();
    switch (verb) {
      case "list":
        return list(client, filter, call, console, now);
      case "show":
        return show(client, id, call, console);
      case "replay":
        return id === ""
          ? replayAll(client, filter, call, console, now)
          : replayOne(client, id, call, console);
      case "purge":
        return purge(client, id, filter, call, console, now);
    }
  },
};

function parseWords({ words }: Call): { verb: Verb; id: string } {
  const [word = "", id = "", extra] = words;
  const verb = verbs.find((each) => each === word);
  if (verb === undefined) {
    const all = `; one of ${verbs.join(", ")}`;
    if (word === "") throw new UsageError(`dead needs a word${all}`);
    throw new UsageError(`dead ${printable(word)} is unknown${didYouMean(word, verbs) || all}`);
  }
  if (extra !== undefined || (verb === "list" && id !== "")) {
    throw new UsageError(`dead ${verb}: unexpected ${printable(extra ?? id)}`);
  }
  if (id === "" && verb === "show") {
    throw new UsageError(`dead ${verb} needs a task id; ferry dead list shows them`);
  }
  if (id !== "" && !/^[\w.:-]{1,128}$/.test(id))
    throw new UsageError(`dead ${verb}: ${printable(id)} is no task id`);
  return { verb, id };
}

interface Filter {
  readonly olderThanMs: number;
  readonly code: string | undefined;
}

const everything: Filter = { olderThanMs: 0, code: undefined };

function parseFilter(call: Call): Filter {
  const age = call.text("older-than");
  if (age === undefined && call.text("code") === undefined) return everything;
  return { olderThanMs: age === undefined ? 0 : parseAge(age), code: call.text("code")?.toUpperCase() };
}

export function parseAge(text: string): number {
  const units: { readonly [unit: string]: number } = { s: 1000, m: 60_000, h: 3_600_000, d: 86_400_000 };
  const match = /^(\d{1,9}(?:\.\d+)?)([smhd])$/.exec(text);
  if (match === null)
    throw new UsageError(`--older-than ${printable(text)} is no age; write 90s, 15m, 12h or 7d`);
  return Number(match[1]) * units[match[2]!]!;
}

export function parseAdminUrl(text: string): string {
  const url = URL.parse(text);
  if (url === null || !/^https?:$/.test(url.protocol) || url.username !== "" || url.password !== "") {
    throw new UsageError("--admin must be a URL like http://127.0.0.1:8081, without credentials in it");
  }
  return `${url.origin}${url.pathname}`.replace(/\/+$/, "");
}

function passes(row: DeadLetterRow, filter: Filter, now: number): boolean {
  if (filter.code !== undefined && row.error !== filter.code) return false;
  return now - row.diedAt >= filter.olderThanMs;
}

async function list(
  client: AdminClient,
  filter: Filter,
  call: Call,
  console: Console,
  now: number,
): Promise<number> {
  const rows = (await client.list()).filter((row) => passes(row, filter, now));
  if (call.is("json")) {
    for (const row of rows) console.out(`${JSON.stringify(row.raw)}\n`);
    return 0;
  }
  if (rows.length === 0) {
    console.out("no dead letters\n");
    return 0;
  }
  const head = ["TASK", "MODEL", "TIER", "AGE", "TRIES", "CODE", "WHY"];
  const cells = rows.map((row) => [
    row.taskId,
    row.model,
    row.tier,
    formatAge(now - row.diedAt),
    String(row.attempts),
    row.error,
    row.message,
  ]);
  console.out(formatTable([head, ...cells]));
  console.err(`  ${plural(rows.length, "dead letter")}.  ferry dead show ID · replay ID · purge [ID]\n`);
  return 0;
}

async function show(client: AdminClient, id: string, call: Call, console: Console): Promise<number> {
  const raw = await client.get(id);
  if (call.is("json")) {
    console.out(`${JSON.stringify(raw)}\n`);
    return 0;
  }
  const width = Math.max(...Object.keys(raw).map((name) => name.length));
  for (const [name, value] of Object.entries(raw)) {
    const text = typeof value === "string" ? value : JSON.stringify(value);
    console.out(`${printable(name).padEnd(width)}  ${printable(text)}\n`);
  }
  return 0;
}

function sayReplayed(id: string, call: Call, console: Console): void {
  console.out(call.is("json") ? `${JSON.stringify({ task_id: id, replayed: true })}\n` : `replayed ${id}\n`);
}

async function replayOne(client: AdminClient, id: string, call: Call, console: Console): Promise<number> {
  const reply = await client.replay(id);
  if (reply.kind === "gone") throw client.unknown(id);
  if (reply.kind === "full") throw new Failure(`${reply.why}; try again in ${reply.retryAfterMs} ms`);
  sayReplayed(id, call, console);
  return 0;
}

/** How long to wait for room in the queue; restarts with each letter replayed. */
const NO_ROOM_MS = 60_000;

/** Replays one after another; while the queue is full, waits as long as the listener says. */
async function replayAll(
  client: AdminClient,
  filter: Filter,
  call: Call,
  console: Console,
  now: number,
): Promise<number> {
  const ids = (await client.list()).filter((row) => passes(row, filter, now)).map((row) => row.taskId);
  await confirm(call, console, ids.length, `replay ${plural(ids.length, "dead letter")}`, "replayed");
  let [replayed, waitedMs] = [0, 0];
  for (let at = 0; at < ids.length;) {
    const reply = await client.replay(ids[at]!);
    if (reply.kind === "full") {
      const left = plural(ids.length - at, "dead letter");
      if (waitedMs >= NO_ROOM_MS) throw new Failure(`${reply.why}; ${left} not replayed, try again later`);
      waitedMs += reply.retryAfterMs;
      await pause(reply.retryAfterMs);
      continue;
    }
    waitedMs = 0;
    at += 1;
    // It may have been replayed or purged since it was listed.
    if (reply.kind === "gone") continue;
    replayed += 1;
    sayReplayed(ids[at - 1]!, call, console);
  }
  console.err(`  ${plural(replayed, "dead letter")} replayed\n`);
  return 0;
}

async function confirm(
  call: Call,
  console: Console,
  count: number,
  what: string,
  done: string,
): Promise<void> {
  if (count === 0 || call.is("yes")) return;
  const verb = call.words[0];
  if (console.ask === undefined) {
    throw new Failure(`dead ${verb}: this would ${what}; say --yes to do it`);
  }
  const answer = await console.ask(`${what[0]!.toUpperCase()}${what.slice(1)}? [y/N] `);
  if (!/^y(?:es)?$/i.test(answer.trim())) throw new Failure(`dead ${verb}: nothing was ${done}`);
}

async function purge(
  client: AdminClient,
  id: string,
  filter: Filter,
  call: Call,
  console: Console,
  now: number,
): Promise<number> {
  const ids =
    id === ""
      ? (await client.list()).filter((row) => passes(row, filter, now)).map((row) => row.taskId)
      : [id];
  const what = id === "" ? plural(ids.length, "dead letter") : `dead letter ${id}`;
  await confirm(call, console, ids.length, `forget ${what}`, "purged");
  let purged = 0;
  for (const each of ids) {
    // It may have been replayed or purged since it was listed; not a failure of this purge.
    if (await client.purge(each)) purged += 1;
    else if (id !== "")
      throw new Failure(`dead purge: there is no dead letter ${id}; ferry dead list shows them`);
  }
  console.out(
    call.is("json") ? `${JSON.stringify({ purged })}\n` : `purged ${plural(purged, "dead letter")}\n`,
  );
  return 0;
}

/** "4 m": the largest whole unit. */
export function formatAge(ageMs: number): string {
  const seconds = Math.max(0, Math.floor(ageMs / 1000));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} m`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86_400)} d`;
}

export function formatTable(rows: readonly (readonly string[])[]): string {
  const safe = rows.map((row) => row.map(printable));
  const widths = safe[0]!.map((_, column) =>
    safe.reduce((most, row) => Math.max(most, row[column]!.length), 0),
  );
  const lines = safe.map((row) => row.map((cell, column) => cell.padEnd(widths[column]!)).join("  "));
  return lines.map((line) => `  ${line.trimEnd()}\n`).join("");
}
