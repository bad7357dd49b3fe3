/** `ferry serve --processes`: one port, several processes, and nobody notices when one dies. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createServer, type AddressInfo } from "node:net";
import { once } from "node:events";
import { execFile } from "node:child_process";
import { after, describe, test } from "node:test";
import { promisify } from "node:util";
import { Agent, request } from "undici";
import { Authority } from "../fixtures/certificates.ts";
import { startServer } from "../engine/redis-client/servers.ts";
import { Load } from "./fleet-load.ts";
import { brisk, fleetConfig, Part, patient } from "./fleet.ts";
import { eventually, Folder, runFerry, SOON_MS, writeConfig, type Config } from "./harness.ts";
import { Gate, stubModel, StubWorker } from "./stub-worker.ts";

/** Each request on a connection of its own, so that processes take turns. */
const fresh = new Agent({ pipelining: 0, headersTimeout: SOON_MS });
after(() => fresh.destroy());

/** In the order of their numbers, with their admin listeners. */
async function several(config: Config, count = 2): Promise<{ part: Part; admins: string[] }> {
  const part = await Part.start("all", config, ["--processes", String(count)]);
  const { admins } = await part.line(({ msg }) => msg === "ready");
  const urls = admins as string[];
  assert.equal(urls.length, count);
  const serves = async (url: string): Promise<boolean> =>
    ((await json(`${url}/internal/health`)) as { healthy_workers: number }).healthy_workers > 0;
  await eventually(async () => (await Promise.all(urls.map(serves))).every(Boolean));
  return { part, admins: urls };
}

async function json(url: string): Promise<unknown> {
  return (await request(url, { dispatcher: fresh })).body.json();
}

/** Requests that this process answered with 200. */
async function answered(admin: string): Promise<number> {
  const text = await (await request(`${admin}/metrics`, { dispatcher: fresh })).body.text();
  const rows = text.matchAll(/^ferry_requests_total\{code="200"[^}]*\} (\d+)$/gm);
  return [...rows].reduce((sum, [, count]) => sum + Number(count), 0);
}

/** Tasks that wait or run, at whichever process, as every one of them knows within a second. */
async function held(admin: string): Promise<number> {
  const { queue_depth, running } = (await json(`${admin}/internal/health`)) as Record<string, number>;
  return queue_depth! + running!;
}

function childrenOf(pid: number): number[] {
  const text = readFileSync(`/proc/${pid}/task/${pid}/children`, "utf8");
  return text.split(" ").filter(Boolean).map(Number);
}

/** A zombie is gone too: it waits for somebody to ask how it ended. */
function isGone(pid: number): boolean {
  try {
    return / [ZX] /.test(readFileSync(`/proc/${pid}/stat`, "utf8").replace(/^.*\)/, ""));
  } catch {
    return true;
  }
}

async function accept(url: string, input: string): Promise<string> {
  const answer = await request(`${url}/v1/inference`, {
    method: "POST",
    headers: { "content-type": "application/json", prefer: "respond-async" },
    body: JSON.stringify({ model: "stub", input }),
    dispatcher: fresh,
  });
  const body = (await answer.body.json()) as { task_id: string };
  assert.equal(answer.statusCode, 202, JSON.stringify(body));
  return body.task_id;
}

