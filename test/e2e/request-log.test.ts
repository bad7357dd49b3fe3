/** The request log in a real PostgreSQL, which comes, goes and hangs, and the story of a request. */
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { after, before, describe, test } from "node:test";
import { SystemClock } from "../../src/app/clock.ts";
import { Events } from "../../src/observe/events.ts";
import { PostgresLog } from "../../src/observe/request-log-postgres.ts";
import { RequestRow } from "../../src/observe/request-log.ts";
import { Sender } from "../../src/observe/sender.ts";
import { PostgresServer } from "../observe/postgres/server.ts";
import { answered } from "../observe/stage.ts";
import { claims, pem, rsaPair, token } from "../gateway/admission/stage.ts";
import { type Config, eventually, Ferry, Folder, runFerry, writeConfig } from "./harness.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

const ISSUER = rsaPair();
const tokenOf = (sub: string) => token(ISSUER, claims(Date.now(), { sub, tier: "free" }));

type Row = Readonly<Record<string, unknown>>;

const log = (url: string, more: Config = {}): Config => ({ requestLog: { url, ...more } });

async function made(postgres: PostgresServer): Promise<boolean> {
  const [found] = await postgres.sql`SELECT to_regclass('ferry_requests') IS NOT NULL AS there`;
  return found!["there"] === true;
}

async function rowsOf(postgres: PostgresServer, id: string): Promise<Row[]> {
  if (!(await made(postgres))) return [];
  return [...(await postgres.sql`SELECT * FROM ferry_requests WHERE id = ${id} ORDER BY seq`)];
}

/** The rows under an id, once there are so many and they fit. */
async function rows(
  postgres: PostgresServer,
  id: string,
  fits: (row: Row) => boolean = () => true,
  count = 1,
) {
  let found: Row[] = [];
  const there = async (): Promise<boolean> => {
    found = await rowsOf(postgres, id);
    return found.length >= count && found.every(fits);
  };
  await eventually(there).catch((error: unknown) => {
    throw new Error(`no such row: ${JSON.stringify(found)}`, { cause: error });
  });
  assert.equal(found.length, count);
  return found;
}

async function countRows(postgres: PostgresServer): Promise<number> {
  if (!(await made(postgres))) return 0;
  return Number((await postgres.sql`SELECT count(*) AS n FROM ferry_requests`)[0]!["n"]);
}

const noticed = (text: RegExp) => (line: { readonly msg?: string }) => text.test(line.msg ?? "");

