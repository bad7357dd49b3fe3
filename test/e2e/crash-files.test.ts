/** What a crash leaves behind: the journal's file, its lock, and the processes of the model. */
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { open, readFile, rm, stat, truncate, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { describe, test } from "node:test";
import { setWritable } from "../engine/journal-child.ts";
import { assertError, eventually, Ferry, Folder, runFerry, writeConfig } from "./harness.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

const engine = { kind: "memory", dataDir: "./data" };

/** Fills a journal and stops cleanly; the path of its file. */
async function fillJournal(folder: Folder, stub: StubWorker): Promise<string> {
  await using ferry = await Ferry.start({ engine, models: [stubModel([stub])] }, folder);
  const input = "x".repeat(2000);
  const inputs = Array.from({ length: 300 }, (_, i) => `${i} ${input}`);
  await Promise.all(inputs.map((input) => ferry.infer(input)));
  assert.equal((await ferry.stop()).code, 0);
  return join(folder.path, "data", "ferry.db");
}

const digest = async (file: string): Promise<string> =>
  createHash("sha256")
    .update(await readFile(file))
    .digest("hex");

/** Starts Ferry on this folder and expects one line that names the culprit, and exit code 1. */
async function assertRefused(
  folder: Folder,
  config: Readonly<Record<string, unknown>>,
  names: string,
): Promise<void> {
  const file = await writeConfig(folder, { engine, ...config, limits: { drainMs: 60_000 } });
  const { code, stderr, stdout } = await runFerry(["serve", "-c", file]);
  assert.equal(code, 1, stderr);
  assert.equal(stdout, "");
  assert.equal(stderr.trimEnd().split("\n").length, 1, `one line:\n${stderr}`);
  assert.ok(stderr.includes(names), `it names ${names}:\n${stderr}`);
  assert.doesNotMatch(stderr, /\bat .+:\d+:\d+/, "no stack trace");
}

describe("a journal that cannot be written", () => {
  interface JournalHealth {
    readonly journal?: string;
    readonly status: string;
  }
  const journalHealth = async (ferry: Ferry): Promise<JournalHealth> =>
    JSON.parse((await ferry.admin("/internal/health")).text) as JournalHealth;

  test("not ready and nothing runs that was refused; ready again, unaided, when the disk takes writes", async () => {
    await using folder = await Folder.make();
    await using stub = await StubWorker.listen();
    const model = stubModel([stub], { retry: { max: 0 } });
    await using ferry = await Ferry.start({ engine, models: [model] }, folder);
    const accepted = await ferry.accept({ input: "before" });
    assert.equal((await ferry.result(accepted)).status, "SUCCESS");
    assert.deepEqual(
      [(await ferry.get("/readyz")).status, (await journalHealth(ferry)).journal],
      [200, "ok"],
    );

    setWritable(ferry.pid, false);
    const answers = await Promise.all(
      Array.from({ length: 40 }, (_, i) =>
        ferry.post({ input: `refused ${i}` }, i % 2 === 0 ? { prefer: "respond-async" } : {}),
      ),
    );
    const inputs = new Set(stub.inputs);
    for (const [i, answer] of answers.entries()) {
      // One that ran before the write failed is answered with its output, and never refused.
      if (answer.status === 200) continue;
      const { message } = assertError(answer, 503, "SERVICE_OVERLOADED");
      assert.ok(!message!.includes(folder.path) && !/ferry\.db|dataDir/.test(message!), answer.text);
      assert.ok(Number(answer.header("retry-after")) >= 1);
      assert.ok(!inputs.has(`refused ${i}`), `refused ${i} ran`);
    }
    assertError(await ferry.post({ input: "refused at once" }), 503, "SERVICE_OVERLOADED");
    const ready = await ferry.get("/readyz");
    assert.deepEqual([ready.status, ready.text], [503, '{"status":"unwritable"}']);
    assert.equal((await ferry.admin("/readyz")).status, 503);
    assert.equal((await ferry.get("/healthz")).status, 200);
    const sick = await journalHealth(ferry);
    assert.deepEqual([sick.status, sick.journal], ["degraded", "unwritable"]);
    const line = await ferry.line(({ msg = "" }) => /journal cannot be written/.test(msg));
    assert.ok(line.msg!.includes(join(folder.path, "data")), "operators are told where");
    assert.equal((await ferry.get(`/v1/result/${accepted}`)).json.status, "SUCCESS");

    setWritable(ferry.pid, true);
    await eventually(async () => (await ferry.get("/readyz")).status === 200);
    assert.equal((await journalHealth(ferry)).journal, "ok");
    const later = await ferry.accept({ input: "after" });
    assert.equal((await ferry.result(later)).status, "SUCCESS");
    await ferry.kill();
    const ran = stub.inputs.length;
    await using next = await Ferry.start({ engine, models: [model] }, folder);
    assert.equal((await next.result(later)).status, "SUCCESS");
    assert.equal((await next.health()).queue_depth, 0);
    // What was accepted may run again: its outcome may not have been on the disk yet.
    const again = stub.inputs.slice(ran);
    const refused = new Set<unknown>(
      answers.flatMap(({ status }, i) => (status === 200 ? [] : [`refused ${i}`])),
    );
    assert.deepEqual(
      again.filter((input) => refused.has(input)),
      [],
      "nothing that was refused was found on the disk",
    );
  });

  test("its folder deleted: it ends with exit code 1 and says why, so that it is started again", async () => {
    await using folder = await Folder.make();
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({ engine, models: [stubModel([stub])] }, folder);
    await ferry.infer("before");
    await rm(join(folder.path, "data"), { recursive: true });
    await ferry.post({ input: "after" });
    assert.equal((await ferry.exited).code, 1);
    const line = await ferry.line(({ msg = "" }) => /journal cannot be written/.test(msg));
    assert.match(line.msg!, /ferry\.db was deleted, moved or replaced .*; ending, to be started again/);
    ferry.signal("SIGTERM"); // it ended by itself, as it should
  });
});

describe("a journal that is not whole", () => {
  const damages: Readonly<Record<string, (file: string, size: number) => Promise<void>>> = {
    "8 KB flipped in the middle": (file, size) => flip(file, Math.floor(size / 2), 8192),
    "64 bytes flipped at the start of a page in the middle": (file, size) =>
      flip(file, Math.floor(size / 2 / 4096) * 4096, 64),
    "its header flipped": (file) => flip(file, 0, 100),
    "cut in the middle": (file, size) => truncate(file, Math.floor(size / 2)),
    "not a database at all": (file) => writeFile(file, "hello\n".repeat(2000)),
  };
  for (const [name, damage] of Object.entries(damages)) {
    test(`${name}: one clear line, exit code 1, and the file stays as it is`, async () => {
      await using folder = await Folder.make();
      await using stub = await StubWorker.listen();
      const file = await fillJournal(folder, stub);
      await damage(file, (await stat(file)).size);
      const before = await digest(file);
      await assertRefused(folder, { models: [stubModel([stub])] }, file);
      assert.equal(await digest(file), before);
    });
  }

  /** Turns every bit of a stretch. */
  async function flip(file: string, from: number, length: number): Promise<void> {
    await using handle = await open(file, "r+");
    const bytes = Buffer.alloc(length);
    const { bytesRead } = await handle.read(bytes, 0, length, from);
    assert.ok(bytesRead > 0);
    await handle.write(
      bytes.subarray(0, bytesRead).map((byte) => byte ^ 0xff),
      0,
      bytesRead,
      from,
    );
  }
});

test("two processes on one dataDir: the second refuses, the first goes on", async () => {
  await using folder = await Folder.make();
  await using stub = await StubWorker.listen();
  const models = [stubModel([stub])];
  await using ferry = await Ferry.start({ engine, models }, folder);
  await ferry.infer("before");
  await assertRefused(folder, { models }, join(folder.path, "data"));
  assert.deepEqual(await ferry.infer("after"), { of: "after" });
});

test("a dataDir that cannot be made is one clear line", async () => {
  await using folder = await Folder.make();
  await using stub = await StubWorker.listen();
  await folder.write("data", "a file, not a folder");
  await assertRefused(folder, { models: [stubModel([stub])] }, join(folder.path, "data"));
});

test("a port that is taken is one clear line that names it", async () => {
  await using stub = await StubWorker.listen();
  await using ferry = await Ferry.start({ models: [stubModel([stub])] });
  await using folder = await Folder.make();
  const listen = ferry.url.replace("http://", "");
  const engine = { kind: "memory" };
  await assertRefused(folder, { listen, engine, models: [stubModel([stub])] }, listen.split(":")[1]!);
});

describe("the processes of a Python model", () => {
  const MODEL = `
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(os.path.join(os.path.dirname(__file__), "pids"), "a") as pids:
    pids.write(f"{os.getpid()} {child.pid}\\n")
def batchstring(inputs):
    if "sleep" in inputs:
        time.sleep(600)
    return inputs
`;

  const alive = (pid: number): boolean => {
    try {
      process.kill(pid, 0);
      return true;
    } catch {
      return false;
    }
  };

  async function start(folder: Folder): Promise<{ ferry: Ferry; pids: number[] }> {
    await folder.write("model.py", MODEL);
    const backend = { kind: "python", function: "model.py:batchstring", workers: 2 };
    const ferry = await Ferry.start({ models: [{ name: "py", backend }] }, folder);
    const text = await readFile(join(folder.path, "pids"), "utf8");
    return { ferry, pids: text.trim().split(/\s+/).map(Number) };
  }

  async function assertGone(pids: readonly number[]): Promise<void> {
    try {
      await eventually(() => !pids.some(alive));
    } catch {
      const left = pids.flatMap((pid, i) => (alive(pid) ? [i % 2 === 0 ? "the model" : "its child"] : []));
      assert.fail(`still alive: ${left.join(", ")}`);
    } finally {
      for (const pid of pids.filter(alive)) process.kill(pid, "SIGKILL");
    }
  }

  for (const busy of [false, true]) {
    test(`and its children are gone after kill -9 of Ferry, ${busy ? "busy" : "idle"}`, async () => {
      await using folder = await Folder.make();
      const { ferry, pids } = await start(folder);
      await using _ = ferry;
      assert.equal(pids.length, 4);
      assert.ok(pids.every(alive));
      assert.equal(await ferry.infer("hello"), "hello");
      if (busy) await ferry.accept({ input: "sleep" });
      if (busy) await ferry.healthy((health) => health.running === 1);
      await ferry.kill();
      await assertGone(pids);
    });
  }

  test("and its children are gone after SIGTERM", async () => {
    await using folder = await Folder.make();
    const { ferry, pids } = await start(folder);
    await using _ = ferry;
    await ferry.accept({ input: "sleep" });
    await ferry.healthy((health) => health.running === 1);
    await ferry.stop();
    await assertGone(pids);
  });
});
