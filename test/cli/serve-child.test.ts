/** One process of `ferry serve --processes`: what it tells its parent, and everything that its parent may do. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import type { Console } from "../../src/cli/command.ts";
import { serveChild, type Parent } from "../../src/cli/serve-child.ts";
import { demoConfig } from "../../src/app/config/load.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import type { ProcessOrder, Word } from "../../src/app/processes/processes.ts";

const tally = { requests: 3, batches: 1, tasks: 3, calls: 1, lost: 0, queued: 2, running: 1 };

function childStage({ fails = false } = {}) {
  const words: Word[] = [];
  const calls: string[] = [];
  let order: (order: ProcessOrder) => void = () => {};
  let terminate = (): void => {};
  let lost = (): void => {};
  const upOrFailed = Promise.withResolvers<void>();
  const drained = Promise.withResolvers<void>();
  const parent: Parent = {
    tell: async (word) => {
      words.push(word);
      upOrFailed.resolve();
    },
    onOrder: (listener) => (order = listener),
    onTerminate: (listener) => (terminate = listener),
    onLost: (listener) => (lost = listener),
    end: () => void calls.push("end"),
  };
  const console: Console = {
    out: () => assert.fail("a child has no results"),
    err: (text) => void calls.push(text),
    env: {},
    outIsTTY: false,
    errIsTTY: false,
  };
  const code = serveChild(
    console,
    {
      clockOf: () => new VirtualClock(),
      uptimeMs: () => 1,
      openPage: () => {},
      start: async () => {
        if (fails) throw new Error("no such model");
        return {
          apiUrl: "http://127.0.0.1:8080",
          adminUrl: "http://127.0.0.1:8082",
          durability: "local",
          tally: () => tally,
          drain: () => {
            calls.push("drain");
            return drained.promise;
          },
          stop: async () => void calls.push("stop"),
        };
      },
    },
    parent,
  );
  return {
    words,
    calls,
    code,
    drained,
    up: upOrFailed.promise,
    order: (next: ProcessOrder) => order(next),
    terminate: () => terminate(),
    lost: () => lost(),
  };
}

describe("a child", () => {
  const begin = (): ProcessOrder => ({
    is: "begin",
    config: demoConfig(),
    role: "all",
    part: { kind: "gateway", number: 1, gateways: 2, socket: "/run/core", vaultKey: "" },
    epoch: 0,
  });
  const seen = (words: readonly Word[]): string[] => words.map(({ is }) => is);

  test("tells its parent, not the terminal, and ends when it is told to", async () => {
    const child = childStage();
    child.order(begin());
    await child.up;
    child.order({ is: "tally" });
    child.order({ is: "drain" });
    child.terminate();
    child.drained.resolve();
    assert.equal(await child.code, 0);
    assert.deepEqual(seen(child.words), ["ready", "tally", "ended"]);
    assert.deepEqual(child.calls, ["drain", "stop"], "a signal to the whole group is no second one");
  });

  test("SIGTERM alone drains it", async () => {
    const child = childStage();
    child.order(begin());
    await child.up;
    child.terminate();
    child.drained.resolve();
    assert.equal(await child.code, 0);
    assert.deepEqual(child.calls, ["drain", "stop"]);
  });

  test("without its parent it drains; without it while it drains, it ends", async () => {
    const child = childStage();
    child.order(begin());
    await child.up;
    child.lost();
    await new Promise(setImmediate);
    assert.deepEqual(child.calls, ["drain"]);
    child.drained.resolve();
    assert.equal(await child.code, 0);

    const second = childStage();
    second.order(begin());
    await second.up;
    second.order({ is: "drain" });
    await new Promise(setImmediate);
    second.lost();
    assert.deepEqual(second.calls, ["drain", "end"]);
    second.drained.resolve();
    await second.code;
  });

  test("before it is ready there is nothing to drain", () => {
    const child = childStage();
    child.lost();
    assert.deepEqual(child.calls, ["end"]);
  });

  test("what keeps it from starting goes to its parent", async () => {
    const child = childStage({ fails: true });
    child.order(begin());
    assert.equal(await child.code, 1);
    assert.deepEqual(child.words, [{ is: "failed", why: "no such model" }]);
    assert.deepEqual(child.calls, []);
  });
});
