/** Items 1 to 12 and 14 to 18: who may enter, as whom, and how often. Whole processes, keys and tokens. */
import assert from "node:assert/strict";
import { createHmac, generateKeyPairSync, type KeyObject, sign } from "node:crypto";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import {
  type Answer,
  assertError,
  eventually,
  Ferry,
  Folder,
  ROOT,
  runFerry,
  writeConfig,
} from "../e2e/harness.ts";
import { postHead, RawClient } from "../e2e/raw-client.ts";
import { stubModel, StubWorker } from "../e2e/stub-worker.ts";

const PER_MINUTE = 30;
const TOKEN = "the-admin-token";
const ISSUER = "https://id.example";
const rsa = generateKeyPairSync("rsa", { modulusLength: 2048 });
const PEM = rsa.publicKey.export({ type: "spki", format: "pem" });

let folder: Folder;
let stub: StubWorker;
let ferry: Ferry;
let configFile: string;

before(async () => {
  folder = await Folder.make();
  stub = await StubWorker.listen();
  const publicKeyFile = await folder.write("jwt.pem", PEM);
  const config = {
    admin: { listen: "127.0.0.1:0", token: TOKEN },
    models: [stubModel([stub])],
    auth: {
      mode: "required",
      keysFile: "./keys.json",
      jwt: { publicKeyFile, issuer: ISSUER, audience: "ferry" },
    },
    limits: { perUserPerMinute: PER_MINUTE },
  };
  configFile = await writeConfig(folder, config);
  await newKey("first");
  ferry = await Ferry.start(config, folder);
});
after(async () => {
  await ferry?.[Symbol.asyncDispose]();
  await stub?.[Symbol.asyncDispose]();
  await folder?.[Symbol.asyncDispose]();
});

async function newKey(user: string): Promise<string> {
  const { stdout, stderr } = await runFerry([
    "keys",
    "create",
    "--user",
    user,
    "--tier",
    "paid",
    "-c",
    configFile,
  ]);
  const key = /fy_live_[0-9A-Za-z]+/.exec(stdout)?.[0];
  assert.ok(key !== undefined, stderr);
  return key;
}

const part = (value: object | string): string =>
  Buffer.from(typeof value === "string" ? value : JSON.stringify(value)).toString("base64url");
const seconds = (): number => Math.floor(Date.now() / 1000);
const claims = (user: string, more: object = {}): object => ({
  sub: user,
  tier: "paid",
  iss: ISSUER,
  aud: "ferry",
  exp: seconds() + 600,
  ...more,
});

function jwt(payload: object, header: object = {}, key: KeyObject = rsa.privateKey): string {
  const text = `${part({ alg: "RS256", ...header })}.${part(payload)}`;
  return `${text}.${sign("sha256", Buffer.from(text), key).toString("base64url")}`;
}

const as = (user: string): { authorization: string } => ({ authorization: `Bearer ${jwt(claims(user))}` });
const post = (input: unknown, headers: Record<string, string>): Promise<Answer> =>
  ferry.post({ input }, headers);

async function refused(
  headers: Record<string, string>,
  status = 401,
  code = "UNAUTHENTICATED",
): Promise<string> {
  const answer = await post("a", headers);
  const { request_id } = assertError(answer, status, code);
  return answer.text.replace(request_id!, "");
}

describe("1 no or malformed credentials → 401 before the body is read, always the same body", () => {
  test("1 every flaw looks alike", async () => {
    const flaws: Record<string, string>[] = [
      {},
      { authorization: "" },
      { authorization: "Bearer" },
      { authorization: "Bearer a b" },
      { authorization: "Basic dXNlcjpwYXNz" },
      { authorization: `Bearer ${"x".repeat(9000)}` },
      { "x-api-key": "fy_live_" },
      { authorization: "Bearer fy_live_000000000000000000000000000000000000000000000" },
      { authorization: `Bearer ${jwt(claims("u"))}`, "x-api-key": "fy_live_other" },
    ];
    const texts = new Set<string>();
    for (const headers of flaws) texts.add(await refused(headers));
    assert.equal(texts.size, 1, [...texts].join("\n"));
  });
  test("1 on every route that has something to tell", async () => {
    assertError(await ferry.post({ input: "a" }, {}, "/api/inference"), 401, "UNAUTHENTICATED");
    assertError(await ferry.get(`/v1/result/${"0".repeat(36)}`), 401, "UNAUTHENTICATED");
    assertError(await ferry.delete(`/v1/result/${"0".repeat(36)}`), 401, "UNAUTHENTICATED");
  });
  test("1 the answer comes while the body is still to be sent, and no 100 before it", async () => {
    for (const field of ["X-A: b", "Expect: 100-continue"]) {
      await using client = await RawClient.connect(ferry.url);
      client.send(postHead(1000, field));
      assertError(await client.answer(), 401, "UNAUTHENTICATED");
      await client.closed();
      assert.deepEqual(client.interims, []);
    }
  });
});

