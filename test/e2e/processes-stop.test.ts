/** `ferry serve --processes` at its end, and where it cannot start: nobody is cut off, and nothing is left behind. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { existsSync, readdirSync, readFileSync, readlinkSync } from "node:fs";
import { createServer, type AddressInfo } from "node:net";
import { dirname } from "node:path";
import { describe, test } from "node:test";
import { Part, patient } from "./fleet.ts";
import { childrenOf, isGone, Several } from "./gateways.ts";
import { eventually, Folder, runFerry, SOON_MS, writeConfig } from "./harness.ts";
import { postText, RawClient } from "./raw-client.ts";
import { Gate, hang, stubModel, StubWorker } from "./stub-worker.ts";

async function isFree(url: string): Promise<boolean> {
  const { hostname, port } = new URL(url);
  const server = createServer().listen(Number(port), hostname);
  const listening = await once(server, "listening").then(
    () => true,
    () => false,
  );
  if (listening) server.close();
  return listening;
}

/** The folder of the socket between the processes. */
function socketFolder(core: number): string {
  const opened = new Set(
    readdirSync(`/proc/${core}/fd`).map((name) => {
      try {
        return readlinkSync(`/proc/${core}/fd/${name}`);
      } catch {
        return "";
      }
    }),
  );
  const rows = readFileSync("/proc/net/unix", "utf8").split("\n");
  const paths = rows
    .map((row) => row.trim().split(/\s+/))
    .filter(([, , , , , , inode, path]) => path !== undefined && opened.has(`socket:[${inode}]`));
  const [, , , , , , , path] = paths.find(([, , , , , , , each]) => /\/ferry-[^/]+\/core$/.test(each!))!;
  return dirname(path!);
}

describe("the end", () => {
  const PYTHON = "def batch(inputs):\n    return inputs\n";

  test("SIGTERM to the group: who waits is answered, the core ends last; ports are free, no child is left", async () => {
    const gate = new Gate();
    await using folder = await Folder.make();
    await using stub = await StubWorker.listen(gate.hold);
    const file = await folder.write("model.py", PYTHON);
    const python = { name: "python", backend: { kind: "python", function: `${file}:batch`, workers: 1 } };
    const model = stubModel([stub], { timeouts: patient, maxBatchSize: 64 });
    const config = { models: [model, python], limits: { drainMs: 60_000 }, admission: { mode: "off" } };
    await using ferry = await Several.start(config);
    const { part } = ferry;
    const answer = await ferry.doors()[0]!.post({ input: [1, "ü"], model: "python" });
    assert.deepEqual(answer.json.output, [1, "ü"], answer.text);
    const waiting = ferry
      .doors()
      .flatMap((door) =>
        Array.from({ length: 4 }, (_, n) => door.post({ model: "stub", input: `${door.pid} ${n}` })),
      );
    await eventually(async () => {
      const { queue_depth, running } = await part.health();
      return queue_depth + running === 8;
    });
    const children = childrenOf(part.pid);
    const all = [...children, ...children.flatMap(childrenOf)];
    assert.ok(all.length >= 4, "the Python worker is a child of the core");
    // To all of them, as supervisors and terminals do.
    for (const pid of children) process.kill(pid, "SIGTERM");
    const ended = part.stop();
    await part.line(({ msg }) => msg === "draining");
    const isClosed = (): Promise<boolean> =>
      fetch(`${part.url}/readyz`, { headers: { connection: "close" } }).then(
        () => false,
        () => true,
      );
    await eventually(isClosed);
    assert.ok(!isGone(ferry.core));
    gate.open();
    for (const { status, text } of await Promise.all(waiting)) assert.equal(status, 200, text);
    assert.deepEqual(await ended, { code: 0, signal: null });
    const last = part.lines.at(-1)!;
    assert.deepEqual([last.msg, last["requests"], last["lost"]], ["stopped", 9, 0]);
    await eventually(() => all.every(isGone));
    for (const url of [part.url, part.adminUrl]) assert.ok(await isFree(url));
  });

  test("who had connected when SIGTERM came is served, also those that nobody had looked at yet", async () => {
    await using stub = await StubWorker.listen();
    const limits = { drainMs: 60_000, lingerMs: 8000 };
    await using ferry = await Several.start({
      models: [stubModel([stub])],
      limits,
      admission: { mode: "off" },
    });
    const { part } = ferry;
    // While it stands still the kernel takes connections for it, and keeps the signal.
    part.pause();
    await using stack = new AsyncDisposableStack();
    const clients: RawClient[] = [];
    for (let n = 0; n < 40; n++) clients.push(stack.use(await RawClient.connect(part.url)));
    clients.forEach((client, at) => client.send(postText(JSON.stringify({ input: `early ${at}` }))));
    const ended = part.stop();
    part.resume();
    for (const [at, answer] of (await Promise.all(clients.map((client) => client.answer()))).entries()) {
      assert.equal(answer.status, 200, answer.text);
      assert.ok(answer.text.includes(`"early ${at}"`));
    }
    await stack.disposeAsync();
    assert.deepEqual(await ended, { code: 0, signal: null });
  });

  test("a second signal ends all of them now, and so does kill -9 of the parent: no child is left", async () => {
    for (const way of ["a second signal", "kill -9"]) {
      await using folder = await Folder.make();
      await using stub = await StubWorker.listen(hang);
      const file = await folder.write("model.py", PYTHON);
      const python = { name: "python", backend: { kind: "python", function: `${file}:batch`, workers: 1 } };
      const limits = { drainMs: way === "kill -9" ? 1000 : 60_000 };
      const config = { models: [stubModel([stub], { timeouts: patient }), python], limits };
      await using ferry = await Several.start(config);
      const { part } = ferry;
      const children = childrenOf(part.pid);
      const all = [...children, ...children.flatMap(childrenOf)];
      const folderOfSocket = socketFolder(ferry.core);
      assert.ok(existsSync(folderOfSocket));
      const held = part.post({ model: "stub", input: "held" }).then(
        ({ status }) => status,
        () => 0,
      );
      await stub.call(1);
      if (way === "kill -9") await part.kill();
      else {
        const ended = part.stop();
        await part.line(({ msg }) => msg === "draining");
        process.kill(part.pid, "SIGTERM");
        assert.deepEqual(await ended, { code: null, signal: "SIGTERM" });
      }
      await eventually(() => all.every(isGone));
      assert.ok([0, 202, 503].includes(await held));
      assert.ok(!existsSync(folderOfSocket), "the socket is gone");
      for (const url of [part.url, part.adminUrl]) assert.ok(await isFree(url));
    }
  });

  test("a connection on its way to a gateway that dies is closed, not forgotten", async () => {
    const model = { name: "demo", backend: { kind: "simulated", workers: 1, baseMs: 1 } };
    await using ferry = await Several.start({ models: [model] });
    const over = new AbortController();
    let [answers, stuck] = [0, 0];
    const caller = async (): Promise<void> => {
      while (!over.signal.aborted) {
        const late = AbortSignal.timeout(SOON_MS);
        const headers = { connection: "close" };
        const answer = fetch(`${ferry.part.url}/readyz`, { headers, signal: late }).then((each) =>
          each.text(),
        );
        await answer.then(
          () => answers++,
          () => (stuck += Number(late.aborted)),
        );
      }
    };
    const callers = Array.from({ length: 8 }, caller);
    for (let kill = 1; kill <= 3; kill++) {
      const goal = answers + 50;
      await eventually(() => answers >= goal);
      await ferry.restart("gateway-1");
    }
    over.abort();
    await Promise.all(callers);
    assert.equal(stuck, 0);
  });
});