describe("two processes behind one port", () => {
  test("both answer, and what one accepted is polled at either", async () => {
    await using redis = await startServer();
    await using stub = await StubWorker.listen();
    const { part, admins } = await several(fleetConfig({ url: redis.url }, [stubModel([stub])]));
    await using _ = part;
    const ids: string[] = [];
    for (let i = 0; i < 6; i++) ids.push(await accept(part.url, `task ${i}`));
    const before = await Promise.all(admins.map(answered));
    for (const [i, id] of ids.entries()) {
      for (let again = 0; again < 2; again++) {
        const body = await json(`${part.url}/v1/result/${id}?wait=20`);
        assert.deepEqual((body as { output: unknown }).output, { of: `task ${i}` });
      }
    }
    const polled = (await Promise.all(admins.map(answered))).map((count, at) => count - before[at]!);
    assert.ok(
      polled.every((count) => count >= 4),
      `each answered its share: ${polled.join(", ")}`,
    );
    // Each hears of the other with a beat.
    await eventually(async () => {
      const { members } = (await json(`${admins[1]}/internal/health`)) as { members: number };
      return members === 2;
    });
    assert.deepEqual(await part.stop(), { code: 0, signal: null });
    const last = part.lines.at(-1)!;
    assert.deepEqual([last.msg, last["requests"], last["lost"]], ["stopped", 6, 0]);
  });

  test("one is killed under load: the other's callers do not notice, it comes back, nothing is lost", async () => {
    await using redis = await startServer();
    const gate = new Gate();
    await using held = await StubWorker.listen(gate.hold);
    await using stub = await StubWorker.listen((call) => void setTimeout(() => call.echo(), 10));
    const models = [stubModel([stub], { timeouts: patient })];
    const slow = { ...stubModel([held], { timeouts: patient, maxBatchSize: 64 }), name: "slow" };
    const more = { telemetry: { logLevel: "debug" } };
    const { part, admins } = await several(
      fleetConfig({ url: redis.url, ...brisk }, [...models, slow], more),
    );
    await using _ = part;
    const body = (input: string) => ({ model: "slow", input });
    const waiting = Array.from({ length: 10 }, (_each, i) => part.post(body(`held ${i}`)));
    const ends = Promise.allSettled(waiting);
    await held.call(1);
    await using load = new Load(() => [part], { model: "stub" });
    await load.more(100);
    const [victim] = childrenOf(part.pid);
    process.kill(victim!, "SIGKILL");
    const { process: number } = await part.line(({ msg }) => msg === "process ended");
    assert.equal(number, 1);
    await load.more(200);
    await part.line(({ msg }) => msg === "process ready");
    await load.more(200);
    gate.open();
    const answers = (await ends).filter((end) => end.status === "fulfilled").map(({ value }) => value);
    assert.ok(answers.length >= 1 && answers.length < 10, `${answers.length} of 10 were at the other one`);
    for (const { status, text } of answers) assert.equal(status, 200, text);
    (await load.stop()).assertWhole();
    const id = await accept(part.url, "after it");
    for (let i = 0; i < 4; i++) await json(`${part.url}/v1/result/${id}?wait=20`);
    assert.ok((await answered(admins[0]!)) > 0, "it answers again, where it was");
    // Thousands of lines came from two processes at once.
    const torn = part.lines.filter(({ level }) => level === undefined);
    assert.deepEqual(torn, []);
    const from = new Set(part.lines.filter(({ level }) => level === "debug").map((line) => line["process"]));
    assert.deepEqual(from, new Set([1, 2]));
  });

  test("a connection on its way to a process that dies is closed, not forgotten", async () => {
    await using redis = await startServer();
    const model = { name: "demo", backend: { kind: "simulated", workers: 1, baseMs: 1 } };
    const { part } = await several(fleetConfig({ url: redis.url }, [model]));
    await using _ = part;
    const over = new AbortController();
    let [answers, stuck] = [0, 0];
    const caller = async (): Promise<void> => {
      while (!over.signal.aborted) {
        const late = AbortSignal.timeout(SOON_MS);
        const url = `${part.url}/readyz`;
        const answer = request(url, { dispatcher: fresh, signal: late }).then(({ body }) => body.dump());
        await answer.then(
          () => answers++,
          () => (stuck += Number(late.aborted)),
        );
      }
    };
    const callers = Array.from({ length: 8 }, caller);
    for (let kill = 1; kill <= 3; kill++) {
      const goal = answers + 100;
      await eventually(() => answers >= goal);
      process.kill(childrenOf(part.pid)[0]!, "SIGKILL");
      const back = () => part.lines.filter(({ msg }) => msg === "process ready").length >= kill;
      await eventually(back);
    }
    over.abort();
    await Promise.all(callers);
    assert.equal(stuck, 0);
  });

  test("SIGTERM drains: who waits is answered, then all end", async () => {
    await using redis = await startServer();
    const gate = new Gate();
    await using stub = await StubWorker.listen(gate.hold);
    const model = stubModel([stub], { timeouts: patient, maxBatchSize: 64 });
    const limits = { limits: { drainMs: 60_000 } };
    const { part, admins } = await several(fleetConfig({ url: redis.url }, [model], limits));
    await using _ = part;
    const waiting = Array.from({ length: 8 }, (_each, i) => part.post({ input: `held ${i}` }));
    await eventually(async () => (await held(admins[0]!)) === 8);
    const ended = part.stop();
    const { requests } = await part.line(({ msg }) => msg === "draining");
    // A process that does not answer within a second is left out of this count, and of no other.
    assert.ok(Number(requests) <= 8);
    gate.open();
    for (const { status, text } of await Promise.all(waiting)) assert.equal(status, 200, text);
    assert.deepEqual(await ended, { code: 0, signal: null });
    const last = part.lines.at(-1)!;
    assert.deepEqual([last.msg, last["requests"], last["lost"]], ["stopped", 8, 0]);
  });

  test("the parent is killed: the others end, and the ports are free", async () => {
    await using redis = await startServer();
    await using stub = await StubWorker.listen();
    const { part, admins } = await several(fleetConfig({ url: redis.url }, [stubModel([stub])]));
    await using _ = part;
    const children = childrenOf(part.pid);
    assert.equal(children.length, 2);
    await part.kill();
    await eventually(() => children.every(isGone));
    for (const url of [part.url, ...admins]) await assert.rejects(json(`${url}/readyz`));
  });

  test("a second signal ends all of them now", async () => {
    await using redis = await startServer();
    await using stub = await StubWorker.listen(() => {});
    const limits = { limits: { drainMs: 60_000 } };
    const { part } = await several(
      fleetConfig({ url: redis.url }, [stubModel([stub], { timeouts: patient })], limits),
    );
    await using _ = part;
    const children = childrenOf(part.pid);
    const waiting = assert.rejects(part.post({ input: "never" }));
    await stub.call(1);
    const ended = part.stop();
    await part.line(({ msg }) => msg === "draining");
    process.kill(part.pid, "SIGTERM");
    assert.deepEqual(await ended, { code: null, signal: "SIGTERM" });
    await waiting;
    await eventually(() => children.every(isGone));
  });
});

