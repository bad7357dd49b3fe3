/** Reading the config again: what is refused, what is told, and one at a time. */
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { describe, test } from "node:test";
import type { Call, Console } from "../../src/cli/command.ts";
import { loader } from "../../src/cli/config-file.ts";
import { hearReloads, holdHangups } from "../../src/cli/serve.ts";
import type { Served, ServeParts } from "../../src/cli/serve.ts";
import { type Loaded, parseConfig } from "../../src/app/config/load.ts";
import type { Config } from "../../src/app/config/config.ts";
import { Reloader } from "../../src/app/reload.ts";

const text = (maxQueued: number, more = ""): string =>
  `models: [{ name: m, backend: { kind: simulated, workers: 1 } }]\nlimits: { maxQueued: ${maxQueued} }\n${more}`;
const load = (written: string): Loaded => parseConfig(written, "ferry.yaml", {});

function stage(apply: (next: Config) => Promise<void> = async () => {}) {
  const said: string[] = [];
  const file = { text: text(1) };
  const reloader = new Reloader(load(file.text).config!, {
    load: () => load(file.text),
    apply,
    tell: (level, message) => void said.push(`${level} ${message}`),
  });
  return { reloader, file, said };
}

describe("a reload", () => {
  test("applies what changed, and the next one goes from there", async () => {
    const applied: number[] = [];
    const { reloader, file, said } = stage(async ({ limits }) => void applied.push(limits.maxQueued));
    file.text = text(2);
    assert.deepEqual(await reloader.reload(), { changed: ["limits.maxQueued 1 → 2"] });
    file.text = text(3);
    assert.deepEqual(await reloader.reload(), { changed: ["limits.maxQueued 2 → 3"] });
    assert.deepEqual(await reloader.reload(), { changed: [] });
    // Keys and certificates are read again, though nothing in the file is new.
    assert.deepEqual(applied, [2, 3, 3]);
    assert.equal(said[0], "info the config was read again: limits.maxQueued 1 → 2");
    assert.equal(reloader.config.limits.maxQueued, 3);
  });

  test("of a file with mistakes changes nothing and tells each", async () => {
    const { reloader, file, said } = stage(() => assert.fail("nothing may be applied"));
    file.text = text(-1, "nonsense: 1\n");
    const { problems = [] } = await reloader.reload();
    assert.equal(problems.length, 2);
    assert.match(problems.join("\n"), /limits\.maxQueued[^]*nonsense/);
    assert.equal(said.length, 2);
    assert.match(said[0]!, /^warn the config was read again and nothing was changed: ferry\.yaml:2:/);
  });

  test("that needs a restart changes nothing, not even what could change", async () => {
    const { reloader, file } = stage(() => assert.fail("nothing may be applied"));
    file.text = text(5, "zone: z\n");
    const { problems = [] } = await reloader.reload();
    assert.equal(problems.length, 1);
    assert.match(problems[0]!, /^zone .*→ z: needs a restart; restart Ferry, or take this change back$/);
    assert.equal(reloader.config.limits.maxQueued, 1);
  });

  test("that cannot be applied says why, and is tried anew the next time", async () => {
    let fails = true;
    const { reloader, file } = stage(async () => {
      if (fails) throw new Error("the worker does not start");
    });
    file.text = text(2);
    assert.deepEqual(await reloader.reload(), { problems: ["the worker does not start"] });
    fails = false;
    assert.deepEqual(await reloader.reload(), { changed: ["limits.maxQueued 1 → 2"] });
  });

  test("whose file cannot even be tried is refused, and the next one is not", async () => {
    const { reloader, file } = stage();
    const { text: before } = file;
    Object.defineProperty(file, "text", {
      configurable: true,
      get: () => {
        throw new Error("too many open files");
      },
    });
    assert.deepEqual(await reloader.reload(), { problems: ["too many open files"] });
    Object.defineProperty(file, "text", { value: before });
    assert.deepEqual(await reloader.reload(), { changed: [] });
  });

  test("waits for the one before it, and reads the file after that", async () => {
    const going = Promise.withResolvers<void>();
    let running = 0;
    const { reloader, file } = stage(async () => {
      assert.equal(++running, 1, "one at a time");
      await going.promise;
      running--;
    });
    file.text = text(2);
    const first = reloader.reload();
    const second = reloader.reload();
    await new Promise(setImmediate);
    file.text = text(3);
    going.resolve();
    assert.deepEqual(await first, { changed: ["limits.maxQueued 1 → 2"] });
    assert.deepEqual(await second, { changed: ["limits.maxQueued 2 → 3"] });
  });
});

test("a pipe is not opened again: nobody would write into it, and all would wait", () => {
  const folder = mkdtempSync(join(tmpdir(), "ferry-pipe-"));
  try {
    const path = join(folder, "pipe");
    execFileSync("mkfifo", [path]);
    const read = loader({ text: () => path } as unknown as Call, { env: {} } as Console);
    assert.throws(
      () => read!(),
      /pipe is a pipe, which can be read once; restart Ferry, or start it with a file$/,
    );
  } finally {
    rmSync(folder, { recursive: true });
  }
});

describe("SIGHUP", () => {
  function hear(terminalGone: boolean, written: string) {
    let hangup = (): void => assert.fail("nobody listens");
    const lines: string[] = [];
    const applied = Promise.withResolvers<Config>();
    const ferry: Pick<Served, "change" | "onReload"> = { change: async (next) => applied.resolve(next) };
    const parts: Pick<ServeParts, "load" | "onHangup" | "clock" | "terminalGone"> = {
      load: () => load(written),
      onHangup: (listener) => (hangup = listener),
      clock: { now: () => 0 } as ServeParts["clock"],
      terminalGone: () => terminalGone,
    };
    let quits = 0;
    const log = (line: string): void => void lines.push(line);
    const { config } = load(text(1));
    hearReloads(config!, ferry as Served, parts as ServeParts, log, () => void quits++);
    return { hangup: () => hangup(), lines, applied: applied.promise, ferry, quits: () => quits };
  }

  test("reloads", async () => {
    const { hangup, applied, lines, ferry } = hear(false, text(2));
    hangup();
    assert.equal((await applied).limits.maxQueued, 2);
    assert.deepEqual(await ferry.onReload!(), { changed: [] });
    assert.match(lines[0]!, /^\{"level":"info",.*"msg":"the config was read again: limits\.maxQueued 1 → 2"/);
  });

  test("during the start is remembered; of a terminal that was closed it ends the start", () => {
    let hangup = (): void => assert.fail("nobody listens");
    let gone = false;
    const raised: string[] = [];
    const take = holdHangups({
      onHangup: (listener) => (hangup = listener),
      terminalGone: () => gone,
      signals: { on: () => {}, off: () => {}, raise: (signal) => void raised.push(signal) },
    });
    hangup();
    hangup();
    let heard = 0;
    take(() => heard++);
    assert.equal(heard, 1);
    hangup();
    assert.deepEqual([heard, raised], [2, []]);
    gone = true;
    const never = holdHangups({
      onHangup: (listener) => (hangup = listener),
      terminalGone: () => gone,
      signals: { on: () => {}, off: () => {}, raise: (signal) => void raised.push(signal) },
    });
    hangup();
    assert.deepEqual([typeof never, raised], ["function", ["SIGTERM"]]);
  });

  test("of a terminal that was closed ends it", () => {
    const { hangup, quits, lines } = hear(true, text(2));
    hangup();
    assert.equal(quits(), 1);
    assert.deepEqual(lines, []);
  });
});
