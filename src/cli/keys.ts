/**
 * `ferry keys`: creates, lists and revokes API keys, whether or not Ferry runs. Keys are in `auth.keysFile`, or in
 * Redis with that engine. A key is printed once, alone on stdout; only its digest is stored.
 */
import { randomBytes } from "node:crypto";
import {
  digestOf,
  isKeyId,
  type KeyRecord,
  nameOfSecret,
  newApiKey,
  readApiKey,
  isUser,
  MAX_USER,
} from "../gateway/admission/api-keys.ts";
import { plural } from "./terminal/banner.ts";
import { SystemClock } from "../app/clock.ts";
import type { Config } from "../app/config/config.ts";
import { KEYS_RELOAD_MS, type OpenKeys, openKeys } from "../app/credentials.ts";
import { didYouMean } from "../app/config/spelling.ts";
import { Events } from "../observe/events.ts";
import { printable } from "./terminal/terminal.ts";
import { Failure, UsageError, type Call, type Command, type Console } from "./command.ts";
import { chooseConfig, configFlag } from "./config-file.ts";
import { formatAge, formatTable } from "./dead.ts";

const verbs = ["create", "list", "revoke"] as const;
type Verb = (typeof verbs)[number];

const MAX_NAME = 64;

export const keys: Command = {
  summary: "make, list and revoke API keys",
  usage: "keys create --user U --tier T [--name N] | list | revoke ID  [-c FILE] [--json]",
  examples: [
    { line: "ferry keys create --user u1 --tier paid -c ferry.yaml", doc: "prints the key, once" },
    { line: "ferry keys revoke 4fTq8ZxW0aBc -c ferry.yaml", doc: "no longer good within 5 seconds" },
  ],
  flags: {
    config: { ...configFlag, doc: "the config file that says where keys are; default ./ferry.yaml" },
    user: { type: "string", value: "USER", doc: "create: whose key it is; a user may have several" },
    tier: { type: "string", value: "TIER", doc: "create: one of the config's tiers" },
    name: { type: "string", value: "NAME", doc: "create: a word for yourself, such as laptop" },
    json: { type: "boolean", doc: "JSON on stdout, one object a line" },
  },

  async run(call: Call, console: Console): Promise<number> {
    const { verb, id } = parseWords(call);
    const wish = verb === "create" ? parseWish(call) : undefined;
    const chosen = chooseConfig(call, console, "nothing was done");
    if (chosen === undefined) return 1;
    const { config } = chosen;
    if (wish !== undefined) checkTier(wish.tier, config);
    try {
      await using opened = await open(config, console);
      if (wish !== undefined) return await create(opened, wish, config, call, console);
      if (verb === "list") return await list(opened, call, console);
      return await revoke(opened, id, call, console);
    } catch (error) {
      if (error instanceof Failure) throw error;
      throw new Failure(`keys ${verb}: ${printable((error as Error).message)}`);
    }
  },
};

interface Wish {
  readonly user: string;
  readonly tier: string;
  readonly name: string;
}

function parseWords(call: Call): { verb: Verb; id: string } {
  const [word = "", given = "", extra] = call.words;
  const verb = verbs.find((each) => each === word);
  if (verb === undefined) {
    const all = `; one of ${verbs.join(", ")}`;
    if (word === "") throw new UsageError(`keys needs a word${all}`);
    throw new UsageError(`keys ${printable(word)} is unknown${didYouMean(word, verbs) || all}`);
  }
  if (extra !== undefined || (verb !== "revoke" && given !== "")) {
    throw new UsageError(`keys ${verb}: unexpected ${printable(extra ?? given)}`);
  }
  const stray = verb === "create" ? undefined : ["user", "tier", "name"].find((flag) => call.text(flag));
  if (stray !== undefined) throw new UsageError(`keys ${verb}: --${stray} is for keys create`);
  if (verb !== "revoke") return { verb, id: "" };
  if (given === "") throw new UsageError("keys revoke needs the id of a key; ferry keys list shows them");
  // Accepts a whole key too: the finder of a leaked key does not know its id.
  const id = readApiKey(given) ?? given;
  if (!isKeyId(id)) throw new UsageError("keys revoke: that is no id of a key; ferry keys list shows them");
  return { verb, id };
}

