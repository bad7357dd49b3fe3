/** Clients' credentials by name: found while they are needed, bounded. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { Vault } from "../../../src/workers/backend/vault.ts";
import { checkUncredited, credited, uncredited } from "../../../src/gateway/protocol/fields.ts";
import { VirtualClock } from "../../../src/cli/plan/virtual-clock.ts";

const KEY = Buffer.alloc(32, 1);

test("a credential has one name, for as long as it is used and a little longer", async () => {
  const clock = new VirtualClock();
  const vault = new Vault(() => ({ ttlMs: 100, max: 2 }), clock, KEY);
  const name = vault.keep("Bearer a")!;
  assert.doesNotMatch(name, /Bearer/);
  assert.equal(vault.find(name), "Bearer a");
  assert.equal(vault.find("x"), undefined);
  await clock.run(clock.now() + 60);
  assert.equal(vault.keep("Bearer a"), name);
  await clock.run(clock.now() + 60);
  assert.equal(vault.find(name), "Bearer a", "used again, kept again");
  await clock.run(clock.now() + 60);
  assert.equal(vault.find(name), undefined);
});

test("it holds so many and no more; names are those of the key", async () => {
  const clock = new VirtualClock();
  const vault = new Vault(() => ({ ttlMs: 100, max: 2 }), clock, KEY);
  const a = vault.keep("a");
  assert.notEqual(vault.keep("b"), a);
  assert.equal(vault.keep("c"), undefined);
  assert.equal(vault.keep("a"), a, "those that are there stay");
  await clock.run(clock.now() + 101);
  assert.notEqual(vault.keep("c"), undefined);
  const other = (key: Buffer): Vault => new Vault(() => ({ ttlMs: 100, max: 2 }), clock, key);
  assert.equal(other(KEY).keep("a"), a);
  assert.notEqual(other(Buffer.alloc(32, 2)).keep("a"), a);
  assert.deepEqual(vault.headers(), ["c"]);
});

test("its name goes into a task's parameters and comes out again, whatever they are", () => {
  for (const parameters of ["", '{"a":1,"z":[1.50,9007199254740993]}', '{"$tokens":true}']) {
    const name = 'na"me';
    const both = credited(parameters, name);
    assert.deepEqual(uncredited(both), { parameters, name });
    assert.deepEqual(uncredited(parameters), { parameters, name: undefined });
    assert.throws(() => checkUncredited(both), /unknown parameter/);
    assert.doesNotThrow(() => checkUncredited(parameters));
  }
  assert.equal(uncredited('{"x":"$auth"}').name, undefined);
  assert.equal(uncredited('{"x":{"$auth":"y"}}').name, undefined);
});
