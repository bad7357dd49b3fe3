/** Keys in Redis: made once, good at every gateway, revoked at every gateway; tokens and limits beside them. */
import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { after, before, describe, test } from "node:test";
import { newApiKey } from "../../src/gateway/admission/api-keys.ts";
import { claims, pem, rsaPair, token } from "../gateway/admission/stage.ts";
import { startServer, type Server } from "../engine/redis-client/servers.ts";
import { Fleet, fleetConfig, patient, type Part } from "./fleet.ts";
import {
  assertError,
  eventually,
  Folder,
  runFerry,
  writeConfig,
  type Config,
  type Headers,
} from "./harness.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

const RELOAD_MS = 5000;
const issuer = rsaPair();
const bearer = (text: string): Headers => ({ authorization: `Bearer ${text}` });

describe("two gateways, one batcher, one Redis", () => {
  let redis: Server;
  let folder: Folder;
  let stub: StubWorker;
  let fleet: Fleet;
  let config: Config;

  const keys = async (...words: string[]) => {
    const { code, stdout, stderr } = await runFerry(["keys", ...words, "-c", `${folder.path}/ferry.yaml`]);
    assert.equal(code, 0, stderr);
    return stdout.trim();
  };
  const create = (user: string, tier = "paid") => keys("create", "--user", user, "--tier", tier);
  const doors = (): readonly [Part, Part] => [fleet.gateways[0]!, fleet.gateways[1]!];
  const status = async (door: Part, text: string): Promise<number> =>
    (await door.post({ input: "status" }, bearer(text))).status;

  before(async () => {
    redis = await startServer();
    folder = await Folder.make();
    stub = await StubWorker.listen();
    const publicKeyFile = await folder.write("jwt.pem", pem(issuer));
    const jwt = { publicKeyFile, issuer: "https://id.example", audience: "ferry" };
    const model = stubModel([stub], { timeouts: patient });
    const engine = { url: redis.url, durability: "local" };
    config = fleetConfig(engine, [model], {
      auth: { mode: "required", jwt },
      limits: { perUserPerMinute: 1000 },
    });
    await writeConfig(folder, config);
    fleet = await Fleet.start({ gateways: 2, batchers: 1 }, config);
  });
  after(async () => {
    await fleet?.[Symbol.asyncDispose]();
    await stub?.[Symbol.asyncDispose]();
    await folder?.[Symbol.asyncDispose]();
    await redis?.[Symbol.asyncDispose]();
  });

  test("a key works at both at once, also when it is made while they run, and stops at both", async () => {
    const [a, b] = doors();
    const key = await create("u1");
    assert.deepEqual([await status(a, key), await status(b, key)], [200, 200]);
    await keys("revoke", key);
    const revokedAt = performance.now();
    await eventually(async () => (await status(a, key)) === 401 && (await status(b, key)) === 401);
    const tookMs = performance.now() - revokedAt;
    assert.ok(tookMs < RELOAD_MS + 15_000, `${tookMs.toFixed(0)} ms`);
  });

  test("six made at once are all there; Redis holds no key", async () => {
    const made = await Promise.all(Array.from({ length: 6 }, (_, at) => create(`many ${at}`)));
    const rows = (await keys("list", "--json")).split("\n").map((row) => JSON.parse(row) as { user: string });
    for (let at = 0; at < 6; at++) assert.equal(rows.filter(({ user }) => user === `many ${at}`).length, 1);
    const dump = JSON.stringify(await redis.ask("HGETALL", "ferry:{f0h}:keys"));
    for (const key of made) assert.ok(!dump.includes(key.slice(20, 48)));
    for (const key of made) assert.equal(await status(doors()[1], key), 200);
  });

  test("results are their user's own, at every gateway, whichever credential; strangers see an unknown id", async () => {
    const [a, b] = doors();
    const [mine, theirs] = await Promise.all([create("owner"), create("other")]);
    const answer = await a.post({ input: "owned" }, { ...bearer(mine), prefer: "respond-async" });
    assert.equal(answer.status, 202, answer.text);
    const path = `/v1/result/${answer.json.task_id!}`;
    const jwt = token(issuer, claims(Date.now(), { sub: "owner" }));
    await eventually(async () => (await b.get(path, undefined, bearer(jwt))).json.status === "SUCCESS");
    const plain = (text: string): string => text.replace(/"request_id":"[^"]+"/, "");
    const unknown = `/v1/result/${answer.json.task_id!.slice(0, 20)}${"0".repeat(16)}`;
    for (const wait of ["", "?wait=1"]) {
      const foreign = await b.get(path + wait, undefined, bearer(theirs));
      assertError(foreign, 404, "NOT_FOUND");
      assert.equal(plain(foreign.text), plain((await b.get(unknown + wait, undefined, bearer(theirs))).text));
    }
    assertError(await b.delete(path, bearer(theirs)), 404, "NOT_FOUND");
    assertError(await b.get(path), 401, "UNAUTHENTICATED");
    assert.equal((await b.delete(path, bearer(mine))).status, 204);
  });

  test("the same body and Idempotency-Key of two users are two tasks", async () => {
    const [a, b] = doors();
    const [one, two] = await Promise.all([create("first"), create("second")]);
    const [x, y] = await Promise.all([
      a.post({ input: "both" }, { ...bearer(one), "idempotency-key": "k" }),
      b.post({ input: "both" }, { ...bearer(two), "idempotency-key": "k" }),
    ]);
    assert.deepEqual([x.status, y.status], [200, 200]);
    assert.notEqual(x.json.task_id, y.json.task_id);
    assert.equal(stub.inputs.filter((input) => input === "both").length, 2);
  });

  test("one bucket for a user's key and token, across gateways", async () => {
    const [a, b] = doors();
    const key = await create("bucket");
    const first = await a.post({ input: "bucket 1" }, bearer(key));
    const jwt = token(issuer, claims(Date.now(), { sub: "bucket" }));
    const second = await b.post({ input: "bucket 2" }, bearer(jwt));
    assert.equal(
      Number(second.header("ratelimit-remaining")),
      Number(first.header("ratelimit-remaining")) - 1,
    );
  });

  test("guessing ids costs Redis at most a command each time it answers", async () => {
    const [a] = doors();
    const asked = async (): Promise<number> =>
      Number(/cmdstat_hmget:calls=(\d+)/.exec(await redis.cli("INFO", "commandstats"))?.[1] ?? 0);
    const before = await asked();
    const codes = await Promise.all(Array.from({ length: 300 }, () => status(a, newApiKey(randomBytes))));
    assert.ok(codes.every((code) => code === 401));
    const guess = newApiKey(randomBytes);
    for (let i = 0; i < 50; i++) await status(a, guess);
    const commands = (await asked()) - before;
    // Those that come at once share commands, as far as they do; who guesses the same again costs nothing.
    assert.ok(commands < 340, `${commands} commands`);
  });

  test("while Redis is away: the known key gets the store's 503, a stranger 503 too, never 500 or 401", async () => {
    const [a] = doors();
    const [key, unseen] = await Promise.all([create("outage"), create("unseen")]);
    assert.equal(await status(a, key), 200);
    await redis.kill();
    const told = await a.post({ input: "away" }, bearer(key));
    assertError(told, 503, "SERVICE_OVERLOADED");
    await eventually(async () => {
      const answer = await a.post({ input: "away" }, bearer(unseen));
      assertError(answer, 503, "SERVICE_OVERLOADED");
      return answer.text.includes("credentials cannot be checked now");
    });
    await eventually(() => a.stderr().includes("API keys cannot be looked up"));
    assertError(await a.post({ input: "away" }, bearer("nonsense")), 401, "UNAUTHENTICATED");
    await redis.restart();
    await eventually(async () => (await status(a, unseen)) === 200);
    assert.equal(await status(a, key), 200);
  });
});
