/** Who may enter: keys and tokens at a whole Ferry with a keys file. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { readFile } from "node:fs/promises";
import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { join } from "node:path";
import { after, before, beforeEach, describe, test } from "node:test";
import { claims, jwk, pem, rsaPair, token } from "../gateway/admission/stage.ts";
import {
  Answer,
  assertError,
  eventually,
  Ferry,
  Folder,
  runFerry,
  writeConfig,
  type Config,
  type Headers,
} from "./harness.ts";
import { postHead, RawClient } from "./raw-client.ts";
import { echo, stubModel, StubWorker } from "./stub-worker.ts";

const JWT = { issuer: "https://id.example", audience: "ferry" };
const bearer = (text: string): Headers => ({ authorization: `Bearer ${text}` });
const issuer = rsaPair();
const tokenOf = (more = {}, header = {}) => token(issuer, claims(Date.now(), more), header);

/** Makes a key as an operator does, with the config that is in the folder. */
async function createKey(folder: Folder, user: string, tier: string): Promise<string> {
  const made = await runFerry([
    "keys",
    "create",
    "--user",
    user,
    "--tier",
    tier,
    "-c",
    `${folder.path}/ferry.yaml`,
  ]);
  assert.equal(made.code, 0, made.stderr);
  return made.stdout.trim();
}

async function revokeKey(folder: Folder, key: string): Promise<void> {
  const done = await runFerry(["keys", "revoke", key, "-c", `${folder.path}/ferry.yaml`]);
  assert.equal(done.code, 0, done.stderr);
}

/** The body without what differs between any two answers. */
function plain({ text }: { readonly text: string }): string {
  return text.replace(/"request_id":"[^"]+"/, '"request_id":""');
}