test("with TLS and HTTP/2, as with one", async () => {
  using authority = new Authority();
  const { certFile, keyFile } = authority.issue();
  await using redis = await startServer();
  const model = { name: "demo", backend: { kind: "simulated", workers: 1, baseMs: 1 } };
  const { part, admins } = await several(
    fleetConfig({ url: redis.url }, [model], { tls: { certFile, keyFile } }),
  );
  await using _ = part;
  assert.match(part.url, /^https:/);
  const { certFile: caFile } = authority.own;
  for (const [i, way] of ["--http2", "--http1.1", "--http2", "--http1.1"].entries()) {
    const words = ["-s", way, "--cacert", caFile, "--json", `{"input":"${i}"}`, "-w", " %{http_version}"];
    const { stdout } = await promisify(execFile)("curl", [...words, `${part.url}/v1/inference`]);
    assert.match(stdout, way === "--http2" ? /"SUCCESS".* 2$/s : /"SUCCESS".* 1\.1$/s);
  }
  let counts: number[] = [];
  const all = async (): Promise<boolean> => {
    counts = await Promise.all(admins.map(answered));
    return counts.reduce((sum, count) => sum + count, 0) >= 4;
  };
  await eventually(all);
  assert.deepEqual(counts, [2, 2]);
});

describe("what cannot be started", () => {
  const model = { name: "demo", backend: { kind: "simulated", workers: 1 } };
  const run = async (config: Config, ...words: string[]) => {
    await using folder = await Folder.make();
    return await runFerry(["serve", "-c", await writeConfig(folder, config), ...words]);
  };

  test("the memory engine lives in one process", async () => {
    for (const many of ["2", "auto"]) {
      const { code, stderr } = await run({ models: [model] }, "--processes", many);
      assert.equal(code, 1);
      assert.match(
        stderr,
        /^ferry: --processes (2|auto) needs engine\.kind redis: .*leave --processes out\n$/,
      );
    }
  });

  test("a count that is none is a wrong call", async () => {
    for (const many of ["0", "65", "two", "-1", "1.5"]) {
      const { code, stderr } = await run({ models: [model] }, `--processes=${many}`);
      assert.equal(code, 2, stderr);
      assert.match(stderr, /is not a number from 1 to 64, nor auto/);
    }
  });

  test("a port that is taken, or a Redis that is away, is one line", async () => {
    const taken = createServer().listen(0, "127.0.0.1");
    await once(taken, "listening");
    const listen = `127.0.0.1:${(taken.address() as AddressInfo).port}`;
    try {
      const quiet = { limits: { drainMs: 60_000 } };
      const config = fleetConfig({ url: "redis://127.0.0.1:9" }, [model], quiet);
      const held = await run({ ...config, listen }, "--processes", "3");
      assert.equal(held.code, 1);
      assert.match(held.stderr, /^ferry: listen [\d.:]+: already in use.*; stop it or change listen\n$/);
      const away = await run(config, "--processes", "3");
      assert.equal(away.code, 1);
      assert.match(away.stderr, /^ferry: redis 127\.0\.0\.1:9 is not reachable[^\n]*\n$/);
    } finally {
      taken.close();
    }
  });
});
