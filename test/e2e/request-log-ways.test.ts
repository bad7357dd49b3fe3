/** Ways to the PostgreSQL of the request log: TLS, passwords, rights, and from a fleet. */
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { Authority } from "../fixtures/certificates.ts";
import { PostgresServer } from "../observe/postgres/server.ts";
import { startServer } from "../engine/redis-client/server.ts";
import { Fleet, fleetConfig, patient } from "./fleet.ts";
import { type Config, eventually, Ferry, ROOT } from "./harness.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

type Row = Readonly<Record<string, unknown>>;

const log = (url: string): Config => ({ requestLog: { url } });
const noticed = (text: RegExp) => (line: { readonly msg?: string }) => text.test(line.msg ?? "");

function changed(url: string, change: (url: URL) => void): string {
  const other = new URL(url);
  change(other);
  return other.href;
}

async function rowOf(postgres: PostgresServer, id: string, fits: (row: Row) => boolean): Promise<Row> {
  let row: Row | undefined;
  await eventually(async () => {
    const [made] = await postgres.sql`SELECT to_regclass('ferry_requests') IS NOT NULL AS there`;
    if (made!["there"] !== true) return false;
    row = (await postgres.sql`SELECT * FROM ferry_requests WHERE id = ${id}`)[0];
    return row !== undefined && fits(row);
  });
  return row!;
}

test("what is wrong is told without the user or the password", async () => {
  await using postgres = await PostgresServer.start();
  await using stub = await StubWorker.listen();
  await postgres.sql`CREATE ROLE guest LOGIN PASSWORD 'guest'`;
  const models = [stubModel([stub])];
  const wrong: [url: string, told: RegExp][] = [
    [
      changed(postgres.url, (url) => (url.pathname = "/nothing")),
      /the database of requestLog.url does not exist/,
    ],
    [
      changed(postgres.url, (url) => (url.password = "hunter2")),
      /refuses the user or the password of requestLog/,
    ],
    [
      changed(postgres.url, (url) => {
        url.username = "guest";
        url.password = "guest";
      }),
      /the user of requestLog.url lacks a right/,
    ],
    [`${postgres.url}?sslmode=verify-full`, /is away: /],
  ];
  for (const [url, told] of wrong) {
    await using ferry = await Ferry.start({ models, ...log(url) });
    const line = await ferry.line(noticed(told));
    assert.match(line.msg!, /^request log: PostgreSQL at 127\.0\.0\.1:\d+\/\w+ is away/);
    assert.deepEqual(await ferry.infer(1), { of: 1 });
    await ferry.stop();
    assert.doesNotMatch(ferry.stderr(), /pass word|pass%20word|hunter2|guest|ferry:/);
  }
});

test("rows that a changed table refuses are dropped and told, and do not hold up others", async () => {
  await using postgres = await PostgresServer.start();
  await using stub = await StubWorker.listen();
  await using ferry = await Ferry.start({ models: [stubModel([stub])], ...log(postgres.url) });
  await rowOf(postgres, (await ferry.post({ input: 1 })).json.task_id!, () => true);
  await postgres.sql`ALTER TABLE ferry_requests ADD CONSTRAINT narrow CHECK (status <> 400)`;
  assert.equal((await ferry.post("{}")).status, 400);
  const line = await ferry.line(
    noticed(/refuses \d+ rows, which are dropped: it answered with SQLSTATE 23514/),
  );
  assert.equal(line.level, "error");
  await postgres.sql`ALTER TABLE ferry_requests DROP CONSTRAINT narrow`;
  await rowOf(postgres, (await ferry.post("{}")).json.request_id!, () => true);
});

test("with TLS: sslmode=require encrypts, verify-full also checks the certificate", async () => {
  using authority = new Authority();
  await using postgres = await PostgresServer.prepare();
  postgres.useTls(authority.issue());
  await postgres.start();
  await using stub = await StubWorker.listen();
  const models = [stubModel([stub])];
  const answered = async (ferry: Ferry): Promise<void> => {
    const { json } = await ferry.post({ input: 1 });
    await rowOf(postgres, json.task_id!, () => true);
    const used = await postgres.sql`SELECT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)
      WHERE application_name = 'ferry'`;
    assert.deepEqual([...used], [{ ssl: true }]);
  };
  {
    await using ferry = await Ferry.start({ models, ...log(`${postgres.url}?sslmode=require`) });
    await answered(ferry);
  }
  await eventually(async () => {
    const left = await postgres.sql`SELECT 1 FROM pg_stat_activity WHERE application_name = 'ferry'`;
    return left.length === 0;
  });
  const strict = log(`${postgres.url}?sslmode=verify-full`);
  {
    await using ferry = await Ferry.start({ models, ...strict });
    await ferry.line(noticed(/is away: (UNABLE_TO|SELF_SIGNED)/));
  }
  process.env["NODE_EXTRA_CA_CERTS"] = authority.own.certFile;
  try {
    await using ferry = await Ferry.start({ models, ...strict });
    await answered(ferry);
  } finally {
    delete process.env["NODE_EXTRA_CA_CERTS"];
  }
});

test("in a fleet each gateway writes its own requests, and learns how they ended", async () => {
  await using postgres = await PostgresServer.start();
  await using redis = await startServer();
  await using stub = await StubWorker.listen();
  const models = [stubModel([stub], { timeouts: patient })];
  const config = fleetConfig({ url: redis.url, durability: "local" }, models, log(postgres.url));
  await using fleet = await Fleet.start({ gateways: 2, batchers: 1 }, config);
  for (const gateway of fleet.gateways) {
    const held = await gateway.post({ input: gateway.url });
    assert.equal(held.status, 200, held.text);
    const row = await rowOf(postgres, held.json.task_id!, () => true);
    assert.deepEqual([row["status"], row["outcome"], row["batch_size"]], [200, "SUCCESS", 1]);
    const accepted = await gateway.post({ input: `later ${gateway.url}` }, { prefer: "respond-async" });
    assert.equal(accepted.status, 202, accepted.text);
    const later = await rowOf(postgres, accepted.json.task_id!, ({ outcome }) => outcome !== null);
    assert.deepEqual([later["status"], later["outcome"], later["attempts"]], [202, "SUCCESS", 1]);
  }
  const [made] = await postgres.sql`SELECT count(DISTINCT instance)::int AS instances FROM ferry_requests`;
  assert.equal(made!["instances"], 2);
});

test("the questions of docs/request-log.md are understood", async () => {
  await using postgres = await PostgresServer.start();
  await using stub = await StubWorker.listen();
  await using ferry = await Ferry.start({ models: [stubModel([stub])], ...log(postgres.url) });
  const { json } = await ferry.post({ input: 1 });
  await rowOf(postgres, json.task_id!, () => true);
  const page = await readFile(join(ROOT, "docs/request-log.md"), "utf8");
  const questions = [...page.matchAll(/^```sql\n(.*?)^```$/gms)].map(([, text]) => text!);
  assert.ok(questions.length >= 5);
  const answers = await Promise.all(questions.map((text) => postgres.sql.unsafe(text)));
  assert.equal(answers[0]!.length, 1);
  const columns = await postgres.sql`SELECT column_name AS name FROM information_schema.columns
    WHERE table_name = 'ferry_requests'`;
  for (const { name } of columns)
    assert.ok(page.includes(`\`${name}\``), `docs/request-log.md explains ${name}`);
});
