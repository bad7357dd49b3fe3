/**
 * `auth`: what credentials and rate limits cost, as a share of throughput.
 *
 * Three Ferrys on one core take turns in short slices, as in `embedded`: one that asks nobody who they are,
 * one with an API key, one with a token; the latter two count each request against a limit of its user and
 * one of its tier, neither of which is ever reached. The ratio is that of the medians of one run.
 */
import { createSecretKey, generateKeyPairSync, randomBytes } from "node:crypto";
import { mkdtempSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { SignJWT } from "jose";
import { digestOf, nameOfSecret, newApiKey, readApiKey } from "../../src/admission/api-key.ts";
import { KeyFile } from "../../src/admission/key-file.ts";
import { SystemClock } from "../../src/clock.ts";
import { Events } from "../../src/telemetry/events.ts";
import { measure, type Measured } from "../generator.ts";
import {
  durationMs,
  figure,
  loadNotes,
  median,
  type Bench,
  type Report,
  type Scenario,
} from "../scenario.ts";
import { FerryServer } from "../server.ts";

const callers = 256;
const MOST = 1_000_000_000;

export const auth: Scenario = {
  name: "auth",
  summary: "keys, tokens and limits against none of them: 2 KB body, 64 workers of 1 ms, same core, in turns",
  run,
};

interface Party {
  readonly name: string;
  readonly ferry: FerryServer;
  readonly headers: Readonly<Record<string, string>>;
  readonly runs: Measured[];
}

async function run(bench: Bench): Promise<Report> {
  const setup = {
    dir: bench.dir,
    core: bench.cores?.server,
    models: [{ name: "bench", workers: 64, baseMs: 1 }],
  };
  const { settings, key, token } = await credentials(mkdtempSync(join(bench.dir, "auth-")));
  await using open = await FerryServer.start(setup);
  await using byKey = await FerryServer.start({ ...setup, settings });
  await using byToken = await FerryServer.start({ ...setup, settings });
  const parties: readonly Party[] = [
    { name: "open", ferry: open, headers: {}, runs: [] },
    { name: "key and limits", ferry: byKey, headers: { authorization: `Bearer ${key}` }, runs: [] },
    { name: "token and limits", ferry: byToken, headers: { authorization: `Bearer ${token}` }, runs: [] },
  ];
  for (const party of parties) await slice(bench, party, 8);
  const turns = bench.quick ? 2 : 5;
  for (let turn = 1; turn <= turns; turn++) {
    for (const party of parties) {
      bench.progress(`turn ${turn} of ${turns}: ${party.name}`);
      party.runs.push(await slice(bench, party, 4));
    }
  }
  return report(parties);
}

async function credentials(folder: string) {
  const secret = randomBytes(32).toString("base64url");
  const keyed = createSecretKey(secret, "utf8");
  const key = newApiKey(randomBytes);
  const keysFile = join(folder, "keys.json");
  const file = new KeyFile({ path: keysFile, reloadMs: 1000 }, new SystemClock(), new Events());
  await file.add({
    id: readApiKey(key)!,
    digest: digestOf(key, keyed),
    user: "u1",
    tier: "paid",
    name: "",
    createdAt: Date.now(),
    madeWith: nameOfSecret(keyed),
  });
  const { publicKey, privateKey } = generateKeyPairSync("rsa", { modulusLength: 2048 });
  const publicKeyFile = join(folder, "jwt.pem");
  writeFileSync(publicKeyFile, publicKey.export({ type: "spki", format: "pem" }));
  const jwt = { publicKeyFile, issuer: "https://id.example", audience: "ferry" };
  const token = await new SignJWT({ tier: "paid" })
    .setProtectedHeader({ alg: "RS256" })
    .setIssuer(jwt.issuer)
    .setAudience(jwt.audience)
    .setSubject("u1")
    .setExpirationTime("2h")
    .sign(privateKey);
  const settings = {
    auth: { mode: "required", keysFile, secret, jwt },
    limits: { perUserPerMinute: MOST },
    tiers: { paid: { ratePerMinute: MOST } },
  };
  return { settings, key, token };
}

function slice(bench: Bench, { ferry, headers }: Party, seconds: number): Promise<Measured> {
  const spec = {
    target: { ...ferry.target, headers },
    bodyBytes: 2048,
    verify: true,
    warmMs: 1000,
    measureMs: durationMs(bench, seconds),
    drainMs: 2000,
    load: { kind: "closed", callers },
  } as const;
  return measure(spec, { core: bench.cores?.generator, serverPid: ferry.pid });
}

function report(parties: readonly Party[]): Report {
  const rate = ({ runs }: Party): number => median(runs.map((run) => run.rate));
  // Less moved by what else runs on the machine than throughput is.
  const cpu = ({ runs }: Party): number => median(runs.map((run) => (run.serverCpuShare / run.rate) * 1e6));
  const [open, ...others] = parties;
  const runs = parties.flatMap((party) => party.runs);
  return {
    figures: [
      ...others.map((party) =>
        figure(`throughput with ${party.name}`, rate(party) / rate(open!), "ratio", ">=", 0.92),
      ),
      ...parties.map((party) => figure(`${party.name}, median`, rate(party), "req/s")),
      ...parties.map((party) => figure(`${party.name}, CPU per request`, cpu(party), "µs")),
      figure(
        "errors",
        runs.reduce((sum, run) => sum + run.errors, 0),
        "count",
        "<=",
        0,
      ),
    ],
    notes: parties.flatMap((party) =>
      party.runs.flatMap((run, at) => loadNotes(run, `the generator, ${party.name}, turn ${at + 1},`)),
    ),
  };
}
