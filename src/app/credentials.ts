/** Credentials from the settings: API key store and token verification. `ferry keys` uses the keys only. */
import { createSecretKey, type KeyObject } from "node:crypto";
import { type KeyStore, nameOfSecret } from "../gateway/admission/api-keys.ts";
import { type CredentialParts, Credentials } from "../gateway/admission/credentials.ts";
import { Jwks, JWKS_TIMES } from "../gateway/admission/jwks.ts";
import { PublicKeyFile, type PublicKeys, readPem, SKEW_MS, Tokens } from "../gateway/admission/tokens.ts";
import {
  KeyFile,
  readKeys,
  readSecret,
  readText,
  reasonOf,
  secretOf,
} from "../gateway/admission/key-file.ts";
import { KeyRedis } from "../gateway/admission/key-redis.ts";
import type { Clock } from "./clock.ts";
import type { Config, JwtConfig } from "./config/config.ts";
import { HOMES } from "../core/home.ts";
import { RedisKeys } from "../engine/redis/keys.ts";
import type { Shared } from "./engines.ts";
import { RedisNodes } from "../engine/redis/client/nodes.ts";
import type { Events } from "../observe/events.ts";

/** A revoked key works no longer than this. */
export const KEYS_RELOAD_MS = 5000;
/** How long a cached key works while Redis is down. */
const KEYS_GRACE_MS = 60_000;

export interface OpenCredentials {
  readonly credentials: Credentials;
  close(): void;
}

export async function openCredentials(
  config: Config,
  shared: Pick<Shared, "nodes" | "key"> | undefined,
  clock: Clock,
  events: Events,
): Promise<OpenCredentials> {
  const { auth, tiers } = config;
  if (auth.mode === "none") {
    const credentials = new Credentials({ tiers, anonymousTier: auth.anonymousTier ?? tiers[0]!.name });
    return { credentials, close: () => {} };
  }
  const store = storeOf(config, shared, clock, events);
  const publicKeys = auth.jwt && (await openPublicKeys(auth.jwt, clock, events));
  const close = (): void => {
    store?.close();
    publicKeys?.close();
  };
  try {
    if (store instanceof KeyFile) await store.watch();
    const otherSecret = (id: string): void => {
      const message = `API key ${id} was made with another auth.secret and does not work here; give every gateway, and ferry keys, the same one`;
      events.emit("notice", { level: "warn", message });
    };
    const keys = store && { store, secret: auth.secret ?? (await store.secret()), otherSecret };
    if (keys !== undefined) await tellOtherSecrets(keys.store, keys.secret, events);
    const tokens = tokensOf(auth.jwt, publicKeys, clock);
    return { credentials: new Credentials({ tiers }, { keys, tokens }), close };
  } catch (error) {
    close();
    throw error;
  }
}

/** For `ferry keys`: separate connections, whether or not Ferry runs. */
export interface OpenKeys extends AsyncDisposable {
  readonly store: KeyStore;
  secret(): Promise<KeyObject>;
}

export async function openKeys(config: Config, clock: Clock, events: Events): Promise<OpenKeys | undefined> {
  const { engine, auth } = config;
  let shared: Pick<Shared, "nodes" | "key"> | undefined;
  if (engine.kind === "redis") {
    const keys = new RedisKeys(engine.keyPrefix, HOMES);
    const options = { ...engine, tags: keys.tags, name: "ferry-keys" };
    const nodes = await RedisNodes.open(options, clock, events);
    shared = { nodes, key: (name) => keys.bases[0]! + name };
  }
  const close = async (): Promise<void> => shared?.nodes.close();
  try {
    const store = storeOf(config, shared, clock, events);
    if (store === undefined) return undefined;
    const secret = async (): Promise<KeyObject> =>
      createSecretKey(auth.secret ?? (await store.secret()), "utf8");
    return { store, secret, [Symbol.asyncDispose]: close };
  } catch (error) {
    await close();
    throw error;
  }
}

interface Flaw {
  readonly path: string;
  readonly message: string;
}

/** For `ferry check`: what would fail the start in the files that `auth` names. */
export async function checkAuthFiles(config: Config): Promise<{ problems: Flaw[]; warnings: Flaw[] }> {
  const { keysFile, jwt } = config.auth;
  const found = { problems: [] as Flaw[], warnings: [] as Flaw[] };
  if (config.engine.kind === "memory" && keysFile !== undefined) {
    const none = "there is no such file, so no key works; ferry keys create --user U --tier T makes it";
    try {
      const keys = await readKeys(keysFile);
      if (keys === undefined) found.warnings.push({ path: "auth.keysFile", message: none });
      if (config.auth.secret === undefined) await readSecret(secretOf(keysFile));
    } catch (error) {
      found.problems.push({ path: "auth.keysFile", message: (error as Error).message });
    }
  }
  if (jwt?.publicKeyFile === undefined) return found;
  try {
    readPem(await readText(jwt.publicKeyFile), jwt.algorithm);
  } catch (error) {
    found.problems.push({ path: "auth.jwt.publicKeyFile", message: reasonOf(error) });
  }
  return found;
}

function storeOf(
  { auth, engine }: Config,
  shared: Pick<Shared, "nodes" | "key"> | undefined,
  clock: Clock,
  events: Events,
): KeyStore | undefined {
  const { keysFile } = auth;
  if (shared !== undefined && engine.kind === "redis") {
    const { nodes, key } = shared;
    const options = { reloadMs: KEYS_RELOAD_MS, graceMs: KEYS_GRACE_MS, waitMs: engine.waitTimeoutMs, key };
    return new KeyRedis(nodes, options, clock, events);
  }
  return keysFile === undefined
    ? undefined
    : new KeyFile({ path: keysFile, reloadMs: KEYS_RELOAD_MS }, clock, events);
}

async function openPublicKeys(jwt: JwtConfig, clock: Clock, events: Events): Promise<PublicKeys> {
  const { jwksUrl, publicKeyFile, algorithm } = jwt;
  if (publicKeyFile !== undefined) {
    return PublicKeyFile.open(publicKeyFile, algorithm, KEYS_RELOAD_MS, clock, events);
  }
  const jwks = new Jwks({ url: jwksUrl!, algorithm, ...JWKS_TIMES }, clock, events);
  await jwks.open();
  return jwks;
}

function tokensOf(
  jwt: JwtConfig | undefined,
  publicKeys: PublicKeys | undefined,
  clock: Clock,
): CredentialParts["tokens"] {
  if (jwt === undefined || publicKeys === undefined) return undefined;
  return (callerOf) => new Tokens({ ...jwt, skewMs: SKEW_MS }, publicKeys, clock, callerOf);
}

/** A changed auth.secret breaks every key; warns at the start instead of at the first request. */
async function tellOtherSecrets(store: KeyStore, secret: string, events: Events): Promise<void> {
  const name = nameOfSecret(createSecretKey(secret, "utf8"));
  const records = await store.list().catch(() => []);
  const others = records.filter(({ madeWith }) => madeWith !== name).length;
  if (others === 0) return;
  const message = `${others} of ${records.length} API keys were made with another auth.secret and do not work; ferry keys list shows them`;
  events.emit("notice", { level: "warn", message });
}
