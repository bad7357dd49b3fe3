/** The sentence that says why a batch left. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { type SizeBound, whyItLeft } from "../../src/dispatch/capacity.ts";

test("every reason has its words, in ASCII", () => {
  const most = 64;
  const left = { size: 23, most, waitedMs: 4.4, probing: false };
  const words = (["full", "wait", "idle", "deadline"] as const).map((reason) =>
    whyItLeft({ ...left, reason }),
  );
  assert.deepEqual(words, [
    "batch of 23 of 64 left after 4 ms: no more of its tasks may ride together",
    "batch of 23 of 64 left after 4 ms: it had waited for maxWaitMs",
    "batch of 23 of 64 left after 4 ms: a worker was free and waiting longer would not have paid",
    "batch of 23 of 64 left after 4 ms: waiting longer would have missed a deadline",
  ]);
  const full = whyItLeft({ ...left, size: most, reason: "full" });
  const probing = whyItLeft({ ...left, reason: "full", probing: true });
  assert.equal(full, "a full batch of 64 left after 4 ms");
  assert.equal(probing, "batch of 23 of 64 left after 4 ms: its worker failed before and is tried with few");
  for (const text of [...words, full, probing]) assert.match(text, /^[\x20-\x7e]+$/);
});

test("a batch that a budget or its worker keeps small says which", () => {
  const left = { most: 64, waitedMs: 4, reason: "full", probing: false } as const;
  const words = (size: number, by: SizeBound, weighed: boolean): string =>
    whyItLeft({ ...left, size, bound: { by, weighed } });
  assert.equal(
    words(12, "maxBatchTokens", true),
    "a full batch of 12 left after 4 ms: 12 tasks fill maxBatchTokens",
  );
  assert.equal(
    words(12, "maxBatchBytes", false),
    "a full batch of 12 left after 4 ms: about 12 tasks fill maxBatchBytes",
  );
  assert.equal(
    words(1, "maxBatchTokens", true),
    "a full batch of 1 left after 4 ms: 1 task fills maxBatchTokens",
  );
  assert.equal(
    words(32, "worker", false),
    "a full batch of 32 left after 4 ms: its worker takes no more at once",
  );
  assert.equal(words(64, "worker", false), "a full batch of 64 left after 4 ms");
});

test("a batch of similar lengths says how many of other lengths wait, and for how long at most", () => {
  const batch = { size: 48, most: 64, waitedMs: 4, reason: "full", probing: false } as const;
  const words = (longer: number, shorter: number): string =>
    whyItLeft({ ...batch, left: { longer, shorter, atMostMs: 11.2 } });
  const start = "batch of 48 of 64 left after 4 ms: similar length;";
  assert.equal(words(9, 0), `${start} 9 longer ones wait for the next worker, at most 12 ms`);
  assert.equal(words(0, 1), `${start} 1 shorter one waits for the next worker, at most 12 ms`);
  assert.equal(words(2, 3), `${start} 2 longer and 3 shorter ones wait for the next worker, at most 12 ms`);
  // Nothing was left because of its length, it is full, or something else kept it small.
  assert.equal(words(0, 0), "batch of 48 of 64 left after 4 ms: no more of its tasks may ride together");
  const left = { longer: 9, shorter: 0, atMostMs: 12 };
  assert.equal(whyItLeft({ ...batch, size: 64, left }), "a full batch of 64 left after 4 ms");
  assert.equal(
    whyItLeft({ ...batch, left, bound: { by: "maxBatchTokens", weighed: true } }),
    "a full batch of 48 left after 4 ms: 48 tasks fill maxBatchTokens",
  );
  for (const text of [words(9, 0), words(0, 1), words(2, 3)]) assert.match(text, /^[\x20-\x7e]+$/);
});
