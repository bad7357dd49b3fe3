import assert from "node:assert/strict";
import { test } from "node:test";
import { PieceLine } from "../../src/gateway/reply.ts";

const LONG = "x".repeat(70_000);

/** Counts the turns of the event loop. */
async function turns(until: Promise<unknown>): Promise<number> {
  const seen = { over: false };
  let count = 0;
  void until.finally(() => (seen.over = true)).catch(() => {});
  while (!seen.over) {
    await new Promise((resolve) => setImmediate(resolve));
    count++;
  }
  return count;
}

test("everybody gets his own text, and no turn makes more than one piece", async () => {
  const line = new PieceLine();
  let [made, most, before] = [0, 0, 0];
  const texts = function* (name: string): Generator<string, void> {
    for (let at = 0; at < 5; at++) {
      made++;
      yield name + LONG;
    }
  };
  const all = Promise.all(["a", "é"].map((name) => line.gather(texts(name), () => false)));
  const seen = { over: false };
  void all.then(() => (seen.over = true));
  while (!seen.over) {
    await new Promise((resolve) => setImmediate(resolve));
    most = Math.max(most, made - before);
    before = made;
  }
  const [first, second] = (await all).map((parts) => Buffer.concat(parts!).toString());
  assert.equal(first, `a${LONG}`.repeat(5));
  assert.equal(second, `é${LONG}`.repeat(5));
  assert.equal(most, 1);
});

test("short texts share a turn", async () => {
  const line = new PieceLine();
  const gathered = line.gather(
    Array.from({ length: 1000 }, () => "ab"),
    () => false,
  );
  assert.ok((await turns(gathered)) < 5);
  assert.equal(Buffer.concat((await gathered)!).length, 2000);
});

test("what nobody wants any more is given up, and what is thrown is told; others go on", async () => {
  const line = new PieceLine();
  let made = 0;
  const endless = function* (): Generator<string, void> {
    for (;;) {
      made++;
      yield LONG;
    }
  };
  const failing = function* (): Generator<string, void> {
    yield LONG;
    throw new Error("no embedding");
  };
  const left = line.gather(endless(), () => made >= 3);
  const failed = line.gather(failing(), () => false);
  const other = line.gather([LONG, LONG, LONG], () => false);
  await assert.rejects(failed, /no embedding/);
  assert.equal(Buffer.concat((await other)!).length, 3 * LONG.length);
  assert.equal(await left, undefined);
  assert.equal(made, 3);
});