describe("JSON Web Tokens", () => {
  const bearer = (token: string) => ({ authorization: `Bearer ${token}` });
  test("a good one is taken", async () => assert.equal((await post("good", as("good"))).status, 200));

  test("2 alg none, None and an empty signature → 401", async () => {
    const payload = part(claims("u"));
    for (const alg of ["none", "None", "NONE", ""]) {
      await refused(bearer(`${part({ alg })}.${payload}.`));
      await refused(bearer(`${part({ alg })}.${payload}.e30`));
    }
    await refused(bearer(`${part({ alg: "RS256" })}.${payload}.`));
    await refused(bearer(`${part({ alg: "RS256" })}.${payload}`));
  });
  test("3 RS256 → HS256 with the public key as the secret → 401", async () => {
    for (const secret of [PEM, PEM.trim(), rsa.publicKey.export({ type: "spki", format: "der" })]) {
      const text = `${part({ alg: "HS256", typ: "JWT" })}.${part(claims("u"))}`;
      await refused(bearer(`${text}.${createHmac("sha256", secret).update(text).digest("base64url")}`));
    }
    const other = generateKeyPairSync("rsa", { modulusLength: 2048 }).privateKey;
    await refused(bearer(jwt(claims("u"), {}, other)));
    await refused(bearer(jwt(claims("u"), { alg: "RS512" })));
  });
  test("4 kid as a path, SQL, a URL, __proto__ or no text → 401, never 500", async () => {
    const other = generateKeyPairSync("rsa", { modulusLength: 2048 }).privateKey;
    for (const kid of ["../../etc/passwd", "' OR 1=1 --", "http://evil/key", "__proto__", 1, {}, ["a"], "\0"])
      await refused(bearer(jwt(claims("u"), { kid }, other)));
  });
  test("5 jku, x5u and jwk → ignored: 401, and nobody is asked", async () => {
    let asked = 0;
    const server = createServer((_, response) => void (asked++, response.end("{}"))).listen(0, "127.0.0.1");
    await once(server, "listening");
    const { port } = server.address() as AddressInfo;
    const evil = generateKeyPairSync("rsa", { modulusLength: 2048 });
    const jwk = evil.publicKey.export({ format: "jwk" });
    const url = `http://127.0.0.1:${port}/keys`;
    for (const header of [{ jku: url }, { x5u: url }, { jwk }, { jku: url, jwk, kid: "a" }])
      await refused(bearer(jwt(claims("u"), header, evil.privateKey)));
    assert.equal(asked, 0);
    server.close();
  });
  test("6 exp past, missing, no number or more than 24 h ahead; nbf ahead → 401; 30 s of skew are forgiven", async () => {
    const now = seconds();
    const wrong = [
      { exp: now - 61 },
      { exp: undefined },
      { exp: "soon" },
      { exp: now + 25 * 3600 },
      { nbf: now + 90 },
      { exp: null },
    ];
    for (const each of wrong) await refused(bearer(jwt(claims("u", each))));
    assert.equal(
      (await post("skew", bearer(jwt(claims("skewed", { exp: now - 30, nbf: now + 30 }))))).status,
      200,
    );
  });
  test("7 another aud, iss or typ; none of them → 401", async () => {
    const wrong = [
      { aud: "other" },
      { iss: "https://staging.example" },
      { aud: undefined },
      { iss: undefined },
    ];
    for (const each of wrong) await refused(bearer(jwt(claims("u", each))));
    await refused(bearer(jwt(claims("u"), { typ: "refresh+jwt" })));
    await refused(bearer(jwt(claims("u"), { crit: ["b64"], b64: false })));
  });
  test("a tier that is not served → 403; a user that is no name → 401", async () => {
    for (const tier of ["admin", "__proto__", 5, ["paid"]])
      await refused(bearer(jwt(claims("u", { tier }))), 403, "FORBIDDEN");
    for (const sub of ["", "a\nb", 5, { a: 1 }, "x".repeat(300)])
      await refused(bearer(jwt(claims("u", { sub }))));
  });
});