describe("keys and tokens", () => {
  let folder: Folder;
  let stub: StubWorker;
  let ferry: Ferry;
  let [a, b, free] = ["", "", ""];

  before(async () => {
    folder = await Folder.make();
    stub = await StubWorker.listen();
    await folder.write("jwt.pem", pem(issuer));
    const config = {
      models: [stubModel([stub])],
      auth: {
        mode: "required",
        keysFile: "./keys.json",
        jwt: { ...JWT, publicKeyFile: "./jwt.pem" },
      },
      limits: { perUserPerMinute: 10_000 },
      admin: { listen: "127.0.0.1:0", token: "the-token-of-the-admin-listener" },
    };
    await writeConfig(folder, config);
    [a, b, free] = await Promise.all([
      createKey(folder, "a", "paid"),
      createKey(folder, "b", "paid"),
      createKey(folder, "a", "free"),
    ]);
    ferry = await Ferry.start(config, folder);
  });
  after(async () => {
    await ferry?.[Symbol.asyncDispose]();
    await stub?.[Symbol.asyncDispose]();
    await folder?.[Symbol.asyncDispose]();
  });
  beforeEach(() => {
    stub.behave = echo;
    stub.calls.length = 0;
  });

  test("without a good credential every route is the same 401, but for health and openapi", async () => {
    const bad: Headers[] = [
      {},
      bearer("x"),
      bearer(`${a.slice(0, -1)}_`),
      { authorization: `Basic ${a}` },
      { ...bearer(a), "x-api-key": b },
      bearer(token(rsaPair(), claims(Date.now()))),
      bearer(tokenOf({ aud: "other" })),
      bearer(tokenOf({ exp: Math.floor(Date.now() / 1000) - 61 })),
    ];
    const id = "0".repeat(36);
    const bodies = new Set<string>();
    for (const headers of bad) {
      const answers = await Promise.all([
        ferry.post({ input: 1 }, headers),
        ferry.post({ input: "1" }, headers, "/api/inference"),
        ferry.get(`/v1/result/${id}`, headers),
        ferry.delete(`/v1/result/${id}`, headers),
      ]);
      for (const answer of answers) {
        assertError(answer, 401, "UNAUTHENTICATED");
        assert.equal(answer.header("www-authenticate"), "Bearer");
        bodies.add(plain(answer));
      }
    }
    assert.equal(bodies.size, 1);
    for (const path of ["/healthz", "/readyz", "/openapi.json"])
      assert.equal((await ferry.get(path)).status, 200);
    assert.equal(stub.calls.length, 0);
  });

  test("401 comes before the body: not asked for, not waited for", async () => {
    await using client = await RawClient.connect(ferry.url);
    client.send(postHead(1000, "Expect: 100-continue"));
    const first = await client.answer();
    assert.equal(first.status, 401);
    assert.equal(first.headers["connection"], "close");
    assert.deepEqual(client.interims, []);
    const body = '{"input":"continued"}';
    await using other = await RawClient.connect(ferry.url);
    other.send(postHead(body.length, `Authorization: Bearer ${a}`, "Expect: 100-continue"));
    other.send(body);
    assert.equal((await other.answer()).status, 200);
    assert.deepEqual(other.interims, [100]);
    await using slow = await RawClient.connect(ferry.url);
    slow.send(`${postHead(1000)}{`);
    assert.equal((await slow.answer()).status, 401);
  });

  test("a key and a token let in, by either header", async () => {
    const jwt = tokenOf({ sub: "a" });
    for (const headers of [
      bearer(a),
      { "x-api-key": a },
      bearer(jwt),
      bearer(jwt),
      { ...bearer(a), "x-api-key": a },
    ]) {
      const answer = await ferry.post({ input: "hello" }, headers);
      assert.equal(answer.status, 200, answer.text);
    }
  });

  test("forged tokens are refused, and nobody is called for their sake", async () => {
    let calls = 0;
    const lure = createServer((_, response) => {
      calls++;
      response.end(JSON.stringify({ keys: [jwk(thief, "thief")] }));
    }).listen(0, "127.0.0.1");
    lure.on("connection", () => calls++);
    await once(lure, "listening");
    const thief = rsaPair();
    const url = `http://127.0.0.1:${(lure.address() as AddressInfo).port}/keys`;
    const own = thief.publicKey.export({ format: "jwk" });
    for (const header of [
      { jku: url, kid: "thief" },
      { x5u: url },
      { jwk: own },
      { kid: url },
      { kid: "../../etc/passwd" },
    ]) {
      assertError(
        await ferry.post({ input: 1 }, bearer(token(thief, claims(Date.now()), header))),
        401,
        "UNAUTHENTICATED",
      );
    }
    assert.equal(calls, 0);
    lure.close();
    await once(lure, "close");
  });

  test("a tier that is not configured is 403", async () => {
    assertError(await ferry.post({ input: 1 }, bearer(tokenOf({ tier: "gold" }))), 403, "FORBIDDEN");
    assertError(await ferry.post({ input: 1 }, bearer(tokenOf({ tier: undefined }))), 403, "FORBIDDEN");
  });

  test("the tier is the credential's, whatever body and headers say", async () => {
    const body = { input: "tier", tier: "enterprise" };
    assert.match(
      assertError(await ferry.post(body, bearer(free)), 400, "INVALID_REQUEST").message!,
      /unknown field "tier"/,
    );
    for (const field of ["tenant", "priority", "user", "deadline"]) {
      assertError(await ferry.post({ input: 1, [field]: 1 }, bearer(free)), 400, "INVALID_REQUEST");
    }
    const id = await ferry.accept(
      { input: "tier?" },
      { ...bearer(free), "x-tier": "enterprise", tier: "enterprise" },
    );
    const story = await ferry.admin(
      `/internal/requests/${id}`,
      "GET",
      bearer("the-token-of-the-admin-listener"),
    );
    assert.match(story.text, /"tenant":"a","model":"stub","tier":"free"/);
  });

  test("the same body from two users runs twice, the same Idempotency-Key is two keys", async () => {
    const key = { "idempotency-key": "one" };
    const one = await ferry.post({ input: "shared?" }, { ...bearer(a), ...key });
    const two = await ferry.post({ input: "shared?" }, { ...bearer(b), ...key });
    const again = await ferry.post({ input: "shared?" }, { ...bearer(b), ...key });
    assert.deepEqual([one.status, two.status], [200, 200]);
    assert.notEqual(one.json.task_id, two.json.task_id);
    assert.equal(again.json.task_id, two.json.task_id);
    assert.equal(two.json.metadata!["cached"], false);
    assert.equal(stub.inputs.filter((input) => input === "shared?").length, 2);
    assert.equal(
      (await ferry.post({ input: "other" }, { ...bearer(a), "idempotency-key": "two" })).status,
      200,
    );
    assert.equal(
      (await ferry.post({ input: "another" }, { ...bearer(b), "idempotency-key": "two" })).status,
      200,
    );
  });

  test("somebody else's task looks exactly like one that never was", async () => {
    const id = await ferry.accept({ input: "mine" }, bearer(a));
    await eventually(async () => (await ferry.get(`/v1/result/${id}`, bearer(a))).json.status === "SUCCESS");
    const unknown = id.slice(0, 10) + "0".repeat(26);
    const shapes = async (ask: (id: string) => Promise<Answer>): Promise<string[]> =>
      Promise.all(
        [id, unknown].map(async (each) => {
          const answer = await ask(each);
          assert.equal(answer.status, 404);
          const { date: _, "ratelimit-remaining": _left, ...headers } = answer.headers;
          return JSON.stringify([headers, plain(answer)]);
        }),
      );
    const asks: ((id: string) => Promise<Answer>)[] = [
      (each) => ferry.get(`/v1/result/${each}`, bearer(b)),
      (each) => ferry.get(`/v1/result/${each}?wait=1`, bearer(b)),
      (each) => ferry.delete(`/v1/result/${each}`, bearer(b)),
    ];
    for (const ask of asks) {
      const [foreign, none] = await shapes(ask);
      assert.equal(foreign, none);
    }
    assert.equal((await ferry.get(`/v1/result/${id}`, bearer(free))).json.status, "SUCCESS");
  });

  test("a key that is made works soon, one that is revoked soon no longer; the others stay", async () => {
    // Another process on the same machine may use the same file.
    const text = await readFile(join(folder.path, "ferry.yaml"), "utf8");
    await using other = await Ferry.start(JSON.parse(text) as Config, folder);
    const both = async (key: string, status: number): Promise<boolean> => {
      const answers = await Promise.all([ferry, other].map((each) => each.post({ input: 1 }, bearer(key))));
      return answers.every((answer) => answer.status === status);
    };
    const key = await createKey(folder, "c", "paid");
    await eventually(() => both(key, 200));
    await revokeKey(folder, key);
    await eventually(() => both(key, 401));
    assert.equal((await ferry.post({ input: 1 }, bearer(a))).status, 200);
  });

  test("the admin listener has its own token, which is good nowhere else", async () => {
    const shut = await Promise.all(
      ["", a, tokenOf(), "x"].map((each) => ferry.admin("/internal/health", "GET", bearer(each))),
    );
    for (const answer of shut) {
      assertError(answer, 401, "UNAUTHENTICATED");
      assert.equal(answer.header("www-authenticate"), "Bearer");
    }
    const ours = bearer("the-token-of-the-admin-listener");
    assert.equal((await ferry.admin("/internal/health", "GET", ours)).status, 200);
    assertError(await ferry.post({ input: 1 }, ours), 401, "UNAUTHENTICATED");
    const inside = [
      "/metrics",
      "/internal/health",
      "/internal/workers",
      "/internal/dead-letters",
      `/internal/requests/${"0".repeat(36)}`,
    ];
    for (const path of inside) {
      assertError(await ferry.get(path, ours), 404, "NOT_FOUND");
      assertError(await ferry.get(path, bearer(a)), 404, "NOT_FOUND");
    }
  });

  test("openapi.json names the ways to show a credential", async () => {
    const document = JSON.parse((await ferry.get("/openapi.json")).text) as {
      components: { securitySchemes: object };
      security: unknown;
      paths: unknown;
    };
    assert.deepEqual(Object.keys(document.components.securitySchemes), ["bearer", "apiKey"]);
    assert.deepEqual(document.security, [{ bearer: [] }, { apiKey: [] }]);
    assert.match(JSON.stringify(document.paths), /"401"/);
  });

  test("nothing that was said holds a credential", () => {
    for (const secret of [a, b, free, "the-token-of-the-admin-listener"])
      assert.ok(!ferry.stderr().includes(secret));
  });
});

