/**
 * `auth`: what credentials and limits cost, as throughput of the whole path.
 *
 * The path of `embedded` (2 KB body, 64 workers of 1 ms, 256 callers in a closed loop) on three servers on one
 * core, in turns: without credentials or limits; with an API key, a limit per user and one per tier, neither
 * ever reached; with a JSON Web Token (RS256) and the same limits. Eight users, one credential each: what is
 * remembered of a credential is used, as it is by clients that send more than one request.
 *
 * The ratio is that of the medians of each server's turns.
 */
import { median } from "../../src/core/median.ts";
import { generateKeyPairSync } from "node:crypto";
import { mkdtempSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { SignJWT } from "jose";
import { authSettings, kindWithKey } from "../admission.ts";
import type { CallerKind } from "../../src/cli/bench/arrivals.ts";
import { measure, type Measured } from "../generator.ts";
import { FerryServer, type FerrySetup } from "../server.ts";
import { durationMs, figure, loadNotes, type Bench, type Report, type Scenario } from "../scenario.ts";

const callers = 256;
const users = Array.from({ length: 8 }, (_, i) => `user-${i}`);
const tier = "paid";
const goal = 0.92;
const issuer = "https://bench.example";
const audience = "ferry";

export const auth: Scenario = {
  name: "auth",
  summary:
    "the path of embedded without credentials, with API keys and limits, with tokens and limits, in turns",
  run,
};

interface Side {
  readonly name: string;
  readonly server: FerryServer;
  readonly kinds: readonly CallerKind[] | undefined;
  readonly runs: Measured[];
}

async function run(bench: Bench): Promise<Report> {
  const setup: FerrySetup = {
    dir: bench.dir,
    core: bench.cores?.server,
    models: [{ name: "bench", workers: 64, baseMs: 1 }],
  };
  const { jwt, tokens } = await issue(bench.dir);
  const keys = users.map((user) => ({ user, tier }));
  await using none = await FerryServer.start(setup);
  await using withKeys = await FerryServer.start({ ...setup, settings: authSettings(), keys });
  await using withTokens = await FerryServer.start({ ...setup, settings: authSettings({ jwt }) });
  const kindsOf = (credentials: readonly string[]): CallerKind[] =>
    users.map((user, i) => kindWithKey(user, 1, credentials[i]!));
  const sides: Side[] = [
    { name: "none", server: none, kinds: undefined, runs: [] },
    { name: "API key", server: withKeys, kinds: kindsOf(withKeys.keys), runs: [] },
    { name: "token", server: withTokens, kinds: kindsOf(tokens), runs: [] },
  ];
  // Before the first turn that counts, as in `embedded`.
  for (const side of sides) await slice(bench, side, 10);
  const turns = bench.quick ? 2 : 6;
  for (let turn = 1; turn <= turns; turn++) {
    for (const side of sides) {
      bench.progress(`turn ${turn} of ${turns}: ${side.name}`);
      side.runs.push(await slice(bench, side, 4));
    }
    sides.reverse(); // whoever comes first in a turn does not always do so
  }
  return report(sides);
}

/** Tokens that outlive the run, and the settings that take them. */
async function issue(dir: string): Promise<{ jwt: object; tokens: string[] }> {
  const { publicKey, privateKey } = generateKeyPairSync("rsa", { modulusLength: 2048 });
  const publicKeyFile = join(mkdtempSync(join(dir, "jwt-")), "public.pem");
  writeFileSync(publicKeyFile, publicKey.export({ type: "spki", format: "pem" }));
  const tokens = users.map((user) =>
    new SignJWT({ tier })
      .setProtectedHeader({ alg: "RS256", typ: "JWT" })
      .setSubject(user)
      .setIssuer(issuer)
      .setAudience(audience)
      .setExpirationTime("2h")
      .sign(privateKey),
  );
  const jwt = { publicKeyFile, algorithm: "RS256", issuer, audience };
  return { jwt, tokens: await Promise.all(tokens) };
}

function slice(bench: Bench, { server, kinds }: Side, seconds: number): Promise<Measured> {
  return measure(
    {
      target: server.target,
      bodyBytes: 2048,
      verify: true,
      warmMs: 1000,
      measureMs: durationMs(bench, seconds),
      drainMs: 2000,
      ...(kinds && { kinds }),
      load: { kind: "closed", callers },
    },
    { core: bench.cores?.generator, serverPid: server.pid },
  );
}

function report(sides: readonly Side[]): Report {
  const side = (name: string): Side => sides.find((each) => each.name === name)!;
  const rate = (name: string): number => median(side(name).runs.map((run) => run.rate));
  // Less moved by what else runs on the machine than throughput is.
  const micros = (name: string): number =>
    median(side(name).runs.map((run) => (run.serverCpuShare / run.rate) * 1e6));
  const all = sides.flatMap(({ runs }) => runs);
  const errorCount = all.reduce((sum, run) => sum + run.errors, 0);
  return {
    figures: [
      figure("API key and limits, throughput to none", rate("API key") / rate("none"), "ratio", ">=", goal),
      figure("token and limits, throughput to none", rate("token") / rate("none"), "ratio", ">=", goal),
      ...["none", "API key", "token"].map((name) =>
        figure(`${name}, throughput, median`, rate(name), "req/s"),
      ),
      ...["none", "API key", "token"].map((name) => figure(`${name}, CPU per request`, micros(name), "µs")),
      figure("ferry CPU, median", median(all.map((run) => run.serverCpuShare)) * 100, "%"),
      figure("generator CPU, highest", Math.max(...all.map((run) => run.cpuShare)) * 100, "%"),
      figure("errors", errorCount, "count", "<=", 0),
    ],
    notes: sides.flatMap(({ name, runs }) =>
      runs.flatMap((run, i) => loadNotes(run, `the generator, ${name}, turn ${i + 1},`)),
    ),
  };
}
