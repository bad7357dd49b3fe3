/** Tokens, good and forged; on virtual time, with real keys. */
import assert from "node:assert/strict";
import { createHmac, generateKeyPairSync, sign } from "node:crypto";
import { describe, test } from "node:test";
import { Credentials } from "../../../src/gateway/admission/credentials.ts";
import { fits, readPem, type TokenRules, Tokens } from "../../../src/gateway/admission/tokens.ts";
import { VirtualClock } from "../../../src/cli/plan/virtual-clock.ts";
import {
  claims,
  codeOf,
  FakeStore,
  type Fields,
  makeKey,
  pem,
  rsaPair,
  SECRET,
  START,
  TIERS,
  token,
  unsigned,
} from "./stage.ts";

const issuer = rsaPair();
const stranger = rsaPair();
const RULES: TokenRules = {
  algorithm: "RS256",
  issuer: "https://id.example",
  audience: "ferry",
  userClaim: "sub",
  tierClaim: "tier",
  skewMs: 60_000,
  maxLifeMs: 24 * 3_600_000,
};
const HOUR = 3600;
const NOW = START / 1000;

class Stage {
  readonly clock = new VirtualClock(START);
  readonly paid = makeKey("u1", "paid");
  readonly credentials: Credentials;
  found = 0;

  constructor(rules: Partial<TokenRules> = {}, key = issuer.publicKey) {
    const keys = {
      find: () => {
        this.found++;
        return key;
      },
      close: () => {},
    };
    this.credentials = new Credentials(
      { tiers: TIERS },
      {
        keys: { store: new FakeStore(this.paid), secret: SECRET },
        tokens: (callerOf) => new Tokens({ ...RULES, ...rules }, keys, this.clock, callerOf),
      },
    );
  }

  show(text: string) {
    return this.credentials.identify(`Bearer ${text}`, undefined);
  }

  code(text: string): Promise<string> {
    return codeOf(() => this.show(text));
  }
}

const good = (more: Fields = {}, header: Fields = {}): string => token(issuer, claims(START, more), header);

describe("a good token", () => {
  test("names user and tier; the second time at once, and it is the same caller", async () => {
    const stage = new Stage();
    const text = good();
    const first = stage.show(text);
    assert.ok(first instanceof Promise);
    assert.deepEqual(await first, { tenant: "u1", tier: 1 });
    assert.equal(stage.show(text), await first);
    assert.deepEqual(stage.credentials.identify(undefined, text), await first);
    assert.equal(stage.found, 1);
  });

  test("and a key of the same user are one tenant", async () => {
    const stage = new Stage();
    assert.deepEqual(await stage.show(good()), stage.show(stage.paid.key));
  });

  test("is remembered for a minute, then checked again; never past its end and the skew", async () => {
    const stage = new Stage();
    const [long, short] = [good(), good({ exp: NOW - 30 })];
    await stage.show(long);
    await stage.show(short);
    await stage.clock.run(START + 29_000);
    assert.ok(!(stage.show(short) instanceof Promise));
    await stage.clock.run(START + 30_000);
    assert.equal(await stage.code(short), "UNAUTHENTICATED");
    await stage.clock.run(START + 59_999);
    assert.ok(!(stage.show(long) instanceof Promise));
    await stage.clock.run(START + 60_000);
    assert.ok(stage.show(long) instanceof Promise);
  });

  test("is held against the machine's clock as it is now, whatever it was at the start", async () => {
    const stage = new Stage();
    const [old, fresh] = [good(), good({ nbf: NOW + 10 * HOUR, exp: NOW + 11 * HOUR })];
    await stage.show(old);
    assert.equal(await stage.code(fresh), "UNAUTHENTICATED");
    // The machine slept for ten hours, or its clock was put right.
    stage.clock.setMs = 10 * HOUR * 1000;
    await stage.clock.run(START + 60_000);
    assert.equal(await stage.code(old), "UNAUTHENTICATED");
    assert.equal((await stage.show(fresh)).tenant, "u1");
  });

  test("may have its claims elsewhere, a list of audiences, and a default tier", async () => {
    const stage = new Stage({ userClaim: "email", tierClaim: "https://x/plan", defaultTier: "free" });
    const text = good({ email: "a@b", "https://x/plan": "enterprise", aud: ["other", "ferry"] });
    assert.deepEqual(await stage.show(text), { tenant: "a@b", tier: 0 });
    assert.deepEqual(await stage.show(good({ email: "a@b" })), { tenant: "a@b", tier: 2 });
  });

  test("in every algorithm that can be configured", async () => {
    const ec = (namedCurve: string) => generateKeyPairSync("ec", { namedCurve });
    const pairs = [
      ["ES256", ec("P-256"), "sha256"],
      ["ES384", ec("P-384"), "sha384"],
      ["ES512", ec("P-521"), "sha512"],
      ["EdDSA", generateKeyPairSync("ed25519"), undefined],
    ] as const;
    for (const [algorithm, { publicKey, privateKey }, hash] of pairs) {
      const body = unsigned({ alg: algorithm }, claims(START));
      const signature = sign(hash, Buffer.from(body), { key: privateKey, dsaEncoding: "ieee-p1363" });
      const text = `${body}.${signature.toString("base64url")}`;
      assert.deepEqual(
        await new Stage({ algorithm }, publicKey).show(text),
        { tenant: "u1", tier: 1 },
        algorithm,
      );
      assert.equal(await new Stage().code(text), "UNAUTHENTICATED", algorithm);
    }
  });
});

