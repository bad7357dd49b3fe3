/** The issuer's keys: when they are fetched, and what happens when they cannot be. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { describe, test } from "node:test";
import { SystemClock } from "../../../src/app/clock.ts";
import { Jwks, type JwksOptions } from "../../../src/gateway/admission/jwks.ts";
import { VirtualClock } from "../../../src/cli/plan/virtual-clock.ts";
import { Events } from "../../../src/observe/events.ts";
import { codeOf, jwk, notices, rsaPair, START } from "./stage.ts";

const [one, two] = [rsaPair(), rsaPair()];
const set = (...keys: unknown[]): string => JSON.stringify({ keys });
const OPTIONS: JwksOptions = {
  url: "https://id.example/jwks?token=canary",
  algorithm: "RS256",
  cacheMs: 600_000,
  cooldownMs: 30_000,
  timeoutMs: 2000,
};

class Stage {
  readonly clock = new VirtualClock(START);
  readonly events = new Events();
  readonly notices = notices(this.events);
  readonly jwks: Jwks;
  answer: string | Error | undefined = set(jwk(one, "one"));
  fetches = 0;

  constructor(options: Partial<JwksOptions> = {}) {
    this.jwks = new Jwks({ ...OPTIONS, ...options }, this.clock, this.events, (_, signal) =>
      this.#answer(signal),
    );
  }

  later(ms: number): Promise<number> {
    return this.clock.run(this.clock.now() + ms);
  }

  #answer(signal: AbortSignal): Promise<string> {
    this.fetches++;
    const { answer } = this;
    if (typeof answer === "string") return Promise.resolve(answer);
    if (answer !== undefined) return Promise.reject(answer);
    return new Promise((_, reject) => {
      signal.addEventListener("abort", () => reject(signal.reason as Error));
    });
  }
}

describe("a key", () => {
  test("that is known is given at once, without a fetch", async () => {
    const stage = new Stage();
    await stage.jwks.open();
    const key = stage.jwks.find("one");
    assert.ok(key !== undefined && !(key instanceof Promise) && key.equals(one.publicKey));
    assert.equal(stage.fetches, 1);
  });

  test("that is new is seen with its first token, at the latest after the cooldown", async () => {
    const stage = new Stage();
    await stage.jwks.open();
    stage.answer = set(jwk(one, "one"), jwk(two, "two"));
    await stage.later(1000);
    assert.equal(await stage.jwks.find("two"), undefined);
    assert.equal(stage.fetches, 1);
    await stage.later(29_000);
    assert.ok((await stage.jwks.find("two"))!.equals(two.publicKey));
    assert.equal(stage.fetches, 2);
  });

  test("that is withdrawn is gone once the set was fetched again, which its use asks for", async () => {
    const stage = new Stage();
    await stage.jwks.open();
    stage.answer = set(jwk(two, "two"));
    await stage.later(600_000);
    assert.ok(stage.jwks.find("one") !== undefined);
    await stage.later(1);
    assert.equal(stage.fetches, 2);
    assert.equal(await stage.jwks.find("one"), undefined);
  });

  test("without a kid: only from a set of one", async () => {
    const stage = new Stage();
    await stage.jwks.open();
    assert.ok((await stage.jwks.find(undefined))!.equals(one.publicKey));
    stage.answer = set(jwk(one, "one"), jwk(two, "two"));
    await stage.later(600_000);
    await stage.jwks.find("three");
    assert.equal(await stage.jwks.find(undefined), undefined);
  });

  test("is looked up by its name and nothing else", async () => {
    const stage = new Stage();
    await stage.jwks.open();
    const kids = [
      "../../etc/passwd",
      "' OR 1=1 --",
      "https://evil.example/jwks",
      "__proto__",
      "constructor",
      "",
      "ONE",
    ];
    for (const kid of kids) assert.equal(await stage.jwks.find(kid), undefined, kid);
    assert.equal(stage.fetches, 1);
  });

  test("that does not fit, or is for something else, is left out", async () => {
    const stage = new Stage();
    const { kty, n, e } = one.publicKey.export({ format: "jwk" });
    stage.answer = set(
      { kty: "oct", k: "c2VjcmV0", kid: "secret" },
      { ...jwk(two, "encrypts"), use: "enc" },
      { ...jwk(two, "other"), alg: "RS512" },
      { ...jwk(two, "signs"), key_ops: ["sign"] },
      { kty: "EC", crv: "P-256", x: "AA", y: "AA", kid: "broken" },
      null,
      7,
      { kty, n, e, kid: "plain", alg: "RS256", key_ops: ["verify"] },
    );
    await stage.jwks.open();
    for (const kid of ["secret", "encrypts", "other", "signs", "broken"]) {
      assert.equal(await stage.jwks.find(kid), undefined, kid);
    }
    assert.ok((await stage.jwks.find("plain"))!.equals(one.publicKey));
  });
});

describe("the issuer is asked", () => {
  test("at most once per cooldown, whatever 10,000 tokens name", async () => {
    const stage = new Stage();
    await stage.jwks.open();
    const guess = (round: number): Promise<unknown> =>
      Promise.all(Array.from({ length: 10_000 }, async (_, at) => stage.jwks.find(`kid ${round} ${at}`)));
    await guess(0);
    assert.equal(stage.fetches, 1);
    await stage.later(30_000);
    await guess(1);
    assert.equal(stage.fetches, 2);
    await stage.later(29_999);
    await guess(2);
    assert.equal(stage.fetches, 2);
  });

  test("and not again while it is being asked; an answer that does not come is given up", async () => {
    const stage = new Stage();
    stage.answer = undefined;
    const opening = stage.jwks.open();
    const waiting = [codeOf(() => stage.jwks.find("one")), codeOf(() => stage.jwks.find("two"))];
    await stage.later(1999);
    assert.equal(stage.notices.length, 0);
    await stage.later(1);
    await opening;
    assert.deepEqual(await Promise.all(waiting), ["SERVICE_OVERLOADED", "SERVICE_OVERLOADED"]);
    assert.equal(stage.fetches, 1);
    assert.match(stage.notices[0]!.message, /no answer within 2000 ms; no token can be checked/);
  });
});

describe("an issuer that is away", () => {
  test("its keys go on working; that is said once, and once that it is over; never with the query", async () => {
    const stage = new Stage();
    await stage.jwks.open();
    for (const answer of [
      new Error("HTTP 500"),
      "<html>",
      "{}",
      "null",
      set(),
      set({ kty: "oct", k: "AA" }),
    ]) {
      stage.answer = answer;
      await stage.later(600_000);
      assert.ok(stage.jwks.find("one") !== undefined);
      await stage.later(1);
    }
    assert.equal(stage.fetches, 7);
    stage.answer = set(jwk(one, "one"));
    await stage.later(30_000);
    void stage.jwks.find("one");
    await stage.later(1);
    assert.deepEqual(
      stage.notices.map(({ level, message }) => `${level} ${message}`),
      [
        "warn the keys of https://id.example/jwks cannot be fetched: HTTP 500; those from before stay in force",
        "info the keys of https://id.example/jwks could be fetched again",
      ],
    );
  });

  test("from the start: 503 until it answers, then all is well", async () => {
    const stage = new Stage();
    stage.answer = new Error("HTTP 503");
    await stage.jwks.open();
    assert.equal(await codeOf(() => stage.jwks.find("one")), "SERVICE_OVERLOADED");
    stage.answer = set(jwk(one, "one"));
    await stage.later(30_000);
    assert.ok((await stage.jwks.find("one"))!.equals(one.publicKey));
  });
});

describe("a real fetch", () => {
  type Behave = (request: IncomingMessage, response: ServerResponse) => void;

  async function fetched(behave: Behave, timeoutMs = 5000): Promise<{ found: string; said: string }> {
    const server = createServer(behave).listen(0, "127.0.0.1");
    await once(server, "listening");
    const events = new Events();
    const said = notices(events);
    const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}/jwks`;
    const jwks = new Jwks({ ...OPTIONS, url, timeoutMs }, new SystemClock(), events);
    await jwks.open();
    const found = await codeOf(() => jwks.find("one"));
    jwks.close();
    server.closeAllConnections();
    server.close();
    await once(server, "close");
    return { found, said: said.map(({ message }) => message).join("\n") };
  }

  test("reads a set", async () => {
    assert.deepEqual(await fetched((_, response) => response.end(set(jwk(one, "one")))), {
      found: "none",
      said: "",
    });
  });

  test("follows no redirect", async () => {
    let asked = 0;
    const { found, said } = await fetched((request, response) => {
      asked++;
      if (request.url === "/jwks") response.writeHead(302, { location: "/other" }).end();
      else response.end(set(jwk(one, "one")));
    });
    assert.equal(found, "SERVICE_OVERLOADED");
    assert.match(said, /it redirects, which is not followed/);
    assert.equal(asked, 1);
  });

  test("takes no other status, no endless answer, no silence", async () => {
    const status = await fetched((_, response) => response.writeHead(404).end(set(jwk(one, "one"))));
    assert.match(status.said, /HTTP 404/);
    const long = await fetched((_, response) => {
      const more = (): void => {
        while (!response.destroyed && response.write("x".repeat(65_536)));
      };
      response.on("drain", more);
      more();
    });
    assert.match(long.said, /larger than 524288 bytes/);
    const silent = await fetched(() => {}, 100);
    assert.match(silent.said, /no answer within 100 ms/);
    const drips = await fetched((_, response) => void response.write('{"keys":['), 100);
    assert.match(drips.said, /no answer within 100 ms/);
  });

  test("says what kept it from the issuer", async () => {
    const events = new Events();
    const said = notices(events);
    const jwks = new Jwks({ ...OPTIONS, url: "http://127.0.0.1:1/jwks" }, new SystemClock(), events);
    await jwks.open();
    assert.match(said[0]!.message, /the keys of http:\/\/127\.0\.0\.1:1\/jwks cannot be fetched: /);
  });
});