describe("8 JWKS: rotation, random kids, and a server that is down", () => {
  test("8 300 made-up kids cost one fetch at most; known keys outlive the server", async () => {
    const second = generateKeyPairSync("rsa", { modulusLength: 2048 });
    const jwk = (key: KeyObject, kid: string) => ({
      ...key.export({ format: "jwk" }),
      kid,
      alg: "RS256",
      use: "sig",
    });
    const keys = [jwk(rsa.publicKey, "one")];
    let fetches = 0;
    const server: Server = createServer((_, response) => {
      fetches++;
      response.writeHead(200, { "content-type": "application/json" }).end(JSON.stringify({ keys }));
    }).listen(0, "127.0.0.1");
    await once(server, "listening");
    const jwksUrl = `http://127.0.0.1:${(server.address() as AddressInfo).port}/jwks.json`;
    const rules = { jwksUrl, issuer: ISSUER, audience: "ferry" };
    await using own = await Ferry.start({
      models: [stubModel([stub])],
      auth: { mode: "required", jwt: rules },
    });
    const ask = (kid: string, key: KeyObject, user = "j"): Promise<Answer> =>
      own.post({ input: kid }, { authorization: `Bearer ${jwt(claims(user), { kid }, key)}` });
    assert.equal((await ask("one", rsa.privateKey)).status, 200);
    const before = fetches;
    const forged = await Promise.all(
      Array.from({ length: 300 }, (_, at) => ask(`random ${at}`, second.privateKey)),
    );
    for (const answer of forged) assert.equal(answer.status, 401, answer.text);
    assert.ok(fetches - before <= 1, `${fetches - before} fetches`);

    server.close();
    server.closeAllConnections();
    for (const user of ["x", "y"]) {
      assert.equal((await ask("one", rsa.privateKey, user)).status, 200, "cached keys keep working");
    }
  });
});