describe("with a PostgreSQL", () => {
  let postgres: PostgresServer;
  let folder: Folder;
  let stub: StubWorker;
  let ferry: Ferry;
  let key = "";

  before(async () => {
    postgres = await PostgresServer.start();
    folder = await Folder.make();
    stub = await StubWorker.listen();
    await folder.write("jwt.pem", pem(ISSUER));
    const config = {
      models: [stubModel([stub], { retry: { max: 1, baseMs: 1 } })],
      auth: {
        mode: "required",
        keysFile: "./keys.json",
        jwt: { issuer: "https://id.example", audience: "ferry", publicKeyFile: "./jwt.pem" },
      },
      // Long enough for a look at once, on whatever machine.
      results: { ttlMs: 8000 },
      ...log(postgres.url),
    };
    await writeConfig(folder, config);
    const words = ["keys", "create", "--user", "alice", "--tier", "paid", "-c", `${folder.path}/ferry.yaml`];
    key = (await runFerry(words)).stdout.trim();
    ferry = await Ferry.start(config, folder);
  });
  after(async () => {
    await ferry?.[Symbol.asyncDispose]();
    await stub?.[Symbol.asyncDispose]();
    await folder?.[Symbol.asyncDispose]();
    await postgres?.[Symbol.asyncDispose]();
  });

  const as = (credential: string) => ({ authorization: `Bearer ${credential}` });

  test("a row says who, what, when, and how it ended", async () => {
    const before = Date.now();
    const answer = await ferry.post({ input: "the secret input" }, as(key));
    assert.equal(answer.status, 200, answer.text);
    const [row] = await rows(postgres, answer.json.task_id!);
    const { instance, seq, started_at, settled_at, latency_ms, queue_ms, worker_ms, batch_id, ...rest } =
      row!;
    assert.match(String(instance), /^[0-9a-f-]{36}$/);
    assert.ok(Number(seq) > 0);
    assert.deepEqual(rest, {
      id: answer.json.task_id,
      tenant: "alice",
      tier: "paid",
      model: "stub",
      status: 200,
      code: null,
      work: "own",
      batch_size: 1,
      worker: new URL(stub.url).host,
      reason: rest["reason"],
      attempts: 1,
      outcome: "SUCCESS",
      trace_id: null,
    });
    assert.match(String(rest["reason"]), /^(full|wait|idle|deadline)$/);
    assert.equal(batch_id, answer.header("x-ferry-batch-id"));
    const at = Number(started_at);
    assert.ok(at > before - 1000 && at <= Number(settled_at) && Number(settled_at) <= Date.now() + 1000);
    assert.ok(Number(latency_ms) >= Number(queue_ms) + Number(worker_ms) - 1);
    assert.doesNotMatch(JSON.stringify(row), /secret input/);
  });

  test("what was refused has a row too, and polls have none", async () => {
    const refused = await ferry.post({ input: 1, model: "nobody" }, as(key));
    assert.equal(refused.status, 400);
    const [row] = await rows(postgres, refused.json.request_id!);
    assert.deepEqual(
      [row!["status"], row!["code"], row!["tenant"], row!["model"]],
      [400, "INVALID_REQUEST", "alice", null],
    );
    const stranger = await ferry.post({ input: 1 });
    const [unknown] = await rows(postgres, stranger.json.request_id!);
    assert.deepEqual([unknown!["status"], unknown!["tenant"], unknown!["tier"]], [401, null, null]);
    const poll = await ferry.get(`/v1/result/${"0".repeat(36)}`, as(key));
    assert.equal(poll.status, 404);
    const later = await ferry.post({ input: "after the poll" }, as(key));
    await rows(postgres, later.json.task_id!);
    assert.deepEqual(await rowsOf(postgres, poll.json.request_id!), []);
  });

  test("a 202 gets its outcome when its task ends", async () => {
    const id = await ferry.accept({ input: "later" }, as(key));
    const [row] = await rows(postgres, id, ({ outcome }) => outcome !== null);
    assert.deepEqual([row!["status"], row!["outcome"], row!["batch_size"]], [202, "SUCCESS", 1]);
    assert.ok(row!["settled_at"] instanceof Date);
    stub.behave = (call) => call.reply(500, "{}");
    const bad = await ferry.accept({ input: "fails" }, as(key));
    const [failed] = await rows(postgres, bad, ({ outcome }) => outcome !== null);
    stub.behave = (call) => call.echo();
    assert.deepEqual(
      [failed!["status"], failed!["outcome"], failed!["attempts"]],
      [202, "INFERENCE_FAILED", 2],
    );
  });

  test("users that would be code elsewhere are stored letter by letter", async () => {
    const odd = [
      `'; DROP TABLE ferry_requests; --`,
      `{"a",NULL}`,
      `back\\slash "quote"`,
      `$1 ü 漢 🚢`,
      "NULL",
      "{}",
    ];
    for (const user of odd) {
      const answer = await ferry.post({ input: user }, as(tokenOf(user)));
      assert.equal(answer.status, 200, answer.text);
      const [row] = await rows(postgres, answer.json.task_id!);
      assert.equal(row!["tenant"], user);
      assert.equal(row!["tier"], "free");
    }
  });

  test("the story outlives the record, and the log in memory", async () => {
    const { text, json } = await ferry.post({ input: "a story" }, as(key));
    assert.equal(json.status, "SUCCESS", text);
    const told = async () =>
      JSON.parse((await ferry.admin(`/internal/requests/${json.task_id}`)).text) as Row;
    const fresh = await told();
    assert.equal(fresh["state"], "done");
    assert.equal(fresh["attempts"], 1);
    const gaps = fresh["gaps_ms"] as Record<string, number>;
    assert.deepEqual(Object.keys(gaps), [
      "arrived_to_queued",
      "queued_to_batch",
      "batch_to_settled",
      "settled_to_answered",
    ]);
    await rows(postgres, json.task_id!);
    await eventually(async () => (await told())["source"] === "request log");
    const { state, tenant, tier, model, outcome, batch } = await told();
    assert.deepEqual([state, tenant, tier, model, outcome], ["done", "alice", "paid", "stub", { ok: true }]);
    assert.equal((batch as Row)["worker"], new URL(stub.url).host);

    // Another Ferry knows it from PostgreSQL alone.
    await using other = await Ferry.start({ models: [stubModel([stub])], ...log(postgres.url) });
    const there = async () => (await other.admin(`/internal/requests/${json.task_id}`)).status === 200;
    await eventually(there);
    const missing = await other.admin(`/internal/requests/${"0".repeat(36)}`);
    assert.equal(missing.status, 404);
    assert.equal((await other.admin("/internal/requests/'%20OR%201=1--")).status, 404);
  });

  test("the story tells failed attempts, and refusals that never were a task", async () => {
    stub.behave = (call) => call.reply(500, `{"error":"said by the worker"}`);
    const failed = await ferry.post({ input: "twice" }, as(key));
    stub.behave = (call) => call.echo();
    assert.equal(failed.status, 502, failed.text);
    const story = JSON.parse((await ferry.admin(`/internal/requests/${failed.json.request_id}`)).text) as Row;
    const tries = story["failed_attempts"] as Row[];
    assert.equal(tries.length, 2);
    assert.equal(tries[0]!["attempt"], 1);
    assert.equal(tries[0]!["worker"], new URL(stub.url).host);
    assert.ok(tries[0]!["retry_at"]);
    assert.equal(tries[1]!["dead"], true);
    assert.doesNotMatch(JSON.stringify(story), /said by the worker/);
    const [request] = story["requests"] as Row[];
    assert.deepEqual([request!["status"], request!["code"]], [502, "INFERENCE_FAILED"]);

    const refused = await ferry.post({ nothing: 1 }, as(key));
    const told = JSON.parse((await ferry.admin(`/internal/requests/${refused.json.request_id}`)).text) as Row;
    assert.deepEqual([told["state"], told["tenant"]], ["refused", "alice"]);
    const list = JSON.parse(
      (await ferry.admin("/internal/requests?status=4xx&tenant=alice&limit=1")).text,
    ) as Row;
    assert.equal((list["requests"] as Row[])[0]!["request_id"], refused.json.request_id);
    for (const wrong of ["limit=0", "limit=1e9", "status=6xx", "status=abc", "tennant=bob"])
      assert.equal((await ferry.admin(`/internal/requests?${wrong}`)).status, 400, wrong);
  });

  test("nothing of the URL's user or password is told", () => {
    assert.doesNotMatch(ferry.stderr(), /pass word|pass%20word|ferry:/);
  });
});