test("one limit for all credentials of a user, guesses at task ids included; not for others", async () => {
  await using folder = await Folder.make();
  await using stub = await StubWorker.listen();
  await folder.write("jwt.pem", pem(issuer));
  const config = {
    models: [stubModel([stub])],
    auth: { mode: "required", keysFile: "./keys.json", jwt: { ...JWT, publicKeyFile: "./jwt.pem" } },
    limits: { perUserPerMinute: 6 },
  };
  await writeConfig(folder, config);
  const [one, two, other] = [
    await createKey(folder, "a", "paid"),
    await createKey(folder, "a", "free"),
    await createKey(folder, "b", "paid"),
  ];
  await using ferry = await Ferry.start(config, folder);
  const shown = [one, two, tokenOf({ sub: "a" }), one];
  for (const [at, text] of shown.entries()) {
    const answer = await ferry.post({ input: at }, { ...bearer(text), "x-forwarded-for": `10.0.0.${at}` });
    assert.equal(answer.status, 200, answer.text);
    assert.equal(answer.header("ratelimit-remaining"), String(5 - at));
  }
  const guess = `/v1/result/${"0".repeat(36)}`;
  assertError(await ferry.get(guess, bearer(one)), 404, "NOT_FOUND");
  assertError(await ferry.delete(guess, bearer(one)), 404, "NOT_FOUND");
  const told = await ferry.get(guess, bearer(two));
  assertError(told, 429, "RATE_LIMITED");
  assert.ok(Number(told.header("retry-after")) >= 1);
  for (const text of shown) assertError(await ferry.post({ input: 9 }, bearer(text)), 429, "RATE_LIMITED");
  assert.equal((await ferry.post({ input: 1 }, bearer(other))).status, 200);
});