describe("what cannot be started is one line, exit code 1, and nothing is left", () => {
  const model = { name: "demo", backend: { kind: "simulated", workers: 1 } };
  const run = async (config: object, ...words: string[]) => {
    await using folder = await Folder.make();
    const file = await writeConfig(folder, { limits: { drainMs: 60_000 }, ...config });
    const { code, stderr } = await runFerry(["serve", "-c", file, "--processes", "2", ...words]);
    const lines = stderr.trimEnd().split("\n");
    return { code, last: lines.filter((line) => line.startsWith("ferry: ")), stderr };
  };

  test("a count that is none is a wrong call", async () => {
    for (const many of ["0", "65", "two", "-1", "1.5"]) {
      await using folder = await Folder.make();
      const file = await writeConfig(folder, { models: [model] });
      const { code, stderr } = await runFerry(["serve", "-c", file, `--processes=${many}`]);
      assert.equal(code, 2, stderr);
      assert.match(stderr, /is not a number from 1 to 64, nor auto/);
    }
  });

  test("a port that is taken, a Redis that is away", async () => {
    const taken = createServer().listen(0, "127.0.0.1");
    await once(taken, "listening");
    const listen = `127.0.0.1:${(taken.address() as AddressInfo).port}`;
    try {
      for (const ports of [{ listen }, { admin: { listen } }]) {
        const held = await run({ models: [model], ...ports });
        assert.equal(held.code, 1);
        assert.match(
          held.stderr,
          /^ferry: (admin\.)?listen [\d.:]+: already in use.*; stop it or change (admin\.)?listen\n$/,
        );
      }
      const away = await run({ models: [model], engine: { kind: "redis", url: "redis://127.0.0.1:9" } });
      assert.equal(away.code, 1);
      assert.match(away.stderr, /^ferry: redis 127\.0\.0\.1:9 is not reachable[^\n]*\n$/);
    } finally {
      taken.close();
    }
  });

  test("a data folder that cannot be used or is another Ferry's, a Python model that fails", async () => {
    await using folder = await Folder.make();
    const file = await folder.write("data", "not a folder");
    const unusable = await run({ models: [model], engine: { kind: "memory", dataDir: file } });
    assert.equal(unusable.code, 1, unusable.stderr);
    assert.equal(unusable.stderr.trimEnd().split("\n").length, 1, unusable.stderr);
    assert.match(unusable.stderr, /^ferry: .*data/);

    const engine = { kind: "memory", dataDir: `${folder.path}/held` };
    {
      await using first = await Part.start("all", { models: [model], engine }, ["--processes", "2"]);
      const second = await run({ models: [model], engine });
      assert.equal(second.code, 1, second.stderr);
      assert.equal(second.stderr.trimEnd().split("\n").length, 1, second.stderr);
      assert.match(second.stderr, /^ferry: .*held/);
      assert.equal((await first.post({ input: "the first goes on" })).status, 200);
    }
    const python = await folder.write("model.py", "raise ValueError('no such weights')\n");
    const failing = { name: "p", backend: { kind: "python", function: `${python}:batch`, workers: 1 } };
    const broken = await run({ models: [failing] });
    assert.equal(broken.code, 1, broken.stderr);
    assert.equal(broken.last.length, 1, broken.stderr);
    assert.match(broken.last[0]!, /no such weights/);
  });
});