describe("when PostgreSQL comes and goes", () => {
  test("killed under load: no request fails, and what waited arrives", async () => {
    await using postgres = await PostgresServer.start();
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [stubModel([stub])], ...log(postgres.url) });
    let sent = 0;
    const send = async (count: number): Promise<void> => {
      for (let at = 0; at < count; at += 20) {
        const answers = await Promise.all(Array.from({ length: 20 }, () => ferry.post({ input: sent++ })));
        for (const { status, text } of answers) assert.equal(status, 200, text);
      }
    };
    await send(100);
    await eventually(async () => (await countRows(postgres)) === sent);
    await postgres.kill();
    await send(400);
    const away = await ferry.line(noticed(/request log: PostgreSQL at .* is away/));
    assert.equal(away.level, "warn");
    await send(200);
    await postgres.start();
    await ferry.line(noticed(/is back after \d+ s; 0 rows were dropped/));
    await eventually(async () => (await countRows(postgres)) === sent);
    assert.equal(ferry.lines.filter(noticed(/is away/)).length, 1);
    assert.equal((await postgres.sql`SELECT DISTINCT id FROM ferry_requests`).length, sent);
  });

  test("away at the start: the rows wait for it", async () => {
    await using postgres = await PostgresServer.prepare();
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [stubModel([stub])], ...log(postgres.url) });
    await ferry.line(noticed(/is away: ECONNREFUSED/));
    await Promise.all(Array.from({ length: 50 }, () => ferry.post("{}")));
    await postgres.start();
    await ferry.line(noticed(/is back after \d+ s; 0 rows were dropped/));
    await eventually(async () => (await countRows(postgres)) === 50);
  });

  test("a PostgreSQL that hangs holds up neither requests nor the end", async () => {
    await using postgres = await PostgresServer.start();
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({
      models: [stubModel([stub])],
      ...log(postgres.url),
    });
    const first = await ferry.post({ input: "before" });
    await rows(postgres, first.json.task_id!);
    postgres.pause();
    try {
      for (let at = 0; at < 20; at++) assert.equal((await ferry.post({ input: at })).status, 200);
      const stoppedAt = performance.now();
      assert.equal((await ferry.stop()).code, 0);
      assert.ok(performance.now() - stoppedAt < 45_000);
      assert.ok(ferry.lines.some(noticed(/20 rows may be lost/)), ferry.stderr());
    } finally {
      postgres.resume();
    }
  });

  test("hangs, and is given up in time: the rows are written once it is back, and once", async () => {
    await using postgres = await PostgresServer.start();
    const events = new Events();
    const said: string[] = [];
    events.on("notice", ({ message }) => said.push(message));
    await using stack = new AsyncDisposableStack();
    const sender = new Sender(events);
    stack.defer(() => sender.close());
    const options = { url: postgres.url, instance: randomUUID(), retentionDays: 0 };
    // Enough for the first write on a busy machine, which makes the table.
    const log = new PostgresLog(
      { ...options, flushMs: 50, writeTimeoutMs: 3000 },
      { clock: new SystemClock(), events, sender, random: Math.random },
    );
    stack.defer(() => log.close());
    log.add(new RequestRow(1, answered()));
    await eventually(async () => (await countRows(postgres)) === 1);
    postgres.pause();
    try {
      for (let seq = 2; seq <= 21; seq++) log.add(new RequestRow(seq, answered()));
      await eventually(() => said.some((message) => message.includes("is away: no answer within 3000 ms")));
    } finally {
      postgres.resume();
    }
    await eventually(() => said.some((message) => message.includes("is back")));
    await eventually(async () => (await countRows(postgres)) === 21);
  });

  test("what waits at the end is written", async () => {
    await using postgres = await PostgresServer.start();
    await using stub = await StubWorker.listen();
    const config = { models: [stubModel([stub])], ...log(postgres.url) };
    await using ferry = await Ferry.start(config);
    for (let at = 0; at < 30; at++) await ferry.infer(at);
    assert.equal((await ferry.stop()).code, 0);
    assert.equal(await countRows(postgres), 30);
  });

  test("three start at once, one makes the table, one deletes what is old", async () => {
    await using postgres = await PostgresServer.start();
    await using stub = await StubWorker.listen();
    const config = { models: [stubModel([stub])], ...log(postgres.url, { retentionDays: 7 }) };
    await using first = await Ferry.start(config);
    await eventually(
      async () => (await countRows(postgres)) === 0 && (await first.post("{}")).status === 400,
    );
    await eventually(async () => (await countRows(postgres)) > 0);
    await first.stop();
    await postgres.sql`DROP TABLE ferry_requests, ferry_migrations`;
    const all = await Promise.all([1, 2, 3].map(() => Ferry.start(config)));
    try {
      for (const ferry of all) await rows(postgres, (await ferry.post("{}")).json.request_id!);
      for (const ferry of all) assert.ok(!ferry.lines.some(noticed(/request log/)), ferry.stderr());
    } finally {
      for (const ferry of all) await ferry[Symbol.asyncDispose]();
    }
    assert.equal((await postgres.sql`SELECT * FROM ferry_migrations`).length, 1);
    await postgres.sql`INSERT INTO ferry_requests (instance, seq, id, status, work, started_at, latency_ms, attempts)
      SELECT gen_random_uuid(), n, 'old', 200, 'own', now() - interval '8 days', 1, 1 FROM generate_series(1, 5000) n`;
    await postgres.sql`INSERT INTO ferry_requests (instance, seq, id, status, work, started_at, latency_ms, attempts)
      VALUES (gen_random_uuid(), 1, 'young', 200, 'own', now() - interval '6 days', 1, 1)`;
    await using later = await Ferry.start(config);
    await eventually(async () => (await rowsOf(postgres, "old")).length === 0);
    assert.equal((await rowsOf(postgres, "young")).length, 1);
    assert.equal((await later.post("{}")).status, 400);
  });
});
