/**
 * `ferry serve --processes` when its processes are killed, stopped and ended: what was accepted is finished, who waits is
 * answered or told to come again, nobody gets another's answer, and nothing is left behind.
 */
import assert from "node:assert/strict";
import { existsSync, readdirSync, readFileSync, readlinkSync } from "node:fs";
import { createServer, type AddressInfo } from "node:net";
import { once } from "node:events";
import { dirname } from "node:path";
import { after, before, describe, test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { Load } from "./fleet-load.ts";
import { Part, patient } from "./fleet.ts";
import { childrenOf, counter, engineConfig, isGone, KINDS, Several } from "./gateways.ts";
import { type Answer, assertError, eventually, Folder, runFerry, SOON_MS, writeConfig } from "./harness.ts";
import { postText, RawClient } from "./raw-client.ts";
import { Gate, hang, stubModel, StubWorker } from "./stub-worker.ts";

const LATE = 10;

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

function slowly(stub: StubWorker): void {
  stub.behave = (call) => void setTimeout(() => call.echo(), LATE);
}

for (const kind of KINDS) {
  describe(`under load, ${kind}`, () => {
    const stack = new AsyncDisposableStack();
    let stub: StubWorker;
    let ferry: Several;

    before(async () => {
      const folder = stack.use(await Folder.make());
      stub = stack.use(await StubWorker.listen());
      const model = stubModel([stub], { timeouts: patient, maxBatchSize: 16 });
      const more = { admission: { mode: "off" }, telemetry: { logLevel: "info" } };
      ferry = stack.use(await Several.start(await engineConfig(kind, stack, folder, [model], more), 2));
    });
    after(() => stack.disposeAsync());

    test("a gateway is killed: only its own connections break, it comes back, counters never decrease", async () => {
      slowly(stub);
      const { part } = ferry;
      const [a, b] = ferry.doors();
      await using load = new Load(() => [part], { model: "stub" });
      await load.more(50);
      const gate = new Gate();
      stub.behave = gate.hold;
      const inputs = [0, 1, 2, 3];
      const broken = inputs.map((n) => assert.rejects(a!.post({ input: `breaks ${n}` })));
      const kept = inputs.map((n) => b!.post({ input: `stays ${n}` }));
      const total = (): Promise<number> => counter(part, "ferry_requests_total");
      await eventually(async () => (await part.health()).queue_depth > 8);
      const before = await total();
      await ferry.restart("gateway-1");
      await Promise.all(broken);
      assert.ok((await total()) >= before);
      slowly(stub);
      gate.open();
      for (const [n, { status, text, json }] of (await Promise.all(kept)).entries()) {
        assert.equal(status, 200, text);
        assert.deepEqual(json.output, { of: `stays ${n}` });
      }
      await load.more(100);
      const again = ferry.doors()[0]!;
      assert.equal((await again.post({ input: "at the new one" })).status, 200);
      (await load.stop()).assertWhole();
      assert.equal(await counter(part, "ferry_lost_total"), 0);
      const torn = part.lines.filter(({ level }) => level === undefined);
      assert.deepEqual(torn, []);
    });

    test("the core is killed: accepted tasks are finished, callers are answered or told to come again", async () => {
      slowly(stub);
      const { part } = ferry;
      const [a, b] = ferry.doors();
      await using load = new Load(() => [part], { model: "stub", name: "core" });
      await load.more(50);
      stub.behave = hang;
      const accepted = await Promise.all(
        Array.from({ length: 20 }, (_, n) => (n % 2 === 0 ? a! : b!).accept({ input: `accepted ${n}` })),
      );
      const waiting = Array.from({ length: 20 }, (_, n) =>
        (n % 2 === 0 ? a! : b!).post({ input: `held ${n}` }),
      );
      const polled = accepted.map((id) => b!.get(`/v1/result/${id}?wait=30`));
      await eventually(async () => (await part.health()).queue_depth >= 30);
      slowly(stub);
      const { core } = ferry;
      process.kill(core, "SIGKILL");
      // While it is away.
      const refused: { readonly answer: Answer; readonly ms: number }[] = [];
      for (let n = 0; ferry.core === core; n++) {
        const from = performance.now();
        const answer = await a!.post({ input: `new ${n}` });
        refused.push({ answer, ms: performance.now() - from });
        await pause(20);
      }
      for (const { answer, ms } of refused) {
        if (answer.status === 200) continue;
        assertError(answer, 503, "SERVICE_OVERLOADED");
        assert.ok(Number(answer.header("retry-after")) >= 1, answer.text);
        assert.ok(ms < 10_000, `${ms} ms`);
      }
      for (const [n, answer] of (await Promise.all(waiting)).entries()) {
        if (answer.status === 503) assert.ok(Number(answer.header("retry-after")) >= 1, answer.text);
        else assert.deepEqual([answer.status, answer.json.output], [200, { of: `held ${n}` }], answer.text);
      }
      for (const answer of await Promise.all(polled))
        assert.ok([200, 503].includes(answer.status), answer.text);
      for (const [n, id] of accepted.entries()) {
        const { status, output } = await (n % 3 === 0 ? a! : b!).result(id);
        assert.deepEqual([status, output], ["SUCCESS", { of: `accepted ${n}` }]);
      }
      await eventually(async () => (await a!.get("/readyz")).status === 200);
      await load.more(50);
      (await load.stop()).assertWhole();
      assert.equal(await counter(part, "ferry_lost_total"), 0);
    });

    test("the core stands still for 3 s: everybody is answered, none with another's output", async () => {
      slowly(stub);
      const [a, b] = ferry.doors();
      const { core } = ferry;
      process.kill(core, "SIGSTOP");
      const from = performance.now();
      const posts = Array.from({ length: 10 }, (_, n) =>
        (n % 2 === 0 ? a! : b!).post({ input: `still ${n}` }),
      );
      await pause(3000);
      process.kill(core, "SIGCONT");
      for (const [n, answer] of (await Promise.all(posts)).entries()) {
        if (answer.status !== 503)
          assert.deepEqual([answer.status, answer.json.output], [200, { of: `still ${n}` }], answer.text);
      }
      assert.ok(performance.now() - from < 30_000);
      for (const door of [a!, b!])
        await eventually(async () => (await door.post({ input: `awake ${door.pid}` })).status === 200);
    });

    test("a gateway stands still: the others answer, new connections too, and it goes on when it wakes up", async () => {
      slowly(stub);
      const [a, b] = ferry.doors();
      await a!.get("/healthz");
      process.kill(a!.pid, "SIGSTOP");
      const held = a!.post({ input: "for the one that stands still" });
      const fresh = Array.from({ length: 12 }, async (_, n) => {
        const late = AbortSignal.timeout(SOON_MS);
        const answer = await fetch(`${ferry.part.url}/v1/inference`, {
          method: "POST",
          headers: { "content-type": "application/json", connection: "close" },
          body: JSON.stringify({ input: `fresh ${n}` }),
          signal: late,
        });
        return answer.status;
      });
      assert.equal((await b!.post({ input: "at the other" })).status, 200);
      // One at most was on its way to the one that stands still.
      await eventually(async () => {
        const ended = await Promise.all(fresh.map((each) => Promise.race([each, pause(1, 0)])));
        return ended.filter((status) => status === 200).length >= 11;
      });
      process.kill(a!.pid, "SIGCONT");
      assert.equal((await held).status, 200);
      assert.deepEqual(new Set(await Promise.all(fresh)), new Set([200]));
    });

    test("SIGTERM to one gateway drains it, and to the core alone loses nothing", async () => {
      slowly(stub);
      const { part } = ferry;
      await using load = new Load(() => [part], { model: "stub", name: "term" });
      await load.more(50);
      await ferry.restart("gateway-2", "SIGTERM");
      await load.more(50);
      await ferry.restart("core", "SIGTERM");
      await load.more(50);
      (await load.stop()).assertWhole();
      assert.equal(await counter(part, "ferry_lost_total"), 0);
    });
  });
}

test("without a data folder: who waits is told to send it again, what was accepted is gone, new ones are served", async () => {
  await using stub = await StubWorker.listen(hang);
  const model = stubModel([stub], { timeouts: patient });
  await using ferry = await Several.start({ models: [model], admission: { mode: "off" } });
  const [a, b] = ferry.doors();
  const id = await a!.accept({ input: "accepted" });
  const held = [a!, b!].map((door) => door.post({ input: `held ${door.pid}` }));
  await eventually(async () => (await ferry.part.health()).queue_depth >= 2);
  const { core } = ferry;
  process.kill(core, "SIGSTOP");
  process.kill(core, "SIGKILL");
  stub.behave = (call) => call.echo();
  for (const answer of await Promise.all(held)) {
    const { message } = assertError(answer, 503, "SERVICE_OVERLOADED");
    assert.match(message!, /send/);
    assert.ok(Number(answer.header("retry-after")) >= 1);
  }
  await eventually(() => ferry.core !== core);
  for (const door of ferry.doors()) {
    await eventually(async () => (await door.get(`/v1/result/${id}`)).status === 404);
    assert.equal((await door.post({ input: `again ${door.pid}` })).status, 200);
  }
});

test("a core that stands still for 8 s: refused within seconds, not ready, then ready and all right", async () => {
  await using folder = await Folder.make();
  await using stub = await StubWorker.listen();
  const model = stubModel([stub], { timeouts: patient });
  const engine = { kind: "memory", dataDir: `${folder.path}/data` };
  await using ferry = await Several.start({ engine, models: [model], admission: { mode: "off" } });
  const [a, b] = ferry.doors();
  process.kill(ferry.core, "SIGSTOP");
  const from = performance.now();
  const first = await a!.post({ input: "first" });
  assertError(first, 503, "SERVICE_OVERLOADED");
  assert.ok(performance.now() - from < 8000, `${performance.now() - from} ms`);
  const next = performance.now();
  assertError(await a!.post({ input: "next" }), 503, "SERVICE_OVERLOADED");
  assert.ok(performance.now() - next < 2000, `${performance.now() - next} ms`);
  await pause(Math.max(0, 8000 - (performance.now() - from)));
  process.kill(ferry.core, "SIGCONT");
  for (const door of [a!, b!]) {
    await eventually(async () => (await door.get("/readyz")).status === 200);
    await eventually(async () => (await door.post({ input: `after ${door.pid}` })).status === 200);
  }
});

describe("the end", () => {
  const PYTHON = "def batch(inputs):\n    return inputs\n";

  test("SIGTERM: who waits is answered, the core ends last; ports are free, no child is left", async () => {
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
    const ended = part.stop();
    await part.line(({ msg }) => msg === "draining");
    await assert.rejects(fetch(`${part.url}/readyz`, { headers: { connection: "close" } }));
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