function parseWish(call: Call): Wish {
  const [user, tier, name = ""] = [call.text("user"), call.text("tier"), call.text("name")];
  if (user === undefined) throw new UsageError("keys create needs --user USER");
  if (tier === undefined) throw new UsageError("keys create needs --tier TIER");
  if (!isUser(user)) {
    throw new UsageError(`--user must have 1 to ${MAX_USER} characters, none of them a control character`);
  }
  if (name !== "" && (!isUser(name) || name.length > MAX_NAME)) {
    throw new UsageError(`--name may have ${MAX_NAME} characters, none of them a control character`);
  }
  return { user, tier, name };
}

function checkTier(tier: string, { tiers }: Config): void {
  const names = tiers.map(({ name }) => name);
  if (names.includes(tier)) return;
  throw new Failure(
    `keys create: there is no tier ${printable(tier)}${didYouMean(tier, names)}; tiers: ${names.join(", ")}`,
  );
}

async function open(config: Config, console: Console): Promise<OpenKeys> {
  const events = new Events();
  events.on("notice", ({ level, message }) => {
    if (level !== "info") console.err(`  ${printable(message)}\n`);
  });
  const opened = await openKeys(config, new SystemClock(), events);
  if (opened !== undefined) return opened;
  throw new Failure(
    "the config has no place for keys; add auth: { mode: required, keysFile: ./keys.json } to it",
  );
}

async function create(
  opened: OpenKeys,
  wish: Wish,
  config: Config,
  call: Call,
  console: Console,
): Promise<number> {
  const secret = await opened.secret();
  const key = newApiKey(randomBytes);
  const id = readApiKey(key)!;
  const createdAt = new SystemClock().now();
  const record = { id, digest: digestOf(key, secret), ...wish, createdAt, madeWith: nameOfSecret(secret) };
  await opened.store.add(record);
  console.out(call.is("json") ? `${JSON.stringify({ ...view(record), key })}\n` : `${key}\n`);
  const { user, tier } = wish;
  console.err(`  Key ${id} of ${printable(user)}, tier ${tier}. It is not shown again.\n`);
  if (config.auth.mode === "none") {
    console.err("  auth.mode is none: keys are not asked for yet; set auth.mode: required.\n");
  }
  return 0;
}

async function list(opened: OpenKeys, call: Call, console: Console): Promise<number> {
  const records = await opened.store.list();
  if (call.is("json")) {
    for (const record of records) console.out(`${JSON.stringify(view(record))}\n`);
    return 0;
  }
  if (records.length === 0) {
    console.out("no keys\n");
    return 0;
  }
  const now = new SystemClock().now();
  const secretName = nameOfSecret(await opened.secret());
  const rows = records.map(({ id, user, tier, name, createdAt }) => [
    id,
    user,
    tier,
    formatAge(now - createdAt),
    name,
  ]);
  console.out(formatTable([["ID", "USER", "TIER", "AGE", "NAME"], ...rows]));
  const others = records.filter(({ madeWith }) => madeWith !== secretName).map(({ id }) => id);
  if (others.length > 0) {
    console.err(`  Made with another auth.secret, so that they do not work: ${others.join(", ")}\n`);
  }
  console.err(`  ${plural(records.length, "key")}.  ferry keys create --user U --tier T · revoke ID\n`);
  return 0;
}

async function revoke({ store }: OpenKeys, id: string, call: Call, console: Console): Promise<number> {
  if (!(await store.revoke(id))) {
    throw new Failure(`keys revoke: there is no key ${id}; ferry keys list shows them`);
  }
  console.out(call.is("json") ? `${JSON.stringify({ id, revoked: true })}\n` : `revoked ${id}\n`);
  console.err(`  A running Ferry takes it for at most ${KEYS_RELOAD_MS / 1000} s more.\n`);
  return 0;
}

/** Everything but the digest. */
function view({ id, user, tier, name, createdAt }: KeyRecord): object {
  return { id, user, tier, name, created_at: new Date(createdAt).toISOString() };
}
