import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { describe, test } from "node:test";
import { newApiKey } from "../../../src/gateway/admission/api-keys.ts";
import { Credentials } from "../../../src/gateway/admission/credentials.ts";
import { Refusal } from "../../../src/core/errors.ts";
import { codeOf, FakeStore, makeKey, SECRET, TIERS } from "./stage.ts";

const paid = makeKey("u1", "paid");

function withStore(store: FakeStore): Credentials {
  return new Credentials({ tiers: TIERS }, { keys: { store, secret: SECRET } });
}

function refusal(act: () => unknown): Refusal {
  try {
    act();
  } catch (error) {
    if (error instanceof Refusal) return error;
    throw error;
  }
  throw new Error("it was let in");
}

describe("without auth", () => {
  test("everybody is anonymous, in the configured tier, whatever they show", () => {
    const credentials = new Credentials({ tiers: TIERS, anonymousTier: "paid" });
    assert.equal(credentials.required, false);
    for (const shown of [undefined, "Bearer x", "Basic eDp5", "nonsense"]) {
      assert.deepEqual(credentials.identify(shown, shown), { tenant: "anonymous", tier: 1 });
    }
  });
});

describe("a key", () => {
  test("is taken from Authorization or from x-api-key, at once", () => {
    const credentials = withStore(new FakeStore(paid));
    const expected = { tenant: "u1", tier: 1 };
    for (const scheme of ["Bearer", "bearer", "BEARER"]) {
      assert.deepEqual(credentials.identify(`${scheme} ${paid.key}`, undefined), expected);
    }
    assert.deepEqual(credentials.identify(undefined, paid.key), expected);
    assert.deepEqual(credentials.identify(`Bearer ${paid.key}`, paid.key), expected);
  });

  test("gives the very same caller each time: nothing is made anew", () => {
    const credentials = withStore(new FakeStore(paid));
    const first = credentials.identify(undefined, paid.key);
    assert.equal(credentials.identify(undefined, paid.key), first);
    assert.equal(credentials.identify(`Bearer ${paid.key}`, undefined), first);
  });

  test("works no longer once its record is gone, also when it was proven before", () => {
    const store = new FakeStore(paid);
    const credentials = withStore(store);
    void credentials.identify(undefined, paid.key);
    store.records.clear();
    assert.equal(refusal(() => credentials.identify(undefined, paid.key)).code, "UNAUTHENTICATED");
  });

  test("of a tier that is not configured is 403, and 401 when it is wrong as well", () => {
    const gold = makeKey("u1", "gold");
    const credentials = withStore(new FakeStore(gold));
    assert.equal(refusal(() => credentials.identify(undefined, gold.key)).code, "FORBIDDEN");
    const other = withStore(new FakeStore({ ...gold, record: { ...gold.record, digest: Buffer.alloc(32) } }));
    assert.equal(refusal(() => other.identify(undefined, gold.key)).code, "UNAUTHENTICATED");
  });

  test("made with another secret does not work", () => {
    const other = makeKey("u1", "paid", "another secret of 32 characters!!");
    assert.equal(
      refusal(() => withStore(new FakeStore(other)).identify(undefined, other.key)).code,
      "UNAUTHENTICATED",
    );
  });

  test("made with another secret is told to the operator, once, and only by who has a whole key", () => {
    const told: string[] = [];
    const other = makeKey("u1", "paid", "another secret of 32 characters!!");
    const keys = { store: new FakeStore(other), secret: SECRET, otherSecret: (id: string) => told.push(id) };
    const credentials = new Credentials({ tiers: TIERS }, { keys });
    for (const key of [`${other.key.slice(0, -1)}!`, other.key, other.key]) {
      refusal(() => credentials.identify(undefined, key));
    }
    assert.deepEqual(told, [other.record.id]);
  });

  test("a store that has to ask gives a promise, and its refusals come through", async () => {
    const store = new FakeStore(paid);
    store.get = (id) => Promise.resolve(store.records.get(id));
    const credentials = withStore(store);
    assert.deepEqual(await credentials.identify(undefined, paid.key), { tenant: "u1", tier: 1 });
    assert.equal(
      await codeOf(() => credentials.identify(undefined, newApiKey(randomBytes))),
      "UNAUTHENTICATED",
    );
    store.get = () => Promise.reject(new Refusal("SERVICE_OVERLOADED", "away"));
    assert.equal(await codeOf(() => credentials.identify(undefined, paid.key)), "SERVICE_OVERLOADED");
  });
});

describe("401", () => {
  const { key } = paid;
  const stranger = newApiKey(randomBytes);
  const mistyped = key.slice(0, -1) + (key.endsWith("0") ? "1" : "0");
  const cases: [what: string, authorization: string | undefined, apiKey: string | undefined][] = [
    ["nothing", undefined, undefined],
    ["empty", "", ""],
    ["a scheme alone", "Bearer", undefined],
    ["a scheme and blanks", "Bearer   ", undefined],
    ["another scheme", `Basic ${key}`, undefined],
    ["no scheme", key, undefined],
    ["two words", `Bearer ${key} ${key}`, undefined],
    ["a comma and another", `Bearer ${key}, Bearer ${key}`, undefined],
    ["two that differ", `Bearer ${key}`, stranger],
    ["a good one beside an empty one", `Bearer ${key}`, ""],
    ["mistyped", `Bearer ${mistyped}`, undefined],
    ["cut off", `Bearer ${key.slice(0, -1)}`, undefined],
    ["unknown", `Bearer ${stranger}`, undefined],
    ["a token, where none are taken", "Bearer a.b.c", undefined],
  ];

  test("is the same whatever was wrong", () => {
    const credentials = withStore(new FakeStore(paid));
    const messages = cases.map(([what, authorization, apiKey]) => {
      const { code, status, message } = refusal(() => credentials.identify(authorization, apiKey));
      assert.deepEqual([code, status], ["UNAUTHENTICATED", 401], what);
      return message;
    });
    assert.equal(new Set(messages).size, 1);
    assert.ok(!messages[0]!.includes(key.slice(8, 20)));
  });

  test("a typo, or a key that somebody made up without its checksum, is not looked up", () => {
    const store = new FakeStore(paid);
    const credentials = withStore(store);
    for (const shown of [mistyped, key.slice(0, -1), `${key.slice(0, 30)}${"a".repeat(24)}`]) {
      refusal(() => credentials.identify(undefined, shown));
    }
    assert.equal(store.asked, 0);
  });

  test("another secret behind a known id, proven before or not", () => {
    const store = new FakeStore(paid);
    // A key of its own, under the other's id.
    const forged = makeKey("u2", "free");
    const asOther = new FakeStore({ key: forged.key, record: { ...paid.record, id: forged.record.id } });
    assert.equal(refusal(() => withStore(asOther).identify(undefined, forged.key)).code, "UNAUTHENTICATED");
    const credentials = withStore(store);
    void credentials.identify(undefined, paid.key);
    store.records.set(forged.record.id, paid.record);
    assert.equal(refusal(() => credentials.identify(undefined, forged.key)).code, "UNAUTHENTICATED");
  });
});