describe("401", () => {
  const hs256 = (header: Fields): string => {
    const body = unsigned(header, claims(START));
    return `${body}.${createHmac("sha256", pem(issuer)).update(body).digest("base64url")}`;
  };
  const parts = good().split(".");
  const flipped = (part: string): string => (part.startsWith("A") ? "B" : "A") + part.slice(1);
  const forged: [what: string, text: string][] = [
    ["alg none, no signature", `${unsigned({ alg: "none" }, claims(START))}.`],
    ["alg None", `${unsigned({ alg: "None" }, claims(START))}.AA`],
    ["alg NONE with our signature", good({}, { alg: "NONE" })],
    ["alg empty", good({}, { alg: "" })],
    ["alg missing", good({}, { alg: undefined })],
    ["alg a list", good({}, { alg: ["RS256"] })],
    ["empty signature", `${parts[0]}.${parts[1]}.`],
    ["no signature part", `${parts[0]}.${parts[1]}`],
    ["HS256 with the public key as its secret", hs256({ alg: "HS256" })],
    ["the same, called RS256", hs256({ alg: "RS256" })],
    ["PS256 said, RS256 signed", good({}, { alg: "PS256" })],
    ["RS512 said, RS256 signed", good({}, { alg: "RS512" })],
    ["signed by a stranger", token(stranger, claims(START))],
    ["signature changed", `${parts[0]}.${parts[1]}.${flipped(parts[2]!)}`],
    [
      "payload changed",
      `${parts[0]}.${unsigned({}, claims(START, { sub: "admin" })).split(".")[1]}.${parts[2]}`,
    ],
    [
      "jwk in the header, signed by it",
      token(stranger, claims(START), { jwk: stranger.publicKey.export({ format: "jwk" }) }),
    ],
    ["crit", good({}, { crit: ["exp"] })],
    ["crit with b64", good({}, { crit: ["b64"], b64: false })],
    ["typ of another purpose", good({}, { typ: "logout+jwt" })],
    ["typ no text", good({}, { typ: 7 })],
    ["kid no text", good({}, { kid: { a: 1 } })],
    ["longer than 8 KiB", good({ more: "x".repeat(8192) })],
    ["a JWE's five parts", "a.b.c.d.e"],
    ["no JSON", `${Buffer.from("{").toString("base64url")}.${parts[1]}.${parts[2]}`],
    ["nonsense", "ä.ö.ü"],
    ["expired 61 s ago", good({ exp: NOW - 61 })],
    ["not before 61 s from now", good({ nbf: NOW + 61 })],
    ["without exp", good({ exp: undefined })],
    ["exp no number", good({ exp: "tomorrow" })],
    ["good for longer than a day and the skew", good({ exp: NOW + 24 * HOUR + 61 })],
    ["good for ever", good({ exp: 1e300 })],
    ["another issuer", good({ iss: "https://id.example.evil" })],
    ["without issuer", good({ iss: undefined })],
    ["issuer a list", good({ iss: ["https://id.example"] })],
    ["another audience", good({ aud: "other" })],
    ["without audience", good({ aud: undefined })],
    ["audiences that only contain ours", good({ aud: ["ferry2", "xferry"] })],
    ["without user", good({ sub: undefined })],
    ["user empty", good({ sub: "" })],
    ["user too long", good({ sub: "x".repeat(256) })],
    ["user with a line break", good({ sub: "a\nb" })],
    ["user with half a surrogate pair", good({ sub: "a\ud800" })],
    ["user no text", good({ sub: 7 })],
    ["user from the prototype", good({ sub: undefined, ["__proto__"]: { sub: "admin" } })],
  ];
  for (const [what, text] of forged) {
    test(what, async () => assert.equal(await new Stage().code(text), "UNAUTHENTICATED"));
  }

  test("at the edges of the skew it is good", async () => {
    for (const edge of [
      { exp: NOW - 59 },
      { nbf: NOW + 60 },
      { exp: NOW + 24 * HOUR + 60 },
      { iat: NOW + HOUR },
    ]) {
      assert.equal(await new Stage().code(good(edge)), "none", JSON.stringify(edge));
    }
  });

  test("jku and x5u beside our signature are not looked at", async () => {
    const header = { jku: "http://127.0.0.1:1/keys", x5u: "http://127.0.0.1:1/cert", typ: "at+jwt" };
    assert.equal(await new Stage().code(good({}, header)), "none");
  });

  test("nothing that was refused is remembered", async () => {
    const stage = new Stage();
    const text = good({ nbf: NOW + 70 });
    assert.equal(await stage.code(text), "UNAUTHENTICATED");
    await stage.clock.run(START + 20_000);
    assert.equal(await stage.code(text), "none");
  });
});

test("403: a tier that is not configured, none, or no text; never another's", async () => {
  for (const tier of ["gold", undefined, 1, ["paid"], "__proto__", "constructor"]) {
    assert.equal(await new Stage().code(good({ tier })), "FORBIDDEN", String(tier));
  }
});

describe("a public key", () => {
  test("is taken as SPKI or as a certificate's; a private key is refused", () => {
    assert.ok(fits(readPem(pem(issuer), "RS256"), "RS256"));
    const secret = issuer.privateKey.export({ type: "pkcs8", format: "pem" });
    assert.throws(() => readPem(secret, "RS256"), /holds a private key/);
    assert.throws(() => readPem("hello", "RS256"), /no public key in PEM/);
  });

  test("that the algorithm cannot use is refused when it is read", () => {
    const short = generateKeyPairSync("rsa", { modulusLength: 1024 });
    assert.throws(() => readPem(pem(short), "RS256"), /rsa of 1024 bits\) cannot be used with RS256/);
    assert.throws(() => readPem(pem(issuer), "ES256"), /cannot be used with ES256/);
    const curve = generateKeyPairSync("ec", { namedCurve: "P-384" });
    assert.throws(() => readPem(pem(curve), "ES256"), /\(ec\) cannot be used with ES256/);
  });
});
