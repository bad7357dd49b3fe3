import assert from "node:assert/strict";
import { createSecretKey, randomBytes } from "node:crypto";
import { describe, test } from "node:test";
import fc from "fast-check";
import {
  digestOf,
  isKeyId,
  KEY_LENGTH,
  KEY_PREFIX,
  nameOfSecret,
  newApiKey,
  readApiKey,
  isUser,
} from "../../../src/gateway/admission/api-keys.ts";

const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/** Bytes from a list, over and over: what chance could give. */
function bytesOf(list: readonly number[]): (bytes: number) => Uint8Array {
  let at = 0;
  return (bytes) => Uint8Array.from({ length: bytes }, () => list[at++ % list.length]!);
}

const anyKey = fc
  .array(fc.integer({ min: 0, max: 247 }), { minLength: 40, maxLength: 200 })
  .map((list) => newApiKey(bytesOf(list)));

describe("an API key", () => {
  test("is 54 characters of base 62 after its prefix, and gives its id back", () => {
    fc.assert(
      fc.property(anyKey, (key) => {
        assert.equal(key.length, KEY_LENGTH);
        assert.match(key, /^fy_live_[0-9A-Za-z]{46}$/);
        const id = readApiKey(key);
        assert.equal(id, key.slice(KEY_PREFIX.length, KEY_PREFIX.length + 12));
        assert.ok(isKeyId(id));
      }),
    );
  });

  test("one character changed, two swapped, one lost or added: it is no key", () => {
    const place = fc.integer({ min: KEY_PREFIX.length, max: KEY_LENGTH - 1 });
    fc.assert(
      fc.property(anyKey, place, fc.constantFrom(...DIGITS.split("")), (key, at, digit) => {
        const changed = key.slice(0, at) + digit + key.slice(at + 1);
        if (changed !== key) assert.equal(readApiKey(changed), undefined);
        const swapped = key.slice(0, at - 1) + key[at]! + key[at - 1]! + key.slice(at + 1);
        if (swapped !== key) assert.equal(readApiKey(swapped), undefined);
        assert.equal(readApiKey(key.slice(0, at) + key.slice(at + 1)), undefined);
        assert.equal(readApiKey(key.slice(0, at) + digit + key.slice(at)), undefined);
      }),
    );
  });

  test("no other text is one, and none is a crash", () => {
    fc.assert(
      fc.property(
        fc.oneof(
          fc.string(),
          fc.string({ unit: "binary" }).map((text) => KEY_PREFIX + text),
        ),
        (text) => {
          assert.equal(readApiKey(text), undefined);
        },
      ),
    );
  });

  test("a thousand differ, in id and in secret, and use every digit alike", () => {
    const keys = Array.from({ length: 1000 }, () => newApiKey(randomBytes));
    assert.equal(new Set(keys.map(readApiKey)).size, 1000);
    const counts = new Map<string, number>();
    for (const key of keys) {
      for (const digit of key.slice(KEY_PREFIX.length, -6)) counts.set(digit, (counts.get(digit) ?? 0) + 1);
    }
    // 40,000 digits: 645 of each, give or take 25; ten times that never happens by chance.
    for (const digit of DIGITS) assert.ok(Math.abs((counts.get(digit) ?? 0) - 645) < 250, digit);
  });

  test("its digest depends on every part of it and on the secret, whose name tells nothing", () => {
    const [one, two] = [createSecretKey(randomBytes(32)), createSecretKey(randomBytes(32))];
    const [key, other] = [newApiKey(randomBytes), newApiKey(randomBytes)];
    const digests = [digestOf(key, one), digestOf(other, one), digestOf(key, two)];
    assert.equal(new Set(digests.map((digest) => digest.toString("hex"))).size, 3);
    assert.ok(digests.every((digest) => digest.length === 32));
    assert.deepEqual(digestOf(key, one), digests[0]);
    assert.notEqual(nameOfSecret(one), nameOfSecret(two));
    assert.match(nameOfSecret(one), /^[0-9a-f]{8}$/);
  });
});

test("a user has 1 to 255 whole characters, none a control character", () => {
  for (const good of ["u", "a b", "ünï", "日本", "😀", "x".repeat(255), "a\nb".replace("\n", "_")]) {
    assert.ok(isUser(good), good);
  }
  const bad = [
    "",
    "x".repeat(256),
    "a\nb",
    "\0",
    "\u007f",
    "\u0085",
    "\u2028",
    "a\ud800",
    "\udc00",
    7,
    null,
    undefined,
  ];
  for (const each of bad) assert.ok(!isUser(each), JSON.stringify(each));
});