describe("9 API keys", () => {
  test("9 the file holds digests and ids, no key; one that is changed is refused; revoked, it ends in time", async () => {
    const key = await newKey("nine");
    const stored = readFileSync(join(folder.path, "keys.json"), "utf8");
    assert.ok(!stored.includes(key) && !stored.includes(key.slice(20, 48)), "no secret is stored");
    await eventually(async () => (await post("nine", { "x-api-key": key })).status === 200);
    const at = 30;
    const other = key[at] === "a" ? "b" : "a";
    await refused({ "x-api-key": key.slice(0, at) + other + key.slice(at + 1) });
    await refused({ "x-api-key": `${key}0` });
    await refused({ "x-api-key": key.slice(0, -1) });
    const id = key.slice(8, 20);
    const { code, stderr } = await runFerry(["keys", "revoke", id, "-c", configFile]);
    assert.equal(code, 0, stderr);
    await eventually(async () => (await post("nine", { "x-api-key": key })).status === 401);
  });
  test("9 timing: no clock here could tell, so the source is asked: digests meet only in timingSafeEqual", () => {
    const source = readFileSync(join(ROOT, "src/gateway/admission/credentials.ts"), "utf8");
    assert.match(source, /timingSafeEqual\(digestOf\(/);
    assert.doesNotMatch(source, /digest[^\n]*(===|!==|\.equals\(|\.compare\()/);
  });
});

describe("tenants", () => {
  test("10 another tenant's task: 404, the same bytes as for an unknown id; DELETE too", async () => {
    const { task_id } = (await post("mine", as("ten-a"))).json;
    const read = async (id: string, user: string): Promise<string> => {
      const answer = await ferry.get(`/v1/result/${id}`, as(user));
      return `${answer.status} ${answer.text.replace(answer.json.request_id ?? "", "")}`;
    };
    assert.match(await read(task_id!, "ten-a"), /^200 /);
    const unknown = `${task_id!.slice(0, -4)}0000`;
    assert.equal(await read(task_id!, "ten-b"), await read(unknown, "ten-b"));
    assert.match(await read(task_id!, "ten-b"), /^404 /);
    assert.match(await read("nonsense", "ten-b"), /^404 /);
    await using client = await RawClient.connect(ferry.url);
    client.send(
      `DELETE /v1/result/${task_id} HTTP/1.1\r\nHost: f\r\nAuthorization: ${as("ten-b").authorization}\r\n\r\n`,
    );
    assertError(await client.answer(), 404, "NOT_FOUND");
    assert.match(await read(task_id!, "ten-a"), /^200 /, "and it is still there");
  });
  test("11 guessed ids: none is found, and each guess counts against the limit", async () => {
    const { task_id } = (await post("eleven", as("eleven-a"))).json;
    const statuses = new Set<number>();
    // Twice the limit and more: one of two minutes is over it, also when a new one begins in between.
    for (let at = 0; at < 2 * PER_MINUTE + 2 && !statuses.has(429); at++) {
      const guess = task_id!.slice(0, 30) + String(at).padStart(6, "0");
      statuses.add((await ferry.get(`/v1/result/${guess}`, as("eleven-b"))).status);
    }
    assert.deepEqual([...statuses], [404, 429]);
  });
  test("12 the same body from two tenants: run twice, two ids, never `cached`", async () => {
    const calls = stub.calls.length;
    const [a, b] = [await post("twelve", as("twelve-a")), await post("twelve", as("twelve-b"))];
    assert.notEqual(a.json.task_id, b.json.task_id);
    assert.deepEqual([a.json.metadata?.["cached"], b.json.metadata?.["cached"]], [false, false]);
    assert.equal(stub.calls.length, calls + 2);
    assert.equal(
      (await post("twelve", as("twelve-b"))).json.metadata?.["cached"],
      true,
      "but within a tenant",
    );
  });
  test("14 Idempotency-Key: other body → 422, > 255 → 400, twice → 400, another tenant's is another key", async () => {
    const keyed = (input: string, user: string, key: string) =>
      post(input, { ...as(user), "idempotency-key": key });
    const first = await keyed("one", "fourteen-a", "k");
    assert.equal((await keyed("one", "fourteen-a", "k")).json.task_id, first.json.task_id);
    assertError(await keyed("two", "fourteen-a", "k"), 422, "IDEMPOTENCY_CONFLICT");
    const other = await keyed("two", "fourteen-b", "k");
    assert.equal(other.status, 200);
    assert.notEqual(other.json.task_id, first.json.task_id);
    assertError(await keyed("one", "fourteen-a", "k".repeat(256)), 400, "INVALID_REQUEST");
  });
  test("15 mass assignment: tier, tenant, user, priority, deadline in the body or in headers", async () => {
    const { authorization } = as("fifteen");
    for (const field of ["tier", "tenant", "user", "priority", "gw", "deadline_ms", "admin", "cache"]) {
      assertError(
        await ferry.post({ input: 1, [field]: "enterprise" }, { authorization }),
        400,
        "INVALID_REQUEST",
      );
    }
    const forged = { authorization, "x-tier": "enterprise", "x-user": "ten-a", "x-ferry-tenant": "ten-a" };
    const { task_id } = (await post("fifteen", forged)).json;
    const story = await ferry.admin(`/internal/requests/${task_id}`, "GET", {
      authorization: `Bearer ${TOKEN}`,
    });
    assert.match(story.text, /"tenant":"fifteen".*"tier":"paid"/);
  });
  test("16 operators' routes: 404 on the public port; 401 with a user's credential on the admin's", async () => {
    for (const path of ["/internal/health", "/internal/dead-letters", "/internal/workers", "/metrics", "/"]) {
      assert.equal((await ferry.get(path, as("sixteen"))).status, 404, path);
    }
    for (const headers of [
      as("sixteen"),
      {},
      { authorization: `Bearer ${TOKEN}x` },
      { authorization: TOKEN },
    ]) {
      for (const path of ["/internal/health", "/internal/dead-letters", "/internal/workers", "/metrics"])
        assertError(await ferry.admin(path, "GET", headers), 401, "UNAUTHENTICATED");
    }
    const id = "0".repeat(36);
    assertError(
      await ferry.admin(`/internal/dead-letters/${id}/replay`, "POST", as("sixteen")),
      401,
      "UNAUTHENTICATED",
    );
    assertError(await ferry.admin(`/internal/dead-letters/${id}`, "DELETE", {}), 401, "UNAUTHENTICATED");
  });
  test("17 the next request of the minute → 429; keys, tokens and X-Forwarded-For are one bucket", async () => {
    const keys = [await newKey("seventeen"), await newKey("seventeen")];
    await eventually(async () => (await ferry.get("/v1/result/x", { "x-api-key": keys[1]! })).status === 404);
    const ways: Record<string, string>[] = [
      { "x-api-key": keys[0]! },
      { "x-api-key": keys[1]! },
      as("seventeen"),
    ];
    let limited: Answer | undefined;
    for (let at = 0; at < 2 * PER_MINUTE + 2 && limited === undefined; at++) {
      const answer = await post("seventeen", { ...ways[at % 3]!, "x-forwarded-for": `10.0.0.${at}` });
      if (answer.status !== 200) limited = answer;
    }
    assertError(limited!, 429, "RATE_LIMITED");
    assert.ok(Number(limited!.header("retry-after")) >= 1 && limited!.json.retry_after_ms! > 0);
    for (const way of ways) assert.equal((await post("again", way)).status, 429);
    assert.equal((await post("other", as("seventeen-b"))).status, 200, "nobody else is refused");
  });
});