describe("an issuer with a JWKS URL", () => {
  async function listen(behave: () => string | undefined): Promise<{ server: Server; url: string }> {
    const server = createServer((_, response) => {
      const text = behave();
      response.writeHead(text === undefined ? 500 : 200).end(text);
    }).listen(0, "127.0.0.1");
    await once(server, "listening");
    return { server, url: `http://127.0.0.1:${(server.address() as AddressInfo).port}/jwks` };
  }

  test("its keys outlive it, and random kids ask it for nothing", async () => {
    let fetches = 0;
    const { server, url } = await listen(() => {
      fetches++;
      return JSON.stringify({ keys: [jwk(issuer, "1")] });
    });
    const model = { name: "m", backend: { kind: "simulated", baseMs: 1 } };
    const jwt = { ...JWT, jwksUrl: url };
    await using ferry = await Ferry.start({ models: [model], auth: { mode: "required", jwt } });
    const startedAt = performance.now();
    const status = async (text: string): Promise<number> =>
      (await ferry.post({ input: 1 }, bearer(text))).status;
    assert.equal(await status(tokenOf({}, { kid: "1" })), 200);
    for (let round = 0; round < 10; round++) {
      const codes = await Promise.all(
        Array.from({ length: 20 }, (_, at) => status(tokenOf({}, { kid: `${round} ${at}` }))),
      );
      assert.ok(codes.every((code) => code === 401));
    }
    // The first at the start, and one every half minute.
    assert.ok(fetches <= 2 + (performance.now() - startedAt) / 30_000, String(fetches));
    server.close();
    server.closeAllConnections();
    assert.equal(await status(tokenOf({ jti: "last" }, { kid: "1" })), 200);
  });
});
