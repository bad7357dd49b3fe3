import assert from "node:assert/strict";
import { test } from "node:test";
import { Tallied, Tally } from "./tally.ts";

const kinds = [
  { label: "a", share: 1 },
  { label: "b", share: 1 },
];
const phases = [
  { name: "first", ms: 2000 },
  { name: "second", ms: 3000 },
];

/** Two kinds, two phases, from instant 1000 on, in slices of 500 ms. */
function tally(): Tally {
  return new Tally(kinds, phases, 500, 1000);
}

function read(written: Tally): Tallied {
  return new Tallied(JSON.parse(JSON.stringify(written.state())) as ReturnType<Tally["state"]>);
}

function request(to: Tally, kind: number, at: number, ms: number, status: number): void {
  to.sent(kind, at);
  to.ended(kind, at, at + ms, status);
}

void test("a request belongs to its kind and to the phase in which it should have left", () => {
  const written = tally();
  request(written, 0, 1000, 100, 200);
  request(written, 0, 2999, 5000, 200);
  request(written, 1, 3000, 10, 429);
  written.sent(1, 5999);
  const found = read(written);
  assert.deepEqual(found.account(["first"]).statuses, { 200: 2 });
  assert.deepEqual(found.account(["second"]).statuses, { 429: 1 });
  assert.equal(found.account(["second"], (label) => label === "b").sent, 2);
  assert.equal(found.account(["second"], (label) => label === "a").sent, 0);
  assert.equal(found.account(["first", "second"]).latencies.ok.maxMs, 5000);
});

void test("429 and 503 are refused; 504, 500 and a broken connection failed", () => {
  const written = tally();
  for (const status of [200, 429, 503, 504, 500, 0]) request(written, 0, 1000, 5, status);
  const { ok, refused, failed } = read(written).account(["first"]).latencies;
  assert.deepEqual([ok.count, refused.count, failed.count], [1, 2, 3]);
});

void test("a window has what left in it, and the 200s that came in it", () => {
  const written = tally();
  request(written, 0, 1100, 600, 200);
  request(written, 1, 1600, 50, 503);
  request(written, 0, 2100, 50, 504);
  const found = read(written);
  const [early, late] = [found.window(0, 500), found.window(500, 1500)];
  assert.deepEqual([early.ok.count, early.arrivedOk], [1, 0]);
  assert.deepEqual([late.ok.count, late.arrivedOk, late.refused, late.failed], [0, 1, 1, 1]);
  assert.equal(late.seconds, 1);
});

void test("how long it took until something held for a while", () => {
  const written = tally();
  for (let at = 1000; at < 6000; at += 100) request(written, 0, at, 5, at < 2700 ? 429 : 200);
  const found = read(written);
  const calm = ({ refused }: { refused: number }): boolean => refused === 0;
  assert.equal(found.msUntil(0, 5000, 1000, calm), 2000);
  assert.equal(found.msUntil(1000, 5000, 1000, calm), 1000);
  assert.ok(Number.isNaN(found.msUntil(0, 2500, 1000, calm)));
  assert.deepEqual(found.span("second"), { fromMs: 2000, toMs: 5000 });
});

void test("what left before the start does not count", () => {
  const written = tally();
  written.ended(0, 900, 1100, 200);
  assert.equal(read(written).account(["first"]).latencies.ok.count, 0);
});
